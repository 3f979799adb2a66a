"""The seconds of an answer: what searches may take, and what is kept back for all that follows.

A budget in seconds is for everything after the capture; with what is not foreseen an answer may be
a fifth late. When the searches have ended, their best strategy is ordered, rehearsed, put through
noise, explained and written. How long that takes follows from the size of its program, so it is
measured: the order of the best strategy so far is made while the search goes on (once: it is the
plan's if that strategy wins), and the rest takes multiples of that.

The multiples were measured under data parallelism, parameter servers and pipelines on eight
devices: a rehearsal takes 11 to 16 times as long as the order (bert_base), an explanation 3 to 4
times, noise half to twice (also vgg19, bert_large_24l and resnet200).
"""

import math
import time
from collections.abc import Callable, Sequence

from heterog.planners.issue_order import IssuedSteps
from heterog.planners.planner import Budget, Candidate

NOISE_PART = 0.08
"""Of a budget in seconds, for the draws of noise that ranges of gains come from."""
LATE = 0.1
"""Part of a budget by which an answer may be late as it is planned; promised is twice that."""
_LATEST = 0.17
"""The same for rehearsal and noise: better a little later than a plan that nobody has played
through."""
REHEARSAL = 15.0
NOISE = 2.0
EXPLANATION = 5.0
"""Seconds of each for a second of ordering; an explanation without what buying would save."""
LAST_S = 0.3
"""To print, and for Python to end."""
MOST_KEPT = 0.5
"""Of a budget: searches always get the rest. What then has no time left is left out, and said."""
_NO_TIME_S = 1e-3
CHANGES_PART = 0.08
MOST_CHANGES = 0.2
"""Of a budget, for what buying something would save: kept back, and taken if there is more."""
_COMPARISON = 30.0
"""Seconds for a second of ordering: 200 simulations without and with what is bought. Nothing is
kept back where that part of a budget does not suffice for one."""


class Promise:
    """What is left of a budget in seconds, for whom; endless under a budget in evaluations.

    Until ``follow`` is called, only draws of noise come after the searches.

    Args:
        budget: for all of an answer.
        is_explained: an explanation and files come last.
        with_changes: and what buying something would save.
        clock: seconds of some clock.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        is_explained: bool = False,
        with_changes: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._budget_s = budget.seconds or math.inf
        self._begin_s = clock()
        self._is_explained = is_explained
        self._with_changes = with_changes
        self._issued: IssuedSteps | None = None
        self._is_rehearsed = False
        self._order_s = 0.0

    def begin(self) -> None:
        """Libraries and kernels are loaded: time counts from here on."""
        self._begin_s = self.clock()

    def follow(self, issued: IssuedSteps, *, is_rehearsed: bool) -> None:
        """A plan is made of what searches find: their best strategy gets an order.

        Args:
            issued: makes the orders.
            is_rehearsed: whether the plan is rehearsed.
        """
        self._issued, self._is_rehearsed = issued, is_rehearsed

    def search_s(self, found: Sequence[Candidate]) -> float:
        """Seconds that are left for searches.

        Args:
            found: the best of the methods that have ended, as judged by the referee.
        """
        if math.isinf(self._budget_s):
            return math.inf
        follows_s = NOISE_PART * self._budget_s
        if self._issued is not None and found:
            best = min(found, key=_preference)
            self._order_s = self._issued.seconds(best)
            follows_s = self._order_s * NOISE + self._last_s
            follows_s += self._kept_for_changes_s - LATE * self._budget_s
            rehearsal_s = self._order_s * REHEARSAL * self._is_rehearsed
            # A rehearsal that cannot end in time is left out, and nothing kept back for it.
            if follows_s + rehearsal_s <= MOST_KEPT * self._budget_s:
                follows_s += rehearsal_s
        kept_s = min(max(follows_s, 0.0), MOST_KEPT * self._budget_s)
        return self._left_s(0.0) - kept_s

    @property
    def rehearsal_s(self) -> float:
        """Seconds that rehearsals may take: until there is only time to explain and write."""
        return max(self._left_s(_LATEST) - self._last_s, _NO_TIME_S)

    @property
    def noise_s(self) -> float:
        """Seconds that the draws of noise may take."""
        return max(self._left_s(_LATEST) - self._last_s, _NO_TIME_S)

    @property
    def changes_s(self) -> float:
        """Seconds that it may take to find out what buying something would save."""
        left_s = min(self._left_s(LATE) - self._last_s, MOST_CHANGES * self._budget_s)
        return max(left_s, _NO_TIME_S)

    def _left_s(self, late: float) -> float:
        return self._budget_s * (1.0 + late) - (self.clock() - self._begin_s)

    @property
    def _kept_for_changes_s(self) -> float:
        part_s = CHANGES_PART * self._budget_s
        return part_s if self._with_changes and part_s >= _COMPARISON * self._order_s else 0.0

    @property
    def _last_s(self) -> float:
        """What comes last, whatever was before: to explain, to write, to print."""
        return (self._order_s * EXPLANATION + LAST_S) * self._is_explained


def _preference(candidate: Candidate) -> tuple[float, float]:
    assert candidate.judged is not None
    return candidate.judged.preference
