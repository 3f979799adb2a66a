"""What is changed on a model after its step was captured matters only where the step reads it."""

from argparse import Namespace
from collections import UserDict, UserList
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from heterog.errors import CaptureError
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.repeated_calls import WatchedState
from heterog.graph.workload import Workload

SCALE = {"loss": 1.0}


@dataclass
class Settings:
    act: str = "relu"
    unread: int = 3


class Kept(nn.Module):
    """A model that reads much of what it keeps."""

    factor = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 4)
        self.temperature, self.twice, self.bias, self.size = 1.0, False, None, (2, 3)
        self.settings, self.options = Settings(), {"deep": {"weight": 2.0}}
        self.weights, self.inner, self.mask = [0.9, 0.5], SimpleNamespace(k=3.0), torch.ones(6)
        self.args, self.own, self.row = Namespace(k=1.0), UserDict(k=1.0), UserList([1.0])
        self.config = transformers.PretrainedConfig(k=1.0)
        self.calls, self.waits = 0, 0
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(6.0)
        h = self.first(x)
        h = torch.relu(h) if self.settings.act == "relu" else torch.tanh(h)
        h = h * self.mask * self.weights[0] * self.options["deep"]["weight"] + self.table
        h = h.view(-1, *self.size).flatten(1) * self.inner.k * self.factor
        h = h * self.args.k * self.own["k"] * self.row[0] * self.config.k
        h = h * 2 if self.twice or self.waits > 100 else h
        h = h if self.bias is None else h + self.bias
        made: Tensor = self.last(self.drop(h)) / self.temperature
        return made


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target) * SCALE["loss"]


BATCH = torch.randn(6, 4), torch.randn(6, 4)
WORKLOAD = Workload(Kept, BATCH, loss, torch.optim.SGD)


@cache
def graph() -> OpGraph:
    return capture(WORKLOAD)


def hook(
    parameter: Tensor, function: Callable[[Tensor], Tensor | None], kind: str = "hook"
) -> None:
    getattr(parameter, f"register_{kind}")(function)


def run(model: Any) -> None:
    model.eval()(BATCH[0])
    model.train()


REFUSED: dict[str, Callable[[Any], Any]] = {
    r"'temperature' of the model \(1.0, then 0.5\)": lambda m: setattr(m, "temperature", 0.5),
    r"'twice' of the model \(False, then True\)": lambda m: setattr(m, "twice", True),
    r"'bias' of the model": lambda m: setattr(m, "bias", 1.0),
    r"'size' of the model": lambda m: setattr(m, "size", (3, 2)),
    r"'factor' of the model": lambda m: setattr(m, "factor", 2.0),
    r"'p' of module 'drop' \(0.2, then 0.0\)": lambda m: setattr(m.drop, "p", 0.0),
    r"'act' of 'settings' of the model": lambda m: setattr(m.settings, "act", "tanh"),
    r"'options' of the model\['deep'\]\['weight'\]": lambda m: m.options["deep"].update(weight=1),
    r"'weights' of the model\[0\]": lambda m: m.weights.__setitem__(0, 0.8),
    r"'k' of 'inner' of the model": lambda m: setattr(m.inner, "k", 1.0),
    r"'k' of 'args' of the model": lambda m: setattr(m.args, "k", 2.0),  # of the command line
    r"'k' of 'config' of the model": lambda m: setattr(m.config, "k", 2.0),  # of a library
    r"'own' of the model\['k'\]": lambda m: m.own.update(k=2.0),
    r"'row' of the model\[0\]": lambda m: m.row.__setitem__(0, 2.0),
    r"'mask' of the model": lambda m: setattr(m, "mask", torch.zeros(6)),
    r"'mask' of the model$": lambda m: m.mask.mul_(0.5),
    r"'waits' of the model \(0, then 1\)": lambda m: setattr(m, "waits", 1),  # later it matters
    r"'forward' of the model": lambda m: setattr(m, "forward", lambda x: x),
    r"module 'drop' of the model": lambda m: setattr(m, "drop", nn.Identity()),
    r"module 'last' of the model": lambda m: setattr(m, "last", nn.Linear(6, 4)),
    r"global 'SCALE' of test_changed_state.py\['loss'\]": lambda m: SCALE.update(loss=0.5),
}
ALLOWED: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "as it was": lambda m: setattr(m, "temperature", 1.0),
    "not read": lambda m: setattr(m.settings, "unread", 4),
    "not read in a list": lambda m: m.weights.__setitem__(1, 0.1),
    "new": lambda m: setattr(m, "last_loss", torch.ones(3)),
    "another of the kind": lambda m: setattr(m, "drop", nn.Dropout(0.2)),
    "evaluated": run,
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_the_step_reads_is_named(text: str) -> None:
    model = Kept()
    state = WatchedState(WORKLOAD, model, graph())
    REFUSED[text](model)
    held = dict(vars(model))
    try:
        with pytest.raises(ValueError, match=text):
            raise ValueError(", ".join(each.text for each in state.changed()))
    finally:
        SCALE["loss"] = 1.0
    assert all(vars(model)[name] is value for name, value in held.items())


