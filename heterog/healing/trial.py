"""Changes of plan that are measured, and taken back or changed again if they do not pay.

Predictions err: about a slow device, which no longer does what it was planned with, and about
plans that differ little. So steps are measured after a change about a slow device (it is given
less, or left out) and after one that is tried because it might be better. The job then changes to
the other plan that it has the choice of, if that ends it earlier:

    steps_left (measured_s - other_s) > moving_s

The other plan counts with its measured step time if it has run, else with its predicted one. Then
it is measured, too, so that after a change there are two more at most. Nothing is planned while
steps are measured, since that takes cores from ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from heterog.healing.question import Choice

WARM_STEPS = 2
"""Steps of a generation, after its first, in which ranks still write the code of a step."""


def recent_step_s(seconds: Sequence[float], num_steps: int, least_s: float) -> float:
    """Mean of the last steps, at least so many and so long; 0 if there are no such steps.

    A mean, since a process with a limited share of a core stands still in some steps and runs at
    full speed in the others.

    >>> recent_step_s([9.0, 0.25, 0.75], 2, 1.0), recent_step_s([0.5, 0.25], 2, 1.0)
    (0.5, 0.0)
    """
    count, whole_s = 0, 0.0
    for step_s in reversed(seconds):
        count, whole_s = count + 1, whole_s + step_s
        if count >= num_steps and whole_s >= least_s:
            return whole_s / count
    return 0.0


class Side(NamedTuple):
    """One of the two plans of a trial.

    Attributes:
        choice: The plan.
        step_s: Seconds of a step with it: measured if it has run, else predicted.
        what: What it does about a slow device: ``"rebalanced"`` or ``"left out"``.
    """

    choice: Choice
    step_s: float
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan that is measured, and the one to change to if that ends the job earlier.

    Attributes:
        chosen: The plan that is measured.
        other: The other one.
        device: Name of the slow device that it is about; empty for a plan that might be better.
        has_other_run: Whether the other plan has run.
        after_s: Measured seconds of a step with the chosen plan.
        is_kept: Whether training goes on with that.
    """

    chosen: Side
    other: Side
    device: str = ""
    has_other_run: bool = False
    after_s: float = 0.0
    is_kept: bool = False

    def measured(self, after_s: float, steps_left: int) -> "Trial":
        """The trial at its end.

        Moving takes what was predicted of the longer of both moves: where the state lies by now
        was not known then.
        """
        moving_s = max(self.chosen.choice.moving_s, self.other.choice.moving_s)
        is_kept = steps_left * (after_s - self.other.step_s) <= moving_s
        return replace(self, after_s=after_s, is_kept=is_kept)

    def then(self) -> "Trial | None":
        """The trial of the other plan, unless that has run."""
        if self.has_other_run:
            return None
        other = self.chosen._replace(step_s=self.after_s)
        return Trial(chosen=self.other, other=other, device=self.device, has_other_run=True)

    def to_json(self) -> dict[str, Any]:
        """What was found of a plan; its file exists as long as the job runs."""
        return {
            "plan": self.chosen.choice.path,
            "predicted_s": self.chosen.choice.step_time_s,
            "stay_predicted_s": self.chosen.choice.stay_step_s,
            "before_s": self.other.step_s,
            "after_s": self.after_s,
            "is_kept": self.is_kept,
        }
