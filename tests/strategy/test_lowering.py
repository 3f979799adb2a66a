"""What a strategy means: the tasks, by hand."""

import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog import lowering
from heterog.cluster import Cluster
from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.placement import P, R, S
from heterog.lowering import (
    encode,
    lower,
    lower_to_tape,
    make_scratch,
    program_from_tape,
)
from heterog.lowering.channels import ChannelTable
from heterog.lowering.program import FIRST_FREE_KIND, Program, TaskKind
from heterog.lowering.tables import Domain, graph_tables
from heterog.lowering.tape import NUM_TASKS, Tape, make_tape
from heterog.strategy.division import Division, micro_shares, split_evenly, split_in_proportion
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from tests.simulator.builders import (
    GraphBuilder,
    cluster_of,
    linear_chain,
    random_cluster,
    random_composition,
    random_graph,
    random_strategy,
    strategy_of,
)

WIDTH = 1024
WEIGHT = 4.0 * WIDTH * WIDTH
SAMPLE = 4.0 * WIDTH
THREE = cluster_of((10.0, ["T4"]), (10.0, ["T4"]), (10.0, ["T4"]))
CHAIN = linear_chain(("a", "b"))


class Task(NamedTuple):
    """A task in words; ``route`` is the devices of its channel."""

    number: int
    subject: int
    device: int
    route: tuple[int, ...]
    num_bytes: float


def tasks_of(program: Program, kind: TaskKind) -> list[Task]:
    return [
        Task(
            number,
            int(program.subject[number]),
            int(program.device[number]),
            program.channels[program.channel[number]].devices
            if program.channel[number] >= 0
            else (),
            float(program.num_bytes[number]),
        )
        for number in range(program.num_tasks)
        if program.kind[number] == kind
    ]


def kinds_of(program: Program) -> set[TaskKind]:
    return {TaskKind(kind) for kind in program.kind}


def split(devices: Sequence[int], shares: Sequence[int], sync: Sync = Sync.RING) -> Decision:
    return Decision(devices=tuple(devices), shares=tuple(shares), sync=sync)


def needs(program: Program, task: int) -> set[int]:
    """All tasks that must be done before a task, direct or not."""
    found: set[int] = set()
    stack = [task]
    while stack:
        for needed in program.dependencies(stack.pop()):
            if needed not in found:
                found.add(needed)
                stack.append(needed)
    return found


# --- conversions --------------------------------------------------------------------------------


def test_equal_shares_move_nothing() -> None:
    program = lower(CHAIN, THREE, strategy_of(CHAIN, THREE, split((0, 1), (5, 3))))
    assert kinds_of(program) == {TaskKind.COMPUTE, TaskKind.ALL_REDUCE, TaskKind.UPDATE}


def test_different_shares_move_the_overlaps() -> None:
    strategy = strategy_of(CHAIN, THREE, [split((0, 1), (4, 4)), split((0, 1), (6, 2))])
    program = lower(CHAIN, THREE, strategy)
    # Device 0 lacks samples 4 and 5 of y1, and device 1 the same two of its gradient.
    sends = tasks_of(program, TaskKind.SEND)
    assert [(t.route, t.num_bytes) for t in sends] == [((1, 0), 2 * SAMPLE), ((0, 1), 2 * SAMPLE)]
    joins = tasks_of(program, TaskKind.CONCAT)
    assert [(t.device, t.num_bytes) for t in joins] == [(0, 12 * SAMPLE), (1, 8 * SAMPLE)]
    # Whole rows need no copy before they are sent.
    assert not tasks_of(program, TaskKind.SPLIT)
    assert sends[0].number in program.dependencies(joins[0].number)


def test_strided_parts_are_cut_out_first() -> None:
    builder = GraphBuilder(8)
    x = builder.batch(WIDTH)
    weight = builder.parameter(WIDTH, WIDTH)
    turned = builder.op("turn", (x,), (WIDTH, 8), module="a", rule=((S(0),), (S(1),)))
    back = builder.op("turn", (turned,), (8, WIDTH), module="b", rule=((S(1),), (S(0),)))
    gradient = builder.weight_gradient(back, x, weight, module="b")
    builder.update(weight, gradient, module="b")
    graph = builder.build(back)
    strategy = strategy_of(graph, THREE, [split((0, 1), (4, 4)), split((0, 1), (6, 2))])
    program = lower(graph, THREE, strategy)
    (cut,) = tasks_of(program, TaskKind.SPLIT)
    (sent,) = tasks_of(program, TaskKind.SEND)
    assert (cut.device, cut.num_bytes) == (1, 2 * 2 * SAMPLE)
    assert (sent.route, sent.num_bytes) == ((1, 0), 2 * SAMPLE)
    assert cut.number in program.dependencies(sent.number)


