"""Statistics of runs, as section 4 of Agarwal et al. recommends.

Deep RL at the Edge of the Statistical Precipice, 2021. Its library ``rliable`` (1.2.0) gives the
same interquartile means if the number of runs is a multiple of four (otherwise it leaves out whole
runs) and the same probabilities of improvement.

A run's score is the best known step time of its pair over its own: 1 is best, 0 does not fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
NUM_RESAMPLES = 2000  # of the bootstrap
NO_FIT = 3.0
"""Ratio of step times assigned to a run in which nothing fits."""
CLOSE = 1.15
"""Ratio to the best known step time up to which an answer is close."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


def interquartile_mean(scores: Array) -> Array:
    """Mean of the middle half of all runs; a run at the edge of this half counts in part.

    >>> float(interquartile_mean(np.array([[0.0, 1.0], [1.0, 9.0]])))
    1.0
    """
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    ends = np.arange(ordered.shape[-1] + 1) / ordered.shape[-1]
    weights = np.diff(np.clip(ends, 0.25, 0.75))
    return np.asarray(ordered @ weights / weights.sum())


def probability_of_improvement(ours: Array, theirs: Array) -> Array:
    """Probability that our run beats theirs on the same pair; ties count half.

    >>> float(probability_of_improvement(np.array([[1.0, 2.0]]), np.array([[1.0, 1.0]])))
    0.75
    """
    difference = ours[..., :, None] - theirs[..., None, :]
    return np.asarray((0.5 * (1.0 + np.sign(difference))).mean(axis=(-3, -2, -1)))


def estimate(statistic: Callable[..., Array], *scores: Array) -> Estimate:
    """A statistic and its interval by the stratified bootstrap.

    Seeds are resampled within each pair, for each method separately; pairs are not resampled.

    Args:
        statistic: Function of one array for each method; the leading axis may be resamples.
        scores: Scores of each method: a row for each pair, a column for each seed.
    """
    rng = np.random.default_rng(0)
    low, high = np.quantile(statistic(*(_redrawn(each, rng) for each in scores)), [0.025, 0.975])
    return Estimate(float(statistic(*scores)), float(low), float(high))


def _redrawn(scores: Array, rng: np.random.Generator) -> Array:
    drawn = rng.integers(scores.shape[1], size=(NUM_RESAMPLES, *scores.shape))
    return np.take_along_axis(scores[None], drawn, axis=2)


def scores_of(seconds: Sequence[Sequence[float | None]], best_s: Sequence[float]) -> Array:
    """Scores of step times: a row for each pair, a column for each seed."""
    return np.array(
        [
            [0.0 if each is None else best / each for each in row]
            for row, best in zip(seconds, best_s, strict=True)
        ]
    )


def ratios_of(scores: Array) -> Array:
    """An arm's step time over the best known one, by pair: geometric means over seeds.

    >>> ratios_of(np.array([[1.0, 0.25], [0.0, 0.0]])).round(6).tolist()
    [2.0, 3.0]
    """
    ratios = np.where(scores > 0.0, 1.0 / np.maximum(scores, 1e-300), NO_FIT)
    return np.asarray(np.exp(np.log(ratios).mean(axis=1)))


def over_pairs(ratios: Array) -> Estimate:
    """Geometric mean of the pairs' ratios, and its interval when pairs are resampled."""
    rng, logs = np.random.default_rng(0), np.log(ratios)
    drawn = logs[rng.integers(len(logs), size=(NUM_RESAMPLES, len(logs)))].mean(axis=1)
    return Estimate(
        *(float(np.exp(x)) for x in (logs.mean(), *np.quantile(drawn, [0.025, 0.975])))
    )
