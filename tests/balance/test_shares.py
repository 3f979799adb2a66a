"""Shares against all shares there are, and against closed forms."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterog.balance.shares import (
    BalanceError,
    RankSpeed,
    best_shares,
    check_shares,
    shares_from_speeds,
    step_s,
)

SPEEDS = st.builds(
    RankSpeed,
    unit_s=st.floats(1e-6, 1e3),
    fixed_units=st.one_of(st.just(0.0), st.floats(0, 50)),
)


@given(speeds=st.lists(SPEEDS, min_size=1, max_size=3), total=st.integers(0, 9), data=st.data())
def test_no_other_shares_are_quicker(
    speeds: list[RankSpeed], total: int, data: st.DataObject
) -> None:
    limit = st.one_of(st.none(), st.integers(0, 9))
    most = data.draw(st.lists(limit, min_size=len(speeds), max_size=len(speeds)))
    limits = [total if each is None else each for each in most]
    every = [
        shares
        for shares in product(range(total + 1), repeat=len(speeds))
        if sum(shares) == total and all(n <= m for n, m in zip(shares, limits, strict=True))
    ]
    if not every:
        with pytest.raises(BalanceError, match="the ranks can take"):
            best_shares(speeds, total, most)
        return
    found = best_shares(speeds, total, most)
    assert found in every
    least = min(step_s(speeds, shares) for shares in every)
    assert step_s(speeds, found) <= least * (1 + 1e-9)


def test_shares_follow_speeds() -> None:
    assert shares_from_speeds([0.8, 0.4, 0.3], 150) == (80, 40, 30)
    assert shares_from_speeds([1, 1, 1], 7) == (3, 2, 2)
    assert shares_from_speeds([1], 7) == (7,)


def test_a_rank_that_would_end_late_with_nothing_gets_nothing() -> None:
    quick, stuck = RankSpeed(unit_s=0.01), RankSpeed(unit_s=1, fixed_units=5)
    assert best_shares([quick, stuck], 100) == (100, 0)


def test_large_batches_are_shared_at_once() -> None:
    shares = best_shares([RankSpeed(unit_s=1e-6 * (rank + 1)) for rank in range(64)], 4_000_000)
    assert sum(shares) == 4_000_000
    assert shares[0] == pytest.approx(2 * shares[1], abs=2)


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ((3, 4), "2 shares for 3 ranks"),
        ((3, 4, 2), r"3 \+ 4 \+ 2 = 9"),
        ((12, -2, 0), "0 or more"),
    ],
)
def test_shares_that_do_not_fit_are_refused(shares: tuple[int, ...], text: str) -> None:
    with pytest.raises(BalanceError, match=text):
        check_shares(shares, 3, 10)


def test_speeds_that_make_no_sense_are_refused() -> None:
    with pytest.raises(BalanceError, match="rank 1 has a speed of 0"):
        shares_from_speeds([1, 0], 8)
    with pytest.raises(BalanceError, match="a unit takes nan s"):
        RankSpeed(unit_s=float("nan"))
    with pytest.raises(BalanceError, match="fixed part is -1"):
        RankSpeed(unit_s=1, fixed_units=-1)