def test_whole_parts_go_as_they_are() -> None:
    strategy = strategy_of(CHAIN, THREE, [split((0,), (8,)), split((2,), (8,))])
    program = lower(CHAIN, THREE, strategy)
    assert [(t.route, t.num_bytes) for t in tasks_of(program, TaskKind.SEND)] == [
        ((0, 2), 8 * SAMPLE),
        ((2, 0), 8 * SAMPLE),
    ]
    assert not kinds_of(program) & {TaskKind.SPLIT, TaskKind.CONCAT}


def one_reader(maker_out: str, reader_kind: str = "read") -> OpGraph:
    """An op in ``a`` whose output is S, P or R; ``b`` reads it and has the weight."""
    places = {"S": S(0), "P": P, "R": R}
    shape = (8, WIDTH) if maker_out == "S" else (WIDTH, WIDTH)
    builder = GraphBuilder(8)
    x = builder.batch(WIDTH)
    weight = builder.parameter(WIDTH, WIDTH)
    made = builder.op("make", (x,), shape, module="a", rule=((S(0),), (places[maker_out],)))
    rule = None if reader_kind == "mystery" else ((S(0), R), (S(0),))
    read = builder.op(reader_kind, (x, made), (8, WIDTH), module="b", rule=rule)
    rule = ((S(0) if rule else R, S(0)), (P,))
    gradient = builder.op(
        "gradient", (read, x), (WIDTH, WIDTH), module="b", rule=rule, phase=Phase.BACKWARD
    )
    builder.update(weight, gradient, module="b")
    return builder.build(read)


def test_partial_read_whole_is_reduced() -> None:
    graph = one_reader("P")
    program = lower(graph, THREE, strategy_of(graph, THREE, split((0, 1), (5, 3))))
    (reduced,) = tasks_of(program, TaskKind.REDUCE_VALUE)
    assert (reduced.route, reduced.num_bytes) == ((0, 1), WEIGHT)


def test_partial_read_whole_elsewhere_is_reduced_and_sent() -> None:
    graph = one_reader("P")
    strategy = strategy_of(graph, THREE, [split((0, 1), (5, 3)), split((1, 2), (4, 4))])
    program = lower(graph, THREE, strategy)
    (reduced,) = tasks_of(program, TaskKind.REDUCE_VALUE)
    (sent,) = tasks_of(program, TaskKind.SEND)
    assert reduced.route == (0, 1)
    assert (sent.route, sent.num_bytes) == ((0, 2), WEIGHT)  # device 1 has it already
    assert reduced.number in program.dependencies(sent.number)


def test_split_read_whole_is_gathered() -> None:
    graph = one_reader("S")
    program = lower(graph, THREE, strategy_of(graph, THREE, split((0, 1), (5, 3))))
    (gathered,) = tasks_of(program, TaskKind.GATHER_VALUE)
    # Parts are padded to the largest.
    assert (gathered.route, gathered.num_bytes) == ((0, 1), 2 * 5 * SAMPLE)


def test_whole_read_elsewhere_is_copied() -> None:
    graph = one_reader("R")
    strategy = strategy_of(graph, THREE, [split((0,), (8,)), split((0, 1, 2), (4, 2, 2))])
    program = lower(graph, THREE, strategy)
    sends = tasks_of(program, TaskKind.SEND)
    assert [(t.route, t.num_bytes) for t in sends] == [((0, 1), WEIGHT), ((0, 2), WEIGHT)]


def test_unknown_ops_run_on_gathered_inputs() -> None:
    graph = one_reader("S", "mystery")
    program = lower(graph, THREE, strategy_of(graph, THREE, split((0, 1), (4, 4))))
    assert len(tasks_of(program, TaskKind.GATHER_VALUE)) == 1
    alone = lower(graph, THREE, strategy_of(graph, THREE, split((0,), (8,))))
    assert not tasks_of(alone, TaskKind.GATHER_VALUE)


def test_constants_run_where_anything_runs() -> None:
    builder = GraphBuilder(8)
    x = builder.batch(WIDTH)
    weight = builder.parameter(WIDTH, WIDTH)
    table = builder.input(TensorKind.BUFFER, WIDTH)
    mask = builder.op("mask", (table,), (WIDTH,), module="a", rule=((R,), (R,)))
    y = builder.op("add", (x, mask), (8, WIDTH), module="b", rule=((S(0), R), (S(0),)))
    builder.update(weight, builder.weight_gradient(x, y, weight, module="b"), module="b")
    graph = builder.build(y)
    program = lower(graph, THREE, strategy_of(graph, THREE, split((0, 2), (8, 0))))
    assert program.device[program.subject == 0][0] == 0
    program = lower(graph, THREE, strategy_of(graph, THREE, split((0, 2), (4, 4))))
    masks = [t.device for t in tasks_of(program, TaskKind.COMPUTE) if t.subject == 0]
    assert masks == [0, 2]
    assert not tasks_of(program, TaskKind.SEND)


