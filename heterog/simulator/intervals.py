"""Intervals around predictions: where a measurement lies, four times out of five."""

import math
from statistics import NormalDist
from typing import NamedTuple

COVERAGE = 0.8
"""Part of all measurements that an interval is to hold."""
MEDIAN_OF_NORMAL = NormalDist().inv_cdf(0.75)
"""Median of the absolute value of a normal variable, in standard deviations."""
_DEVIATIONS = NormalDist().inv_cdf(0.5 + 0.5 * COVERAGE)


class Interval(NamedTuple):
    """Its ends, in the unit of what was predicted."""

    low: float
    high: float


def interval_around(predicted: float, spread: float) -> Interval:
    """The interval of a prediction whose logarithm is off by a normal error.

    Args:
        predicted: the middle, by ratios.
        spread: standard deviation of the logarithm of measured / predicted.

    >>> [round(end, 3) for end in interval_around(1.0, 0.1)]
    [0.88, 1.137]
    """
    factor = math.exp(_DEVIATIONS * spread)
    return Interval(predicted / factor, predicted * factor)
