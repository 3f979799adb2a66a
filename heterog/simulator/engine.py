"""The engine: discrete events over a program's tasks, fast enough to sit inside a search.

Rules, also those of the slow reference in the tests:

- A task may start when the makers of all buffers it reads are done.
- A device runs one compute task at a time. The ops of a *turn* (by default a micro-batch) run in
  program order, as kernels on one CUDA stream do. While the next op of an earlier turn is not
  ready, a later turn goes on, so a chain of devices works as a pipeline. If a strategy states
  turns (``lowering.tape``), they run strictly in order. *Free* tasks (sums and updates) run by
  priority whenever no next op is ready.
- Transfers wait in one queue per pair of devices (one way), collectives in one per communicator
  (the device set), by priority. A queue serves one operation at a time: a transfer until its
  bytes are through (its latency overlaps with the next one), a collective to its end.
- An operation starts when it is the head of a free queue, and loads every link r of its channel
  for h_r = the payload's bytes over that link's rate; alone, its bytes take H = max h_r. A link
  has the load L_r = the sum of h_r / H of the operations whose bytes are under way, and all of
  them go on at 1 / L_r of their speed if L_r > 1. So the bytes of an operation that starts are
  through after H L_r on its slowest link r, or when that link has done all that it has to do by
  now if that is sooner. Then it is asked whether others have joined that link since; if so, the
  bytes that are left take their time at the present load. (Unlike in the referee, all flows have
  the same weight.)
- Communication slows compute (*drag*): every byte takes seconds of compute from the members
  (threads that move bytes share a CPU with kernels; NCCL takes multiprocessors), spread evenly
  from the operation's start to the end that is found there. If an op already runs when
  communication starts, the next op on its device pays for its loss.
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
from heterog.lowering.kernels import helper, inlined, kernel
from heterog.lowering.program import (
    FIRST_FREE_KIND,
    FIRST_LINK_KIND,
    IntArray,
    TaskKind,
)
from heterog.lowering.tape import IN_TURN, NUM_TASKS, Tape
from heterog.pricing.cost_model import ChannelPrices, Prices
from heterog.simulator.heaps import pop_event, push_event, remove_first, replace_event, sift_up
from heterog.simulator.successors import prepare, rank_tasks
from heterog.simulator.task_seconds import price_kernel
from heterog.simulator.timings import (
    NUM_AHEAD,
    NUM_CANDIDATES,
    NUM_DONE,
    NUM_EVENTS,
    NUM_FRESH,
    NUM_TOUCHED,
    Timings,
    Workspace,
    make_workspace,
)

GIVEN_UP = -1
"""Returned as the number of finished tasks if the end is sure to come after the limit."""


class Order(IntEnum):
    """The order of waiting tasks."""

    FIFO = 0
    RANK = 1
    PROGRAM = 2


# The same as plain numbers, for kernels.
FIFO, RANK, PROGRAM = (int(order) for order in Order)


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
    end, done = _simulate_kernel(tape, prices, timings, work, order, limit_s)
    return float(end), int(done)


@kernel
def _simulate_kernel(
    tape: Tape, prices: Prices, timings: Timings, work: Workspace, order: int, limit_s: float
) -> tuple[float, int]:
    num_devices = len(work.idle)
    num_tasks = tape.counts[NUM_TASKS]
    for task in range(num_tasks):
        if tape.tasks[task].kind < FIRST_LINK_KIND:
            work.left[tape.tasks[task].device] += timings.seconds[task]
    for device in range(num_devices):
        if work.left[device] > limit_s:
            return work.left[device], GIVEN_UP
    prepare(tape, prices, timings, work, num_devices)
    if order == RANK or limit_s < np.inf:
        rank_tasks(tape, timings.seconds, timings.rank)
    if order != FIFO:
        for task in range(num_tasks):
            timings.priority[task] = -timings.rank[task] if order == RANK else task
    for task in range(num_tasks):
        if timings.waiting_for[task] == 0 and work.chain_of[task] < 0:
            _add_fresh(work, task)
    for device in range(num_devices):
        _touch_device(work, device)
    now = 0.0
    while True:
        _queue_fresh(tape, prices, timings, work, order, now)
        bound = _start_devices(tape, prices, timings, work, now, limit_s)
        if bound <= limit_s:
            bound = _start_links(tape, prices, timings, work, now, limit_s)
        if bound > limit_s:
            return bound, GIVEN_UP
        if work.counts[NUM_AHEAD] == 0:
            break
        now = timings.heap_time[0]
        while work.counts[NUM_AHEAD] > 0 and timings.heap_time[0] == now:
            _end_first(tape, prices, timings, work, now)
    timings.events[work.counts[NUM_EVENTS]] = -1
    return now, work.counts[NUM_DONE]


@helper
def _add_fresh(work: Workspace, task: int) -> None:
    """Note that a task just got ready."""
    work.fresh[work.counts[NUM_FRESH]] = task
    work.counts[NUM_FRESH] += 1


@inlined
def _touch_device(work: Workspace, device: int) -> None:
    """Note that a device may start a task now."""
    work.counts[NUM_TOUCHED] = touch(
        device, work.touched, work.is_touched, work.counts[NUM_TOUCHED]
    )


@inlined
def _try_queue(timings: Timings, work: Workspace, queue: int) -> None:
    """Have the head of a queue of links start if there is one and the queue is free."""
    if timings.queue_size[queue] > 0 and not work.is_taken[queue]:
        work.candidate[work.counts[NUM_CANDIDATES]] = queue
        work.counts[NUM_CANDIDATES] += 1


@inlined
def _add_event(timings: Timings, work: Workspace, event: int) -> None:
    """Add to ``Timings.events``."""
    timings.events[work.counts[NUM_EVENTS]] = event
    work.counts[NUM_EVENTS] += 1


@inlined
def _end_later(timings: Timings, work: Workspace, time: float, item: int) -> None:
    """Add an item to the heap of what ends when; see ``_end_first`` for items."""
    work.counts[NUM_AHEAD] = push_event(
        timings.heap_time, timings.heap_item, work.counts[NUM_AHEAD], time, item
    )


@inlined
def _enqueue(timings: Timings, queue: int, task: int) -> None:
    size = timings.queue_size[queue]
    sift_up(timings.priority, timings.queue_item, timings.queue_start[queue], size, task)
    timings.queue_size[queue] = size + 1


@inlined
def _dequeue(timings: Timings, queue: int) -> int:
    """Remove the head of a queue; returns it."""
    base = timings.queue_start[queue]
    task = int(timings.queue_item[base])
    timings.queue_size[queue] -= 1
    remove_first(timings.priority, timings.queue_item, base, timings.queue_size[queue])
    return task


@helper
def _queue_fresh(
    tape: Tape, prices: Prices, timings: Timings, work: Workspace, order: int, now: float
) -> None:
    """Put the tasks that got ready into their queues; ops need none, they have their chains."""
    channels, tasks, fresh, priority = prices.channels, tape.tasks, work.fresh, timings.priority
    for index in range(work.counts[NUM_FRESH]):
        task = fresh[index]
        kind = tasks[task].kind
        if order == FIFO:
            priority[task] = now
        if kind >= FIRST_LINK_KIND:
            channel = tasks[task].channel
            if kind == TaskKind.SEND and prices.blocks_sends:
                work.sending[sender(channels, channel)] += 1
            queue = channels.queue[channel]
            _enqueue(timings, queue, task)
            if timings.queue_size[queue] == 1:  # else its turn is noted already
                _try_queue(timings, work, queue)
            continue
        device = tasks[task].device
        if kind >= FIRST_FREE_KIND:
            _enqueue(timings, len(channels.queue) + device, task)
        _touch_device(work, device)
    work.counts[NUM_FRESH] = 0


@inlined
def _start_devices(
    tape: Tape, prices: Prices, timings: Timings, work: Workspace, now: float, limit_s: float
) -> float:
    """Start what devices do next; returns a bound of the end if that is above the limit, or 0."""
    touched, is_touched, idle, left = work.touched, work.is_touched, work.idle, work.left
    for index in range(work.counts[NUM_TOUCHED]):
        device = touched[index]
        is_touched[device] = False
        if not idle[device] or work.sending[device] > 0:
            continue
        if now + left[device] > limit_s:
            return float(now + left[device])
        queue = len(prices.channels.queue) + device
        chain = _next_chain(tape, timings, work, device)
        if chain >= 0:
            bound, end, item = _run_ops(prices, timings, work, device, chain, now, limit_s)
            if bound > limit_s:
                return bound
            work.op_until[device] = end
        elif timings.queue_size[queue] > 0:
            task = _dequeue(timings, queue)
            if now + timings.rank[task] > limit_s:
                return float(now + timings.rank[task])
            end, item = _start_compute(prices, timings, work, device, task, now), 2 * task
            _add_event(timings, work, 2 * task)
        else:
            continue
        idle[device] = False
        work.busy_until[device] = end
        _end_later(timings, work, end, item)
    work.counts[NUM_TOUCHED] = 0
    return 0.0


@inlined
def _next_chain(tape: Tape, timings: Timings, work: Workspace, device: int) -> int:
    """The chain of a device's first turn whose next op is ready, or -1."""
    position, chain_start, first_open = work.position, work.chain_start, work.first_open
    for turn in range(first_open[device], work.num_turns):
        chain = device * work.num_turns + turn
        if position[chain] == chain_start[chain + 1]:
            if turn == first_open[device]:
                first_open[device] += 1
        elif timings.waiting_for[timings.chain[position[chain]]] == 0:
            return chain
        elif tape.counts[IN_TURN] == 1:
            break
    return -1


