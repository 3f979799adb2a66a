"""A policy's proposals: draws, scored coarsely, and the best of them at the op level.

A policy decides the rows: device set, shares and synchronisation of every block. Settings of the
whole step are no part of a row, and are tried here for the best rows: micro-batches, recomputation
in as few blocks as it takes to fit, and what ``finishing`` has words for: teams inside hosts, caps
and split backward passes, stages in a V. The rows are drawn in ``ways``.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from heterog.agents.finishing import PLAIN, SCHEDULES_TRIED, Finish, Finisher, moved_cuts
from heterog.errors import StrategyError
from heterog.planners.data_parallel import device_speeds
from heterog.planners.planner import Candidate, Problem
from heterog.planners.recomputing import kinds_worth_trying
from heterog.planners.teams import without_needless_rules
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import UNROLLED_STEPS, Outcome
from heterog.strategy.program import IntArray
from heterog.strategy.space import StrategySpace
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Keeps

if TYPE_CHECKING:
    from heterog.agents.policy import PairScores, Policy
    from heterog.agents.ways import Way
    from heterog.envs.pair import Pair

NUM_SAMPLES = 64
NUM_RESCORED = 8
NUM_RETURNED = 4
BUCKETS = (0, DEFAULT_BUCKET_BYTES)
NUM_VARIED = 6
MICRO_BATCHES = (2, 4, 8, 16)
NUM_FINISHED = 2
"""Number of different pipelined rows that get teams and schedules."""
MOST_BEHIND = 1.5
"""Step time over the best row's up to which such a row may win by them; on cases that no policy
was held against, they took rows at most 1.26 times further."""
MOST_FINISHED_TASKS = 1_000_000
"""Most tasks simulated at the op level for these."""
NUM_PIPELINED = 5
"""Number of rows drawn as pipelines, and of those made of them, scored at the op level."""
MOST_TASKS = 3_000_000
"""Most tasks simulated at the op level for a table, half a second's work."""
_HALVINGS = 3
FILLED = 0.98
"""Most of a device's memory that strategies may fill which recompute just enough to fit: the
referee's schedule may need more than the engine's."""
HOPELESS = 0.05
"""Missing part of memory, by the coarse evaluator, from which a row is left to other ways."""

Scored = tuple[tuple[float, float], Candidate]
"""(bytes missing, seconds) of a candidate."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """A policy's proposals for a problem.

    Attributes:
        candidates: The best by the op-level evaluator, best first.
        num_evaluations: Number of coarse and op-level simulations.
        pair: Model and cluster as the policy sees them, in the way that the best one came from.
        scores: The policy's scores of that pair, for more draws.
        out_of_memory: Part of the draws that do not fit, by the coarse evaluator.
    """

    candidates: tuple[Candidate, ...]
    num_evaluations: int
    pair: "Pair"
    scores: "PairScores"
    out_of_memory: float


@dataclass(frozen=True, slots=True, order=True)
class Whole:
    """Settings of the whole step.

    Attributes:
        bucket_bytes: Bytes of a bucket, as in ``Strategy``.
        num_micro: Number of micro-batches that the batch is cut into evenly.
        recompute: Part of the blocks that recompute, first those that free the most bytes per
            second.
        keeps: What these keep nevertheless.
        finish: Teams and schedule.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    num_micro: int = 1
    recompute: float = 0.0
    keeps: Keeps = Keeps.NOTHING
    finish: Finish = PLAIN


