"""The engine: discrete events over a program's tasks, fast enough to sit inside a search.

Rules, also those of the slow reference in the tests:

- A task may start when the makers of all buffers it reads are done.
- A device runs one compute task at a time. The ops of a *turn* (by default a micro-batch) run in
  program order, as kernels on one CUDA stream do. While the next op of an earlier turn is not
  ready, a later turn goes on, so a chain of devices works as a pipeline. If a strategy states
  turns (``lowering.tape``), they run strictly in order. *Free* tasks (sums and updates) run by
  priority whenever no next op is ready.
- Transfers wait in one queue per set of links, collectives in one per communicator (the device
  set), by priority. The head of a queue starts when the links of its gate are free, the best head
  over all queues first. A start loads every link of the channel for the payload's bytes over that
  link's rate, behind the load that the link still has. A collective also holds its gate for its
  latency: its many small steps follow one another on the same links, while the latency of a
  transfer overlaps with the next transfer. And it holds its communicator from its start to its
  end: a reduce-scatter and an all-gather over the same devices take turns, as the operations of
  one process group do.
- Communication slows compute (*drag*): every byte takes seconds of compute from the members
  (threads that move bytes share a CPU with kernels; NCCL takes multiprocessors), spread evenly
  from the operation's start to its end. If an op already runs when communication starts, the next
  op on its device pays for its loss.
- Compute slows communication: an operation that starts while a member runs an op has a longer
  latency.
- If sends block (``Cluster.sends``), a device starts no task while a value that it sends is under
  way: from when it is made until it has arrived.

Priority is the order of getting ready (``fifo``), the upward rank (``rank``: the task's seconds
plus the longest path to the end, HeteroG section 4.2), or program order (``program``).
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from heterog.errors import StrategyError
from heterog.lowering.kernels import helper, kernel
from heterog.lowering.program import (
    FIRST_FREE_KIND,
    FIRST_LINK_KIND,
    LAST_OP_KIND,
    FloatArray,
    IntArray,
    TaskKind,
)
from heterog.lowering.tape import IN_TURN, NUM_TASKS, Tape
from heterog.pricing.cost_model import ChannelPrices, Prices
from heterog.simulator.heaps import before, pop_event, push_event, remove_first, sift_up
from heterog.simulator.timings import Timings, Workspace, make_workspace

GIVEN_UP = -1
"""Returned as the number of finished tasks if the end is sure to come after the limit."""


class Order(IntEnum):
    """The order of waiting tasks."""

    FIFO = 0
    RANK = 1
    PROGRAM = 2


@helper
def latency_of(channels: ChannelPrices, channel: int, payload: float) -> float:
    """Seconds of an operation before its bytes move at full rate; see ``ChannelSeconds``."""
    fill: float = payload * channels.fill_s_per_byte[channel]
    latency: float = channels.latency_s[channel]
    return latency + min(fill, float(channels.fill_s[channel]))


@kernel
def price_kernel(tape: Tape, prices: Prices, seconds: FloatArray) -> None:
    """Compute the seconds of every task on a tape."""
    for number in range(tape.counts[NUM_TASKS]):
        task = tape.tasks[number]
        if task.kind >= FIRST_LINK_KIND:
            channel = task.channel
            seconds[number] = (
                latency_of(prices.channels, channel, task.num_bytes)
                + task.num_bytes * prices.channels.s_per_byte[channel]
            )
            continue
        device_type = prices.type_of_device[task.device]
        if task.kind <= LAST_OP_KIND:
            # A remade op has no entry in the row: its work depends only on the samples.
            if prices.has_rule[task.subject] and task.kind != TaskKind.REMAKE:
                row = prices.ruled_row[task.subject]
                work = prices.ruled_number[row, task.micro, task.device]
                seconds[number] = prices.ruled_seconds[work, task.subject]
            else:
                seconds[number] = prices.op_seconds[device_type, task.samples, task.subject]
        elif task.kind == TaskKind.UPDATE:
            whole = prices.update_seconds[device_type, task.subject]
            if task.num_bytes > 0.0:  # the update of a slice
                whole *= task.num_bytes / prices.parameter_bytes[task.subject]
            seconds[number] = whole
        else:
            seconds[number] = (
                prices.copy_fixed_s[device_type]
                + task.num_bytes * prices.copy_s_per_byte[device_type]
            )


@helper
def _rank_tasks(tape: Tape, seconds: FloatArray, rank: FloatArray) -> None:
    """Upward rank: rank(o) = seconds(o) + max over successors of rank (HeteroG section 4.2)."""
    num_tasks = tape.counts[NUM_TASKS]
    rank[:num_tasks] = 0.0
    for task in range(num_tasks - 1, -1, -1):
        rank[task] += seconds[task]
        for read in range(tape.tasks[task].read_start, tape.tasks[task + 1].read_start):
            maker = tape.buffers[tape.reads[read]].maker
            rank[maker] = max(rank[maker], rank[task])


@helper
def _prepare(
    tape: Tape, prices: Prices, timings: Timings, work: Workspace, num_devices: int
) -> None:
    """Fill the successor lists, the segments of the queues, and the chains.

    Chain ``device * num_turns + turn`` holds the ops of one turn of one device. Queues of links
    come first, then a queue per device for its free tasks.
    """
    num_tasks = tape.counts[NUM_TASKS]
    num_queues = prices.channels.num_queues + num_devices
    starts, queue_size = timings.successor_start, timings.queue_size
    chain_of, chain_start, position = work.chain_of, work.chain_start, work.position
    num_turns = len(position) // num_devices
    starts[: num_tasks + 2] = 0
    queue_size[:num_queues] = 0
    _count(tape, prices, timings, work, num_turns)
    for task in range(num_tasks):
        starts[task + 2] += starts[task + 1]
    total = 0
    for queue in range(num_queues):
        timings.queue_start[queue] = total
        total += queue_size[queue]
        queue_size[queue] = 0
    for chain in range(num_devices * num_turns):
        chain_start[chain + 1] += chain_start[chain]
        position[chain] = chain_start[chain]
    for device in range(num_devices + 1):
        timings.sequence_start[device] = chain_start[device * num_turns]
    num_awaited = 0
    for task in range(num_tasks):
        chain = chain_of[task]
        if chain >= 0:
            timings.chain[position[chain]] = task
            position[chain] += 1
        for _ in range(timings.waiting_for[task]):
            maker = timings.awaited[num_awaited]
            num_awaited += 1
            timings.successor[starts[maker + 1]] = task
            starts[maker + 1] += 1
    for chain in range(num_devices * num_turns):
        position[chain] = chain_start[chain]
    for device in range(num_devices):
        work.ran[device] = timings.sequence_start[device]


@helper
def _count(tape: Tape, prices: Prices, timings: Timings, work: Workspace, num_turns: int) -> None:
    """Find the makers that each task waits for; count successors and sizes of queues and chains.

    An op does not wait for makers in its chain or, if turns run strictly in order, in earlier
    chains of its device: these are done whenever the op is next. Most reads are of this kind.
    """
    chain_of, chain_start = work.chain_of, work.chain_start
    starts, is_local = timings.successor_start, timings.is_local
    is_in_turn = tape.counts[IN_TURN] == 1
    num_awaited = 0
    for task in range(tape.counts[NUM_TASKS]):
        record = tape.tasks[task]
        chain, first_done = -1, 0  # makers in chains from ``first_done`` to ``chain`` are done
        if record.kind >= FIRST_LINK_KIND:
            timings.queue_size[prices.channels.queue[record.channel]] += 1
        elif record.kind >= FIRST_FREE_KIND:
            timings.queue_size[prices.channels.num_queues + record.device] += 1
        else:
            chain = record.device * num_turns + record.turn
            chain_start[chain + 1] += 1
            first_done = record.device * num_turns if is_in_turn else chain
        chain_of[task] = chain
        is_local[task] = chain >= 0
        already_awaited = num_awaited
        for read in range(record.read_start, tape.tasks[task + 1].read_start):
            maker = tape.buffers[tape.reads[read]].maker
            if first_done <= chain_of[maker] <= chain:
                continue
            timings.awaited[num_awaited] = maker
            num_awaited += 1
            starts[maker + 2] += 1
            if chain < 0 or tape.tasks[maker].device != record.device:
                is_local[maker] = False
        timings.waiting_for[task] = num_awaited - already_awaited


@helper
def touch(
    which: int, touched: IntArray, is_touched: npt.NDArray[np.bool_], num_touched: int
) -> int:
    """Add an item to a list unless it is there; returns the new length of the list."""
    if is_touched[which]:
        return num_touched
    is_touched[which] = True
    touched[num_touched] = which
    return num_touched + 1


@helper
def sender(channels: ChannelPrices, channel: int) -> int:
    """The source device of a transfer."""
    return int(channels.member[channels.member_start[channel]])


@helper
def _is_blocked(channels: ChannelPrices, channel: int, busy: npt.NDArray[np.uint64]) -> bool:
    """Whether a link of a channel's gate is in use; the gate is a part of the links it loads."""
    first, last = channels.resource_start[channel], channels.resource_start[channel + 1]
    by_word = last - first > len(busy)
    for entry in range(len(busy) if by_word else last - first):
        word = entry if by_word else channels.resource[first + entry] // 64
        if channels.gate[channel, word] & busy[word]:
            return True
    return False