@inlined
def _run_ops(
    prices: Prices,
    timings: Timings,
    work: Workspace,
    device: int,
    chain: int,
    now: float,
    limit_s: float,
) -> tuple[float, float, int]:
    """Run the next ops of a chain as one event: up to one whose end others wait for.

    Returns:
        (a bound of the end if that is above the limit, or 0; when they end; item of the heap).
    """
    position, stop, waiting_for = work.position, work.chain_start[chain + 1], timings.waiting_for
    # Ops run one by one if events elsewhere may change when a device's next op begins.
    steps_alone = prices.channels.has_drag or prices.blocks_sends
    first_chain = device * work.num_turns + work.first_open[device]
    rank, sequence, successor = timings.rank, timings.sequence, timings.successor
    time, item = now, -1 - device
    first = place = position[chain]
    while place < stop:
        task = timings.chain[place]
        if waiting_for[task] != 0:
            break
        if time + rank[task] > limit_s:
            return float(time + rank[task]), time, 2 * task
        sequence[work.ran[device] + place - first] = task
        place += 1
        time = _start_compute(prices, timings, work, device, task, time)
        if steps_alone or not timings.is_local[task]:
            item = 2 * task
            break
        for edge in range(timings.successor_start[task], timings.successor_start[task + 1]):
            waiting_for[successor[edge]] -= 1
        if chain > first_chain:
            break  # an earlier turn may want the device next
    position[chain] = place
    work.ran[device] += place - first
    work.counts[NUM_DONE] += place - first - (1 if item >= 0 else 0)
    return 0.0, time, item


