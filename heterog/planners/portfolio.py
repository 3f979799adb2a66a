"""Runs methods side by side on one graph and cluster; ``auto`` is the portfolio of all of them.

Every method is judged in the same way: the referee re-scores each of its candidates, a baseline's
in the orders of its definition, a search's in all orders that are allowed, and the best counts.
Searches get the strategies that earlier methods found, to start from (``local_search`` does).
``auto`` looks at all rows, the baselines' too, so it is never worse than any of them by the
referee.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module

from heterog.errors import StrategyError
from heterog.planners.given import GIVEN
from heterog.planners.issue_order import MOST_WRITTEN, IssuedSteps, Rehearse
from heterog.planners.judging import under_noise
from heterog.planners.planner import (
    Budget,
    Candidate,
    MethodRow,
    Planner,
    Problem,
    Spending,
    Stop,
)
from heterog.planners.promise import Promise
from heterog.planners.registry import AUTO, Methods, built_in_methods
from heterog.planners.sharing import Progress, Shares, SharesTogether
from heterog.planners.stability import reference_of
from heterog.planners.together import Question, Together, can_be_sent
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator, Outcome
from heterog.strategy.kernels import compilation_told
from heterog.strategy.strategy import Strategy
from heterog.workers import Seats

Rank = Callable[[MethodRow], tuple[float, ...]]
"""Function from a method's row to a few numbers; the row with the smallest is the best."""


def by_time(row: MethodRow) -> tuple[float, ...]:
    """Rank by the shortest step among those that fit; by nearness to fitting if none does."""
    return row.preference


def run_methods(
    evaluator: Evaluator,
    methods: Sequence[str],
    *,
    budget: Budget,
    known: Methods | None = None,
    seed: int = 0,
    step_barrier: bool = True,
    orders: tuple[Order, ...] = tuple(Order),
    without: Collection[str] = (),
    given: Planner | None = None,
    seeds: Planner | None = None,
    progress: Progress = lambda method, fraction, best: None,
    stop: Stop | None = None,
    clock: Callable[[], float] = time.perf_counter,
    promise: Promise | None = None,
    seats: Seats | None = None,
) -> list[MethodRow]:
    """Run methods and judge them by the referee.

    Nothing is counted before every kernel is compiled and every library imported. Then a budget in
    seconds is for all that ``auto`` does: baselines get ``BASELINE_PART`` of it, the searches the
    rest, except what ``promise`` keeps back: ``FIRST_ROUND`` of it in equal parts (``Purse``), the
    rest in rounds where it pays (``rounds``). A budget in evaluations is divided among the
    searches in equal parts; baselines do not count.

    Args:
        evaluator: Evaluator of the graph and cluster.
        methods: Names of methods; ``auto`` means all that have something to find on the cluster.
        budget: Budget of each method that searches; ``auto`` divides it among its searches.
        known: Methods that the names are looked up in; those of this package without a policy by
            default.
        seed: Seed of everything random.
        step_barrier: Whether a step ends with all updates.
        orders: Orders that searching methods may choose from.
        without: Names of methods that do not run at all, not even to give searches a start.
        given: A person's own strategy, judged first beside the baselines; searches start from it,
            too.
        seeds: Strategies that are known already, likewise; see ``planners.seeds``.
        progress: Function that gets every method's progress.
        stop: Switch that ends the methods early; the first that has a strategy is finished.
        clock: Function that returns the seconds by which a budget in seconds is kept.
        promise: What else a budget in seconds is for; all methods then share it by its clock,
            even without ``auto``.
        seats: Workers that keep their state, which then run the methods that share a budget,
            several at a time; see ``planners.together``.

    Returns:
        One row per method, in the order they ran: baselines first.

    Raises:
        UnknownNameError: a method does not exist.
    """
    known = known or built_in_methods()
    chosen = [each for each in _chosen(methods, known, evaluator) if each.name not in without]
    searching = any(planner.stage == "search" for planner in chosen)
    running = [
        planner
        for planner in known
        if planner in chosen
        or (searching and planner.stage == "baseline" and planner.name not in without)
    ]
    running.sort(key=lambda planner: planner.comes_last)
    for own in (given, seeds):
        if own is not None:
            chosen.append(own)
            running.insert(0, own)
    stop = stop or Stop()
    prepare(evaluator, running, progress, stop)
    is_shared = AUTO in methods or (promise is not None and budget.seconds is not None)
    promise = promise or Promise(budget, clock=clock)
    together = None
    if seats is not None and is_shared:
        progress(f"load kernels on {len(seats)} workers", 0.0, math.inf)
        question = Question(
            graph=evaluator.graph,
            cluster=evaluator.cluster,
            cost_model=evaluator.cost_model,
            step_barrier=step_barrier,
            orders=orders,
        )
        together = Together(seats, question)
        together.prepare([planner for planner in running if can_be_sent(planner)])
    promise.begin()
    asked = Problem(
        evaluator=evaluator,
        budget=budget,
        seed=seed,
        step_barrier=step_barrier,
        orders=orders,
        stop=stop,
        clock=promise.clock,
    )
    shares = Shares(asked, running, promise, progress)
    if together is not None:
        shares = SharesTogether(asked, running, promise, progress, together)
    if is_shared:
        shares.divide()
        if budget.seconds is not None and searching:
            shares.go_on([planner for planner in chosen if planner.resumes])
    else:
        shares.give_each()
    return [
        shares.rows[planner.name]
        for planner in running
        if planner in chosen and planner.name in shares.rows
    ]


