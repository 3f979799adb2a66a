"""Poplar's allocation of samples to devices, by exact search over integer batches.

A *curve* is the seconds of one device for 0, 1, ..., m samples at once, where m is the most that
fits its memory; seconds never fall when samples are added. ``zero_strategy`` makes an allocation
into a strategy with ZeRO over the whole model (Rajbhandari et al. 2020).
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from heterog.graph.op_graph import FloatArray
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Problem
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Strategy, Sync

Allocation = tuple[tuple[int, ...], ...]
"""Micro-batches of each device, all of one length, 0 where a device has fewer."""


def cheapest_cut(curve: FloatArray, batch: int) -> tuple[FloatArray, list[int]]:
    """Least seconds for 0 to ``batch`` samples in successive micro-batches, and the last sizes.

    g(B) = min over b of curve(b) + g(B - b); among equals the larger micro-batch.
    """
    best = np.full(batch + 1, np.inf)
    best[0] = 0.0
    last = [0] * (batch + 1)
    for total in range(1, batch + 1):
        largest = min(len(curve) - 1, total)
        if largest == 0:
            break
        # From the largest size down to 1, so that argmin prefers it.
        seconds = curve[largest:0:-1] + best[total - largest : total]
        index = int(np.argmin(seconds))
        best[total], last[total] = seconds[index], largest - index
    return best, last


def _pieces(last: Sequence[int], total: int) -> list[int]:
    """Sizes of the micro-batches of a cut, largest first; see ``cheapest_cut``."""
    sizes = []
    while total:
        sizes.append(last[total])
        total -= last[total]
    return sorted(sizes, reverse=True)


def own_micro_batches(curves: Sequence[FloatArray], batch: int) -> tuple[float, Allocation] | None:
    """Stages 0 and 1: each device cuts its share into its own micro-batches.

    Devices synchronise once, at the end of the step: min over shares of max_i g_i(B_i), where g_i
    is the cheapest cut. The search is exact, because the answer is one of the values of g: a time
    is enough if the samples that all devices can finish in it reach the batch.

    Args:
        curves: Curve of each device.
        batch: Number of samples to place.

    Returns:
        Seconds of the slowest device, and the micro-batches; ``None`` if no device can take any.
    """
    different = {curve.tobytes(): curve for curve in curves}
    known = {key: cheapest_cut(curve, batch) for key, curve in different.items()}
    cuts = [known[curve.tobytes()] for curve in curves]
    shares = _within_time([best for best, _ in cuts], batch)
    if shares is None:
        return None
    sizes = [_pieces(last, share) for share, (_, last) in zip(shares, cuts, strict=True)]
    length = max(map(len, sizes))
    seconds = max(float(best[share]) for share, (best, _) in zip(shares, cuts, strict=True))
    return seconds, tuple(tuple(own + [0] * (length - len(own))) for own in sizes)


def common_steps(
    curves: Sequence[FloatArray], batch: int, step_s: float
) -> tuple[float, Allocation] | None:
    """Stages 2 and 3: all devices share the number of micro-steps, each with its collectives.

    A micro-step of n samples takes h(n) + step_s, where h(n) is the least t with sum_i max{b :
    curve_i(b) <= t} >= n; the step is the cheapest cut of the batch into micro-steps. Unlike in
    the paper, micro-steps may differ, which makes the answer exact.

    Args:
        curves: Curve of each device.
        batch: Number of samples to place.
        step_s: Seconds of the collectives of a micro-step.

    Returns:
        Seconds of all micro-steps, and the micro-batches; ``None`` if no device can take any.
    """
    most = min(sum(len(curve) - 1 for curve in curves), batch)
    if most == 0:
        return None
    times = np.unique(np.concatenate([curve[1:] for curve in curves]))
    done = sum(np.searchsorted(curve[1:], times, side="right") for curve in curves)
    enough = np.searchsorted(np.asarray(done), np.arange(1, most + 1))
    micro_step = np.concatenate([[0.0], times[enough] + step_s])
    best, last = cheapest_cut(micro_step, batch)
    columns = [_within_time(curves, size) for size in _pieces(last, batch)]
    assert all(column is not None for column in columns)
    rows = zip(*(column for column in columns if column is not None), strict=True)
    return float(best[batch]), tuple(tuple(row) for row in rows)


def _within_time(curves: Sequence[FloatArray], batch: int) -> list[int] | None:
    """Samples of each device with the earliest end of the slowest; ``None`` if too few fit.

    If the devices can take more than the batch in that time, those that end last get fewer.
    """
    times = np.unique(np.concatenate(list(curves)))
    times = times[np.isfinite(times)]

    def most(time: float) -> list[int]:
        return [int(np.searchsorted(curve, time, side="right")) - 1 for curve in curves]

    if sum(most(times[-1])) < batch:
        return None
    enough = bisect_left(times, batch, hi=len(times) - 1, key=lambda time: sum(most(time)))
    shares = most(times[enough])
    ends = [(-float(curves[i][share]), i) for i, share in enumerate(shares) if share]
    heapq.heapify(ends)
    for _ in range(sum(shares) - batch):
        _, index = heapq.heappop(ends)
        shares[index] -= 1
        if shares[index]:
            heapq.heappush(ends, (-float(curves[index][shares[index]]), index))
    return shares


STAGES = (0, 1, 2, 3)  # of ZeRO; 0 divides nothing


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