def propose(
    problem: Problem, network: "Policy", num_samples: int = NUM_SAMPLES, *, name: str = ""
) -> Proposed:
    """Draw strategies for a problem and choose the best.

    Args:
        problem: Graph, cluster and seed; evaluations beyond its budget are not made.
        network: The policy.
        num_samples: Number of draws, the greedy one included.
        name: Name of the policy, for logs.
    """
    from heterog.agents.ways import BALANCED, FEWEST_FOR_WAYS, draw_in, make_ways
    from heterog.envs.pair import Pair

    if problem.budget.evaluations is not None:
        # A fifth of a small budget is left for the op level.
        most = int(0.8 * problem.budget.evaluations / (1.0 + BALANCED))
        num_samples = max(min(num_samples, most), 1)
    evaluator, spending = problem.evaluator, problem.spend()
    tables = [Pair(evaluator.graph, evaluator.cluster, evaluator.cost_model)]
    if num_samples >= FEWEST_FOR_WAYS:
        tables += [pair for pair in (tables[0].divided(),) if pair is not None]
    ways = make_ways(network, tables, num_samples)
    with spending.limits():
        draw_in(ways, num_samples, np.random.default_rng([problem.seed, 64]), spending.check)
    spent = sum(len(way.rows) for way in ways)
    scored: list[tuple[Scored, Way]] = []
    for table in tables:
        own = [way for way in ways if way.pair.table is table.table]
        if not len(own[0].rows):  # out of time before it was drawn in
            continue
        scorer = _Scorer(problem, table, spent)
        with spending.limits():
            _score(scorer, own)
        if spending.is_cut:
            scorer.ensure(own[0].rows[0])
        spent += scorer.num_evaluations
        for each, row in scorer.candidates():
            scored.append((each, next((way for way in own if way.drew(row)), own[0])))
    scored.sort(key=lambda each: each[0][0])
    found = Proposed(
        candidates=tuple(candidate for (_, candidate), _ in scored[:NUM_RETURNED]),
        num_evaluations=spent,
        pair=scored[0][1].pair,
        scores=scored[0][1].scores,
        out_of_memory=float(np.mean([each.overflow > 0 for way in ways for each in way.found])),
    )
    _log.info(
        "policy %s, seed %d: %d draws for %s, %.0f %% do not fit",
        name or "in training", problem.seed, num_samples, tables[0].name,
        100.0 * found.out_of_memory,
    )  # fmt: skip
    return found


def _score(scorer: "_Scorer", ways: "Sequence[Way]") -> None:
    """Score the best rows of a table's ways at the op level."""
    plain, *pipelined = ways
    found = plain.found
    order = sorted(range(len(found)), key=lambda n: found[n].preference)
    others: list[list[tuple[IntArray, Whole]]] = []
    if plain.is_tight:  # by seconds alone: rows that do not fit may fit if they recompute
        loosely = sorted(order, key=lambda n: found[n].step_time_s)
        others.append([(plain.rows[n], Whole(recompute=1.0)) for n in loosely[:NUM_RESCORED]])
        order = [n for n in order if found[n].overflow <= HOPELESS] or order[:1]
    for way in pipelined:
        whole = Whole(num_micro=way.pair.num_micro)
        for rows in (way.rows[: way.num_drawn], way.rows[way.num_drawn :]):
            fastest = sorted(rows, key=lambda row: way.pair.score(row).preference)
            others.append([(row, whole) for row in fastest[:NUM_PIPELINED]])
    in_turn = [each for turn in zip_longest(*others) for each in turn if each is not None]
    scorer.search(plain.rows[order], in_turn)


def rescore(
    problem: Problem, pair: "Pair", rows: IntArray, *, spent: int
) -> tuple[tuple[Candidate, ...], int]:
    """Score the first rows at the op level, in both bucket sizes, and vary the whole step.

    For the best few, micro-batches are tried as well, doubled while that helps, and recomputation
    if nothing fits without.

    Args:
        problem: Problem for the rows.
        pair: Its model and cluster.
        rows: Rows, best first by the coarse evaluator.
        spent: Evaluations of the problem's budget that are spent.

    Returns:
        The best candidates, best first, and the evaluations made.
    """
    scorer = _Scorer(problem, pair, spent)
    scorer.search(rows)
    found = tuple(candidate for (_, candidate), _ in scorer.candidates())
    return found, scorer.num_evaluations


def _orders(whole: Whole, allowed: tuple[Order, ...]) -> tuple[Order, ...]:
    """Orders to score in: by rank; first in, first out before it with micro-batches.

    By rank, every micro-batch's forward pass comes before the first backward pass: up to a fifth
    faster than in turn, or a half slower, and beyond memory where that is scarce. A schedule with
    caps, split backward passes or turns says itself what comes first.
    """
    wanted = (Order.RANK,) if whole.num_micro == 1 else (Order.FIFO, Order.RANK)
    if whole.finish.schedule:
        wanted = (Order.FIFO,)
    return tuple(order for order in wanted if order in allowed) or allowed[:1]


