"""Recomputation: what runs again and when, what it costs and what it saves."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.errors import StrategyError
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import P, R, S
from heterog.lowering import lower
from heterog.lowering.program import Program, TaskKind
from heterog.lowering.tables import GraphTables, graph_tables
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator
from heterog.simulator.space import StepSettings, StrategySpace
from heterog.simulator.timeline import Timeline
from heterog.strategy.keeping import recomputations
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.simulator.builders import (
    GraphBuilder,
    cluster_of,
    random_cluster,
    random_graph,
    random_strategy,
    strategy_of,
)

WIDTH, BATCH = 4, 1024
UNIT = 4.0 * WIDTH * BATCH  # bytes of what lies between two layers
ONE = cluster_of((10.0, ["T4"]))
TWO = cluster_of((10.0, ["T4"]), (10.0, ["T4"]))
WHOLE = Decision(devices=(0,), shares=(BATCH,))


def layers(
    num_layers: int, *, batch: int = BATCH, width: int = WIDTH, seconds: float = 0.0
) -> OpGraph:
    """Equal layers: to four times the width, an activation, and back; weights are tiny.

    Ops of layer ``i`` forward: ``3 i`` to ``3 i + 2``. Its activation's input is read backward.
    The loss is a group of its own, the last one.
    """
    builder = GraphBuilder(batch)
    x = builder.batch(width)
    weights = [builder.parameter(width, name=f"{index}.weight") for index in range(num_layers)]
    narrow, wide = (batch, width), (batch, 4 * width)
    one, two = ((S(0),), (S(0),)), ((S(0), S(0)), (S(0),))
    measured = (("T4", seconds),) if seconds else ()
    kept: list[tuple[int, int]] = []
    for index, weight in enumerate(weights):
        module = f"{index}"
        hidden = builder.op(
            "widen", (x, weight), wide, module=module, rule=((S(0), R), (S(0),)),
            measured_s=measured,
        )  # fmt: skip
        kept.append((x, hidden))
        active = builder.op("act", (hidden,), wide, module=module, rule=one, measured_s=measured)
        x = builder.op("narrow", (active,), narrow, module=module, rule=one, measured_s=measured)
    loss = builder.op("loss", (x,), (), module="loss", rule=((S(0),), (P,)))
    above = builder.op(
        "loss back", (loss,), narrow, module="loss", rule=((P,), (S(0),)), phase=Phase.BACKWARD
    )
    gradients = []
    for index in range(num_layers - 1, -1, -1):
        module, (source, hidden) = f"{index}", kept[index]
        back = Phase.BACKWARD
        above = builder.op("narrow back", (above,), wide, module=module, rule=one, phase=back)
        above = builder.op("act back", (above, hidden), wide, module=module, rule=two, phase=back)
        gradients.append(
            builder.op(
                "weight back", (above, source), (width,), module=module,
                rule=((S(0), S(0)), (P,)), phase=back,
            )
        )  # fmt: skip
        above = builder.op("widen back", (above,), narrow, module=module, rule=one, phase=back)
    for weight, gradient in zip(weights, reversed(gradients), strict=True):
        builder.update(weight, gradient, module=f"{weights.index(weight)}")
    return builder.build(loss, state_ratio=0.0)


def subjects(program: Program, kind: TaskKind, device: int = 0) -> list[int]:
    mine = (program.kind == kind) & (program.device == device)
    return [int(subject) for subject in program.subject[mine]]


def with_flags(strategy: Strategy, flags: list[bool]) -> Strategy:
    pairs = zip(strategy.decisions, flags, strict=True)
    return replace(
        strategy, decisions=tuple(replace(decision, recompute=flag) for decision, flag in pairs)
    )


# --- by hand ------------------------------------------------------------------------------------


def test_only_what_the_backward_pass_reads_runs_again() -> None:
    """The activation's input is: its output and the layer's are not."""
    graph = layers(2)
    plain = strategy_of(graph, ONE, WHOLE)
    program = lower(graph, ONE, with_flags(plain, [True, True, False]))
    assert subjects(program, TaskKind.RECOMPUTE) == [3, 0]
    order = [
        (TaskKind(kind), int(subject))
        for kind, subject in zip(program.kind, program.subject, strict=True)
    ]
    # Just before the first backward op of its group: layer 1's begin at 8, layer 0's at 12.
    assert order.index((TaskKind.RECOMPUTE, 3)) + 1 == order.index((TaskKind.COMPUTE, 8))
    assert order.index((TaskKind.RECOMPUTE, 0)) + 1 == order.index((TaskKind.COMPUTE, 12))
    one = lower(graph, ONE, with_flags(plain, [False, True, False]))
    assert subjects(one, TaskKind.RECOMPUTE) == [3]
    assert len({program.hash, one.hash, lower(graph, ONE, plain).hash}) == 3


def test_what_other_groups_read_is_made_once() -> None:
    graph = layers(2)
    strategy = strategy_of(graph, ONE, replace(WHOLE, recompute=True))
    program = lower(graph, ONE, strategy)
    (again,) = [t for t in range(program.num_tasks) if _is(program, t, TaskKind.RECOMPUTE, 3)]
    (between,) = [t for t in range(program.num_tasks) if _is(program, t, TaskKind.COMPUTE, 2)]
    assert between in program.dependencies(again)


def test_a_block_keeps_only_what_it_reads_of_others() -> None:
    """Two layers a block: what lies between them is let go, and made again with the rest."""
    graph = layers(4)
    apart = strategy_of(graph, ONE, replace(WHOLE, recompute=True))
    together = replace(apart, blocks=(0, 2, 4))
    program = lower(graph, ONE, together)
    # Backward: the loss, then the second block without its last op, which nothing reads again.
    assert subjects(program, TaskKind.RECOMPUTE) == [12, 6, 7, 8, 9, 0, 1, 2, 3]
    assert subjects(lower(graph, ONE, apart), TaskKind.RECOMPUTE) == [12, 9, 6, 3, 0]
    evaluator = Evaluator(graph, ONE)
    assert (
        evaluator.evaluate(together, Order.FIFO).step_time_s
        > evaluator.evaluate(apart, Order.FIFO).step_time_s
    )
    assert strategy_from_dict(strategy_to_dict(together)) == together
    assert lower(graph, ONE, replace(apart, blocks=(0, 1, 2, 3, 4))).hash == (
        lower(graph, ONE, apart).hash
    ), "blocks of one group are what there is without blocks"


def test_a_block_of_unlike_groups_is_refused() -> None:
    graph = layers(2)
    strategy = strategy_of(graph, ONE, replace(WHOLE, recompute=True))
    for blocks in ((1,), (0, 0), (0, 9), (0, 2, 1)):
        with pytest.raises(StrategyError, match="ascending"):
            replace(strategy, blocks=blocks).check(graph, ONE)
    unlike = replace(with_flags(strategy, [True, False, False]), blocks=(0, 2))
    with pytest.raises(StrategyError, match="are in one block but have different decisions"):
        unlike.check(graph, ONE)
    kept = replace(strategy, blocks=(0, 2)).with_decisions(unlike.decisions)
    assert kept.blocks == (0, 1, 2)
    kept.check(graph, ONE)


def _is(program: Program, task: int, kind: TaskKind, subject: int) -> bool:
    return bool(program.kind[task] == kind and program.subject[task] == subject)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_memory_of_equal_layers(num_layers: int) -> None:
    """Without: every layer's input and inside. With: every layer's input, one layer's inside."""
    graph = layers(num_layers)
    evaluator = Evaluator(graph, ONE)
    peaks = []
    for recompute in (False, True):
        decision = replace(WHOLE, recompute=recompute)
        evaluation = evaluator.evaluate(strategy_of(graph, ONE, decision), Order.FIFO)
        peaks.append(evaluation.peak_memory_bytes[0])
    resident = 4.0 * WIDTH * num_layers + UNIT  # weights and the batch
    # At "act back" of the last layer: inputs but the batch, what is kept inside (4 units each),
    # and the gradients before and after (4 each).
    plain = resident + (num_layers - 1 + 4 * num_layers + 8) * UNIT
    again = resident + (num_layers - 1 + 4 + 8) * UNIT
    assert peaks == [round(size * (1.0 + MEMORY_MARGIN)) for size in (plain, again)]


