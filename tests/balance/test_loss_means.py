"""What a loss is a mean of is measured, and measuring leaves no trace."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.balance.group import RankGroup
from heterog.balance.loss_means import LossMean
from heterog.balance.loss_probe import Batch, measure, undisturbed
from heterog.balance.shares import BalanceError
from tests.runtime.ranks import Ranks

NAMES = ("labels",)
LENGTH = 5


def batch_of(num_samples: int, *, ignored: bool, seed: int = 0) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_samples, LENGTH, 3, generator=drawn)
    labels = torch.randint(0, 3, (num_samples, LENGTH), generator=drawn)
    if ignored:
        lengths = torch.randint(1, LENGTH + 1, (num_samples, 1), generator=drawn)
        labels[torch.arange(LENGTH) >= lengths] = -100
    return {"scores": scores, "labels": labels}


def token_losses(batch: Batch) -> Tensor:
    scores = batch["scores"].transpose(1, 2)
    return functional.cross_entropy(scores, batch["labels"], reduction="none")


def mean_of_labels(batch: Batch, items: float) -> float:
    return float(token_losses(batch).sum() / (batch["labels"] != -100).sum())


def mean_of_samples(batch: Batch, items: float) -> float:
    counts = (batch["labels"] != -100).sum(1)
    return float((token_losses(batch).sum(1) / counts).mean())


def divided_sum(batch: Batch, items: float) -> float:
    return float(token_losses(batch).sum()) / 10 / items


def with_a_term(batch: Batch, items: float) -> float:
    return divided_sum(batch, items) + 1e-3


def refuses_ignored(batch: Batch, items: float) -> float:
    if (batch["labels"] == -100).any():
        raise IndexError("Target -100 is out of bounds.")
    return mean_of_labels(batch, items)


def measured(loss_of: Any, *arguments: Any, training: bool, **options: Any) -> Any:
    return measure(loss_of, *arguments, has_items=True, tolerance=1e-5, **options)


def weights_of(rank: int, loss_of: Any, sizes: tuple[int, ...], ignored: bool) -> list[float]:
    """Weights of the first update, of one batch."""
    means = LossMean(RankGroup(), NAMES, None)
    batch = batch_of(max(1, sizes[rank]), ignored=ignored, seed=rank)
    return means.weights([batch], [[size > 0 for size in sizes]], partial(measured, loss_of))


@pytest.mark.distributed
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("sizes", [(5, 2, 1), (3, 0, 1), (1, 1, 1)])
@pytest.mark.parametrize("loss_of", [mean_of_labels, mean_of_samples, divided_sum])
def test_weights_make_the_loss_of_the_whole_batch(
    ranks: Ranks, loss_of: Callable[..., float], sizes: tuple[int, ...], ignored: bool
) -> None:
    weights = [each for (each,) in ranks.run(weights_of, loss_of, sizes, ignored)]
    parts = [batch_of(max(1, size), ignored=ignored, seed=rank) for rank, size in enumerate(sizes)]
    mean = sum(
        weight * loss_of(part, 1.0) for weight, part in zip(weights, parts, strict=True)
    ) / len(sizes)
    held = [part for part, size in zip(parts, sizes, strict=True) if size]
    whole = {name: torch.cat([each[name] for each in held]) for name in parts[0]}
    assert mean == pytest.approx(loss_of(whole, 1.0), rel=1e-5)


@pytest.mark.distributed
def test_a_loss_that_is_no_mean_is_refused_with_what_was_measured(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"BalanceError: .*A sum would be .*loss_mean_over="):
        ranks.run(weights_of, with_a_term, (5, 2, 1), True)


@pytest.mark.distributed
def test_labels_that_cannot_be_ignored_are_left_alone(ranks: Ranks) -> None:
    found = ranks.run(weights_of, refuses_ignored, (5, 2, 1), False)
    assert found == [[3 * 5 / 8], [3 * 2 / 8], [3 * 1 / 8]]


def test_what_is_stated_is_one_of_a_few_words() -> None:
    with pytest.raises(BalanceError, match="loss_mean_over='tokens': give 'num_items', 'samples'"):
        LossMean(RankGroup(), NAMES, "tokens")


class Restless(nn.Module):
    """All that may differ from one call to the next."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
        self.num_calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        self.seen = self.seen + 1
        hidden = functional.dropout(self.first(inputs), 0.5, self.training)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = hidden + self.attention(hidden, hidden, hidden)[0] + self.recurrent(hidden)[0]
        query = hidden[:, None]
        fused = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.4)[:, 0]
        noise = torch.randn_like(hidden) + torch.zeros_like(hidden).uniform_(-1, 1)
        steps = torch.randint(0, 10, (len(hidden), 1, 1)) + torch.rand(len(hidden), 1, 1)
        kept = torch.bernoulli(torch.full_like(hidden, 0.3)) + functional.gumbel_softmax(hidden)
        random.random(), np.random.rand()  # noqa: NPY002
        total: Tensor = hidden + fused + noise + steps + kept
        return total.square().mean((1, 2))


def states_of_generators() -> list[str]:
    numpy_state = np.random.get_state()  # noqa: NPY002
    return [str(torch.get_rng_state().tolist()), str(random.getstate()), repr(numpy_state)]


def test_measuring_is_by_sample_and_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = Restless()
    inputs = torch.randn(4, LENGTH, 8)
    before = copy.deepcopy(model.state_dict())
    states = states_of_generators()
    with undisturbed(model, training=True):
        whole, parts = model(inputs), torch.cat([model(inputs[:1]), model(inputs[1:])])
    torch.testing.assert_close(whole, parts)
    assert states_of_generators() == states
    assert model.num_calls == 0
    assert all(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
