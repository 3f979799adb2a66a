"""Models that keep state in Python between steps, control flow, schedules, guards."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from families.family import BATCH, FLOAT32, Batch, family, sgd, trained
from families.training import network, numbers
from heterog.graph.workload import Workload


class Penalised(nn.Module):
    """A penalty whose weight grows for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(6, 8, 4)

    def with_weight(self, x: Tensor, labels: Tensor, weight: Tensor | float) -> Tensor:
        made = self.network(x)
        return functional.cross_entropy(made, labels) + weight * made.square().mean()


def labelled() -> tuple[Tensor, Tensor]:
    """Features and labels."""
    return numbers(6), torch.randint(0, 4, (BATCH,))


class Counting(Penalised):
    """Counts its steps in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.steps += 1
        return self.with_weight(x, labels, min(1.0, self.steps / 5))


@family("counter_in_python", refused="'steps' of the model (0, then 1) decides that")
def counter_in_python() -> Workload:
    """Refused: the next two are what the message advises."""
    return sgd(lambda: Counting().double(), labelled)


@family("schedule_as_input")
def schedule_as_input() -> Workload:
    """The same penalty by a tensor of the batch."""

    class Scheduled(Penalised):
        def forward(self, x: Tensor, step: Tensor, labels: Tensor) -> Tensor:
            return self.with_weight(x, labels, torch.clamp(step / 5, max=1.0))

    def batch() -> Batch:
        x, labels = labelled()
        return x, torch.randint(1, 6, ()), labels

    return sgd(lambda: Scheduled().double(), batch)


@family("schedule_in_buffer")
def schedule_in_buffer() -> Workload:
    """The same penalty by a buffer that counts."""

    class Buffered(Penalised):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            self.steps += 1
            return self.with_weight(x, labels, torch.clamp(self.steps / 5, max=1.0))

    return sgd(lambda: Buffered().double(), labelled)


class Dropped(nn.Module):
    """Four layers, some of which are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


@family("layer_drop_in_python", refused="the state of Python's random decides that")
def layer_drop_in_python() -> Workload:
    """Refused: the next two are what the message advises."""

    class Drawn(Dropped):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                if random.random() > 0.2:
                    x = x + layer(x).relu()
            return self.head(x)

    return sgd(lambda: Drawn().double(), labelled, loss=functional.cross_entropy)


@family("layer_drop_as_input")
def layer_drop_as_input() -> Workload:
    """What to keep is drawn with the batch."""

    class Given(Dropped):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            x = self.first(x)
            for place, layer in enumerate(self.layers):
                x = x + keep[place] * layer(x).relu()
            return self.head(x)

    def batch() -> Batch:
        x, labels = labelled()
        return x, torch.rand(4).gt(0.2).double(), labels

    return sgd(lambda: Given().double(), batch, loss=functional.cross_entropy)


@family("layer_drop_by_torch", is_random=True)
def layer_drop_by_torch() -> Workload:
    """Drawn in the step."""

    class Drawn(Dropped):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = torch.where(torch.rand(()) < 0.2, x, x + layer(x).relu())
            return self.head(x)

    return sgd(lambda: Drawn().double(), labelled, loss=functional.cross_entropy)


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
