"""Learning by algorithms of stable-baselines3 and sb3-contrib on ``heterog/Strategy-v1``.

Every algorithm for discrete actions works: ``A2C``, ``PPO``, ``DQN``, ``MaskablePPO``, ``QRDQN``,
``TRPO``. Our policy is its features extractor. Features are the policy's scores of the current
block's candidates, with candidates that do not fit masked, and its value. The algorithm's heads
only read these off, so the learned policy draws strategies as any other does. A pair is encoded
once for all steps on it with the same weights.
"""

import copy
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import FilterObservation
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

from heterog.agents.graph_data import PairBatch
from heterog.agents.learner import Learner, MakeLearner, Task
from heterog.agents.policy import Policy, Scores
from heterog.envs.pair import Pair
from heterog.envs.spaces import Padding
from heterog.envs.strategy_env import StrategyEnv
from heterog.errors import HeterogError, UnknownNameError

PACKAGES = {"sb3": "stable_baselines3", "sb3_contrib": "sb3_contrib"}
SEEN = ("pair", "block", "chosen", "action_mask")
"""Keys of an observation that are read; the rest follows from the number of the pair."""
_MASKED = -1e9
_POLICY = "MultiInputPolicy"
_EXPLORED = 0.3
"""Part of the training over which random exploration declines."""
_LEAST_RANDOM = 0.05  # least part of random actions
TEMPERATURE = 0.1
"""Difference of action values, in units of the reward, that makes an action e times as likely.
Algorithms that learn action values have no probabilities, but a policy that draws needs them."""


class CandidateScores(BaseFeaturesExtractor):
    """Scores of the current block's candidates, then the value.  # [N, C + 1]

    Args:
        observation_space: Space of ``heterog/Strategy-v1``.
        pairs: Pairs that the numbers in observations refer to.
        policy: Initial policy; it is copied, because some algorithms need two.
    """

    def __init__(
        self, observation_space: gym.spaces.Dict, pairs: Sequence[Pair], policy: Policy
    ) -> None:
        shape = observation_space["action_mask"].shape
        assert shape is not None
        self.num_candidates = shape[1]
        super().__init__(observation_space, features_dim=self.num_candidates + 1)
        self.policy = copy.deepcopy(policy)
        self._weights = tuple(self.policy.parameters())
        self._pairs = pairs
        self._known: tuple[float, dict[int, Scores]] = (np.nan, {})

    def forward(self, seen: dict[str, Tensor]) -> Tensor:
        """Features of some steps."""
        blocks = seen["block"].reshape(-1).long()
        chosen, masks = seen["chosen"].long() - 1, seen["action_mask"] > 0.5
        features = torch.full((len(blocks), self.num_candidates + 1), _MASKED)
        numbers = seen["pair"].reshape(-1).long()
        for number in torch.unique(numbers).tolist():
            rows = torch.nonzero(numbers == number).flatten()
            scores = self._scores_of(number)
            block = blocks[rows].clamp(max=self._pairs[number].num_blocks - 1)
            logits = scores.unary[0, block]
            later = torch.nonzero(block > 0).flatten()
            before = chosen[rows[later], block[later] - 1].clamp(min=0)
            chain = scores.pair[0, before]
            chain = chain + scores.cut[0, block[later], None] * scores.overlap[0, before]
            chain = chain.scatter_add(1, before[:, None], scores.stay[0, block[later], None])
            logits = logits.index_add(0, later, chain)
            count = logits.shape[1]
            logits = logits.masked_fill(~masks[rows, block, :count], _MASKED)
            value = scores.value.expand(len(rows), 1)
            padding = torch.full((len(rows), self.num_candidates - count), _MASKED)
            features = features.index_copy(0, rows, torch.cat([logits, padding, value], dim=1))
        return features

    def _scores_of(self, number: int) -> Scores:
        """The policy's scores of a pair; without gradients, cached until weights change."""
        stamp = float(parameters_to_vector(self._weights).detach().sum())
        if stamp != self._known[0]:
            self._known = stamp, {}
        if number in self._known[1] and not torch.is_grad_enabled():
            return self._known[1][number]
        with sdpa_kernel(SDPBackend.MATH):  # TRPO needs second derivatives
            scores: Scores = self.policy(PairBatch([self._pairs[number].observation]))
        if not torch.is_grad_enabled():
            self._known[1][number] = scores
        return scores


