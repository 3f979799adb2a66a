"""The evaluator: predicts whether strategies can run, their step times and their memory.

A strategy can run if it fits in memory and trains as one device does. All planners ask the
evaluator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.batch_plan import micro_batches_refused, norms_of_lone_values
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, Phase, UpdateScope
from heterog.lowering import Choice, encode, resident_bytes, steps_to_unroll
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.tables import saved_values
from heterog.lowering.tape import mark_channels
from heterog.pricing.cost_model import CostModel
from heterog.pricing.intervals import Interval, interval_around, regime_of, regime_spread
from heterog.pricing.price_table import RuleSets
from heterog.simulator.engine import Order
from heterog.simulator.lower_bound import floor_s
from heterog.simulator.runs import Lowered, Runner
from heterog.simulator.space import StrategySpace
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, apart_fault
from heterog.units import format_bytes


class Outcome(StrEnum):
    """Whether a strategy can run."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    CANNOT_RUN = "cannot_run"
    """Ranks would compute other results than one device, or get stuck."""
    TOO_LARGE = "too_large"
    """Not simulated: its program has more tasks than ``Evaluator.most_tasks``."""
    GIVEN_UP = "given_up"
    """Slower than the given limit; ``step_time_s`` is a lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Predicted step time and memory of a strategy.

    Attributes:
        outcome: ``ok`` or why it cannot run.
        step_time_s: Seconds per training step, even if it is out of memory.
        peak_memory_bytes: Predicted peak memory of each device.
        order: Order in which waiting tasks ran.
        shortage: Why it cannot run, in words; for ``out_of_memory`` the device and missing bytes.
        overflow_bytes: Bytes missing on the worst device, 0 if none; infinite if it cannot run
            for another reason.
        is_ok: Whether the strategy can run.
        preference: Sort key (overflow, seconds), smaller is better. The overflow of a given-up
            strategy counts as infinite, since its memory is not known.
    """

    outcome: Outcome
    step_time_s: float
    peak_memory_bytes: tuple[int, ...]
    order: Order
    shortage: str = ""
    overflow_bytes: float = 0.0
    is_ok: bool = field(init=False, repr=False, compare=False)
    preference: tuple[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        missing = math.inf if self.outcome == Outcome.GIVEN_UP else self.overflow_bytes
        object.__setattr__(self, "is_ok", self.outcome == Outcome.OK)
        object.__setattr__(self, "preference", (missing, self.step_time_s))


def given_up(seconds: float, order: Order) -> Evaluation:
    """Evaluation of a strategy that was given up because it takes at least these seconds."""
    return Evaluation(
        outcome=Outcome.GIVEN_UP, step_time_s=seconds, peak_memory_bytes=(), order=order
    )


MEMORY_MARGIN = 0.04
"""Share added to predicted bytes for small workspaces, rounding of allocators, and gradients that
are not freed at once when they are sent to a server."""


class Feasibility:
    """Turns predictions into evaluations: whether choices on a graph and cluster can run.

    Attributes:
        usable: Bytes that a step may use on each device.
    """

    def __init__(self, graph: OpGraph, cluster: Cluster, rules: RuleSets) -> None:
        self._graph, self._cluster, self._rules = graph, cluster, rules
        self.usable = np.array([device.usable_memory_bytes for device in cluster.devices])

    def judge(self, choice: Choice, seconds: float, peak: FloatArray, order: Order) -> Evaluation:
        """Evaluation of a choice from its predicted seconds and peak bytes."""
        peak = np.rint(peak * (1.0 + MEMORY_MARGIN))
        if refused := self.refused(choice):
            return Evaluation(
                outcome=Outcome.CANNOT_RUN,
                step_time_s=seconds,
                peak_memory_bytes=tuple(peak.astype(np.int64).tolist()),
                order=order,
                shortage=refused,
                overflow_bytes=math.inf,  # every strategy that can run is better
            )
        over = peak - self.usable
        worst = int(np.argmax(over))
        missing = float(over[worst])
        shortage = ""
        if missing > 0:
            device = self._cluster.devices[worst]
            shortage = (
                f"{device.name} ({device.type.name}) needs {format_bytes(peak[worst])}, "
                f"{format_bytes(missing)} more than its {format_bytes(self.usable[worst])}"
            )
        return Evaluation(
            outcome=Outcome.OUT_OF_MEMORY if missing > 0 else Outcome.OK,
            step_time_s=seconds,
            peak_memory_bytes=tuple(peak.astype(np.int64).tolist()),
            order=order,
            shortage=shortage,
            overflow_bytes=max(missing, 0.0),
        )

    def refused(self, choice: Choice) -> str:
        """Why a choice would not train as one device does; empty if it would."""
        return (
            micro_batches_refused(self._graph, choice.num_micro)
            or self._lone_norm(choice)
            or self.scope_fault(choice)
        )

    def scope_fault(self, choice: Choice) -> str:
        """Why an optimizer that needs all parameters would not see all of them, or empty."""
        if self._graph.scope != UpdateScope.MODEL or not self._graph.updates:
            return ""
        division = choice.division[self._rules.tables_of(choice).parameter_group]
        return apart_fault(self._graph, choice.home, choice.member[division].astype(np.bool_))

    def _lone_norm(self, choice: Choice) -> str:
        """Description of a BatchNorm that a device would train on one value per channel, or empty.

        The rehearsal checks BatchNorms with rules: members of a team may see all its samples.
        """
        norms = norms_of_lone_values(self._graph)
        ruled = {op for op, _ in self._rules.rules_of(choice.rule_set)} if norms else set()
        for op in norms:
            group = group_ops(self._graph).group[op]
            is_lone = choice.shares[choice.division[group]] == 1  # [num_micro, num_devices]
            if op not in ruled and is_lone.any():
                device = self._cluster.devices[int(np.flatnonzero(is_lone.any(0))[0])]
                return (
                    f"{device.name} would have one sample of BatchNorm "
                    f"'{self._graph.ops[op].module or '(root)'}', which torch trains on more than "
                    "one value per channel; a larger batch, or more samples on fewer devices, can."
                )
        return ""


_SERVED = 16

OVERFULL = 2.0
"""Multiple of a device's memory that parameters and states may take when time is short: what a
search tries next (micro-batches, recomputation, an order) cannot make more than that fit."""

REFEREE_SLACK = 0.03
"""Share by which the referee's prediction may be below the engine's without the strategy being
given up by the engine."""


class Evaluator(Runner):
    """Scores strategies of one graph on one cluster by the fast engine.

    Attributes:
        most_tasks: Most tasks of a program that is simulated, as ``tasks_of`` counts them; no
            limit for programs whose devices are folded.
        feasibility: Judge of predictions.
        memo: Cache in which modes store results for this graph and cluster, by their own keys.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        cost_model: CostModel | None = None,
        beside: Runner | None = None,
    ) -> None:
        super().__init__(graph, cluster, cost_model, beside)
        self.most_tasks = math.inf
        self.memo: dict[object, float] = {}
        self.feasibility = Feasibility(graph, cluster, self.rules)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Samples per second of the whole model on each device at its even share."""
        graph, cluster = self.graph, self.cluster
        samples = max(graph.batch_size // cluster.num_devices, 1)
        computing = graph.phases != Phase.UPDATE
        by_type = [
            samples / float(self.cost_model.op_seconds(graph, kind, samples)[computing].sum())
            for kind in cluster.device_types
        ]
        return tuple(by_type[index] for index in cluster.type_index)

    @cached_property
    def group_num_ops(self) -> IntArray:
        """Number of compute ops of each group, whatever rules they have.  # [num_groups]"""
        groups = self.tables.op_group
        counts = np.bincount(groups[groups >= 0], minlength=self.tables.num_groups)
        return counts.astype(np.int32)

    @cached_property
    def group_state_bytes(self) -> FloatArray:
        """Bytes of each group's parameters, gradients and optimizer state.  # [num_groups]"""
        tables = self.tables
        sizes = tables.parameter_bytes * (2.0 + tables.state_ratio)
        memory = np.bincount(tables.parameter_group, sizes, tables.num_groups)
        return memory.astype(np.float64)

    @cached_property
    def group_saved_bytes(self) -> FloatArray:
        """Bytes of each group's values that are kept for the backward pass.  # [num_groups]"""
        tables = self.tables
        owners = tables.op_group[tables.value_op]
        is_kept = saved_values(tables) & (owners >= 0)
        sizes = tables.value_bytes + tables.value_bytes_per_unit * self.graph.batch_size
        memory = np.bincount(owners[is_kept], sizes[is_kept], tables.num_groups)
        return memory.astype(np.float64)

    @cached_property
    def spreads(self) -> tuple[float, ...]:
        """Error of the predicted seconds on each device type; see ``CostModel.spread``."""
        return tuple(
            self.cost_model.spread(self.graph, kind) for kind in self.cluster.device_types
        )

    def space(self, candidates: Sequence[Decision] | None = None) -> StrategySpace:
        """The strategies that give every group one candidate decision; see ``StrategySpace``."""
        return StrategySpace(
            self.graph, self.cluster, self.rules, self.channels, self.speeds, candidates
        )

    def interval(self, step_time_s: float, strategy: Strategy | None = None) -> Interval:
        """Interval of a step's measured seconds, from the largest spread of a type and the regime.

        Args:
            step_time_s: Predicted seconds.
            strategy: Strategy of this prediction, whose devices count; by default one on one host
                and all types.
        """
        if strategy is None:
            return interval_around(step_time_s, max(self.spreads))
        homes = [home for home in strategy.homes if home != REPLICATED]
        used = {*homes, *(device for each in strategy.decisions for device in each.devices)}
        kinds = {self.cluster.type_index[device] for device in used}
        rows = (self.prices.row(kind, is_alone=len(used) == 1) for kind in kinds)
        models = (self.prices.models[row] for row in rows)
        own = max(model.spread(self.graph, device_type) for device_type, model in models)
        of_regime = regime_spread(regime_of(strategy, self.cluster))
        return interval_around(step_time_s, math.hypot(own, of_regime))

    def warm_up(self) -> None:
        """Load the kernels, compiled once per installation; not counted as an evaluation."""
        decision = Decision(devices=(0,), shares=(self.graph.batch_size,))
        strategy = Strategy(
            graph=self.graph.fingerprint,
            cluster=self.cluster.fingerprint,
            decisions=(decision,) * self.tables.num_groups,
            homes=(REPLICATED,) * len(self.graph.updates),
        )
        counted = self.num_evaluations
        self.referee(strategy, Order.RANK)
        self.facts()
        floor_s(self.prices, self.encode(strategy))
        mark_channels(self._tape, np.zeros(len(self.channels) + 1, np.bool_))
        self.num_evaluations = counted

    def evaluate(
        self,
        strategy: Strategy | Choice,
        order: Order | None = None,
        limit_s: float = math.inf,
    ) -> Evaluation:
        """Predict step time and memory of a strategy.

        Args:
            strategy: Strategy made for this graph and cluster, or a choice from ``encode`` or a
                ``StrategySpace``.
            order: Order of waiting tasks; the best of all three if ``None``.
            limit_s: Seconds per step above which the outcome may be ``given_up`` instead of an
                exact result.
        """
        choice = self.encode(strategy) if isinstance(strategy, Strategy) else strategy
        orders = tuple(Order) if order is None else (order,)
        tried = self.evaluate_orders(choice, orders, limit_s)
        return min(tried, key=lambda result: result.preference)

    def encode(self, strategy: Strategy) -> Choice:
        """Check a strategy and encode it as flat arrays."""
        strategy.check(self.graph, self.cluster)
        steps = steps_to_unroll(strategy.step_barrier)
        number = self.rules.number(strategy.op_rules, strategy.blocks)
        rules = self.rules.of(number)
        choice = encode(
            strategy, rules.tables, self.channels, num_steps=steps, encoder=rules.encoder
        )
        choice = choice._replace(rule_set=number)
        if not strategy.modes:
            return choice
        pairs = zip(strategy.modes, choice.modes, strict=True)
        priced = tuple(mode.priced(own, self, strategy, choice) for mode, own in pairs)
        return choice._replace(modes=priced)

    def local_s(self, choice: Choice) -> float:
        """Seconds of a choice whose modes add none yet; 0 if it is too large to simulate."""
        lowered = self._ready(choice)
        return 0.0 if lowered is None else self.run(lowered, Order.FIFO, math.inf)[0]

    def evaluate_orders(
        self, choice: Choice, orders: Sequence[Order], limit_s: float = math.inf
    ) -> list[Evaluation]:
        """Like ``evaluate`` in several orders, lowered once; the result of each order.

        A choice with a ``scope_fault`` is neither simulated nor counted: its seconds and bytes are
        lower bounds. An order may be given up if it is slower than an earlier one that can run.
        """
        is_refused = bool(self.feasibility.scope_fault(choice))
        lowered = self._begun(choice, orders, is_refused=is_refused)
        if isinstance(lowered, list):
            return lowered
        found = []
        for order in orders:
            seconds, is_done = self.run(lowered, order, limit_s)
            if not is_done or seconds > limit_s:
                found.append(given_up(seconds, order))
                continue
            found.append(
                self.feasibility.judge(choice, seconds, self.peak(lowered, self.last), order)
            )
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

        The referee is slower than ``evaluate`` and harder to exploit, so its numbers are reported.
        Memory is the larger of both predictions on each device.

        Args:
            strategy: Strategy made for this graph and cluster.
            order: Order of waiting tasks in the engine; the best of all three by the referee if
                ``None``.
            limit_s: As in ``evaluate``. A strategy is also given up if the engine predicts more
                than ``1 + REFEREE_SLACK`` times the limit.
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
        self, choice: Choice, lowered: Lowered, order: Order, limit_s: float
    ) -> Evaluation:
        seconds, is_done = self.run(lowered, order, limit_s * (1.0 + REFEREE_SLACK))
        if not is_done:
            return given_up(seconds, order)
        peak = self.peak(lowered, self.last)
        if (
            self.is_short_of_time
            and (peak * (1.0 + MEMORY_MARGIN) > self.feasibility.usable).any()
        ):
            return self.feasibility.judge(choice, seconds, peak, order)
        seconds, replayed = self.replayed(lowered, limit_s)
        if replayed is None or seconds > limit_s:
            return given_up(seconds, order)
        peak = np.maximum(peak, self.peak(lowered, replayed))
        return self.feasibility.judge(choice, seconds, peak, order)

    @property
    def is_short_of_time(self) -> bool:
        """Whether ``most_tasks`` is a limit, so that strategies that do not fit get less time.

        Strategies that keep over ``OVERFULL`` times a device's memory are then not simulated. The
        referee does not replay strategies that do not fit by the engine, and reports its seconds.
        """
        return not math.isinf(self.most_tasks)

    def tasks_of(self, choice: Choice) -> int:
        """Approximate number of tasks of a choice on all devices.

        Each op on each share is a task, and each update of a parameter on a member of its group. A
        served parameter counts ``_SERVED`` times, because it is pushed and pulled over about as
        many channels. Other communication is not counted.
        """
        tables = self.tables_of(choice)
        has_work = (choice.shares[: len(choice.member)] > 0).sum((1, 2))
        if choice.rule_set:  # members of a team run ops with rules on samples of other members
            has_work = choice.member.astype(np.bool_).sum(1) * choice.num_micro
        division = choice.division[: tables.num_groups]
        num_members = choice.member.astype(np.bool_).sum(1)[division]
        members = num_members[tables.parameter_group]
        num_updates = (members * np.where(choice.home >= 0, _SERVED, 1)).sum()
        num_runs = (self.group_num_ops * has_work[division]).sum()
        return int(num_runs + num_updates) * choice.num_steps

    def _begun(
        self, choice: Choice, orders: Sequence[Order], *, is_refused: bool = False
    ) -> Lowered | list[Evaluation]:
        """A lowered choice, or its evaluation for each order if it is not simulated.

        Args:
            choice: The choice.
            orders: Orders to evaluate.
            is_refused: Whether the choice would not train as one device does.
        """
        self._ran = None
        if is_refused or self._is_overfull(choice):
            self.poll()
            self.num_evaluations += not is_refused
            kept = resident_bytes(self.tables_of(choice), choice)
            return [self._unsimulated(choice, kept, order) for order in orders]
        return self._ready(choice) or [self._too_large(choice, order) for order in orders]

    def _is_overfull(self, choice: Choice) -> bool:
        """Whether time is short and a device keeps more than ``OVERFULL`` times its memory.

        A simulation, which takes seconds on hundreds of devices, is then useless: the peak is
        still larger, and the floor is a lower bound of the step.
        """
        if not self.is_short_of_time:
            return False
        whole = self.tables.parameter_bytes.sum() * (1.0 + self.tables.state_ratio)
        usable = self.feasibility.usable
        if whole <= OVERFULL * usable.min() or floor_s(self.prices, choice) == 0.0:
            return False
        kept = resident_bytes(self.tables_of(choice), choice)
        return bool((kept > OVERFULL * usable).any())

    def _unsimulated(self, choice: Choice, kept: FloatArray, order: Order) -> Evaluation:
        """The evaluation of a strategy that was not simulated, from lower bounds."""
        found = self.feasibility.judge(choice, floor_s(self.prices, choice), kept, order)
        return replace(found, shortage=found.shortage.replace(" needs ", " needs at least ", 1))

    def _ready(self, choice: Choice) -> Lowered | None:
        """Lower a choice, folded if that is exact; ``None`` if it has too many tasks."""
        folded = self.fold(choice)
        is_limited = folded is None and self.is_short_of_time
        if is_limited and self.tasks_of(choice) > self.most_tasks:
            return None
        return folded or self.lower(choice)

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
