"""Pipelines of machines: the sequences that are tried, and what comes out of them."""

from itertools import permutations

import pytest

from heterog.cluster import Cluster
from heterog.methods.pipeline import _Enumeration, _Point, stage_sequences
from heterog.methods.planner import Budget, Problem
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from tests.runtime.cases import capture_case, workload_of
from tests.search.asking import compare_methods
from tests.simulator.builders import cluster_of, linear_chain


def test_alike_machines_come_in_one_order_only() -> None:
    alike = stage_sequences(cluster_of((1.0, ["T4"]), (1.0, ["T4"]), (1.0, ["T4"])))
    # Two or three stages: blocks (1, 1), (1, 2), (2, 1), (1, 1, 1), always in the same order.
    assert sorted(alike) == [((0,), (1,)), ((0,), (1,), (2,)), ((0,), (1, 2)), ((0, 1), (2,))]


def test_unlike_machines_come_in_every_order() -> None:
    cluster = cluster_of((1.0, ["T4"]), (2.0, ["T4"]), (1.0, ["V100-16GB"]))
    found = stage_sequences(cluster)
    assert {stages for stages in found if len(stages) == 3} == {
        tuple((device,) for device in order) for order in permutations(range(3))
    }


def test_many_machines_give_few_sequences() -> None:
    cluster = Cluster.load("hap_v100_p100")
    found = stage_sequences(cluster)
    assert 4 <= len(found) <= 60
    kinds = {frozenset(range(16)), frozenset(range(16, 64)), frozenset(range(64))}
    for stages in found:
        devices = [device for stage in stages for device in stage]
        assert len(devices) == len(set(devices))
        assert frozenset(devices) in kinds  # all machines, or all of one kind
    assert {frozenset(d for stage in stages for d in stage) for stages in found} == kinds


def test_there_are_stages_where_micro_batches_are_refused() -> None:
    graph = capture_case(workload_of("contrastive")).graph
    cluster = cluster_of((1.0, ["T4"]), (1.0, ["V100-16GB"]))
    found = compare_methods(graph, cluster, ["pipeline"], budget=Budget(evaluations=20))
    assert {row.outcome for row in found.rows} == {"ok"}


def test_messages_between_stages_count() -> None:
    """64 samples of 1,024 numbers through 0.1 Gbit/s: stages on one host are estimated best."""
    graph = linear_chain(batch_size=64, width=1024)
    cluster = cluster_of((0.1, ["T4"] * 2), (0.1, ["T4"] * 2))
    problem = Problem(evaluator=Evaluator(graph, cluster), budget=Budget(evaluations=50))
    search = _Enumeration(problem)
    between = search._message_seconds(_Point(((0,), (2,)), (1,), 4, Order.FIFO))
    assert between == pytest.approx([64 * 1024 * 4 / (0.1e9 / 8)])
    on_two = search._message_seconds(_Point(((0, 1), (2, 3)), (1,), 4, Order.FIFO))
    assert on_two == between  # two devices of a host share its NIC
    (first, second), *_ = search._sequences(4, Order.FIFO)
    assert {cluster.host_of[device] for device in (*first, *second)} in ({0}, {1})
