"""Which variant of a composition is simulated next.

The variants of a few good compositions wait, each with a predicted step time: that of the
composition that it varies, times the ratio of both estimates. The one with the least predicted
step comes next. What estimates miss is learned during the search, for each kind of change: a
prediction is corrected by the mean error of earlier variants with the same change, taken with
``TRUSTED`` errors of 0.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from heterog.methods.islands.composing import Composition
from heterog.simulator.evaluator import Evaluation

TRUSTED = 2.0
"""Number of errors of 0 that count beside those that were seen."""
WORST = 0.7
"""Largest logarithm of a ratio; that of a variant that does not fit."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A variant that waits.

    Attributes:
        change: What it changes.
        step_s: Simulated step time of the composition that it varies.
        judged: Ratio of the referee's step time to the simulated one, for that composition.
        ratio: Logarithm of the ratio of both estimates.
    """

    change: str
    step_s: float
    judged: float
    ratio: float


class Prospects:
    """Variants of compositions that wait for simulation.

    Args:
        estimated: Function that estimates a composition with its layers.

    Attributes:
        varied: Compositions whose variants wait, or have been simulated.
    """

    def __init__(self, estimated: Callable[[Composition], float]) -> None:
        self.varied: set[Composition] = set()
        self._estimated = estimated
        self._waiting: dict[Composition, _Waiting] = {}
        # For each change the sum and the number of the errors of its ratios.
        self._errors: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))

    def vary(
        self, start: Composition, step_s: float, judged: float, variants: Iterable[Composition]
    ) -> None:
        """Let the variants of a composition wait.

        Args:
            start: The composition.
            step_s: Its simulated step time.
            judged: Ratio of the referee's step time to it.
            variants: Its variants.
        """
        before_s = self._estimated(start)
        for other in dict.fromkeys(variants):
            if other != start and other not in self._waiting:
                ratio = _limited(math.log(self._estimated(other) / before_s))
                self._waiting[other] = _Waiting(change(start, other), step_s, judged, ratio)
        self.varied.add(start)

    def next(self, done: Callable[[Composition], bool]) -> Composition | None:
        """The variant with the least predicted step; those that are done wait no longer."""
        self._waiting = {point: each for point, each in self._waiting.items() if not done(point)}
        return min(self._waiting, key=self._predicted, default=None)

    def tell(self, point: Composition, found: Evaluation | None) -> None:
        """Learn from the evaluation of a variant that came next; ``None`` if it was refused."""
        waiting = self._waiting.pop(point)
        if found is not None:
            ratio = math.log(found.step_time_s / waiting.step_s) if found.is_ok else WORST
            errors, count = self._errors[waiting.change]
            self._errors[waiting.change] = errors + _limited(ratio) - waiting.ratio, count + 1

    def _predicted(self, point: Composition) -> float:
        """Logarithm of the predicted step time."""
        waiting = self._waiting[point]
        errors, count = self._errors[waiting.change]
        error = errors / (count + TRUSTED)
        return math.log(waiting.step_s * waiting.judged) + waiting.ratio + error


def _limited(ratio: float) -> float:
    return min(max(ratio, -WORST), WORST)


def change(start: Composition, other: Composition) -> str:
    """Name of what a variant changes; of several changes, of the one that matters most."""
    before, after = (
        [[(each.kind, each.members, each.stages) for each in pool] for pool in point.pools]
        for point in (start, other)
    )
    if before != after:
        return "division"
    hosts = [sum(each.hosts for pool in point.pools for each in pool) for point in (start, other)]
    numbers: tuple[tuple[str, float, float], ...] = (
        ("hosts", hosts[0], hosts[1]),
        ("chunks", start.in_a_v, other.in_a_v),
        ("micro-batches", start.num_micro, other.num_micro),
        ("ZeRO", start.zero, other.zero),
        ("copies", start.copies_on_hosts, other.copies_on_hosts),
        ("hidden messages", start.hides_messages, other.hides_messages),
        ("split backward passes", start.splits_backward, other.splits_backward),
    )
    for name, old, new in numbers:
        if old != new:
            return f"{'more' if new > old else 'less'} {name}"
    if start.recompute != other.recompute:
        return f"recompute {other.recompute.name}"
    return "samples" if start.samples != other.samples else "layers"
