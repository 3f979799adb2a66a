"""Runs methods side by side on one graph and cluster; ``auto`` is the portfolio of all of them.

All methods are judged in the same way (``judging``). Searches get the strategies of earlier
methods and may start from them, as ``local_search`` does. ``auto`` takes the best of all rows,
also those of baselines, so by the referee it is never worse than any of them.
"""

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.garbage import settled
from heterog.graph.op_graph import OpGraph
from heterog.lowering.kernels import compilation_told
from heterog.methods.planner import ENDLESS, Planner, Problem, Spending, Stop
from heterog.methods.registry import AUTO, Methods
from heterog.pricing.cost_model import CostModel
from heterog.pricing.intervals import Interval
from heterog.search.allotment import NOISE_PART, Allotment
from heterog.search.issue_order import (
    MOST_REHEARSED,
    MOST_WRITTEN,
    IssuedStep,
    IssuedSteps,
    Rehearse,
)
from heterog.search.judging import can_be_sent, prepare_seat, under_noise
from heterog.search.plan_file import row_to_dict
from heterog.search.request import GIVEN, Request, Session
from heterog.search.rows import MethodRow, Rank, by_time, reference_of
from heterog.search.sharing import Shares, SharesTogether
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator, Outcome
from heterog.simulator.lower_bound import lower_bound_s
from heterog.strategy.strategy import Strategy


def run_methods(
    evaluator: Evaluator,
    request: Request,
    session: Session | None = None,
    *,
    without: Collection[str] = (),
) -> list[MethodRow]:
    """Run the methods of a request and judge them by the referee.

    Time is counted once all kernels are compiled and all libraries imported. A budget in seconds
    then covers everything that ``auto`` does. Baselines get ``BASELINE_PART`` of it. The searches
    get the rest, except what ``allotment`` keeps back: ``FIRST_ROUND`` of it in equal parts
    (``BudgetSplit``), the remainder in rounds to methods that gain most (``judging``). A budget in
    evaluations is divided among the searches in equal parts; baselines do not count.

    Args:
        evaluator: Evaluator of the request's graph and cluster.
        request: Methods and their limits. Each search has the whole budget; ``auto`` divides it
            among its searches. Objective and asynchronous method are not used.
        session: Progress, stop switch and workers of the search; none by default.
        without: Names of methods that do not run at all, not even as starts of searches.

    Returns:
        One row per method, in the order they ran: baselines first.

    Raises:
        UnknownNameError: a method does not exist.
    """
    session = session or Session()
    chosen, running = _planners_of(request, evaluator, without)
    prepare(evaluator, running, session)
    budget, searching = request.budget, any(each.stage == "search" for each in chosen)
    is_shared = AUTO in request.methods or (
        session.allotment is not None and budget.seconds is not None
    )
    allotment = session.allotment or Allotment(budget, clock=session.clock)
    seats = session.seats if is_shared else None
    if seats is not None:
        # The evaluator's model is resolved; a user's methods stay here.
        request = replace(
            request, cost_model=evaluator.cost_model, known=Methods(()), given=None, seeds=None
        )
        session.progress(f"load kernels on {len(seats)} workers", 0.0, math.inf)
        sent = tuple(planner for planner in running if can_be_sent(planner))
        seats.run(prepare_seat, request, [sent] * len(seats))
    allotment.begin()
    asked = Problem(
        evaluator=evaluator,
        budget=budget,
        seed=request.seed,
        step_barrier=request.step_barrier,
        orders=request.orders,
        stop=session.stop,
        clock=allotment.clock,
    )
    shares = Shares(asked, running, allotment, session.progress)
    if seats is not None:
        shares = SharesTogether(asked, running, allotment, session.progress, seats, request)
    if is_shared:
        shares.divide()
        if budget.seconds is not None and searching:
            shares.go_on([planner for planner in chosen if planner.resumes])
    else:
        shares.give_each()
    return [
        shares.rows[planner.name]
        for planner in running
        if planner in chosen and planner.name in shares.rows
    ]


def _planners_of(
    request: Request, evaluator: Evaluator, without: Collection[str]
) -> tuple[list[Planner], list[Planner]]:
    """The methods asked for, and those that run: searches also need baselines to start from."""
    chosen = [each for each in _chosen(request, evaluator) if each.name not in without]
    searching = any(planner.stage == "search" for planner in chosen)
    running = [
        planner
        for planner in request.known
        if planner in chosen
        or (searching and planner.stage == "baseline" and planner.name not in without)
    ]
    running.sort(key=lambda planner: planner.comes_last)
    for own in (request.given, request.seeds):
        if own is not None:
            chosen.append(own)
            running.insert(0, own)
    return chosen, running


def prepare(evaluator: Evaluator, running: Sequence[Planner], session: Session) -> None:
    """Import, read and compile what methods need, before time is counted.

    Raises:
        KeyboardInterrupt: a stop was requested during compilation, when there is no result yet.
    """

    def tell(name: str, part: float) -> None:
        if session.stop.is_requested:
            raise KeyboardInterrupt
        session.progress(f"compile kernels (once, {part:.0%}): {name}", part, math.inf)

    # Methods import it where they use it: ranks import methods, too, and need not wait for it.
    import_module("scipy.interpolate")
    session.progress("load kernels", 0.0, math.inf)
    with compilation_told(tell):
        evaluator.warm_up()
    session.progress("load methods", 0.0, math.inf)
    for planner in running:
        planner.prepare(evaluator)


