"""Timelines by hand, then their invariants on random programs."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterog.cluster import Cluster
from heterog.cluster.topology import Sends
from heterog.graph.op_graph import OpGraph, Phase
from heterog.lowering.program import FIRST_LINK_KIND
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.timeline import Cause, Timeline
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.simulator import builders

CLUSTER = builders.cluster_of((10.0, ["V100-16GB"]), (10.0, ["P100-12GB"]))


def timeline_of(graph: OpGraph, strategy: Strategy, cluster: Cluster = CLUSTER) -> Timeline:
    evaluator = Evaluator(graph, cluster)
    program, start, finish = evaluator.timings(evaluator.encode(strategy), Order.FIFO)
    return Timeline(program, start, finish, cluster, graph)


def two_layers() -> OpGraph:
    """y = x a b; backward: input gradient of b, then the weight gradients of b and a."""
    builder = builders.GraphBuilder(8)
    x = builder.batch(1024)
    a, b = (builder.parameter(1024, 1024, name=f"{name}.weight") for name in "ab")
    hidden = builder.mm(x, a, module="a")
    loss = builder.mm(hidden, b, module="b")
    above = builder.mm(loss, b, module="b", phase=Phase.BACKWARD)
    gradient_b = builder.weight_gradient(hidden, loss, b, module="b")
    gradient_a = builder.weight_gradient(x, above, a, module="a")
    builder.update(b, gradient_b, module="b")
    builder.update(a, gradient_a, module="a")
    return builder.build(loss)


def pipeline(cluster: Cluster = CLUSTER) -> Timeline:
    """Module a on the V100, module b on the P100: forward, send, backward, send back."""
    graph = two_layers()
    first = Decision(devices=(0,), shares=(8,))
    second = Decision(devices=(1,), shares=(8,))
    return timeline_of(graph, builders.strategy_of(graph, cluster, [first, second]), cluster)


def data_parallel(*, bucket_bytes: int = 0) -> Timeline:
    graph = two_layers()
    both = Decision(devices=(0, 1), shares=(4, 4))
    strategy = builders.strategy_of(graph, CLUSTER, both, bucket_bytes=bucket_bytes)
    return timeline_of(graph, strategy)


def test_names_of_a_pipeline() -> None:
    timeline = pipeline()
    names = [timeline.name(task) for task in range(timeline.program.num_tasks)]
    assert names == [
        "mm a forward",
        "send mm a A:0 -> B:0",
        "mm b forward",
        "mm b backward",
        "weight_gradient b backward",
        "update b.weight",
        "send mm b B:0 -> A:0",
        "weight_gradient a backward",
        "update a.weight",
    ]
    assert [timeline.kind(task) for task in (0, 1, 4, 5)] == [
        "forward",
        "send",
        "backward",
        "update",
    ]
    assert [timeline.module(task) for task in (0, 1, 2, 5)] == ["a", "a", "b", "b"]
    assert timeline.phase(6) == "backward"
    assert [lane.name for lane in timeline.lanes] == [
        "A:0 V100-16GB compute",
        "B:0 P100-12GB compute",
        "A:0 -> B:0",
        "B:0 -> A:0",
    ]
    assert [lane.tasks for lane in timeline.lanes[2:]] == [(1,), (6,)]


def test_critical_path_of_a_pipeline() -> None:
    timeline = pipeline()
    path = timeline.critical_path
    # The weight gradient and the update of b run while the input gradient travels.
    assert [step.task for step in path] == [0, 1, 2, 3, 6, 7, 8]
    assert path[0].cause == Cause.BEGIN
    assert {step.cause for step in path[1:]} == {Cause.DEPENDENCY}
    assert sum(step.wait_s for step in path) == 0.0
    assert {timeline.module(step.task) for step in path} == {"a", "b"}
    assert sum(step.seconds for step in path) == pytest.approx(timeline.seconds)


def test_critical_path_where_sends_block() -> None:
    """What its device sent is why an op began late."""
    path = pipeline(replace(CLUSTER, sends=Sends.BLOCKING)).critical_path
    # The slower device computes its weight gradient when the input gradient has arrived.
    assert [step.task for step in path] == [0, 1, 2, 3, 6, 4, 5]
    assert [step.cause for step in path[-2:]] == [Cause.SEND, Cause.DEPENDENCY]
    assert [step.wait_s for step in path] == pytest.approx([0.0] * len(path))


def test_critical_path_of_contended_links() -> None:
    timeline = data_parallel()
    path = timeline.critical_path
    names = [timeline.name(step.task) for step in path]
    # Two all-reduces of 4 MiB at 10 Gbit/s take longer than all compute: the second one waits for
    # the first, not for its gradient.
    assert names[-3:] == ["all-reduce b.weight", "all-reduce a.weight", "update a.weight"]
    assert path[-2].cause == Cause.COMMUNICATOR
    assert "ring all-reduce A:0 B:0" in [lane.name for lane in timeline.lanes]


def test_both_collectives_of_a_communicator_are_on_one_lane() -> None:
    graph = two_layers()
    cut = Decision(devices=(0, 1), shares=(4, 4), sync=Sync.REDUCE_SCATTER_ALL_GATHER)
    timeline = timeline_of(graph, builders.strategy_of(graph, CLUSTER, cut))
    (lane,) = timeline.lanes[CLUSTER.num_devices :]
    assert lane.name == "collectives A:0 B:0"
    assert sorted(timeline.kind(task) for task in lane.tasks) == [
        "all-gather", "all-gather", "reduce-scatter", "reduce-scatter",
    ]  # fmt: skip
    ends = timeline.finish[list(lane.tasks)]
    assert (timeline.start[list(lane.tasks)][1:] >= ends[:-1]).all()


def test_a_transfer_waits_for_links() -> None:
    graph = two_layers()
    served = Decision(devices=(0, 1), shares=(4, 4), sync=Sync.PARAMETER_SERVER)
    timeline = timeline_of(graph, builders.strategy_of(graph, CLUSTER, served, homes=0))
    causes = {timeline.name(step.task): step.cause for step in timeline.critical_path}
    assert causes["push a.weight B:0 -> A:0"] == Cause.LINK


def test_names_of_buckets_and_servers() -> None:
    bucketed = data_parallel(bucket_bytes=10**9)
    names = {bucketed.name(task) for task in range(bucketed.program.num_tasks)}
    assert {"flatten 2 tensors", "all-reduce 2 tensors", "update a.weight"} <= names
    graph = two_layers()
    served = Decision(devices=(0, 1), shares=(4, 4), sync=Sync.PARAMETER_SERVER)
    timeline = timeline_of(graph, builders.strategy_of(graph, CLUSTER, served, homes=0))
    names = {timeline.name(task) for task in range(timeline.program.num_tasks)}
    assert {"push a.weight B:0 -> A:0", "sum a.weight", "pull a.weight A:0 -> B:0"} <= names


def test_an_op_that_waited_for_its_stream() -> None:
    timeline = data_parallel()
    path = timeline.critical_path
    # The weight gradient of b was ready with the forward, but the input gradient came first.
    (position,) = (i for i, s in enumerate(path) if timeline.name(s.task).startswith("weight"))
    assert path[position].cause == Cause.STREAM
    assert timeline.name(path[position - 1].task) == "mm b backward"


def test_a_gap_is_a_wait() -> None:
    timeline = pipeline()
    late = timeline.program.num_tasks - 1
    start, finish = timeline.start.copy(), timeline.finish.copy()
    start[late] += 1.0
    finish[late] += 1.0
    delayed = Timeline(timeline.program, start, finish, CLUSTER, timeline.graph)
    assert delayed.critical_path[-1].wait_s == pytest.approx(1.0)
    assert sum(step.wait_s for step in delayed.critical_path) == pytest.approx(1.0)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_invariants_of_random_programs(seed: int) -> None:
    rng = Random(seed)
    graph, cluster = builders.random_graph(rng), builders.random_cluster(rng)
    evaluator = Evaluator(graph, cluster)
    choice = evaluator.encode(builders.random_strategy(rng, graph, cluster))
    order = rng.choice(list(Order))
    _, peak = evaluator.simulate(choice, order)
    program, start, finish = evaluator.timings(choice, order)
    timeline = Timeline(program, start, finish, cluster, graph)

    tasks = sorted(task for lane in timeline.lanes for task in lane.tasks)
    assert tasks == list(range(program.num_tasks))
    for device, lane in enumerate(timeline.lanes[: cluster.num_devices]):
        seconds = sum(float(finish[task] - start[task]) for task in lane.tasks)
        assert timeline.busy_s[device] == pytest.approx(seconds)
        assert timeline.busy_s[device] <= timeline.seconds * (1.0 + 1e-9)
        assert all(program.kind[task] < FIRST_LINK_KIND for task in lane.tasks)
        times, num_bytes = timeline.memory(device)
        assert np.all(np.diff(times) >= 0.0)
        assert num_bytes.max() == pytest.approx(peak[device], rel=1e-9, abs=1.0)
        assert num_bytes[-1] == pytest.approx(program.resident_bytes[device], abs=1.0)
    assert all(timeline.name(task) for task in tasks)

    # The fast engine leaves no gap that the path cannot explain.
    path = timeline.critical_path
    assert sum(step.seconds for step in path) == pytest.approx(timeline.seconds, rel=1e-6)
    assert path[0].cause == Cause.BEGIN
    assert [start[step.task] for step in path] == sorted(start[step.task] for step in path)
    assert min(step.wait_s for step in path) >= 0.0
    assert min(step.seconds for step in path) >= 0.0

    program, start, finish = evaluator.referee_timings(choice, order)
    referee = Timeline(program, start, finish, cluster, graph)
    total = sum(step.seconds + step.wait_s for step in referee.critical_path)
    assert total == pytest.approx(referee.seconds, rel=1e-9)
