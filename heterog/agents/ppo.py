"""PPO through stable-baselines3, with an extractor and a policy of our own.

The environment is ``heterog/StrategyOneShot-v1`` behind a wrapper that shows only the number of
the pair: the extractor has the pairs, and encodes each that occurs in a minibatch once, however
often it occurs. All environments play the same pair at a time, so that few occur. Masks are those
of the decoder, memory included, and log-probabilities are exact.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor

from heterog.agents.config import PolicyConfig, TrainingConfig
from heterog.agents.graph_data import PairBatch
from heterog.agents.policy import Policy, Scores, draw, log_probabilities, masks_of
from heterog.envs.pair import Pair
from heterog.envs.reward import RewardFunction, reward_of
from heterog.envs.spaces import Padded, Padding, pair_space
from heterog.envs.strategy_env import StrategyOneShotEnv

_FIRST_COEFFICIENT = 3e-3
"""Coefficient of the entropy of whole strategies, in nats, before it is steered."""


class TurnsEnv(gym.Wrapper[Padded, npt.NDArray[np.int64], Padded, npt.NDArray[np.int64]]):
    """Plays pairs in an order that depends on the seed alone, and shows only their numbers.

    Args:
        env: Environment to wrap.
        seed: Seed of the order; equal in all environments that play side by side.
    """

    def __init__(self, env: StrategyOneShotEnv, seed: int) -> None:
        super().__init__(env)
        self._num_pairs = len(env.pairs)
        self._seed = seed
        self.turn = 0
        self.observation_space: gym.Space[Any] = gym.spaces.Dict(
            {"pair": pair_space(env.padding)["pair"]}
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Padded, dict[str, Any]]:
        """Begin the next turn."""
        rng = np.random.default_rng([self._seed, self.turn])
        self.turn += 1
        seen, info = self.env.reset(
            seed=seed, options={"pair": int(rng.integers(self._num_pairs))}
        )
        return {"pair": seen["pair"]}, info

    def step(
        self, action: npt.NDArray[np.int64]
    ) -> tuple[Padded, Any, bool, bool, dict[str, Any]]:
        """Play the whole episode."""
        seen, reward, terminated, truncated, info = self.env.step(action)
        return {"pair": seen["pair"]}, reward, terminated, truncated, info


class PairExtractor(BaseFeaturesExtractor):
    """Makes scores from numbers of pairs: encodes each pair that occurs once.

    Args:
        observation_space: Observation space of ``TurnsEnv``.
        pairs: Pairs that the numbers refer to.
        network: Configuration of the policy.
    """

    def __init__(
        self, observation_space: gym.Space[Any], pairs: Sequence[Pair], network: PolicyConfig
    ) -> None:
        super().__init__(observation_space, features_dim=network.width)
        self.pairs = list(pairs)
        self.policy = Policy(network)
        self.num_encoded = 0

    def encode(self, observations: dict[str, Tensor]) -> tuple[Scores, Tensor, list[int]]:
        """(scores of the pairs that occur, position of each row's pair, their numbers)."""
        asked = observations["pair"].reshape(-1).long()
        numbers, which = torch.unique(asked, return_inverse=True)
        present = numbers.tolist()
        self.num_encoded += len(present)
        batch = PairBatch([self.pairs[number].observation for number in present])
        return self.policy(batch), which, present


class PairPolicy(ActorCriticPolicy):
    """Actor and critic on one encoder; draws with the decoder and its memory check.

    Args:
        observation_space: Observation space of ``TurnsEnv``.
        action_space: Action space of ``heterog/StrategyOneShot-v1``.
        lr_schedule: Learning rate as stable-baselines3 passes it.
        seed: Seed of the draws.
        **options: Other options: ``features_extractor_kwargs`` with ``pairs`` and ``network``.

    Attributes:
        entropy: Mean entropy of whole strategies in the last minibatch, in nats.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        lr_schedule: Schedule,
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.rng = np.random.default_rng([seed, 5])
        self.entropy = 0.0
        self._masks: dict[tuple[int, bytes], npt.NDArray[np.uint8]] = {}
        options.pop("use_sde", None)
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            features_extractor_class=PairExtractor,
            **options,
        )

    def _build(self, lr_schedule: Schedule) -> None:
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )

    @property
    def extractor(self) -> PairExtractor:
        """The encoder with its pairs."""
        assert isinstance(self.features_extractor, PairExtractor)
        return self.features_extractor

    def forget_masks(self) -> None:
        """Drop the masks of earlier draws."""
        self._masks.clear()

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Draw actions; return them with values and log-probabilities."""
        scores, which, present = self.extractor.encode(obs)
        actions = self._draw(scores, which, present, greedy=deterministic)
        log_p, _ = self._log_p(scores, which, present, actions)
        return actions, scores.value[which][:, None], log_p

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, log-probabilities and entropies of actions drawn before."""
        scores, which, present = self.extractor.encode(obs)
        log_p, entropy = self._log_p(scores, which, present, actions.long())
        self.entropy = float(entropy.detach().mean())
        return scores.value[which][:, None], log_p, entropy

    def predict_values(self, obs: Any) -> Tensor:
        """The critic alone."""
        scores, which, _ = self.extractor.encode(obs)
        return scores.value[which][:, None]

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        scores, which, present = self.extractor.encode(observation)
        return self._draw(scores, which, present, greedy=deterministic)

    def _draw(self, scores: Scores, which: Tensor, present: list[int], *, greedy: bool) -> Tensor:
        assert isinstance(self.action_space, gym.spaces.MultiDiscrete)
        actions = torch.zeros(len(which), len(self.action_space.nvec), dtype=torch.long)
        for index, number in enumerate(present):
            pair = self.extractor.pairs[number]
            rows = torch.nonzero(which == index).flatten()
            found = draw(
                scores.of(index, pair), pair, len(rows), self.rng, greedy=greedy, keep_masks=True
            )
            actions[rows[:, None], torch.arange(pair.num_blocks)] = torch.from_numpy(
                found.rows
            ).long()
            for row, mask in zip(found.rows, found.masks, strict=True):
                self._masks[number, row.tobytes()] = np.packbits(mask, axis=1)
        return actions

    def _log_p(
        self, scores: Scores, which: Tensor, present: list[int], actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        blocks, candidates = scores.unary.shape[1:]
        masks = np.zeros((len(which), blocks, candidates), np.bool_)
        masks[:, :, 0] = True
        rows = actions.numpy().astype(np.int32)
        for index, number in enumerate(which.tolist()):
            pair = self.extractor.pairs[present[number]]
            row = np.ascontiguousarray(rows[index, : pair.num_blocks])
            key = present[number], row.tobytes()
            if key not in self._masks:
                self._masks[key] = np.packbits(masks_of(pair, row[None])[0], axis=1)
            bits = np.unpackbits(self._masks[key], axis=1, count=pair.num_candidates)
            masks[index, : pair.num_blocks] = False
            masks[index, : pair.num_blocks, : pair.num_candidates] = bits
        return log_probabilities(scores, which, actions[:, :blocks], torch.from_numpy(masks))


class PpoLearner:
    """A PPO run over some pairs.

    Args:
        pairs: Pairs to play.
        network: Sizes of a new policy.
        config: Settings: environments side by side, pairs of a rollout, learning rate and seed.
        reward: Reward of a scored strategy.

    Attributes:
        rate: Learning rate of the next rollout's passes; like ``coefficient``, it may be changed
            between rollouts.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        network: PolicyConfig,
        config: TrainingConfig,
        reward: RewardFunction = reward_of,
    ) -> None:
        padding = Padding.of(pairs)
        self.rate, seed = config.learning_rate, config.seed

        def make() -> gym.Env[Any, Any]:
            return TurnsEnv(StrategyOneShotEnv(pairs, padding, reward), seed)

        self.envs = DummyVecEnv([make for _ in range(config.samples_per_pair)])
        self.model = PPO(
            PairPolicy,
            self.envs,
            # Its own schedules restart at every call of learn(); ours covers the whole run.
            learning_rate=lambda _: self.rate,
            n_steps=config.pairs_per_step,
            batch_size=config.samples_per_pair * config.pairs_per_step,
            n_epochs=2,
            gamma=1.0,  # an episode is one step: there is nothing to discount
            gae_lambda=1.0,
            ent_coef=_FIRST_COEFFICIENT,
            max_grad_norm=1.0,
            policy_kwargs={
                "features_extractor_kwargs": {"pairs": pairs, "network": network},
                "seed": seed,
            },
            seed=seed,
            device="cpu",
        )

    @property
    def actor_critic(self) -> PairPolicy:
        """The policy in the form of stable-baselines3."""
        assert isinstance(self.model.policy, PairPolicy)
        return self.model.policy

    @property
    def policy(self) -> Policy:
        """The network that is trained."""
        return self.actor_critic.extractor.policy

    @property
    def coefficient(self) -> float:
        """Coefficient of the entropy of whole strategies, in nats."""
        return float(self.model.ent_coef)

    @coefficient.setter
    def coefficient(self, value: float) -> None:
        self.model.ent_coef = value

    def state(self) -> dict[str, Any]:
        """Everything that a run needs to resume exactly, between rollouts."""
        # Minibatches are cut by numpy's global generator, which stable-baselines3 seeds.
        name, words, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
        words = np.asarray(words)
        env = self.envs.envs[0]
        assert isinstance(env, TurnsEnv)
        return {
            "optimizer": self.actor_critic.optimizer.state_dict(),
            "draws": self.actor_critic.rng.bit_generator.state,
            "minibatches": [name, torch.from_numpy(words.astype(np.int64)), position],
            "gauss": [has_gauss, gauss],
            "turn": env.turn,
            "coefficient": self.coefficient,
            "num_timesteps": self.model.num_timesteps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; the caller loads the weights."""
        self.actor_critic.optimizer.load_state_dict(state["optimizer"])
        self.actor_critic.rng.bit_generator.state = state["draws"]
        name, words, position = state["minibatches"]
        legacy = (name, words.numpy().astype(np.uint32), position, *state["gauss"])
        np.random.set_state(legacy)  # noqa: NPY002
        for env in self.envs.envs:
            assert isinstance(env, TurnsEnv)
            env.turn = state["turn"] - 1  # the next reset begins the turn that was begun before
        self.model.num_timesteps = state["num_timesteps"]
        self.coefficient = state["coefficient"]

    def learn(
        self, num_rollouts: int, after_rollout: Callable[[int, dict[str, float]], bool]
    ) -> None:
        """Train for some rollouts.

        Args:
            num_rollouts: Number of rollouts, each followed by two passes of minibatches.
            after_rollout: Function called with the number of rollouts done and the numbers of the
                last one; training stops when it returns ``False``.
        """
        per_rollout = self.model.n_steps * self.envs.num_envs
        self.model.learn(
            num_rollouts * per_rollout,
            callback=_AfterRollout(after_rollout),
            reset_num_timesteps=False,
        )


class _AfterRollout(BaseCallback):
    """Collects the final results of episodes, and reports before the next rollout begins."""

    def __init__(self, report: Callable[[int, dict[str, float]], bool]) -> None:
        super().__init__()
        self._report = report
        self._infos: list[dict[str, Any]] = []
        self._num = 0
        self._goes_on = True
        self._began = time.perf_counter()

    def _on_rollout_start(self) -> None:
        # The policy was updated since the last rollout, so that one has ended here.
        self._tell()
        self._began = time.perf_counter()
        self._policy.forget_masks()

    def _on_training_end(self) -> None:
        self._tell()

    @property
    def _policy(self) -> PairPolicy:
        assert isinstance(self.model.policy, PairPolicy)
        return self.model.policy

    def _tell(self) -> None:
        if self._infos:
            self._num += 1
            seconds = time.perf_counter() - self._began
            speedups = [info["speedup"] for info in self._infos if info["is_ok"]]
            self._goes_on = self._report(
                self._num,
                {
                    "reward": float(np.mean([info["reward"] for info in self._infos])),
                    "speedup": float(np.exp(np.mean(np.log(speedups)))) if speedups else 0.0,
                    "entropy": self._policy.entropy,
                    "out_of_memory": float(np.mean([not i["is_ok"] for i in self._infos])),
                    "evaluations_per_s": len(self._infos) / max(seconds, 1e-9),
                },
            )
        self._infos = []

    def _on_step(self) -> bool:
        rewards = self.locals["rewards"]
        for info, reward in zip(self.locals["infos"], rewards, strict=True):
            self._infos.append(info | {"reward": float(reward)})
        return self._goes_on
