"""Runs methods side by side on one graph and cluster; ``auto`` is the portfolio of all of them.

Every method is judged in the same way: the referee re-scores each of its candidates, a baseline's
in the orders of its definition, a search's in all orders that are allowed, and the best counts.
Searches are given the strategies that earlier methods found, to start from (``local_search``
does). ``auto`` looks at all rows, the baselines' too, so it is never worse than any of them by the
referee.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import heterog.planners.data_parallel
import heterog.planners.deeppool
import heterog.planners.hap
import heterog.planners.islands.search
import heterog.planners.megatron_grid
import heterog.planners.model_parallel
import heterog.planners.pipeline
import heterog.planners.pipette.planner
import heterog.planners.poplar
import heterog.planners.spatial
import heterog.planners.tuned_uniform
import heterog.planners.two_segment

# isort: split
# Registered last: they start from what all others have found.
import heterog.planners.dedication
import heterog.planners.local_search  # noqa: F401
from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.graph.op_graph import OpGraph
from heterog.planners.given import GIVEN
from heterog.planners.issue_order import MOST_WRITTEN, IssuedSteps, Rehearse
from heterog.planners.planner import (
    Budget,
    Candidate,
    MethodRow,
    Planner,
    PlanResult,
    Problem,
    Purse,
    Spending,
    Stop,
    planner_by_name,
    planners,
)
from heterog.planners.promise import Promise
from heterog.planners.rounds import STARVED, Contender, next_of
from heterog.planners.stability import TUNED_UNIFORM, best_data_parallel
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator, Outcome
from heterog.simulator.noise import draw_noise
from heterog.strategy.kernels import compilation_told
from heterog.strategy.strategy import Strategy

AUTO = "auto"
NUM_DRAWS = 20
"""Draws of noise that every method's best strategy goes through."""
EQUALLY_GOOD = 0.005
"""Relative difference of two step times that no simulator can vouch for."""
MOST_COMPARED = 3
"""Candidates of one search that go through the draws."""
BASELINE_PART = 0.25
"""Of a budget in seconds, for all baselines of ``auto`` together."""
JUDGED_PART = 0.15
"""Of a method's budget in seconds, for the referee to judge what it found."""
LEAST_SEARCHED = 0.25
"""Of a budget in seconds, for all searches of ``auto`` together, whatever else there is to do."""
FIRST_ROUND = 0.4
"""Of the searches' seconds, in equal parts; the rest goes to whom it pays."""
ROUND = 0.3
"""Of the seconds that are left, for the next round."""
LEAST_ROUND = 0.03
"""Of a budget in seconds: a shorter round is not begun."""
LAST_PART = 0.05
"""Of a budget in seconds, kept for each method that comes last: to improve the winner."""
_TASKS_PER_S = 50_000
_LEAST_TASKS = 200_000
"""Tasks of the largest program for each second of a budget: to lower and simulate it takes two or
three percent of the time."""
Progress = Callable[[str, float, float], None]
"""Called with (method, fraction of its budget spent, best seconds so far)."""
Rank = Callable[[MethodRow], tuple[float, ...]]
"""A few numbers for a method's row; the row with the smallest is the best."""


def by_time(row: MethodRow) -> tuple[float, ...]:
    """The shortest step of those that fit; the nearest to fitting if none does."""
    return row.preference


def run_methods(
    evaluator: Evaluator,
    methods: Sequence[str],
    *,
    budget: Budget,
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
) -> list[MethodRow]:
    """Run methods and judge them by the referee.

    Nothing is counted before every kernel is compiled and every library imported. Then a budget in
    seconds is for all that ``auto`` does: baselines get ``BASELINE_PART`` of it, the searches the
    rest but for what ``promise`` keeps back: ``FIRST_ROUND`` of it in equal parts (``Purse``), the
    other part in rounds to whom it pays (``rounds``). A budget in evaluations is divided among the
    searches in equal parts; baselines do not count.

    Args:
        evaluator: of the graph and cluster.
        methods: names; ``auto`` means all that have something to find on the cluster.
        budget: of each method that searches; ``auto`` divides it among its searches.
        seed: of everything random.
        step_barrier: whether a step ends with all updates.
        orders: orders that searching methods may choose from.
        without: names that ``auto`` leaves out.
        given: a person's own strategy, judged first beside the baselines; searches start from it,
            too.
        seeds: strategies that are known already, likewise; see ``planners.seeds``.
        progress: told about every method's progress.
        stop: ends the methods early; the first that has a strategy is finished.
        clock: seconds, by which a budget in seconds is kept.
        promise: what else a budget in seconds is for; all methods then share it, also where
            ``auto`` is not asked, by its clock.

    Returns:
        One row per method, in the order they ran: baselines first.

    Raises:
        UnknownNameError: a method does not exist.
    """
    chosen = [planner for planner in _chosen(methods, evaluator) if planner.name not in without]
    searching = any(planner.stage != "baseline" for planner in chosen)
    running = [
        planner
        for planner in planners()
        if planner in chosen or (planner.stage == "baseline" and searching)
    ]
    running.sort(key=_comes_last)
    for own in (given, seeds):
        if own is not None:
            chosen.append(own)
            running.insert(0, own)
    stop = stop or Stop()
    prepare(evaluator, running, progress, stop)
    is_shared = AUTO in methods or (promise is not None and budget.seconds is not None)
    promise = promise or Promise(budget, clock=clock)
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
    shares = _Shares(asked, running, promise, progress)
    if is_shared:
        shares.divide()
        if budget.seconds is not None and searching:
            shares.go_on([planner for planner in chosen if getattr(planner, "resumes", False)])
    else:
        shares.give_each()
    return [
        shares.rows[planner.name]
        for planner in running
        if planner in chosen and planner.name in shares.rows
    ]


