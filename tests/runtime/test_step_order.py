"""The order of tasks over several steps: one sequence, legal, the same for every rank."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heterog.graph.grouping import group_ops
from heterog.lowering import lower
from heterog.lowering.channels import ChannelKind
from heterog.lowering.program import FIRST_LINK_KIND, LAST_OP_KIND, TaskKind
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.step_order import LOSS, NORM, StepOrder, step_order
from heterog.search.issue_order import AHEAD_BYTES, issue_order, sends_by_op
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.strategies import (
    ALL,
    SYNCS,
    cluster,
    graph_of,
    homes_of,
    plan_of,
    random_strategy,
    strategy_of,
)
from tests.simulator import builders


def part_of(strategy: Strategy, rank: int = 0) -> RankProgram:
    graph = graph_of("gpt")
    return RankProgram(graph, strategy, lower(graph, cluster(), strategy, num_steps=1), rank)


def sequence(order: StepOrder, num_steps: int) -> list[tuple[int, int]]:
    """(step, task) of some steps and the flush after them."""
    found = []
    for step in range(num_steps):
        for turn in order.turns:
            if not turn.of_step_before:
                found.append((step, turn.task))
            elif step:
                found.append((step - 1, turn.task))
    return found + [(num_steps - 1, task) for task in order.end]


def parameter_reads(part: RankProgram, task: int) -> list[tuple[int, int]]:
    """(parameter, device) of what an op reads."""
    if part.program.kind[task] != TaskKind.COMPUTE:
        return []
    row, tables = part.program.subject[task], part.tables
    span = slice(tables.parameter_read_start[row], tables.parameter_read_start[row + 1])
    return [(int(p), int(part.program.device[task])) for p in tables.parameter_read[span]]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), clips=st.booleans())
def test_three_steps_and_a_flush_are_one_legal_sequence(seed: int, clips: bool) -> None:
    graph = graph_of("gpt")
    strategy = random_strategy(Random(seed), graph)
    part = part_of(strategy)
    program = part.program
    order = step_order(part, plan_of(graph, strategy).task_order, clips=clips)
    assert order == step_order(
        part_of(strategy, 2), plan_of(graph, strategy).task_order, clips=clips
    )
    played = sequence(order, 3)
    position = {turn: number for number, turn in enumerate(played)}
    assert len(position) == len(played) == 3 * (program.num_tasks + 1 + clips)
    makes = {
        (int(program.subject[task]), int(program.device[task])): task
        for task in range(program.num_tasks)
        if program.kind[task] in (TaskKind.UPDATE, TaskKind.PULL)
    }
    for (step, task), now in position.items():
        if task < 0:
            continue
        for needed in program.dependencies(task):
            assert position[step, needed] < now
        for read in parameter_reads(part, task):
            # After the update of the step before, before that of its own step.
            if step and read in makes:
                assert position[step - 1, makes[read]] < now
            if read in makes:
                assert now < position[step, makes[read]]
        if clips and program.kind[task] in (TaskKind.SUM, TaskKind.ALL_GATHER):
            assert now < position[step, NORM]
        if clips and program.kind[task] in (TaskKind.UPDATE, TaskKind.PULL):
            assert position[step, NORM] < now
    # All ranks sum their losses and norms in one process group: the same order on each.
    sums = [task for _, task in played if task < 0]
    for rank in ALL:
        own = order.for_rank(part_of(strategy, rank))
        assert [task for _, task in sequence(own, 3) if task < 0] == sums
        tasks, seen = plan_of(graph, strategy).task_order, part_of(strategy, rank)
        assert step_order(seen, tasks, clips=clips, own=True).for_rank(seen) == own


def test_with_a_step_barrier_the_order_is_the_plans() -> None:
    graph = graph_of("gpt")
    strategy = strategy_of(graph, [SYNCS["ring"]] * group_ops(graph).num_groups)
    part = part_of(strategy)
    tasks = plan_of(graph, strategy).task_order
    order = step_order(part, tasks, clips=False)
    assert order.end == []
    kept = [
        turn.task for turn in order.turns if turn.task != LOSS and not part.is_early(turn.task)
    ]
    assert kept == [task for task in tasks if not part.is_early(task)]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_communicator_is_given_its_operations_in_the_order_of_the_simulation(seed: int) -> None:
    graph = graph_of("gpt")
    strategy = replace(random_strategy(Random(seed), graph), step_barrier=True)
    evaluator = Evaluator(graph, cluster())
    program, start, _ = evaluator.referee_timings(evaluator.encode(strategy), Order.FIFO)
    part = part_of(strategy)
    order = step_order(part, plan_of(graph, strategy).task_order, clips=False)
    by_devices: dict[tuple[int, ...], list[int]] = {}
    for turn in order.turns:
        task = turn.task
        if task >= 0 and program.kind[task] >= FIRST_LINK_KIND and not part.is_early(task):
            channel = program.channels[program.channel[task]]
            if channel.kind != ChannelKind.POINT_TO_POINT:
                by_devices.setdefault(channel.devices, []).append(task)
    for issued in by_devices.values():
        assert issued == sorted(issued, key=lambda task: (start[task], task))


@pytest.mark.parametrize("case", ["ring", "uneven slices", "server"])
def test_without_a_step_barrier_the_forward_pass_begins_before_the_last_update(case: str) -> None:
    graph = graph_of("gpt")
    strategy = strategy_of(
        graph,
        [SYNCS[case]] * group_ops(graph).num_groups,
        homes=homes_of(graph, case),
        step_barrier=False,
    )
    for rank in ALL:
        part = part_of(strategy, rank)
        order = step_order(part, plan_of(graph, strategy).task_order, clips=False).for_rank(part)
        kinds = [
            (TaskKind(part.program.kind[turn.task]), turn.of_step_before)
            for turn in order.turns
            if turn.task >= 0
        ]
        # A step ends without updates of its own: they are left to the next one.
        updates = (TaskKind.UPDATE, TaskKind.PULL)
        assert not any(kind in updates and not before for kind, before in kinds)
        first_op = kinds.index((TaskKind.COMPUTE, False))
        late = [kind for kind, before in kinds[first_op:] if before]
        assert len(late) > len(graph.updates) // 2
        assert {task for task in order.end} == {t for t, before in order.turns if before}


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=3638)  # a pull and a push of one link are moved up to the same moment
def test_communication_is_issued_before_the_op_during_which_it_begins(seed: int) -> None:
    graph = graph_of("gpt")
    strategy = random_strategy(Random(seed), graph)
    evaluator = Evaluator(graph, cluster())
    choice = evaluator.encode(strategy)._replace(num_steps=1)
    program, start, finish = evaluator.timings(choice, Order.FIFO)
    order = issue_order(program, start, finish)
    position = np.argsort(order)
    assert sorted(order) == list(range(program.num_tasks))
    for task in range(program.num_tasks):
        assert all(position[needed] < position[task] for needed in program.dependencies(task))
    for device in ALL:
        part = part_of(strategy, device)
        mine = [task for task in range(program.num_tasks) if part.is_mine[task]]
        ops = [task for task in mine if program.kind[task] < FIRST_LINK_KIND]
        for task in mine:
            if program.kind[task] in (TaskKind.PUSH, TaskKind.PULL):
                for op in ops:
                    if finish[op] > start[task]:
                        assert position[task] < position[op]
            elif program.kind[task] >= FIRST_LINK_KIND:
                for op in ops:
                    if finish[op] > start[task]:
                        assert position[task] < position[op]
                    elif finish[op] < start[task]:
                        assert position[op] < position[task]
        in_time = sorted(ops, key=lambda op: (start[op], op))
        assert in_time == sorted(ops, key=lambda op: position[op])
    for channel in range(len(program.channels)):
        served = [
            task
            for task in order.tolist()
            if program.channel[task] == channel
            and program.kind[task] in (TaskKind.PUSH, TaskKind.PULL)
        ]
        assert served == sorted(served, key=lambda task: start[task])
    for send, op in sends_by_op(program, start, finish, order):
        assert program.channels[int(program.channel[send])].devices[0] == program.device[op]
        assert finish[send] <= start[op]
        assert position[send] < position[op]
        before = [
            other
            for other in range(program.num_tasks)
            if program.kind[other] <= LAST_OP_KIND
            and program.device[other] == program.device[op]
            and position[other] < position[op]
        ]
        assert all(start[other] < finish[send] or start[other] == start[op] for other in before)


def test_a_server_announces_what_comes_next_and_no_more_than_that() -> None:
    # Seven gradients of half the limit, pushed from device 1 to their server, one at a time.
    width = int((AHEAD_BYTES / 2 / 4) ** 0.5)
    graph = builders.linear_chain("abcdefg", width=width)
    target = builders.cluster_of((0.1, ["T4"]), (0.1, ["T4"]))
    decision = Decision(devices=(0, 1), shares=(4, 4), sync=Sync.PARAMETER_SERVER)
    evaluator = Evaluator(graph, target)
    choice = evaluator.encode(builders.strategy_of(graph, target, decision, homes=0))
    program, start, finish = evaluator.timings(choice, Order.FIFO)
    order = issue_order(program, start, finish).tolist()
    pushes = [task for task in order if program.kind[task] == TaskKind.PUSH]
    for number, push in enumerate(pushes):
        added = next(
            task for task in order
            if program.kind[task] == TaskKind.SUM and push in program.dependencies(task)
        )  # fmt: skip
        # The one it waits for, the one that follows it on the link, and two more.
        announced = sum(order.index(other) < order.index(added) for other in pushes)
        assert announced == min(number + 4, 7)
