"""Local search over rows of candidates, warm-started from other methods' strategies.

A row holds one candidate per group, groups in the order of the forward pass. First every uniform
row is scored; then simulated annealing with restarts changes segments of neighbouring groups. What
pays (measured in ablations on BERT and Transformer): device subsets per range of layers,
collectives whose slices follow the NICs, and the order on top.
"""

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from heterog.planners.data_parallel import device_speeds
from heterog.planners.planner import Candidate, PlanResult, Spending, Task, register
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import UNROLLED_STEPS, Evaluation
from heterog.strategy.program import IntArray
from heterog.strategy.space import StrategySpace
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES

BUCKETS = (0, 4 * 1024 * 1024, DEFAULT_BUCKET_BYTES)
NUM_RETURNED = 6
"""Strategies handed to the referee: a search overfits the fast engine's link model."""


@dataclass(frozen=True, slots=True)
class _State:
    """A point of the search: a row of candidates and what holds for the whole step."""

    row: IntArray
    bucket_bytes: int
    order: Order
    num_micro: int = 1

    @property
    def key(self) -> tuple[bytes, int, int, int]:
        return self.row.tobytes(), self.bucket_bytes, int(self.order), self.num_micro


class LocalSearch:
    """Simulated annealing on segments of groups; see the module docstring."""

    name = "local_search"
    stage = "search"

    def plan(self, task: Task) -> PlanResult:
        """Search until the budget is over; the best few different strategies come back."""
        return _Search(task).run()


