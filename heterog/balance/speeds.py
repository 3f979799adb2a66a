"""A rank's speed from measured steps, by medians, so that one slow step does not count.

The model is  t(n) = s (p + n)  as in ``shares``. The unit time ``s`` is that of the last few
windows of steps; a rank that is throttled is known after one. The fixed part ``p``, in units,
stays when a rank slows down, and needs steps of different sizes: it is fitted to pairs of them
(Theil 1950, Sen 1968) and counts as far as it is proved. Steps from before a sudden change of
speed are forgotten.

Steps of a window resemble each other more than those of the next: a machine does something else
for a while, a quota is given every so often. So the error of a rank's speed is not only that of a
median of steps, but also what whole windows of the same size differ by.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from heterog.balance.shares import RankSpeed

FloatArray = npt.NDArray[np.float64]

REMEMBERED = 6
"""Number of windows of which the slowest counts, so a rank is quickly found slow, but fast only
after these. One that waits much looks faster than it is with more to do (its card is cool, its
quota unspent), and believing it at once makes shares swing; with 4 they still do on simulated
quotas, 8 gain nothing (``tests/balance/test_rebalancing.py``)."""
KEPT_STEPS = 64
"""Number of steps that a fixed part is fitted to: several windows, and a few thousand pairs."""
RECENT_STEPS = 24
"""Number of steps in the median of the unit time: three windows, unless the speed has changed."""
DIFFERENT = 0.05
"""Least relative difference of step sizes; smaller ones show noise, not a fixed part."""
SUDDEN = 1.25
"""Factor between one window and the next from which a change of speed is not noise."""
EXPECTED_FIXED = 0.2
"""Expected size of a fixed part over a rank's share, which the fit's error is compared with."""
NOISE_WINDOWS = 24
"""Number of differences between neighbouring windows whose median tells their noise."""
LEAST_DIFFERENCES = 3
"""Fewer differences between windows say nothing yet. So for four windows after a sudden change
shares follow as if windows did not differ, and small errors of the first new shares are mended."""
_NORMAL_MAD = 1.4826  # standard deviation of normal numbers over their median absolute deviation
_NORMAL_MEDIAN = 1.2533  # standard error of their median over that of their mean, sqrt(pi / 2)


class SpeedEstimate:
    """The measurements of one rank, and its estimated speed."""

    def __init__(self) -> None:
        self._units: FloatArray = np.zeros(0)
        self._seconds: FloatArray = np.zeros(0)
        self._fixed_units = 0.0
        self._windows: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # size, seconds
        self._differences: deque[float] = deque(maxlen=NOISE_WINDOWS)
        self._unit_s = 0.0
        self._error_of_steps = 0.0

    def state_dict(self) -> dict[str, Any]:
        """All that was measured, as JSON values."""
        return {
            "units": self._units.tolist(),
            "seconds": self._seconds.tolist(),
            "fixed_units": self._fixed_units,
            "windows": [list(each) for each in self._windows],
            "differences": list(self._differences),
            "unit_s": self._unit_s,
            "relative_error": self._error_of_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another estimate has measured."""
        self._units = np.array(state["units"], np.float64)
        self._seconds = np.array(state["seconds"], np.float64)
        self._fixed_units = float(state["fixed_units"])
        self._windows.clear()
        self._windows.extend((float(size), float(told)) for size, told in state["windows"])
        self._differences.clear()
        self._differences.extend(map(float, state.get("differences", ())))
        self._unit_s = float(state["unit_s"])
        self._error_of_steps = float(state["relative_error"])

    @property
    def speed(self) -> RankSpeed | None:
        """The estimate to plan with; ``None`` until a window was measured."""
        if not self._windows:
            return None
        slowest = max(told / (size + self._fixed_units) for size, told in self._windows)
        unit_s = max(self._unit_s, slowest)
        return RankSpeed(unit_s=unit_s, fixed_units=self._fixed_units)

    @property
    def relative_error(self) -> float:
        """Standard error of the unit time over that time.

        The slowest of a few windows counts, so this is the noise of one window where that is
        known: what neighbouring windows of the same size differ by, over the square root of 2. A
        median of them ignores the one difference that a change of speed makes.
        """
        if len(self._differences) < LEAST_DIFFERENCES:
            return self._error_of_steps
        middle = _median(np.abs(self._differences))
        return max(self._error_of_steps, _NORMAL_MAD * middle / float(np.sqrt(2)))

    def add(self, units: Sequence[float], seconds: Sequence[float]) -> bool:
        """Take in a window of steps: their sizes and seconds, nan where unknown.

        Returns:
            Whether the speed has suddenly changed.
        """
        told = np.asarray(seconds, np.float64)
        sizes = np.maximum(np.asarray(units, np.float64), 1.0)  # a rank without data runs on one
        measured = np.isfinite(told) & (told > 0)
        told, sizes = told[measured], sizes[measured]
        if not len(told):
            return False
        has_changed = self._has_changed(sizes, told)
        if has_changed:
            self._units, self._seconds = np.zeros(0), np.zeros(0)
        self._units = np.append(self._units, sizes)[-KEPT_STEPS:]
        self._seconds = np.append(self._seconds, told)[-KEPT_STEPS:]
        self._fit_fixed_part()
        each = (self._seconds / (self._units + self._fixed_units))[-RECENT_STEPS:]
        self._unit_s = _median(each)
        self._add_window(_median(sizes), _median(told))
        error = _spread(each) / float(np.sqrt(len(each)))
        self._error_of_steps = _NORMAL_MEDIAN * error / self._unit_s
        return has_changed

    def forget_noise(self) -> None:
        """Forget what windows differed by: some rank's speed has changed, and shares follow."""
        self._differences.clear()

    def _add_window(self, size: float, told: float) -> None:
        """Add a window, and what it differs by from the one before if that had the same size."""
        if self._windows:
            size_before, told_before = self._windows[-1]
            if abs(size_before - size) < DIFFERENT * size:
                self._differences.append(float(np.log(told / size * size_before / told_before)))
        self._windows.append((size, told))

    def _has_changed(self, sizes: FloatArray, told: FloatArray) -> bool:
        """Whether steps of this size take another time than before; ignores other sizes."""
        size = _median(sizes)
        alike = np.abs(self._units - size) < DIFFERENT * size
        if not alike.any():
            return False
        before = _median(self._seconds[alike][-RECENT_STEPS:])
        return not 1 / SUDDEN < _median(told) / before < SUDDEN

    def _fit_fixed_part(self) -> None:
        """Fit the fixed part from the median slope, reduced by its uncertainty.

        The standard error of a fitted line at 0 is  e = sigma sqrt(1 / k + mean(n)^2 / sum (n -
        mean(n))^2);  against an expected size ``d`` the fixed part counts by  d^2 / (d^2 + e^2).
        Without steps of different sizes it stays.
        """
        units, seconds = self._units, self._seconds
        first, second = np.triu_indices(len(units), 1)
        change = units[first] - units[second]
        apart = np.abs(change) >= DIFFERENT * np.maximum(units[first], units[second])
        if not apart.any():
            return
        slope = _median((seconds[first] - seconds[second])[apart] / change[apart])
        if slope <= 0:
            return
        rest = seconds - slope * units
        mean = float(np.mean(units))
        found = min(max(_median(rest) / slope, 0.0), mean)
        lever = 1 / len(units) + mean**2 / float(np.sum((units - mean) ** 2))
        error = _NORMAL_MEDIAN * _spread(rest) / slope * float(np.sqrt(lever))
        expected = EXPECTED_FIXED * mean
        self._fixed_units = found * expected**2 / (expected**2 + error**2)


def _spread(values: FloatArray) -> float:
    """Standard deviation as if normal, by the median absolute deviation."""
    return _NORMAL_MAD * _median(np.abs(values - _median(values)))


def _median(values: FloatArray) -> float:
    """As that of numpy, which takes ten times as long for a few numbers."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
