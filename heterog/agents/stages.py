"""Pipelines near a drawn one: its devices one by one, its fastest stages, its cuts in balance.

A drawn pipeline says which devices come after which. How long each stage lasts, whether the
devices of a host share a stage or are stages behind each other, and whether the slowest stages are
worth their messages follows from that order by a dynamic program, and is drawn too seldom.
"""

from collections.abc import Iterator

import numpy as np

from heterog.envs.pair import CUT_WEIGHTS, Pair
from heterog.strategy.program import FloatArray, IntArray

Sequence = tuple[int, ...]
"""Candidate of each stage."""

MOST_STAGES = 32
"""Most stages of a sequence: its dynamic program and its simulation then take milliseconds."""
PARTS = 1.0, 0.75, 0.5, 0.25
"""Parts of a sequence's stages, the fastest ones, that are tried."""


def rows_near(pair: Pair, row: IntArray) -> Iterator[IntArray]:
    """Rows of pipelines on a row's devices in its order, in balance.

    Args:
        pair: Model and cluster, with micro-batches.
        row: Candidate of each block.  # [G]

    Yields:
        Rows, those with all stages first.  # [G]
    """
    for stages in dict.fromkeys(sequences_near(pair, row)):
        for weight in CUT_WEIGHTS[1:]:
            yield balanced(pair, stages, weight)


def sequences_near(pair: Pair, row: IntArray) -> Iterator[Sequence]:
    """The row's stages and their devices one by one; all of them, and the fastest."""
    starts = [0, *(b for b in range(1, len(row)) if row[b] != row[b - 1])]
    drawn = tuple(int(number) for number in row[starts])
    alone = {d.devices[0]: n for n, d in enumerate(pair.table) if len(d.devices) == 1}
    devices = [device for number in drawn for device in pair.table[number].devices]
    apart = tuple(alone[device] for device in devices if device in alone)
    whole = pair.observer.compute_seconds.sum(axis=0)
    for stages in (drawn, apart if len(apart) == len(devices) else ()):
        used = [device for number in stages for device in pair.table[number].devices]
        if len(stages) > min(MOST_STAGES, pair.num_blocks) or len(set(used)) < len(used):
            continue
        by_speed = sorted(range(len(stages)), key=lambda stage: whole[stages[stage]])
        for part in PARTS:
            kept = set(by_speed[: max(round(part * len(stages)), 1)])
            if len(kept) > 1:
                yield tuple(each for stage, each in enumerate(stages) if stage in kept)


def balanced(pair: Pair, stages: Sequence, cut_weight: float) -> IntArray:
    """The row of a sequence whose slowest stage is as fast as possible.

    The time of stage s from block a to block b is what it computes, and a part of what crosses
    the cut behind it: T(s, a, b) = sum of C(s, k) for a <= k < b + weight X(b). Over the first s
    stages the least time of the slowest is B(s, b) = min over a of max(B(s - 1, a), T(s, a, b)).
    Missing memory counts as time, so that what cannot fit comes out as even as it can.

    Args:
        pair: Model and cluster.
        stages: Candidate of each stage.
        cut_weight: Weight of what crosses a cut, as in ``CUT_WEIGHTS``.
    """
    num_blocks, observer = pair.num_blocks, pair.observer
    crossing = np.append(0.0, observer.cut_seconds * cut_weight)
    crossing[-1] = 0.0
    best = np.full(num_blocks + 1, np.inf)
    best[0] = 0.0
    begins: list[IntArray] = []
    for number in stages:
        before = np.append(0.0, np.cumsum(observer.compute_seconds[:, number]))
        held = np.append(0.0, np.cumsum(_held(pair, number)))
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


def _held(pair: Pair, number: int) -> FloatArray:
    """Part of the memory of a candidate's fullest device that each block fills.  # [G]"""
    memory, decision = pair.memory, pair.table[number]
    devices, shares = list(decision.devices), np.array(decision.shares)
    room = memory.usable_bytes[devices] - memory.common_bytes
    state = memory.state_bytes * memory.state_part(decision) + memory.gradient_bytes
    bytes_held = state[:, None] + memory.saved_bytes_per_sample[:, None] * shares
    return np.asarray((bytes_held / room).max(axis=1), np.float64)
