"""Search for plans under Sailor's rules, limited by time and number of evaluations.

The search is simulated annealing from many starts, until the limit is reached.

Starts are random columns; moves are small changes to columns.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from heterog.errors import BudgetError, StrategyError
from sailor.columns import Columns, Kind, Tables, gpus_of, plan_of, time_of
from sailor.inputs import Inputs, Plan
from sailor.score import Score, score_of

MOST_STAGES = 8
"""More stages were never near the best, because each sends twice and fills the pipeline."""
MOST_KINDS = 4
"""Plans with more kinds of columns than one per card and one more were not better."""


class Moves:
    """Makes random columns and changes them.

    Args:
        tables: for teams and numbers of GPUs.
        random: where chance comes from.
    """

    def __init__(self, tables: Tables, random: Random) -> None:
        self._tables, self._random = tables, random
        measured = tables.inputs.profiled
        self._sizes = sorted(
            {size for team in tables.teams for size in measured(team.card, team.tensor)}
        )
        self._every: tuple[Callable[[Columns], Columns | None], ...] = (
            self._shift_bound,
            self._shift_bound,
            self._change_team,
            self._change_team,
            self._resize,
            self._recount,
            self._recount,
            self._exchange,
            self._add_kind,
            self._drop_kind,
            self._split_stage,
            self._join_stages,
        )

    def start(self, num_stages: int) -> Columns:
        """Random columns of so many stages, on as many GPUs as they can use."""
        random, tables = self._random, self._tables
        layers = tables.inputs.num_layers
        # The head is never a stage of its own: its gradients to the stage before are logits.
        inner = sorted(random.sample(range(1, layers - 1), num_stages - 1))
        size = random.choice(self._sizes[:4])
        kinds = []
        for _ in range(random.randint(1, len(tables.cards) + 1)):
            cards = random.sample(tables.cards, random.randint(1, len(tables.cards)))
            fitting = [team for team in tables.teams if team.card in cards]
            teams = tuple(random.choice(fitting) for _ in range(num_stages))
            if random.random() < 0.5:  # most good columns have like teams
                teams = (teams[0],) * num_stages
            kinds.append(Kind(teams=teams, count=1))
        made = Columns(bounds=(0, *inner, layers), kinds=tuple(kinds), micro_batch=size)
        return self._filled(made)

    def change(self, columns: Columns) -> Columns | None:
        """One change by chance, or ``None`` where it does not apply."""
        changed = self._random.choice(self._every)(columns)
        if changed is None:
            return None
        return self._filled(changed) if self._random.random() < 0.7 else self._shrunk(changed)

    def _shrunk(self, columns: Columns) -> Columns | None:
        """Fewer columns, until there are GPUs enough."""
        limits = self._tables.num_gpus
        while over := {
            card for card, used in gpus_of(columns, self._tables).items() if used > limits[card]
        }:
            users = [
                index
                for index, kind in enumerate(columns.kinds)
                if any(team.card in over for team in kind.teams)
            ]
            columns = _counted(columns, self._random.choice(users), -1)
            if not columns.kinds:
                return None
        return columns

    def _filled(self, columns: Columns) -> Columns:
        """As many columns as there are GPUs for, of kinds in random order."""
        shrunk = self._shrunk(columns)
        if shrunk is None:
            return columns
        tables = self._tables
        order = list(range(len(shrunk.kinds)))
        self._random.shuffle(order)
        for index in order:
            used = gpus_of(shrunk, tables)
            one = replace(shrunk.kinds[index], count=1)
            needs = gpus_of(replace(shrunk, kinds=(one,)), tables)
            more = min(
                (tables.num_gpus[card] - used[card]) // count
                for card, count in needs.items()
                if count
            )
            shrunk = _counted(shrunk, index, more)
        return shrunk

    def _shift_bound(self, columns: Columns) -> Columns | None:
        if columns.num_stages == 1:
            return None
        index = self._random.randint(1, columns.num_stages - 1)
        moved = columns.bounds[index] + self._random.choice((-2, -1, 1, 2))
        bounds = (*columns.bounds[:index], moved, *columns.bounds[index + 1 :])
        # The last bound may not move to the head either.
        in_order = all(one < other for one, other in pairwise((*bounds[:-1], bounds[-1] - 1)))
        return replace(columns, bounds=bounds) if in_order else None

    def _change_team(self, columns: Columns) -> Columns | None:
        index = self._random.randrange(len(columns.kinds))
        kind = columns.kinds[index]
        team = self._random.choice(self._tables.teams)
        stage = self._random.randrange(columns.num_stages)
        teams = (*kind.teams[:stage], team, *kind.teams[stage + 1 :])
        if self._random.random() < 0.3:
            teams = tuple(team if each == kind.teams[stage] else each for each in kind.teams)
        return _with_kind(columns, index, replace(kind, teams=teams))

    def _resize(self, columns: Columns) -> Columns | None:
        place = self._sizes.index(columns.micro_batch) + self._random.choice((-1, 1))
        if not 0 <= place < len(self._sizes):
            return None
        return replace(columns, micro_batch=self._sizes[place])

    def _recount(self, columns: Columns) -> Columns | None:
        index = self._random.randrange(len(columns.kinds))
        changed = _counted(columns, index, self._random.choice((-4, -2, -1, 1, 2, 4)))
        return changed if changed.kinds else None

    def _exchange(self, columns: Columns) -> Columns | None:
        """Fewer of one kind, more of another."""
        if len(columns.kinds) < 2:
            return None
        one, other = self._random.sample(range(len(columns.kinds)), 2)
        more = _counted(columns, one, self._random.randint(1, 4))
        return _counted(more, other, -self._random.randint(1, 4))

    def _add_kind(self, columns: Columns) -> Columns | None:
        if len(columns.kinds) >= MOST_KINDS:
            return None
        kind = self._random.choice(columns.kinds)
        added = replace(columns, kinds=(*columns.kinds, replace(kind, count=1)))
        stage = self._random.randrange(columns.num_stages)
        team = self._random.choice(self._tables.teams)
        teams = (*kind.teams[:stage], team, *kind.teams[stage + 1 :])
        if self._random.random() < 0.5:
            teams = (team,) * columns.num_stages
        return _with_kind(added, len(columns.kinds), replace(kind, teams=teams, count=1))

    def _drop_kind(self, columns: Columns) -> Columns | None:
        if len(columns.kinds) < 2:
            return None
        index = self._random.randrange(len(columns.kinds))
        return _counted(columns, index, -columns.kinds[index].count)

    def _split_stage(self, columns: Columns) -> Columns | None:
        stages = columns.num_stages
        stage = self._random.randrange(stages)
        first, end = columns.bounds[stage : stage + 2]
        last = end - 1 if stage + 1 == stages else end
        if stages >= MOST_STAGES or last - first < 2:
            return None
        bound = self._random.randint(first + 1, last - 1)
        bounds = (*columns.bounds[: stage + 1], bound, *columns.bounds[stage + 1 :])
        kinds = tuple(
            replace(
                kind,
                teams=(*kind.teams[:stage], kind.teams[stage], *kind.teams[stage:]),
                count=max(kind.count * stages // (stages + 1), 1),
            )
            for kind in columns.kinds
        )
        return replace(columns, bounds=bounds, kinds=kinds)

    def _join_stages(self, columns: Columns) -> Columns | None:
        if columns.num_stages == 1:
            return None
        stage = self._random.randint(1, columns.num_stages - 1)
        dropped = stage - self._random.randint(0, 1)
        bounds = (*columns.bounds[:stage], *columns.bounds[stage + 1 :])
        kinds = tuple(
            replace(kind, teams=(*kind.teams[:dropped], *kind.teams[dropped + 1 :]))
            for kind in columns.kinds
        )
        return replace(columns, bounds=bounds, kinds=kinds)


def _with_kind(columns: Columns, index: int, kind: Kind) -> Columns:
    kinds = (*columns.kinds[:index], kind, *columns.kinds[index + 1 :])
    return replace(columns, kinds=kinds)


def _counted(columns: Columns, index: int, more: int) -> Columns:
    """More columns of a kind, or fewer; a kind without columns is left out."""
    kind = columns.kinds[index]
    if kind.count + more > 0:
        return _with_kind(columns, index, replace(kind, count=kind.count + more))
    return replace(columns, kinds=(*columns.kinds[:index], *columns.kinds[index + 1 :]))


STEPS = 1500
"""Changes from one start: on 16 + 16 GPUs this found the best plan of Sailor's kind more often per
second than 3,000 or 10,000."""
WARMEST, COLDEST = 0.03, 1e-4
"""Share of a plan's time by which a worse one may be taken, at the beginning and the end."""
NUM_ELITES = 2
"""Best plans kept for each number of stages, as further starts; one list for all numbers would be
filled by the first good one."""
PART_FROM_ELITES = 0.4
"""Share of starts from one of them."""
PART_AGAIN_CHANGED = 0.5
"""Share of changes that are followed by a second one before pricing: a slower team needs fewer
layers. On 32 + 96 GPUs, 0 and 0.35 found the best plan of Sailor's kind from one of three seeds,
0.5 from all."""
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
    """The best plan that Sailor can express.

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
    plan = plan_of(annealing.best)
    return Found(
        plan=plan,
        score=score_of(plan, inputs),
        seconds=time.monotonic() - begin,
        evaluations=annealing.evaluations,
    )
