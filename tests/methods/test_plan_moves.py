"""Moves of whole plans: each kind leads to plans that can run, and is repeated at a seed."""

import numpy as np
import pytest

from heterog.cluster import Cluster
from heterog.envs.toy import chain_graph
from heterog.graph.op_graph import OpGraph
from heterog.methods.local_search.move_features import changed_groups
from heterog.methods.local_search.neighbours import Move, MoveKind, State
from heterog.methods.local_search.plan_moves import PlanMoves
from heterog.methods.local_search.planner import Search
from heterog.methods.planner import Budget, Problem
from heterog.simulator.evaluator import Evaluator, Outcome
from tests.runtime.strategies import graph_of

CLUSTERS = ("paper_8gpu", "homogeneous_8xa100")


def searched(cluster: str, graph: OpGraph | None = None) -> tuple[Search, PlanMoves]:
    evaluator = Evaluator(graph or chain_graph(num_layers=6), Cluster.load(cluster))
    search = Search(Problem(evaluator=evaluator, budget=Budget(evaluations=10**6)))
    return search, PlanMoves(search.neighbours)


def walk(cluster: str, steps: int) -> tuple[Search, list[tuple[MoveKind, State]]]:
    """Plans along a walk that makes every move."""
    search, plans = searched(cluster)
    busy_s = np.linspace(1.0, 2.0, search.evaluator.cluster.num_devices)
    state, made = search.everywhere(0), []
    for _ in range(steps):
        move = plans.move(state, busy_s)
        if move.state.key != state.key:
            state = search.neighbours.after(move)
            made.append((move.kind, state))
    return search, made


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_kind_leads_to_plans_that_can_run(cluster: str) -> None:
    search, made = walk(cluster, 300)
    kinds = {kind for kind in MoveKind if kind >= MoveKind.STAGES} - {MoveKind.SHARDED}
    assert {kind for kind, _ in made} == kinds  # a chain has no layers to shard
    for _, state in made[::4]:
        assert search.evaluated(state).outcome in (Outcome.OK, Outcome.OUT_OF_MEMORY)
        search._strategy(state).check(search.evaluator.graph, search.evaluator.cluster)


def test_layers_are_sharded_on_devices_of_their_own_and_no_longer() -> None:
    search, plans = searched("paper_8gpu", graph_of("moe"))
    state, sizes = search.everywhere(0), set()
    for _ in range(40):
        made = plans._sharded(state)
        assert made is not None
        after = search.neighbours.after(Move(MoveKind.SHARDED, made, without=state))
        assert search.evaluated(after).outcome in (Outcome.OK, Outcome.OUT_OF_MEMORY)
        search._strategy(after).check(search.evaluator.graph, search.evaluator.cluster)
        seen = changed_groups(state, [Move(MoveKind.SHARDED, made)])[0]
        assert seen.any()
        sizes.add((bool(state.rules), bool(after.rules), bool((after.row != state.row).any())))
        state = after
    assert {(False, True, True), (False, True, False), (True, False, False)} <= sizes


def test_a_walk_is_repeated() -> None:
    first, second = (walk("paper_8gpu", 60)[1] for _ in range(2))
    assert [state.key for _, state in first] == [state.key for _, state in second]


def test_samples_go_from_busy_devices_to_idle_ones() -> None:
    search, plans = searched("homogeneous_8xa100")
    state = search.everywhere(0)
    busy_s = np.array([3.0, *[1.0] * 7])
    made = plans._shared(state, busy_s)
    assert made is not None
    before, after = (search.space.candidates[int(each.row[0])] for each in (state, made))
    assert after.shares[0] < before.shares[0]
    assert sum(after.shares) == sum(before.shares)
