"""The tape: the records that lowering writes a program to, task by task.

``Scratch`` is the kernel's working memory during a step: which buffer holds what on which device.
``Turns`` are the order in which each device runs its tasks, and its limit of micro-batches.

The engine takes the tasks of one turn of a device in program order. By default the turns are the
micro-batches, and the earliest that can go on does. Under a ``PipelineSchedule`` the weight
gradients have turns after all others, or every pass of a chunk has a stated turn, and turns are
taken strictly one after the other. A cap needs no turn: the first op of a micro-batch on a chunk
reads a token of no bytes, made there by the last op of the micro-batch that began ``cap``
micro-batches earlier. Micro-batches without samples there are not counted.

``TapeWriter`` writes tapes of a few tasks that are not lowered from a strategy: an averaging, an
exchange with a server.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.lowering.kernels import by_reference, helper, inlined, kernel, records
from heterog.lowering.program import FIRST_FREE_KIND, FloatArray, IntArray, TaskKind
from heterog.lowering.tables import Domain, GraphTables
from heterog.strategy.schedules import Pass, PipelineSchedule, device_chunks

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
"""Wide fields first, so that there is no padding: an evaluation reads all tasks often."""
BUFFER = np.dtype(
    [("num_bytes", np.float64), ("maker", np.int32), ("device", np.int32)], align=True
)
NUM_TASKS, NUM_BUFFERS, NUM_READS, OVERFLOW, IN_TURN, FIRST_TURN, APART = range(7)
"""Positions in ``Tape.counts``. IN_TURN is 1 if devices take their turns strictly in order, and
FIRST_TURN is the first turn of the step that is being written. APART is 1 if a device reads from a
device that a fold may have removed; see ``folding``."""


@by_reference
class Tape(NamedTuple):
    """The records that a program is written to; see ``Program`` for the meaning of the fields.

    They are records instead of columns, so that kernels pass few arrays and a task is written to
    one place in memory. The record after the last task holds the ends of the last task's lists.
    """

    tasks: npt.NDArray[np.void]  # TASK
    buffers: npt.NDArray[np.void]  # BUFFER
    reads: IntArray
    bucket: IntArray
    turn: IntArray  # turn of each device for tasks that are written now
    counts: npt.NDArray[np.int64]


def make_tape(num_tasks: int, num_parameters: int, num_devices: int) -> Tape:
    """Empty records with room for a number of tasks and for a few times as many edges."""
    room = max(num_tasks, 64)
    return Tape(
        tasks=records(room, TASK),
        buffers=records(3 * room + most_buffers(num_devices), BUFFER),
        reads=np.empty(4 * room + most_reads(num_parameters, num_devices), np.int32),
        bucket=np.empty(num_parameters, np.int32),
        turn=np.zeros(num_devices, np.int32),
        counts=np.zeros(7, np.int64),
    )


def most_buffers(num_devices: int) -> int:
    """Room for the buffers of one task: a collective makes one on every device, and a token."""
    return 2 * num_devices + 256


def most_reads(num_parameters: int, num_devices: int) -> int:
    """Room for the reads of one task: a gradient and its token of each parameter or device."""
    return 4 * num_parameters + 4 * num_devices + 2048


_most_buffers, _most_reads = helper(most_buffers), helper(most_reads)


@kernel
def mark_channels(tape: Tape, is_used: npt.NDArray[np.bool_]) -> None:
    """Mark the channels that some task uses; the last place stands for no channel.

    Args:
        tape: A program.
        is_used: Output, only ever set.  # [num_channels + 1]
    """
    for number in range(tape.counts[NUM_TASKS]):
        is_used[tape.tasks[number].channel] = True


@inlined
def has_room(tape: Tape, num_tasks: int, num_buffers: int, num_reads: int) -> bool:
    """Whether some more tasks, buffers and reads fit on the tape; if not, it overflows."""
    counts = tape.counts
    if (
        counts[NUM_TASKS] + num_tasks < len(tape.tasks) - 2
        and counts[NUM_BUFFERS] + num_buffers < len(tape.buffers)
        and counts[NUM_READS] + num_reads < len(tape.reads)
    ):
        return True
    counts[OVERFLOW] = 1
    counts[NUM_BUFFERS] = 0
    counts[NUM_READS] = 0
    return False


@helper
def write_task(
    tape: Tape, kind: int, subject: int, device: int, micro: int, samples: int, channel: int,
    num_bytes: float,
) -> None:  # fmt: skip
    """Begin a task; its reads and buffers are written before the next one begins."""
    number = tape.counts[NUM_TASKS]
    num_devices = len(tape.turn)
    num_reads = _most_reads(len(tape.bucket), num_devices)
    if not has_room(tape, 0, _most_buffers(num_devices), num_reads):
        number = 0
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


@by_reference
class Scratch(NamedTuple):
    """Working memory of the kernel."""

    # First member of each division, and one after its last: no other device has work there.
    span: IntArray  # [num_divisions, 2]
    value_buffer: IntArray  # local buffer of each value  # [num_values, num_devices]
    remade_buffer: IntArray  # of values that readers make again; see ``sends``
    slot_buffer: IntArray  # converted value of each slot  # [num_slots, num_devices]
    slot_done: IntArray  # 1: ``slot_buffer`` is filled; 2: filled again for a recomputation
    # Buffer that a gather in the backward pass, or a remade value, waits for; -1 for none.
    awaited: IntArray  # [num_devices]
    gradient_buffer: IntArray  # [num_parameters, num_devices]
    gradient_token: IntArray
    last_read: IntArray  # made by the last reader of each parameter  # [num_parameters, ...]
    ready_buffer: IntArray  # token: the parameter of this step has arrived
    next_ready_buffer: IntArray  # token: the parameter of the next step has arrived
    next_in_bucket: IntArray
    open_first: (
        IntArray  # first parameter of an open bucket  # [num_groups * num_domains * num_dtypes]
    )
    open_last: IntArray
    open_bytes: FloatArray
    full_bytes: FloatArray  # size at which a bucket is closed
    bucket_key: IntArray  # of each group: the first group whose gradients may share its buckets
    flat_buffer: IntArray  # by ring of a domain  # [num_devices, num_devices]
    ring_token: IntArray  # the ring's collective is done  # [num_devices]
    holder_buffer: IntArray  # each device's copy at the start of a conversion  # [num_devices]
    # Under ZeRO, by the first parameter of a bucket; see ``slices``.
    bucket_bytes: FloatArray
    bucket_gradient_bytes: FloatArray
    bucket_count: IntArray  # number of its parameters
    unfinished: IntArray  # number of parameters whose gradients are not made yet
    # Micro-batch and pass of the last gather; bits of passes if all micro-batches share one.
    gathered: IntArray
    whole_buffer: IntArray  # gathered for all micro-batches  # [2 * num_parameters, num_devices]
    slice_buffer: IntArray  # summed slices of gradients  # [num_parameters, num_devices]
    slice_token: IntArray  # the last reduce-scatter is done  # [num_parameters, num_devices]
    # Of the last two reduce-scatters: received slice, flat input, token of the end. Under stated
    # turns for each chunk, with the turn in which it was last written.
    received_buffer: IntArray  # [2 * num_lanes, num_devices]
    scattered_buffer: IntArray  # [2 * num_lanes, num_devices]
    scattered_token: IntArray  # [2 * num_lanes, num_devices]
    scattered_turn: IntArray  # [num_lanes, num_devices]
    is_part: (
        IntArray  # 1: the device has no part in some groups, as in a pipeline  # [num_devices]
    )
    # Made by the first readers of the last two gathers, then of the last two in the backward pass;
    # under stated turns for each pass of each chunk.
    anchor: IntArray  # [4, or 2 * num_lanes, num_devices]
    anchor_turn: IntArray  # [num_lanes, num_devices]
    # Under caps on micro-batches in flight; see ``ask_permits``.
    # Ring buffer of tokens made at the end of the last micro-batches that began on a chunk.
    token: IntArray  # [num_devices, num_chunks, num_micro, 2]
    entered: IntArray  # 1 + the last micro-batch that began  # [num_devices, num_chunks]
    begun: IntArray  # number of micro-batches that have begun  # [num_devices, num_chunks]
    permit: IntArray  # tokens that the next op waits for  # [2, num_devices]


def make_scratch(tables: GraphTables, num_devices: int) -> Scratch:
    """Working memory for one graph and cluster."""
    num_parameters = len(tables.parameter_bytes)
    num_domains = Domain.SLICES + len(tables.axis_units) - 1
    num_keys = tables.num_groups * num_domains * tables.num_dtypes

    def per_device(rows: int) -> IntArray:
        return np.empty((rows, num_devices), np.int32)

    return Scratch(
        span=np.empty((tables.num_groups + 1, 2), np.int32),
        value_buffer=per_device(len(tables.value_op)),
        remade_buffer=per_device(len(tables.value_op)),
        slot_buffer=per_device(len(tables.slot_value)),
        slot_done=np.empty(len(tables.slot_value), np.int32),
        awaited=np.empty(num_devices, np.int32),
        gradient_buffer=per_device(num_parameters),
        gradient_token=per_device(num_parameters),
        last_read=per_device(num_parameters),
        ready_buffer=per_device(num_parameters),
        next_ready_buffer=per_device(num_parameters),
        next_in_bucket=np.empty(num_parameters, np.int32),
        open_first=np.empty(num_keys, np.int32),
        open_last=np.empty(num_keys, np.int32),
        open_bytes=np.empty(num_keys, np.float64),
        full_bytes=np.empty(num_keys, np.float64),
        bucket_key=np.empty(tables.num_groups, np.int32),
        flat_buffer=per_device(num_devices),
        ring_token=np.empty(num_devices, np.int32),
        holder_buffer=np.empty(num_devices, np.int32),
        bucket_bytes=np.empty(num_parameters, np.float64),
        bucket_gradient_bytes=np.empty(num_parameters, np.float64),
        bucket_count=np.empty(num_parameters, np.int32),
        unfinished=np.empty(num_parameters, np.int32),
        gathered=np.empty(num_parameters, np.int32),
        whole_buffer=per_device(2 * num_parameters),
        slice_buffer=per_device(num_parameters),
        slice_token=per_device(num_parameters),
        received_buffer=per_device(2),
        scattered_buffer=per_device(2),
        scattered_token=per_device(2),
        scattered_turn=per_device(0),
        is_part=np.empty(num_devices, np.int32),
        anchor=per_device(4),
        anchor_turn=per_device(0),
        token=np.empty((num_devices, 0, 0, 2), np.int32),
        entered=np.empty((num_devices, 0), np.int32),
        begun=np.empty((num_devices, 0), np.int32),
        permit=per_device(2),
    )


def with_lanes(scratch: Scratch, num_chunks: int, num_devices: int) -> Scratch:
    """The memory for gathers and scatters under stated turns; see ``slices``."""

    def per_device(rows: int) -> IntArray:
        return np.empty((rows, num_devices), np.int32)

    return scratch._replace(
        received_buffer=per_device(2 * num_chunks),
        scattered_buffer=per_device(2 * num_chunks),
        scattered_token=per_device(2 * num_chunks),
        scattered_turn=per_device(num_chunks),
        anchor=per_device(2 * len(Pass) * num_chunks),
        anchor_turn=per_device(len(Pass) * num_chunks),
    )


BY_MICRO_BATCH, WEIGHTS_LAST, AS_STATED = 0, 1, 2
"""Orders that determine the turns."""
_FORWARD = int(Pass.FORWARD)
_BACKWARD = int(Pass.BACKWARD)
_WEIGHTS = int(Pass.WEIGHTS)


@by_reference
class Turns(NamedTuple):
    """A ``PipelineSchedule`` in flat arrays; unused arrays have no rows."""

    rule: int
    num_turns: int  # of one step; the last turn is for tasks that belong to no chunk
    splits: bool
    once: bool  # slices are gathered and gradients reduced once for all micro-batches
    chunk: IntArray  # of each group, -1 if a device has no part  # [num_groups, num_devices]
    cap: IntArray  # 0: none  # [num_devices, num_chunks]
    # Last op, and last deferred op of weight gradients.
    closing_op: IntArray  # [num_devices, num_chunks, num_micro, 2]
    turn: IntArray  # [num_devices, num_micro, num_chunks, 3]


def _nothing(dimensions: int) -> IntArray:
    return np.zeros((0,) * dimensions, np.int32)


NO_SCHEDULE = Turns(
    rule=BY_MICRO_BATCH,
    num_turns=0,
    splits=False,
    once=False,
    chunk=_nothing(2),
    cap=_nothing(2),
    closing_op=_nothing(4),
    turn=_nothing(4),
)


def encode_turns(
    schedule: PipelineSchedule,
    tables: GraphTables,
    group_devices: Sequence[Sequence[int]],
    division: IntArray,
    shares: IntArray,
) -> Turns:
    """Convert a schedule to the kernel's arrays.

    Args:
        schedule: A schedule that fits the decisions.
        tables: Tables of the graph.
        group_devices: Devices of each group's decision.
        division: Division of each group; see ``Choice``.
        shares: Shares of each division along each axis; see ``Choice``.
    """
    num_micro, num_devices = shares.shape[1:]
    # A single micro-batch waits for no other, but its weight gradients may be deferred.
    if schedule.is_default or (num_micro == 1 and not schedule.splits_backward):
        return NO_SCHEDULE
    chunks = device_chunks(group_devices, num_devices, schedule.chunk_starts)
    num_chunks = max(map(len, chunks))
    chunk = np.full((tables.num_groups, num_devices), -1, np.int32)
    for device, own in enumerate(chunks):
        for number, groups in enumerate(own):
            chunk[groups.start : groups.stop, device] = number
    cap, closing, turn = _nothing(2), _nothing(4), _nothing(4)
    if any(any(caps) for caps in schedule.in_flight):
        last = _last_ops(tables, schedule.splits_backward)
        closing = np.full((num_devices, num_chunks, num_micro, 2), -1, np.int32)
        by_axis = shares.reshape(len(tables.axis_units), -1, num_micro, num_devices)
        axes, of, micros, on = np.nonzero(by_axis[:, division[: tables.num_groups]])
        np.maximum.at(closing, (on, chunk[of, on], micros), last[axes, of])
        cap = np.zeros((num_devices, num_chunks), np.int32)
        for device, caps in enumerate(schedule.in_flight):
            cap[device, : len(caps)] = np.minimum(caps, num_micro)
    rule, num_turns = BY_MICRO_BATCH, num_micro
    if schedule.turns:
        rule, num_turns = AS_STATED, max(map(len, schedule.turns)) + 1
        turn = np.full((num_devices, num_micro, num_chunks, len(Pass)), num_turns - 1, np.int32)
        for device, stated in enumerate(schedule.turns):
            for place, (micro, number, work) in enumerate(stated):
                turn[device, micro, number, work] = place
    elif schedule.splits_backward:
        rule, num_turns = WEIGHTS_LAST, 2 * num_micro
    return Turns(
        rule=rule,
        num_turns=num_turns,
        splits=schedule.splits_backward,
        once=schedule.gathers_once and num_micro > 1,
        chunk=chunk,
        cap=cap,
        closing_op=closing,
        turn=turn,
    )


def _last_ops(tables: GraphTables, splits: bool) -> IntArray:
    """Last compute op of each group and axis, and the last op of deferred weight gradients.

    Returns:
        Op, or -1 if there is none.  # [num_axes, num_groups, 2]
    """
    shape = len(tables.axis_units), tables.num_groups + 1, 2  # the last group is for constants
    last = np.full(shape, -1, np.int32)
    rows = np.arange(len(tables.op_id), dtype=np.int32)
    later = (tables.op_is_weights == 1) & splits
    np.maximum.at(last, (tables.op_axis, tables.op_group, later.astype(np.int32)), rows)
    return last[:, :-1]


@helper
def work_of(tables: GraphTables, turns: Turns, op: int) -> int:
    """The pass that an op belongs to."""
    if tables.op_is_backward[op] == 0:
        return _FORWARD
    return _WEIGHTS if turns.splits and tables.op_is_weights[op] == 1 else _BACKWARD


@helper
def turn_of(turns: Turns, tape: Tape, group: int, work: int, device: int, micro: int) -> int:
    """The turn of a device for a pass of a micro-batch; group -1 stands for constants."""
    if turns.rule == BY_MICRO_BATCH:
        return micro
    num_micro = turns.num_turns // 2
    if turns.rule == WEIGHTS_LAST:
        return micro + num_micro if work == _WEIGHTS else micro
    first = tape.counts[FIRST_TURN]
    turn = turns.num_turns - 1
    if group < 0:  # constants are made when a micro-batch begins
        for chunk in range(turns.turn.shape[2]):
            turn = min(turn, turns.turn[device, micro, chunk, _FORWARD])
    elif turns.chunk[group, device] >= 0:
        turn = turns.turn[device, micro, turns.chunk[group, device], work]
    return int(first + turn)


@helper
def take_turns(turns: Turns, tape: Tape, group: int, work: int, micro: int) -> None:
    """Set the turns of all tasks written from now on to a pass of a group."""
    if turns.rule != AS_STATED:  # the same on all devices
        tape.turn[:] = turn_of(turns, tape, group, work, 0, micro)
        return
    for device in range(len(tape.turn)):
        tape.turn[device] = turn_of(turns, tape, group, work, device, micro)


@helper
def follow_gradients(turns: Turns, tape: Tape) -> None:
    """Move the task begun last, which reads gradients, to a turn not before theirs.

    The op that finishes a parameter may belong to another pass than the maker of its gradient.
    """
    if turns.rule == BY_MICRO_BATCH:
        return
    number = tape.counts[NUM_TASKS] - 1
    task = tape.tasks[number]
    for read in range(task.read_start, tape.counts[NUM_READS]):
        maker = tape.tasks[tape.buffers[tape.reads[read]].maker]
        if maker.device == task.device and maker.kind < FIRST_FREE_KIND:
            task.turn = max(task.turn, maker.turn)


@helper
def begin_turns(turns: Turns, scratch: Scratch, tape: Tape, step: int) -> None:
    """Begin a step: reset its turns and caps."""
    tape.counts[IN_TURN] = 1 if turns.rule == AS_STATED else 0
    tape.counts[FIRST_TURN] = step * turns.num_turns if turns.rule == AS_STATED else 0
    if step == 0:
        scratch.token[:] = -1
        scratch.entered[:] = 0
        scratch.begun[:] = 0
        scratch.permit[:] = -1


@helper
def last_turns(turns: Turns, tape: Tape, num_micro: int) -> None:
    """Put all tasks written from now on after the rest of the step."""
    in_step = num_micro if turns.rule == BY_MICRO_BATCH else turns.num_turns
    tape.turn[:] = tape.counts[FIRST_TURN] + in_step - 1


@helper
def ask_permits(
    turns: Turns, scratch: Scratch, shares: IntArray, group: int, work: int, number: int
) -> None:
    """Find the tokens that a group's op has to wait for on each device.

    Args:
        turns: Turns with caps.
        scratch: Working memory; its ``permit`` is written.
        shares: Shares of the op in this micro-batch.  # [num_devices]
        group: Group of the op.
        work: Pass of the op.
        number: Number of the micro-batch, counted through all steps.
    """
    scratch.permit[:] = -1
    if work != _FORWARD:
        return
    num_micro = scratch.token.shape[2]
    for device in range(len(shares)):
        chunk = turns.chunk[group, device]
        if shares[device] == 0 or scratch.entered[device, chunk] > number:
            continue
        scratch.entered[device, chunk] = number + 1
        begun = scratch.begun[device, chunk]
        scratch.begun[device, chunk] = begun + 1
        cap = turns.cap[device, chunk]
        for part in range(2):
            if 0 < cap <= begun:
                token = scratch.token[device, chunk, (begun - cap) % num_micro, part]
                scratch.permit[part, device] = token
            scratch.token[device, chunk, begun % num_micro, part] = -1


class TapeWriter:
    """Writes a few tasks without compiled helpers: compiling would take longer than writing.

    Args:
        num_tasks: Largest number of tasks that will be written.
        num_parameters: Number of parameters of the graph.
        num_devices: Number of devices of the cluster.

    Attributes:
        tape: Tape with all tasks written so far; complete after ``end``.
    """

    def __init__(self, num_tasks: int, num_parameters: int, num_devices: int) -> None:
        # ``make_tape`` makes room for a few buffers and reads of each task.
        self.tape: Tape = make_tape(num_tasks + num_devices + 64, num_parameters, num_devices)

    def write(
        self,
        kind: TaskKind,
        subject: int,
        device: int,
        num_bytes: float,
        *,
        channel: int = -1,
        reads: Sequence[int] = (),
    ) -> int:
        """Write a task that makes one token; returns the token's buffer."""
        tape, counts = self.tape, self.tape.counts
        number, buffer, read = (int(counts[each]) for each in (NUM_TASKS, NUM_BUFFERS, NUM_READS))
        values = {"kind": int(kind), "subject": subject, "device": device, "channel": channel}
        values |= dict.fromkeys(("micro", "samples", "turn", "units"), 0)
        values |= {"read_start": read, "buffer_start": buffer}
        for name, value in values.items():
            tape.tasks[name][number] = value
        tape.tasks["num_bytes"][number] = num_bytes
        tape.reads[read : read + len(reads)] = reads
        for name, value in (("maker", number), ("device", device)):
            tape.buffers[name][buffer] = value
        tape.buffers["num_bytes"][buffer] = 0.0
        for place, more in ((NUM_TASKS, 1), (NUM_BUFFERS, 1), (NUM_READS, len(reads))):
            counts[place] += more
        return buffer

    def end(self) -> None:
        """End the lists of the last task: the next record holds their ends."""
        number = int(self.tape.counts[NUM_TASKS])
        self.tape.tasks["read_start"][number] = self.tape.counts[NUM_READS]
        self.tape.tasks["buffer_start"][number] = self.tape.counts[NUM_BUFFERS]
