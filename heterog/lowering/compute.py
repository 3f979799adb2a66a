"""Compute tasks: one op of one micro-batch on each device that has samples or units of it."""

from heterog.lowering.choice import Choice
from heterog.lowering.kernels import helper
from heterog.lowering.program import TaskKind
from heterog.lowering.scratch import Scratch
from heterog.lowering.tables import KIND_NUMBER, GraphTables, Recut
from heterog.lowering.tape import NUM_BUFFERS, NUM_READS, NUM_TASKS, OVERFLOW, Tape
from heterog.lowering.turns import Turns

_COMPUTE = int(TaskKind.COMPUTE)
_EXCHANGED = int(Recut.EXCHANGED)
_S = KIND_NUMBER["S"]


@helper
def compute_op(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, op: int, division: int,
    micro: int,
) -> None:  # fmt: skip
    """Write an op's task on each device of a division that has a share.

    Nearly all tasks of a program are made here, so they are written directly, with the counts of
    the tape in registers, instead of through ``write_task``.
    """
    num_devices = choice.member.shape[1]
    axis = tables.op_axis[op]
    plain = division - axis * len(choice.member)
    first_read, last_read = tables.read_start[op], tables.read_start[op + 1]
    first_ready = tables.parameter_read_start[op]
    last_ready = tables.parameter_read_start[op + 1]
    first_value, last_value = tables.value_start[op], tables.value_start[op + 1]
    number = tape.counts[NUM_TASKS]
    made = tape.counts[NUM_BUFFERS]
    read = tape.counts[NUM_READS]
    turns = choice.turns
    is_capped = len(turns.cap) > 0
    group = tables.op_group[op]
    num_reads = last_read - first_read + last_ready - first_ready
    if not _has_room(tape, num_devices, num_devices * num_reads, last_value - first_value):
        return
    recut = tables.op_recut[op]
    units = tables.axis_units[tables.value_axis[first_value]] if recut > 0 else 0
    last_samples, part = tables.batch_size, 1.0  # of all samples, at the device before
    for device in range(scratch.span[plain, 0], scratch.span[plain, 1]):
        share = choice.shares[division, micro, device]
        if share == 0:
            continue
        samples = share
        if axis > 0:  # on all samples of the team, and on the own units
            samples = choice.teams.samples[plain, micro, device]
            if samples != last_samples:
                last_samples, part = samples, samples / tables.batch_size
        task = tape.tasks[number]
        task.kind = _COMPUTE
        task.turn = tape.turn[device]
        task.subject = op
        task.device = device
        task.micro = micro
        task.samples = samples
        task.units = share if axis > 0 else 0
        task.channel = -1
        task.num_bytes = 0.0
        task.read_start = read
        task.buffer_start = made
        for entry in range(first_read, last_read):
            slot = tables.read_slot[entry]
            if slot >= 0:
                needed = scratch.slot_buffer[slot, device]
            else:
                needed = scratch.value_buffer[tables.read_value[entry], device]
            if needed >= 0:
                tape.reads[read] = needed
                read += 1
        for entry in range(first_ready, last_ready):
            needed = scratch.ready_buffer[tables.parameter_read[entry], device]
            if needed >= 0:
                tape.reads[read] = needed
                read += 1
        for value in range(first_value, last_value):
            buffer = tape.buffers[made]
            buffer.maker = number
            buffer.device = device
            size = tables.value_bytes[value] + tables.value_bytes_per_unit[value] * share
            if recut > 0:  # afterwards; this is a part of the whole sum, or a slice along its axis
                size = tables.value_bytes_per_unit[value] * units
                if recut == _EXCHANGED:
                    size *= share / tables.axis_units[axis]
            if axis > 0 and tables.value_batch_kind[value] == _S:
                size *= part
            buffer.num_bytes = size
            scratch.value_buffer[value, device] = made
            made += 1
        if is_capped and group >= 0:
            chunk = turns.chunk[group, device]
            for end in range(2):
                if scratch.permit[end, device] >= 0:
                    tape.reads[read] = scratch.permit[end, device]
                    read += 1
                if _gives_permit(turns, scratch, op, device, chunk, micro, end):
                    buffer = tape.buffers[made]
                    buffer.maker = number
                    buffer.device = device
                    buffer.num_bytes = 0.0
                    place = (scratch.begun[device, chunk] - 1) % scratch.token.shape[2]
                    scratch.token[device, chunk, place, end] = made
                    made += 1
        number += 1
    tape.counts[NUM_TASKS] = number
    tape.counts[NUM_BUFFERS] = made
    tape.counts[NUM_READS] = read


@helper
def _has_room(tape: Tape, num_devices: int, num_reads: int, num_values: int) -> bool:
    """Whether an op's tasks fit on the tape, on all devices; if not, it overflows."""
    counts = tape.counts
    if (
        counts[NUM_TASKS] + num_devices >= len(tape.tasks) - 2
        or counts[NUM_BUFFERS] + num_devices * (num_values + 1) >= len(tape.buffers) - 256
        or counts[NUM_READS] + num_reads + 2 * num_devices >= len(tape.reads)
    ):
        counts[OVERFLOW] = 1
        return False
    return True


@helper
def _gives_permit(
    turns: Turns, scratch: Scratch, op: int, device: int, chunk: int, micro: int, end: int
) -> bool:
    """Whether an op ends a micro-batch's stay in a chunk, so that another one may begin.

    Only micro-batches with forward ops there have begun.
    """
    if chunk < 0 or turns.closing_op[device, chunk, micro, end] != op:
        return False
    entered = scratch.entered[device, chunk]
    return bool(entered > 0 and (entered - 1) % scratch.token.shape[2] == micro)
