"""A person's own layout as a row beside the methods, judged as all others are."""

from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Candidate, Planner, PlanResult, Problem
from heterog.simulator.engine import Order
from heterog.strategy.layouts.layout import Layout, LayoutError
from heterog.strategy.layouts.placed import Given, place_layout

GIVEN = "given"
"""Name of the row."""


class GivenLayout(Planner):
    """Evaluates one layout; what could not be carried over exactly is in the row's note.

    Args:
        layout: The person's layout.
        batch_size: Batch size that its file is for; 0 for any.
        remarks: Sentences about what its file says beyond the layout.
        is_required: Whether a layout that does not fit is an error; otherwise the row says why.
    """

    stage = "baseline"

    def __init__(
        self,
        layout: Layout,
        *,
        batch_size: int = 0,
        remarks: tuple[str, ...] = (),
        is_required: bool = True,
    ) -> None:
        self.name = GIVEN
        self.layout = layout
        self.batch_size = batch_size
        self.remarks = remarks
        self.is_required = is_required

    def place(self, graph: OpGraph, cluster: Cluster, *, step_barrier: bool = True) -> Given:
        """The layout's strategy.

        Raises:
            LayoutError: the layout does not fit the graph or the cluster.
            StrategyError: its schedule is not one for these numbers.
        """
        if self.batch_size not in (0, graph.batch_size):
            raise LayoutError(
                f"the layout's file is for a batch of {self.batch_size}, but '{graph.name}' was "
                f"captured with {graph.batch_size}; give `batch_size` {self.batch_size}."
            )
        return place_layout(self.layout, graph, cluster, step_barrier=step_barrier)

    def plan(self, problem: Problem) -> PlanResult:
        """The layout's strategy in first-come, first-served order, as training loops run it.

        Raises:
            LayoutError: the layout does not fit the graph or the cluster, and is required to.
            StrategyError: likewise, about its schedule.
        """
        evaluator = problem.evaluator
        try:
            placed = self.place(
                evaluator.graph, evaluator.cluster, step_barrier=problem.step_barrier
            )
        except (LayoutError, StrategyError) as error:
            if self.is_required:
                raise
            return PlanResult(candidates=(), num_evaluations=0, reason=str(error))
        orders = (Order.FIFO,) if problem.step_barrier else problem.orders
        return PlanResult(
            candidates=(Candidate(strategy=placed.strategy, orders=orders),),
            num_evaluations=0,
            note=" ".join([f"{self.layout}.", *self.remarks, *placed.remarks]),
        )
