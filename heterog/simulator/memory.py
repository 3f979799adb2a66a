"""Peak memory of a simulated step, by liveness.

A buffer is alive from the start of the task that makes it to the end of its last reader. A rank
issues and frees communication only between two ops, so a message that arrives or leaves while an
op runs stays in memory until the op ends. ``lowering.resident_bytes`` gives the memory that stays
for the whole step: parameters, optimizer state, batch, room for the largest weight that a kernel
reorders. ``Inside`` has what is there during a task only. The evaluator's
``MEMORY_MARGIN`` covers small workspaces and the rounding of allocators, a cluster's
``reserved_memory`` the device's context.

If steps are compiled, some results take no memory, and some that of an input that dies
(``device_models.fusion.ResultMemory``). The latter are alive only from the end of their op. All
ops of a kernel count as run at the place of one of them: what they read is there until all of
their results are.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Execution
from heterog.graph.op_costs import Copies, copies_on_cpu
from heterog.graph.op_graph import OpGraph
from heterog.lowering import value_of_buffers
from heterog.lowering.kernels import by_reference, helper, kernel
from heterog.lowering.program import (
    FIRST_FREE_KIND,
    LAST_OP_KIND,
    FloatArray,
    IntArray,
    Program,
    TaskKind,
)
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import NUM_BUFFERS, NUM_READS, NUM_TASKS, Tape
from heterog.pricing.device_models.fusion import ResultMemory, memory_of_results
from heterog.simulator.timings import Timings

_FEW = 8
"""Most buffers or reads of a task that are searched one by one; more are bisected."""
_OWN, _OF_INPUT, _NONE = map(int, ResultMemory)
_UPDATE = int(TaskKind.UPDATE)
_READS_OR_RESULT = int(Copies.READS_OR_RESULT)
_IS_UPDATE = 2
"""Column of a task's marks; the first two say whether the devices of its buffers and of its reads
ascend."""


class Kept(NamedTuple):
    """Where a compiled step keeps what its ops make; empty if steps are not compiled."""

    memory: IntArray  # ``ResultMemory`` of each value
    runs: IntArray  # compute op at whose place each op's kernel runs  # [num_compute_ops]


def kept_values(
    graph: OpGraph,
    tables: GraphTables,
    execution: Execution,
    num_micro: int,
    *,
    splits_backward: bool = False,
) -> Kept:
    """Where the values of some tables are kept in a step of some micro-batches."""
    if not execution.compiles:
        return NOTHING_COMPILED
    results = memory_of_results(graph, accumulates=num_micro > 1)
    found = results.memory[tables.value_tensor]
    # What a team sums or exchanges is sent.
    memory = np.where(tables.op_recut[tables.value_op] > 0, _OWN, found).astype(np.int32)
    own = np.arange(len(tables.op_id), dtype=np.int32)
    row = np.zeros(graph.num_ops, np.int32)
    row[tables.op_id] = own
    runs = row[results.runs[tables.op_id]]
    if splits_backward:  # delayed weight gradients run apart from what they are joined with
        is_apart = (tables.op_is_weights == 1) | (tables.op_is_weights[runs] == 1)
        runs = np.where(is_apart, own, runs)
    return Kept(memory, runs.astype(np.int32))


NOTHING_COMPILED = Kept(np.zeros(0, np.int32), np.zeros(0, np.int32))


@by_reference
class Inside(NamedTuple):
    """What kernels and the optimizer make and free inside a task."""

    stepping: FloatArray  # bytes in an update; see ``lowering.stepping_bytes``  # [num_devices]
    copies: IntArray  # ``Copies`` of each op; empty if no kernel copies  # [num_compute_ops]
    on_cpu: npt.NDArray[np.bool_]  # devices whose kernels copy  # [num_devices]


def copies_of_ops(graph: OpGraph, tables: GraphTables) -> IntArray:
    """``Copies`` of each compute op; empty if all are nothing."""
    found = [copies_on_cpu(graph.ops[op].kind) for op in tables.op_id]
    return np.array(found if any(found) else [], np.int32)


def copied_bytes(program: Program, inside: Inside) -> FloatArray:
    """Bytes that the kernel of each task copies while it runs.  # [num_tasks]"""
    num_tasks = program.num_tasks
    found = np.zeros(num_tasks)
    if not len(inside.copies):
        return found
    sizes = program.buffer_bytes
    _, readers = program.edges
    read = np.bincount(readers, sizes[program.read_buffer], minlength=num_tasks)
    made = np.bincount(program.buffer_maker, sizes, minlength=num_tasks)
    ops = np.flatnonzero((program.kind <= LAST_OP_KIND) & inside.on_cpu[program.device])
    kind = inside.copies[program.subject[ops]]
    both, larger = read[ops] + made[ops], np.maximum(read[ops], made[ops])
    of_kind = np.where(kind == _READS_OR_RESULT, larger, both)
    found[ops] = np.where(kind == Copies.NOTHING, 0.0, of_kind)
    return found