def test_seconds_are_those_of_the_ops_once_more() -> None:
    graph = layers(3, seconds=0.25)
    evaluator = Evaluator(graph, ONE)
    plain = strategy_of(graph, ONE, WHOLE)
    before, after = (
        evaluator.evaluate(strategy, Order.FIFO).step_time_s
        for strategy in (plain, with_flags(plain, [True, False, True, False]))
    )
    assert after - before == pytest.approx(2 * 0.25)
    choice = evaluator.encode(with_flags(plain, [True, True, True, False]))
    timeline = Timeline(*evaluator.timings(choice, Order.FIFO), ONE, graph)
    path = timeline.critical_path
    again_s = sum(step.seconds for step in path if timeline.kind(step.task) == "recompute")
    assert again_s == pytest.approx(3 * 0.25)
    (last, *_) = [
        task
        for task in range(timeline.program.num_tasks)
        if timeline.program.kind[task] == TaskKind.RECOMPUTE
    ]
    assert (timeline.name(last), timeline.module(last)) == ("widen 2 recompute", "2")


def test_a_device_ahead_of_others_waits_for_the_gradient() -> None:
    """Otherwise the first stage of a pipeline would recompute at once, and hold the result."""
    graph = layers(2)
    first = Decision(devices=(0,), shares=(BATCH,), recompute=True)
    second = Decision(devices=(1,), shares=(BATCH,))
    strategy = strategy_of(graph, TWO, [first, second, second])
    program = lower(graph, TWO, strategy)
    (again,) = [t for t in range(program.num_tasks) if _is(program, t, TaskKind.RECOMPUTE, 0)]
    sends = [t for t in range(program.num_tasks) if program.kind[t] == TaskKind.SEND]
    assert sends[-1] in program.dependencies(again)
    evaluator = Evaluator(graph, TWO)
    _, start, finish = evaluator.timings(evaluator.encode(strategy), Order.FIFO)
    assert start[again] >= finish[sends[-1]]