# --- synchronisation ----------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(4, 4, 0), (7, 1, 0), (1, 0, 7), (3, 3, 2)])
def test_every_replica_synchronises_a_whole_gradient(shares: tuple[int, ...]) -> None:
    program = lower(CHAIN, THREE, strategy_of(CHAIN, THREE, split((0, 1, 2), shares)))
    reduced = tasks_of(program, TaskKind.ALL_REDUCE)
    assert [(t.route, t.num_bytes) for t in reduced] == [((0, 1, 2), WEIGHT)] * 2
    assert len(tasks_of(program, TaskKind.UPDATE)) == 6


def test_a_replica_without_samples_receives_the_gradient() -> None:
    program = lower(CHAIN, THREE, strategy_of(CHAIN, THREE, split((0, 1, 2), (4, 4, 0))))
    assert 2 not in {t.device for t in tasks_of(program, TaskKind.COMPUTE)}
    for reduced in tasks_of(program, TaskKind.ALL_REDUCE):
        made = slice(*program.buffer_start[[reduced.number, reduced.number + 1]])
        sizes = dict(zip(program.buffer_device[made], program.buffer_bytes[made], strict=True))
        assert sizes == {2: WEIGHT, -1: 0.0}


def test_reduce_scatter_then_all_gather() -> None:
    decision = replace(
        split((0, 1, 2), (4, 2, 2), Sync.REDUCE_SCATTER_ALL_GATHER), slices=(2, 1, 1)
    )
    program = lower(CHAIN, THREE, strategy_of(CHAIN, THREE, decision))
    scatters = tasks_of(program, TaskKind.REDUCE_SCATTER)
    gathers = tasks_of(program, TaskKind.ALL_GATHER)
    for scatter, gather in zip(scatters, gathers, strict=True):
        assert scatter.num_bytes == gather.num_bytes == WEIGHT
        assert scatter.number in program.dependencies(gather.number)
    assert program.channels[program.channel[gathers[0].number]].slices == (0.5, 0.25, 0.25)


def test_parameter_server() -> None:
    decision = split((0, 1, 2), (4, 4, 0), Sync.PARAMETER_SERVER)
    program = lower(CHAIN, THREE, strategy_of(CHAIN, THREE, decision, homes=[0, 2]))
    pushes = [(t.subject, t.route) for t in tasks_of(program, TaskKind.PUSH)]
    assert pushes == [(1, (0, 2)), (1, (1, 2)), (0, (1, 0))]  # the last layer comes first
    sums = [(t.subject, t.device, t.num_bytes) for t in tasks_of(program, TaskKind.SUM)]
    assert sums == [(1, 2, 3 * WEIGHT), (0, 0, 3 * WEIGHT)]
    assert [(t.subject, t.device) for t in tasks_of(program, TaskKind.UPDATE)] == [(1, 2), (0, 0)]
    pulls = [(t.subject, t.route) for t in tasks_of(program, TaskKind.PULL)]
    assert pulls == [(1, (2, 0)), (1, (2, 1)), (0, (0, 1)), (0, (0, 2))]


def test_a_single_device_with_a_home_elsewhere() -> None:
    strategy = strategy_of(CHAIN, THREE, split((1,), (8,)), homes=[REPLICATED, 2])
    program = lower(CHAIN, THREE, strategy)
    assert [(t.subject, t.route) for t in tasks_of(program, TaskKind.PUSH)] == [(1, (1, 2))]
    assert [(t.subject, t.route) for t in tasks_of(program, TaskKind.PULL)] == [(1, (2, 1))]
    assert [(t.subject, t.device) for t in tasks_of(program, TaskKind.UPDATE)] == [(1, 2), (0, 1)]
    assert not tasks_of(program, TaskKind.SUM)


def test_buckets() -> None:
    graph = linear_chain(("a", "b", "c"))
    strategy = strategy_of(graph, THREE, split((0, 1), (4, 4)), bucket_bytes=int(1.5 * WEIGHT))
    program = lower(graph, THREE, strategy)
    # Weights 2 and 1 fill the first bucket; the last one is alone and needs no copy.
    reduced = tasks_of(program, TaskKind.ALL_REDUCE)
    assert [(t.subject, t.num_bytes) for t in reduced] == [(2, 2 * WEIGHT), (0, WEIGHT)]
    copies = tasks_of(program, TaskKind.FLATTEN)
    assert [(t.device, t.num_bytes) for t in copies] == [(0, 4 * WEIGHT), (1, 4 * WEIGHT)]
    assert program.bucket.tolist() == [0, 2, 2]
    assert len(tasks_of(program, TaskKind.UPDATE)) == 6


