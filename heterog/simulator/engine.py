"""The engine: discrete events over a program's tasks, fast enough to sit inside a search.

Rules, also those of the slow reference in the tests:

- A task may start when the makers of all buffers it reads are done.
- A device runs one compute task at a time. Ops keep program order on their device, as kernels on
  one CUDA stream do; sums and updates (*free* tasks) run by priority whenever the next op in
  program order is not ready.
- Communication waits in one queue per set of links, by priority. The head of a queue starts when
  the links of its gate are free, the best head over all queues first. Starting loads every link of
  the channel for the payload's bytes over that link's rate, behind whatever the link still has to
  do. A collective also holds its gate for its latency: its many small steps follow one another on
  the same links, where a single transfer's latency overlaps with the next transfer.

Priority is the order of getting ready (``fifo``), the upward rank (``rank``: own seconds plus the
longest path of seconds to the end, HeteroG section 4.2), or program order (``program``).
"""

from enum import IntEnum
from typing import NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt

from heterog.simulator.cost_model import Prices
from heterog.strategy.lowering import Choice, Scratch, Tape, lower_kernel
from heterog.strategy.program import (
    FIRST_FREE_KIND,
    FIRST_LINK_KIND,
    FloatArray,
    IntArray,
    TaskKind,
)
from heterog.strategy.tables import GraphTables

_COMPUTE = int(TaskKind.COMPUTE)
_UPDATE = int(TaskKind.UPDATE)


class Order(IntEnum):
    """How waiting tasks are ordered."""

    FIFO = 0
    RANK = 1
    PROGRAM = 2


class Schedule(NamedTuple):
    """Working memory and results of one simulation; grown to the largest program seen."""

    seconds: FloatArray  # of each task
    start: FloatArray
    finish: FloatArray
    priority: FloatArray
    waiting_for: IntArray  # unfinished reads of each task
    successor_start: IntArray
    successor: IntArray
    events: IntArray  # 2 task at its start, 2 task + 1 at its end, in time order
    queue_start: IntArray  # segments of ``queue_item``, one heap per queue
    queue_size: IntArray
    queue_item: IntArray
    chain_start: IntArray  # ops of each device in program order
    chain: IntArray
    heap_time: FloatArray
    heap_item: IntArray
    alive: IntArray  # unfinished readers of each buffer


def make_schedule(num_tasks: int, num_reads: int, num_buffers: int, num_queues: int) -> Schedule:
    """Empty arrays with room for a program."""
    return Schedule(
        seconds=np.empty(num_tasks),
        start=np.empty(num_tasks),
        finish=np.empty(num_tasks),
        priority=np.empty(num_tasks),
        waiting_for=np.empty(num_tasks, np.int32),
        successor_start=np.empty(num_tasks + 2, np.int32),
        successor=np.empty(max(num_reads, 1), np.int32),
        events=np.empty(2 * num_tasks, np.int32),
        queue_start=np.empty(num_queues + 1, np.int32),
        queue_size=np.empty(num_queues, np.int32),
        queue_item=np.empty(num_tasks, np.int32),
        chain_start=np.empty(num_queues + 1, np.int32),
        chain=np.empty(num_tasks, np.int32),
        heap_time=np.empty(4 * num_tasks + 64),
        heap_item=np.empty(4 * num_tasks + 64, np.int32),
        alive=np.empty(max(num_buffers, 1), np.int32),
    )


@nb.njit(cache=True, nogil=True)
def price_kernel(tape: Tape, prices: Prices, seconds: FloatArray) -> None:
    """Seconds of every task on a tape."""
    for task in range(tape.count[0]):
        kind = tape.kind[task]
        if kind >= FIRST_LINK_KIND:
            channel = tape.channel[task]
            seconds[task] = (
                prices.channel_latency_s[channel]
                + tape.num_bytes[task] * prices.channel_s_per_byte[channel]
            )
            continue
        device_type = prices.type_of_device[tape.device[task]]
        if kind == _COMPUTE:
            seconds[task] = prices.op_seconds[device_type, tape.samples[task], tape.subject[task]]
        elif kind == _UPDATE:
            seconds[task] = prices.update_seconds[device_type, tape.subject[task]]
        else:
            seconds[task] = (
                prices.copy_fixed_s[device_type]
                + tape.num_bytes[task] * prices.copy_s_per_byte[device_type]
            )


@nb.njit(cache=True, nogil=True)
def rank_kernel(tape: Tape, seconds: FloatArray, rank: FloatArray) -> None:
    """Upward rank: rank(o) = seconds(o) + max over successors of rank (HeteroG section 4.2)."""
    num_tasks = tape.count[0]
    rank[:num_tasks] = 0.0
    for task in range(num_tasks - 1, -1, -1):
        rank[task] += seconds[task]
        for read in range(tape.read_start[task], tape.read_start[task + 1]):
            maker = tape.buffer_maker[tape.read_buffer[read]]
            rank[maker] = max(rank[maker], rank[task])


