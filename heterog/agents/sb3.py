"""Learning by algorithms of stable-baselines3 and sb3-contrib on ``heterog/Strategy-v1``.

Every algorithm for discrete actions works: ``A2C``, ``PPO``, ``DQN``, ``MaskablePPO``, ``QRDQN``,
``TRPO``. Our policy is its features extractor. Features are the policy's scores of the current
block's candidates, with candidates that do not fit masked, and its value. The algorithm's heads
only read these off, so the learned policy draws strategies as any other does.

The chain of a policy depends on the pair, the block and the candidate before, so an observation
holds only these and what fits. All pairs of a minibatch are encoded in one pass; between updates,
each pair once. Several environments play the same pair at once, and a reward is the gain over
these siblings (``reinforce``), because pairs differ more than the strategies of a pair.
"""

import copy
import importlib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Self

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

from heterog.agents.graph_data import PairBatch
from heterog.agents.learner import Learner, Task
from heterog.agents.policy import Policy, Scores
from heterog.agents.reinforce import BEST_OF, advantage
from heterog.envs.pair import Pair
from heterog.envs.reward import RewardFunction
from heterog.envs.spaces import Padding
from heterog.envs.strategy_env import Info, StrategyEnv
from heterog.errors import HeterogError, UnknownNameError

PACKAGES = {"sb3": "stable_baselines3", "sb3_contrib": "sb3_contrib"}
_MASKED = -2e9  # below what the policy itself masks
_POLICY = "MlpPolicy"
_NUM_PLACE = 3  # numbers of an observation before the candidates
_MOST_BATCHES = 8  # batches of graphs that are kept
_NUM_QUANTILES = 16
"""Quantiles of an action value; 200, the library's own number, take 300 MB for a rollout."""
TEMPERATURE = 0.02
"""Difference of action values, in units of the reward, that makes an action e times as likely.
Algorithms that learn action values have no probabilities, but a policy that draws needs them."""


class PolicyEnv(StrategyEnv):
    """``heterog/Strategy-v1`` that shows only what a policy's scores of a block depend on.

    An observation is one array: the pair's number, the block, 1 + the candidate of the block
    before (0 for the first block), and for each candidate whether it fits.  # [3 + C]

    Args:
        pairs: Pairs to draw from.
        seed: Seed of the draws; environments of one seed play the same pairs.
        padding: Sizes to pad to.
        reward: Reward of a scored row.
    """

    def __init__(
        self, pairs: Sequence[Pair], seed: Sequence[int], padding: Padding, reward: RewardFunction
    ) -> None:
        super().__init__(pairs, padding, reward)
        self._draws = np.random.default_rng(seed)

    def _choose(self, options: Info | None) -> None:
        self._number = int(self._draws.integers(len(self.pairs)))

    def _make_spaces(self) -> None:
        super()._make_spaces()
        sizes = self.padding
        most = [sizes.pairs, sizes.blocks, sizes.candidates, *[1] * sizes.candidates]
        self.observation_space = gym.spaces.Box(0.0, np.array(most, np.float32))

    def _observe(self) -> npt.NDArray[np.float32]:
        place = self._number, len(self._row), self._row[-1] + 1 if self._row else 0
        return np.concatenate([place, self._fits], dtype=np.float32)


