"""From finished gradients to updated parameters, tensor by tensor or bucket by bucket."""

from heterog.strategy.kernels import helper
from heterog.strategy.lowering.choice import Choice
from heterog.strategy.lowering.gradients import read_gradient
from heterog.strategy.lowering.scratch import Scratch
from heterog.strategy.lowering.serve import serve
from heterog.strategy.lowering.slices import finish_gradient
from heterog.strategy.lowering.tape import (
    NUM_BUFFERS,
    NUM_READS,
    NUM_TASKS,
    OVERFLOW,
    Tape,
    write_buffer,
    write_read,
    write_task,
)
from heterog.strategy.lowering.turns import follow_gradients
from heterog.strategy.program import TaskKind
from heterog.strategy.strategy import Sync
from heterog.strategy.tables import GraphTables

# Plain integers, because numba freezes enum members into slow objects.
_FLATTEN = int(TaskKind.FLATTEN)
_UPDATE = int(TaskKind.UPDATE)
_ALL_REDUCE = int(TaskKind.ALL_REDUCE)
_REDUCE_SCATTER = int(TaskKind.REDUCE_SCATTER)
_ALL_GATHER = int(TaskKind.ALL_GATHER)
_ZERO1 = int(Sync.ZERO1)
_ZERO3 = int(Sync.ZERO3)


@helper
def number_buckets(tables: GraphTables, choice: Choice, scratch: Scratch) -> None:
    """Groups whose gradients may share a bucket get the same key: the first such group."""
    for group in range(tables.num_groups):
        scratch.bucket_key[group] = group
        for other in range(group):
            if (
                choice.layout[group] == choice.layout[other]
                and choice.first_channel[group] == choice.first_channel[other]
                and choice.second_channel[group] == choice.second_channel[other]
                and choice.sync[group] == choice.sync[other]
                and choice.sync[group] != _ZERO3  # gathers a bucket for the ops of one group
            ):
                scratch.bucket_key[group] = other
                break


@helper
def synchronise(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, parameter: int
) -> None:
    """Aggregate a finished gradient and update, or put it into its bucket."""
    group = tables.parameter_group[parameter]
    layout = choice.layout[group]
    num_devices = choice.member.shape[1]
    if tables.parameter_axis[parameter] >= 0:
        row = layout + tables.parameter_axis[parameter] * (
            len(choice.shares) // len(tables.axis_units)
        )
        for device in range(num_devices):
            share = choice.shares[row, 0, device]
            if share > 0:
                size = tables.parameter_bytes[parameter]
                part = share * size / tables.parameter_units[parameter]
                write_task(tape, _UPDATE, parameter, device, 0, share, -1, part)
                read_gradient(scratch, tape, parameter, device)
                write_read(tape, scratch.last_read[parameter, device])
                scratch.next_ready_buffer[parameter, device] = write_buffer(tape, device, 0.0)
        return
    if choice.home[parameter] >= 0:
        serve(tables, choice, scratch, tape, parameter)
        return
    if choice.first_channel[group] < 0 or tables.gradient_is_partial[parameter] == 0:
        for device in range(num_devices):
            if choice.member[layout, device]:
                write_task(tape, _UPDATE, parameter, device, 0, 0, -1, 0.0)
                read_gradient(scratch, tape, parameter, device)
                write_read(tape, scratch.last_read[parameter, device])
                scratch.next_ready_buffer[parameter, device] = write_buffer(tape, device, 0.0)
        return
    if choice.sync[group] >= _ZERO1:
        finish_gradient(tables, choice, scratch, tape, parameter, choice.num_micro - 1)
        return
    key = scratch.bucket_key[group]
    size = tables.parameter_bytes[parameter]
    if scratch.open_first[key] < 0:
        scratch.open_first[key] = parameter
        scratch.open_bytes[key] = 0.0
    else:
        scratch.next_in_bucket[scratch.open_last[key]] = parameter
    scratch.open_last[key] = parameter
    scratch.next_in_bucket[parameter] = -1
    scratch.open_bytes[key] += size
    if scratch.open_bytes[key] >= choice.bucket_bytes:
        close_bucket(tables, choice, scratch, tape, key)


