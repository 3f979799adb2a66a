"""Tries drafts of a problem: the most promising of many, then variants of the best of these.

A closed form scores drafts, the referee judges the chosen ones, and a local search starts from
these. Drafts are drawn without replacement, each by the softmax of the scores of the remaining
ones (Plackett and Luce); the K largest scores with Gumbel noise are such a draw. So a few hundred
whole plans are scored in one batch, as Ansor chooses programs (Zheng et al. 2020, section 5), and
every decision is scored together with its consequences.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterog.agents.draft_estimates import DraftEstimates
from heterog.agents.drafter import Drafter
from heterog.agents.drafts import Draft
from heterog.lowering.program import FloatArray
from heterog.methods.local_search.neighbours import State
from heterog.methods.local_search.planner import NUM_RETURNED, Lead, Search
from heterog.methods.planner import (
    Budget,
    Candidate,
    Planner,
    PlanResult,
    Problem,
    Spending,
)

SHARPNESS = 8.0
"""Weight of the logarithm of seconds in a score: a draft that is a tenth slower is half as
likely."""
NUM_DRAWN, NUM_TRIED = 384, 24
"""Numbers of drafts that are drawn and scored, and that are simulated."""
NUM_VARIED, NUM_VARIANTS, ROUNDS = 160, 12, 3
"""Numbers of variants that are scored and that are simulated per round, and of rounds."""
FEW_DEVICES, LEAST_DRAWN = 64, 48
"""With more devices, fewer drafts are drawn, in inverse proportion, but at least ``LEAST_DRAWN``:
a draft of a thousand devices takes milliseconds."""
TRIALS_PART = 0.6
"""Part of the seconds for drafts; the rest is for the moves that finish them."""
NUM_PARENTS = 6
"""Number of the best drafts whose variants are tried."""
LEAST_TRIED = 6
MOST_TASKS = 1_500_000
"""Simulated tasks after which no more drafts are tried, once ``LEAST_TRIED`` have been."""
LARGEST = 250_000
"""Most tasks of a simulated draft: half a second if few devices can be folded."""
NUM_MOVES, LEAST_MOVES = 64, 4
"""Most and fewest moves that finish the best under a budget in evaluations; fewer if a simulation
has many tasks."""
LIMIT = 1.5
"""Ratio to the best step so far above which a draft is given up."""


def chosen(
    scores: FloatArray,
    count: int,
    rng: np.random.Generator,
    shapes: Sequence[Hashable] = (),
    most: int = 2,
) -> list[int]:
    """Numbers of drafts to try: half are the best, the others drawn; see the module docstring.

    Args:
        scores: Score of each draft.
        count: Most numbers.
        rng: Generator of the draws.
        shapes: Shape of each draft; by default all differ.
        most: Most drafts of one shape, unless there are too few others.
    """
    noisy = scores + rng.gumbel(size=len(scores))
    found: dict[int, None] = {}
    left: list[int] = []
    seen: Counter[Hashable] = Counter()
    for order, until in ((scores, (count + 1) // 2), (noisy, count)):
        for number in np.argsort(-order, kind="stable").tolist():
            if len(found) >= until:
                break
            shape = shapes[number] if shapes else number
            if number not in found and seen[shape] < most:
                seen[shape] += 1
                found[number] = None
            elif number not in found:
                left.append(number)
    return [*found, *dict.fromkeys(n for n in left if n not in found)][:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A draft that was tried.

    Attributes:
        draft: The draft.
        state: The point of the search that it describes.
        cost: Seconds of its step, with a charge for missing memory; perhaps only a lower bound.
    """

    draft: Draft
    state: State
    cost: float


