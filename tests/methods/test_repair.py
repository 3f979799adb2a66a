"""Repair: cases that need each kind of it, and what must hold for every strategy."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.cluster import Cluster
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import P, S
from heterog.methods.changes import without_devices
from heterog.methods.planner import Budget, Spending
from heterog.methods.repair import _Repair, repair
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.stages import layer_blocks
from heterog.strategy.strategy import Decision, Strategy
from tests.simulator.builders import (
    GraphBuilder,
    cluster_of,
    linear_chain,
    random_cluster,
    random_graph,
    random_strategy,
    strategy_of,
)
from tests.strategy.test_layouts import GRAPH
from tests.strategy.test_recomputation import layers

BUDGET = Budget(evaluations=300)
TWO = cluster_of((10.0, ["T4"]), (10.0, ["T4"]))


def with_memory(cluster: Cluster, sizes: Sequence[float]) -> Cluster:
    pairs = zip(cluster.devices, sizes, strict=True)
    devices = tuple(replace(device, usable_memory_bytes=int(size)) for device, size in pairs)
    return replace(cluster, devices=devices)


def peaks(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> tuple[int, ...]:
    return Evaluator(graph, cluster).evaluate(strategy, Order.FIFO).peak_memory_bytes


def repaired(
    graph: OpGraph, cluster: Cluster, decisions: Decision | Sequence[Decision]
) -> Strategy:
    """Repair, and check that it was needed and that the result fits."""
    evaluator = Evaluator(graph, cluster)
    strategy = strategy_of(graph, cluster, decisions)
    assert not evaluator.evaluate(strategy, Order.FIFO).is_ok
    found = repair(evaluator, strategy, Order.FIFO, budget=BUDGET)
    assert evaluator.referee(found, Order.FIFO).is_ok
    return found


def test_groups_recompute() -> None:
    """One sample on one device: nothing else can help. As few groups as it takes."""
    graph = layers(6, batch=1, width=4096)
    one = cluster_of((10.0, ["T4"]))
    whole = Decision(devices=(0,), shares=(1,))
    again = replace(whole, recompute=True)
    enough = [
        peaks(graph, one, strategy_of(graph, one, [again] * count + [whole] * (7 - count)))[0]
        for count in range(7)
    ]
    assert enough == sorted(enough, reverse=True)
    tight = with_memory(one, [enough[3]])
    found = repaired(graph, tight, whole)
    assert sum(decision.recompute for decision in found.decisions) == 3


def test_more_micro_batches() -> None:
    """A single layer holds nothing that it could make again later."""
    graph = layers(1)
    one = cluster_of((10.0, ["T4"]))
    whole = Decision(devices=(0,), shares=(1024,))
    micro = (tuple([256] * 4),)
    (enough,) = peaks(graph, one, strategy_of(graph, one, whole, micro_batches=micro))
    found = repaired(graph, with_memory(one, [enough]), whole)
    assert found.micro_batches == micro


def needs_the_whole_batch() -> OpGraph:
    """A wide activation of every sample; an op that sees all samples forbids micro-batches."""
    builder = GraphBuilder(64)
    x = builder.batch(4)
    weight = builder.parameter(4, 4)
    mixed = builder.op("mystery", (x,), (64, 4), module="a")
    wide = builder.op("widen", (x, mixed), (64, 4096), module="a", rule=((S(0), S(0)), (S(0),)))
    gradient = builder.op("back", (wide, x), (4, 4), module="a", rule=((S(0), S(0)), (P,)))
    builder.update(weight, gradient, module="a")
    return builder.build(wide, state_ratio=0.0)


def test_samples_move_to_where_there_is_room() -> None:
    graph = needs_the_whole_batch()
    even = Decision(devices=(0, 1), shares=(32, 32))
    first, second = peaks(graph, TWO, strategy_of(graph, TWO, even))
    tight = with_memory(TWO, [0.8 * first, 1.5 * second])
    found = repaired(graph, tight, even)
    shares = found.decisions[0].shares
    assert shares[0] in (24, 25)
    assert sum(shares) == 64


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_groups_leave_a_device_that_is_too_small_for_them(devices: tuple[int, ...]) -> None:
    """Weights and their state are what is too large."""
    graph = linear_chain(("a", "b", "c", "d"))
    decision = Decision(devices=devices, shares=(8,) if len(devices) == 1 else (4, 4))
    before = peaks(graph, TWO, strategy_of(graph, TWO, decision))
    tight = with_memory(TWO, [0.6 * before[0], 2.0 * max(before)])
    found = repaired(graph, tight, decision)
    left = [d for d in found.decisions if d.devices == (1,)]
    assert len(left) == 2


def test_replicas_become_a_team() -> None:
    """Two devices of one machine share every matrix instead of having it twice."""
    one = cluster_of((10.0, ["T4"] * 2), (10.0, ["T4"]))
    evaluator = Evaluator(GRAPH, one)
    replicas = Decision(devices=(0, 1, 2), shares=(12, 12, 8))
    strategy = strategy_of(GRAPH, one, replicas)
    before = peaks(GRAPH, one, strategy)
    tight = with_memory(one, [0.9 * before[0], 0.9 * before[1], 2.0 * before[2]])
    evaluator = Evaluator(GRAPH, tight)
    work = _Repair(evaluator, Order.FIFO, Spending(BUDGET, evaluator))
    current = work._evaluate(strategy_of(GRAPH, tight, replicas))
    (made,) = work._form_teams(current)
    assert {each.teams for each in made.strategy.decisions} == {((0, 1), (2,))}
    assert work._missing(made) < work._missing(current)
    found = repair(evaluator, current.strategy, Order.FIFO, budget=BUDGET)
    assert evaluator.referee(found, Order.FIFO).is_ok


def test_whole_layers_recompute_where_groups_do_not_suffice() -> None:
    """What groups of a layer read of each other is kept, unless the layer recomputes whole."""
    one = cluster_of((10.0, ["T4"]))
    groups = len(group_ops(GRAPH).names)
    whole = Decision(devices=(0,), shares=(GRAPH.batch_size,))
    by_group = strategy_of(GRAPH, one, replace(whole, recompute=True))
    by_layer = replace(by_group, blocks=layer_blocks(GRAPH))
    (enough,), (least,) = peaks(GRAPH, one, by_group), peaks(GRAPH, one, by_layer)
    assert least < enough
    tight = with_memory(one, [least])
    evaluator = Evaluator(GRAPH, tight)
    work = _Repair(evaluator, Order.FIFO, Spending(BUDGET, evaluator))
    current = work._evaluate(strategy_of(GRAPH, tight, [whole] * groups))
    of_groups, of_layers = work._recompute(current)
    assert not work._fits(of_groups)
    assert work._fits(of_layers)
    assert of_layers.strategy.blocks


def test_devices_leave_their_teams() -> None:
    decision = Decision(
        devices=(0, 1, 2, 3), shares=(2, 2, 2, 2), teams=((0, 1), (2, 3)), parts=(2, 1, 2, 1)
    )
    left = without_devices(decision, {1, 2, 3}, 0)
    assert left == Decision(devices=(0,), shares=(8,), teams=((0,),), parts=(2,))
    left = without_devices(decision, {3}, 0)
    assert (left.teams, left.parts) == (((0, 1), (2,)), (2, 1, 2))


def test_two_kinds_together() -> None:
    """What a device alone must hold for one sample is less than with either kind alone."""
    graph = layers(8, batch=2, width=4096)
    one = cluster_of((10.0, ["T4"]))
    whole = Decision(devices=(0,), shares=(2,))
    again = replace(whole, recompute=True)
    (both,) = peaks(graph, one, strategy_of(graph, one, again, micro_batches=((1, 1),)))
    found = repaired(graph, with_memory(one, [1.02 * both]), whole)
    assert found.num_micro_batches == 2
    assert any(decision.recompute for decision in found.decisions)


def test_what_cannot_be_repaired_comes_as_near_as_it_can() -> None:
    graph = layers(6, batch=1, width=4096)
    tiny = with_memory(cluster_of((10.0, ["T4"])), [1000.0])
    strategy = strategy_of(graph, tiny, Decision(devices=(0,), shares=(1,)))
    evaluator = Evaluator(graph, tiny)
    found = repair(evaluator, strategy, Order.FIFO, budget=BUDGET)
    before, after = (
        evaluator.evaluate(each, Order.FIFO).overflow_bytes for each in (strategy, found)
    )
    assert 0 < after < before
    assert all(decision.recompute for decision in found.decisions)


def test_a_budget_of_one_evaluation_changes_nothing() -> None:
    graph = layers(6, batch=1, width=4096)
    tiny = with_memory(cluster_of((10.0, ["T4"])), [1000.0])
    strategy = strategy_of(graph, tiny, Decision(devices=(0,), shares=(1,)))
    found = repair(Evaluator(graph, tiny), strategy, Order.FIFO, budget=Budget(evaluations=1))
    assert found == strategy


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_any_strategy(seed: int) -> None:
    rng = Random(seed)
    graph, cluster = random_graph(rng), random_cluster(rng)
    loose = random_strategy(rng, graph, cluster)
    needed = peaks(graph, cluster, loose)
    tight = with_memory(cluster, [max(rng.uniform(0.3, 1.3) * size, 1e6) for size in needed])
    strategy = replace(loose, cluster=tight.fingerprint)
    evaluator, order = Evaluator(graph, tight), rng.choice(list(Order))
    found = repair(evaluator, strategy, order, budget=Budget(evaluations=60))
    assert evaluator.num_evaluations <= 60 + 1  # a last confirmation by the referee
    again = repair(evaluator, strategy, order, budget=Budget(evaluations=60))
    assert again == found
    before, after = (evaluator.evaluate(each, order) for each in (strategy, found))
    assert after.overflow_bytes <= before.overflow_bytes
    if evaluator.referee(strategy, order).is_ok:
        assert found == strategy
