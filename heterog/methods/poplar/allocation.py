"""How many samples each device takes, exactly: the searches of Poplar over integer batches.

A *curve* is the seconds of one device for 0, 1, ..., m samples at once, where m is the most that
fits its memory; seconds never fall when samples are added.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from heterog.graph.op_graph import FloatArray

Allocation = tuple[tuple[int, ...], ...]
"""Micro-batches of each device, all of one length, 0 where a device has fewer."""


def cheapest_cut(curve: FloatArray, batch: int) -> tuple[FloatArray, list[int]]:
    """Least seconds for 0 to ``batch`` samples in micro-batches one after another, and last sizes.

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


def own_micro_batches(curves: Sequence[FloatArray], batch: int) -> tuple[float, Allocation] | None:
    """Stages 0 and 1: each device cuts its share into micro-batches of its own.

    The devices meet once, at the end of the step: min over shares of max_i g_i(B_i), where g_i is
    the cheapest cut. Exact: the answer is one of the values of g, and a time is enough if the most
    samples that the devices finish in it add up to the batch.

    Args:
        curves: Curve of each device.
        batch: Number of samples to place.

    Returns:
        Seconds of the slowest device, and the micro-batches; ``None`` if no device can take any.
    """
    known: dict[bytes, tuple[FloatArray, list[int]]] = {}
    for curve in curves:
        if curve.tobytes() not in known:
            known[curve.tobytes()] = cheapest_cut(curve, batch)
    cuts = [known[curve.tobytes()] for curve in curves]
    shares = _within_time([best for best, _ in cuts], batch)
    if shares is None:
        return None
    sizes = []
    for share, (_, last) in zip(shares, cuts, strict=True):
        own: list[int] = []
        left = share
        while left:
            own.append(last[left])
            left -= last[left]
        sizes.append(sorted(own, reverse=True))
    length = max(map(len, sizes))
    seconds = max(float(best[share]) for share, (best, _) in zip(shares, cuts, strict=True))
    return seconds, tuple(tuple(own + [0] * (length - len(own))) for own in sizes)


def common_steps(
    curves: Sequence[FloatArray], batch: int, step_s: float
) -> tuple[float, Allocation] | None:
    """Stages 2 and 3: all devices share the number of micro-steps, each with its collectives.

    A micro-step of n samples takes h(n) + step_s, where h(n) is the least t with sum_i max{b :
    curve_i(b) <= t} >= n; the step is the cheapest cut of the batch into micro-steps. Unlike the
    paper, micro-steps need not be alike: that is what makes the answer exact.

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
    sizes = []
    left = batch
    while left:
        sizes.append(last[left])
        left -= last[left]
    columns = [_within_time(curves, size) for size in sorted(sizes, reverse=True)]
    assert all(column is not None for column in columns)
    rows = zip(*(column for column in columns if column is not None), strict=True)
    return float(best[batch]), tuple(tuple(row) for row in rows)


def _within_time(curves: Sequence[FloatArray], batch: int) -> list[int] | None:
    """Samples of each device so that the slowest ends first; ``None`` if they cannot take all.

    Samples beyond the batch are taken off the device that would end last.
    """
    times = np.unique(np.concatenate(list(curves)))
    times = times[np.isfinite(times)]
    low, high = 0, len(times) - 1

    def most(time: float) -> list[int]:
        return [int(np.searchsorted(curve, time, side="right")) - 1 for curve in curves]

    if sum(most(times[high])) < batch:
        return None
    while low < high:
        middle = (low + high) // 2
        if sum(most(times[middle])) >= batch:
            high = middle
        else:
            low = middle + 1
    shares = most(times[high])
    ends = [(-float(curves[i][share]), i) for i, share in enumerate(shares) if share]
    heapq.heapify(ends)
    for _ in range(sum(shares) - batch):
        _, index = heapq.heappop(ends)
        shares[index] -= 1
        if shares[index]:
            heapq.heappush(ends, (-float(curves[index][shares[index]]), index))
    return shares
