"""A step whose dtypes plain PyTorch refuses is refused when it is captured, and no other."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.errors import CaptureError
from heterog.graph.capture import capture
from heterog.graph.workload import Workload

BATCH = 6
INT32, INT64, UINT8 = torch.int32, torch.int64, torch.uint8
FLOAT64, FLOAT32, BFLOAT16 = torch.float64, torch.float32, torch.bfloat16


class Net(nn.Module):
    """A layer, and a loss of its output and a target."""

    def __init__(self, layer: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self._loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self._loss(self.layer(x), target)


class Gathered(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).gather(1, (x > 0).to(INT32)).sum(1)


class Written(nn.Linear):
    """Writes what has another dtype into rows of its output."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x).clone()
        out[torch.arange(2)] = x[:2].double()
        return out


class Searched(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        edges = torch.linspace(-1, 1, 4, dtype=FLOAT64)
        out: Tensor = super().forward(x) * torch.searchsorted(edges, x.detach())
        return out


def squared(out: Any, target: Tensor) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return (found.float() - target.float().mean()).square().mean()


def labels(dtype: torch.dtype) -> Tensor:
    return (torch.arange(BATCH) % 3).to(dtype)


def numbers(*shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.randn(BATCH, *shape).to(dtype)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


Case = tuple[Callable[[], nn.Module], Callable[..., Tensor], Tensor, Tensor]

CASES: dict[str, Case] = {
    **{
        f"{loss.__name__} of {dtype}": (linear, loss, numbers(4), labels(dtype))
        for loss in (functional.cross_entropy, functional.multi_margin_loss)
        for dtype in (INT64, INT32, torch.int16, UINT8, torch.bool, FLOAT32)
    },
    "probabilities in double": (
        *(linear, functional.cross_entropy, numbers(4)),
        numbers(4, dtype=FLOAT64).softmax(1),
    ),
    **{
        f"{loss.__name__} with targets of {dtype}": (
            *(linear, loss, numbers(4)),
            numbers(4).sigmoid().to(dtype),
        )
        for loss in (
            functional.mse_loss,
            functional.l1_loss,
            functional.smooth_l1_loss,
            functional.binary_cross_entropy_with_logits,
            functional.soft_margin_loss,
            functional.kl_div,
        )
        for dtype in (FLOAT64, BFLOAT16, INT64)
    },
    **{
        f"{type(layer).__name__} of {dtype}": (
            partial(deepcopy, layer),
            squared,
            x.to(dtype),
            numbers(),
        )
        for layer, x in (
            (nn.Linear(4, 4), numbers(4)),
            (nn.Conv1d(4, 4, 2), numbers(4, 5)),
            (nn.Conv2d(4, 8, 2, groups=4), numbers(4, 5, 5)),
            (nn.ConvTranspose1d(4, 4, 2), numbers(4, 5)),
            (nn.LayerNorm(4), numbers(4)),
            (nn.RMSNorm(4), numbers(4)),
            (nn.GroupNorm(2, 4), numbers(4, 5)),
            (nn.BatchNorm1d(4), numbers(4)),
            (nn.InstanceNorm1d(4, affine=True), numbers(4, 5)),
            (nn.PReLU(4), numbers(4)),
            (nn.GRU(4, 4), numbers(3, 4)),
            (nn.LSTM(4, 4, batch_first=True), numbers(3, 4)),
            (nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), numbers(3, 4)),
            (Written(4, 4), numbers(4)),
            (Searched(4, 4), numbers(4)),
        )
        for dtype in (FLOAT64, BFLOAT16, INT64)
    },
    **{
        f"Embedding of {dtype}": (lambda: nn.Embedding(8, 4), squared, labels(dtype), numbers())
        for dtype in (INT64, INT32, torch.int16, UINT8, FLOAT32)
    },
    **{
        f"EmbeddingBag of {dtype}": (
            *(lambda: nn.EmbeddingBag(8, 4), squared),
            *(labels(dtype)[:, None].repeat(1, 2), numbers()),
        )
        for dtype in (INT64, INT32, torch.int16)
    },
    "gather by int32": (lambda: Gathered(4, 4), squared, numbers(4), numbers()),
}


STRICTER = ("cross_entropy of torch.uint8",)
"""Refused by fake tensors, which make this loss of other ops."""


@pytest.mark.parametrize("name", CASES)
def test_capture_refuses_the_dtypes_that_a_step_of_plain_torch_refuses(name: str) -> None:
    make, loss, x, target = CASES[name]
    refusal = ""
    try:
        torch.autograd.backward(Net(make(), loss)(x, target))
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError) as error:
        refusal = str(error).splitlines()[0]
    workload = Workload(lambda: Net(make(), loss), (x, target), None, torch.optim.SGD, {"lr": 0.1})
    if not refusal and name not in STRICTER:
        capture(workload)
        return
    with pytest.raises(CaptureError) as caught:
        capture(workload)
    assert "\n" not in str(caught.value)


def test_no_large_result_is_made_for_a_try() -> None:
    def loss(made: Tensor, target: Tensor) -> Tensor:
        return made.new_zeros(1 << 19, 1 << 19, dtype=INT64)[0, 0] + (made - target).sum()

    batch = torch.zeros(4, 3), torch.zeros(4, 2)
    made = Workload(lambda: Net(nn.Linear(3, 2), loss), batch, None, torch.optim.SGD, {"lr": 0.1})
    assert capture(made).ops
