"""Two jobs on one device: by hand, against a slow simulation by events, and on real schedules."""

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from heterog.cluster import Cluster
from heterog.graph.op_graph import FloatArray
from heterog.lowering.program import FIRST_LINK_KIND
from heterog.methods.data_parallel import uniform_strategy
from heterog.simulator.compile_kernels import smallest_graph
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.multiplex import (
    MEASURED_STEPS,
    WARM_UP_STEPS,
    Foreground,
    foreground_of_program,
    make_foreground,
    multiplex,
)
from heterog.strategy.strategy import Decision, Sync
from tests.simulator.builders import cluster_of, linear_chain, strategy_of


def schedule_of(
    device: Sequence[int], seconds: Sequence[float], waits: Sequence[Sequence[int]]
) -> Foreground:
    """A foreground whose tasks start as early as they can, in their order."""
    num_devices = max(device) + 1
    start, finish = np.zeros(len(device)), np.zeros(len(device))
    free = [0.0] * num_devices
    for task, own in enumerate(device):
        start[task] = max([finish[each] for each in waits[task]] + [free[own] if own >= 0 else 0])
        finish[task] = start[task] + seconds[task]
        if own >= 0:
            free[own] = finish[task]
    return make_foreground(np.array(device), start, finish, waits, num_devices=num_devices)


def by_events(
    foreground: Foreground, background: Sequence[FloatArray], allowance: Sequence[float]
) -> tuple[float, list[int]]:
    """The same as ``multiplex``, device by device as time goes on: (seconds per step, ops)."""
    num_tasks = len(foreground.device)
    steps = WARM_UP_STEPS + MEASURED_STEPS
    before = [
        foreground.before[foreground.before_start[task] : foreground.before_start[task + 1]]
        for task in range(num_tasks)
    ]
    ops_done = [0] * foreground.num_devices
    following = [0] * foreground.num_devices
    free = [0.0] * foreground.num_devices
    queues = [
        [task for task in range(num_tasks) if foreground.device[task] == own]
        for own in range(foreground.num_devices)
    ]
    begin, warm_end, counted = 0.0, 0.0, list(ops_done)
    for step in range(steps):
        finish: dict[int, float] = {}
        left = [list(queue) for queue in queues]
        waiting = {task for task in range(num_tasks) if foreground.device[task] < 0}
        idle_since = list(free)
        # (time, device) at which a device is free and looks for something to do.
        clock = [(free[own], own) for own in range(foreground.num_devices)]
        heapq.heapify(clock)
        parked: set[int] = set()

        def ready_at(task: int, begin: float = begin, finish: dict[int, float] = finish) -> float:
            ends = [finish.get(int(each), np.inf) for each in before[task]]
            return max([begin, *ends]) + float(foreground.lag[task])

        while clock:
            now, own = heapq.heappop(clock)
            for task in sorted(waiting):
                if ready_at(task) < np.inf:
                    finish[task] = ready_at(task) + foreground.seconds[task]
                    waiting.remove(task)
                    clock += [(free[each], each) for each in parked]
                    parked.clear()
                    heapq.heapify(clock)
            if not left[own]:
                continue
            task = left[own][0]
            if ready_at(task) <= now:
                left[own].pop(0)
                finish[task] = now + foreground.seconds[task]
                free[own] = idle_since[own] = finish[task]
                clock += [(free[each], each) for each in {own, *parked}]
                parked.clear()
                heapq.heapify(clock)
                continue
            planned = idle_since[own] + foreground.gap[task]
            ops = background[own]
            length = ops[following[own]] if len(ops) else np.inf
            if length <= allowance[own] or now + length <= planned:
                following[own] = (following[own] + 1) % len(ops)
                ops_done[own] += 1
                free[own] = now + length
                heapq.heappush(clock, (free[own], own))
            elif ready_at(task) < np.inf:
                free[own] = ready_at(task)
                heapq.heappush(clock, (free[own], own))
            else:
                free[own] = now
                parked.add(own)
        begin = max(finish.values())
        if step == WARM_UP_STEPS - 1:
            warm_end, counted = begin, list(ops_done)
    done = [after - earlier for after, earlier in zip(ops_done, counted, strict=True)]
    return (begin - warm_end) / MEASURED_STEPS, done


# Device 0 computes 4 s, a transfer of 3 s, device 1 computes 2 s, a transfer back of 1 s.
PING_PONG = schedule_of((0, -1, 1, -1), (4.0, 3.0, 2.0, 1.0), ((), (0,), (1,), (2,)))


