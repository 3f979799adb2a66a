"""Training by PPO: a step is a rollout and the passes over it; the rest is ``Trainer``'s."""

from collections.abc import Mapping
from typing import Any

from heterog.agents.config import Algorithm, PolicyConfig, TrainingConfig
from heterog.agents.imitation import Example
from heterog.agents.policy import Policy
from heterog.agents.ppo import PpoLearner
from heterog.agents.reinforce import steered
from heterog.agents.sources import PairSource
from heterog.agents.training import Trainer


class PpoTrainer(Trainer):
    """Like ``Trainer``, but ``num_steps`` counts rollouts.

    In a rollout ``samples_per_pair`` environments play ``pairs_per_step`` pairs side by side, 16
    and 8 by default. Learning rate and entropy follow the same schedules as in REINFORCE.
    """

    def make_policy(self, network: PolicyConfig) -> Policy:
        """The policy inside stable-baselines3's."""
        pairs = [self.source.pair(index) for index in range(self.config.num_pairs)]
        self.learner = PpoLearner(pairs, network, self.config, self.reward)
        return self.learner.policy

    def advance(self, examples: list[Example], num_steps: int, begin: float) -> None:
        """Play and learn."""
        config, learner = self.config, self.learner
        learner.rate = config.rate_at(self.step)

        def after(number: int, terms: dict[str, float]) -> bool:
            fraction = self.step / config.num_steps
            learner.coefficient = steered(
                learner.coefficient, terms["entropy"], config.entropy_nats, fraction
            )
            self.step += 1
            learner.rate = config.rate_at(self.step)
            self.num_evaluations += config.samples_per_pair * config.pairs_per_step
            self.log({name: v for name, v in terms.items() if name != "evaluations_per_s"}, begin)
            return True

        learner.learn(num_steps, after)

    def state(self) -> dict[str, Any]:
        """State of stable-baselines3's parts."""
        return self.learner.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``."""
        self.learner.restore(dict(state))


def make_trainer(
    source: PairSource,
    config: TrainingConfig,
    network: PolicyConfig | Policy | None = None,
    **options: Any,
) -> Trainer:
    """The trainer for a configuration's algorithm.

    Args:
        source: Source of the pairs.
        config: Settings; the algorithm decides.
        network: Sizes of a new policy, or a policy to begin with.
        **options: Other arguments of ``Trainer``.
    """
    kind = PpoTrainer if config.algorithm == Algorithm.PPO else Trainer
    return kind(source, config, network, **options)