class _Shares:
    """Runs methods, each on its share of a budget, and keeps their rows.

    Args:
        asked: what all are asked, with the budget of all.
        running: methods, those first that run first.
        promise: what else the budget is for.
        progress: told about every method's progress.
    """

    def __init__(
        self, asked: Problem, running: Sequence[Planner], promise: Promise, progress: Progress
    ) -> None:
        self.rows: dict[str, MethodRow] = {}
        self._asked = asked
        self._running = running
        self._promise = promise
        self._progress = progress
        self._contenders = {planner.name: Contender(planner=planner) for planner in running}

    def give_each(self) -> None:
        """Every method may spend the whole budget."""
        for planner in self._running:
            if not self._is_stopped:
                self._run(planner, self._asked.budget)

    def divide(self) -> None:
        """Baselines share one part equally, searches another; see ``Purse``."""
        budget = self._asked.budget
        for is_baseline in (True, False):
            stage = [each for each in self._running if (each.stage == "baseline") == is_baseline]
            part = 1.0 if is_baseline or budget.seconds is None else FIRST_ROUND
            whole = _whole(budget, is_baseline, self._left_s)
            purse = Purse(whole.part(part), len(stage))
            for planner in stage:
                if self._is_stopped:
                    return
                left_s = math.inf if is_baseline else part * self._left_s
                seconds = self._run(planner, purse.next_part(left_s))
                evaluations = self.rows[planner.name].num_evaluations
                purse.settle(evaluations if budget.seconds is None else seconds)

    def go_on(self, planners: Sequence[Planner]) -> None:
        """Some methods go on with the seconds that are left; see ``rounds``.

        Those that come last have their turn after the others, on what these have found.
        """
        last = [planner for planner in planners if _comes_last(planner)]
        contenders = [self._contenders[each.name] for each in planners if each not in last]
        budget_s = self._asked.budget.seconds or 0.0
        least_s, kept_s = LEAST_ROUND * budget_s, LAST_PART * budget_s * len(last)
        while not self._is_stopped and (left_s := self._left_s - kept_s) >= least_s:
            contender = next_of(contenders)
            if contender is None:
                break
            self._run(contender.planner, Budget(seconds=max(ROUND * left_s, least_s)))
        for planner in last:
            if not self._is_stopped:
                self._run(planner, Budget(seconds=max(self._left_s, least_s)))

    @property
    def _candidates(self) -> list[Candidate]:
        return [row.candidate for row in self.rows.values() if row.candidate is not None]

    @property
    def _is_stopped(self) -> bool:
        """Whether somebody asked to stop, and there is something to hand over."""
        return self._asked.stop.is_requested and bool(self._candidates)

    @property
    def _left_s(self) -> float:
        return self._promise.search_s(self._candidates)

    def _run(self, planner: Planner, part: Budget) -> float:
        """Let a method spend a part; returns the seconds that it took."""
        contender, seeds = self._contenders[planner.name], tuple(self._candidates)
        self._progress(planner.name, 0.0, math.inf)
        problem = replace(
            self._asked,
            budget=part,
            seeds=seeds,
            report=_named(planner, self._progress),
            stop=self._asked.stop if seeds else Stop(),
            memory=contender.memory,
        )
        spending = problem.spend()
        if self._asked.budget.seconds is not None and planner.name != GIVEN:
            # No single evaluation may eat up what all have; a person's own layout is always told.
            most_tasks = max(_TASKS_PER_S * self._asked.budget.seconds, _LEAST_TASKS)
            self._asked.evaluator.most_tasks = most_tasks
        try:
            row = run_method(planner, problem)
        finally:
            self._asked.evaluator.most_tasks = math.inf
        self.rows[planner.name] = _joined(self.rows.get(planner.name), row)
        contender.tell(
            given_s=part.seconds or 0.0,
            seconds=spending.seconds,
            evaluations=row.num_evaluations,
            step_time_s=_best_s([self.rows[planner.name]]),
            best_s=_best_s(self.rows.values()),
        )
        self._progress(planner.name, 1.0, row.step_time_s or math.inf)
        return spending.seconds


