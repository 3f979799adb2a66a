"""The plan: a strategy, its predictions, and everything needed to run it."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import heterog
from heterog.cluster import Cluster
from heterog.errors import (
    ClusterError,
    GraphError,
    InputFileError,
    StrategyError,
    named,
)
from heterog.files import write_json
from heterog.garbage import settled
from heterog.graph.op_graph import OpGraph
from heterog.graph.serialize import graph_from_dict, graph_to_dict
from heterog.lowering import lower
from heterog.lowering.program import IntArray
from heterog.methods.planner import ENDLESS, Budget, Planner, Problem, Spending, Stop
from heterog.pricing.device_models.parameters import shipped_peak_errors
from heterog.pricing.intervals import Interval, PeakErrors
from heterog.records import packed
from heterog.search.allotment import Allotment
from heterog.search.background import BackgroundPlan, plan_background
from heterog.search.cheapest import CheapestSearch
from heterog.search.history import MethodHistory, SearchHistory
from heterog.search.issue_order import MOST_WRITTEN, IssuedSteps, Rehearse
from heterog.search.judging import run_method
from heterog.search.objective import (
    FASTEST,
    Cost,
    Objective,
    Offer,
    cost_of,
    offers_of_rows,
)
from heterog.search.plan_file import (
    background_of,
    contradiction,
    program_fault,
    read_plan_record,
    row_to_dict,
)
from heterog.search.portfolio import (
    assert_not_below,
    best_row,
    rehearsed,
    run_methods,
    use_op_rules,
    with_noise,
)
from heterog.search.request import GIVEN, Request, Session
from heterog.search.rows import Gain, MethodRow, Rank, by_time, gain, reference_of, robust_rank
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.lower_bound import lower_bound_s
from heterog.simulator.timeline import Timeline
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Strategy

SCHEMA_VERSION = 1
BEST = "best"
_ASYNCHRONOUS = 100  # evaluations; its search tries a dozen strategies


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A strategy with its order and everything needed to trust, show and run it.

    Attributes:
        graph: Operator graph of the training step that the plan is for.
        cluster: Cluster that the plan is for.
        strategy: All decisions of the plan.
        order: Name of the order in which tasks run.
        task_order: Every task of the program, in the order in which ranks take them up; see
            ``issue_order``. Empty for a step of too many tasks (``is_written``).
        sent_before: (transfer, op of its sender): the op begins after the transfer has ended; see
            ``sends_by_op``.
        program_hash: Hash of the program that ``task_order`` belongs to; empty without one.
        outcome: ``"ok"``, or why the best strategy cannot run.
        step_time_s: Predicted seconds per step; ``None`` unless ``ok``.
        interval_s: Range in which four of five measured step times are expected to lie; ``None``
            unless ``ok``, and in plans of earlier versions.
        peak_memory_bytes: Predicted peak memory of each device.
        method: Name of the method that found the plan.
        rows: Result of every method that was tried.
        lower_bound_s: Step time that no strategy can beat (with a step barrier).
        budget: Budget of the search, as it was given.
        seed: Seed of the search, as it was given.
        calibration: Name of the cost model.
        search_seconds: Seconds that all methods took together.
        num_evaluations: Strategies that all methods simulated together.
        shortage: Reason in words, unless ``ok``: which device lacks how much memory, for example.
        peak_errors: Errors of the predicted peaks; ``None`` in plans of earlier versions.
        background: Second job in the idle time of the devices, if one was planned.
        history: Best step of each method while the search went on; empty in plans of earlier
            versions.
        objective: Aim of the plan, such as the shortest step, and for how many steps.
        offers: Trades of time for money that were found, the fastest first; empty where hosts have
            no prices.
    """

    graph: OpGraph
    cluster: Cluster
    strategy: Strategy
    order: str
    task_order: IntArray  # [num_tasks]
    sent_before: IntArray  # [number of such transfers, 2]
    program_hash: str
    outcome: str
    step_time_s: float | None
    peak_memory_bytes: tuple[int, ...]
    method: str
    rows: tuple[MethodRow, ...]
    lower_bound_s: float
    budget: str
    seed: int
    calibration: str
    search_seconds: float
    num_evaluations: int
    shortage: str = ""
    interval_s: Interval | None = None
    peak_errors: PeakErrors | None = None
    background: BackgroundPlan | None = None
    history: tuple[MethodHistory, ...] = ()
    objective: Objective = FASTEST
    offers: tuple[Offer, ...] = ()

    @property
    def cost(self) -> Cost | None:
        """Price of the plan's hosts; ``None`` unless it is ``ok`` and they have prices."""
        if self.step_time_s is None or self.cluster.prices is None:
            return None
        return cost_of(self.graph, self.cluster, self.strategy, self.step_time_s, self.objective)

    @property
    def throughput_samples_per_s(self) -> float | None:
        """Samples trained per second; ``None`` unless ``ok``."""
        return None if self.step_time_s is None else self.graph.batch_size / self.step_time_s

    @property
    def peak_intervals_bytes(self) -> tuple[tuple[int, int], ...]:
        """(low, high) of each device, between which four of five measured peaks are expected.

        Empty in plans of earlier versions, and where no method could say what devices need.
        """
        if self.peak_errors is None:
            return ()
        ends = [self.peak_errors.interval(peak) for peak in self.peak_memory_bytes]
        return tuple((math.floor(low), math.ceil(high)) for low, high in ends)

    @property
    def fit_probability(self) -> float | None:
        """Chance that every device has enough memory, from 0 to 1; ``None`` without intervals."""
        if self.peak_errors is None or not self.peak_memory_bytes:
            return None
        usable = [device.usable_memory_bytes for device in self.cluster.devices]
        return self.peak_errors.fit_probability(zip(self.peak_memory_bytes, usable, strict=True))

    @property
    def is_written(self) -> bool:
        """Whether the plan holds an order of tasks; without one, it can be judged but not run.

        See ``issue_order.MOST_WRITTEN``.
        """
        return bool(self.program_hash)

    def require_written(self) -> None:
        """Refuse a plan that cannot be run or shown task by task.

        Raises:
            StrategyError: it holds no order.
        """
        if not self.is_written:
            raise StrategyError(
                f"the step has more than {MOST_WRITTEN:,} ops on all devices, and a plan for it "
                "says what is best but not the order of its tasks: it can be neither run, "
                "exported nor shown as a timeline."
            )

    @property
    def gains(self) -> tuple[Gain, ...]:
        """Speed-up over the row of ``reference_of``, with its spread.

        Empty if either does not fit, or no reference method was asked for.
        """
        winner = next(row for row in self.rows if row.method == self.method)
        other = reference_of(self.rows)
        if winner.step_time_s is None or other is None:
            return ()
        return (gain(winner, other),)

    @property
    def gain_over_given(self) -> Gain | None:
        """Speed-up over the user's own layout; ``None`` unless both fit."""
        winner = next(row for row in self.rows if row.method == self.method)
        given = next((row for row in self.rows if row.method == GIVEN and row.step_time_s), None)
        return None if given is None or winner.step_time_s is None else gain(winner, given)

    def timeline(self) -> Timeline:
        """The predicted step as a timeline, by the referee.

        Raises:
            StrategyError: it has too many tasks.
        """
        self.require_written()
        evaluator = Evaluator(self.graph, self.cluster)
        choice = evaluator.encode(self.strategy)
        order = Order[self.order.upper()]
        program, start, finish = evaluator.referee_timings(choice, order)
        return Timeline(program, start, finish, self.cluster, self.graph)

    def measured_timeline(self, tasks: Mapping[str, Sequence[float | None]]) -> Timeline:
        """The step as it ran, as a timeline.

        Args:
            tasks: ``start_s`` and ``finish_s`` of each task; ``None`` where none was recorded.
        """
        start, finish = (np.array(tasks[key], np.float64) for key in ("start_s", "finish_s"))
        program = lower(self.graph, self.cluster, self.strategy, num_steps=1)
        return Timeline(program, start, finish, self.cluster, self.graph)

    def summary(self) -> dict[str, Any]:
        """The document that ``heterog plan`` prints as JSON."""
        return {
            "model": self.graph.name,
            "cluster": self.cluster.name,
            "outcome": self.outcome,
            "step_time_s": self.step_time_s,
            "interval_s": None if self.interval_s is None else list(self.interval_s),
            "throughput_samples_per_s": self.throughput_samples_per_s,
            "method": self.method,
            "order": self.order,
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "peak_intervals_bytes": [list(each) for each in self.peak_intervals_bytes],
            "fit_probability": self.fit_probability,
            "peak_errors": None if self.peak_errors is None else asdict(self.peak_errors),
            "lower_bound_s": self.lower_bound_s,
            "search_seconds": self.search_seconds,
            "num_evaluations": self.num_evaluations,
            "batch_size": self.graph.batch_size,
            "seed": self.seed,
            "budget": self.budget,
            "step_barrier": self.strategy.step_barrier,
            "calibration": self.calibration,
            "shortage": self.shortage,
            "gains": [asdict(each) for each in self.gains],
            "methods": [row_to_dict(row, self) for row in self.rows],
            "strategy": strategy_to_dict(self.strategy),
            "background": None if self.background is None else self.background.to_dict(),
        } | self._money()

    def _money(self) -> dict[str, Any]:
        """Objective, cost and offers, as far as there are any."""
        found: dict[str, Any] = {}
        if self.objective != FASTEST:
            found["objective"] = asdict(self.objective)
        if self.cost is not None:
            found["cost"] = asdict(self.cost)
            found["offers"] = [asdict(each) for each in self.offers]
        return found

    def with_background(self, background: OpGraph, limit: float) -> "Plan":
        """The plan with a background job in the idle part of its devices.

        Args:
            background: Step of the second job at the batch size that one device trains on.
            limit: Largest slow-down of this plan's step, as a factor from 1.

        Raises:
            HeterogError: the limit is below 1.
        """
        planned = plan_background(
            Evaluator(self.graph, self.cluster),
            self.strategy,
            Order[self.order.upper()],
            background,
            limit=limit,
        )
        return replace(self, background=planned)

    def save(self, path: str | Path) -> None:
        """Write one file that holds all that deployment needs."""
        document = self.summary() | {
            "schema_version": SCHEMA_VERSION,
            "heterog_version": heterog.__version__,
            "source": self.graph.source,
            "program_hash": self.program_hash,
            "task_order": packed(self.task_order),
            "sent_before": packed(self.sent_before),
            "cluster_description": self.cluster.to_dict(),
            "graph": graph_to_dict(self.graph),
            "history": [asdict(each) for each in self.history],
        }
        document.pop("cost", None)  # follows from the step time and the cluster's prices
        write_json(path, document)

    def report(self, path: str | Path) -> None:
        """Write one HTML page for people, which needs no network.

        Raises:
            InputFileError: the file cannot be written; no half of it is left behind.
        """
        # Imported here because reports are a layer above plans.
        from heterog.report.html import write_report

        write_report(path, self)


