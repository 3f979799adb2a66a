"""Intervals around predictions that hold four of five measurements."""

import math
from statistics import NormalDist
from typing import NamedTuple

COVERAGE = 0.8
"""Share of all measurements that an interval is to hold."""
MEDIAN_OF_NORMAL = NormalDist().inv_cdf(0.75)
"""Median of the absolute value of a normal variable, in standard deviations."""
_DEVIATIONS = NormalDist().inv_cdf(0.5 + 0.5 * COVERAGE)

_MOST_SPREAD = 20.0
"""Spread from which an interval says nothing, 11 orders of magnitude to each side."""


class Interval(NamedTuple):
    """Ends of an interval, in the unit of the prediction."""

    low: float
    high: float


def interval_around(predicted: float, spread: float) -> Interval:
    """The interval of a prediction whose logarithm is off by a normal error.

    Args:
        predicted: Predicted value, in the middle of the interval by ratios.
        spread: Standard deviation of the logarithm of measured / predicted; measurements that
            contradict each other may make it larger than any float can say, and 20 is as much.

    >>> [round(end, 3) for end in interval_around(1.0, 0.1)]
    [0.88, 1.137]
    """
    factor = math.exp(_DEVIATIONS * min(spread, _MOST_SPREAD))
    return Interval(predicted / factor, predicted * factor)
