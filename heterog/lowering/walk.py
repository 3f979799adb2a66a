"""The walk through a step: every op of every micro-batch, in program order.

An op of a micro-batch becomes a compute task on each device that has samples or units of it
(``compute_op``). Recomputation reruns forward ops before the backward ops that read their results
(``recompute_before``).
"""

from heterog.lowering.choice import Choice, Lowering
from heterog.lowering.convert import (
    convert,
    gather_again,
    has_window,
    needed_buffer,
    wait_for_gradients,
    wait_for_inputs,
)
from heterog.lowering.gradients import (
    accumulate,
    fresh_gradient,
    is_shared,
    num_rings,
    share_whole_gradient,
)
from heterog.lowering.kernels import helper, kernel
from heterog.lowering.program import IntArray, TaskKind
from heterog.lowering.reduce import close_bucket, number_buckets, synchronise
from heterog.lowering.sends import may_remake
from heterog.lowering.slices import (
    begin_sliced_step,
    find_pipelines,
    finish_gradient,
    gather_parameters,
    note_reader,
    number_sliced_buckets,
    scatters_by_micro,
)
from heterog.lowering.tables import KIND_NUMBER, GraphTables
from heterog.lowering.tape import (
    BY_MICRO_BATCH,
    NUM_BUFFERS,
    NUM_READS,
    NUM_TASKS,
    OVERFLOW,
    Scratch,
    Tape,
    Turns,
    ask_permits,
    begin_turns,
    has_room,
    last_turns,
    set_units,
    take_turns,
    work_of,
    write_buffer,
    write_read,
    write_task,
)
from heterog.lowering.value_collectives import (
    complete_in_teams,
    exchange_in_teams,
    scatter_in_teams,
)
from heterog.lowering.value_reads import BACKWARD_PASS, Recut
from heterog.strategy.schedules import Pass
from heterog.strategy.sync import Sharded

_S = KIND_NUMBER["S"]


@helper
def compute_op(lowering: Lowering, op: int, division: int, micro: int) -> None:
    """Write an op's task on each device of a division that has a share.

    Nearly all tasks of a program are made here, so they are written directly, with the counts of
    the tape in registers, instead of through ``write_task``.
    """
    tables, choice, scratch, tape = lowering
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
    num_made = last_value - first_value + 2  # a device may make two tokens, and read two
    if not has_room(tape, num_devices, num_devices * num_made, num_devices * (num_reads + 2)):
        return
    recut = tables.op_recut[op]
    units = tables.axis_units[tables.value_axis[first_value]] if recut > 0 else 0
    last_samples, part = tables.batch_size, 1.0  # of the previous device: samples, and fraction
    for device in range(scratch.span[plain, 0], scratch.span[plain, 1]):
        share = choice.shares[division, micro, device]
        if share == 0:
            continue
        samples = share
        if axis > 0:  # on all samples of the team, and on the device's own units
            samples = choice.teams.samples[plain, micro, device]
            if samples != last_samples:
                last_samples, part = samples, samples / tables.batch_size
        task = tape.tasks[number]
        task.kind = TaskKind.COMPUTE
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
            if recut == Recut.SUMMED or recut == Recut.EXCHANGED:
                # The value's axis is the one after the recut; this buffer is a part of the whole
                # sum, or a slice along the op's axis.
                size = tables.value_bytes_per_unit[value] * units
                if recut == Recut.EXCHANGED:
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
def _gives_permit(
    turns: Turns, scratch: Scratch, op: int, device: int, chunk: int, micro: int, end: int
) -> bool:
    """Whether an op is the last of a micro-batch on a chunk, so that another one may begin.

    A micro-batch has begun only if it has forward ops there.
    """
    if chunk < 0 or turns.closing_op[device, chunk, micro, end] != op:
        return False
    entered = scratch.entered[device, chunk]
    return bool(entered > 0 and (entered - 1) % scratch.token.shape[2] == micro)


