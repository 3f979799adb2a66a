"""The request for a search, and the session in which the search runs.

``SeedPlanner`` and ``GivenLayout`` are methods that return strategies known before the search.
Searches start from these; the referee judges them like all others.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError, StrategyError
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget, Candidate, Planner, PlanResult, Problem, Progress, Stop
from heterog.methods.registry import AUTO, Methods, built_in_methods
from heterog.names import shown
from heterog.pricing.cost_model import CostModel
from heterog.search.allotment import Allotment
from heterog.search.objective import FASTEST, Objective
from heterog.simulator.engine import Order
from heterog.strategy.layouts.layout import Layout, LayoutError
from heterog.strategy.layouts.placed import Given, place_layout
from heterog.workers import Seats


class SeedPlanner(Planner):
    """Returns strategies that are known already; the referee judges them like all others.

    Args:
        name: Name of its row.
        candidates: Strategies for the graph and cluster that it will be asked about.
    """

    stage = "baseline"

    def __init__(self, name: str, candidates: Sequence[Candidate]) -> None:
        self.name = name
        self.candidates = tuple(candidates)

    def plan(self, problem: Problem) -> PlanResult:
        """The strategies, each in its own orders."""
        return PlanResult(
            candidates=self.candidates,
            num_evaluations=0,
            search_seconds=0.0,
            reason="" if self.candidates else "nothing was known before",
        )


GIVEN = "given"
"""Name of the row of a user's own layout."""


class GivenLayout(Planner):
    """Evaluates one layout; the row's note says what could not be translated exactly.

    Args:
        layout: The person's layout.
        batch_size: Batch size that its file is for; 0 for any.
        remarks: Sentences about further contents of the layout's file.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A training step to plan, and how.

    Attributes:
        graph: The captured step.
        cluster: Devices and links.
        methods: Names of methods; ``auto`` means all that have something to find on the cluster.
        known: Methods among which names are looked up; by default those of this package that need
            no policy.
        budget: Limit of the search. In seconds it covers the whole answer, except for imports and
            compilation; see ``Allotment``.
        seed: Seed of everything random.
        step_barrier: Whether a step ends with all updates.
        orders: Orders that searching methods may choose from.
        objective: Aim of the plan; by default the shortest step.
        is_robust: Whether to choose, among the rows whose intervals overlap that of the best, the
            one with the least regret under noise; see ``robust_rank``.
        cost_model: Model of the seconds of tasks; see ``Evaluator`` for the default.
        given: A user's own strategy, a row beside the methods from which searches start, too; see
            ``GivenLayout``.
        seeds: Strategies that are known already, for searches to start from.
        asynchronous: Method that a user asked for by name and whose training is not exact (its
            weights differ from those of one device); judged last, beside the exact ones.
    """

    graph: OpGraph
    cluster: Cluster
    methods: tuple[str, ...] = (AUTO,)
    known: Methods = field(default_factory=built_in_methods)
    budget: Budget = field(default_factory=lambda: Budget(seconds=30.0))
    seed: int = 0
    step_barrier: bool = True
    orders: tuple[Order, ...] = tuple(Order)
    objective: Objective = FASTEST
    is_robust: bool = False
    cost_model: CostModel | None = None
    given: Planner | None = None
    seeds: SeedPlanner | None = None
    asynchronous: Planner | None = None

    def __post_init__(self) -> None:
        for name, kind, advice in _KINDS:
            if not isinstance(given := getattr(self, name), kind):
                raise HeterogError(f"`{name}` is of type {type(given).__name__}; give {advice}.")
        if not 0 <= self.seed < 2**63:
            raise HeterogError(f"`seed` is {shown(self.seed)}; give a number of 0 to 2**63 - 1.")


_KINDS = (
    ("cluster", Cluster, "a cluster, heterog.Cluster.load('cluster.yaml') say"),
    ("budget", Budget, "a text, '30s' or '5000e' (evaluations)"),
    ("objective", Objective, "an Objective of heterog.search.objective"),
    ("seed", Integral, "a whole number"),
    ("step_barrier", bool, "True or False"),
)
"""What a person may get wrong in Python, where no option is parsed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Session:
    """The surroundings of a search: progress, stop switch, clock and workers.

    Attributes:
        progress: Function that gets every method's progress.
        stop: Switch that ends the search early; the plan is then the best so far.
        clock: Function that returns the seconds by which a budget in seconds is kept.
        allotment: Time to keep back for the work after the searches. If set, all methods share a
            budget in seconds by its clock, even without ``auto``.
        seats: Workers that keep their state and run several of the methods that share a budget at
            a time; see ``search.judging``.
    """

    progress: Progress = lambda method, fraction, best: None
    stop: Stop = field(default_factory=Stop)
    clock: Callable[[], float] = time.perf_counter
    allotment: Allotment | None = None
    seats: Seats | None = None
