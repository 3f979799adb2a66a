"""Conversions: bringing a value from the form in which it was made into the form that is read.

The part of a value on one device is a box: an interval of samples (its own, or all of its team's)
and an interval of units of the axis of the rule that made it. It may also be a part of a sum. A
conversion makes the value whole inside teams if necessary (a gather, a reduction), then brings
boxes to the devices that need them, piece by piece from the nearest holder, and gathers or reduces
over all devices if the whole is needed. ``sends`` brings boxes, ``value_collectives`` gathers and
reduces.

With halos an op on some rows reads rows of its inputs that neighbours own, so boxes of readers
overlap. Each device gets the missing rows of its window from their owners, and joins them with its
own. The number of these rows follows from the devices' units alone (see ``Window`` in
``heterog.graph.placement``), or from the entries of a sparse matrix (``SparseRows``).
"""

from heterog.graph.axis_plan import AS_MADE, EVERYTHING, IN_TEAM
from heterog.lowering.choice import Choice, Lowering
from heterog.lowering.kernels import helper
from heterog.lowering.sends import (
    ALL,
    FIRST,
    FIRST_TEAM,
    FIRSTS,
    OWN,
    TEAMS,
    box_of,
    bring,
    bring_whole,
    copy_whole,
    join_pieces,
    remake,
    send_piece,
)
from heterog.lowering.tables import KIND_NUMBER, GraphTables
from heterog.lowering.tape import APART, NUM_BUFFERS, Scratch
from heterog.lowering.value_collectives import gather, gather_in_teams, reduce, reduce_in_teams
from heterog.lowering.value_reads import FORWARD_PASS


@helper
def has_window(tables: GraphTables, slot: int) -> bool:
    """Whether readers of a slot need rows that other devices may own."""
    return bool(tables.slot_window[slot, 3] > 0)


@helper
def same_window(tables: GraphTables, one: int, other: int) -> bool:
    """Whether two slots bring the same rows."""
    for number in range(4):
        if tables.slot_window[one, number] != tables.slot_window[other, number]:
            return False
    return True


@helper
def _rows_of(
    tables: GraphTables, choice: Choice, slot: int, source: int, target: int, micro: int,
    device: int, other: int,
) -> int:  # fmt: skip
    """Number of rows that a device needs from the rows of another device (or of itself).

    Args:
        tables: Tables of the graph.
        choice: The strategy.
        slot: The slot to fill.
        source: Row of the maker's division.
        target: Row of the reader's division.
        micro: Number of the micro-batch.
        device: Device that needs the rows.
        other: Device that owns them.
    """
    step, before = tables.slot_window[slot, 0], tables.slot_window[slot, 1]
    after, rows = tables.slot_window[slot, 2], tables.slot_window[slot, 3]
    num_divisions = len(choice.member)
    if step < 0:  # the entries of a sparse matrix name them
        return int(
            choice.sparse_rows[
                -1 - step, target % num_divisions, source % num_divisions, device, other
            ]
        )
    inner = rows // tables.axis_units[tables.value_axis[tables.slot_value[slot]]]
    _, _, first_unit, units = box_of(choice, target, micro, device)
    first = min(max(first_unit * step - before, 0), rows)
    end = max(first, min((first_unit + units) * step + after, rows))
    _, _, first_owned, owned = box_of(choice, source, micro, other)
    return int(min(end, (first_owned + owned) * inner) - max(first, first_owned * inner))


@helper
def bring_windows(lowering: Lowering, slot: int, source: int, target: int, micro: int) -> None:
    """Bring each target device the rows of its window from the devices that own them.

    Args:
        lowering: Its ``slot_buffer`` and tape are written.
        slot: The slot to fill.
        source: Division of the maker.
        target: Division of the reader.
        micro: Number of the micro-batch.
    """
    tables, choice, scratch, tape = lowering
    value = tables.slot_value[slot]
    axis, num_devices = tables.value_axis[value], choice.member.shape[1]
    source += axis * len(choice.member)
    target += axis * len(choice.member)
    inner = tables.slot_window[slot, 3] // tables.axis_units[axis]
    row_bytes = tables.value_bytes_per_unit[value] / (inner * tables.batch_size)
    for device in range(num_devices):
        if choice.shares[target, micro, device] == 0:
            continue
        if choice.stands_for[device] > 1:
            tape.counts[APART] = 1  # a twin reads from other devices than this column does
        begin, count, _, _ = box_of(choice, target, micro, device)
        first_piece = tape.counts[NUM_BUFFERS]
        parts, joined = 0, 0
        local = -1
        for other in range(num_devices):
            if choice.shares[source, micro, other] == 0:
                continue
            low, owned, _, units = box_of(choice, source, micro, other)
            samples = min(begin + count, low + owned) - max(begin, low)
            got = _rows_of(tables, choice, slot, source, target, micro, device, other)
            if samples <= 0 or got <= 0:
                continue
            parts += 1
            joined += samples * got
            mine = scratch.value_buffer[value, other]
            if other == device:
                local = mine
                continue
            send_piece(
                lowering, slot, mine, other, device, micro, samples, got,
                row_bytes * samples * got, samples < owned or got < units * inner,
            )  # fmt: skip
        join_pieces(
            lowering, slot, device, micro, parts, local, first_piece, count, joined // count,
            row_bytes * joined,
        )  # fmt: skip


