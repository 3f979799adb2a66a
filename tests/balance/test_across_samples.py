"""Losses that put samples together are told from means over samples, by shapes of autograd."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from heterog.balance.group import RankGroup
from heterog.balance.label_means import MeanCounts
from heterog.balance.loss_graph import RowsTogether, rows_together
from heterog.balance.replicas import ReplicaCheck
from heterog.errors import HeterogWarning
from heterog.runtime.step.alike import Replicas

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
    "largest": lambda x: (x / x.amax(0)).mean(),
    "root of a sum": lambda x: x.norm(),
    "next sample": lambda x: (x - x.roll(1, 0)).square().mean(),
    "mirrored": lambda x: (x * x.flip(0)).mean(),
    "scores of pairs by einsum": lambda x: torch.einsum("id,jd->ij", x, x).exp().mean(),
    "largest loss": lambda x: x.square().sum(1).max(),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_losses_that_put_samples_together_are_found(name: str) -> None:
    found = []
    for samples in (3, 5):
        x = torch.randn(samples, WIDTH, requires_grad=True)
        rows = rows_together(TOGETHER[name](x), samples)
        assert rows is not None
        assert rows.number == samples
        found.append(rows.place)
    assert found[0] == found[1]


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
    "shifted": lambda x: (x - x.max()).exp().sum(1).log().mean() - (x - x.amin()).exp().mean(),
    "similar": lambda x: 2 - 2 * functional.cosine_similarity(x, x.detach() + 1).mean(),
    "guarded": lambda x: torch.nan_to_num(functional.mse_loss(x, x.detach() + 1)),
    "mirrored features": lambda x: (x * x.flip(1) - x.roll(1, 1)).mean(),
    "masked": lambda x: (x.exp()[x > 0].log_softmax(0) * 0).sum() + x.square().mean(),
}


@pytest.mark.parametrize("name", APART)
def test_means_over_samples_are_left_alone(name: str) -> None:
    """What has a parameter's size by chance has not as many rows for each sample elsewhere."""
    ratios = []
    for samples in (3, 5):
        x = torch.randn(samples, WIDTH, requires_grad=True)
        found = rows_together(APART[name](x), samples)
        ratios.append(math.nan if found is None else found.number / samples)
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
    """A group in which the other ranks say something."""

    own: list[float]

    def __init__(self, *told: list[float]) -> None:
        self.told = told

    def gather(self, numbers: object) -> list[list[float]]:
        own = self.own = list(numbers)  # type: ignore[call-overload]
        return [own, *((told + [math.nan] * len(own))[: len(own)] for told in self.told)]


def check(loss: Loss, samples: int, *told: list[float], width: int = WIDTH) -> list[float]:
    """Compare a loss with what other ranks told; returns what this one tells."""
    group = Other(*told)
    x = torch.randn(samples, width, requires_grad=True)
    MeanCounts(group).check(loss(x), samples, 0, looks=True)
    return group.own


def spread(x: Tensor) -> Tensor:
    return x.square().mean() + torch.logsumexp(x[:, 0], 0)


def test_only_ranks_with_unlike_many_samples_tell() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeterogWarning)
        five, three = check(spread, 5, []), check(spread, 3, [])
        check(spread, 5, five)  # may be a width
        check(spread, 5, [*three[:-2], 5.0, three[-1]])  # is one
        check(spread, 5, [*three[:-1], three[-1] + 1])  # something else
    with pytest.warns(
        HeterogWarning, match=r"\(5 for 5 samples, 3 for 3 samples\).*heterog.deploy"
    ):
        check(spread, 5, three)


def contrast(x: Tensor) -> Tensor:
    scores = functional.normalize(x, dim=1) @ functional.normalize(x, dim=1).T
    return (torch.logsumexp(scores - torch.eye(len(x)), 1) - scores.mean(1)).mean()


def test_a_rank_with_one_sample_does_not_hide_what_others_tell() -> None:
    """Its places, where any number is a multiple of its samples, may be others."""
    with pytest.warns(HeterogWarning, match=r"\(5 for 5 samples, 3 for 3 samples\)"):
        check(contrast, 5, check(contrast, 3), check(contrast, 1))

    def penalised(x: Tensor) -> Tensor:
        return functional.cross_entropy(x, torch.arange(len(x))) + x.square().sum(1).mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error", HeterogWarning)
        check(penalised, 5, check(penalised, 3), check(penalised, 1))


def normalised_factors(x: Tensor) -> Tensor:
    """Policy gradients, with advantages that have the mean 0 on each rank."""
    rewards = torch.rand(len(x), generator=torch.Generator().manual_seed(len(x)))
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    ratio = (x[:, 0] - x[:, 0].detach()).exp()
    clipped = ratio.clamp(0.8, 1.2) * advantages
    return -torch.min(ratio * advantages, clipped).mean() + 0.1 * x.square().mean()


