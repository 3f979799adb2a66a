"""A cache of all prices that strategies of one graph on one cluster can need.

Ops without rules have a row for each device type and share. Ops with rules are priced by their
work on a device, for the rule sets used last. Channels are priced one by one.

The work of a row of a sparse product is its number of entries: a device with a tenth of the nodes
of a skewed graph may have half of the edges. All other costs follow from the number of units
alone.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import Cluster, Sends
from heterog.graph.axis_plan import BATCH_AXIS, AxisPlan, axis_plan
from heterog.graph.op_costs import SPARSE_PRODUCT
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpRules
from heterog.graph.sharding_rules.matmul import pattern_key
from heterog.lowering import Choice, make_scratch, used_channels
from heterog.lowering.channels import Channel, ChannelKind, ChannelTable, communicators
from heterog.lowering.choice import Encoder
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.sparse_tables import distinct, starts_of
from heterog.lowering.tables import Domain, GraphTables, graph_tables
from heterog.lowering.tape import NUM_TASKS, Scratch, Tape
from heterog.memo import kept
from heterog.pricing.cost_model import ChannelPrices, ChannelSeconds, CostModel, Prices


class SparseWork:
    """Work of the sparse products of a graph that have a rule.

    Args:
        graph: One training step.
        plan: Placements of its tensors.
    """

    def __init__(self, graph: OpGraph, plan: AxisPlan) -> None:
        self._graph = graph
        self._plan = plan
        by_key = {pattern.key: pattern for pattern in graph.patterns}
        self._ops = [
            (index, by_key[pattern_key(op.args)])
            for index, op in enumerate(graph.ops)
            if op.kind == SPARSE_PRODUCT
            and plan.op_axis[index] != BATCH_AXIS
            and pattern_key(op.args) in by_key
        ]

    @property
    def by_rows(self) -> bool:
        """Whether rows are split, so that work depends on which rows a device has."""
        return any(self._plan.needed[op][0].pattern for op, _ in self._ops)

    def put(
        self, work: tuple[FloatArray, FloatArray], first_unit: int, units: int, samples: int
    ) -> tuple[FloatArray, FloatArray]:
        """Replace the work of sparse products, since the number of units does not determine it.

        Args:
            work: FLOPs and bytes moved of every op; changed in place.
            first_unit: First unit of the device.
            units: Number of units of the device.
            samples: Number of samples of its team.

        Returns:
            The changed work.
        """
        flops, moved = work
        graph = self._graph
        for index, pattern in self._ops:
            op, all_units = graph.ops[index], max(self._plan.units(index), 1)
            needed = self._plan.needed[index][0]
            begin, end = min(first_unit, all_units), min(first_unit + units, all_units)
            part = (end - begin) / all_units if needed.is_split else 1.0
            entries = part
            if needed.pattern:
                inner = pattern.num_rows // all_units
                count = pattern.num_entries_of(begin * inner, end * inner)
                entries = count / max(pattern.num_entries, 1)
            of_matrix = float(sum(graph.tensor_bytes[tensor] for tensor in op.inputs[1:]))
            along = samples / graph.batch_size
            flops[index] = op.flops * entries * along
            moved[index] = (
                (op.bytes_read - of_matrix) * entries * along
                + of_matrix * (entries if needed.pattern else 1.0)
                + op.bytes_written * part * along
            )
        return flops, moved


MOST_PRICED = 1024
"""Most channels of a table that are priced at once; beyond it (32 devices) only used ones are."""
_MOST_PRICE_LISTS = 64
MAX_RULE_SETS = 16
"""Most rule sets whose tables are cached."""
_Number = TypeVar("_Number", bound=np.generic)
_NO_ROWS: IntArray = np.zeros(0, np.int32)
_NO_NUMBERS: IntArray = np.zeros((0, 0, 0), np.int32)
_NO_SECONDS: FloatArray = np.zeros((0, 0))
TypeModel: TypeAlias = tuple[DeviceType, CostModel]
"""A device type, and the model of what it computes."""
_MOST_DRAG = 0.9
"""Largest fraction of compute speed that drag takes: compute never stops while bytes move."""


class _Seconds(dict[tuple[int, ...], FloatArray]):
    """Seconds of all ops of a rule set by (members, type, units, samples, first unit)."""


class RuleSet:
    """Tables of a graph under some op rules, and a cache of the seconds of ops with rules."""

    def __init__(
        self, graph: OpGraph, op_rules: OpRules, blocks: tuple[int, ...], channels: ChannelTable
    ) -> None:
        self.op_rules = op_rules
        self.blocks = blocks
        self.tables = graph_tables(graph, op_rules, blocks)
        self.encoder = Encoder(self.tables, channels)
        self._num_devices = channels.cluster.num_devices
        ruled = {op for op, _ in op_rules}
        self.has_rule = np.array([int(op) in ruled for op in self.tables.op_id], np.bool_)
        self.has_rules = bool(self.has_rule.any())
        self.remakes = bool(self.has_rule[self.tables.remake_op].any())
        self._plan = axis_plan(graph, op_rules)
        self._graph = graph
        self._sparse = SparseWork(graph, self._plan)
        # Whether work depends on which rows a device has, not only on its number of units.
        self.tells_rows_apart = self._sparse.by_rows
        self.minds_position = len(self._plan.causal_ops) > 0 or self.tells_rows_apart
        self.kept_seconds = _Seconds()

    @cached_property
    def scratch(self) -> Scratch:
        """Working memory for all devices, made at the first use."""
        return make_scratch(self.tables, self._num_devices)

    def seconds(
        self,
        choice: Choice,
        types: IntArray,
        models: Sequence[TypeModel],
        members: int = 0,
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """Seconds of ops with rules at the samples and units of a choice, by its devices' types.

        Args:
            choice: Choice on some devices.
            types: Row of ``models`` for each of these devices.
            models: Device types with the models of their seconds.
            members: Devices of a team if stages lie on several hosts; else 0.

        Returns:
            (row of ``choice.shares`` of each op with a rule, else -1 [num_compute_ops]; number of
            the work that a row gives a device in a micro-batch [num_rows, num_micro,
            num_devices]; seconds of every op at each work [numbers, num_compute_ops]).
        """
        if not self.has_rules:
            return _NO_ROWS, _NO_NUMBERS, _NO_SECONDS
        tables, num_divisions = self.tables, len(choice.member)
        row_of = choice.division[tables.op_group] + num_divisions * tables.op_axis
        row_of = np.where(self.has_rule, row_of, -1).astype(np.int32)
        rows = np.unique(row_of[row_of >= 0])
        units = choice.shares[rows]  # [num_used_rows, num_micro, num_devices]
        samples = (
            choice.teams.samples[rows % num_divisions] * (rows >= num_divisions)[:, None, None]
        )
        kinds = np.broadcast_to(types, units.shape)
        begins = np.zeros_like(units)
        if self.minds_position:
            begins += (
                choice.teams.unit_begin[rows][:, None, :] * (rows >= num_divisions)[:, None, None]
            )
        works, number = distinct(kinds, units, samples, begins)
        numbers = np.zeros(choice.shares.shape, np.int32)
        numbers[rows] = number.reshape(units.shape)
        seconds = np.stack([self._at((members, *work), models) for work in works])
        return row_of, numbers, seconds

    def _at(self, key: tuple[int, ...], models: Sequence[TypeModel]) -> FloatArray:
        """Seconds of all compute ops; see ``_Seconds``."""
        if key not in self.kept_seconds:
            (members, kind, units, samples, begin), batch = key, self._graph.batch_size
            device_type, model = models[kind]
            model = model.in_teams(members) if members else model
            work = self._plan.work(units, samples or batch, batch, begin)
            work = self._sparse.put(work, begin, units, samples or batch)
            row = model.work_seconds(self._graph, device_type, *work)
            self.kept_seconds[key] = row[self.tables.op_id]
        return self.kept_seconds[key]


class RuleSets:
    """The rule sets of a graph by number, 0 for no rules.

    Args:
        graph: One training step.
        channels: Table in which the channels of strategies are registered.
        beside: Rule sets with which seconds are shared if they are of the same graph.
    """

    def __init__(
        self, graph: OpGraph, channels: ChannelTable, beside: "RuleSets | None" = None
    ) -> None:
        self._graph, self._channels = graph, channels
        self._shared: WeakValueDictionary[object, _Seconds] = WeakValueDictionary()
        if beside and beside._graph is graph:
            self._shared = beside._shared
        self._numbers: dict[tuple[OpRules, tuple[int, ...]], int] = {((), ()): 0}
        self._kept: dict[int, RuleSet] = {0: RuleSet(graph, (), (), channels)}

    def number(self, op_rules: OpRules, blocks: tuple[int, ...] = ()) -> int:
        """The number of op rules and blocks in a ``Choice``; 0 if there are none."""
        return self._numbers.setdefault((op_rules, blocks), len(self._numbers))

    def rules_of(self, number: int) -> OpRules:
        """The op rules with a number."""
        return list(self._numbers)[number][0]

    def of(self, number: int) -> RuleSet:
        """The rule set with a number; a few that were used last are cached.

        Raises:
            StrategyError: no placement satisfies these rules together.
        """
        found = self._kept.pop(number, None)
        if found is None:
            key = list(self._numbers)[number]
            found = RuleSet(self._graph, *key, self._channels)
            found.kept_seconds = self._shared.setdefault(key, found.kept_seconds)
            if len(self._kept) >= MAX_RULE_SETS:
                del self._kept[next(other for other in self._kept if other != 0)]
        self._kept[number] = found
        return found

    def tables_of(self, choice: Choice) -> GraphTables:
        """The graph's tables under the op rules of an encoded strategy."""
        return self.of(choice.rule_set).tables


