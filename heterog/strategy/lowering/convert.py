"""Conversions: bringing a value, as it was made, into the form that a reader elsewhere needs.

What a device holds of a value is a box: an interval of samples (its own, or all of its team's) and
an interval of units of the axis of the rule that made it, and it may be a part of a sum. A
conversion makes the value whole inside teams where it has to (a gather, a reduction), then brings
boxes from where they lie to where they are needed, piece by piece from the nearest that has it,
and gathers or reduces over all devices what is needed whole.

Two conversions belong to the maker and not to readers: parts of a sum that a rule says to add up
in slices (``scatter_in_teams``), and slices that it says to cut along another axis
(``exchange_in_teams``).
"""

from heterog.graph.axis_plan import AS_MADE, EVERYTHING, IN_TEAM
from heterog.strategy.kernels import helper
from heterog.strategy.lowering.choice import Choice, is_first
from heterog.strategy.lowering.halo import bring_windows, has_window, same_window
from heterog.strategy.lowering.pieces import box_of, bytes_of, join_pieces, send_piece
from heterog.strategy.lowering.remake import remake
from heterog.strategy.lowering.scratch import Scratch
from heterog.strategy.lowering.tape import (
    APART,
    NUM_BUFFERS,
    Tape,
    set_units,
    write_buffer,
    write_read,
    write_task,
)
from heterog.strategy.program import TaskKind
from heterog.strategy.tables import ANY_PASS, FORWARD_PASS, KIND_NUMBER, GraphTables

# Plain integers, because numba freezes enum members into slow objects.
_SEND = int(TaskKind.SEND)
_REDUCE_VALUE = int(TaskKind.REDUCE_VALUE)
_GATHER_VALUE = int(TaskKind.GATHER_VALUE)
_SCATTER_VALUE = int(TaskKind.SCATTER_VALUE)
_EXCHANGE_VALUE = int(TaskKind.EXCHANGE_VALUE)
_S, _P = KIND_NUMBER["S"], KIND_NUMBER["P"]
_ALL, _FIRST, _FIRST_TEAM, _FIRSTS = 0, 1, 2, 3
"""Devices that get a copy of a whole value: all, or those that count it in a partial sum: the
first reader, those of the first team, or the first reader of each team."""
_OWN, _TEAMS = 4, 5
"""Samples that a target device gets: its own or those of its team; with ``_FIRSTS`` the first
reader of each team gets these."""


@helper
def needed_buffer(tables: GraphTables, scratch: Scratch, entry: int, device: int) -> int:
    """Buffer that an op reads, -1 if there is none."""
    slot = tables.read_slot[entry]
    if slot >= 0:
        return int(scratch.slot_buffer[slot, device])
    return int(scratch.value_buffer[tables.read_value[entry], device])


@helper
def convert(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, micro: int
) -> None:
    """Convert a value to the form that a slot needs."""
    value = tables.slot_value[slot]
    source = choice.division[tables.op_group[tables.value_op[value]]]
    target = choice.division[tables.slot_group[slot]]
    scratch.slot_done[slot] = 1
    if _is_there(tables, choice, scratch, slot, source, target, micro):
        return
    if source != target and remake(tables, choice, scratch, tape, slot, source, target, micro):
        return
    for device in range(choice.member.shape[1]):
        scratch.slot_buffer[slot, device] = scratch.value_buffer[value, device]
    if has_window(tables, slot):
        bring_windows(tables, choice, scratch, tape, slot, source, target, micro)
    elif tables.value_axis[value] == 0:
        _convert_along_batch(tables, choice, scratch, tape, slot, source, target, micro)
    else:
        _convert_ruled(tables, choice, scratch, tape, slot, source, target, micro)


@helper
def wait_for_inputs(tables: GraphTables, choice: Choice, scratch: Scratch, reader: int) -> None:
    """Let values that are made again for an op wait for an input that is already there."""
    division = choice.division[tables.op_group[reader]]
    scratch.awaited[:] = -1
    for device in range(scratch.span[division, 0], scratch.span[division, 1]):
        for entry in range(tables.read_start[reader], tables.read_start[reader + 1]):
            slot = tables.read_slot[entry]
            is_constant = tables.op_group[tables.value_op[tables.read_value[entry]]] < 0
            if not is_constant and (slot < 0 or scratch.slot_done[slot] > 0):
                scratch.awaited[device] = needed_buffer(tables, scratch, entry, device)
                if scratch.awaited[device] >= 0:
                    break


