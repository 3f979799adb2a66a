"""What a job asks the process that plans, and what that answers."""

from collections.abc import Mapping
from dataclasses import dataclass

from heterog.healing.service import Message

FIRST_METHODS = ("agent", "cp_ar", "tuned_uniform")
"""Quick ones: a policy's own answer, and two baselines in case it has none that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a job wants to know.

    Attributes:
        lost: devices of the whole cluster that cannot be used.
        slow: how many times as long kernels of a device take as planned.
        methods: names of planners.
        budget: of their search.
        steps_left: to be trained.
        restart_s: until ranks are there again, whatever they run.
        running: file of the plan that runs or ran.
        running_on: device of the whole cluster of each of its ranks.
        path: file for the new plan.
    """

    lost: tuple[int, ...]
    slow: Mapping[int, float]
    methods: tuple[str, ...]
    budget: str
    steps_left: int
    restart_s: float
    running: str
    running_on: tuple[int, ...]
    path: str

    def to_request(self) -> Message:
        """As it goes to the process."""
        return {
            "lost": self.lost,
            "slow": {str(device): factor for device, factor in self.slow.items()},
            "methods": self.methods,
            "budget": self.budget,
            "steps_left": self.steps_left,
            "restart_s": self.restart_s,
            "running": self.running,
            "running_on": self.running_on,
            "path": self.path,
        }

    @staticmethod
    def from_request(request: Message) -> "Question":
        """As the process got it."""
        return Question(
            lost=tuple(request["lost"]),
            slow={int(device): float(factor) for device, factor in request["slow"].items()},
            methods=tuple(request["methods"]),
            budget=request["budget"],
            steps_left=int(request["steps_left"]),
            restart_s=float(request["restart_s"]),
            running=request["running"],
            running_on=tuple(request["running_on"]),
            path=request["path"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan that could be gone to.

    Attributes:
        question: that it answers.
        path: file of the plan.
        method: that found it.
        step_time_s: predicted.
        moving_s: until its ranks would have their state.
        stay_step_s: predicted for the plan that runs, on the devices as they are.
        busy_s: predicted seconds that each of its devices computes in a step.
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
        """As it came from the process."""
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
        """Seconds by which the job is done earlier if it goes to this plan now.

        Args:
            steps_left: to be trained.
            seconds_per_predicted: that steps really take, for each second that is predicted.
        """
        gain_s = (self.stay_step_s - self.step_time_s) * seconds_per_predicted
        return steps_left * gain_s - self.moving_s
