"""Search for good rows of a pair, from which imitation learns.

The search starts from uniform rows (the most promising by their analytic times) or from balanced
pipelines, then anneals over segments of blocks with the coarse evaluator. In a pair with
micro-batches it searches pipelines of disjoint stages only, because its policy cannot draw other
rows. The best different rows are the *elites*. Half or more of the segments that annealing leaves
are useless, so elites lose these: a policy that imitated them would change devices for no reason.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from heterog.envs.observation import WHOLE_OVERFLOWS, WHOLE_SLOWER, WHOLE_SUM
from heterog.envs.pair import Pair, RunningMemory, Score
from heterog.lowering.program import IntArray

NUM_ELITES = 6  # most rows returned; four times as many are kept
_HALVINGS = 12  # bisections of the limit on a stage's seconds
_MOST_IDLE = 3  # annealing runs in a row without a new row after which the search ends
CLOSE = 0.01
"""Most by which an elite is slower than the best one, as a part."""
SIMPLIFY_FROM = 0.8
"""Part of the evaluations after which elites lose segments that gain nothing."""
GAINS_NOTHING = 2e-3
"""Largest relative rise of the step time for which an elite loses a segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elites:
    """The result of a search of one pair.

    Attributes:
        rows: The best rows, best first.  # [num_elites, G]
        step_time_s: Step time of the best row.
        overflow: Overflow of the best row, 0 if it fits.
        uniform_s: Step time of the best uniform row that fits; infinite if none does.
        num_evaluations: Number of rows simulated.
    """

    rows: IntArray
    step_time_s: float
    overflow: float
    uniform_s: float
    num_evaluations: int

    @property
    def headroom(self) -> float:
        """Natural logarithm of the gain over the best uniform row, 0 to 1; 1 if none fits."""
        if self.overflow > 0.0:
            return 0.0
        return min(max(math.log(self.uniform_s / self.step_time_s), 0.0), 1.0)


def find_elites(
    pair: Pair,
    num_evaluations: int,
    rng: np.random.Generator,
    starts: Sequence[npt.NDArray[np.integer]] = (),
) -> Elites:
    """Search a pair.

    Args:
        pair: Model and cluster.
        num_evaluations: Most rows that may be simulated.
        rng: Generator for every draw.
        starts: Rows to start from beside the uniform ones, such as a policy's own samples.
    """
    return _Search(pair, num_evaluations, rng).run(starts)


