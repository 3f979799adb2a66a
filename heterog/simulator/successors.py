"""What waits for what: successors of tasks, upward ranks, and room for queues and chains."""

from heterog.lowering.kernels import helper
from heterog.lowering.program import FIRST_FREE_KIND, FIRST_LINK_KIND, FloatArray
from heterog.lowering.tape import IN_TURN, NUM_TASKS, Tape
from heterog.pricing.cost_model import Prices
from heterog.simulator.timings import Timings, Workspace


@helper
def rank_tasks(tape: Tape, seconds: FloatArray, rank: FloatArray) -> None:
    """Upward rank: rank(o) = seconds(o) + max over successors of rank (HeteroG section 4.2)."""
    num_tasks = tape.counts[NUM_TASKS]
    rank[:num_tasks] = 0.0
    for task in range(num_tasks - 1, -1, -1):
        rank[task] += seconds[task]
        for read in range(tape.tasks[task].read_start, tape.tasks[task + 1].read_start):
            maker = tape.buffers[tape.reads[read]].maker
            rank[maker] = max(rank[maker], rank[task])


@helper
def prepare(
    tape: Tape, prices: Prices, timings: Timings, work: Workspace, num_devices: int
) -> None:
    """Fill the successor lists, the segments of the queues, and the chains.

    Chain ``device * num_turns + turn`` holds the ops of one turn of one device. Queues of links
    come first, then a queue per device for its free tasks.
    """
    num_tasks = tape.counts[NUM_TASKS]
    num_queues = len(prices.channels.queue) + num_devices
    starts, queue_size = timings.successor_start, timings.queue_size
    chain_of, chain_start, position = work.chain_of, work.chain_start, work.position
    num_turns = work.num_turns
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
            timings.queue_size[len(prices.channels.queue) + record.device] += 1
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
