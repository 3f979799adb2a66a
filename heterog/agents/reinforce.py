"""Policy gradients for the best of several draws.

A method uses the best of the strategies that it draws for a pair, so training raises the expected
best of K draws. Its gradient weights each draw by its gain over the best of others, averaged over
sets of K draws:

    A(a) = mean over sets S of K - 1 other draws of max(R(a) - max R(S), 0)

The estimator is self-critical (a draw is compared with others of the same pair) and unbiased (the
baseline max R(S) does not depend on a). HeteroG's REINFORCE raises the mean instead (section
4.1.3): then draws that are never used count as much as the best.

The entropy coefficient is adapted so that the entropy of whole strategies follows a schedule: with
a fixed coefficient it fell to nothing within a hundred steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterog.agents.policy import Samples, Scores, draw, log_probabilities
from heterog.envs.pair import Pair
from heterog.envs.reward import Reward, RewardFunction, reward_of
from heterog.lowering.program import FloatArray, IntArray

BEST_OF = 4
"""K, the number of draws of which the best counts; if it were the number of all draws, only the
best two would have an effect."""
VALUE_WEIGHT = 0.1
"""Weight of the value head's error in predicting the best reward of a pair."""
ScoreAhead = Callable[[Sequence[int], Sequence[Pair], Sequence[IntArray]], None]
"""Function called with (keys, pairs, rows of each pair) before scores of the rows are needed."""


def steered(
    coefficient: float, entropy: float, schedule: tuple[float, float], fraction: float
) -> float:
    """The next step's entropy coefficient, which grows while the entropy is too low.

    Args:
        coefficient: Coefficient of this step.
        entropy: Entropy of whole strategies in this step, in nats.
        schedule: Target entropy at the start and at the end of training; linear in between.
        fraction: Part of the training that is done.
    """
    first, last = schedule
    wanted = first + (last - first) * fraction
    # At most a tenth per step, because the entropy follows the coefficient with a delay.
    factor = float(np.exp(np.clip(0.05 * (wanted - entropy), -0.1, 0.1)))
    return float(np.clip(coefficient * factor, 1e-4, 1.0))


def gains_of_best(rewards: FloatArray, best_of: int = BEST_OF) -> FloatArray:
    """Mean gain of each draw over the best of ``best_of - 1`` others; see the module docstring.

    >>> gains_of_best(np.array([0.0, 1.0, 3.0]), 2).tolist()
    [0.0, 0.5, 2.5]
    """
    count = len(rewards)
    others = min(best_of, count) - 1
    order = np.argsort(rewards)
    ranked = rewards[order]
    # P(the best of the others has the rank j): C(j, others - 1) / C(n - 1, others).
    chance = np.zeros(count)
    for place in range(others - 1, count):
        ways = np.prod([(place - k) / (k + 1) for k in range(others - 1)])
        chance[place] = ways / np.prod([(count - 1 - k) / (k + 1) for k in range(others)])
    gains = np.zeros(count)
    for place in range(count):
        gains[order[place]] = ((ranked[place] - ranked[:place]) * chance[:place]).sum()
    return gains


