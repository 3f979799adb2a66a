"""Gains under noise: paired draws, and the choice between equally good strategies."""

import pytest

from heterog.search.rows import MethodRow, by_time, gain, reference_of, robust_rank


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


def test_gains_are_over_the_better_of_the_references() -> None:
    def over(*rows: MethodRow) -> str:
        found = reference_of(rows)
        return "" if found is None else found.method

    plain = row("cp_ps", 0.6), row("cp_ar", 0.7), row("auto", 0.1)
    assert over(row("ev_ar", None), row("auto", 0.1)) == ""
    assert over(*plain) == "cp_ps"  # nothing else was asked
    assert over(*plain, row("best_ddp", None)) == "cp_ps"  # or fits
    assert over(*plain, row("tuned_uniform", 0.8), row("best_ddp", 0.9)) == "tuned_uniform"
    assert over(*plain, row("tuned_uniform", 0.8), row("best_ddp", 0.5)) == "best_ddp"


def test_the_row_that_loses_least_under_noise_is_robust() -> None:
    """On its own day each is the best; the third is never far from it."""
    rows = [
        row("brittle", 1.0, (1.0, 2.0)),
        row("slow", 1.3, (2.0, 1.0)),
        row("robust", 1.1, (1.2, 1.2)),
        row("not compared", 0.9, ()),
    ]
    rank = robust_rank(rows, by_time)
    assert [each.method for each in sorted(rows, key=rank)] == [
        "robust", "brittle", "slow", "not compared",
    ]  # fmt: skip
    assert robust_rank(rows[3:], by_time)(rows[3])[1:] == by_time(rows[3])