def prepare(
    evaluator: Evaluator, running: Sequence[Planner], progress: Progress, stop: Stop
) -> None:
    """Import, read and compile what methods need, which no budget counts.

    Raises:
        KeyboardInterrupt: a stop was requested during compilation: nothing to hand over.
    """

    def tell(name: str, part: float) -> None:
        if stop.is_requested:
            raise KeyboardInterrupt
        progress(f"compile kernels (once, {part:.0%}): {name}", part, math.inf)

    # Methods import it where they use it, because ranks import methods and need not wait for it.
    import_module("scipy.interpolate")
    progress("load kernels", 0.0, math.inf)
    with compilation_told(tell):
        evaluator.warm_up()
    progress("load methods", 0.0, math.inf)
    for planner in running:
        planner.prepare(evaluator)


def with_noise(
    evaluator: Evaluator,
    rows: Sequence[MethodRow],
    spending: Spending | None = None,
    rank: Rank = by_time,
) -> list[MethodRow]:
    """The rows, with seconds under noise for those between which a gain is quoted.

    These are the winner, the row of ``reference_of`` and a given layout, as far as they fit. If
    the spending is over before all of them are done, none gets any: gains are then quoted without
    a range.
    """
    quoted = [best_row(rows, rank), reference_of(rows)]
    quoted += [row for row in rows if row.method == GIVEN]
    wanted = {row.method for row in quoted if row is not None and row.step_time_s is not None}
    result: list[MethodRow] = []
    with spending.limits() if spending is not None else nullcontext():
        for row in rows:
            if row.method in wanted and row.candidate is not None:
                seconds = under_noise(evaluator, row.candidate.strategy, row.candidate.orders[0])
                row = replace(row, noisy_step_times_s=seconds)
            result.append(row)
    return result if len(result) == len(rows) else list(rows)


def best_row(rows: Sequence[MethodRow], rank: Rank = by_time) -> MethodRow:
    """The winner: the shortest step of those that fit; the nearest to fitting if none does.

    Args:
        rows: Rows of methods.
        rank: Function that ranks them, by default by their steps; see ``Objective.rank``.

    Raises:
        StrategyError: no method has a strategy at all; says why of each.
    """
    applicable = [row for row in rows if row.candidate is not None]
    if not applicable:
        reasons = "; ".join(f"{row.method}: {row.shortage or 'no reason given'}" for row in rows)
        raise StrategyError(f"no method applies here ({reasons}); ask another one, or auto.")
    return min(applicable, key=rank)


def rehearsed(
    issued: IssuedSteps,
    rows: Sequence[MethodRow],
    rehearse: Rehearse,
    *,
    every: bool = False,
    spending: Spending | None = None,
    rank: Rank = by_time,
) -> list[MethodRow]:
    """The rows, rehearsed from the best one on until one is known to run.

    Args:
        issued: Programs and orders of candidates.
        rows: Rows of methods.
        rehearse: Function that says why a strategy could not be executed.
        every: Whether to go through all rows that fit, not only up to the winner.
        spending: Limit of all rehearsals together. The row that is not reached says so.
        rank: Function that ranks the rows.

    Returns:
        The rows in their order; ``cannot_run`` with the reason where a rehearsal failed.
    """
    result = list(rows)
    known: dict[tuple[Strategy, Order], str] = {}
    fitting = [number for number, row in enumerate(rows) if row.step_time_s is not None]
    for number in sorted(fitting, key=lambda index: rank(result[index])):
        row = result[number]
        assert row.candidate is not None
        key = row.candidate.strategy, row.candidate.orders[0]
        if key not in known and issued.of(row.candidate) is None:
            result[number] = replace(row, note="; ".join(filter(None, (row.note, UNWRITTEN))))
            break
        if key not in known:
            said = _said_of(issued, row.candidate, rehearse, spending)
            if said is None:
                result[number] = replace(row, note="; ".join(filter(None, (row.note, UNPLAYED))))
                break
            known[key] = said
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


UNPLAYED = (
    "not rehearsed: the budget was over; a larger --budget plays it through before it says ok"
)


UNWRITTEN = (
    f"not rehearsed: a step of more than {MOST_WRITTEN:,} ops on all devices is judged and "
    "compared, but no plan to run is written"
)


def _said_of(
    issued: IssuedSteps, candidate: Candidate, rehearse: Rehearse, spending: Spending | None
) -> str | None:
    """Result of a rehearsal; ``None`` if time was up before it had ended."""
    step = issued.of(candidate)
    assert step is not None
    if spending is None:
        return rehearse(candidate.strategy, step, lambda: None)
    said: str | None = None
    with spending.limits():
        said = rehearse(candidate.strategy, step, spending.check)
    return said


def use_op_rules(rows: Sequence[MethodRow]) -> bool:
    """Whether any strategy gives ops rules of their own, so that another lower bound holds."""
    return any(row.candidate is not None and row.candidate.strategy.op_rules for row in rows)


def assert_not_below(rows: Sequence[MethodRow], bound_s: float) -> None:
    """Check that no row beats the lower bound of a step: a search finds holes in metrics.

    Steps that overlap, with a stash, may.
    """
    for row in rows:
        if row.candidate is not None and row.candidate.strategy.stash is not None:
            continue
        assert row.step_time_s is None or row.step_time_s >= bound_s * (1.0 - 1e-9), (
            f"{row.method} claims {row.step_time_s} s, below the lower bound of {bound_s} s"
        )


def _chosen(methods: Sequence[str], known: Methods, evaluator: Evaluator) -> list[Planner]:
    if AUTO not in methods:
        return [known[name] for name in methods]
    graph, cluster = evaluator.graph, evaluator.cluster
    return [
        planner
        for planner in known
        if planner.name in methods or planner.joins_auto(graph, cluster)
    ]