@helper
def recompute_before(lowering: Lowering, reader: int, micro: int) -> None:
    """Rerun the forward ops that are due before a backward op, by what its group keeps."""
    tables, choice = lowering.tables, lowering.choice
    group = tables.op_group[reader]
    ops, first, end = tables.recompute_op, 0, 0
    if choice.recompute[group] > 1:
        place = (choice.recompute[group] - 2) * len(tables.op_id) + reader
        ops = tables.partly_op
        first, end = tables.partly_start[place], tables.partly_start[place + 1]
    elif tables.op_recomputes[reader] == 1:
        first, end = tables.recompute_start[group], tables.recompute_start[group + 1]
    if first < end:
        _rerun(lowering, ops, first, end, reader, micro)


@helper
def _rerun(
    lowering: Lowering, ops: IntArray, first: int, end: int, reader: int, micro: int
) -> None:
    """Rerun forward ops of a group before one of its backward ops, the ``reader``.

    They read the same inputs as the first time, except for recomputed ones. The first op waits for
    the gradients that the reader waits for. Otherwise a device that is ahead of others would hold
    recomputed values for as long as if it had kept them.
    """
    tables, choice, scratch, tape = lowering
    group = tables.op_group[reader]
    num_divisions = len(choice.member)
    num_devices = choice.member.shape[1]
    turns = choice.turns
    if turns.rule != BY_MICRO_BATCH:  # even if the reader is deferred with the weight gradients
        take_turns(turns, tape, group, Pass.BACKWARD, micro)
    reading = choice.division[group] + num_divisions * tables.op_axis[reader]
    for position in range(first, end):
        op = ops[position]
        division = choice.division[group] + num_divisions * tables.op_axis[op]
        gather_again(lowering, op, reader, micro)
        is_sliced = choice.sharded[group] == Sharded.PARAMETERS
        gathers = is_sliced and gather_parameters(lowering, op, division, micro, 1)
        for device in range(num_devices):
            share = choice.shares[division, micro, device]
            if share == 0:
                continue
            samples = share
            if tables.op_axis[op] > 0:
                samples = choice.teams.samples[choice.division[group], micro, device]
            write_task(tape, TaskKind.RECOMPUTE, op, device, micro, samples, -1, 0.0)
            if tables.op_axis[op] > 0:
                set_units(tape, share)
            for entry in range(tables.read_start[op], tables.read_start[op + 1]):
                write_read(tape, needed_buffer(tables, scratch, entry, device))
            for entry in range(
                tables.parameter_read_start[op], tables.parameter_read_start[op + 1]
            ):
                write_read(tape, scratch.ready_buffer[tables.parameter_read[entry], device])
            if position == first and choice.shares[reading, micro, device] > 0:
                for entry in range(tables.read_start[reader], tables.read_start[reader + 1]):
                    if tables.op_is_backward[tables.value_op[tables.read_value[entry]]] == 1:
                        write_read(tape, needed_buffer(tables, scratch, entry, device))
            for value in range(tables.value_start[op], tables.value_start[op + 1]):
                size = tables.value_bytes[value] + tables.value_bytes_per_unit[value] * share
                if tables.op_axis[op] > 0 and tables.value_batch_kind[value] == _S:
                    size *= samples / tables.batch_size
                scratch.value_buffer[value, device] = write_buffer(tape, device, size)
        if gathers:
            note_reader(lowering, op, division, micro, 1)
    if turns.rule != BY_MICRO_BATCH:
        take_turns(turns, tape, group, work_of(tables, turns, reader), micro)