def with_noise(
    evaluator: Evaluator,
    rows: Sequence[MethodRow],
    spending: Spending | None = None,
    rank: Rank = by_time,
    *,
    rivals: bool = False,
) -> list[MethodRow]:
    """The rows, with seconds under noise where a gain needs them.

    A gain compares the winner, the row of ``reference_of`` and a given layout, as far as they fit.
    If the limit is reached before all of these are simulated, no row gets seconds under noise, and
    gains have no range.

    Args:
        evaluator: Evaluator that judged the rows.
        rows: Rows of methods.
        spending: Limit of all draws together.
        rank: Function that ranks the rows.
        rivals: Whether rows whose intervals overlap that of the winner are simulated, too.
    """
    best = best_row(rows, rank)
    quoted = [best, reference_of(rows)]
    quoted += [row for row in rows if row.method == GIVEN]
    if rivals and (end := _interval(evaluator, best)) is not None:
        ends = [(row, _interval(evaluator, row)) for row in rows]
        quoted += [row for row, own in ends if own is not None and own.low <= end.high]
    wanted = {row.method for row in quoted if row is not None and row.step_time_s is not None}
    result: list[MethodRow] = []
    with spending.limits() if spending is not None else nullcontext():
        for row in rows:
            is_drawn = bool(row.noisy_step_times_s)
            if row.method in wanted and row.candidate is not None and not is_drawn:
                seconds = under_noise(evaluator, row.candidate.strategy, row.candidate.orders[0])
                row = replace(row, noisy_step_times_s=seconds)
            result.append(row)
    return result if len(result) == len(rows) else list(rows)


def _interval(evaluator: Evaluator, row: MethodRow) -> Interval | None:
    """Interval of a row's step; ``None`` if it does not fit."""
    if row.step_time_s is None or row.candidate is None:
        return None
    return evaluator.interval(row.step_time_s, row.candidate.strategy)


def best_row(rows: Sequence[MethodRow], rank: Rank = by_time) -> MethodRow:
    """The winner: the shortest step of those that fit; the nearest to fitting if none does.

    Args:
        rows: Rows of methods.
        rank: Function that ranks them, by default by their steps; see ``Objective.rank``.

    Raises:
        StrategyError: no method has a strategy at all; the text gives the reason of each.
    """
    applicable = [row for row in rows if row.candidate is not None]
    if not applicable:
        reasons = "; ".join(f"{row.method}: {row.shortage or 'no reason given'}" for row in rows)
        raise StrategyError(f"no method applies here ({reasons}); ask another one, or auto.")
    return min(applicable, key=rank)


def rehearsed(
    issued: IssuedSteps,
    rows: Sequence[MethodRow],
    rehearse: Rehearse,
    *,
    every: bool = False,
    spending: Spending | None = None,
    rank: Rank = by_time,
) -> list[MethodRow]:
    """The rows, rehearsed from the best one on until one succeeds.

    Args:
        issued: Programs and orders of candidates.
        rows: Rows of methods.
        rehearse: Function that says why a strategy could not be executed.
        every: Whether to rehearse all rows that fit, not only up to the winner.
        spending: Limit of all rehearsals together. The first row beyond it gets a note.
        rank: Function that ranks the rows.

    Returns:
        The rows in their order; ``cannot_run`` with the reason where a rehearsal failed.
    """
    result = list(rows)
    known: dict[tuple[Strategy, Order], str] = {}
    fitting = [number for number, row in enumerate(rows) if row.step_time_s is not None]
    for number in sorted(fitting, key=lambda index: rank(result[index])):
        row = result[number]
        assert row.candidate is not None
        key = row.candidate.strategy, row.candidate.orders[0]
        if key not in known:
            step = issued.of(*key)
            is_large = step is not None and step.program.num_tasks > MOST_REHEARSED
            said = None
            if step is not None and not is_large:
                said = _said_of(key[0], step, rehearse, spending)
            if said is None:
                why = UNWRITTEN if step is None else UNREHEARSED if is_large else UNPLAYED
                result[number] = replace(row, note="; ".join(filter(None, (row.note, why))))
                if every and why != UNPLAYED:
                    continue
                break
            known[key] = said
        if not known[key]:
            result[number] = replace(row, is_rehearsed=True)
            if not every:
                break
            continue
        result[number] = replace(
            row,
            outcome=str(Outcome.CANNOT_RUN),
            step_time_s=None,
            shortage=known[key],
            overflow_bytes=math.inf,
            is_rehearsed=True,
        )
    return result


UNPLAYED = "not rehearsed: the budget was over; a larger budget plays it through before it says ok"


UNREHEARSED = f"not rehearsed: the step has more than {MOST_REHEARSED:,} ops on all devices"


