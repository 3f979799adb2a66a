"""What every way to learn has in common: ``Learner``, and which one a name means.

``imitation``, ``reinforce`` and ``mixed`` are in ``gradients``; ``sb3:NAME`` and
``sb3_contrib:NAME`` are algorithms of stable-baselines3 and sb3-contrib (``sb3``);
``path/to/file.py:NAME`` is a learner of your own, a subclass of ``Learner``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from heterog.agents.config import Algorithm, TrainingConfig
from heterog.agents.policy import Policy
from heterog.agents.sources import PairSource
from heterog.envs.reward import RewardFunction, reward_of
from heterog.errors import ConformanceError, UnknownNameError
from heterog.user_code import is_from_file, load_object
from heterog.workers import HERE, Workers

Report = Callable[[str, float, str], None]
"""Function called with (stage, part done, news)."""


def _silent(stage: str, fraction: float, text: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be learned.

    Attributes:
        source: Source of the pairs; those below ``config.num_pairs`` are for learning.
        config: Settings.
        policy: Policy to begin with, which the learner may change.
        reward: Reward of a scored strategy.
        workers: Workers for searches and scores.
        report: Function that gets the progress of preparations.
    """

    source: PairSource
    config: TrainingConfig
    policy: Policy
    reward: RewardFunction = reward_of
    workers: Workers = HERE
    report: Report = _silent


class Learner(ABC):
    """Improves a policy step by step; ``Trainer`` validates it, keeps the best, stops and resumes.

    Args:
        task: What is to be learned.

    Attributes:
        policy: The policy that is learning.
        num_evaluations: Number of strategies simulated so far.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.policy = task.policy
        self.num_evaluations = 0

    @property
    def kept(self) -> Policy:
        """The policy that is validated and kept."""
        return self.policy

    @abstractmethod
    def advance(self, step: int) -> Mapping[str, float]:
        """Make a step of ``config.num_steps``; return numbers to log."""

    def state(self) -> dict[str, Any]:
        """What it needs to go on besides the policy's weights, as a checkpoint may hold it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (nothing by default)
        """Go on from a state; the policy has its weights already."""


MakeLearner = Callable[[Task], Learner]


def learner_of(algorithm: str) -> MakeLearner:
    """What makes the learner of a name; see the module docstring.

    Raises:
        UnknownNameError: there is no such algorithm.
        HeterogError: it takes other actions than a choice among candidates, or its package or file
            is missing.
        ConformanceError: a name of your own is no ``Learner``.
    """
    if algorithm in list(Algorithm):
        from heterog.agents.gradients import GradientLearner

        return GradientLearner
    library, _, name = algorithm.partition(":")
    if library in ("sb3", "sb3_contrib") and name:
        from heterog.agents.sb3 import sb3_learner

        return sb3_learner(library, name)
    if not is_from_file(algorithm) or ".py" not in algorithm:
        known = (*Algorithm, "sb3:A2C", "sb3:PPO", "sb3:DQN", "sb3_contrib:MaskablePPO")
        raise UnknownNameError("algorithm", algorithm, known)
    found = load_object(algorithm, "learner")
    if not (isinstance(found, type) and issubclass(found, Learner)):
        raise ConformanceError(
            f"{algorithm} is no subclass of heterog.agents.learner.Learner; write "
            "'class Mine(Learner)' with a method 'advance'."
        )
    return found