@kernel
def lower_kernel(tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape) -> bool:
    """Write the program of a choice to a tape; ``False`` if the tape is too short."""
    lowering = Lowering(tables, choice, scratch, tape)
    num_divisions = len(choice.member)
    tape.counts[:] = 0
    tape.bucket[:] = -1
    scratch.next_ready_buffer[:] = -1
    # From here on only members of a division are visited; other devices make nothing.
    scratch.value_buffer[:] = -1
    scratch.slot_buffer[:] = -1
    _find_spans(choice, scratch)
    number_buckets(choice, scratch)
    has_slices, has_gathers = False, False
    for group in range(tables.num_groups):
        if choice.sharded[group] >= Sharded.STATE:
            has_slices = True
            has_gathers |= choice.sharded[group] == Sharded.PARAMETERS
    if has_slices:
        find_pipelines(tables, choice, scratch)
        number_sliced_buckets(lowering)
    turns = choice.turns
    has_turns, is_capped = turns.rule != BY_MICRO_BATCH, len(turns.cap) > 0
    for step in range(choice.num_steps):
        _begin_step(choice, scratch, has_slices)
        begin_turns(turns, scratch, tape, step)
        for micro in range(choice.num_micro):
            _forget_values(tables, choice, scratch)
            scratch.slot_done[:] = 0
            scratch.awaited[:] = -1
            tape.turn[:] = micro
            turns_group, turns_work = -2, -1  # group and pass of the devices' current turns
            for op in range(len(tables.op_id)):
                group = tables.op_group[op]
                # The constant group is -1: the last entry.
                division = choice.division[group] + num_divisions * tables.op_axis[op]
                work = work_of(tables, turns, op)
                if has_turns and (group != turns_group or work != turns_work):
                    take_turns(turns, tape, group, work, micro)
                    turns_group, turns_work = group, work
                if is_capped and group >= 0:
                    number = step * choice.num_micro + micro
                    shares = choice.shares[division, micro]
                    ask_permits(turns, scratch, shares, group, work, number)
                _lower_op(lowering, op, division, micro, has_gathers)
                if tape.counts[OVERFLOW] != 0:
                    return False
        last_turns(turns, tape, choice.num_micro)
        for key in range(len(scratch.open_first)):
            if scratch.open_first[key] >= 0:
                close_bucket(lowering, key)
    end = tape.tasks[tape.counts[NUM_TASKS]]
    end.read_start = tape.counts[NUM_READS]
    end.buffer_start = tape.counts[NUM_BUFFERS]
    return bool(tape.counts[OVERFLOW] == 0)


@helper
def _find_spans(choice: Choice, scratch: Scratch) -> None:
    """Find the first member of each division, and one after its last; 0 and 0 if it has none."""
    for division in range(len(choice.member)):
        begin, end = 0, 0
        for device in range(choice.member.shape[1]):
            if choice.member[division, device]:
                begin = device if end == 0 else begin
                end = device + 1
        scratch.span[division, 0] = begin
        scratch.span[division, 1] = end


@helper
def _lower_op(lowering: Lowering, op: int, division: int, micro: int, has_gathers: bool) -> None:
    """Write an op's conversions, the op itself, and everything that it completes."""
    tables, choice, scratch = lowering.tables, lowering.choice, lowering.scratch
    _bring_inputs(lowering, op, division, micro)
    is_backward = tables.op_is_backward[op]
    gathers = has_gathers and gather_parameters(lowering, op, division, micro, is_backward)
    if tables.op_group[op] >= 0 and choice.recompute[tables.op_group[op]] > 0:
        recompute_before(lowering, op, micro)
    compute_op(lowering, op, division, micro)
    if gathers:
        note_reader(lowering, op, division, micro, is_backward)
    if tables.op_recut[op] == Recut.SUMMED:
        scatter_in_teams(lowering, tables.value_start[op], division, micro)
    elif tables.op_recut[op] == Recut.EXCHANGED:
        exchange_in_teams(lowering, tables.value_start[op], division, micro)
    elif tables.op_recut[op] == Recut.COMPLETED:
        complete_in_teams(lowering, tables.value_start[op], division, micro)
    for entry in range(tables.finished_start[op], tables.finished_start[op + 1]):
        parameter = tables.finished_parameter[entry]
        _note_last_readers(tables, scratch, parameter)
        _finish_parameter(lowering, parameter, micro)


@helper
def _begin_step(choice: Choice, scratch: Scratch, has_slices: bool) -> None:
    """Reset the working memory, except for when the last step's parameters arrive."""
    for parameter in range(scratch.ready_buffer.shape[0]):
        for device in range(scratch.ready_buffer.shape[1]):
            arrived = scratch.next_ready_buffer[parameter, device]
            scratch.ready_buffer[parameter, device] = arrived
    scratch.gradient_buffer[:] = -1
    scratch.gradient_token[:] = -1
    scratch.last_read[:] = -1
    scratch.open_first[:] = -1
    scratch.full_bytes[:] = choice.first_bucket_bytes
    if has_slices:
        begin_sliced_step(scratch)


