"""Memory that kernels take for themselves is in the prediction."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.workload import Workload
from heterog.lowering import resident_bytes
from heterog.lowering.tables import graph_tables
from heterog.runtime.deploy import deploy
from heterog.runtime.measure.op_profiler import peak_bytes
from heterog.search.plan import load_plan
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator
from heterog.strategy.strategy import Decision
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import cluster, plan_of, strategy_of

CHANNELS = 256
FILTER = 4 * 9 * CHANNELS * CHANNELS  # bytes


def workload() -> Workload:
    """Filters that are larger than the images they are for."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(3)]
        return nn.Sequential(*layers)

    images = torch.randn(8, CHANNELS, 4, 4)
    return Workload(
        model, (images, images), functional.mse_loss, torch.optim.SGD, {"lr": 0.01}, name="filters"
    )


def peak_of_filters(rank: int, path: str) -> int:
    step = deploy(workload(), load_plan(path))
    batch = workload().make_batch()
    step(batch)
    return peak_bytes(step, batch)


@pytest.mark.distributed
def test_reordered_weights_of_convolutions_are_predicted(ranks: Ranks, tmp_path: Path) -> None:
    graph = capture(workload())
    groups = group_ops(graph).num_groups
    # The last layer is alone on its device: a filter, its gradient, and a copy to compute with.
    decisions = [
        Decision(devices=(0,), shares=(8,)) if group < groups - 1
        else Decision(devices=(2,), shares=(8,))
        for group in range(groups)
    ]  # fmt: skip
    plan = plan_of(graph, strategy_of(graph, decisions))
    path = tmp_path / "plan.json"
    plan.save(path)
    found = ranks.run(peak_of_filters, str(path))
    for rank in (0, 2):
        said = plan.peak_memory_bytes[rank]
        assert 0.85 * said <= found[rank] <= said
        # It would not have been enough without.
        assert found[rank] > said / (1.0 + MEMORY_MARGIN) - FILTER


def test_a_device_needs_the_largest_workspace_of_what_it_runs() -> None:
    graph = capture(workload())
    strategy = strategy_of(
        graph,
        [Decision(devices=(0, 2), shares=(4, 4))] * group_ops(graph).num_groups,
    )
    tables = graph_tables(graph)
    assert tables.parameter_workspace.tolist() == [float(FILTER)] * 3
    choice = Evaluator(graph, cluster()).encode(strategy)
    images = 2 * 4 * 4 * CHANNELS * 4 * 4  # four samples of input and target
    assert resident_bytes(tables, choice).tolist() == [4 * FILTER + images, 0, 4 * FILTER + images]
