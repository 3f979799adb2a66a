"""Parameter groups in captured steps: who is trained, what the state weighs, what is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.errors import CaptureError
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.graph.optimizer_probe import parameter_groups
from heterog.graph.workload import Workload

Groups = Callable[[Any], Any]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))


def workload_of(groups: Groups | None, **options: Any) -> Workload:
    batch = (torch.zeros(8, 6), torch.zeros(8, 4))
    return Workload(
        mlp, batch, functional.mse_loss, torch.optim.SGD, options, parameter_groups=groups
    )


def updated(graph: OpGraph) -> list[str]:
    return [graph.tensors[tensor].name for _, tensor, _ in graph.updates]


def test_parameters_in_no_group_are_not_trained() -> None:
    """As in torch, whose optimizer does not have them; their gradients are not even computed."""
    graph = capture(workload_of(lambda model: model[2].parameters()))
    assert updated(graph) == ["2.weight", "2.bias"]
    kinds = {each.name: each.kind for each in graph.tensors[: graph.num_inputs]}
    assert kinds["0.weight"] == TensorKind.BUFFER

    def frozen() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)  # type: ignore[index]
        return model

    like = Workload(frozen, workload_of(None).make_batch(), functional.mse_loss, torch.optim.SGD)
    assert [op.kind for op in graph.ops] == [op.kind for op in capture(like).ops]


def test_all_parameters_in_groups_make_the_graph_of_none() -> None:
    plain = capture(workload_of(None, momentum=0.9))
    groups = capture(
        workload_of(lambda m: [{"params": p, "lr": 0.1 * p.dim()} for p in m.parameters()],
                    momentum=0.9)
    )  # fmt: skip
    assert groups.fingerprint == plain.fingerprint


def test_state_weighs_what_each_group_keeps() -> None:
    """A momentum for the first layer only: 70 of 114 elements."""

    def by_layer(model: Any) -> list[dict[str, Any]]:
        return [
            {"params": model[0].parameters(), "momentum": 0.9},
            {"params": model[2].parameters(), "name": "head", "lr": torch.tensor(0.1)},
            {"params": []},
        ]

    graph = capture(workload_of(by_layer))
    assert graph.optimizer_state_ratio == pytest.approx(70 / 114)
    read = {
        graph.tensors[tensor].name: graph.ops[op].bytes_read / graph.tensors[tensor].num_bytes
        for op, tensor, _ in graph.updates
    }
    assert read == {"0.weight": 3.0, "0.bias": 3.0, "2.weight": 2.0, "2.bias": 2.0}


def test_tied_parameters_and_named_ones_have_their_first_name() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    def names(model: Any) -> list[dict[str, Any]]:
        second = model[1]
        return [
            {"params": [("again", second.weight)], "lr": 0.1},
            {"params": [("bias", second.bias)]},
        ]

    batch = (torch.zeros(8, 4), torch.zeros(8, 4))
    named = Workload(tied, batch, functional.mse_loss, torch.optim.SGD, parameter_groups=names)
    assert updated(capture(named)) == ["0.weight", "1.bias"]
    first, second = parameter_groups(named, tied())
    assert (first.names, dict(first.options)) == (("0.weight",), {"lr": 0.1})
    assert (second.names, dict(second.options)) == (("1.bias",), {})


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda _: [], "ValueError: optimizer got an empty parameter list"),
        (lambda _: 3, "TypeError: 'int' object is not iterable"),
        (lambda m: {"params": m.parameters()}, "but one of the params is str"),
        (lambda m: [{"lr": 0.1}], "KeyError: 'params'"),
        (lambda m: [{"params": set(m.parameters())}], "need to be organized in ordered"),
        (lambda m: m.nothing, "AttributeError: .* has no attribute 'nothing'"),
        (
            lambda m: [{"params": m.parameters()}, {"params": m[0].parameters()}],
            "some parameters appear in more than one parameter group",
        ),
        (lambda m: [m[0].bias, m[0].bias], "a parameter group with duplicate parameters$"),
        (lambda m: mlp().parameters(), r"group 0 .* shape \(10, 6\) that is not a parameter of"),
        (
            lambda m: [{"params": m.parameters(), "weight_deacy": 0.1}],
            "option 'weight_deacy', which SGD does not have; it has 'weight_decay'",
        ),
        (lambda m: [{"params": m.parameters(), "lr": "1"}], "cannot step with the options"),
    ],
)
def test_what_torch_refuses_is_refused_in_one_line(groups: Groups, said: str) -> None:
    with pytest.raises(CaptureError, match=said) as caught:
        capture(workload_of(groups))
    assert "\n" not in str(caught.value)


def test_groups_that_are_no_function_are_refused() -> None:
    with pytest.raises(CaptureError, match="parameter_groups is a list; give a function"):
        workload_of([{"params": []}])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", ["AdamW", torch.optim.SGD([torch.zeros(1)]), partial(torch.optim.SGD, (), lr=0.1)]
)
def test_an_optimizer_that_is_no_class_is_refused(given: Any) -> None:
    said = f"the optimizer is of type {type(given).__name__}; give a class"
    with pytest.raises(CaptureError, match=said):
        Workload(nn.Linear(2, 2), (torch.zeros(4, 2),) * 2, nn.functional.mse_loss, given)


def test_options_that_the_optimizer_does_not_take_are_refused() -> None:
    for groups in (None, lambda m: m.parameters()):
        with pytest.raises(CaptureError, match=r"cannot .* with .*options .*'rate': 0.1"):
            capture(workload_of(groups, rate=0.1))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": 7}, "name is of type int; give a text"),
        ({"source": None}, "source is of type NoneType; give a text"),
        ({"optimizer_options": [("lr", 0.1)]}, "optimizer_options is of type list; give a dict"),
        ({"batch_dims": (1, 0)}, "batch_dims is of type tuple; give a dict"),
    ],
)
def test_fields_of_other_types_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        Workload(nn.Linear(2, 2), (), None, torch.optim.SGD, **fields)
