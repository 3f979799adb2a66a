"""Teams inside machines: who is in one, what each member has, and that searches use them."""

from dataclasses import replace

import pytest

from heterog.agents.benchmark.tiles import graph_of as tiled
from heterog.agents.benchmark.tiles import nodes_of
from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.pipeline import PipelineSearch, _Enumeration, _Point
from heterog.methods.planner import Budget, Problem
from heterog.methods.teams import (
    apart,
    has_teams,
    host_teams,
    in_teams,
    parts_of,
    rules_of_model,
    team_sizes,
    without_needless_rules,
)
from heterog.methods.tuned_uniform import tuned_decision
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.stages import Caps
from heterog.strategy.strategy import Decision, Sync
from tests.simulator.builders import cluster_of
from tests.strategy.test_layouts import GRAPH

UNLIKE = cluster_of((10.0, ["V100-16GB"] * 4), (5.0, ["P100-12GB"] * 2))


def test_teams_stay_inside_machines_and_below_a_size() -> None:
    assert host_teams(UNLIKE, range(6), 4) == ((0, 1, 2, 3), (4, 5))
    assert host_teams(UNLIKE, range(6), 2) == ((0, 1), (2, 3), (4, 5))
    assert host_teams(UNLIKE, (1, 2, 3, 5), 2) == ((1, 2), (3,), (5,))
    assert host_teams(UNLIKE, range(6), 1) == tuple((device,) for device in range(6))


def test_samples_go_to_teams_and_units_to_members_in_proportion_to_speed() -> None:
    """Two machines, 4 + 4 + 1 and 3 samples a second: 12 of 16 samples and 4 of 16."""
    decision = Decision(devices=(0, 1, 2, 3), shares=(4, 4, 4, 4))
    cluster = cluster_of((1.0, ["T4"] * 3), (1.0, ["T4"]))
    found = in_teams(decision, ((0, 1, 2), (3,)), (4.0, 4.0, 1.0, 3.0), cluster)
    assert sum(found.shares[:3]) == 12
    assert found.shares[3] == 4
    assert found.parts == (4, 4, 1, 1)
    assert found.devices == decision.devices


def test_zero_is_given_up_where_teams_cut_parameters_unlike_each_other() -> None:
    sliced = Decision(devices=tuple(range(6)), shares=(4,) * 6, sync=Sync.ZERO1)
    speeds = (2.0,) * 4 + (1.0,) * 2
    unlike = in_teams(sliced, host_teams(UNLIKE, range(6), 4), speeds, UNLIKE)
    alike = in_teams(sliced, host_teams(UNLIKE, range(6), 2), speeds, UNLIKE)
    assert unlike.sync == Sync.REDUCE_SCATTER_ALL_GATHER
    assert alike.sync == Sync.ZERO1
    rules = rules_of_model(GRAPH)
    assert rules is not None
    evaluator = Evaluator(GRAPH, UNLIKE)
    for decision in (unlike, alike):
        strategy = uniform_strategy(evaluator, replace(decision, shares=(8, 8, 4, 4, 4, 4)))
        evaluator.evaluate(replace(strategy, op_rules=rules.op_rules), Order.FIFO)  # is legal


def test_small_parts_stay_above_nothing() -> None:
    assert parts_of((1.0, 1.0, 1.0)) == (1, 1, 1)
    assert min(parts_of((1000.0, 1.0))) == 1


def test_a_model_with_nothing_to_share_has_no_teams() -> None:
    assert team_sizes(UNLIKE, None) == []
    rules = rules_of_model(GRAPH)
    assert rules is not None
    assert team_sizes(UNLIKE, rules) == [4, 2]
    assert team_sizes(cluster_of((1.0, ["T4"]), (1.0, ["T4"])), rules) == []


def test_a_step_has_only_places_if_neither_samples_nor_ops_are_divided() -> None:
    def of(graph: OpGraph) -> bool:
        evaluator = Evaluator(graph, UNLIKE)
        return Problem(evaluator=evaluator, budget=Budget(evaluations=1)).has_only_places

    tiles = tiled("tiled_ffn", nodes_of("tiled_ffn"))
    assert of(tiles)
    assert not of(replace(tiles, batch_size=2))
    assert not of(replace(GRAPH, batch_size=1))  # its matrix products are


def test_rules_of_teams_of_one_device_say_nothing() -> None:
    """Data parallelism as teams of one device each takes the seconds of no teams at all."""
    evaluator = Evaluator(GRAPH, UNLIKE)
    rules = rules_of_model(GRAPH)
    assert rules is not None
    devices = tuple(range(6))
    decision = tuned_decision(evaluator, devices, evaluator.speeds)
    plain = uniform_strategy(evaluator, decision)
    said = replace(
        uniform_strategy(evaluator, apart(decision)),
        op_rules=rules.op_rules,
    )
    assert not has_teams(apart(decision))
    assert without_needless_rules(said) == plain
    seconds = [evaluator.evaluate(each, Order.FIFO).step_time_s for each in (plain, said)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.02)


def test_a_pipeline_of_teams_means_what_was_simulated() -> None:
    """Four V100 in a team before two P100 as replicas: legal, and priced as in the search."""
    evaluator = Evaluator(GRAPH, UNLIKE)
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=50))
    search = _Enumeration(problem)
    middle = search.num_groups // 2
    for point in (
        _Point(((0, 1, 2, 3), (4, 5)), (middle,), 4, Order.FIFO, teams=(4, 1)),
        _Point(
            ((4, 5), (0, 1, 2, 3)), (middle,), 2, Order.FIFO, teams=(2, 2), caps=Caps.ONE_F_ONE_B
        ),
        _Point(((0, 1, 2, 3), (4, 5)), (middle,), 4, Order.FIFO, teams=(2, 2), recomputing=1),
        _Point(((0, 1, 2, 3), (4, 5)), (middle,), 4, Order.FIFO, slices_updates=True),
    ):
        search.try_points([point])
        strategy = search.strategy_of(point)
        evaluation = evaluator.evaluate(strategy, Order.FIFO)  # checks it
        assert evaluation.step_time_s == search.found[point].step_time_s
        sizes = {len(team) for decision in strategy.decisions for team in decision.teams}
        assert sizes == set(point.teams)
        recomputing = {d.devices for d in strategy.decisions if d.recompute}
        assert recomputing == set(point.stages[: point.recomputing])


def test_a_small_budget_reaches_every_kind_of_point() -> None:
    """What is left to try of one kind does not keep the search from the next."""
    evaluator = Evaluator(GRAPH, Cluster.load("hap_v100_p100_16"))
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=120))
    search = _Enumeration(problem)
    with search.spending.limits():
        search.search()
    assert any(point.teams for point in search.found)
    assert any(point.splits_backward for point in search.found)
    assert any(point.caps for point in search.found)
    assert search.spending.evaluations <= 120
    again = PipelineSearch().plan(
        Problem(evaluator=Evaluator(GRAPH, evaluator.cluster), budget=problem.budget)
    )
    assert [c.strategy for c in again.candidates] == [
        search.strategy_of(point) for point in search.best(6)
    ]
