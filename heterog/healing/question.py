"""The question that a job asks the planning process, and the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from heterog.healing.service import Message

FIRST_METHODS = ("agent", "cp_ar", "tuned_uniform")
"""Quick methods: a policy's own answer, and two baselines in case it has none that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request for a plan.

    Attributes:
        lost: Devices of the whole cluster that cannot be used.
        slow: Factor by which kernels take longer than planned, by device.
        methods: Names of planners.
        budget: Budget of their search.
        steps_left: Number of steps left to train.
        restart_s: Seconds until new ranks are running, whatever they run.
        running: Path of the plan that runs or ran.
        running_on: Device of the whole cluster of each of its ranks.
        path: Path to write the new plan to.
        tried: Paths of plans that were measured, the running one among them; the plan asked for
            is then one near the running one and none of these.
    """

    lost: tuple[int, ...]
    slow: Mapping[int, float] = field(default_factory=dict)
    methods: tuple[str, ...] = FIRST_METHODS
    budget: str
    steps_left: int
    restart_s: float
    running: str
    running_on: tuple[int, ...]
    path: str
    tried: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan that the job could change to.

    Attributes:
        question: The question that it answers.
        path: Path of the plan.
        method: Name of the method that found it.
        step_time_s: Predicted step time.
        moving_s: Seconds until its ranks would have their state.
        stay_step_s: Predicted step time of the running plan, on the devices as they are now.
        busy_s: Predicted seconds that each of its devices computes in a step.
    """

    question: Question
    path: str
    method: str
    step_time_s: float
    moving_s: float
    stay_step_s: float
    busy_s: tuple[float, ...]

    @staticmethod
    def from_reply(question: Question, reply: Message) -> "Answer":
        """Decode the reply of the process."""
        return Answer(
            question=question,
            path=str(reply["path"]),
            method=str(reply["method"]),
            step_time_s=float(reply["step_time_s"]),
            moving_s=float(reply["moving_s"]),
            stay_step_s=float(reply["stay_step_s"]),
            busy_s=tuple(map(float, reply["busy_s"])),
        )

    def saved_s(self, steps_left: int, seconds_per_predicted: float) -> float:
        """Seconds by which the job ends earlier if it changes to this plan now.

        Args:
            steps_left: Number of steps left to train.
            seconds_per_predicted: Measured step time divided by the predicted one.
        """
        gain_s = (self.stay_step_s - self.step_time_s) * seconds_per_predicted
        return steps_left * gain_s - self.moving_s