@helper
def dragged(seconds: float, window: float, share: float) -> float:
    """Seconds that work takes when a fraction of the speed is lost for a window from now on."""
    if window <= 0.0 or share == 0.0:
        return seconds
    if seconds <= window * (1.0 - share):
        return seconds / (1.0 - share)
    return seconds + share * window


def simulate(
    tape: Tape, prices: Prices, timings: Timings, num_devices: int, order: int, limit_s: float
) -> tuple[float, int]:
    """Run a priced program; returns (time of the last finish, number of finished tasks).

    Afterwards ``timings.start``, ``finish`` and ``events`` hold the schedule. If not all tasks
    finish, the program cannot run: its turns wait for each other, or its maker has a bug.

    As soon as the end is sure to come after ``limit_s``, the run is given up: it returns (a lower
    bound of the end, ``GIVEN_UP``) and leaves a meaningless schedule.
    """
    work = make_workspace(tape, prices, num_devices)
    end, done = _simulate_kernel(tape, prices, timings, work, num_devices, order, limit_s)
    return float(end), int(done)


@kernel
def _simulate_kernel(
    tape: Tape,
    prices: Prices,
    timings: Timings,
    work: Workspace,
    num_devices: int,
    order: int,
    limit_s: float,
) -> tuple[float, int]:
    num_tasks = tape.counts[NUM_TASKS]
    left = work.left
    for task in range(num_tasks):
        if tape.tasks[task].kind < FIRST_LINK_KIND:
            left[tape.tasks[task].device] += timings.seconds[task]
    for device in range(num_devices):
        if left[device] > limit_s:
            return left[device], GIVEN_UP
    _prepare(tape, prices, timings, work, num_devices)
    chain_start, position = work.chain_start, work.position
    num_turns = len(position) // num_devices
    is_in_turn = tape.counts[IN_TURN] == 1
    # Ops run one by one if events elsewhere may change when a device's next op begins.
    channels = prices.channels
    steps_alone = channels.has_drag or prices.blocks_sends
    rank = timings.rank
    if order == 1 or limit_s < np.inf:
        _rank_tasks(tape, timings.seconds, rank)
    if order == 1:
        for task in range(num_tasks):
            timings.priority[task] = -rank[task]
    elif order == 2:
        for task in range(num_tasks):
            timings.priority[task] = task
    heap_time, heap_item = timings.heap_time, timings.heap_item
    priority, items = timings.priority, timings.queue_item
    num_link_queues = channels.num_queues
    busy, free_at = work.busy, work.free_at
    candidate, is_candidate, is_held = work.candidate, work.is_candidate, work.is_held
    num_candidates = 0
    idle, busy_until, op_until = work.idle, work.busy_until, work.op_until
    drag_until, drag_share, debt = work.drag_until, work.drag_share, work.debt
    first_open, ran, sending = work.first_open, work.ran, work.sending
    touched, is_touched = work.touched, work.is_touched
    num_touched = 0
    num_heap = 0
    num_events = 0
    done = 0
    now = 0.0
    fresh = work.fresh
    num_fresh = 0
    for task in range(num_tasks):
        if timings.waiting_for[task] == 0 and work.chain_of[task] < 0:
            fresh[num_fresh] = task
            num_fresh += 1
    for device in range(num_devices):
        num_touched = touch(device, touched, is_touched, num_touched)
    while True:
        for index in range(num_fresh):
            task = fresh[index]
            kind = tape.tasks[task].kind
            if order == 0:
                timings.priority[task] = now
            if kind >= FIRST_LINK_KIND:
                if kind == TaskKind.SEND and prices.blocks_sends:
                    sending[sender(channels, tape.tasks[task].channel)] += 1
                queue = channels.queue[tape.tasks[task].channel]
                base, size = timings.queue_start[queue], timings.queue_size[queue]
                sift_up(priority, items, base, size, task)
                timings.queue_size[queue] = size + 1
                if not is_candidate[queue]:
                    is_candidate[queue] = True
                    candidate[num_candidates] = queue
                    num_candidates += 1
            else:
                device = tape.tasks[task].device
                if kind >= FIRST_FREE_KIND:
                    queue = num_link_queues + device
                    base, size = timings.queue_start[queue], timings.queue_size[queue]
                    sift_up(priority, items, base, size, task)
                    timings.queue_size[queue] = size + 1
                num_touched = touch(device, touched, is_touched, num_touched)
        num_fresh = 0
        # Compute streams. Consecutive ops that are local to the device run as one event: no other
        # task depends on when exactly they end.
        for index in range(num_touched):
            device = touched[index]
            is_touched[device] = False
            if not idle[device] or sending[device] > 0:
                continue
            # The first turn whose next op is ready.
            picked = -1
            for turn in range(first_open[device], num_turns):
                chain = device * num_turns + turn
                if position[chain] == chain_start[chain + 1]:
                    first_open[device] += 1 if turn == first_open[device] else 0
                elif timings.waiting_for[timings.chain[position[chain]]] == 0:
                    picked = chain
                    break
                elif is_in_turn:
                    break
            if now + left[device] > limit_s:
                return now + left[device], GIVEN_UP
            time = now
            event = -1 - device
            while picked >= 0 and position[picked] < chain_start[picked + 1]:
                task = timings.chain[position[picked]]
                if timings.waiting_for[task] != 0:
                    break
                if time + rank[task] > limit_s:
                    return time + rank[task], GIVEN_UP
                left[device] -= timings.seconds[task]
                position[picked] += 1
                timings.sequence[ran[device]] = task
                ran[device] += 1
                timings.start[task] = time
                if channels.has_drag:
                    timings.seconds[task] = dragged(
                        timings.seconds[task] + debt[device],
                        drag_until[device] - time,
                        drag_share[device],
                    )
                    debt[device] = 0.0
                time += timings.seconds[task]
                timings.finish[task] = time
                if steps_alone or not timings.is_local[task]:
                    event = 2 * task
                    break
                done += 1
                for edge in range(
                    timings.successor_start[task], timings.successor_start[task + 1]
                ):
                    timings.waiting_for[timings.successor[edge]] -= 1
                if picked > device * num_turns + first_open[device]:
                    break  # an earlier turn may want the device next
            queue = num_link_queues + device
            if picked < 0 and timings.queue_size[queue] > 0:
                task = items[timings.queue_start[queue]]
                timings.queue_size[queue] -= 1
                remove_first(
                    priority, items, timings.queue_start[queue], timings.queue_size[queue]
                )
                if now + rank[task] > limit_s:
                    return now + rank[task], GIVEN_UP
                left[device] -= timings.seconds[task]
                timings.start[task] = now
                if channels.has_drag:
                    timings.seconds[task] = dragged(
                        timings.seconds[task] + debt[device],
                        drag_until[device] - now,
                        drag_share[device],
                    )
                    debt[device] = 0.0
                time = now + timings.seconds[task]
                timings.finish[task] = time
                timings.events[num_events] = 2 * task
                num_events += 1
                event = 2 * task
            if event >= 0 or picked >= 0:
                idle[device] = False
                busy_until[device] = time
                if picked >= 0:
                    op_until[device] = time
                num_heap = push_event(heap_time, heap_item, num_heap, time, event)
        num_touched = 0
        # Links: start the best head that is not blocked, until all are blocked.
        while num_candidates > 0:
            best = -1
            slot = 0
            while slot < num_candidates:
                queue = candidate[slot]
                blocked = timings.queue_size[queue] == 0 or is_held[queue]
                task = -1
                if not blocked:
                    task = timings.queue_item[timings.queue_start[queue]]
                    blocked = _is_blocked(channels, tape.tasks[task].channel, busy)
                if blocked:
                    is_candidate[queue] = False
                    num_candidates -= 1
                    candidate[slot] = candidate[num_candidates]
                    continue
                if best < 0 or before(priority, task, best):
                    best = task
                slot += 1
            if best < 0:
                break
            channel = tape.tasks[best].channel
            queue = channels.queue[channel]
            is_held[queue] = channels.is_collective[channel]
            timings.queue_size[queue] -= 1
            remove_first(priority, items, timings.queue_start[queue], timings.queue_size[queue])
            payload = tape.tasks[best].num_bytes
            latency = latency_of(channels, channel, payload)
            if channels.loaded_s[channel] > 0.0:
                for entry in range(
                    channels.member_start[channel], channels.member_start[channel + 1]
                ):
                    if op_until[channels.member[entry]] > now:
                        latency += channels.loaded_s[channel]
                        timings.seconds[best] += channels.loaded_s[channel]
                        break
            end = now + timings.seconds[best]
            for entry in range(
                channels.resource_start[channel], channels.resource_start[channel + 1]
            ):
                resource = channels.resource[entry]
                held = payload * channels.resource_s_per_byte[entry]
                if held > 0.0:
                    until = max(free_at[resource], now) + held
                    end = max(end, until + latency)
                    bit = np.uint64(1) << np.uint64(resource % 64)
                    if (
                        channels.is_collective[channel]
                        and channels.gate[channel, resource // 64] & bit
                    ):
                        until += latency
                    free_at[resource] = until
                    busy[resource // 64] |= bit
            if channels.has_drag:
                # Only bytes that move take compute time, not waits; it is spread over the whole.
                spread = 0.0
                if end > now:
                    spread = payload * channels.s_per_byte[channel] / (end - now)
                for entry in range(
                    channels.member_start[channel], channels.member_start[channel + 1]
                ):
                    device = channels.member[entry]
                    share = spread * channels.drag[channel, prices.type_of_device[device]]
                    if busy_until[device] > now:
                        debt[device] += channels.overhead_s[channel, prices.type_of_device[device]]
                    begin = max(now, drag_until[device])
                    debt[device] += share * max(min(end, busy_until[device]) - begin, 0.0)
                    if drag_until[device] > now:
                        share = max(share, drag_share[device])
                    drag_share[device] = share
                    drag_until[device] = max(end, drag_until[device])
            # Links that come free before the end wake the queues, once for each such time.
            last_wake = end
            for entry in range(
                channels.resource_start[channel], channels.resource_start[channel + 1]
            ):
                until = free_at[channels.resource[entry]]
                if until < end and until > now and until != last_wake:
                    num_heap = push_event(
                        heap_time, heap_item, num_heap, until, -1 - num_devices - channel
                    )
                    last_wake = until
            if end + rank[best] - timings.seconds[best] > limit_s:
                return end + rank[best] - timings.seconds[best], GIVEN_UP
            timings.start[best] = now
            timings.finish[best] = end
            timings.events[num_events] = 2 * best
            num_events += 1
            num_heap = push_event(heap_time, heap_item, num_heap, end, 2 * best)
        if num_heap == 0:
            break
        now = heap_time[0]
        while num_heap > 0 and heap_time[0] == now:
            item = heap_item[0]
            num_heap = pop_event(heap_time, heap_item, num_heap)
            task = item >> 1
            device = -1 - item
            released = -1
            if item >= 0:
                kind = tape.tasks[task].kind
                done += 1
                if kind >= FIRST_FREE_KIND:
                    timings.events[num_events] = item + 1
                    num_events += 1
                if kind >= FIRST_LINK_KIND:
                    released = tape.tasks[task].channel
                    if kind == TaskKind.SEND and prices.blocks_sends:
                        device = sender(channels, released)
                        sending[device] -= 1
                        num_touched = touch(device, touched, is_touched, num_touched)
                    if channels.is_collective[released]:
                        queue = channels.queue[released]
                        is_held[queue] = False
                        if timings.queue_size[queue] > 0 and not is_candidate[queue]:
                            is_candidate[queue] = True
                            candidate[num_candidates] = queue
                            num_candidates += 1
                device = tape.tasks[task].device
                for edge in range(
                    timings.successor_start[task], timings.successor_start[task + 1]
                ):
                    reader = timings.successor[edge]
                    timings.waiting_for[reader] -= 1
                    if timings.waiting_for[reader] == 0:
                        fresh[num_fresh] = reader
                        num_fresh += 1
            elif device >= num_devices:
                released = device - num_devices
            if released < 0:
                idle[device] = True
                num_touched = touch(device, touched, is_touched, num_touched)
                continue
            for entry in range(
                channels.resource_start[released], channels.resource_start[released + 1]
            ):
                resource = channels.resource[entry]
                bit = np.uint64(1) << np.uint64(resource % 64)
                if free_at[resource] <= now and busy[resource // 64] & bit:
                    busy[resource // 64] &= ~bit
                    for user in range(
                        channels.gated_start[resource], channels.gated_start[resource + 1]
                    ):
                        queue = channels.gated_queue[user]
                        if timings.queue_size[queue] > 0 and not is_candidate[queue]:
                            is_candidate[queue] = True
                            candidate[num_candidates] = queue
                            num_candidates += 1
    timings.events[num_events] = -1
    return now, done


def run_program(
    tape: Tape, prices: Prices, timings: Timings, num_devices: int, order: Order, limit_s: float
) -> tuple[float, bool]:
    """Price and simulate a lowered program.

    Returns:
        (seconds, True), or (a lower bound of them above the limit, False).

    Raises:
        StrategyError: turns of its schedule wait for each other.
    """
    # Pricing, simulation and memory are separate kernels: compiled as one they ran a third slower.
    price_kernel(tape, prices, timings.seconds)
    end, done = simulate(tape, prices, timings, num_devices, int(order), limit_s)
    num_tasks = int(tape.counts[NUM_TASKS])
    if tape.counts[IN_TURN] and done < num_tasks and done != GIVEN_UP:
        raise StrategyError(
            f"the turns of the schedule wait for each other: only {done} of {num_tasks} "
            "tasks can run; change their order, or state none."
        )
    assert done in (num_tasks, GIVEN_UP), f"only {done} of {num_tasks} tasks can run"
    return end, done != GIVEN_UP
