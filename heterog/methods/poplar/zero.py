"""Strategies of ZeRO over the whole model (Rajbhandari et al. 2020), with any allocation."""

from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Problem
from heterog.methods.poplar.allocation import Allocation
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Strategy, Sync

STAGES = (0, 1, 2, 3)


def even_allocation(evaluator: Evaluator, num_micro: int) -> Allocation:
    """The batch in equal parts over all devices and micro-steps."""
    shares = split_evenly(evaluator.graph.batch_size, evaluator.cluster.num_devices)
    rows = [split_evenly(share, num_micro) for share in shares]
    used = max(sum(size > 0 for size in row) for row in rows)
    return tuple(row[:used] for row in rows)


def zero_decision(
    evaluator: Evaluator, stage: int, micro_batches: Allocation, slices: tuple[int, ...] = ()
) -> Decision:
    """The decision of every group: all devices, with equal slices by default.

    Stage 0 uses all-reduce, hierarchical if there are several hosts.
    """
    hosts = set(evaluator.cluster.host_of)
    plain = Sync.HIERARCHICAL if len(hosts) > 1 else Sync.RING
    return Decision(
        devices=tuple(range(evaluator.cluster.num_devices)),
        shares=tuple(map(sum, micro_batches)),
        sync=Sync.of_stage(stage) if stage else plain,
        slices=slices,
    )


def zero_strategy(
    problem: Problem,
    stage: int,
    micro_batches: Allocation,
    slices: tuple[int, ...] = (),
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Strategy:
    """ZeRO over the whole model with given micro-batches."""
    return uniform_strategy(
        problem.evaluator,
        zero_decision(problem.evaluator, stage, micro_batches, slices),
        bucket_bytes=bucket_bytes,
        micro_batches=micro_batches if len(micro_batches[0]) > 1 else (),
        step_barrier=problem.step_barrier,
    )
