"""Sums over samples, and factors and constants that a rank computes from its own samples."""

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from heterog.balance.balancer import Balancer
from heterog.balance.group import RankGroup
from heterog.balance.label_means import MeanCounts
from heterog.balance.loss_graph import Factor, factors_of, is_normalised
from heterog.balance.shares import BalanceError
from heterog.errors import HeterogWarning
from tests.runtime.ranks import Ranks

Loss = Callable[[Tensor], Tensor]


class Second(RankGroup):
    """The second of two ranks; the first has said before what it says."""

    def __init__(self) -> None:
        self.said: list[list[float]] = []

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        self.said.append(list(numbers))
        return self.said


def on_two(loss: Loss, sizes: tuple[int, int] = (8, 5), *, is_stated: bool = False) -> list[str]:
    """What is warned of when a loss of two ranks is compared."""
    group = Second()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for samples in sizes:
            x = torch.rand(samples, 3, generator=torch.Generator().manual_seed(samples))
            output = x.requires_grad_().clone()  # of a model, no parameter
            means = MeanCounts(group)
            means.check(loss(output), samples, 0, looks=True, is_stated=is_stated)
    return [str(each.message) for each in told if issubclass(each.category, HeterogWarning)]


def kinds(x: Tensor) -> Tensor:
    return torch.arange(len(x)) % 3


def of_each(x: Tensor) -> Tensor:
    return functional.cross_entropy(x, kinds(x), reduction="none")


def log_prob(x: Tensor) -> Tensor:
    made: Tensor = torch.distributions.Categorical(logits=x).log_prob(kinds(x))  # type: ignore[no-untyped-call]
    return made


def weights(x: Tensor) -> Tensor:
    return x[:, 0].detach() + 0.1


SUMMED: dict[str, Loss] = {
    "log probability": lambda x: -log_prob(x).sum(),
    "divergence": lambda x: of_each(x).mean() - 0.01 * (1 + x - x.square() - x.exp()).sum(),
    "list": lambda x: sum((each.exp().mean() for each in x), x.new_zeros(())),
    "stack": lambda x: torch.stack([each.exp().mean() for each in x]).sum(),
    "over samples, then a mean": lambda x: x.exp().sum(0).mean(),
}


@pytest.mark.parametrize("name", SUMMED)
def test_sums_over_samples_are_refused(name: str) -> None:
    with pytest.raises(BalanceError, match=r"is a sum over samples, .*\(its elements are .* 8 sa"):
        on_two(SUMMED[name])
    assert on_two(SUMMED[name], (8, 8)) == []  # one share for all tells nothing
    assert on_two(SUMMED[name], is_stated=True) == []


OWN: dict[str, Loss] = {
    "times samples": lambda x: of_each(x).mean() * len(x) / 8,
    "loss as a factor": lambda x: of_each(x).mean() + x.mean() * of_each(x).mean().item(),
    "guard": lambda x: of_each(x).mean() * (0.5 if len(x) == 8 else 1.0),
    "some samples": lambda x: of_each(x)[kinds(x) == 0].sum(),
    "a term if it is needed": lambda x: of_each(x).mean() + x.exp().mean() * (len(x) > 6),
}


@pytest.mark.parametrize("name", OWN)
def test_factors_that_ranks_compute_are_warned_of(name: str) -> None:
    (told,) = on_two(OWN[name])
    assert "add up to unlike numbers on the ranks" in told
    assert on_two(OWN[name], (8, 8)) == []  # of the same samples they are alike