@helper
def close_bucket(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, key: int
) -> None:
    """All-reduce (or reduce-scatter and all-gather) a bucket, then update its parameters.

    The bucket is named by its first parameter. A bucket of one tensor is synchronised in place; a
    larger one is first copied together on each device.
    """
    first = scratch.open_first[key]
    size = scratch.open_bytes[key]
    scratch.open_first[key] = -1
    layout = choice.layout[key]
    num_devices = choice.member.shape[1]
    single = scratch.next_in_bucket[first] < 0
    parameter = first
    while parameter >= 0:
        tape.bucket[parameter] = first
        parameter = scratch.next_in_bucket[parameter]
    scratch.flat_buffer[:] = -1
    if not single:
        for device in range(num_devices):
            if choice.member[layout, device]:
                last = choice.num_micro - 1
                write_task(tape, _FLATTEN, first, device, last, 0, -1, 2.0 * size)
                parameter = first
                while parameter >= 0:
                    read_gradient(scratch, tape, parameter, device)
                    parameter = scratch.next_in_bucket[parameter]
                follow_gradients(choice.turns, tape)
                scratch.flat_buffer[device] = write_buffer(tape, device, size)
    two_phases = choice.second_channel[key] >= 0
    kind = _REDUCE_SCATTER if two_phases else _ALL_REDUCE
    write_task(tape, kind, first, -1, 0, 0, choice.first_channel[key], size)
    for device in range(num_devices):
        if choice.member[layout, device]:
            if single:
                read_gradient(scratch, tape, first, device)
            else:
                write_read(tape, scratch.flat_buffer[device])
    for device in range(num_devices):
        # A replica without samples has no gradient of its own: it receives one.
        missing = single and scratch.gradient_buffer[first, device] < 0
        if choice.member[layout, device] and missing:
            scratch.gradient_buffer[first, device] = write_buffer(tape, device, size)
    token = write_buffer(tape, -1, 0.0)
    if two_phases:
        write_task(tape, _ALL_GATHER, first, -1, 0, 0, choice.second_channel[key], size)
        write_read(tape, token)
        for device in range(num_devices):
            if choice.member[layout, device]:
                if single:
                    read_gradient(scratch, tape, first, device)
                else:
                    write_read(tape, scratch.flat_buffer[device])
        token = write_buffer(tape, -1, 0.0)
    # The updates, written out like the ops: an optimizer step of each parameter on each replica.
    # In a bucket the gradient is a view of the flat copy.
    number, made, read = tape.counts[NUM_TASKS], tape.counts[NUM_BUFFERS], tape.counts[NUM_READS]
    parameter = first
    while parameter >= 0:
        if (
            number + num_devices >= len(tape.tasks) - 2
            or made + num_devices >= len(tape.buffers) - 256
            or read + 4 * num_devices >= len(tape.reads)
        ):
            tape.counts[OVERFLOW] = 1
            number, made, read = 0, 0, 0
        for device in range(num_devices):
            if not choice.member[layout, device]:
                continue
            task = tape.tasks[number]
            task.kind = _UPDATE
            task.turn = tape.turn[device]
            task.subject = parameter
            task.device = device
            task.micro = 0
            task.samples = 0
            task.channel = -1
            task.num_bytes = 0.0
            task.read_start = read
            task.buffer_start = made
            tape.reads[read] = token
            read += 1
            if scratch.last_read[parameter, device] >= 0:
                tape.reads[read] = scratch.last_read[parameter, device]
                read += 1
            if single:
                tape.reads[read] = scratch.gradient_buffer[parameter, device]
                read += 1
                if scratch.gradient_token[parameter, device] >= 0:
                    tape.reads[read] = scratch.gradient_token[parameter, device]
                    read += 1
            else:
                tape.reads[read] = scratch.flat_buffer[device]
                read += 1
            buffer = tape.buffers[made]
            buffer.maker = number
            buffer.device = device
            buffer.num_bytes = 0.0
            scratch.next_ready_buffer[parameter, device] = made
            made += 1
            number += 1
        parameter = scratch.next_in_bucket[parameter]
    tape.counts[NUM_TASKS] = number
    tape.counts[NUM_BUFFERS] = made
    tape.counts[NUM_READS] = read
