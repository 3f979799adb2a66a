"""Runs of positions that take unequal devices the same time.

What a device does for the positions ``[u, v)`` of a sequence takes
``a + b (v - u) + c (v^2 - u^2)`` seconds: launches, work by position, and causal attention, whose
queries see more keys the later they are. Equal devices then get shorter and shorter runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_HALVINGS = 60  # of the interval in which the time lies: to the last bit of a float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Seconds that a device takes for a run of units ``[u, v)``.

    Attributes:
        fixed_s: Seconds of any run.
        unit_s: Seconds for each unit.
        rising_s: Seconds for each unit squared, of ``v^2 - u^2``.
    """

    fixed_s: float
    unit_s: float
    rising_s: float

    def seconds(self, begin: float, end: float) -> float:
        """Seconds of the units from ``begin`` to before ``end``."""
        return (
            self.fixed_s
            + self.unit_s * (end - begin)
            + self.rising_s * (end * end - begin * begin)
        )

    def end_within(self, begin: float, limit_s: float) -> float:
        """The end that a device reaches from ``begin`` in some seconds."""
        left = limit_s - self.fixed_s
        if left <= 0.0:
            return begin
        if self.rising_s <= 0.0:
            return begin + left / self.unit_s
        # rising (v^2 - u^2) + unit (v - u) = left, for v
        half = self.unit_s / (2.0 * self.rising_s)
        return math.sqrt((half + begin) ** 2 + left / self.rising_s) - half


def run_cost(units: int, first_half_s: float, second_half_s: float, whole_s: float) -> RunCost:
    """Fit a cost to the seconds for both halves of an even number of units and for all of them.

    >>> run_cost(4, 5.0, 13.0, 17.0)
    RunCost(fixed_s=1.0, unit_s=0.0, rising_s=1.0)
    """
    rising = max(2.0 * (second_half_s - first_half_s) / units**2, 0.0)
    fixed = min(max(first_half_s + second_half_s - whole_s, 0.0), first_half_s)
    unit = max((whole_s - fixed - rising * units**2) / units, 0.0)
    if unit == rising == 0.0:
        unit = max(whole_s, 1e-30) / units  # nothing takes time: any shares are equal
    return RunCost(fixed_s=fixed, unit_s=unit, rising_s=rising)


def balanced_runs(costs: Sequence[RunCost], units: int) -> tuple[int, ...]:
    """Units of each device, in the order of the sequence, such that all take the same time.

    Every device gets at least one unit.

    Args:
        costs: Cost of each device.
        units: Units of the sequence; at least as many as there are devices.

    >>> from heterog.strategy.balanced_runs import RunCost
    >>> linear = [RunCost(fixed_s=0.0, unit_s=each, rising_s=0.0) for each in (1.0, 1.0, 2.0)]
    >>> balanced_runs(linear, 10)
    (4, 4, 2)
    >>> balanced_runs([RunCost(fixed_s=0.0, unit_s=0.0, rising_s=1.0)] * 4, 8)
    (4, 2, 1, 1)
    """
    low, high = 0.0, max(cost.seconds(0.0, units) for cost in costs)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if _ends(costs, middle)[-1] < units:
            low = middle
        else:
            high = middle
    ends = [0]
    for place, end in enumerate(_ends(costs, high)):
        after = len(costs) - 1 - place
        ends.append(min(max(round(end), ends[-1] + 1), units - after))
    ends[-1] = units
    return tuple(end - begin for begin, end in pairwise(ends))


def _ends(costs: Sequence[RunCost], limit_s: float) -> list[float]:
    ends = [0.0]
    for cost in costs:
        ends.append(cost.end_within(ends[-1], limit_s))
    return ends[1:]