@nb.njit(cache=True, nogil=True, inline="always")
def _before(schedule: Schedule, first: int, second: int) -> bool:
    """Whether task ``first`` goes before ``second``: by priority, then by number."""
    a = schedule.priority[first]
    b = schedule.priority[second]
    return a < b or (a == b and first < second)


@nb.njit(cache=True, nogil=True)
def _push(schedule: Schedule, queue: int, task: int) -> None:
    """Put a ready task into its queue (a binary heap by priority)."""
    base = schedule.queue_start[queue]
    position = schedule.queue_size[queue]
    schedule.queue_size[queue] = position + 1
    items = schedule.queue_item
    while position > 0:
        above = (position - 1) >> 1
        if not _before(schedule, task, items[base + above]):
            break
        items[base + position] = items[base + above]
        position = above
    items[base + position] = task


@nb.njit(cache=True, nogil=True)
def _pop(schedule: Schedule, queue: int) -> int:
    """Take the first task of a queue."""
    base = schedule.queue_start[queue]
    items = schedule.queue_item
    first = items[base]
    size = schedule.queue_size[queue] - 1
    schedule.queue_size[queue] = size
    task = items[base + size]
    position = 0
    while True:
        below = 2 * position + 1
        if below >= size:
            break
        if below + 1 < size and _before(schedule, items[base + below + 1], items[base + below]):
            below += 1
        if not _before(schedule, items[base + below], task):
            break
        items[base + position] = items[base + below]
        position = below
    if size > 0:
        items[base + position] = task
    return int(first)


@nb.njit(cache=True, nogil=True)
def _push_event(schedule: Schedule, size: int, time: float, item: int) -> int:
    """Add an event; returns the new number of events."""
    times, items = schedule.heap_time, schedule.heap_item
    position = size
    while position > 0:
        above = (position - 1) >> 1
        if times[above] < time or (times[above] == time and items[above] <= item):
            break
        times[position] = times[above]
        items[position] = items[above]
        position = above
    times[position] = time
    items[position] = item
    return size + 1


@nb.njit(cache=True, nogil=True)
def _pop_event(schedule: Schedule, size: int) -> int:
    """Remove the first event; returns the new number of events."""
    times, items = schedule.heap_time, schedule.heap_item
    size -= 1
    time, item = times[size], items[size]
    position = 0
    while True:
        below = 2 * position + 1
        if below >= size:
            break
        right = below + 1
        if right < size and (
            times[right] < times[below]
            or (times[right] == times[below] and items[right] < items[below])
        ):
            below = right
        if time < times[below] or (time == times[below] and item <= items[below]):
            break
        times[position] = times[below]
        items[position] = items[below]
        position = below
    times[position] = time
    items[position] = item
    return size


@nb.njit(cache=True, nogil=True)
def _prepare(tape: Tape, prices: Prices, schedule: Schedule, num_devices: int) -> None:
    """Successor lists, room for the queues, and the chain of each device."""
    num_tasks = tape.count[0]
    starts = schedule.successor_start
    starts[: num_tasks + 2] = 0
    for task in range(num_tasks):
        begin, end = tape.read_start[task], tape.read_start[task + 1]
        schedule.waiting_for[task] = end - begin
        for read in range(begin, end):
            starts[tape.buffer_maker[tape.read_buffer[read]] + 2] += 1
    for task in range(num_tasks):
        starts[task + 2] += starts[task + 1]
    for task in range(num_tasks):
        for read in range(tape.read_start[task], tape.read_start[task + 1]):
            maker = tape.buffer_maker[tape.read_buffer[read]]
            schedule.successor[starts[maker + 1]] = task
            starts[maker + 1] += 1
    # Queue numbers: links first, then one per device for its free tasks.
    num_queues = prices.num_queues + num_devices
    schedule.queue_size[:num_queues] = 0
    schedule.chain_start[: num_devices + 1] = 0
    for task in range(num_tasks):
        kind = tape.kind[task]
        if kind >= FIRST_LINK_KIND:
            schedule.queue_size[prices.channel_queue[tape.channel[task]]] += 1
        elif kind >= FIRST_FREE_KIND:
            schedule.queue_size[prices.num_queues + tape.device[task]] += 1
        else:
            schedule.chain_start[tape.device[task] + 1] += 1
    total = 0
    for queue in range(num_queues):
        schedule.queue_start[queue] = total
        total += schedule.queue_size[queue]
        schedule.queue_size[queue] = 0
    for device in range(num_devices):
        schedule.chain_start[device + 1] += schedule.chain_start[device]
    filled = np.zeros(num_devices, np.int32)
    for task in range(num_tasks):
        if tape.kind[task] < FIRST_FREE_KIND:
            device = tape.device[task]
            schedule.chain[schedule.chain_start[device] + filled[device]] = task
            filled[device] += 1


