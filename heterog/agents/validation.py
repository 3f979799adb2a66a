"""The quality of a policy on pairs that it never learns from, run as in use."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from heterog.agents.imitation import search_pair
from heterog.agents.policy import Policy, draw
from heterog.agents.sources import PairSource
from heterog.agents.ways import draw_in, make_ways
from heterog.envs.pair import Pair
from heterog.envs.reward import RewardFunction, reward_of
from heterog.workers import HERE, Workers

if TYPE_CHECKING:
    from heterog.agents.config import TrainingConfig

FIRST_PAIR = 1_000_000
"""Number in the source of the first pair by which the best policy of a run is chosen."""
FIRST_REPORTED = 2_000_000
"""Number of the first pair by which that policy is reported."""
NO_FIT = 3.0
"""Ratio that counts if no sample fits."""


class Validation:
    """Some pairs with search results for them, plain rows or pipelines.

    Args:
        source: Source of the pairs.
        config: Number of pairs, and length of the searches.
        workers: Workers that run the searches.
        first: Number of the first pair.
        reward: Reward that the policy learns to raise; reported unless it is ``reward_of``, which
            says the same as the ratios do.
    """

    def __init__(
        self,
        source: PairSource,
        config: "TrainingConfig",
        workers: Workers = HERE,
        first: int = FIRST_PAIR,
        *,
        reward: RewardFunction = reward_of,
    ) -> None:
        # The policy has to find out which way is best.
        source = replace(source, pipelined=0.0)
        self.pairs: list[Pair] = []
        self.reference_s: list[float] = []
        self.num_evaluations = 0
        self._seed, self._reward = config.seed, reward
        if config.num_validation == 0:
            return
        # Pairs without any strategy that fits tell nothing about a policy; others replace them.
        numbers = range(first, first + 500)
        jobs = ((index, config.search_evaluations) for index in numbers)
        for index, found in zip(numbers, workers.map(_search, source, jobs), strict=True):
            reference_s, num_evaluations = found
            self.num_evaluations += num_evaluations
            if reference_s < math.inf:
                self.pairs.append(source.pair(index))
                self.reference_s.append(reference_s)
            if len(self.pairs) == config.num_validation:
                break

    def run(self, policy: Policy, num_samples: int = 16) -> dict[str, float]:
        """Geometric mean ratios to the reference: greedy, best of 16; part that does not fit.

        With a reward of its own also ``reward``: the mean over the pairs of the mean over all
        draws.
        """
        policy.eval()
        greedy, best, too_large, rewards = [], [], [], []
        evaluations = 0
        for number, (pair, reference_s) in enumerate(
            zip(self.pairs, self.reference_s, strict=True)
        ):
            rng = np.random.default_rng([self._seed, number])
            ways = make_ways(policy, [pair], num_samples)
            draw_in(ways, num_samples, rng)
            found = [score for way in ways for score in way.found]
            likeliest = draw(ways[0].scores, pair, 1, rng, greedy=True).rows[0]
            overflow, seconds = min(way.promise for way in ways)
            first = pair.score(likeliest)
            greedy.append(_log_ratio(first.overflow, first.step_time_s, reference_s))
            best.append(_log_ratio(overflow, seconds, reference_s))
            too_large.append(np.mean([score.overflow > 0.0 for score in found]))
            evaluations += len(found)
            if self._reward is not reward_of:
                rewards.append(np.mean([self._reward(pair, each).reward for each in found]))
            pair.forget()
        own = {"reward": float(np.mean(rewards))} if rewards else {}
        return own | {
            "greedy": math.exp(np.mean(greedy)),
            "best_of_16": math.exp(np.mean(best)),
            "out_of_memory": float(np.mean(too_large)),
            "evaluations": float(evaluations),
        }


def _log_ratio(overflow: float, seconds: float, reference_s: float) -> float:
    return math.log(seconds / reference_s if overflow == 0.0 else NO_FIT)


def _search(source: PairSource, job: tuple[int, int]) -> tuple[float, int]:
    """(seconds of the best that fits, with micro-batches or without; rows simulated)."""
    torch.set_num_threads(1)  # several workers share the machine
    index, num_evaluations = job
    pair, rng = source.pair(index), source.rng(index)
    found = [
        search_pair(each, num_evaluations, rng)
        for each in (pair, pair.pipelined())
        if each is not None
    ]
    seconds = [each.step_time_s for each in found if each.overflow == 0.0]
    return min(seconds, default=math.inf), sum(each.num_evaluations for each in found)