@helper
def wait_for_gradients(
    tables: GraphTables, choice: Choice, scratch: Scratch, reader: int, micro: int
) -> None:
    """Make gathers for a backward op wait, where it runs, for a gradient that it reads.

    Otherwise values would be gathered as soon as they are made, and kept whole until then.
    """
    row = choice.division[tables.op_group[reader]]
    begin, end = scratch.span[row, 0], scratch.span[row, 1]
    row += len(choice.member) * tables.op_axis[reader]
    scratch.awaited[:] = -1
    for device in range(begin, end):
        if choice.shares[row, micro, device] == 0:
            continue
        for entry in range(tables.read_start[reader], tables.read_start[reader + 1]):
            if tables.op_is_backward[tables.value_op[tables.read_value[entry]]] == 1:
                slot = tables.read_slot[entry]
                if slot < 0 or scratch.slot_done[slot] > 0:
                    scratch.awaited[device] = needed_buffer(tables, scratch, entry, device)
                    break


@helper
def gather_again(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, op: int, reader: int,
    micro: int,
) -> None:  # fmt: skip
    """Gather an op's inputs again before it reruns for a backward op, the ``reader``."""
    for entry in range(tables.read_start[op], tables.read_start[op + 1]):
        slot = tables.read_slot[entry]
        if slot < 0 or tables.slot_pass[slot] != FORWARD_PASS or scratch.slot_done[slot] != 1:
            continue
        value = tables.slot_value[slot]
        source = choice.division[tables.op_group[tables.value_op[value]]]
        if source != choice.division[tables.slot_group[slot]]:
            continue  # it has come from other devices, and is kept
        for other in range(tables.value_slot_start[value], tables.value_slot_start[value + 1]):
            if tables.slot_pass[other] == FORWARD_PASS and scratch.slot_done[other] == 1:
                scratch.slot_done[other] = 0
        wait_for_gradients(tables, choice, scratch, reader, micro)
        convert(tables, choice, scratch, tape, slot, micro)
        scratch.slot_done[slot] = 2


@helper
def _is_there(
    tables: GraphTables, choice: Choice, scratch: Scratch, slot: int, source: int, target: int,
    micro: int,
) -> bool:  # fmt: skip
    """Reuse what another slot of the same value has brought to the same division, if any."""
    value = tables.slot_value[slot]
    # One team has every sample.
    is_one_team = choice.teams.num_teams[source] == 1 and choice.teams.num_teams[target] == 1
    most = IN_TEAM if is_one_team else EVERYTHING
    whole = min(tables.slot_whole[slot], most)
    kind = tables.value_kind[value]
    # Gathers and reductions leave the whole on every device of a division.
    in_division = kind == _S or (kind == _P and whole != AS_MADE and source == target)
    axis = tables.slot_axis[slot]
    reader = target + len(choice.member) * axis
    # What all members of a team hold alike serves readers along every axis.
    in_team = axis != 0 and not (kind == _P and whole == AS_MADE)
    for other in range(tables.value_slot_start[value], tables.value_slot_start[value + 1]):
        if (
            other != slot
            and scratch.slot_done[other] > 0
            and (tables.slot_pass[other] == tables.slot_pass[slot] or source != target)
            and min(tables.slot_whole[other], most) == whole
            and same_window(tables, other, slot)
            and choice.division[tables.slot_group[other]] == target
            and (
                in_division
                or tables.slot_axis[other] == axis
                or (
                    in_team
                    and tables.slot_axis[other] != 0
                    and _covers(
                        choice,
                        reader,
                        target + len(choice.member) * tables.slot_axis[other],
                        micro,
                    )
                )
            )
        ):
            for device in range(choice.member.shape[1]):
                scratch.slot_buffer[slot, device] = scratch.slot_buffer[other, device]
            return True
    return False


