"""Simulated steps after one purchase, or if idle devices took part.

Both sides of every comparison are planned in the same way: the plan's own strategy where it is
legal, the strategy with the new device in its ranges, and the quick methods ``tuned_uniform`` and
``two_segment`` (and ``model_parallel`` or ``pipeline`` if the plan is of that kind), with the same
small budget; the referee judges. A change is never worse than none, because a purchase need not be
used, so a step that comes out longer counts as no saving.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from heterog.explain.changed_cluster import (
    ChangedCluster,
    ChangeKind,
    moved,
    possible_changes,
    strategies_with,
)
from heterog.methods.data_parallel import device_speeds, uniform_strategy
from heterog.methods.planner import Budget, Problem, Progress, Spending
from heterog.methods.registry import built_in_methods
from heterog.methods.tuned_uniform import machine_subsets, tuned_decision
from heterog.search.stability import TUNED_UNIFORM
from heterog.simulator.engine import Order
from heterog.simulator.evaluation import Evaluation
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Strategy

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
    changed = Evaluator(evaluator.graph, change.cluster, evaluator.cost_model)
    changed.poll = evaluator.poll
    own = [moved(strategy, change.cluster)]
    if change.kind == ChangeKind.DEVICE:
        new = (change.cluster.num_devices - 1,)
        own += strategies_with(strategy, changed, new, device_speeds(changed))
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
    joined = strategies_with(strategy, evaluator, devices, device_speeds(evaluator))
    judged = _referee(evaluator, _ranked(evaluator, joined, order))
    return _best(judged) if judged else None


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
    judged["own"] = _best(_referee(evaluator, first + _ranked(evaluator, known[1:], order)))
    tuned = _ranked(evaluator, _tuned(evaluator, evaluations // 4, barrier), Order.RANK)
    judged[TUNED_UNIFORM] = _best(_referee(evaluator, tuned))
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
            judged[method] = _best(_referee(evaluator, pairs))
    method = min(judged, key=lambda name: judged[name].preference)
    best = judged[method]
    return Replanned(
        step_time_s=best.step_time_s if best.is_ok else None,
        method=method,
        num_evaluations=evaluator.num_evaluations - counted,
    )


def _tuned(evaluator: Evaluator, most: int, step_barrier: bool) -> list[Strategy]:
    """Tuned data parallelism on the largest subsets of machines."""
    speeds = device_speeds(evaluator)
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
    tried = [(evaluator.evaluate(each, order).preference, each) for each in strategies]
    tried.sort(key=lambda pair: pair[0])
    return [(each, other) for _, each in tried[:_MOST_JUDGED] for other in Order]


def _referee(evaluator: Evaluator, pairs: Iterable[tuple[Strategy, Order]]) -> list[Evaluation]:
    return [evaluator.referee(strategy, order) for strategy, order in pairs]


def _best(evaluations: Sequence[Evaluation]) -> Evaluation:
    return min(evaluations, key=lambda evaluation: evaluation.preference)