def test_the_first_bucket_of_each_step_may_be_smaller() -> None:
    graph = linear_chain(("a", "b", "c"))
    strategy = strategy_of(
        graph,
        THREE,
        split((0, 1), (4, 4)),
        bucket_bytes=10**9,
        first_bucket_bytes=int(0.5 * WEIGHT),
    )
    program = lower(graph, THREE, strategy, num_steps=2)
    reduced = tasks_of(program, TaskKind.ALL_REDUCE)
    assert strategy_from_dict(strategy_to_dict(strategy)) == strategy
    # Weight 2, whose gradient is there first, travels alone, the others at the end.
    assert [(t.subject, t.num_bytes) for t in reduced] == 2 * [(2, WEIGHT), (1, 2 * WEIGHT)]


def test_groups_of_different_layout_do_not_share_a_bucket() -> None:
    strategy = strategy_of(
        CHAIN, THREE, [split((0, 1), (4, 4)), split((0, 1), (6, 2))], bucket_bytes=10**9
    )
    program = lower(CHAIN, THREE, strategy)
    assert [t.num_bytes for t in tasks_of(program, TaskKind.ALL_REDUCE)] == [WEIGHT, WEIGHT]


def test_tied_weights_have_one_update() -> None:
    builder = GraphBuilder(8)
    x = builder.batch(WIDTH)
    weight = builder.parameter(WIDTH, WIDTH)
    y = builder.mm(x, weight, module="a")
    z = builder.mm(y, weight, module="b")
    parts = [
        builder.weight_gradient(y, z, weight, module="b"),
        builder.weight_gradient(x, y, weight, module="a"),
    ]
    rule = ((P, P), (P,))
    total = builder.op("add", parts, (WIDTH, WIDTH), module="a", rule=rule, phase=Phase.BACKWARD)
    builder.update(weight, total, module="a")
    graph = builder.build(z)
    assert group_ops(graph).num_groups == 1
    program = lower(graph, THREE, strategy_of(graph, THREE, split((0, 1), (4, 4))))
    assert len(tasks_of(program, TaskKind.ALL_REDUCE)) == 1
    assert [t.device for t in tasks_of(program, TaskKind.UPDATE)] == [0, 1]


def test_no_op_waits_for_the_update_of_its_own_step() -> None:
    """The input gradient reads the old weight, wherever the graph puts the weight gradient."""
    program = lower(CHAIN, THREE, strategy_of(CHAIN, THREE, split((0, 1), (4, 4))))
    updates = {t.number for t in tasks_of(program, TaskKind.UPDATE)}
    ops = tasks_of(program, TaskKind.COMPUTE)
    tables = graph_tables(CHAIN)
    readers = {(t.device, int(tables.op_id[t.subject])): t.number for t in ops}
    for op in ops:
        assert not updates & needs(program, op.number)
    for update in tasks_of(program, TaskKind.UPDATE):
        # On its device the update comes after an op that follows the last reader in the chain.
        last_reader = {0: 0, 1: 3}[update.subject]
        before = [
            t.number
            for t in ops
            if t.device == update.device and t.number in needs(program, update.number)
        ]
        assert max(before) >= readers[update.device, last_reader]


def test_an_update_waits_for_a_reader_that_follows_from_the_gradient() -> None:
    builder = GraphBuilder(8)
    x = builder.batch(WIDTH)
    weight = builder.parameter(WIDTH, WIDTH)
    gradient = builder.weight_gradient(x, x, weight, module="a")
    again = builder.op(
        "mm again", (gradient, weight), (WIDTH, WIDTH), module="a", rule=((P, R), (P,))
    )
    builder.update(weight, gradient, module="a")
    graph = builder.build(again)
    program = lower(graph, THREE, strategy_of(graph, THREE, split((0, 1), (4, 4))))
    readers = {t.device: t.number for t in tasks_of(program, TaskKind.COMPUTE) if t.subject == 1}
    for update in tasks_of(program, TaskKind.UPDATE):
        assert readers[update.device] in needs(program, update.number)


def test_a_gradient_that_no_op_makes_is_refused() -> None:
    builder = GraphBuilder(8)
    x = builder.batch(WIDTH)
    weight = builder.parameter(8, WIDTH, name="w")
    y = builder.relu(x, module="a")
    builder.update(weight, x, module="a")
    with pytest.raises(StrategyError, match=r"the gradient of 'w' is not made by any op"):
        graph_tables(builder.build(y))


