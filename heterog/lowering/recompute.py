"""Recomputation: rerunning forward ops before the backward ops that read their results."""

from heterog.lowering.choice import Choice
from heterog.lowering.convert import gather_again, needed_buffer
from heterog.lowering.kernels import helper
from heterog.lowering.program import IntArray, TaskKind
from heterog.lowering.scratch import Scratch
from heterog.lowering.slices import gather_parameters, note_reader
from heterog.lowering.tables import KIND_NUMBER, GraphTables
from heterog.lowering.tape import Tape, set_units, write_buffer, write_read, write_task
from heterog.lowering.turns import BY_MICRO_BATCH, take_turns, work_of
from heterog.strategy.pipeline_schedule import Pass
from heterog.strategy.sync import Sharded

# Plain integers, because numba freezes enum members into slow objects.
_RECOMPUTE = int(TaskKind.RECOMPUTE)
_BACKWARD = int(Pass.BACKWARD)
_PARAMETERS = int(Sharded.PARAMETERS)
_S = KIND_NUMBER["S"]


@helper
def recompute_before(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, reader: int, micro: int
) -> None:
    """Rerun the forward ops that are due before a backward op, by what its group keeps."""
    group = tables.op_group[reader]
    ops, first, end = tables.recompute_op, 0, 0
    if choice.recompute[group] > 1:
        place = (choice.recompute[group] - 2) * len(tables.op_id) + reader
        ops = tables.partly_op
        first, end = tables.partly_start[place], tables.partly_start[place + 1]
    elif tables.op_recomputes[reader] == 1:
        first, end = tables.recompute_start[group], tables.recompute_start[group + 1]
    if first < end:
        _rerun(tables, choice, scratch, tape, ops, first, end, reader, micro)


@helper
def _rerun(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, ops: IntArray, first: int,
    end: int, reader: int, micro: int,
) -> None:  # fmt: skip
    """Rerun forward ops of a group before one of its backward ops, the ``reader``.

    They read the same inputs as the first time, except those that are recomputed themselves. The
    first one waits for the gradients that the reader waits for: a device that is ahead of others
    would otherwise hold recomputed values for as long as if it had kept them.
    """
    group = tables.op_group[reader]
    num_divisions = len(choice.member)
    num_devices = choice.member.shape[1]
    turns = choice.turns
    if turns.rule != BY_MICRO_BATCH:  # also where the reader is one of the ops that come later
        take_turns(turns, tape, group, _BACKWARD, micro)
    reading = choice.division[group] + num_divisions * tables.op_axis[reader]
    for position in range(first, end):
        op = ops[position]
        division = choice.division[group] + num_divisions * tables.op_axis[op]
        gather_again(tables, choice, scratch, tape, op, reader, micro)
        gathers = False
        if choice.sharded[group] == _PARAMETERS:
            gathers = gather_parameters(tables, choice, scratch, tape, op, division, micro, 1)
        for device in range(num_devices):
            share = choice.shares[division, micro, device]
            if share == 0:
                continue
            samples = share
            if tables.op_axis[op] > 0:
                samples = choice.teams.samples[choice.division[group], micro, device]
            write_task(tape, _RECOMPUTE, op, device, micro, samples, -1, 0.0)
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
            note_reader(tables, choice, scratch, tape, op, division, micro, 1)
    if turns.rule != BY_MICRO_BATCH:
        take_turns(turns, tape, group, work_of(tables, turns, reader), micro)
