"""Gains under noise: paired draws, and the choice between equally good strategies."""

from dataclasses import replace

import pytest

from heterog.planners.planner import MethodRow
from heterog.planners.stability import best_data_parallel, gain


def row(method: str, step_time_s: float | None, noisy: tuple[float, ...] = ()) -> MethodRow:
    return MethodRow(
        method=method,
        stage="baseline",
        outcome="ok" if step_time_s is not None else "out_of_memory",
        step_time_s=step_time_s,
        order="fifo",
        peak_memory_bytes=(),
        num_evaluations=1,
        search_seconds=0.0,
        noisy_step_times_s=noisy,
    )


def test_a_gain_is_the_ratio_draw_by_draw() -> None:
    found = gain(row("auto", 2.0, (2.0, 2.5)), row("ddp", 3.0, (2.0, 4.0)))
    assert (found.speedup, found.low, found.high) == (1.5, 1.0, 1.6)
    assert str(found) == "1.50x, 1.00x to 1.60x under noise"


def test_a_gain_without_draws_has_no_spread() -> None:
    found = gain(row("auto", 2.0), row("ddp", 3.0))
    assert found.low == found.speedup == found.high


def test_draws_must_be_paired() -> None:
    with pytest.raises(ValueError, match="zip"):
        gain(row("auto", 2.0, (2.0,)), row("ddp", 3.0, (2.0, 4.0)))


def test_only_data_parallel_rows_that_fit_are_the_measure() -> None:
    rows = [row("ev_ar", None), row("tuned_uniform", 0.3)]
    assert best_data_parallel(rows) is None
    rows += [row("cp_ps", 0.6), replace(row("ddp", 0.7), method="cp_ar")]
    best = best_data_parallel(rows)
    assert best is not None
    assert best.method == "cp_ps"