def memory_of_buffers(program: Program, tables: GraphTables, kept: Kept) -> IntArray:
    """``ResultMemory`` of each buffer.  # [num_buffers]

    What other tasks read is in memory, and what they have made is not written over.
    """
    value, is_op = value_of_buffers(program, tables), program.kind <= LAST_OP_KIND
    if not len(kept.memory):
        return np.zeros(len(value), np.int32)
    found = np.where(value >= 0, kept.memory[value], _OWN).astype(np.int32)
    read, (_, readers) = program.read_buffer, program.edges
    found[read[~is_op[readers]]] = _OWN
    is_foreign = ~is_op[program.buffer_maker[read]] & (program.buffer_bytes[read] > 0.0)
    takes_foreign = np.isin(program.buffer_maker, readers[is_foreign])
    found[takes_foreign & (found == _OF_INPUT)] = _OWN
    return found


def task_runs(program: Program, kept: Kept) -> IntArray:
    """The task at whose place the kernel of each task runs.  # [num_tasks]"""
    read, (_, readers) = program.read_buffer, program.edges
    columns = program.kind, program.subject, program.device, program.micro
    return _task_runs(columns, program.buffer_maker[read], readers, kept.runs)


def _task_runs(
    columns: tuple[npt.NDArray[np.integer], ...],
    makers: IntArray,
    readers: IntArray,
    runs: IntArray,
) -> IntArray:
    """See ``task_runs``; ops that would run before what they read stay in their own places.

    Args:
        columns: Kind, subject, device and micro-batch of each task.
        makers: The task that makes what each read needs.
        readers: The task of each read.
        runs: Compute op at whose place each op's kernel runs.
    """
    kind, subject, device, micro = (column.astype(np.int64) for column in columns)
    run = np.arange(len(kind), dtype=np.int32)
    if not len(runs):
        return run
    is_moved = (np.bincount(runs, minlength=len(runs)) > 1)[runs] | (runs != np.arange(len(runs)))
    ops = np.flatnonzero(kind <= LAST_OP_KIND)
    ops = ops[is_moved[subject[ops]]]
    if not len(ops):
        return run
    # An op comes again in other steps, on other devices and with other micro-batches.
    place = (device[ops] * (micro.max() + 1) + micro[ops]) * (LAST_OP_KIND + 1) + kind[ops]
    code = place * len(runs) + subject[ops]
    order = np.argsort(code, kind="stable")
    time = np.empty(len(ops), np.int64)
    time[order] = np.arange(len(ops)) - np.searchsorted(code[order], code[order])
    steps = time.max() + 1
    wanted = (place * len(runs) + runs[subject[ops]]) * steps + time
    known = code[order] * steps + time[order]
    found = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    run[ops] = np.where(known[found] == wanted, ops[order[found]], ops)
    while True:
        late = run[makers] > run[readers]
        if not late.any():
            return run
        apart = np.isin(run, np.concatenate([run[makers[late]], run[readers[late]]]))
        run[apart] = np.flatnonzero(apart)


