"""Simulates the step after one purchase, with idle devices, or after a change that makes it fit.

Both sides of every comparison are planned in the same way, with the same small budget. The
candidates are the plan's own strategy where it is legal, the strategy with the new device in its
ranges, and the quick methods ``tuned_uniform`` and ``two_segment`` (and ``model_parallel`` or
``pipeline`` if the plan is of that kind); the referee judges. A purchase need not be used, so a
longer step counts as no saving.

Changes that make a strategy fit are simulated, too; none is guessed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from heterog.explain.changed_cluster import (
    ChangedCluster,
    ChangeKind,
    possible_changes,
    strategies_with,
)
from heterog.graph.axis_plan import axis_plan
from heterog.lowering import encode
from heterog.methods.changes import renumbered
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Budget, Problem, Progress, Spending
from heterog.methods.recomputing import kinds_worth_trying
from heterog.methods.registry import built_in_methods
from heterog.methods.tuned_uniform import machine_subsets, tuned_decision
from heterog.pricing.calibration import model_on
from heterog.search.rows import TUNED_UNIFORM
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator
from heterog.simulator.memory_breakdown import Fit
from heterog.strategy.division import micro_batch_table, split_evenly, split_in_proportion
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Keeps, Strategy

EVALUATIONS = 200
"""Approximate number of simulations for each side of a comparison."""

_MOST_JUDGED = 4
"""Number of strategies of each kind that the referee judges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The value of one change of the cluster.

    Attributes:
        kind: Kind of purchase.
        what: The purchase in words.
        where: Its place in words.
        before_s: Shortest step found on the cluster as it is; ``None`` if nothing fits.
        after_s: Shortest step found with the change, at most ``before_s``; ``None`` if nothing
            fits.
        method: Method that found it: ``"own"`` is the plan's strategy, adapted or not.
        num_evaluations: Number of simulations spent on it.
    """

    kind: ChangeKind
    what: str
    where: str
    before_s: float | None
    after_s: float | None
    method: str
    num_evaluations: int

    @property
    def saving(self) -> float:
        """Part of the step that the change saves; 1 if nothing fits without it."""
        if self.after_s is None:
            return 0.0
        return 1.0 if self.before_s is None else 1.0 - self.after_s / self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The best that quick methods and given strategies reach on a cluster.

    Attributes:
        step_time_s: Seconds per step by the referee; ``None`` if nothing fits.
        method: Method that found it.
        num_evaluations: Number of simulations spent.
    """

    step_time_s: float | None
    method: str
    num_evaluations: int


def value_of_changes(
    evaluator: Evaluator,
    strategy: Strategy,
    order: Order,
    *,
    peaks_bytes: Sequence[Sequence[int]] = (),
    evaluations: int = EVALUATIONS,
    progress: Progress = lambda method, fraction, best: None,
    spending: Spending | None = None,
) -> tuple[Change, ...]:
    """Savings by every possible change of the cluster, most first.

    Args:
        evaluator: Evaluator of the graph and the cluster as it is.
        strategy: The best strategy known for it.
        order: Order in which its waiting tasks run.
        peaks_bytes: Peaks of each device under the strategies that were looked at: memory is
            offered where it limits one of them.
        evaluations: Approximate number of simulations for each change.
        progress: Function that gets the progress at every change.
        spending: Limit of all simulations together; changes not reached within it are left out.
    """
    changes = list(possible_changes(evaluator.cluster, peaks_bytes))
    progress("what if", 0.0, math.inf)
    found = []
    with spending.limits() if spending is not None else nullcontext():
        before = replan(evaluator, [strategy], order, evaluations=evaluations)
        for number, change in enumerate(changes):
            progress(f"what if: {change.what}", (number + 1) / (len(changes) + 1), math.inf)
            found.append(_value(evaluator, strategy, order, before, change, evaluations))
    return tuple(
        sorted(found, key=lambda each: (-each.saving, each.after_s or math.inf, each.what))
    )


def _value(
    evaluator: Evaluator,
    strategy: Strategy,
    order: Order,
    before: Replanned,
    change: ChangedCluster,
    evaluations: int,
) -> Change:
    # A model knows whether it is on one device only.
    model = model_on(evaluator.cost_model, change.cluster)
    changed = Evaluator(evaluator.graph, change.cluster, model)
    changed.poll = evaluator.poll
    own = [renumbered(strategy, range(evaluator.cluster.num_devices), change.cluster)]
    if change.kind == ChangeKind.DEVICE:
        new = (change.cluster.num_devices - 1,)
        own += strategies_with(strategy, changed, new, changed.speeds)
    after = replan(changed, own, order, evaluations=evaluations)
    seconds, method = after.step_time_s, after.method
    if before.step_time_s is not None and (seconds is None or seconds > before.step_time_s):
        seconds, method = before.step_time_s, before.method
    return Change(
        kind=change.kind,
        what=change.what,
        where=change.where,
        before_s=before.step_time_s,
        after_s=seconds,
        method=method,
        num_evaluations=after.num_evaluations,
    )


