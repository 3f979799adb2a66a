"""Random walks of the local search: every point is legal, and what is fixed stays."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from heterog.agents.benchmark.tiles import equal_devices, nodes_of
from heterog.agents.benchmark.tiles import graph_of as tiled
from heterog.graph.grouping import block_starts, group_ops
from heterog.graph.op_graph import OpGraph
from heterog.methods.local_search.group_rules import GroupRules
from heterog.methods.local_search.neighbours import Neighbours, State
from heterog.methods.local_search.planner import Changes, LocalSearch, Search
from heterog.methods.planner import Budget, Candidate, Problem
from heterog.methods.teams import without_needless_rules
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.strategies import cluster, graph_of, strategy_of
from tests.runtime.walks import all_sharded, decoded, everywhere, moves_of, start
from tests.simulator.builders import cluster_of

UNEVEN = ((2, 1, 1), (0, 2, 0), (1, 0, 1))
"""Micro-batches of three devices for a batch of 8."""


def in_stages(graph: OpGraph) -> Strategy:
    """A pipeline that says of each device which samples it takes: two have the whole batch."""
    num_groups = group_ops(graph).num_groups
    stages = [
        Decision(devices=(0,), shares=(8,)),
        Decision(devices=(1, 2), shares=(5, 3), sync=Sync.RING),
    ]
    decisions = [stages[2 * group >= num_groups] for group in range(num_groups)]
    return replace(strategy_of(graph, decisions), micro_batches=((3, 3, 2), (2, 2, 1), (1, 1, 1)))


def check_point(moves: Neighbours, state: State) -> None:
    """The strategy is legal, and the quick encoding means the same as the careful one."""
    evaluator = moves.problem.evaluator
    strategy = decoded(moves, state)
    # As a search hands it over: what rules no longer shard has a home where it is served.
    without_needless_rules(strategy).check(evaluator.graph, evaluator.cluster)
    careful = evaluator.evaluate(strategy, Order.RANK)  # checks it
    choice = moves.space.encode(state.row, moves.settings(state), step_barrier=True)
    assert evaluator.evaluate(choice, Order.RANK) == careful


@pytest.mark.parametrize("name", ["gpt", "moe"])
@pytest.mark.parametrize("beginning", ["plain", "zero", "uneven", "stages", "sharded"])
def test_every_point_of_a_walk_is_legal(name: str, beginning: str) -> None:
    graph = graph_of(name)
    strategy = {
        "plain": everywhere(graph),
        "zero": everywhere(graph, Sync.ZERO1),
        "uneven": replace(everywhere(graph), micro_batches=UNEVEN),
        "stages": in_stages(graph),
        "sharded": all_sharded(graph),
    }[beginning]
    moves = moves_of(graph)
    state = start(moves, strategy)
    assert decoded(moves, state) == strategy
    seen = set()
    for step in range(300):
        state = moves.of(state)
        seen.add((bool(state.rules), len(state.micro_batches) > 0))
        if step % 10 == 0:
            check_point(moves, state)
    assert len(seen) > 1  # from rules or micro-batches to none, or the other way


def test_rules_are_put_on_and_taken_off_place_by_place() -> None:
    graph = graph_of("gpt")
    rules = GroupRules(Evaluator(graph, cluster()))
    whole: tuple[int, ...] = ()
    places = [place for places in rules.layers for place in places]
    for place in places:
        assert not rules.holds(whole, place)
        whole = rules.added(whole, place)
    assert all(rules.holds(whole, place) for place in places)
    assert rules.op_rules(whole) == all_sharded(graph).op_rules
    assert rules.row_of(all_sharded(graph).op_rules) == whole
    first = rules.removed(whole, places[0])
    assert not rules.holds(first, places[0])
    assert all(rules.holds(first, place) for place in places[1:])
    for place in places:
        whole = rules.without(whole, set(place))
    assert whole == ()


def test_uneven_micro_batches_are_moved_with_the_shares_that_follow_them() -> None:
    graph = graph_of("gpt")
    moves = moves_of(graph)
    state = start(moves, replace(everywhere(graph), micro_batches=UNEVEN))
    for _ in range(20):
        state = moves._moved_between_cuts(state)
        sums = tuple(sum(counts) for counts in state.micro_batches)
        assert sum(sums) == graph.batch_size
        assert {moves.space.candidates[number].shares for number in state.row} == {sums}


@pytest.mark.parametrize("kind", ["sharded", "uneven"])
def test_the_search_keeps_what_it_was_given_and_scores_it_once(kind: str) -> None:
    graph = graph_of("gpt")
    given = {
        "sharded": all_sharded(graph),
        "uneven": replace(everywhere(graph), micro_batches=UNEVEN),
    }[kind]
    evaluator = Evaluator(graph, cluster())
    problem = Problem(
        evaluator=evaluator,
        budget=Budget(evaluations=400),
        seeds=(Candidate(strategy=given, orders=tuple(Order)),),
    )
    search = Search(problem)
    search._seed()
    assert evaluator.num_evaluations <= len(search.engine.found) + len(search.referee.found)
    assert all(state.key in search.engine.found for state in search._states(problem.seeds[0]))
    best = LocalSearch().plan(problem).candidates[0].strategy
    referee = Evaluator(graph, cluster()).referee
    assert referee(best).step_time_s <= referee(given).step_time_s


def test_changes_that_did_not_pay_are_not_made_again() -> None:
    """By hand, and by searches that are refused what the ones before them have found."""
    before = State(np.array([0, 0, 0, 0], np.int32), 0, Order.RANK)
    moved = before._replace(row=np.array([0, 1, 1, 1], np.int32))
    changes = Changes(before, moved)
    for row, makes_them in (([2, 1, 1, 0], True), ([0, 1, 0, 0], False), ([0, 2, 2, 2], False)):
        assert changes.are_in(before._replace(row=np.array(row, np.int32))) == makes_them, row
    # A setting counts as much as all groups: half of the changes may be made again.
    both = Changes(before, moved._replace(bucket_bytes=1))
    assert both.are_in(moved._replace(bucket_bytes=1))
    assert not both.are_in(moved)
    assert not both.are_in(before._replace(bucket_bytes=1))
    assert not Changes(before, before).are_in(before)

    graph = graph_of("gpt")
    evaluator = Evaluator(graph, cluster())
    problem = Problem(
        evaluator=evaluator,
        budget=Budget(evaluations=200),
        seeds=(Candidate(strategy=everywhere(graph), orders=(Order.RANK,)),),
    )
    refused: list[Strategy] = []
    for _ in range(2):
        search = Search(problem, refused=refused)
        found = search.run(problem).candidates[0]
        state = search._states(found)[0]
        assert not any(each.are_in(state) for each in search._refused)
        assert found.strategy not in (everywhere(graph), *refused)
        refused.append(found.strategy)


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_teams_are_formed_and_left_and_stay_legal(name: str) -> None:
    """On unlike machines: teams beside replicas, micro-batches and ZeRO beside rules, blocks."""
    graph = graph_of(name)
    machines = cluster_of((4.0, ["V100-16GB"] * 3), (2.0, ["T4"] * 2), (1.0, ["T4"]))
    evaluator = Evaluator(graph, machines)
    space = evaluator.space()
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=1))
    moves = Neighbours(problem, space, GroupRules(evaluator), np.random.default_rng(0))
    moves.may_team = moves.may_shard = True
    state = State(np.zeros(moves.num_groups, np.int32), 0, Order.RANK)
    seen: Counter[str] = Counter()
    for step in range(600):
        state = moves.of(state)
        decided = [space.candidates[number] for number in set(state.row.tolist())]
        in_teams = any(len(team) > 1 for each in decided for team in each.teams)
        assert in_teams <= bool(state.rules)
        seen["teams"] += in_teams
        seen["teams in micro-batches"] += in_teams and bool(state.micro_batches)
        seen["ZeRO beside rules"] += bool(state.rules) and any(d.sync.is_sharded for d in decided)
        seen["blocks"] += bool(state.blocks)
        seen["caps"] += bool(state.schedule.in_flight)
        if step % 10 == 0:
            check_point(moves, state)
    assert all(seen.values()), seen
    assert seen["teams"] < 600  # they are left again


def test_what_a_search_hands_over_is_what_it_scored() -> None:
    """Also where some groups have rules that others do without: to the last digit."""
    graph = graph_of("gpt")
    machines = cluster_of((4.0, ["V100-16GB"] * 2), (1.0, ["T4"]), (1.0, ["T4"]))
    evaluator = Evaluator(graph, machines)
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=300))
    search = Search(problem)
    search.neighbours.may_team = True
    search._seed()
    start = search.engine.best[0][1]
    for size in search.rules.team_sizes:
        half = np.arange(search.num_groups // 2, dtype=np.int32)
        state = search.neighbours.in_teams(start, size, half)
        strategy = search._strategy(state)
        strategy.check(graph, machines)
        found = evaluator.referee(strategy, state.order)
        assert found.step_time_s == search.referee.cost(state)
        again = search._states(Candidate(strategy=strategy, orders=(state.order,)))[0]
        assert again.rules in ((), search.rules.of_teams)


@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_rules_of_teams_are_told_from_others(name: str) -> None:
    """By equality, also where the first groups alone tell that they are others."""
    rules = GroupRules(Evaluator(graph_of(name), cluster()))
    places = [place for way in rules.layers for place in way]
    sharded = [rules.added((), place) for place in places]
    all_of_them = sharded[0]
    for place in places[1:]:
        all_of_them = rules.added(all_of_them, place)
    first = [group for group, number in enumerate(rules.of_teams) if number][:1]
    parts = [rules.without(rules.of_teams, first), rules.without(all_of_them, first)]
    for each in (*sharded, all_of_them, *parts, ()):
        assert rules.are_of_teams(each) == (bool(each) and each == rules.of_teams)
    assert rules.are_of_teams(rules.of_teams)


def test_where_nothing_is_divided_devices_change_at_the_edges_of_blocks() -> None:
    graph, devices = tiled("tiled_ffn", nodes_of("tiled_ffn")), equal_devices(4)
    search = Search(Problem(evaluator=Evaluator(graph, devices), budget=Budget(evaluations=9)))
    state, changed = search.everywhere(0), 0
    edges = set(block_starts(graph).tolist())
    for _ in range(50):
        new = search.neighbours._placed(state)
        assert set((np.flatnonzero(np.diff(new.row)) + 1).tolist()) <= edges
        changed += new.key != state.key
        state = new
    assert changed > 10
    used = [search.space.candidates[number].devices for number in set(state.row.tolist())]
    assert sorted(device for devices in used for device in devices if len(devices) == 1) == [
        0,
        1,
        2,
        3,
    ]


def test_what_cannot_be_divided_is_spread_over_devices() -> None:
    graph, devices = tiled("tiled_ffn", nodes_of("tiled_ffn")), equal_devices(4)
    evaluator = Evaluator(graph, devices)
    search = Search(Problem(evaluator=evaluator, budget=Budget(evaluations=150)))
    alone = search.referee.cost(search.everywhere(0))
    found = search.run(search.problem).candidates[0]
    assert evaluator.referee(found.strategy, found.orders[0]).step_time_s < 0.5 * alone
