"""What optimizers look at is found out by stepping them, whatever they are called."""

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from heterog.errors import HeterogWarning
from heterog.graph.capture import capture
from heterog.graph.op_graph import ELEMENTWISE_OPTIMIZERS, UpdateScope
from heterog.graph.optimizer_probe import Kind, ProbedGroup, probed_scope, update_scope
from heterog.graph.serialize import graph_from_dict, graph_to_dict
from heterog.graph.workload import Workload
from tests.own_optimizers import LOOKS, AdamW, Lookahead, Own, scope_of
from tests.thorough import cases

MIXED = [ProbedGroup({}, (Kind(2), Kind(1), Kind(4)))]


@pytest.mark.parametrize("name", sorted(ELEMENTWISE_OPTIMIZERS))
def test_torchs_elementwise_optimizers_are_seen_to_be_so(name: str) -> None:
    optimizer = getattr(torch.optim, name)
    assert probed_scope(optimizer, {"lr": 1e-2}, MIXED) == UpdateScope.ELEMENT


@pytest.mark.parametrize(
    ("optimizer", "options", "kinds", "scope"),
    [
        (torch.optim.SGD, {"lr": 0.0, "momentum": 0.9}, (Kind(2), Kind(0)), UpdateScope.ELEMENT),
        (torch.optim.Adam, {"fused": True}, (Kind(1), Kind(3)), UpdateScope.ELEMENT),
        (torch.optim.AdamW, {"capturable": True}, (Kind(1),), UpdateScope.ELEMENT),
        (torch.optim.Adam, {}, (Kind(2, is_complex=True),), UpdateScope.ELEMENT),
        (torch.optim.Muon, {}, (Kind(2),), UpdateScope.PARAMETER),
        (torch.optim.Adafactor, {}, (Kind(2), Kind(1)), UpdateScope.PARAMETER),
        (torch.optim.Adafactor, {}, (Kind(1),), UpdateScope.PARAMETER),
        (AdamW, {}, (Kind(2), Kind(1)), UpdateScope.PARAMETER),
        (Lookahead, {}, (Kind(2), Kind(1)), UpdateScope.PARAMETER),
    ],
)
def test_known_optimizers(
    optimizer: type[torch.optim.Optimizer],
    options: dict[str, Any],
    kinds: tuple[Kind, ...],
    scope: UpdateScope,
) -> None:
    assert probed_scope(optimizer, options, [ProbedGroup({}, kinds)]) == scope


class Late(torch.optim.Optimizer):
    """Divides by the norm of a gradient, or of all, after many steps (as Shampoo begins late)."""

    def __init__(self, params: Any, where: str = "state", of_all: bool = False) -> None:
        super().__init__(params, {"lr": 0.01, "k": 0, "where": where, "of_all": of_all})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            stepped = [each for each in group["params"] if each.grad is not None]
            for parameter in stepped:
                state = self.state[parameter]
                state["step"] = state.get("step", torch.zeros(())) + 1
                number = group["k"] if group["where"] == "group" else int(state["step"])
                looked_at = stepped if group["of_all"] else [parameter]
                norm = torch.stack([each.grad.norm() for each in looked_at]).norm()
                scaled = parameter.grad / (norm if number > 500 else 1.0)
                parameter.sub_(scaled, alpha=group["lr"])


@pytest.mark.parametrize("where", ["state", "group"])
def test_what_an_optimizer_looks_at_later_counts(where: str) -> None:
    groups = [ProbedGroup({}, (Kind(2), Kind(1)))]
    assert probed_scope(Late, {"where": where}, groups) == UpdateScope.PARAMETER
    every = {"where": where, "of_all": True}
    assert probed_scope(Late, every, groups) == UpdateScope.MODEL


@settings(max_examples=cases(300, 12), deadline=None)
@given(
    looks=st.lists(st.sampled_from(sorted(LOOKS)), max_size=4, unique=True),
    rate=st.sampled_from([1e-4, 0.01, 1.0]),
    groups=st.integers(1, 3),
)
def test_own_optimizers(looks: list[str], rate: float, groups: int) -> None:
    # What another makes of gradients may not reach the limit, or the distance, that these need.
    looks = next(([each] for each in ("clip of all", "estimated step") if each in looks), looks)
    looks.sort(key=lambda look: list(UpdateScope).index(LOOKS[look]))  # a norm undoes one before
    made = [ProbedGroup({"lr": rate * (1 + n)}, (Kind(3), Kind(1))) for n in range(groups)]
    assert probed_scope(Own, {"lr": rate, "looks": looks}, made) == scope_of(looks)