class _Search:
    def __init__(self, pair: Pair, num_evaluations: int, rng: np.random.Generator) -> None:
        self.pair, self.rng = pair, rng
        self.budget = num_evaluations
        self.devices = [frozenset(decision.devices) for decision in pair.table]
        self.cost: dict[bytes, float] = {}
        self.best: list[tuple[float, bytes]] = []
        self.seen: dict[bytes, Score] = {}

    @property
    def spent(self) -> int:
        """Number of rows simulated so far."""
        return len(self.seen)

    def run(self, starts: Sequence[npt.NDArray[np.integer]]) -> Elites:
        pair = self.pair
        promise = pair.observation.candidates
        # The analytic time of compute or synchronisation, whichever is slower, counts most; rows
        # that do not fit come last.
        order = np.argsort(
            promise[:, WHOLE_SLOWER]
            + 0.5 * promise[:, WHOLE_SUM]
            + 5.0 * promise[:, WHOLE_OVERFLOWS]
        )
        # Pipelines are only compared with uniform rows, not made from them.
        part = 5 if pair.num_micro == 1 else 20
        num_uniform = max(min(self.budget // part, pair.num_candidates), 1)
        uniform_s = math.inf
        for number in order[:num_uniform]:
            row = np.full(pair.num_blocks, number, np.int32)
            self._cost(row)
            score = self._score(row)
            if score.overflow == 0.0:
                uniform_s = min(uniform_s, score.step_time_s)
        for start in starts:
            self._cost(np.asarray(start, np.int32))
        favourites = order[: max(num_uniform // 2, 4)].astype(np.int32)
        until, longest = int(SIMPLIFY_FROM * self.budget), max(self.budget // 5, 50)
        idle = 0
        while self.best and self.spent < until and idle < _MOST_IDLE:
            spent = self.spent
            # Each run starts from one of the best rows, from the very best most often.
            rank = min(int(self.rng.exponential(2.0)), len(self.best) - 1)
            row = np.frombuffer(self.best[rank][1], np.int32)
            self._anneal(row, favourites, min(until - self.spent, longest))
            idle = idle + 1 if self.spent == spent else 0
        limit = self.best[0][0] * (1.0 + CLOSE) if self.best else 0.0
        close = [np.frombuffer(key, np.int32) for cost, key in self.best if cost <= limit]
        rows = {row.tobytes(): row for row in map(self._simpler, close[:NUM_ELITES])}
        best = (
            self.seen[self.best[0][1]]
            if self.best
            else Score(step_time_s=math.inf, overflow=math.inf)
        )
        return Elites(
            rows=np.array([*rows.values()], np.int32).reshape(-1, pair.num_blocks),
            step_time_s=best.step_time_s,
            overflow=best.overflow,
            uniform_s=uniform_s,
            num_evaluations=self.spent,
        )

    def _score(self, row: IntArray) -> Score:
        key = row.tobytes()
        if key not in self.seen:
            self.seen[key] = self.pair.score(row)
        return self.seen[key]

    def _cost(self, row: IntArray) -> float:
        """Seconds with a charge for missing memory; infinite for rows that cannot be drawn."""
        key = row.tobytes()
        if key not in self.cost:
            if self.pair.num_micro > 1 and not self._is_pipeline(row):
                return math.inf
            score = self._score(row)
            charge = 1.0 if score.overflow == 0.0 else 10.0 * (1.0 + score.overflow)
            self.cost[key] = cost = score.step_time_s * charge
            if cost < (self.best[-1][0] if len(self.best) == 4 * NUM_ELITES else math.inf):
                self.best.append((cost, key))
                self.best.sort()
                del self.best[4 * NUM_ELITES :]
        return self.cost[key]

    def _is_pipeline(self, row: IntArray) -> bool:
        """Whether there are two or more stages, which share no device."""
        stages = [devices for devices, _ in groupby(self.devices[number] for number in row)]
        return len(stages) > 1 and len(frozenset().union(*stages)) == sum(map(len, stages))

    def _anneal(self, start: IntArray, favourites: IntArray, num_moves: int) -> None:
        """One run of simulated annealing, cooling from 3 % to 0.1 % of the cost."""
        row, cost = start, self._cost(start)
        stop = self.spent + num_moves
        move, repeats = 0, 0
        while self.spent < stop and repeats < 10 * num_moves:
            temperature = 0.03 * cost * 0.03 ** (move / num_moves)
            neighbour = self._neighbour(row, favourites)
            spent = self.spent
            new = self._cost(neighbour)
            repeats += 1
            move += self.spent - spent
            if new < cost or self.rng.random() < math.exp((cost - new) / temperature):
                row, cost = neighbour, new

    def _simpler(self, row: IntArray) -> IntArray:
        """The row without the segments that gain nothing, the shortest ones first."""
        limit = self._cost(row) * (1.0 + GAINS_NOTHING)
        while True:
            for simpler in _with_a_segment_less(row):
                if self.spent >= self.budget and simpler.tobytes() not in self.cost:
                    return row
                if self._cost(simpler) <= limit:
                    row = simpler
                    break
            else:
                return row

    def _neighbour(self, row: IntArray, favourites: IntArray) -> IntArray:
        """Change the candidate of a segment of blocks; in a pipeline, perhaps of a whole stage."""
        num_blocks, rng = len(row), self.rng
        if self.pair.num_micro > 1 and rng.random() < 0.4:
            return self._restaged(row)
        # Short segments are as likely as long ones, because both find boundaries.
        length = min(max(int(math.exp(rng.uniform(0.0, math.log(num_blocks + 1)))), 1), num_blocks)
        first = int(rng.integers(num_blocks - length + 1))
        last = first + length
        changed = row.copy()
        kind = rng.random()
        if kind < 0.45:  # the candidate of a neighbouring block: shifts or removes a boundary
            near = first - 1 if (rng.random() < 0.5 and first > 0) else last
            changed[first:last] = row[min(near, num_blocks - 1)]
        elif kind < 0.65:  # another candidate on the same devices
            table = self.pair.table
            devices = table[row[first]].devices
            alike = [n for n, decision in enumerate(table) if decision.devices == devices]
            changed[first:last] = alike[rng.integers(len(alike))]
        elif kind < 0.85:
            changed[first:last] = favourites[rng.integers(len(favourites))]
        else:
            changed[first:last] = rng.integers(self.pair.num_candidates)
        return changed

    def _restaged(self, row: IntArray) -> IntArray:
        """Exchange two stages' candidates, or give a stage devices that no other stage uses."""
        stage = np.cumsum([0, *(a != b for a, b in pairwise(self.devices[n] for n in row))])
        one, other = self.rng.integers(stage[-1] + 1, size=2)
        changed = row.copy()
        if one != other:
            first, second = row[stage == one][0], row[stage == other][0]
            changed[stage == one], changed[stage == other] = second, first
            return changed
        taken = frozenset().union(*(self.devices[number] for number in row[stage != one]))
        free = [number for number, devices in enumerate(self.devices) if not devices & taken]
        changed[stage == one] = free[self.rng.integers(len(free))]
        return changed


def _with_a_segment_less(row: IntArray) -> Iterator[IntArray]:
    """The rows with one segment joined to the one before or after it, shortest first."""
    edges = [0, *np.flatnonzero(np.diff(row)) + 1, len(row)]
    for first, last in sorted(pairwise(edges), key=lambda segment: segment[1] - segment[0]):
        for near in (first - 1, last):
            if 0 <= near < len(row):
                simpler = row.copy()
                simpler[first:last] = row[near]
                yield simpler


def balanced_stages(pair: Pair, count: int, rng: np.random.Generator) -> IntArray:
    """Rows of random sequences of stages, cut so that the slowest stage is as fast as possible.

    Stages are single devices or hosts: a random number of the fastest ones, sorted by speed in
    either direction or in random order. A stage also ends when it has no memory left.

    Returns:
        The rows that reach the last block.  # [at most count, G]
    """
    whole = pair.observer.compute_seconds.sum(axis=0)
    fastest: dict[tuple[int, ...], int] = {}  # candidate of each device set
    for number in np.argsort(whole + pair.observer.sync_seconds.sum(axis=0)):
        fastest.setdefault(pair.table[number].devices, int(number))
    cluster = pair.cluster
    hosts = set(cluster.host_devices)
    levels = [
        [fastest[devices] for devices in sorted(kind & set(fastest))]
        for kind in ({(device,) for device in range(cluster.num_devices)}, hosts)
    ]
    levels = [sorted(level, key=whole.__getitem__) for level in levels if len(level) > 1]
    if not levels:
        return np.zeros((0, pair.num_blocks), np.int32)
    longest = max(len(level) for level in levels)
    stages = np.full((count, longest + 1), -1, np.int32)  # candidate of each stage, then none
    for row in range(count):
        level = levels[rng.integers(len(levels))]
        size = len(level) if rng.random() < 0.5 else int(rng.integers(2, len(level) + 1))
        kept = level[:size][:: 1 if rng.random() < 0.5 else -1]
        stages[row, :size] = rng.permutation(kept) if rng.random() < 0.4 else kept
    low, high = np.zeros(count), np.full(count, whole[stages[:, 0]].max())
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        done = _fill(pair, stages, middle)[1]
        low, high = np.where(done, low, middle), np.where(done, middle, high)
    rows, done = _fill(pair, stages, high)
    return np.unique(rows[done], axis=0)


def _fill(
    pair: Pair, stages: IntArray, limit_s: npt.NDArray[np.float64]
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Put blocks on stages one after another; return (rows, whether all blocks were placed)."""
    memory = RunningMemory(pair, len(stages))
    every = np.arange(len(stages))
    rows = np.zeros((len(stages), pair.num_blocks), np.int32)
    stage, load = np.zeros(len(stages), np.int64), np.zeros(len(stages))
    done = np.ones(len(stages), np.bool_)
    for block, seconds in enumerate(pair.observer.compute_seconds):
        fits = memory.fits()
        candidate = stages[every, stage]
        is_over = (load + seconds[candidate] > limit_s) | ~fits[every, candidate]
        stage += is_over & done
        done &= stages[every, stage] >= 0
        stage -= ~done & (stages[every, stage] < 0)  # no stage left: the last one takes the rest
        rows[:, block] = candidate = stages[every, stage]
        load = np.where(is_over, 0.0, load) + seconds[candidate]
        done &= load <= limit_s
        memory.add(candidate)
    return rows, done
