"""PAC-ML's users: how much of its time alone a job may take, and when jobs arrive."""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.stats import skewnorm

from heterog.errors import HeterogError, UnknownNameError
from heterog.search.arrivals.queueing import JobCluster, JobRequest

DeadlineName = Literal["A", "B", "C", "D"]
DEADLINES: tuple[DeadlineName, ...] = get_args(DeadlineName)
"""Even, tight, medium and loose."""
_SKEWNESS = {"B": 5.0, "C": 0.0, "D": -5.0}
_LEAST_FACTOR = 0.1
_DECIMALS = 2
_NUM_SAMPLES, _NUM_BINS = 50_000, 1_000
"""Size of the authors' ``CustomSkewNorm``: a histogram of samples, whose upper edges are drawn."""
SPACING_S = 1_000.0
EPISODE_S = 1e6
"""Seconds between arrivals, and seconds for which they go on: 1001 jobs."""

Factors = npt.NDArray[np.float64]


def draw_factors(name: str, number: int, rng: np.random.Generator) -> Factors:
    """Deadlines as factors of jobs' times alone.

    ``A`` is even on 0.1 to 1. The others are normal distributions skewed by 5, 0 and -5, shifted
    to begin at 0 and divided to end at 1. The authors draw values below 0.1 again between two
    equal bounds, so they become 0.1.

    Raises:
        UnknownNameError: no such distribution.
    """
    if name not in DEADLINES:
        raise UnknownNameError("distribution of deadlines", name, DEADLINES)
    if name == "A":
        return np.round(rng.integers(10, 101, number) / 100.0, _DECIMALS)
    values = np.asarray(
        skewnorm.rvs(_SKEWNESS[name], loc=1.0, size=_NUM_SAMPLES, random_state=rng)
    )
    values = (values - values.min()) / np.ptp(values)
    counts, edges = np.histogram(np.maximum(values, _LEAST_FACTOR), bins=_NUM_BINS)
    return rng.choice(np.round(edges[1:], _DECIMALS), number, p=counts / counts.sum())


def draw_requests(
    cluster: JobCluster,
    deadlines: str,
    seed: int,
    *,
    spacing_s: float = SPACING_S,
    episode_s: float = EPISODE_S,
) -> list[JobRequest]:
    """An episode: a cluster's kinds in equal numbers and random order, one job each spacing.

    Args:
        cluster: Cluster that knows the kinds and their times alone.
        deadlines: Name of a distribution: ``A`` to ``D``.
        seed: Seed of the order and the deadlines.
        spacing_s: Seconds between arrivals.
        episode_s: Latest time at which a job arrives.
    """
    if not 0.0 < spacing_s <= 1e12 or not 0.0 <= episode_s <= 1e6 * spacing_s:
        raise HeterogError(
            f"arrivals every {spacing_s:g} s for {episode_s:g} s; give a spacing above 0 and at "
            "most a million arrivals."
        )
    rng = np.random.default_rng(seed)
    number = int(episode_s // spacing_s) + 1
    factors = draw_factors(deadlines, number, rng)
    kinds = cluster.kinds * -(-number // len(cluster.kinds))
    order = rng.permutation(len(kinds))[:number]
    return [
        JobRequest(
            name=f"{kinds[place]}-{index}",
            kind=kinds[place],
            arrives_s=index * spacing_s,
            acceptable_s=float(factors[index]) * cluster.alone_s(kinds[place]),
        )
        for index, place in enumerate(order)
    ]