_S, _P = KIND_NUMBER["S"], KIND_NUMBER["P"]


@helper
def needed_buffer(tables: GraphTables, scratch: Scratch, entry: int, device: int) -> int:
    """Buffer that an op reads, -1 if there is none."""
    slot = tables.read_slot[entry]
    if slot >= 0:
        return int(scratch.slot_buffer[slot, device])
    return int(scratch.value_buffer[tables.read_value[entry], device])


@helper
def convert(lowering: Lowering, slot: int, micro: int) -> None:
    """Convert a value to the form that a slot needs."""
    tables, choice, scratch = lowering.tables, lowering.choice, lowering.scratch
    value = tables.slot_value[slot]
    source = choice.division[tables.op_group[tables.value_op[value]]]
    target = choice.division[tables.slot_group[slot]]
    scratch.slot_done[slot] = 1
    if _is_there(tables, choice, scratch, slot, source, target, micro):
        return
    if source != target and remake(lowering, slot, source, target, micro):
        return
    for device in range(choice.member.shape[1]):
        scratch.slot_buffer[slot, device] = scratch.value_buffer[value, device]
    if has_window(tables, slot):
        bring_windows(lowering, slot, source, target, micro)
    elif tables.value_axis[value] == 0:
        _convert_along_batch(lowering, slot, source, target, micro)
    else:
        _convert_ruled(lowering, slot, source, target, micro)


@helper
def wait_for_inputs(tables: GraphTables, choice: Choice, scratch: Scratch, reader: int) -> None:
    """Make values that are made again for an op wait for an input that has already arrived."""
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
    """Make gathers for a backward op wait, on its devices, for a gradient that the op reads.

    Otherwise values would be gathered as soon as they are made, and kept whole until the op runs.
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
def gather_again(lowering: Lowering, op: int, reader: int, micro: int) -> None:
    """Gather an op's inputs again before it reruns for a backward op, the ``reader``."""
    tables, choice, scratch = lowering.tables, lowering.choice, lowering.scratch
    for entry in range(tables.read_start[op], tables.read_start[op + 1]):
        slot = tables.read_slot[entry]
        if slot < 0 or tables.slot_pass[slot] != FORWARD_PASS or scratch.slot_done[slot] == 2:
            continue
        value = tables.slot_value[slot]
        source = choice.division[tables.op_group[tables.value_op[value]]]
        if source != choice.division[tables.slot_group[slot]]:
            continue  # a value from other devices is kept
        for other in range(tables.value_slot_start[value], tables.value_slot_start[value + 1]):
            if tables.slot_pass[other] == FORWARD_PASS and scratch.slot_done[other] == 1:
                scratch.slot_done[other] = 0
        wait_for_gradients(tables, choice, scratch, reader, micro)
        convert(lowering, slot, micro)
        scratch.slot_done[slot] = 2


@helper
def _is_there(
    tables: GraphTables, choice: Choice, scratch: Scratch, slot: int, source: int, target: int,
    micro: int,
) -> bool:  # fmt: skip
    """Reuse the buffers of another slot of the same value and division, if one is equivalent."""
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
    # A value that all members of a team hold whole serves readers along every axis.
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
    lowering: Lowering, slot: int, source: int, target: int, micro: int
) -> None:
    """Convert a value of an op that follows the batch: each device has its own samples."""
    tables, choice = lowering.tables, lowering.choice
    kind = tables.value_kind[tables.slot_value[slot]]
    whole = tables.slot_whole[slot]
    reader = target + len(choice.member) * tables.slot_axis[slot]
    if kind == _S:
        if source != target:
            bring(lowering, slot, source, target, micro)
        if whole == IN_TEAM:
            gather_in_teams(lowering, slot, target, target, micro)
        elif whole == EVERYTHING:
            gather(lowering, slot, target, micro)
    elif kind == _P:
        if whole == IN_TEAM and source == target:
            reduce_in_teams(lowering, slot, source, source, micro)
        elif whole != AS_MADE or source != target or not _covers(choice, source, reader, micro):
            reduce(lowering, slot, source, source, micro, False)
            if whole == AS_MADE or source != target:
                who = _who_gets(whole)
                copy_whole(lowering, slot, source, reader, micro, who)
    elif source != reader:
        copy_whole(lowering, slot, source, reader, micro, ALL)


