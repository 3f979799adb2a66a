"""The protocol of planners, their budgets and results.

``PointSearch`` is the base class of searches over points, ``Searching`` of methods that are one.
"""

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from heterog.cluster.topology import Cluster
from heterog.errors import BudgetError, StrategyError
from heterog.graph.op_graph import OpGraph
from heterog.methods.teams import rules_of_model
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator, Outcome
from heterog.strategy.layouts.layout import LayoutError
from heterog.strategy.strategy import Decision, Strategy

_BUDGET = re.compile(r"(\d+(?:\.\d*)?)\s*(ms|s|m|min|h|e)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_ROUNDING = 1e-6
"""Rounding error of shares: 30 x (1/3 + 1/10) is 12.99... but means 13 evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limit of a search: either seconds or evaluations (then the result is reproducible).

    Attributes:
        seconds: Wall-clock seconds, if the budget is one of time.
        evaluations: Number of simulated strategies, if the budget is one of evaluations.

    >>> Budget.parse("30s"), Budget.parse("5000e")
    (Budget(seconds=30.0, evaluations=None), Budget(seconds=None, evaluations=5000))
    """

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and self.evaluations is not None:
            raise BudgetError(
                f"a budget of {self.seconds:g} s and {self.evaluations} evaluations: only the "
                "evaluations would count; give one of the two."
            )
        amount = self.seconds if self.evaluations is None else self.evaluations
        kind: Any = Real if self.evaluations is None else Integral
        if not isinstance(amount, kind) or not 0 < amount < float("inf"):
            raise BudgetError(f"a budget of {amount} allows no search; give '30s' or '5000e' say.")

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.evaluations is None else f"{self.evaluations}e"

    @property
    def limit_s(self) -> float:
        """Its seconds; infinite for a budget of evaluations."""
        return math.inf if self.seconds is None else self.seconds

    @property
    def most_evaluations(self) -> float:
        """Its evaluations; infinite for a budget of time."""
        return math.inf if self.evaluations is None else self.evaluations

    def part(self, share: float) -> "Budget":
        """A part of the budget, at least one evaluation."""
        if self.evaluations is not None:
            return Budget(evaluations=max(int(self.evaluations * share + _ROUNDING), 1))
        return Budget(seconds=self.limit_s * share)

    @staticmethod
    def parse(text: str) -> "Budget":
        """Read ``"30s"``, ``"2m"``, ``"500ms"`` or ``"5000e"``.

        Raises:
            BudgetError: the text is something else, or the amount is not positive.
        """
        match = _BUDGET.fullmatch(str(text).strip())
        if match is None:
            raise BudgetError(
                f"cannot read budget '{text}'; write 30s, 2m or 5000e (evaluations)."
            )
        amount = float(match[1])
        if amount <= 0:
            raise BudgetError(f"a budget of {text} allows no search; give more, for example 30s.")
        if match[2] == "e":
            if amount % 1:  # also of an infinite amount
                raise BudgetError(f"a budget of {text} is not a whole number of evaluations.")
            return Budget(evaluations=int(amount))
        return Budget(seconds=amount * _SECONDS[match[2]])


ENDLESS = Budget(evaluations=10**12)
"""A budget for what only a stop ends."""


class Stop:
    """Switch that asks all searches to return their best so far; Ctrl-C sets it.

    Args:
        is_asked: Function that returns whether a stop is requested elsewhere (another process).
    """

    def __init__(self, is_asked: Callable[[], bool] = lambda: False) -> None:
        self._is_asked = is_asked
        self._is_requested = False

    @property
    def is_requested(self) -> bool:
        """Whether a stop was requested."""
        return self._is_requested or self._is_asked()

    def request(self) -> None:
        """Request a stop; every search notices at its next evaluation."""
        self._is_requested = True


class TimeUp(Exception):
    """A search has no time left."""

    def __init__(self, spending: "Spending") -> None:
        super().__init__("a search has no time left")
        self.spending = spending


class Spending:
    """The rest of a budget while a search runs.

    Under a budget in evaluations the caller must check ``is_over``; time never cuts the search, so
    that results can be reproduced. A budget in seconds also ends loops that do not check
    ``is_over``: inside ``limits``, the first evaluation after the end leaves the block. Long loops
    without evaluations call ``check``, which does the same. ``stop`` ends them under any budget.

    Args:
        budget: Time or evaluations that may be spent from now on.
        evaluator: Evaluator whose evaluations count.
        stop: Switch that ends the search early.
        clock: Function that returns the seconds of some clock.
    """

    def __init__(
        self,
        budget: Budget,
        evaluator: Evaluator,
        *,
        stop: Stop | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._budget = budget
        self._evaluator = evaluator
        self._stop = stop or Stop()
        self._clock = clock
        self._started_s = clock()
        self._evaluations_before = evaluator.num_evaluations

    @property
    def evaluations(self) -> int:
        """Evaluations spent so far."""
        return self._evaluator.num_evaluations - self._evaluations_before

    @property
    def seconds(self) -> float:
        """Seconds spent so far."""
        return self._clock() - self._started_s

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up, or the search was asked to stop."""
        return self.fraction >= 1.0 or self._stop.is_requested

    @property
    def is_cut(self) -> bool:
        """Whether time is up, or the search was asked to stop."""
        return self._stop.is_requested or self.seconds >= self._budget.limit_s

    @property
    def fraction(self) -> float:
        """Part of the budget that is spent: from 0, and above 1 if it is overspent."""
        budget = self._budget
        return max(self.evaluations / budget.most_evaluations, self.seconds / budget.limit_s)

    def is_past(self, part: float) -> bool:
        """Whether the time is over, or a part of a budget of seconds is spent."""
        return self.is_cut or (self._budget.seconds is not None and self.fraction >= part)

    def check(self) -> None:
        """Leave the block of ``limits`` if time is up; for long loops without evaluations.

        Raises:
            TimeUp: time is up; ``limits`` catches this.
        """
        if self.is_cut:
            raise TimeUp(self)

    @contextmanager
    def limits(self) -> Iterator[None]:
        """A block that ends, without an error, at the first evaluation after time is up.

        The caller returns its best so far after the block.
        """
        outer = self._evaluator.poll

        def poll() -> None:
            self.check()
            outer()

        self._evaluator.poll = poll
        try:
            yield
        except TimeUp as up:
            if up.spending is not self:  # a search around this one has to end
                raise
        finally:
            self._evaluator.poll = outer


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy with the orders that its method runs it in.

    Attributes:
        strategy: The strategy.
        orders: Orders that the method allows. A baseline is judged in these orders, and the best
            one counts; a search is judged in all orders of the problem.
        judged: The referee's result for the first order, if it is known already.
    """

    strategy: Strategy
    orders: tuple[Order, ...]
    judged: Evaluation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The result of a planner.

    Attributes:
        candidates: Its best strategies, best first by its own evaluations; the referee chooses
            among them. Empty if the method does not apply; ``reason`` then says why.
        num_evaluations: Number of simulations it asked for.
        search_seconds: Seconds of the search, if the method knows them better than its caller.
        reason: Reason why there is no candidate.
        note: Remark about the search, for example that a beam cut it short.
    """

    candidates: tuple[Candidate, ...]
    num_evaluations: int
    search_seconds: float | None = None
    reason: str = ""
    note: str = ""


Progress = Callable[[str, float, float], None]
"""Function called with (method, fraction of its budget spent, best seconds so far)."""
Search = TypeVar("Search")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A planner's task; the evaluator knows its graph and cluster.

    Attributes:
        evaluator: Evaluator that scores strategies; it has graph, cluster and cost model.
        budget: Time or evaluations that the search may spend.
        seed: Seed of all random choices.
        step_barrier: Whether a step ends with all updates.
        orders: Orders that a searching method may choose from.
        seeds: Strategies of other methods to start from.
        proposals: For each strategy that a policy drew, the decisions of all groups; a search may
            use parts of them.
        report: Function called with (fraction of the budget spent, best seconds so far).
        stop: Switch that asks the search to return its best so far.
        clock: Function that returns the seconds by which a budget in seconds is kept.
        memory: Storage of one method, passed to it again at every later call so that it can
            resume.
    """

    evaluator: Evaluator
    budget: Budget
    seed: int = 0
    step_barrier: bool = True
    orders: tuple[Order, ...] = tuple(Order)
    seeds: tuple[Candidate, ...] = ()
    proposals: tuple[tuple[Decision, ...], ...] = ()
    report: Callable[[float, float], None] = field(default=lambda fraction, best: None)
    stop: Stop = field(default_factory=Stop)
    clock: Callable[[], float] = time.perf_counter
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def first_order(self) -> Order:
        """Order in which a search evaluates its starts: the second allowed one, if any."""
        return self.orders[min(1, len(self.orders) - 1)]

    @property
    def has_only_places(self) -> bool:
        """Whether there is nothing to divide, neither samples nor ops: each op has a place."""
        graph = self.evaluator.graph
        return graph.batch_size == 1 and rules_of_model(graph) is None

    def resumed(self, make: Callable[["Problem"], Search], key: str = "search") -> Search:
        """A method's search, either as the last call left it in ``memory`` or newly made.

        A search for another evaluator is dropped, because channels are numbered differently there.

        Args:
            make: Makes the search of a problem.
            key: Name in ``memory``; anything else of a method may be kept there in the same way.
        """
        evaluator, known = self.memory.get(key, (None, None))
        if evaluator is not self.evaluator:
            known = make(self)
            self.memory[key] = self.evaluator, known
        found: Search = known
        return found

    def spend(self) -> Spending:
        """Begin to spend the budget."""
        return Spending(self.budget, self.evaluator, stop=self.stop, clock=self.clock)


STAGES = ("baseline", "zero_shot", "search")
"""Stages in the order in which methods run: searches start from strategies of earlier methods."""


@runtime_checkable
class Planner(Protocol):
    """A method: turns a problem into candidate strategies.

    A method of your own is a subclass with a ``name``, a ``stage`` and ``plan``; everything else
    has a default.
    """

    name: str
    """Name of the method on the command line, in tables and in plans."""
    stage: str
    """``"baseline"`` for methods without search, ``"zero_shot"`` for a policy alone, ``"search"``
    for others."""
    resumes: bool = False
    """Whether it resumes its search when it gets a problem with the same ``memory`` again."""
    comes_last: bool = False
    """Whether it only improves plans of the others, so that it runs after them."""
    improves: bool = False
    """Whether it starts from the best plans of all methods; half of the time after the first
    round is kept for such methods."""
    is_random: bool = False
    """Whether another seed gives another search, so that several workers may run it."""
    answers_whole: bool = False
    """Whether a search that is cut has no answer, and one that ends may be followed by another;
    see ``whole_s``."""
    most_part: float = 1.0
    """Largest part that it takes of a budget in seconds that several methods share."""
    least_part: float = 0.0
    """Least part of such a budget that its first round gets; what it does not use others get."""

    def plan(self, problem: Problem) -> PlanResult:
        """Find strategies for the problem's graph and cluster."""
        ...

    @property
    def written_in(self) -> str:
        """Module of its code; workers have the modules of this package, but no user's file."""
        return type(self).__module__

    def prepare(self, evaluator: Evaluator) -> None:
        """Do the work before time is counted: imports, reading a policy."""
        return

    def joins_auto(self, graph: OpGraph, cluster: Cluster) -> bool:
        """Whether ``auto`` runs it for this graph and cluster."""
        return True

    def whole_s(self, problem: Problem) -> float:
        """Seconds that a whole answer takes; 0 for a search that can be cut at any time.

        If several methods share a budget, the method gets at least this long where possible. With
        a shorter budget it does not begin, and says so.
        """
        return 0.0


Point = TypeVar("Point", bound=Hashable)


class PointSearch(ABC, Generic[Point]):
    """A search whose points are made into strategies and simulated, each once.

    A subclass says which strategy a point means; its ``search`` chooses the points to try.

    Args:
        problem: Problem to find strategies for.

    Attributes:
        problem: The problem, or a later one on the same evaluator if the search is resumed.
        spending: What has been spent of its budget.
        evaluator: Evaluator of the problem.
        found: Evaluations of the points that were simulated.
        refused: For each other point, why it has no strategy or cannot run.
    """

    num_returned = 3

    def __init__(self, problem: Problem) -> None:
        self.problem, self.spending = problem, problem.spend()
        self.evaluator = problem.evaluator
        self.found: dict[Point, Evaluation] = {}
        self.refused: dict[Point, str] = {}
        self._best_s = math.inf

    @abstractmethod
    def search(self) -> None:
        """Try points; the end of the budget may cut it at any evaluation."""

    @abstractmethod
    def strategy_of(self, point: Point) -> Strategy:
        """The strategy of a point; a ``LayoutError`` or ``StrategyError`` refuses it."""

    @property
    @abstractmethod
    def why_nothing(self) -> str:
        """Reason to give if no point makes sense."""

    def in_words(self, point: Point) -> str:
        """Description of the best point for people; empty if there is nothing to say."""
        return ""

    def orders(self, point: Point) -> tuple[Order, ...]:
        """Orders in which the strategy of a point may run."""
        return tuple(Order)

    def returned(self) -> list[Point]:
        """The points that the method returns, best first."""
        return self.best(self.num_returned)

    def answer(self, problem: Problem) -> PlanResult:
        """Search with the budget of a problem, and return the best strategies.

        Args:
            problem: The problem of the beginning, or a later one on the same evaluator.
        """
        if problem is not self.problem:
            self.problem, self.spending = problem, problem.spend()
        # A program that was too large to simulate may be allowed in a longer round.
        for point in [p for p, each in self.found.items() if each.outcome == Outcome.TOO_LARGE]:
            del self.found[point]
        with self.spending.limits():
            self.search()
        best = self.returned()
        # Time was up before any point was tried, so that nothing is known of them.
        is_cut_first = self.spending.is_cut and not self.found and not self.refused
        return PlanResult(
            candidates=tuple(
                Candidate(strategy=self.strategy_of(point), orders=self.orders(point))
                for point in best
            ),
            num_evaluations=self.spending.evaluations,
            reason="" if best or is_cut_first else self.why_nothing,
            note=self.in_words(best[0]) if best else "",
        )

    def ask(self, point: Point) -> Evaluation | None:
        """Evaluate a point in its first order while the budget lasts.

        Until a first point has run, points are evaluated even if the budget is over. ``None`` for
        a new point once the budget is over, and where ``evaluate`` returns ``None``.
        """
        if self.found and point not in self.found and self.spending.is_over:
            return None
        return self.evaluate(point, self.orders(point)[0])

    def while_it_fits(self, points: Iterable[Point]) -> Point | None:
        """Ask points until one does not fit; returns the last one that does."""
        last = None
        for point in points:
            found = self.ask(point)
            if found is None or not found.is_ok:
                break
            last = point
        return last

    def evaluate(self, point: Point, order: Order = Order.FIFO) -> Evaluation | None:
        """Evaluate a point, once; ``None`` if it is refused or cannot run."""
        if point in self.found or point in self.refused:
            return self.found.get(point)
        try:
            evaluation = self.evaluator.evaluate(self.strategy_of(point), order)
        except (LayoutError, StrategyError) as error:
            self.refused[point] = str(error)
            return None
        if evaluation.outcome == Outcome.CANNOT_RUN:
            self.refused[point] = evaluation.shortage
            return None
        self.keep(point, evaluation)
        return evaluation

    def keep(self, point: Point, evaluation: Evaluation) -> None:
        """Keep the evaluation of a point, and report the best step so far."""
        self.found[point] = evaluation
        if evaluation.is_ok:
            self._best_s = min(self._best_s, evaluation.step_time_s)
        self.problem.report(self.spending.fraction, self._best_s)

    def best(self, count: int) -> list[Point]:
        """The best points, best first."""
        return sorted(self.found, key=lambda point: self.found[point].preference)[:count]


class Searching(Planner):
    """A method that is a ``PointSearch``; if it ``resumes``, it goes on with the same one."""

    search: ClassVar[type[PointSearch[Any]]]

    def plan(self, problem: Problem) -> PlanResult:
        """Search with the budget of a problem; see the module of the method."""
        search = problem.resumed(self.search) if self.resumes else self.search(problem)
        return search.answer(problem)


class StrategySearch(PointSearch[tuple[Strategy, Order]]):
    """A search whose points are strategies, each in one order."""

    num_returned = 4

    def strategy_of(self, point: tuple[Strategy, Order]) -> Strategy:
        """See ``PointSearch``."""
        return point[0]

    def orders(self, point: tuple[Strategy, Order]) -> tuple[Order, ...]:
        """See ``PointSearch``."""
        return (point[1],)
