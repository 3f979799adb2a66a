"""Scores rows at the op level, under any settings of the whole step, and refines the best.

The engine scores many rows and, for the best of them, settings of the whole step: micro-batches,
recomputation in as few blocks as needed to fit, and the finishes of ``finishing``. Where links are
shared, the referee differs from the engine by up to a tenth. So it judges the best different rows,
and their cuts and micro-batches are refined by its step times. Both stop after a number of
simulated tasks, so that an answer takes as long for 256 devices as for 16.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from heterog.agents.finishing import (
    PLAIN,
    SCHEDULES_TRIED,
    Finish,
    Finished,
    Finisher,
    Scheduled,
    moved_cuts,
)
from heterog.agents.stages import kind_of
from heterog.errors import StrategyError
from heterog.lowering import Choice
from heterog.lowering.program import IntArray
from heterog.memo import kept
from heterog.methods.planner import Candidate, Problem
from heterog.methods.recomputing import kinds_worth_trying
from heterog.methods.teams import without_needless_rules
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluation, Outcome
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Keeps

if TYPE_CHECKING:
    from heterog.envs.pair import Pair

NUM_RESCORED = 8  # first rows that are scored with each bucket size
NUM_RETURNED = 4  # strategies of an answer
BUCKETS = (0, DEFAULT_BUCKET_BYTES)
NUM_VARIED = 6  # best rows whose settings are varied
MICRO_BATCHES = (2, 4, 8, 16)  # numbers tried for each varied row
NUM_MADE_FIT = 2  # best rows that get ever more micro-batches if nothing fits
MOST_MICRO_BATCHES, MOST_FIT_TASKS = 64, 2_400_000
"""Most micro-batches that these rows get, and about the most tasks that are simulated then."""
MOST_TASKS = 1_200_000
"""Most tasks simulated at the op level for a table, up to one and a half seconds of work."""
NUM_FINISHED = 4
"""Number of different pipelined rows that get teams and schedules."""
MOST_BEHIND = 1.5
"""Ratio to the best row's step up to which a pipelined row is finished. On cases that no policy
was tested on, teams and schedules made rows at most 1.26 times faster."""
MOST_FINISHED_TASKS = 400_000
"""Most tasks simulated at the op level for teams and schedules."""
NUM_JUDGED = 6
"""Number of different rows that the referee judges in all orders."""
MOST_JUDGED = 1.1
"""Ratio to the best judged step beyond which the referee gives up a row."""
NUM_REFINED = 4
"""Number of different rows that are refined by the referee."""
MOST_REFINED_TASKS = 750_000
"""Most tasks that the referee simulates to refine rows."""
COARSE_STEPS = 8, 4
"""Numbers of groups by which cuts move, one after another, if the engine judges."""
FINE_STEPS = 4, 2, 1
"""Numbers of groups by which cuts move, one after another, if the referee judges."""
FILLED = 0.98
"""Largest part of a device's memory that a recomputing strategy may fill: the referee's schedule
may need more than the engine's."""
_HALVINGS = 3  # bisections of the part of blocks that recompute

Preference = tuple[float, float]
"""(bytes missing, seconds); less is better."""
Scored = tuple[Preference, Candidate]

_WORST = math.inf, math.inf