def _best_s(rows: Iterable[MethodRow]) -> float:
    """Seconds of the best step so far; infinite if none fits."""
    return min((row.step_time_s for row in rows if row.step_time_s is not None), default=math.inf)


def _joined(before: MethodRow | None, row: MethodRow) -> MethodRow:
    """The better one of a method's rows, with what all its rounds took."""
    if before is None:
        return row
    rows = [each for each in (before, row) if each.candidate is not None] or [row]
    evaluations = before.num_evaluations + row.num_evaluations
    best = min(rows, key=lambda each: each.preference)
    is_starved = row.is_starved and evaluations < STARVED
    return replace(
        best,
        num_evaluations=evaluations,
        search_seconds=before.search_seconds + row.search_seconds,
        note=best.note if is_starved or not best.is_starved else "",
        is_starved=is_starved,
    )


def prepare(
    evaluator: Evaluator, running: Sequence[Planner], progress: Progress, stop: Stop
) -> None:
    """Import, read and compile what methods need, which no budget counts.

    Raises:
        KeyboardInterrupt: it was asked to stop while it compiled: there is nothing to hand over.
    """

    def tell(name: str, part: float) -> None:
        if stop.is_requested:
            raise KeyboardInterrupt
        progress(f"compile kernels (once, {part:.0%}): {name}", part, math.inf)

    progress("load kernels", 0.0, math.inf)
    with compilation_told(tell):
        evaluator.warm_up()
    for planner in running:
        load = getattr(planner, "prepare", None)
        if load is not None:
            progress(f"load {planner.name}", 0.0, math.inf)
            load(evaluator)


def _whole(budget: Budget, is_baselines: bool, left_s: float) -> Budget:
    """What all baselines or all searches may spend together."""
    if budget.seconds is None:
        return budget
    if is_baselines:
        return budget.part(BASELINE_PART)
    return Budget(seconds=max(left_s, LEAST_SEARCHED * budget.seconds))


def run_method(planner: Planner, problem: Problem) -> MethodRow:
    """Run one method and judge its candidates by the referee, all within its budget.

    Of a search's candidates that are equally good, the one that stays good under noise is taken;
    of a baseline's, by their definition, the fastest.
    """
    evaluator = problem.evaluator
    spending = problem.spend()
    result = PlanResult(candidates=(), num_evaluations=0, search_seconds=0.0)
    # Whoever does not watch its own limits is ended by these, a little later, with empty hands.
    whole = problem.budget if problem.budget.seconds is None else problem.budget.part(1.1)
    with replace(problem, budget=whole).spend().limits():
        searching = problem.budget
        if searching.seconds is not None:
            searching = searching.part(1.0 - JUDGED_PART)
        result = planner.plan(replace(problem, budget=searching))
    is_cut = spending.seconds >= (1.0 - JUDGED_PART) * (problem.budget.seconds or math.inf)
    judged = _judged(planner, problem, result, spending)
    is_starved = is_cut and result.num_evaluations < STARVED
    notes = [result.note] * bool(result.note)
    if is_starved:
        notes.append(
            f"starved: {result.num_evaluations} evaluations in {spending.seconds:.1f} s; "
            "a larger --budget lets it search"
        )
    row = MethodRow(
        method=planner.name,
        stage=planner.stage,
        outcome="not_applicable",
        step_time_s=None,
        order="",
        peak_memory_bytes=(),
        num_evaluations=result.num_evaluations,
        search_seconds=spending.seconds if problem.budget.seconds else result.search_seconds,
        shortage=result.reason or _OUT_OF_TIME * is_cut,
        note="; ".join(notes),
        is_starved=is_starved,
    )
    if not judged:
        return row
    judged.sort(key=lambda pair: pair[0].preference)
    chosen = 0
    with spending.limits():
        chosen = 0 if planner.stage == "baseline" else _most_robust(evaluator, judged)
    best, strategy = judged[chosen]
    return replace(
        row,
        outcome=str(best.outcome),
        step_time_s=best.step_time_s if best.is_ok else None,
        order=best.order.name.lower(),
        peak_memory_bytes=best.peak_memory_bytes,
        shortage=best.shortage,
        overflow_bytes=best.overflow_bytes,
        candidate=Candidate(strategy=strategy, orders=(best.order,), judged=best),
        search_seconds=spending.seconds if problem.budget.seconds else result.search_seconds,
    )


_OUT_OF_TIME = "its part of the budget was over before it had a strategy"


