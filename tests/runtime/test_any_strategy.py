"""Random strategies of every kind, executed by four and six ranks: the numbers of one device."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from heterog.graph.placement import R, S
from heterog.strategy.strategy import Decision, OpRule, Strategy, Sync
from heterog.strategy.tensor_parallel import Region, follow_split
from tests.runtime.any_strategy import Draws, any_strategy, new_draws
from tests.runtime.cases import NORMALISED, SGD, assert_same, reference, train_sharded
from tests.runtime.grids import grid_cluster
from tests.runtime.local_groups import reference_in_groups
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import graph_of
from tests.runtime.test_rehearsal import verdict
from tests.simulator.builders import plan_by_hand, strategy_of
from tests.thorough import one_in

SEED = int(os.environ.get("HETEROG_SEED", "0"))
CASES = int(os.environ.get("HETEROG_RANDOM_STRATEGIES", "1"))
FAMILIES = ("mlp", "normalised residual", "gpt", "translation", "moe", "encodings")
ON_SIX = FAMILIES if CASES > 1 else FAMILIES[:2]
"""Each rank captures a model once, which takes seconds: by default only the small ones."""


def check_strategy(
    ranks: Ranks, folder: Path, name: str, strategy: Strategy, num_devices: int
) -> None:
    """A rehearsal accepts it, and the ranks give the numbers of one device."""
    graph = graph_of(name)
    plan = plan_by_hand(graph, grid_cluster(num_devices), strategy)
    path = folder / "plan.json"
    plan.save(path)
    said = verdict(name, plan)
    assert said == ""
    results = ranks.run(train_sharded, name, SGD, str(path))
    if name in NORMALISED:
        wanted = reference_in_groups(name, plan)
        assert_same(results, wanted, rtol=1e-8, loss_rtol=1e-8, all_gradients=False)
    else:
        assert_same(results, reference(name), all_gradients=False)


def check_any(
    ranks: Callable[[], Ranks], folder: Path, name: str, num_devices: int, draws: Draws
) -> list[str]:
    """What went wrong in some random strategies."""
    wrong = []
    for seed in range(SEED, SEED + CASES):
        rng = Random(f"{seed} {name} {num_devices}")
        strategy = any_strategy(rng, graph_of(name), num_devices, draws)
        try:
            check_strategy(ranks(), folder, name, strategy, num_devices)
        except AssertionError as error:
            wrong.append(f"{name}, {num_devices} ranks, seed {seed}: {error}")
            print(wrong[-1][-1500:], flush=True)
    return wrong


@one_in(4)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("num_devices", "name"), [*((4, name) for name in FAMILIES), *((6, name) for name in ON_SIX)]
)
def test_any_strategy_trains_as_one_device(
    request: pytest.FixtureRequest, tmp_path: Path, num_devices: int, name: str
) -> None:
    ranks: Ranks = request.getfixturevalue("four_ranks" if num_devices == 4 else "six_ranks")
    draws = new_draws()
    wrong = check_any(lambda: ranks, tmp_path, name, num_devices, draws)
    print(f"{name}, {num_devices} ranks: {CASES - len(wrong)} of {CASES} equal;", end=" ")
    print(f"refused by the language: {dict(draws.refused)}; made use of: {dict(draws.said)}")
    assert not wrong


@pytest.mark.distributed
@pytest.mark.parametrize("shares", [(2, 2, 2, 2), (6, 0, 0, 2)])
def test_what_a_team_has_alike_enters_a_sum_where_it_is_held(
    four_ranks: Ranks, tmp_path: Path, shares: tuple[int, ...]
) -> None:
    """The first reader of the team makes none of it; with the other shares no reader does."""
    graph = graph_of("language")  # the embedding is tied: two gradients are added up
    rules = tuple(
        (op, OpRule(inputs=(R, R), outputs=(R,), units=1))
        for op, node in enumerate(graph.ops)
        if node.kind == "embedding_dense_backward.default"
    )
    decision = Decision(
        devices=(0, 1, 2, 3),
        shares=shares,
        teams=((0, 1, 2), (3,)),
        parts=(0, 1, 1, 1),
        sync=Sync.RING,
    )
    strategy = strategy_of(graph, grid_cluster(4), decision)
    check_strategy(four_ranks, tmp_path, "language", replace(strategy, op_rules=rules), 4)


@pytest.mark.distributed
def test_a_ring_adds_up_single_columns_of_a_slice(four_ranks: Ranks, tmp_path: Path) -> None:
    """A team of one holds all units of a split, of another team one member has a single one.

    Without samples the first team gives zeros to their ring: a view in steps of eight columns.
    """
    graph = graph_of("mlp")
    shapes = {parameter: graph.tensors[parameter].shape for parameter in graph.parameters}
    split = {p: S(1, 2) for p, shape in shapes.items() if shape[1:] == (16,)}
    rules = follow_split(Region(graph, range(graph.num_ops)), split, 8)
    decision = Decision(
        devices=(0, 1, 2),
        shares=(0, 4, 4),
        teams=((0,), (1, 2)),
        parts=(1, 1, 7),
        sync=Sync.RING,
    )
    strategy = strategy_of(graph, grid_cluster(4), decision)
    check_strategy(four_ranks, tmp_path, "mlp", replace(strategy, op_rules=rules), 4)
