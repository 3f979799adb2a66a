"""Rows of two segments: most of the model on some devices, its first or last part on others.

Gradients of the last layers come first and have the whole backward pass to be summed, so that the
last layers may be worth more devices than the first; few layers hold most parameters in some
models. Where such a row changes its devices follows from a closed form, and is drawn too seldom.
"""

import numpy as np

from heterog.agents.stages import kind_of
from heterog.envs.pair import Pair
from heterog.lowering.program import FloatArray, IntArray

NUM_MAIN = 8
"""Number of candidates, the best ones alone, that a row may begin or end with."""
BACKWARD = 2 / 3
"""Part of a block's compute time that is its backward pass."""


def rows_in_segments(pair: Pair, most: int) -> list[IntArray]:
    """The best rows of two segments by ``seconds_of_cuts``.

    Args:
        pair: Model and cluster, without micro-batches.
        most: Most rows.

    Returns:
        Different rows, the fastest first; none of a single block.  # each [G]
    """
    if pair.num_blocks < 2:
        return []
    every = np.arange(pair.num_candidates, dtype=np.int32)
    alone = seconds_of_cuts(pair, every, every)[0]  # all blocks in the second segment
    main = np.argsort(alone, kind="stable")[:NUM_MAIN]
    found: list[tuple[float, int, int, int]] = []
    for number in main.tolist():
        same = np.full(len(every), number, np.int32)
        for first, second in ((same, every), (every, same)):
            seconds = seconds_of_cuts(pair, first, second)[1:]
            cuts = seconds.argmin(axis=0)
            found += [
                (float(seconds[cuts[n], n]), int(cuts[n]) + 1, int(first[n]), int(second[n]))
                for n in range(len(every))
                if first[n] != second[n]
            ]
    rows: dict[object, IntArray] = {}
    for _, cut, first_number, second_number in sorted(set(found)):
        numbers = (first_number, second_number)
        syncs = (pair.table[number].sync for number in numbers)
        kind = cut, *syncs, *kind_of(pair, numbers)
        if kind not in rows:
            rows[kind] = np.repeat(np.array(numbers, np.int32), (cut, pair.num_blocks - cut))
            if len(rows) == most:
                break
    return list(rows.values())


def seconds_of_cuts(pair: Pair, first: IntArray, second: IntArray) -> FloatArray:
    """Estimated seconds of a step for every place of the cut.

    Blocks compute one after another. Backward, the last block first, a block's gradients are
    summed when it is done and those before it have been: f(b) = max(f(b + 1), r(b)) + R(b), with
    R(b) the time of its gradients alone and r(b) the end of its backward pass. The step takes
    until the last are summed. Missing memory counts as time.

    Args:
        pair: Model and cluster.
        first: Candidates of the blocks before the cut.  # [N]
        second: Candidates of the others.  # [N]

    Returns:
        Seconds with the cut before each block.  # [G, N]
    """
    num_blocks, observer = pair.num_blocks, pair.observer
    is_first = np.arange(num_blocks)[None] < np.arange(num_blocks)[:, None]  # [cut, block]
    ready = np.zeros((num_blocks, len(first)))
    for block in range(num_blocks):
        compute = observer.compute_seconds[block]
        ready += np.where(is_first[:, block, None], compute[first], compute[second])
    total = ready.copy()
    ready *= 1.0 - BACKWARD
    done = np.zeros_like(ready)
    for block in reversed(range(num_blocks)):
        own = is_first[:, block, None]
        compute, reduced = observer.compute_seconds[block], observer.sync_seconds[block]
        ready += BACKWARD * np.where(own, compute[first], compute[second])
        done = np.maximum(done, ready) + np.where(own, reduced[first], reduced[second])
    held = pair.held_parts
    before = np.cumsum(held, axis=1) - held
    filled = before[first].T + (held[second].sum(axis=1)[:, None] - before[second]).T
    return np.asarray(
        np.maximum(done, total) * (1.0 + 10.0 * np.maximum(filled - 1.0, 0.0)), np.float64
    )
