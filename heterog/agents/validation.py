"""How good a policy is on pairs that it never learns from."""

import math
from typing import TYPE_CHECKING

import numpy as np

from heterog.agents.imitation import search_pair
from heterog.agents.policy import Policy, draw, score_pairs
from heterog.agents.sources import PairSource
from heterog.envs.pair import Pair

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
    """

    def __init__(self, source: PairSource, config: "TrainingConfig") -> None:
        self.pairs: list[Pair] = []
        self.reference_s: list[float] = []
        self.num_evaluations = 0
        self._seed = config.seed
        index = FIRST_PAIR
        while len(self.pairs) < config.num_validation and index < FIRST_PAIR + 500:
            pair = source.pair(index)
            found = search_pair(pair, config.search_evaluations, source.rng(index))
            self.num_evaluations += found.num_evaluations
            if found.overflow == 0.0:
                self.pairs.append(pair)
                self.reference_s.append(found.step_time_s)
            index += 1

    def run(self, policy: Policy, num_samples: int = 16) -> dict[str, float]:
        """Geometric mean ratios to the reference: greedy, best of 16; how many do not fit."""
        policy.eval()
        greedy, best, too_large = [], [], []
        evaluations = 0
        for number, pair in enumerate(self.pairs):
            rng = np.random.default_rng([self._seed, number])
            scores = score_pairs(policy, [pair])[0]
            first = pair.score(draw(scores, pair, 1, rng, greedy=True).rows[0])
            rows = draw(scores, pair, num_samples, rng).rows
            found = [first, *(pair.score(row) for row in rows)]
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
