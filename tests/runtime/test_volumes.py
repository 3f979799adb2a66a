"""Samples cut along space give the single-device numbers: rows are uneven, halos cross ranks."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.planners.plan import load_plan
from heterog.strategy.spatial_split import SpatialSplit, spatial_splits
from heterog.strategy.strategy import Decision, Strategy
from tests.runtime.cases import Trained, assert_same
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import ALL, plan_of, strategy_of
from tests.runtime.volumes import train, trained_alone, workload_of

TOGETHER = Decision(devices=ALL, shares=(1, 0, 0), teams=(ALL,), parts=(3, 2, 1))


@cache
def graph_of(name: str, batch_size: int) -> OpGraph:
    return capture(workload_of(name, batch_size))


def split_of(graph: OpGraph, units: int, dim: int = 2) -> SpatialSplit:
    return next(each for each in spatial_splits(graph) if (each.dim, each.units) == (dim, units))


def strategy(graph: OpGraph, units: int, decision: Decision, dim: int = 2) -> Strategy:
    decisions = [decision] * group_ops(graph).num_groups
    return replace(strategy_of(graph, decisions), op_rules=split_of(graph, units, dim).op_rules)


def trained(
    ranks: Ranks, folder: Path, name: str, chosen: Strategy, batch_size: int = 1
) -> list[Trained]:
    path = folder / "plan.json"
    plan_of(graph_of(name, batch_size), chosen).save(path)
    assert load_plan(path).strategy == chosen
    results: list[Trained] = ranks.run(train, name, batch_size, str(path))
    return results


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "units", "dim"),
    [
        ("cosmoflow", 8, 2), ("cosmoflow", 16, 3), ("unet", 8, 2), ("waves", 12, 2),
        ("picture", 4, 2), ("picture", 6, 3),
    ],
)  # fmt: skip
def test_uneven_rows_of_one_sample_give_the_numbers_of_one_device(
    ranks: Ranks, tmp_path: Path, name: str, units: int, dim: int
) -> None:
    chosen = strategy(graph_of(name, 1), units, TOGETHER, dim)
    results = trained(ranks, tmp_path, name, chosen)
    assert_same(results, trained_alone(name, 1), rtol=1e-9, loss_rtol=1e-11, all_gradients=False)