def test_every_micro_batch_runs_its_own_ops_again() -> None:
    graph = layers(2)
    decision = Decision(devices=(0, 1), shares=(1000, 24), recompute=True)
    micro = ((600, 400), (24, 0))
    program = lower(graph, TWO, strategy_of(graph, TWO, decision, micro_batches=micro))
    again = program.kind == TaskKind.RECOMPUTE
    found = list(zip(program.device[again], program.micro[again], program.samples[again],
                     strict=True))  # fmt: skip
    assert sorted(set(found)) == [(0, 0, 600), (0, 1, 400), (1, 0, 24)]
    assert len(found) == 3 * 3


def test_no_update_comes_before_the_reads_of_a_recomputation() -> None:
    """A gradient that is made before any backward op: what runs again reads the weight first."""
    #       0 forward, 1 forward, 2 makes a gradient, 3 and 4 backward
    found = recomputations(
        group=[0, 0, 0, 0, 0],
        is_backward=[False, False, False, True, True],
        own_reads=[[], [0], [], [1], [2]],
        gradient_makers=[2, 4],
        num_groups=1,
    )
    assert [(each.reader, each.ops) for each in found] == [(2, (0, 1))]


def test_a_group_without_a_backward_pass_has_nothing_to_run_again() -> None:
    found = recomputations([0, -1, 1], [False, False, True], [[], [], [1]], [], 3)
    assert [(each.reader, each.ops) for each in found] == [(-1, ()), (2, ()), (-1, ())]