def load_plan(path: str | Path) -> Plan:
    """Read a plan.

    Raises:
        InputFileError: the file is missing, cut off, of another version, or does not fit together.
    """
    record, document = read_plan_record(path, SCHEMA_VERSION)
    row = record.row
    where = f"plan {path}"
    graph = graph_from_dict(record.graph, where)
    try:
        cluster = Cluster.from_dict(record.cluster_description)
        strategy = strategy_from_dict(record.strategy)
        strategy.check(graph, cluster)
    except (ClusterError, GraphError, StrategyError) as error:
        raise InputFileError(f"{where}: {error}") from error
    plan = Plan(
        graph=graph,
        cluster=cluster,
        strategy=strategy,
        order=row.order,
        task_order=record.task_order,
        sent_before=record.sent_before,
        program_hash=record.program_hash,
        outcome=row.outcome,
        step_time_s=row.step_time_s,
        peak_memory_bytes=row.peak_memory_bytes,
        method=record.method,
        rows=tuple(record.methods),
        lower_bound_s=record.lower_bound_s,
        budget=record.budget,
        seed=record.seed,
        calibration=record.calibration,
        search_seconds=record.search_seconds,
        num_evaluations=record.num_evaluations,
        shortage=row.shortage,
        interval_s=None if record.interval_s is None else Interval(*record.interval_s),
        peak_errors=record.peak_errors,
        background=background_of(record, where),
        history=tuple(record.history),
        objective=record.objective or FASTEST,
        offers=tuple(record.offers),
    )
    if fault := contradiction(plan, document) or program_fault(plan):
        raise InputFileError(f"{where}: {fault}.")
    return plan


