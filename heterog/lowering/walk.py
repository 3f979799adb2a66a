"""The walk through a step: every op of every micro-batch, in program order."""

from heterog.lowering.choice import Choice
from heterog.lowering.compute import compute_op
from heterog.lowering.convert import convert, wait_for_gradients, wait_for_inputs
from heterog.lowering.gradients import (
    accumulate,
    fresh_gradient,
    is_shared,
    num_rings,
    share_whole_gradient,
)
from heterog.lowering.halo import has_window
from heterog.lowering.kernels import helper, kernel
from heterog.lowering.recompute import recompute_before
from heterog.lowering.reduce import close_bucket, number_buckets, synchronise
from heterog.lowering.remake import may_remake
from heterog.lowering.scratch import Scratch
from heterog.lowering.slices import (
    begin_sliced_step,
    find_pipelines,
    finish_gradient,
    gather_parameters,
    note_reader,
    number_sliced_buckets,
)
from heterog.lowering.tables import GraphTables, Recut
from heterog.lowering.tape import NUM_BUFFERS, NUM_READS, NUM_TASKS, OVERFLOW, Tape
from heterog.lowering.turns import (
    BY_MICRO_BATCH,
    ask_permits,
    begin_turns,
    last_turns,
    take_turns,
    work_of,
)
from heterog.lowering.value_collectives import exchange_in_teams, scatter_in_teams
from heterog.lowering.value_reads import BACKWARD_PASS
from heterog.strategy.sync import Sharded

# Plain integers, because numba freezes enum members into slow objects.
_SUMMED, _EXCHANGED = int(Recut.SUMMED), int(Recut.EXCHANGED)
_STATE = int(Sharded.STATE)
_GRADIENTS = int(Sharded.GRADIENTS)
_PARAMETERS = int(Sharded.PARAMETERS)


@kernel
def lower_kernel(tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape) -> bool:
    """Write the program of a choice to a tape; ``False`` if the tape is too short."""
    num_divisions = len(choice.member)
    tape.counts[:] = 0
    tape.bucket[:] = -1
    scratch.next_ready_buffer[:] = -1
    # Only members of a division are looked at from here on; the others have made nothing.
    scratch.value_buffer[:] = -1
    scratch.slot_buffer[:] = -1
    number_buckets(choice, scratch)
    has_slices, has_gathers = False, False
    for group in range(tables.num_groups):
        if choice.sharded[group] >= _STATE:
            has_slices = True
            has_gathers |= choice.sharded[group] == _PARAMETERS
    if has_slices:
        find_pipelines(tables, choice, scratch)
        number_sliced_buckets(tables, choice, scratch, tape)
    turns = choice.turns
    has_turns, is_capped = turns.rule != BY_MICRO_BATCH, len(turns.cap) > 0
    for step in range(choice.num_steps):
        _begin_step(scratch, has_slices)
        begin_turns(turns, scratch, tape, step)
        for micro in range(choice.num_micro):
            _forget_values(tables, choice, scratch)
            scratch.slot_done[:] = 0
            scratch.awaited[:] = -1
            tape.turn[:] = micro
            turns_group, turns_work = -2, -1  # whose turns devices have
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
                _lower_op(tables, choice, scratch, tape, op, division, micro, has_gathers)
                if tape.counts[OVERFLOW] != 0:
                    return False
        last_turns(turns, tape, choice.num_micro)
        for key in range(len(scratch.open_first)):
            if scratch.open_first[key] >= 0:
                close_bucket(tables, choice, scratch, tape, key)
    end = tape.tasks[tape.counts[NUM_TASKS]]
    end.read_start = tape.counts[NUM_READS]
    end.buffer_start = tape.counts[NUM_BUFFERS]
    return bool(tape.counts[OVERFLOW] == 0)


@helper
def _lower_op(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, op: int, division: int,
    micro: int, has_gathers: bool,
) -> None:  # fmt: skip
    """Write an op's conversions, the op itself, and everything that it completes."""
    _bring_inputs(tables, choice, scratch, tape, op, division, micro)
    gathers = False
    if has_gathers:
        is_backward = tables.op_is_backward[op]
        gathers = gather_parameters(
            tables, choice, scratch, tape, op, division, micro, is_backward
        )
    if tables.op_group[op] >= 0 and choice.recompute[tables.op_group[op]] > 0:
        recompute_before(tables, choice, scratch, tape, op, micro)
    compute_op(tables, choice, scratch, tape, op, division, micro)
    if gathers:
        is_backward = tables.op_is_backward[op]
        note_reader(tables, choice, scratch, tape, op, division, micro, is_backward)
    if tables.op_recut[op] == _SUMMED:
        scatter_in_teams(tables, choice, scratch, tape, tables.value_start[op], division, micro)
    elif tables.op_recut[op] == _EXCHANGED:
        exchange_in_teams(tables, choice, scratch, tape, tables.value_start[op], division, micro)
    for entry in range(tables.finished_start[op], tables.finished_start[op + 1]):
        parameter = tables.finished_parameter[entry]
        _note_last_readers(tables, scratch, parameter)
        _finish_parameter(tables, choice, scratch, tape, parameter, micro)


