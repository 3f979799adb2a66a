"""Conversions: a value as it was made becomes what a reader elsewhere needs."""

from heterog.strategy.kernels import helper
from heterog.strategy.lowering.choice import Choice
from heterog.strategy.lowering.scratch import Scratch
from heterog.strategy.lowering.tape import (
    NUM_BUFFERS,
    NUM_TASKS,
    Tape,
    write_buffer,
    write_read,
    write_task,
)
from heterog.strategy.lowering.turns import BY_MICRO_BATCH, turn_of, work_of
from heterog.strategy.pipeline_schedule import Pass
from heterog.strategy.program import TaskKind
from heterog.strategy.tables import GraphTables

# Plain integers, because numba freezes enum members into slow objects.
_SPLIT = int(TaskKind.SPLIT)
_CONCAT = int(TaskKind.CONCAT)
_SEND = int(TaskKind.SEND)
_REDUCE_VALUE = int(TaskKind.REDUCE_VALUE)
_GATHER_VALUE = int(TaskKind.GATHER_VALUE)
_BACKWARD = int(Pass.BACKWARD)
_WEIGHTS = int(Pass.WEIGHTS)
_R, _S, _P = 0, 1, 2


@helper
def needed_buffer(tables: GraphTables, scratch: Scratch, entry: int, device: int) -> int:
    """Buffer of what an op reads, -1 if there is none."""
    slot = tables.read_slot[entry]
    if slot >= 0:
        return int(scratch.slot_buffer[slot, device])
    return int(scratch.value_buffer[tables.read_value[entry], device])


@helper
def convert(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, micro: int
) -> None:
    """Make a value available the way a slot needs it."""
    value = tables.slot_value[slot]
    whole = tables.slot_whole[slot]
    kind = tables.value_kind[value]
    maker = tables.value_op[value]
    num_layouts = len(choice.shares) // len(tables.axis_units)
    first_row = num_layouts * tables.op_axis[maker]
    source = choice.layout[tables.op_group[maker]] + first_row
    reading = choice.layout[tables.slot_group[slot]]
    # Units move along their own axis; whatever else is read is wanted where the reader runs.
    target = reading + (first_row if kind == _S else num_layouts * tables.slot_axis[slot])
    scratch.slot_done[slot] = 1
    num_devices = choice.member.shape[1]
    same_devices = source == reading + first_row
    # Gathers and reductions leave the whole on every device of a layout.
    in_layout = kind == _S or (kind == _P and whole == 1 and same_devices)
    # Another slot of the same value may have brought it to the same layout already.
    for other in range(tables.value_slot_start[value], tables.value_slot_start[value + 1]):
        if (
            other != slot
            and scratch.slot_done[other] == 1
            and tables.slot_whole[other] == whole
            and choice.layout[tables.slot_group[other]] == reading
            and (in_layout or tables.slot_axis[other] == tables.slot_axis[slot])
        ):
            for device in range(num_devices):
                scratch.slot_buffer[slot, device] = scratch.slot_buffer[other, device]
            return
    for device in range(num_devices):
        scratch.slot_buffer[slot, device] = scratch.value_buffer[value, device]
    if kind == _S:
        if source != target:
            _move_samples(tables, choice, scratch, tape, slot, source, target, micro)
        if whole == 1:
            _gather(tables, choice, scratch, tape, slot, target, micro)
    elif kind == _P:
        if whole == 1 or not (same_devices and _covers(choice, source, target, micro)):
            _reduce(tables, choice, scratch, tape, slot, source, micro)
            if whole == 0 or not same_devices:
                _copy_whole(tables, choice, scratch, tape, slot, source, target, micro, whole == 0)
    elif source != target:
        _copy_whole(tables, choice, scratch, tape, slot, source, target, micro, False)


@helper
def _covers(choice: Choice, source: int, target: int, micro: int) -> bool:
    """Whether whoever made a part of a sum also runs its reader."""
    for device in range(choice.member.shape[1]):
        if choice.shares[source, micro, device] > 0 and choice.shares[target, micro, device] == 0:
            return False
    return True


