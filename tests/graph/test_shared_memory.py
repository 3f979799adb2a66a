"""A step reads only memory that no other tensor of it changes, and batches only of tensors."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heterog.errors import CaptureError, HeterogWarning, StrategyError
from heterog.graph.capture import capture, capture_step
from heterog.graph.workload import Workload
from heterog.runtime.step.deploy_checks import check_plain_entries


class Model(nn.Module):
    """Two layers, and something else that is read."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("moved", torch.zeros(2, 2))
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        self.moved.add_(1)  # type: ignore[operator]
        made: Tensor = self.last(torch.relu(self.first(x))) + self.read().sum()
        return made

    def read(self) -> Tensor:
        return self.other  # type: ignore[return-value]


def set_attribute(value: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    return lambda model: setattr(model, "other", value(model))


def set_buffer(value: Callable[[Any], Tensor]) -> Callable[[Any], None]:
    return lambda model: model.register_buffer("other", value(model))


def tie_memory(model: Any) -> None:
    model.other = nn.Parameter(torch.zeros(4, 4))
    model.other.data = model.first.weight.data


def set_halves(model: Any) -> None:
    whole = torch.ones(8, 4)
    model.first.weight, model.other = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "attribute": (
        set_attribute(lambda model: model.first.weight.data),
        "a tensor of (4, 4) in an attribute shares memory with 'first.weight', which the step",
    ),
    "buffer": (
        set_buffer(lambda model: model.first.weight.detach()[1]),
        "'other' shares memory with 'first.weight', which the step changes",
    ),
    "written buffer": (
        set_buffer(lambda model: model.moved[0]),
        "'other' shares memory with 'moved', which the step changes",
    ),
    "parameter": (tie_memory, "'first.weight' shares memory with 'other', which the step changes"),
}

TAKEN: dict[str, Callable[[Any], None]] = {
    "a copy": set_attribute(lambda model: model.first.weight.detach().clone()),
    "the same parameter": set_attribute(lambda model: model.first.weight),
    "two halves of one tensor": set_halves,
    "no view of what is changed": set_buffer(lambda model: torch.ones(3).expand(2, 3)),
}


def workload(model: Any, *entries: Any) -> Workload:
    batch = (torch.zeros(6, 4), *entries, torch.zeros(6, 2))
    return Workload(model, batch, nn.functional.mse_loss, torch.optim.SGD)


@pytest.mark.parametrize("what", REFUSED)
def test_memory_that_changes_under_another_name_is_refused(what: str) -> None:
    change, text = REFUSED[what]
    with pytest.raises(CaptureError, match=re.escape(text)):
        capture(workload(lambda: Model(change)))


@pytest.mark.parametrize("what", TAKEN)
def test_other_memory_is_taken(what: str) -> None:
    capture(workload(lambda: Model(TAKEN[what])))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        made: Tensor = self.layer(x) * options["scale"]
        return made


def test_numbers_of_a_batch_are_constants_of_its_step() -> None:
    """A step that was captured with a number refuses another one."""
    made = workload(Scaled, {"scale": 0.5, "name": None})
    captured = capture_step(made)
    check_plain_entries(captured, made.make_batch())
    for entry in ({"scale": 0.7, "name": None}, {"scale": 0.5, "name": "b"}):
        text = r"entry \[1\]\['(scale|name)'\] of the batch is .*captured with (0.5|None) and goes"
        with pytest.raises(StrategyError, match=text):
            check_plain_entries(captured, workload(Scaled, entry).make_batch())


def test_arrays_in_a_batch_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"\[1\]\['scale'\] of the batch is a ndarray of numpy"):
        capture(workload(Scaled, {"scale": np.ones(2)}))


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x.mul_(2)) + x[:, :2]
        return made


def test_a_batch_is_left_as_it_is() -> None:
    """The step reads what it has written, and writes nothing to the user's tensor."""
    with pytest.warns(HeterogWarning, match=r"writes to a tensor of its batch.*x = x.clone\(\)"):
        graph = capture(workload(Scaling))
    assert not any(op.is_write for op in graph.ops)
    (scaling,) = (number for number, op in enumerate(graph.ops) if op.kind == "mul.Tensor")
    (scaled,) = graph.outputs[scaling]
    assert sum(scaled in op.inputs for op in graph.ops) > 1
