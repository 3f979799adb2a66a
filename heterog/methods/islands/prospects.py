"""Which variant of a composition is simulated next.

The variants of a few good compositions wait, each with a predicted step time: that of the
composition that it varies, times the ratio of both estimates. The one with the least predicted
step comes next.
"""

from collections.abc import Callable, Iterable

from heterog.methods.islands.composing import Composition

MOST = 2.0
"""Largest ratio that counts, either way: what does not fit by its estimate may fit."""


class Prospects:
    """Variants of compositions that wait for simulation.

    Args:
        estimated: Function that estimates the seconds of a composition with its layers.

    Attributes:
        varied: Compositions whose variants wait, or have been simulated.
    """

    def __init__(self, estimated: Callable[[Composition], float]) -> None:
        self.varied: set[Composition] = set()
        self._estimated = estimated
        self._predicted: dict[Composition, float] = {}

    def vary(self, start: Composition, step_s: float, variants: Iterable[Composition]) -> None:
        """Let the variants of a composition wait.

        Args:
            start: The composition.
            step_s: Seconds of its step.
            variants: Its variants.
        """
        start_s = self._estimated(start)
        for other in dict.fromkeys(variants):
            ratio = min(max(self._estimated(other) / start_s, 1.0 / MOST), MOST)
            predicted_s = step_s * ratio
            self._predicted[other] = min(predicted_s, self._predicted.get(other, predicted_s))
        self.varied.add(start)

    def next(self, done: Callable[[Composition], bool]) -> Composition | None:
        """The variant with the least predicted step; those that are done wait no longer."""
        self._predicted = {point: s for point, s in self._predicted.items() if not done(point)}
        return min(self._predicted, key=self._predicted.__getitem__, default=None)