@helper
def _move_samples(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int,
) -> None:  # fmt: skip
    """S to S: each device gets its range of samples from the devices whose ranges overlap it."""
    value = tables.slot_value[slot]
    num_devices = choice.member.shape[1]
    per_unit = tables.value_bytes_per_unit[value] * tables.value_moved_fraction[value]
    contiguous = tables.value_is_outermost[value] == 1
    turns, maker = choice.turns, tables.value_op[value]
    work = work_of(tables, turns, maker)
    begin = 0
    for device in range(num_devices):
        count = choice.shares[target, micro, device]
        if count == 0:
            continue
        end = begin + count
        # First the pieces that must travel, then one task that joins all of them.
        parts = 0
        low = 0
        first_piece = tape.counts[NUM_BUFFERS]
        local = -1
        for other in range(num_devices):
            owned = choice.shares[source, micro, other]
            high = low + owned
            overlap = min(end, high) - max(begin, low)
            low = high
            if overlap <= 0:
                continue
            parts += 1
            mine = scratch.value_buffer[value, other]
            size = overlap * per_unit
            if other == device:
                local = mine
                if overlap == owned and overlap == count:
                    break
                continue
            if overlap < owned and not contiguous:
                write_task(tape, _SPLIT, slot, other, micro, overlap, -1, 2.0 * size)
                if turns.rule != BY_MICRO_BATCH:  # it follows what it cuts
                    cut = tape.tasks[tape.counts[NUM_TASKS] - 1]
                    group = tables.op_group[maker]
                    cut.turn = turn_of(turns, tape, group, work, other, micro)
                write_read(tape, mine)
                mine = write_buffer(tape, other, size)
            write_task(
                tape, _SEND, slot, device, micro, overlap, other * num_devices + device, size
            )
            write_read(tape, mine)
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)
        if parts > 1:
            pieces = tape.counts[NUM_BUFFERS]
            write_task(tape, _CONCAT, slot, device, micro, count, -1, 2.0 * count * per_unit)
            if turns.rule != BY_MICRO_BATCH and work != _WEIGHTS:
                # The first reader may be of the weights, and others wait for it before those.
                group = tables.slot_group[slot]
                joined = tape.tasks[tape.counts[NUM_TASKS] - 1]
                joined.turn = min(
                    joined.turn, turn_of(turns, tape, group, _BACKWARD, device, micro)
                )
            write_read(tape, local)
            for piece in range(first_piece, pieces):
                if tape.buffers[piece].device == device:
                    write_read(tape, piece)
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, count * per_unit)
        begin = end


@helper
def _gather(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, layout: int,
    micro: int,
) -> None:  # fmt: skip
    """S to R inside a layout: a padded all-gather to every member."""
    channel = choice.gather_channel[layout]
    if channel < 0:
        return
    value = tables.slot_value[slot]
    num_devices = choice.member.shape[1]
    total = 0
    largest = 0
    members = 0
    for device in range(num_devices):
        count = choice.shares[layout, micro, device]
        total += count
        largest = max(largest, count)
        members += 1 if choice.member[layout, device] else 0
    per_unit = tables.value_bytes_per_unit[value]
    write_task(tape, _GATHER_VALUE, slot, -1, micro, total, channel, members * largest * per_unit)
    for device in range(num_devices):
        if choice.shares[layout, micro, device] > 0:
            write_read(tape, scratch.slot_buffer[slot, device])
    for device in range(num_devices):
        if choice.member[layout, device]:
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, total * per_unit)


@helper
def _reduce(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, layout: int,
    micro: int,
) -> None:  # fmt: skip
    """P to R inside a layout: an all-reduce over every member."""
    channel = choice.reduce_channel[layout]
    if channel < 0:
        return
    value = tables.slot_value[slot]
    size = tables.value_bytes[value]
    num_devices = choice.member.shape[1]
    write_task(tape, _REDUCE_VALUE, slot, -1, micro, 0, channel, size)
    for device in range(num_devices):
        if choice.shares[layout, micro, device] > 0 and tables.value_is_early[value] == 0:
            write_read(tape, scratch.value_buffer[value, device])
    for device in range(num_devices):
        if choice.member[layout, device]:
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)


@helper
def _copy_whole(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int, only_first: bool,
) -> None:  # fmt: skip
    """R to R: send a copy to every target device that has none.

    With ``only_first`` the value goes to the target's first device alone and counts as zero on the
    others: a whole value seen as a partial sum.
    """
    value = tables.slot_value[slot]
    size = (tables.value_bytes[value]) * tables.value_moved_fraction[value]
    num_devices = choice.member.shape[1]
    sender = -1
    for device in range(num_devices):
        if choice.shares[source, micro, device] > 0:
            sender = device
            break
    seen = False
    for device in range(num_devices):
        if choice.shares[target, micro, device] == 0:
            continue
        if only_first and seen:
            scratch.slot_buffer[slot, device] = -1
            continue
        seen = True
        if scratch.slot_buffer[slot, device] < 0:
            write_task(tape, _SEND, slot, device, micro, 0, sender * num_devices + device, size)
            write_read(tape, scratch.slot_buffer[slot, sender])
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)
