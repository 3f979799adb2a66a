"""Intervals of peaks: closed forms of Student's t, and draws of runs beside them."""

import math

import numpy as np
import pytest
from peak_errors import peak_errors_of
from scipy.special import stdtr, stdtrit

from heterog.errors import HeterogError
from heterog.pricing.device_models.parameters import shipped_peak_errors
from heterog.pricing.intervals import COVERAGE, PeakErrors
from heterog.units import GIB


@pytest.mark.parametrize("num_runs", [2, 3, 4, 5, 12, 31, 1000])
def test_probabilities_are_those_of_student(num_runs: int) -> None:
    """For an even and an odd number of degrees of freedom, beside the incomplete beta function."""
    errors = PeakErrors(spread=0.1, num_runs=num_runs, measured_on="GH200")
    scale = 0.1 * math.sqrt(1.0 + 1.0 / num_runs)
    for part in (0.5, 0.9, 1.0, 1.2):
        found = errors.fit_probability([(part * GIB, GIB)])
        assert found == pytest.approx(stdtr(num_runs - 1, -math.log(part) / scale), rel=1e-9)
    _, high = errors.interval(1.0)
    assert math.log(high) == pytest.approx(stdtrit(num_runs - 1, 0.9) * scale, rel=1e-9)


def test_four_runs_by_hand() -> None:
    """With three degrees of freedom P(T <= t) = 1/2 + (x / (1 + x^2) + atan x) / pi."""
    errors = PeakErrors(spread=0.1, num_runs=4, measured_on="GH200")
    x = -math.log(0.9) / (0.1 * math.sqrt(1.25)) / math.sqrt(3.0)
    by_hand = 0.5 + (x / (1.0 + x * x) + math.atan(x)) / math.pi
    assert errors.fit_probability([(9.0, 10.0)]) == pytest.approx(by_hand, rel=1e-12)


def test_an_interval_leaves_a_tenth_on_either_side() -> None:
    errors = PeakErrors(spread=0.1, num_runs=4, measured_on="GH200")
    low, high = errors.interval(GIB)
    assert low * high == pytest.approx(GIB**2), "symmetric in ratios"
    assert errors.fit_probability([(GIB, high)]) == pytest.approx(0.9)
    assert errors.fit_probability([(GIB, low)]) == pytest.approx(0.1)
    assert errors.fit_probability([(GIB, GIB)]) == pytest.approx(0.5)


def test_a_plan_fits_as_often_as_its_fullest_device() -> None:
    """Errors are common: the device that is fullest in proportion decides, whatever its size."""
    errors = PeakErrors(spread=0.1, num_runs=4, measured_on="GH200")
    small = (0.95 * GIB, 1.0 * GIB)
    large = (60.0 * GIB, 80.0 * GIB)
    alone = errors.fit_probability([small])
    assert errors.fit_probability([large, small, (0, GIB)]) == alone
    assert errors.fit_probability([large]) > alone
    assert errors.fit_probability([(0, GIB)]) == 1.0, "what holds nothing always fits"
    assert errors.interval(0) == (0.0, 0.0)


def test_intervals_hold_four_runs_in_five_where_few_were_measured() -> None:
    """Drawn anew many times: four runs to which a centre is fitted, and one that is predicted.

    An interval by the normal quantile holds less than 70 % of them.
    """
    rng = np.random.default_rng(0)
    draws, true_spread = 4000, 0.07
    runs = rng.normal(0.0, true_spread, (draws, 5))
    errors = np.exp(runs - runs[:, :4].mean(1, keepdims=True))
    inside, spreads = 0, []
    for *few, last in errors.tolist():
        found = peak_errors_of([(each, 1.0) for each in few], "x")
        low, high = found.interval(1.0)
        inside += low <= last <= high
        spreads.append(found.spread)
    deviation = math.sqrt(COVERAGE * (1.0 - COVERAGE) / draws)
    assert inside / draws == pytest.approx(COVERAGE, abs=3.5 * deviation)
    normal, measured = np.exp(1.2816 * np.array(spreads)), errors[:, 4]
    assert ((measured >= 1.0 / normal) & (measured <= normal)).mean() < 0.7


def test_one_run_says_nothing_about_the_spread() -> None:
    with pytest.raises(HeterogError, match="at least two measured peaks, got 1; record more"):
        peak_errors_of([(1.0, 1.1)], "GH200")


def test_what_ships_says_where_it_is_from() -> None:
    errors = shipped_peak_errors()
    assert errors.measured_on == "GH200"
    assert errors.num_runs == 4
    low, high = errors.interval(1.0)
    assert 0.5 < low < 1.0 < high < 2.0