class _Read(nn.Module):
    """A head that returns features: scores, the value, or action values, also with quantiles."""

    def __init__(
        self, first: int | None, last: int | None, scale: float = 1.0, num_quantiles: int = 0
    ) -> None:
        super().__init__()
        self._part, self._scale = slice(first, last), scale
        self.offsets = nn.Parameter(torch.linspace(-0.1, 0.1, num_quantiles)[:, None])

    def forward(self, features: Tensor) -> Tensor:
        """A part of the features, for each quantile if there are any."""
        part = self._scale * features[:, self._part]
        if not len(self.offsets):
            return part
        return (part[:, None] + self.offsets).flatten(1)


def _read_off(policy: Any) -> CandidateScores:
    """Give a policy of any algorithm heads of ``_Read``; return the extractor that learns."""
    if hasattr(policy, "action_net"):
        policy.action_net, policy.value_net = _Read(None, -1), _Read(-1, None)
        learning = policy
    elif hasattr(policy, "q_net"):
        for network in (policy.q_net, policy.q_net_target):
            network.q_net = _Read(None, -1, TEMPERATURE)
        learning = policy.q_net
    else:
        for network in (policy.quantile_net, policy.quantile_net_target):
            network.quantile_net = _Read(None, -1, TEMPERATURE, network.n_quantiles)
        learning = policy.quantile_net
    options = {"lr": 0.0} | policy.optimizer_kwargs  # the algorithm sets the rate
    policy.optimizer = policy.optimizer_class(learning.parameters(), **options)
    extractor = learning.features_extractor
    assert isinstance(extractor, CandidateScores)
    return extractor