class Lives(NamedTuple):
    """Lives of buffers, and after them of what is made inside tasks."""

    device: IntArray
    num_bytes: FloatArray
    begin: FloatArray  # in seconds
    end: FloatArray


def all_lives(
    program: Program, start: FloatArray, finish: FloatArray, tables: GraphTables, kept: Kept,
    inside: Inside,
) -> Lives:  # fmt: skip
    """Lives of everything that is not there for the whole step.

    Args:
        program: The program.
        start: Start of each task, in seconds.  # [num_tasks]
        finish: End of each task, in seconds.  # [num_tasks]
        tables: Tables of the program.
        kept: Where the values of the tables are kept.
        inside: What is made inside tasks.
    """
    begin, end = buffer_lives(program, start, finish, tables, kept)
    num_bytes = copied_bytes(program, inside)
    is_update = program.kind == _UPDATE
    num_bytes[is_update] = inside.stepping[program.device[is_update]]
    tasks = np.flatnonzero(num_bytes)
    start, finish = _one_by_one(start, finish, _ops_of(program, start, finish))
    return Lives(
        np.concatenate([program.buffer_device, program.device[tasks]]),
        np.concatenate([program.buffer_bytes, num_bytes[tasks]]),
        np.concatenate([begin, start[tasks]]),
        np.concatenate([end, finish[tasks]]),
    )


def buffer_lives(
    program: Program, start: FloatArray, finish: FloatArray, tables: GraphTables, kept: Kept
) -> tuple[FloatArray, FloatArray]:
    """Start and end of each buffer's life; at one instant, ends come before starts.

    A buffer without memory has no life: it starts and ends when its maker ends.

    Args:
        program: The program with the buffers.
        start: Start of each task, in seconds.  # [num_tasks]
        finish: End of each task, in seconds.  # [num_tasks]
        tables: Tables of the program.
        kept: Where the values of the tables are kept.

    Returns:
        (begin, end), in seconds.  # [num_buffers] each
    """
    memory, run = memory_of_buffers(program, tables, kept), task_runs(program, kept)
    ops_of = _ops_of(program, start, finish)
    start, finish = _one_by_one(start, finish, ops_of)
    makers = run[program.buffer_maker]
    _, readers = program.edges
    begin = np.where(memory == _OWN, start[makers], finish[makers])
    end = finish[makers]
    np.maximum.at(end, program.read_buffer, finish[run[readers]])
    end = np.where(memory == _NONE, begin, end)
    buffers_of = of_each_device(program.buffer_device, program.num_devices)
    for ops, mine in zip(ops_of, buffers_of, strict=True):
        if not len(ops):
            continue
        for times, op_times in ((begin, start), (end, finish)):
            running = ops[np.maximum(np.searchsorted(start[ops], times[mine]) - 1, 0)]
            is_running = (start[running] < times[mine]) & (times[mine] < finish[running])
            times[mine] = np.where(is_running, op_times[running], times[mine])
    return begin, end


def _ops_of(program: Program, start: FloatArray, finish: FloatArray) -> list[npt.NDArray[np.intp]]:
    """Tasks on the compute stream of each device whose order is fixed, by time."""
    ops = np.flatnonzero(program.kind < FIRST_FREE_KIND)
    return [
        ops[own][np.lexsort((finish[ops[own]], start[ops[own]]))]
        for own in of_each_device(program.device[ops], program.num_devices)
    ]


def _one_by_one(
    start: FloatArray, finish: FloatArray, ops_of: list[npt.NDArray[np.intp]]
) -> tuple[FloatArray, FloatArray]:
    """Times in which ops that take no time come one after the other, by the least difference."""
    start, finish = start.copy(), finish.copy()
    for ops in ops_of:
        is_short = finish[ops] == start[ops]
        if not is_short.any():
            continue
        done = np.concatenate([[0], np.cumsum(is_short)])
        first = np.searchsorted(start[ops], start[ops])  # op that starts at the same time
        before = done[:-1] - done[first]
        least = np.spacing(start[ops])
        start[ops] += 2 * before * least
        finish[ops] += np.where(is_short, (2 * before + 1) * least, 0.0)
    return start, finish


