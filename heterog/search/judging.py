"""Runs one method and judges what it found, in the same way for all methods.

The referee scores each of a method's candidates again, a baseline's in the orders of its
definition, a search's in all orders that are allowed, and the best counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from heterog.methods.planner import (
    Candidate,
    MethodRow,
    Planner,
    PlanResult,
    Problem,
    Spending,
)
from heterog.pricing.noise import draw_noise
from heterog.search.rounds import STARVED
from heterog.simulator.engine import Order
from heterog.simulator.evaluation import Evaluation, Outcome
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy

NUM_DRAWS = 20
"""Number of draws of noise that every method's best strategy is simulated under."""
EQUALLY_GOOD = 0.005
"""Relative difference between two step times below which no simulator can rank them."""
MOST_COMPARED, NUM_COMPARED = 3, 8
"""Most candidates of one search that are simulated under noise, and the draws that tell which of
equally good ones to take."""
JUDGED_PART = 0.15
"""Part of a method's budget in seconds for the referee to judge its candidates."""


def run_method(planner: Planner, problem: Problem) -> MethodRow:
    """Run one method and judge its candidates by the referee, all within its budget.

    Of a search's candidates that are equally good, the one that stays good under noise is taken;
    of a baseline's, by their definition, the fastest.
    """
    evaluator = problem.evaluator
    spending = problem.spend()
    result = PlanResult(candidates=(), num_evaluations=0)
    # A method that ignores its limits is ended by these, a little later and without a result.
    whole = problem.budget if problem.budget.seconds is None else problem.budget.part(1.1)
    with replace(problem, budget=whole).spend().limits():
        searching = problem.budget
        if searching.seconds is not None:
            searching = searching.part(1.0 - JUDGED_PART)
        result = planner.plan(replace(problem, budget=searching))
    searched_s = spending.seconds if result.search_seconds is None else result.search_seconds
    is_cut = spending.seconds >= (1.0 - JUDGED_PART) * (problem.budget.seconds or math.inf)
    judged = _judged(planner, problem, result, spending)
    is_starved = is_cut and result.num_evaluations < STARVED
    notes = [result.note] * bool(result.note)
    if is_starved:
        notes.append(
            f"starved: {result.num_evaluations} evaluations in {spending.seconds:.1f} s; "
            "a larger budget lets it search"
        )
    row = MethodRow(
        method=planner.name,
        stage=planner.stage,
        outcome="not_applicable",
        step_time_s=None,
        order="",
        peak_memory_bytes=(),
        num_evaluations=result.num_evaluations,
        search_seconds=spending.seconds if problem.budget.seconds else searched_s,
        shortage=result.reason or _OUT_OF_TIME * is_cut,
        note="; ".join(notes),
        is_starved=is_starved,
    )
    if not judged:
        return row
    judged.sort(key=lambda pair: pair[0].preference)
    chosen = 0
    with spending.limits():
        if planner.stage != "baseline":
            chosen = _most_robust(evaluator, judged, _known_of(problem).noisy_s)
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
        search_seconds=spending.seconds if problem.budget.seconds else searched_s,
    )


_OUT_OF_TIME = "its part of the budget was over before it had a strategy"


def _judged(
    planner: Planner, problem: Problem, result: PlanResult, spending: Spending
) -> list[tuple[Evaluation, Strategy]]:
    """The referee's judgement of a method's candidates, at least of the first one.

    Every candidate in its own first order, then in the others: a search may have tried one only.
    """
    evaluator = problem.evaluator
    judged: list[tuple[Evaluation, Strategy]] = []
    turns: list[tuple[Strategy, tuple[Order, ...]]] = []
    for candidate in result.candidates:
        if candidate.judged is not None:
            judged.append((candidate.judged, candidate.strategy))
        else:
            turns.append((candidate.strategy, candidate.orders[:1]))
    for candidate in result.candidates:
        own = candidate.orders if planner.stage == "baseline" else problem.orders
        done = candidate.judged.order if candidate.judged is not None else candidate.orders[0]
        turns.append((candidate.strategy, tuple(order for order in own if order != done)))

    known = _known_of(problem).evaluations

    def take(strategy: Strategy, orders: tuple[Order, ...]) -> None:
        # What is longer than the best so far is not compared with it any more.
        fitting = [each.step_time_s for each, _ in judged if each.is_ok]
        limit_s = min(fitting, default=math.inf) * (1.0 + EQUALLY_GOOD)
        new = [order for order in orders if (strategy, order) not in known]
        for each in evaluator.referee_orders(strategy, new, limit_s) if new else ():
            if each.outcome == Outcome.TOO_LARGE:  # perhaps not in a longer round
                judged.append((each, strategy))
            else:
                known[strategy, each.order] = each
        found = [known[strategy, order] for order in orders if (strategy, order) in known]
        judged.extend((each, strategy) for each in found if each.outcome != Outcome.GIVEN_UP)

    if not judged and turns:
        take(*turns.pop(0))
    with spending.limits():
        for strategy, orders in turns:
            if orders:
                take(strategy, orders)
    return judged


_KNOWN = "run_method"  # in a problem's memory, beside what the method keeps


@dataclass(slots=True)
class _Known:
    """Verdicts of earlier rounds on the same candidates, which often do not change."""

    evaluator: Evaluator
    evaluations: dict[tuple[Strategy, Order], Evaluation] = field(default_factory=dict)
    noisy_s: dict[tuple[Strategy, Order], float] = field(default_factory=dict)


def _known_of(problem: Problem) -> _Known:
    found = problem.memory.get(_KNOWN)
    if found is None or found.evaluator is not problem.evaluator:
        found = problem.memory[_KNOWN] = _Known(problem.evaluator)
    known: _Known = found
    return known


def _most_robust(
    evaluator: Evaluator,
    judged: Sequence[tuple[Evaluation, Strategy]],
    known: dict[tuple[Strategy, Order], float],
) -> int:
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
        key = strategy, evaluation.order
        if key not in known:
            known[key] = sum(under_noise(evaluator, *key, NUM_COMPARED))
        return known[key]

    return min(equal, key=total)


def under_noise(
    evaluator: Evaluator, strategy: Strategy, order: Order, num_draws: int = NUM_DRAWS
) -> tuple[float, ...]:
    """Seconds per step in each draw; the draws are the same for all strategies."""
    noise = draw_noise(evaluator.cluster, num_draws, evaluator.spreads)
    choice = evaluator.encode(strategy)
    return tuple(evaluator.seconds_under_noise(choice, order, noise).tolist())
