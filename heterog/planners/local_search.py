"""Local search over rows of candidates, warm-started from other methods' strategies.

A row holds one candidate per group, groups in the order of the forward pass; neighbouring groups
with the same candidate are a *run*. Simulated annealing with restarts changes runs: it shifts,
adds and removes boundaries, gives a run, part of it or all groups of one kind another decision,
and changes what holds for the whole step. What pays (measured in ablations on BERT and
Transformer): device subsets per range of layers, collectives whose slices follow the NICs, and the
order on top.

A search overfits the link model that it looks at. So what annealing finds with the fast engine is
scored again by the referee, restarts begin from the referee's favourites, and the last part of the
budget anneals with the referee as the judge.
"""

import math
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from heterog.graph.grouping import alike_groups
from heterog.planners.data_parallel import device_speeds
from heterog.planners.planner import Candidate, PlanResult, Spending, Task, register
from heterog.planners.repair import repair
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import UNROLLED_STEPS, Evaluation
from heterog.strategy.lowering import Choice
from heterog.strategy.program import IntArray
from heterog.strategy.space import StrategySpace
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES

BUCKETS = (0, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024, DEFAULT_BUCKET_BYTES)
NUM_RETURNED = 4
"""Strategies handed to the portfolio, the best by the referee."""
NUM_ELITES = 12
REFEREE_FROM = 0.6
"""Part of the budget after which the referee judges every move."""
SIMPLIFY_FROM = 0.97
"""Part of the budget after which the best strategy is made simpler."""
COSTS_NOTHING = 2e-4
"""Relative difference of step times for which a strategy may be simpler."""

_MOST_UNIFORM = 128  # uniform rows scored at the start
_LEAST_SPEED = 0.25  # of the cluster's, for the devices of a uniform row
_MOST_REPAIRED = 3  # of the seeds that do not fit
_REPAIR_SHARE = 0.1  # of the budget, for each
_NUM_MOVES = 300  # of one annealing run
_PROPOSED = 0.4  # of the changes to groups, where a policy has proposed some
_HOT, _COLD = 0.02, 0.0005  # temperatures as parts of the start's cost


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


_Key = tuple[bytes, int, int, int]


class LocalSearch:
    """Simulated annealing on runs of groups; see the module docstring."""

    name = "local_search"
    stage = "search"

    def plan(self, task: Task) -> PlanResult:
        """Search until the budget is over; the best few different strategies come back."""
        return _Search(task).run()


class _Elites:
    """The best few different states by one judge, best first."""

    def __init__(self) -> None:
        self.states: list[tuple[float, _State]] = []

    def offer(self, cost: float, state: _State) -> bool:
        """Keep a state if it is good enough; whether it is now the best."""
        if len(self.states) == NUM_ELITES and cost >= self.states[-1][0]:
            return False
        if any(state.key == other.key for _, other in self.states):
            return False
        self.states.append((cost, state))
        self.states.sort(key=lambda pair: pair[0])
        del self.states[NUM_ELITES:]
        return self.states[0][1] is state


