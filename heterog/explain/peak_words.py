"""Words about how well a peak of memory is known, for answers, explanations and reports."""

from collections.abc import Iterable

from heterog.pricing.peak_errors import PeakErrors
from heterog.units import format_bytes, format_bytes_range


def size_with_interval(errors: PeakErrors | None, peak_bytes: int) -> str:
    """A peak, and in brackets the range of four of five measured peaks.

    >>> errors = PeakErrors(spread=0.05, num_runs=4, measured_on="GH200")
    >>> size_with_interval(errors, 10 * 1024**3)
    '10.0 GiB (9.1 to 11.0)'
    """
    if errors is None:
        return format_bytes(peak_bytes)
    low, high = errors.interval(peak_bytes)
    return f"{format_bytes(peak_bytes)} ({format_bytes_range(low, high, around=peak_bytes)})"


def near_limit(errors: PeakErrors | None, peaks: Iterable[tuple[int, int]]) -> str:
    """Distance of a plan from the limit if that is within the model's error; else empty.

    Args:
        errors: Errors of the memory model; ``None`` if they are not known.
        peaks: (predicted, usable) bytes of each device.

    >>> errors = PeakErrors(spread=0.05, num_runs=4, measured_on="GH200")
    >>> near_limit(errors, [(97, 100), (1, 100)])
    "3 % below the limit is within the model's error (chance to fit 69 %)"
    >>> near_limit(errors, [(105, 100)])
    "5 % above the limit is within the model's error (chance to fit 22 %)"
    >>> near_limit(errors, [(50, 100)])
    ''
    """
    if errors is None:
        return ""
    peak, usable = max(peaks, key=lambda pair: pair[0] / pair[1])
    interval = errors.interval(peak)
    if not interval.low <= usable <= interval.high:
        return ""
    side = "above" if peak > usable else "below"
    away = 100.0 * abs(peak / usable - 1.0)
    chance = errors.fit_probability([(peak, usable)])
    return (
        f"{away:.{0 if away >= 1.0 else 1}f} % {side} the limit is within the model's error "
        f"({chance_to_fit(chance)})"
    )


def chance_to_fit(probability: float) -> str:
    """Chance that a plan fits, with no more digits than four runs allow.

    >>> chance_to_fit(0.612), chance_to_fit(0.9996), chance_to_fit(0.002)
    ('chance to fit 61 %', 'chance to fit over 99 %', 'chance to fit under 1 %')
    """
    if probability > 0.99:
        return "chance to fit over 99 %"
    if probability < 0.01:
        return "chance to fit under 1 %"
    return f"chance to fit {100.0 * probability:.0f} %"


def provenance(errors: PeakErrors) -> str:
    """One sentence about what an interval says and where it comes from.

    >>> provenance(PeakErrors(spread=0.05, num_runs=4, measured_on="GH200"))
    'Four of five measured peaks are expected in their interval, by the errors of 4 runs on GH200.'
    """
    return (
        "Four of five measured peaks are expected in their interval, by the errors of "
        f"{errors.num_runs} runs on {errors.measured_on}."
    )
