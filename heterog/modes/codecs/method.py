"""Codecs on the slowest boundaries of a plan, if the user asked for a codec by name.

A *boundary* is all messages of one kind of traffic between the same devices: activations from one
stage to the next, their gradients back, all-reduces of gradients over the same replicas, pushes to
a server and pulls from it. If islands average, a boundary is all parameters on the same devices,
because their changes are sent. Let  t_i  be the seconds for which the exact messages of boundary i
hold its slowest link in a step, t* = max t_i.

- ``fp16`` and ``int8`` are tried on the slowest boundary, the two slowest, the four slowest, ...
  The fewest boundaries within ``EQUALLY_FAST`` of the best step are chosen, because more of them
  would only lose accuracy.
- ``top_k=R`` shortens the slowest boundary by R and the others to the same seconds,
  r_i = max(1, R t_i / t*): boundaries above t*/R end at t*/R, the rest stay exact. This is our
  reading of AdaTopK (FusionLLM, arXiv 2410.12707), whose code is not public.
- With a target for the step, R is an upper bound, and the reductions
  r_i = min(R, max(1, t_i / tau)) are as small as the target allows: tau is bisected.

The fastest plan without codecs sends little. So codecs are tried on all known strategies that
could still win: those whose exact steps are slower than the best by at most the factor by which a
codec shortens messages, at most the ``MOST_STARTS`` fastest.

The sum of n replicas' gradients becomes an all-gather of messages, which carries n/2 times the
bytes of a ring for the same length. So the reductions of such boundaries are multiplied by n/2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterog.errors import StrategyError
from heterog.lowering.program import Program
from heterog.lowering.tables import GraphTables
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Candidate
from heterog.modes.averaging.value import Averaging, averaged_buckets
from heterog.modes.codecs.messages import traffic_of
from heterog.modes.codecs.value import (
    MOST_REDUCTION,
    Codec,
    CodecKind,
    CodecRule,
    Codecs,
    Traffic,
    codec_rules,
    with_rules,
)
from heterog.modes.mode import Mode
from heterog.modes.search import Tried, by_preference, island_decisions
from heterog.pricing.intervals import Interval
from heterog.search.issue_order import IssuedStep, Rehearse, issued_step
from heterog.search.judging import under_noise
from heterog.search.plan import Plan
from heterog.search.rows import MethodRow
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator
from heterog.strategy.strategy import Strategy

EQUALLY_FAST = 0.01
"""Relative difference of step times that counts as none; no prediction is more precise."""
MOST_STARTS = 8
"""Most exact strategies on which codecs are tried."""
_NOTE = "lossy: changes the numbers of training"
_BISECTIONS = 12
"""Halvings of the range of tau; for R below 4 they find tau to within a thousandth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Messages of one kind of traffic between the same devices.

    Attributes:
        traffic: Kind of traffic.
        devices: Source and destination, or the members of an all-reduce.
        seconds: Time for which the exact messages of a step hold their slowest link.
        num_gathered: Number of messages gathered instead of an all-reduce; 2 for transfers, which
            stay transfers.
    """

    traffic: Traffic
    devices: tuple[int, ...]
    seconds: float
    num_gathered: int = 2


def boundaries(evaluator: Evaluator, program: Program, tables: GraphTables) -> list[Boundary]:
    """Boundaries of an exact program that may have codecs, slowest first.

    Args:
        evaluator: Evaluator with the links' prices.
        program: Program of one step.
        tables: Tables from which it was lowered.
    """
    seconds: dict[tuple[Traffic, tuple[int, ...]], float] = {}
    traffic = traffic_of(program.kind, program.subject, tables)
    for task in np.flatnonzero(traffic >= 0).tolist():
        channel = program.channels[int(program.channel[task])]
        per_byte = evaluator.prices.pricer.seconds(channel).seconds_per_byte
        key = Traffic(int(traffic[task])), channel.devices
        seconds[key] = seconds.get(key, 0.0) + float(program.num_bytes[task]) * per_byte
    found = [
        Boundary(
            traffic=traffic, devices=devices, seconds=total, num_gathered=max(len(devices), 2)
        )
        for (traffic, devices), total in seconds.items()
        if total > 0.0
    ]
    return slowest_first(found)


def averaged_boundaries(evaluator: Evaluator, strategy: Strategy) -> list[Boundary]:
    """Boundaries of a strategy whose islands average, slowest first."""
    averaging = strategy.own_mode(Averaging)
    found: dict[tuple[int, ...], Boundary] = {}
    for bucket in averaged_buckets(evaluator.graph, strategy):
        channel = evaluator.channels[evaluator.channels.value_reduce(bucket.devices)]
        per_byte = evaluator.prices.pricer.seconds(channel).seconds_per_byte
        seconds = bucket.num_bytes * per_byte / averaging.every
        before = found.get(bucket.devices)
        found[bucket.devices] = Boundary(
            traffic=Traffic.PARAMETER_CHANGES,
            devices=bucket.devices,
            seconds=seconds + (0.0 if before is None else before.seconds),
            num_gathered=len(bucket.senders),
        )
    return slowest_first([each for each in found.values() if each.seconds > 0.0])


def slowest_first(found: Sequence[Boundary]) -> list[Boundary]:
    """Boundaries in the order in which they get codecs, slowest first."""
    return sorted(found, key=lambda each: (-each.seconds, each.traffic, each.devices))


def adaptive_reductions(seconds: Sequence[float], reduction: float) -> list[float]:
    """r_i = max(1, R t_i / t*): the factor by which each boundary's messages are shortened.

    >>> adaptive_reductions([0.1, 0.5, 1.0, 4.0], 100.0)
    [2.5, 12.5, 25.0, 100.0]
    """
    longest = max(seconds)
    return [max(1.0, reduction * each / longest) for each in seconds]


def reductions_to(seconds: Sequence[float], tau_s: float, most: float) -> list[float]:
    """r_i = min(R, max(1, t_i / tau)), so that no boundary takes longer than tau.

    >>> reductions_to([0.1, 0.5, 4.0], 0.25, 10.0)
    [1.0, 2.0, 10.0]
    """
    return [min(most, max(1.0, each / tau_s)) for each in seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossyResult:
    """An exact strategy with codecs.

    Attributes:
        strategy: Strategy with the codecs; the exact one if none makes it faster.
        evaluation: Its evaluation.
        exact: Evaluation of the exact strategy.
        halves: Evaluation of the exact strategy with ``fp16`` on all boundaries, for comparison,
            because that costs little time and accuracy.
        num_boundaries: Number of boundaries that may have codecs.
        misses_target: Whether even the strongest codecs do not reach a given target.
    """

    strategy: Strategy
    evaluation: Evaluation
    exact: Evaluation
    halves: Evaluation
    num_boundaries: int
    misses_target: bool = False

    @property
    def is_lossy(self) -> bool:
        """Whether any codec is used."""
        return bool(codec_rules(self.strategy))


def lossy_strategy(
    evaluator: Evaluator,
    strategy: Strategy,
    order: Order,
    codec: Codec,
    *,
    target_s: float | None = None,
) -> LossyResult:
    """Put a codec on the boundaries of an exact strategy that limit its step.

    Args:
        evaluator: Evaluator of the graph and cluster.
        strategy: An exact strategy.
        order: Order in which its tasks run.
        codec: The requested codec.
        target_s: Target for the step, with ``top_k``: reductions are the least that reach it.

    Raises:
        StrategyError: the strategy has codecs already, or a target was given for another codec.
    """
    if codec_rules(strategy):
        raise StrategyError("the strategy has codecs already; begin with an exact one.")
    if target_s is not None and codec.kind != CodecKind.TOP_K:
        raise StrategyError(f"{codec} has no reduction to choose for a target; only top_k has.")
    search = _Search(evaluator, strategy, order)
    halves = search.with_rules(search.rules(Codec(kind=CodecKind.FP16), len(search.boundaries)))
    misses = False
    if codec.kind != CodecKind.TOP_K:
        best = search.fewest(codec)
    elif target_s is None:
        reductions = adaptive_reductions(search.seconds or [1.0], codec.reduction)
        best = search.with_rules(search.sparse(codec, reductions))
    else:
        best, misses = search.to_target(codec, target_s)
    if best[0].preference >= search.exact.preference:
        best = search.exact, strategy
    return LossyResult(
        strategy=best[1],
        evaluation=best[0],
        exact=search.exact,
        halves=halves[0],
        num_boundaries=len(search.boundaries),
        misses_target=misses,
    )


class _Search:
    """Tries codecs on one strategy."""

    def __init__(self, evaluator: Evaluator, strategy: Strategy, order: Order) -> None:
        self._evaluator = evaluator
        self._strategy = strategy
        self._order = order
        if strategy.mode(Averaging) is not None:
            found = averaged_boundaries(evaluator, strategy)
        else:
            choice = evaluator.encode(strategy)._replace(num_steps=1)
            found = boundaries(evaluator, evaluator.program(choice), evaluator.tables_of(choice))
        # Rules without a message, such as rules for integers, would be refused.
        self.boundaries = [each for each in found if self._has_messages(each)]
        self.seconds = [each.seconds for each in self.boundaries]
        self.exact = evaluator.referee(strategy, order)

    def _has_messages(self, boundary: Boundary) -> bool:
        half = Codec(kind=CodecKind.FP16)
        rule = CodecRule(traffic=boundary.traffic, devices=boundary.devices, codec=half)
        coded = with_rules(self._strategy, (rule,))
        if coded.mode(Averaging) is not None:
            return any(each.rule for each in averaged_buckets(self._evaluator.graph, coded))
        try:
            choice = self._evaluator.encode(coded)._replace(num_steps=1)
            return bool(self._evaluator.program(choice).codec.any())
        except StrategyError:
            return False

    def with_rules(self, rules: tuple[CodecRule, ...]) -> Tried:
        """The strategy with some rules."""
        coded = with_rules(self._strategy, rules)
        return self._evaluator.referee(coded, self._order), coded

    def rules(self, codec: Codec, number: int) -> tuple[CodecRule, ...]:
        """Rules for one codec on the slowest boundaries."""
        return tuple(
            CodecRule(traffic=each.traffic, devices=each.devices, codec=codec)
            for each in self.boundaries[:number]
        )

    def sparse(self, codec: Codec, reductions: Sequence[float]) -> tuple[CodecRule, ...]:
        """Rules for ``top_k``; parameters stay exact, and boundaries with a reduction of 1."""
        rules = []
        for each, reduction in zip(self.boundaries, reductions, strict=False):
            if reduction <= 1.0 or each.traffic == Traffic.PARAMETERS:
                continue
            reduction *= each.num_gathered / 2.0
            own = replace(codec, reduction=min(reduction, MOST_REDUCTION))
            rules.append(CodecRule(traffic=each.traffic, devices=each.devices, codec=own))
        return tuple(rules)

    def fewest(self, codec: Codec) -> Tried:
        """The codec on the fewest boundaries that suffice for the best step."""
        every = len(self.boundaries)
        counts = {*(1 << power for power in range(every.bit_length())), every}
        tried = [self.with_rules(self.rules(codec, count)) for count in sorted(counts)]
        best = min(map(by_preference, tried))
        enough = best[0], best[1] * (1.0 + EQUALLY_FAST)
        return next(each for each in tried if by_preference(each) <= enough)

    def to_target(self, codec: Codec, target_s: float) -> tuple[Tried, bool]:
        """(strategy with the least reductions that reach a target, whether all miss it)."""
        is_reached = self.exact.step_time_s <= target_s
        if is_reached or not self.seconds:
            return (self.exact, self._strategy), not is_reached

        def at(tau_s: float) -> Tried:
            wanted = reductions_to(self.seconds, tau_s, codec.reduction)
            return self.with_rules(self.sparse(codec, wanted))

        low, high = max(self.seconds) / codec.reduction, max(self.seconds)
        best = at(low)
        if best[0].step_time_s > target_s:
            return best, True
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            tried = at(middle)
            if tried[0].is_ok and tried[0].step_time_s <= target_s:
                best, low = tried, middle
            else:
                high = middle
        return best, False


def with_codec(
    plan: Plan,
    evaluator: Evaluator,
    codec: Codec,
    *,
    target_s: float | None = None,
    rehearse: Rehearse | None = None,
) -> tuple[Plan, str]:
    """A plan with codecs, made from a plan without.

    Its method has the old name with ``+ CODEC (lossy)`` and a row of its own: wherever the method
    is named, readers see that training computes other numbers.

    Args:
        plan: A plan without codecs that is ``ok``, exact or with islands that average.
        evaluator: Evaluator of its graph and cluster.
        codec: The requested codec.
        target_s: Target for the step; see ``lossy_strategy``.
        rehearse: Function that runs the result on shapes.

    Returns:
        The plan, and a remark that compares both; the given plan if no codec makes it faster.

    Raises:
        StrategyError: the plan does not run, it has a server or a stash, or its step is too large
            to be written task by task.
    """
    _check_start(plan, codec)
    assert plan.step_time_s is not None
    is_reached = target_s is not None and plan.step_time_s <= target_s
    has_boundaries, faults, found = False, [], []
    starts = _starts(plan, codec)[: 1 if is_reached else MOST_STARTS]
    for row, candidate in starts if is_reached else [*starts, *_other_islands(evaluator, starts)]:
        result = lossy_strategy(
            evaluator, candidate.strategy, candidate.orders[0], codec, target_s=target_s
        )
        has_boundaries |= result.num_boundaries > 0
        if result.is_lossy and result.evaluation.step_time_s < plan.step_time_s:
            found.append((result, row, candidate.orders))
    found.sort(key=lambda each: (each[0].misses_target, each[0].evaluation.preference))
    for result, row, orders in found:
        candidate = Candidate(strategy=result.strategy, orders=orders)
        issued = issued_step(evaluator, result.strategy, orders[0])
        fault = "" if rehearse is None else rehearse(result.strategy, issued, lambda: None)
        if fault:
            faults.append(fault)
            continue
        coded = _row(row, candidate, result.evaluation, codec, is_rehearsed=bool(rehearse))
        if any(each.noisy_step_times_s for each in plan.rows):  # rows are compared draw by draw
            noisy = under_noise(evaluator, candidate.strategy, candidate.orders[0])
            coded = replace(coded, noisy_step_times_s=noisy)
        ends = evaluator.interval(result.evaluation.step_time_s, candidate.strategy)
        lossy = _with_row(plan, coded, issued, ends)
        return lossy, _remark(result, plan, row.method, codec, target_s)
    why = "slower" if has_boundaries else "nothing travels that codecs are for"
    if faults:
        why = f"it cannot be executed ({faults[0]})"
    beside = _beside(plan.strategy)
    rest = "The plan is exact" if beside is None else f"The plan has {beside.words}"
    return plan, f"{codec} is not used: {why}. {rest}"


def _check_start(plan: Plan, codec: Codec) -> None:
    """Refuse a plan that cannot have codecs."""
    beside = _beside(plan.strategy)
    if beside is not None and beside.key not in Codecs.goes_with:
        raise StrategyError(
            f"the plan has {beside.words}, where codecs are not planned; plan with a codec "
            "or with that, not both."
        )
    if plan.step_time_s is None:
        raise StrategyError(f"no exact plan fits to put {codec} on: {plan.shortage}")
    plan.require_written()


def _starts(plan: Plan, codec: Codec) -> list[tuple[MethodRow, Candidate]]:
    """Distinct strategies that may win with a codec; the plan's own first."""
    assert plan.step_time_s is not None
    # No message is shortened by more than this factor, and compute stays, so a step gains less.
    most = {CodecKind.FP16: 2.0, CodecKind.INT8: 4.0}.get(codec.kind, codec.reduction)
    own = Candidate(strategy=plan.strategy, orders=(Order[plan.order.upper()],))
    found = {plan.strategy: (next(row for row in plan.rows if row.method == plan.method), own)}
    for row in sorted(plan.rows, key=lambda row: row.preference):
        strategy = None if row.candidate is None else row.candidate.strategy
        if (
            strategy is not None
            and row.outcome == "ok"
            and {mode.key for mode in strategy.modes} <= set(Codecs.goes_with)
            and (row.step_time_s or 0.0) < most * plan.step_time_s
        ):
            order = Order[row.order.upper()]
            found.setdefault(strategy, (row, Candidate(strategy=strategy, orders=(order,))))
    return list(found.values())


