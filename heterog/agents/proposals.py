"""What a policy proposes: draws, scored coarsely, the best of them at the op level.

A policy decides the rows: device set, shares and synchronisation of every block. What holds for
the whole step is no part of a row, and tried here for the best rows: micro-batches, and
recomputation in every block.

A third of the draws are pipelines: blocks stay on the devices of the block before until these have
had their time, and go on to others. Where memory is scarce, half of the rest mind the memory as if
every block recomputed. Where parameters and optimizer state fill most devices alone, half of all
draws are from the table of candidates that divide this state.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from heterog.planners.data_parallel import device_speeds
from heterog.planners.planner import Candidate, Task
from heterog.simulator.evaluator import UNROLLED_STEPS
from heterog.strategy.program import IntArray
from heterog.strategy.space import StrategySpace
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES

if TYPE_CHECKING:
    from heterog.agents.policy import PairScores, Policy
    from heterog.envs.pair import Pair

NUM_SAMPLES = 64
NUM_RESCORED = 8
NUM_RETURNED = 4
BUCKETS = (0, DEFAULT_BUCKET_BYTES)
NUM_VARIED = 6
TIGHT = 0.5
"""Part of the candidates that cannot hold the whole model from which memory counts as scarce."""
MICRO_BATCHES = (2, 4, 8, 16)
PIPELINED, NUM_PIPELINED = 8, 6
"""Micro-batches of rows that are drawn as pipelines, and how many of these are rescored."""
STAGE_LIMITS = 1.1, 2.5
"""Compute time of a pipeline's devices over the least that all devices together need."""
MOST_TASKS = 3_000_000
"""Simulated at the op level in all, about half a second: an answer shall not take longer."""
HOPELESS = 0.05
"""Memory missing by the coarse evaluator, as a part, from which a row is left to other ways."""

Scored = tuple[tuple[float, float], Candidate]
"""(bytes missing, seconds) of a candidate."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """What a policy proposes for a task.

    Attributes:
        candidates: the best by the op-level evaluator, best first.
        num_evaluations: coarse and op-level simulations.
        pair: model and cluster as the policy sees them.
        scores: the policy's scores, for more draws.
        out_of_memory: part of the draws that do not fit, by the coarse evaluator.
    """

    candidates: tuple[Candidate, ...]
    num_evaluations: int
    pair: "Pair"
    scores: "PairScores"
    out_of_memory: float


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Whole:
    """What holds for the whole step.

    Attributes:
        bucket_bytes: as in ``Strategy``.
        num_micro: micro-batches that the batch is cut into evenly.
        recompute: whether every group recomputes.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    num_micro: int = 1
    recompute: bool = False