def _judged(
    planner: Planner, problem: Problem, result: PlanResult, spending: Spending
) -> list[tuple[Evaluation, Strategy]]:
    """What the referee says about a method's candidates, at least about the first one.

    Every candidate in its own first order, then in the others: a search may have tried one only.
    """
    evaluator = problem.evaluator
    judged: list[tuple[Evaluation, Strategy]] = []
    turns: list[tuple[Strategy, Order]] = []
    for candidate in result.candidates:
        if candidate.judged is not None:
            judged.append((candidate.judged, candidate.strategy))
        else:
            turns.append((candidate.strategy, candidate.orders[0]))
    for candidate in result.candidates:
        own = candidate.orders if planner.stage == "baseline" else problem.orders
        done = candidate.judged.order if candidate.judged is not None else candidate.orders[0]
        turns += [(candidate.strategy, order) for order in own if order != done]
    if turns and not judged:
        strategy, order = turns.pop(0)
        judged.append((evaluator.referee(strategy, order), strategy))
    with spending.limits():
        for strategy, order in turns:
            judged.append((evaluator.referee(strategy, order), strategy))
    return judged


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
    noise = draw_noise(evaluator.cluster, NUM_DRAWS, evaluator.spreads)
    choice = evaluator.encode(strategy)
    return tuple(evaluator.seconds_under_noise(choice, order, noise).tolist())


def with_noise(
    evaluator: Evaluator,
    rows: Sequence[MethodRow],
    spending: Spending | None = None,
    rank: Rank = by_time,
) -> list[MethodRow]:
    """The rows, with seconds under noise for those that a gain is quoted between.

    These are the winner, the best data parallelism, ``tuned_uniform`` and a given layout, as far
    as they fit. With a spending that is over before all of them are through, none has any: gains
    are then quoted without a range.
    """
    quoted = [best_row(rows, rank), best_data_parallel(rows)]
    quoted += [row for row in rows if row.method in (TUNED_UNIFORM, GIVEN)]
    wanted = {row.method for row in quoted if row is not None and row.step_time_s is not None}
    result: list[MethodRow] = []
    with spending.limits() if spending is not None else nullcontext():
        for row in rows:
            if row.method in wanted and row.candidate is not None:
                seconds = _under_noise(evaluator, row.candidate.strategy, row.candidate.orders[0])
                row = replace(row, noisy_step_times_s=seconds)
            result.append(row)
    return result if len(result) == len(rows) else list(rows)


def best_row(rows: Sequence[MethodRow], rank: Rank = by_time) -> MethodRow:
    """The winner: the shortest step of those that fit; the nearest to fitting if none does.

    Args:
        rows: of methods.
        rank: how they compare, if not by their steps; see ``Objective.rank``.

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
    """The rows, best first played through until one is known to run.

    Args:
        issued: orders of candidates.
        rows: of methods.
        rehearse: says why a strategy could not be executed.
        every: go through all rows that fit, not only up to the winner.
        spending: what all of it may take. The row that is not reached says so.
        rank: which rows are best.

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
    """What a rehearsal says; ``None`` if time was up before it had ended."""
    step = issued.of(candidate)
    assert step is not None
    if spending is None:
        return rehearse(candidate.strategy, step, lambda: None)
    said: str | None = None
    with spending.limits():
        said = rehearse(candidate.strategy, step, spending.check)
    return said


def use_op_rules(rows: Sequence[MethodRow]) -> bool:
    """Whether a method's strategy gives ops rules of their own: the lower bound is another one."""
    return any(row.candidate is not None and row.candidate.strategy.op_rules for row in rows)


def assert_not_below(rows: Sequence[MethodRow], bound_s: float) -> None:
    """No row may beat the lower bound of a step with barrier: a search finds holes in metrics."""
    for row in rows:
        assert row.step_time_s is None or row.step_time_s >= bound_s * (1.0 - 1e-9), (
            f"{row.method} claims {row.step_time_s} s, below the lower bound of {bound_s} s"
        )


def _chosen(methods: Sequence[str], evaluator: Evaluator) -> list[Planner]:
    if AUTO in methods:
        return [
            planner
            for planner in planners()
            if planner.name in methods or _joins_auto(planner, evaluator)
        ]
    return [planner_by_name(name) for name in methods]


def _joins_auto(planner: Planner, evaluator: Evaluator) -> bool:
    """Whether ``auto`` runs a method here; all but those that say otherwise."""
    joins: Callable[[OpGraph, Cluster], bool] | None = getattr(planner, "joins_auto", None)
    return joins is None or joins(evaluator.graph, evaluator.cluster)


def _comes_last(planner: Planner) -> bool:
    """Whether a method only improves what the others have found."""
    return bool(getattr(planner, "comes_last", False))


def _named(planner: Planner, progress: Progress) -> Callable[[float, float], None]:
    def report(fraction: float, best: float) -> None:
        progress(planner.name, fraction, best)

    return report