class CandidateScores(BaseFeaturesExtractor):
    """Scores of the current block's candidates, then the value.  # [N, C + 1]

    Args:
        observation_space: Space of ``PolicyEnv``.
        pairs: Pairs that the numbers in observations refer to.
        policy: Initial policy; it is copied, because some algorithms need two.
    """

    def __init__(
        self, observation_space: gym.spaces.Box, pairs: Sequence[Pair], policy: Policy
    ) -> None:
        self.num_candidates = observation_space.shape[0] - _NUM_PLACE
        super().__init__(observation_space, features_dim=self.num_candidates + 1)
        self.policy = copy.deepcopy(policy)
        self._known: dict[tuple[int, ...], Scores] = {}

        @lru_cache(_MOST_BATCHES)
        def batch(numbers: tuple[int, ...]) -> PairBatch:
            return PairBatch([pairs[number].observation for number in numbers])

        self._batch = batch

    def train(self, mode: bool = True) -> Self:
        """Change the mode; weights may change in training, so what they gave is dropped."""
        if mode:
            self._known.clear()
        return super().train(mode)

    def forward(self, seen: Tensor) -> Tensor:
        """Features of some steps, from one pass over their pairs."""
        number, block, before = seen[:, :_NUM_PLACE].long().unbind(dim=1)
        numbers, which = torch.unique(number, return_inverse=True)
        scores = self._scores_of(tuple(numbers.tolist()))
        count = scores.unary.shape[2]
        block = block.clamp(max=scores.unary.shape[1] - 1)  # an episode's end has no block
        chain = scores.transition(which, block, (before - 1).clamp(min=0))
        logits = scores.unary[which, block] + chain * (before > 0)[:, None]
        fits = seen[:, _NUM_PLACE : _NUM_PLACE + count] > 0.5
        logits = logits.masked_fill(~fits, _MASKED)
        padding = logits.new_full((len(seen), self.num_candidates - count), _MASKED)
        return torch.cat([logits, padding, scores.value[which, None]], dim=1)

    def _scores_of(self, numbers: tuple[int, ...]) -> Scores:
        """The policy's scores of some pairs, kept between rounds of training."""
        is_kept = not (self.training or torch.is_grad_enabled())
        if is_kept and numbers in self._known:
            return self._known[numbers]
        scores: Scores = self.policy(self._batch(numbers))
        if is_kept:
            self._known[numbers] = scores
        return scores


class _Chances(nn.Module):
    """A head that returns the scores."""

    def forward(self, features: Tensor) -> Tensor:
        """The scores, as logits.  # [N, C]"""
        return features[:, :-1]


class _Value(nn.Linear):
    """A head for what is expected of a pair: nothing at first, because siblings share it."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        """The value.  # [N, 1]"""
        return super().forward(features[:, -1:])


class _ActionValues(nn.Module):
    """A head whose action values belong to the policy's own probabilities.

        Q(s, a) = V(s) + TEMPERATURE * log p(a | s)

    so that p is the softmax of Q / TEMPERATURE. With Gumbel noise in units of TEMPERATURE, the
    largest value is a draw from p: exploration draws what the policy would.

    Args:
        num_quantiles: Number of quantiles of each value; none if 0.
        explores: Whether values have noise, except in training.
    """

    def __init__(self, num_quantiles: int = 0, *, explores: bool = False) -> None:
        super().__init__()
        self._explores, self.value = explores, _Value()
        self.offsets = nn.Parameter(torch.linspace(-0.1, 0.1, num_quantiles)[:, None])

    def forward(self, features: Tensor) -> Tensor:
        """Values of actions, for each quantile if there are any.  # [N, C or quantiles * C]"""
        chances = features[:, :-1].log_softmax(dim=1)
        if self._explores and not self.training:
            chances = chances - torch.empty_like(chances).exponential_().log()
        values: Tensor = self.value(features) + TEMPERATURE * chances
        if not len(self.offsets):
            return values
        return (values[:, None] + self.offsets).flatten(1)


