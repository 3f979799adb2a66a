"""Rows that a mask chooses have in a captured step the losses and gradients that torch gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from heterog.errors import CaptureError
from heterog.graph.batch_plan import batch_plan
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.placement import S
from heterog.graph.workload import Workload

ROWS, CLASSES = 6, 3
Use = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def written(out: Tensor, wanted: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """As a prompt encoder writes embeddings of points by their labels."""
    made = out * 1.0
    made[mask] += labels[:1, None] + labels[1]
    made[~mask] = 0.0
    made[mask] = made[mask] * 2
    return made.pow(3).sum()


USES: dict[str, Use] = {
    "labels": lambda out, wanted, labels, mask: functional.cross_entropy(
        out[mask], labels[mask], torch.tensor([1.0, 2.0, 3.0]).double(), label_smoothing=0.1
    ),
    "each label": lambda out, wanted, labels, mask: (
        (functional.cross_entropy(out[mask], labels[mask], reduction="none") / 2).sum()
        * (out[mask].argmax(-1) == labels[mask]).double().mean()
    ),
    "missing targets": lambda out, wanted, labels, mask: functional.mse_loss(
        out[~torch.isnan(wanted)], wanted[~torch.isnan(wanted)]
    ),
    "steep functions": lambda out, wanted, labels, mask: (
        (out[mask] - out[mask] * (1 + labels[:, None][mask])).abs().log().mean()
        + (out[mask] ** 2).sum(-1).sqrt().mean()
        + (1 - 1 / out[mask]).norm(dim=-1).sum()
    ),
    "functions of a row": lambda out, wanted, labels, mask: (
        functional.linear(out[mask], torch.ones(2, CLASSES).double())[:, 1].tanh().mean()
        + out[mask].log_softmax(-1).gather(1, labels[:, None][mask]).mean()
        - functional.cosine_similarity(out[mask], 2.0 - out[mask]).sum()
    ),
    "columns": lambda out, wanted, labels, mask: (
        (out[labels == 0].mean(0) - out[mask].sum(0)).nan_to_num(1.0).square().sum()
        + torch.masked_select(out, mask[:, None]).pow(3).mean()
    ),
    "written": written,
}


def own_gradient(out: Tensor, wanted: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = Own.apply(out[mask])  # type: ignore[no-untyped-call]
    return found.sum()


COUNTS: dict[str, Use] = {
    "an own gradient": own_gradient,
    "length": lambda out, wanted, labels, mask: out[mask].sum() / len(out[mask]),
    "shape": lambda out, wanted, labels, mask: out[mask].sum() / out[mask].shape[0],
    "order": lambda out, wanted, labels, mask: out[mask].sort(0)[0][0].sum(),
    "sums of columns": lambda out, wanted, labels, mask: out[mask].softmax(0)[:, 0].sum(),
    "other rows": lambda out, wanted, labels, mask: (out[mask] - wanted).sum(),
    "divided in place": lambda out, wanted, labels, mask: out[mask].div_(2).sum(),
    "a mean over weights": lambda out, wanted, labels, mask: functional.mse_loss(
        out[mask], wanted[mask], weight=wanted[mask].abs()
    ),
    "pairs": lambda out, wanted, labels, mask: functional.mse_loss(
        out[:, :1][mask], wanted[:, 0][mask]
    ),
}


class Own(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Using(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, CLASSES).double()
        self.use = use

    def forward(self, x: Tensor, wanted: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return self.use(self.layer(x), wanted, labels, mask)


def batch(*chosen: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[list(chosen)] = True
    wanted = torch.where(torch.rand(ROWS, CLASSES) < 0.3, torch.nan, 1.0).double()
    x = torch.where(mask[:, None], torch.randn(ROWS, 4).double(), 0.0)
    return x, wanted, torch.randint(0, CLASSES, (ROWS,)), mask


def captured(use: Use) -> CapturedStep:
    workload = Workload(
        lambda: Using(use), batch(0), None, torch.optim.SGD, {"lr": 0.1}, name="masked"
    )
    return capture_step(workload)


@pytest.mark.parametrize("kind", USES)
def test_a_captured_step_uses_the_rows_that_torch_chooses(kind: str) -> None:
    step, model = captured(USES[kind]), Using(USES[kind])
    for chosen in ((2, 5), (0, 1, 3, 4)):
        values = batch(*chosen)
        model.zero_grad()
        loss = model(*values)
        torch.autograd.backward(loss)
        found = pytree.tree_leaves(step.module(*model.parameters(), *values))
        wanted = [loss.detach(), *(each.grad for each in model.parameters())]
        for value, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(value, expected, equal_nan=True)


def test_samples_stay_where_they_are() -> None:
    graph = captured(USES["missing targets"]).graph
    plan = batch_plan(graph)
    places = [plan.placements[each] for op in range(graph.num_ops) for each in graph.outputs[op]]
    wide = [shape for shape in places if shape == S(0)]
    assert len(wide) > 8


def test_masks_that_choose_other_rows_fail_in_the_step() -> None:
    def other(out: Tensor, wanted: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return functional.l1_loss(out[mask], out[labels > 0])

    step, model = captured(other), Using(other)
    x, wanted, _, mask = batch(1, 2)
    step.module(*model.parameters(), x, wanted, mask.long(), mask)
    with pytest.raises(RuntimeError, match="two masks choose other rows"):
        step.module(*model.parameters(), x, wanted, 1 - mask.long(), mask)


@pytest.mark.parametrize("kind", COUNTS)
def test_code_that_needs_their_number_is_refused(kind: str) -> None:
    with pytest.raises(CaptureError, match="depends on tensor values"):
        captured(COUNTS[kind])
