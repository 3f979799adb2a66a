"""Two contiguous ranges of layers, each uniform on its own subset of machines, by enumeration.

Every pair of subsets is first tried at a few boundaries. Then the boundaries of the best pairs are
refined. This gives most of the gain of a search in a second or two.
"""

from typing import NamedTuple

import numpy as np

from heterog.methods.enumeration import Enumeration, Meaning
from heterog.methods.planner import Problem, Searching
from heterog.methods.tuned_uniform import machine_subsets, tuned_decision
from heterog.simulator.engine import Order
from heterog.simulator.space import StepSettings
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES

_NUM_CUTS = 7  # of the first round
_NUM_REFINED = 6  # best points whose neighbours are tried
_MOST_SUBSETS = 24  # on clusters with more subsets, the best on their own are paired


class _Point(NamedTuple):
    """The decision numbered ``first`` for the groups before ``cut``, ``second`` for the others."""

    first: int
    second: int
    cut: int
    bucket_bytes: int
    order: Order


class _Enumeration(Enumeration[_Point]):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.numbers = [
            self.space.add(tuned_decision(problem.evaluator, devices, self.speeds))
            for devices in machine_subsets(problem.evaluator.cluster)
        ]

    def search(self) -> None:
        """Try each decision alone, pairs at a few cuts, then finer cuts and other settings."""
        order = self.problem.first_order
        alone = [
            _Point(number, number, self.num_groups, DEFAULT_BUCKET_BYTES, order)
            for number in self.numbers
        ]
        self.try_points(alone)
        chosen = [point.first for point in self.best(_MOST_SUBSETS)]
        cuts = np.linspace(0, self.num_groups, _NUM_CUTS + 2)[1:-1].round().astype(int).tolist()
        self.try_points(
            _Point(first, second, cut, DEFAULT_BUCKET_BYTES, order)
            for cut in dict.fromkeys(cuts)
            for first in chosen
            for second in chosen
            if first != second
        )
        width = max(self.num_groups // (_NUM_CUTS + 1), 1)
        while width > 0:
            width //= 2
            self.try_points(
                start._replace(cut=start.cut + step)
                for start in self.best(_NUM_REFINED)
                for step in (-width, width)
                if 0 < start.cut + step < self.num_groups
            )
        for other in self.problem.orders:
            self.try_points(
                start._replace(bucket_bytes=bucket, order=other)
                for start in self.best(_NUM_REFINED)
                for bucket in (0, DEFAULT_BUCKET_BYTES)
            )

    def meaning(self, point: _Point) -> Meaning:
        """See ``Enumeration``."""
        row = np.full(self.num_groups, point.second, np.int32)
        row[: point.cut] = point.first
        return Meaning(row, point.order, StepSettings(point.bucket_bytes))


class TwoSegment(Searching):
    """Two tuned decisions; see the module docstring."""

    name = "two_segment"
    stage = "search"
    resumes = True
    search = _Enumeration
