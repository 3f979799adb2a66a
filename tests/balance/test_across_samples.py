"""Losses that put samples together are told from means over samples, by shapes of autograd."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from heterog.balance.across_samples import rows_together
from heterog.balance.group import RankGroup
from heterog.balance.label_means import Count, MeanCounts, Of
from heterog.balance.replicas import ReplicaCheck
from heterog.balance.shares import BalanceError
from heterog.errors import HeterogWarning

WIDTH = 6
Loss = Callable[[Tensor], Tensor]


def normalised(x: Tensor) -> Tensor:
    made: Tensor = (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()
    return made


TOGETHER: dict[str, Loss] = {
    "variance": lambda x: x.square().mean() + functional.relu(1 - x.std(0)).mean(),
    "normalised by hand": lambda x: normalised(x).exp().mean(),
    "a product of means": lambda x: x.square().mean() * x.abs().mean(),
    "a quotient of means": lambda x: 1 - 2 * (x.sigmoid() * 0.3).sum() / x.sigmoid().sum(),
    "one over a mean": lambda x: 1.0 / x.square().mean(),
    "entropy of a mean": lambda x: torch.special.entr(x.softmax(1).mean(0)).sum(),
    "log of a sum": lambda x: torch.logsumexp(x[:, 0], 0),
    "hard samples": lambda x: x.square().mean(1).topk(2).values.mean(),
    "median": lambda x: x.square().mean(1).median(),
    "quantile": lambda x: torch.quantile(x.square().mean(1), 0.75),
    "weights over samples": lambda x: (x[:, 0].softmax(0) * x[:, 1]).sum(),
    "distances": lambda x: torch.cdist(x, x).exp().mean(),
    "scores of pairs": lambda x: (x @ x.T).exp().mean(),
    "covariance": lambda x: (x.T @ x / len(x) - torch.eye(WIDTH)).square().sum(),
    "largest": lambda x: (x / x.max()).mean(),
    "root of a sum": lambda x: x.norm(),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_losses_that_put_samples_together_are_found(name: str) -> None:
    for samples in (3, 5):
        x = torch.randn(samples, WIDTH, requires_grad=True)
        assert rows_together(TOGETHER[name](x), samples) == samples


def of_module(module: nn.Module, *shape: int) -> Loss:
    def loss(x: Tensor) -> Tensor:
        out = module(x.new_ones(len(x), *shape) * x.mean(1).view(-1, *[1] * len(shape)))
        out = out[0] if isinstance(out, tuple) else out
        made: Tensor = out.flatten(1).log_softmax(1)[:, 0].neg().mean()
        return made

    return loss


def uncertain(x: Tensor) -> Tensor:
    spread = nn.Parameter(torch.zeros(2))
    found = torch.stack([x.square().mean(), functional.l1_loss(x, torch.zeros_like(x))])
    penalty: Tensor = nn.Parameter(torch.ones(6)).norm()
    return (found * torch.exp(-spread) + spread).sum() + 0.1 * penalty


def slope(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))
    (found,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    made: Tensor = (found.norm(dim=1) - 1).square().mean()
    return made


APART: dict[str, Loss] = {
    "layers": of_module(nn.Sequential(nn.Linear(6, 15), nn.ReLU(), nn.LayerNorm(15)), 6),
    "no bias": of_module(nn.Linear(6, 15, bias=False), 6),
    "images": of_module(
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6), nn.MaxPool2d(2)), 3, 7, 7
    ),
    "batch norm": of_module(nn.Sequential(nn.Linear(6, 15), nn.BatchNorm1d(15)), 6),
    "attention": of_module(nn.TransformerEncoderLayer(6, 2, 15, batch_first=True), 4, 6),
    "recurrent": of_module(nn.LSTM(6, 5, batch_first=True, bidirectional=True), 4, 6),
    "normed weights": of_module(parametrizations.weight_norm(nn.Linear(6, 15)), 6),
    "spectral norm": of_module(parametrizations.spectral_norm(nn.Linear(6, 15)), 6),
    "uncertain weights": uncertain,
    "slope": slope,
    "per sample": lambda x: (x / x.norm(dim=1, keepdim=True)).logsumexp(1).sqrt().mean(),
    "sums": lambda x: 0.3 * x.exp().sum(0).sum() / len(x) - x.square().mean(0).sum(),
    "clipped": lambda x: torch.max(x.exp(), x.clamp(-1, 1)).mean().clamp(max=9.0),
    "words": lambda x: functional.cross_entropy(
        x[:, None].expand(-1, 4, -1).exp().flatten(0, 1), torch.zeros(4 * len(x), dtype=torch.long)
    ),
    "masked": lambda x: (x.exp()[x > 0].log_softmax(0) * 0).sum() + x.square().mean(),
}


@pytest.mark.parametrize("name", APART)
def test_means_over_samples_are_left_alone(name: str) -> None:
    """What has a parameter's size by chance has not as many rows for each sample elsewhere."""
    ratios = []
    for samples in (3, 5):
        x = torch.randn(samples, WIDTH, requires_grad=True)
        found = rows_together(APART[name](x), samples)
        ratios.append(math.nan if found is None else found / samples)
    assert ratios[0] != ratios[1]


def test_checkpointed_layers_are_not_computed_again() -> None:
    calls = []

    def layer(x: Tensor) -> Tensor:
        calls.append(x)
        return x.exp() * x.sigmoid()

    x = torch.randn(5, WIDTH, requires_grad=True)
    loss = checkpoint(layer, x, use_reentrant=False).mean()
    assert rows_together(loss, 5) is None
    assert len(calls) == 1


class Other(RankGroup):
    """A group of two in which the other rank says something."""

    def __init__(self, told: list[float]) -> None:
        self.told = told

    def gather(self, numbers: object) -> list[list[float]]:
        own = list(numbers)  # type: ignore[call-overload]
        return [own, (self.told + [math.nan] * len(own))[: len(own)]]


def test_only_ranks_with_unlike_many_samples_tell() -> None:
    def check(samples: int, rows: int) -> None:
        told = [float(samples), *map(float, Count(rows, Of.TOGETHER))]
        x = torch.randn(5, WIDTH, requires_grad=True)
        MeanCounts(Other(told)).check(torch.logsumexp(x[:, 0], 0), 5, 0, looks=True)

    check(5, 5)  # may be a width
    check(3, 5)  # is one
    with pytest.raises(
        BalanceError, match=r"\(5 for 5 samples, 3 for 3 samples\).*heterog.deploy"
    ):
        check(3, 3)


def test_buffers_of_ranks_own_samples_are_warned_of() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.register_buffer("center", torch.full((4,), 2.0))
    ranks = Other([])
    check = ReplicaCheck(model, ranks)
    gather, asked = ranks.gather, []

    def alike_but_for_buffers(numbers: list[float]) -> list[list[float]]:
        asked.append(numbers)
        return gather(numbers) if len(asked) == 2 else [numbers, numbers]

    ranks.gather = alike_but_for_buffers  # type: ignore[assignment, method-assign]
    ranks.told = [3.0]
    with pytest.warns(HeterogWarning, match=r"'center' differs .* step 1: .*heterog\.deploy"):
        check.end_step()
    assert asked[1] == [4.0]
    check.end_step()
    assert len(asked) == 3  # once is enough