@nb.njit(cache=True, nogil=True)
def simulate_kernel(
    tape: Tape, prices: Prices, schedule: Schedule, num_devices: int, order: int
) -> tuple[float, int]:
    """Run a priced program; returns (time of the last finish, number of finished tasks).

    ``schedule.start``, ``finish`` and ``events`` hold the details afterwards. Fewer finished tasks
    than there are means that the program cannot run: a bug in whoever made it.
    """
    _prepare(tape, prices, schedule, num_devices)
    num_tasks = tape.count[0]
    words = prices.gate.shape[1]
    if order == 1:
        rank_kernel(tape, schedule.seconds, schedule.priority)
        schedule.priority[:num_tasks] *= -1.0
    elif order == 2:
        for task in range(num_tasks):
            schedule.priority[task] = task
    num_link_queues = prices.num_queues
    busy = np.zeros(words, np.uint64)
    free_at = np.zeros(prices.num_resources)
    active = np.empty(num_link_queues, np.int32)  # link queues with waiting tasks
    num_active = 0
    idle = np.ones(num_devices, np.bool_)
    position = schedule.chain_start[:num_devices].copy()
    touched = np.empty(num_devices, np.int32)  # devices to look at
    is_touched = np.zeros(num_devices, np.bool_)
    num_touched = 0
    num_heap = 0
    num_events = 0
    done = 0
    now = 0.0
    links_changed = False
    # Tasks that just got ready, handled like successors of a task that has just finished.
    fresh = np.empty(num_tasks, np.int32)
    num_fresh = 0
    for task in range(num_tasks):
        if schedule.waiting_for[task] == 0:
            fresh[num_fresh] = task
            num_fresh += 1
    while True:
        for index in range(num_fresh):
            task = fresh[index]
            kind = tape.kind[task]
            if order == 0:
                schedule.priority[task] = now
            if kind >= FIRST_LINK_KIND:
                queue = prices.channel_queue[tape.channel[task]]
                if schedule.queue_size[queue] == 0:
                    active[num_active] = queue
                    num_active += 1
                _push(schedule, queue, task)
                links_changed = True
            else:
                device = tape.device[task]
                if kind >= FIRST_FREE_KIND:
                    _push(schedule, num_link_queues + device, task)
                if not is_touched[device]:
                    is_touched[device] = True
                    touched[num_touched] = device
                    num_touched += 1
        num_fresh = 0
        # Compute streams.
        for index in range(num_touched):
            device = touched[index]
            is_touched[device] = False
            if not idle[device]:
                continue
            task = -1
            if position[device] < schedule.chain_start[device + 1]:
                head = schedule.chain[position[device]]
                if schedule.waiting_for[head] == 0:
                    task = head
                    position[device] += 1
            if task < 0 and schedule.queue_size[num_link_queues + device] > 0:
                task = _pop(schedule, num_link_queues + device)
            if task >= 0:
                idle[device] = False
                schedule.start[task] = now
                schedule.events[num_events] = 2 * task
                num_events += 1
                num_heap = _push_event(schedule, num_heap, now + schedule.seconds[task], 2 * task)
        num_touched = 0
        # Links: start the best head that may start, until none may.
        while links_changed and num_active > 0:
            best = -1
            best_slot = -1
            for slot in range(num_active):
                queue = active[slot]
                task = schedule.queue_item[schedule.queue_start[queue]]
                if best >= 0 and not _before(schedule, task, best):
                    continue
                channel = tape.channel[task]
                blocked = False
                for word in range(words):
                    if prices.gate[channel, word] & busy[word]:
                        blocked = True
                        break
                if not blocked:
                    best = task
                    best_slot = slot
            if best < 0:
                break
            queue = active[best_slot]
            _pop(schedule, queue)
            if schedule.queue_size[queue] == 0:
                num_active -= 1
                active[best_slot] = active[num_active]
            channel = tape.channel[best]
            end = now + schedule.seconds[best]
            payload = tape.num_bytes[best]
            latency = prices.channel_latency_s[channel]
            for entry in range(prices.resource_start[channel], prices.resource_start[channel + 1]):
                resource = prices.resource[entry]
                held = payload * prices.resource_s_per_byte[entry]
                if held > 0.0:
                    until = max(free_at[resource], now) + held
                    end = max(end, until + latency)
                    if prices.channel_is_collective[channel] and (
                        prices.gate[channel, resource // 64] >> np.uint64(resource % 64)
                    ) & np.uint64(1):
                        until += latency
                    free_at[resource] = until
                    busy[resource // 64] |= np.uint64(1) << np.uint64(resource % 64)
            # Links that come free before the end wake the queues once each.
            last_wake = end
            for entry in range(prices.resource_start[channel], prices.resource_start[channel + 1]):
                until = free_at[prices.resource[entry]]
                if until < end and until > now and until != last_wake:
                    num_heap = _push_event(schedule, num_heap, until, -1 - channel)
                    last_wake = until
            schedule.start[best] = now
            schedule.events[num_events] = 2 * best
            num_events += 1
            num_heap = _push_event(schedule, num_heap, end, 2 * best)
        links_changed = False
        if num_heap == 0:
            break
        now = schedule.heap_time[0]
        while num_heap > 0 and schedule.heap_time[0] == now:
            item = schedule.heap_item[0]
            num_heap = _pop_event(schedule, num_heap)
            if item < 0:
                links_changed = True
                _release(prices, -1 - item, now, free_at, busy)
                continue
            task = item >> 1
            schedule.finish[task] = now
            schedule.events[num_events] = item + 1
            num_events += 1
            done += 1
            if tape.kind[task] >= FIRST_LINK_KIND:
                channel = tape.channel[task]
                links_changed = True
                _release(prices, channel, now, free_at, busy)
            else:
                device = tape.device[task]
                idle[device] = True
                if not is_touched[device]:
                    is_touched[device] = True
                    touched[num_touched] = device
                    num_touched += 1
            for edge in range(schedule.successor_start[task], schedule.successor_start[task + 1]):
                reader = schedule.successor[edge]
                schedule.waiting_for[reader] -= 1
                if schedule.waiting_for[reader] == 0:
                    fresh[num_fresh] = reader
                    num_fresh += 1
    return now, done


@nb.njit(cache=True, nogil=True)
def _release(
    prices: Prices, channel: int, now: float, free_at: FloatArray, busy: npt.NDArray[np.uint64]
) -> None:
    """Mark the links of a channel that have nothing left to do as free."""
    for entry in range(prices.resource_start[channel], prices.resource_start[channel + 1]):
        resource = prices.resource[entry]
        if free_at[resource] <= now:
            busy[resource // 64] &= ~(np.uint64(1) << np.uint64(resource % 64))


@nb.njit(cache=True, nogil=True)
def memory_kernel(tape: Tape, schedule: Schedule, resident: FloatArray, peak: FloatArray) -> None:
    """Peak bytes of each device: a buffer lives from its maker's start to its last reader's end."""
    num_tasks = tape.count[0]
    num_buffers = tape.count[1]
    alive = schedule.alive
    alive[:num_buffers] = 0
    for read in range(tape.count[2]):
        alive[tape.read_buffer[read]] += 1
    live = resident.copy()
    peak[:] = live
    for index in range(2 * num_tasks):
        event = schedule.events[index]
        task = event >> 1
        if event & 1 == 0:
            for buffer in range(tape.buffer_start[task], tape.buffer_start[task + 1]):
                device = tape.buffer_device[buffer]
                if device >= 0:
                    live[device] += tape.buffer_bytes[buffer]
                    peak[device] = max(peak[device], live[device])
            continue
        for buffer in range(tape.buffer_start[task], tape.buffer_start[task + 1]):
            if alive[buffer] == 0 and tape.buffer_device[buffer] >= 0:
                live[tape.buffer_device[buffer]] -= tape.buffer_bytes[buffer]
        for read in range(tape.read_start[task], tape.read_start[task + 1]):
            buffer = tape.read_buffer[read]
            alive[buffer] -= 1
            if alive[buffer] == 0 and tape.buffer_device[buffer] >= 0:
                live[tape.buffer_device[buffer]] -= tape.buffer_bytes[buffer]


@nb.njit(cache=True, nogil=True)
def evaluate_kernel(
    tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape, prices: Prices,
    schedule: Schedule, order: int, resident: FloatArray, peak: FloatArray,
) -> tuple[float, int]:  # fmt: skip
    """Lower, price, simulate and account memory in one call.

    Returns:
        (seconds, finished tasks); (-1, 0) if the tape and (-2, 0) if the schedule is too short.
    """
    if not lower_kernel(tables, choice, scratch, tape):
        return -1.0, 0
    if (
        tape.count[0] > len(schedule.seconds)
        or tape.count[2] > len(schedule.successor)
        or tape.count[1] > len(schedule.alive)
    ):
        return -2.0, 0
    price_kernel(tape, prices, schedule.seconds)
    num_devices = choice.member.shape[1]
    seconds, done = simulate_kernel(tape, prices, schedule, num_devices, order)
    memory_kernel(tape, schedule, resident, peak)
    return seconds, done
