"""Batches by tokens: every sample once, within the budget, and cut by cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError
from heterog.balance.tokens import TokenBatches
from tests.balance.loops import Loop
from tests.balance.test_sampler import dealt
from tests.balance.test_weights import assert_like_one_process
from tests.runtime.ranks import Ranks

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=80)
SHARES = st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any)


def batches_of(lengths: list[int], budget: int, padded: bool = False) -> TokenBatches:
    return TokenBatches(lengths, budget, seed=0, shuffle=True, drop_last=False, padded=padded)


@given(lengths=LENGTHS, shares=SHARES, padded=st.booleans())
def test_every_sample_is_dealt_once(lengths: list[int], shares: list[int], padded: bool) -> None:
    batches = batches_of(lengths, sum(shares), padded)
    ranks = [
        ShareSampler(batches, rank=rank, num_ranks=len(shares), shares=shares)
        for rank in range(len(shares))
    ]
    steps = dealt(ranks)
    every = [index for step in steps for part in step for index in part]
    assert sorted(every) == list(range(len(lengths)))
    for step in steps:
        together = [index for part in step for index in part]
        assert len(together) == 1 or sum(lengths[i] for i in together) <= sum(shares)
        assert all(share or not part for share, part in zip(shares, step, strict=True))


@given(lengths=LENGTHS, shares=SHARES)
def test_costs_are_in_proportion_up_to_one_sample(lengths: list[int], shares: list[int]) -> None:
    """No rank ends later than the ideal end by more than its own longest sample."""
    batches = batches_of(lengths, 10**6)
    costs = np.array(lengths)
    parts = batches.cut(batches.batch(0, 0), shares)
    ideal = costs.sum() / sum(shares)
    for part, share in zip(parts, shares, strict=True):
        if share and len(part):
            assert costs[part].sum() / share <= ideal + costs.max() / share + 1e-9


@given(lengths=LENGTHS, shares=SHARES)
def test_padded_ranges_are_no_worse_than_ranges_by_count(
    lengths: list[int], shares: list[int]
) -> None:
    batches = batches_of(lengths, 10**6, padded=True)
    indices = batches.batch(0, 0)

    def end(parts: list[np.ndarray]) -> float:
        pairs = zip(parts, shares, strict=True)
        return max(batches.units(part) / share for part, share in pairs if len(part))

    ordered = indices[np.argsort(-np.array(lengths)[indices], kind="stable")]
    counts = np.floor(np.cumsum(shares) / sum(shares) * len(ordered)).astype(int)
    by_count = np.split(ordered, counts[:-1])
    if all(share or not len(part) for share, part in zip(shares, by_count, strict=True)):
        assert end(batches.cut(indices, shares)) <= end(by_count) * (1 + 1e-6)


def test_what_costs_time_is_balanced() -> None:
    lengths = [100] + [10] * 20
    batches = TokenBatches(
        lengths, 10**6, seed=0, shuffle=False, drop_last=False, cost=lambda n: n * n
    )
    first, second = batches.cut(batches.batch(0, 0), (1, 1))
    assert first.tolist() == [0]
    assert len(second) == 20


@pytest.mark.distributed
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [False, True], ids=["samples", "tokens"])
def test_it_trains_like_one_process(ranks: Ranks, padded: bool, tokens: bool) -> None:
    loop = Loop(wrapper="ddp", shares=(12, 6, 3), tokens=tokens, padded=padded, interval=3)
    assert_like_one_process(ranks, loop)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(BalanceError, match="0 samples in batches of 4 tokens"):
        batches_of([], 4)
    with pytest.raises(BalanceError, match="sample 1 of 0 tokens costs 0"):
        batches_of([3, 0], 4)