@settled()
def make_plan(
    request: Request,
    session: Session | None = None,
    *,
    evaluator: Evaluator | None = None,
    rehearse: Rehearse | None = None,
) -> Plan:
    """Plan one training step on a cluster.

    Args:
        request: What to plan, by which methods, and what limits them.
        session: Progress, stop switch and workers of the search; none by default.
        evaluator: Evaluator of the request's graph, cluster and cost model; made from these if
            ``None``.
        rehearse: Function that executes the winner on shapes alone; if that fails, the next best
            wins. See ``heterog.runtime.measure.rehearsal.rehearsal_of``.

    Raises:
        StrategyError: no method has a strategy at all.
        ClusterError: the objective needs prices that the cluster does not have.
        UnknownNameError: a method does not exist.
    """
    session = session or Session()
    evaluator = evaluator or Evaluator(request.graph, request.cluster, request.cost_model)
    allotment = session.allotment or Allotment(request.budget)
    issued = IssuedSteps(evaluator)
    allotment.follow(
        issued,
        is_rehearsed=rehearse is not None,
        # The long part of the bound is cached, and holds with and without rules of single ops.
        ahead=lambda: lower_bound_s(request.graph, request.cluster, evaluator.cost_model),
    )
    history = SearchHistory(evaluator, session.progress)
    begin = time.perf_counter()
    told = replace(session, progress=history.tell, allotment=allotment)
    rows, offers = _searched(evaluator, request, told, allotment)
    if request.asynchronous is not None:
        row = _asynchronous_row(evaluator, request.asynchronous, request, session, rows)
        rows = [*rows, row]
    search_seconds = time.perf_counter() - begin
    rank = request.objective.rank(evaluator.cluster)
    if request.is_robust:
        drawing = _spending(evaluator, allotment.trial_s, allotment, session.stop)
        rows = with_noise(evaluator, rows, drawing, rank, rivals=True)
        rank = robust_rank(rows, rank)
    if rehearse is not None:
        session.progress("rehearsal", 0.0, math.inf)
        spending = _spending(evaluator, allotment.trial_s, allotment)
        rows = rehearsed(issued, rows, rehearse, spending=spending, rank=rank)
    plan = plan_from_rows(
        evaluator,
        rows,
        noise=_spending(evaluator, allotment.trial_s, allotment, session.stop),
        issued=issued,
        rank=rank,
    )
    return replace(
        plan,
        budget=str(request.budget),
        seed=request.seed,
        search_seconds=search_seconds,
        history=history.of([row.method for row in rows]),
        objective=request.objective,
        offers=offers,
    )


