"""Methods side by side on one model and cluster, every one with the full budget."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from heterog.cluster import Cluster
from heterog.garbage import settled
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import ENDLESS, Spending, Stop
from heterog.methods.registry import AUTO
from heterog.pricing.cost_model import CostModel
from heterog.search.allotment import NOISE_PART
from heterog.search.issue_order import IssuedSteps, Rehearse
from heterog.search.plan_file import row_to_dict
from heterog.search.portfolio import (
    assert_not_below,
    best_row,
    rehearsed,
    run_methods,
    use_op_rules,
    with_noise,
)
from heterog.search.request import Request, Session
from heterog.search.rows import MethodRow
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.lower_bound import lower_bound_s


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
        """The comparison with every strategy rehearsed on shapes; see ``portfolio.rehearsed``.

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