class _Search:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.evaluator = task.evaluator
        self.rng = np.random.default_rng(task.seed)
        self.spending = Spending(task.budget, task.evaluator)
        self.space = StrategySpace(
            task.evaluator.graph,
            task.evaluator.cluster,
            task.evaluator.tables,
            task.evaluator.channels,
            device_speeds(task.evaluator),
        )
        self.num_groups = task.evaluator.tables.num_groups
        self.num_steps = 1 if task.step_barrier else UNROLLED_STEPS
        self.cost: dict[tuple[bytes, int, int, int], float] = {}
        self.best: list[tuple[float, _State]] = []

    def run(self) -> PlanResult:
        begin = time.perf_counter()
        elites = self._seed()
        while elites and not self.spending.is_over:
            # Restarts go back to one of the best states, the first ones most often.
            start = elites[min(int(self.rng.exponential(1.5)), len(elites) - 1)]
            self._anneal(start)
            elites = [state for _, state in self.best]
        candidates = tuple(
            Candidate(
                strategy=self.space.decode(
                    state.row,
                    bucket_bytes=state.bucket_bytes,
                    step_barrier=self.task.step_barrier,
                    num_micro=state.num_micro,
                ),
                orders=(state.order,),
            )
            for _, state in self.best
        )
        return PlanResult(
            candidates=candidates,
            num_evaluations=self.spending.evaluations,
            search_seconds=time.perf_counter() - begin,
        )

    def _seed(self) -> list[_State]:
        """Score the other methods' strategies and every uniform row."""
        starts: list[_State] = []
        for candidate in self.task.seeds:
            row = self.space.row_of(candidate.strategy)
            if row is not None:
                starts += [
                    _State(
                        row,
                        candidate.strategy.bucket_bytes,
                        order,
                        candidate.strategy.num_micro_batches,
                    )
                    for order in candidate.orders
                ]
        order = self.task.orders[min(1, len(self.task.orders) - 1)]
        for number in range(len(self.space.candidates)):
            row = np.full(self.num_groups, number, np.int32)
            starts.append(_State(row, DEFAULT_BUCKET_BYTES, order))
        for state in starts:
            if self.spending.is_over and self.best:
                break
            self._score(state)
        return [state for _, state in self.best]

    def _score(self, state: _State) -> float:
        """Cost of a state: seconds, with memory overflow charged heavily."""
        key = state.key
        if key not in self.cost:
            choice = self.space.encode(
                state.row,
                bucket_bytes=state.bucket_bytes,
                num_steps=self.num_steps,
                num_micro=state.num_micro,
            )
            evaluation = self.evaluator.evaluate_choice(choice, state.order)
            self.cost[key] = cost = _cost(evaluation)
            self._remember(cost, state)
        return self.cost[key]

    def _remember(self, cost: float, state: _State) -> None:
        if len(self.best) < NUM_RETURNED or cost < self.best[-1][0]:
            self.best.append((cost, state))
            self.best.sort(key=lambda pair: pair[0])
            del self.best[NUM_RETURNED:]
            self.task.report(self.spending.fraction, self.best[0][0])

    def _anneal(self, start: _State, num_moves: int = 600) -> None:
        """One annealing run from a state, cooling from 3 % to 0.1 % of its cost."""
        state, cost = start, self._score(start)
        for move in range(num_moves):
            if self.spending.is_over:
                return
            temperature = 0.03 * cost * (0.03 ** (move / num_moves))
            neighbour = self._neighbour(state)
            new = self._score(neighbour)
            if new < cost or self.rng.random() < math.exp((cost - new) / temperature):
                state, cost = neighbour, new

    def _neighbour(self, state: _State) -> _State:
        """A random move: of a segment's decisions, or of what holds for the whole step."""
        kind = self.rng.random()
        row = state.row.copy()
        if kind < 0.06:
            return replace(state, bucket_bytes=BUCKETS[self.rng.integers(len(BUCKETS))])
        if kind < 0.09:
            order = self.task.orders[self.rng.integers(len(self.task.orders))]
            return replace(state, order=order)
        if kind < 0.12:
            most = self.evaluator.graph.batch_size
            near = (max(state.num_micro // 2, 1), min(2 * state.num_micro, most))
            return replace(state, num_micro=near[self.rng.integers(2)])
        first, last = self._segment()
        if kind < 0.45:  # the decision of a neighbouring group: shifts or removes a boundary
            neighbour = first - 1 if (self.rng.random() < 0.5 and first > 0) else last
            row[first:last] = row[min(neighbour, self.num_groups - 1)]
        elif kind < 0.60:
            self._move_sample(row, first, last)
        elif kind < 0.75:  # another synchronisation on the same devices
            old = self.space.candidates[row[first]]
            others = self.space.decisions_on(old.devices)
            row[first:last] = self.space.add(others[self.rng.integers(len(others))])
        else:
            row[first:last] = self.rng.integers(len(self.space.candidates))
        return replace(state, row=row)

    def _segment(self) -> tuple[int, int]:
        """A random range of groups; short ones are as likely as long ones."""
        length = int(math.exp(self.rng.uniform(0.0, math.log(self.num_groups + 1))))
        length = min(max(length, 1), self.num_groups)
        first = int(self.rng.integers(self.num_groups - length + 1))
        return first, first + length

    def _move_sample(self, row: IntArray, first: int, last: int) -> None:
        """Move one or a few samples between two devices of the decision at a segment's start."""
        old = self.space.candidates[row[first]]
        if len(old.devices) < 2:
            return
        giver, taker = self.rng.choice(len(old.devices), 2, replace=False)
        most = max(1, old.shares[giver] // 4)
        amount = min(int(self.rng.integers(1, most + 1)), old.shares[giver])
        shares = list(old.shares)
        shares[giver] -= amount
        shares[taker] += amount
        number = self.space.add(replace(old, shares=tuple(shares)))
        same = row[first:last] == row[first]
        row[first:last][same] = number


def _cost(evaluation: Evaluation) -> float:
    """Seconds, plus a charge for memory overflow that always outweighs speed."""
    if evaluation.is_ok:
        return evaluation.step_time_s
    overflow_gib = evaluation.overflow_bytes / 2**30
    return evaluation.step_time_s * (10.0 + overflow_gib)


register(LocalSearch())
