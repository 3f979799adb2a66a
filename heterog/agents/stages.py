"""Pipelines near a drawn one: its devices in other stages, its fastest stages, balanced cuts.

A drawn pipeline gives an order of devices. The rest follows from that order by a dynamic program
and a closed form, while draws hit it too seldom: where each stage ends, whether devices of a host
or of a type share a stage or are successive stages, at which end the model begins, and whether
the slowest stages are worth their messages.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest

import numpy as np

from heterog.envs.pair import CUT_WEIGHTS, Pair
from heterog.lowering.program import IntArray

Sequence = tuple[int, ...]
"""Candidate of each stage."""

MOST_STAGES = 32
"""Most stages of a sequence: its dynamic program and its simulation then take milliseconds."""
PARTS = 1.0, 0.75, 0.5, 0.25
"""Parts of a sequence's stages that are tried alone, the fastest ones."""


def rows_near(pair: Pair, rows: Iterable[IntArray]) -> list[IntArray]:
    """Balanced pipelines on the devices of some rows, in their order or reversed.

    Args:
        pair: Model and cluster, with micro-batches.
        rows: Rows, each with a candidate for each block.  # each [G]

    Returns:
        Different rows, first the best with each number of stages by ``estimated_s``, then the
        second ones, and so on.  # each [G]
    """
    sequences: dict[object, Sequence] = {}
    for row in rows:
        for stages in sequences_near(pair, row):
            sequences.setdefault(kind_of(pair, stages), stages)
    found: dict[bytes, tuple[float, IntArray]] = {}
    for stages in sequences.values():
        for weight in CUT_WEIGHTS[1:]:
            row = balanced(pair, stages, weight)
            found.setdefault(row.tobytes(), (estimated_s(pair, row), row))
    return of_each_length([row for _, row in sorted(found.values(), key=lambda each: each[0])])


def of_each_length(rows: Iterable[IntArray]) -> list[IntArray]:
    """Rows, the first with each number of stages, then the second ones, and so on.

    The coarse evaluator scores with few micro-batches, with which long pipelines seem too slow.
    """
    found: dict[int, list[IntArray]] = {}
    for row in rows:
        found.setdefault(int(np.count_nonzero(np.diff(row))), []).append(row)
    return [row for turn in zip_longest(*found.values()) for row in turn if row is not None]


def sequences_near(pair: Pair, row: IntArray) -> Iterator[Sequence]:
    """Sequences of stages on the row's devices, in both directions; all stages or the fastest.

    Stages are formed in four ways: as drawn, single devices, a stage's devices host by host, and
    successive devices of one type together.
    """
    starts = [0, *(b for b in range(1, len(row)) if row[b] != row[b - 1])]
    drawn = tuple(int(number) for number in row[starts])
    host_of, type_of = pair.cluster.host_of, pair.cluster.type_index
    of_stages = [pair.table[number].devices for number in drawn]
    devices = [device for of_stage in of_stages for device in of_stage]
    by_host = [list(own) for of in of_stages for _, own in groupby(of, host_of.__getitem__)]
    by_type = [list(own) for _, own in groupby(devices, type_of.__getitem__)]
    whole = pair.observer.compute_seconds.sum(axis=0)
    for stages in (
        drawn,
        _candidates(pair, [[device] for device in devices]),
        _candidates(pair, by_host),
        _candidates(pair, by_type),
    ):
        used = [device for number in stages for device in pair.table[number].devices]
        if len(stages) > min(MOST_STAGES, pair.num_blocks) or len(set(used)) < len(used):
            continue
        by_speed = sorted(range(len(stages)), key=lambda stage: whole[stages[stage]])
        for part in PARTS:
            kept = set(by_speed[: max(round(part * len(stages)), 1)])
            if len(kept) > 1:
                some = tuple(each for stage, each in enumerate(stages) if stage in kept)
                yield some
                yield some[::-1]


def kind_of(pair: Pair, stages: Iterable[int]) -> tuple[object, ...]:
    """A key that is equal for sequences that differ only by exchanged hosts of one kind."""
    cluster = pair.cluster
    place: dict[int, int] = {}  # of each host, by first use
    return tuple(
        (
            tuple(
                (
                    place.setdefault(cluster.host_of[device], len(place)),
                    cluster.host_kind[cluster.host_of[device]],
                    cluster.type_index[device],
                )
                for device in pair.table[number].devices
            ),
            pair.table[number].shares,
        )
        for number in stages
    )


def _candidates(pair: Pair, stages: list[list[int]]) -> Sequence:
    """The fastest candidate, gradients included, on each stage's devices; () if one has none."""
    found = [pair.numbers_on.get(tuple(sorted(devices)), []) for devices in stages]
    if not all(found):
        return ()
    seconds = (pair.observer.compute_seconds + pair.observer.sync_seconds).sum(axis=0)
    return tuple(min(numbers, key=lambda number: (seconds[number], number)) for numbers in found)


def estimated_s(pair: Pair, row: IntArray) -> float:
    """Seconds of a pipeline with m micro-batches, by a closed form.

    T = max C(s) + (sum of C(s) - max C(s)) / m + max R(s). C(s) is the time in which stage s
    computes the whole batch, R(s) that of its gradients alone. Missing memory counts as time.
    """
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    blocks = np.arange(len(row))
    compute = np.add.reduceat(pair.observer.compute_seconds[blocks, row], starts)
    reduced = np.add.reduceat(pair.observer.sync_seconds[blocks, row], starts)
    held = pair.held_parts[row[starts]]
    stage_of = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(row)))
    filled = np.add.reduceat(held[stage_of, blocks], starts)
    lacking = float(np.maximum(filled - 1.0, 0.0).max())
    fill = (compute.sum() - compute.max()) / pair.num_micro
    return float((compute.max() + fill + reduced.max()) * (1.0 + 10.0 * lacking))


def balanced(pair: Pair, stages: Sequence, cut_weight: float) -> IntArray:
    """The row of a sequence whose slowest stage is as fast as possible.

    The time of stage s from block a to block b is its compute time and a weighted time of the cut
    after it: T(s, a, b) = sum of C(s, k) for a <= k < b, plus weight X(b). Over the first s stages
    the least time of the slowest is B(s, b) = min over a of max(B(s - 1, a), T(s, a, b)). Missing
    memory counts as time, so that stages that cannot fit overflow as evenly as possible.

    Args:
        pair: Model and cluster.
        stages: Candidate of each stage.
        cut_weight: Weight of the time of a cut, as in ``CUT_WEIGHTS``.
    """
    num_blocks, observer = pair.num_blocks, pair.observer
    crossing = np.append(0.0, observer.cut_seconds * cut_weight)
    crossing[-1] = 0.0
    best = np.full(num_blocks + 1, np.inf)
    best[0] = 0.0
    begins: list[IntArray] = []
    for number in stages:
        before = np.append(0.0, np.cumsum(observer.compute_seconds[:, number]))
        held = np.append(0.0, np.cumsum(pair.held_parts[number]))
        seconds = before[None] - before[:, None] + crossing[None]  # [begin, end]
        over = np.maximum(held[None] - held[:, None] - 1.0, 0.0)
        total = np.maximum(best[:, None], seconds + 10.0 * before[-1] * over)
        total[np.tril_indices(num_blocks + 1)] = np.inf  # every stage has a block
        begins.append(total.argmin(axis=0).astype(np.int32))
        best = total.min(axis=0)
    row, end = np.empty(num_blocks, np.int32), num_blocks
    for number, begin in zip(reversed(stages), reversed(begins), strict=True):
        row[begin[end] : end] = number
        end = int(begin[end])
    return row
