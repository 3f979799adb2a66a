"""How a budget in seconds is divided between the searches and the work that follows them.

The budget covers everything after the capture; with unforeseen delays an answer may be a fifth
late. After the searches, their best strategy is ordered, rehearsed, simulated under noise,
explained and written. The time for that follows from the number of turns that ranks take in one
of its steps and from the number of ops of the graph. To count the turns, the best strategy so far
is lowered and ordered during the search; if that strategy wins, the plan uses the same order.
Work that does not depend on the winner is done before the searches.

Seconds for a turn and an op were measured under data parallelism, parameter servers and pipelines
on eight devices for vgg19, bert_large_24l and resnet200 (``endings.py`` in git, at c8348ba).
"""

import math
import time
from collections.abc import Callable, Sequence

from heterog.methods.planner import Budget, Candidate
from heterog.search.issue_order import MOST_REHEARSED, IssuedSteps

NOISE_PART = 0.08
"""Part of a budget in seconds for the draws of noise from which ranges of gains follow."""
LATE = 0.1
"""Part of a budget by which the schedule lets an answer be late; the limit is twice that."""
_LATEST = 0.17
"""The same part for rehearsal and noise: an answer that is a little later is better than a plan
that was not rehearsed."""
LATE_S, _LATEST_S = 3.0, 6.0
"""Most seconds of ``LATE`` and of ``_LATEST``."""
STARTED_PART = 0.1
"""Largest part of a budget that is charged for loading before time is counted."""
REHEARSAL_S = 2.6e-5
NOISE_S = 1e-6
EXPLANATION_S = 8e-6
"""Seconds of each per turn; the explanation is one without savings by purchases."""
REHEARSAL_OP_S = 1e-4
WRITING_OP_S = 4e-5
"""Seconds of each per op of the graph, whatever the strategy."""
LAST_S = 0.45
"""Seconds to print, and for Python to end."""
MOST_KEPT = 0.5
"""Largest part of a budget that is kept back; work that does not fit is left out and reported."""
_NO_TIME_S = 1e-3  # least limit of optional work
CHANGES_PART = 0.08
MOST_CHANGES = 0.2
"""Parts of a budget for savings by purchases: what is kept back, and the most that is used."""
_COMPARISON_S = 2e-5
"""Seconds per turn of one comparison: 200 simulations without and with a purchase. If
``CHANGES_PART`` is too short for one comparison, nothing is kept back."""


class Allotment:
    """The seconds left of a budget, by purpose; infinite under a budget in evaluations.

    Until ``follow`` is called, only draws of noise come after the searches.

    Args:
        budget: Budget for all of an answer.
        is_explained: Whether an explanation and files come last.
        with_changes: Whether savings by purchases are looked for, too.
        clock: Function that returns the seconds of some clock.
        started_s: Function that returns the seconds that a command took to load libraries and
            to read the graph; the user waits for these, too. At most ``STARTED_PART`` of the
            budget is charged for them, so that a first compilation of kernels leaves most of the
            budget.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        is_explained: bool = False,
        with_changes: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        started_s: Callable[[], float] = float,
    ) -> None:
        self.clock = clock
        self._started_s = started_s
        self._budget_s = budget.limit_s
        self._begin_s = clock()
        self._is_explained = is_explained
        self._with_changes = with_changes
        self._issued: IssuedSteps | None = None
        self._is_rehearsed = False
        self._ahead: Callable[[], object] = lambda: None
        self._num_turns = 0
        self._num_ops = 0

    def begin(self) -> None:
        """Start counting time, after libraries and kernels are loaded."""
        self._begin_s = self.clock()
        if not math.isinf(self._budget_s):
            self._begin_s -= min(self._started_s(), STARTED_PART * self._budget_s)
        self._ahead()

    def follow(
        self,
        issued: IssuedSteps,
        *,
        is_rehearsed: bool,
        ahead: Callable[[], object] = lambda: None,
    ) -> None:
        """Expect a plan after the searches, so that their best strategy gets an order.

        Args:
            issued: Object that makes the orders.
            is_rehearsed: Whether the plan is rehearsed.
            ahead: Function that does the work of a plan that does not depend on the winner. It is
                called when time starts, so that no time is kept back for it.
        """
        self._issued, self._is_rehearsed, self._ahead = issued, is_rehearsed, ahead
        self._num_ops = issued.num_ops

    def search_s(self, found: Sequence[Candidate]) -> float:
        """Seconds left for searches.

        Args:
            found: Best strategies of the methods that have ended, judged by the referee.
        """
        if math.isinf(self._budget_s):
            return math.inf
        follows_s = NOISE_PART * self._budget_s
        if self._issued is not None and found:
            best = min(found, key=_preference)
            self._num_turns = self._issued.num_turns(best.strategy, best.orders[0])
            follows_s = self._num_turns * NOISE_S + self._last_s
            follows_s += self._kept_for_changes_s - self._late_s
            rehearsal_s = self._num_turns * REHEARSAL_S + self._num_ops * REHEARSAL_OP_S
            rehearsal_s *= self._is_rehearsed and self._num_turns <= MOST_REHEARSED
            # A rehearsal that cannot end in time is left out, and no time is kept back for it.
            if follows_s + rehearsal_s <= MOST_KEPT * self._budget_s:
                follows_s += rehearsal_s
        kept_s = min(max(follows_s, 0.0), MOST_KEPT * self._budget_s)
        return self._left_s(0.0) - kept_s

    @property
    def trial_s(self) -> float:
        """Seconds that rehearsals or draws of noise may take; the time of later work is kept."""
        latest_s = min(_LATEST * self._budget_s, _LATEST_S)
        return max(self._left_s(latest_s) - self._last_s, _NO_TIME_S)

    @property
    def changes_s(self) -> float:
        """Seconds that looking for savings by purchases may take."""
        left_s = min(self._left_s(self._late_s) - self._last_s, MOST_CHANGES * self._budget_s)
        return max(left_s, _NO_TIME_S)

    @property
    def _late_s(self) -> float:
        return min(LATE * self._budget_s, LATE_S)

    def _left_s(self, late_s: float) -> float:
        return self._budget_s + late_s - (self.clock() - self._begin_s)

    @property
    def _kept_for_changes_s(self) -> float:
        part_s = CHANGES_PART * self._budget_s
        return part_s if self._with_changes and part_s >= _COMPARISON_S * self._num_turns else 0.0

    @property
    def _last_s(self) -> float:
        """Seconds of the work that always comes last: explaining, writing, printing."""
        last_s = self._num_turns * EXPLANATION_S + self._num_ops * WRITING_OP_S + LAST_S
        return last_s * self._is_explained


def _preference(candidate: Candidate) -> tuple[float, float]:
    assert candidate.judged is not None
    return candidate.judged.preference
