"""Training by PPO: a step is a rollout and the passes over it; the rest is the trainer's."""

from collections.abc import Mapping
from typing import Any

from heterog.agents.config import PolicyConfig
from heterog.agents.imitation import Example
from heterog.agents.policy import Policy
from heterog.agents.ppo import PpoLearner
from heterog.agents.training import Algorithm, Trainer


class PpoTrainer(Trainer):
    """As ``Trainer``; ``num_steps`` counts rollouts of 8 pairs by 16 environments."""

    def make_policy(self, network: PolicyConfig) -> Policy:
        """The policy inside of stable-baselines3's."""
        pairs = [self.source.pair(index) for index in range(self.config.num_pairs)]
        self.learner = PpoLearner(
            pairs,
            network,
            seed=self.config.seed,
            learning_rate=self.config.learning_rate,
            num_envs=self.config.samples_per_pair,
            steps_per_rollout=self.config.pairs_per_step,
        )
        return self.learner.policy

    def advance(self, examples: list[Example], num_steps: int, begin: float) -> None:
        """Play and learn."""

        def after(number: int, terms: dict[str, float]) -> bool:
            self.step += 1
            self.num_evaluations += self.config.samples_per_pair * self.config.pairs_per_step
            self.log({name: v for name, v in terms.items() if name != "evaluations_per_s"}, begin)
            return True

        self.learner.learn(num_steps, after)

    def state(self) -> dict[str, Any]:
        """Of stable-baselines3's parts."""
        return self.learner.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.learner.restore(dict(state))


def make_trainer(*args: Any, **options: Any) -> Trainer:
    """The trainer that a configuration asks for; arguments are those of ``Trainer``."""
    config = options["config"] if "config" in options else args[1]
    return (PpoTrainer if config.algorithm == Algorithm.PPO else Trainer)(*args, **options)
