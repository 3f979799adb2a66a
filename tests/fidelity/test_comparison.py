"""Errors of families, pairs and intervals, by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from heterog.fidelity.comparison import (
    Compared,
    Pairs,
    family_errors,
    in_words,
    ordered_pairs,
    regret,
)
from heterog.pricing.intervals import Interval, interval_around


def runs(pairs: Sequence[tuple[float, float]], choice: str = "") -> list[Compared]:
    return [
        Compared(
            family="f",
            name=str(number),
            measured_s=measured,
            predicted_s=predicted,
            interval_s=interval_around(predicted, 0.1),
            measured_bytes=100.0,
            predicted_bytes=100.0 + number,
            interval_bytes=Interval(99.5 + number, 101.0 + number),
            choice=choice,
        )
        for number, (measured, predicted) in enumerate(pairs)
    ]


def test_errors_of_a_family_by_hand() -> None:
    found = family_errors("f", runs([(1.0, 1.1), (2.0, 1.9), (4.0, 2.0)]))
    assert found.num_runs == 3
    assert found.mape == pytest.approx((0.1 + 0.05 + 0.5) / 3)
    assert found.median == pytest.approx(0.1)
    assert found.bias == pytest.approx(-0.05)
    assert found.spearman == pytest.approx(1.0)
    assert found.memory_mape == pytest.approx(0.01)
    assert found.interval_coverage == pytest.approx(2 / 3)
    assert found.interval_width == pytest.approx(math.exp(0.12816) - math.exp(-0.12816), rel=1e-4)
    assert found.is_coverage_sound
    assert found.memory_coverage == pytest.approx(1 / 3), "100 is in the first interval only"
    assert found.memory_width == pytest.approx(1.5 / 101.0)
    assert found.is_memory_coverage_sound
    assert "memory 1.0%, 33% inside intervals of 1%" in in_words(found)
    assert found.pairs is None


def test_intervals_that_hold_too_little_are_told() -> None:
    assert not family_errors("f", runs([(1.0, 2.0)] * 10)).is_coverage_sound
    assert not family_errors("f", runs([(1.0, 1.0)] * 10)).is_memory_coverage_sound
    assert not family_errors("f", runs([(1.0, 1.0)] * 30)).is_coverage_sound, "nor too much"


def test_runs_without_intervals_or_memory_say_nothing_of_them() -> None:
    bare = [Compared(family="f", name="a", measured_s=1.0, predicted_s=1.0)]
    found = family_errors("f", bare)
    assert found.interval_coverage is None
    assert found.memory_mape is None
    assert found.memory_coverage is None
    assert found.is_memory_coverage_sound is None
    unpredicted = [replace(run, interval_bytes=None) for run in runs([(1.0, 1.0)])]
    assert family_errors("f", unpredicted).memory_coverage is None
    assert found.spearman is None


def test_pairs_are_of_one_choice_and_differ_by_more_than_a_twentieth() -> None:
    one = runs([(1.0, 1.0), (1.04, 0.5), (2.0, 0.9)], "one")
    other = runs([(9.0, 5.0), (8.0, 4.0)], "other")
    # 1.00 and 1.04 are equally good; 2.0 is behind both, and one of the two is told so.
    assert ordered_pairs([*one, *other]) == Pairs(number=3, ordered=2)


def test_an_interval_is_symmetric_in_ratios() -> None:
    low, high = interval_around(3.0, 0.2)
    assert low * high == pytest.approx(9.0)
    assert interval_around(3.0, 0.0) == Interval(3.0, 3.0)


def test_measurements_that_contradict_each_other_give_a_wide_interval() -> None:
    low, high = interval_around(3.0, 1e6)
    assert 0 < low < 1e-9
    assert 1e9 < high < float("inf")


def test_regret_of_the_best_liked_by_hand() -> None:
    three = runs([(1.0, 1.3), (1.2, 1.1), (1.5, 1.0)], "a")
    assert regret(three) == pytest.approx(0.5)
    assert regret(three, liked=2) == pytest.approx(0.2)
    assert regret(three, liked=3) == 0.0
    assert regret(runs([(1.0, 2.0)], "alone")) is None
    # Of two at a time: one of the pairs has 1.2, 1.5 and 1.25 times the best of it.
    assert regret(three, subset=2, draws=4000) == pytest.approx((0.2 + 0.5 + 0.25) / 3, abs=0.01)
    assert "the best-liked takes 50.0% longer than the best, of five 0.0%" in in_words(
        family_errors("f", three)
    )
    assert ordered_pairs(three) == Pairs(number=3, ordered=0)
    near = runs([(1.0, 1.3), (1.04, 1.1), (1.5, 1.0)], "a")  # the first two count as equally good
    assert ordered_pairs(near) == Pairs(number=2, ordered=0)
