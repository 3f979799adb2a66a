"""Samples cut along space give the single-device numbers: rows are uneven, halos cross ranks."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.search.plan import load_plan
from heterog.strategy.spatial_split import UnitSplit, spatial_splits
from heterog.strategy.strategy import Decision, Strategy
from tests.runtime.cases import Trained, assert_same
from tests.runtime.ranks import PARENT, Ranks
from tests.runtime.strategies import ALL, plan_of, strategy_of
from tests.runtime.volumes import train, trained_alone, workload_of
from tests.thorough import one_in

TOGETHER = Decision(devices=ALL, shares=(1, 0, 0), teams=(ALL,), parts=(3, 2, 1))


@cache
def graph_of(name: str, batch_size: int) -> OpGraph:
    return PARENT.capture((name, batch_size), workload_of, name, batch_size)


def split_of(graph: OpGraph, units: int, dim: int = 2) -> UnitSplit:
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


@one_in(4)
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


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "units", "decision"),
    [
        # Batch and space together; the second team is one device.
        ("waves", 24, replace(TOGETHER, shares=(2, 0, 1), teams=((0, 1), (2,)), parts=(1, 2, 1))),
        # Rows on the last device only wait for those of the first, past one with none.
        ("cosmoflow", 8, Decision(devices=ALL, shares=(1, 1, 1), teams=(ALL,), parts=(5, 0, 3))),
        # Parts of one row and of two are thinner than the halo of the dilated kernel.
        ("waves", 48, replace(TOGETHER, shares=(3, 0, 0), teams=((2, 0, 1),), parts=(1, 2, 45))),
        ("cosmoflow", 4, replace(TOGETHER, shares=(3, 0, 0), parts=(2, 1, 1), recompute=True)),
    ],
)  # fmt: skip
def test_batch_and_space_together(
    ranks: Ranks, tmp_path: Path, name: str, units: int, decision: Decision
) -> None:
    chosen = strategy(graph_of(name, 3), units, decision)
    results = trained(ranks, tmp_path, name, chosen, 3)
    assert_same(results, trained_alone(name, 3), rtol=1e-9, loss_rtol=1e-11, all_gradients=False)


@pytest.mark.distributed
def test_micro_batches_of_cut_samples(ranks: Ranks, tmp_path: Path) -> None:
    decision = replace(TOGETHER, shares=(3, 0, 0))
    micro = replace(
        strategy(graph_of("picture", 3), 4, decision), micro_batches=((2, 1), (0, 0), (0, 0))
    )
    results = trained(ranks, tmp_path, "picture", micro, 3)
    wanted = trained_alone("picture", 3)
    assert_same(results, wanted, rtol=1e-9, loss_rtol=1e-11, all_gradients=False)


@pytest.mark.distributed
def test_batch_norm_normalises_each_part_or_the_whole(ranks: Ranks, tmp_path: Path) -> None:
    """Two numbers, both right: what was asked for decides."""
    name = "unet of parts"
    chosen = strategy(graph_of(name, 1), 8, replace(TOGETHER, parts=(4, 3, 1)))
    results = trained(ranks, tmp_path, name, chosen)
    wanted = trained_alone(name, 1, parts=(4, 3, 1))
    weights, found = wanted.weights, results[0].weights
    assert weights is not None
    assert found is not None
    # Running statistics are those of the rank's own part.
    running = {key for key in weights if "running" in key or "num_batches" in key}
    results = [
        each._replace(weights={k: v for k, v in found.items() if k not in running})
        for each in results
    ]
    wanted = wanted._replace(weights={k: v for k, v in weights.items() if k not in running})
    assert_same(results, wanted, rtol=1e-9, loss_rtol=1e-11, all_gradients=False)
    assert results[0].losses != pytest.approx(trained_alone("unet", 1).losses, rel=1e-4)
