"""What a planner is: the protocol, its budget, its result, and the registry of methods."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from heterog.errors import BudgetError, UnknownNameError
from heterog.names import name_problem
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Evaluator
from heterog.strategy.strategy import Decision, Strategy

_BUDGET = re.compile(r"(\d+(?:\.\d*)?)\s*(ms|s|m|min|h|e)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much a search may spend: seconds, or evaluations (then the result is reproducible).

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
        if amount is None or not 0 < amount < float("inf"):
            raise BudgetError(
                f"a budget of {self} allows no search; give some time (30s) or a number of "
                "evaluations (5000e)."
            )

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.evaluations is None else f"{self.evaluations}e"

    def part(self, share: float) -> "Budget":
        """A part of the budget, at least one evaluation."""
        if self.evaluations is not None:
            return Budget(evaluations=max(int(self.evaluations * share), 1))
        assert self.seconds is not None
        return Budget(seconds=self.seconds * share)

    @staticmethod
    def parse(text: str) -> "Budget":
        """Read ``"30s"``, ``"2m"``, ``"500ms"`` or ``"5000e"``.

        Raises:
            BudgetError: the text is something else, or the amount is not positive.
        """
        match = _BUDGET.fullmatch(text.strip())
        if match is None:
            raise BudgetError(
                f"cannot read budget '{text}'; write 30s, 2m or 5000e (evaluations)."
            )
        amount = float(match[1])
        if amount <= 0:
            raise BudgetError(f"a budget of {text} allows no search; give more, for example 30s.")
        if match[2] == "e":
            if amount != int(amount):
                raise BudgetError(f"a budget of {text} is not a whole number of evaluations.")
            return Budget(evaluations=int(amount))
        return Budget(seconds=amount * _SECONDS[match[2]])


class Spending:
    """What is left of a budget while a search runs."""

    def __init__(self, budget: Budget, evaluator: Evaluator) -> None:
        self._budget = budget
        self._evaluator = evaluator
        self._started_s = time.perf_counter()
        self._evaluations_before = evaluator.num_evaluations

    @property
    def evaluations(self) -> int:
        """Evaluations spent so far."""
        return self._evaluator.num_evaluations - self._evaluations_before

    @property
    def seconds(self) -> float:
        """Seconds spent so far."""
        return time.perf_counter() - self._started_s

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up."""
        return self.fraction >= 1.0

    @property
    def fraction(self) -> float:
        """Part of the budget that is spent, 0 to 1 and more."""
        if self._budget.evaluations is not None:
            return self.evaluations / self._budget.evaluations
        assert self._budget.seconds is not None
        return self.seconds / self._budget.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy with the order that its method runs it in.

    Attributes:
        strategy: the decisions.
        orders: that the method allows. Of a baseline the best of them counts; a search's
            candidates are judged in all orders of its task.
    """

    strategy: Strategy
    orders: tuple[Order, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What a planner found.

    Attributes:
        candidates: its best strategies, best first by its own evaluations; the referee chooses
            among them. Empty if the method does not apply; ``reason`` then says why.
        num_evaluations: simulations it asked for.
        search_seconds: seconds it searched.
        reason: why there is no candidate.
        note: what else to know about the search: that a beam cut it, say.
    """

    candidates: tuple[Candidate, ...]
    num_evaluations: int
    search_seconds: float
    reason: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a planner is asked to do, beyond graph and cluster, which the evaluator knows.

    Attributes:
        evaluator: scores strategies; holds graph, cluster and cost model.
        budget: what the search may spend.
        seed: of everything random.
        step_barrier: whether a step ends with all updates.
        orders: the orders that a searching method may choose from.
        seeds: strategies of other methods to start from.
        proposals: decisions of every group in strategies that a policy drew; a search may take
            parts of them over.
        report: called with (fraction of the budget spent, best seconds so far).
    """

    evaluator: Evaluator
    budget: Budget
    seed: int = 0
    step_barrier: bool = True
    orders: tuple[Order, ...] = tuple(Order)
    seeds: tuple[Candidate, ...] = ()
    proposals: tuple[tuple[Decision, ...], ...] = ()
    report: Callable[[float, float], None] = field(default=lambda fraction, best: None)


OUTCOMES = ("ok", "out_of_memory", "cannot_run", "not_applicable")
"""What can become of a method; a plan's file with another word is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """What one method reached, judged by the referee: a row of every comparison.

    Attributes:
        method: name of the planner.
        stage: ``"baseline"``, ``"search"``, ``"zero_shot"`` or ``"finetuned"``.
        outcome: one of ``OUTCOMES``.
        step_time_s: seconds per step; ``None`` unless ``ok``.
        order: name of the order it ran in.
        peak_memory_bytes: of each device.
        num_evaluations: simulations spent.
        search_seconds: seconds spent.
        shortage: why it is not ``ok``, in words.
        overflow_bytes: bytes missing on the worst device, 0 if it fits, infinite if it cannot run.
        candidate: the strategy itself; ``None`` if the method does not apply.
        noisy_step_times_s: seconds per step when devices and links are not as fast as predicted,
            one for each draw of ``simulator.noise``; the same draws for every method. Empty for
            rows that no gain is quoted between.
        is_rehearsed: the strategy was played through on all ranks without data; where it was not,
            ``ok`` is what the simulator says.
    """

    method: str
    stage: str
    outcome: str
    step_time_s: float | None
    order: str
    peak_memory_bytes: tuple[int, ...]
    num_evaluations: int
    search_seconds: float
    shortage: str = ""
    overflow_bytes: float = 0.0
    candidate: Candidate | None = None
    noisy_step_times_s: tuple[float, ...] = ()
    is_rehearsed: bool = False


STAGES = ("baseline", "zero_shot", "search")
"""Stages in the order in which methods run: searches start from what the others found."""


class Planner(Protocol):
    """A method: turns a task into candidate strategies."""

    name: str
    stage: str
    """``"baseline"`` for methods without search, ``"zero_shot"`` for a policy alone, ``"search"``
    for others."""

    def plan(self, task: Task) -> PlanResult:
        """Find strategies for the task's graph and cluster."""


_REGISTRY: dict[str, Planner] = {}


def register(planner: Planner) -> Planner:
    """Make a planner known by its name; ``auto`` and the command line find it there.

    Raises:
        ValueError: the name is none; see ``heterog.names``.
    """
    if (problem := name_problem(planner.name)) is not None:
        raise ValueError(f"the method's name {planner.name!r} {problem}.")
    _REGISTRY[planner.name] = planner
    return planner


def planner_by_name(name: str) -> Planner:
    """The planner of a name.

    Raises:
        UnknownNameError: there is none; names the nearest.
    """
    if name not in _REGISTRY:
        raise UnknownNameError("method", name, ["auto", *_REGISTRY])
    return _REGISTRY[name]


def planners() -> Iterator[Planner]:
    """All registered planners: baselines, policies, searches; each in order of registration."""
    yield from sorted(_REGISTRY.values(), key=lambda planner: STAGES.index(planner.stage))


def best_of(evaluations: list[Evaluation]) -> int:
    """Index of the best evaluation: those that fit first, then the shortest step."""
    return min(range(len(evaluations)), key=lambda index: evaluations[index].preference)
