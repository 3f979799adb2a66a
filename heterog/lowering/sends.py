"""Sends of boxes: moving a value from the devices that hold it to the devices that need it.

A piece is a part of a value that one device holds; it is sent to another device and joined there.
Instead of a transfer, the reading device may run the ops of the value again; see ``keeping``.
"""

from heterog.lowering.choice import Choice, Lowering, is_first
from heterog.lowering.kernels import helper
from heterog.lowering.program import TaskKind
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import (
    APART,
    BY_MICRO_BATCH,
    NUM_BUFFERS,
    NUM_TASKS,
    Scratch,
    set_units,
    turn_of,
    work_of,
    write_buffer,
    write_read,
    write_task,
)
from heterog.strategy.schedules import Pass


@helper
def box_of(choice: Choice, row: int, micro: int, device: int) -> tuple[int, int, int, int]:
    """First sample, samples, first unit, and units (or -1 for all) of a device in a row."""
    teams, division = choice.teams, row % len(choice.member)
    share = choice.shares[row, micro, device]
    if row == division:  # along the batch: its own samples, whole
        return teams.own_begin[division, micro, device], share, 0, -1
    samples = teams.samples[division, micro, device]
    return teams.begin[division, micro, device], samples, teams.unit_begin[row, device], share


@helper
def bytes_of(tables: GraphTables, value: int, samples: int, units: int) -> float:
    """Bytes of some samples and units of a value that is split along the batch.

    Args:
        tables: Tables of the graph.
        value: The value.
        samples: Number of samples of the batch.
        units: Number of units of the axis of the rule that made it; -1 for all of them.
    """
    if tables.value_axis[value] == 0:
        return float(samples * tables.value_bytes_per_unit[value])
    per_unit = tables.value_bytes_per_unit[value]
    if units < 0:
        units = tables.axis_units[tables.value_axis[value]]
    return float((tables.value_bytes[value] + units * per_unit) * samples / tables.batch_size)


@helper
def send_piece(
    lowering: Lowering, slot: int, mine: int, other: int, device: int, micro: int, samples: int,
    units: int, size: float, is_cut: bool,
) -> None:  # fmt: skip
    """Send a piece of a device's value, which is first cut out if it is not contiguous.

    Args:
        lowering: Its ``slot_buffer`` and tape are written.
        slot: The slot to fill.
        mine: Buffer of the device that sends.
        other: Device that sends.
        device: Device that receives.
        micro: Number of the micro-batch.
        samples: Number of samples of the piece.
        units: Number of units of the piece, or of rows for a window; -1 if it is whole.
        size: Bytes of the piece.
        is_cut: Whether it is copied out before it is sent.
    """
    tables, choice, scratch, tape = lowering
    maker = tables.value_op[tables.slot_value[slot]]
    turns = choice.turns
    if is_cut:
        write_task(tape, TaskKind.SPLIT, slot, other, micro, samples, -1, 2.0 * size)
        set_units(tape, max(units, 0))
        if turns.rule != BY_MICRO_BATCH:  # the cut has the turn of the op that makes the value
            cut = tape.tasks[tape.counts[NUM_TASKS] - 1]
            group, work = tables.op_group[maker], work_of(tables, turns, maker)
            cut.turn = turn_of(turns, tape, group, work, other, micro)
        write_read(tape, mine)
        mine = write_buffer(tape, other, size)
    channel = other * choice.member.shape[1] + device
    write_task(tape, TaskKind.SEND, slot, device, micro, samples, channel, size)
    set_units(tape, max(units, 0))
    write_read(tape, mine)
    scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)


@helper
def join_pieces(
    lowering: Lowering, slot: int, device: int, micro: int, parts: int, local: int,
    first_piece: int, samples: int, units: int, size: float,
) -> None:  # fmt: skip
    """Join a device's own piece of a value with the pieces that it has received, if there are any.

    Args:
        lowering: Its ``slot_buffer`` and tape are written.
        slot: The slot to fill.
        device: Device on which they are joined.
        micro: Number of the micro-batch.
        parts: Number of pieces; a single one is left as it is.
        local: Buffer of the device's own piece; -1 if it has none.
        first_piece: First buffer that was made for this join.
        samples: Number of samples of all pieces.
        units: Number of units of all pieces, or of rows for a window; -1 if they are whole.
        size: Bytes of all pieces.
    """
    tables, choice, scratch, tape = lowering
    value = tables.slot_value[slot]
    turns = choice.turns
    pieces = tape.counts[NUM_BUFFERS]
    if parts < 2:
        return
    write_task(tape, TaskKind.CONCAT, slot, device, micro, samples, -1, 2.0 * size)
    set_units(tape, max(units, 0))
    if (
        turns.rule != BY_MICRO_BATCH
        and work_of(tables, turns, tables.value_op[value]) != Pass.WEIGHTS
    ):
        # The first reader may make weight gradients, but others need the value in earlier turns.
        joined = tape.tasks[tape.counts[NUM_TASKS] - 1]
        group = tables.slot_group[slot]
        joined.turn = min(joined.turn, turn_of(turns, tape, group, Pass.BACKWARD, device, micro))
    write_read(tape, local)
    for piece in range(first_piece, pieces):
        if tape.buffers[piece].device == device:
            write_read(tape, piece)
    scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)


