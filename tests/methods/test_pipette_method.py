"""The method: what it enumerates and refuses, what its model knows, and what dedication gains."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from heterog.cluster import Cluster, PairLimit
from heterog.graph.op_graph import OpGraph
from heterog.lowering.program import FloatArray
from heterog.methods.host_order import HostTraffic
from heterog.methods.pipette.communication import HostRates
from heterog.methods.pipette.planner import (
    LayoutCosts,
    Pipette,
    _Search,
    _Trial,
    host_sets,
    points,
    ranks,
    stage_by_stage,
)
from heterog.methods.planner import Budget, Problem
from heterog.search.judging import run_method
from heterog.search.request import GivenLayout
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import parse_layout
from heterog.strategy.layouts.placed import place_layout
from tests.search.asking import run_methods
from tests.simulator.builders import cluster_of
from tests.strategy.test_layouts import graph_of
from tests.thorough import THOROUGH

NUM_HOSTS = 8
RATE = 1e7


def with_rates(cluster: Cluster, rates: FloatArray) -> Cluster:
    """A cluster with a measured matrix.  # [num_hosts, num_hosts] bytes/s"""
    hosts = range(cluster.num_hosts)
    pairs = [
        PairLimit(sources=(i,), targets=(j,), bandwidth_bytes_per_s=float(rates[i, j]))
        for i in hosts
        for j in hosts
        if i != j
    ]
    return replace(cluster, pairs=tuple(pairs))


def rows_of_hosts(num_hosts: int = NUM_HOSTS) -> Cluster:
    """Hosts of two V100 with fast NICs: what lies between them limits."""
    return cluster_of(*[(100.0, ["V100-16GB"] * 2)] * num_hosts)


def slow_between(pairs: list[tuple[int, int]], times: float = 20.0) -> FloatArray:
    """All rates equal but for some pairs, both ways."""
    rates = np.full((NUM_HOSTS, NUM_HOSTS), RATE)
    for i, j in pairs:
        rates[i, j] = rates[j, i] = RATE / times
    return rates


@lru_cache(maxsize=1)
def graph() -> OpGraph:
    return graph_of(8)


def problem(cluster: Cluster, budget: str = "200e") -> Problem:
    return Problem(evaluator=Evaluator(graph(), cluster), budget=Budget.parse(budget))


def test_it_enumerates_whole_hosts_and_nothing_that_does_not_divide() -> None:
    found = list(points(Evaluator(graph(), rows_of_hosts())))
    assert {point.layout.pp for point in found} == {1, 2, 4, 8}
    assert {point.layout.tp for point in found} == {1, 2}
    for point in found:
        layout = point.layout
        assert layout.tp * layout.pp * layout.dp == 2 * NUM_HOSTS
        assert layout.dp * layout.micro_batch * point.num_micro == graph().batch_size
    assert len(found) == len(set(found))


def test_unlike_hosts_are_taken_together_only_if_they_have_as_many_devices() -> None:
    mixed = cluster_of((1.0, ["V100-16GB"] * 2), (1.0, ["T4"] * 2), (1.0, ["T4"] * 2))
    assert host_sets(mixed) == ((0, 1, 2), (0,), (1, 2))
    uneven = cluster_of((1.0, ["V100-16GB"]), (1.0, ["T4"] * 2))
    assert host_sets(uneven) == ((0,), (1,))


def test_ranks_go_stage_by_stage_and_hosts_as_given_are_the_usual_numbering() -> None:
    cluster = rows_of_hosts(6)
    assert ranks(cluster, stage_by_stage(6, 3), 3) == tuple(range(12))
    rows = np.array([0, 1, 2, 3, 4, 5], np.int32)  # two pipelines of three hosts
    assert ranks(cluster, rows, 3) == (0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11)


def test_what_the_models_know_is_counted_in_the_graph() -> None:
    """A message is 6 tokens of 16 floats, gradients are those of the largest stage."""
    costs = LayoutCosts(Evaluator(graph(), rows_of_hosts()))
    by_stages = {
        point.layout.pp: costs.costs(point)
        for point in points(Evaluator(graph(), rows_of_hosts()))
        if point.layout.tp == 1 and point.layout.micro_batch == 1
    }
    for stages, found in by_stages.items():
        assert found.message_bytes == (0.0 if stages == 1 else 4 * 6 * 16)
        assert found.replicas_per_host == 2
    block = 2 * 16 + 16 * 64 + 64 + 64 * 16 + 16
    whole = 8 * block + 40 * 16 + 2 * 16 + 16 * 40
    assert by_stages[1].gradient_bytes == 4 * whole
    assert by_stages[8].gradient_bytes == 4 * (block + 16 * 40 + 2 * 16)
    assert by_stages[1].forward_s > by_stages[2].forward_s > by_stages[8].forward_s > 0.0


