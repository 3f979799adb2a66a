"""Making a value where it is read: its ops run again instead of a transfer; see ``remaking``."""

from heterog.lowering.choice import Choice
from heterog.lowering.kernels import helper
from heterog.lowering.pieces import box_of, bytes_of
from heterog.lowering.program import TaskKind
from heterog.lowering.scratch import Scratch
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import Tape, set_units, write_buffer, write_read, write_task

# Plain integers, because numba freezes enum members into slow objects.
_REMAKE = int(TaskKind.REMAKE)
_MAKES, _HAS, _READS_NOT = 1, 0, -1


@helper
def may_remake(tables: GraphTables, slot: int) -> bool:
    """Whether there are ops that make what a slot needs where it is read."""
    return bool(tables.remake_start[slot] < tables.remake_start[slot + 1])


@helper
def remake(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int,
) -> bool:  # fmt: skip
    """Make a slot's value on the devices that read it, if they have no part of it.

    The first op waits for what ``wait_for_inputs`` has noted: a device would otherwise make the
    values of all its micro-batches as soon as it has nothing else to do, and hold them.

    Args:
        tables: Tables of the graph.
        choice: The strategy.
        scratch: Working memory; its ``slot_buffer`` is written.
        tape: Output.
        slot: The slot to fill.
        source: Division of the maker.
        target: Division of the reader, another one.
        micro: Number of the micro-batch.

    Returns:
        Whether it is made there; if not, nothing was written.
    """
    if not may_remake(tables, slot):
        return False
    value = tables.slot_value[slot]
    axis = tables.value_axis[value]
    row = target + len(choice.member) * axis
    if not _is_lacking(tables, choice, scratch, slot, source, target, micro):
        return False
    for device in range(choice.member.shape[1]):
        scratch.slot_buffer[slot, device] = scratch.value_buffer[value, device]
        if scratch.holder_buffer[device] != _MAKES:
            continue
        _, samples, _, _ = box_of(choice, row, micro, device)
        for entry in range(tables.remake_start[slot], tables.remake_start[slot + 1]):
            op = tables.remake_op[entry]
            write_task(tape, _REMAKE, op, device, micro, samples, -1, 0.0)
            if axis > 0:
                set_units(tape, choice.shares[row, micro, device])
            if entry == tables.remake_start[slot]:
                write_read(tape, scratch.awaited[device])
                for end in range(2):
                    write_read(tape, scratch.permit[end, device])
            for read in range(tables.read_start[op], tables.read_start[op + 1]):
                needed = tables.read_value[read]
                if tables.op_group[tables.value_op[needed]] < 0:
                    write_read(tape, scratch.value_buffer[needed, device])
                else:
                    write_read(tape, scratch.remade_buffer[needed, device])
            for made in range(tables.value_start[op], tables.value_start[op + 1]):
                size = bytes_of(tables, made, samples, -1)
                scratch.remade_buffer[made, device] = write_buffer(tape, device, size)
        scratch.slot_buffer[slot, device] = scratch.remade_buffer[value, device]
    return True


@helper
def _is_lacking(
    tables: GraphTables, choice: Choice, scratch: Scratch, slot: int, source: int, target: int,
    micro: int,
) -> bool:  # fmt: skip
    """Note which readers have no part of a value, if all other readers have exactly theirs.

    Where readers have a part, as where neighbouring groups have slightly other shares, the rest is
    sent: to make all of it again would take longer, and memory twice.
    """
    value = tables.slot_value[slot]
    axis = tables.value_axis[value]
    row, made = target + len(choice.member) * axis, source + len(choice.member) * axis
    reader = target + len(choice.member) * tables.slot_axis[slot]
    is_lacking = False
    for device in range(choice.member.shape[1]):
        scratch.holder_buffer[device] = _READS_NOT
        if choice.shares[reader, micro, device] == 0:
            continue
        if choice.shares[row, micro, device] == 0:
            return False
        begin, count, _, _ = box_of(choice, row, micro, device)
        if choice.shares[made, micro, device] > 0:
            low, owned, _, _ = box_of(choice, made, micro, device)
            if low == begin and owned == count:
                scratch.holder_buffer[device] = _HAS
                continue
            if min(begin + count, low + owned) > max(begin, low):
                return False
        size = bytes_of(tables, value, count, -1) * tables.value_moved_fraction[value]
        if size < tables.slot_remade_from[slot]:
            return False
        scratch.holder_buffer[device] = _MAKES
        is_lacking = True
    return is_lacking