def value_loss(values: Tensor, rewards: Tensor) -> Tensor:
    """Weighted error of the value head in predicting the best rewards of some pairs."""
    return VALUE_WEIGHT * torch.nn.functional.smooth_l1_loss(values, rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceStep:
    """Results of one step.

    Attributes:
        loss: Loss to be minimised.
        terms: Numbers to log: ``reward``, the mean over pairs of the best draw's reward;
            ``speedup``, the geometric mean of the best draw's speed-up over the baseline;
            ``entropy`` of whole strategies in nats; ``out_of_memory``, the part of draws that do
            not fit.
        num_evaluations: Number of strategies scored.
        rows: For each pair, every row that was scored.
        improved: For each pair, the best drawn row that fits and its seconds.
    """

    loss: Tensor
    terms: dict[str, float]
    num_evaluations: int
    rows: tuple[IntArray, ...]
    improved: tuple[tuple[IntArray, float] | None, ...]


class Reinforce:
    """The estimator; see the module docstring.

    Args:
        samples_per_pair: Number of strategies drawn for each pair.
        entropy_nats: Entropy of whole strategies at the start and at the end of training.
        reward: Reward of a scored row.
        score_ahead: Function that may score a step's rows on workers; see ``learner.score_on``.
    """

    def __init__(
        self,
        samples_per_pair: int = 16,
        entropy_nats: tuple[float, float] = (12.0, 6.0),
        reward: RewardFunction = reward_of,
        score_ahead: ScoreAhead = lambda keys, pairs, rows: None,
    ) -> None:
        self._reward, self._score_ahead = reward, score_ahead
        self._num_samples = samples_per_pair
        self._entropy_nats = entropy_nats
        self.coefficient = 0.01

    def step(
        self,
        scores: Scores,
        pairs: Sequence[Pair],
        keys: Sequence[int],
        fraction: float,
        rng: np.random.Generator,
    ) -> ReinforceStep:
        """Draw, score, and compute the loss.

        Args:
            scores: Scores of the pairs, with gradients.
            pairs: The pairs.
            keys: Number of each pair in its source, for ``score_ahead``.
            fraction: Part of the training that is done.
            rng: Generator for the draws.
        """
        drawn = [
            draw(scores.of(index, pair), pair, self._num_samples, rng, keep_masks=True)
            for index, pair in enumerate(pairs)
        ]
        rows = tuple(each.rows for each in drawn)
        self._score_ahead(keys, pairs, rows)
        found = [
            [self._reward(pair, pair.score(row)) for row in own]
            for pair, own in zip(pairs, rows, strict=True)
        ]
        rewards = np.array([[each.reward for each in own] for own in found])
        log_p, entropy = _log_probabilities(scores, drawn)
        gains = [advantage(own) for own in rewards]
        best = torch.tensor(rewards.max(axis=1), dtype=torch.float32)
        mean_entropy = entropy.mean()
        loss = -(torch.tensor(np.concatenate(gains), dtype=torch.float32) * log_p).mean()
        loss = loss - self.coefficient * mean_entropy + value_loss(scores.value, best)
        reached = float(mean_entropy.detach())
        self.coefficient = steered(self.coefficient, reached, self._entropy_nats, fraction)
        speedups = [max(each.speedup for each in own) for own in found]
        return ReinforceStep(
            loss=loss,
            terms={
                "reward": float(best.mean()),
                "speedup": float(np.exp(np.mean(np.log(speedups)))),
                "entropy": reached,
                "out_of_memory": float(np.mean([r.overflow > 0.0 for own in found for r in own])),
            },
            num_evaluations=rewards.size,
            rows=rows,
            improved=tuple(map(_best_fitting, rows, found)),
        )


def advantage(rewards: FloatArray) -> FloatArray:
    """Gains divided by the standard deviation of a pair's rewards, so that pairs count alike."""
    # At least 0.02, so that tiny differences of nearly equal draws are not inflated.
    return np.asarray(gains_of_best(rewards) * BEST_OF / max(float(rewards.std()), 0.02))


def _best_fitting(rows: IntArray, found: Sequence[Reward]) -> tuple[IntArray, float] | None:
    fitting = [(each.step_time_s, n) for n, each in enumerate(found) if each.overflow == 0.0]
    if not fitting:
        return None
    seconds, number = min(fitting)
    return rows[number], seconds


def _log_probabilities(scores: Scores, drawn: Sequence[Samples]) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every row that was drawn, in one pass.  # [R], [R]"""
    num_blocks, num_candidates = scores.unary.shape[1:]
    which = np.repeat(np.arange(len(drawn)), [len(each.rows) for each in drawn])
    actions = np.zeros((len(which), num_blocks), np.int64)
    masks: npt.NDArray[np.bool_] = np.zeros((len(which), num_blocks, num_candidates), np.bool_)
    masks[:, :, 0] = True  # of blocks that a smaller pair does not have
    at = 0
    for each in drawn:
        count, blocks = each.rows.shape
        actions[at : at + count, :blocks] = each.rows
        masks[at : at + count, :blocks] = False
        masks[at : at + count, :blocks, : each.masks.shape[2]] = each.masks
        at += count
    return log_probabilities(
        scores, torch.from_numpy(which), torch.from_numpy(actions), torch.from_numpy(masks)
    )
