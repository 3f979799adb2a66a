"""The division of the remaining time among methods once every one has had its part.

Time goes where it pays, in rounds: to the method whose last rounds improved its own best plan most
per second, as a bandit would; the farther that plan is behind the best of all by now, the less
this counts. Every second round goes to a method that was starved, if there is one: to the one with
the best plan (or nearest to fitting) before the others. Methods without gain are tried again when
the others gain nothing either. Only methods that resume (``Planner.resumes``) take part, and one
that ended before its part was over has nothing left to try, unless its answers are whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from heterog.methods.planner import Planner

STARVED = 20
"""A search that was cut before it had made this many evaluations was starved."""
_MOST_STARVED, _MOST_BEHIND = 4, 2.0
"""Rounds after which a method that still makes few evaluations is no longer preferred; half as
many if its step is so many times the best one's."""
_FIRST_GAIN = 0.1
"""Gain that the first plan that fits counts as: more may follow."""
FADES = 0.25
"""Part of a method's gain that still counts after another round."""
_BEHIND = 8.0
"""Exponent for plans behind the best: one 1.5 times as long counts as 1.5^-8, a 25th."""
_ENDED_EARLY = 0.8
"""Part of the part given below which a method that stopped by itself has nothing left to try."""


@dataclass(slots=True, kw_only=True)
class Contender:
    """A method and the results of its rounds.

    Attributes:
        planner: The method.
        memory: State that it resumes from; see ``Problem.memory``.
        evaluations: Evaluations of all rounds.
        seconds: Seconds of all rounds.
        rounds: Number of its rounds.
        step_time_s: Step time of its best plan; infinite if none fits.
        overflow_bytes: Bytes missing for its best plan on the worst device, 0 if it fits.
        behind: Its step over the best of all methods; 1 where it has none yet.
        gain_per_s: Relative improvements of that plan per second, as far as they count: those of
            the last round, or what is left of those before (``FADES``), whichever is more.
        is_done: Whether it has nothing left to try.
    """

    planner: Planner
    memory: dict[str, object] = field(default_factory=dict)
    evaluations: int = 0
    seconds: float = 0.0
    rounds: int = 0
    step_time_s: float = math.inf
    overflow_bytes: float = math.inf
    behind: float = 1.0
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
        known_s: float = math.inf,
        overflow_bytes: float = math.inf,
    ) -> None:
        """Record the result of a round.

        Args:
            given_s: Seconds that it was allowed.
            seconds: Seconds that it took.
            evaluations: Number of its evaluations.
            step_time_s: Step time of the best plan of all its rounds; infinite if none fits.
            best_s: Step time of the best plan of all methods.
            known_s: The same before the round: a search that starts from it has not gained it.
            overflow_bytes: Bytes missing for the best plan of all its rounds.
        """
        gain = 0.0
        if step_time_s < self.step_time_s and step_time_s != known_s:
            is_first, before_s = math.isinf(self.step_time_s), self.step_time_s
            if step_time_s < known_s:
                before_s = min(before_s, known_s)
            gain = _FIRST_GAIN if math.isinf(before_s) else math.log(before_s / step_time_s)
            gain = max(gain, _FIRST_GAIN * is_first) * (best_s / step_time_s) ** _BEHIND
        self.step_time_s = step_time_s
        self.overflow_bytes = overflow_bytes
        self.behind = 1.0 if math.isinf(step_time_s) else step_time_s / best_s
        self.rounds += 1
        self.seconds += seconds
        self.evaluations += evaluations
        self.gain_per_s = max(gain / max(seconds, 1e-9), FADES * self.gain_per_s)
        # Whose answers are whole hands one over and may have another.
        goes_on = evaluations > 0 and self.planner.answers_whole
        self.is_done = seconds < _ENDED_EARLY * given_s and not goes_on

    def gain_beside(self, best_s: float) -> float:
        """Gain per second of its last part, measured against the best plan found by now."""
        if math.isinf(self.step_time_s):
            return 0.0
        part: float = (self.behind * best_s / self.step_time_s) ** _BEHIND
        return self.gain_per_s * part

    @property
    def is_starved(self) -> bool:
        """Whether it has had too little time to be judged."""
        most = _MOST_STARVED if self.behind <= _MOST_BEHIND else _MOST_STARVED // 2
        return self.evaluations < STARVED and self.rounds < most and not self.is_done


def next_of(contenders: Sequence[Contender]) -> Contender | None:
    """The contender whose turn it is; ``None`` if none can use more time.

    Whose plan became the best has the first turn, then one that was starved:

    >>> class Method(Planner):
    ...     name, stage, resumes = "a", "search", True
    >>> quick, slow = Contender(planner=Method()), Contender(planner=Method())
    >>> of_round = {"given_s": 1.0, "seconds": 1.0, "best_s": 1.0}
    >>> quick.tell(**of_round, evaluations=90, step_time_s=1.0)
    >>> slow.tell(**of_round, evaluations=2, step_time_s=1.9)
    >>> next_of([quick, slow]) is quick
    True
    >>> quick.tell(**of_round, evaluations=90, step_time_s=1.0)
    >>> next_of([quick, slow]) is slow
    True
    >>> ahead = Contender(planner=Method())
    >>> ahead.tell(**of_round, evaluations=3, step_time_s=1.5)
    >>> next_of([quick, slow, ahead]) is ahead
    True

    Of those that were starved, one whose plan is far behind comes after all others:

    >>> far = Contender(planner=Method())
    >>> far.tell(**of_round, evaluations=3, step_time_s=9.0)
    >>> next_of([quick, slow, far]) is slow
    True
    >>> next_of([quick, far]) is far
    True

    Who starts from the best plan and only hands it back has gained nothing:

    >>> adopts = Contender(planner=Method())
    >>> adopts.tell(**of_round, evaluations=9, step_time_s=1.0, known_s=1.0)
    >>> adopts.gain_per_s
    0.0
    """
    able = [each for each in contenders if not each.is_done]
    if not able:
        return None
    best_s = min(each.step_time_s for each in contenders)
    # Of those with equal gains, the one that had the least time.
    chosen = max(able, key=lambda each: (each.gain_beside(best_s), -each.seconds))
    starved = [each for each in able if each.is_starved]
    # Rounds beyond the first of all, and of the starved: half of them at most while others gain.
    of_all, of_starved = (sum(each.rounds - 1 for each in some) for some in (contenders, starved))
    is_due = 2 * of_starved >= of_all and chosen.gain_beside(best_s) > 0.0
    if not starved or is_due:
        return chosen
    near = [each for each in starved if each.behind <= _MOST_BEHIND]
    return min(
        near or starved,
        key=lambda each: (each.step_time_s, each.overflow_bytes, each.evaluations),
    )