def test_operations_of_a_communicator_wait_for_one_another() -> None:
    """A reduce-scatter to device 1 and an all-gather from it have no link in common."""
    graph, cluster = linear_chain(("a", "b")), cluster_of((10.0, ["T4"]), (10.0, ["T4"]))
    decision = Decision(
        devices=(0, 1), shares=(4, 4), sync=Sync.REDUCE_SCATTER_ALL_GATHER, slices=(0, 1)
    )
    evaluator = Evaluator(graph, cluster)
    choice = evaluator.encode(strategy_of(graph, cluster, decision))
    program, start, finish = evaluator.timings(choice, Order.FIFO)
    collectives = np.flatnonzero(program.kind >= FIRST_LINK_KIND)
    assert len(np.unique(program.channel[collectives])) == 2, "scatters and gathers"
    foreground = foreground_of_program(program, start, finish)
    place = np.argsort(np.lexsort((np.arange(program.num_tasks), finish, start)))
    in_order = collectives[np.argsort(start[collectives], kind="stable")]
    for first, second in pairwise(place[in_order].tolist()):
        begin, end = foreground.before_start[second : second + 2]
        assert first in foreground.before[begin:end]


def test_gaps_by_hand() -> None:
    assert PING_PONG.step_seconds == 10.0
    assert PING_PONG.idle_share.tolist() == pytest.approx([0.6, 0.8])
    # Device 0 is idle from 4 to 10; device 1 from 9 to 7 of the next step.
    assert PING_PONG.gap[[0, 2]].tolist() == [6.0, 8.0]


def test_ops_that_fit_fill_the_gaps_and_delay_nothing() -> None:
    background = [np.array([2.0]), np.array([3.0])]
    both = multiplex(PING_PONG, background, np.zeros(2))
    assert both.step_seconds == pytest.approx(10.0)
    assert both.ops.tolist() == pytest.approx([3.0, 2.0])
    assert both.busy_seconds.tolist() == pytest.approx([6.0, 6.0])


def test_a_foreground_op_waits_for_at_most_one_background_op() -> None:
    background = [np.array([5.0]), np.zeros(0)]
    # 5 fits into 6, the next one does not.
    assert multiplex(PING_PONG, background, np.zeros(2)).step_seconds == pytest.approx(10.0)
    # With an allowance it is begun all the same, at 9, and ends at 14.
    late = multiplex(PING_PONG, background, np.array([5.0, 0.0]))
    assert late.step_seconds == pytest.approx(14.0)
    assert late.ops.tolist() == pytest.approx([2.0, 0.0])


def test_ops_longer_than_every_gap_are_never_begun() -> None:
    both = multiplex(PING_PONG, [np.array([7.0]), np.array([9.0])], np.zeros(2))
    assert both.step_seconds == pytest.approx(10.0)
    assert both.ops.tolist() == [0.0, 0.0]


def test_a_device_without_foreground_ops_is_the_backgrounds() -> None:
    foreground = schedule_of((0, 0, 2), (1.0, 1.0, 2.0), ((), (), ()))
    both = multiplex(foreground, [np.zeros(0), np.array([0.5]), np.zeros(0)], np.zeros(3))
    assert both.step_seconds == pytest.approx(2.0)
    assert both.ops.tolist() == pytest.approx([0.0, 4.0, 0.0])
    assert foreground.idle_share.tolist() == pytest.approx([0.0, 1.0, 0.0])


@pytest.mark.parametrize("seed", range(25))
def test_against_a_simulation_by_events(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_devices, num_tasks = int(rng.integers(1, 4)), int(rng.integers(2, 16))
    device = [*range(num_devices), *rng.integers(-1, num_devices, num_tasks).tolist()]
    seconds = rng.integers(1, 9, len(device)) / 4.0
    waits = [
        sorted({int(each) for each in rng.integers(0, task, min(task, 2))}) if task else []
        for task in range(len(device))
    ]
    foreground = schedule_of(device, seconds.tolist(), waits)
    background = [rng.integers(1, 9, int(rng.integers(0, 4))) / 8.0 for _ in range(num_devices)]
    allowance = rng.choice([0.0, 0.25, 0.5, 2.0], num_devices)
    both = multiplex(foreground, background, allowance)
    step_seconds, ops = by_events(foreground, background, allowance.tolist())
    assert both.step_seconds == pytest.approx(step_seconds)
    assert (both.ops * MEASURED_STEPS).tolist() == pytest.approx(ops)
    assert both.step_seconds >= foreground.step_seconds - 1e-9


@pytest.mark.parametrize("order", list(Order))
def test_without_background_the_schedule_stays_as_it_was(order: Order) -> None:
    evaluator = Evaluator(smallest_graph(), Cluster.load("paper_8gpu"))
    strategy = uniform_strategy(evaluator, Decision(devices=(0, 1, 3), shares=(4, 3, 1)))
    choice = evaluator.encode(strategy)
    program, start, finish = evaluator.referee_timings(choice, order)
    foreground = foreground_of_program(program, start, finish)
    nothing = [np.zeros(0)] * 8
    both = multiplex(foreground, nothing, np.zeros(8))
    assert both.step_seconds == pytest.approx(float(finish.max()))
    assert foreground.idle_share[[2, 4, 5, 6, 7]].tolist() == [1.0] * 5