def _read_off(policy: Any) -> CandidateScores:
    """Give a policy of any algorithm our heads; return the extractor that learns."""
    if hasattr(policy, "action_net"):
        policy.action_net, policy.value_net = _Chances(), _Value()
        learning = policy
    elif hasattr(policy, "q_net"):
        learning, target = policy.q_net, policy.q_net_target
        learning.q_net, target.q_net = _ActionValues(explores=True), _ActionValues()
    else:
        learning, target = policy.quantile_net, policy.quantile_net_target
        count = learning.n_quantiles
        learning.quantile_net = _ActionValues(count, explores=True)
        target.quantile_net = _ActionValues(count)
    if learning is not policy:
        target.train()  # its weights change outside of training, so no scores of it are kept
    options = {"lr": 0.0, "foreach": True} | policy.optimizer_kwargs  # the algorithm sets the rate
    policy.optimizer = policy.optimizer_class(learning.parameters(), **options)
    extractor = learning.features_extractor
    assert isinstance(extractor, CandidateScores)
    return extractor


def _actor_slopes(
    policy: nn.Module, divergence: Tensor, objective: Tensor
) -> tuple[list[nn.Parameter], Tensor, Tensor, list[torch.Size]]:
    """What TRPO asks of a policy: weights, slopes of the objective and the divergence, shapes.

    Unlike its own method, in one pass for all weights instead of one for each, and without leaving
    out those with "value" in their names: the encoder has such.
    """
    weights = list(policy.parameters())
    found = torch.autograd.grad(divergence, weights, create_graph=True, allow_unused=True)
    acting = [(w, slope) for w, slope in zip(weights, found, strict=True) if slope is not None]
    weights = [weight for weight, _ in acting]
    wanted = torch.autograd.grad(objective, weights, retain_graph=True)
    flat = parameters_to_vector
    slopes = flat([slope for _, slope in acting])
    return weights, flat(wanted), slopes, [weight.shape for weight in weights]


class Siblings(VecEnvWrapper):
    """Environments of which neighbours play the same pair; a reward is a gain over siblings.

    Less the mean of the gains, so that a value of 0, which the heads begin with, is right.

    Args:
        envs: Environments whose episodes on the same pair end together.
        count: Number of neighbours that play the same pair.
        scale: Factor on gains.
    """

    def __init__(self, envs: VecEnv, count: int, scale: float) -> None:
        super().__init__(envs)
        self._count, self._scale = count, scale

    def reset(self) -> VecEnvObs:
        """Begin episodes."""
        return self.venv.reset()

    def step_wait(self) -> VecEnvStepReturn:
        """Make a step; compare the episodes that end."""
        seen, rewards, dones, infos = self.venv.step_wait()
        for first in range(0, len(rewards), self._count):
            own = slice(first, first + self._count)
            if self._count > 1 and dones[own].all():
                gains = advantage(rewards[own].astype(np.float64))
                rewards[own] = self._scale * (gains - gains.mean())
        return seen, rewards, dones, infos


