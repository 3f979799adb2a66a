"""The cost of a plan: a step, a million samples or tokens, and the whole training run."""

from dataclasses import dataclass

from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import MethodRow
from heterog.search.objective import (
    Objective,
    cost_per_s,
    hosts_used,
    rent_per_s,
    tokens_per_sample,
)
from heterog.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Money of a plan, in the currency of its cluster's prices.

    Attributes:
        currency: Name of the currency, for people.
        hosts: Names of the hosts that are rented.
        per_hour: Rent of all of them together for an hour.
        per_step: Cost of a training step.
        per_million_samples: Cost of training on a million samples.
        per_million_tokens: Cost of training on a million tokens; ``None`` without tokens.
        num_steps: Number of steps of the run; ``None`` if not given, and then so is what follows.
        total_s: Seconds of the run.
        total: Cost of the run.
        missed_s: Seconds by which it ends after the deadline; ``None`` without a deadline.
    """

    currency: str
    hosts: tuple[str, ...]
    per_hour: float
    per_step: float
    per_million_samples: float
    per_million_tokens: float | None
    num_steps: int | None
    total_s: float | None
    total: float | None
    missed_s: float | None


def cost_of(
    graph: OpGraph,
    cluster: Cluster,
    strategy: Strategy,
    step_time_s: float,
    objective: Objective,
) -> Cost:
    """The cost of a strategy on a cluster with prices.

    Args:
        graph: Graph of one step.
        cluster: Cluster with prices.
        strategy: Strategy whose hosts are rented.
        step_time_s: Seconds per step.
        objective: Number of steps and deadline, if there are any.
    """
    assert cluster.prices is not None
    used = hosts_used(strategy, cluster)
    rent = rent_per_s(cluster, used)
    per_step, steps = step_time_s * rent, objective.num_steps
    tokens = tokens_per_sample(graph)
    per_sample = per_step / graph.batch_size
    return Cost(
        currency=cluster.prices.currency,
        hosts=tuple(cluster.hosts[host].name for host in used),
        per_hour=rent * 3600.0,
        per_step=per_step,
        per_million_samples=per_sample * 1e6,
        per_million_tokens=None if tokens is None else per_sample / tokens * 1e6,
        num_steps=steps,
        total_s=None if steps is None else steps * step_time_s,
        total=None if steps is None else steps * per_step,
        missed_s=None if objective.deadline_s is None else objective.missed_s(step_time_s),
    )


def cost_per_step(row: MethodRow, cluster: Cluster) -> float | None:
    """Price of a step of a row; ``None`` where that is not known."""
    if cluster.prices is None or row.step_time_s is None or row.candidate is None:
        return None
    return row.step_time_s * cost_per_s(row.candidate.strategy, cluster)
