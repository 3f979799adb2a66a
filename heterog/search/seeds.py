"""Methods that hand over strategies known before a search.

Seeds are what the others start from; a person's own layout is a row beside the methods, judged as
all others are.
"""

from collections.abc import Sequence

from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Candidate, Planner, PlanResult, Problem
from heterog.search.host_subset import HostSubset
from heterog.simulator.engine import Order
from heterog.strategy.layouts.layout import Layout, LayoutError
from heterog.strategy.layouts.placed import Given, place_layout
from heterog.strategy.strategy import Strategy


class SeedPlanner(Planner):
    """Hands over strategies that are known already; the referee judges them like all others.

    Args:
        name: Name of its row.
        candidates: Strategies for the graph and cluster that it will be asked about.
        note: Where they come from, in words.
    """

    stage = "baseline"

    def __init__(self, name: str, candidates: Sequence[Candidate], note: str = "") -> None:
        self.name = name
        self.candidates = tuple(candidates)
        self.note = note

    def plan(self, problem: Problem) -> PlanResult:
        """The strategies, each in its own orders."""
        return PlanResult(
            candidates=self.candidates,
            num_evaluations=0,
            search_seconds=0.0,
            reason="" if self.candidates else "nothing was known before",
            note=self.note,
        )

    def on(self, subset: HostSubset) -> "SeedPlanner | None":
        """The strategies that need no other hosts, for these hosts alone; ``None`` if none."""
        kept: list[Candidate] = []
        for candidate in self.candidates:
            strategy: Strategy | None = subset.lowered(candidate.strategy)
            if strategy is not None:
                kept.append(Candidate(strategy=strategy, orders=candidate.orders))
        return SeedPlanner(self.name, kept, self.note) if kept else None


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
