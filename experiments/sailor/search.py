"""Finds plans under Sailor's rules, within a time and a number of evaluations.

Simulated annealing from many starts, done when its budget is.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Generic, Protocol, TypeVar

from heterog.errors import BudgetError, StrategyError
from sailor import columns, uneven
from sailor.inputs import Inputs, Plan
from sailor.moves import Moves, UnevenMoves
from sailor.score import Score, score_of
from sailor.tables import Tables


class Staged(Protocol):
    """A plan of any kind."""

    @property
    def num_stages(self) -> int:
        """How many stages it has."""
        ...


State = TypeVar("State", bound=Staged)

STEPS = 1500
"""Changes from one start: on 16 + 16 GPUs this found the best plan of Sailor's kind more often per
second than 3,000 or 10,000."""
WARMEST, COLDEST = 0.03, 1e-4
"""Share of a plan's time by which a worse one may be taken, at the beginning and the end."""
NUM_ELITES = 2
"""Best plans of each number of stages, from which others start again; over all numbers, the first
that is good would fill the list."""
PART_FROM_ELITES = 0.4
"""Share of starts from one of them."""
PART_AGAIN_CHANGED = 0.5
"""Share of changes with one more before they are priced: a slower team wants fewer layers. On
32 + 96 GPUs, 0 and 0.35 found the best plan of Sailor's kind from one of three seeds, 0.5 from
all."""
MOST_DRAWS = 300
"""Random plans until one is possible."""
STAGES = (1, 1, 2, 2, 2, 3, 3, 4, 5, 6)
"""Numbers of stages to start with, by how often."""


class Neighbourhood(Protocol[State]):
    """Makes random plans and changes them."""

    def start(self, num_stages: int) -> State:
        """A random plan."""
        ...

    def change(self, state: State) -> State | None:
        """A plan that differs a little; ``None`` where the change drawn does not apply."""
        ...


class Annealing(Generic[State]):
    """One search; ``rounds`` yields after each start, so that several take turns.

    Args:
        moves: random plans and changes.
        objective: seconds of a plan, infinite where it is not possible.
        random: where chance comes from.
        most_stages: of a model with as many layers but one.

    Attributes:
        best: the best plan so far.
        best_s: its seconds.
        evaluations: plans that were priced.
    """

    def __init__(
        self,
        moves: Neighbourhood[State],
        objective: Callable[[State], float],
        random: Random,
        most_stages: int,
    ) -> None:
        self._moves = moves
        self._objective = objective
        self._random = random
        self._stages = [count for count in STAGES if count <= most_stages]
        self._elites: dict[int, list[tuple[float, State]]] = {}
        self.best: State | None = None
        self.best_s = math.inf
        self.evaluations = 0

    def rounds(self, is_over: Callable[[], bool]) -> Iterator[float]:
        """Anneal from one start after the other.

        Args:
            is_over: whether the budget is spent; asked at every step.

        Yields:
            Seconds of the best plan so far.
        """
        while not is_over():
            state = self._begin()
            if state is not None:
                self._anneal(state, is_over)
            yield self.best_s

    def offer(self, state: State) -> None:
        """Start from this plan, too, if it is possible here."""
        seconds = self._price(state)
        if seconds < math.inf:
            self._keep((seconds, state))

    def _begin(self) -> State | None:
        if self._elites and self._random.random() < PART_FROM_ELITES:
            ranked = sorted(self._elites.values(), key=lambda each: each[0][0])
            # The best numbers of stages more often: the lower of two draws.
            place = min(self._random.randrange(len(ranked)) for _ in range(2))
            return self._random.choice(ranked[place])[1]
        for _ in range(MOST_DRAWS):
            state = self._moves.start(self._random.choice(self._stages))
            if self._price(state) < math.inf:
                return state
        return None

    def _price(self, state: State) -> float:
        self.evaluations += 1
        seconds = self._objective(state)
        if seconds < self.best_s:
            self.best, self.best_s = state, seconds
        return seconds

    def _anneal(self, state: State, is_over: Callable[[], bool]) -> None:
        seconds = self._price(state)
        best = (seconds, state)
        for step in range(STEPS):
            if is_over():
                break
            warmth = WARMEST * (COLDEST / WARMEST) ** (step / STEPS)
            changed = self._moves.change(state)
            while changed is not None and self._random.random() < PART_AGAIN_CHANGED:
                changed = self._moves.change(changed)
            if changed is None:
                continue
            new = self._price(changed)
            # The slack has an exponential distribution: Metropolis' rule.
            if new <= seconds * (1.0 - warmth * math.log(1.0 - self._random.random())):
                state, seconds = changed, new
                if seconds < best[0]:
                    best = (seconds, state)
        self._keep(best)

    def _keep(self, found: tuple[float, State]) -> None:
        elites = self._elites.setdefault(found[1].num_stages, [])
        if all(abs(found[0] - seconds) > 1e-9 for seconds, _ in elites):
            elites.append(found)
            elites.sort(key=lambda each: each[0])
            del elites[NUM_ELITES:]


