"""Teams on real ranks: tensor, data and pipeline parallelism in any combination."""

from dataclasses import replace
from pathlib import Path

import pytest

from heterog.graph.grouping import group_ops
from heterog.strategy.strategy import Decision, Strategy, Sync
from heterog.strategy.tensor_parallel import shardings
from tests.runtime.cases import SGD, Recipe, assert_same, reference, train_sharded
from tests.runtime.grids import done_by_all, grid_cluster
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import graph_of
from tests.simulator.builders import plan_by_hand
from tests.strategy.merging import merge_rules
from tests.thorough import one_in


def trained_alike(
    ranks: Ranks, folder: Path, name: str, strategy: Strategy, recipe: Recipe = SGD
) -> None:
    """Four ranks give the numbers of one device."""
    graph = graph_of(name)
    path = folder / "plan.json"
    plan_by_hand(graph, grid_cluster(4), strategy).save(path)
    results = ranks.run(train_sharded, name, recipe, str(path))
    assert_same(results, reference(name, recipe), all_gradients=False)


def megatron(name: str, decision: Decision, optimizer: str = "SGD", **changes: object) -> Strategy:
    """Heads and columns inside teams, every other op done by each member."""
    graph = graph_of(name, optimizer)
    groups = range(group_ops(graph).num_groups)
    sharded = merge_rules(*(each.op_rules for each in shardings(graph, groups)))
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=grid_cluster(4).fingerprint,
        decisions=(decision,) * len(groups),
        homes=(-1,) * len(graph.updates),
        op_rules=merge_rules(sharded, done_by_all(graph, groups)),
    )
    return replace(strategy, **changes)  # type: ignore[arg-type]


PAIRS = Decision(
    devices=(0, 1, 2, 3), shares=(3, 3, 1, 1), teams=((0, 1), (2, 3)), parts=(2, 1, 1, 1)
)


@one_in(3)
@pytest.mark.distributed
@pytest.mark.parametrize("sync", [Sync.RING, Sync.ZERO1, Sync.ZERO2, Sync.ZERO3])
def test_a_grid_in_micro_batches(four_ranks: Ranks, tmp_path: Path, sync: Sync) -> None:
    decision = replace(PAIRS, sync=sync, parts=(1, 1, 1, 1), recompute=sync == Sync.ZERO2)
    idle = (0, 0)
    strategy = megatron("gpt", decision, micro_batches=((4, 4), idle, idle, idle))
    trained_alike(four_ranks, tmp_path, "gpt", strategy)


@pytest.mark.distributed
def test_unlike_teams_and_clipping(four_ranks: Ranks, tmp_path: Path) -> None:
    """One replica on one device, another cut over three of unequal parts."""
    unlike = Decision(
        devices=(0, 1, 2, 3), shares=(3, 3, 1, 1), teams=((1,), (2, 0, 3)), parts=(3, 1, 2, 1)
    )
    recipe = Recipe(max_grad_norm=0.1)
    trained_alike(four_ranks, tmp_path, "gpt", megatron("gpt", unlike, bucket_bytes=400), recipe)