@inlined
def _start_compute(
    prices: Prices, timings: Timings, work: Workspace, device: int, task: int, time: float
) -> float:
    """Start a compute task; returns when it ends."""
    work.left[device] -= timings.seconds[task]
    timings.start[task] = time
    if prices.channels.has_drag:
        timings.seconds[task] = dragged(
            timings.seconds[task] + work.debt[device],
            work.drag_until[device] - time,
            work.drag_share[device],
        )
        work.debt[device] = 0.0
    end = float(time + timings.seconds[task])
    timings.finish[task] = end
    return end


@helper
def _start_links(
    tape: Tape, prices: Prices, timings: Timings, work: Workspace, now: float, limit_s: float
) -> float:
    """Start the heads of free queues together; returns as ``_start_devices`` does."""
    num_candidates = work.counts[NUM_CANDIDATES]
    work.counts[NUM_CANDIDATES] = 0
    for slot in range(num_candidates):
        task = timings.queue_item[timings.queue_start[work.candidate[slot]]]
        _load_links(tape, prices.channels, work, task, now)
    for slot in range(num_candidates):
        queue = work.candidate[slot]
        task = _dequeue(timings, queue)
        work.is_taken[queue] = True
        end = _start_operation(tape, prices, timings, work, task, now)
        bound = end + timings.rank[task] - timings.seconds[task]
        if bound > limit_s:
            return float(bound)
    return 0.0


