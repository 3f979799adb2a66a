"""Ways to draw strategies from a policy: plain rows and pipelines, from one table or another.

There are up to four ways: plain rows and pipelines, each from one or two tables of candidates. In
a pipeline, the policy draws the devices of the next stage when the current stage has reached its
time. If parameters and optimizer state alone fill most devices, the second table has candidates
that divide this state. Half of the draws are divided among the ways; the most promising ways get
the rest. If memory is scarce, half of the plain rows are drawn as if every block recomputed.

Some draws are exact, others have steady noise, and a third of the plain rows change their
candidate one to three times, because good rows change seldom. Pipelines are drawn with different
weights of cuts, and at a lower temperature once they are promising. At the end, balanced pipelines
on the same devices are made near the best ones (``stages``), and rows of two segments beside plain
ones.

A row of two segments has most of the model on some devices, and its first or last part on others.
Gradients of the last layers come first and can be summed during the whole backward pass, so the
last layers may be worth more devices than the first ones; in some models, few layers hold most
parameters. A closed form finds where such a row should change its devices; draws seldom do.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from heterog.agents.policy import PairScores, Policy, Variety, draw, score_pairs
from heterog.agents.stages import kind_of, rows_near
from heterog.envs.observation import WHOLE_OVERFLOWS
from heterog.envs.pair import Pair, Score
from heterog.lowering.program import FloatArray, IntArray
from heterog.strategy.sync import Sync

NUM_MAIN = 8
"""Number of the best candidates, one of which each row of two segments has."""
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

    Blocks compute one after another, in the backward pass from last to first. A block's gradients
    are summed once its backward pass ends and those of later blocks are summed: f(b) = max(f(b +
    1), r(b)) + R(b), with R(b) the time of its gradients alone and r(b) the end of its backward
    pass. The step ends with the last sum. Missing memory counts as time.

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


TIGHT = 0.5
"""Memory is scarce if the whole model does not fit on more than this part of the candidates."""
FEWEST_FOR_WAYS = 12
"""Fewest draws with more than one way."""
MOST_CHANGES = 3
"""Most changes of candidate in a third of the plain rows."""
ALIKE = 1.1
"""Ratio to the step of the most promising way up to which other ways are promising, too."""
COLD = 0.5
"""Temperature of half of the pipelines that are drawn because they are promising."""
FEWER = 2 / 3
"""Most devices of the next uniform row, as a part of those of the last. Uniform rows complement a
few draws, which may all be on too many devices: the closed form does not see that messages wait
for each other."""
NUM_BALANCED = 3
"""Number of a way's best pipelines near which others are made."""
BALANCED = 0.5
"""Most rows that are made beside the draws, as a part of the draws."""
AGAIN = 4 / 3
"""Largest factor of a second forward pass on the time of a step."""