_Way = tuple[ChannelKind, tuple[int, ...], tuple[float, ...]]


class ChannelPricer:
    """Computes the prices of channels from a cost model, each channel only once.

    All collectives over one device set belong to one *communicator*, which runs one operation at
    a time. So they wait in one queue, whatever their links are; each transfer's pair has its own.

    Args:
        model: Cost model of the channels.
        cluster: The cluster with the links.
    """

    def __init__(self, model: CostModel, cluster: Cluster) -> None:
        self._model = model
        self._cluster = cluster
        self._names = [device_type.name for device_type in cluster.device_types]
        self._costs: dict[_Way, _Cost] = {}

    def seconds(self, channel: Channel) -> ChannelSeconds:
        """Cost of a channel."""
        return self._cost(channel).seconds

    def prices(self, channels: Sequence[Channel]) -> ChannelPrices:
        """Prices of some channels, numbered in their order."""
        costs = [self._cost(channel) for channel in channels]
        starts = starts_of([len(cost.seconds.held) for cost in costs])
        by_type = len(costs), len(self._names)  # keeps the shape if there is no channel
        drag = np.array([cost.drag for cost in costs], np.float64).reshape(by_type)
        overhead_s = np.array([cost.overhead_s for cost in costs], np.float64).reshape(by_type)
        return ChannelPrices(
            latency_s=np.array([cost.seconds.latency_s for cost in costs], np.float64),
            fill_s=np.array([cost.seconds.fill_s for cost in costs], np.float64),
            fill_s_per_byte=np.array([cost.seconds.fill_s_per_byte for cost in costs], np.float64),
            s_per_byte=np.array([cost.seconds.seconds_per_byte for cost in costs], np.float64),
            weight=np.array([cost.seconds.weight for cost in costs], np.float64),
            is_collective=np.array(
                [channel.kind != ChannelKind.POINT_TO_POINT for channel in channels], np.bool_
            ),
            drag=drag,
            overhead_s=overhead_s,
            loaded_s=np.array([cost.loaded_s for cost in costs], np.float64),
            member_start=starts_of([len(channel.devices) for channel in channels]),
            member=np.array([d for channel in channels for d in channel.devices], np.int32),
            queue=communicators(channels),
            resource_start=starts,
            resource=np.array([r for cost in costs for r in cost.seconds.held], np.int32),
            resource_s_per_byte=np.array(
                [s for cost in costs for s in cost.seconds.held.values()], np.float64
            ),
            has_drag=bool(drag.any() or overhead_s.any()),
        )

    def _cost(self, channel: Channel) -> "_Cost":
        way = channel.kind, channel.devices, channel.slices
        cost = self._costs.get(way)
        if cost is None:
            cost = self._costs[way] = self._new_cost(channel)
        return cost

    def _new_cost(self, channel: Channel) -> "_Cost":
        cost = self._model.channel_seconds(self._cluster, channel)
        return _Cost(
            seconds=cost,
            drag=_lost_speed(cost, self._names),
            overhead_s=[cost.overhead_s.get(name, 0.0) for name in self._names],
            loaded_s=max(cost.loaded_latency_s - cost.latency_s, 0.0),
        )