class Beginnings:
    """Drafts of a problem that were tried, by the referee.

    Args:
        search: Search whose judges evaluate drafts, so that it can start from them.
        seed: Seed of all draws.
        limit: Ratio to the best step so far above which a draft may be given up.

    Attributes:
        drafter: Drafter of the problem.
        found: Drafts that were tried.
        most_tasks: Simulated tasks after which no more drafts are tried.
        is_over: Function that returns whether to stop for another reason.
    """

    def __init__(self, search: Search, seed: int, *, limit: float = LIMIT) -> None:
        self._search, self._limit = search, limit
        self._rng = np.random.default_rng([seed, 21])
        self.drafter = Drafter(search, self._rng)
        self._estimates = DraftEstimates(self.drafter)
        self.found: dict[Draft, Begun] = {}
        self.most_tasks = math.inf
        self.is_over: Callable[[], bool] = lambda: False
        self._num_tasks, self._best = 0, math.inf

    @property
    def is_spent(self) -> bool:
        """Whether enough was simulated."""
        return len(self.found) >= LEAST_TRIED and self._num_tasks >= self.most_tasks

    def best(self) -> list[Begun]:
        """The drafts that were tried, best first."""
        return sorted(self.found.values(), key=lambda each: each.cost)

    def tried(self, draft: Draft) -> Begun:
        """A draft with its cost by the referee."""
        if draft not in self.found:
            state = self.drafter.state(draft)
            cost = self._search.referee.cost(state, self._limit * self._best)
            self._num_tasks += self._search.evaluator.num_tasks
            self.found[draft] = Begun(draft=draft, state=state, cost=cost)
            self._best = min(self._best, cost)
        return self.found[draft]

    def _score(self, drafts: Sequence[Draft]) -> FloatArray:
        return -SHARPNESS * self._estimates.logarithms(drafts)

    def _num_drawn(self, most: int) -> int:
        part = FEW_DEVICES / max(self.drafter.cluster.num_devices, FEW_DEVICES)
        return max(int(most * part), min(most, LEAST_DRAWN))

    def begin(self, num_drawn: int = NUM_DRAWN, count: int = NUM_TRIED) -> None:
        """Draw drafts, fewer on many devices, and try the most promising."""
        self.try_best(self.drafter.drawn(self._num_drawn(num_drawn)), count)

    def try_best(self, drafts: list[Draft], count: int) -> None:
        """Try the most promising of some drafts."""
        new = [each for each in drafts if each not in self.found]
        if new:
            scores = self._score(new)
            shapes = [draft.shape for draft in new]
            self._try([new[n] for n in chosen(scores, count, self._rng, shapes)])

    def go_on(self, num_drawn: int = NUM_VARIED, count: int = NUM_VARIANTS) -> None:
        """Vary the best, and try the most promising variants.

        The cost of a draft says much about its variants: the score of a variant is its gain over
        the draft by the closed form, minus the draft's measured distance from the best.
        """
        parents = self._parents()
        share = self._num_drawn(num_drawn) // len(parents)
        of: dict[Draft, int] = {}
        for number, parent in enumerate(parents):
            for each in self.drafter.near(parent.draft, share):
                if each not in self.found:
                    of.setdefault(each, number)
        if not of:
            return
        own, new = [parent.draft for parent in parents], list(of)
        scores = self._score([*own, *new])
        behind = np.log([parent.cost / parents[0].cost for parent in parents])
        numbers = np.array(list(of.values()))
        relative = scores[len(own) :] - scores[numbers] - SHARPNESS * behind[numbers]
        self._try([new[n] for n in chosen(relative, count, self._rng)])

    def _parents(self) -> list[Begun]:
        """The best drafts, at most two of a shape, and one per step time.

        Drafts of equal step time differ only in settings without effect.
        """
        seen: Counter[object] = Counter()
        found: dict[float, Begun] = {}
        for each in self.best():
            if seen[each.draft.shape] < 2 and each.cost not in found:
                found[each.cost] = each
                seen[each.draft.shape] += 1
        return list(found.values())[:NUM_PARENTS]

    def _try(self, drafts: list[Draft]) -> None:
        for draft in drafts:
            if self.is_spent or (self.found and self.is_over()):
                return
            self.tried(draft)


