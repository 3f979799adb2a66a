"""Models that keep state in Python between steps, control flow, schedules, guards."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from families.family import BATCH, FLOAT32, Batch, family, sgd, trained
from families.training import network, numbers
from heterog.graph.workload import Workload


def _penalised(net: Any, x: Tensor, labels: Tensor, weight: Tensor | float) -> Tensor:
    """A loss with a penalty whose weight grows for some steps."""
    made = net.network(x)
    return functional.cross_entropy(made, labels) + weight * made.square().mean()


def labelled() -> tuple[Tensor, Tensor]:
    """Features and labels."""
    return numbers(6), torch.randint(0, 4, (BATCH,))


class Counting(nn.Module):
    """Counts its steps in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.steps = network(6, 8, 4), 0

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.steps += 1
        return _penalised(self, x, labels, min(1.0, self.steps / 5))


@family("counter_in_python", refused="'steps' of the model (0, then 1) decides that")
def counter_in_python() -> Workload:
    """Refused: the next two are what the message advises."""
    return sgd(lambda: Counting().double(), labelled)


def _numbered() -> Batch:
    x, labels = labelled()
    return x, torch.randint(1, 6, ()), labels


@trained("schedule_as_input", lambda: {"network": network(6, 8, 4)}, _numbered)
def schedule_as_input(net: Any, x: Tensor, step: Tensor, labels: Tensor) -> Tensor:
    """The same penalty by a tensor of the batch."""
    return _penalised(net, x, labels, torch.clamp(step / 5, max=1.0))


@trained(
    "schedule_in_buffer", lambda: {"network": network(6, 8, 4), "steps": torch.zeros(())}, labelled
)
def schedule_in_buffer(net: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The same penalty by a buffer that counts."""
    net.steps += 1
    return _penalised(net, x, labels, torch.clamp(net.steps / 5, max=1.0))


def _four_layers() -> dict[str, nn.Module]:
    """Layers, some of which are left out."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    return {"first": nn.Linear(6, 8), "head": nn.Linear(8, 4), "layers": layers}


@trained(
    "layer_drop_in_python",
    _four_layers,
    labelled,
    loss=functional.cross_entropy,
    refused="the state of Python's random decides that",
)
def layer_drop_in_python(net: Any, x: Tensor) -> Tensor:
    """Refused: the next two are what the message advises."""
    x = net.first(x)
    for layer in net.layers:
        if random.random() > 0.2:
            x = x + layer(x).relu()
    return net.head(x)


def _with_kept() -> Batch:
    x, labels = labelled()
    return x, torch.rand(4).gt(0.2).double(), labels


@trained("layer_drop_as_input", _four_layers, _with_kept, loss=functional.cross_entropy)
def layer_drop_as_input(net: Any, x: Tensor, keep: Tensor) -> Tensor:
    """What to keep is drawn with the batch."""
    x = net.first(x)
    for place, layer in enumerate(net.layers):
        x = x + keep[place] * layer(x).relu()
    return net.head(x)


@trained(
    "layer_drop_by_torch", _four_layers, labelled, loss=functional.cross_entropy, is_random=True
)
def layer_drop_by_torch(net: Any, x: Tensor) -> Tensor:
    """Drawn in the step."""
    x = net.first(x)
    for layer in net.layers:
        x = torch.where(torch.rand(()) < 0.2, x, x + layer(x).relu())
    return net.head(x)


@trained(
    "cond_and_guards",
    lambda: {"first": network(6, 8, 4), "other": network(6, 8, 4)},
    labelled,
    loss=functional.cross_entropy,
)
def cond_and_guards(net: Any, x: Tensor) -> Tensor:
    """``torch.cond`` between layers, and DETR's guard against values that are not finite."""
    made: Tensor = torch.cond(x.mean() > 0, net.first, net.other, (x,))
    if not torch.isfinite(made).all():
        made = made.clamp(-1e4, 1e4)
    return made


@trained(
    "complex_parameters",
    lambda: {
        "first": nn.Linear(6, 8, dtype=torch.complex128),
        "head": nn.Linear(8, 4, dtype=torch.complex128),
    },
    labelled,
    loss=functional.cross_entropy,
    dtype=None,
)
def complex_parameters(net: Any, x: Tensor) -> Tensor:
    """Weights that are complex numbers."""
    made = net.first(x.to(torch.complex128))
    return net.head(torch.complex(made.real.relu(), made.imag.relu())).abs()


@trained(
    "linear_recurrent_unit",
    lambda: {
        "size": nn.Parameter(torch.rand(8)),
        "angle": nn.Parameter(torch.rand(8)),
        "into": nn.Linear(5, 8),
        "head": nn.Linear(8, 4),
    },
    lambda: (numbers(6, 5), torch.randint(0, 4, (BATCH,))),
    loss=functional.cross_entropy,
)
def linear_recurrent_unit(net: Any, x: Tensor) -> Tensor:
    """A diagonal recurrence with complex numbers, step by step."""
    factor = torch.polar(torch.exp(-net.size.exp()), net.angle)
    state = torch.zeros(x.shape[0], 8, dtype=torch.complex128)
    for place in range(x.shape[1]):
        state = factor * state + net.into(x[:, place])
    return net.head(state.real)


@family("kan", tolerance=FLOAT32)
def kan() -> Workload:
    """Kolmogorov and Arnold's network: sums of bumps at every edge."""

    class Edges(nn.Module):
        def __init__(self, wide: int, out: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(0.3 * torch.randn(out, wide, 5))

        def forward(self, x: Tensor) -> Tensor:
            bumps = torch.exp(-((x[..., None] - torch.linspace(-2, 2, 5)) ** 2))
            return torch.einsum("bik,oik->bo", bumps, self.weight)

    return sgd(
        lambda: nn.Sequential(Edges(6, 8), Edges(8, 4)),
        lambda: (torch.randn(BATCH, 6), torch.randint(0, 4, (BATCH,))),
        loss=functional.cross_entropy,
    )