ALL, FIRST, FIRST_TEAM, FIRSTS = 0, 1, 2, 3
"""Devices that get a copy of a whole value: all readers; or, if readers add the value to a partial
sum, the first reader, the readers of the first team, or the first reader of each team."""
OWN, TEAMS = 4, 5
"""Samples that a target device gets: its own or those of its team; with ``FIRSTS`` the first
reader of each team gets the samples of the team."""


@helper
def bring(lowering: Lowering, slot: int, source: int, target: int, micro: int) -> None:
    """Bring each target device its box from the devices whose boxes overlap it.

    Args:
        lowering: Its ``slot_buffer`` and tape are written.
        slot: The slot to fill.
        source: Row of the maker.
        target: Row of the same axis in the division of the reader.
        micro: Number of the micro-batch.
    """
    tables, choice, scratch, tape = lowering
    value = tables.slot_value[slot]
    num_devices = choice.member.shape[1]
    fraction = tables.value_moved_fraction[value]
    for device in range(num_devices):
        if choice.shares[target, micro, device] == 0:
            continue
        begin, count, unit_begin, units = box_of(choice, target, micro, device)
        first_piece = tape.counts[NUM_BUFFERS]
        parts = 0
        missing = count * max(units, 1)
        local = -1
        for other in range(num_devices):
            if choice.shares[source, micro, other] == 0:
                continue
            low, owned, other_begin, owned_units = box_of(choice, source, micro, other)
            overlap = min(begin + count, low + owned) - max(begin, low)
            overlap_units = -1
            if units >= 0:
                end = min(unit_begin + units, other_begin + owned_units)
                overlap_units = end - max(unit_begin, other_begin)
            if overlap <= 0 or (units >= 0 and overlap_units <= 0):
                continue
            parts += 1
            missing -= overlap * max(overlap_units, 1)
            mine = scratch.value_buffer[value, other]
            if other == device:
                local = mine
                continue
            _send(
                lowering, slot, mine, other, device, micro, overlap, overlap_units, owned,
                owned_units, fraction,
            )  # fmt: skip
        if missing > 0:
            tape.counts[APART] = 1
        size = bytes_of(tables, value, count, units) * fraction
        join_pieces(lowering, slot, device, micro, parts, local, first_piece, count, units, size)


@helper
def bring_whole(
    lowering: Lowering, slot: int, source: int, reader: int, target: int, micro: int, wanted: int
) -> None:
    """Bring each target device its samples of a value that all members of a source team hold.

    A member of that team uses its own copy; others get it from the member at their position.
    """
    tables, choice, scratch, tape = lowering
    value = tables.slot_value[slot]
    num_devices = choice.member.shape[1]
    axis = tables.value_axis[value]
    from_division = source - axis * len(choice.member)
    teams = choice.teams
    fraction = tables.value_moved_fraction[value]
    for device in range(num_devices):
        scratch.holder_buffer[device] = scratch.slot_buffer[slot, device]
    for device in range(num_devices):
        if choice.shares[reader, micro, device] == 0:
            continue
        if wanted == OWN:
            begin = teams.own_begin[target, micro, device]
            count = choice.shares[target, micro, device]
        else:
            begin, count = teams.begin[target, micro, device], teams.samples[target, micro, device]
        if wanted == FIRSTS and not is_first(choice, reader, micro, device):
            scratch.slot_buffer[slot, device] = -1
            continue
        if count == 0:
            continue
        first_piece = tape.counts[NUM_BUFFERS]
        parts = 0
        missing = count
        local = -1
        for other in range(num_devices):
            if scratch.holder_buffer[other] < 0:
                continue
            low = teams.begin[from_division, micro, other]
            owned = teams.samples[from_division, micro, other]
            overlap = min(begin + count, low + owned) - max(begin, low)
            place = teams.position[target, device]
            if overlap <= 0 or not _sends(choice, scratch, from_division, other, device, place):
                continue
            parts += 1
            missing -= overlap
            mine = scratch.holder_buffer[other]
            if other == device:
                local = mine
                continue
            _send(lowering, slot, mine, other, device, micro, overlap, -1, owned, -1, fraction)
        if missing > 0:
            tape.counts[APART] = 1
        size = bytes_of(tables, value, count, -1) * fraction
        join_pieces(lowering, slot, device, micro, parts, local, first_piece, count, -1, size)


