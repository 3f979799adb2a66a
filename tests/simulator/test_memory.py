"""Peak memory against a slow reference, and against answers by hand."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from heterog import Workload, capture
from heterog.cluster.topology import Execution
from heterog.lowering.program import TaskKind
from heterog.lowering.resident import STEPPED_BYTES, STEPPED_BYTES_CPU, held_bytes
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator
from heterog.simulator.memory import (
    NOTHING_COMPILED,
    buffer_lives,
    kept_values,
    memory_of_buffers,
    task_runs,
)
from heterog.strategy.strategy import Decision, Sync
from tests.simulator import reference
from tests.simulator.builders import (
    GraphBuilder,
    cluster_of,
    linear_chain,
    random_case,
    strategy_of,
)
from tests.thorough import cases

WIDTH = 1024
WEIGHT = 4 * WIDTH * WIDTH  # bytes of a weight
SAMPLE = 4 * WIDTH  # bytes of one sample's activation
ADAM = 2.0  # state bytes per parameter byte


@pytest.mark.parametrize("execution", [Execution.EAGER, Execution.COMPILED])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=cases(150, 30), deadline=None)
def test_equals_the_slow_reference(execution: Execution, seed: int) -> None:
    rng = Random(seed)
    evaluator, choice = random_case(rng, execution)
    order = rng.choice(list(Order))
    program, start, finish = evaluator.timings(choice, order)
    tables = evaluator.tables_of(choice)
    kept = evaluator.kept_values(tables, choice)
    results = memory_of_buffers(program, tables, kept).tolist()
    runs = task_runs(program, kept).tolist()
    assert execution.compiles or not any(results)
    assert execution.compiles or runs == list(range(program.num_tasks))
    _, peak = evaluator.simulate(choice, order)
    inside = evaluator.inside(tables, choice, held_bytes(tables, choice))
    made = reference.made_inside(program, inside)
    expected = reference.memory(program, start, finish, results, runs, made)
    np.testing.assert_allclose(peak, expected, rtol=1e-9)


def test_delayed_weight_gradients_are_joined_with_nothing() -> None:
    """A kernel would read what is not made yet."""
    data = torch.zeros(8, 16), torch.zeros(8, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))
    graph = capture(Workload(model, data, nn.functional.mse_loss, torch.optim.SGD))
    tables = Evaluator(graph, cluster_of((10.0, ["T4"]))).tables
    runs = kept_values(graph, tables, Execution.COMPILED, 1, splits_backward=True).runs
    weights = np.flatnonzero(tables.op_is_weights)
    assert len(weights)
    assert runs[weights].tolist() == weights.tolist()
    assert not np.isin(np.delete(runs, weights), weights).any()
    assert (runs != np.arange(len(runs))).any()


def with_margin(num_bytes: float) -> int:
    """What is reported where tensors need so many bytes."""
    return round(num_bytes * (1.0 + MEMORY_MARGIN))


def test_one_device_by_hand() -> None:
    graph = linear_chain(("a", "b"))
    cluster = cluster_of((10.0, ["T4"]))
    strategy = strategy_of(graph, cluster, Decision(devices=(0,), shares=(8,)))
    resident = 2 * WEIGHT * (1 + ADAM) + 8 * SAMPLE
    # The gradient of y1 comes before that of b's weight, and ops before updates: at the end both
    # weights' gradients and that of y1 are alive.
    expected = resident + 2 * WEIGHT + 8 * SAMPLE
    (peak,) = Evaluator(graph, cluster).evaluate(strategy, Order.FIFO).peak_memory_bytes
    assert peak == with_margin(expected)


@pytest.mark.parametrize(
    ("device_type", "optimizer", "made"),
    [
        ("T4", "Adam", 1.5 * 2 * WEIGHT),  # of both weights, in one call
        ("CPU", "Adam", 3 * STEPPED_BYTES_CPU),  # of a piece of one
        ("CPU", "Adafactor", 3 * WEIGHT),
    ],
)
def test_what_an_optimizer_makes_while_it_steps_by_hand(
    device_type: str, optimizer: str, made: float
) -> None:
    assert STEPPED_BYTES_CPU < WEIGHT < STEPPED_BYTES / 2
    graph = replace(linear_chain(("a", "b")), optimizer=optimizer)
    graph = replace(graph, optimizer_step_ratios=(3.0, 1.5))
    cluster = cluster_of((10.0, [device_type]))
    strategy = strategy_of(graph, cluster, Decision(devices=(0,), shares=(8,)))
    (peak,) = Evaluator(graph, cluster).evaluate(strategy, Order.FIFO).peak_memory_bytes
    # The first update begins when all gradients are there. That of y1, for which b's weight was
    # read last, is held until then.
    assert peak == with_margin(2 * WEIGHT * (1 + ADAM) + 2 * 8 * SAMPLE + 2 * WEIGHT + made)


@pytest.mark.parametrize("sync", [Sync.PARAMETER_SERVER, Sync.ZERO2, Sync.RING])
def test_what_an_optimizer_makes_is_of_the_parameters_that_a_device_steps(sync: Sync) -> None:
    graph = replace(linear_chain(("a", "b")), optimizer_step_ratios=(0.0, 3.0))
    cluster = cluster_of((10.0, ["T4", "T4"]))
    slices = (3, 1) if sync.is_sharded else ()
    decision = Decision(devices=(0, 1), shares=(4, 4), sync=sync, slices=slices)
    strategy = strategy_of(graph, cluster, decision)
    if sync == Sync.PARAMETER_SERVER:
        strategy = strategy_of(graph, cluster, decision, homes=1)
    evaluator = Evaluator(graph, cluster)
    choice = evaluator.encode(strategy)
    tables = evaluator.tables_of(choice)
    found = evaluator.inside(tables, choice, held_bytes(tables, choice)).stepping
    parts = {Sync.PARAMETER_SERVER: (0, 1), Sync.ZERO2: (0.75, 0.25), Sync.RING: (1, 1)}[sync]
    assert found == pytest.approx([3 * 2 * WEIGHT * part for part in parts])


def test_a_value_lives_until_its_last_reader() -> None:
    builder = GraphBuilder(4)
    x = builder.batch(WIDTH)
    weight = builder.parameter(WIDTH, WIDTH)
    first = builder.mm(x, weight, module="a")
    second = builder.relu(first, module="a")
    third = builder.relu(second, module="a")
    fourth = builder.relu(third, module="a")
    gradient = builder.weight_gradient(x, first, weight, module="a")
    builder.update(weight, gradient, module="a")
    graph = builder.build(fourth, state_ratio=0.0)
    cluster = cluster_of((10.0, ["T4"]))
    strategy = strategy_of(graph, cluster, Decision(devices=(0,), shares=(4,)))
    (peak,) = Evaluator(graph, cluster).evaluate(strategy, Order.FIFO).peak_memory_bytes
    # At the gradient only the first product is alive: the last one was freed at once.
    gradient_time = WEIGHT + 4 * SAMPLE
    assert peak == with_margin(WEIGHT + 4 * SAMPLE + max(gradient_time, 3 * 4 * SAMPLE))


@pytest.mark.parametrize(
    ("execution", "activations"),
    [(Execution.EAGER, 3 * 4096 * SAMPLE), (Execution.COMPILED, 2 * 4096 * SAMPLE + 4 * 4096)],
)
def test_a_compiler_writes_over_what_nobody_reads(execution: Execution, activations: int) -> None:
    builder = GraphBuilder(4096)
    x = builder.batch(WIDTH)
    wide, narrow = builder.parameter(WIDTH, WIDTH), builder.parameter(WIDTH, 1)
    first = builder.relu(builder.mm(x, wide, module="a"), module="a")
    product = builder.mm(x, wide, module="b")
    # Op by op, this product and what two ops make of it are there, two at a time, and ``first``.
    # A compiler keeps one of the three in registers and writes the other over the product; the
    # peak is then at the narrow product.
    second = builder.relu(builder.relu(product, module="b"), module="b")
    builder.mm(first, narrow, module="c")
    loss = builder.mm(second, narrow, module="c")
    graph = builder.build(loss, state_ratio=0.0)
    cluster = replace(cluster_of((10.0, ["T4"])), execution=execution)
    strategy = strategy_of(graph, cluster, Decision(devices=(0,), shares=(4096,)))
    (peak,) = Evaluator(graph, cluster).evaluate(strategy, Order.FIFO).peak_memory_bytes
    resident = WEIGHT + 4 * WIDTH + 4096 * SAMPLE
    assert peak == with_margin(resident + activations)


def test_resident_bytes_of_replicas() -> None:
    graph = linear_chain(("a",), batch_size=6)
    cluster = cluster_of((10.0, ["T4", "T4"]), (10.0, ["T4"]))
    evaluator = Evaluator(graph, cluster)
    decision = Decision(devices=(0, 1), shares=(4, 2))
    program = evaluator.program(evaluator.encode(strategy_of(graph, cluster, decision)))
    kept = WEIGHT * (1 + ADAM)
    assert program.resident_bytes == pytest.approx([kept + 4 * SAMPLE, kept + 2 * SAMPLE, 0.0])


@pytest.mark.parametrize("home", [0, 2])
def test_resident_bytes_with_a_server(home: int) -> None:
    graph = linear_chain(("a",), batch_size=6)
    cluster = cluster_of((10.0, ["T4", "T4"]), (10.0, ["T4"]))
    evaluator = Evaluator(graph, cluster)
    decision = Decision(devices=(0, 1), shares=(4, 2), sync=Sync.PARAMETER_SERVER)
    strategy = strategy_of(graph, cluster, decision, homes=home)
    program = evaluator.program(evaluator.encode(strategy))
    expected = np.array([WEIGHT + 4 * SAMPLE, WEIGHT + 2 * SAMPLE, 0.0])
    # The state is the server's alone, which keeps a weight of its own if it has no replica.
    expected[home] += WEIGHT * ADAM + (WEIGHT if home == 2 else 0)
    assert program.resident_bytes == pytest.approx(expected)


def test_buffers_of_received_values_count() -> None:
    graph = linear_chain(("a", "b"), batch_size=6)
    cluster = cluster_of((10.0, ["T4"]), (10.0, ["T4"]))
    evaluator = Evaluator(graph, cluster)
    decisions = [Decision(devices=(0,), shares=(6,)), Decision(devices=(1,), shares=(6,))]
    strategy = strategy_of(graph, cluster, decisions)
    peak = evaluator.evaluate(strategy, Order.FIFO).peak_memory_bytes
    # Device 1: y2, b's weight's gradient, and first y1 received, then y1's own gradient.
    expected = WEIGHT * (1 + ADAM) + 6 * SAMPLE + WEIGHT + 2 * 6 * SAMPLE
    assert peak[1] == with_margin(expected)
    # Device 0: its own y1 is gone once sent; then the gradient of y1 and of a.
    assert peak[0] == with_margin(WEIGHT * (1 + ADAM) + 6 * SAMPLE + WEIGHT + 6 * SAMPLE)


def test_what_arrives_during_an_op_is_there_from_its_begin() -> None:
    # Two stages: device 1 runs a long op of its own while the first stage's output arrives.
    builder = GraphBuilder(4)
    x = builder.batch(WIDTH)
    first, second = builder.parameter(WIDTH, WIDTH), builder.parameter(WIDTH, 64 * WIDTH)
    third = builder.parameter(64 * WIDTH, WIDTH)
    y = builder.mm(x, first, module="a")
    narrow = builder.mm(builder.mm(x, second, module="b"), third, module="b")
    builder.relu(narrow, module="b")
    graph = builder.build(builder.relu(y, module="b"), state_ratio=0.0)
    cluster = cluster_of((1000.0, ["T4"]), (1000.0, ["T4"]))
    strategy = strategy_of(
        graph, cluster, [Decision(devices=(0,), shares=(4,)), Decision(devices=(1,), shares=(4,))]
    )
    evaluator = Evaluator(graph, cluster)
    program, start, finish = evaluator.timings(evaluator.encode(strategy), Order.FIFO)
    tables = evaluator.tables
    begin, end = buffer_lives(program, start, finish, tables, NOTHING_COMPILED)
    (send,) = np.flatnonzero(program.kind == TaskKind.SEND)
    (during,) = (
        task
        for task in np.flatnonzero(program.kind == TaskKind.COMPUTE)
        if program.device[task] == 1 and start[task] < start[send] < finish[task]
    )
    arrived = int(program.buffer_start[send])
    assert begin[arrived] == start[during]
    # Its reader comes last.
    assert end[arrived] == finish.max()
