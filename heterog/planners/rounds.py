"""Who searches with the time that is left when every method has had its part.

Time goes where it pays, in rounds: first to methods that were starved, then to the one whose last
round improved the best plan most per second, as a bandit would; who brought nothing for a while is
tried again when the others bring nothing either. Only methods that go on where they were take part
(``Planner.resumes``), and one that ended before its part was over has seen all it wants to see.
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
        gain_per_s: relative improvements of the best plan per second, those of earlier rounds
            counted less and less.
        is_done: it has nothing left to try.
    """

    planner: Planner
    memory: dict[str, object] = field(default_factory=dict)
    evaluations: int = 0
    seconds: float = 0.0
    rounds: int = 0
    gain_per_s: float = 0.0
    is_done: bool = False

    def tell(
        self, *, given_s: float, seconds: float, evaluations: int, before_s: float, after_s: float
    ) -> None:
        """What a round came to.

        Args:
            given_s: what it might have spent.
            seconds: what it spent.
            evaluations: that it made.
            before_s: the best step of all methods before the round; infinite if none fits.
            after_s: and after it.
        """
        gain = 0.0
        if after_s < before_s < math.inf:  # the first that fits is no sign of more to come
            gain = math.log(before_s / after_s)
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
    >>> quick.tell(given_s=1.0, seconds=1.0, evaluations=90, before_s=2.0, after_s=1.0)
    >>> slow.tell(given_s=1.0, seconds=1.0, evaluations=2, before_s=1.0, after_s=1.0)
    >>> next_of([quick, slow]) is slow
    True
    >>> slow.tell(given_s=1.0, seconds=1.0, evaluations=40, before_s=1.0, after_s=1.0)
    >>> next_of([quick, slow]) is quick
    True
    """
    able = [each for each in contenders if not each.is_done]
    if not able:
        return None
    starved = [each for each in able if each.is_starved and each.rounds < _MOST_STARVED]
    if starved:
        return min(starved, key=lambda each: each.evaluations)
    return max(
        able, key=lambda each: (each.gain_per_s, -each.seconds)
    )  # the least tried of equals
