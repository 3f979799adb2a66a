"""A cross entropy that is a mean over some labels only is not weighed by samples."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heterog.balance.label_means import check_mean_over_samples
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
    check_mean_over_samples(loss(scores()))


@pytest.mark.parametrize("loss", OF_LABELS)
def test_means_over_some_labels_are_refused(loss: Loss) -> None:
    with pytest.raises(BalanceError, match=r"mean over labels of a total weight of .*count="):
        check_mean_over_samples(loss(scores()))
