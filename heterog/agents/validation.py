"""How good a policy is on pairs that it never learns from."""

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from heterog.agents.elites import Elites
from heterog.agents.imitation import search_pair
from heterog.agents.policy import Policy, draw, score_pairs
from heterog.agents.scoring import Scorer
from heterog.agents.sources import PairSource
from heterog.envs.pair import Pair
from heterog.workers import HERE, Workers

if TYPE_CHECKING:
    from heterog.agents.training import TrainingConfig

FIRST_PAIR = 1_000_000
"""Validation pairs are those of the source from this number on."""
NO_FIT = 3.0
"""Ratio that counts where no sample fits."""


class Validation:
    """Some pairs with what a search found for them.

    Args:
        source: of the pairs.
        config: how many, and how long to search.
        workers: where the searches run.
    """

    def __init__(
        self, source: PairSource, config: "TrainingConfig", workers: Workers = HERE
    ) -> None:
        self.indices: list[int] = []
        self.pairs: list[Pair] = []
        self.reference_s: list[float] = []
        self.num_evaluations = 0
        self._seed = config.seed
        self._score = Scorer(workers, source)
        if config.num_validation == 0:
            return
        numbers = range(FIRST_PAIR, FIRST_PAIR + 500)
        jobs = ((index, config.search_evaluations) for index in numbers)
        for index, found in zip(numbers, workers.map(_search, source, jobs), strict=True):
            self.num_evaluations += found.num_evaluations
            if found.overflow == 0.0:
                self.indices.append(index)
                self.pairs.append(source.pair(index))
                self.reference_s.append(found.step_time_s)
            if len(self.pairs) == config.num_validation:
                break

    def run(self, policy: Policy, num_samples: int = 16) -> dict[str, float]:
        """Geometric mean ratios to the reference: greedy, best of 16; how many do not fit."""
        policy.eval()
        drawn = []
        for number, pair in enumerate(self.pairs):
            rng = np.random.default_rng([self._seed, number])
            scores = score_pairs(policy, [pair])[0]
            first = draw(scores, pair, 1, rng, greedy=True).rows
            drawn.append(np.concatenate([first, draw(scores, pair, num_samples, rng).rows]))
        self._score(self.indices, self.pairs, drawn)
        greedy, best, too_large = [], [], []
        evaluations = 0
        for number, pair in enumerate(self.pairs):
            found = [pair.score(row) for row in drawn[number]]
            pair.forget()
            evaluations += len(found)
            reference = self.reference_s[number]
            ratios = [
                each.step_time_s / reference if each.overflow == 0.0 else NO_FIT for each in found
            ]
            greedy.append(math.log(ratios[0]))
            best.append(math.log(min(ratios)))
            too_large.append(np.mean([each.overflow > 0.0 for each in found[1:]]))
        return {
            "greedy": math.exp(np.mean(greedy)),
            "best_of_16": math.exp(np.mean(best)),
            "out_of_memory": float(np.mean(too_large)),
            "evaluations": float(evaluations),
        }


def _search(source: PairSource, job: tuple[int, int]) -> Elites:
    torch.set_num_threads(1)  # workers are beside each other
    index, num_evaluations = job
    return search_pair(source.pair(index), num_evaluations, source.rng(index))
