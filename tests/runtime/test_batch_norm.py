"""How many samples each BatchNorm sees."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from heterog.graph.grouping import group_ops
from heterog.runtime.batch_norm import batch_norm_samples
from heterog.strategy.strategy import Decision
from tests.runtime.cases import batch_of, deployed, workload_of
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import ALL, SYNCS, graph_of, plan_of, strategy_of


def test_samples_are_the_shares() -> None:
    graph = graph_of("normalised")
    decisions = [SYNCS["zero share"]] * group_ops(graph).num_groups
    found = batch_norm_samples(graph, strategy_of(graph, decisions))
    assert found == {"features.1": {0: 5, 2: 3}, "features.5": {0: 5, 2: 3}}


def test_the_smallest_micro_batch_counts() -> None:
    graph = graph_of("normalised")
    decision = Decision(devices=ALL, shares=(5, 2, 1))
    micro = ((3, 2), (0, 2), (1, 0))
    strategy = strategy_of(graph, [decision] * group_ops(graph).num_groups, micro_batches=micro)
    assert batch_norm_samples(graph, strategy)["features.1"] == {0: 2, 1: 2, 2: 1}


def test_a_model_without_batch_norm_has_none() -> None:
    graph = graph_of("mlp")
    decisions = [SYNCS["ring"]] * group_ops(graph).num_groups
    assert batch_norm_samples(graph, strategy_of(graph, decisions)) == {}


def trained_buffers(rank: int, path: str) -> dict[str, Tensor] | None:
    """Running statistics in the state dict after a step."""
    step = deployed("normalised", path)
    step(batch_of("normalised", 0))
    state = step.state_dict()
    return state and {k: v for k, v in state.items() if "running_mean" in k}


@pytest.mark.distributed
def test_state_dict_has_statistics_of_modules_that_rank_0_does_not_run(
    ranks: Ranks, tmp_path: Path
) -> None:
    """In a pipeline: those of rank 0 were returned, which had never changed."""
    graph = graph_of("normalised")
    groups = group_ops(graph).num_groups
    stages = [Decision(devices=(2 * g // groups,), shares=(8,)) for g in range(groups)]
    path = tmp_path / "plan.json"
    plan_of(graph, strategy_of(graph, stages)).save(path)
    model = workload_of("normalised").make_model()
    model(batch_of("normalised", 0)[0])
    found = ranks.run(trained_buffers, str(path))[0]
    assert len(found) == 2
    for name, value in found.items():
        assert torch.allclose(value, model.state_dict()[name]), name