def _other_islands(
    evaluator: Evaluator, starts: Sequence[tuple[MethodRow, Candidate]]
) -> Iterator[tuple[MethodRow, Candidate]]:
    """The first averaging strategy on other islands, of devices and of hosts.

    All islands gather each other's messages, so fewer islands may be best with a codec.
    """
    averaged = [
        (row, averaging)
        for row, candidate in starts
        if (averaging := candidate.strategy.mode(Averaging)) is not None
    ]
    known = {candidate.strategy for _, candidate in starts}
    for row, averaging in averaged[:1]:
        for decision in island_decisions(evaluator):
            strategy = uniform_strategy(evaluator, decision).with_mode(averaging)
            if strategy not in known:
                yield row, Candidate(strategy=strategy, orders=(Order.FIFO,))


def _with_row(plan: Plan, row: MethodRow, issued: IssuedStep, interval_s: Interval) -> Plan:
    """The plan with a further row, whose strategy it now runs."""
    assert row.candidate is not None
    return replace(
        plan,
        strategy=row.candidate.strategy,
        order=row.order,
        task_order=issued.task_order,
        sent_before=issued.sent_before,
        program_hash=issued.program.hash,
        step_time_s=row.step_time_s,
        peak_memory_bytes=row.peak_memory_bytes,
        method=row.method,
        rows=(*plan.rows, row),
        interval_s=interval_s,
    )


