"""Methods that search at the same time, each on a seat of its own, and share their plans.

A search has *turns*: in each, every seat runs a few methods one after another, which start from
the best plans of all seats and resume from their state on that seat. With a budget in evaluations,
what a turn gives does not depend on which seat was done first.

Methods that draw at random (``is_random``) run on every seat with a seed of its own. All others
would do the same work everywhere; they are dealt out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from heterog.methods.planner import Budget, Candidate, MethodRow, Planner, Problem, Stop
from heterog.search.judging import run_method
from heterog.search.request import Request
from heterog.simulator.evaluator import Evaluator
from heterog.workers import Seats, is_asked_to_stop

Ran = tuple[MethodRow, float]
"""Row of a method, and the seconds that it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
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


class Together:
    """Seats that search the same graph and cluster.

    Args:
        seats: Workers that keep their state.
        request: Request for all of them.
    """

    def __init__(self, seats: Seats, request: Request) -> None:
        self._seats, self._request = seats, request

    @property
    def num_seats(self) -> int:
        """Number of methods that run at a time."""
        return len(self._seats)

    def prepare(self, planners: Sequence[Planner]) -> None:
        """Let all seats import, read and compile what methods need."""
        self._seats.run(_prepare, self._request, [tuple(planners)] * len(self._seats))

    def take(self, turns: Sequence[Turn]) -> list[list[Ran]]:
        """Run one turn on each seat; return the results of its methods, in their order.

        A seat that was asked to stop hands over what it has.
        """
        return [ran or [] for ran in self._seats.run(_take, self._request, turns)]

    def stop(self) -> None:
        """Ask all methods for their best so far."""
        self._seats.stop()


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
    return type(planner).__module__.partition(".")[0] == __name__.partition(".")[0]


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


def _prepare(request: Request, planners: tuple[Planner, ...]) -> None:
    evaluator = _seat_for(request).evaluator
    evaluator.warm_up()
    for planner in planners:
        planner.prepare(evaluator)


def _take(request: Request, turn: Turn) -> list[Ran]:
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
        # There must be some strategy: until then nobody is stopped.
        asked = stop if seeds else Stop()
        part = replace(problem, budget=budget, seeds=seeds, memory=memory, stop=asked)
        spending = part.spend()
        ran.append((run_method(planner, part), spending.seconds))
    return ran