@helper
def _convert_ruled(lowering: Lowering, slot: int, source: int, target: int, micro: int) -> None:
    """Convert a value of an op with a rule: each device has all samples of its team.

    Along the axis of the rule a device has its units (S), a part of a sum (P) or everything (R).
    """
    tables, choice = lowering.tables, lowering.choice
    value = tables.slot_value[slot]
    kind = tables.value_kind[value]
    row = source + len(choice.member) * tables.value_axis[value]
    if kind == _P:
        if _convert_parts(lowering, slot, source, row, target, micro):
            return
    elif kind == _S:
        if _convert_slices(lowering, slot, source, row, target, micro):
            return
    _convert_between_teams(lowering, slot, source, row, target, micro)


@helper
def _convert_parts(
    lowering: Lowering, slot: int, source: int, row: int, target: int, micro: int
) -> bool:
    """Convert parts of a sum along the axis; returns whether readers now have what they need.

    If not, each member of a source team has all of the team's sum.
    """
    tables, choice = lowering.tables, lowering.choice
    whole = tables.slot_whole[slot]
    reader = target + len(choice.member) * tables.slot_axis[slot]
    same = source == target
    if whole == AS_MADE and same and _covers(choice, row, reader, micro):
        return True
    over_teams = tables.value_batch_kind[tables.slot_value[slot]]
    if over_teams == _P and (whole != IN_TEAM or not same):
        reduce(lowering, slot, source, row, micro, False)
        if whole == AS_MADE or not same:
            who = _who_gets(whole)
            copy_whole(lowering, slot, row, reader, micro, who)
        return True
    reduce_in_teams(lowering, slot, source, row, micro)
    return False


@helper
def _convert_slices(
    lowering: Lowering, slot: int, source: int, row: int, target: int, micro: int
) -> bool:
    """Convert slices along the axis; returns whether readers now have what they need.

    If not, each member of a source team has all of the team's slices.
    """
    tables = lowering.tables
    whole = tables.slot_whole[slot]
    if source != target and tables.value_batch_kind[tables.slot_value[slot]] == _S:
        arrived = target + row - source
        bring(lowering, slot, row, arrived, micro)
        if whole != AS_MADE:
            gather_in_teams(lowering, slot, target, arrived, micro)
        if whole == EVERYTHING:
            gather(lowering, slot, target, micro)
        return True
    if source == target and whole == AS_MADE:
        return True
    gather_in_teams(lowering, slot, source, row, micro)
    return False


@helper
def _convert_between_teams(
    lowering: Lowering, slot: int, source: int, row: int, target: int, micro: int
) -> None:
    """Bring a value that each member of a source team has to the devices that read it."""
    tables, choice = lowering.tables, lowering.choice
    value = tables.slot_value[slot]
    kind, over_teams = tables.value_kind[value], tables.value_batch_kind[value]
    whole, reader_axis = tables.slot_whole[slot], tables.slot_axis[slot]
    reader = target + len(choice.member) * reader_axis
    is_first_of_sum = kind == _P and whole == AS_MADE
    if over_teams == _S:
        wanted = OWN if reader_axis == 0 and whole != IN_TEAM else TEAMS
        if is_first_of_sum:
            wanted = FIRSTS
        if whole == EVERYTHING:
            wanted = OWN
        bring_whole(lowering, slot, row, reader, target, micro, wanted)
        if whole == EVERYTHING:
            gather(lowering, slot, target, micro)
    elif over_teams == _P:
        same = source == target and (
            whole != AS_MADE or _each_team_has_a_reader(choice, row, reader, micro)
        )
        # One team has all of a sum over teams.
        is_one_team = choice.teams.num_teams[source] == 1
        if whole == EVERYTHING or not same:
            if not is_one_team:
                reduce(lowering, slot, source, row, micro, True)
            if not same or is_one_team:
                who = ALL if whole == EVERYTHING else FIRST_TEAM
                copy_whole(lowering, slot, row, reader, micro, who)
        # Otherwise each member keeps it; for a reader of partial sums it counts as zero on all
        # members but the first that has it and reads it.
    elif row != reader:
        who = ALL
        if is_first_of_sum:
            who = FIRST if reader_axis == 0 else FIRSTS
        copy_whole(lowering, slot, row, reader, micro, who)


@helper
def _who_gets(whole: int) -> int:
    """Devices that get the sum of all parts, by how much of it readers need."""
    if whole == AS_MADE:
        return FIRST
    return FIRST_TEAM if whole == IN_TEAM else ALL


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
