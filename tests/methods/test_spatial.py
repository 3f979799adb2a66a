"""Planning samples cut along space: where batch shares cannot exist, and nowhere else."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.methods.planner import Budget, PlanResult, Problem
from heterog.methods.registry import built_in_methods
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.zoo.volumes import cosmoflow
from tests.simulator.builders import cluster_of


@cache
def graph_of(batch_size: int, width: int) -> OpGraph:
    return capture(cosmoflow(batch_size, width))


def planned(
    graph: OpGraph, cluster: Cluster, evaluations: int = 400
) -> tuple[Evaluator, PlanResult]:
    evaluator = Evaluator(graph, cluster)
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=evaluations))
    return evaluator, built_in_methods()["spatial"].plan(problem)


def test_cosmoflow_512_fits_eight_unequal_devices_that_cannot_hold_it_alone() -> None:
    graph = graph_of(1, 512)
    cluster = cluster_of((100.0, ["V100-16GB"] * 4), (100.0, ["P100-16GB"] * 4))
    evaluator, result = planned(graph, cluster)
    alone = built_in_methods()["single_device"].plan(
        Problem(evaluator=evaluator, budget=Budget(evaluations=20))
    )
    found = evaluator.referee(result.candidates[0].strategy, Order.FIFO)
    whole = evaluator.referee(alone.candidates[0].strategy, Order.FIFO)
    assert found.is_ok
    assert not whole.is_ok
    parts = result.candidates[0].strategy.decisions[0].parts
    assert min(parts[:4]) > max(parts[4:])  # a V100 has more rows than a P100
    even = replace(result.candidates[0].strategy.decisions[0], parts=(1,) * 8)
    strategy = replace(
        result.candidates[0].strategy,
        decisions=(even,) * len(result.candidates[0].strategy.decisions),
    )
    assert found.step_time_s < evaluator.referee(strategy, Order.FIFO).step_time_s


def test_the_same_budget_gives_the_same_plan() -> None:
    cluster = cluster_of((12.5, ["V100-16GB"] * 2), (12.5, ["T4"] * 2))
    graph = graph_of(1, 64)
    (_, one), (_, other) = planned(graph, cluster, 60), planned(graph, cluster, 60)
    assert one.candidates[0].strategy == other.candidates[0].strategy
    assert one.num_evaluations <= 60 + 1


@pytest.mark.parametrize(
    ("graph", "types", "reason"),
    [
        (lambda: graph_of(4, 32), ["T4", "T4"], "4 samples are enough for 2 devices"),
        (lambda: graph_of(1, 32), ["T4"], "one device only"),
        (lambda: linear(), ["T4", "T4"], "no convolution of the network can be cut"),
    ],
)
def test_it_says_where_it_is_of_no_use(graph, types: list[str], reason: str) -> None:  # type: ignore[no-untyped-def]
    _, result = planned(graph(), cluster_of((1.0, types)))
    assert not result.candidates
    assert reason in result.reason


def linear() -> OpGraph:
    batch = torch.rand(1, 4), torch.rand(1, 4)
    return capture(Workload(lambda: nn.Linear(4, 4), batch, functional.mse_loss, torch.optim.SGD))
