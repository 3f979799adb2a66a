"""What was done about a slow device, measured beside what was promised and what else can be done.

A slow device is given less or left out, whichever is predicted to end the job first. Predictions
err, most of all about a device that no longer does what it was planned with. So steps are measured
after the change. From then on this choice counts with its measured step time, and the other one
with its predicted time until it was tried, too. The other is gone to if that ends the job earlier:

    steps_left (measured_s - other_s) > moving_s

Both are measured once at most, so that two more changes are the most there can be: to the other
choice, and back.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterog.healing.question import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One thing to do about a slow device.

    Attributes:
        what: It in words, ``"rebalanced"`` or ``"left out"``.
        answer: The plan.
        step_s: Seconds of a step: measured if it was tried, else predicted.
        is_measured: Whether it was tried.
    """

    what: str
    answer: Answer
    step_s: float
    is_measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The choice that was taken about a slow device, before its steps are measured.

    Attributes:
        device: Name of the device.
        chosen: The choice that was taken.
        other: The other one.
    """

    device: str
    chosen: Choice
    other: Choice

    def swapped(self, step_s: Sequence[float]) -> "Trial":
        """The trial of the other choice, after steps of this one were measured."""
        measured = replace(self.chosen, step_s=statistics.median(step_s), is_measured=True)
        return replace(self, chosen=self.other, other=measured)

    def pays(self, steps_left: int) -> bool:
        """Whether the job ends earlier if it changes from the other choice to the chosen one now.

        Moving takes what the planning process said of the longer of both moves: where the state
        lies by now was not known then.
        """
        moving_s = max(self.chosen.answer.moving_s, self.other.answer.moving_s)
        return steps_left * (self.other.step_s - self.chosen.step_s) > moving_s
