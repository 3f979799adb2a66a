"""The tape: the records that lowering writes a program to, task by task."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.lowering.kernel_arguments import by_reference
from heterog.lowering.kernels import helper, kernel, records
from heterog.lowering.program import IntArray

TASK = np.dtype(
    [
        ("num_bytes", np.float64),
        ("subject", np.int32),
        ("device", np.int32),
        ("micro", np.int32),
        ("samples", np.int32),
        ("channel", np.int32),
        ("read_start", np.int32),
        ("buffer_start", np.int32),
        ("turn", np.int32),
        ("units", np.int32),
        ("codec", np.int16),  # see ``Program.codec``; a mode writes it
        ("kind", np.int8),
    ],
    align=True,
)
"""Wide fields first, so that nothing lies between them: an evaluation reads all tasks often."""
BUFFER = np.dtype(
    [("num_bytes", np.float64), ("maker", np.int32), ("device", np.int32)], align=True
)
NUM_TASKS, NUM_BUFFERS, NUM_READS, OVERFLOW, IN_TURN, FIRST_TURN, APART = range(7)
"""Positions in ``Tape.counts``. IN_TURN is 1 if devices take their turns strictly in order, and
FIRST_TURN the first turn of the step that is written. APART is 1 where a device reads from other
devices, which may be folded away; see ``folding``."""


@by_reference
class Tape(NamedTuple):
    """The records that a program is written to; see ``Program`` for the meaning of the fields.

    Records instead of columns: the kernels pass few arrays around, and a task is written to one
    place in memory. The record after the last task holds the ends of its lists.
    """

    tasks: npt.NDArray[np.void]  # TASK
    buffers: npt.NDArray[np.void]  # BUFFER
    reads: IntArray
    bucket: IntArray
    turn: IntArray  # of each device, which tasks that are written now belong to
    counts: npt.NDArray[np.int64]


def make_tape(num_tasks: int, num_parameters: int, num_devices: int) -> Tape:
    """Empty records with room for a number of tasks and for a few times as many edges."""
    room = max(num_tasks, 64)
    return Tape(
        tasks=records(room, TASK),
        buffers=records(3 * room, BUFFER),
        reads=np.empty(4 * room, np.int32),
        bucket=np.empty(num_parameters, np.int32),
        turn=np.zeros(num_devices, np.int32),
        counts=np.zeros(7, np.int64),
    )


@kernel
def mark_channels(tape: Tape, is_used: npt.NDArray[np.bool_]) -> None:
    """Mark the channels that some task uses; the last place is of tasks that use none.

    Args:
        tape: A program.
        is_used: Output, only ever set.  # [num_channels + 1]
    """
    for number in range(tape.counts[NUM_TASKS]):
        is_used[tape.tasks[number].channel] = True


@helper
def write_task(
    tape: Tape, kind: int, subject: int, device: int, micro: int, samples: int, channel: int,
    num_bytes: float,
) -> None:  # fmt: skip
    """Begin a task; its reads and buffers are written before the next one begins."""
    number = tape.counts[NUM_TASKS]
    if (
        number >= len(tape.tasks) - 2
        or tape.counts[NUM_BUFFERS] >= len(tape.buffers) - 256
        or tape.counts[NUM_READS] >= len(tape.reads) - 2048 - 4 * len(tape.bucket)
    ):
        tape.counts[OVERFLOW] = 1
        number = 0
        tape.counts[NUM_BUFFERS] = 0
        tape.counts[NUM_READS] = 0
    task = tape.tasks[number]
    task.kind = kind
    task.turn = tape.turn[device] if device >= 0 else 0
    task.subject = subject
    task.device = device
    task.micro = micro
    task.samples = samples
    task.units = 0
    task.channel = channel
    task.num_bytes = num_bytes
    task.read_start = tape.counts[NUM_READS]
    task.buffer_start = tape.counts[NUM_BUFFERS]
    tape.counts[NUM_TASKS] = number + 1


@helper
def set_units(tape: Tape, units: int) -> None:
    """Set the number of units of an axis for the task begun last."""
    tape.tasks[tape.counts[NUM_TASKS] - 1].units = units


@helper
def write_read(tape: Tape, buffer: int) -> None:
    """Add a buffer to the reads of the task begun last; nothing if it is -1."""
    if buffer >= 0:
        tape.reads[tape.counts[NUM_READS]] = buffer
        tape.counts[NUM_READS] += 1


@helper
def write_buffer(tape: Tape, device: int, num_bytes: float) -> int:
    """Add a buffer made by the task begun last; returns its number."""
    number = tape.counts[NUM_BUFFERS]
    buffer = tape.buffers[number]
    buffer.maker = tape.counts[NUM_TASKS] - 1
    buffer.device = device
    buffer.num_bytes = num_bytes
    tape.counts[NUM_BUFFERS] = number + 1
    return int(number)