class _Search:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.evaluator = task.evaluator
        self.rng = np.random.default_rng(task.seed)
        self.spending = Spending(task.budget, task.evaluator)
        self.speeds = device_speeds(task.evaluator)
        self.space = StrategySpace(
            task.evaluator.graph,
            task.evaluator.cluster,
            task.evaluator.tables,
            task.evaluator.channels,
            self.speeds,
        )
        self.num_named = len(self.space.candidates)
        self.num_groups = task.evaluator.tables.num_groups
        self.num_steps = 1 if task.step_barrier else UNROLLED_STEPS
        self.proposals = [
            np.array([self.space.add(decision) for decision in proposal], np.int32)
            for proposal in task.proposals
        ]
        self.alike = alike_groups(task.evaluator.graph)
        self.by_engine: dict[_Key, float] = {}
        self.by_referee: dict[_Key, float] = {}
        self.elites = _Elites()
        self.judged = _Elites()

    def run(self) -> PlanResult:
        begin = time.perf_counter()
        self._seed()
        while self.spending.fraction < SIMPLIFY_FROM:
            pool = self.judged if self.rng.random() < 0.75 else self.elites
            # Restarts go back to one of the best states, the first ones most often.
            which = min(int(self.rng.exponential(1.5)), len(pool.states) - 1)
            self._anneal(pool.states[which][1])
        best = [self._simpler(state) for _, state in self.judged.states[:NUM_RETURNED]]
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
            for state in {state.key: state for state in best}.values()
        )
        return PlanResult(
            candidates=candidates,
            num_evaluations=self.spending.evaluations,
            search_seconds=time.perf_counter() - begin,
        )

    # --- scores ---------------------------------------------------------------------------------

    def _seed(self) -> None:
        """Score the other methods' strategies and uniform rows; the best meet the referee."""
        starts = [state for seed in self.task.seeds for state in self._states(seed)]
        order = self.task.orders[min(1, len(self.task.orders) - 1)]
        starts += [
            _State(np.full(self.num_groups, number, np.int32), DEFAULT_BUCKET_BYTES, order)
            for number in self._uniform()
        ]
        for state in starts:
            if self.spending.is_over and self.elites.states:
                break
            self._engine(state)
        self._repair_seeds()
        for index, (_, state) in enumerate(list(self.elites.states)):
            if index and self.spending.is_over:
                break
            self._referee(state)

    def _states(self, candidate: Candidate) -> list[_State]:
        """A candidate's points of the search, one per order; none if no row can express it."""
        row = self.space.row_of(candidate.strategy)
        if row is None:
            return []
        strategy = candidate.strategy
        return [
            _State(row, strategy.bucket_bytes, order, strategy.num_micro_batches)
            for order in candidate.orders
        ]

    def _repair_seeds(self) -> None:
        """Make the fastest strategies that do not fit fit, and start from those too."""
        broken: list[tuple[float, int, Candidate]] = []
        for candidate in self.task.seeds:
            found = self.evaluator.evaluate(candidate.strategy, candidate.orders[0])
            if not found.is_ok and not self.spending.is_over:
                broken.append((found.step_time_s, len(broken), candidate))
        for _, _, candidate in sorted(broken)[:_MOST_REPAIRED]:
            if self.spending.is_over:
                return
            repaired = repair(
                self.evaluator,
                candidate.strategy,
                candidate.orders[0],
                budget=self.task.budget.part(_REPAIR_SHARE),
            )
            for state in self._states(replace(candidate, strategy=repaired.strategy)):
                self._engine(state)

    def _uniform(self) -> list[int]:
        """Candidates worth a uniform row: those with the fastest devices together first."""
        total = sum(self.speeds)
        speed = [
            sum(self.speeds[device] for device in decision.devices)
            for decision in self.space.candidates[: self.num_named]
        ]
        worth = [n for n in range(self.num_named) if speed[n] >= _LEAST_SPEED * total]
        return sorted(worth, key=lambda n: (-speed[n], n))[:_MOST_UNIFORM]

    def _engine(self, state: _State) -> float:
        """Cost of a state by the fast engine."""
        key = state.key
        if key not in self.by_engine:
            evaluation = self.evaluator.evaluate_choice(self._choice(state), state.order)
            self.by_engine[key] = _cost(evaluation)
            self.elites.offer(self.by_engine[key], state)
        return self.by_engine[key]

    def _referee(self, state: _State) -> float:
        """Cost of a state by the referee."""
        key = state.key
        if key not in self.by_referee:
            self.by_referee[key] = _cost(self.evaluator.referee(self._choice(state), state.order))
            if self.judged.offer(self.by_referee[key], state):
                self.task.report(self.spending.fraction, self.by_referee[key])
        return self.by_referee[key]

    def _choice(self, state: _State) -> Choice:
        return self.space.encode(
            state.row,
            bucket_bytes=state.bucket_bytes,
            num_steps=self.num_steps,
            num_micro=state.num_micro,
        )

    # --- moves ----------------------------------------------------------------------------------

    def _anneal(self, start: _State) -> None:
        """One annealing run from a state; its best state then meets the referee."""
        judge = self._engine if self.spending.fraction < REFEREE_FROM else self._referee
        state, cost = start, judge(start)
        best, best_cost = state, cost
        for move in range(_NUM_MOVES):
            if self.spending.is_over:
                break
            temperature = _HOT * cost * (_COLD / _HOT) ** (move / _NUM_MOVES)
            neighbour = self._neighbour(state)
            new = judge(neighbour)
            if new < cost or self.rng.random() < math.exp((cost - new) / temperature):
                state, cost = neighbour, new
                if cost < best_cost:
                    best, best_cost = state, cost
        self._referee(best)

    def _simpler(self, state: _State) -> _State:
        """The state with the same decision for neighbours on the same devices, where that is free.

        Annealing takes moves that change nothing; what they leave behind is only hard to read.
        """
        limit = self._referee(state) * (1.0 + COSTS_NOTHING)
        devices = [self.space.candidates[number].devices for number in state.row]
        edges = [i for i in range(1, self.num_groups) if devices[i] != devices[i - 1]]
        for first, last in pairwise((0, *edges, self.num_groups)):
            numbers, counts = np.unique(state.row[first:last], return_counts=True)
            if len(numbers) == 1 or self.spending.is_over:
                continue
            row = state.row.copy()
            row[first:last] = numbers[np.argmax(counts)]
            simpler = replace(state, row=row)
            if self._referee(simpler) <= limit:
                state = simpler
        return state

    def _neighbour(self, state: _State) -> _State:
        """A random move: of some groups' decisions, or of what holds for the whole step."""
        kind = self.rng.random()
        if kind < 0.05:
            return replace(state, bucket_bytes=BUCKETS[self.rng.integers(len(BUCKETS))])
        if kind < 0.08:
            order = self.task.orders[self.rng.integers(len(self.task.orders))]
            return replace(state, order=order)
        if kind < 0.12:
            most = self.evaluator.graph.batch_size
            near = (max(state.num_micro // 2, 1), min(2 * state.num_micro, most))
            return replace(state, num_micro=near[self.rng.integers(2)])
        row = state.row.copy()
        if kind < 0.32:
            self._shift_boundary(row)
        else:
            chosen = self._some_groups(row)
            if self.proposals and self.rng.random() < _PROPOSED:
                row[chosen] = self.proposals[self.rng.integers(len(self.proposals))][chosen]
            elif kind < 0.50:  # a neighbour's decision: moves or removes boundaries
                near = chosen[0] - 1 if self.rng.random() < 0.5 else chosen[-1] + 1
                row[chosen] = row[min(max(near, 0), self.num_groups - 1)]
            elif kind < 0.65:
                self._move_samples(row, chosen)
            elif kind < 0.69:
                row[chosen] = self._recomputed(row[chosen])
            elif kind < 0.82:  # another synchronisation or share rule on the same devices
                devices = self.space.candidates[row[chosen[0]]].devices
                others = self.space.decisions_on(devices)
                row[chosen] = self.space.add(others[self.rng.integers(len(others))])
            elif kind < 0.90:  # a decision that is used elsewhere
                row[chosen] = row[self.rng.integers(self.num_groups)]
            else:
                row[chosen] = self.rng.integers(self.num_named)
        return replace(state, row=row)

    def _recomputed(self, numbers: IntArray) -> IntArray:
        """The same decisions, recomputing if the first one does not, else keeping."""
        recompute = not self.space.candidates[numbers[0]].recompute
        changed = [
            self.space.add(replace(self.space.candidates[number], recompute=recompute))
            for number in numbers
        ]
        return np.array(changed, np.int32)

    def _some_groups(self, row: IntArray) -> IntArray:
        """A range of groups, a whole run, or all groups of one kind in a run."""
        kind = self.rng.random()
        if kind < 0.5:
            return self._range(self.num_groups)
        anchor = int(self.rng.integers(self.num_groups))
        edges = np.flatnonzero(np.diff(row)) + 1
        first = int(edges[edges <= anchor].max(initial=0))
        last = int(edges[edges > anchor].min(initial=self.num_groups))
        run = np.arange(first, last, dtype=np.int32)
        if kind < 0.7:
            return run
        if kind < 0.85:
            return first + self._range(last - first)
        alike: IntArray = run[self.alike[run] == self.alike[anchor]]
        return alike

    def _range(self, size: int) -> IntArray:
        """A random range below ``size``; short ones are as likely as long ones."""
        length = int(math.exp(self.rng.uniform(0.0, math.log(size + 1))))
        length = min(max(length, 1), size)
        first = int(self.rng.integers(size - length + 1))
        return np.arange(first, first + length, dtype=np.int32)

    def _shift_boundary(self, row: IntArray) -> None:
        """Move a boundary between two runs by a few groups."""
        edges = np.flatnonzero(np.diff(row)) + 1
        if len(edges) == 0:
            return
        edge = int(edges[self.rng.integers(len(edges))])
        step = int(self.rng.geometric(0.5))
        if self.rng.random() < 0.5:
            row[max(edge - step, 0) : edge] = row[edge]
        else:
            row[edge : edge + step] = row[edge - 1]

    def _move_samples(self, row: IntArray, chosen: IntArray) -> None:
        """Move one or a few samples between two devices of the first group's decision."""
        old = self.space.candidates[row[chosen[0]]]
        if len(old.devices) < 2:
            return
        giver, taker = self.rng.choice(len(old.devices), 2, replace=False)
        most = max(1, old.shares[giver] // 4)
        amount = min(int(self.rng.integers(1, most + 1)), old.shares[giver])
        shares = list(old.shares)
        shares[giver] -= amount
        shares[taker] += amount
        changed = replace(old, shares=tuple(shares))
        same = chosen[row[chosen] == row[chosen[0]]]
        row[same] = self.space.add(changed)


def _cost(evaluation: Evaluation) -> float:
    """Seconds, plus a charge for memory overflow that always outweighs speed."""
    if evaluation.is_ok:
        return evaluation.step_time_s
    overflow_gib = evaluation.overflow_bytes / 2**30
    return evaluation.step_time_s * (10.0 + overflow_gib)


register(LocalSearch())
