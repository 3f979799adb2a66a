"""Families of which each showed something when a stranger brought it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from families.family import BATCH, Batch, Family, enter, family, sgd, trained
from families.language import VOCABULARY, causal_batch, config_of, hugging_face
from families.training import network, numbers
from heterog.graph.workload import Workload

CLASSES = 4
WAVES = 5
"""Kept by the Fourier operator."""


def features_and_classes() -> Batch:
    """Eight numbers of each sample, and its class."""
    return numbers(8), torch.randint(0, CLASSES, (BATCH,))


@trained(
    "checked_tokens",
    lambda: {"table": nn.Embedding(VOCABULARY, 8), "head": nn.Linear(8, CLASSES)},
    lambda: (
        torch.randint(0, VOCABULARY, (BATCH, 6)),
        torch.randint(1, 7, (BATCH,)),
        torch.randint(0, CLASSES, (BATCH,)),
    ),
    loss=functional.cross_entropy,
)
def checked_tokens(net: Any, words: Tensor, lengths: Tensor) -> Tensor:
    """Asserts and errors about values, which the step checks when it runs."""
    if words.max() >= net.table.num_embeddings or words.min() < 0:
        raise ValueError("a word is not in the vocabulary")
    assert lengths.max().item() <= words.shape[1], "too long"
    found = net.table(words)
    assert not torch.isnan(found).any()
    mask = torch.arange(words.shape[1]) < lengths[:, None]
    mean = (found * mask[..., None]).sum(1) / lengths[:, None]
    assert mean.isnan().sum() == 0
    return net.head(mean)


@trained("gaussian_head", lambda: {"body": network(8, 16, 2)}, lambda: (numbers(8), numbers()))
def gaussian_head(net: Any, x: Tensor, target: Tensor) -> Tensor:
    """Regression with a variance of its own for each sample."""
    mean, spread = net.body(x).unbind(1)
    return functional.gaussian_nll_loss(mean, target, functional.softplus(spread))


@trained(
    "moving_average",
    lambda: {
        "body": nn.Sequential(nn.Linear(8, 16), nn.Tanh()),
        "head": nn.Linear(16, CLASSES),
        "average": torch.zeros(16),
    },
    features_and_classes,
    loss=functional.cross_entropy,
    is_quick=True,
)
def moving_average(net: Any, x: Tensor) -> Tensor:
    """A buffer that the forward pass steps in place."""
    found = net.body(x)
    with torch.no_grad():
        net.average.mul_(0.9).add_(found.mean(0), alpha=0.1)
    return net.head(found - net.average)


@trained(
    "own_teacher",
    lambda: {
        "student": nn.Linear(8, 6),
        "teacher": nn.Linear(8, 6).requires_grad_(False),
        "guess": nn.Linear(6, 6),
    },
    lambda: (numbers(8), numbers(8)),
)
def own_teacher(net: Any, one: Tensor, other: Tensor) -> Tensor:
    """BYOL: frozen weights that are a moving average of trained ones."""
    with torch.no_grad():
        for old, new in zip(net.teacher.parameters(), net.student.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)
        wanted = functional.normalize(net.teacher(other), dim=1)
    found = functional.normalize(net.guess(net.student(one)), dim=1)
    return 2 - 2 * (found * wanted).sum(1).mean()


class Reversed(torch.autograd.Function):
    """Two residual halves; the backward pass computes the inputs from the outputs."""

    @staticmethod
    def forward(context: Any, left: Tensor, right: Tensor, block: "Reversible") -> Any:
        context.block = block
        with torch.no_grad():
            first = left + block.one(right)
            second = right + block.two(first)
        context.save_for_backward(first.detach(), second.detach())
        return first, second

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        first, second = context.saved_tensors
        block = context.block
        with torch.enable_grad():
            first = first.detach().requires_grad_()
            inner = block.two(first)
            inner.backward(gradients[1])  # adds to the gradients of the weights
        with torch.no_grad():
            right = second - inner
            left_gradient = gradients[0] + first.grad
        with torch.enable_grad():
            right = right.detach().requires_grad_()
            block.one(right).backward(left_gradient)
        return left_gradient, gradients[1] + right.grad, None


class Reversible(nn.Module):
    """A reversible layer (RevNet), which keeps no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = network(4, 8, 4), network(4, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = Reversed.apply(*x.chunk(2, 1), self)
        return torch.cat([right, left], 1)


@family("reversible", is_quick=True)
def reversible() -> Workload:
    """Gradients of weights that the backward pass of a layer adds up itself."""

    def model() -> nn.Module:
        body = nn.Linear(8, 8), Reversible(), Reversible(), nn.Linear(8, CLASSES)
        return nn.Sequential(*body).double()

    return sgd(model, features_and_classes, loss=functional.cross_entropy)


@trained(
    "fourier_operator",
    lambda: {
        "lift": nn.Conv1d(1, 4, 1).double(),
        "drop": nn.Conv1d(4, 1, 1).double(),
        "mix": nn.Parameter(0.2 * torch.randn(4, 4, WAVES, dtype=torch.complex128)),
    },
    lambda: (numbers(1, 16), numbers(1, 16)),
    loss=functional.mse_loss,
    dtype=None,
)
def fourier_operator(net: Any, x: Tensor) -> Tensor:
    """FNO: the lowest waves of a signal are mixed by complex weights."""
    lifted = net.lift(x)
    waves = torch.fft.rfft(lifted)
    mixed = torch.zeros_like(waves)
    mixed[:, :, :WAVES] = torch.einsum("bix,iox->box", waves[:, :, :WAVES], net.mix)
    return net.drop(functional.gelu(lifted + torch.fft.irfft(mixed, n=x.shape[-1])))


@family("orthogonal_weights")
def orthogonal_weights() -> Workload:
    """An orthogonal matrix as a parametrization, which looks at its values when it is made."""

    def model() -> nn.Module:
        first = parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley")
        return nn.Sequential(first, nn.ReLU(), nn.Linear(8, CLASSES)).double()

    return sgd(model, features_and_classes, loss=functional.cross_entropy)


@trained(
    "unread_head",
    lambda: {
        "body": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        "unread": nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
        "head": nn.Linear(4, CLASSES),
    },
    lambda: (numbers(3, 6, 6), torch.randint(0, CLASSES, (BATCH,))),
    loss=functional.cross_entropy,
)
def unread_head(net: Any, x: Tensor) -> Tensor:
    """Running statistics of a norm whose result nothing reads."""
    found = net.body(x)
    net.unread(found)
    return net.head(found.mean((2, 3)))


@family("plain_features_normalised")
def plain_features_normalised() -> Workload:
    """BatchNorm over plain features, of which torch trains none on one sample."""

    def model() -> nn.Module:
        norm = nn.BatchNorm1d(16, affine=False, track_running_stats=False)
        return nn.Sequential(nn.Linear(8, 16), norm, nn.GLU(), nn.Linear(8, CLASSES)).double()

    return sgd(model, features_and_classes, loss=functional.cross_entropy)


enter(
    Family(
        "xlm",
        "XLM: lengths are asserted to fit.",
        lambda: hugging_face(
            lambda: config_of(
                "XLM",
                vocab_size=VOCABULARY,
                emb_dim=16,
                n_layers=2,
                n_heads=2,
                dropout=0.0,
                attention_dropout=0.0,
                max_position_embeddings=32,
                pad_index=1,
                init_std=0.2,
            ),
            "XLMWithLMHeadModel",
            causal_batch,
        ),
    )
)