@dataclass(frozen=True, slots=True, order=True)
class Variation:
    """Settings of the whole step that are tried with a row.

    Attributes:
        bucket_bytes: Bytes of a bucket, as in ``Strategy``.
        num_micro: Number of micro-batches that the batch is cut into evenly.
        recompute: Part of the blocks that recompute; blocks that free the most bytes per second
            come first.
        keeps: What recomputing blocks keep.
        finish: Teams and schedule.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    num_micro: int = 1
    recompute: float = 0.0
    keeps: Keeps = Keeps.NOTHING
    finish: Finish = PLAIN


def _orders(whole: Variation, allowed: tuple[Order, ...]) -> tuple[Order, ...]:
    """Orders to score in: by rank; with micro-batches, first in, first out and then by rank.

    By rank, the forward passes of all micro-batches come before the first backward pass: up
    to a fifth faster or a half slower than first in, first out, and needs more memory. Schedules
    with caps, split backward passes or turns set the order themselves.
    """
    wanted = (Order.RANK,) if whole.num_micro == 1 else (Order.FIFO, Order.RANK)
    if whole.finish.schedule:
        wanted = (Order.FIFO,)
    return tuple(order for order in wanted if order in allowed) or allowed[:1]


class Scorer:
    """Scores rows at the op level, under any settings of the whole step.

    Attributes:
        num_evaluations: So far: one for each order of a row and settings of the whole step.
    """

    def __init__(self, problem: Problem, pair: "Pair", spent: int) -> None:
        evaluator = problem.evaluator
        self.pair = pair
        self._space = evaluator.space(pair.table)
        self.num_evaluations = 0
        self._scored: dict[tuple[bytes, Variation], Preference] = {}
        self._judged: dict[tuple[bytes, Variation, Order], Preference] = {}
        self._found: dict[tuple[bytes, Variation, Order], Evaluation] = {}  # of those that fit
        self._kinds = kinds_worth_trying(evaluator.graph)
        self._finisher = Finisher(evaluator, self._space)
        self.begin(problem, spent)

    def begin(self, problem: Problem, spent: int) -> None:
        """Begin to score rows under a budget, of which ``spent`` evaluations are spent already."""
        self._problem, self._num_tasks, self._most_tasks = problem, 0, MOST_TASKS
        left = max(problem.budget.most_evaluations - spent, 1)
        self._most_evaluations = self.num_evaluations + left

    def search(
        self,
        rows: IntArray,
        ways: Sequence[tuple[IntArray, Variation]] = (),
    ) -> None:
        """Score the first rows, and other rows with given settings; vary the best."""
        count = NUM_RESCORED
        left = self._most_evaluations - self.num_evaluations
        if left < math.inf:
            count = max(min(count, int(left) // len(BUCKETS)), 1)
        for row in self.pair.groups(rows[:count]):
            for bucket_bytes in BUCKETS:
                self.score(row, Variation(bucket_bytes, self.pair.num_micro))
        for row, whole in ways:
            if self._num_tasks < MOST_TASKS / 2:  # the rest is for varying them
                self.score(self.pair.groups(row), whole)
        for row, whole in self.best_rows(NUM_VARIED):
            self.vary(row, whole)
        if self.score(*self.best(1)[0])[0] > 0.0:
            self._make_fit()
        self._most_tasks = self._num_tasks + MOST_FINISHED_TASKS
        for row, whole in self._worth_finishing():
            self.finish(row, whole)

    def score(self, row: IntArray, whole: Variation, best: Preference = _WORST) -> Preference:
        """(bytes missing, seconds); infinite if the row is surely slower than the best.

        Also infinite for new rows once the budget is spent.
        """
        key = np.asarray(row, np.int32).tobytes(), whole
        if key in self._scored:
            return self._scored[key]
        orders = _orders(whole, self._problem.orders)
        is_spent = (
            bool(self._scored) and self.num_evaluations + len(orders) > self._most_evaluations
        )
        if is_spent or self._num_tasks > self._most_tasks:
            return _WORST
        problem = self._problem
        choice = self._choice(row, whole)
        if choice is None:
            return _WORST
        limit_s = best[1] if best[0] == 0.0 else np.inf
        try:
            evaluations = problem.evaluator.evaluate_orders(choice, orders, limit_s)
        except StrategyError:  # turns of a V wait for each other where other values cross
            evaluations = []
        if any(found.outcome == Outcome.CANNOT_RUN for found in evaluations):
            self._scored[key] = _WORST  # and nothing was simulated
            return _WORST
        preferences = (self._preference(found, whole) for found in evaluations)
        self._scored[key] = min(preferences, default=_WORST)
        self.num_evaluations += len(orders)
        self._num_tasks += len(orders) * problem.evaluator.num_tasks
        return self._scored[key]

    def _choice(self, row: IntArray, whole: Variation) -> Choice | None:
        """The row and settings for the evaluator; ``None`` if the row has no such schedule."""
        made = self._finished(row, whole)
        return made and self._space.encode(*made, step_barrier=self._problem.step_barrier)

    def _finished(self, row: IntArray, whole: Variation) -> Finished | None:
        row = self._candidates(row, whole)
        made = self._finisher.finished(row, whole.finish, whole.num_micro)
        return made and (made[0], made[1]._replace(bucket_bytes=whole.bucket_bytes))

    def _preference(self, found: Evaluation, whole: Variation) -> Preference:
        """An evaluation's preference; a recomputing strategy above ``FILLED`` does not fit."""
        if whole.recompute > 0.0 and found.outcome == Outcome.OK:
            if (found.peak_memory_bytes / self.pair.memory.usable_bytes).max() > FILLED:
                return 1.0, found.step_time_s
        return found.preference

    # --- by the referee --------------------------------------------------------------------------

    def judge(
        self,
        row: IntArray,
        whole: Variation,
        order: Order,
        best: Preference = _WORST,
    ) -> Preference:
        """Like ``score``, but in one order and by the referee."""
        key = np.asarray(row, np.int32).tobytes(), whole, order
        if key in self._judged:
            return self._judged[key]
        choice = None
        if self._num_tasks <= self._most_tasks and self.num_evaluations < self._most_evaluations:
            choice = self._choice(row, whole)
        if choice is None:
            return _WORST
        evaluator = self._problem.evaluator
        try:
            found = evaluator.referee(choice, order, best[1] if best[0] == 0.0 else np.inf)
            self._judged[key] = self._preference(found, whole)
            if found.is_ok:
                self._found[key] = found
        except StrategyError:
            self._judged[key] = _WORST
        self.num_evaluations += 1
        self._num_tasks += evaluator.num_tasks
        return self._judged[key]

    def judge_best(self) -> None:
        """Judge the best rows by the referee in all orders."""
        self._most_tasks = self._num_tasks + MOST_REFINED_TASKS // 2
        best = self.best_judged
        for row, whole in self.best_rows(NUM_JUDGED):
            for order in self._problem.orders:
                best = min(best, self.judge(row, whole, order, (best[0], MOST_JUDGED * best[1])))

    @property
    def best_judged(self) -> Preference:
        """The least (bytes missing, seconds) by the referee so far."""
        return min(self._judged.values(), default=_WORST)

    def refine(self) -> None:
        """Refine the best judged rows, by the referee's judgement."""
        self._most_tasks = self._num_tasks + MOST_REFINED_TASKS
        starts: dict[object, tuple[IntArray, Variation, Order]] = {}
        for row, whole, order in self._judged_in_order(len(self._judged)):
            starts.setdefault(self._kind(row), (row, whole, order))
        for row, whole, order in list(starts.values())[:NUM_REFINED]:
            self._refine(row, whole, order)

    def _refine(self, row: IntArray, whole: Variation, order: Order) -> None:
        """Move a row's cuts, then try more and fewer micro-batches, and move them again."""
        row, best = self._move_cuts(
            row, FINE_STEPS, lambda other, best: self.judge(other, whole, order, best)
        )
        for num_micro in (2 * whole.num_micro, whole.num_micro // 2):
            if whole.num_micro > 1 and 1 < num_micro <= self.pair.graph.batch_size:
                other = replace(whole, num_micro=num_micro)
                if self.judge(row, other, order, best) < best:
                    self._refine(row, other, order)
                    return

    def _move_cuts(
        self,
        row: IntArray,
        steps: tuple[int, ...],
        ask: Callable[[IntArray, Preference], Preference],
    ) -> tuple[IntArray, Preference]:
        """Move a row's cuts while that helps, by ever fewer groups.

        Args:
            row: Candidate of each group.  # [num_groups]
            steps: Numbers of groups.
            ask: Function that scores a row, given the best score so far.

        Returns:
            The best row and its score.
        """
        best = ask(row, _WORST)
        for step in steps:
            is_better = True
            while is_better:
                is_better = False
                for other in moved_cuts(row, self.pair.observer.member, step):
                    found = ask(other, best)
                    if found < best:
                        best, row, is_better = found, other, True
                        break
        return row, best

    def _judged_in_order(self, count: int) -> list[tuple[IntArray, Variation, Order]]:
        """The best rows and settings that the referee has judged, best first."""
        keys = sorted(self._judged, key=lambda key: (self._judged[key], key))
        return [(np.frombuffer(row, np.int32), whole, order) for row, whole, order in keys[:count]]

    def ensure(self, rows: IntArray) -> None:
        """Provide a result even if there was no time to score any row."""
        if not self._scored:
            whole = Variation(num_micro=self.pair.num_micro)
            self._scored[self.pair.groups(rows[0]).tobytes(), whole] = _WORST

    def best(self, count: int) -> list[tuple[IntArray, Variation]]:
        """The best so far, best first."""
        keys = sorted(self._scored, key=lambda key: (self._scored[key], key))
        return [(np.frombuffer(row, np.int32), whole) for row, whole in keys[:count]]

    def best_rows(self, count: int) -> list[tuple[IntArray, Variation]]:
        """The best different rows that can run, each in its best way, best first."""
        first: dict[object, tuple[IntArray, Variation]] = {}
        for row, whole in self.best(sum(score < _WORST for score in self._scored.values())):
            first.setdefault(self._kind(row), (row, whole))
            if len(first) == count:
                break
        return list(first.values())

    def _kind(self, row: IntArray) -> tuple[object, ...]:
        """A key that is equal for rows that differ only by an exchange of hosts of one kind."""
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        return (*starts.tolist(), *kind_of(self.pair, row[starts]))

    def _make_fit(self) -> None:
        """Try ever more micro-batches of the best rows, recomputing, until one fits."""
        self._most_tasks = self._num_tasks + MOST_FIT_TASKS
        for row, whole in self.best_rows(NUM_MADE_FIT):
            again = replace(whole, recompute=1.0)
            for num_micro in self._fewest(whole.num_micro, self.score(row, again)):
                self.score(row, replace(whole, num_micro=num_micro))
                if self.score(row, replace(again, num_micro=num_micro))[0] == 0.0:
                    return

    def _fewest(self, num_micro: int, found: Preference) -> list[int]:
        """Numbers of micro-batches with which a row may fit, ascending.

        A device holds at least ``1 / k`` of what it holds with ``1 / k`` of the micro-batches.

        Args:
            num_micro: Number of micro-batches that the row was scored with.
            found: Its score.
        """
        least = num_micro * (1.0 + found[0] / self.pair.memory.usable_bytes.max())
        num_tasks = self.pair.graph.num_ops * self.pair.cluster.num_devices
        most = min(MOST_MICRO_BATCHES, self.pair.graph.batch_size, MOST_FIT_TASKS // num_tasks)
        numbers = (num_micro << power for power in range(1, MOST_MICRO_BATCHES.bit_length()))
        return [number for number in numbers if least <= number <= most]

    def _worth_finishing(self) -> list[tuple[IntArray, Variation]]:
        """The best pipelined rows within ``MOST_BEHIND`` of the best row.

        Rows of one stage are not finished: data parallelism hides what teams would save.
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

    def vary(self, row: IntArray, whole: Variation) -> None:
        """Try other settings of the whole step."""
        best = self._saved(row, whole, self.score(row, whole))
        for num_micro in MICRO_BATCHES:
            if num_micro > self.pair.graph.batch_size:
                return
            # Smaller micro-batches need less memory, so recomputation may not be needed.
            cut = replace(whole, num_micro=num_micro, recompute=0.0, keeps=Keeps.NOTHING)
            found = self.score(row, cut, best)
            if best[0] == 0.0 and found >= best and num_micro > whole.num_micro:
                return
            best = self._saved(row, cut, min(best, found))

    def _saved(self, row: IntArray, whole: Variation, best: Preference) -> Preference:
        """The score, or a better one with as few recomputing blocks as needed to fit.

        If recomputing all blocks suffices, all blocks with less recomputation are tried, too.
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

    def finish(self, row: IntArray, whole: Variation) -> None:
        """Try teams, schedules and places of the cuts of a pipeline, each from the best so far."""
        best = self.score(row, whole)
        if best[0] == np.inf:
            return
        for vary in (self._in_teams, self._scheduled):
            for other in list(vary(row, whole)):
                found = self.score(row, other, best)
                if found < best:
                    best, whole = found, other
        self._move_cuts(row, COARSE_STEPS, lambda other, best: self.score(other, whole, best))

    def _in_teams(self, row: IntArray, whole: Variation) -> Iterator[Variation]:
        """Teams of every size, also with twice as many micro-batches."""
        for size, factor in product(self._finisher.sizes, (1, 2)):
            if factor * whole.num_micro <= self.pair.graph.batch_size:
                finish = replace(whole.finish, team_size=size)
                yield replace(whole, num_micro=factor * whole.num_micro, finish=finish)

    def _scheduled(self, row: IntArray, whole: Variation) -> Iterator[Variation]:
        """Schedules of a row with its micro-batches, and delayed weight gradients without any.

        Without micro-batches, a schedule decides only when weight gradients are computed.
        """
        for schedule in SCHEDULES_TRIED if whole.num_micro > 1 else ():
            yield replace(whole, finish=replace(whole.finish, schedule=schedule))
        yield replace(whole, num_micro=1, finish=replace(whole.finish, schedule=Scheduled.SPLIT))

    def candidates(self) -> list[tuple[Scored, bool]]:
        """The best strategies with their scores, and whether they are pipelines, best first."""
        judged = [
            (self.judge(row, whole, order), row, whole, order)
            for row, whole, order in self._judged_in_order(NUM_RETURNED)
            if self.judge(row, whole, order) < _WORST
        ]
        first = self._problem.orders[0]
        found = judged or [
            (self.score(row, whole), row, whole, first) for row, whole in self.best(NUM_RETURNED)
        ]
        return [
            ((score, self._candidate(row, whole, order)), whole.num_micro > 1)
            for score, row, whole, order in found
        ]

    def _candidate(self, row: IntArray, whole: Variation, order: Order) -> Candidate:
        made = self._finished(row, whole)
        assert made is not None
        strategy = self._space.decode(*made, step_barrier=self._problem.step_barrier)
        plain = without_needless_rules(strategy)
        orders = tuple(dict.fromkeys((order, *self._problem.orders)))
        judged = None
        if plain == strategy:  # the referee has seen it already
            judged = self._found.get((np.asarray(row, np.int32).tobytes(), whole, order))
        return Candidate(strategy=plain, orders=orders, judged=judged)

    def _candidates(self, row: IntArray, whole: Variation) -> IntArray:
        """Number of every group's decision in the space, in teams of one."""
        blocks = self.pair.observer.cheapest_to_recompute
        blocks = blocks[: round(whole.recompute * self.pair.num_blocks)]
        again = np.isin(self.pair.evaluator.block_of, blocks)
        if not again.any():
            return row
        return np.where(again, self._recomputing(whole.keeps)[row], row)

    @kept
    def _recomputing(self, keeps: Keeps) -> IntArray:
        """Number in the space of each candidate that recomputes.  # [num_candidates]"""
        numbers = [
            self._space.add(replace(decision, recompute=True, keeps=keeps))
            for decision in self.pair.table
        ]
        return np.array(numbers, np.int32)