@helper
def _convert_along_batch(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int,
) -> None:  # fmt: skip
    """Convert a value of an op that follows the batch, of which each device has its samples."""
    kind = tables.value_kind[tables.slot_value[slot]]
    whole = tables.slot_whole[slot]
    reader = target + len(choice.member) * tables.slot_axis[slot]
    if kind == _S:
        if source != target:
            _bring(tables, choice, scratch, tape, slot, source, target, micro)
        if whole == IN_TEAM:
            _gather_in_teams(tables, choice, scratch, tape, slot, target, target, micro)
        elif whole == EVERYTHING:
            _gather(tables, choice, scratch, tape, slot, target, micro)
    elif kind == _P:
        if whole == IN_TEAM and source == target:
            _reduce_in_teams(tables, choice, scratch, tape, slot, source, source, micro)
        elif whole != AS_MADE or source != target or not _covers(choice, source, reader, micro):
            _reduce(tables, choice, scratch, tape, slot, source, source, micro, False)
            if whole == AS_MADE or source != target:
                who = _who_gets(whole)
                _copy_whole(tables, choice, scratch, tape, slot, source, reader, micro, who)
    elif source != reader:
        _copy_whole(tables, choice, scratch, tape, slot, source, reader, micro, _ALL)


@helper
def _convert_ruled(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int,
) -> None:  # fmt: skip
    """Convert a value of an op with a rule, of which each device has all its team's samples.

    Along the axis of the rule it has its units (S), a part of a sum (P) or everything (R).
    """
    value = tables.slot_value[slot]
    kind = tables.value_kind[value]
    row = source + len(choice.member) * tables.value_axis[value]
    if kind == _P:
        if _convert_parts(tables, choice, scratch, tape, slot, source, row, target, micro):
            return
    elif kind == _S:
        if _convert_slices(tables, choice, scratch, tape, slot, source, row, target, micro):
            return
    _convert_between_teams(tables, choice, scratch, tape, slot, source, row, target, micro)


@helper
def _convert_parts(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    row: int, target: int, micro: int,
) -> bool:  # fmt: skip
    """Convert parts of a sum along the axis; returns whether readers now have what they need.

    If not, each member of a source team has all of the team's sum.
    """
    whole = tables.slot_whole[slot]
    reader = target + len(choice.member) * tables.slot_axis[slot]
    same = source == target
    if whole == AS_MADE and same and _covers(choice, row, reader, micro):
        return True
    over_teams = tables.value_batch_kind[tables.slot_value[slot]]
    if over_teams == _P and (whole != IN_TEAM or not same):
        _reduce(tables, choice, scratch, tape, slot, source, row, micro, False)
        if whole == AS_MADE or not same:
            who = _who_gets(whole)
            _copy_whole(tables, choice, scratch, tape, slot, row, reader, micro, who)
        return True
    _reduce_in_teams(tables, choice, scratch, tape, slot, source, row, micro)
    return False


@helper
def _convert_slices(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    row: int, target: int, micro: int,
) -> bool:  # fmt: skip
    """Convert slices along the axis; returns whether readers now have what they need.

    If not, each member of a source team has all of the team's slices.
    """
    whole = tables.slot_whole[slot]
    if source != target and tables.value_batch_kind[tables.slot_value[slot]] == _S:
        arrived = target + row - source
        _bring(tables, choice, scratch, tape, slot, row, arrived, micro)
        if whole != AS_MADE:
            _gather_in_teams(tables, choice, scratch, tape, slot, target, arrived, micro)
        if whole == EVERYTHING:
            _gather(tables, choice, scratch, tape, slot, target, micro)
        return True
    if source == target and whole == AS_MADE:
        return True
    _gather_in_teams(tables, choice, scratch, tape, slot, source, row, micro)
    return False


@helper
def _convert_between_teams(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    row: int, target: int, micro: int,
) -> None:  # fmt: skip
    """Bring a value that each member of a source team has to the devices that read it."""
    value = tables.slot_value[slot]
    kind, over_teams = tables.value_kind[value], tables.value_batch_kind[value]
    whole, reader_axis = tables.slot_whole[slot], tables.slot_axis[slot]
    reader = target + len(choice.member) * reader_axis
    is_first_of_sum = kind == _P and whole == AS_MADE
    if over_teams == _S:
        wanted = _OWN if reader_axis == 0 and whole != IN_TEAM else _TEAMS
        if is_first_of_sum:
            wanted = _FIRSTS
        if whole == EVERYTHING:
            wanted = _OWN
        _bring_whole(tables, choice, scratch, tape, slot, row, reader, target, micro, wanted)
        if whole == EVERYTHING:
            _gather(tables, choice, scratch, tape, slot, target, micro)
    elif over_teams == _P:
        same = source == target and (
            whole != AS_MADE or _each_team_has_a_reader(choice, row, reader, micro)
        )
        # One team has all of a sum over teams.
        is_one_team = choice.teams.num_teams[source] == 1
        if whole == EVERYTHING or not same:
            if not is_one_team:
                _reduce(tables, choice, scratch, tape, slot, source, row, micro, True)
            if not same or is_one_team:
                who = _ALL if whole == EVERYTHING else _FIRST_TEAM
                _copy_whole(tables, choice, scratch, tape, slot, row, reader, micro, who)
        # Otherwise each member keeps it, and for a reader of parts it is zero on all but the first
        # one that has it and reads it.
    elif row != reader:
        who = _ALL
        if is_first_of_sum:
            who = _FIRST if reader_axis == 0 else _FIRSTS
        _copy_whole(tables, choice, scratch, tape, slot, row, reader, micro, who)


