"""Intervals around predictions that hold four of five measurements."""

import math
from collections.abc import Sequence
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


def spread_of_interval(predicted: float, high: float) -> float:
    """The spread of the interval of a prediction that ends at ``high``.

    >>> round(spread_of_interval(1.0, interval_around(1.0, 0.1).high), 3)
    0.1
    """
    return math.log(high / predicted) / _DEVIATIONS


def conformal_spread(log_errors: Sequence[float], spreads: Sequence[float]) -> float:
    """The least spread that, added in quadrature, lets intervals hold one more run.

    Split conformal prediction (Vovk et al. 2005): of n runs and one more, all equally likely to
    be the worst, four of five lie inside if ceil(0.8 (n + 1)) of the n do.

    Args:
        log_errors: log(measured / predicted) of runs that nothing was fitted to.
        spreads: Spread of each prediction without what is looked for.

    >>> round(conformal_spread([0.1, -0.2, 0.3, 0.1], [0.0] * 4) * 1.2816, 3)
    0.3
    """
    lacking = sorted(
        math.sqrt(max((error / _DEVIATIONS) ** 2 - spread**2, 0.0))
        for error, spread in zip(log_errors, spreads, strict=True)
    )
    return lacking[min(math.ceil(COVERAGE * (len(lacking) + 1)), len(lacking)) - 1]
