"""Prices of everything that strategies of one graph on one cluster can contain, each once."""

from collections.abc import Sequence

import numpy as np

from heterog.cluster.execution import Sends
from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.lowering import Choice, used_channels
from heterog.lowering.channels import Channel, ChannelTable
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.tables import Domain
from heterog.lowering.tape import NUM_TASKS, Tape
from heterog.pricing.cost_model import ChannelPricer, ChannelPrices, CostModel, Prices
from heterog.pricing.rule_sets import RuleSets

MOST_PRICED = 1024
"""Most channels that are all priced, used by a program or not: those of 32 devices."""
_MOST_PRICE_LISTS = 64
MAX_RULE_SETS = 16
"""Most rule sets of strategies whose tables are kept."""
_MOST_PRICE_LISTS = 64


class PriceTable:
    """Seconds by the cost model, kept between calls.

    Args:
        graph: One training step.
        cluster: Devices and links.
        cost_model: Model of the seconds of tasks.
        channels: Table in which the channels of strategies are registered.
        rules: Rule sets of the graph.

    Attributes:
        types: Device type of each device.  # [num_devices]
        pricer: Prices of channels, one by one.
        group_seconds: Seconds of each group's forward ops, and of all its ops, by device type and
            samples.  # [2, num_types, samples, num_groups]
        reduced_bytes: Bytes of each group's gradients that are summed.  # [num_groups]
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        cost_model: CostModel,
        channels: ChannelTable,
        rules: RuleSets,
    ) -> None:
        self._graph, self._cluster, self._cost_model = graph, cluster, cost_model
        self._channels, self._rules, self._tables = channels, rules, rules.of(0).tables
        self.types: IntArray = np.array(cluster.type_index, np.int32)
        self.pricer = ChannelPricer(cost_model, cluster)
        kinds, updates = cluster.device_types, [op for op, _, _ in graph.updates]
        full = [cost_model.op_seconds(graph, kind, graph.batch_size) for kind in kinds]
        self._update_seconds = np.array([row[updates] for row in full])
        copies = [cost_model.copy_seconds(kind) for kind in kinds]
        self._copy_fixed_s = np.array([fixed for fixed, _ in copies])
        self._copy_s_per_byte = np.array([per_byte for _, per_byte in copies])
        self._channel_prices: dict[bytes, ChannelPrices] = {}
        self._held: dict[int, FloatArray] = {}  # see ``held_by``
        tables, shape = self._tables, (len(kinds), graph.batch_size + 1)
        # Rows are filled when a share is first seen: a row of zeros is never read.
        self._is_priced = np.zeros(shape, np.bool_)
        self._op_seconds = np.zeros((*shape, len(tables.op_id)))
        self.group_seconds = np.zeros((2, *shape, tables.num_groups))
        is_added = tables.gradient_domain != Domain.NOBODY
        reduced = np.where(is_added, tables.gradient_bytes, 0.0)
        bytes_of_groups = np.bincount(tables.parameter_group, reduced, tables.num_groups)
        self.reduced_bytes: FloatArray = bytes_of_groups.astype(np.float64)

    def prices(
        self, choice: Choice, types: IntArray, channel: ChannelPrices, members: int = 0
    ) -> Prices:
        """Prices, from the cost model, of everything that a choice can contain.

        Args:
            choice: Choice on some devices.
            types: Device type of each of these devices.
            channel: Prices of its channels.
            members: Devices of a team if stages lie on several hosts; else 0.
        """
        self.price_rows(choice, types)
        rules = self._rules.of(choice.rule_set)
        ruled_row, ruled_number, ruled_seconds = rules.seconds(
            choice, types, self._cluster, self._cost_model, members
        )
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
            channel_latency_s=channel.latency_s,
            channel_fill_s=channel.fill_s,
            channel_fill_s_per_byte=channel.fill_s_per_byte,
            channel_s_per_byte=channel.s_per_byte,
            channel_weight=channel.weight,
            channel_is_collective=channel.is_collective,
            channel_drag=channel.drag,
            channel_overhead_s=channel.overhead_s,
            member_start=channel.member_start,
            member=channel.member,
            has_drag=bool(channel.drag.any() or channel.overhead_s.any()),
            blocks_sends=self._cluster.sends == Sends.BLOCKING,
            channel_loaded_s=channel.loaded_s,
            channel_queue=channel.queue,
            channel_communicator=channel.communicator,
            resource_start=channel.resource_start,
            resource=channel.resource,
            resource_s_per_byte=channel.resource_s_per_byte,
            gate=channel.gate,
            gated_start=channel.gated_start,
            gated_queue=channel.gated_queue,
            num_queues=channel.num_queues,
            num_resources=len(self._cluster.resources),
        )

    def of_channels(self, tape: Tape) -> ChannelPrices:
        """Prices of a program's channels: of all channels, or, if there are many, of its own.

        In the latter case its tasks are given the numbers of their channels in these prices.
        """
        used = np.arange(len(self._channels), dtype=np.int32)
        if len(used) > MOST_PRICED:
            tasks = tape.tasks[: tape.counts[NUM_TASKS]]
            used, tasks["channel"] = used_channels(tasks["channel"], len(used))
        key = used.tobytes()
        found = self._channel_prices.pop(key, None)
        if found is None:
            found = self.pricer.prices([self._channels[number] for number in used.tolist()])
            if len(self._channel_prices) >= _MOST_PRICE_LISTS:
                del self._channel_prices[next(iter(self._channel_prices))]
        self._channel_prices[key] = found
        return found

    def price_rows(self, choice: Choice, types: IntArray) -> None:
        """Fill the rows of the op table for the shares of the batch in a choice."""
        shares = choice.shares[: len(choice.member)]  # along the batch
        rules = self._rules.of(choice.rule_set)
        if rules.has_rule[rules.tables.remake_op].any():  # made again for the samples of teams
            shares = np.concatenate([shares, choice.teams.samples])
        if self._is_priced[types, shares].all():
            return
        kinds = np.broadcast_to(types, shares.shape)
        for kind, samples in np.unique(np.stack([kinds, shares], -1).reshape(-1, 2), axis=0):
            if not self._is_priced[kind, samples]:
                self._price(int(kind), int(samples))

    @property
    def num_resources(self) -> int:
        """Number of links, and of what else messages share."""
        return len(self._cluster.resources)

    def op_seconds(self, kind: int, samples: int) -> FloatArray:
        """Seconds of every compute op of the tables on a device type.  # [num_compute_ops]"""
        device_type = self._cluster.device_types[kind]
        return self._cost_model.op_seconds(self._graph, device_type, samples)[self._tables.op_id]

    def _price(self, kind: int, samples: int) -> None:
        """Store the seconds of all compute ops on a device type at a share."""
        row = self.op_seconds(kind, samples)
        self._op_seconds[kind, samples] = row
        self._is_priced[kind, samples] = True
        if samples:  # a device without samples runs nothing
            groups = self._tables.op_group + 1  # constants, group -1, come first
            count = self._tables.num_groups + 1
            forward = np.where(self._tables.op_is_backward == 0, row, 0.0)
            self.group_seconds[0, kind, samples] = np.bincount(groups, forward, count)[1:]
            self.group_seconds[1, kind, samples] = np.bincount(groups, row, count)[1:]

    def update_s(self, device: int, rows: Sequence[int]) -> float:
        """Seconds of the optimizer's steps of some rows of ``graph.updates`` on a device."""
        return float(self._update_seconds[self.types[device], list(rows)].sum())

    def copy_s(self, device: int, num_bytes: float) -> float:
        """Seconds of a copy on a device that reads and writes so many bytes together."""
        kind = self.types[device]
        return float(self._copy_fixed_s[kind] + num_bytes * self._copy_s_per_byte[kind])

    def seconds_per_byte(self, channel: Channel) -> float:
        """Seconds that one byte of payload occupies the slowest link of a channel."""
        return self.pricer.seconds(channel).seconds_per_byte

    def held_by(self, channel: int) -> FloatArray:
        """Seconds that one byte of payload occupies each link of a channel.  # [num_resources]"""
        if channel not in self._held:
            row = self._held[channel] = np.zeros(len(self._cluster.resources))
            held = self.pricer.seconds(self._channels[channel]).held
            row[list(held)] = list(held.values())
        return self._held[channel]
