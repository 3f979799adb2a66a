"""The evaluator: predicts step time and memory of strategies, for every planner."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from heterog.cluster.execution import Sends
from heterog.cluster.topology import Cluster
from heterog.graph.axis_plan import axis_plan
from heterog.graph.batch_plan import micro_batches_refused, norms_of_lone_values
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.op_rule import OpRules
from heterog.graph.update_scope import UpdateScope
from heterog.simulator.asynchronous import TeamPace, steady_seconds
from heterog.simulator.averaging import averaging_tape
from heterog.simulator.calibration import cost_model_of
from heterog.simulator.cost_model import ChannelPricer, ChannelPrices, CostModel, Prices
from heterog.simulator.engine import (
    GIVEN_UP,
    Order,
    Timings,
    make_timings,
    run_program,
    with_room,
)
from heterog.simulator.exchange import pull_tape, push_tape
from heterog.simulator.folded import Folding
from heterog.simulator.intervals import Interval, interval_around
from heterog.simulator.memory import peak_memory
from heterog.simulator.noise import Noise, noisy_prices, noisy_seconds
from heterog.simulator.referee import replay
from heterog.simulator.sparse_work import SparseWork
from heterog.simulator.stash import StagedStep, StagePace, held_s
from heterog.strategy.asynchronous import Traffic, pulls_of, pushes_of
from heterog.strategy.averaged_buckets import averaged_buckets
from heterog.strategy.averaging import islands
from heterog.strategy.channels import Channel, ChannelTable
from heterog.strategy.folding import Fold
from heterog.strategy.lowering import (
    Choice,
    encode,
    kept_bytes,
    lower_to_tape,
    make_scratch,
    program_from_tape,
    resident_bytes,
    used_channels,
)
from heterog.strategy.lowering.choice import Encoder
from heterog.strategy.lowering.scratch import Scratch
from heterog.strategy.lowering.tape import NUM_TASKS, Tape, make_tape, mark_channels
from heterog.strategy.program import FloatArray, IntArray, Program, TaskKind
from heterog.strategy.stepping import apart_fault
from heterog.strategy.strategy import REPLICATED, Decision, Strategy
from heterog.strategy.sync import Sharded
from heterog.strategy.tables import Domain, GraphTables, graph_tables
from heterog.units import format_bytes

UNROLLED_STEPS = 8
"""Steps unrolled to measure a step without barrier: T_8 / 8 (a difference of two unrolled times
can be gamed by a search; the mean cannot)."""


_SERVED = 16
_MOST_PRICED = 1024
"""Most channels that are all priced, used by a program or not: those of 32 devices."""
_MOST_PRICE_LISTS = 64
MAX_RULE_SETS = 16
"""Most rule sets of strategies whose tables are kept."""

LEAST_FOLDED = 30_000
"""Fewest ops, on all devices in all micro-batches and steps, for which it pays to look for devices
that do alike: about a millisecond, in which a third of so many ops is lowered and simulated."""

MEMORY_MARGIN = 0.04
"""Share added to what tensors and workspaces need: small workspaces, rounding of allocators,
gradients that are on their way to a server and are not freed at once."""

OVERFULL = 2.0
"""Times a device's memory that parameters and states alone may take where time is short: nothing
that a search tries next (micro-batches, recomputation, an order) makes more than that fit."""

REFEREE_SLACK = 0.03
"""Share by which the referee may find a strategy faster than the engine does before a search that
asks the engine first misses it."""


class Outcome(StrEnum):
    """Whether a strategy can run."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    CANNOT_RUN = "cannot_run"
    """Ranks would not compute what one device does, or get stuck."""
    TOO_LARGE = "too_large"
    """Not simulated: its program has more tasks than ``Evaluator.most_tasks``."""
    GIVEN_UP = "given_up"
    """Slower than the limit that was asked for; ``step_time_s`` is a lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Predicted step time and memory of a strategy.

    Attributes:
        outcome: ``ok`` or why it cannot run.
        step_time_s: Seconds per training step, also where memory does not suffice.
        peak_memory_bytes: Predicted peak memory of each device.
        order: Order in which waiting tasks ran.
        shortage: For ``out_of_memory``, the device and the missing bytes in words.
        overflow_bytes: Bytes missing on the worst device, 0 if none; infinite for what cannot run.
    """

    outcome: Outcome
    step_time_s: float
    peak_memory_bytes: tuple[int, ...]
    order: Order
    shortage: str = ""
    overflow_bytes: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether the strategy can run."""
        return self.outcome == Outcome.OK

    @property
    def preference(self) -> tuple[float, float]:
        """Sort key, smaller is better: what fits comes first (overflow 0), then the shorter step.

        What was given up comes last: whether it fits is not known.
        """
        if self.outcome == Outcome.GIVEN_UP:
            return math.inf, self.step_time_s
        return self.overflow_bytes, self.step_time_s


def given_up(seconds: float, order: Order) -> Evaluation:
    """Evaluation of a strategy that was given up, because it takes at least these seconds."""
    return Evaluation(
        outcome=Outcome.GIVEN_UP, step_time_s=seconds, peak_memory_bytes=(), order=order
    )


class _Lowered(NamedTuple):
    """A choice ready to be simulated, on all devices or on those that stand for others."""

    choice: Choice
    tape: Tape
    prices: Prices
    fold: Fold | None = None


class _RuleSet:
    """Tables of a graph whose ops run by some rules, and seconds of these ops known so far."""

    def __init__(
        self, graph: OpGraph, op_rules: OpRules, blocks: tuple[int, ...], channels: ChannelTable
    ) -> None:
        self.op_rules = op_rules
        self.blocks = blocks
        self.tables = graph_tables(graph, op_rules, blocks)
        self.encoder = Encoder(self.tables, channels)
        self._num_devices = channels.cluster.num_devices
        self._scratch: Scratch | None = None
        ruled = {op for op, _ in op_rules}
        self.has_rule = np.array([int(op) in ruled for op in self.tables.op_id], np.bool_)
        self._plan = axis_plan(graph, op_rules)
        self._graph = graph
        self._sparse = SparseWork(graph, self._plan)
        self.minds_position = len(self._plan.causal_ops) > 0 or self._sparse.by_rows
        self._seconds: dict[tuple[int, ...], FloatArray] = {}

    @property
    def scratch(self) -> Scratch:
        """Working memory for all devices, made when it is first needed."""
        if self._scratch is None:
            self._scratch = make_scratch(self.tables, self._num_devices)
        return self._scratch

    @property
    def tells_rows_apart(self) -> bool:
        """Whether work depends on which rows a device has, not only on its number of units."""
        return self._sparse.by_rows

    def seconds(
        self, choice: Choice, types: IntArray, cluster: Cluster, cost_model: CostModel
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """Seconds of ops with rules at the samples and units of a choice, by its devices' types.

        Returns:
            The row of ``choice.shares`` that each op with a rule looks at, -1 of others; the
            number of what a row says of a device and micro-batch; and by these numbers seconds.
            # [num_compute_ops], [num_rows, num_micro, num_devices], [numbers, num_compute_ops]
        """
        if not self.has_rule.any():
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
        works, number = _distinct(kinds, units, samples, begins)
        numbers = np.zeros(choice.shares.shape, np.int32)
        numbers[rows] = number.reshape(units.shape)
        seconds = np.stack([self._at(work, cluster, cost_model) for work in works])
        return row_of, numbers, seconds

    def _at(self, key: tuple[int, ...], cluster: Cluster, cost_model: CostModel) -> FloatArray:
        """Seconds of all compute ops by device type, units, samples of the team, first unit."""
        if key not in self._seconds:
            (kind, units, samples, begin), batch = key, self._graph.batch_size
            work = self._plan.work(units, samples or batch, batch, begin)
            work = self._sparse.put(work, begin, units, samples or batch)
            row = cost_model.work_seconds(self._graph, cluster.device_types[kind], *work)
            self._seconds[key] = row[self.tables.op_id]
        return self._seconds[key]


def _distinct(*columns: IntArray) -> tuple[list[tuple[int, ...]], IntArray]:
    """The distinct rows of columns of a shape, in order, and the number of each entry's row.

    Rows become single numbers, which sort many times faster than rows.
    """
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    if prod(sizes) >= 2**63:  # far beyond any cluster and batch; sorted as rows
        flat = np.stack(columns, axis=-1).reshape(-1, len(columns))
        rows, number = np.unique(flat, axis=0, return_inverse=True)
        return [tuple(row) for row in rows.tolist()], number.astype(np.int32)
    keys = np.zeros(columns[0].shape, np.int64)
    for column, size in zip(columns, sizes, strict=True):
        keys = keys * size + column
    distinct, number = np.unique(keys.ravel(), return_inverse=True)
    places = np.unravel_index(distinct, sizes)
    return list(zip(*(place.tolist() for place in places), strict=True)), number.astype(np.int32)


_NO_ROWS: IntArray = np.zeros(0, np.int32)
_NO_NUMBERS: IntArray = np.zeros((0, 0, 0), np.int32)
_NO_SECONDS: FloatArray = np.zeros((0, 0))


class Evaluator:
    """Scores strategies of one graph on one cluster by the fast engine.

    It keeps the arrays between calls, so use one evaluator per thread.

    Args:
        graph: One training step.
        cluster: Devices and links.
        cost_model: Model of the seconds of tasks; by default the calibration that the cluster
            names, else the roofline prior.

    Attributes:
        num_evaluations: Number of simulations so far.
        num_tasks: Number of tasks of the program that was simulated last.
        most_tasks: Most tasks of a program that is simulated, as ``tasks_of`` counts them; no
            limit where devices that do alike are folded into one.
        poll: Callback before every simulation; what it raises ends a search (``Spending.limits``).
    """

    def __init__(
        self, graph: OpGraph, cluster: Cluster, cost_model: CostModel | None = None
    ) -> None:
        self.graph = graph
        self.cluster = cluster
        self.cost_model: CostModel = cost_model or cost_model_of(cluster)
        self.tables = graph_tables(graph)
        self.channels = ChannelTable(cluster)
        self.num_evaluations = 0
        self.num_tasks = 0
        self.most_tasks = math.inf
        self.poll: Callable[[], None] = lambda: None
        self._rule_numbers: dict[tuple[OpRules, tuple[int, ...]], int] = {((), ()): 0}
        self._rules_by_number: list[tuple[OpRules, tuple[int, ...]]] = [((), ())]
        self._rule_sets: dict[int, _RuleSet] = {0: _RuleSet(graph, (), (), self.channels)}
        self._pricer = ChannelPricer(self.cost_model, cluster)
        self._folding = Folding(cluster, self._pricer, self.channels)
        self._timings = make_timings(1, 1, 1, 1)
        self._usable = np.array([device.usable_memory_bytes for device in cluster.devices])
        types = cluster.device_types
        updates = [op for op, _, _ in graph.updates]
        full = [self.cost_model.op_seconds(graph, kind, graph.batch_size) for kind in types]
        self._update_seconds = np.array([row[updates] for row in full])
        copies = [self.cost_model.copy_seconds(kind) for kind in types]
        self._copy_fixed_s = np.array([fixed for fixed, _ in copies])
        self._copy_s_per_byte = np.array([per_byte for _, per_byte in copies])
        self._type_of_device = np.array(cluster.type_index, np.int32)
        self._channel_prices: dict[bytes, ChannelPrices] = {}
        self._held: dict[int, FloatArray] = {}  # see ``_held_by``
        self._exchanges: dict[tuple[bool, tuple[Traffic, ...]], float] = {}
        self._make_rows()

    @cached_property
    def spreads(self) -> tuple[float, ...]:
        """Error of the predicted seconds on each device type; see ``CostModel.spread``."""
        return tuple(
            self.cost_model.spread(self.graph, kind) for kind in self.cluster.device_types
        )

    def interval(self, step_time_s: float) -> Interval:
        """Range of a step's measured seconds, by the device type that is known least."""
        return interval_around(step_time_s, max(self.spreads))

    def _make_rows(self) -> None:
        """Make room for what depends on the length of the tables."""
        tables = self.tables
        self._tape = make_tape(4096, len(tables.parameter_bytes), self.cluster.num_devices)
        shape = (len(self.cluster.device_types), self.graph.batch_size + 1)
        # Rows are filled when a share is first seen: a row of zeros is never read.
        self._is_priced = np.zeros(shape, np.bool_)
        self._op_seconds = np.zeros((*shape, len(tables.op_id)))
        # Of each group's forward ops, and of all its ops.
        self._group_seconds = np.zeros((2, *shape, tables.num_groups))
        is_added = tables.gradient_domain != Domain.NOBODY
        reduced = np.where(is_added, tables.gradient_bytes, 0.0)
        bytes_of_groups = np.bincount(tables.parameter_group, reduced, tables.num_groups)
        self._reduced_bytes = bytes_of_groups.astype(np.float64)

    def warm_up(self) -> None:
        """Compile the kernels (once per installation, then they come from disk); not counted."""
        decision = Decision(devices=(0,), shares=(self.graph.batch_size,))
        strategy = Strategy(
            graph=self.graph.fingerprint,
            cluster=self.cluster.fingerprint(),
            decisions=(decision,) * self.tables.num_groups,
            homes=(REPLICATED,) * len(self.graph.updates),
        )
        counted = self.num_evaluations
        self.referee(strategy, Order.RANK)
        mark_channels(self._tape, np.zeros(len(self.channels) + 1, np.bool_))
        self.num_evaluations = counted

    def evaluate(self, strategy: Strategy, order: Order | None = None) -> Evaluation:
        """Predict step time and memory of a strategy.

        Args:
            strategy: Strategy made for this graph and cluster.
            order: Order of waiting tasks; the best of all three if ``None``.
        """
        orders = tuple(Order) if order is None else (order,)
        tried = self.evaluate_orders(self.encode(strategy), orders)
        return min(tried, key=lambda result: result.preference)

    def encode(self, strategy: Strategy) -> Choice:
        """A strategy as flat arrays, checked."""
        strategy.check(self.graph, self.cluster)
        steps = 1 if strategy.step_barrier else UNROLLED_STEPS
        number = self.rule_number(strategy.op_rules, strategy.blocks)
        rules = self._rule_set(number)
        choice = encode(
            strategy, rules.tables, self.channels, num_steps=steps, encoder=rules.encoder
        )
        choice = choice._replace(rule_set=number)
        if strategy.asynchronous is not None:
            return self._with_server(strategy, choice)
        if strategy.stash is not None:
            return self._with_stash(strategy, choice)
        if strategy.averaging is None:
            return choice
        seconds = self.averaging_seconds(strategy, choice)
        # What a delay hides follows from the step alone, which is simulated once for it.
        lowered = self._ready(choice) if strategy.averaging.delay else None
        local_s = 0.0 if lowered is None else self._run(lowered, Order.FIFO, math.inf)[0]
        return choice._replace(averaging_s=strategy.averaging.step_s(local_s, seconds) - local_s)

    def _with_server(self, strategy: Strategy, choice: Choice) -> Choice:
        """The choice of a strategy with an asynchronous server, at its steady pace."""
        if self.tasks_of(choice) > self.most_tasks:  # it will not be simulated
            return choice
        assert strategy.asynchronous is not None
        seconds = steady_seconds(self.team_paces(strategy, choice), strategy.asynchronous)
        seconds = max(seconds, self._exchanges_on_links_s(strategy))
        counted = self.num_evaluations
        local_s, _ = self._run(self._lower(choice), Order.FIFO, math.inf)
        self.num_evaluations = counted
        return choice._replace(averaging_s=seconds - local_s)

    def _with_stash(self, strategy: Strategy, choice: Choice) -> Choice:
        """The choice of a pipeline with a stash, at its steady pace."""
        if self.tasks_of(choice) > self.most_tasks:  # it will not be simulated
            return choice
        assert strategy.stash is not None
        lowered = self._lower(choice)
        pace, local_s = self._pace_of(lowered)
        seconds = max(pace.step_s(strategy.stash), held_s(lowered.tape, lowered.prices))
        return choice._replace(averaging_s=seconds - local_s)

    def stage_pace(self, strategy: Strategy) -> StagePace:
        """Seconds of the passes of each stage of a pipeline with a stash.

        Not counted as an evaluation: it belongs to that of the strategy.
        """
        return self._pace_of(self._lower(self.encode(strategy)._replace(averaging_s=0.0)))[0]

    def _pace_of(self, lowered: _Lowered) -> tuple[StagePace, float]:
        """Pace of stages by the referee's times of a step on its own, and its seconds."""
        choice, tables = lowered.choice, self.tables_of(lowered.choice)
        counted = self.num_evaluations
        self._run(lowered, Order.FIFO, math.inf)
        self.num_evaluations = counted
        local_s, replayed = self._replay(lowered)
        assert replayed is not None
        number = int(lowered.tape.counts[NUM_TASKS])
        staged = StagedStep(lowered.tape, tables, choice.stage, choice.num_micro)
        return staged.pace(self._timings.seconds[:number], replayed.finish[:number]), local_s

    def _exchanges_on_links_s(self, strategy: Strategy) -> float:
        """Seconds that one step of all teams occupies the busiest link.

        Teams of one host share its NIC, and a device of the server sends and receives for others.
        """
        held = np.zeros(len(self.cluster.resources))
        for team in range(len(strategy.decisions[0].teams)):
            for device, server, rows in pushes_of(self.graph, strategy, team):
                if device != server:
                    channel = device * self.cluster.num_devices + server
                    held += self._bytes_of(rows) * self._held_by(channel)
            for device, server, rows in pulls_of(self.graph, strategy, team):
                if device != server:
                    channel = server * self.cluster.num_devices + device
                    held += self._bytes_of(rows) * self._held_by(channel)
        return float(held.max(initial=0.0))

    def _bytes_of(self, rows: Sequence[int]) -> float:
        """Bytes of the parameters of some rows of ``graph.updates``."""
        return float(sum(self.graph.tensor_bytes[self.graph.updates[row][1]] for row in rows))

    def team_paces(self, strategy: Strategy, choice: Choice) -> tuple[TeamPace, ...]:
        """Seconds that a step of each team takes, and its exchange with the server alone.

        Not counted as an evaluation: it belongs to that of the strategy.

        Args:
            strategy: Strategy with an asynchronous server.
            choice: The same strategy, encoded.
        """
        counted = self.num_evaluations
        lowered = self._lower(choice._replace(averaging_s=0.0))
        self._run(lowered, Order.FIFO, math.inf)
        number = int(lowered.tape.counts[NUM_TASKS])
        tasks, finish = lowered.tape.tasks[:number], self._timings.finish[:number].copy()
        # The server updates, and a team is done when it has its gradients.
        finish[tasks["kind"] == TaskKind.UPDATE] = 0.0
        paces = []
        for team, members in enumerate(islands(strategy)):
            own = np.isin(tasks["device"], members)
            compute_s = float(finish[own].max(initial=0.0))
            paces.append(self._pace(strategy, choice, team, compute_s))
        self.num_evaluations = counted
        return tuple(paces)

    def _pace(self, strategy: Strategy, choice: Choice, team: int, compute_s: float) -> TeamPace:
        """Pace of a team, given its compute seconds."""
        assert strategy.asynchronous is not None
        whole, busy = [], []
        for is_push, of in ((False, pulls_of), (True, pushes_of)):
            traffic = of(self.graph, strategy, team)
            whole.append(self._exchange_s(traffic, choice, is_push=is_push))
            busy.append(
                tuple(
                    sum(
                        self._busy_s(each, is_push=is_push)
                        for each in traffic
                        if each.server == device
                    )
                    for device in strategy.asynchronous.devices
                )
            )
        return TeamPace(whole[0], compute_s, whole[1], *busy)

    def _busy_s(self, traffic: Traffic, *, is_push: bool) -> float:
        """Seconds that an exchange occupies the server's link, and its device.

        A push holds the device for the optimizer's step, a pull for the copy of the weights.
        """
        rows, kind = list(traffic.rows), self._type_of_device[traffic.server]
        num_bytes = self._bytes_of(rows)
        if is_push:
            own_s = float(self._update_seconds[kind, rows].sum())
        else:
            own_s = float(self._copy_fixed_s[kind] + num_bytes * 2 * self._copy_s_per_byte[kind])
        if traffic.device == traffic.server:
            return own_s
        ends = (traffic.device, traffic.server) if is_push else (traffic.server, traffic.device)
        route = self.cluster.route(*ends)
        channel = ends[0] * self.cluster.num_devices + ends[1]
        link_s = self._held_by(channel)[route[-1 if is_push else 0]] if route else 0.0
        return own_s + num_bytes * float(link_s)

    def _exchange_s(self, traffic: tuple[Traffic, ...], choice: Choice, *, is_push: bool) -> float:
        """Seconds of a push or pull when nobody else talks to the server; simulated once."""
        key = is_push, traffic
        if key not in self._exchanges:
            sizes = np.array([self.graph.tensor_bytes[row] for _, row, _ in self.graph.updates])
            tape = (push_tape if is_push else pull_tape)(traffic, sizes, self.channels)
            self._exchanges[key] = self._seconds_of_tape(tape, choice)
        return self._exchanges[key]

    def averaging_seconds(self, strategy: Strategy, choice: Choice) -> float:
        """Seconds of one averaging of a strategy's parameters, by the referee.

        Args:
            strategy: Strategy with an averaging.
            choice: The same strategy, encoded.
        """
        assert strategy.averaging is not None
        tape = averaging_tape(
            strategy.averaging,
            averaged_buckets(self.graph, strategy),
            self.channels,
            num_parameters=len(self.tables.parameter_bytes),
            num_devices=self.cluster.num_devices,
        )
        return self._seconds_of_tape(tape, choice)

    def _seconds_of_tape(self, tape: Tape, choice: Choice) -> float:
        """Seconds of a tape that is no step, by the referee."""
        prices = self._prices(choice, self._type_of_device, self._price_channels(tape))
        lowered = _Lowered(choice._replace(num_steps=1, averaging_s=0.0), tape, prices)
        self._run(lowered, Order.FIFO, math.inf)
        return self._replay(lowered)[0]

    def rule_number(self, op_rules: OpRules, blocks: tuple[int, ...] = ()) -> int:
        """The number by which a ``Choice`` names op rules and blocks, 0 if there are none."""
        key = op_rules, blocks
        if key not in self._rule_numbers:
            self._rule_numbers[key] = len(self._rules_by_number)
            self._rules_by_number.append(key)
        return self._rule_numbers[key]

    def rule_tables(self, number: int) -> GraphTables:
        """The graph's tables under the op rules of a number.

        Raises:
            StrategyError: these rules cannot be followed together.
        """
        return self._rule_set(number).tables

    def tables_of(self, choice: Choice) -> GraphTables:
        """The graph's tables under the op rules of an encoded strategy."""
        return self._rule_set(choice.rule_set).tables

    def _rule_set(self, number: int) -> _RuleSet:
        """Rule set of a choice; few are kept at once, those used last."""
        found = self._rule_sets.pop(number, None)
        if found is None:
            op_rules, blocks = self._rules_by_number[number]
            found = _RuleSet(self.graph, op_rules, blocks, self.channels)
            if len(self._rule_sets) >= MAX_RULE_SETS:
                del self._rule_sets[next(other for other in self._rule_sets if other != 0)]
        self._rule_sets[number] = found
        return found

    def floor_s(self, choice: Choice) -> float:
        """Lower bound of a step's seconds, without a simulation; takes microseconds.

        The busiest device's compute; or the busiest link's share of the gradients, none of which
        is there before its members' forward passes. Constants, updates, parameter servers and
        whatever moves between groups are left out; everything is if ops run by rules, or messages
        are encoded (0).
        """
        if choice.rule_set or choice.codecs:
            return 0.0
        self._price_rows(choice, self._type_of_device)
        shares = choice.shares[choice.division[:-1]]  # [num_groups, num_micro, num_devices]
        groups = np.arange(len(shares))[:, None, None]
        seconds = self._group_seconds[:, self._type_of_device, shares, groups].sum((1, 2))
        forward, whole = seconds  # [num_devices] each
        floor = whole.max()
        rings, everyone = choice.rings, Domain.ALL
        ring = rings.first[:, everyone]
        has_ring = ring < rings.end[:, everyone]
        reduced = np.flatnonzero(has_ring & (choice.sharded <= Sharded.STATE))
        if len(reduced):
            payload, ring = self._reduced_bytes[reduced], ring[reduced]
            load = self._load(rings.first_channel[ring], payload)
            load += self._load(rings.second_channel[ring], payload)
            member = rings.member[ring[payload > 0.0]] > 0
            first = (member * forward).max(1).min(initial=np.inf)
            if np.isfinite(first):
                floor = max(floor, first / choice.num_steps + load.max())
        return float(floor)

    def _load(self, channel: IntArray, payload: FloatArray) -> FloatArray:
        """Seconds that payloads over channels occupy each link; -1 marks no channel.

        Args:
            channel: Channel of each payload.
            payload: Bytes of each payload.

        Returns:
            # [num_resources]
        """
        load = np.zeros(len(self.cluster.resources))
        numbers, place = np.unique(channel, return_inverse=True)
        total = np.bincount(place, payload, len(numbers))
        for number, num_bytes in zip(numbers.tolist(), total, strict=True):
            if number >= 0:
                load += num_bytes * self._held_by(number)
        return load

    def seconds_per_byte(self, channel: Channel) -> float:
        """Seconds that one byte of payload occupies the slowest link of a channel."""
        return self._pricer.seconds(channel).seconds_per_byte

    def _held_by(self, channel: int) -> FloatArray:
        """Seconds that one byte of payload occupies each link of a channel.  # [num_resources]"""
        if channel not in self._held:
            row = self._held[channel] = np.zeros(len(self.cluster.resources))
            held = self._pricer.seconds(self.channels[channel]).held
            row[list(held)] = list(held.values())
        return self._held[channel]

    @property
    def is_short_of_time(self) -> bool:
        """Whether ``most_tasks`` is a limit. What does not fit is then looked at briefly.

        What keeps ``OVERFULL`` times a device's memory is not simulated, and the referee does not
        replay what the engine's schedule has no memory for: its step is the engine's.
        """
        return not math.isinf(self.most_tasks)

    def evaluate_choice(
        self, choice: Choice, order: Order, limit_s: float = math.inf
    ) -> Evaluation:
        """Predict step time and memory of an encoded strategy.

        Args:
            choice: Choice from ``encode`` or a ``StrategySpace``.
            order: Order of waiting tasks.
            limit_s: Seconds per step above which an exact result is not needed: the outcome may
                then be ``given_up``.
        """
        return self.evaluate_orders(choice, (order,), limit_s)[0]

    def evaluate_orders(
        self, choice: Choice, orders: Sequence[Order], limit_s: float = math.inf
    ) -> list[Evaluation]:
        """Like ``evaluate_choice`` in several orders, lowered once.

        What is slower than an earlier order in which the strategy fits may be given up, too.
        """
        lowered = self._begun(choice, orders)
        if isinstance(lowered, list):
            return lowered
        found = []
        for order in orders:
            seconds, is_done = self._run(lowered, order, limit_s)
            if not is_done or seconds > limit_s:
                found.append(given_up(seconds, order))
                continue
            found.append(self._judge(choice, seconds, self._peak(lowered, self._timings), order))
            if found[-1].outcome == Outcome.OK:
                limit_s = seconds
        return found

    def referee(
        self,
        strategy: Strategy | Choice,
        order: Order | None = None,
        limit_s: float = math.inf,
    ) -> Evaluation:
        """Predict step time and memory under max-min fair sharing of links; see ``referee``.

        Slower than ``evaluate`` and harder to exploit: the numbers to report. Memory is the larger
        of both predictions on each device.

        Args:
            strategy: Strategy made for this graph and cluster.
            order: Order of waiting tasks in the engine; the best of all three by the referee if
                ``None``.
            limit_s: As in ``evaluate_choice``. A strategy that the engine takes for more than
                ``REFEREE_SLACK`` slower than that is given up, too.
        """
        orders = tuple(Order) if order is None else (order,)
        tried = self.referee_orders(strategy, orders, limit_s)
        return min(tried, key=lambda result: result.preference)

    def referee_orders(
        self, strategy: Strategy | Choice, orders: Sequence[Order], limit_s: float = math.inf
    ) -> list[Evaluation]:
        """Like ``referee`` in several orders, lowered once; the result of each order."""
        choice = self.encode(strategy) if isinstance(strategy, Strategy) else strategy
        lowered = self._begun(choice, orders)
        if isinstance(lowered, list):
            return lowered
        return [self._refereed(choice, lowered, order, limit_s) for order in orders]

    def _refereed(
        self, choice: Choice, lowered: _Lowered, order: Order, limit_s: float
    ) -> Evaluation:
        seconds, is_done = self._run(lowered, order, limit_s * (1.0 + REFEREE_SLACK))
        if not is_done:
            return given_up(seconds, order)
        peak = self._peak(lowered, self._timings)
        if self.is_short_of_time and (peak * (1.0 + MEMORY_MARGIN) > self._usable).any():
            return self._judge(choice, seconds, peak, order)
        seconds, replayed = self._replay(lowered, limit_s)
        if replayed is None or seconds > limit_s:
            return given_up(seconds, order)
        peak = np.maximum(peak, self._peak(lowered, replayed))
        return self._judge(choice, seconds, peak, order)

    def _replay(
        self, lowered: _Lowered, limit_s: float = math.inf
    ) -> tuple[float, Timings | None]:
        """(seconds per step, timings) by the referee of what was simulated last.

        No timings and a lower bound of the seconds above the limit.
        """
        choice, tape, prices, _ = lowered
        limit_s -= choice.averaging_s
        end, done, replayed = replay(
            tape, prices, self._timings, len(prices.type_of_device), limit_s * choice.num_steps
        )
        num_tasks = int(tape.counts[NUM_TASKS])
        assert done in (num_tasks, GIVEN_UP), f"only {done} of {num_tasks} tasks can be replayed"
        seconds = end / choice.num_steps + choice.averaging_s
        return seconds, None if done == GIVEN_UP else replayed

    def seconds_under_noise(self, choice: Choice, order: Order, noise: Noise) -> FloatArray:
        """Seconds per step by the referee when speeds are not as predicted.

        The order stays that of the undisturbed run, as it does when a plan is executed. Where
        twins are folded away they share the factor of the device that stands for them.

        Returns:
            # [num_draws]
        """
        lowered = self._fold(choice) or self._lower(choice)
        whole_s, _ = self._run(lowered, order, math.inf)
        _, tape, prices, fold = lowered
        more_s, part = choice.averaging_s, 1.0
        if more_s < 0.0:  # steps overlap, and go with the speeds of their own tasks
            more_s, part = 0.0, whole_s / (whole_s - choice.averaging_s)
        nominal, num_devices = self._timings, len(prices.type_of_device)
        factor = noise.device if fold is None else noise.device[:, fold.columns]
        result = np.empty(noise.num_draws)
        for draw in range(noise.num_draws):
            self.poll()
            noisy = noisy_prices(prices, noise.resource[draw])
            seconds = noisy_seconds(tape, prices, noisy, nominal.seconds, factor[draw])
            end, _, _ = replay(tape, noisy, nominal._replace(seconds=seconds), num_devices)
            result[draw] = end / choice.num_steps * part + more_s
        return result

    def _judge(self, choice: Choice, seconds: float, peak: FloatArray, order: Order) -> Evaluation:
        """Evaluation of a predicted step time and memory."""
        peak = np.rint(peak * (1.0 + MEMORY_MARGIN))
        refused = (
            micro_batches_refused(self.graph, choice.num_micro)
            or self._lone_norm(choice)
            or self.scope_fault(choice)
        )
        if refused:
            return Evaluation(
                outcome=Outcome.CANNOT_RUN,
                step_time_s=seconds,
                peak_memory_bytes=tuple(peak.astype(np.int64).tolist()),
                order=order,
                shortage=refused,
                overflow_bytes=math.inf,  # whatever fits is better
            )
        over = peak - self._usable
        worst = int(np.argmax(over))
        missing = float(over[worst])
        shortage = ""
        if missing > 0:
            device = self.cluster.devices[worst]
            shortage = (
                f"{device.name} ({device.type.name}) needs {format_bytes(peak[worst])}, "
                f"{format_bytes(missing)} more than its {format_bytes(self._usable[worst])}"
            )
        return Evaluation(
            outcome=Outcome.OUT_OF_MEMORY if missing > 0 else Outcome.OK,
            step_time_s=seconds,
            peak_memory_bytes=tuple(peak.astype(np.int64).tolist()),
            order=order,
            shortage=shortage,
            overflow_bytes=max(missing, 0.0),
        )

    def scope_fault(self, choice: Choice) -> str:
        """Why an optimizer that looks at all parameters would not see all, or empty."""
        if self.graph.scope != UpdateScope.MODEL or not self.graph.updates:
            return ""
        division = choice.division[self.tables_of(choice).parameter_group]
        return apart_fault(self.graph, choice.home, choice.member[division].astype(np.bool_))

    def _lone_norm(self, choice: Choice) -> str:
        """Description of a BatchNorm that a device would train on one value per channel, or empty.

        Those with rules are left to the rehearsal: members of a team may see all of its samples.
        """
        norms = norms_of_lone_values(self.graph)
        ruled = {op for op, _ in self._rules_by_number[choice.rule_set][0]} if norms else set()
        for op in norms:
            group = group_ops(self.graph).group[op]
            is_lone = choice.shares[choice.division[group]] == 1  # [num_micro, num_devices]
            if op not in ruled and is_lone.any():
                device = self.cluster.devices[int(np.flatnonzero(is_lone.any(0))[0])]
                return (
                    f"{device.name} would have one sample of BatchNorm "
                    f"'{self.graph.ops[op].module or '(root)'}', which torch trains on more than "
                    "one value per channel; a larger batch, or more samples on fewer devices, can."
                )
        return ""

    def simulate(self, choice: Choice, order: Order) -> tuple[float, FloatArray]:
        """(seconds per step, peak bytes of each device) of an encoded strategy."""
        lowered = self._lower(choice)
        seconds, _ = self._run(lowered, order, math.inf)
        return seconds, self._peak(lowered, self._timings)

    def tasks_of(self, choice: Choice) -> int:
        """Approximate number of tasks of a choice on all devices.

        One for each op on each share and for each update of a parameter on a member of its group.
        A served parameter counts ``_SERVED`` times: it is pushed and pulled over as many different
        channels. Other communication is not counted.
        """
        tables = self.tables_of(choice)
        num_ops = np.bincount(tables.op_group[tables.op_group >= 0], minlength=tables.num_groups)
        has_work = (choice.shares[: len(choice.member)] > 0).sum((1, 2))
        if choice.rule_set:  # members of a team run ops with rules on samples that are not theirs
            has_work = choice.member.astype(np.bool_).sum(1) * choice.num_micro
        division = choice.division[: len(num_ops)]
        num_members = choice.member.astype(np.bool_).sum(1)[division]
        members = num_members[tables.parameter_group]
        num_updates = (members * np.where(choice.home >= 0, _SERVED, 1)).sum()
        return int((num_ops * has_work[division]).sum() + num_updates) * choice.num_steps

    def _begun(self, choice: Choice, orders: Sequence[Order]) -> _Lowered | list[Evaluation]:
        """A choice lowered, or for each order the reason why it is not simulated."""
        if (kept := self._overfull(choice)) is not None:
            return [self._hopeless(choice, kept, order) for order in orders]
        return self._ready(choice) or [self._too_large(choice, order) for order in orders]

    def _overfull(self, choice: Choice) -> FloatArray | None:
        """Bytes that stay on each device, where time is short and they are hopelessly many.

        Then a simulation, which takes seconds on hundreds of devices, has nothing to add: the
        peak is larger still, and the step is at least the floor.
        """
        if not self.is_short_of_time:
            return None
        whole = self.tables.parameter_bytes.sum() * (1.0 + self.tables.state_ratio)
        if whole <= OVERFULL * self._usable.min() or self.floor_s(choice) == 0.0:
            return None
        kept = resident_bytes(self.tables_of(choice), choice)
        if not (kept > OVERFULL * self._usable).any():
            return None
        self.poll()
        self.num_evaluations += 1
        return kept

    def _hopeless(self, choice: Choice, kept: FloatArray, order: Order) -> Evaluation:
        """The evaluation of a strategy that was not simulated, from lower bounds."""
        found = self._judge(choice, self.floor_s(choice), kept, order)
        return replace(found, shortage=found.shortage.replace(" needs ", " needs at least ", 1))

    def _ready(self, choice: Choice) -> _Lowered | None:
        """Lower a choice, folded where that is exact; ``None`` if that makes too many tasks."""
        folded = self._fold(choice)
        if folded is None and self.tasks_of(choice) > self.most_tasks:
            return None
        return folded or self._lower(choice)

    def _too_large(self, choice: Choice, order: Order) -> Evaluation:
        return Evaluation(
            outcome=Outcome.TOO_LARGE,
            step_time_s=math.inf,
            peak_memory_bytes=(),
            order=order,
            shortage=f"a program of about {self.tasks_of(choice):,} tasks, of which few do alike, "
            f"is not simulated under this budget (at most {self.most_tasks:,.0f})",
            overflow_bytes=math.inf,
        )

    def _lower(self, choice: Choice) -> _Lowered:
        """Lower a choice on all devices."""
        self.poll()
        rules = self._rule_set(choice.rule_set)
        self._tape = lower_to_tape(rules.tables, choice, rules.scratch, self._tape)
        channels = self._price_channels(self._tape)
        return _Lowered(choice, self._tape, self._prices(choice, self._type_of_device, channels))

    def _fold(self, choice: Choice) -> _Lowered | None:
        """Lower a choice on devices that stand for others; ``None`` where that is not exact."""
        tables, num_devices = self.tables_of(choice), self.cluster.num_devices
        if (
            choice.codecs or len(choice.kept_bytes) or len(choice.stage)
        ):  # these are given by device
            return None
        if len(tables.op_id) * num_devices * choice.num_micro * choice.num_steps < LEAST_FOLDED:
            return None
        self.poll()
        rules = self._rule_set(choice.rule_set)
        if rules.tells_rows_apart:
            return None
        folded = self._folding.lower(choice, tables, minds_position=rules.minds_position)
        if folded is None:
            return None
        prices = self._prices(folded.choice, folded.types, folded.channels)
        return _Lowered(folded.choice, folded.tape, prices, folded.fold)

    def _run(self, lowered: _Lowered, order: Order, limit_s: float) -> tuple[float, bool]:
        """Simulate what was lowered.

        Returns:
            (seconds per step, True), or (a lower bound of them above the limit, False).
        """
        choice, tape, prices, _ = lowered
        num_devices = len(prices.type_of_device)
        limit_s -= choice.averaging_s
        self._timings = with_room(self._timings, tape, prices.num_queues + num_devices)
        end, is_done = run_program(
            tape, prices, self._timings, num_devices, order, limit_s * choice.num_steps
        )
        self.num_evaluations += 1
        self.num_tasks = int(tape.counts[NUM_TASKS])
        return end / choice.num_steps + choice.averaging_s, is_done

    def _peak(self, lowered: _Lowered, *timings: Timings) -> FloatArray:
        """Peak bytes of each device, the largest over timings of the lowered choice."""
        choice, tape, prices, fold = lowered
        peaks = np.empty((len(timings), len(prices.type_of_device)))
        resident = kept_bytes(tape, self.tables_of(choice), choice)
        for each, peak in zip(timings, peaks, strict=True):
            peak_memory(tape, each, resident, peak)
        most = peaks.max(axis=0)
        return np.asarray(most if fold is None else fold.unfolded(most), np.float64)

    def _prices(self, choice: Choice, types: IntArray, channel: ChannelPrices) -> Prices:
        """Prices, from the cost model, of everything that a choice can contain.

        Args:
            choice: Choice on some devices.
            types: Device type of each of these devices.
            channel: Prices of its channels.
        """
        self._price_rows(choice, types)
        rules = self._rule_set(choice.rule_set)
        ruled_row, ruled_number, ruled_seconds = rules.seconds(
            choice, types, self.cluster, self.cost_model
        )
        return Prices(
            type_of_device=types,
            op_seconds=self._op_seconds,
            has_rule=rules.has_rule,
            ruled_row=ruled_row,
            ruled_number=ruled_number,
            ruled_seconds=ruled_seconds,
            update_seconds=self._update_seconds,
            parameter_bytes=self.tables.parameter_bytes,
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
            blocks_sends=self.cluster.sends == Sends.BLOCKING,
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
            num_resources=len(self.cluster.resources),
        )

    def _price_channels(self, tape: Tape) -> ChannelPrices:
        """Prices of a program's channels: of all channels, or, if there are many, of its own.

        In the latter case its tasks are given the numbers of their channels in these prices.
        """
        used = np.arange(len(self.channels), dtype=np.int32)
        if len(used) > _MOST_PRICED:
            tasks = tape.tasks[: tape.counts[NUM_TASKS]]
            used, tasks["channel"] = used_channels(tasks["channel"], len(used))
        key = used.tobytes()
        found = self._channel_prices.pop(key, None)
        if found is None:
            found = self._pricer.prices([self.channels[number] for number in used.tolist()])
            if len(self._channel_prices) >= _MOST_PRICE_LISTS:
                del self._channel_prices[next(iter(self._channel_prices))]
        self._channel_prices[key] = found
        return found

    def _price_rows(self, choice: Choice, types: IntArray) -> None:
        """Fill the rows of the op table for the shares of the batch in a choice."""
        shares = choice.shares[: len(choice.member)]  # along the batch
        rules = self._rule_set(choice.rule_set)
        if rules.has_rule[rules.tables.remake_op].any():  # made again for the samples of teams
            shares = np.concatenate([shares, choice.teams.samples])
        if self._is_priced[types, shares].all():
            return
        kinds = np.broadcast_to(types, shares.shape)
        for kind, samples in np.unique(np.stack([kinds, shares], -1).reshape(-1, 2), axis=0):
            if not self._is_priced[kind, samples]:
                self._price(int(kind), int(samples))

    def op_seconds(self, kind: int, samples: int) -> FloatArray:
        """Seconds of every compute op of the tables on a device type.  # [num_compute_ops]"""
        device_type = self.cluster.device_types[kind]
        return self.cost_model.op_seconds(self.graph, device_type, samples)[self.tables.op_id]

    def _price(self, kind: int, samples: int) -> None:
        """Store the seconds of all compute ops on a device type at a share."""
        row = self.op_seconds(kind, samples)
        self._op_seconds[kind, samples] = row
        self._is_priced[kind, samples] = True
        if samples:  # a device without samples runs nothing
            groups = self.tables.op_group + 1  # constants, group -1, come first
            count = self.tables.num_groups + 1
            forward = np.where(self.tables.op_is_backward == 0, row, 0.0)
            self._group_seconds[0, kind, samples] = np.bincount(groups, forward, count)[1:]
            self._group_seconds[1, kind, samples] = np.bincount(groups, row, count)[1:]

    def program(self, choice: Choice) -> Program:
        """The program of an encoded strategy."""
        rules = self._rule_set(choice.rule_set)
        self._tape = lower_to_tape(rules.tables, choice, rules.scratch, self._tape)
        return program_from_tape(
            self._tape,
            rules.tables,
            choice,
            self.channels,
            self.cluster.num_devices,
            op_rules=rules.op_rules,
            blocks=rules.blocks,
        )

    def timings(self, choice: Choice, order: Order) -> tuple[Program, FloatArray, FloatArray]:
        """(program, start, finish) of an encoded strategy, seconds from the step's begin."""
        self.simulate(choice, order)
        program = self.program(choice)
        tasks = program.num_tasks
        return program, self._timings.start[:tasks].copy(), self._timings.finish[:tasks].copy()

    def referee_timings(
        self, choice: Choice, order: Order
    ) -> tuple[Program, FloatArray, FloatArray]:
        """Like ``timings``, with the referee's times."""
        lowered = self._lower(choice)
        self._run(lowered, order, math.inf)
        _, replayed = self._replay(lowered)
        assert replayed is not None
        return self.program(choice), replayed.start, replayed.finish
