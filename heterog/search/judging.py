"""Runs methods, judges all candidates in the same way, and chooses who gets the remaining time.

The referee scores each candidate of a method again: a baseline's in the orders of its definition,
a search's in all orders that are allowed. The best one counts.

Several methods may run at the same time on *seats* (workers that keep their state) and share their
plans. Such a search has *turns*: in a turn, every seat runs a few methods one after another. They
start from the best plans of all seats and resume from their state on that seat. With a budget in
evaluations, the result of a turn does not depend on which seat finishes first. Methods that draw
at random (``is_random``) run on every seat, with a different seed on each. Every other method
would do the same work everywhere, so it runs on one seat.

After every method has had its part, the remaining time is given out in rounds, to methods that
resume (``Planner.resumes``). Half of it goes to methods that improve the best plans of all
(``Planner.improves``), in turn with the others; a fifth while they gain nothing. Within each of
these two sets a bandit chooses: the next round goes to the method whose last rounds improved its
own best plan most per second. This gain counts less, the farther that plan is behind the best of
all. Every second round of methods that make their own plans goes to a starved method, if there is
one: first to the one with the best plan, then to one without an evaluation, then to the one
nearest to fitting. Methods without gain are tried again when the others gain nothing either. A
method that ended before its part was over has nothing left to try, unless its answers are whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from heterog.errors import ConformanceError, StrategyError
from heterog.methods.planner import Budget, Candidate, Planner, PlanResult, Problem, Spending, Stop
from heterog.pricing.intervals import draw_noise
from heterog.search.request import Request
from heterog.search.rows import MethodRow
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator, Outcome
from heterog.strategy.strategy import Strategy
from heterog.workers import is_asked_to_stop

STARVED = 20
"""A search that was cut before it had made this many evaluations was starved."""
_MOST_STARVED, _MOST_BEHIND = 4, 2.0
"""Rounds after which a starved method is no longer preferred (half as many if its step is more
than ``_MOST_BEHIND`` times the best one)."""
_HOPELESS = 8.0
"""Ratio to the best step above which a starved method is not preferred: its plans are slow to
simulate."""
_FIRST_GAIN = 0.1
"""Least gain of a method's first plan that fits: better ones may follow."""
FADES = 0.25
"""Part of a method's gain that still counts after another round."""
_BEHIND = 8.0
"""Exponent for plans behind the best: the gain of a step 1.5 times the best is divided by 25."""
IMPROVED_PART, STALLED_PART = 0.5, 0.2
"""Least part of the seconds after the first round for methods that improve the best plans, and
where the last round of none of them has gained ``GAINED``."""
GAINED = 1e-3
"""Logarithm of a ratio of step times that counts as a gain."""
_ENDED_EARLY = 0.8
"""A method that ended before this part of its seconds was over has nothing left to try."""


