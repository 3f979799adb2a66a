"""An explanation of a plan: what it decides, what limits it, how good it is, what would help.

Every sentence follows from a simulated fact, and the facts are included for JSON and for reports.
``sentences`` turns facts into words; this module finds the facts.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from heterog.explain import sentences
from heterog.explain.decided import Decided, what_was_decided
from heterog.explain.differences import Difference, differences
from heterog.explain.what_if import (
    EVALUATIONS,
    Change,
    Remedy,
    remedies,
    value_of_changes,
    with_idle_devices,
)
from heterog.grouped import grouped
from heterog.methods.planner import ENDLESS, Budget, Problem, Progress, Spending, Stop
from heterog.methods.registry import built_in_methods
from heterog.search.judging import run_method
from heterog.search.plan import Plan
from heterog.search.request import GIVEN
from heterog.search.rows import DATA_PARALLEL, REFERENCES, Gain, MethodRow, fastest, reference_of
from heterog.simulator.critical_path import PathPiece, critical_pieces, totals
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.lower_bound import LowerBound, lower_bound_s
from heterog.simulator.memory_breakdown import Fit, memory_fit
from heterog.simulator.timeline import Cause, Timeline

SUFFICES = 0.01
"""Part by which data parallelism that suffices may take longer than the best."""

_MANY_TASKS = 20_000
"""Tasks of a program beyond which each change gets fewer simulations."""


_SAME_BOUND = 1e-6
"""Relative difference of a bound that rounding in a plan's file can explain."""
_BASELINES_PART = 0.5
"""Part of an explanation's seconds for baselines that have no row in the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Devices without work, and the step time if they get some.

    Attributes:
        devices: Indices of the devices.
        step_time_s: Shortest step found in which they take part; ``None`` if none fits.
    """

    devices: tuple[int, ...]
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Collectives on the critical path that were ready before their communicator was free.

    Attributes:
        devices: Devices of the communicator, which runs one operation at a time.
        num_collectives: Number of collectives per step that waited for another one.
        seconds: Seconds of the path that are spent in these collectives.
    """

    devices: tuple[int, ...]
    num_collectives: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The plan compared with methods that people would use without it.

    Attributes:
        data_parallel: Name of the best method of data parallelism, ``""`` if none fits: the
            reference of gains, or plain data parallelism if that suffices.
        data_parallel_s: Its seconds per step.
        suffices: Whether data parallelism as people run it is within 1 % of the best known.
    """

    data_parallel: str
    data_parallel_s: float | None
    suffices: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFacts:
    """The person's own layout compared with the plan.

    Attributes:
        said: Description of the layout, and of anything that could not be carried over exactly.
        outcome: Whether it fits and runs.
        step_time_s: Its seconds per step, ``None`` unless ``ok``.
        shortage: Reason why it is not ``ok``.
        gain: Speed-up of the plan over it; ``None`` unless both run.
        differences: What the plan does differently; empty if the plan was loaded from a file, or
            is the layout itself.
    """

    said: str
    outcome: str
    step_time_s: float | None
    shortage: str
    gain: Gain | None
    differences: tuple[Difference, ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan in words, and the facts behind them.

    Attributes:
        paragraphs: Plain English, one subject each.
        recommendation: Advice in one or two sentences.
        plan: The plan that is explained.
        step_time_s: Seconds per step, also if it does not fit into memory.
        decided: Decisions of the strategy.
        left_out: Devices without work, host by host.
        pieces: The critical path by place, purpose and module, the longest first; the seconds add
            up to ``step_time_s``.
        queued: Collectives on the critical path that waited for their communicator, by
            communicator, the most seconds first.
        busy: Part of the step in which each device computes.
        bound: Lower bound of the plan, which no strategy can beat.
        quality: The plan compared with data parallelism.
        fit: Memory of every device.
        remedies: Changes that make it fit, if it does not.
        changes: Savings by each possible purchase, most first; empty if not asked for.
        given: The person's own layout, if one was given.
    """

    paragraphs: tuple[str, ...]
    recommendation: str
    plan: Plan
    step_time_s: float
    decided: Decided
    left_out: tuple[LeftOut, ...]
    pieces: tuple[PathPiece, ...]
    queued: tuple[Queued, ...]
    busy: tuple[float, ...]
    bound: LowerBound
    quality: Quality
    fit: Fit
    remedies: tuple[Remedy, ...]
    changes: tuple[Change, ...]
    given: GivenFacts | None = None

    @property
    def bound_s(self) -> float:
        """The bound that holds for this plan: without a step barrier, only that of compute."""
        return self.bound.seconds if self.decided.step_barrier else self.bound.compute_s

    @property
    def left_to_gain(self) -> float:
        """Largest part of the step that any plan could still save."""
        return max(1.0 - self.bound_s / self.step_time_s, 0.0)

    @property
    def quickly_found_s(self) -> float | None:
        """Step time of a quick search on the same cluster, if it is shorter by 1 % or more."""
        before = self.changes[0].before_s if self.changes else None
        is_shorter = before is not None and before < self.step_time_s * (1.0 - SUFFICES)
        return before if is_shorter and self.fit.is_ok else None

    @property
    def faster_reference_s(self) -> float | None:
        """Step time of tuned data parallelism, if nobody asked for it and it is shorter by 1 %."""
        reference_s = self.quality.data_parallel_s
        if any(row.method == self.quality.data_parallel for row in self.plan.rows):
            return None  # something else than the nominal time decided
        is_shorter = reference_s is not None and reference_s < self.step_time_s * (1.0 - SUFFICES)
        return reference_s if is_shorter else None

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the words and the facts, without the plan."""
        return {
            "paragraphs": list(self.paragraphs),
            "recommendation": self.recommendation,
            "step_time_s": self.step_time_s,
            "decided": asdict(self.decided),
            "left_out": [asdict(each) for each in self.left_out],
            "critical_path": [asdict(piece) for piece in self.pieces],
            "queued": [asdict(each) for each in self.queued],
            "busy": list(self.busy),
            "lower_bound": asdict(self.bound) | {"left_to_gain": self.left_to_gain},
            "quality": asdict(self.quality),
            "memory": [
                asdict(device)
                | {"parts": dict(device.parts), "lacking_bytes": device.lacking_bytes}
                for device in self.fit.devices
            ],
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "changes": [asdict(each) | {"saving": each.saving} for each in self.changes],
            "given": None if self.given is None else asdict(self.given),
        }


def explain(
    plan: Plan,
    evaluator: Evaluator | None = None,
    *,
    changes: bool = True,
    evaluations: int = EVALUATIONS,
    progress: Progress = lambda method, fraction, best: None,
    stop: Stop | None = None,
    seconds: float | None = None,
) -> Explanation:
    """Explain a plan.

    The same plan gives the same explanation. With ``changes`` it takes some seconds for a large
    model on 8 devices, otherwise well under one.

    Args:
        plan: Plan, made or loaded.
        evaluator: Evaluator of the plan's graph and cluster; made anew if ``None``.
        changes: Whether to simulate savings by purchases.
        evaluations: Approximate number of simulations for each change.
        progress: Function that gets the progress.
        stop: Switch; once it is set, savings by purchases are left out.
        seconds: Time that idle devices, remedies, baselines without rows in the plan, and
            simulations of purchases may take together; unlimited if ``None``. Whatever is not
            reached in time is left out.

    Raises:
        StrategyError: the plan's step has too many tasks; see ``Plan.is_written``.
    """
    plan.require_written()
    evaluator = evaluator or Evaluator(plan.graph, plan.cluster)
    limit = ENDLESS if seconds is None else Budget(seconds=seconds)
    spending = Spending(limit, evaluator, stop=stop)
    progress("explain", 0.0, math.inf)
    order = Order[plan.order.upper()]
    choice = evaluator.encode(plan.strategy)
    evaluation = evaluator.referee(choice, order)
    program, start, finish = evaluator.referee_timings(choice, order)
    timeline = Timeline(program, start, finish, plan.cluster, plan.graph)
    decided = what_was_decided(plan.strategy, plan.graph, plan.cluster)
    fit = memory_fit(evaluator, choice, order)
    rows = _with_baselines(plan, evaluator, stop, seconds)
    bought: tuple[Change, ...] = ()
    if changes:
        bought = value_of_changes(
            evaluator,
            plan.strategy,
            order,
            peaks_bytes=[
                evaluation.peak_memory_bytes,
                *(  # a model too large for one device is no news
                    row.peak_memory_bytes
                    for row in rows
                    if np.count_nonzero(row.peak_memory_bytes) > 1
                ),
            ],
            evaluations=max(int(evaluations * min(_MANY_TASKS / program.num_tasks, 1.0)), 10),
            progress=progress,
            spending=spending,
        )
    found_s = [evaluation.step_time_s] if evaluation.is_ok else []
    found_s += [each.before_s for each in bought if each.before_s is not None]
    facts = Explanation(
        paragraphs=(),
        recommendation="",
        plan=plan,
        step_time_s=evaluation.step_time_s,
        decided=decided,
        left_out=_left_out(plan, evaluator, decided, order, spending),
        pieces=tuple(
            replace(piece, seconds=piece.seconds / program.num_steps)
            for piece in totals(critical_pieces(timeline, evaluator.cost_model))
        ),
        queued=_queued(timeline),
        busy=tuple((timeline.busy_s / timeline.seconds).tolist()),
        bound=_bound_of(plan, evaluator),
        quality=_quality(rows, min(found_s, default=0.0)),
        fit=fit,
        remedies=remedies(evaluator, plan.strategy, order, fit, spending),
        changes=bought,
        given=_given(plan),
    )
    progress("explain", 1.0, evaluation.step_time_s)
    return replace(
        facts,
        paragraphs=sentences.paragraphs(facts),
        recommendation=sentences.recommendation(facts),
    )


def _bound_of(plan: Plan, evaluator: Evaluator) -> LowerBound:
    """The bound in the plan: it includes rules of single ops if a method used some."""
    bound = lower_bound_s(plan.graph, plan.cluster, evaluator.cost_model, with_op_rules=True)
    is_same = math.isclose(bound.seconds, plan.lower_bound_s, rel_tol=_SAME_BOUND)
    if is_same or plan.strategy.op_rules:
        return bound
    return lower_bound_s(plan.graph, plan.cluster, evaluator.cost_model)


def _given(plan: Plan) -> GivenFacts | None:
    """The row of the person's own layout, and how the plan differs from it."""
    row = next((row for row in plan.rows if row.method == GIVEN), None)
    if row is None:
        return None
    own = row.candidate.strategy if row.candidate is not None else plan.strategy
    return GivenFacts(
        said=row.note,
        outcome=row.outcome,
        step_time_s=row.step_time_s,
        shortage=row.shortage,
        gain=plan.gain_over_given,
        differences=differences(own, plan.strategy, plan.graph, plan.cluster),
    )


def _queued(timeline: Timeline) -> tuple[Queued, ...]:
    """Collectives of the critical path that waited for their communicator, per step."""
    program = timeline.program
    found = grouped(
        (program.channels[int(program.channel[step.task])].devices, step.seconds)
        for step in timeline.critical_path
        if step.cause == Cause.COMMUNICATOR
    )
    queued = [
        Queued(
            devices=devices,
            num_collectives=len(seconds) / program.num_steps,
            seconds=sum(seconds) / program.num_steps,
        )
        for devices, seconds in found.items()
    ]
    return tuple(sorted(queued, key=lambda each: -each.seconds))


def _with_baselines(
    plan: Plan, evaluator: Evaluator, stop: Stop | None, seconds: float | None
) -> list[MethodRow]:
    """The plan's rows and those of baselines that it lacks, as far as time allows."""
    known = {row.method for row in plan.rows}
    problem = Problem(
        evaluator=evaluator,
        budget=Budget(evaluations=EVALUATIONS),
        seed=plan.seed,
        step_barrier=plan.strategy.step_barrier,
        stop=stop or Stop(),
    )
    missing = [name for name in (*DATA_PARALLEL, *REFERENCES) if name not in known]
    if seconds is not None and missing:
        problem = replace(problem, budget=Budget(seconds=_BASELINES_PART * seconds / len(missing)))
    return [*plan.rows, *(run_method(built_in_methods()[name], problem) for name in missing)]


def _left_out(
    plan: Plan, evaluator: Evaluator, decided: Decided, order: Order, spending: Spending
) -> tuple[LeftOut, ...]:
    """Idle devices host by host, simulated once for like hosts, as far as time allows."""
    cluster = plan.cluster
    found = []
    known: dict[tuple[int, int], float | None] = {}
    with spending.limits():
        for host in range(cluster.num_hosts):
            idle = tuple(d for d in cluster.host_devices[host] if d in decided.idle)
            if not idle:
                continue
            key = cluster.host_kind[host], len(idle)
            if key not in known:
                best = with_idle_devices(evaluator, plan.strategy, order, idle)
                known[key] = best.step_time_s if best is not None and best.is_ok else None
            found.append(LeftOut(devices=idle, step_time_s=known[key]))
    return tuple(found)


def _quality(rows: Sequence[MethodRow], best_s: float) -> Quality:
    """Data parallelism compared with the shortest step known, which is 0 if nothing fits."""
    plain = fastest([row for row in rows if row.method in DATA_PARALLEL])
    plain_s = math.inf if plain is None else plain.step_time_s or math.inf
    suffices = plain_s <= best_s * (1.0 + SUFFICES)
    best = plain if suffices else reference_of(rows)
    return Quality(
        data_parallel="" if best is None else best.method,
        data_parallel_s=None if best is None else best.step_time_s,
        suffices=suffices,
    )
