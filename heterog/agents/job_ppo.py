"""PPO through stable-baselines3 for ``heterog/JobPartition-v0``, with actions masked.

The policy sees the job, the cluster and which degrees have room, through two small layers.
Illegal degrees and degrees without room are masked, because the job would be blocked. Degrees with
which the job would be late are not masked: by choosing one, the policy turns a job away. Masking
them, with rejection as an action, was tried and learned worse on all four distributions.
"""

from collections.abc import Callable

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor

from heterog.envs.job_partition import JobPartitionEnv
from heterog.search.arrivals.queueing import blocking_rate, causes

NUM_ENVS = 8  # environments that run at once
STEPS_PER_ROLLOUT = 256
"""Decisions of each environment between two updates."""
_REFUSED = -1e9  # score of an action without room: its probability is 0


class _Features(CombinedExtractor):
    """An observation as one row; keeps which actions it refuses."""

    refused: Tensor

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Features.  # [N, num_features]"""
        has_room = observations["has_room"][:, 1:] > 0.5
        self.refused = torch.cat((has_room.any(dim=1, keepdim=True), ~has_room), dim=1)
        return super().forward(observations)


class MaskedPolicy(MultiInputActorCriticPolicy):
    """Actor and critic whose actor rejects a job only if no degree has room."""

    features_extractor: _Features

    def _get_action_dist_from_latent(self, latent_pi: Tensor) -> Distribution:
        """Chances of the actions for the observation whose features were made last."""
        scores = self.action_net(latent_pi)
        return self.action_dist.proba_distribution(
            scores.masked_fill(self.features_extractor.refused, _REFUSED)
        )


def train_jobs(
    make_env: Callable[[], JobPartitionEnv],
    num_decisions: int,
    *,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda decisions, accepted: None,
) -> PPO:
    """Learn to share a cluster among arriving jobs.

    Args:
        make_env: Function that makes each of the environments that play side by side.
        num_decisions: Number of arrivals to learn from.
        seed: Seed of everything random.
        report: Function called after each rollout with the decisions so far and the part accepted.
    """
    envs = DummyVecEnv([make_env] * NUM_ENVS)
    envs.seed(seed)
    model = PPO(
        MaskedPolicy,
        envs,
        learning_rate=lambda left: 1e-3 * max(left, 0.05),
        n_steps=STEPS_PER_ROLLOUT,
        batch_size=256,
        n_epochs=6,
        gamma=0.99,  # jobs overlap few arrivals; the paper's is 0.997 to 0.999
        gae_lambda=0.95,
        ent_coef=3e-3,
        policy_kwargs={"net_arch": [64, 64], "features_extractor_class": _Features},
        seed=seed,
        device="cpu",
    )
    model.learn(max(num_decisions, 1), callback=_Report(report))
    envs.close()
    return model


class _Report(BaseCallback):
    """Reports the part that was accepted in each rollout."""

    def __init__(self, report: Callable[[int, float], None]) -> None:
        super().__init__()
        self._report = report

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        rewards = self.locals["rollout_buffer"].rewards
        self._report(self.num_timesteps, float((np.asarray(rewards) > 0).mean()))


def play(model: PPO, env: JobPartitionEnv, episode: int) -> tuple[float, dict[str, float]]:
    """Blocking rate and causes of one whole episode, by the policy's most likely degrees."""
    seen, _ = env.reset(options={"episode": episode})
    is_over = False
    while not is_over:
        action, _ = model.predict(seen, deterministic=True)
        seen, _, is_over, _, _ = env.step(int(action))
    final = env.queueing.final()
    return blocking_rate(final), causes(final)