def whole_gradient() -> OpGraph:
    """A step whose gradient is the same on every replica."""
    builder = GraphBuilder(8)
    x = builder.batch(WIDTH)
    weight = builder.parameter(WIDTH, WIDTH)
    y = builder.mm(x, weight, module="a")
    gradient = builder.weight_gradient(x, y, weight, module="a", place=R)
    builder.update(weight, gradient, module="a")
    return builder.build(y)


def test_whole_gradients_are_not_added() -> None:
    graph = whole_gradient()
    program = lower(graph, THREE, strategy_of(graph, THREE, split((0, 1), (4, 4))))
    assert kinds_of(program) == {TaskKind.COMPUTE, TaskKind.UPDATE}
    served = split((0, 1), (4, 4), Sync.PARAMETER_SERVER)
    program = lower(graph, THREE, strategy_of(graph, THREE, served, homes=2))
    assert [t.route for t in tasks_of(program, TaskKind.PUSH)] == [(0, 2)]
    assert not tasks_of(program, TaskKind.SUM)
    # No replica's weight is overwritten before its own ops are done.
    for pull in tasks_of(program, TaskKind.PULL):
        own = {t.number for t in tasks_of(program, TaskKind.COMPUTE) if t.device == pull.device}
        assert max(own) in needs(program, pull.number)


def test_whole_gradients_reach_replicas_without_samples() -> None:
    graph = whole_gradient()
    program = lower(graph, THREE, strategy_of(graph, THREE, split((0, 1), (8, 0))))
    (moved,) = tasks_of(program, TaskKind.PUSH)
    assert (moved.route, moved.num_bytes) == ((0, 1), WEIGHT)
    update = next(t for t in tasks_of(program, TaskKind.UPDATE) if t.device == 1)
    assert program.dependencies(update.number) == [moved.number]


# --- micro-batches and steps --------------------------------------------------------------------


def test_micro_batches() -> None:
    micro = ((3, 2), (2, 1), (0, 0))
    strategy = strategy_of(CHAIN, THREE, split((0, 1), (5, 3)), micro_batches=micro)
    program = lower(CHAIN, THREE, strategy)
    ops = program.kind == TaskKind.COMPUTE
    for device, counts in enumerate(micro):
        for op in range(5):
            mine = ops & (program.device == device) & (program.subject == op)
            assert program.samples[mine].tolist() == [count for count in counts if count]
    added = tasks_of(program, TaskKind.ACCUMULATE)
    assert [(t.subject, t.device, t.num_bytes) for t in added] == [
        (1, 0, 3 * WEIGHT), (1, 1, 3 * WEIGHT), (0, 0, 3 * WEIGHT), (0, 1, 3 * WEIGHT),
    ]  # fmt: skip
    assert len(tasks_of(program, TaskKind.ALL_REDUCE)) == 2
    for reduced in tasks_of(program, TaskKind.ALL_REDUCE):
        mine_added = {t.number for t in added if t.subject == reduced.subject}
        assert mine_added <= set(program.dependencies(reduced.number))


def test_a_device_may_sit_out_a_micro_batch() -> None:
    micro = ((4, 1), (0, 3), (0, 0))
    strategy = strategy_of(CHAIN, THREE, split((0, 1), (5, 3)), micro_batches=micro)
    program = lower(CHAIN, THREE, strategy)
    assert {t.device for t in tasks_of(program, TaskKind.ACCUMULATE)} == {0}


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_micro_shares_add_up(seed: int) -> None:
    rng = Random(seed)
    batch, count = rng.randint(3, 40), rng.randint(1, 4)
    num_micro = rng.randint(1, 3)
    columns = [
        random_composition(rng, extra + 1, 4)
        for extra in random_composition(rng, batch - num_micro, num_micro)
    ]
    devices = tuple(sorted(rng.sample(range(4), count)))
    shares = random_composition(rng, batch, count)
    micro = tuple(zip(*columns, strict=True))
    sizes = tuple(map(sum, columns))
    rows = micro_shares(Division(devices, shares), micro, sizes)
    assert (rows >= 0).all()
    assert rows.sum(axis=0).tolist() == list(shares)
    assert rows.sum(axis=1).tolist() == [sum(column) for column in columns]


def test_next_step_waits_for_its_own_parameters_only() -> None:
    strategy = strategy_of(CHAIN, THREE, split((0, 1), (4, 4)), step_barrier=False)
    program = lower(CHAIN, THREE, strategy, num_steps=2)
    updates = {(t.subject, t.device): t.number for t in tasks_of(program, TaskKind.UPDATE)[:4]}
    ops = [t for t in tasks_of(program, TaskKind.COMPUTE) if t.device == 0]
    again = [t.number for t in ops if t.number > max(updates.values())]
    assert program.dependencies(again[0]) == [updates[0, 0]]
    assert updates[1, 0] in program.dependencies(again[1])
    assert lower(CHAIN, THREE, strategy).num_steps == 8