@dataclass(slots=True, kw_only=True)
class Contender:
    """A method and the results of its rounds.

    Attributes:
        planner: The method.
        memory: State that it resumes from; see ``Problem.memory``.
        evaluations: Evaluations of all rounds.
        seconds: Seconds of all rounds.
        first_s: Seconds of the first round.
        rounds: Number of its rounds.
        step_time_s: Step time of its best plan; infinite if none fits.
        overflow_bytes: Bytes missing for its best plan on the worst device, 0 if it fits.
        behind: Ratio of its step to the best of all methods; 1 while it has no plan that fits.
        gain_per_s: Relative improvement of its best plan per second: that of the last round, or
            the faded one of earlier rounds (``FADES``), whichever is more.
        gain: Gain of its last round, as the logarithm of a ratio of step times.
        is_done: Whether it has nothing left to try.
    """

    planner: Planner
    memory: dict[str, object] = field(default_factory=dict)
    evaluations: int = 0
    seconds: float = 0.0
    first_s: float = 0.0
    rounds: int = 0
    step_time_s: float = math.inf
    overflow_bytes: float = math.inf
    behind: float = 1.0
    gain_per_s: float = 0.0
    gain: float = 0.0
    is_done: bool = False

    def tell(
        self,
        *,
        given_s: float,
        seconds: float,
        evaluations: int,
        step_time_s: float,
        best_s: float,
        known_s: float = math.inf,
        overflow_bytes: float = math.inf,
    ) -> None:
        """Record the result of a round.

        Args:
            given_s: Seconds that it was allowed.
            seconds: Seconds that it took.
            evaluations: Number of its evaluations.
            step_time_s: Step time of the best plan of all its rounds; infinite if none fits.
            best_s: Step time of the best plan of all methods.
            known_s: Step time of the best plan of all methods before the round; returning that
                plan, from which a search may start, is no gain.
            overflow_bytes: Bytes missing for the best plan of all its rounds.
        """
        gain = 0.0
        if step_time_s < self.step_time_s and step_time_s != known_s:
            is_first, before_s = math.isinf(self.step_time_s), self.step_time_s
            if step_time_s < known_s:
                before_s = min(before_s, known_s)
            gain = _FIRST_GAIN if math.isinf(before_s) else math.log(before_s / step_time_s)
            gain = max(gain, _FIRST_GAIN * is_first) * (best_s / step_time_s) ** _BEHIND
        self.step_time_s = step_time_s
        self.overflow_bytes = overflow_bytes
        self.behind = 1.0 if math.isinf(step_time_s) else step_time_s / best_s
        self.first_s = self.first_s if self.rounds else seconds
        self.rounds += 1
        self.seconds += seconds
        self.evaluations += evaluations
        self.gain = gain
        self.gain_per_s = max(gain / max(seconds, 1e-9), FADES * self.gain_per_s)
        # A method whose answers are whole ends after one and may find another.
        goes_on = evaluations > 0 and self.planner.answers_whole
        self.is_done = seconds < _ENDED_EARLY * given_s and not goes_on

    def gain_beside(self, best_s: float) -> float:
        """Gain per second of its last part, measured against the best plan found by now."""
        if math.isinf(self.step_time_s):
            return 0.0
        part: float = (self.behind * best_s / self.step_time_s) ** _BEHIND
        return self.gain_per_s * part

    @property
    def is_starved(self) -> bool:
        """Whether it has had too little time to be judged."""
        most = _MOST_STARVED if self.behind <= _MOST_BEHIND else _MOST_STARVED // 2
        most = most if self.behind <= _HOPELESS else 0
        return self.evaluations < STARVED and self.rounds < most and not self.is_done


def next_of(contenders: Sequence[Contender]) -> Contender | None:
    """The contender whose turn it is; ``None`` if none can use more time.

    The method whose plan became the best comes first, then a starved one:

    >>> class Method(Planner):
    ...     name, stage, resumes = "a", "search", True
    >>> quick, slow = Contender(planner=Method()), Contender(planner=Method())
    >>> of_round = {"given_s": 1.0, "seconds": 1.0, "best_s": 1.0}
    >>> quick.tell(**of_round, evaluations=90, step_time_s=1.0)
    >>> slow.tell(**of_round, evaluations=2, step_time_s=1.9)
    >>> next_of([quick, slow]) is quick
    True
    >>> quick.tell(**of_round, evaluations=90, step_time_s=1.0)
    >>> next_of([quick, slow]) is slow
    True
    >>> ahead = Contender(planner=Method())
    >>> ahead.tell(**of_round, evaluations=3, step_time_s=1.5)
    >>> next_of([quick, slow, ahead]) is ahead
    True

    Among starved methods, one whose plan is far behind comes last:

    >>> far = Contender(planner=Method())
    >>> far.tell(**of_round, evaluations=3, step_time_s=7.0)
    >>> next_of([quick, slow, far]) is slow
    True
    >>> next_of([quick, far]) is far
    True

    If none has a plan that fits, one that could not evaluate any comes first:

    >>> unknown, overfull = Contender(planner=Method()), Contender(planner=Method())
    >>> nothing = {**of_round, "best_s": math.inf, "step_time_s": math.inf}
    >>> unknown.tell(**nothing, evaluations=0)
    >>> overfull.tell(**nothing, evaluations=3, overflow_bytes=1.0)
    >>> next_of([overfull, unknown]) is unknown
    True

    A method that starts from the best plan and returns it unchanged has gained nothing:

    >>> adopts = Contender(planner=Method())
    >>> adopts.tell(**of_round, evaluations=9, step_time_s=1.0, known_s=1.0)
    >>> adopts.gain_per_s
    0.0

    A method that improves the best plans gets half of the later seconds, whatever others gain:

    >>> improving = Contender(planner=Method())
    >>> improving.planner.improves = True
    >>> improving.tell(**of_round, evaluations=90, step_time_s=1.0, known_s=1.0)
    >>> next_of([quick, improving]) is improving
    True
    >>> improving.tell(**of_round, evaluations=90, step_time_s=1.0)
    >>> quick.seconds - quick.first_s, improving.seconds - improving.first_s
    (1.0, 1.0)
    >>> improving.seconds += 0.1
    >>> next_of([quick, improving]) is quick
    True
    """
    able = [each for each in contenders if not each.is_done]
    if not able:
        return None
    later_s = sum(each.seconds - each.first_s for each in contenders)
    improving = [each for each in contenders if each.planner.improves]
    improved_s = sum(each.seconds - each.first_s for each in improving)
    is_stalled = later_s > 0.0 and all(each.gain < GAINED for each in improving)
    improves = improved_s <= (STALLED_PART if is_stalled else IMPROVED_PART) * later_s
    able = [each for each in able if each.planner.improves == improves] or able
    best_s = min(each.step_time_s for each in contenders)
    # Of those with equal gains, the one that had the least time.
    chosen = max(able, key=lambda each: (each.gain_beside(best_s), -each.seconds))
    starved = [each for each in able if each.is_starved]
    # While others gain, at most half of the rounds after the first go to starved methods.
    of_all, of_starved = (sum(each.rounds - 1 for each in some) for some in (contenders, starved))
    is_due = 2 * of_starved >= of_all and chosen.gain_beside(best_s) > 0.0
    if not starved or is_due:
        return chosen
    near = [each for each in starved if each.behind <= _MOST_BEHIND]
    return min(
        near or starved,
        key=lambda each: (
            each.step_time_s, each.overflow_bytes if each.evaluations else 0.0, each.evaluations
        ),
    )  # fmt: skip