class DraftAgent(Planner):
    """Answers with the best of some drafts and of a problem's seeds, finished by a local search.

    It uses up a budget in seconds; under one in evaluations, the search makes a few moves. Where
    there is nothing to divide, there is nothing to draft: all of it is search.

    Args:
        lead: Function that makes the moves of the local search.
    """

    name = "drafts"
    stage = "zero_shot"
    is_random = True

    def __init__(self, lead: Lead | None = None) -> None:
        self._lead = lead

    def plan(self, problem: Problem) -> PlanResult:
        """Try drafts, then finish the best."""
        evaluator = problem.evaluator
        allowed, evaluator.most_tasks = evaluator.most_tasks, min(evaluator.most_tasks, LARGEST)
        try:
            return self._answer(problem)
        finally:
            evaluator.most_tasks = allowed

    def _answer(self, problem: Problem) -> PlanResult:
        # Some evaluations are for the parents and the judgement.
        problem = replace(problem, budget=left_of(problem.budget, NUM_PARENTS + NUM_RETURNED))
        spending = problem.spend()
        search = Search(problem, self._lead)
        with spending.limits():
            if not problem.has_only_places:
                self._draft(search, problem, spending)
                search.is_seeded = True
            if (budget := _rest(problem, spending)) is not None:
                search.advance(replace(problem, budget=budget))
        search.spending = spending  # what is left of it is for making plans simpler
        candidates: tuple[Candidate, ...] = ()
        for candidate in search.result().candidates:
            is_late = bool(candidates) and spending.is_cut
            candidates += (candidate if is_late else _judged(candidate, problem),)
        return PlanResult(candidates=candidates, num_evaluations=spending.evaluations)

    def _draft(self, search: Search, problem: Problem, spending: Spending) -> None:
        """Try drafts, and let the search begin from the best."""
        beginnings = Beginnings(search, problem.seed)
        beginnings.most_tasks = MOST_TASKS
        beginnings.is_over = lambda: _is_next_late(spending, len(beginnings.found), problem)
        beginnings.begin()
        for _ in range(ROUNDS):
            if not beginnings.is_over():
                beginnings.go_on()
        for each in beginnings.best()[:NUM_PARENTS]:
            search.engine.cost(each.state)


def left_of(budget: Budget, evaluations: int, seconds: float = 0.0) -> Budget:
    """What is left of a budget after some evaluations or seconds; at least a little.

    >>> left_of(Budget(evaluations=5), 2, 9.0), left_of(Budget(seconds=1.0), 2, 9.0)
    (Budget(seconds=None, evaluations=3), Budget(seconds=0.001, evaluations=None))
    """
    if budget.evaluations is not None:
        return Budget(evaluations=max(budget.evaluations - evaluations, 1))
    return Budget(seconds=max(budget.limit_s - seconds, 1e-3))


def _rest(problem: Problem, spending: Spending) -> Budget | None:
    """Budget of the moves; ``None`` if too little is left."""
    if problem.budget.seconds is not None:
        left_s = problem.budget.seconds - spending.seconds
        return Budget(seconds=left_s) if left_s > 0.0 else None
    assert problem.budget.evaluations is not None
    left = problem.budget.evaluations - spending.evaluations
    if not problem.has_only_places:
        left = min(left, MOST_TASKS // max(problem.evaluator.num_tasks, 1), NUM_MOVES)
    return Budget(evaluations=left) if left >= LEAST_MOVES else None


def _is_next_late(spending: Spending, tried: int, problem: Problem) -> bool:
    """Whether another draft would exceed the part of the budget for drafts."""
    if problem.budget.seconds is None:
        return spending.is_over
    return spending.is_over or spending.fraction * (1.0 + 1.0 / max(tried, 1)) > TRIALS_PART


def _judged(candidate: Candidate, problem: Problem) -> Candidate:
    """A candidate in all orders, with the referee's result for its own, which comes first."""
    order = candidate.orders[0]
    judged = problem.evaluator.referee(candidate.strategy, order)
    return replace(candidate, orders=tuple(dict.fromkeys((order, *problem.orders))), judged=judged)