class Sb3Learner(Learner):
    """An algorithm of stable-baselines3; see the module docstring.

    A step is a rollout of about an episode of each environment, with the passes over it. A resumed
    run has the checkpoint's weights and optimizer, but new episodes.

    Args:
        task: The learning task.
        algorithm: Class of the algorithm.
    """

    def __init__(self, task: Task, algorithm: type[BaseAlgorithm]) -> None:
        super().__init__(task)
        config = task.config
        source = replace(task.source, judged=True)
        pairs = [source.pair(index) for index in range(config.num_pairs)]
        padding = Padding.of(pairs)

        def make() -> gym.Env[Any, Any]:
            env: gym.Env[Any, Any] = StrategyEnv(pairs, padding, task.reward)
            env = FilterObservation(env, SEEN)
            return env

        envs = DummyVecEnv([make] * config.pairs_per_step)
        envs.seed(config.seed)
        self._rate = config.learning_rate
        self._per_step = padding.blocks * config.pairs_per_step
        kwargs = {
            "features_extractor_class": CandidateScores,
            "features_extractor_kwargs": {"pairs": pairs, "policy": task.policy},
            "net_arch": [],
        }
        policy_class = algorithm.policy_aliases[_POLICY]
        if "ortho_init" in inspect.signature(policy_class.__init__).parameters:
            kwargs["ortho_init"] = False  # it would overwrite the initial policy
        self.model: Any = algorithm(
            _POLICY, envs, policy_kwargs=kwargs, **_options(algorithm, self, padding.blocks)
        )
        self.policy = _read_off(self.model.policy).policy
        self.model.set_logger(Logger(folder=None, output_formats=[]))

    def rate(self, left: float) -> float:
        """Learning rate of the current step; ``left``, which restarts at each step, is unused."""
        return self._rate

    def advance(self, step: int) -> Mapping[str, float]:
        """Play and learn."""
        config, episodes = self.task.config, _Episodes()
        self._rate = config.rate_at(step)
        done = step / config.num_steps
        self.model.exploration_schedule = lambda left: max(1.0 - done / _EXPLORED, _LEAST_RANDOM)
        self.model.learn(self._per_step, callback=episodes, reset_num_timesteps=False)
        self.num_evaluations += len(episodes.ended)
        terms = episodes.terms()
        drawn = getattr(self.model, "rollout_buffer", None)
        if drawn is not None:  # mean of -log p, because TRPO logs no entropy and A2C seldom does
            terms["entropy"] = -float(np.mean(drawn.log_probs))
        return terms

    def state(self) -> dict[str, Any]:
        """Weights of all networks, and the optimizer."""
        return {
            "networks": self.model.policy.state_dict(),
            "optimizer": self.model.policy.optimizer.state_dict(),
            "num_timesteps": self.model.num_timesteps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.model.policy.load_state_dict(state["networks"])
        self.model.policy.optimizer.load_state_dict(state["optimizer"])
        self.model.num_timesteps = state["num_timesteps"]


def _options(
    algorithm: type[BaseAlgorithm], learner: Sb3Learner, num_blocks: int
) -> dict[str, Any]:
    """Settings for an algorithm, for episodes of ``num_blocks`` steps with one reward each."""
    per_step, config = num_blocks * learner.task.config.pairs_per_step, learner.task.config
    wanted = {
        "learning_rate": learner.rate,
        "seed": config.seed,
        "device": "cpu",
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "n_steps": num_blocks,
        "batch_size": num_blocks * max(config.pairs_per_step // 2, 1),
        "n_epochs": 4,
        "ent_coef": 3e-3,
        "max_grad_norm": 1.0,
        "buffer_size": 20 * per_step,
        "learning_starts": per_step,
        "train_freq": max(num_blocks // 4, 1),
        "target_update_interval": per_step,
    }
    known = set(inspect.signature(algorithm).parameters)
    if "buffer_size" in known:  # for off-policy algorithms it means n-step returns
        known.discard("n_steps")
    return {name: value for name, value in wanted.items() if name in known}


class _Episodes(BaseCallback):
    """Collects how episodes ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[tuple[float, dict[str, Any]]] = []

    def _on_step(self) -> bool:
        for reward, info in zip(self.locals["rewards"], self.locals["infos"], strict=True):
            if "speedup" in info:
                self.ended.append((float(reward), info))
        return True

    def terms(self) -> dict[str, float]:
        """Numbers to log."""
        if not self.ended:
            return {}
        speedups = [info["speedup"] for _, info in self.ended if info["is_ok"]]
        return {
            "reward": float(np.mean([reward for reward, _ in self.ended])),
            "speedup": float(np.exp(np.mean(np.log(speedups)))) if speedups else 0.0,
            "out_of_memory": 1.0 - len(speedups) / len(self.ended),
        }


class _Probe(gym.Env[Any, Any]):
    """An environment with the kinds of spaces that an algorithm must support."""

    observation_space = gym.spaces.Dict({"block": gym.spaces.Box(0, 1, (1,))})
    action_space = gym.spaces.Discrete(2)


def sb3_learner(library: str, name: str) -> MakeLearner:
    """The function that makes the learner of an algorithm.

    Raises:
        UnknownNameError: the library has no such algorithm.
        HeterogError: the library is missing, or the algorithm takes other actions.
    """
    try:
        module = importlib.import_module(PACKAGES[library])
    except ImportError as error:
        raise HeterogError(
            f"{library}:{name} needs sb3-contrib; install it with 'pip install heterog[contrib]'."
        ) from error
    known = {
        each: found
        for each, found in vars(module).items()
        if isinstance(found, type) and issubclass(found, BaseAlgorithm)
    }
    if name not in known:
        raise UnknownNameError("algorithm", f"{library}:{name}", [f"{library}:{k}" for k in known])
    algorithm: Any = known[name]
    try:
        algorithm(_POLICY, DummyVecEnv([_Probe]), _init_setup_model=False)
    except (AssertionError, TypeError, ValueError) as error:
        raise HeterogError(
            f"{library}:{name} cannot learn here, where a step chooses one of some candidates and "
            f"sees a dictionary of arrays: {' '.join(str(error).split())[:120]}. Take sb3:PPO, "
            "sb3:A2C, sb3:DQN or sb3_contrib:MaskablePPO."
        ) from error
    return partial(Sb3Learner, algorithm=algorithm)