MEANS: dict[str, Loss] = {
    "of a list": lambda x: sum((each.exp().mean() for each in x), x.new_zeros(())) / len(x),
    "of some samples": lambda x: of_each(x)[kinds(x) > 0].sum() / len(x) + of_each(x).mean(),
    "weighted": lambda x: (of_each(x) * weights(x)).mean(),
    "soft labels": lambda x: -(x.detach().softmax(1) * x.log_softmax(1)).sum(1).mean(),
    "signs": lambda x: (1 - x[:, 0] * (1.0 - 2.0 * (kinds(x) > 0))).relu().mean(),
    "mixed by ranks": lambda x: (
        len(x) / 10 * of_each(x).mean() + (1 - len(x) / 10) * x.exp().mean()
    ),
    "penalty": lambda x: of_each(x).mean() + torch.ones(7, requires_grad=True).cos().sum(),
    "batchmean": lambda x: functional.kl_div(
        x.log_softmax(1), x.detach().softmax(1), reduction="batchmean"
    ),
    "differences": lambda x: (2 - 3 * x.exp().mean() - x.cos().mean()) / 4,
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("sizes", [(8, 5), (8, 8)])
def test_means_over_samples_pass(name: str, sizes: tuple[int, int]) -> None:
    assert on_two(MEANS[name], sizes) == []


@pytest.mark.parametrize(("part", "sizes"), [(0.5, (8, 4)), (0.1, (10, 1)), (0.25, (4, 16))])
def test_parts_of_means_are_no_sums(part: float, sizes: tuple[int, int]) -> None:
    """Half of a mean over four samples has the factor of a mean over eight."""
    assert on_two(lambda x: (x.cos().sum() + part * x.exp().sum()) / len(x), sizes) == []


class WithLoss(nn.Module):
    """A model that returns its loss and its output, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output = self.layer(x)
        return {"loss": of_each(output).mean(), "output": output}


def distils(rank: int) -> float:
    """The node of DistributedDataParallel is below the loss and the output."""
    model = DistributedDataParallel(WithLoss(), find_unused_parameters=True)
    balancer = Balancer(model, global_batch_size=12, shares=(6, 4, 2), interval=0)
    data = TensorDataset(torch.rand(24, 3, generator=torch.Generator().manual_seed(0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeterogWarning)
        for (inputs,) in balancer.loader(data):
            made = model(inputs)
            teacher = inputs.softmax(1)
            loss = functional.kl_div(made["output"].log_softmax(1), teacher, reduction="batchmean")
            torch.autograd.backward(balancer.weigh(0.5 * made["loss"] + 0.5 * loss))
    return balancer.mean_loss()


@pytest.mark.distributed
def test_an_output_of_a_wrapped_model_is_apart_from_its_loss(ranks: Ranks) -> None:
    first, *others = ranks.run(distils)
    assert others == [first, first]


@pytest.mark.parametrize("loss", [Tensor.mean, lambda x: x.sum() / 8])
def test_losses_of_nested_tensors_are_read(loss: Loss) -> None:
    parts = [torch.rand(n, requires_grad=True) for n in (3, 5)]
    losses = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    found = loss(losses * torch.zeros_like(losses.detach()).exp())
    assert not is_normalised(found, 2)
    assert factors_of(found) in ([], [Factor(1.0, 1.0)])


def triplets(x: Tensor) -> Tensor:
    return functional.triplet_margin_loss(x, 2 * x.detach(), x.detach() - 1)


def ranks_of_pairs(x: Tensor) -> Tensor:
    return functional.margin_ranking_loss(x[:, 0], x[:, 1], torch.ones(len(x)), margin=0.3)


def angles(x: Tensor) -> Tensor:
    return functional.cosine_embedding_loss(x, 2 * x.detach() + 1, torch.ones(len(x)))


@pytest.mark.parametrize("loss", [triplets, ranks_of_pairs, angles])
def test_losses_that_add_a_number_are_read(loss: Loss) -> None:
    assert on_two(loss) == []


def test_the_length_of_a_rank_s_only_sample_is_no_count() -> None:
    lengths = iter([7.0, 5.0])
    assert on_two(lambda x: (x.exp().sum(1) / torch.tensor([next(lengths)])).sum(), (1, 1)) == []
