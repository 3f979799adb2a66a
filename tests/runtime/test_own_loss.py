"""Models that compute their own loss, from labels that they shift, mask or make."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.sharding_rules import Special
from heterog.graph.workload import Workload
from heterog.runtime.step.local_op import Share, local_ops
from heterog.strategy.strategy import Decision, Sync
from tests.runtime.cases import OWN_LOSS, mlp
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import (
    ALL,
    SYNCS,
    ZERO,
    graph_of,
    homes_of,
    strategy_of,
)
from tests.runtime.test_numerics import assert_trains_like_one_device
from tests.thorough import one_in

GATHERS = ("contrastive", "pseudo-labels", "weighted labels")
"""These need the whole batch in one op: no micro-batches."""


@one_in(8)
@pytest.mark.distributed
@pytest.mark.parametrize("name", OWN_LOSS)
@pytest.mark.parametrize("case", ["ring", "zero share", "server", "one device"])
def test_uniform(ranks: Ranks, tmp_path: Path, name: str, case: str) -> None:
    graph = graph_of(name)
    decisions = [SYNCS[case]] * group_ops(graph).num_groups
    strategy = strategy_of(graph, decisions, homes=homes_of(graph, case))
    assert_trains_like_one_device(ranks, tmp_path, name, strategy, graph)


@one_in(8)
@pytest.mark.distributed
@pytest.mark.parametrize("name", OWN_LOSS)
@pytest.mark.parametrize("case", ["zero1", "zero3, no slice"])
def test_zero(ranks: Ranks, tmp_path: Path, name: str, case: str) -> None:
    graph = graph_of(name)
    strategy = strategy_of(graph, [ZERO[case]] * group_ops(graph).num_groups, step_barrier=False)
    assert_trains_like_one_device(ranks, tmp_path, name, strategy, graph)


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("name", OWN_LOSS)
def test_every_group_elsewhere(ranks: Ranks, tmp_path: Path, name: str) -> None:
    graph = graph_of(name)
    turns = [
        Decision(devices=(0,), shares=(8,)),
        Decision(devices=(1, 2), shares=(3, 5)),
        Decision(devices=ALL, shares=(1, 3, 4), sync=Sync.HIERARCHICAL),
    ]
    groups = group_ops(graph).num_groups
    strategy = strategy_of(graph, [turns[group % 3] for group in range(groups)])
    assert_trains_like_one_device(ranks, tmp_path, name, strategy, graph)


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("name", [name for name in OWN_LOSS if name not in GATHERS])
@pytest.mark.parametrize("is_pipeline", [True, False])
def test_micro_batches(ranks: Ranks, tmp_path: Path, name: str, is_pipeline: bool) -> None:
    graph = graph_of(name)
    groups = group_ops(graph).num_groups
    decisions = [Decision(devices=ALL, shares=(5, 2, 1), sync=Sync.RING)] * groups
    if is_pipeline:
        decisions = [Decision(devices=(3 * g // groups,), shares=(8,)) for g in range(groups)]
    strategy = strategy_of(graph, decisions, micro_batches=((3, 2), (0, 2), (1, 0)))
    assert_trains_like_one_device(ranks, tmp_path, name, strategy, graph)


def test_a_number_that_is_added_once_does_not_change_the_dtype_elsewhere() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        counted = ((output > 0).sum(0) + 0.5).sum().sqrt()  # integers of each rank, and a float
        return functional.mse_loss(output, target) + counted

    batch = torch.zeros(8, 6), torch.zeros(8, 4)
    captured = capture_step(Workload(mlp, batch, loss, torch.optim.SGD, {"lr": 0.1}))
    plan = axis_plan(captured.graph)
    numbers = [
        op
        for op in local_ops(captured, plan, torch.device("cpu")).values()
        if Special.BIAS_ON_ONE_RANK in op.specials and op.call.inputs[0].dtype == "int64"
    ]
    assert numbers
    for op in numbers:
        for is_first in (True, False):
            (made,) = op([torch.ones(4, dtype=torch.int64)], Share(4, 1, is_first=is_first))
            assert str(made.dtype).removeprefix("torch.") == op.call.outputs[0].dtype
            assert made.tolist() == [1.5 if is_first else 1.0] * 4
