"""Every index once, on equally many steps, whatever the shares are and become."""

from collections import Counter
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError, SampleBatches

CASES = st.tuples(
    st.integers(1, 200),  # samples
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),  # shares
    st.integers(0, 2**40),  # seed
    st.booleans(),  # shuffle
)


def samplers(
    num_samples: int,
    shares: list[int],
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
) -> list[ShareSampler]:
    return [
        ShareSampler(
            SampleBatches(
                num_samples,
                sum(shares),
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
            ),
            rank=rank,
            num_ranks=len(shares),
            shares=shares,
        )
        for rank in range(len(shares))
    ]


def dealt(ranks: list[ShareSampler]) -> list[list[list[int]]]:
    """Indices that count, by step and rank; also checks what every rank must see."""
    starts = [sampler.start for sampler in ranks]
    steps = list(zip(*(list(sampler) for sampler in ranks), strict=True))
    found = []
    for step, batches in enumerate(steps, start=starts[0]):
        deals = [sampler.deal(step) for sampler in ranks]
        assert all(deal == deals[0] for deal in deals)
        assert all(batches), "a loop cannot run on nothing"
        found.append([b if n else [] for b, n in zip(batches, deals[0].samples, strict=True)])
        assert tuple(map(len, found[-1])) == deals[0].samples
    return found


@given(CASES)
def test_every_index_is_dealt_once_on_equally_many_steps(
    case: tuple[int, list[int], int, bool],
) -> None:
    num_samples, shares, seed, shuffle = case
    steps = dealt(samplers(num_samples, shares, seed, shuffle))
    assert len(steps) == -(-num_samples // sum(shares))
    every = [index for step in steps for part in step for index in part]
    assert sorted(every) == list(range(num_samples))
    for step in steps[:-1]:
        assert [len(part) for part in step] == shares


@given(CASES)
def test_a_global_batch_does_not_depend_on_the_shares(
    case: tuple[int, list[int], int, bool],
) -> None:
    num_samples, shares, seed, shuffle = case
    steps = dealt(samplers(num_samples, shares, seed, shuffle))
    together = [sorted(index for part in step for index in part) for step in steps]
    one = [sorted(step[0]) for step in dealt(samplers(num_samples, [sum(shares)], seed, shuffle))]
    assert together == one


@given(CASES, st.data())
def test_a_job_goes_on_in_the_middle_with_other_shares_and_ranks(
    case: tuple[int, list[int], int, bool], data: st.DataObject
) -> None:
    num_samples, shares, seed, shuffle = case
    first = samplers(num_samples, shares, seed, shuffle)
    epoch = data.draw(st.integers(0, 3))
    for sampler in first:
        sampler.set_epoch(epoch)
    every = dealt(first)
    done = data.draw(st.integers(0, len(every)))
    state = first[0].state_dict(num_done=done)
    # Other ranks, as many units.
    cuts = sorted(data.draw(st.lists(st.integers(0, sum(shares)), max_size=4)))
    others = [b - a for a, b in zip([0, *cuts], [*cuts, sum(shares)], strict=True)]
    second = samplers(num_samples, others, seed, shuffle)
    for sampler in second:
        sampler.load_state_dict(state)
        assert sampler.epoch == (epoch + 1 if done == len(every) else epoch)
        sampler.set_epoch(sampler.epoch)  # as loops do; it keeps the place
    assert len(second[0]) == len(every)
    rest = dealt(second)
    assert len(rest) == (len(every) - done or len(every))
    if done < len(every):
        seen = Counter(i for step in [*every[:done], *rest] for part in step for i in part)
        assert seen == Counter(range(num_samples))


@given(CASES, st.data())
def test_shares_change_at_a_step_although_loaders_are_ahead(
    case: tuple[int, list[int], int, bool], data: st.DataObject
) -> None:
    num_samples, shares, seed, shuffle = case
    ranks = samplers(num_samples, shares, seed, shuffle)
    ahead = [data.draw(st.integers(0, 3)) for _ in ranks]
    turned = shares[1:] + shares[:1]
    iterators = [iter(sampler) for sampler in ranks]
    got = [list(islice(it, count)) for it, count in zip(iterators, ahead, strict=True)]
    change = max(sampler.num_drawn for sampler in ranks)
    for sampler in ranks:
        sampler.set_shares(turned, from_step=change)
    for batches, it in zip(got, iterators, strict=True):
        batches.extend(it)
    every = []
    for step in range(len(ranks[0])):
        samples = ranks[0].deal(step).samples
        every += [i for r, n in enumerate(samples) if n for i in got[r][step]]
        if step < len(ranks[0]) - 1:
            assert list(samples) == (turned if step >= change else shares)
    assert sorted(every) == list(range(num_samples))
    assert ranks[0].shares == tuple(turned)


def test_epochs_and_seeds_have_their_own_order() -> None:
    (sampler,), (other,) = samplers(50, [50]), samplers(50, [50], seed=1)
    first = list(sampler)
    assert list(sampler) == first
    assert list(other) != first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_the_last_samples_can_be_dropped() -> None:
    steps = dealt(samplers(23, [3, 2], drop_last=True))
    assert len(steps) == 4
    with pytest.raises(BalanceError, match="4 samples are less than one global batch of 5"):
        samplers(4, [3, 2], drop_last=True)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_takes_it(num_workers: int) -> None:
    data = TensorDataset(torch.arange(23))
    sampler, _ = samplers(23, [3, 1])
    loader = DataLoader(data, batch_sampler=sampler, num_workers=num_workers)
    sizes = [len(batch) for (batch,) in loader]
    assert sizes == [3, 3, 3, 3, 3, 2]
    assert len(loader) == 6


def test_new_shares_hold_in_the_next_epoch() -> None:
    sampler, _ = samplers(20, [3, 1])
    list(sampler)
    sampler.set_shares((2, 2))
    sampler.set_epoch(1)
    assert {len(batch) for batch in sampler} == {2}


def test_what_does_not_fit_is_refused() -> None:
    (sampler,) = samplers(20, [4])
    with pytest.raises(BalanceError, match="0 samples in batches of 4"):
        SampleBatches(0, 4, seed=0, shuffle=True, drop_last=False)
    batches = SampleBatches(8, 4, seed=0, shuffle=True, drop_last=False)
    with pytest.raises(BalanceError, match="rank 2 does not exist among 2"):
        ShareSampler(batches, rank=2, num_ranks=2)
    next(iter(sampler))
    with pytest.raises(BalanceError, match="from step 0 on come too late: 1 steps are dealt"):
        sampler.set_shares([4], from_step=0)
    state = sampler.state_dict()
    with pytest.raises(BalanceError, match="has version 7"):
        sampler.load_state_dict({**state, "version": 7})
    with pytest.raises(BalanceError, match="global batch of 9, this sampler's is 4"):
        sampler.load_state_dict({**state, "units_per_batch": 9})
