"""Requests by keywords, for tests that ask for many plans; budgets and orders may be texts."""

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget
from heterog.search import plan, portfolio
from heterog.search.issue_order import Rehearse
from heterog.search.plan import Plan
from heterog.search.portfolio import Comparison
from heterog.search.request import Request, Session
from heterog.search.rows import MethodRow
from heterog.simulator.evaluator import Evaluator

_OF_SESSION = {field.name for field in fields(Session)}


def asked(graph: OpGraph, cluster: Cluster, **options: Any) -> tuple[Request, Session]:
    """A request and the session for it."""
    session = {name: options.pop(name) for name in _OF_SESSION & set(options)}
    if isinstance(options.get("budget"), str):
        options["budget"] = Budget.parse(options["budget"])
    if "order" in options:
        options["orders"] = plan.parse_orders(options.pop("order"))
    if "methods" in options:
        options["methods"] = tuple(options["methods"])
    return Request(graph=graph, cluster=cluster, **options), Session(**session)


def make_plan(
    graph: OpGraph,
    cluster: Cluster,
    *,
    evaluator: Evaluator | None = None,
    rehearse: Rehearse | None = None,
    **options: Any,
) -> Plan:
    """The plan of a request."""
    request, session = asked(graph, cluster, **options)
    return plan.make_plan(request, session, evaluator=evaluator, rehearse=rehearse)


def run_methods(
    evaluator: Evaluator, methods: Sequence[str], *, without: Collection[str] = (), **options: Any
) -> list[MethodRow]:
    """The rows of methods."""
    request, session = asked(evaluator.graph, evaluator.cluster, methods=methods, **options)
    return portfolio.run_methods(evaluator, request, session, without=without)


def compare_methods(
    graph: OpGraph, cluster: Cluster, methods: Sequence[str], **options: Any
) -> Comparison:
    """Methods side by side."""
    return portfolio.compare_methods(*asked(graph, cluster, methods=methods, **options))
