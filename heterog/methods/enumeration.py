"""Base class of enumerations: points are tried one by one until the budget is over."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from heterog.lowering.program import IntArray
from heterog.methods.planner import Point, PointSearch, Problem
from heterog.methods.teams import without_needless_rules
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Outcome
from heterog.simulator.space import StepSettings
from heterog.strategy.strategy import Strategy

NUM_RETURNED = 6
"""Number of strategies handed to the referee."""


class Meaning(NamedTuple):
    """What a point of an enumeration stands for.

    Attributes:
        row: The decision of every group.  # [num_groups]
        order: The order that the point is simulated in.
        settings: Settings of the whole step.
    """

    row: IntArray
    order: Order
    settings: StepSettings


class Enumeration(PointSearch[Point]):
    """Base of enumerations over points, each of which has a row: one decision for each group.

    Args:
        problem: The planner's problem.

    Attributes:
        num_groups: Number of groups, each of which has one decision.
        speeds: Speed of each device.
        space: Space of the decisions that rows refer to.
        fault: Why the last point that cannot run was skipped; empty if there was none.
    """

    num_returned = NUM_RETURNED
    nothing = ""
    """Reason to give if there was no point to try."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        evaluator = problem.evaluator
        self.num_groups = evaluator.tables.num_groups
        self.speeds = evaluator.speeds
        self.space = evaluator.space()
        self.fault = ""

    @abstractmethod
    def meaning(self, point: Point) -> Meaning:
        """What a point stands for."""

    def is_possible(self, point: Point) -> bool:
        """Whether a point stands for a strategy; others are skipped."""
        return True

    @property
    def why_nothing(self) -> str:
        """See ``PointSearch``."""
        return "" if self.spending.is_over else self.fault or self.nothing

    def orders(self, point: Point) -> tuple[Order, ...]:
        """See ``PointSearch``."""
        return (self.meaning(point).order,)

    def try_points(self, points: Iterable[Point], *, until: float = 1.0) -> None:
        """Simulate points that are new, at least one, while the budget lasts.

        Args:
            points: Points in the order in which they are tried.
            until: Part of the budget that may be spent when this ends.
        """
        for point in points:
            if self.found and (self.spending.is_over or self.spending.fraction >= until):
                return
            if point in self.found or not self.is_possible(point):
                continue
            meant = self.meaning(point)
            choice = self.space.encode(
                meant.row, meant.settings, step_barrier=self.problem.step_barrier
            )
            evaluation = self.evaluator.evaluate(choice, meant.order)
            if evaluation.outcome == Outcome.CANNOT_RUN:
                self.fault = evaluation.shortage
            else:
                self.keep(point, evaluation)

    def strategy_of(self, point: Point) -> Strategy:
        """See ``PointSearch``."""
        meant = self.meaning(point)
        strategy = self.space.decode(
            meant.row, meant.settings, step_barrier=self.problem.step_barrier
        )
        return without_needless_rules(strategy)
