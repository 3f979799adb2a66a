"""Collectives over values: gathers and reductions, over a division's devices or inside its teams.

Three of them follow the op that makes a value, not its readers: they add up parts of a sum in
slices (``scatter_in_teams``), cut slices along another axis (``exchange_in_teams``), both if the
op's rule says so, and complete slices that need one number per row from the other members
(``complete_in_teams``).
"""

from heterog.lowering.choice import Choice, Lowering, is_first
from heterog.lowering.kernels import helper
from heterog.lowering.program import IntArray, TaskKind
from heterog.lowering.sends import bytes_of
from heterog.lowering.tables import KIND_NUMBER, GraphTables
from heterog.lowering.tape import Scratch, Tape, set_units, write_buffer, write_read, write_task
from heterog.lowering.value_reads import ANY_PASS

_S = KIND_NUMBER["S"]


@helper
def gather(lowering: Lowering, slot: int, division: int, micro: int) -> None:
    """Gather the samples of all devices: a padded all-gather to every member of a division."""
    tables, choice, scratch, tape = lowering
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
    write_task(tape, TaskKind.GATHER_VALUE, slot, -1, micro, total, channel, size)
    whole = bytes_of(tables, value, total, -1)
    for device in range(num_devices):
        if choice.shares[division, micro, device] > 0:
            write_read(tape, scratch.slot_buffer[slot, device])
        if choice.member[division, device]:
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, whole)


@helper
def gather_in_teams(lowering: Lowering, slot: int, division: int, row: int, micro: int) -> None:
    """Gather the parts of the members of each team: a padded all-gather inside it.

    Parts are samples if the row is the division itself, otherwise units of the row's axis.
    """
    tables, choice, scratch, tape = lowering
    value = tables.slot_value[slot]
    teams = choice.teams
    begin, end = scratch.span[division, 0], scratch.span[division, 1]
    for first in range(begin, end):
        channel = teams.gather_channel[division, first]
        samples = teams.samples[division, micro, first]
        if teams.position[division, first] != 0 or channel < 0 or samples == 0:
            continue
        number = teams.number[division, first]
        # The total of the whole team, even if one member stands for others in a fold.
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
        write_task(tape, TaskKind.GATHER_VALUE, slot, -1, micro, samples, channel, size)
        set_units(tape, max(units, 0))
        if tables.slot_pass[slot] != ANY_PASS:
            for device in range(begin, end):
                if teams.number[division, device] == number:
                    write_read(tape, scratch.awaited[device])
        _meet(choice, scratch, tape, slot, row, micro, number, whole)


@helper
def _largest_share(choice: Choice, scratch: Scratch, row: int, micro: int, team: int) -> int:
    """The most samples or units of one member of a team: padding gives this size to all."""
    division, largest = row % len(choice.member), 0
    for device in range(scratch.span[division, 0], scratch.span[division, 1]):
        if choice.teams.number[division, device] == team:
            largest = max(largest, choice.shares[row, micro, device])
    return largest


@helper
def _read_parts(
    choice: Choice, scratch: Scratch, tape: Tape, parts: IntArray, row: int, micro: int, team: int
) -> None:
    """Make the collective begun last read the part of each member of a team with a share of a row.

    Args:
        choice: The strategy.
        scratch: Working memory.
        tape: It is written.
        parts: Buffer of each device's part.  # [num_devices]
        row: Row of the shares.
        micro: Number of the micro-batch.
        team: Number of the team.
    """
    division = row % len(choice.member)
    number = choice.teams.number[division]
    for device in range(scratch.span[division, 0], scratch.span[division, 1]):
        if number[device] == team and choice.shares[row, micro, device] > 0:
            write_read(tape, parts[device])


@helper
def _meet(
    choice: Choice, scratch: Scratch, tape: Tape, slot: int, row: int, micro: int, team: int,
    size: float,
) -> None:  # fmt: skip
    """Write the collective begun last: it reads the members' parts and gives each the result."""
    _read_parts(choice, scratch, tape, scratch.slot_buffer[slot], row, micro, team)
    division = row % len(choice.member)
    for device in range(scratch.span[division, 0], scratch.span[division, 1]):
        if choice.teams.number[division, device] == team:
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)


@helper
def reduce(
    lowering: Lowering, slot: int, division: int, row: int, micro: int, only_firsts: bool
) -> None:
    """Convert P to R: an all-reduce over every member of a division.

    Args:
        lowering: Its ``slot_buffer`` and tape are written.
        slot: The slot to fill.
        division: Division of the maker.
        row: Row of the maker; devices with a share of it have a part.
        micro: Number of the micro-batch.
        only_firsts: Whether members of a team have the same part, which is added once.
    """
    tables, choice, scratch, tape = lowering
    channel = choice.reduce_channel[division]
    if channel < 0:
        return
    value = tables.slot_value[slot]
    size = tables.value_bytes[value]
    if tables.value_kind[value] == _S:
        size = tables.value_bytes_per_unit[value] * tables.axis_units[tables.value_axis[value]]
    num_devices = choice.member.shape[1]
    write_task(tape, TaskKind.REDUCE_VALUE, slot, -1, micro, 0, channel, size)
    for device in range(num_devices):
        if (
            choice.shares[row, micro, device] > 0
            and tables.value_is_early[value] == 0
            and (not only_firsts or is_first(choice, row, micro, device))
        ):
            write_read(tape, scratch.slot_buffer[slot, device])
        if choice.member[division, device]:
            scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)