def of_each_device(device: IntArray, num_devices: int) -> list[npt.NDArray[np.intp]]:
    """Places of the entries of each device, ascending; entries of no device (-1) are left out.

    >>> [places.tolist() for places in of_each_device(np.array([1, -1, 0, 1]), 2)]
    [[2], [0, 3]]
    """
    order = np.argsort(device, kind="stable")
    bounds = np.searchsorted(device[order], np.arange(num_devices + 1))
    return np.split(order, bounds)[1:-1]


def peak_memory(
    tape: Tape,
    timings: Timings,
    resident: FloatArray,
    inside: Inside,
    peak: FloatArray,
    value_start: IntArray,
    kept: Kept,
) -> None:
    """Peak bytes of each device: a buffer lives from its maker's start to its last reader's end.

    Each device is processed separately: its ops, whose order is fixed, are merged by time with the
    link and free tasks that touch its memory. At one instant, ends come before starts.

    Args:
        tape: The program.
        timings: Timings of the engine or the referee.
        resident: Bytes that stay for the whole step.  # [num_devices]
        inside: What is made inside tasks.
        peak: Output.  # [num_devices]
        value_start: First value of each op.  # [num_compute_ops + 1]
        kept: Where values are kept.
    """
    lists = np.zeros((3, len(resident) + 1), np.int32)
    num_tasks, is_compiled = int(tape.counts[NUM_TASKS]), len(kept.memory) > 0
    begins = np.empty((num_tasks + 1, 2), np.int32)
    marks = np.zeros((num_tasks, 3), np.bool_)
    copies = np.zeros(num_tasks if len(inside.copies) else 0, np.int8)
    kinds = np.zeros(int(tape.counts[NUM_BUFFERS]) if is_compiled else 0, np.int8)
    members = np.full((num_tasks if is_compiled else 0, 2), -1, np.int32)
    if is_compiled:
        _fill_kinds(tape, value_start, kept.memory, kinds)
        _fill_members(tape, kept, members)
    _memory_kernel(
        tape, timings, resident, inside, peak, lists, begins, marks, copies, kinds, members
    )


def _fill_members(tape: Tape, kept: Kept, members: IntArray) -> None:
    """The first task that runs in each task's place, and the next one of a task's kernel.

    -1 is none.  # [num_tasks, 2]
    """
    tasks, count = tape.tasks[: len(members)], int(tape.counts[NUM_READS])
    starts = tape.tasks["read_start"][: len(members) + 1]
    readers = np.repeat(np.arange(len(members), dtype=np.int32), np.diff(starts))
    makers = tape.buffers["maker"][tape.reads[:count]]
    columns = tasks["kind"], tasks["subject"], tasks["device"], tasks["micro"]
    run = _task_runs(columns, makers, readers, kept.runs)
    numbers = np.arange(len(members))
    order = np.lexsort((numbers, run != numbers, run))
    is_next = run[order[1:]] == run[order[:-1]]
    members[order[:-1][is_next], 1] = order[1:][is_next]
    firsts = order[np.concatenate([[True], ~is_next])]
    members[run[firsts], 0] = firsts


@kernel
def _fill_kinds(
    tape: Tape, value_start: IntArray, memory: IntArray, kinds: npt.NDArray[np.int8]
) -> None:
    """The ``ResultMemory`` of each buffer; see ``memory_of_buffers``."""
    for number in range(tape.counts[NUM_TASKS]):
        task = tape.tasks[number]
        if task.kind > LAST_OP_KIND:
            continue
        first = value_start[task.subject]
        takes_foreign = False
        for read in range(task.read_start, tape.tasks[number + 1].read_start):
            buffer = tape.buffers[tape.reads[read]]
            if tape.tasks[buffer.maker].kind > LAST_OP_KIND and buffer.num_bytes > 0.0:
                takes_foreign = True
        for place in range(value_start[task.subject + 1] - first):
            own = memory[first + place]
            if takes_foreign and own == _OF_INPUT:
                own = _OWN
            kinds[task.buffer_start + place] = own
    for number in range(tape.counts[NUM_TASKS]):
        task = tape.tasks[number]
        if task.kind > LAST_OP_KIND:
            for read in range(task.read_start, tape.tasks[number + 1].read_start):
                kinds[tape.reads[read]] = _OWN