# --- any strategy -------------------------------------------------------------------------------


def ancestors(program: Program) -> list[set[int]]:
    """For each task all tasks that are done before it starts, by reads or by program order of the
    ops on its device."""
    last_op: dict[int, int] = {}
    found: list[set[int]] = []
    for task in range(program.num_tasks):
        direct = set(program.dependencies(task))
        if program.kind[task] < FIRST_FREE_KIND:
            device = int(program.device[task])
            direct |= {last_op[device]} if device in last_op else set()
            last_op[device] = task
        found.append(direct.union(*(found[needed] for needed in direct)))
    return found


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_tasks_touch_only_memory_of_their_own_devices(seed: int) -> None:
    rng = Random(seed)
    graph, cluster = random_graph(rng), random_cluster(rng)
    program = lower(graph, cluster, random_strategy(rng, graph, cluster), num_steps=1)
    for task in range(program.num_tasks):
        reads = program.read_buffer[program.read_start[task] : program.read_start[task + 1]]
        made = range(program.buffer_start[task], program.buffer_start[task + 1])
        sources = {int(program.buffer_device[b]) for b in reads if program.buffer_bytes[b] > 0}
        targets = {int(program.buffer_device[b]) for b in made if program.buffer_bytes[b] > 0}
        if program.channel[task] < 0:
            assert sources | targets <= {int(program.device[task])}
            continue
        members = program.channels[program.channel[task]].devices
        if program.kind[task] in (TaskKind.SEND, TaskKind.PUSH, TaskKind.PULL):
            # A pull overwrites a weight, so it may also wait for a gradient at its destination.
            is_pull = program.kind[task] == TaskKind.PULL
            assert sources <= (set(members) if is_pull else {members[0]})
            assert targets <= {members[1]}
        else:
            assert sources | targets <= set(members)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_updates_follow_every_gradient_and_every_reader(seed: int) -> None:
    rng = Random(seed)
    graph, cluster = random_graph(rng), random_cluster(rng)
    strategy = random_strategy(rng, graph, cluster)
    program = lower(graph, cluster, strategy, num_steps=1)
    tables, before = graph_tables(graph), ancestors(program)
    ops = [*tasks_of(program, TaskKind.COMPUTE), *tasks_of(program, TaskKind.RECOMPUTE)]
    written = [*tasks_of(program, TaskKind.UPDATE), *tasks_of(program, TaskKind.PULL)]
    for parameter in range(len(tables.parameter_bytes)):
        maker = int(tables.value_op[tables.parameter_gradient[parameter]])
        gradients = {task.number for task in ops if task.subject == maker}
        readers = [
            op
            for op in range(len(tables.op_id))
            if parameter
            in tables.parameter_read[
                tables.parameter_read_start[op] : tables.parameter_read_start[op + 1]
            ]
        ]
        group = int(tables.parameter_group[parameter])
        mine = [task for task in written if task.subject == parameter]
        home = strategy.homes[parameter]
        decision = strategy.decisions[group]
        replicas = set(decision.devices) | ({home} - {REPLICATED})
        if is_sliced(decision) and tables.gradient_domain[parameter] == Domain.ALL:
            weights = decision.slices or (1,) * len(decision.devices)
            parts = zip(decision.devices, weights, strict=True)
            replicas = {device for device, part in parts if part > 0}
            bucket = int(program.bucket[parameter])
            last = [
                t for t in tasks_of(program, TaskKind.GATHER_PARAMETERS) if t.subject == bucket
            ]
            if decision.sync != Sync.ZERO3:  # overwrites the parameter on all its devices
                reading = {t.number for t in ops if t.subject in readers}
                assert reading | {t.number for t in mine} <= before[last[-1].number]
        assert sorted(task.device for task in mine) == sorted(replicas)
        for task in mine:
            reading = {t.number for t in ops if t.subject in readers and t.device == task.device}
            assert reading <= before[task.number]
            if tables.gradient_domain[parameter] == Domain.ALL:
                assert gradients <= before[task.number]
            # No op of the step sees the new weight.
            assert not any(task.number in before[op.number] for op in ops)


def is_sliced(decision: Decision) -> bool:
    return decision.sync.is_sharded and len(decision.devices) > 1


# --- tapes and hashes ---------------------------------------------------------------------------


def lower_on(graph: OpGraph, cluster: Cluster, strategy: Strategy, room: int) -> Program:
    tables, channels = graph_tables(graph), ChannelTable(cluster)
    choice = encode(strategy, tables, channels, num_steps=8)
    tape = make_tape(room, len(tables.parameter_bytes), cluster.num_devices)
    scratch = make_scratch(tables, cluster.num_devices)
    tape = lower_to_tape(tables, choice, scratch, tape)
    return program_from_tape(tape, tables, choice, channels)


