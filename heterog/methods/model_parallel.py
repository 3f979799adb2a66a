"""Methods without replicas: the whole step on one device, or a balanced chain of devices."""

import numpy as np

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import FloatArray
from heterog.lowering.kernels import kernel
from heterog.lowering.program import IntArray
from heterog.methods.data_parallel import in_orders
from heterog.methods.planner import Candidate, Planner, PlanResult, Problem
from heterog.simulator.evaluator import Evaluator, Outcome
from heterog.strategy.division import micro_batch_table, split_evenly
from heterog.strategy.strategy import REPLICATED, Decision, Strategy

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Micro-batch counts that the chain tries (GPipe order: forward and backward of each in turn)."""


class SingleDevice(Planner):
    """Everything on one device: each device type is tried, the best that fits wins."""

    name = "single_device"
    stage = "baseline"

    def plan(self, problem: Problem) -> PlanResult:
        """Try the first device of each type."""
        evaluator = problem.evaluator
        types = evaluator.cluster.type_index
        devices = [types.index(kind) for kind in dict.fromkeys(types)]
        groups = group_ops(evaluator.graph).num_groups
        strategies = [_placed(problem, (device,) * groups, 1) for device in devices]
        return _ranked(problem, strategies)


class ModelParallel(Planner):
    """A chain: consecutive groups on consecutive devices, balanced by time, within memory.

    The chain visits devices in the order of their speed. For every number of devices, dynamic
    programming over (group, device) finds the cut with the fastest slowest stage, each stage
    limited to its device's memory. Then numbers of micro-batches are tried.
    """

    name = "model_parallel"
    stage = "baseline"

    def prepare(self, evaluator: Evaluator) -> None:
        """Compile the kernel that cuts chains; other methods use it, too."""
        balanced_chain(np.ones((1, 1)), np.ones((1, 1)), np.ones(1))

    def plan(self, problem: Problem) -> PlanResult:
        """Cut the chain for every number of devices, and try micro-batches."""
        evaluator = problem.evaluator
        graph, cluster = evaluator.graph, evaluator.cluster
        groups = group_ops(graph)
        speeds = evaluator.speeds
        chain = sorted(range(cluster.num_devices), key=lambda d: (-speeds[d], d))
        seconds, memory = _group_costs(evaluator)
        strategies = []
        longest = min(len(chain), groups.num_groups)
        lengths = [*range(1, min(longest, 12) + 1), *({longest} if longest > 12 else ())]
        for length in lengths:
            devices = chain[:length]
            placement = balanced_chain(
                seconds[:, [cluster.type_index[device] for device in devices]],
                np.repeat(memory[:, None], length, axis=1),
                np.array([cluster.devices[device].usable_memory_bytes for device in devices]),
            )
            placed = tuple(devices[stage] for stage in placement)
            for num_micro in MICRO_BATCHES:
                if num_micro <= graph.batch_size:
                    strategies.append(_placed(problem, placed, num_micro))
        return _ranked(problem, list(dict.fromkeys(strategies)))


def balanced_chain(seconds: FloatArray, memory: FloatArray, room: FloatArray) -> list[int]:
    """Cut a chain of groups into stages so that the slowest stage is as fast as possible.

    Args:
        seconds: Seconds of each group on each stage's device.  # [num_groups, num_stages]
        memory: Bytes that each group keeps on a stage's devices.  # [num_groups, num_stages]
        room: Bytes of each stage's device.  # [num_stages]

    Returns:
        The stage of each group, ascending. Overflow costs seconds in proportion to its size, so
        that a chain that does not fit overflows as evenly as possible.
    """
    num_groups, num_stages = seconds.shape
    before = np.zeros((2, num_stages, num_groups + 1))  # seconds and bytes of all earlier groups
    np.cumsum(seconds.T, axis=1, out=before[0, :, 1:])
    np.cumsum(memory.T, axis=1, out=before[1, :, 1:])
    penalty = 10.0 * float(seconds.sum(axis=0).max())
    best = np.full((num_stages + 1, num_groups + 1), np.inf)
    best[0, 0] = 0.0
    cut = np.zeros((num_stages + 1, num_groups + 1), np.int32)
    _cut_chain(before[0], before[1], np.asarray(room, np.float64), penalty, best, cut)
    placement = [0] * num_groups
    end = num_groups
    for stage in range(num_stages, 0, -1):
        begin = int(cut[stage, end])
        placement[begin:end] = [stage - 1] * (end - begin)
        end = begin
    return placement


def stage_starts(seconds: FloatArray, memory: FloatArray, room: FloatArray) -> tuple[int, ...]:
    """First group of each stage of ``balanced_chain``.

    Every stage keeps a group, even if the fastest cut leaves a slow stage empty.
    """
    lowest = np.arange(1, len(room))
    placement = np.array(balanced_chain(seconds, memory, room))
    cuts = np.maximum(np.searchsorted(placement, lowest), lowest)
    cuts = np.minimum(np.maximum.accumulate(cuts), len(seconds) - lowest[::-1])
    return (0, *cuts.tolist())


@kernel
def _cut_chain(
    time_before: FloatArray, memory_before: FloatArray, room: FloatArray, penalty: float,
    best: FloatArray, cut: IntArray,
) -> None:  # fmt: skip
    """Find the best begin of each stage for each end, given the best cuts of earlier stages.

    Args:
        time_before: Seconds of all groups before each, on each stage.  # [stages, groups + 1]
        memory_before: Bytes of these groups, on each stage.  # [stages, groups + 1]
        room: Bytes of each stage's device.
        penalty: Seconds for an overflow as large as a device's memory.
        best: Output: seconds of the slowest of the first stages.  # [stages + 1, groups + 1]
        cut: Output: where the last of them begins.  # [stages + 1, groups + 1]
    """
    for stage in range(len(room)):
        for end in range(best.shape[1]):
            for begin in range(end + 1):
                over = memory_before[stage, end] - memory_before[stage, begin] - room[stage]
                cost = time_before[stage, end] - time_before[stage, begin]
                cost += penalty * max(over, 0.0) / room[stage]
                total = max(best[stage, begin], cost)
                if total < best[stage + 1, end]:
                    best[stage + 1, end] = total
                    cut[stage + 1, end] = begin


def _group_costs(evaluator: Evaluator) -> tuple[FloatArray, FloatArray]:
    """(seconds of each group on each device type, bytes that each group keeps)."""
    graph = evaluator.graph
    grouping = group_ops(graph)
    inside = grouping.group >= 0
    seconds = np.zeros((grouping.num_groups, len(evaluator.cluster.device_types)))
    for index, kind in enumerate(evaluator.cluster.device_types):
        costs = evaluator.cost_model.op_seconds(graph, kind, graph.batch_size)
        np.add.at(seconds[:, index], grouping.group[inside], costs[inside])
    return seconds, evaluator.group_state_bytes + evaluator.group_saved_bytes


def _placed(problem: Problem, device_of_group: tuple[int, ...], num_micro: int) -> Strategy:
    """The strategy with each group on one device and even micro-batches of the whole batch."""
    evaluator = problem.evaluator
    graph, cluster = evaluator.graph, evaluator.cluster
    sizes = split_evenly(graph.batch_size, num_micro)
    return Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=tuple(
            Decision(devices=(device,), shares=(graph.batch_size,)) for device in device_of_group
        ),
        homes=(REPLICATED,) * len(graph.updates),
        micro_batches=micro_batch_table(sizes, cluster.num_devices, device_of_group[0]),
        step_barrier=problem.step_barrier,
    )


def _ranked(problem: Problem, strategies: list[Strategy]) -> PlanResult:
    """The best few strategies, best first."""
    tried, num_evaluations = in_orders(problem, strategies, problem.orders)
    found = [pair for pair in tried if pair[0].outcome != Outcome.CANNOT_RUN]
    return PlanResult(
        candidates=tuple(
            Candidate(strategy=strategy, orders=(best.order,)) for best, strategy in found[:3]
        ),
        num_evaluations=num_evaluations,
        reason=tried[-1][0].shortage if tried and not found else "",
    )