def test_its_best_is_a_layout_that_a_person_can_write() -> None:
    cluster = rows_of_hosts()
    row = run_method(Pipette(), problem(cluster))
    assert row.outcome == "ok"
    assert "its model says " in row.note
    written = parse_layout(row.note.partition(" on hosts")[0])
    given = run_method(GivenLayout(written), problem(cluster))
    assert row.step_time_s == pytest.approx(given.step_time_s, rel=0.02)


def test_slow_pairs_are_kept_out_of_the_way() -> None:
    """One of three slow pairs is on the way of hosts as given, whatever the layout."""
    cluster = with_rates(rows_of_hosts(), slow_between([(0, 1), (0, 2), (0, 4)]))
    search = problem(cluster)
    row = run_method(Pipette(), search)
    assert row.step_time_s is not None
    written = row.note.partition(" on hosts")[0]
    as_given = run_method(GivenLayout(parse_layout(written)), search)
    assert as_given.step_time_s is not None
    assert 1.2 * row.step_time_s < as_given.step_time_s, (row.note, as_given.note)
    for text in ("dp=16", "pp=8,micro_batch=1", "pp=4,micro_batch=1", "pp=2,micro_batch=1"):
        given = run_method(GivenLayout(parse_layout(text)), search)
        assert given.step_time_s is None or row.step_time_s <= given.step_time_s * (1 + 1e-9)


def test_auto_asks_it_only_where_pairs_differ() -> None:
    plain = rows_of_hosts(2)
    alike = with_rates(rows_of_hosts(), np.full((NUM_HOSTS, NUM_HOSTS), RATE))
    unlike = with_rates(rows_of_hosts(), slow_between([(0, 1)]))
    assert [Pipette.joins_auto(graph(), each) for each in (plain, alike, unlike)] == [
        False,
        False,
        True,
    ]
    assert HostRates.of_cluster(unlike).differ
    rows = run_methods(Evaluator(graph(), plain), ["auto"], budget=Budget(evaluations=20))
    assert "pipette" not in {row.method for row in rows}
    rows = run_methods(
        Evaluator(graph(), plain), ["auto", "pipette"], budget=Budget(evaluations=20)
    )
    assert "pipette" in {row.method for row in rows}


@THOROUGH
def test_it_goes_on_where_it_was_and_ends_when_all_is_tried() -> None:
    cluster = with_rates(rows_of_hosts(), slow_between([(1, 2)]))
    whole = problem(cluster)
    all_at_once = Pipette().plan(whole)
    cut = replace(problem(cluster), budget=Budget(evaluations=3))
    first = Pipette().plan(cut)
    assert 0 < first.num_evaluations <= 3 < all_at_once.num_evaluations
    second = Pipette().plan(replace(cut, budget=Budget(evaluations=200)))
    assert second.candidates == all_at_once.candidates
    third = Pipette().plan(replace(cut, budget=Budget(evaluations=200)))
    assert third.num_evaluations == 0


def test_it_says_what_it_refuses() -> None:
    """Seven hosts, two blocks, a batch of 32: neither replicas nor stages divide."""
    cluster = cluster_of(*[(1.0, ["T4"])] * 7)
    row = run_method(
        Pipette(), Problem(evaluator=Evaluator(graph_of(2), cluster), budget=Budget(evaluations=9))
    )
    assert row.outcome == "not_applicable"
    assert "divides a batch of 32: sets of alike hosts have 7 devices" in row.shortage


def test_a_weight_that_stages_share_closes_the_row_to_a_ring() -> None:
    """The head runs where the embedding is, so that the last stage sends to the first one.

    No published objective knows of it; the traffic of the program does.
    """
    rates = slow_between([(0, host) for host in range(2, NUM_HOSTS)])  # it has one good neighbour
    cluster = with_rates(rows_of_hosts(), rates)
    evaluator = Evaluator(graph_of(8, tied=True), cluster)
    search = _Search(Problem(evaluator=evaluator, budget=Budget(evaluations=200)))
    point = next(each for each in points(evaluator) if each.layout.pp == NUM_HOSTS)
    given = tuple(range(NUM_HOSTS))
    strategy = place_layout(point.layout, evaluator.graph, cluster).strategy
    traffic = HostTraffic.of_strategy(strategy, evaluator)
    assert traffic is not None
    assert traffic.transfers_bytes[NUM_HOSTS - 1, 0] > 0.0
    order = search._counted(_Trial(point=point, order=given), traffic)
    place = order.index(0)
    assert 1 in (order[place - 1], order[(place + 1) % NUM_HOSTS]), "its one good neighbour"
