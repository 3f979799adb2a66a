"""Working memory and results of a simulation: kernels allocate nothing."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.lowering.kernels import by_reference
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.tape import NUM_BUFFERS, NUM_READS, NUM_TASKS, Tape
from heterog.pricing.cost_model import Prices

# Entries of ``Workspace.counts``: how many there are of each at the moment.
NUM_FRESH, NUM_TOUCHED, NUM_CANDIDATES, NUM_AHEAD, NUM_EVENTS, NUM_DONE = range(6)


@by_reference
class Timings(NamedTuple):
    """Working memory and results of one simulation; grown to the largest program seen."""

    seconds: FloatArray  # of each task
    start: FloatArray
    finish: FloatArray
    rank: FloatArray  # upward rank; filled if the order or a limit needs it
    priority: FloatArray
    waiting_for: IntArray  # number of unfinished reads that each task waits for
    awaited: IntArray  # makers of these reads, task by task
    successor_start: IntArray  # segments of ``successor``, one per task
    successor: IntArray  # the tasks that wait for each task
    is_local: npt.NDArray[np.bool_]  # whether only later ops of the same device read its results
    events: IntArray  # 2 task for starts, 2 task + 1 for ends of link and free tasks, in order
    queue_start: IntArray  # segments of ``queue_item``, one heap per queue
    queue_size: IntArray
    queue_item: IntArray
    chain: IntArray  # ops of each device and turn in program order
    sequence_start: IntArray  # segments of ``sequence``, one per device
    sequence: IntArray  # ops in the order in which they ran
    heap_time: FloatArray
    heap_item: IntArray
    alive: IntArray  # unfinished readers of each buffer
    touching: IntArray  # events that touch each device's memory; used by ``peak_memory``


def make_timings(num_tasks: int, num_reads: int, num_buffers: int, num_queues: int) -> Timings:
    """Empty arrays with room for a program."""
    return Timings(
        seconds=np.empty(num_tasks),
        start=np.empty(num_tasks),
        finish=np.empty(num_tasks),
        rank=np.empty(num_tasks),
        priority=np.empty(num_tasks),
        waiting_for=np.empty(num_tasks, np.int32),
        awaited=np.empty(max(num_reads, 1), np.int32),
        successor_start=np.empty(num_tasks + 2, np.int32),
        successor=np.empty(max(num_reads, 1), np.int32),
        is_local=np.empty(num_tasks, np.bool_),
        events=np.empty(2 * num_tasks + 1, np.int32),
        queue_start=np.empty(num_queues + 1, np.int32),
        queue_size=np.empty(num_queues, np.int32),
        queue_item=np.empty(num_tasks, np.int32),
        chain=np.empty(num_tasks, np.int32),
        sequence_start=np.empty(num_queues + 1, np.int32),
        sequence=np.empty(num_tasks, np.int32),
        heap_time=np.empty(4 * num_tasks + 64),
        heap_item=np.empty(4 * num_tasks + 64, np.int32),
        alive=np.empty(max(num_buffers, 1), np.int32),
        # Two events for the maker of each buffer, and one event for the end of each read.
        touching=np.empty(2 * num_buffers + num_reads + 1, np.int32),
    )


@by_reference
class Workspace(NamedTuple):
    """Working memory of a simulation; made by ``simulate``, because kernels allocate nothing."""

    num_turns: int
    counts: IntArray  # lengths of the lists below and of the heap and the events of ``Timings``
    left: FloatArray  # seconds of compute that each device still has to begin
    free_at: FloatArray  # when each link has done all that it has to do
    # Seconds for which each operation under way over a link has had its part of it, were the load
    # 1, and until when they are counted.
    served: FloatArray
    served_at: FloatArray
    load: FloatArray  # of the operations under way over each link; see ``engine``
    candidate: IntArray  # queues of links whose head starts now
    # One entry per queue of links, about its operation under way.
    is_taken: npt.NDArray[np.bool_]  # whether its next one must wait
    alone: FloatArray  # seconds of its bytes alone on its links
    slowest: IntArray  # the link that it waits for
    due: FloatArray  # what that link has ``served`` when its bytes are through
    # From here to ``is_touched``, one entry per device.
    idle: npt.NDArray[np.bool_]
    busy_until: FloatArray
    op_until: FloatArray
    drag_until: FloatArray
    drag_share: FloatArray
    debt: FloatArray
    sending: IntArray  # number of values under way that the device waits for
    first_open: IntArray  # first turn with ops left
    ran: IntArray  # end of the ops in ``Timings.sequence`` that have run
    touched: IntArray  # devices that may start a task now
    is_touched: npt.NDArray[np.bool_]
    chain_of: IntArray  # chain of each task, -1 if it is no op
    chain_start: IntArray  # segments of ``Timings.chain``, one per device and turn
    position: IntArray  # position of the next op of each chain
    fresh: IntArray  # tasks that just got ready


def make_workspace(tape: Tape, prices: Prices, num_devices: int) -> Workspace:
    """Working memory for a tape."""
    num_tasks = int(tape.counts[NUM_TASKS])
    num_turns = int(tape.tasks["turn"][:num_tasks].max(initial=0)) + 1
    num_chains = num_devices * num_turns
    times, links = np.zeros((6, num_devices)), np.zeros((4, prices.num_resources))
    num_queues = len(prices.channels.queue)
    return Workspace(
        num_turns=num_turns,
        counts=np.zeros(6, np.int32),
        left=times[0],
        free_at=links[0],
        served=links[1],
        served_at=links[2],
        load=links[3],
        candidate=np.empty(num_queues, np.int32),
        is_taken=np.zeros(num_queues, np.bool_),
        alone=np.empty(num_queues),
        slowest=np.empty(num_queues, np.int32),
        due=np.empty(num_queues),
        idle=np.ones(num_devices, np.bool_),
        busy_until=times[1],
        op_until=times[2],
        drag_until=times[3],
        drag_share=times[4],
        debt=times[5],
        sending=np.zeros(num_devices, np.int32),
        first_open=np.zeros(num_devices, np.int32),
        ran=np.empty(num_devices, np.int32),
        touched=np.empty(num_devices, np.int32),
        is_touched=np.zeros(num_devices, np.bool_),
        chain_of=np.empty(num_tasks, np.int32),
        chain_start=np.zeros(num_chains + 1, np.int32),
        position=np.empty(num_chains, np.int32),
        fresh=np.empty(num_tasks, np.int32),
    )


def with_room(timings: Timings, tape: Tape, num_queues: int) -> Timings:
    """The given arrays, or larger ones if the tape and the queues need them."""
    if (
        tape.counts[NUM_TASKS] > len(timings.seconds)
        or tape.counts[NUM_READS] > len(timings.successor)
        or tape.counts[NUM_BUFFERS] > len(timings.alive)
        or num_queues > len(timings.queue_size)
    ):
        return make_timings(len(tape.tasks), len(tape.reads), len(tape.buffers), 2 * num_queues)
    return timings