class Way:
    """A way to draw: a table of candidates, with or without micro-batches.

    Attributes:
        rows: Different rows drawn since it began, then rows made from them.  # [num_rows, G]
        num_drawn: Number of drawn rows.
        promise: (part of memory missing, seconds) of the best drawn row.
    """

    def __init__(self, pair: Pair, scores: PairScores) -> None:
        self.pair, self.scores = pair, scores
        self.rows: IntArray = np.zeros((0, pair.num_blocks), np.int32)
        self.num_drawn = 0
        self._known: set[bytes] = set()
        self.promise = (math.inf, math.inf)
        overflows = pair.observation.candidates[:, WHOLE_OVERFLOWS] > 0.5
        self.is_tight = bool(overflows.mean() > TIGHT) and pair.num_micro == 1

    def begin_again(self) -> None:
        """Begin again without rows; known rows are not drawn again, but their promise is kept."""
        self._known |= {row.tobytes() for row in self.rows}
        self.rows, self.num_drawn = self.rows[:0], 0

    def draw(self, count: int, rng: np.random.Generator, *, greedy: bool = False) -> None:
        """Add rows; if memory is scarce, half of them as if every block recomputed."""
        loose = count // 2 if self.is_tight else 0
        drawn = partial(draw, self.scores, self.pair, rng=rng)
        free = count - loose
        if greedy:
            mindful = drawn(free, greedy=True).rows
        elif self.pair.num_micro > 1:
            cold = free // 2 if len(self.rows) else 0
            mindful = np.concatenate([
                drawn(free - cold, variety=Variety(num_steady=(free - cold) // 2)).rows,
                drawn(cold, variety=Variety(num_steady=cold // 2, temperature=COLD)).rows,
            ])  # fmt: skip
        else:
            few = free // 3
            changes = 1 + np.arange(few, dtype=np.int32) % MOST_CHANGES
            mindful = np.concatenate([
                drawn(free - few, variety=Variety(num_steady=(free - few) // 2)).rows,
                drawn(few, variety=Variety(num_changes=changes)).rows,
            ])  # fmt: skip
        again = Variety(num_steady=loose // 2, recompute=True)
        recomputed = drawn(loose, variety=again).rows
        rows = np.unique(np.concatenate([self.rows, mindful, recomputed]), axis=0)
        is_new = np.array([row.tobytes() not in self._known for row in rows], np.bool_)
        self.rows = rows[is_new]
        self.num_drawn = len(self.rows)
        for row in mindful:
            self.promise = min(self.promise, self.pair.score(row).preference)
        for row in recomputed:
            self.promise = min(self.promise, (0.0, AGAIN * self.pair.score(row).step_time_s))

    def add_uniform(self, most: int) -> None:
        """Add uniform rows: for each synchronisation, the fastest on ever fewer devices."""
        every = np.arange(self.pair.num_candidates, dtype=np.int32)
        seconds = seconds_of_cuts(self.pair, every, every)[0]
        sizes = np.array([len(each.devices) for each in self.pair.table])
        rows, smallest = [], dict[Sync, float]()
        for number in np.lexsort((seconds, -sizes)).tolist():
            sync = self.pair.table[number].sync
            if sizes[number] <= FEWER * smallest.get(sync, math.inf):
                smallest[sync] = sizes[number]
                rows.append(np.full((1, self.pair.num_blocks), number, np.int32))
        new = [row for row in rows if row.tobytes() not in self._known][:most]
        self.rows = np.unique(np.concatenate([self.rows, *new]), axis=0)

    def balance(self, most: int) -> None:
        """Add rows that are drawn too seldom: pipelines near the best, or two segments."""
        if not len(self.rows):
            return
        known = self._known | {row.tobytes() for row in self.rows}
        if self.pair.num_micro == 1:
            near = rows_in_segments(self.pair, most)
        else:
            ranked = sorted(self.rows, key=lambda row: self.pair.score(row).preference)
            near = rows_near(self.pair, ranked[:NUM_BALANCED])
        found = [row for row in near if row.tobytes() not in known][:most]
        self.rows = np.concatenate([self.rows, *(row[None] for row in found)])

    @property
    def found(self) -> list[Score]:
        """The coarse evaluator's score of each row."""
        return [self.pair.score(row) for row in self.rows]


def make_ways(network: Policy, tables: Sequence[Pair], num_samples: int) -> list[Way]:
    """Ways from each table without micro-batches, then from each with them.

    Args:
        network: The policy.
        tables: Pairs that differ in their candidates.
        num_samples: Number of draws to come; for few, only the first table is a way.
    """
    pairs = list(tables)
    if num_samples >= FEWEST_FOR_WAYS:
        pairs += [twin for twin in (pair.pipelined() for pair in tables) if twin is not None]
    return [Way(*each) for each in zip(pairs, score_pairs(network, pairs), strict=True)]


def draw_in(
    ways: Sequence[Way],
    num_samples: int,
    rng: np.random.Generator,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Draw: half is divided evenly, the rest goes to the most promising ways.

    Args:
        ways: Ways; the first one's first draw is the greedy one.
        num_samples: Number of draws in all; at most ``BALANCED`` times as many rows are made.
        rng: Generator for the draws.
        check: Called between draws, after the greedy one; an exception from it ends them.
    """
    ways[0].draw(1, rng, greedy=True)
    first = num_samples if len(ways) == 1 else num_samples // 2 // len(ways)
    for number, way in enumerate(ways):
        check()
        way.draw(first - (number == 0), rng)
    if len(ways) > 1:
        missing, seconds = min(way.promise for way in ways)
        best = [way for way in ways if way.promise <= (missing, ALIKE * seconds)]
        left = num_samples - first * len(ways)
        for number, way in enumerate(best):
            check()
            way.draw(left // len(best) + (number < left % len(best)), rng)
    if len(ways) == 1:
        return
    for way in ways:
        check()
        way.balance(int(BALANCED * num_samples) // len(ways))