@helper
def _sends(
    choice: Choice, scratch: Scratch, division: int, other: int, device: int, place: int
) -> bool:
    """Whether a device sends a value, which its whole team holds, to a device of another team.

    The sender is the member at the receiver's position, or the first holder if that member holds
    nothing.
    """
    teams = choice.teams
    team = teams.number[division, other]
    if teams.number[division, device] == team and scratch.holder_buffer[device] >= 0:
        return other == device
    wanted = max(place, 0) % teams.size[division, other]
    first, sender = -1, -1
    for member in range(choice.member.shape[1]):
        if teams.number[division, member] == team and scratch.holder_buffer[member] >= 0:
            position = teams.position[division, member]
            if position == wanted:
                sender = member
            if first < 0 or position < teams.position[division, first]:
                first = member
    return other == (sender if sender >= 0 else first)


@helper
def _send(
    lowering: Lowering, slot: int, mine: int, other: int, device: int, micro: int, overlap: int,
    units: int, owned: int, owned_units: int, fraction: float,
) -> None:  # fmt: skip
    """Send a piece of a value, which is first cut out if it is not contiguous."""
    tables = lowering.tables
    value = tables.slot_value[slot]
    size = bytes_of(tables, value, overlap, units) * fraction
    if tables.value_axis[value] == 0:
        contiguous = tables.value_is_outermost[value] == 1
    elif units == owned_units:
        contiguous = tables.value_batch_is_outermost[value] == 1
    else:
        contiguous = overlap == owned and tables.value_is_outermost[value] == 1
    is_cut = (overlap < owned or units < owned_units) and not contiguous
    send_piece(lowering, slot, mine, other, device, micro, overlap, units, size, is_cut)


@helper
def copy_whole(
    lowering: Lowering, slot: int, source: int, target: int, micro: int, who: int
) -> None:
    """Convert R to R: send a copy to every target device that has none.

    Unless ``who`` is ``ALL``, only some devices get it and it counts as zero on the others: the
    whole value is read as a partial sum.
    """
    tables, choice, scratch, tape = lowering
    value = tables.slot_value[slot]
    axis = tables.value_axis[value]
    size = tables.value_bytes[value] + (
        tables.value_bytes_per_unit[value] * tables.axis_units[axis]
    )
    size *= tables.value_moved_fraction[value]
    num_devices = choice.member.shape[1]
    division = target % len(choice.member)
    sender = -1
    for device in range(num_devices):
        if choice.shares[source, micro, device] > 0 and scratch.slot_buffer[slot, device] >= 0:
            sender = device
            break
    sent = scratch.slot_buffer[slot, sender] if sender >= 0 else -1
    first, first_team = -1, num_devices
    for device in range(num_devices):
        if choice.shares[target, micro, device] > 0:
            first = device if first < 0 else first
            first_team = min(first_team, choice.teams.number[division, device])
    for device in range(num_devices):
        if choice.shares[target, micro, device] == 0:
            continue
        if (
            (who == FIRST and device != first)
            or (who == FIRST_TEAM and choice.teams.number[division, device] != first_team)
            or (who == FIRSTS and not is_first(choice, target, micro, device))
        ):
            scratch.slot_buffer[slot, device] = -1
            continue
        if scratch.slot_buffer[slot, device] < 0:
            write_task(
                tape, TaskKind.SEND, slot, device, micro, 0, sender * num_devices + device, size
            )
            tape.counts[APART] = 1
            write_read(tape, sent)  # the sender itself may count as zero
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)


_MAKES, _HAS, _READS_NOT = 1, 0, -1


@helper
def may_remake(tables: GraphTables, slot: int) -> bool:
    """Whether the reading devices may make a slot's value themselves."""
    return bool(tables.remake_start[slot] < tables.remake_start[slot + 1])


@helper
def remake(lowering: Lowering, slot: int, source: int, target: int, micro: int) -> bool:
    """Make a slot's value on the devices that read it, if they have no part of it.

    The first op waits for the input that ``wait_for_inputs`` has noted. Otherwise a device would
    make the values of all its micro-batches as soon as it is idle, and hold them.

    Args:
        lowering: Its ``slot_buffer`` and tape are written.
        slot: The slot to fill.
        source: Division of the maker.
        target: Division of the reader, another one.
        micro: Number of the micro-batch.

    Returns:
        Whether the value is made there; if not, nothing was written.
    """
    tables, choice, scratch, tape = lowering
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
            write_task(tape, TaskKind.REMAKE, op, device, micro, samples, -1, 0.0)
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
    """Note the readers that have no part of a value, if all other readers have exactly theirs.

    If readers have a part, because neighbouring groups have slightly different shares, the rest is
    sent: making the whole again would take longer, and memory twice.
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
