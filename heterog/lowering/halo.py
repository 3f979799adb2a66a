"""Halos: an op on some rows reads rows of its inputs that neighbours own.

The target's box then overlaps those of its neighbours: each device gets the rows of its window
that it lacks from whoever owns them, and joins them with its own. How many rows that are follows
from the devices' units alone (see ``Window`` in ``heterog.graph.placement``), or from the entries
of a sparse matrix (``sparse_rows``).
"""

from heterog.lowering.choice import Choice
from heterog.lowering.kernels import helper
from heterog.lowering.pieces import box_of, join_pieces, send_piece
from heterog.lowering.scratch import Scratch
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import APART, NUM_BUFFERS, Tape


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
    """Number of rows that a device needs of those that another one (or itself) owns.

    Args:
        tables: Tables of the graph.
        choice: The strategy.
        slot: The slot to fill.
        source: Row of the maker's division.
        target: Row of the reader's division.
        micro: Number of the micro-batch.
        device: Device that needs them.
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
def bring_windows(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, source: int,
    target: int, micro: int,
) -> None:  # fmt: skip
    """Bring each target device the rows of its window from the devices that own them.

    Args:
        tables: Tables of the graph.
        choice: The strategy.
        scratch: Working memory; its ``slot_buffer`` is written.
        tape: Output.
        slot: The slot to fill.
        source: Division of the maker.
        target: Division of the reader.
        micro: Number of the micro-batch.
    """
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
            tape.counts[APART] = 1  # neighbours of twins are no twins
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
                tables, choice, scratch, tape, slot, mine, other, device, micro, samples, got,
                row_bytes * samples * got, samples < owned or got < units * inner,
            )  # fmt: skip
        if parts > 1:
            join_pieces(
                tables, choice, scratch, tape, slot, device, micro, local, first_piece, count,
                joined // count, row_bytes * joined,
            )  # fmt: skip