@helper
def reduce_in_teams(lowering: Lowering, slot: int, division: int, row: int, micro: int) -> None:
    """Convert P to R inside each team: an all-reduce over its members."""
    tables, choice, scratch, tape = lowering
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
        write_task(
            tape, TaskKind.REDUCE_VALUE, slot, -1, micro, samples if in_batch else 0, channel, size
        )
        _meet(choice, scratch, tape, slot, row, micro, number, size)


@helper
def scatter_in_teams(lowering: Lowering, value: int, row: int, micro: int) -> None:
    """Convert P to S inside each team, along the value's axis: a padded reduce-scatter.

    Args:
        lowering: Its ``value_buffer`` and tape are written.
        value: The value, just made.
        row: Row of its op; devices with a share of it have a part.
        micro: Number of the micro-batch.
    """
    tables, choice, scratch, tape = lowering
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
        write_task(tape, TaskKind.SCATTER_VALUE, value, -1, micro, samples, channel, size)
        set_units(tape, tables.axis_units[axis])
        _read_parts(choice, scratch, tape, scratch.value_buffer[value], row, micro, number)
        for device in range(begin, end):
            if teams.number[division, device] == number:
                own = choice.shares[slices, micro, device] * per_unit
                scratch.value_buffer[value, device] = write_buffer(tape, device, own)


@helper
def exchange_in_teams(lowering: Lowering, value: int, row: int, micro: int) -> None:
    """Cut a value along another axis inside each team: a padded all-to-all.

    A device's box is its own samples if an axis is the batch, otherwise all samples of its team
    and its own units. With s and u, the largest shares of a member along the two axes, each member
    of n gets n pieces of s u units.

    Args:
        lowering: Its ``value_buffer`` and tape are written.
        value: The value, just made.
        row: Row of its op, which determines the boxes before the exchange.
        micro: Number of the micro-batch.
    """
    tables, choice, scratch, tape = lowering
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
        write_task(
            tape, TaskKind.EXCHANGE_VALUE, value, -1, micro, samples, channel, size * size * piece
        )
        set_units(tape, tables.axis_units[axis] if axis > 0 else 0)
        _read_parts(choice, scratch, tape, scratch.value_buffer[value], row, micro, number)
        for device in range(begin, end):
            if teams.number[division, device] == number:
                own = whole * choice.shares[after, micro, device] / tables.axis_units[axis]
                if after != division:
                    own *= samples / tables.batch_size
                scratch.value_buffer[value, device] = write_buffer(tape, device, own)


@helper
def complete_in_teams(lowering: Lowering, value: int, row: int, micro: int) -> None:
    """Complete slices inside each team: an all-gather of one number per row.

    A member that has all units needs no numbers of others.

    Args:
        lowering: Its ``value_buffer`` and tape are written.
        value: The value, whose op has computed these numbers.
        row: Row of its op; devices with a share of it have slices.
        micro: Number of the micro-batch.
    """
    tables, choice, scratch, tape = lowering
    teams = choice.teams
    division, units = row % len(choice.member), tables.axis_units[row // len(choice.member)]
    begin, end = scratch.span[division, 0], scratch.span[division, 1]
    for first in range(begin, end):
        channel = teams.gather_channel[division, first]
        samples = teams.samples[division, micro, first]
        if teams.position[division, first] != 0 or channel < 0 or samples == 0:
            continue
        number = teams.number[division, first]
        if _largest_share(choice, scratch, row, micro, number) == units:
            continue
        part = samples / tables.batch_size if tables.value_batch_kind[value] == _S else 1.0
        size = teams.size[division, first] * part * tables.value_row_bytes[value]
        write_task(tape, TaskKind.GATHER_ROWS, value, -1, micro, samples, channel, size)
        set_units(tape, units)
        _read_parts(choice, scratch, tape, scratch.value_buffer[value], row, micro, number)
        for device in range(begin, end):
            share = choice.shares[row, micro, device]
            if teams.number[division, device] == number and share > 0:
                own = tables.value_bytes_per_unit[value] * share * part
                scratch.value_buffer[value, device] = write_buffer(tape, device, own)


@helper
def _largest_part(
    tables: GraphTables, choice: Choice, scratch: Scratch, row: int, micro: int, team: int
) -> float:
    """The largest share of a member of a team, as a part of all units of the row's axis."""
    units = tables.axis_units[row // len(choice.member)]
    return float(_largest_share(choice, scratch, row, micro, team) / units)