class Rules(StrEnum):
    """Which plans are looked for."""

    SAILOR = "sailor"
    """What Sailor can say: one micro-batch size that was measured, as many replicas everywhere."""
    LISTS = "lists"
    """Every column of replicas has micro-batches of its own; sizes in between, ZeRO-1."""
    UNEVEN = "uneven"
    """Stages have unlike numbers of replicas; sizes in between, ZeRO-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        plan: the best plan.
        score: by the rules themselves, not by the search's tables.
        rules: which kind of plan it is.
        seconds: that the search took.
        evaluations: plans that it priced.
        state: the plan as columns, a start for other searches; ``None`` if it has none.
    """

    plan: Plan
    score: Score
    rules: Rules
    seconds: float
    evaluations: int
    state: columns.Columns | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """When a search is done, whichever comes first.

    Attributes:
        seconds: of wall time.
        evaluations: of plans; where these come first, a search gives the same plan again.
    """

    seconds: float = 60.0
    evaluations: int = 300_000

    def __post_init__(self) -> None:
        """Check that there is something to spend.

        Raises:
            BudgetError: there is not.
        """
        if self.seconds <= 0 or self.evaluations < 1:
            raise BudgetError(
                f"a search of {self.seconds} s and {self.evaluations} evaluations finds nothing; "
                "give it more than none of both."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One kind of plan.

    Attributes:
        rules: which.
        annealing: looks for it.
        plan: the best one so far.
        offer: takes the best columns of another search as a start.
    """

    rules: Rules
    annealing: Annealing[columns.Columns] | Annealing[uneven.Uneven]
    plan: Callable[[], Plan | None]
    offer: Callable[[columns.Columns], None]


def _columns_search(rules: Rules, tables: Tables, random: Random) -> _Search:
    is_sailors = rules == Rules.SAILOR
    price = columns.sailors_time_s if is_sailors else columns.time_of
    made = columns.sailors_plan if is_sailors else columns.plan_of
    annealing: Annealing[columns.Columns] = Annealing(
        Moves(tables, random, is_uniform=is_sailors, is_zero1=not is_sailors),
        lambda state: price(state, tables),
        random,
        most_stages=tables.inputs.num_layers - 1,
    )

    def plan() -> Plan | None:
        return None if annealing.best is None else made(annealing.best, tables)

    def offer(found: columns.Columns) -> None:
        annealing.offer(replace(found, is_zero1=not is_sailors))

    return _Search(rules=rules, annealing=annealing, plan=plan, offer=offer)


def _uneven_search(tables: Tables, random: Random) -> _Search:
    annealing: Annealing[uneven.Uneven] = Annealing(
        UnevenMoves(tables, random, is_zero1=True),
        lambda state: uneven.time_of(state, tables),
        random,
        most_stages=tables.inputs.num_layers - 1,
    )

    def plan() -> Plan | None:
        return None if annealing.best is None else uneven.plan_of(annealing.best, tables)

    def offer(found: columns.Columns) -> None:
        annealing.offer(uneven.of_columns(replace(found, is_zero1=True)))

    return _Search(rules=Rules.UNEVEN, annealing=annealing, plan=plan, offer=offer)


def _search_of(
    rules: Rules, inputs: Inputs, num_gpus: Mapping[str, int], is_tight: bool, seed: int
) -> _Search:
    tables = Tables(
        inputs=inputs,
        num_gpus=num_gpus,
        is_tight=is_tight,
        may_interpolate=rules != Rules.SAILOR,
    )
    random = Random(f"{rules} {seed}")
    if rules == Rules.UNEVEN:
        return _uneven_search(tables, random)
    return _columns_search(rules, tables, random)


def _take_turns(searches: Sequence[_Search], is_over: Callable[[], bool]) -> None:
    """A start of each after the other; what Sailor can say is a start for all others."""
    turns = [found.annealing.rounds(is_over) for found in searches]
    offered = math.inf
    while not is_over():
        for turn in turns:
            next(turn, None)
        for found in searches:
            best = found.annealing.best
            is_new = found.rules == Rules.SAILOR and found.annealing.best_s < offered
            if is_new and isinstance(best, columns.Columns):
                offered = found.annealing.best_s
                for other in searches:
                    if other is not found:
                        other.offer(best)


def search(
    inputs: Inputs,
    num_gpus: Mapping[str, int],
    rules: tuple[Rules, ...],
    *,
    limit: Limit | None = None,
    start: columns.Columns | None = None,
    is_tight: bool = False,
    seed: int = 0,
) -> Found:
    """The best plan of some kinds; these take turns, a start each.

    Args:
        inputs: what was measured.
        num_gpus: of the cluster, by card.
        rules: kinds of plans.
        limit: when to stop.
        start: columns that another search found for this cluster.
        is_tight: plans also have to fit by what real runs were predicted to hold.
        seed: of all that is drawn by chance.

    Raises:
        StrategyError: nothing fits, or nothing was found within the limit.
    """
    limit = limit or Limit()
    begin = time.monotonic()
    searches = [_search_of(each, inputs, num_gpus, is_tight, seed) for each in rules]

    def spent() -> int:
        return sum(found.annealing.evaluations for found in searches)

    def is_over() -> bool:
        return spent() >= limit.evaluations or time.monotonic() - begin >= limit.seconds

    if start is not None:
        for found in searches:
            found.offer(start)
    _take_turns(searches, is_over)
    scored = []
    for found in searches:
        plan = found.plan()
        if plan is not None:
            scored.append((score_of(plan, inputs), plan, found))
    if not scored:
        gpus = ", ".join(f"{count} {card}" for card, count in num_gpus.items())
        raise StrategyError(
            f"no plan for {gpus} was found in {spent()} evaluations; give more of them, or GPUs "
            "with more memory."
        )
    score, plan, best = min(scored, key=lambda each: each[0].timing.total_s)
    state = best.annealing.best
    return Found(
        plan=plan,
        score=score,
        rules=best.rules,
        seconds=time.monotonic() - begin,
        evaluations=spent(),
        state=state if isinstance(state, columns.Columns) else None,
    )
