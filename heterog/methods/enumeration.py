"""Base class of enumerations: points are tried one by one until the budget is over."""

from abc import abstractmethod
from collections.abc import Iterable

from heterog.graph.placement import OpRules
from heterog.lowering import Choice
from heterog.lowering.program import IntArray
from heterog.methods.planner import Point, PointSearch, Problem
from heterog.methods.teams import without_needless_rules
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import UNROLLED_STEPS, Outcome
from heterog.strategy.schedules import AS_IT_COMES, PipelineSchedule
from heterog.strategy.strategy import Strategy

NUM_RETURNED = 6
"""Number of strategies handed to the referee."""


class Enumeration(PointSearch[Point]):
    """Base of enumerations over points, each of which has a row: one decision for each group.

    A subclass says which strategy a point means (``row`` and the methods after it).

    Args:
        problem: The planner's problem.

    Attributes:
        num_groups: Number of groups, each of which has one decision.
        num_steps: Number of training steps that are simulated.
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
        self.num_steps = 1 if problem.step_barrier else UNROLLED_STEPS
        self.speeds = evaluator.speeds
        self.space = evaluator.space()
        self.fault = ""

    @abstractmethod
    def row(self, point: Point) -> IntArray:
        """The decision of every group.  # [num_groups]"""

    @abstractmethod
    def order(self, point: Point) -> Order:
        """The order that a point is simulated in."""

    def bucket_bytes(self, point: Point) -> int:
        """Bytes of a bucket of gradients; 0 for one bucket per parameter."""
        return 0

    def micro_batches(self, point: Point) -> tuple[tuple[int, ...], ...]:
        """Micro-batches of each device; none for whole batches."""
        return ()

    def schedule(self, point: Point) -> PipelineSchedule:
        """Order in which devices work through the micro-batches."""
        return AS_IT_COMES

    def op_rules(self, point: Point) -> OpRules:
        """Rules of ops that do not follow the batch."""
        return ()

    def blocks(self, point: Point) -> tuple[int, ...]:
        """First groups of the blocks that recompute as one; a block's groups are alike."""
        return ()

    def is_possible(self, point: Point) -> bool:
        """Whether a point stands for a strategy; others are skipped."""
        return True

    @property
    def why_nothing(self) -> str:
        """See ``PointSearch``."""
        return "" if self.spending.is_over else self.fault or self.nothing

    def orders(self, point: Point) -> tuple[Order, ...]:
        """See ``PointSearch``."""
        return (self.order(point),)

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
            choice = self._choice(point)
            evaluation = self.problem.evaluator.evaluate(choice, self.order(point))
            if evaluation.outcome == Outcome.CANNOT_RUN:
                self.fault = evaluation.shortage
            else:
                self.keep(point, evaluation)

    def _choice(self, point: Point) -> Choice:
        evaluator = self.problem.evaluator
        number = evaluator.rules.number(self.op_rules(point), self.blocks(point))
        choice = self.space.encode(
            self.row(point),
            bucket_bytes=self.bucket_bytes(point),
            num_steps=self.num_steps,
            micro_batches=self.micro_batches(point),
            tables=evaluator.rules.of(number).tables,
            schedule=self.schedule(point),
        )
        return choice._replace(rule_set=number)

    def strategy_of(self, point: Point) -> Strategy:
        """See ``PointSearch``."""
        strategy = self.space.decode(
            self.row(point),
            bucket_bytes=self.bucket_bytes(point),
            step_barrier=self.problem.step_barrier,
            micro_batches=self.micro_batches(point),
            op_rules=self.op_rules(point),
            schedule=self.schedule(point),
            blocks=self.blocks(point),
        )
        return without_needless_rules(strategy)