@kernel
def _memory_kernel(
    tape: Tape, timings: Timings, resident: FloatArray, inside: Inside, peak: FloatArray,
    lists: IntArray, begins: IntArray, marks: npt.NDArray[np.bool_],
    copies: npt.NDArray[np.int8], kinds: npt.NDArray[np.int8], members: IntArray,
) -> None:  # fmt: skip
    is_compiled = len(kinds) > 0
    alive = timings.alive
    alive[: tape.counts[NUM_BUFFERS]] = 0
    for read in range(tape.counts[NUM_READS]):
        alive[tape.reads[read]] += 1
    num_devices = len(resident)
    # Starts of each task's buffers and reads, and what else is asked of it, in dense arrays:
    # devices are processed one by one, and the records of a device's tasks lie far apart.
    for task in range(tape.counts[NUM_TASKS] + 1):
        begins[task, 0] = tape.tasks[task].buffer_start
        begins[task, 1] = tape.tasks[task].read_start
    for task in range(len(marks)):
        marks[task, _IS_UPDATE] = tape.tasks[task].kind == _UPDATE
    for task in range(len(copies)):
        if tape.tasks[task].kind <= LAST_OP_KIND:
            copies[task] = inside.copies[tape.tasks[task].subject]
    _find_ascending(tape, begins, marks)
    _list_events(tape, timings, num_devices, lists, begins)
    touching, touching_start = timings.touching, lists[0]
    for device in range(num_devices):
        live = resident[device]
        most = live
        is_copied = len(copies) > 0 and inside.on_cpu[device]
        op = timings.sequence_start[device]
        last_op = timings.sequence_start[device + 1]
        is_running = False
        other = touching_start[device]
        last_other = touching_start[device + 1]
        time = _time_of(timings, other, last_other)
        gone = 0.0  # bytes kept alive by the running op
        late = 0.0  # bytes that an op puts where its inputs were
        while op < last_op or other < last_other:
            take_op = op < last_op
            if take_op:
                task = timings.sequence[op]
                if is_running:
                    take_op = timings.finish[task] <= time
                else:
                    take_op = timings.start[task] < time
            if take_op:
                is_start = not is_running
                # Most ops have no event between their start and their end.
                is_end = is_running or timings.finish[task] <= time
                is_running = not is_end
                op += 1 if is_end else 0
                if is_copied and copies[task] > 0:
                    copied = _copied(tape, begins, copies[task], task)
                    live += copied if is_start else 0.0
                    gone += copied if is_end else 0.0
            else:
                task = touching[other] >> 1
                is_end = touching[other] & 1 == 1
                is_start = not is_end
                other += 1
                time = _time_of(timings, other, last_other)
                if marks[task, _IS_UPDATE]:
                    if is_start:
                        live += inside.stepping[device]
                    else:
                        gone += inside.stepping[device]
            # All ops of a compiled kernel, or the task alone.
            first = members[task, 0] if is_compiled and take_op else task
            member = first
            while member >= 0:
                made_end = begins[member + 1, 0]
                is_wide = not take_op and marks[member, 0]
                made = begins[member, 0]
                if is_wide:
                    made = _first_of(tape, 0, made, made_end, device)
                while made < made_end:
                    buffer, number = tape.buffers[made], made
                    made += 1
                    if buffer.device != device:
                        if is_wide:
                            break
                        continue
                    if is_compiled and kinds[number] == _NONE:
                        continue
                    if is_compiled and kinds[number] == _OF_INPUT:
                        late += buffer.num_bytes if is_end else 0.0
                    elif is_start:
                        live += buffer.num_bytes
                    if is_end and alive[number] == 0:
                        gone += buffer.num_bytes
                member = members[member, 1] if is_compiled and take_op else -1
            most = max(most, live)
            member = first if is_end else -1
            while member >= 0:
                read, read_end = begins[member, 1], begins[member + 1, 1]
                is_wide = not take_op and marks[member, 1]
                if is_wide:
                    read = _first_of(tape, 1, read, read_end, device)
                while read < read_end:
                    needed = tape.reads[read]
                    read += 1
                    if is_wide and tape.buffers[needed].device != device:
                        break
                    # An op reads only buffers on its device. Skipping the check saves most of the
                    # time of large programs.
                    if take_op or tape.buffers[needed].device == device:
                        alive[needed] -= 1
                        if alive[needed] == 0 and tape.buffers[needed].device == device:
                            if not is_compiled or kinds[needed] != _NONE:
                                gone += tape.buffers[needed].num_bytes
                member = members[member, 1] if is_compiled and take_op else -1
            if not is_running:
                live -= gone
                gone = 0.0
                if is_compiled:
                    live += late
                    late = 0.0
                    most = max(most, live)
        peak[device] = most


