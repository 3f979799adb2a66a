"""The one-line entry points of the package; everything else is imported from where it lives."""

import warnings
from collections.abc import Sequence

from heterog.agents.planners import DEFAULT_POLICY, LEARNED, default_methods
from heterog.cluster import Cluster
from heterog.errors import HeterogWarning, named
from heterog.graph.capture import capture_step
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.methods.planner import Budget
from heterog.methods.registry import AUTO
from heterog.names import items_of
from heterog.runtime.measure.rehearsal import rehearsal_of
from heterog.search.issue_order import Rehearse
from heterog.search.objective import FASTEST, Objective
from heterog.search.plan import BEST, Plan, make_plan, parse_orders
from heterog.search.request import GivenLayout, Request
from heterog.strategy.layouts.layout import Layout, Recompute


def plan(
    workload: Workload | OpGraph,
    cluster: Cluster,
    *,
    method: str | Sequence[str] = "auto",
    budget: Budget | str = "30s",
    seed: int = 0,
    order: str = BEST,
    step_barrier: bool = True,
    policy: str = DEFAULT_POLICY,
    objective: Objective = FASTEST,
) -> Plan:
    """Find how to run one training step of a workload on a cluster.

    Args:
        workload: Model, example batch, loss and optimizer class; or a captured graph.
        cluster: Devices and links.
        method: Name or names of planners; ``"auto"`` runs all of them.
        budget: Limit of the search: ``"30s"`` of time, or ``"5000e"`` for 5,000 evaluations, with
            which the result is reproducible.
        seed: Seed of all random choices.
        order: ``"best"``, or the only order that searching methods may use.
        step_barrier: Whether a step ends with all updates.
        policy: Trained network for ``agent`` and ``agent+search``: ``"default"``, ``"heldout"`` or
            the path of a file.
        objective: What the plan should be best at: the shortest step, or the least money before a
            deadline; see ``heterog.search.objective``.

    Returns:
        The best plan; ``plan.outcome`` says whether it fits and runs. A plan of a workload has
        been rehearsed: played through on all ranks, without data.
    """
    graph, rehearse = _captured(workload)
    known = default_methods(policy)
    methods = items_of("method", method.split(",") if isinstance(method, str) else method, str)
    if policy != DEFAULT_POLICY and not {AUTO, *LEARNED} & set(methods):
        warnings.warn(
            f"policy {policy!r} has no effect on {', '.join(methods)}; only "
            f"{' and '.join(LEARNED)} ask a policy.",
            HeterogWarning,
            stacklevel=2,
        )
    request = Request(
        graph=graph,
        cluster=cluster,
        methods=methods,
        known=known,
        budget=Budget.parse(budget) if isinstance(budget, str) else budget,
        seed=seed,
        orders=parse_orders(order),
        step_barrier=step_barrier,
        objective=objective,
    )
    return make_plan(request, rehearse=rehearse)


def _captured(workload: Workload | OpGraph) -> tuple[OpGraph, Rehearse | None]:
    """The graph of a workload, and the rehearsal of its plans; a graph alone has none."""
    if isinstance(workload, OpGraph):
        return workload, None
    captured = capture_step(workload)
    return captured.graph, rehearsal_of(captured)


def layout(
    workload: Workload | OpGraph,
    cluster: Cluster,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 0,
    micro_batch: int = 0,
    num_micro: int = 0,
    zero: int = 0,
    recompute: str = "none",
    schedule: str = "",
    chunks: int = 0,
    layers: Sequence[int] = (),
    split: Sequence[str] = (),
    step_barrier: bool = True,
) -> Plan:
    """A person's own layout, in Megatron's and FSDP's words, as a plan.

    The arguments are those of ``strategy.layouts.layout.Layout``, which explains them.

    Args:
        workload: Model, example batch, loss and optimizer class; or a captured graph.
        cluster: Devices and links; rank r of the layout is device r.
        tp: Number of devices that share every matrix product.
        pp: Number of ranks of a pipeline.
        dp: Number of replicas; 0 for as many as there are devices for.
        micro_batch: Samples of a replica that go through the model at a time.
        num_micro: Number of micro-batches of a replica, instead of ``micro_batch``.
        zero: Stage of ZeRO, 0 to 3.
        recompute: ``"none"``, ``"selective"``, ``"op"`` or ``"full"``.
        schedule: Name of the pipeline's schedule; ``"1f1b"`` if empty.
        chunks: Number of stages on each rank.
        layers: Number of repeated layers in each stage.
        split: Modules at which stages begin, instead of ``layers``.
        step_barrier: Whether a step ends with all updates.

    Returns:
        A plan of one row, ``"given"``, with predicted step time and memory. A plan of a workload
        has been rehearsed. It can be saved, reported, explained and deployed like any other.

    Raises:
        LayoutError: the layout does not fit the model, its batch or the cluster.
    """
    said = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batch=micro_batch,
        num_micro=num_micro,
        zero=zero,
        recompute=named("recompute", recompute, {each.value: each for each in Recompute}),
        schedule=schedule,
        chunks=chunks,
        layers=items_of("layers", layers, int),
        split=items_of("split", split, str),
    )
    graph, rehearse = _captured(workload)
    request = Request(
        graph=graph,
        cluster=cluster,
        methods=(),
        budget=Budget(evaluations=1),
        step_barrier=step_barrier,
        given=GivenLayout(said),
    )
    return make_plan(request, rehearse=rehearse)