def _searched(
    evaluator: Evaluator, request: Request, session: Session, allotment: Allotment
) -> tuple[list[MethodRow], tuple[Offer, ...]]:
    """Rows of all methods, and the trades of time for money that were found in the search."""
    if not request.objective.is_time:
        request.objective.require_prices(evaluator.cluster)
        search = CheapestSearch(evaluator, request, session)
        return search.run(request.budget, allotment), search.offers()
    rows = run_methods(evaluator, request, session)
    has_prices = evaluator.cluster.prices is not None
    return rows, offers_of_rows(rows, evaluator.cluster) if has_prices else ()


def _asynchronous_row(
    evaluator: Evaluator,
    planner: Planner,
    request: Request,
    session: Session,
    rows: Sequence[MethodRow],
) -> MethodRow:
    """Row of a method that is not exact; it starts from strategies of the exact ones."""
    problem = Problem(
        evaluator=evaluator,
        budget=Budget(evaluations=_ASYNCHRONOUS),
        seed=request.seed,
        step_barrier=request.step_barrier,
        orders=request.orders,
        seeds=tuple(row.candidate for row in rows if row.candidate is not None),
        stop=session.stop,
    )
    return run_method(planner, problem)


def _spending(
    evaluator: Evaluator, seconds: float, allotment: Allotment, stop: Stop | None = None
) -> Spending:
    """A limit of some seconds from now on; no limit if they are infinite."""
    budget = ENDLESS if math.isinf(seconds) else Budget(seconds=seconds)
    return Spending(budget, evaluator, stop=stop, clock=allotment.clock)