# --- in general ---------------------------------------------------------------------------------

Line = tuple[object, ...]


def lines(program: Program, twin: dict[int, int]) -> Iterator[Line]:
    """The tasks of a program without those that have a twin, whose buffers stand for theirs."""
    kept = [task for task in range(program.num_tasks) if task not in twin]
    number = {task: index for index, task in enumerate(kept)}

    def name(buffer: int) -> tuple[int, int]:
        maker = int(program.buffer_maker[buffer])
        place = buffer - int(program.buffer_start[maker])
        return number[twin.get(maker, maker)], place

    for task in kept:
        reads = program.read_buffer[program.read_start[task] : program.read_start[task + 1]]
        made = slice(program.buffer_start[task], program.buffer_start[task + 1])
        kind = TaskKind(program.kind[task])
        columns = (program.subject, program.device, program.micro, program.samples,
                   program.channel, program.num_bytes)  # fmt: skip
        yield (
            kind,
            *(column[task].item() for column in columns),
            tuple(name(int(buffer)) for buffer in reads),
            tuple(program.buffer_device[made].tolist()),
            tuple(program.buffer_bytes[made].tolist()),
        )


def twins(program: Program) -> dict[int, int]:
    """The forward task that each recomputation repeats."""
    last: dict[tuple[int, int, int], int] = {}
    found = {}
    for task in range(program.num_tasks):
        key = tuple(int(c[task]) for c in (program.subject, program.device, program.micro))
        if program.kind[task] == TaskKind.COMPUTE:
            last[key[0], key[1], key[2]] = task
        elif program.kind[task] == TaskKind.RECOMPUTE:
            found[task] = last[key[0], key[1], key[2]]
    return found


def slow_rule(graph: OpGraph, tables: GraphTables, group: int) -> set[int]:
    """Ops of a group that run again, by trying until nothing changes."""
    mine = [op for op in range(len(tables.op_id)) if tables.op_group[op] == group]
    backward = [op for op in mine if graph.ops[tables.op_id[op]].phase == Phase.BACKWARD]
    makers = {int(tables.value_op[value]) for value in tables.parameter_gradient}
    first = min({*backward, *(makers & set(mine))}, default=-1)
    again: set[int] = set()
    while True:
        found = set(again)
        for reader in (*backward, *again):
            for read in range(tables.read_start[reader], tables.read_start[reader + 1]):
                maker = int(tables.value_op[tables.read_value[read]])
                lies_here = tables.read_slot[read] < 0 and maker in mine
                if lies_here and maker not in backward and maker < first:
                    found.add(maker)
        if found == again:
            return again
        again = found


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=120, deadline=None)
def test_a_recomputing_program_is_the_plain_one_and_what_runs_again(seed: int) -> None:
    rng = Random(seed)
    graph, cluster = random_graph(rng), random_cluster(rng)
    strategy = random_strategy(rng, graph, cluster)
    # Under ZeRO-3 the parameters are gathered again, for what runs again.
    plainer = [
        replace(d, sync=Sync.RING, slices=()) if d.sync == Sync.ZERO3 else d
        for d in strategy.decisions
    ]
    strategy = replace(strategy, decisions=tuple(plainer))
    flags = [rng.random() < 0.7 for _ in strategy.decisions]
    plain = lower(graph, cluster, with_flags(strategy, [False] * len(flags)), num_steps=2)
    program = lower(graph, cluster, with_flags(strategy, flags), num_steps=2)
    twin = twins(program)
    # The same tasks, reading the same values.
    assert list(lines(program, twin)) == list(lines(plain, {}))
    # What runs again, on whom, and of whom the backward pass reads it.
    tables = graph_tables(graph)
    expected = {
        op for group, flag in enumerate(flags) if flag for op in slow_rule(graph, tables, group)
    }
    repeated = set(twin.values())
    for task in range(program.num_tasks):
        subject = int(program.subject[task])
        if program.kind[task] == TaskKind.COMPUTE:
            assert (task in repeated) == (subject in expected)
    readers = _readers(program)
    for again, first in twin.items():
        group = tables.op_group[program.subject[first]]
        for reader in readers[first]:
            if program.kind[reader] == TaskKind.COMPUTE:
                op = int(program.subject[reader])
                is_backward = graph.ops[tables.op_id[op]].phase == Phase.BACKWARD
                if is_backward and tables.op_group[op] == group:
                    # Only what arrived through a conversion in place of it is kept.
                    span = slice(tables.read_start[op], tables.read_start[op + 1])
                    assert (tables.read_slot[span] >= 0).any()
        assert first < again


