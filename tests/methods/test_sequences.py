"""Planning sequences cut in runs of positions: equal times, not equal lengths."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.methods.planner import Budget, PlanResult, Problem
from heterog.methods.registry import built_in_methods
from heterog.methods.unit_search import Sequences
from heterog.pricing.calibration import cost_model_of
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.sequence_split import sequence_split
from tests.simulator.builders import cluster_of

WIDTH, LENGTH = 512, 8192


class Attention(nn.Module):
    """Causal attention alone, on sequences of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.fused(x).view(batch, length, 3, 8, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


@cache
def graph_of(batch_size: int, length: int = LENGTH) -> OpGraph:
    batch = torch.zeros(batch_size, length, WIDTH), torch.zeros(batch_size, length, WIDTH)
    return capture(Workload(Attention, batch, functional.mse_loss, torch.optim.SGD))


def planned(graph: OpGraph, cluster: Cluster) -> tuple[Evaluator, PlanResult]:
    evaluator = Evaluator(graph, cluster)
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=30))
    return evaluator, built_in_methods()["sequences"].plan(problem)


@pytest.mark.parametrize("types", [["V100-16GB"] * 4, ["V100-16GB"] * 2 + ["P100-16GB"] * 2])
def test_runs_follow_speeds_and_what_positions_cost(types: list[str]) -> None:
    evaluator, result = planned(graph_of(1), cluster_of((100.0, types)))
    found = result.candidates[0].strategy
    parts = found.decisions[0].parts
    assert parts[0] > parts[1] >= parts[-1]  # later positions see more keys
    assert parts[1] > parts[2]
    even = replace(found.decisions[0], parts=(1,) * 4)
    evenly = replace(found, decisions=(even,) * len(found.decisions))
    step_s, even_s = (evaluator.referee(s, Order.FIFO).step_time_s for s in (found, evenly))
    assert step_s < 0.9 * even_s


def test_models_of_devices_price_late_queries_like_the_formula() -> None:
    """They know FLOPs and bytes of a part alone, and have to find out which sizes are cut."""
    graph = graph_of(1)
    split = sequence_split(graph, 128)
    assert split is not None
    plan, (kind,) = axis_plan(graph, split.op_rules), cluster_of((1.0, ["A100-40GB"])).device_types
    model = cost_model_of(cluster_of((1.0, ["A100-40GB"])))
    whole, early, late = (
        model.work_seconds(graph, kind, *plan.work(end - begin, 1, 1, begin))[plan.causal_ops]
        for begin, end in ((0, 128), (0, 64), (64, 128))
    )
    assert early == pytest.approx(whole / 4, rel=0.1)
    assert late == pytest.approx(whole * 3 / 4, rel=0.1)


@pytest.mark.parametrize(
    ("batch_size", "length", "types", "reason"),
    [
        (4, 64, ["T4", "T4"], "4 samples are enough for 2 devices"),
        (1, 509, ["T4", "T4"], "sequences of 509 positions cannot be cut"),
        (1, 64, ["T4"], "one device only"),
    ],
)
def test_it_says_where_it_is_of_no_use(
    batch_size: int, length: int, types: list[str], reason: str
) -> None:
    cluster = cluster_of((1.0, types))
    _, result = planned(graph_of(batch_size, length), cluster)
    assert not result.candidates
    assert reason in result.reason


def test_auto_asks_it_where_long_sequences_are_few() -> None:
    two = cluster_of((1.0, ["T4", "T4"]))
    assert Sequences.joins_auto(graph_of(1), two)
    assert not Sequences.joins_auto(graph_of(1, 64), two)
    assert not Sequences.joins_auto(graph_of(4, 64), two)
