"""Runs methods side by side on one graph and cluster; ``auto`` is the portfolio of all of them.

Every method is judged in the same way: the referee re-scores each of its candidates, a baseline's
in the orders of its definition, a search's in all orders that are allowed, and the best counts.
Searches are given the strategies that earlier methods found, to start from (``local_search``
does). ``auto`` looks at all rows, the baselines' too, so it is never worse than any of them by the
referee.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import heterog.planners.data_parallel
import heterog.planners.deeppool
import heterog.planners.hap
import heterog.planners.model_parallel
import heterog.planners.pipeline
import heterog.planners.poplar
import heterog.planners.tuned_uniform
import heterog.planners.two_segment

# isort: split
# Registered last: it starts from what all others have found.
import heterog.planners.local_search  # noqa: F401
from heterog.errors import StrategyError
from heterog.planners.issue_order import Rehearse, issued_step
from heterog.planners.planner import (
    Budget,
    Candidate,
    MethodRow,
    Planner,
    Task,
    planner_by_name,
    planners,
)
from heterog.planners.stability import TUNED_UNIFORM, best_data_parallel
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator, Outcome
from heterog.simulator.noise import draw_noise
from heterog.strategy.strategy import Strategy

AUTO = "auto"
NUM_DRAWS = 20
"""Draws of noise that every method's best strategy goes through."""
EQUALLY_GOOD = 0.005
"""Relative difference of two step times that no simulator can vouch for."""
MOST_COMPARED = 3
"""Candidates of one search that go through the draws."""
Progress = Callable[[str, float, float], None]
"""Called with (method, fraction of its budget spent, best seconds so far)."""


def run_methods(
    evaluator: Evaluator,
    methods: Sequence[str],
    *,
    budget: Budget,
    seed: int = 0,
    step_barrier: bool = True,
    orders: tuple[Order, ...] = tuple(Order),
    without: Collection[str] = (),
    progress: Progress = lambda method, fraction, best: None,
) -> list[MethodRow]:
    """Run methods and judge them by the referee.

    Args:
        evaluator: of the graph and cluster.
        methods: names; ``auto`` means all.
        budget: of each method that searches; ``auto`` divides it among its searches.
        seed: of everything random.
        step_barrier: whether a step ends with all updates.
        orders: orders that searching methods may choose from.
        without: names that ``auto`` leaves out.
        progress: told about every method's progress.

    Returns:
        One row per method, in the order they ran: baselines first.

    Raises:
        UnknownNameError: a method does not exist.
    """
    chosen = [planner for planner in _chosen(methods) if planner.name not in without]
    searches_left = sum(planner.stage != "baseline" for planner in chosen)
    task = Task(
        evaluator=evaluator, budget=budget, seed=seed, step_barrier=step_barrier, orders=orders
    )
    progress("compile kernels", 0.0, math.inf)
    evaluator.warm_up()
    rows: list[MethodRow] = []
    seeds: list[Candidate] = []
    searching = any(planner.stage != "baseline" for planner in chosen)
    for planner in planners():
        wanted = planner in chosen
        if not wanted and (planner.stage != "baseline" or not searching):
            continue
        progress(planner.name, 0.0, math.inf)
        if AUTO in methods and planner.stage != "baseline":
            # What one search leaves over, the later ones share.
            task = replace(task, budget=budget.part(1.0 / searches_left))
            searches_left -= 1
        row = run_method(
            planner, replace(task, seeds=tuple(seeds), report=_named(planner, progress))
        )
        if AUTO in methods and planner.stage != "baseline" and searches_left:
            budget = _rest(budget, row)
        if row.candidate is not None:
            seeds.append(row.candidate)
        if wanted:
            rows.append(row)
        progress(planner.name, 1.0, row.step_time_s or math.inf)
    return rows


def run_method(planner: Planner, task: Task) -> MethodRow:
    """Run one method and judge its candidates by the referee.

    Of a search's candidates that are equally good, the one that stays good under noise is taken;
    of a baseline's, by their definition, the fastest.
    """
    evaluator = task.evaluator
    result = planner.plan(task)
    judged: list[tuple[Evaluation, Strategy]] = []
    for candidate in result.candidates:
        choice = evaluator.encode(candidate.strategy)
        # A search may have tried one order only; the referee knows better which is best.
        orders = candidate.orders if planner.stage == "baseline" else task.orders
        for order in orders:
            judged.append((evaluator.referee(choice, order), candidate.strategy))
    if not judged:
        return MethodRow(
            method=planner.name,
            stage=planner.stage,
            outcome="not_applicable",
            step_time_s=None,
            order="",
            peak_memory_bytes=(),
            num_evaluations=result.num_evaluations,
            search_seconds=result.search_seconds,
            shortage=result.reason,
        )
    judged.sort(key=lambda pair: pair[0].preference)
    chosen = 0 if planner.stage == "baseline" else _most_robust(evaluator, judged)
    best, strategy = judged[chosen]
    return MethodRow(
        method=planner.name,
        stage=planner.stage,
        outcome=str(best.outcome),
        step_time_s=best.step_time_s if best.is_ok else None,
        order=best.order.name.lower(),
        peak_memory_bytes=best.peak_memory_bytes,
        num_evaluations=result.num_evaluations,
        search_seconds=result.search_seconds,
        shortage=best.shortage,
        overflow_bytes=best.overflow_bytes,
        candidate=Candidate(strategy=strategy, orders=(best.order,)),
    )