@helper
def _begin_step(scratch: Scratch, has_slices: bool) -> None:
    """Reset the working memory, except for when the last step's parameters arrive."""
    for parameter in range(scratch.ready_buffer.shape[0]):
        for device in range(scratch.ready_buffer.shape[1]):
            arrived = scratch.next_ready_buffer[parameter, device]
            scratch.ready_buffer[parameter, device] = arrived
    scratch.gradient_buffer[:] = -1
    scratch.gradient_token[:] = -1
    scratch.last_read[:] = -1
    scratch.open_first[:] = -1
    if has_slices:
        begin_sliced_step(scratch)


@helper
def _forget_values(tables: GraphTables, choice: Choice, scratch: Scratch) -> None:
    """Begin a micro-batch: reset which buffers hold values, where the last one can have made any.

    Devices outside a division make none, and there may be hundreds of these.
    """
    for op in range(len(tables.op_id)):
        division = choice.division[tables.op_group[op]]
        begin, end = scratch.span[division, 0], scratch.span[division, 1]
        for value in range(tables.value_start[op], tables.value_start[op + 1]):
            scratch.value_buffer[value, begin:end] = -1
    for parameter in range(len(tables.parameter_bytes)):  # which members of its group may receive
        division = choice.division[tables.parameter_group[parameter]]
        begin, end = scratch.span[division, 0], scratch.span[division, 1]
        scratch.value_buffer[tables.parameter_gradient[parameter], begin:end] = -1


@helper
def _bring_inputs(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, op: int, division: int,
    micro: int,
) -> None:  # fmt: skip
    """Convert the inputs of an op that have not been converted yet."""
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
            convert(tables, choice, scratch, tape, slot, micro)
        if not is_remade:
            return
    scratch.awaited[:] = -1


@helper
def _note_last_readers(tables: GraphTables, scratch: Scratch, parameter: int) -> None:
    """Note the ops that an update has to wait for besides those that make the gradient."""
    num_devices = scratch.last_read.shape[1]
    last_value = tables.parameter_last_value[parameter]
    if last_value >= 0:
        for device in range(num_devices):
            if scratch.value_buffer[last_value, device] >= 0:
                scratch.last_read[parameter, device] = scratch.value_buffer[last_value, device]
    # Where no gradient is made, nothing else waits for the parameter's readers.
    gradient = tables.parameter_gradient[parameter]
    for reader in range(tables.reader_start[parameter], tables.reader_start[parameter + 1]):
        for device in range(num_devices):
            made = scratch.value_buffer[tables.reader_value[reader], device]
            if made >= 0 and scratch.value_buffer[gradient, device] < 0:
                scratch.last_read[parameter, device] = made


@helper
def _finish_parameter(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, parameter: int, micro: int
) -> None:
    """Handle a finished gradient of a micro-batch: keep it, add it up, synchronise."""
    slot = tables.gradient_slot[parameter]
    if slot >= 0 and scratch.slot_done[slot] == 0:  # made in parts of a parameter that is whole
        convert(tables, choice, scratch, tape, slot, micro)
    if is_shared(tables, choice, parameter):
        share_whole_gradient(tables, choice, scratch, tape, parameter, micro)
    by_micro = choice.sharded[tables.parameter_group[parameter]] >= _GRADIENTS
    if by_micro and num_rings(tables, choice, parameter) > 0:
        finish_gradient(tables, choice, scratch, tape, parameter, micro)
        return
    if micro == 0:
        for device in range(choice.member.shape[1]):
            fresh = fresh_gradient(tables, choice, scratch, parameter, device)
            scratch.gradient_buffer[parameter, device] = fresh
    else:
        accumulate(tables, choice, scratch, tape, parameter, micro)
    if micro == choice.num_micro - 1:
        synchronise(tables, choice, scratch, tape, parameter)
