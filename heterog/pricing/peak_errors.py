"""Errors of predicted memory peaks, from the few peaks that were measured.

Of a run, e = log(measured / predicted) of the largest peak of a device. Over n runs, to which one
number was fitted (what their devices reserve beside tensors),

    spread^2 = sum(e^2) / (n - 1)

The e of one more run, divided by spread x sqrt(1 + 1 / n), follows Student's t distribution with
n - 1 degrees of freedom: the prediction interval for one further value of a normal variable (Hahn
and Meeker, Statistical Intervals, 1991, chapter 4). For few runs it is wider than a normal one of
the same spread, because the spread itself is not well known: by 1.43 for n = 4 at 80 %.

Errors of the memory model are taken to be common to all devices of a plan, so that a plan fits as
often as the device that is fullest in proportion.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from heterog.errors import HeterogError
from heterog.pricing.intervals import COVERAGE, Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakErrors:
    """Errors of predicted memory peaks.

    Attributes:
        spread: Spread of log(measured / predicted); see the module.
        num_runs: Number of runs that it was found from, at least two.
        measured_on: GPU type of these runs.
    """

    spread: float
    num_runs: int
    measured_on: str

    def __post_init__(self) -> None:
        assert self.spread > 0.0
        assert self.num_runs > 1, "of one run the spread is not known"

    @property
    def _scale(self) -> float:
        """Divisor of the error of one more run, which makes it follow Student's distribution."""
        return self.spread * math.sqrt(1.0 + 1.0 / self.num_runs)

    def interval(self, peak_bytes: float) -> Interval:
        """Interval in which four of five measured peaks are expected, in bytes.

        Args:
            peak_bytes: Predicted peak, without what the device reserves.

        >>> errors = PeakErrors(spread=0.05, num_runs=4, measured_on="GH200")
        >>> [round(end, 1) for end in errors.interval(100.0)]
        [91.3, 109.6]
        """
        factor = math.exp(_quantile(0.5 + 0.5 * COVERAGE, self.num_runs - 1) * self._scale)
        return Interval(peak_bytes / factor, peak_bytes * factor)

    def fit_probability(self, peaks: Iterable[tuple[float, float]]) -> float:
        """Chance that a plan with these peaks fits, from 0 to 1.

        Args:
            peaks: Pairs (predicted, usable) bytes of each device, usable more than 0.

        >>> errors = PeakErrors(spread=0.05, num_runs=4, measured_on="GH200")
        >>> round(errors.fit_probability([(90.0, 100.0), (1.0, 100.0)]), 2)
        0.92
        """
        fullest = max((predicted / usable for predicted, usable in peaks), default=0.0)
        if fullest == 0.0:
            return 1.0
        return _probability(-math.log(fullest) / self._scale, self.num_runs - 1)


def peak_errors_of(peaks: Sequence[tuple[float, float]], measured_on: str) -> PeakErrors:
    """Errors from a few runs, to which one number had been fitted; the module has the formula.

    Args:
        peaks: (measured, predicted) bytes of each run, above 0, without what devices reserve.
        measured_on: GPU type of the runs.

    Raises:
        HeterogError: there are fewer than two runs.

    >>> round(peak_errors_of([(1.1, 1.0), (1.0, 1.1)], "GH200").spread, 4)
    0.1348
    """
    if len(peaks) < 2:
        raise HeterogError(
            f"a spread needs at least two measured peaks, got {len(peaks)}; record more runs."
        )
    squares = math.fsum(math.log(measured / predicted) ** 2 for measured, predicted in peaks)
    spread = math.sqrt(squares / (len(peaks) - 1))
    return PeakErrors(spread=spread, num_runs=len(peaks), measured_on=measured_on)


def _probability(t: float, freedom: int) -> float:
    """P(T <= t) of Student's distribution with whole degrees of freedom.

    A finite sum (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4), so that nothing has to be
    imported: ranks check intervals whenever they load a plan.

    >>> round(_probability(1.6377, 3), 4), round(_probability(-1.0, 1), 4)
    (0.9, 0.25)
    """
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    is_odd = freedom % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for number in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= square * (number - 1) / number
    inside = math.sin(angle) * total
    return 0.5 + (angle + inside) / math.pi if is_odd else 0.5 + 0.5 * inside


@lru_cache(maxsize=16)
def _quantile(probability: float, freedom: int) -> float:
    """The t at which ``_probability`` reaches a value of 0.5 or more."""
    low, high = 0.0, 1.0
    while _probability(high, freedom) < probability:
        high *= 2.0
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if _probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)
