"""Ranks that deal other samples than each other are refused in the first step."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from heterog.balance.group import RankGroup
from heterog.balance.replicas import SameDeals
from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError, SampleBatches
from heterog.errors import HeterogWarning


class Other(RankGroup):
    """A group whose second rank says what it was told before."""

    def __init__(self, told: list[float] | None = None) -> None:
        self.told = told

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        if self.told is None:
            self.told = list(numbers)
        return [list(numbers), self.told]


def data(begin: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(begin, begin + 20.0))


def sampler(
    dataset: Dataset[Any], *, seed: int = 0, shares: Sequence[int] = (3, 1)
) -> ShareSampler:
    length: int = len(dataset)  # type: ignore[arg-type]
    batches = SampleBatches(length, 4, seed=seed, shuffle=True, drop_last=False)
    made = ShareSampler(batches, rank=0, num_ranks=2, shares=shares)
    made.dataset = dataset
    return made


def drawn(seed: int) -> Dataset[Any]:
    return random_split(data(), [15, 5], generator=torch.Generator().manual_seed(seed))[0]


CASES: tuple[tuple[Callable[[int], ShareSampler], str], ...] = (
    (lambda rank: sampler(data(), seed=rank), "the orders of the samples"),
    (lambda rank: sampler(data(), shares=(3 - rank, 1 + rank)), "the shares"),
    (lambda rank: sampler(data(rank)), "the data sets"),
    (lambda rank: sampler(drawn(rank)), "the data sets"),
    (lambda rank: sampler(Subset(data(), range(rank, 20, 2))), "the data sets"),
    (lambda rank: sampler(Subset(data(), range(15 + rank))), "the data sets"),
)


@pytest.mark.parametrize(("made", "what"), CASES)
def test_what_ranks_deal_is_compared(made: Callable[[int], ShareSampler], what: str) -> None:
    one, other = made(0), made(1)
    group = Other()
    SameDeals(group).check(other, other.deal(0))
    SameDeals(group).check(other, other.deal(0))  # alike
    with pytest.raises(BalanceError, match=rf"^{what} of rank 1 and rank 0 differ.*seed"):
        SameDeals(group).check(one, one.deal(0))


class Hashed(TensorDataset):
    def __init__(self, told: str) -> None:
        super().__init__(torch.arange(20.0))
        self._fingerprint = told


def test_fingerprints_that_differ_are_warned_of() -> None:
    """They are drawn where a transform cannot be hashed."""
    group, (one, other) = Other(), (sampler(Hashed(told)) for told in ("a", "b"))
    SameDeals(group).check(other, other.deal(0))
    with pytest.warns(HeterogWarning, match=r"fingerprints of ranks' data sets differ"):
        SameDeals(group).check(one, one.deal(0))
