"""Base class of enumerations: points are tried one by one until the budget is over."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from heterog.graph.placement import OpRules
from heterog.lowering.program import IntArray
from heterog.lowering.space import MicroBatches
from heterog.methods.planner import Point, PointSearch, Problem
from heterog.methods.teams import without_needless_rules
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import UNROLLED_STEPS, Outcome
from heterog.strategy.schedules import AS_IT_COMES, PipelineSchedule
from heterog.strategy.strategy import Strategy

NUM_RETURNED = 6
"""Number of strategies handed to the referee."""


class Meaning(NamedTuple):
    """What a point of an enumeration stands for.

    Attributes:
        row: The decision of every group.  # [num_groups]
        order: The order that the point is simulated in.
        bucket_bytes: Bytes of a bucket of gradients; 0 for one bucket per parameter.
        micro_batches: Micro-batches of each device; none for whole batches.
        schedule: Order in which devices work through the micro-batches.
        op_rules: Rules of ops that do not follow the batch.
        blocks: First groups of the blocks that recompute as one; a block's groups are alike.
    """

    row: IntArray
    order: Order
    bucket_bytes: int = 0
    micro_batches: MicroBatches = ()
    schedule: PipelineSchedule = AS_IT_COMES
    op_rules: OpRules = ()
    blocks: tuple[int, ...] = ()


class Enumeration(PointSearch[Point]):
    """Base of enumerations over points, each of which has a row: one decision for each group.

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
        evaluator = self.evaluator
        for point in points:
            if self.found and (self.spending.is_over or self.spending.fraction >= until):
                return
            if point in self.found or not self.is_possible(point):
                continue
            meant = self.meaning(point)
            number = evaluator.rules.number(meant.op_rules, meant.blocks)
            choice = self.space.encode(
                meant.row,
                bucket_bytes=meant.bucket_bytes,
                num_steps=self.num_steps,
                micro_batches=meant.micro_batches,
                tables=evaluator.rules.of(number).tables,
                schedule=meant.schedule,
            )
            evaluation = evaluator.evaluate(choice._replace(rule_set=number), meant.order)
            if evaluation.outcome == Outcome.CANNOT_RUN:
                self.fault = evaluation.shortage
            else:
                self.keep(point, evaluation)

    def strategy_of(self, point: Point) -> Strategy:
        """See ``PointSearch``."""
        meant = self.meaning(point)
        strategy = self.space.decode(
            meant.row,
            bucket_bytes=meant.bucket_bytes,
            step_barrier=self.problem.step_barrier,
            micro_batches=meant.micro_batches,
            op_rules=meant.op_rules,
            schedule=meant.schedule,
            blocks=meant.blocks,
        )
        return without_needless_rules(strategy)
