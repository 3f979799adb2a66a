"""What is asked of a search, and the session in which it is worked on."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget, Planner, Progress, Stop
from heterog.methods.registry import AUTO, Methods, built_in_methods
from heterog.pricing.cost_model import CostModel
from heterog.search.allotment import Allotment
from heterog.search.objective import FASTEST, Objective
from heterog.search.seeds import SeedPlanner
from heterog.simulator.engine import Order
from heterog.workers import Seats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A training step to plan, and how.

    Attributes:
        graph: The captured step.
        cluster: Devices and links.
        methods: Names of methods; ``auto`` means all that have something to find on the cluster.
        known: Methods that the names are looked up in; those of this package without a policy by
            default.
        budget: Limit of the search. In seconds it is for all of an answer, but for what is
            imported and compiled; see ``Allotment``.
        seed: Seed of everything random.
        step_barrier: Whether a step ends with all updates.
        orders: Orders that searching methods may choose from.
        objective: Aim of the plan; by default the shortest step.
        cost_model: Model of the seconds of tasks; see ``Evaluator`` for the default.
        given: A person's own strategy, a row beside the methods from which searches start, too;
            see ``methods.given``.
        seeds: Strategies that are known already, for searches to start from.
        asynchronous: Method that a person asked for by name and whose training is not exact (its
            weights differ from one device's); judged last, beside what is exact.
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
    cost_model: CostModel | None = None
    given: Planner | None = None
    seeds: SeedPlanner | None = None
    asynchronous: Planner | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Session:
    """Who hears of a search, who may end it, and who takes part.

    Attributes:
        progress: Function that gets every method's progress.
        stop: Switch that ends the search early; the plan is then the best so far.
        clock: Function that returns the seconds by which a budget in seconds is kept.
        allotment: What else a budget in seconds is for; all methods then share it by its clock,
            even without ``auto``.
        seats: Workers that keep their state, which then run the methods that share a budget,
            several at a time; see ``search.together``.
    """

    progress: Progress = lambda method, fraction, best: None
    stop: Stop = field(default_factory=Stop)
    clock: Callable[[], float] = time.perf_counter
    allotment: Allotment | None = None
    seats: Seats | None = None
