"""A cross entropy that is a mean over some labels only is not weighed by samples."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heterog.balance.group import RankGroup
from heterog.balance.label_means import (
    Count,
    MeanCounts,
    Of,
    check_mean_over_samples,
    counts_of,
)
from heterog.balance.shares import BalanceError
from heterog.errors import HeterogWarning

LABELS = torch.tensor([1, 2, -100, 0])
WEIGHTS = torch.tensor([1.0, 2.0, 0.5])

Loss = Callable[[Tensor], Tensor]


def scores() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3, requires_grad=True).clone()  # results of a model, no parameters


OF_SAMPLES: tuple[Loss, ...] = (
    lambda x: functional.cross_entropy(x, LABELS.clamp(0)),
    lambda x: functional.cross_entropy(x, LABELS, reduction="sum") / 4,
    lambda x: functional.cross_entropy(x, LABELS, reduction="none").mean(),
    lambda x: ((x - 1) ** 2).mean(0).sum() + x.square()[:3].sum(),
    lambda x: functional.mse_loss(x, torch.zeros_like(x)),
    lambda x: functional.cross_entropy(x.T[None], torch.zeros(1, 4, dtype=torch.long)),
)
PENALTY = torch.ones(4, 3, requires_grad=True)  # as many rows as there are samples


def test_a_penalty_of_weights_is_no_sum_over_samples() -> None:
    for penalty in (PENALTY.square().sum(), ((PENALTY - 1) ** 2).sum() / 10, PENALTY.abs().sum()):
        loss = scores().mean() + penalty
        check_mean_over_samples(loss, 4)
        assert all(each.of != Of.SUM for each in counts_of(loss, 4))


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


def labels(x: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(x, LABELS.clamp(0), reduction=reduction)


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.mean()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].expand(4, 3) / 12


def test_losses_of_kernels_hide_what_they_are_means_over() -> None:
    made: Tensor = Kernel.apply(scores())  # type: ignore[no-untyped-call]
    with pytest.warns(HeterogWarning, match="out of a compiled function or a kernel"):
        check_mean_over_samples(0.5 * made + scores().mean(), 4)


def slope(x: Tensor) -> Tensor:
    """The size of a loss's gradient, whose node has a reduction but is no mean."""
    total = labels(x) + functional.mse_loss(x, torch.zeros_like(x))
    return torch.autograd.grad(total, x, create_graph=True)[0].square().sum(1).mean()


COUNTS: tuple[tuple[Loss, list[float]], ...] = (
    (slope, [4]),
    (lambda x: functional.mse_loss(x, torch.zeros_like(x)), [12]),
    (lambda x: functional.l1_loss(x, torch.zeros_like(x)) / 2 + x.mean((0, 1)), [12, 2, 12]),
    (lambda x: x.mean(1).mean(), [4]),
    (lambda x: functional.kl_div(x, x.detach().exp(), reduction="batchmean"), [4]),
    (lambda x: labels(x), [4]),
    (lambda x: x.sigmoid().sum() / torch.tensor([0.25, 0.5]).sum(), [0.75]),
    (lambda x: x.square().prod() / x.detach().norm(), []),
)


@pytest.mark.parametrize(("loss", "counts"), COUNTS)
def test_what_losses_are_means_over(loss: Loss, counts: list[float]) -> None:
    found = [each for each in counts_of(loss(scores()), 4) if each.of != Of.CLASSES]
    assert all(each.of == Of.MEAN for each in found)
    assert sorted(each.number for each in found) == sorted(counts)


OTHERS: tuple[tuple[Loss, Count], ...] = (
    (lambda x: labels(x, "sum") / (LABELS >= 0).sum(), Count(3, Of.SUM)),
    (lambda x: 0.125 * labels(x, "sum") + x.mean(), Count(8, Of.SUM)),
    (lambda x: torch.tensor(0.5) * labels(x, "none").sum() / 4, Count(8, Of.SUM)),
    (lambda x: functional.mse_loss(x, torch.zeros_like(x)).sqrt() / 2, Count(12, Of.CURVED)),
    (lambda x: (labels(x) - 0.1).abs() + 0.1, Count(4, Of.CURVED)),
    (lambda x: labels(x) + x.square().mean(), Count(3, Of.CLASSES)),
)


