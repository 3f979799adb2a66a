"""A cross entropy that is a mean over some labels only is not weighed by samples."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heterog.balance.group import RankGroup
from heterog.balance.label_means import MeanCounts, check_mean_over_samples, counts_of
from heterog.balance.shares import BalanceError

LABELS = torch.tensor([1, 2, -100, 0])
WEIGHTS = torch.tensor([1.0, 2.0, 0.5])

Loss = Callable[[Tensor], Tensor]


def scores() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3, requires_grad=True)


OF_SAMPLES: tuple[Loss, ...] = (
    lambda x: functional.cross_entropy(x, LABELS.clamp(0)),
    lambda x: functional.cross_entropy(x, LABELS, reduction="sum") / 4,
    lambda x: functional.cross_entropy(x, LABELS, reduction="none").mean(),
    lambda x: ((x - 1) ** 2).mean(0).sum() + x.square()[:3].sum(),
    lambda x: functional.mse_loss(x, torch.zeros_like(x)),
    lambda x: functional.cross_entropy(x.T[None], torch.zeros(1, 4, dtype=torch.long)),
)
OF_LABELS: tuple[Loss, ...] = (
    lambda x: functional.cross_entropy(x, LABELS),
    lambda x: 0.5 * functional.cross_entropy(x, LABELS) + x.square().mean(),
    lambda x: functional.cross_entropy(x, LABELS.clamp(0), weight=WEIGHTS),
    lambda x: functional.cross_entropy(x.T[None], LABELS[None]),
    lambda x: functional.nll_loss(x.log_softmax(1), LABELS).to(torch.float64),
)


@pytest.mark.parametrize("loss", OF_SAMPLES)
def test_means_over_samples_pass(loss: Loss) -> None:
    check_mean_over_samples(loss(scores()), 4)


@pytest.mark.parametrize("loss", OF_LABELS)
def test_means_over_some_labels_are_refused(loss: Loss) -> None:
    with pytest.raises(BalanceError, match=r"mean over labels of a total weight of .*count="):
        check_mean_over_samples(loss(scores()), 4)


SUMS: tuple[Loss, ...] = (
    lambda x: functional.cross_entropy(x, LABELS, reduction="sum"),
    lambda x: functional.cross_entropy(x, LABELS, reduction="none").sum(),
    lambda x: functional.mse_loss(x, torch.zeros_like(x), reduction="sum") - 0.5 * x.exp().sum(),
    lambda x: functional.l1_loss(x, torch.zeros_like(x), reduction="sum"),
    lambda x: ((x - 1) ** 2).sum() + x.mean(),
)


@pytest.mark.parametrize("loss", SUMS)
def test_sums_over_samples_are_refused(loss: Loss) -> None:
    with pytest.raises(BalanceError, match=r"a sum over samples.* divided by the number"):
        check_mean_over_samples(loss(scores()), 4)


COUNTS: tuple[tuple[Loss, list[float]], ...] = (
    (lambda x: functional.mse_loss(x, torch.zeros_like(x)), [12]),
    (lambda x: functional.l1_loss(x, torch.zeros_like(x)) / 2 + x.mean((0, 1)), [12, 2, 12]),
    (lambda x: x.mean(1).mean(), [4]),
    (lambda x: functional.cross_entropy(x, LABELS, reduction="sum") / (LABELS >= 0).sum(), [3]),
    (lambda x: functional.kl_div(x, x.detach().exp(), reduction="batchmean"), [4]),
    (lambda x: functional.cross_entropy(x, LABELS.clamp(0)), [4]),
    (lambda x: x.square().sum() / x.detach().norm(), []),
)


@pytest.mark.parametrize(("loss", "counts"), COUNTS)
def test_what_losses_are_means_over(loss: Loss, counts: list[float]) -> None:
    assert sorted(counts_of(loss(scores()))) == sorted(counts)


class Ranks(RankGroup):
    """A group in which the other rank says something."""

    def __init__(self, samples: float, count: float) -> None:
        self.other = [samples, count, *[float("nan")] * 3]

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(numbers), self.other]


def mean_over(count: int) -> Tensor:
    return torch.zeros(count, requires_grad=True).mean()


@pytest.mark.parametrize(
    ("other", "first", "later"),
    [
        ((2.0, 10.0), (6, 30), (3, 15)),  # equally long
        ((2.0, 7.0), (6, 7), (3, 7)),  # a penalty
        ((0.0, 9.0), (6, 30), (3, 15)),  # no samples there
    ],
)
def test_counts_that_suit_pass(
    other: tuple[float, float], first: tuple[int, int], later: tuple[int, int]
) -> None:
    counts = MeanCounts(Ranks(*other))
    for samples, count in (first, first, later):
        counts.check(mean_over(count), samples, 0, looks=True, part=False)


def test_unlike_counts_are_refused() -> None:
    with pytest.raises(BalanceError, match=r"\(30 for 6 samples, 12 for 2 samples\).*count="):
        MeanCounts(Ranks(2, 12)).check(mean_over(30), 6, 0, looks=True, part=False)
    counts = MeanCounts(Ranks(2, 10))
    for _ in range(3):
        counts.check(mean_over(30), 6, 0, looks=True, part=False)
    with pytest.raises(BalanceError, match=r"\(5 for each sample before, 28 for 6 now\)"):
        counts.check(mean_over(28), 6, 1, looks=True, part=True)
