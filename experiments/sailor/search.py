"""Finds plans under Sailor's rules, within a time and a number of evaluations.

Simulated annealing from many starts, done when its budget is.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from heterog.errors import BudgetError, StrategyError
from sailor.columns import Columns, plan_of, time_of
from sailor.inputs import Inputs, Plan
from sailor.moves import Moves
from sailor.score import Score, score_of
from sailor.tables import Tables

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


class Annealing:
    """One search, from one start after the other.

    Args:
        tables: of the cluster.
        random: where chance comes from.

    Attributes:
        best: the best plan so far.
        best_s: its seconds.
        evaluations: plans that were priced.
    """

    def __init__(self, tables: Tables, random: Random) -> None:
        self._tables = tables
        self._moves = Moves(tables, random)
        self._random = random
        self._stages = [count for count in STAGES if count < tables.inputs.num_layers]
        self._elites: dict[int, list[tuple[float, Columns]]] = {}
        self.best: Columns | None = None
        self.best_s = math.inf
        self.evaluations = 0

    def run(self, is_over: Callable[[], bool]) -> None:
        """Anneal until the budget is spent, which is asked at every step."""
        while not is_over():
            state = self._begin()
            if state is not None:
                self._anneal(state, is_over)

    def _begin(self) -> Columns | None:
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

    def _price(self, state: Columns) -> float:
        self.evaluations += 1
        seconds = time_of(state, self._tables)
        if seconds < self.best_s:
            self.best, self.best_s = state, seconds
        return seconds

    def _anneal(self, state: Columns, is_over: Callable[[], bool]) -> None:
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

    def _keep(self, found: tuple[float, Columns]) -> None:
        elites = self._elites.setdefault(found[1].num_stages, [])
        if all(abs(found[0] - seconds) > 1e-9 for seconds, _ in elites):
            elites.append(found)
            elites.sort(key=lambda each: each[0])
            del elites[NUM_ELITES:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        plan: the best plan.
        score: by the rules themselves, not by the search's tables.
        seconds: that the search took.
        evaluations: plans that it priced.
    """

    plan: Plan
    score: Score
    seconds: float
    evaluations: int


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


def search(
    inputs: Inputs, num_gpus: Mapping[str, int], limit: Limit | None = None, seed: int = 0
) -> Found:
    """The best plan that Sailor can say.

    Args:
        inputs: what was measured.
        num_gpus: of the cluster, by card.
        limit: when to stop.
        seed: of all that is drawn by chance.

    Raises:
        StrategyError: nothing was found within the limit.
    """
    limit = limit or Limit()
    begin = time.monotonic()
    tables = Tables(inputs=inputs, num_gpus=num_gpus)
    annealing = Annealing(tables, Random(f"sailor {seed}"))

    def is_over() -> bool:
        spent_s = time.monotonic() - begin
        return annealing.evaluations >= limit.evaluations or spent_s >= limit.seconds

    annealing.run(is_over)
    if annealing.best is None:
        gpus = ", ".join(f"{count} {card}" for card, count in num_gpus.items())
        raise StrategyError(
            f"no plan for {gpus} was found in {annealing.evaluations} evaluations; give more of "
            "them, or GPUs with more memory."
        )
    plan = plan_of(annealing.best, tables)
    return Found(
        plan=plan,
        score=score_of(plan, inputs),
        seconds=time.monotonic() - begin,
        evaluations=annealing.evaluations,
    )