NUM_DRAWS = 20
"""Number of draws of noise that every method's best strategy is simulated under."""
EQUALLY_GOOD = 0.005
"""Relative difference between two step times below which no simulator can rank them."""
MOST_COMPARED, NUM_COMPARED = 3, 8
"""Most candidates of one search that are simulated under noise, and the number of draws by which
one of equally good candidates is chosen."""
JUDGED_PART = 0.15
"""Part of a method's budget in seconds for the referee to judge its candidates."""


def run_method(planner: Planner, problem: Problem) -> MethodRow:
    """Run one method and judge its candidates by the referee, within its budget.

    Among equally good candidates of a search, the most robust under noise is taken. Of a
    baseline's candidates the fastest is taken, because that is its definition.
    """
    evaluator = problem.evaluator
    spending = problem.spend()
    result = PlanResult(candidates=(), num_evaluations=0)
    # A method that ignores its limits is interrupted after 1.1 budgets, without a result.
    whole = problem.budget if problem.budget.seconds is None else problem.budget.part(1.1)
    with replace(problem, budget=whole).spend().limits():
        result = _planned(planner, problem)
    searched_s = spending.seconds if result.search_seconds is None else result.search_seconds
    is_cut = spending.seconds >= (1.0 - JUDGED_PART) * problem.budget.limit_s
    try:
        judged = _judged(planner, problem, result, spending)
    except StrategyError as error:
        raise StrategyError(f"a candidate of {planner.name} is no legal plan: {error}") from error
    is_starved = is_cut and result.num_evaluations < STARVED
    starved = (
        f"starved: {result.num_evaluations} evaluations in {spending.seconds:.1f} s; a larger "
        "budget lets it search"
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
        note="; ".join(filter(None, (result.note, starved * is_starved))),
        starved=is_starved,
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


def _planned(planner: Planner, problem: Problem) -> PlanResult:
    """The result of a method, which leaves seconds for the referee.

    Raises:
        ConformanceError: a method of a user returns something else.
    """
    searching = problem.budget
    if searching.seconds is not None:
        searching = searching.part(1.0 - JUDGED_PART)
    result = planner.plan(replace(problem, budget=searching))
    if not isinstance(result, PlanResult):
        raise ConformanceError(
            f"{planner.name}: plan() returns {type(result).__name__}; return a "
            "heterog.methods.planner.PlanResult."
        )
    return result


def _judged(
    planner: Planner, problem: Problem, result: PlanResult, spending: Spending
) -> list[tuple[Evaluation, Strategy]]:
    """The referee's evaluations of a method's candidates, at least of the first one.

    Every candidate is judged in its own first order, then in the orders that it has not tried.
    """
    evaluator = problem.evaluator
    judged = [
        (each.judged, each.strategy) for each in result.candidates if each.judged is not None
    ]
    turns = [(each.strategy, each.orders[:1]) for each in result.candidates if each.judged is None]
    for candidate in result.candidates:
        own = candidate.orders if planner.stage == "baseline" else problem.orders
        done = candidate.judged.order if candidate.judged is not None else candidate.orders[0]
        turns.append((candidate.strategy, tuple(order for order in own if order != done)))

    known = _known_of(problem).evaluations

    def take(strategy: Strategy, orders: tuple[Order, ...]) -> None:
        # A step that exceeds the best so far is not simulated to its end.
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


@dataclass(slots=True)
class _Known:
    """Evaluations of earlier rounds: a method often returns the same candidates again."""

    evaluations: dict[tuple[Strategy, Order], Evaluation] = field(default_factory=dict)
    noisy_s: dict[tuple[Strategy, Order], float] = field(default_factory=dict)


def _known_of(problem: Problem) -> _Known:
    return problem.resumed(lambda _: _Known(), "judged")


def _most_robust(
    evaluator: Evaluator,
    judged: Sequence[tuple[Evaluation, Strategy]],
    known: dict[tuple[Strategy, Order], float],
) -> int:
    """Index of the candidate to take, of candidates sorted best first.

    Candidates within ``EQUALLY_GOOD`` of the shortest step are equal to any simulator; among
    them the one with the shortest mean step under noise is taken.
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


Ran = tuple[MethodRow, float]
"""Row of a method, and the seconds that it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatTurn:
    """The next work of one seat.

    Attributes:
        methods: Methods with their budgets, in the order in which they run.
        seeds: Strategies to start from, beside those that the methods find.
        seed: Seed of everything random on this seat.
        most_tasks: Most tasks of a program that is simulated.
    """

    methods: tuple[tuple[Planner, Budget], ...]
    seeds: tuple[Candidate, ...]
    seed: int
    most_tasks: float


def deal(planners: Sequence[Planner], num_seats: int) -> list[list[Planner]]:
    """Methods of each seat, in their order; those that draw at random are on every seat.

    >>> class Method:
    ...     def __init__(self, name, is_random=False): self.name, self.is_random = name, is_random
    >>> asked = [Method("a"), Method("b"), Method("c"), Method("annealing", True)]
    >>> [[each.name for each in seat] for seat in deal(asked, 2)]
    [['a', 'c', 'annealing'], ['b', 'annealing']]
    """
    alone = [planner for planner in planners if not planner.is_random]
    return [
        [each for each in planners if each.is_random or alone.index(each) % num_seats == seat]
        for seat in range(num_seats)
    ]


def can_be_sent(planner: Planner) -> bool:
    """Whether a seat has the code of a method: it has this package, but no user's file."""
    return planner.written_in.partition(".")[0] == __name__.partition(".")[0]


@dataclass(slots=True, kw_only=True)
class _Seat:
    """State of a seat between turns: an evaluator, and what its methods resume from."""

    request: Request
    evaluator: Evaluator
    memories: dict[str, dict[str, object]] = field(default_factory=dict)


_seat: _Seat | None = None


def _seat_for(request: Request) -> _Seat:
    global _seat
    if _seat is None or _seat.request is not request:
        evaluator = Evaluator(request.graph, request.cluster, request.cost_model)
        _seat = _Seat(request=request, evaluator=evaluator)
    return _seat


def prepare_seat(request: Request, planners: tuple[Planner, ...]) -> None:
    """Import, read and compile what methods need on this seat."""
    evaluator = _seat_for(request).evaluator
    evaluator.warm_up()
    for planner in planners:
        planner.prepare(evaluator)


def take_turn(request: Request, turn: SeatTurn) -> list[Ran]:
    """Run a turn on this seat; returns the results of its methods, in their order.

    A seat that was asked to stop hands over what it has.
    """
    seat = _seat_for(request)
    seat.evaluator.most_tasks = turn.most_tasks
    problem = Problem(
        evaluator=seat.evaluator,
        budget=turn.methods[0][1] if turn.methods else Budget(evaluations=1),
        seed=turn.seed,
        step_barrier=request.step_barrier,
        orders=request.orders,
    )
    stop = Stop(is_asked_to_stop)
    ran: list[Ran] = []
    for planner, budget in turn.methods:
        found = [row.candidate for row, _ in ran if row.candidate is not None]
        seeds = (*turn.seeds, *found)
        if stop.is_requested and seeds:
            break
        memory = seat.memories.setdefault(planner.name, {})
        # No method is stopped before there is a strategy to return.
        asked = stop if seeds else Stop()
        part = replace(problem, budget=budget, seeds=seeds, memory=memory, stop=asked)
        spending = part.spend()
        ran.append((run_method(planner, part), spending.seconds))
    return ran