@helper
def _copied(tape: Tape, begins: IntArray, copies: int, task: int) -> float:
    """See ``copied_bytes``."""
    read, made = 0.0, 0.0
    for place in range(begins[task, 1], begins[task + 1, 1]):
        read += tape.buffers[tape.reads[place]].num_bytes
    for place in range(begins[task, 0], begins[task + 1, 0]):
        made += tape.buffers[place].num_bytes
    return max(read, made) if copies == _READS_OR_RESULT else read + made


@helper
def _time_of(timings: Timings, other: int, last_other: int) -> float:
    """Time of an event in ``timings.touching``; infinite behind the last event."""
    if other >= last_other:
        return np.inf
    event = timings.touching[other]
    return float(timings.finish[event >> 1] if event & 1 else timings.start[event >> 1])


@helper
def _device_of(tape: Tape, side: int, place: int) -> int:
    """The device of a buffer that a task makes (side 0) or reads (side 1)."""
    return int(tape.buffers[tape.reads[place] if side == 1 else place].device)


@helper
def _find_ascending(tape: Tape, begins: IntArray, marks: npt.NDArray[np.bool_]) -> None:
    """Find tasks with many buffers, or many reads, whose devices ascend.

    Each member of a collective searches them for its buffers. A search one by one would take time
    in proportion to the square of the number of members.
    """
    for task in range(tape.counts[NUM_TASKS]):
        for side in range(2):
            first, end = begins[task, side], begins[task + 1, side]
            if end - first > _FEW:
                marks[task, side] = True
                for place in range(first + 1, end):
                    if _device_of(tape, side, place) < _device_of(tape, side, place - 1):
                        marks[task, side] = False
                        break


@helper
def _first_of(tape: Tape, side: int, first: int, end: int, device: int) -> int:
    """The first buffer or read that is on a device or a later one; devices ascend."""
    while first < end:
        middle = (first + end) >> 1
        if _device_of(tape, side, middle) < device:
            first = middle + 1
        else:
            end = middle
    return first


@helper
def _list_events(
    tape: Tape, timings: Timings, num_devices: int, lists: IntArray, begins: IntArray
) -> None:
    """List starts and ends of link and free tasks that touch each device's memory, by time.

    The lists are written to ``timings.touching``, their starts by device to ``lists[0]``.
    """
    start, seen, filled = lists[0], lists[1], lists[2]
    touching = timings.touching
    for writing in range(2):
        for device in range(num_devices):
            seen[device] = -1
        index = 0
        while timings.events[index] >= 0:
            event = timings.events[index]
            task = event >> 1
            for side in range(1 + (event & 1)):  # a start touches no buffer that it reads
                for place in range(begins[task, side], begins[task + 1, side]):
                    device = _device_of(tape, side, place)
                    if device >= 0 and seen[device] != index:
                        seen[device] = index
                        if writing == 1:
                            touching[start[device] + filled[device]] = event
                            filled[device] += 1
                        else:
                            start[device + 1] += 1
            index += 1
        if writing == 0:
            for device in range(num_devices):
                start[device + 1] += start[device]