UNWRITTEN = (
    f"not rehearsed: a step of more than {MOST_WRITTEN:,} ops on all devices is judged and "
    "compared, but no plan to run is written"
)


def _said_of(
    strategy: Strategy, step: IssuedStep, rehearse: Rehearse, spending: Spending | None
) -> str | None:
    """Result of a rehearsal; ``None`` if time was up before it had ended."""
    if spending is None:
        return rehearse(strategy, step, lambda: None)
    said: str | None = None
    with spending.limits():
        said = rehearse(strategy, step, spending.check)
    return said


def use_op_rules(rows: Sequence[MethodRow]) -> bool:
    """Whether any strategy gives ops rules of their own, so that another lower bound holds."""
    return any(row.candidate is not None and row.candidate.strategy.op_rules for row in rows)


def assert_not_below(rows: Sequence[MethodRow], bound_s: float) -> None:
    """Check that no row beats the lower bound: a search would exploit an error of the simulator.

    Modes that overlap steps may beat it.
    """
    for row in rows:
        modes = () if row.candidate is None else row.candidate.strategy.modes
        if any(mode.overlaps_steps for mode in modes):
            continue
        assert row.step_time_s is None or row.step_time_s >= bound_s * (1.0 - 1e-9), (
            f"{row.method} claims {row.step_time_s} s, below the lower bound of {bound_s} s"
        )


def _chosen(request: Request, evaluator: Evaluator) -> list[Planner]:
    if AUTO not in request.methods:
        return [request.known[name] for name in request.methods]
    graph, cluster = evaluator.graph, evaluator.cluster
    return [
        planner
        for planner in request.known
        if planner.name in request.methods or planner.joins_auto(graph, cluster)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rows of one model on one cluster.

    Attributes:
        graph: The model.
        cluster: The cluster.
        rows: One row per method; ``auto`` last.
        lower_bound_s: Seconds per step below which no strategy can be.
        seed: Seed of the searches.
        picked_from: For ``auto``, the method whose row it took.
        cost_model: Cost model that the rows were simulated with; ``None`` for the default.
    """

    graph: OpGraph
    cluster: Cluster
    rows: tuple[MethodRow, ...]
    lower_bound_s: float
    seed: int
    picked_from: str = ""
    cost_model: CostModel | None = None

    def rehearsed(self, rehearse: Rehearse, stop: Stop | None = None) -> "Comparison":
        """The comparison with every strategy rehearsed on shapes; see ``rehearsed``.

        Args:
            rehearse: Function that says why a strategy could not be executed.
            stop: Switch that ends rehearsals early; rows that it leaves out are not rehearsed.
        """
        own = [row for row in self.rows if row.method != AUTO]
        evaluator = Evaluator(self.graph, self.cluster, self.cost_model)
        spending = Spending(ENDLESS, evaluator, stop=stop)
        rows = rehearsed(IssuedSteps(evaluator), own, rehearse, every=True, spending=spending)
        auto = [row for row in self.rows if row.method == AUTO]
        if not auto:
            return replace(self, rows=tuple(rows))
        picked = _picked(rows, auto)
        return replace(self, rows=(*rows, picked), picked_from=best_row(rows).method)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as JSON; that of ``auto`` names the method whose row it took."""
        documents = [row_to_dict(row, self) for row in self.rows]
        for document in documents:
            document["picked_from"] = self.picked_from if document["method"] == AUTO else ""
        return documents


def _picked(rows: Sequence[MethodRow], spent: Sequence[MethodRow]) -> MethodRow:
    """The row of ``auto``: the best of ``rows``, with the effort of all rows in ``spent``."""
    return replace(
        best_row(rows),
        method=AUTO,
        stage="search",
        num_evaluations=sum(row.num_evaluations for row in spent),
        search_seconds=sum(row.search_seconds for row in spent),
    )


@settled()
def compare_methods(request: Request, session: Session | None = None) -> Comparison:
    """Run methods, each with the full budget; ``auto`` picks from all rows that were computed.

    Raises:
        StrategyError: no method applies.
    """
    session = session or Session()
    evaluator = Evaluator(request.graph, request.cluster, request.cost_model)
    has_auto = AUTO in request.methods
    wanted = request.known.names if has_auto else request.methods
    rows = run_methods(evaluator, replace(request, methods=wanted), session)
    budget = request.budget
    noise = budget if budget.seconds is None else budget.part(NOISE_PART)
    rows = with_noise(evaluator, rows, Spending(noise, evaluator, stop=session.stop))
    picked_from = best_row(rows).method if has_auto else ""
    if has_auto:
        rows.append(_picked(rows, rows))
    bound = lower_bound_s(
        request.graph, request.cluster, evaluator.cost_model, with_op_rules=use_op_rules(rows)
    ).seconds
    if request.step_barrier:
        assert_not_below(rows, bound)
    return Comparison(
        graph=request.graph,
        cluster=request.cluster,
        rows=tuple(rows),
        lower_bound_s=bound,
        seed=request.seed,
        picked_from=picked_from,
        cost_model=request.cost_model,
    )
