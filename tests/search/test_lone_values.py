"""BatchNorm over one value per channel: torch refuses it, so no plan asks for it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.graph.batch_plan import norms_of_lone_values
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.methods.planner import Budget
from heterog.methods.registry import AUTO
from heterog.runtime.measure.rehearsal import rehearsal_of, rehearse
from heterog.simulator.evaluator import Evaluator, Outcome
from heterog.strategy.strategy import Decision
from tests.runtime.strategies import ALL, cluster, plan_of, strategy_of
from tests.search.asking import compare_methods


def pooled(batch: int, size: int = 1) -> CapturedStep:
    """A BatchNorm over maps of ``size`` x ``size`` and one over pooled features' maps of 4 x 4."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(size),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4 * size * size, 2),
    )
    images, labels = torch.zeros(batch, 3, 4, 4), torch.zeros(batch, dtype=torch.long)

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(out, labels)

    return capture_step(
        Workload(
            lambda: model, (images, labels), loss, torch.optim.SGD, {"lr": 0.1}, name="pooled"
        )
    )


def test_only_maps_of_one_value_count() -> None:
    graph = pooled(8).graph
    assert [graph.ops[op].module for op in norms_of_lone_values(graph)] == ["4"]
    assert norms_of_lone_values(pooled(8, size=2).graph) == ()


def test_one_sample_of_it_cannot_run_and_two_can() -> None:
    captured = pooled(8)
    graph = captured.graph
    groups = group_ops(graph).num_groups
    for shares, is_refused in (((5, 2, 1), True), ((5, 3, 0), False)):
        decisions = [Decision(devices=ALL, shares=shares)] * groups
        plan = plan_of(graph, strategy_of(graph, decisions))
        judged = Evaluator(graph, cluster()).evaluate(plan.strategy)
        program = lower(graph, plan.cluster, plan.strategy, num_steps=1)
        said = rehearse(captured, plan.strategy, program, plan.task_order)
        assert (judged.outcome == Outcome.CANNOT_RUN) == is_refused
        assert ("more than one value per channel" in judged.shortage) == is_refused
        assert ("would have one value per channel" in said) == is_refused


def test_methods_find_plans_without_it() -> None:
    captured = pooled(6)
    found = compare_methods(
        captured.graph, Cluster.load("paper_8gpu"), [AUTO], budget=Budget(evaluations=20)
    ).rehearsed(rehearsal_of(captured))
    assert found.rows[-1].outcome == "ok"
    for row in found.rows:
        if row.outcome == "cannot_run":
            assert "one value per channel" in row.shortage, row.method
    assert sum(row.outcome == "ok" for row in found.rows) >= 5
