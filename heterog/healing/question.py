"""What a job asks the planning process, and the plans that it runs or could change to."""

from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_METHODS = ("agent", "cp_ar", "tuned_uniform")
"""Quick methods: a policy's own answer, and two baselines in case it has none that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan that the job runs, or could change to.

    Attributes:
        path: Path of its file.
        method: Name of the method that found it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request for a plan.

    Attributes:
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

    devices: tuple[int, ...]
    running: Choice
    path: str
    budget: str
    slow: Mapping[int, float] = field(default_factory=dict)
    methods: tuple[str, ...] = FIRST_METHODS
    steps_left: int
    restart_s: float
    tried: tuple[str, ...] = ()
