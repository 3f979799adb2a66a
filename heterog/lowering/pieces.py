"""Pieces of values: parts that one device holds, sent to another and joined there."""

from heterog.lowering.choice import Choice
from heterog.lowering.kernels import helper
from heterog.lowering.program import TaskKind
from heterog.lowering.scratch import Scratch
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import (
    NUM_BUFFERS,
    NUM_TASKS,
    Tape,
    set_units,
    write_buffer,
    write_read,
    write_task,
)
from heterog.lowering.turns import BY_MICRO_BATCH, turn_of, work_of
from heterog.strategy.pipeline_schedule import Pass

# Plain integers, because numba freezes enum members into slow objects.
_SPLIT = int(TaskKind.SPLIT)
_CONCAT = int(TaskKind.CONCAT)
_SEND = int(TaskKind.SEND)
_BACKWARD = int(Pass.BACKWARD)
_WEIGHTS = int(Pass.WEIGHTS)


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
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, mine: int,
    other: int, device: int, micro: int, samples: int, units: int, size: float, is_cut: bool,
) -> None:  # fmt: skip
    """Send a piece of a device's value, which is first cut out if it is not contiguous.

    Args:
        tables: Tables of the graph.
        choice: The strategy.
        scratch: Working memory; its ``slot_buffer`` is written.
        tape: Output.
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
    maker = tables.value_op[tables.slot_value[slot]]
    turns = choice.turns
    if is_cut:
        write_task(tape, _SPLIT, slot, other, micro, samples, -1, 2.0 * size)
        set_units(tape, max(units, 0))
        if turns.rule != BY_MICRO_BATCH:  # it follows what it cuts
            cut = tape.tasks[tape.counts[NUM_TASKS] - 1]
            group, work = tables.op_group[maker], work_of(tables, turns, maker)
            cut.turn = turn_of(turns, tape, group, work, other, micro)
        write_read(tape, mine)
        mine = write_buffer(tape, other, size)
    channel = other * choice.member.shape[1] + device
    write_task(tape, _SEND, slot, device, micro, samples, channel, size)
    set_units(tape, max(units, 0))
    write_read(tape, mine)
    scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)


@helper
def join_pieces(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, slot: int, device: int,
    micro: int, local: int, first_piece: int, samples: int, units: int, size: float,
) -> None:  # fmt: skip
    """Join a device's own piece of a value with the pieces that it has received.

    Args:
        tables: Tables of the graph.
        choice: The strategy.
        scratch: Working memory; its ``slot_buffer`` is written.
        tape: Output.
        slot: The slot to fill.
        device: Device on which they are joined.
        micro: Number of the micro-batch.
        local: Buffer of the device's own piece; -1 if it has none.
        first_piece: First buffer that was made for this join.
        samples: Number of samples of all pieces.
        units: Number of units of all pieces, or of rows for a window; -1 if they are whole.
        size: Bytes of all pieces.
    """
    value = tables.slot_value[slot]
    turns = choice.turns
    pieces = tape.counts[NUM_BUFFERS]
    write_task(tape, _CONCAT, slot, device, micro, samples, -1, 2.0 * size)
    set_units(tape, max(units, 0))
    if turns.rule != BY_MICRO_BATCH and work_of(tables, turns, tables.value_op[value]) != _WEIGHTS:
        # The first reader may be of the weights, and others wait for it before those.
        joined = tape.tasks[tape.counts[NUM_TASKS] - 1]
        group = tables.slot_group[slot]
        joined.turn = min(joined.turn, turn_of(turns, tape, group, _BACKWARD, device, micro))
    write_read(tape, local)
    for piece in range(first_piece, pieces):
        if tape.buffers[piece].device == device:
            write_read(tape, piece)
    scratch.slot_buffer[slot, device] = write_buffer(tape, device, size)
