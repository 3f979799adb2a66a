"""Sends of boxes: a value comes from where it lies to where it is needed."""

from heterog.lowering.choice import Choice, is_first
from heterog.lowering.kernels import helper
from heterog.lowering.pieces import box_of, bytes_of, join_pieces, send_piece
from heterog.lowering.program import TaskKind
from heterog.lowering.scratch import Scratch
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import (
    APART,
    NUM_BUFFERS,
    Tape,
    write_buffer,
    write_read,
    write_task,
)

# Plain integers, because numba freezes enum members into slow objects.
_SEND = int(TaskKind.SEND)


ALL, FIRST, FIRST_TEAM, FIRSTS = 0, 1, 2, 3
"""Devices that get a copy of a whole value: all, or those that count it in a partial sum: the
first reader, those of the first team, or the first reader of each team."""
OWN, TEAMS = 4, 5
"""Samples that a target device gets: its own or those of its team; with ``FIRSTS`` the first
reader of each team gets these."""


@helper
def bring(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int,
) -> None:  # fmt: skip
    """Bring each target device its box from the devices whose boxes overlap it.

    Args:
        tables: Tables of the graph.
        choice: The strategy.
        scratch: Working memory; its ``slot_buffer`` is written.
        tape: Output.
        slot: The slot to fill.
        source: Row of the maker.
        target: Row of the same axis in the division of the reader.
        micro: Number of the micro-batch.
    """
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
                tables, choice, scratch, tape, slot, mine, other, device, micro, overlap,
                overlap_units, owned, owned_units, fraction,
            )  # fmt: skip
        if missing > 0:
            tape.counts[APART] = 1
        _join(
            tables, choice, scratch, tape, slot, device, micro, parts, local, first_piece, count,
            units, fraction,
        )  # fmt: skip


@helper
def bring_whole(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    reader: int, target: int, micro: int, wanted: int,
) -> None:  # fmt: skip
    """Bring each target device its samples of a value that all members of a source team hold.

    From itself if it is one of them, otherwise from the member at its own position in the team.
    """
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
            _send(
                tables, choice, scratch, tape, slot, mine, other, device, micro, overlap, -1,
                owned, -1, fraction,
            )  # fmt: skip
        if missing > 0:
            tape.counts[APART] = 1
        _join(
            tables, choice, scratch, tape, slot, device, micro, parts, local, first_piece, count,
            -1, fraction,
        )  # fmt: skip


@helper
def _sends(
    choice: Choice, scratch: Scratch, division: int, other: int, device: int, place: int
) -> bool:
    """Whether a device sends a value, which its whole team holds, to a device of another team.

    The sender is the member at the receiver's position, or the first holder if that one holds
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
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, mine: int,
    other: int, device: int, micro: int, overlap: int, units: int, owned: int, owned_units: int,
    fraction: float,
) -> None:  # fmt: skip
    """Send a piece of a value, which is first cut out where it is not contiguous."""
    value = tables.slot_value[slot]
    size = bytes_of(tables, value, overlap, units) * fraction
    if tables.value_axis[value] == 0:
        contiguous = tables.value_is_outermost[value] == 1
    elif units == owned_units:
        contiguous = tables.value_batch_is_outermost[value] == 1
    else:
        contiguous = overlap == owned and tables.value_is_outermost[value] == 1
    is_cut = (overlap < owned or units < owned_units) and not contiguous
    send_piece(
        tables, choice, scratch, tape, slot, mine, other, device, micro, overlap, units, size,
        is_cut,
    )  # fmt: skip


@helper
def _join(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, device: int,
    micro: int, parts: int, local: int, first_piece: int, count: int, units: int, fraction: float,
) -> None:  # fmt: skip
    """Join the pieces of a value that a device has received, if there are several."""
    if parts < 2:
        return
    size = bytes_of(tables, tables.slot_value[slot], count, units) * fraction
    join_pieces(
        tables, choice, scratch, tape, slot, device, micro, local, first_piece, count, units, size
    )


@helper
def copy_whole(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int, who: int,
) -> None:  # fmt: skip
    """Convert R to R: send a copy to every target device that has none.

    Unless ``who`` is ``ALL`` only some devices get it, and it counts as zero on the others: a
    whole value seen as a partial sum.
    """
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
            write_task(tape, _SEND, slot, device, micro, 0, sender * num_devices + device, size)
            tape.counts[APART] = 1
            write_read(tape, sent)  # the sender itself may count as zero
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)