def _row(
    exact: MethodRow,
    candidate: Candidate,
    evaluation: Evaluation,
    codec: Codec,
    *,
    is_rehearsed: bool,
) -> MethodRow:
    beside = _beside(candidate.strategy)
    words = [] if beside is None else [f"not exact: {beside.words}"]
    return replace(
        exact,
        method=f"{exact.method} + {codec} (lossy)",
        order=candidate.orders[0].name.lower(),
        step_time_s=evaluation.step_time_s,
        peak_memory_bytes=evaluation.peak_memory_bytes,
        candidate=candidate,
        is_rehearsed=is_rehearsed,
        note="; ".join([*words, _NOTE]),
    )


def _beside(strategy: Strategy) -> Mode | None:
    """A strategy's other mode beside codecs, if any."""
    return next((mode for mode in strategy.modes if mode.key != Codecs.key), None)


def _remark(
    found: LossyResult, plan: Plan, start: str, codec: Codec, target_s: float | None
) -> str:
    """A remark that compares the result with the exact plan."""
    step = found.evaluation.step_time_s
    assert plan.step_time_s is not None
    without = "exact" if _beside(plan.strategy) is None else "uncompressed"
    text = (
        f"LOSSY, trains with other numbers: {codec} on {len(codec_rules(found.strategy))} of "
        f"{found.num_boundaries} boundaries of {start}; {plan.step_time_s / step:.2f}x the "
        f"{without} {plan.method}, {found.halves.step_time_s / step:.2f}x {start} with fp16"
    )
    if found.misses_target:
        text += f"; the target of {target_s:g} s is not reached"
    return text