@helper
def _who_gets(whole: int) -> int:
    """Devices that get the sum of all parts, given how much of it readers need."""
    if whole == AS_MADE:
        return _FIRST
    return _FIRST_TEAM if whole == IN_TEAM else _ALL


@helper
def _each_team_has_a_reader(choice: Choice, source: int, target: int, micro: int) -> bool:
    """Whether every team has a member that made a value and also runs its reader.

    A member without units makes nothing; one without samples reads nothing.
    """
    teams = choice.teams
    division = target % len(choice.member)
    for device in range(choice.member.shape[1]):
        if choice.shares[target, micro, device] == 0:
            continue
        is_held = False
        for other in range(choice.member.shape[1]):
            if (
                teams.number[division, other] == teams.number[division, device]
                and choice.shares[source, micro, other] > 0
                and choice.shares[target, micro, other] > 0
            ):
                is_held = True
        if not is_held:
            return False
    return True


@helper
def _covers(choice: Choice, source: int, target: int, micro: int) -> bool:
    """Whether every device that made a part of a sum also runs its reader."""
    for device in range(choice.member.shape[1]):
        if choice.shares[source, micro, device] > 0 and choice.shares[target, micro, device] == 0:
            return False
    return True


@helper
def _bring(
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
def _bring_whole(
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
        if wanted == _OWN:
            begin = teams.own_begin[target, micro, device]
            count = choice.shares[target, micro, device]
        else:
            begin, count = teams.begin[target, micro, device], teams.samples[target, micro, device]
        if wanted == _FIRSTS and not is_first(choice, reader, micro, device):
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
def _gather(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, division: int,
    micro: int,
) -> None:  # fmt: skip
    """Gather the samples of all devices: a padded all-gather to every member of a division."""
    channel = choice.gather_channel[division]
    if channel < 0:
        return
    value = tables.slot_value[slot]
    num_devices = choice.member.shape[1]
    total = 0
    largest = 0
    members = 0
    for device in range(num_devices):
        count = choice.shares[division, micro, device]
        total += count * choice.stands_for[device]
        largest = max(largest, count)
        members += choice.stands_for[device] if choice.member[division, device] else 0
    size = members * bytes_of(tables, value, largest, -1)
    write_task(tape, _GATHER_VALUE, slot, -1, micro, total, channel, size)
    for device in range(num_devices):
        if choice.shares[division, micro, device] > 0:
            write_read(tape, scratch.slot_buffer[slot, device])
    for device in range(num_devices):
        if choice.member[division, device]:
            whole = bytes_of(tables, value, total, -1)
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, whole)


@helper
def _gather_in_teams(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, division: int,
    row: int, micro: int,
) -> None:  # fmt: skip
    """Gather the parts of the members of each team: a padded all-gather inside it.

    Parts are samples if the row is the division itself, otherwise units of the row's axis.
    """
    value = tables.slot_value[slot]
    teams = choice.teams
    begin, end = scratch.span[division, 0], scratch.span[division, 1]
    for first in range(begin, end):
        channel = teams.gather_channel[division, first]
        samples = teams.samples[division, micro, first]
        if teams.position[division, first] != 0 or channel < 0 or samples == 0:
            continue
        number = teams.number[division, first]
        # All of the team's, also where a member stands for others.
        total = samples if row == division else tables.axis_units[row // len(choice.member)]
        largest = _largest_share(choice, scratch, row, micro, number)
        units = -1 if row == division else total
        if row == division:
            whole = bytes_of(tables, value, total, -1)
            size = teams.size[division, first] * bytes_of(tables, value, largest, -1)
        else:
            per_unit = tables.value_bytes_per_unit[value]
            if tables.value_batch_kind[value] == _S:
                per_unit *= samples / tables.batch_size
            whole, size = total * per_unit, teams.size[division, first] * largest * per_unit
        if row != division and tables.value_batch_kind[value] != _S:
            samples = 0
        write_task(tape, _GATHER_VALUE, slot, -1, micro, samples, channel, size)
        set_units(tape, max(units, 0))
        if tables.slot_pass[slot] != ANY_PASS:
            for device in range(begin, end):
                if teams.number[division, device] == number:
                    write_read(tape, scratch.awaited[device])
        _meet(choice, scratch, tape, slot, division, row, micro, number, whole)


@helper
def _largest_share(choice: Choice, scratch: Scratch, row: int, micro: int, team: int) -> int:
    """The most samples or units of one member of a team: the size that padding gives to all."""
    division, largest = row % len(choice.member), 0
    for device in range(scratch.span[division, 0], scratch.span[division, 1]):
        if choice.teams.number[division, device] == team:
            largest = max(largest, choice.shares[row, micro, device])
    return largest


@helper
def _meet(
    choice: Choice, scratch: Scratch, tape: Tape, slot: int, division: int, row: int, micro: int,
    team: int, size: float,
) -> None:  # fmt: skip
    """Write the collective begun last: it reads the members' parts and gives each the result."""
    for device in range(scratch.span[division, 0], scratch.span[division, 1]):
        is_member = choice.teams.number[division, device] == team
        if is_member and choice.shares[row, micro, device] > 0:
            write_read(tape, scratch.slot_buffer[slot, device])
    for device in range(scratch.span[division, 0], scratch.span[division, 1]):
        if choice.teams.number[division, device] == team:
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)


@helper
def _reduce(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, division: int,
    row: int, micro: int, only_firsts: bool,
) -> None:  # fmt: skip
    """Convert P to R: an all-reduce over every member of a division.

    Args:
        tables: Tables of the graph.
        choice: The strategy.
        scratch: Working memory; its ``slot_buffer`` is written.
        tape: Output.
        slot: The slot to fill.
        division: Division of the maker.
        row: Row of the maker, which tells the devices that have a part.
        micro: Number of the micro-batch.
        only_firsts: Whether members of a team have the same part, which is added once.
    """
    channel = choice.reduce_channel[division]
    if channel < 0:
        return
    value = tables.slot_value[slot]
    size = tables.value_bytes[value]
    if tables.value_kind[value] == _S:
        size = tables.value_bytes_per_unit[value] * tables.axis_units[tables.value_axis[value]]
    num_devices = choice.member.shape[1]
    write_task(tape, _REDUCE_VALUE, slot, -1, micro, 0, channel, size)
    for device in range(num_devices):
        if (
            choice.shares[row, micro, device] > 0
            and tables.value_is_early[value] == 0
            and (not only_firsts or is_first(choice, row, micro, device))
        ):
            write_read(tape, scratch.slot_buffer[slot, device])
    for device in range(num_devices):
        if choice.member[division, device]:
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)