@helper
def _forget_values(tables: GraphTables, choice: Choice, scratch: Scratch) -> None:
    """Begin a micro-batch: reset the buffers of values on devices that can have made any.

    Devices outside a division make none, and there may be hundreds of such devices.
    """
    for op in range(len(tables.op_id)):
        division = choice.division[tables.op_group[op]]
        begin, end = scratch.span[division, 0], scratch.span[division, 1]
        for value in range(tables.value_start[op], tables.value_start[op + 1]):
            scratch.value_buffer[value, begin:end] = -1
    for parameter in range(len(tables.parameter_bytes)):  # members may have received a gradient
        division = choice.division[tables.parameter_group[parameter]]
        begin, end = scratch.span[division, 0], scratch.span[division, 1]
        scratch.value_buffer[tables.parameter_gradient[parameter], begin:end] = -1


@helper
def _bring_inputs(lowering: Lowering, op: int, division: int, micro: int) -> None:
    """Convert the inputs of an op that have not been converted yet."""
    tables, choice, scratch = lowering.tables, lowering.choice, lowering.scratch
    num_divisions = len(choice.member)
    plain = division % num_divisions
    is_remade = False
    for is_late in range(2):
        for read in range(tables.read_start[op], tables.read_start[op + 1]):
            slot = tables.read_slot[read]
            if slot < 0 or scratch.slot_done[slot] > 0:
                continue
            if is_late == 0 and may_remake(tables, slot):
                is_remade = True  # waits for the other inputs
                continue
            value = tables.slot_value[slot]
            source = choice.division[tables.op_group[tables.value_op[value]]]
            source += num_divisions * tables.value_axis[value]
            is_as_made = tables.slot_whole[slot] == 0 and not has_window(tables, slot)
            if source == division and is_as_made:
                scratch.slot_done[slot] = 1
                for device in range(scratch.span[plain, 0], scratch.span[plain, 1]):
                    scratch.slot_buffer[slot, device] = scratch.value_buffer[value, device]
                continue
            if is_late == 1:
                wait_for_inputs(tables, choice, scratch, op)
            elif tables.slot_pass[slot] == BACKWARD_PASS:
                wait_for_gradients(tables, choice, scratch, op, micro)
            convert(lowering, slot, micro)
        if not is_remade:
            return
    scratch.awaited[:] = -1


@helper
def _note_last_readers(tables: GraphTables, scratch: Scratch, parameter: int) -> None:
    """Note the ops that an update has to wait for besides the maker of its gradient."""
    num_devices = scratch.last_read.shape[1]
    last_value = tables.parameter_last_value[parameter]
    if last_value >= 0:
        for device in range(num_devices):
            if scratch.value_buffer[last_value, device] >= 0:
                scratch.last_read[parameter, device] = scratch.value_buffer[last_value, device]
    # On a device that makes no gradient, nothing else waits for the parameter's readers.
    gradient = tables.parameter_gradient[parameter]
    for reader in range(tables.reader_start[parameter], tables.reader_start[parameter + 1]):
        for device in range(num_devices):
            made = scratch.value_buffer[tables.reader_value[reader], device]
            if made >= 0 and scratch.value_buffer[gradient, device] < 0:
                scratch.last_read[parameter, device] = made


@helper
def _finish_parameter(lowering: Lowering, parameter: int, micro: int) -> None:
    """Handle a finished gradient of a micro-batch: keep it, add it up, synchronise."""
    tables, choice, scratch = lowering.tables, lowering.choice, lowering.scratch
    slot = tables.gradient_slot[parameter]
    if slot >= 0 and scratch.slot_done[slot] == 0:  # made in parts, but the parameter is whole
        convert(lowering, slot, micro)
    if is_shared(tables, choice, parameter):
        share_whole_gradient(lowering, parameter, micro)
    by_micro = scatters_by_micro(choice, tables.parameter_group[parameter])
    if by_micro and num_rings(tables, choice, parameter) > 0:
        finish_gradient(lowering, parameter, micro)
        return
    if micro == 0:
        for device in range(choice.member.shape[1]):
            fresh = fresh_gradient(tables, choice, scratch, parameter, device)
            scratch.gradient_buffer[parameter, device] = fresh
    else:
        accumulate(lowering, parameter, micro)
    if micro == choice.num_micro - 1:
        synchronise(lowering, parameter)
