"""Plans that a job runs or could change to, the question for one, and the trial of one.

Predictions err: about a slow device, which no longer does what it was planned with, and about
plans that differ little. So steps are measured after a change about a slow device (it is given
less, or left out) and after a change to a plan that might be better. The job then changes to the
other plan that it has the choice of, if that ends it earlier:

    steps_left (measured_s - other_s) > moving_s

The other plan counts with its measured step time if it has run, else with its predicted one. In
that case it is measured, too: there are two more changes at most, to the other plan and back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

FIRST_METHODS = ("agent", "cp_ar", "tuned_uniform")
"""Quick methods: a policy's own answer, and two baselines in case it has none that fits."""
DRIFT = 1.02
"""Factor by which the same plan's steps may take longer a minute later. Plans of ``skew_compute``
that took 1.6 to 1.9 % less in their trials took 0.7 to 1.3 % longer afterwards."""
WARM_STEPS = 2
"""Steps of a generation, after its first, in which ranks still write the code of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan that the job runs, or could change to.

    Attributes:
        path: Path of its file.
        method: Name of the method that found it.
        kind: The kind of the question that it answers.
        devices: Device of the whole cluster of each of its ranks.
        slow: Factor by which kernels take longer than in the first plan, by device, as it assumes.
        busy_s: Predicted seconds that each of its ranks computes in a step; empty if unknown.
        step_time_s: Predicted step time.
        stay_step_s: Predicted step time of the plan that ran when it was asked for, on the devices
            as they were then.
        moving_s: Predicted seconds of the change from that plan to this one.
    """

    path: str
    method: str
    devices: tuple[int, ...]
    kind: str = ""
    slow: Mapping[int, float] = field(default_factory=dict)
    busy_s: tuple[float, ...] = ()
    step_time_s: float = 0.0
    stay_step_s: float = 0.0
    moving_s: float = 0.0

    def saved_s(self, steps_left: int, seconds_per_predicted: float) -> float:
        """Seconds by which the job ends earlier if it changes to this plan now.

        Args:
            steps_left: Number of steps left to train.
            seconds_per_predicted: Measured step time divided by the predicted one.
        """
        gain_s = (self.stay_step_s - self.step_time_s) * seconds_per_predicted
        return steps_left * gain_s - self.moving_s


NO_PLAN = Choice(path="", method="", devices=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request for a plan.

    Attributes:
        kind: What it is for: a change of this kind (see ``Move``), or ``"prepared"`` for later,
            ``"rebalanced"`` and ``"left out"`` for what can be done about a slow device.
        why: Why the job would change to the answer.
        devices: Devices of the whole cluster that can be used.
        running: The plan that runs, or ran.
        path: Path to write the new plan to.
        budget: Budget of the search.
        slow: Factor by which kernels take longer than in the first plan, by device.
        methods: Names of planners.
        steps_left: Number of steps left to train.
        restart_s: Seconds until new ranks are running, whatever they run.
        tried: Paths of plans that were measured, the running one among them; the plan asked for
            is then one near the running one and none of these.
    """

    kind: str = "prepared"
    why: str = ""
    devices: tuple[int, ...]
    running: Choice
    path: str
    budget: str
    slow: Mapping[int, float] = field(default_factory=dict)
    methods: tuple[str, ...] = FIRST_METHODS
    steps_left: int = 1
    restart_s: float = 0.0
    tried: tuple[str, ...] = ()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan that is measured, and the one to change to if that ends the job earlier.

    Attributes:
        chosen: The plan that is measured.
        chosen_s: Predicted seconds of a step with it.
        other: The other one.
        other_s: Seconds of a step with that: measured if it has run, else predicted.
        device: Name of the slow device that it is about; empty for a plan that might be better.
        has_other_run: Whether the other plan has run.
        after_s: Measured seconds of a step with the chosen plan.
        is_kept: Whether training goes on with that.
    """

    chosen: Choice
    chosen_s: float
    other: Choice
    other_s: float
    device: str = ""
    has_other_run: bool = False
    after_s: float = 0.0
    is_kept: bool = False

    def measured(self, after_s: float, steps_left: int) -> "Trial":
        """The trial at its end; a plan that might be better has to be so by more than ``DRIFT``.

        Moving takes what was predicted of the longer of both moves: where the state lies by now
        was not known then.
        """
        moving_s = max(self.chosen.moving_s, self.other.moving_s)
        expected_s = after_s if self.device else DRIFT * after_s
        is_kept = steps_left * (expected_s - self.other_s) <= moving_s
        return replace(self, after_s=after_s, is_kept=is_kept)

    def then(self) -> "Trial | None":
        """The trial of the other plan, unless that has run."""
        if self.has_other_run:
            return None
        return Trial(
            chosen=self.other,
            chosen_s=self.other_s,
            other=self.chosen,
            other_s=self.after_s,
            device=self.device,
            has_other_run=True,
        )

    def to_json(self) -> dict[str, Any]:
        """What was found of a plan; its file exists as long as the job runs."""
        return {
            "plan": self.chosen.path,
            "predicted_s": self.chosen.step_time_s,
            "stay_predicted_s": self.chosen.stay_step_s,
            "before_s": self.other_s,
            "after_s": self.after_s,
            "is_kept": self.is_kept,
        }