def over_mean(x: Tensor) -> Tensor:
    weights = torch.rand(len(x), generator=torch.Generator().manual_seed(len(x)))
    return (x.square().mean(1) * weights / weights.mean()).mean()


def signed(x: Tensor) -> Tensor:
    """Labels, whose mean is 0 by chance."""
    return (x.exp().mean(1) * torch.tensor([1.0, -1.0] * 3)[: len(x)]).mean()


def weighted(x: Tensor) -> Tensor:
    return (x.exp() * x.detach().abs().sqrt()).mean()


@pytest.mark.parametrize("loss", [normalised_factors, over_mean])
def test_factors_normalised_over_samples_are_warned_of(loss: Loss) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeterogWarning)
        three = check(loss, 3)
        check(loss, 3, three)
        for apart in (signed, weighted):
            check(apart, 4, check(apart, 2))
    with pytest.warns(HeterogWarning, match="are normalised over each rank's own samples"):
        check(loss, 5, three)


def test_samples_put_together_are_warned_of_once() -> None:
    group = Other(check(spread, 3, []))
    counts = MeanCounts(group)
    x = torch.randn(5, WIDTH, requires_grad=True)
    with pytest.warns(HeterogWarning, match="takes statistics over the samples"):
        counts.check(spread(x), 5, 0, looks=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeterogWarning)
        counts.check(spread(x), 5, 0, looks=True)
    assert group.own[0] == 5.0
    assert math.isnan(group.own[-1])  # a second comparison, which does not look


def test_rows_are_told_beside_any_number_of_means() -> None:
    """Ranks whose losses have unlike many means compare rows with rows alone."""

    def with_means(number: int) -> Loss:
        return lambda x: sum((x.mean() * (1 / number) for _ in range(number)), spread(x))

    for number in (0, 3, 5, 8):
        own = check(with_means(number), 5, [])
        assert len(own) == 1 + 2 * 6 + 2 * 4 + 1 + 2
        assert own[-2] == 5.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeterogWarning)
        check(with_means(5), 5, check(with_means(3), 3, []))


WIDE = nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 3, bias=False))
LOW_RANK = [nn.Parameter(torch.randn(*shape)) for shape in ((3, 12), (12, 8))]


@pytest.mark.parametrize("layer", [WIDE, lambda x: (x @ (LOW_RANK[0] @ LOW_RANK[1]).T).relu()])
def test_widths_in_proportion_to_samples_are_no_samples(layer: Callable[[Tensor], Tensor]) -> None:
    """Widths 12 and 8 are 2 for each of 6 and 4 samples, but in unlike layers."""

    def loss(x: Tensor) -> Tensor:
        return functional.mse_loss(layer(x), x.new_zeros(len(x), 3))

    found = [rows_together(loss(torch.randn(n, 8, requires_grad=True)), n) for n in (6, 4)]
    if layer is WIDE:
        assert [each and each.number for each in found] == [12, 8]
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeterogWarning)
        check(loss, 6, check(loss, 4, width=8), width=8)


def test_strided_nested_tensors_have_no_shape() -> None:
    parts = [torch.randn(n, WIDTH, requires_grad=True) for n in (2, 3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.strided)
    found = torch.nested.to_padded_tensor(nn.Linear(WIDTH, 4)(nested).softmax(-1), 0.0)
    assert rows_together(found.mean(), 2) is None
    assert rows_together(found.mean().exp(), 2) == RowsTogether(2, 1)


@pytest.mark.parametrize("center", [torch.full((4,), 2.0), torch.tensor([-2.0, 2.0, 2.0, 2.0])])
def test_buffers_of_ranks_own_samples_are_warned_of(center: Tensor) -> None:
    """Also those of one norm, as a queue of normalised features."""
    models = [nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)) for _ in range(2)]
    for model, value in zip(models, (center, torch.tensor([2.0, -2.0, 2.0, 2.0])), strict=True):
        model.register_buffer("center", value)
        model.register_buffer("mask", torch.full((4,), -torch.inf))
    other = Replicas(list(models[1].buffers())[:2]).facts()
    ranks = Other([])
    check, asked = ReplicaCheck(models[0], ranks), []

    def alike_but_for_buffers(numbers: list[float]) -> list[list[float]]:
        asked.append(numbers)
        return [numbers, other if len(asked) == 2 else numbers]

    ranks.gather = alike_but_for_buffers  # type: ignore[assignment, method-assign]
    with pytest.warns(HeterogWarning, match=r"'center' differs .* step 1: .*heterog\.deploy"):
        check.end_step()
    check.end_step()
    assert len(asked) == 3  # once is enough