@pytest.mark.parametrize("sync", [Sync.RING, Sync.HIERARCHICAL, Sync.ZERO1, Sync.ZERO3])
def test_nothing_is_written_beyond_a_tape(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    # With more replicas than samples, one task makes a gradient for hundreds of devices.
    hosts = [(10.0, ["T4"] * 8)] * 50
    cluster, graph = cluster_of(*hosts), linear_chain(tuple(f"layer{n}" for n in range(6)))
    guarded: list[tuple[np.ndarray, int]] = []

    def tape_before_guards(*sizes: int) -> Tape:
        made = make_tape(*sizes)
        for name in ("tasks", "buffers", "reads"):
            own = getattr(made, name)
            whole = np.concatenate([own, np.zeros(2 * 400, own.dtype)])
            guarded.append((whole[len(own) :], len(own)))
            made = made._replace(**{name: whole[: len(own)]})
        return made

    monkeypatch.setattr(lowering, "make_tape", tape_before_guards)
    # Buckets of other devices are all closed at the end of the step, one after another.
    decisions = [
        Decision(
            devices=tuple(range(count)),
            shares=tuple(int(device < graph.batch_size) for device in range(count)),
            sync=sync,
        )
        for count in range(400, 394, -1)
    ]
    strategy = strategy_of(graph, cluster, decisions, bucket_bytes=2**30)
    tables, channels = graph_tables(graph), ChannelTable(cluster)
    choice = encode(strategy, tables, channels, num_steps=2)
    scratch = make_scratch(tables, 400)
    num_tasks = set()
    for room in (*range(64, 4096, 37), 8192):
        guarded.clear()
        tape = tape_before_guards(room, len(tables.parameter_bytes), 400)
        num_tasks.add(int(lower_to_tape(tables, choice, scratch, tape).counts[NUM_TASKS]))
        for guard, size in guarded:
            assert (guard == np.zeros_like(guard)).all(), (room, size)
    assert len(num_tasks) == 1


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_short_tapes_grow(seed: int) -> None:
    rng = Random(seed)
    graph, cluster = random_graph(rng), random_cluster(rng)
    strategy = random_strategy(rng, graph, cluster)
    small, large = (lower_on(graph, cluster, strategy, room) for room in (1, 20_000))
    assert small.hash == large.hash
    # Tasks are numbered topologically.
    for task in range(large.num_tasks):
        assert all(needed < task for needed in large.dependencies(task))


def test_hashes() -> None:
    base = strategy_of(CHAIN, THREE, split((0, 1), (4, 4)))
    same = strategy_of(CHAIN, THREE, split((0, 1), (4, 4)))
    program = lower(CHAIN, THREE, base)
    assert program.hash == lower(CHAIN, THREE, same).hash
    served = split((0, 1), (4, 4), Sync.PARAMETER_SERVER)
    sliced = replace(split((0, 1), (4, 4), Sync.REDUCE_SCATTER_ALL_GATHER), slices=(1, 2))
    others = [
        strategy_of(CHAIN, THREE, split((0, 1), (5, 3))),
        strategy_of(CHAIN, THREE, split((0, 2), (4, 4))),
        strategy_of(CHAIN, THREE, split((0, 1), (4, 4), Sync.HIERARCHICAL)),
        strategy_of(CHAIN, THREE, served, homes=0),
        strategy_of(CHAIN, THREE, served, homes=1),
        strategy_of(CHAIN, THREE, sliced),
        strategy_of(CHAIN, THREE, replace(sliced, slices=(2, 1))),
        strategy_of(CHAIN, THREE, split((0, 1), (4, 4)), bucket_bytes=10**9),
        strategy_of(CHAIN, THREE, split((0, 1), (4, 4)), micro_batches=((2, 2), (2, 2), (0, 0))),
        strategy_of(CHAIN, THREE, split((0, 1), (4, 4)), step_barrier=False),
    ]
    hashes = {lower(CHAIN, THREE, strategy).hash for strategy in (base, *others)}
    assert len(hashes) == 1 + len(others)


def test_the_hash_does_not_know_channel_numbers() -> None:
    strategy = strategy_of(CHAIN, THREE, split((0, 1), (4, 4)))
    tables, channels = graph_tables(CHAIN), ChannelTable(THREE)
    channels.all_reduce((0, 1, 2), hierarchical=True)  # another strategy was there before
    choice = encode(strategy, tables, channels, num_steps=1)
    scratch, tape = make_scratch(tables, 3), make_tape(100, 2, 3)
    tape = lower_to_tape(tables, choice, scratch, tape)
    program = program_from_tape(tape, tables, choice, channels)
    assert program.hash == lower(CHAIN, THREE, strategy).hash


# --- illegal strategies -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"graph": "0"}, "the strategy was made for graph 0, not for 'tiny'"),
        ({"cluster": "0"}, "the strategy was made for cluster 0, not for 'tiny'"),
        (
            {"decisions": (split((0,), (8,)),)},
            "has 1 decisions and 2 homes; the graph has 2 groups and 2 parameters.",
        ),
        (
            {"decisions": (split((0,), (8,)), split((3,), (8,)))},
            "group 'b' names device 3, but the cluster has devices 0 to 2.",
        ),
        (
            {"decisions": (split((0,), (7,)), split((0,), (8,)))},
            "group 'a' has shares (7,), 7 samples in all; the batch has 8.",
        ),
        ({"homes": (3, -1)}, "'a.weight' has home 3, but the cluster has devices 0 to 2."),
        ({"homes": (0, -1)}, "'a.weight' has home 0, but its group is synchronised by ring;"),
        (
            {"decisions": (split((0, 1), (4, 4), Sync.PARAMETER_SERVER),) * 2, "homes": (0, -1)},
            "parameter 'b.weight' is served, but has no home device.",
        ),
        ({"micro_batches": ((4, 0), (4, 0), (0, 0))}, "with at least one sample in each"),
        ({"micro_batches": ((4,), (3,), (0,))}, "that sum to the batch of 8"),
        ({"micro_batches": ((4,), (4,))}, "must be 3 tuples of one length"),
        ({"bucket_bytes": -1}, "bucket_bytes is -1; it must be 0 or more."),
        (
            {"bucket_bytes": 5, "first_bucket_bytes": 6},
            "first_bucket_bytes is 6; it must be 0, or at most bucket_bytes, which is 5.",
        ),
    ],
)
def test_illegal_strategies(change: dict[str, object], text: str) -> None:
    legal = strategy_of(CHAIN, THREE, split((0, 1), (4, 4)))
    legal.check(CHAIN, THREE)
    with pytest.raises(StrategyError, match=re.escape(text)):
        replace(legal, **change).check(CHAIN, THREE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "shares", "sync", "slices", "text"),
    [
        ((1, 0), (4, 4), Sync.RING, (), "must be ascending and distinct, got (1, 0)"),
        ((), (), Sync.RING, (), "must be ascending and distinct, got ()"),
        ((0, 1), (8,), Sync.RING, (), "one share of at least 0 per device, got (8,)"),
        ((0, 1), (9, -1), Sync.RING, (), "one share of at least 0 per device, got (9, -1)"),
        ((0, 1), (4, 4), Sync.RING, (1, 1), "slices (1, 1) need one weight"),
        ((0, 1), (4, 4), Sync.REDUCE_SCATTER_ALL_GATHER, (0, 0), "not all 0"),
    ],
)
def test_illegal_decisions(
    devices: tuple[int, ...],
    shares: tuple[int, ...],
    sync: Sync,
    slices: tuple[int, ...],
    text: str,
) -> None:
    with pytest.raises(StrategyError, match=re.escape(text)):
        Decision(devices=devices, shares=shares, sync=sync, slices=slices)