def _readers(program: Program) -> list[set[int]]:
    """Tasks that read what each task makes."""
    found: list[set[int]] = [set() for _ in range(program.num_tasks)]
    for task in range(program.num_tasks):
        for needed in program.dependencies(task):
            found[needed].add(task)
    return found


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_recomputation_never_makes_a_device_alone_faster(seed: int) -> None:
    rng = Random(seed)
    graph = random_graph(rng)
    evaluator = Evaluator(graph, ONE)
    alone = Decision(devices=(0,), shares=(graph.batch_size,))
    plain = strategy_of(graph, ONE, alone)
    flags = [rng.random() < 0.5 for _ in plain.decisions]
    before = evaluator.evaluate(plain, Order.FIFO)
    after = evaluator.evaluate(with_flags(plain, flags), Order.FIFO)
    program = evaluator.program(evaluator.encode(with_flags(plain, flags)))
    again = program.subject[program.kind == TaskKind.RECOMPUTE]
    row = evaluator.cost_model.op_seconds(graph, ONE.devices[0].type, graph.batch_size)
    extra = float(row[graph_tables(graph).op_id[again]].sum())
    assert after.step_time_s == pytest.approx(before.step_time_s + extra, rel=1e-9)


# --- as a value ---------------------------------------------------------------------------------


def test_a_space_knows_it() -> None:
    graph = layers(2)
    evaluator = Evaluator(graph, TWO)
    space = StrategySpace(graph, TWO, evaluator.rules, evaluator.channels, (1.0, 1.0))
    both = Decision(devices=(0, 1), shares=(1000, 24))
    strategy = strategy_of(graph, TWO, [both, replace(both, recompute=True), both])
    row = space.row_of(strategy)
    assert row is not None
    assert space.decode(row, StepSettings(), step_barrier=True) == strategy
    choice = space.encode(row, StepSettings(), step_barrier=True)
    assert choice.recompute.tolist() == [False, True, False]
    assert evaluator.program(choice).hash == lower(graph, TWO, strategy).hash


def test_as_json() -> None:
    graph = layers(2)
    strategy = strategy_of(graph, ONE, [WHOLE, replace(WHOLE, recompute=True), WHOLE])
    record = strategy_to_dict(strategy)
    assert strategy_from_dict(record) == strategy
    for entry in record["decisions"]:
        del entry["recompute"]
    assert strategy_from_dict(record) == strategy_of(graph, ONE, WHOLE)
    record["decisions"][0]["recompute"] = "yes"
    with pytest.raises(
        StrategyError, match=r"'decisions.0.recompute' should be a valid boolean, got 'yes'"
    ):
        strategy_from_dict(record)


def test_the_tables_of_a_graph() -> None:
    tables = graph_tables(layers(2))
    assert np.flatnonzero(tables.op_recomputes).tolist() == [7, 8, 12]
    assert tables.recompute_start.tolist() == [0, 1, 2, 3]
    assert tables.recompute_op.tolist() == [0, 3, 6]
