"""Ways to draw strategies from a policy: plain rows and pipelines, from one table or another.

There are up to four: plain rows, and pipelines, in which the policy decides which devices come
next and stages last until these have had their time; and, if parameters and optimizer state alone
fill most devices, both from a table of candidates that divide this state. Half of the draws are
shared out among the ways, and the most promising get the rest. If memory is scarce, half of the
plain rows count it as if every block recomputed.

Rows are exact draws, draws with steady noise, and, if plain, draws given that they change their
candidate one to three times: good rows change seldom, but not never. Pipelines are drawn with
different weights of what crosses their cuts, and colder once they are known to be promising. Of
the best pipelines others are made in the end, on the same devices and in balance (``stages``), and
rows of two segments beside the plain ones (``segments``).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from heterog.agents.policy import PairScores, Policy, Variety, draw, score_pairs
from heterog.agents.segments import rows_in_segments
from heterog.agents.stages import rows_near
from heterog.envs.observation import WHOLE_OVERFLOWS
from heterog.envs.pair import Pair, Score
from heterog.lowering.program import IntArray

TIGHT = 0.5
"""Part of the candidates too small for the whole model from which memory counts as scarce."""
FEWEST_FOR_WAYS = 12
"""Fewest draws for which there is more than one way."""
MOST_CHANGES = 3
"""Most changes of candidate in a third of the plain rows."""
ALIKE = 1.1
"""Step time, in that of the most promising way, up to which other ways are promising, too."""
COLD = 0.5
"""Temperature of half of the pipelines that are drawn because they are promising."""
NUM_BALANCED = 3
"""Number of pipelines of a way, the best ones, that others are made of."""
BALANCED = 0.5
"""Most rows that are made beside the draws, as a part of these."""
AGAIN = 4 / 3
"""Most by which a second forward pass multiplies the time of a step."""


class Way:
    """A way to draw: a table of candidates, with or without micro-batches.

    Attributes:
        rows: Different rows drawn since it began, then those made of them.  # [num_rows, G]
        num_drawn: Number of those drawn.
        promise: (part of memory missing, seconds) of the best of them.
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
        """Begin anew with rows that were never drawn; the promise of those that were is kept."""
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

    def balance(self, most: int) -> None:
        """Add rows that are drawn too seldom: pipelines near the best ones, or two segments."""
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
        num_samples: Number of draws in all; up to ``BALANCED`` as many rows are made beside them.
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