@helper
def _serve(work: Workspace, resource: int, now: float) -> None:
    """Count what a link has done for each operation under way since its load changed."""
    if now > work.served_at[resource]:
        since = now - work.served_at[resource]
        work.served[resource] += since / max(work.load[resource], 1.0)
        work.served_at[resource] = now


@helper
def _load_links(
    tape: Tape, channels: ChannelPrices, work: Workspace, task: int, now: float
) -> None:
    """Load the links of an operation that starts now."""
    channel, payload = tape.tasks[task].channel, tape.tasks[task].num_bytes
    begin, end = channels.resource_start[channel], channels.resource_start[channel + 1]
    alone = 0.0
    for entry in range(begin, end):
        alone = max(alone, payload * channels.resource_s_per_byte[entry])
    work.alone[channels.queue[channel]] = alone
    for entry in range(begin, end):
        resource = channels.resource[entry]
        held = payload * channels.resource_s_per_byte[entry]
        if held > 0.0:
            _serve(work, resource, now)
            work.free_at[resource] = max(work.free_at[resource], now) + held
            work.load[resource] += held / alone


@helper
def _start_operation(
    tape: Tape, prices: Prices, timings: Timings, work: Workspace, task: int, now: float
) -> float:
    """Start an operation whose links are loaded; returns when it ends unless others join."""
    channels, channel = prices.channels, tape.tasks[task].channel
    payload = tape.tasks[task].num_bytes
    if channels.loaded_s[channel] > 0.0:
        for entry in range(channels.member_start[channel], channels.member_start[channel + 1]):
            if work.op_until[channels.member[entry]] > now:
                timings.seconds[task] += channels.loaded_s[channel]
                break
    queue = channels.queue[channel]
    work.slowest[queue], work.due[queue] = 0, 0.0
    through, alone = now, work.alone[queue]
    for entry in range(channels.resource_start[channel], channels.resource_start[channel + 1]):
        resource = channels.resource[entry]
        if payload * channels.resource_s_per_byte[entry] > 0.0:
            at_load = now + alone * max(work.load[resource], 1.0)
            if min(work.free_at[resource], at_load) > through:
                through = min(work.free_at[resource], at_load)
                work.slowest[queue] = resource
                work.due[queue] = work.served[resource] + alone
    end = through + _rest(tape, channels, timings, work, task)
    if channels.has_drag:
        # Only bytes that move take compute time, not waits; it is spread over the whole.
        spread = 0.0
        if end > now:
            spread = payload * channels.s_per_byte[channel] / (end - now)
        _drag_members(prices, work, channel, spread, now, end)
    timings.start[task] = now
    _add_event(timings, work, 2 * task)
    _end_later(timings, work, through, 2 * task + 1)
    return float(end)


@helper
def _rest(
    tape: Tape, channels: ChannelPrices, timings: Timings, work: Workspace, task: int
) -> float:
    """Seconds of an operation besides those of its bytes on its most loaded link."""
    channel = tape.tasks[task].channel
    moving = tape.tasks[task].num_bytes * channels.s_per_byte[channel]
    return float(timings.seconds[task] - min(moving, work.alone[channels.queue[channel]]))