def test_splitting_numbers() -> None:
    assert split_evenly(7, 3) == (3, 2, 2)
    assert split_in_proportion(7, (1.0, 1.0, 1.0)) == (3, 2, 2)
    assert split_in_proportion(10, (0.0, 1.0)) == (0, 10)
    assert np.sum(split_in_proportion(11, (3.0, 2.0, 2.0))) == 11


def test_the_label_count_is_summed_before_the_step() -> None:
    """Otherwise every device would wait for the slowest one between forward and backward."""
    builder = GraphBuilder(8)
    x = builder.batch(WIDTH)
    weight = builder.parameter(WIDTH, WIDTH)
    y = builder.mm(x, weight, module="a")
    loss = builder.op("nll_loss_forward.default", (y,), (), (), module="a", rule=((S(0),), (P, P)))
    above = builder.op(
        "nll_loss_backward.default", (y, loss + 1), (8, WIDTH), module="a",
        rule=((S(0), R), (S(0),)), phase=Phase.BACKWARD,
    )  # fmt: skip
    gradient = builder.weight_gradient(x, above, weight, module="a")
    builder.update(weight, gradient, module="a")
    graph = builder.build(loss)
    program = lower(graph, THREE, strategy_of(graph, THREE, split((0, 1), (4, 4))))
    (reduction,) = tasks_of(program, TaskKind.REDUCE_VALUE)
    assert needs(program, reduction.number) == set()
    backward = [t for t in tasks_of(program, TaskKind.COMPUTE) if t.subject == 2]
    assert all(reduction.number in needs(program, task.number) for task in backward)
