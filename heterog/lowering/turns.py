"""Turns: the order in which each device runs its tasks, and its limit of micro-batches.

The engine takes the tasks of one turn of a device in program order. By default the turns are the
micro-batches, and the earliest that can go on does. Under a ``PipelineSchedule`` the weight
gradients have turns after all others, or every pass of a chunk has the turn that is stated, and
turns are taken strictly one after the other. A cap needs no turn: the first op of a micro-batch
that runs on a chunk reads a token of no bytes that the last op makes there that runs of the
micro-batch ``cap`` before it. Micro-batches without samples there are not counted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from heterog.lowering.kernel_arguments import by_reference
from heterog.lowering.kernels import helper
from heterog.lowering.program import FIRST_FREE_KIND, IntArray
from heterog.lowering.scratch import Scratch
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import FIRST_TURN, IN_TURN, NUM_READS, NUM_TASKS, Tape
from heterog.strategy.pipeline_schedule import Pass, PipelineSchedule, device_chunks

BY_MICRO_BATCH, WEIGHTS_LAST, AS_STATED = 0, 1, 2
"""Orders that determine the turns."""
_FORWARD = int(Pass.FORWARD)
_BACKWARD = int(Pass.BACKWARD)
_WEIGHTS = int(Pass.WEIGHTS)


@by_reference
class Turns(NamedTuple):
    """A ``PipelineSchedule`` in flat arrays; unused arrays have no rows."""

    rule: int
    num_turns: int  # of one step; the last one is for what belongs to no chunk
    splits: bool
    chunk: IntArray  # of each group, -1 where a device has no part  # [num_groups, num_devices]
    cap: IntArray  # 0: none  # [num_devices, num_chunks]
    closing_op: IntArray  # last, last of the weights  # [num_devices, num_chunks, num_micro, 2]
    turn: IntArray  # [num_devices, num_micro, num_chunks, 3]


def _nothing(dimensions: int) -> IntArray:
    return np.zeros((0,) * dimensions, np.int32)


NO_SCHEDULE = Turns(
    rule=BY_MICRO_BATCH,
    num_turns=0,
    splits=False,
    chunk=_nothing(2),
    cap=_nothing(2),
    closing_op=_nothing(4),
    turn=_nothing(4),
)


def encode_turns(
    schedule: PipelineSchedule,
    tables: GraphTables,
    group_devices: Sequence[Sequence[int]],
    division: IntArray,
    shares: IntArray,
) -> Turns:
    """Convert a schedule to the kernel's arrays.

    Args:
        schedule: A schedule that fits the decisions.
        tables: Tables of the graph.
        group_devices: Devices of each group's decision.
        division: Division of each group; see ``Choice``.
        shares: Shares of each division along each axis; see ``Choice``.
    """
    num_micro, num_devices = shares.shape[1:]
    # One micro-batch waits for no other, but its weight gradients may for the rest of it.
    if schedule.is_default or (num_micro == 1 and not schedule.splits_backward):
        return NO_SCHEDULE
    chunks = device_chunks(group_devices, num_devices, schedule.chunk_starts)
    num_chunks = max(map(len, chunks))
    chunk = np.full((tables.num_groups, num_devices), -1, np.int32)
    for device, own in enumerate(chunks):
        for number, groups in enumerate(own):
            chunk[groups.start : groups.stop, device] = number
    cap, closing, turn = _nothing(2), _nothing(4), _nothing(4)
    if any(any(caps) for caps in schedule.in_flight):
        last = _last_ops(tables, schedule.splits_backward)
        closing = np.full((num_devices, num_chunks, num_micro, 2), -1, np.int32)
        by_axis = shares.reshape(len(tables.axis_units), -1, num_micro, num_devices)
        axes, of, micros, on = np.nonzero(by_axis[:, division[: tables.num_groups]])
        np.maximum.at(closing, (on, chunk[of, on], micros), last[axes, of])
        cap = np.zeros((num_devices, num_chunks), np.int32)
        for device, caps in enumerate(schedule.in_flight):
            cap[device, : len(caps)] = np.minimum(caps, num_micro)
    rule, num_turns = BY_MICRO_BATCH, num_micro
    if schedule.turns:
        rule, num_turns = AS_STATED, max(map(len, schedule.turns)) + 1
        turn = np.full((num_devices, num_micro, num_chunks, len(Pass)), num_turns - 1, np.int32)
        for device, stated in enumerate(schedule.turns):
            for place, (micro, number, work) in enumerate(stated):
                turn[device, micro, number, work] = place
    elif schedule.splits_backward:
        rule, num_turns = WEIGHTS_LAST, 2 * num_micro
    return Turns(
        rule=rule,
        num_turns=num_turns,
        splits=schedule.splits_backward,
        chunk=chunk,
        cap=cap,
        closing_op=closing,
        turn=turn,
    )


def _last_ops(tables: GraphTables, splits: bool) -> IntArray:
    """Last compute op of each group and axis, and the last one of the deferred weight gradients.

    Returns:
        Op, or -1 where there is none.  # [num_axes, num_groups, 2]
    """
    shape = len(tables.axis_units), tables.num_groups + 1, 2  # the last group is for constants
    last = np.full(shape, -1, np.int32)
    rows = np.arange(len(tables.op_id), dtype=np.int32)
    later = (tables.op_is_weights == 1) & splits
    np.maximum.at(last, (tables.op_axis, tables.op_group, later.astype(np.int32)), rows)
    return last[:, :-1]


@helper
def work_of(tables: GraphTables, turns: Turns, op: int) -> int:
    """The pass that an op belongs to."""
    if tables.op_is_backward[op] == 0:
        return _FORWARD
    return _WEIGHTS if turns.splits and tables.op_is_weights[op] == 1 else _BACKWARD


@helper
def turn_of(turns: Turns, tape: Tape, group: int, work: int, device: int, micro: int) -> int:
    """The turn of a device for a pass of a micro-batch; group -1 stands for constants."""
    if turns.rule == BY_MICRO_BATCH:
        return micro
    num_micro = turns.num_turns // 2
    if turns.rule == WEIGHTS_LAST:
        return micro + num_micro if work == _WEIGHTS else micro
    first = tape.counts[FIRST_TURN]
    turn = turns.num_turns - 1
    if group < 0:  # constants are made when a micro-batch begins
        for chunk in range(turns.turn.shape[2]):
            turn = min(turn, turns.turn[device, micro, chunk, _FORWARD])
    elif turns.chunk[group, device] >= 0:
        turn = turns.turn[device, micro, turns.chunk[group, device], work]
    return int(first + turn)


@helper
def take_turns(turns: Turns, tape: Tape, group: int, work: int, micro: int) -> None:
    """Set the turns of all tasks written from now on to a pass of a group."""
    if turns.rule != AS_STATED:  # the same on all devices
        tape.turn[:] = turn_of(turns, tape, group, work, 0, micro)
        return
    for device in range(len(tape.turn)):
        tape.turn[device] = turn_of(turns, tape, group, work, device, micro)


@helper
def follow_gradients(turns: Turns, tape: Tape) -> None:
    """Move the task begun last, which reads gradients, to a turn not before theirs.

    The op that finishes a parameter may be of another pass than the one that makes its gradient.
    """
    if turns.rule == BY_MICRO_BATCH:
        return
    number = tape.counts[NUM_TASKS] - 1
    task = tape.tasks[number]
    for read in range(task.read_start, tape.counts[NUM_READS]):
        maker = tape.tasks[tape.buffers[tape.reads[read]].maker]
        if maker.device == task.device and maker.kind < FIRST_FREE_KIND:
            task.turn = max(task.turn, maker.turn)


@helper
def begin_turns(turns: Turns, scratch: Scratch, tape: Tape, step: int) -> None:
    """Begin a step: reset its turns and caps."""
    tape.counts[IN_TURN] = 1 if turns.rule == AS_STATED else 0
    tape.counts[FIRST_TURN] = step * turns.num_turns if turns.rule == AS_STATED else 0
    if step == 0:
        scratch.token[:] = -1
        scratch.entered[:] = 0
        scratch.begun[:] = 0
        scratch.permit[:] = -1


@helper
def last_turns(turns: Turns, tape: Tape, num_micro: int) -> None:
    """Put all tasks written from now on after the rest of the step."""
    for device in range(len(tape.turn)):
        if turns.rule == BY_MICRO_BATCH:
            tape.turn[device] = num_micro - 1
        else:
            tape.turn[device] = tape.counts[FIRST_TURN] + turns.num_turns - 1


@helper
def ask_permits(
    turns: Turns, scratch: Scratch, shares: IntArray, group: int, work: int, number: int
) -> None:
    """Find the tokens that a group's op has to wait for on each device.

    Args:
        turns: Turns with caps.
        scratch: Working memory; its ``permit`` is written.
        shares: Shares of the op in this micro-batch.  # [num_devices]
        group: Group of the op.
        work: Pass of the op.
        number: Number of the micro-batch, counted through all steps.
    """
    scratch.permit[:] = -1
    if work != _FORWARD:
        return
    num_micro = scratch.token.shape[2]
    for device in range(len(shares)):
        chunk = turns.chunk[group, device]
        if shares[device] == 0 or scratch.entered[device, chunk] > number:
            continue
        scratch.entered[device, chunk] = number + 1
        begun = scratch.begun[device, chunk]
        scratch.begun[device, chunk] = begun + 1
        cap = turns.cap[device, chunk]
        for part in range(2):
            if 0 < cap <= begun:
                token = scratch.token[device, chunk, (begun - cap) % num_micro, part]
                scratch.permit[part, device] = token
            scratch.token[device, chunk, begun % num_micro, part] = -1
