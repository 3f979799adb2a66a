"""Slow and obvious references of the engine, the referee and the memory, to compare with.

Everything is a dictionary or a list of plain numbers, and every step looks at everything. Prices
come straight from the cost model.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from heterog.cluster import Cluster
from heterog.cluster.topology import Sends
from heterog.graph.axis_plan import axis_plan
from heterog.graph.op_costs import Copies
from heterog.graph.op_graph import OpGraph
from heterog.lowering.channels import ChannelKind
from heterog.lowering.program import (
    FIRST_FREE_KIND,
    FIRST_LINK_KIND,
    LAST_OP_KIND,
    Program,
    TaskKind,
)
from heterog.lowering.tables import graph_tables
from heterog.pricing.cost_model import ChannelSeconds, CostModel
from heterog.pricing.device_models.fusion import ResultMemory
from heterog.simulator.engine import Order
from heterog.simulator.memory import Inside


@dataclass(frozen=True)
class PricedTask:
    """What the simulations know about a task."""

    number: int
    kind: int
    device: int  # of a compute task
    channel: int  # -1 for compute tasks
    communicator: tuple[int, ...]  # devices of a collective, else none
    payload: float
    seconds: float  # alone on the cluster
    cost: ChannelSeconds  # of a link task
    needs: tuple[int, ...]
    turn: int
    drag: dict[int, float]  # of a link task: share of compute speed that each member loses
    overhead: dict[int, float]  # of a link task: seconds that it takes from each busy member
    blocks: int  # the device that computes nothing while this is under way, -1 if none

    @property
    def is_link(self) -> bool:
        return self.kind >= FIRST_LINK_KIND

    @property
    def is_collective(self) -> bool:
        return bool(self.communicator)

    @property
    def is_free(self) -> bool:
        return FIRST_FREE_KIND <= self.kind < FIRST_LINK_KIND

    @property
    def queue(self) -> tuple[str, object]:
        if self.is_collective:
            return "communicator", self.communicator
        return "transfer", self.channel


def price(
    program: Program, graph: OpGraph, cluster: Cluster, model: CostModel
) -> list[PricedTask]:
    """All tasks of a program with their seconds."""
    op_id = graph_tables(graph, program.op_rules).op_id
    plan = axis_plan(graph, program.op_rules)
    ruled = {op for op, _ in program.op_rules}
    tasks = []
    for number in range(program.num_tasks):
        kind, device = int(program.kind[number]), int(program.device[number])
        subject, payload = int(program.subject[number]), float(program.num_bytes[number])
        channel = int(program.channel[number])
        cost = ChannelSeconds(0.0, 0.0, {})
        communicator: tuple[int, ...] = ()
        blocks = -1
        drag: dict[int, float] = {}
        overhead: dict[int, float] = {}
        if kind >= FIRST_LINK_KIND:
            cost = model.channel_seconds(cluster, program.channels[channel])
            if program.channels[channel].kind != ChannelKind.POINT_TO_POINT:
                communicator = program.channels[channel].devices
            elif kind == TaskKind.SEND and cluster.sends == Sends.BLOCKING:
                blocks = program.channels[channel].devices[0]
            seconds = cost.latency(payload) + payload * cost.seconds_per_byte
            for member in program.channels[channel].devices:
                name = cluster.devices[member].type.name
                overhead[member] = cost.overhead_s.get(name, 0.0)
                drag[member] = 0.0
                if cost.seconds_per_byte > 0.0:
                    drag[member] = min(cost.drag.get(name, 0.0) / cost.seconds_per_byte, 0.9)
        else:
            device_type = cluster.devices[device].type
            if kind <= LAST_OP_KIND:
                share, op = int(program.samples[number]), int(op_id[subject])
                units = int(program.units[number])
                if op in ruled and kind != TaskKind.REMAKE:
                    flops, moved = plan.work(units or share, share, graph.batch_size)
                    seconds = float(model.work_seconds(graph, device_type, flops, moved)[op])
                else:
                    seconds = float(model.op_seconds(graph, device_type, share)[op])
            elif kind == TaskKind.UPDATE:
                row = model.op_seconds(graph, device_type, graph.batch_size)
                seconds = float(row[graph.updates[subject][0]])
                if payload > 0.0:  # a slice of the parameter
                    seconds *= payload / float(graph_tables(graph).parameter_bytes[subject])
            else:
                fixed, per_byte = model.copy_seconds(device_type)
                seconds = fixed + payload * per_byte
        needs = tuple(program.dependencies(number))
        tasks.append(
            PricedTask(
                number,
                kind,
                device,
                channel,
                communicator,
                payload,
                seconds,
                cost,
                needs,
                int(program.turn[number]),
                drag,
                overhead,
                blocks,
            )
        )
    return tasks


def simulate(
    tasks: list[PricedTask],
    order: Order,
    seconds: list[float] | None = None,
    *,
    is_in_turn: bool = False,
) -> tuple[list[float], list[float]]:
    """(start, finish) of every task by the rules of the engine.

    ``seconds`` gets what each task took with the drag of communication on compute and of compute
    on communication.
    """
    seconds = [] if seconds is None else seconds
    seconds[:] = [task.seconds for task in tasks]
    debt: dict[int, float] = defaultdict(float)
    op_until: dict[int, float] = defaultdict(float)
    drag_until: dict[int, float] = defaultdict(float)
    drag_share: dict[int, float] = defaultdict(float)
    start, finish = [math.inf] * len(tasks), [math.inf] * len(tasks)
    priority = [float(task.number) for task in tasks]
    if order == Order.RANK:
        priority = [-rank for rank in upward_rank(tasks)]

    def urgency(task: PricedTask) -> tuple[float, int]:
        return priority[task.number], task.number

    # Ops of each device and turn in program order, earlier turns first.
    ops: dict[tuple[int, int], list[PricedTask]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: (task.turn, task.number)):
        if not task.is_link and not task.is_free:
            ops[task.device, task.turn].append(task)
    device_free_at = dict.fromkeys((task.device for task in tasks if not task.is_link), 0.0)
    link_free_at: dict[int, float] = defaultdict(float)
    served: dict[int, float] = defaultdict(float)
    # Where bytes are under way: when to ask whether they are through, the link that they wait for,
    # and what that link will have served then.
    under_way: dict[int, tuple[float, int, float]] = {}
    taken: set[object] = set()
    blocking = [task for task in tasks if task.blocks >= 0]
    unready = list(tasks)
    ready: list[PricedTask] = []
    moments = {0.0}
    now = 0.0

    def load(link: int) -> float:
        shares = (
            tasks[number].cost.held[link] / most_held(tasks[number])
            for number in under_way
            if link in loaded(tasks[number])
        )
        return max(sum(shares), 1.0)

    while moments:
        last, now = now, min(moments)
        moments.discard(now)
        for link in list(link_free_at):
            served[link] += (now - last) / load(link)
        for number in sorted(under_way):
            task, (asked, link, due) = tasks[number], under_way[number]
            if asked > now:
                continue
            alone = task.payload * most_held(task)
            remaining = min((due - served[link]) * load(link), link_free_at[link] - now)
            if alone > 0.0 and remaining > 1e-9 * alone + 1e-12 * now:
                under_way[number] = (now + remaining, link, due)
                moments.add(now + remaining)
                continue
            del under_way[number]
            finish[number] = now + rest(task, seconds[number])
            moments.add(finish[number])
            if not task.is_collective:
                taken.discard(task.queue)
        taken -= {t.queue for t in tasks if t.is_collective and finish[t.number] == now}
        for task in [t for t in unready if all(finish[needed] <= now for needed in t.needs)]:
            unready.remove(task)
            ready.append(task)
            if order == Order.FIFO:
                priority[task.number] = now
        blocked = {t.blocks for t in blocking if t not in unready and finish[t.number] > now}
        for device, free_at in device_free_at.items():
            if device in blocked:
                continue
            chosen: PricedTask | None = None
            if free_at <= now:
                for (where, _), left in ops.items():
                    if chosen is None and where == device and left and left[0] in ready:
                        chosen = left.pop(0)
                    if is_in_turn and where == device and (left or chosen is not None):
                        break  # one turn after the other
            if free_at <= now and chosen is None:
                free = [task for task in ready if task.is_free and task.device == device]
                chosen = min(free, key=urgency, default=None)
            if chosen is not None:
                ready.remove(chosen)
                start[chosen.number] = now
                work = chosen.seconds + debt.pop(device, 0.0)
                window, share = max(drag_until[device] - now, 0.0), drag_share[device]
                if window > 0.0:
                    in_window = window * (1.0 - share)
                    work = work / (1.0 - share) if work <= in_window else work + share * window
                seconds[chosen.number] = work
                finish[chosen.number] = device_free_at[device] = now + work
                if not chosen.is_free:
                    op_until[device] = now + work
                moments.add(finish[chosen.number])
        heads: dict[object, PricedTask] = {}
        for task in sorted(filter(lambda task: task.is_link, ready), key=urgency):
            heads.setdefault(task.queue, task)
        started = [task for queue, task in heads.items() if queue not in taken]
        for task in started:
            ready.remove(task)
            taken.add(task.queue)
            start[task.number] = now
            under_way[task.number] = (now, -1, 0.0)
            for link in loaded(task):
                work = task.payload * task.cost.held[link]
                link_free_at[link] = max(link_free_at[link], now) + work
        for chosen in started:
            latency = alone = chosen.cost.latency(chosen.payload)
            if any(op_until[device] > now for device in chosen.drag):
                latency += max(chosen.cost.loaded_latency_s - chosen.cost.latency_s, 0.0)
            seconds[chosen.number] += latency - alone
            alone, through = chosen.payload * most_held(chosen), now
            for link in loaded(chosen):
                until = min(link_free_at[link], now + alone * load(link))
                if until > through:
                    through = until
                    under_way[chosen.number] = (until, link, served[link] + alone)
            end = through + rest(chosen, seconds[chosen.number])
            moments.add(through)
            moving = chosen.payload * chosen.cost.seconds_per_byte
            spread = moving / (end - now) if end > now else 0.0
            for device, lost in chosen.drag.items():
                share = lost * spread
                covered = max(now, drag_until[device])
                overlap = min(end, device_free_at.get(device, 0.0)) - covered
                debt[device] += share * max(overlap, 0.0)
                if device_free_at.get(device, 0.0) > now:
                    debt[device] += chosen.overhead[device]
                drag_share[device] = (
                    max(share, drag_share[device]) if drag_until[device] > now else share
                )
                drag_until[device] = max(end, drag_until[device])
    return start, finish


def most_held(task: PricedTask) -> float:
    """Seconds per byte of its most loaded link; any number above 0 if it loads none."""
    return max(task.cost.held.values(), default=0.0) or 1.0


def rest(task: PricedTask, seconds: float) -> float:
    """Seconds besides those of its bytes on its most loaded link."""
    most = max(task.cost.held.values(), default=0.0)
    return seconds - task.payload * min(task.cost.seconds_per_byte, most)


def loaded(task: PricedTask) -> list[int]:
    """The links that a transfer or collective loads."""
    return [link for link, held in task.cost.held.items() if task.payload * held > 0.0]


def upward_rank(tasks: list[PricedTask]) -> list[float]:
    """Own seconds plus the longest path of seconds to the end."""
    rank = [0.0] * len(tasks)
    for task in reversed(tasks):
        rank[task.number] += task.seconds
        for needed in task.needs:
            rank[needed] = max(rank[needed], rank[task.number])
    return rank


def replay(
    tasks: list[PricedTask], engine_start: list[float], seconds: list[float]
) -> tuple[list[float], list[float]]:
    """(start, finish) of every task by the rules of the referee.

    ``seconds`` is what each task took in the engine.
    """
    start, finish = [math.inf] * len(tasks), [math.inf] * len(tasks)
    lines: dict[object, list[PricedTask]] = defaultdict(list)
    for task in sorted(tasks, key=lambda t: (engine_start[t.number], t.number)):
        lines[_line(task)].append(task)
    needs = {task.number: set(task.needs) for task in tasks}
    blocking = [task for task in tasks if task.blocks >= 0]
    for task in tasks:
        if not task.is_link:
            needs[task.number] |= {
                sent.number
                for sent in blocking
                if sent.blocks == task.device
                and (engine_start[sent.number], sent.number)
                < (engine_start[task.number], task.number)
            }
    left: dict[int, float] = {}  # bytes of transfers and collectives that are under way
    busy_until: dict[object, float] = dict.fromkeys(lines, 0.0)
    flow_from: dict[int, float] = {}  # when a collective's latency is over
    now = 0.0
    while True:
        for line, queue in lines.items():
            while (
                queue
                and busy_until[line] <= now
                and all(finish[needed] <= now for needed in needs[queue[0].number])
            ):
                task = queue.pop(0)
                start[task.number] = now
                if not task.is_link:
                    finish[task.number] = busy_until[line] = now + seconds[task.number]
                    continue
                latency = _latency(task, seconds) if task.is_collective else 0.0
                flow_from[task.number] = now + latency
                left[task.number] = task.payload
                busy_until[line] = math.inf
        flowing = [tasks[n] for n in left if flow_from[n] <= now]
        rates = progressive_filling(
            [task.cost.held for task in flowing], [task.cost.weight for task in flowing]
        )
        ends = {
            task.number: now + (left[task.number] / rate if left[task.number] > 0.0 else 0.0)
            for task, rate in zip(flowing, rates, strict=True)
        }
        later = [
            moment
            for moment in (*busy_until.values(), *flow_from.values(), *finish)
            if now < moment < math.inf
        ]
        moment = min([*later, *ends.values()], default=math.inf)
        if moment == math.inf:
            return start, finish
        for task, rate in zip(flowing, rates, strict=True):
            number = task.number
            if ends[number] <= moment:
                del left[number]
                most = max(task.cost.held.values(), default=0.0)
                rest = task.payload * (task.cost.seconds_per_byte - most)
                rest += 0.0 if task.is_collective else _latency(task, seconds)
                finish[number] = moment + max(rest, 0.0)
                busy_until[_line(task)] = finish[number] if task.is_collective else moment
            else:
                left[number] -= rate * (moment - now)
        now = moment


def _line(task: PricedTask) -> object:
    """What runs one task after another: a device, a pair one way, or a communicator."""
    return task.queue if task.is_link else ("device", task.device)


def _latency(task: PricedTask, seconds: list[float]) -> float:
    """Of a transfer or collective, with what busy members added to it in the engine."""
    return task.cost.latency(task.payload) + seconds[task.number] - task.seconds


def progressive_filling(
    held: list[dict[int, float]], weights: Sequence[float] | None = None
) -> list[float]:
    """Max-min fair payload rates of flows: all rise until a link is full, step by step."""
    weights = [1.0] * len(held) if weights is None else weights
    rates = [0.0] * len(held)
    rising = {flow for flow, links in enumerate(held) if any(links.values())}
    while rising:
        room: dict[int, float] = {}
        for link in {link for flow in rising for link in held[flow]}:
            used = sum(links.get(link, 0.0) * rates[flow] for flow, links in enumerate(held))
            growth = sum(held[flow].get(link, 0.0) * weights[flow] for flow in rising)
            if growth > 0.0:
                room[link] = max(1.0 - used, 0.0) / growth
        step = min(room.values())
        full = {link for link, most in room.items() if most <= step * (1.0 + 1e-12)}
        for flow in rising:
            rates[flow] += step * weights[flow]
        rising = {f for f in rising if not any(held[f].get(link, 0.0) > 0.0 for link in full)}
    for flow, links in enumerate(held):
        if not any(links.values()):
            rates[flow] = math.inf
    return rates


def running(
    program: Program, start: Sequence[float], finish: Sequence[float], device: int, moment: float
) -> tuple[float, float]:
    """(begin, end) of the op on a device, in its fixed order; the moment itself if none runs."""
    for op in range(program.num_tasks):
        if program.kind[op] < FIRST_FREE_KIND and program.device[op] == device:
            if start[op] < moment < finish[op]:
                return start[op], finish[op]
    return moment, moment


def memory(
    program: Program,
    start: Iterable[float],
    finish: Iterable[float],
    results: Sequence[int] | None = None,
    runs: Sequence[int] | None = None,
    inside: Sequence[float] | None = None,
) -> list[float]:
    """Peak bytes of each device: walk all buffers, sort by time, ends before starts.

    What a link brings or takes away during an op is there for the whole op. ``results`` says for
    each buffer where a compiler puts it, ``runs`` for each task where its kernel runs,
    ``inside`` what is made and freed inside each task.
    """
    begins, ends = list(start), list(finish)
    # Ops that take no time come one after the other, too.
    short: dict[tuple[int, float], int] = defaultdict(int)
    order = sorted(range(program.num_tasks), key=lambda task: (begins[task], ends[task], task))
    for task in order:
        if program.kind[task] < FIRST_FREE_KIND:
            key = int(program.device[task]), begins[task]
            is_short, tick = begins[task] == ends[task], math.ulp(begins[task])
            begins[task] += 2 * short[key] * tick
            if is_short:
                ends[task] = begins[task] + tick
                short[key] += 1
    runs = range(program.num_tasks) if runs is None else runs
    last_use = [ends[runs[maker]] for maker in program.buffer_maker]
    for task in range(program.num_tasks):
        for buffer in program.read_buffer[program.read_start[task] : program.read_start[task + 1]]:
            last_use[buffer] = max(last_use[buffer], ends[runs[task]])
    peaks = []
    for device in range(program.num_devices):
        changes: list[tuple[float, int, float]] = []
        for buffer, maker in enumerate(program.buffer_maker):
            where = ResultMemory.OWN if results is None else results[buffer]
            if program.buffer_device[buffer] == device and where != ResultMemory.NONE:
                size = float(program.buffer_bytes[buffer])
                run = runs[maker]
                born = begins[run] if where == ResultMemory.OWN else ends[run]
                first, _ = running(program, begins, ends, device, born)
                _, last = running(program, begins, ends, device, last_use[buffer])
                changes += [(first, 1, size), (last, 0, -size)]
        for task, size in enumerate(inside or ()):
            if program.device[task] == device:
                changes += [(begins[task], 1, size), (ends[task], 0, -size)]
        live = most = float(program.resident_bytes[device])
        for _, _, change in sorted(changes):
            live += change
            most = max(most, live)
        peaks.append(most)
    return peaks


def made_inside(program: Program, inside: Inside) -> list[float]:
    """What is made and freed inside each task."""
    found = [0.0] * program.num_tasks
    for task in range(program.num_tasks):
        device = int(program.device[task])
        if program.kind[task] == TaskKind.UPDATE:
            found[task] = float(inside.stepping[device])
        if (
            program.kind[task] > LAST_OP_KIND
            or not inside.on_cpu[device]
            or not len(inside.copies)
        ):
            continue
        reads = program.read_buffer[program.read_start[task] : program.read_start[task + 1]]
        makes = slice(program.buffer_start[task], program.buffer_start[task + 1])
        read = sum(float(program.buffer_bytes[buffer]) for buffer in reads)
        made = float(program.buffer_bytes[makes].sum())
        rule = {Copies.READS_OR_RESULT: max(read, made), Copies.READS_AND_RESULT: read + made}
        found[task] = rule.get(Copies(inside.copies[program.subject[task]]), 0.0)
    return found


def assert_legal(tasks: list[PricedTask], start: Iterable[float], finish: Iterable[float]) -> None:
    """Dependencies hold, a device runs one task at a time and its ops in program order."""
    begins, ends = list(start), list(finish)
    for task in tasks:
        assert 0.0 <= begins[task.number] <= ends[task.number] < math.inf
        assert all(ends[needed] <= begins[task.number] for needed in task.needs)
    for device in {task.device for task in tasks if not task.is_link}:
        mine = [t for t in tasks if not t.is_link and t.device == device]
        mine.sort(key=lambda t: (begins[t.number], t.number))
        for first, second in pairwise(mine):
            assert ends[first.number] <= begins[second.number]
        for turn in {t.turn for t in mine}:
            ops = [t.number for t in mine if not t.is_free and t.turn == turn]
            assert ops == sorted(ops)
