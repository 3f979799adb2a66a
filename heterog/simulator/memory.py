"""Peak memory of a simulated step, by liveness.

A buffer is alive from the start of the task that makes it to the end of its last reader. A rank
issues communication and lets go of it between two ops only, so what arrives or has left while an
op runs is there for as long as this op. What stays for the whole step (parameters, optimizer
state, batch, room for the largest weight that a kernel reorders) comes from
``strategy.lowering.resident_bytes``. Small workspaces and the rounding of allocators are covered
by the evaluator's ``MEMORY_MARGIN``, the device's context by a cluster's ``reserved_memory``.
"""

import numpy as np

from heterog.simulator.engine import Timings
from heterog.strategy.kernels import helper, kernel
from heterog.strategy.lowering.tape import NUM_BUFFERS, NUM_READS, NUM_TASKS, Tape
from heterog.strategy.program import FIRST_FREE_KIND, FloatArray, IntArray, Program


def buffer_lives(
    program: Program, start: FloatArray, finish: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """From when until when each buffer is there; at one instant, ends come before begins.

    Args:
        program: whose buffers they are.
        start: of each task, seconds.  # [num_tasks]
        finish: of each task, seconds.  # [num_tasks]

    Returns:
        (begin, end), seconds.  # [num_buffers] each
    """
    makers = program.buffer_maker
    readers = np.repeat(np.arange(program.num_tasks), np.diff(program.read_start))
    begin, end = start[makers], finish[makers]
    np.maximum.at(end, program.read_buffer, finish[readers])
    for device in range(program.num_devices):
        ops = np.flatnonzero((program.kind < FIRST_FREE_KIND) & (program.device == device))
        if not len(ops):
            continue
        ops = ops[np.lexsort((finish[ops], start[ops]))]
        mine = np.flatnonzero(program.buffer_device == device)
        for times, op_times in ((begin, start), (end, finish)):
            running = ops[np.maximum(np.searchsorted(start[ops], times[mine]) - 1, 0)]
            is_running = (start[running] < times[mine]) & (times[mine] < finish[running])
            times[mine] = np.where(is_running, op_times[running], times[mine])
    return begin, end


def peak_memory(tape: Tape, timings: Timings, resident: FloatArray, peak: FloatArray) -> None:
    """Peak bytes of each device: a buffer lives from its maker's start to its last reader's end.

    Each device is followed on its own: its ops, whose order is fixed, are merged in time with the
    link and free tasks that touch its memory. At one instant, ends come before starts.

    Args:
        tape: the program.
        timings: of the engine or the referee.
        resident: bytes that are there all the time.  # [num_devices]
        peak: written.  # [num_devices]
    """
    lists = np.zeros((3, len(resident) + 1), np.int32)
    begins = np.empty((int(tape.counts[NUM_TASKS]) + 1, 2), np.int32)
    _memory_kernel(tape, timings, resident, peak, lists, begins)


@kernel
def _memory_kernel(
    tape: Tape, timings: Timings, resident: FloatArray, peak: FloatArray, lists: IntArray,
    begins: IntArray,
) -> None:  # fmt: skip
    alive = timings.alive
    alive[: tape.counts[NUM_BUFFERS]] = 0
    for read in range(tape.counts[NUM_READS]):
        alive[tape.reads[read]] += 1
    num_devices = len(resident)
    # Where each task's buffers and reads begin, close together: devices are followed one by one,
    # and the records of one device's tasks lie far apart.
    for task in range(tape.counts[NUM_TASKS] + 1):
        begins[task, 0] = tape.tasks[task].buffer_start
        begins[task, 1] = tape.tasks[task].read_start
    _list_events(tape, timings, num_devices, lists)
    touching, touching_start = timings.touching, lists[0]
    for device in range(num_devices):
        live = resident[device]
        most = live
        op = timings.sequence_start[device]
        last_op = timings.sequence_start[device + 1]
        is_running = False
        other = touching_start[device]
        last_other = touching_start[device + 1]
        gone = 0.0  # what the op that runs keeps alive
        while op < last_op or other < last_other:
            take_op = op < last_op
            if take_op and other < last_other:
                event = touching[other]
                task = timings.sequence[op]
                time = timings.finish[event >> 1] if event & 1 else timings.start[event >> 1]
                if is_running:
                    take_op = timings.finish[task] <= time
                else:
                    take_op = timings.start[task] < time
            if take_op:
                task = timings.sequence[op]
                is_end = is_running
                is_running = not is_running
                op += 1 if is_end else 0
            else:
                task = touching[other] >> 1
                is_end = touching[other] & 1 == 1
                other += 1
            for made in range(begins[task, 0], begins[task + 1, 0]):
                buffer = tape.buffers[made]
                if buffer.device != device:
                    continue
                if not is_end:
                    live += buffer.num_bytes
                elif alive[made] == 0:
                    gone += buffer.num_bytes
            most = max(most, live)
            if is_end:
                for read in range(begins[task, 1], begins[task + 1, 1]):
                    needed = tape.reads[read]
                    # An op reads nothing that lies on another device: that it is here need not be
                    # looked up, which for large programs is what takes the time.
                    if take_op or tape.buffers[needed].device == device:
                        alive[needed] -= 1
                        if alive[needed] == 0 and tape.buffers[needed].device == device:
                            gone += tape.buffers[needed].num_bytes
            if not is_running:
                live -= gone
                gone = 0.0
        peak[device] = most


@helper
def _list_events(tape: Tape, timings: Timings, num_devices: int, lists: IntArray) -> None:
    """Starts and ends of link and free tasks that touch each device's memory, in time order.

    They go to ``timings.touching``, and where each device's begin to ``lists[0]``.
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
            for edge in range(tape.tasks[task].buffer_start, tape.tasks[task + 1].buffer_start):
                device = tape.buffers[edge].device
                if device >= 0 and seen[device] != index:
                    seen[device] = index
                    if writing == 1:
                        touching[start[device] + filled[device]] = event
                        filled[device] += 1
                    else:
                        start[device + 1] += 1
            if event & 1 == 1:
                for edge in range(tape.tasks[task].read_start, tape.tasks[task + 1].read_start):
                    device = tape.buffers[tape.reads[edge]].device
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