class _Cost(NamedTuple):
    """All prices of a single channel."""

    seconds: ChannelSeconds
    drag: list[float]
    overhead_s: list[float]
    loaded_s: float


def _lost_speed(cost: ChannelSeconds, device_types: Sequence[str]) -> list[float]:
    """Fraction of compute speed that a device of each type loses while a channel is busy."""
    if cost.seconds_per_byte <= 0.0:
        return [0.0] * len(device_types)
    return [
        min(cost.drag.get(name, 0.0) / cost.seconds_per_byte, _MOST_DRAG) for name in device_types
    ]


def _of_all(
    prices: ChannelPrices, first: IntArray, number: IntArray, used: IntArray, table: ChannelTable
) -> ChannelPrices:
    """Prices of all used channels from the prices of each set's first; see ``over_same_links``."""
    member_start, member = _segments(prices.member_start, prices.member, number)
    is_transfer = used < table.num_transfers
    src, dst = np.divmod(used[is_transfer], table.cluster.num_devices)
    begin = member_start[:-1][is_transfer]
    member[begin], member[begin + 1] = src, dst
    resource_start, resource = _segments(prices.resource_start, prices.resource, number)
    _, seconds = _segments(prices.resource_start, prices.resource_s_per_byte, number)
    own = np.arange(len(used), dtype=np.int32)
    each = {
        name: getattr(prices, name)[number]
        for name in (
            "latency_s", "fill_s", "fill_s_per_byte", "s_per_byte", "weight", "is_collective",
            "drag", "overhead_s", "loaded_s",
        )
    }  # fmt: skip
    return prices._replace(
        **each,
        member_start=member_start,
        member=member,
        queue=np.where(is_transfer, own, first[prices.queue[number]]),
        resource_start=resource_start,
        resource=resource,
        resource_s_per_byte=seconds,
    )