@helper
def _end_bytes(
    tape: Tape, prices: Prices, timings: Timings, work: Workspace, task: int, now: float
) -> tuple[float, int]:
    """Let an operation go whose bytes are through, or find when they are if others have joined.

    Returns:
        (time, item of the heap) of what follows.
    """
    channels, channel = prices.channels, tape.tasks[task].channel
    queue, payload = channels.queue[channel], tape.tasks[task].num_bytes
    alone = work.alone[queue]
    if alone > 0.0:
        slowest = work.slowest[queue]
        _serve(work, slowest, now)
        left = (work.due[queue] - work.served[slowest]) * max(work.load[slowest], 1.0)
        left = min(left, work.free_at[slowest] - now)
        # What is left by rounding, beside all that the link has served, would never be served.
        if left > 1e-9 * alone + 1e-12 * now:
            return float(now + left), 2 * task + 1
    for entry in range(channels.resource_start[channel], channels.resource_start[channel + 1]):
        held = payload * channels.resource_s_per_byte[entry]
        if held > 0.0:
            _serve(work, channels.resource[entry], now)
            work.load[channels.resource[entry]] -= held / alone
    if not channels.is_collective[channel]:
        work.is_taken[queue] = False
        _try_queue(timings, work, queue)
    timings.finish[task] = now + _rest(tape, channels, timings, work, task)
    return float(timings.finish[task]), 2 * task


@helper
def _drag_members(
    prices: Prices, work: Workspace, channel: int, spread: float, now: float, end: float
) -> None:
    """Slow the members' compute down from now to the end of an operation (drag)."""
    channels = prices.channels
    for entry in range(channels.member_start[channel], channels.member_start[channel + 1]):
        device = channels.member[entry]
        kind = prices.type_of_device[device]
        share = spread * channels.drag[channel, kind]
        if work.busy_until[device] > now:
            work.debt[device] += channels.overhead_s[channel, kind]
        begin = max(now, work.drag_until[device])
        work.debt[device] += share * max(min(end, work.busy_until[device]) - begin, 0.0)
        if work.drag_until[device] > now:
            share = max(share, work.drag_share[device])
        work.drag_share[device] = share
        work.drag_until[device] = max(end, work.drag_until[device])


@inlined
def _end_first(tape: Tape, prices: Prices, timings: Timings, work: Workspace, now: float) -> None:
    """Take the first item from the heap, and let what it ends set others free.

    Item ``2 * task`` is a task's end, ``2 * task + 1`` that of the bytes of an operation, and
    ``-1 - device`` that of ops nobody else waits for.
    """
    times, items, size = timings.heap_time, timings.heap_item, work.counts[NUM_AHEAD]
    item = int(items[0])
    if item >= 0 and item & 1:
        time, following = _end_bytes(tape, prices, timings, work, item >> 1, now)
        replace_event(times, items, size, time, following)
        return
    work.counts[NUM_AHEAD] = pop_event(times, items, size)
    device = -1 - item
    if item >= 0:
        _end_task(tape, prices, timings, work, item >> 1)
        if tape.tasks[item >> 1].kind >= FIRST_LINK_KIND:
            return
        device = tape.tasks[item >> 1].device
    work.idle[device] = True
    _touch_device(work, device)


@inlined
def _end_task(tape: Tape, prices: Prices, timings: Timings, work: Workspace, task: int) -> None:
    """Count a task as done, let go of what it held, and note who got ready."""
    channels = prices.channels
    kind, channel = tape.tasks[task].kind, tape.tasks[task].channel
    work.counts[NUM_DONE] += 1
    if kind >= FIRST_FREE_KIND:
        _add_event(timings, work, 2 * task + 1)
    if kind == TaskKind.SEND and prices.blocks_sends:
        device = sender(channels, channel)
        work.sending[device] -= 1
        _touch_device(work, device)
    if kind >= FIRST_LINK_KIND and channels.is_collective[channel]:
        work.is_taken[channels.queue[channel]] = False
        _try_queue(timings, work, channels.queue[channel])
    waiting_for, successor, fresh = timings.waiting_for, timings.successor, work.fresh
    num_fresh = work.counts[NUM_FRESH]
    for edge in range(timings.successor_start[task], timings.successor_start[task + 1]):
        reader = successor[edge]
        waiting_for[reader] -= 1
        if waiting_for[reader] == 0:
            fresh[num_fresh] = reader
            num_fresh += 1
    work.counts[NUM_FRESH] = num_fresh


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