def with_idle_devices(
    evaluator: Evaluator, strategy: Strategy, order: Order, devices: Sequence[int]
) -> Evaluation | None:
    """The best step found in which idle devices take part; see ``strategies_with``."""
    joined = strategies_with(strategy, evaluator, devices, evaluator.speeds)
    pairs = _ranked(evaluator, joined, order)
    return _best(evaluator, pairs) if pairs else None


def replan(
    evaluator: Evaluator, own: Iterable[Strategy], order: Order, *, evaluations: int = EVALUATIONS
) -> Replanned:
    """The best of some strategies and of the quick methods' results; deterministic.

    Args:
        evaluator: Evaluator of the graph and cluster.
        own: Known strategies, first that of the plan.
        order: Order in which the plan's waiting tasks run.
        evaluations: Approximate number of simulations.
    """
    known = list(own)
    counted = evaluator.num_evaluations
    barrier = known[0].step_barrier
    judged: dict[str, Evaluation] = {}
    # The plan's own strategy is always judged, the others only if they look good.
    first = [(known[0], each) for each in Order]
    judged["own"] = _best(evaluator, first + _ranked(evaluator, known[1:], order))
    tuned = _ranked(evaluator, _tuned(evaluator, evaluations // 4, barrier), Order.RANK)
    judged[TUNED_UNIFORM] = _best(evaluator, tuned)
    methods = ["two_segment"]
    if all(len(decision.devices) == 1 for decision in known[0].decisions):
        methods.append("model_parallel")
    elif known[0].num_micro_batches > 1:
        methods.append("pipeline")
    for method in methods:
        problem = Problem(
            evaluator=evaluator,
            budget=Budget(evaluations=max(evaluations // (2 * len(methods)), 1)),
            step_barrier=barrier,
        )
        candidates = built_in_methods()[method].plan(problem).candidates[:_MOST_JUDGED]
        pairs = [(each.strategy, order) for each in candidates for order in each.orders]
        if pairs:
            judged[method] = _best(evaluator, pairs)
    method = min(judged, key=lambda name: judged[name].preference)
    best = judged[method]
    return Replanned(
        step_time_s=best.step_time_s if best.is_ok else None,
        method=method,
        num_evaluations=evaluator.num_evaluations - counted,
    )


def _tuned(evaluator: Evaluator, most: int, step_barrier: bool) -> list[Strategy]:
    """Tuned data parallelism on the largest subsets of machines."""
    speeds = evaluator.speeds
    return [
        uniform_strategy(
            evaluator,
            tuned_decision(evaluator, devices, speeds),
            bucket_bytes=bucket_bytes,
            step_barrier=step_barrier,
        )
        for devices in machine_subsets(evaluator.cluster)[: max(most // 2, 1)]
        for bucket_bytes in (0, DEFAULT_BUCKET_BYTES)
    ]


def _ranked(
    evaluator: Evaluator, strategies: Iterable[Strategy], order: Order
) -> list[tuple[Strategy, Order]]:
    """The most promising strategies by the fast engine, to be judged in every order."""
    tried = sorted(strategies, key=lambda each: evaluator.evaluate(each, order).preference)
    return [(each, other) for each in tried[:_MOST_JUDGED] for other in Order]


def _best(evaluator: Evaluator, pairs: Iterable[tuple[Strategy, Order]]) -> Evaluation:
    judged = (evaluator.referee(strategy, order) for strategy, order in pairs)
    return min(judged, key=lambda evaluation: evaluation.preference)


class RemedyKind(StrEnum):
    """The kind of change that makes a strategy fit."""

    RECOMPUTE = "recompute"
    MICRO_BATCHES = "micro_batches"
    BATCH_SIZE = "batch_size"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change after which the strategy fits.

    Attributes:
        kind: Kind of change.
        amount: The groups that recompute their activations (all of them), the smallest number of
            micro-batches found, the largest global batch found, or the usable bytes that every
            device of a type must have.
        device_type: For memory, the type's name.
        keeps: For recomputation, what is not made again: the quickest kind that fits.
        step_time_s: Seconds per step with the change; ``None`` for memory, which changes nothing.
    """

    kind: RemedyKind
    amount: int
    device_type: str = ""
    keeps: Keeps = Keeps.NOTHING
    step_time_s: float | None = None


def remedies(
    evaluator: Evaluator,
    strategy: Strategy,
    order: Order,
    fit: Fit,
    spending: Spending | None = None,
) -> tuple[Remedy, ...]:
    """Every change that makes a strategy fit; none if it fits already.

    Micro-batches and batch sizes are found by doubling and bisection, which assumes that more
    micro-batches or fewer samples never need more memory; the results were simulated and fit.

    Args:
        evaluator: Evaluator of the graph and cluster.
        strategy: Strategy for them.
        order: Order in which waiting tasks run.
        fit: Its memory, by ``memory_fit``.
        spending: Limit of the simulations; what is not found in time is left out.
    """
    if fit.is_ok:
        return ()
    found: list[Remedy | None] = []
    with spending.limits() if spending is not None else nullcontext():
        for change in (_recompute, _micro_batches, _batch_size):
            found.append(change(evaluator, strategy, order))
    return tuple(remedy for remedy in (*found, *_memory(fit)) if remedy is not None)


def _recompute(evaluator: Evaluator, strategy: Strategy, order: Order) -> Remedy | None:
    """The quickest remedy that recomputes every group, if one helps.

    A kind that recomputes less also frees less: the search ends at the first that does not fit.
    """
    found: list[Remedy] = []
    for keeps in reversed(kinds_worth_trying(evaluator.graph)):
        again = tuple(replace(each, recompute=True, keeps=keeps) for each in strategy.decisions)
        tried = evaluator.referee(replace(strategy, decisions=again), order)
        if not tried.is_ok:
            break
        found.append(
            Remedy(
                kind=RemedyKind.RECOMPUTE,
                amount=len(strategy.decisions),
                keeps=keeps,
                step_time_s=tried.step_time_s,
            )
        )
    return min(found, key=lambda remedy: remedy.step_time_s or math.inf, default=None)


def _judged(
    evaluator: Evaluator, strategy: Strategy, order: Order, batch_size: int, num_micro: int
) -> Evaluation:
    """The evaluation of a part of the batch, in the same proportions and even micro-batches.

    The graph is still that of the whole batch: costs that depend on the samples of a device
    shrink with them, all others stay.
    """
    sizes = split_evenly(batch_size, num_micro)
    changed = replace(
        strategy,
        decisions=tuple(
            replace(each, shares=split_in_proportion(batch_size, tuple(map(float, each.shares))))
            for each in strategy.decisions
        ),
        micro_batches=micro_batch_table(sizes, evaluator.cluster.num_devices),
        schedule=strategy.schedule
        if num_micro == strategy.num_micro_batches
        else replace(strategy.schedule, turns=()),  # turns belong to a number of micro-batches
    )
    given = evaluator.encode(strategy)
    # Lowering divides the tables' batch in proportion, so they get this batch size.
    tables = evaluator.tables_of(given)._replace(batch_size=batch_size)
    choice = encode(changed, tables, evaluator.channels, num_steps=given.num_steps)
    return evaluator.referee(choice._replace(rule_set=given.rule_set), order)


def _micro_batches(evaluator: Evaluator, strategy: Strategy, order: Order) -> Remedy | None:
    """The smallest number of micro-batches that fits, if there may be any."""
    graph, rules = evaluator.graph, strategy.op_rules
    if rules and axis_plan(graph, rules).crossing is not None:
        return None  # an op has no meaning on a part of the batch
    cut = partial(_judged, evaluator, strategy, order, graph.batch_size)
    low = high = strategy.num_micro_batches
    found: Evaluation | None = None
    while found is None and high < graph.batch_size:
        low, high = high, min(2 * high, graph.batch_size)
        tried = cut(high)
        found = tried if tried.is_ok else None
    if found is None:
        return None
    amount, found = _bisect(low, high, found, cut)
    return Remedy(kind=RemedyKind.MICRO_BATCHES, amount=amount, step_time_s=found.step_time_s)


def _batch_size(evaluator: Evaluator, strategy: Strategy, order: Order) -> Remedy | None:
    """The largest batch that fits, of at least a sample a device if the batch has that many."""

    def shrunk(batch_size: int) -> Evaluation:
        num_micro = min(strategy.num_micro_batches, batch_size)
        return _judged(evaluator, strategy, order, batch_size, num_micro)

    whole, num_devices = evaluator.graph.batch_size, evaluator.cluster.num_devices
    fewest = num_devices if num_devices < whole else 1
    smallest = shrunk(fewest)
    if not smallest.is_ok:
        return None
    amount, found = _bisect(whole, fewest, smallest, shrunk)
    return Remedy(kind=RemedyKind.BATCH_SIZE, amount=amount, step_time_s=found.step_time_s)


def _bisect(
    bad: int, good: int, found: Evaluation, evaluate: Callable[[int], Evaluation]
) -> tuple[int, Evaluation]:
    """The amount nearest to ``bad`` that fits, and its evaluation; ``good`` is known to fit."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        tried = evaluate(middle)
        if tried.is_ok:
            good, found = middle, tried
        else:
            bad = middle
    return good, found


def _memory(fit: Fit) -> Iterator[Remedy]:
    """Memory needed by each type that lacks some; the need does not depend on sizes."""
    for name in dict.fromkeys(d.device_type for d in fit.devices if d.lacking_bytes > 0):
        needs = max(d.peak_bytes for d in fit.devices if d.device_type == name)
        yield Remedy(kind=RemedyKind.MEMORY, amount=needs, device_type=name)