def propose(
    task: Task, network: "Policy", num_samples: int = NUM_SAMPLES, *, name: str = ""
) -> Proposed:
    """Draw strategies for a task and choose the best.

    Args:
        task: graph, cluster, seed; evaluations beyond its budget are not made.
        network: the policy.
        num_samples: draws, the greedy one included.
        name: of the policy, for logs.
    """
    from heterog.envs.pair import Pair

    if task.budget.evaluations is not None:
        # A fifth of a small budget is left for the op level.
        num_samples = max(min(num_samples, int(0.8 * task.budget.evaluations)), 1)
    evaluator = task.evaluator
    whole = Pair(evaluator.graph, evaluator.cluster, evaluator.cost_model)
    divided = whole.divided() if num_samples > 1 else None
    pairs = [whole] if divided is None else [whole, divided]
    rng = np.random.default_rng([task.seed, 64])
    parts = [_ask(task, network, pair, num_samples // len(pairs), rng) for pair in pairs]
    best = min(parts, key=lambda part: part.scored[0][0])
    scored = sorted((row for part in parts for row in part.scored), key=lambda row: row[0])
    found = Proposed(
        candidates=tuple(candidate for _, candidate in scored[:NUM_RETURNED]),
        num_evaluations=sum(part.num_evaluations for part in parts),
        pair=best.pair,
        scores=best.scores,
        out_of_memory=float(np.mean([part.out_of_memory for part in parts])),
    )
    _log.info(
        "policy %s, seed %d: %d draws for %s, %.0f %% do not fit",
        name or "in training", task.seed, num_samples, whole.name, 100.0 * found.out_of_memory,
    )  # fmt: skip
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Answers from one table of candidates."""

    scored: list[Scored]
    num_evaluations: int
    pair: "Pair"
    scores: "PairScores"
    out_of_memory: float


def _ask(
    task: Task, network: "Policy", pair: "Pair", num_samples: int, rng: np.random.Generator
) -> _Part:
    """Draw rows of one table, and score the best at the op level."""
    from heterog.agents.policy import draw, score_pairs
    from heterog.envs.observation import WHOLE_OVERFLOWS
    from heterog.envs.pair import RunningStages

    scores = score_pairs(network, [pair])[0]
    num_piped = num_samples // 3 if pair.graph.batch_size >= PIPELINED else 0
    num_samples -= num_piped
    tight = bool((pair.observation.candidates[:, WHOLE_OVERFLOWS] > 0.5).mean() > TIGHT)
    loose = (num_samples - 1) // 2 if tight else 0
    greedy = draw(scores, pair, 1, rng, greedy=True).rows
    plain = draw(scores, pair, num_samples - 1 - loose, rng).rows
    recomputed = draw(scores, pair, loose, rng, recompute=True).rows
    rows = np.unique(np.concatenate([greedy, plain, recomputed]), axis=0)
    found = [pair.score(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda n: found[n].preference)
    fit = [n for n in order if found[n].overflow <= HOPELESS] if tight else order
    ways: list[tuple[IntArray, Whole]] = []
    if tight:  # by seconds alone: what does not fit may fit if it recomputes
        loosely = sorted(range(len(rows)), key=lambda n: found[n].step_time_s)
        ways += [(rows[n], Whole(recompute=True)) for n in loosely[:NUM_RESCORED]]
    stages = RunningStages(pair, np.geomspace(*STAGE_LIMITS, num_piped))
    drawn = np.unique(draw(scores, pair, num_piped, rng, stages=stages).rows, axis=0)
    lightest = sorted(drawn, key=pair.floor_s)[: 2 * NUM_PIPELINED]
    fastest = sorted(lightest, key=lambda row: pair.score(row, PIPELINED).preference)
    ways += [(row, Whole(num_micro=PIPELINED)) for row in fastest[:NUM_PIPELINED]]
    spent = len(rows) + len(lightest)
    scorer = _Scorer(task, pair, spent)
    scorer.search(rows[fit or order[:1]], ways)
    return _Part(
        scored=scorer.candidates(),
        num_evaluations=spent + scorer.num_evaluations,
        pair=pair,
        scores=scores,
        out_of_memory=float(np.mean([each.overflow > 0.0 for each in found])),
    )


def rescore(
    task: Task, pair: "Pair", rows: IntArray, *, spent: int
) -> tuple[tuple[Candidate, ...], int]:
    """Score the first rows at the op level, in both bucket sizes, and vary the whole step.

    For the best few, micro-batches are tried as well, twice as many while that helps, and
    recomputation where nothing fits without.

    Args:
        task: what the rows are for.
        pair: its model and cluster.
        rows: best first by the coarse evaluator.
        spent: evaluations of the task's budget that are gone.

    Returns:
        The best candidates, best first, and the evaluations made.
    """
    scorer = _Scorer(task, pair, spent)
    scorer.search(rows)
    return tuple(candidate for _, candidate in scorer.candidates()), scorer.num_evaluations


class _Scorer:
    """Scores rows at the op level, whatever holds for the whole step."""

    def __init__(self, task: Task, pair: "Pair", spent: int) -> None:
        evaluator = task.evaluator
        self._task = task
        self._pair = pair
        self._left = math.inf
        if task.budget.evaluations is not None:
            self._left = max(task.budget.evaluations - spent, 1)
        self._space = StrategySpace(
            evaluator.graph,
            evaluator.cluster,
            evaluator.tables,
            evaluator.channels,
            device_speeds(evaluator),
            pair.table,
        )
        self._num_tasks = 0
        self._scored: dict[tuple[bytes, Whole], tuple[float, float]] = {}
        again = [replace(decision, recompute=True) for decision in pair.table]
        self._recomputing = np.array([self._space.add(each) for each in again], np.int32)

    @property
    def num_evaluations(self) -> int:
        """Made so far."""
        return len(self._scored)

    def search(
        self,
        rows: IntArray,
        ways: Sequence[tuple[IntArray, Whole]] = (),
    ) -> None:
        """Score the first rows, and ways to run others; vary the best."""
        count = NUM_RESCORED
        if self._left < math.inf:
            count = max(min(count, int(self._left) // len(BUCKETS)), 1)
        for row in rows[:count]:
            for bucket_bytes in BUCKETS:
                self.score(row, Whole(bucket_bytes=bucket_bytes))
        for row, whole in ways:
            self.score(row, whole)
        for row, whole in self.best_rows(NUM_VARIED):
            self.vary(row, whole)

    def score(
        self, row: IntArray, whole: Whole, best: tuple[float, float] = (np.inf, np.inf)
    ) -> tuple[float, float]:
        """(bytes missing, seconds); infinitely many if it is sure to be slower than the best.

        Nothing is found out once the budget is spent.
        """
        key = np.asarray(row, np.int32).tobytes(), whole
        if key in self._scored:
            return self._scored[key]
        if len(self._scored) >= self._left or self._num_tasks > MOST_TASKS:
            return np.inf, np.inf
        task = self._task
        choice = self._space.encode(
            self._groups(row, whole),
            bucket_bytes=whole.bucket_bytes,
            num_steps=1 if task.step_barrier else UNROLLED_STEPS,
            micro_batches=self._space.micro_batches(whole.num_micro),
        )
        judge = task.orders[min(1, len(task.orders) - 1)]
        limit_s = best[1] if best[0] == 0.0 else np.inf
        self._scored[key] = task.evaluator.evaluate_choice(choice, judge, limit_s).preference
        self._num_tasks += task.evaluator.num_tasks
        return self._scored[key]

    def best(self, count: int) -> list[tuple[IntArray, Whole]]:
        """The best so far, best first."""
        keys = sorted(self._scored, key=lambda key: (self._scored[key], key))
        return [(np.frombuffer(row, np.int32), whole) for row, whole in keys[:count]]

    def best_rows(self, count: int) -> list[tuple[IntArray, Whole]]:
        """The best different rows so far, each in its best way, best first."""
        first: dict[bytes, tuple[IntArray, Whole]] = {}
        for row, whole in self.best(len(self._scored)):
            first.setdefault(row.tobytes(), (row, whole))
        return list(first.values())[:count]

    def vary(self, row: IntArray, whole: Whole) -> None:
        """Try what else may hold for the whole step."""
        best = self._saved(row, whole, self.score(row, whole))
        for num_micro in MICRO_BATCHES:
            if num_micro > self._pair.graph.batch_size:
                return
            # Smaller micro-batches need less memory: perhaps nothing has to run twice.
            cut = replace(whole, num_micro=num_micro, recompute=False)
            found = self.score(row, cut, best)
            if best[0] == 0.0 and found >= best and num_micro > whole.num_micro:
                return
            best = self._saved(row, cut, min(best, found))

    def _saved(
        self, row: IntArray, whole: Whole, best: tuple[float, float]
    ) -> tuple[float, float]:
        """The best, or the same recomputing if nothing fits."""
        if best[0] == 0.0:
            return best
        return min(best, self.score(row, replace(whole, recompute=True), best))

    def candidates(self) -> list[Scored]:
        """The best strategies with their scores, best first."""
        return [
            (
                self.score(row, whole),
                Candidate(
                    strategy=self._space.decode(
                        self._groups(row, whole),
                        bucket_bytes=whole.bucket_bytes,
                        step_barrier=self._task.step_barrier,
                        micro_batches=self._space.micro_batches(whole.num_micro),
                    ),
                    orders=self._task.orders,
                ),
            )
            for row, whole in self.best(NUM_RETURNED)
        ]

    def _groups(self, row: IntArray, whole: Whole) -> IntArray:
        """Number of every group's decision in the space."""
        groups = self._pair.groups(row)
        return self._recomputing[groups] if whole.recompute else groups