@pytest.mark.parametrize("name", ALLOWED)
def test_the_rest_may_change(name: str) -> None:
    model = Kept()
    state = WatchedState(WORKLOAD, model, graph())
    for _ in range(2):
        ALLOWED[name](model)
        assert state.changed() == []
    model.temperature = 2.0
    assert [each.key for each in state.changed()] == ["temperature"]


def test_weights_that_a_step_writes_are_no_state_of_python() -> None:
    """Deep LSTMs list more of them than places are tried one by one."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(4, 4, num_layers=5)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layers(x)[0]
            return made

    workload = Workload(Deep, BATCH, nn.functional.mse_loss, torch.optim.SGD)
    model = Deep()
    state = WatchedState(workload, model, capture(workload))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    assert state.changed() == []


def test_a_counter_of_the_loop_is_looked_at_once() -> None:
    made: list[None] = []

    def batch() -> tuple[Tensor, Tensor]:
        made.append(None)
        return BATCH

    model: Any = Kept()
    state = WatchedState(replace(WORKLOAD, example_batch=batch), model, graph())
    for step in range(5):
        model.loop_step, model.last_loss = step, torch.zeros(1)
        assert not state.changed()
    assert len(made) == 1


def test_hooks_of_a_captured_model_are_named() -> None:
    model = Kept()
    state = WatchedState(WORKLOAD, model, graph())
    assert state.new_hook() == ""
    handle = model.last.register_forward_hook(lambda *_: None)
    assert state.new_hook() == "forward hook of module 'last'"
    handle.remove()
    assert state.new_hook() == ""
    hook(model.first.weight, lambda gradient: gradient * 0)
    assert state.new_hook() == "hook of the gradient of 'first.weight'"


def hooked() -> nn.Module:
    model = nn.Linear(4, 4)
    hook(model.weight, lambda weight: None, "post_accumulate_grad_hook")
    return model


def test_hooks_that_no_plan_calls_are_refused_at_capture() -> None:
    workload = Workload(hooked, BATCH, nn.functional.mse_loss, torch.optim.SGD)
    with pytest.raises(CaptureError, match=r"'weight' has a hook that runs after its gradient"):
        capture(workload)


@pytest.mark.parametrize("in_memory", [False, True])
def test_hooks_of_gradients_are_a_part_of_the_step(in_memory: bool) -> None:
    def clamped() -> nn.Module:
        model, factor = nn.Linear(4, 4), torch.ones(4)
        hook(model.weight, lambda gradient: gradient.clamp(-0.125, 0.125))
        if in_memory:  # so that the values of this tensor are known
            model.register_forward_hook(lambda module, inputs, output: output * factor)
        return model

    made = capture(Workload(clamped, BATCH, nn.functional.mse_loss, torch.optim.SGD))
    assert [op.kind for op in made.ops].count("clamp.default") == 1
