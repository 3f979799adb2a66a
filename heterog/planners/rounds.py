"""Who searches with the time that is left when every method has had its part.

Time goes where it pays, in rounds: first to methods that were starved, then to the one whose last
rounds improved its own best plan most per second, as a bandit would; the further that is behind
the best of all, the less it counts. Who brought nothing for a while is tried again when the others
bring nothing either. Only methods that go on where they were take part (``Planner.resumes``), and
one that ended before its part was over has seen all it wants to see.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from heterog.planners.planner import Planner

STARVED = 20
"""A search that was cut before it had made so many evaluations was starved."""
_MOST_STARVED = 4
"""Rounds after which a method that still makes few evaluations is no longer preferred."""
_FORGOTTEN = 0.5
"""How much a method's gain counts in the next round if that brings nothing."""
_FIRST_GAIN = 0.1
"""What the first plan that fits counts as: more may follow."""
_BEHIND = 8.0
"""A method that is half as fast again as the best counts as 1.5^-8, a 25th."""
_ENDED_EARLY = 0.8
"""Of its part: who spends less was done."""


@dataclass(slots=True, kw_only=True)
class Contender:
    """A method and what its rounds have brought.

    Attributes:
        planner: the method.
        memory: what it goes on from; see ``Problem.memory``.
        evaluations: of all rounds.
        seconds: of all rounds.
        rounds: that it has had.
        step_time_s: of its best plan; infinite if none fits.
        gain_per_s: relative improvements of that plan per second, those of earlier rounds counted
            less and less.
        is_done: it has nothing left to try.
    """

    planner: Planner
    memory: dict[str, object] = field(default_factory=dict)
    evaluations: int = 0
    seconds: float = 0.0
    rounds: int = 0
    step_time_s: float = math.inf
    gain_per_s: float = 0.0
    is_done: bool = False

    def tell(
        self,
        *,
        given_s: float,
        seconds: float,
        evaluations: int,
        step_time_s: float,
        best_s: float,
    ) -> None:
        """What a round came to.

        Args:
            given_s: what it might have spent.
            seconds: what it spent.
            evaluations: that it made.
            step_time_s: of the best plan of all its rounds; infinite if none fits.
            best_s: the same of all methods.
        """
        gain = 0.0
        if step_time_s < self.step_time_s:
            before_s = self.step_time_s
            gain = _FIRST_GAIN if math.isinf(before_s) else math.log(before_s / step_time_s)
            gain *= (best_s / step_time_s) ** _BEHIND
        self.step_time_s = step_time_s
        self.gain_per_s = max(gain / max(seconds, 1e-9), _FORGOTTEN * self.gain_per_s)
        self.rounds += 1
        self.seconds += seconds
        self.evaluations += evaluations
        self.is_done = seconds < _ENDED_EARLY * given_s

    @property
    def is_starved(self) -> bool:
        """Whether it had no time to show what it can do."""
        return self.evaluations < STARVED and not self.is_done


def next_of(contenders: Sequence[Contender]) -> Contender | None:
    """Whose turn it is; ``None`` if nobody can use more time.

    >>> class Method:
    ...     name, stage, resumes = "a", "search", True
    >>> quick, slow = Contender(planner=Method()), Contender(planner=Method())
    >>> quick.tell(given_s=1.0, seconds=1.0, evaluations=90, step_time_s=1.0, best_s=1.0)
    >>> slow.tell(given_s=1.0, seconds=1.0, evaluations=2, step_time_s=3.0, best_s=1.0)
    >>> next_of([quick, slow]) is slow
    True
    >>> slow.tell(given_s=1.0, seconds=1.0, evaluations=40, step_time_s=2.0, best_s=1.0)
    >>> next_of([quick, slow]) is quick
    True
    """
    able = [each for each in contenders if not each.is_done]
    if not able:
        return None
    starved = [each for each in able if each.is_starved and each.rounds < _MOST_STARVED]
    if starved:
        return min(starved, key=lambda each: each.evaluations)
    # Of those that gained as much, the one that was tried least.
    return max(able, key=lambda each: (each.gain_per_s, -each.seconds))