@helper
def _reduce_in_teams(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, division: int,
    row: int, micro: int,
) -> None:  # fmt: skip
    """Convert P to R inside each team: an all-reduce over its members."""
    value = tables.slot_value[slot]
    teams = choice.teams
    begin, end = scratch.span[division, 0], scratch.span[division, 1]
    for first in range(begin, end):
        channel = teams.reduce_channel[division, first]
        samples = teams.samples[division, micro, first]
        if teams.position[division, first] != 0 or channel < 0 or samples == 0:
            continue
        number = teams.number[division, first]
        size = tables.value_bytes[value]
        in_batch = row != division and tables.value_batch_kind[value] == _S
        if in_batch:
            size *= samples / tables.batch_size
        write_task(tape, _REDUCE_VALUE, slot, -1, micro, samples if in_batch else 0, channel, size)
        _meet(choice, scratch, tape, slot, division, row, micro, number, size)


@helper
def scatter_in_teams(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, value: int, row: int,
    micro: int,
) -> None:  # fmt: skip
    """Convert P to S inside each team, along the value's axis: a padded reduce-scatter.

    Args:
        tables: Tables of the graph.
        choice: The strategy.
        scratch: Working memory; its ``value_buffer`` is written.
        tape: Output.
        value: The value, just made.
        row: Row of its op, which tells the devices that have a part.
        micro: Number of the micro-batch.
    """
    teams = choice.teams
    division, axis = row % len(choice.member), tables.value_axis[value]
    begin, end = scratch.span[division, 0], scratch.span[division, 1]
    slices = division + axis * len(choice.member)
    for first in range(begin, end):
        channel = teams.scatter_channel[division, first]
        samples = teams.samples[division, micro, first]
        if teams.position[division, first] != 0 or channel < 0 or samples == 0:
            continue
        number = teams.number[division, first]
        largest = _largest_share(choice, scratch, slices, micro, number)
        per_unit = tables.value_bytes_per_unit[value] * samples / tables.batch_size
        size = teams.size[division, first] * largest * per_unit
        write_task(tape, _SCATTER_VALUE, value, -1, micro, samples, channel, size)
        set_units(tape, tables.axis_units[axis])
        _read_made(choice, scratch, tape, value, row, micro, number)
        for device in range(begin, end):
            if teams.number[division, device] == number:
                own = choice.shares[slices, micro, device] * per_unit
                scratch.value_buffer[value, device] = write_buffer(tape, device, own)


