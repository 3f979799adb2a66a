"""Recomputation on real ranks: the numbers of one device, in less memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.lowering.tables import graph_tables
from heterog.runtime.deploy import deploy
from heterog.runtime.measure.op_profiler import peak_bytes
from heterog.search.plan import load_plan
from heterog.strategy.strategy import Decision, Strategy
from tests.runtime.cases import (
    MODELS,
    NORMALISED,
    SGD,
    assert_same,
    batch_of,
    captured_once,
    reference,
    reference_with_local_statistics,
    train,
)
from tests.runtime.ranks import PARENT, Ranks
from tests.runtime.strategies import ALL, SYNCS, cluster, graph_of, homes_of, plan_of, strategy_of
from tests.runtime.test_random_ops import gpt
from tests.thorough import one_in

UNEVEN = Decision(devices=ALL, shares=(5, 2, 1), recompute=True)


def recomputes(graph: OpGraph, strategy: Strategy) -> bool:
    program = lower(graph, cluster(), strategy, num_steps=1)
    return bool((program.kind == TaskKind.RECOMPUTE).any())


def saved(folder: Path, graph: OpGraph, strategy: Strategy) -> str:
    path = folder / "plan.json"
    plan_of(graph, strategy).save(path)
    return str(path)


@one_in(3)
@pytest.mark.distributed
@pytest.mark.parametrize("step_barrier", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_every_group_recomputes(
    ranks: Ranks, tmp_path: Path, name: str, step_barrier: bool
) -> None:
    """In uneven micro-batches; a device sits one out."""
    graph = graph_of(name)
    strategy = strategy_of(
        graph,
        [UNEVEN] * group_ops(graph).num_groups,
        micro_batches=((3, 2), (0, 2), (1, 0)),
        bucket_bytes=600,
        step_barrier=step_barrier,
    )
    assert recomputes(graph, strategy)
    results = ranks.run(train, name, SGD, saved(tmp_path, graph, strategy))
    assert_same(results, reference(name))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mlp", "residual", "gpt"])
def test_blocks_of_groups_recompute_together(ranks: Ranks, tmp_path: Path, name: str) -> None:
    graph = graph_of(name)
    num_groups = group_ops(graph).num_groups
    apart = strategy_of(
        graph, [UNEVEN] * num_groups, micro_batches=((3, 2), (0, 2), (1, 0)), bucket_bytes=600
    )
    together = replace(apart, blocks=tuple(range(0, num_groups, 3)))
    again = [
        (lower(graph, cluster(), each).kind == TaskKind.RECOMPUTE).sum()
        for each in (apart, together)
    ]
    assert again[0] < again[1], "what groups of a block read of each other is made again as well"
    results = ranks.run(train, name, SGD, saved(tmp_path, graph, together))
    assert_same(results, reference(name))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_some_groups_on_devices_of_their_own(ranks: Ranks, tmp_path: Path, name: str) -> None:
    graph = graph_of(name)
    alone = Decision(devices=(2,), shares=(8,))
    decisions = [
        (UNEVEN, alone, replace(alone, recompute=True), SYNCS["ring"])[index % 4]
        for index in range(group_ops(graph).num_groups)
    ]
    strategy = strategy_of(graph, decisions, step_barrier=False)
    assert recomputes(graph, strategy)
    results = ranks.run(train, name, SGD, saved(tmp_path, graph, strategy))
    assert_same(results, reference(name))


@pytest.mark.distributed
def test_with_parameter_servers(ranks: Ranks, tmp_path: Path) -> None:
    graph = graph_of("residual")
    decision = replace(SYNCS["server"], recompute=True)
    strategy = strategy_of(
        graph, [decision] * group_ops(graph).num_groups, homes=homes_of(graph, "server")
    )
    results = ranks.run(train, "residual", SGD, saved(tmp_path, graph, strategy))
    assert_same(results, reference("residual"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", NORMALISED)
def test_batch_norm_counts_each_batch_once(ranks: Ranks, tmp_path: Path, name: str) -> None:
    graph = graph_of(name)
    strategy = strategy_of(graph, [UNEVEN] * group_ops(graph).num_groups)
    again = graph_ops_that_run_again(graph, strategy)
    assert any("batch_norm" in kind for kind in again)
    results = ranks.run(train, name, SGD, saved(tmp_path, graph, strategy))
    wanted = reference_with_local_statistics(name, UNEVEN.shares)
    assert_same(results, wanted, rtol=1e-8, loss_rtol=1e-9)  # running statistics included


def graph_ops_that_run_again(graph: OpGraph, strategy: Strategy) -> set[str]:
    program = lower(graph, cluster(), strategy, num_steps=1)
    rows = program.subject[program.kind == TaskKind.RECOMPUTE]
    return {graph.ops[op].kind for op in graph_tables(graph).op_id[rows]}


def trained_gpt(rank: int, path: str) -> dict[str, Tensor]:
    """Weights after two steps with dropout."""
    with captured_once("gpt with dropout"):
        step = deploy(gpt(0.3), load_plan(path), seed=5)
    for number in range(2):
        step(batch_of("gpt", number))
    weights = step.state_dict()
    return {} if weights is None else weights


@pytest.mark.distributed
def test_dropout_draws_the_same_numbers_again(ranks: Ranks, tmp_path: Path) -> None:
    graph = PARENT.capture("gpt with dropout", gpt, 0.3)
    groups = group_ops(graph).num_groups
    plain = strategy_of(graph, [replace(UNEVEN, recompute=False)] * groups)
    again = strategy_of(graph, [UNEVEN] * groups)
    assert any("bernoulli" in kind for kind in graph_ops_that_run_again(graph, again))
    wanted = ranks.run(trained_gpt, saved(tmp_path, graph, plain))[0]
    found = ranks.run(trained_gpt, saved(tmp_path, graph, again))[0]
    assert wanted
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0.0, atol=0.0)


class Deep(nn.Module):
    """Layers that hold much more inside than between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Wide() for _ in range(24)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Wide(nn.Module):
    """A small input, repeated 16 times inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.1, 1.0, 16))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(x.unsqueeze(-1) * self.scale)
        return torch.sin(wide).mean(-1)


def deep() -> Workload:
    torch.manual_seed(0)
    batch = (torch.randn(64, 1000), torch.randn(64, 1000))
    return Workload(Deep, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.1}, name="deep")


def peak_of_deep(rank: int, path: str) -> int:
    workload = deep()
    with captured_once("deep"):
        step = deploy(workload, load_plan(path))
    step(workload.make_batch())
    return peak_bytes(step, workload.make_batch())


@pytest.mark.distributed
def test_measured_memory_falls_as_predicted(ranks: Ranks, tmp_path: Path) -> None:
    graph = PARENT.capture("deep", deep)
    decision = Decision(devices=ALL, shares=(40, 16, 8))
    measured, predicted = [], []
    for recompute in (False, True):
        decisions = [replace(decision, recompute=recompute)] * group_ops(graph).num_groups
        strategy = strategy_of(graph, decisions)
        path = tmp_path / "plan.json"
        plan = plan_of(graph, strategy)
        plan.save(path)
        measured.append(ranks.run(peak_of_deep, str(path)))
        predicted.append(plan.peak_memory_bytes)
    for rank in ALL:
        assert measured[1][rank] < 0.25 * measured[0][rank]
        for found, said in zip(measured, predicted, strict=True):
            assert 0.9 * said[rank] <= found[rank] <= said[rank]