def _segments(
    starts: IntArray, values: npt.NDArray[_Number], chosen: IntArray
) -> tuple[IntArray, npt.NDArray[_Number]]:
    """Starts and values of chosen segments, one after another."""
    counts = np.diff(starts)[chosen]
    begin = starts_of(counts)
    place = np.arange(begin[-1]) + np.repeat(starts[:-1][chosen] - begin[:-1], counts)
    return begin, values[place]


class PriceTable:
    """A cache of the cost model's prices.

    Args:
        graph: One training step.
        cluster: Devices and links.
        cost_model: Model of the seconds of tasks.
        channels: Table in which the channels of strategies are registered.
        tables: Tables of the graph without rules.
        beside: Prices on the same cluster by the same cost model: those of channels are shared,
            and if they are of the same tables, those of ops.

    Attributes:
        types: Device type of each device.  # [num_devices]
        models: The cluster's device types and, if the cost model differs for these, each of them
            alone: as the only device of a strategy.
        pricer: Prices of single channels.
        group_seconds: Seconds of (each group's forward ops, all its ops) by device type and
            samples.  # [2, num_types, samples, num_groups]
        reduced_bytes: Bytes of each group's gradients that are summed.  # [num_groups]
        gathered_bytes: Bytes of the parameters of these gradients.  # [num_groups]
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        cost_model: CostModel,
        channels: ChannelTable,
        tables: GraphTables,
        beside: "PriceTable | None" = None,
    ) -> None:
        self._graph, self._cluster = graph, cluster
        self._channels, self._tables = channels, tables
        self.types: IntArray = np.array(cluster.type_index, np.int32)
        known = beside.pricer if beside else None
        self.pricer: ChannelPricer = known or ChannelPricer(cost_model, cluster)
        self._channel_prices: dict[int | bytes, ChannelPrices] = {}
        self.reduced_bytes, self.gathered_bytes = (
            np.bincount(
                tables.parameter_group,
                sizes * (tables.gradient_domain != Domain.NOBODY),
                tables.num_groups,
            ).astype(np.float64)
            for sizes in (tables.gradient_bytes, tables.parameter_bytes)
        )
        if beside and beside._tables is tables:
            of_ops = "_op_seconds", "_update_seconds", "_copy_fixed_s", "_copy_s_per_byte"
            for name in ("models", *of_ops, "group_seconds", "_is_priced"):
                setattr(self, name, getattr(beside, name))
            return
        updates, alone = [op for op, _, _ in graph.updates], cost_model.alone()
        both = [cost_model] if alone is cost_model else [cost_model, alone]
        self.models = [(kind, model) for model in both for kind in cluster.device_types]
        full = [model.op_seconds(graph, kind, graph.batch_size) for kind, model in self.models]
        self._update_seconds = np.array([row[updates] for row in full])
        copies = [model.copy_seconds(kind) for kind, model in self.models]
        self._copy_fixed_s = np.array([fixed for fixed, _ in copies])
        self._copy_s_per_byte = np.array([per_byte for _, per_byte in copies])
        shape = len(self.models), graph.batch_size + 1
        # Rows are filled when a share is first seen: an unfilled row is never read.
        self._is_priced = np.zeros(shape, np.bool_)
        self._op_seconds = np.zeros((*shape, len(tables.op_id)))
        self.group_seconds = np.zeros((2, *shape, tables.num_groups))

    def row(self, kind: int, *, is_alone: bool) -> int:
        """Row of ``models`` of a device type, in a strategy on one device if it is alone."""
        return kind + is_alone * (len(self.models) - len(self._cluster.device_types))

    def types_of(self, choice: Choice) -> IntArray:
        """Row of ``models`` for each device of a choice on all devices.  # [num_devices]"""
        members, home = np.flatnonzero(choice.member.any(0)), choice.home
        is_alone = len(members) == 1 and bool(((home < 0) | (home == members[0])).all())
        return self.types + np.int32(self.row(0, is_alone=is_alone))

    def prices(
        self,
        choice: Choice,
        rules: RuleSet,
        types: IntArray,
        channels: ChannelPrices,
        members: int = 0,
    ) -> Prices:
        """Prices of everything that a choice can contain.

        Args:
            choice: Choice on some devices.
            rules: Its rule set.
            types: Row of ``models`` for each of these devices.
            channels: Prices of its channels.
            members: Devices of a team if stages lie on several hosts; else 0.
        """
        shares = choice.shares[: len(choice.member)]  # along the batch
        if rules.remakes:  # for the samples of teams
            shares = np.concatenate([shares, choice.teams.samples])
        self.price_shares(shares, types)
        ruled_row, ruled_number, ruled_seconds = rules.seconds(choice, types, self.models, members)
        return Prices(
            type_of_device=types,
            op_seconds=self._op_seconds,
            has_rule=rules.has_rule,
            ruled_row=ruled_row,
            ruled_number=ruled_number,
            ruled_seconds=ruled_seconds,
            update_seconds=self._update_seconds,
            parameter_bytes=self._tables.parameter_bytes,
            copy_fixed_s=self._copy_fixed_s,
            copy_s_per_byte=self._copy_s_per_byte,
            channels=channels,
            blocks_sends=self._cluster.sends == Sends.BLOCKING,
            num_resources=len(self._cluster.resources),
        )

    def of_channels(self, tape: Tape) -> ChannelPrices:
        """Prices of all channels, or only of those that a program uses if there are many.

        In the latter case the channels of its tasks are replaced by their numbers in these prices.
        """
        count, used = len(self._channels), None
        key: int | bytes = count
        if count > MOST_PRICED:
            tasks = tape.tasks[: tape.counts[NUM_TASKS]]
            used, tasks["channel"] = used_channels(tasks["channel"], count)
            key = used.tobytes()
        found = self._channel_prices.pop(key, None)
        if found is None:
            found = self._prices_of(used)
            if len(self._channel_prices) >= _MOST_PRICE_LISTS:
                del self._channel_prices[next(iter(self._channel_prices))]
        self._channel_prices[key] = found
        return found

    def _prices_of(self, used: IntArray | None) -> ChannelPrices:
        """Prices of some channels, or of all; of some, those over the same links once."""
        if used is None:
            return self.pricer.prices([self._channels[n] for n in range(len(self._channels))])
        first, number = self._channels.over_same_links(used)
        firsts = [self._channels[each] for each in used[first].tolist()]
        return _of_all(self.pricer.prices(firsts), first, number, used, self._channels)

    def price_shares(self, shares: IntArray, types: IntArray) -> None:
        """Fill the rows of the op table for shares of the batch.

        Args:
            shares: Samples of each device.  # [rows, num_micro, num_devices]
            types: Row of ``models`` for each device.
        """
        is_new = ~self._is_priced[types, shares]
        if not is_new.any():
            return
        kinds = np.broadcast_to(types, shares.shape)
        new = zip(kinds[is_new].tolist(), shares[is_new].tolist(), strict=True)
        for kind, samples in dict.fromkeys(new):
            self._price(kind, samples)

    @property
    def num_resources(self) -> int:
        """Number of link resources that messages share."""
        return len(self._cluster.resources)

    def op_seconds(self, kind: int, samples: int) -> FloatArray:
        """Seconds of every compute op of the tables by one of ``models``.  # [num_compute_ops]"""
        device_type, model = self.models[kind]
        return model.op_seconds(self._graph, device_type, samples)[self._tables.op_id]

    def seconds_of_groups(self, kind: int, samples: int) -> FloatArray:
        """Seconds of (each group's forward ops, all its ops) on a type.  # [2, num_groups]"""
        if not self._is_priced[kind, samples]:
            self._price(kind, samples)
        found: FloatArray = self.group_seconds[:, kind, samples]
        return found

    def _price(self, kind: int, samples: int) -> None:
        """Store the seconds of all compute ops on a device type at a share."""
        row = self.op_seconds(kind, samples)
        self._op_seconds[kind, samples] = row
        if samples:  # a device without samples runs nothing
            groups = self._tables.op_group + 1  # constants, group -1, come first
            count = self._tables.num_groups + 1
            forward = np.where(self._tables.op_is_backward == 0, row, 0.0)
            self.group_seconds[0, kind, samples] = np.bincount(groups, forward, count)[1:]
            self.group_seconds[1, kind, samples] = np.bincount(groups, row, count)[1:]
        self._is_priced[kind, samples] = True

    def update_s(self, device: int, rows: Sequence[int]) -> float:
        """Seconds of the updates in some rows of ``graph.updates`` on a device."""
        return float(self._update_seconds[self.types[device], list(rows)].sum())

    def copy_s(self, device: int, num_bytes: float) -> float:
        """Seconds of a copy on a device; ``num_bytes`` are the bytes read plus those written."""
        kind = self.types[device]
        return float(self._copy_fixed_s[kind] + num_bytes * self._copy_s_per_byte[kind])

    @kept
    def held_by(self, channel: int) -> FloatArray:
        """Seconds that one byte of payload occupies each link of a channel.  # [num_resources]"""
        row = np.zeros(self.num_resources)
        held = self.pricer.seconds(self._channels[channel]).held
        row[list(held)] = list(held.values())
        return row
