"""Two contiguous ranges of layers, each uniform on its own subset of machines, by enumeration.

Every pair of subsets is tried at a few boundaries first, then the boundaries around the best pairs
are refined. It carries most of the gain of a search in a second or two.
"""

import time
from collections.abc import Iterable

import numpy as np

from heterog.planners.data_parallel import device_speeds
from heterog.planners.planner import Candidate, PlanResult, Task, register
from heterog.planners.tuned_uniform import machine_subsets, tuned_decision
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import UNROLLED_STEPS
from heterog.strategy.program import IntArray
from heterog.strategy.space import StrategySpace
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES

NUM_RETURNED = 6
"""Strategies handed to the referee."""

_NUM_CUTS = 7  # of the first round
_NUM_REFINED = 6
_MOST_SUBSETS = 24  # those that are best on their own, on clusters with more


class TwoSegment:
    """Two tuned decisions; see the module docstring."""

    name = "two_segment"
    stage = "search"

    def plan(self, task: Task) -> PlanResult:
        """Enumerate until all is tried or the budget is over."""
        return _Enumeration(task).run()


_Point = tuple[int, int, int, int, Order]  # first and second candidate, cut, bucket bytes, order


class _Enumeration:
    def __init__(self, task: Task) -> None:
        evaluator = task.evaluator
        self.task = task
        self.spending = task.spend()
        self.num_groups = evaluator.tables.num_groups
        self.num_steps = 1 if task.step_barrier else UNROLLED_STEPS
        speeds = device_speeds(evaluator)
        self.space = StrategySpace(
            evaluator.graph, evaluator.cluster, evaluator.tables, evaluator.channels, speeds
        )
        self.numbers = [
            self.space.add(tuned_decision(evaluator, devices, speeds))
            for devices in machine_subsets(evaluator.cluster)
        ]
        self.cost: dict[_Point, tuple[float, float]] = {}

    def run(self) -> PlanResult:
        begin = time.perf_counter()
        with self.spending.limits():
            self._search()
        return PlanResult(
            candidates=tuple(self._candidate(point) for point in self._best(NUM_RETURNED)),
            num_evaluations=self.spending.evaluations,
            search_seconds=time.perf_counter() - begin,
        )

    def _search(self) -> None:
        order = self.task.orders[min(1, len(self.task.orders) - 1)]
        alone = [(n, n, self.num_groups, DEFAULT_BUCKET_BYTES, order) for n in self.numbers]
        self._try(alone)
        chosen = [point[0] for point in self._best(_MOST_SUBSETS)]
        cuts = np.linspace(0, self.num_groups, _NUM_CUTS + 2)[1:-1].round().astype(int).tolist()
        self._try(
            (first, second, cut, DEFAULT_BUCKET_BYTES, order)
            for cut in dict.fromkeys(cuts)
            for first in chosen
            for second in chosen
            if first != second
        )
        width = max(self.num_groups // (_NUM_CUTS + 1), 1)
        while width > 0:
            width //= 2
            self._try(
                (first, second, cut + step, bucket, order)
                for first, second, cut, bucket, order in self._best(_NUM_REFINED)
                for step in (-width, width)
                if 0 < cut + step < self.num_groups
            )
        for other in self.task.orders:
            self._try(
                (first, second, cut, bucket, other)
                for first, second, cut, _, _ in self._best(_NUM_REFINED)
                for bucket in (0, DEFAULT_BUCKET_BYTES)
            )

    def _try(self, points: Iterable[_Point]) -> None:
        for point in points:
            if self.cost and self.spending.is_over:
                return
            if point not in self.cost:
                evaluation = self.task.evaluator.evaluate_choice(
                    self.space.encode(
                        self._row(point), bucket_bytes=point[3], num_steps=self.num_steps
                    ),
                    point[4],
                )
                self.cost[point] = evaluation.preference

    def _row(self, point: _Point) -> IntArray:
        first, second, cut, _, _ = point
        row = np.full(self.num_groups, second, np.int32)
        row[:cut] = first
        return row

    def _best(self, count: int) -> list[_Point]:
        best = sorted(self.cost, key=self.cost.__getitem__)[:count]
        if best:
            self.task.report(self.spending.fraction, self.cost[best[0]][1])
        return best

    def _candidate(self, point: _Point) -> Candidate:
        strategy = self.space.decode(
            self._row(point), bucket_bytes=point[3], step_barrier=self.task.step_barrier
        )
        return Candidate(strategy=strategy, orders=(point[4],))


register(TwoSegment())