def _most_robust(evaluator: Evaluator, judged: Sequence[tuple[Evaluation, Strategy]]) -> int:
    """Index of the candidate to take, of candidates sorted best first.

    Those within ``EQUALLY_GOOD`` of the shortest step are equal by what a simulator can know;
    among them the shortest mean step under noise decides.
    """
    shortest = judged[0][0]
    equal = [
        index
        for index, (evaluation, _) in enumerate(judged[:MOST_COMPARED])
        if evaluation.overflow_bytes == shortest.overflow_bytes
        and evaluation.step_time_s <= shortest.step_time_s * (1.0 + EQUALLY_GOOD)
    ]
    if len(equal) == 1:
        return 0

    def total(index: int) -> float:
        evaluation, strategy = judged[index]
        return sum(_under_noise(evaluator, strategy, evaluation.order))

    return min(equal, key=total)


def _under_noise(evaluator: Evaluator, strategy: Strategy, order: Order) -> tuple[float, ...]:
    """Seconds per step in every draw; the draws are the same for all strategies."""
    noise = draw_noise(evaluator.cluster, NUM_DRAWS)
    choice = evaluator.encode(strategy)
    return tuple(evaluator.seconds_under_noise(choice, order, noise).tolist())


def with_noise(evaluator: Evaluator, rows: Sequence[MethodRow]) -> list[MethodRow]:
    """The rows, with seconds under noise for those that a gain is quoted between.

    These are the winner, the best data parallelism and ``tuned_uniform``, as far as they fit.
    """
    quoted = [best_row(rows), best_data_parallel(rows)]
    quoted += [row for row in rows if row.method == TUNED_UNIFORM]
    wanted = {row.method for row in quoted if row is not None and row.step_time_s is not None}
    result: list[MethodRow] = []
    for row in rows:
        if row.method in wanted and row.candidate is not None:
            seconds = _under_noise(evaluator, row.candidate.strategy, row.candidate.orders[0])
            row = replace(row, noisy_step_times_s=seconds)
        result.append(row)
    return result


def best_row(rows: Sequence[MethodRow]) -> MethodRow:
    """The winner: the shortest step of those that fit; the nearest to fitting if none does.

    Raises:
        StrategyError: no method has a strategy at all; says why of each.
    """
    applicable = [row for row in rows if row.candidate is not None]
    if not applicable:
        reasons = "; ".join(f"{row.method}: {row.shortage or 'no reason given'}" for row in rows)
        raise StrategyError(f"no method applies here ({reasons}); ask another one, or auto.")
    return min(applicable, key=lambda row: (row.overflow_bytes, row.step_time_s or 0.0))


def rehearsed(
    evaluator: Evaluator, rows: Sequence[MethodRow], rehearse: Rehearse, *, every: bool = False
) -> list[MethodRow]:
    """The rows, best first played through until one is known to run.

    Args:
        evaluator: of the graph and cluster.
        rows: of methods.
        rehearse: says why a strategy could not be executed.
        every: go through all rows that fit, not only up to the winner.

    Returns:
        The rows in their order; ``cannot_run`` with the reason where a rehearsal failed.
    """
    result = list(rows)
    known: dict[tuple[Strategy, Order], str] = {}
    fitting = [number for number, row in enumerate(rows) if row.step_time_s is not None]
    for number in sorted(fitting, key=lambda index: result[index].step_time_s or 0.0):
        row = result[number]
        assert row.candidate is not None
        key = row.candidate.strategy, row.candidate.orders[0]
        if key not in known:
            known[key] = rehearse(row.candidate.strategy, issued_step(evaluator, row.candidate))
        if not known[key]:
            result[number] = replace(row, is_rehearsed=True)
            if not every:
                break
            continue
        result[number] = replace(
            row,
            outcome=str(Outcome.CANNOT_RUN),
            step_time_s=None,
            shortage=known[key],
            overflow_bytes=math.inf,
            is_rehearsed=True,
        )
    return result


def use_op_rules(rows: Sequence[MethodRow]) -> bool:
    """Whether a method's strategy gives ops rules of their own: the lower bound is another one."""
    return any(row.candidate is not None and row.candidate.strategy.op_rules for row in rows)


def assert_not_below(rows: Sequence[MethodRow], bound_s: float) -> None:
    """No row may beat the lower bound of a step with barrier: a search finds holes in metrics."""
    for row in rows:
        assert row.step_time_s is None or row.step_time_s >= bound_s * (1.0 - 1e-9), (
            f"{row.method} claims {row.step_time_s} s, below the lower bound of {bound_s} s"
        )


def _chosen(methods: Sequence[str]) -> list[Planner]:
    if AUTO in methods:
        return list(planners())
    return [planner_by_name(name) for name in methods]


def _rest(budget: Budget, row: MethodRow) -> Budget:
    """What a method has left of a budget; never nothing."""
    if budget.evaluations is not None:
        return Budget(evaluations=max(budget.evaluations - row.num_evaluations, 1))
    assert budget.seconds is not None
    return Budget(seconds=max(budget.seconds - row.search_seconds, 1e-3))


def _named(planner: Planner, progress: Progress) -> Callable[[float, float], None]:
    def report(fraction: float, best: float) -> None:
        progress(planner.name, fraction, best)

    return report
