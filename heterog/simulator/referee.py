"""The referee: the order found by the engine, replayed under max-min fair sharing of links.

In the engine, what shares a link with others goes on as if all of them could use their parts.
This is fast and nearly right, but a search can learn to exploit it. The referee keeps the engine's
*order* and computes its time if flows share links as in a real network:

- A device runs its compute tasks one at a time in the order of their starts in the engine. So does
  a pair of devices (one way) with its transfers, and a communicator (all collectives over one
  device set).
- Payloads of different pairs and communicators flow at the same time. Flow t moves y_t bytes/s and
  loads link r for h_tr seconds per byte. Rates are max-min fair (in proportion to the weights of
  their channels, which are 1 unless a cost model says otherwise) subject to

      sum_t h_tr y_t <= 1    for every link r

  by progressive filling (Bertsekas & Gallager, Data Networks, section 6.5.2): all rates rise
  together until a link is full; its flows keep their rates, and the others rise further.
- Like ops of a team's members (``division``) take the same place in all their sequences: that of
  the one that starts last in the engine. Members whose messages take unequally long would run
  micro-batches in different orders, and wait for one another at each collective of the team.
- The seconds that compute and communication take from each other are those of the engine.
- If sends block, a compute task waits for every value that its device began to send before it in
  the engine. The order of starts keeps these waits free of circles.
- A collective spends its latency first, and holds its communicator from its start to its end. The
  seconds that a cost model charges beyond the most loaded link follow the bytes. The latency of a
  transfer also follows its bytes, while its pair is already free for the next transfer.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.lowering.choice import Choice
from heterog.lowering.kernels import by_reference, helper, kernel
from heterog.lowering.program import (
    FIRST_FREE_KIND,
    FIRST_LINK_KIND,
    LAST_OP_KIND,
    FloatArray,
    IntArray,
    TaskKind,
)
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import IN_TURN, NUM_TASKS, Tape
from heterog.pricing.cost_model import Prices
from heterog.simulator.engine import GIVEN_UP, sender, touch
from heterog.simulator.heaps import pop_event, push_event
from heterog.simulator.task_seconds import latency_of
from heterog.simulator.timings import Timings


class TaskOrder(NamedTuple):
    """The order in which the referee takes up tasks."""

    tasks: IntArray  # all tasks  # [num_tasks]
    ops: IntArray  # the ops of each device, as ``Timings.sequence``


def sequence_of(tables: GraphTables, choice: Choice, tape: Tape, timings: Timings) -> TaskOrder:
    """The order of the engine's last simulation, with teams together.

    Tasks are numbered topologically and none starts before its inputs are made, so a stable sort
    by start keeps every dependency: no two sequences can wait for each other.
    """
    start = timings.start[: int(tape.counts[NUM_TASKS])]
    # Stated turns are the same for all members.
    if choice.teams.size.max(initial=1) == 1 or tape.counts[IN_TURN]:
        return TaskOrder(np.argsort(start, kind="stable").astype(np.int32), timings.sequence)
    records = tape.tasks[: len(start)]
    num_devices, num_turns = choice.teams.size.shape[1], int(records["turn"].max(initial=0)) + 1
    # A fold leaves out devices, but teams keep their numbers.
    start, latest = start.copy(), np.empty(int(choice.teams.number.max()) + 1)
    exact = choice._replace(modes=())  # kernels get no modes
    _align_teams(tables, exact, tape, start, latest, np.zeros((num_devices, num_turns)))
    tasks = np.argsort(start, kind="stable").astype(np.int32)
    ops = tasks[records["kind"][tasks] < FIRST_FREE_KIND]
    return TaskOrder(tasks, ops[np.argsort(records["device"][ops], kind="stable")])


@kernel
def _align_teams(
    tables: GraphTables,
    choice: Choice,
    tape: Tape,
    start: FloatArray,
    latest: FloatArray,
    begun: FloatArray,
) -> None:
    """Let like ops of a team start together, the last first.

    No task starts before what it reads, nor before an earlier one of its device and turn. Working
    memory: the latest start in each team, and the last one of each device and turn.
    """
    first = 0
    while first < len(start):
        past, kind = first + 1, tape.tasks[first].kind
        # Lowering writes an op's tasks of one micro-batch one after another.
        while kind <= LAST_OP_KIND and past < len(start):
            if not _is_like(tape.tasks[first], tape.tasks[past]):
                break
            past += 1
        for task in range(first, past):
            record = tape.tasks[task]
            for read in range(record.read_start, tape.tasks[task + 1].read_start):
                start[task] = max(start[task], start[tape.buffers[tape.reads[read]].maker])
            if kind < FIRST_FREE_KIND:
                start[task] = max(start[task], begun[record.device, record.turn])
        group = tables.op_group[tape.tasks[first].subject] if kind <= LAST_OP_KIND else -1
        if group >= 0:  # each device makes its own constants
            team = choice.teams.number[choice.division[group]]
            latest[:] = 0.0
            for task in range(first, past):
                member = team[tape.tasks[task].device]
                latest[member] = max(latest[member], start[task])
            for task in range(first, past):
                start[task] = latest[team[tape.tasks[task].device]]
        if kind < FIRST_FREE_KIND:
            for task in range(first, past):
                begun[tape.tasks[task].device, tape.tasks[task].turn] = start[task]
        first = past


@helper
def _is_like(record: Any, other: Any) -> bool:
    """Whether two tasks are those of the same op and micro-batch on two devices."""
    return bool(
        record.kind == other.kind
        and record.subject == other.subject
        and record.micro == other.micro
    )


def replay(
    tape: Tape,
    prices: Prices,
    timings: Timings,
    num_devices: int,
    sequence: TaskOrder,
    limit_s: float = math.inf,
) -> tuple[float, int, Timings]:
    """Replay the engine's last simulation.

    Args:
        tape: The program.
        prices: Prices of its tasks.
        timings: The engine's result for this program.
        num_devices: Number of devices of the cluster.
        sequence: Order of the tasks.
        limit_s: Limit as for the engine, which must also have run with a limit.

    Returns:
        (time of the last finish, number of finished tasks, timings with the replayed starts,
        finishes and events), or (a lower bound, ``GIVEN_UP``, meaningless timings).
    """
    num_tasks = len(sequence.tasks)
    replayed = timings._replace(
        sequence=sequence.ops,
        start=np.empty(num_tasks),
        finish=np.empty(num_tasks),
        events=np.empty(2 * num_tasks + 1, np.int32),
    )
    end, done = replay_order(tape, prices, replayed, num_devices, sequence.tasks, limit_s)
    return end, done, replayed


@kernel
def is_linear_extension(tape: Tape, sequence: IntArray, position: IntArray) -> bool:
    """Whether every task comes after the makers of all buffers that it reads.

    ``position`` is working memory, one entry per task.
    """
    for index in range(len(sequence)):
        position[sequence[index]] = index
    for task in range(len(sequence)):
        for read in range(tape.tasks[task].read_start, tape.tasks[task + 1].read_start):
            if position[tape.buffers[tape.reads[read]].maker] >= position[task]:
                return False
    return True


@by_reference
class ReplayWorkspace(NamedTuple):
    """Working memory of a replay; made by ``replay_order``, because kernels allocate nothing."""

    # A server is a device's stream, a pair of devices or a communicator (numbered like its first
    # channel); each runs its part of the sequence in order.
    server: IntArray  # server of each task
    waiting_for: IntArray  # number of unfinished dependencies of each task
    payload: FloatArray
    loaded: FloatArray  # latency that busy members added to each task in the engine
    queue: IntArray  # the tasks of each server in their order
    over: IntArray  # tasks that have just ended
    position: IntArray  # position in ``queue`` of each server's next task, and one entry more
    last: IntArray  # end of each server's tasks in ``queue``
    is_free: npt.NDArray[np.bool_]
    touched: IntArray  # servers that may start a task now
    is_touched: npt.NDArray[np.bool_]
    left: FloatArray  # seconds of compute that each device still has to begin
    holds_back: IntArray  # the compute task that waits until a value is sent; -1 if none does
    upcoming: IntArray  # the next compute task of each device, while ``holds_back`` is filled
    largest_held: FloatArray  # largest seconds per byte of each channel's links
    # Active flows, at most one per server; ``unsent`` is as of the last change of the rate.
    flow: IntArray
    flow_channel: IntArray
    unsent: FloatArray
    since: FloatArray
    rate: FloatArray
    until: FloatArray
    fair: FloatArray
    through: IntArray  # tasks whose bytes have just arrived
    # One entry per link; see ``fair_rates``.
    room: FloatArray
    load: FloatArray
    users: IntArray
    links: IntArray


def _make_workspace(num_tasks: int, num_devices: int, prices: Prices) -> ReplayWorkspace:
    num_channels = len(prices.channels.latency_s)
    num_servers = num_devices + num_channels
    return ReplayWorkspace(
        server=np.empty(num_tasks, np.int32),
        waiting_for=np.empty(num_tasks, np.int32),
        payload=np.empty(num_tasks),
        loaded=np.zeros(num_tasks),
        queue=np.empty(num_tasks, np.int32),
        over=np.empty(num_tasks, np.int32),
        position=np.zeros(num_servers + 1, np.int32),
        last=np.empty(num_servers, np.int32),
        is_free=np.ones(num_servers, np.bool_),
        touched=np.empty(num_servers, np.int32),
        is_touched=np.zeros(num_servers, np.bool_),
        left=np.zeros(num_devices),
        holds_back=np.full(num_tasks, -1, np.int32),
        upcoming=np.full(num_devices, -1, np.int32),
        largest_held=np.zeros(num_channels),
        flow=np.empty(num_channels, np.int32),
        flow_channel=np.empty(num_channels, np.int32),
        unsent=np.empty(num_channels),
        since=np.empty(num_channels),
        rate=np.empty(num_channels),
        until=np.empty(num_channels),
        fair=np.empty(num_channels),
        through=np.empty(num_channels, np.int32),
        room=np.empty(prices.num_resources),
        load=np.empty(prices.num_resources),
        users=np.zeros(prices.num_resources, np.int32),
        links=np.empty(prices.num_resources, np.int32),
    )


def replay_order(
    tape: Tape,
    prices: Prices,
    timings: Timings,
    num_devices: int,
    sequence: IntArray,
    limit_s: float,
) -> tuple[float, int]:
    """Replay tasks in a given order; returns (time of the last finish, finished tasks).

    ``sequence`` is a linear extension of the dependencies. ``timings`` holds the successor lists
    and seconds of the engine's run, and upward ranks if there is a limit. The replay writes
    ``start``, ``finish`` and ``events``.
    """
    work = _make_workspace(len(sequence), num_devices, prices)
    assert is_linear_extension(tape, sequence, work.server)
    end, done = _replay_kernel(tape, prices, timings, work, sequence, limit_s)
    return float(end), int(done)


@kernel
def _replay_kernel(
    tape: Tape,
    prices: Prices,
    timings: Timings,
    work: ReplayWorkspace,
    sequence: IntArray,
    limit_s: float,
) -> tuple[float, int]:
    num_tasks = len(sequence)
    num_devices = len(work.left)
    channels = prices.channels
    num_channels = len(channels.latency_s)
    num_servers = num_devices + num_channels
    seconds, start, finish = timings.seconds, timings.start, timings.finish
    rank = timings.rank
    successor_start, successor = timings.successor_start, timings.successor
    events = timings.events
    resource_start, resource = channels.resource_start, channels.resource
    held = channels.resource_s_per_byte
    heap_time, heap_item = timings.heap_time, timings.heap_item
    server, waiting_for = work.server, work.waiting_for
    payload, loaded, left = work.payload, work.loaded, work.left
    position, last, queue = work.position, work.last, work.queue
    for task in range(num_tasks):
        record = tape.tasks[task]
        is_link = record.kind >= FIRST_LINK_KIND
        server[task] = record.device
        if is_link:
            server[task] = num_devices + channels.queue[record.channel]
        waiting_for[task] = 0
        payload[task] = record.num_bytes
        position[server[task] + 1] += 1
        if is_link and channels.loaded_s[record.channel] > 0.0:
            alone = latency_of(channels, record.channel, payload[task])
            alone += payload[task] * channels.s_per_byte[record.channel]
            loaded[task] = max(seconds[task] - alone, 0.0)
        elif not is_link:
            left[record.device] += seconds[task]
    for edge in range(successor_start[num_tasks]):
        waiting_for[successor[edge]] += 1
    for index in range(num_servers):
        position[index + 1] += position[index]
        last[index] = position[index + 1]
    for index in range(num_tasks):
        task = sequence[index]
        queue[position[server[task]]] = task
        position[server[task]] += 1
    for index in range(num_servers - 1, -1, -1):
        position[index + 1] = position[index]
    position[0] = 0
    holds_back = work.holds_back
    if prices.blocks_sends:
        _hold_back(tape, prices, sequence, waiting_for, holds_back, work.upcoming)
    largest_held = work.largest_held
    for channel in range(num_channels):
        for entry in range(resource_start[channel], resource_start[channel + 1]):
            largest_held[channel] = max(largest_held[channel], held[entry])
    is_free, touched, is_touched = work.is_free, work.touched, work.is_touched
    num_touched = 0
    for index in range(num_servers):
        if position[index] < last[index]:
            num_touched = touch(index, touched, is_touched, num_touched)
    flow, flow_channel, unsent = work.flow, work.flow_channel, work.unsent
    since, rate, until, fair = work.since, work.rate, work.until, work.fair
    num_flows = 0
    is_changed = False
    room, load, users, links = work.room, work.load, work.users, work.links
    through, over = work.through, work.over
    num_heap = 0
    num_events = 0
    done = 0
    now = 0.0
    while True:
        for index in range(num_touched):
            which = touched[index]
            is_touched[which] = False
            if not is_free[which] or position[which] == last[which]:
                continue
            task = queue[position[which]]
            if waiting_for[task] != 0:
                continue
            if now + rank[task] > limit_s:
                return now + rank[task], GIVEN_UP
            if which < num_devices:
                if now + left[which] > limit_s:
                    return now + left[which], GIVEN_UP
                left[which] -= seconds[task]
            position[which] += 1
            is_free[which] = False
            start[task] = now
            if tape.tasks[task].kind >= FIRST_FREE_KIND:
                events[num_events] = 2 * task
                num_events += 1
            # Heap items: 2 task + 1 when the bytes start to flow, 2 task at the end.
            channel = tape.tasks[task].channel
            if which < num_devices:
                when, item = now + seconds[task], 2 * task
            elif channels.is_collective[channel]:
                when = now + latency_of(channels, channel, payload[task]) + loaded[task]
                item = 2 * task + 1
            else:
                when, item = now, 2 * task + 1
            num_heap = push_event(heap_time, heap_item, num_heap, when, item)
        num_touched = 0
        # Handle events of this moment, which starts above may have added, else of the next one.
        if num_heap == 0 or heap_time[0] > now:
            if is_changed:
                fair_rates(
                    num_flows, flow_channel, channels.weight, resource_start, resource, held,
                    fair, room, load, users, links,
                )  # fmt: skip
                for index in range(num_flows):
                    if fair[index] != rate[index]:
                        unsent[index] -= rate[index] * (now - since[index])
                        since[index], rate[index] = now, fair[index]
                        until[index] = now + max(unsent[index], 0.0) / rate[index]
                is_changed = False
            upcoming = np.inf
            if num_heap > 0:
                upcoming = heap_time[0]
            for index in range(num_flows):
                upcoming = min(upcoming, until[index])
            if upcoming == np.inf:
                break
            now = upcoming
        num_over, num_through = 0, 0
        while num_heap > 0 and heap_time[0] == now:
            item = heap_item[0]
            num_heap = pop_event(heap_time, heap_item, num_heap)
            task = item >> 1
            channel = tape.tasks[task].channel
            if item & 1 == 0:
                over[num_over] = task
                num_over += 1
            elif payload[task] * largest_held[channel] > 0.0:
                flow[num_flows], flow_channel[num_flows] = task, channel
                unsent[num_flows], since[num_flows] = payload[task], now
                rate[num_flows], until[num_flows] = 0.0, np.inf
                num_flows += 1
                is_changed = True
            else:
                through[num_through] = task
                num_through += 1
        index = 0
        while index < num_flows:
            if until[index] > now:
                index += 1
                continue
            through[num_through] = flow[index]
            num_through += 1
            num_flows -= 1
            is_changed = True
            flow[index], flow_channel[index] = flow[num_flows], flow_channel[num_flows]
            unsent[index], since[index] = unsent[num_flows], since[num_flows]
            rate[index], until[index] = rate[num_flows], until[num_flows]
        for index in range(num_through):
            task = through[index]
            channel = tape.tasks[task].channel
            rest = payload[task] * (channels.s_per_byte[channel] - largest_held[channel])
            rest = max(rest, 0.0)
            if not channels.is_collective[channel]:
                rest += latency_of(channels, channel, payload[task]) + loaded[task]
            if rest > 0.0:
                num_heap = push_event(heap_time, heap_item, num_heap, now + rest, 2 * task)
            else:
                over[num_over] = task
                num_over += 1
            which = server[task]
            if not channels.is_collective[channel]:
                is_free[which] = True
                num_touched = touch(which, touched, is_touched, num_touched)
        for index in range(num_over):
            task = over[index]
            finish[task] = now
            done += 1
            if tape.tasks[task].kind >= FIRST_FREE_KIND:
                events[num_events] = 2 * task + 1
                num_events += 1
            which = server[task]
            if which < num_devices or channels.is_collective[tape.tasks[task].channel]:
                is_free[which] = True
                num_touched = touch(which, touched, is_touched, num_touched)
            if holds_back[task] >= 0:
                num_touched = _let_go(holds_back[task], work, num_touched)
            for edge in range(successor_start[task], successor_start[task + 1]):
                num_touched = _let_go(successor[edge], work, num_touched)
    events[num_events] = -1
    return now, done


@helper
def _let_go(reader: int, work: ReplayWorkspace, num_touched: int) -> int:
    """Count one dependency less of a task; returns the new number of touched servers."""
    work.waiting_for[reader] -= 1
    if work.waiting_for[reader] > 0:
        return num_touched
    return touch(work.server[reader], work.touched, work.is_touched, num_touched)


@helper
def _hold_back(
    tape: Tape,
    prices: Prices,
    sequence: IntArray,
    waiting_for: IntArray,
    holds_back: IntArray,
    upcoming: IntArray,
) -> None:
    """Make the next compute task of a device wait for each value that it sends.

    Args:
        tape: The program.
        prices: Prices, which name the source device of a transfer.
        sequence: Tasks in their order.
        waiting_for: Number of unfinished dependencies of each task; increased here.
        holds_back: Output: compute task that each send holds back.
        upcoming: Working memory, -1 for each device.
    """
    for index in range(len(sequence) - 1, -1, -1):
        task = sequence[index]
        kind = tape.tasks[task].kind
        if kind < FIRST_LINK_KIND:
            upcoming[tape.tasks[task].device] = task
        elif kind == TaskKind.SEND:
            reader = upcoming[sender(prices.channels, tape.tasks[task].channel)]
            if reader >= 0:
                holds_back[task] = reader
                waiting_for[reader] += 1


@helper
def fair_rates(
    num_flows: int,
    flow_channel: IntArray,
    weight: FloatArray,
    resource_start: IntArray,
    resource: IntArray,
    held: FloatArray,
    rate: FloatArray,
    room: FloatArray,
    load: FloatArray,
    users: IntArray,
    links: IntArray,
) -> None:
    """Weighted max-min fair payload rates of the active flows, by progressive filling.

    All rates rise together; each is its weight times a common level. A link is full at the level
    room / load, where ``room`` is what its stopped flows leave of it and ``load`` is the load of
    its rising flows per level. The link with the lowest such level fills up next and stops its
    flows.

    Args:
        num_flows: Number of active flows.
        flow_channel: Channel of each flow.
        weight: Weight of each channel.
        resource_start: First entry of each channel in the next two arrays.
        resource: Links that a channel loads.
        held: Seconds per payload byte for which a channel loads each of its links.
        rate: Output: bytes per second of each flow.
        room: Working memory, one entry per link.
        load: Working memory, one entry per link.
        users: Working memory, one entry per link, zeros before and after.
        links: Working memory, one entry per link.
    """
    num_links = 0
    for flow in range(num_flows):
        channel = flow_channel[flow]
        rate[flow] = 0.0
        for entry in range(resource_start[channel], resource_start[channel + 1]):
            link = resource[entry]
            if held[entry] > 0.0:
                if users[link] == 0:
                    links[num_links] = link
                    num_links += 1
                    room[link] = 1.0
                    load[link] = 0.0
                users[link] += 1
                load[link] += held[entry] * weight[channel]
    level = 0.0
    rising = num_flows
    while rising > 0:
        lowest = np.inf
        full = -1
        index = 0
        while index < num_links:
            link = links[index]
            if users[link] == 0:
                num_links -= 1
                links[index] = links[num_links]
                continue
            if room[link] < lowest * load[link]:
                lowest = room[link] / load[link]
                full = link
            index += 1
        # Levels only rise; rounding must not lower one.
        level = max(level, lowest)
        for flow in range(num_flows):
            if rate[flow] > 0.0:
                continue
            channel = flow_channel[flow]
            first, last = resource_start[channel], resource_start[channel + 1]
            for entry in range(first, last):
                if resource[entry] == full and held[entry] > 0.0:
                    rate[flow] = level * weight[channel]
            if rate[flow] > 0.0:
                rising -= 1
                for entry in range(first, last):
                    link = resource[entry]
                    if held[entry] > 0.0:
                        users[link] -= 1
                        load[link] -= held[entry] * weight[channel]
                        room[link] -= held[entry] * rate[flow]