def plan_from_rows(
    evaluator: Evaluator,
    rows: Sequence[MethodRow],
    *,
    noise: Spending | None = None,
    issued: IssuedSteps | None = None,
    rank: Rank = by_time,
) -> Plan:
    """The plan of the best row, with its order and program, as if somebody had made it by hand.

    Args:
        evaluator: Evaluator that judged the rows.
        rows: Rows of all methods.
        noise: Limit on the draws of noise; ``None`` for no limit.
        issued: Orders of candidates that may have been made already.
        rank: Function that ranks the rows.
    """
    graph, cluster = evaluator.graph, evaluator.cluster
    row = best_row(rows, rank)
    rows = with_noise(evaluator, rows, noise, rank)
    assert row.candidate is not None
    strategy = row.candidate.strategy
    step = (issued or IssuedSteps(evaluator)).of(row.candidate.strategy, row.candidate.orders[0])
    least = lower_bound_s(graph, cluster, evaluator.cost_model, with_op_rules=use_op_rules(rows))
    if strategy.step_barrier:
        assert_not_below(rows, least.seconds)
    overlaps = any(mode.overlaps_steps for mode in strategy.modes)
    bound = least.compute_s if overlaps else least.seconds
    return Plan(
        graph=graph,
        cluster=cluster,
        strategy=strategy,
        order=row.order,
        task_order=np.zeros(0, np.int32) if step is None else step.task_order,
        sent_before=np.zeros((0, 2), np.int32) if step is None else step.sent_before,
        program_hash="" if step is None else step.program.hash,
        outcome=row.outcome,
        step_time_s=row.step_time_s,
        peak_memory_bytes=row.peak_memory_bytes,
        method=row.method,
        rows=tuple(rows),
        lower_bound_s=bound,
        budget="1e",
        seed=0,
        calibration=evaluator.cost_model.name,
        search_seconds=0.0,
        num_evaluations=sum(each.num_evaluations for each in rows),
        shortage=row.shortage,
        interval_s=None
        if row.step_time_s is None
        else evaluator.interval(row.step_time_s, strategy),
        peak_errors=shipped_peak_errors(),
    )


def parse_orders(name: str) -> tuple[Order, ...]:
    """All orders that a name allows: every one for ``best``.

    >>> parse_orders("rank")
    (<Order.RANK: 1>,)
    """
    known = {BEST: tuple(Order)} | {order.name.lower(): (order,) for order in Order}
    return named("order", str(name).lower(), known)
