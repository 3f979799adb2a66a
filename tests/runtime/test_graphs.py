"""Full-batch graph networks cut by rows or by features give the single-device numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heterog.graph.grouping import group_ops
from heterog.graph.op_rule import OpRules
from heterog.planners.plan import load_plan
from heterog.strategy.graph_split import feature_rules, row_rules
from heterog.strategy.strategy import Decision
from tests.runtime.cases import Trained, assert_same
from tests.runtime.graphs import NODES, graph_of, train, trained_alone
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import ALL, plan_of, strategy_of

TOGETHER = Decision(devices=ALL, shares=(1, 0, 0), teams=(ALL,), parts=(3, 2, 1))


def trained(
    ranks: Ranks,
    folder: Path,
    name: str,
    rules: OpRules,
    decision: Decision = TOGETHER,
    dtype: torch.dtype = torch.float64,
) -> list[Trained]:
    graph = graph_of(name, dtype)
    decisions = [decision] * group_ops(graph).num_groups
    chosen = replace(strategy_of(graph, decisions), op_rules=rules)
    path = folder / "plan.json"
    plan_of(graph, chosen).save(path)
    assert load_plan(path).strategy == chosen
    results: list[Trained] = ranks.run(train, name, dtype, str(path))
    return results


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["gcn", "sage", "mixed"])
def test_rows_three_two_one_give_the_numbers_of_one_device(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    results = trained(ranks, tmp_path, name, row_rules(graph_of(name), NODES))
    wanted = trained_alone(name)
    assert_same(results, wanted, rtol=1e-9, loss_rtol=1e-11, all_gradients=False)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_features_three_two_one_give_the_numbers_of_one_device(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    results = trained(ranks, tmp_path, name, feature_rules(graph_of(name), 12))
    wanted = trained_alone(name)
    assert_same(results, wanted, rtol=1e-9, loss_rtol=1e-11, all_gradients=False)