def test_the_programs_random_numbers_stay() -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for value in group["params"]:
                    if value.grad is not None:
                        size = random.random() + np.random.rand()  # noqa: NPY002
                        value.data.add_(torch.randn_like(value), alpha=size)
            super().step(closure)

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    before, also = torch.get_rng_state(), random.getstate()
    third = np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002
    assert update_scope(Noisy, {}, MIXED) == UpdateScope.MODEL
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == also
    assert np.random.get_state(legacy=False)["state"]["pos"] == third  # noqa: NPY002


def test_one_that_cannot_be_stepped_is_said_to_look_at_everything() -> None:
    class Picky(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.param_groups[0]["params"][0].shape != (64, 64):
                raise RuntimeError("only my own model")

    with pytest.warns(
        HeterogWarning, match=r"Picky .* \(RuntimeError: only my own model\): plans"
    ):
        assert update_scope(Picky, {}, MIXED) == UpdateScope.MODEL


def test_one_that_moves_nothing_is_not_believed() -> None:
    class Still(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    with pytest.warns(HeterogWarning, match="moves nothing"):
        assert update_scope(Still, {}, MIXED) == UpdateScope.MODEL


def test_one_that_takes_minutes_for_small_tensors_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Endless(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            while True:
                torch.eye(130, device="cpu") @ torch.eye(130, device="cpu")

    monkeypatch.setattr("heterog.graph.optimizer_probe._MOST_WORK", 3e7)
    with pytest.warns(HeterogWarning, match="cannot step small tensors .* more than 3e.07"):
        assert update_scope(Endless, {}, MIXED) == UpdateScope.MODEL


def workload_of(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> Workload:
    return Workload(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)),
        lambda: (torch.randn(4, 3), torch.randn(4, 2)),
        nn.functional.mse_loss,
        optimizer,
        options,
    )


def test_graphs_keep_what_was_seen() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = capture(workload_of(AdamW, {"looks": ("norm of all",)}))
    assert (graph.optimizer, graph.scope) == ("AdamW", UpdateScope.MODEL)
    record = graph_to_dict(graph)
    assert graph_from_dict(record, "it").scope == UpdateScope.MODEL
    # Older files, and those of other tools, go by the name.
    del record["update_scope"]
    assert graph_from_dict(record, "it").scope == UpdateScope.ELEMENT
    record["optimizer"] = "Prodigy"
    assert graph_from_dict(record, "it").scope == UpdateScope.PARAMETER


def test_options_decide() -> None:
    assert capture(workload_of(Own, {"looks": ("sign",)})).scope == UpdateScope.ELEMENT
    assert capture(workload_of(Own, {"looks": ("rows",)})).scope == UpdateScope.PARAMETER


def test_notes_of_parameters_need_whole_parameters() -> None:
    """Slices of ZeRO have no attributes, so ``p.rate = 3.0`` would be lost without a word."""

    class Noting(Own):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for value in group["params"]:
                    if value.grad is not None:
                        value.grad.mul_(getattr(value, "rate", 1.0))
            super().step(closure)

    def noted() -> nn.Module:
        model = nn.Linear(3, 2)
        vars(model.bias)["rate"] = 3.0
        return model

    def scope(optimizer: type[torch.optim.Optimizer], model: Callable[[], nn.Module]) -> str:
        workload = replace(workload_of(optimizer, {}), model=model)
        return capture(workload).scope

    assert scope(Noting, noted) == UpdateScope.PARAMETER
    assert scope(Noting, lambda: nn.Linear(3, 2)) == scope(Own, noted) == UpdateScope.ELEMENT
    assert scope(torch.optim.Adam, noted) == UpdateScope.ELEMENT


def test_a_partial_optimizer_is_its_class_with_options() -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    batch = torch.zeros(4, 3), torch.zeros(4, 2)
    made = [
        Workload(nn.Linear(3, 2), batch, nn.functional.mse_loss, *optimizer)
        for optimizer in (
            (partial(torch.optim.SGD, lr=1.0, momentum=0.9), {"lr": 0.1}),
            (torch.optim.SGD, options),
        )
    ]
    assert (made[0].optimizer, made[0].optimizer_options) == (torch.optim.SGD, options)
    assert capture(made[0]).fingerprint == capture(made[1]).fingerprint