@pytest.mark.parametrize(("loss", "count"), OTHERS)
def test_what_is_no_mean_is_told_apart(loss: Loss, count: Count) -> None:
    assert count in counts_of(loss(scores()), 4)


class Ranks(RankGroup):
    """A group in which the other rank says something."""

    def __init__(self, samples: float, *counts: Count) -> None:
        self.other = [samples, *(float(number) for count in counts for number in count)]

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        padding = [float("nan")] * (len(numbers) - len(self.other))
        return [list(numbers), self.other + padding]


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
    counts = MeanCounts(Ranks(other[0], Count(other[1])))
    for samples, count in (first, first, later):
        counts.check(mean_over(count), samples, 0, looks=True)


UNLIKE: tuple[tuple[Loss, Ranks, str], ...] = (
    (
        lambda x: x.square().sum() / 16,
        Ranks(12, Count(16, Of.SUM)),
        r"divided by something else than their number \(16 for 4 samples, 16 for 12 samples\)",
    ),
    (
        lambda x: x.square().mean().sqrt(),
        Ranks(2, Count(6, Of.CURVED)),
        r"a root, .* \(a mean of 12 for 4 samples, 6 for 2 samples\).*count=len\(batch\)",
    ),
    (
        lambda x: functional.cross_entropy(x @ x.T, torch.arange(4)),
        Ranks(2, Count(2), Count(2, Of.CLASSES)),
        r"\(4 for 4 samples, 2 for 2 samples\): it compares samples of a batch with each other",
    ),
)


@pytest.mark.parametrize(("loss", "others", "text"), UNLIKE)
def test_losses_whose_parts_do_not_add_up_are_refused(
    loss: Loss, others: Ranks, text: str
) -> None:
    with pytest.raises(BalanceError, match=text):
        MeanCounts(others).check(loss(scores()), 4, 0, looks=True)


def test_places_in_a_sequence_are_no_samples() -> None:
    """Answers to questions are classes, too, of which ranks pad unlike many."""
    counts = MeanCounts(Ranks(2, Count(2), Count(9, Of.CLASSES)))
    for _ in range(3):
        counts.check(labels(scores()), 4, 0, looks=True)


def test_a_stated_count_is_that_of_the_labels() -> None:
    """Three of four labels count here, one of two there; a penalty is over as much everywhere."""
    penalty = torch.ones(5, requires_grad=True)
    loss = functional.cross_entropy(scores(), LABELS) + penalty.square().mean()
    for count, other in ((3, 1), (6, 2)):
        means = Count(1, Of.STATED), Count(5, Of.STATED)
        MeanCounts(Ranks(other, *means)).check(loss, count, 0, looks=True, is_stated=True)
    shifted = Ranks(2, *means)
    with pytest.raises(
        BalanceError, match=r"\(3 for 4 counted, 1 for 2 counted\).*labels\[:, 1:\]"
    ):
        MeanCounts(shifted).check(loss, 4, 0, looks=True, is_stated=True)


def test_unlike_counts_are_refused() -> None:
    with pytest.raises(BalanceError, match=r"\(30 for 6 samples, 12 for 2 samples\).*count="):
        MeanCounts(Ranks(2, Count(12))).check(mean_over(30), 6, 0, looks=True)
    counts = MeanCounts(Ranks(2, Count(10)))
    for _ in range(3):
        counts.check(mean_over(30), 6, 0, looks=True)
    with pytest.raises(BalanceError, match=r"\(5 for each sample before, 28 for 6 now\)"):
        counts.check(mean_over(28), 6, 1, looks=True, part=True)