@helper
def exchange_in_teams(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, value: int, row: int,
    micro: int,
) -> None:  # fmt: skip
    """Cut a value along another axis inside each team: a padded all-to-all.

    A device's box is its own samples if an axis is the batch, otherwise all samples of its team
    and its own units. With s and u, the largest shares of a member along the two axes, each member
    of n gets n pieces of s u units.

    Args:
        tables: Tables of the graph.
        choice: The strategy.
        scratch: Working memory; its ``value_buffer`` is written.
        tape: Output.
        value: The value, just made.
        row: Row of its op, which tells the boxes before.
        micro: Number of the micro-batch.
    """
    teams = choice.teams
    division, axis = row % len(choice.member), tables.value_axis[value]
    begin, end = scratch.span[division, 0], scratch.span[division, 1]
    after = division + axis * len(choice.member)
    whole = tables.value_bytes_per_unit[value] * tables.axis_units[axis]
    for first in range(begin, end):
        channel = teams.exchange_channel[division, first]
        samples = teams.samples[division, micro, first]
        if teams.position[division, first] != 0 or channel < 0 or samples == 0:
            continue
        number, size = teams.number[division, first], teams.size[division, first]
        piece = whole * _largest_part(tables, choice, scratch, row, micro, number)
        piece *= _largest_part(tables, choice, scratch, after, micro, number)
        if row != division and after != division:
            piece *= samples / tables.batch_size
        write_task(tape, _EXCHANGE_VALUE, value, -1, micro, samples, channel, size * size * piece)
        set_units(tape, tables.axis_units[axis] if axis > 0 else 0)
        _read_made(choice, scratch, tape, value, row, micro, number)
        for device in range(begin, end):
            if teams.number[division, device] == number:
                own = whole * choice.shares[after, micro, device] / tables.axis_units[axis]
                if after != division:
                    own *= samples / tables.batch_size
                scratch.value_buffer[value, device] = write_buffer(tape, device, own)


@helper
def _read_made(
    choice: Choice, scratch: Scratch, tape: Tape, value: int, row: int, micro: int, team: int
) -> None:
    """Let the collective begun last read what a team's members have just made of a value."""
    division = row % len(choice.member)
    number = choice.teams.number[division]
    for device in range(scratch.span[division, 0], scratch.span[division, 1]):
        if number[device] == team and choice.shares[row, micro, device] > 0:
            write_read(tape, scratch.value_buffer[value, device])


@helper
def _largest_part(
    tables: GraphTables, choice: Choice, scratch: Scratch, row: int, micro: int, team: int
) -> float:
    """The largest share of a member of a team, as a part of all units of the row's axis."""
    units = tables.axis_units[row // len(choice.member)]
    return float(_largest_share(choice, scratch, row, micro, team) / units)


@helper
def _copy_whole(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int, who: int,
) -> None:  # fmt: skip
    """Convert R to R: send a copy to every target device that has none.

    Unless ``who`` is ``_ALL`` only some devices get it, and it counts as zero on the others: a
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
            (who == _FIRST and device != first)
            or (who == _FIRST_TEAM and choice.teams.number[division, device] != first_team)
            or (who == _FIRSTS and not is_first(choice, target, micro, device))
        ):
            scratch.slot_buffer[slot, device] = -1
            continue
        if scratch.slot_buffer[slot, device] < 0:
            write_task(tape, _SEND, slot, device, micro, 0, sender * num_devices + device, size)
            tape.counts[APART] = 1
            write_read(tape, sent)  # the sender itself may count as zero
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)