class Sb3Learner(Learner):
    """An algorithm of stable-baselines3; see the module docstring.

    A step is a rollout of about an episode of each environment, ``pairs_per_step`` times
    ``samples_per_pair`` of them, with the passes over it. A resumed run has the checkpoint's
    weights and optimizer, but new episodes.

    Args:
        task: The learning task.
        algorithm: Class of the algorithm.
        settings: Settings of the algorithm that differ from those for many pairs.
    """

    def __init__(self, task: Task, algorithm: type[BaseAlgorithm], **settings: float) -> None:
        super().__init__(task)
        config = task.config
        source = replace(task.source, judged=True)
        pairs = [source.pair(index) for index in range(config.num_pairs)]
        padding = Padding.of(pairs)

        def env(group: int) -> PolicyEnv:
            return PolicyEnv(pairs, [config.seed, group], padding, task.reward)

        groups = np.repeat(np.arange(config.pairs_per_step), config.samples_per_pair)
        envs = Siblings(
            DummyVecEnv([partial(env, group) for group in groups.tolist()]),
            config.samples_per_pair,
            # Action values have a Huber loss, which would cut the few large gains beyond 1, so
            # that on the average whatever is drawn would become less likely.
            1.0 / BEST_OF if issubclass(algorithm, OffPolicyAlgorithm) else 1.0,
        )
        self._rate = config.learning_rate
        self._per_step = padding.blocks * len(groups)
        kwargs = {
            "features_extractor_class": CandidateScores,
            "features_extractor_kwargs": {"pairs": pairs, "policy": task.policy},
            "net_arch": [],
        }
        policy_class = algorithm.policy_aliases[_POLICY]
        if "ortho_init" in inspect.signature(policy_class.__init__).parameters:
            kwargs["ortho_init"] = False  # it would overwrite the initial policy
        if "n_quantiles" in inspect.signature(policy_class.__init__).parameters:
            kwargs["n_quantiles"] = _NUM_QUANTILES
        made: Any = algorithm
        options = _options(algorithm, self, padding.blocks) | settings
        self.model: Any = made(_POLICY, envs, policy_kwargs=kwargs, **options)
        self._differentiates_twice = hasattr(self.model, "cg_max_steps")
        if self._differentiates_twice:
            self.model._compute_actor_grad = partial(_actor_slopes, self.model.policy)
        self.policy = _read_off(self.model.policy).policy
        self.model.set_logger(Logger(folder=None, output_formats=[]))

    def rate(self, left: float) -> float:
        """Learning rate of the current step; ``left``, which restarts at each step, is unused."""
        return self._rate

    def advance(self, step: int) -> Mapping[str, float]:
        """Play and learn."""
        episodes = _Episodes()
        self._rate = self.task.config.rate_at(step)
        # Fused attention has no second derivatives.
        with sdpa_kernel(SDPBackend.MATH) if self._differentiates_twice else nullcontext():
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
        self.model.policy.set_training_mode(True)  # nothing that other weights gave is kept
        self.model.policy.optimizer.load_state_dict(state["optimizer"])
        self.model.num_timesteps = state["num_timesteps"]


def _options(
    algorithm: type[BaseAlgorithm], learner: Sb3Learner, num_blocks: int
) -> dict[str, Any]:
    """Settings for an algorithm, for episodes of ``num_blocks`` steps with one reward each."""
    config = learner.task.config
    rollout = num_blocks * (config.pairs_per_step * config.samples_per_pair)
    wanted = {
        "learning_rate": learner.rate,
        "seed": config.seed,
        "device": "cpu",
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "n_steps": num_blocks,
        # An update encodes its pairs however few of their steps it has. With one seed, four passes
        # in halves learned no more from as many strategies, in 1.8 times the seconds.
        "batch_size": rollout,
        "n_epochs": 2,
        "gradient_steps": 2,
        "train_freq": num_blocks,
        "ent_coef": 3e-3,
        "max_grad_norm": 1.0,
        "use_rms_prop": False,  # its first updates are ten times as long as later ones
        "cg_max_steps": 5,
        "n_critic_updates": 1,
        "buffer_size": 2 * rollout,
        "learning_starts": 0,
        "target_update_interval": rollout,
        "exploration_initial_eps": 0.0,
        "exploration_final_eps": 0.0,
    }
    known = set(inspect.signature(algorithm).parameters)
    return {name: value for name, value in wanted.items() if name in known}


class _Episodes(BaseCallback):
    """Collects how episodes ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.ended += [info for info in self.locals["infos"] if "speedup" in info]
        return True

    def terms(self) -> dict[str, float]:
        """Numbers to log."""
        if not self.ended:
            return {}
        speedups = [info["speedup"] for info in self.ended if info["is_ok"]]
        return {
            "reward": float(np.mean([info["reward"] for info in self.ended])),
            "speedup": float(np.exp(np.mean(np.log(speedups)))) if speedups else 0.0,
            "out_of_memory": 1.0 - len(speedups) / len(self.ended),
        }


class _Probe(gym.Env[Any, Any]):
    """An environment with the kinds of spaces that an algorithm must support."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)


def sb3_learner(library: str, name: str) -> partial[Sb3Learner]:
    """The function that makes the learner of an algorithm, from a task and settings.

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