class _Scorer:
    """Scores rows at the op level, under any settings of the whole step."""

    def __init__(self, problem: Problem, pair: "Pair", spent: int) -> None:
        evaluator = problem.evaluator
        self._problem = problem
        self.pair = pair
        self._left = math.inf
        if problem.budget.evaluations is not None:
            self._left = max(problem.budget.evaluations - spent, 1)
        self._space = StrategySpace(
            evaluator.graph,
            evaluator.cluster,
            evaluator.tables,
            evaluator.channels,
            device_speeds(evaluator),
            pair.table,
        )
        self._num_tasks = 0
        self._num_evaluations = 0
        self._scored: dict[tuple[bytes, Whole], tuple[float, float]] = {}
        self._kinds = kinds_worth_trying(evaluator.graph)
        self._recomputing = {
            keeps: np.array(
                [
                    self._space.add(replace(decision, recompute=True, keeps=keeps))
                    for decision in pair.table
                ],
                np.int32,
            )
            for keeps in self._kinds
        }
        self._most_tasks = MOST_TASKS
        self._finisher = Finisher(evaluator, self._space)

    @property
    def num_evaluations(self) -> int:
        """Evaluations so far: one for each order of a row and settings of the whole step."""
        return self._num_evaluations

    def search(
        self,
        rows: IntArray,
        ways: Sequence[tuple[IntArray, Whole]] = (),
    ) -> None:
        """Score the first rows, and other rows with given settings; vary the best."""
        count = NUM_RESCORED
        if self._left < math.inf:
            count = max(min(count, int(self._left) // len(BUCKETS)), 1)
        for row in rows[:count]:
            for bucket_bytes in BUCKETS:
                self.score(row, Whole(bucket_bytes, self.pair.num_micro))
        for row, whole in ways:
            if self._num_tasks < MOST_TASKS / 2:  # the rest is for varying them
                self.score(row, whole)
        for row, whole in self.best_rows(NUM_VARIED):
            self.vary(row, whole)
        self._most_tasks = self._num_tasks + MOST_FINISHED_TASKS
        for row, whole in self._worth_finishing():
            self.finish(row, whole)

    def score(
        self, row: IntArray, whole: Whole, best: tuple[float, float] = (np.inf, np.inf)
    ) -> tuple[float, float]:
        """(bytes missing, seconds); infinitely many if it is surely slower than the best.

        Nothing more is simulated once the budget is spent.
        """
        key = np.asarray(row, np.int32).tobytes(), whole
        if key in self._scored:
            return self._scored[key]
        orders = _orders(whole, self._problem.orders)
        is_spent = bool(self._scored) and self._num_evaluations + len(orders) > self._left
        if is_spent or self._num_tasks > self._most_tasks:
            return np.inf, np.inf
        problem = self._problem
        made = self._finisher.finished(self._candidates(row, whole), whole.finish, whole.num_micro)
        if made is None:
            return np.inf, np.inf
        choice = self._space.encode(
            made.row,
            bucket_bytes=whole.bucket_bytes,
            num_steps=1 if problem.step_barrier else UNROLLED_STEPS,
            micro_batches=self._space.micro_batches(whole.num_micro),
            tables=problem.evaluator.rule_tables(made.rule_number),
            schedule=made.schedule,
        )._replace(rule_set=made.rule_number)
        limit_s = best[1] if best[0] == 0.0 else np.inf
        preferences = []
        try:
            evaluations = problem.evaluator.evaluate_orders(choice, orders, limit_s)
        except StrategyError:  # turns of a V wait for each other where other values cross
            evaluations = []
            preferences.append((np.inf, np.inf))
        for found in evaluations:
            preferences.append(found.preference)
            if whole.recompute > 0.0 and found.outcome == Outcome.OK:
                filled = found.peak_memory_bytes / self.pair.memory.usable_bytes
                if filled.max() > FILLED:
                    preferences[-1] = 1.0, found.step_time_s
        self._scored[key] = min(preferences)
        self._num_evaluations += len(orders)
        self._num_tasks += len(orders) * problem.evaluator.num_tasks
        return self._scored[key]

    def ensure(self, row: IntArray) -> None:
        """Make sure of a result even if there was no time to score anything."""
        if not self._scored:
            whole = Whole(num_micro=self.pair.num_micro)
            self._scored[np.asarray(row, np.int32).tobytes(), whole] = (np.inf, np.inf)

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

    def _worth_finishing(self) -> list[tuple[IntArray, Whole]]:
        """The best pipelined rows, also behind rows of one stage, unless they are far behind.

        Rows of one stage are left as they are: data parallelism hides what teams would save.
        """
        missing, seconds = self.score(*self.best(1)[0])
        most = missing, MOST_BEHIND * seconds
        pipelined = [
            (row, whole)
            for row, whole in self.best_rows(len(self._scored))
            if self._is_pipelined(row) and self.score(row, whole) <= most
        ]
        return pipelined[:NUM_FINISHED]

    def _is_pipelined(self, row: IntArray) -> bool:
        member = self.pair.observer.member
        return bool((member[row[1:]] != member[row[:-1]]).any())

    def vary(self, row: IntArray, whole: Whole) -> None:
        """Try other settings of the whole step."""
        best = self._saved(row, whole, self.score(row, whole))
        for num_micro in MICRO_BATCHES:
            if num_micro > self.pair.graph.batch_size:
                return
            # Smaller micro-batches need less memory: perhaps nothing has to run twice.
            cut = replace(whole, num_micro=num_micro, recompute=0.0, keeps=Keeps.NOTHING)
            found = self.score(row, cut, best)
            if best[0] == 0.0 and found >= best and num_micro > whole.num_micro:
                return
            best = self._saved(row, cut, min(best, found))

    def _saved(
        self, row: IntArray, whole: Whole, best: tuple[float, float]
    ) -> tuple[float, float]:
        """The score, or that with as few blocks recomputing as it takes to fit, if better.

        Where all of them suffice, all of them are also tried with less to make again.
        """
        if best[0] == 0.0 and whole.recompute == 0.0:
            return best
        found = self.score(row, replace(whole, recompute=1.0), best)
        best = min(best, found)
        if found[0] > 0.0:
            return best
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            part = 0.5 * (low + high)
            found = self.score(row, replace(whole, recompute=part), best)
            best = min(best, found)
            low, high = (low, part) if found[0] == 0.0 else (part, high)
        for keeps in reversed(self._kinds[:-1]):
            cheaper = self.score(row, replace(whole, recompute=1.0, keeps=keeps), best)
            best = min(best, cheaper)
            if cheaper[0] > 0.0:
                break
        return best

    def finish(self, row: IntArray, whole: Whole) -> None:
        """Try teams, schedules and places of the cuts of a pipeline, each from the best so far."""
        best = self.score(row, whole)
        if best[0] == np.inf:
            return
        for vary in (self._in_teams, self._scheduled):
            for other in list(vary(row, whole)):
                found = self.score(row, other, best)
                if found < best:
                    best, whole = found, other
        if whole.num_micro == 1:
            return
        is_better = True
        while is_better:
            is_better = False
            for other_row in moved_cuts(row, self.pair.observer.member):
                found = self.score(other_row, whole, best)
                if found < best:
                    best, row, is_better = found, other_row, True
                    break

    def _in_teams(self, row: IntArray, whole: Whole) -> Iterator[Whole]:
        """Teams of every size, whose micro-batches may be small."""
        for size in self._finisher.sizes:
            for num_micro in (whole.num_micro, 2 * whole.num_micro):
                if num_micro <= self.pair.graph.batch_size:
                    finish = replace(whole.finish, team_size=size)
                    yield replace(whole, num_micro=num_micro, finish=finish)

    def _scheduled(self, row: IntArray, whole: Whole) -> Iterator[Whole]:
        """Schedules of a row with micro-batches, and twice as many of these in a V."""
        if whole.num_micro == 1:
            return
        for schedule in SCHEDULES_TRIED:
            yield replace(whole, finish=replace(whole.finish, schedule=schedule))

    def candidates(self) -> list[tuple[Scored, IntArray]]:
        """The best strategies with their scores, and the rows they come from, best first."""
        return [
            ((self.score(row, whole), self._candidate(row, whole)), row)
            for row, whole in self.best(NUM_RETURNED)
        ]

    def _candidate(self, row: IntArray, whole: Whole) -> Candidate:
        made = self._finisher.finished(self._candidates(row, whole), whole.finish, whole.num_micro)
        assert made is not None
        strategy = self._space.decode(
            made.row,
            bucket_bytes=whole.bucket_bytes,
            step_barrier=self._problem.step_barrier,
            micro_batches=self._space.micro_batches(whole.num_micro),
            op_rules=made.op_rules,
            schedule=made.schedule,
        )
        strategy = without_needless_rules(self.pair.graph, strategy)
        return Candidate(strategy=strategy, orders=self._problem.orders)

    def _candidates(self, row: IntArray, whole: Whole) -> IntArray:
        """Number of every group's decision in the space, in teams of one."""
        groups = self.pair.groups(row)
        blocks = self.pair.observer.cheapest_to_recompute[: round(whole.recompute * len(row))]
        again = np.isin(self.pair.evaluator.block_of, blocks)
        return np.where(again, self._recomputing[whole.keeps][groups], groups)
