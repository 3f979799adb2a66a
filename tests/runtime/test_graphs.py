"""Full-batch graph networks cut by rows or by features give the single-device numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heterog.graph.grouping import group_ops
from heterog.graph.op_rule import OpRules
from heterog.search.plan import load_plan
from heterog.strategy.graph_split import feature_rules, row_rules
from heterog.strategy.strategy import Decision
from tests.runtime.cases import Trained, assert_same
from tests.runtime.graphs import NODES, graph_of, train, trained_alone
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import ALL, plan_of, strategy_of
from tests.thorough import one_in

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


@one_in(2)
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


@pytest.mark.distributed
def test_single_precision(ranks: Ranks, tmp_path: Path) -> None:
    graph, wanted = graph_of("gcn", torch.float32), trained_alone("gcn", torch.float32)
    for rules in (row_rules(graph, NODES), feature_rules(graph, 12)):
        results = trained(ranks, tmp_path, "gcn", rules, dtype=torch.float32)
        assert_same(results, wanted, rtol=1e-5, loss_rtol=1e-5, all_gradients=False)


@pytest.mark.distributed
def test_other_teams_and_divisions(ranks: Ranks, tmp_path: Path) -> None:
    """A device without rows; groups that lie otherwise; nodes with the rows of another device."""
    graph = graph_of("sage")
    groups = group_ops(graph).num_groups
    turned = replace(TOGETHER, teams=((2, 0, 1),), parts=(1, 1, 100), recompute=True)
    one_empty = replace(TOGETHER, parts=(5, 0, 3))
    mixed = [one_empty if number % 2 else turned for number in range(groups)]
    wanted = trained_alone("sage")
    for decisions in ([one_empty] * groups, mixed):
        chosen = replace(strategy_of(graph, decisions), op_rules=row_rules(graph, NODES // 2))
        path = tmp_path / "plan.json"
        plan_of(graph, chosen).save(path)
        results = ranks.run(train, "sage", torch.float64, str(path))
        assert_same(results, wanted, rtol=1e-9, loss_rtol=1e-11, all_gradients=False)
