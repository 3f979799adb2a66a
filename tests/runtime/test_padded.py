"""A mask of pairs of positions on every stage, and attention whose scores are made again."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import Program, TaskKind
from heterog.modes.stash.value import WeightStash
from heterog.runtime.deploy import deploy
from heterog.search.plan import load_plan
from heterog.strategy.layouts.layout import parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.strategy import REPLICATED, Decision, Strategy
from tests.runtime.cases import captured_once
from tests.runtime.grids import grid_cluster
from tests.runtime.padded import padded_batch, padded_workload
from tests.runtime.ranks import PARENT, Ranks
from tests.simulator.builders import plan_by_hand
from tests.thorough import THOROUGH

SAMPLES, STEPS = 8, 2
LONG, SHORT = 160, 12
"""Positions for which a mask of two samples is large enough to be made on each stage, or not."""


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]


def workload(length: int) -> Workload:
    return padded_workload(SAMPLES, length, dropout=0.3 if length == SHORT else 0.0)


@cache
def graph_of(length: int) -> OpGraph:
    return PARENT.capture(f"padded {length}", workload, length)


def trained(rank: int, path: str, length: int) -> Trained:
    with captured_once(f"padded {length}"):
        step = deploy(workload(length), load_plan(path), seed=3)
    losses = [float(step(padded_batch(SAMPLES, length, number))) for number in range(STEPS)]
    return Trained(losses, step.state_dict() or {})


@cache
def trained_alone() -> Trained:
    """The same steps on one device, by torch alone."""
    model = workload(LONG).make_model()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(STEPS):
        loss = model(**padded_batch(SAMPLES, LONG, number))
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return Trained(losses, model.state_dict())


def planned(folder: Path, text: str, length: int) -> tuple[str, Program]:
    graph, cluster = graph_of(length), grid_cluster(4)
    strategy = place_layout(parse_layout(text), graph, cluster).strategy
    path = folder / f"{text}.json"
    plan_by_hand(graph, cluster, strategy).save(path)
    return str(path), lower(graph, cluster, strategy)


def count(program: Program, kind: TaskKind) -> int:
    return int((program.kind == kind).sum())


@pytest.mark.distributed
@pytest.mark.parametrize(
    "text",
    [
        "pp=2,micro_batch=2",
        "tp=2,pp=2,micro_batch=4,recompute=selective",
        "pp=2,micro_batch=2,recompute=op,zero=3",
        pytest.param("pp=2,micro_batch=2,recompute=selective", marks=THOROUGH),
        pytest.param("pp=2,micro_batch=4,recompute=full", marks=THOROUGH),
    ],
)
def test_stages_make_their_masks(four_ranks: Ranks, tmp_path: Path, text: str) -> None:
    path, program = planned(tmp_path, text, LONG)
    assert count(program, TaskKind.REMAKE)
    assert bool(count(program, TaskKind.RECOMPUTE)) == ("recompute" in text)
    alone = trained_alone()
    for found in four_ranks.run(trained, path, LONG):
        assert found.losses == pytest.approx(alone.losses, rel=1e-12)
        for name, weight in found.weights.items():
            torch.testing.assert_close(weight, alone.weights[name], rtol=1e-9, atol=1e-12)


@pytest.mark.distributed
def test_dropout_of_what_is_made_again_is_the_same(four_ranks: Ranks, tmp_path: Path) -> None:
    once, *others = (
        four_ranks.run(
            trained, planned(tmp_path, f"pp=2,micro_batch=2,{manner}", SHORT)[0], SHORT
        )[0]
        for manner in ("recompute=none", "recompute=selective", "recompute=op")
    )
    for again in others:
        assert again.losses == once.losses
        for name, weight in again.weights.items():
            torch.testing.assert_close(weight, once.weights[name], rtol=0.0, atol=0.0)


def stashed(rank: int, path: str) -> Trained:
    with captured_once(f"padded {LONG}"):
        step = deploy(workload(LONG), load_plan(path))
    for number in range(STEPS):
        step(padded_batch(SAMPLES, LONG, number))
    step.settle()
    return Trained(step.take_late_losses(), step.state_dict() or {})


def stashed_alone(is_first: Callable[[str], bool]) -> dict[str, Tensor]:
    """Two steps on one device, where the first stage makes both gradients of its first weights."""
    model = workload(LONG).make_model()
    named = dict(model.named_parameters())
    begin = {name: value.detach().clone() for name, value in named.items() if is_first(name)}
    for number in range(STEPS):
        now = {name: named[name].detach().clone() for name in begin}
        for name, value in begin.items():
            named[name].data = value.clone()
        model.zero_grad()
        torch.autograd.backward(model(**padded_batch(SAMPLES, LONG, number)))
        with torch.no_grad():
            for name, value in named.items():
                assert value.grad is not None
                value.data = now.get(name, value.data) - 0.1 * value.grad
    return model.state_dict()


@pytest.mark.distributed
def test_stages_that_do_not_wait_make_their_masks(four_ranks: Ranks, tmp_path: Path) -> None:
    """What is made again belongs to the forward pass, each micro-batch's to its own."""
    graph = graph_of(LONG)
    names = group_ops(graph).names
    cut = names.index("layers.0.wide")
    stages = [
        Decision(devices=(int(group >= cut),), shares=(SAMPLES,)) for group in range(len(names))
    ]
    cluster = grid_cluster(4)  # whose ranks have captured the model
    exact = Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=tuple(stages),
        homes=(REPLICATED,) * len(graph.updates),
        micro_batches=((4, 4), (0, 0), (0, 0), (0, 0)),
    )
    strategy = exact.with_mode(WeightStash(boundary_steps=1))
    program = lower(graph, cluster, strategy)
    assert count(program, TaskKind.REMAKE)
    path = tmp_path / "plan.json"
    plan_by_hand(graph, cluster, strategy).save(path)
    found = four_ranks.run(stashed, str(path))[0]
    group = group_ops(graph).group
    first = {
        graph.tensors[parameter].name for op, parameter, _ in graph.updates if int(group[op]) < cut
    }
    for name, weight in stashed_alone(first.__contains__).items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-9, atol=1e-12)
