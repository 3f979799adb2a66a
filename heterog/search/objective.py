"""The objective of a plan: the shortest step, or the least money before a deadline.

Only this module defines how outcomes compare. On a fixed set of rented hosts, money is seconds
times a constant, so methods always search for the shortest step. The objective decides between
sets of hosts (``search.cheapest``), between methods, and which plan is returned.

A host is rented as a whole, from the first step to the last. It costs the same whether a plan uses
one of its devices or all of them; a host without any group or parameter costs nothing. ``Cost``
gives the money for a step, a million samples or tokens, and the whole run.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.records import VALUE, Amount, Name, PositiveSeconds, Series, within
from heterog.search.rows import MethodRow, Rank, by_time
from heterog.strategy.strategy import Strategy

MAX_STEPS = 10**12
"""Most steps of a training run; seconds and money then stay far within the range of floats."""


class Aim(StrEnum):
    """The quantity that is made as small as possible."""

    TIME = "time"
    """Seconds of a step."""
    COST = "cost"
    """Money for all steps."""
    COST_PER_TOKEN = "cost_per_token"
    """Money for a token, or for a sample where samples have no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The quantity to make small, the number of steps, and the deadline for all of them.

    Attributes:
        aim: Quantity to make small.
        num_steps: Number of steps of the whole training run; ``None`` if not given.
        deadline_s: Seconds that all steps may take; needs ``num_steps``.

    >>> two_days = Objective(aim=Aim.COST, num_steps=1000, deadline_s=172800.0)
    >>> two_days.key(step_time_s=100.0, cost_per_s=0.5), two_days.missed_s(200.0)
    ((0.0, 0.0, 50.0, 100.0), 27200.0)
    """

    __pydantic_config__: ClassVar = VALUE

    aim: Aim = Aim.TIME
    num_steps: Annotated[int, within(1, MAX_STEPS)] | None = None
    deadline_s: PositiveSeconds | None = None

    def __post_init__(self) -> None:
        if self.num_steps is not None and not 1 <= self.num_steps <= MAX_STEPS:
            raise HeterogError(
                f"a run of {self.num_steps:,} steps; give a number from 1 to {MAX_STEPS:,}."
            )
        if self.deadline_s is not None:
            if not 0.0 < self.deadline_s < math.inf:
                raise HeterogError(
                    f"a deadline of {self.deadline_s:g} s; give a time above 0, 36h or 2d say."
                )
            if self.num_steps is None:
                raise HeterogError(
                    "a deadline without a number of steps; give a number of steps, samples or "
                    "tokens, so that there is an end that can be late."
                )
        if self.aim == Aim.COST and self.num_steps is None:
            raise HeterogError(
                "the objective cost without a number of steps; give one, or a number "
                "of samples or tokens, or ask for cost_per_token."
            )

    @property
    def is_time(self) -> bool:
        """Whether only seconds count, so that no prices are needed."""
        return self.aim == Aim.TIME

    def key(
        self, *, step_time_s: float, cost_per_s: float = 0.0, overflow_bytes: float = 0.0
    ) -> tuple[float, ...]:
        """Sort key of an outcome; smaller is better.

        Outcomes are compared by missing memory, then by seconds past the deadline, then by cost,
        then by step time; if only time counts, by missing memory and step time.

        Args:
            step_time_s: Seconds per step.
            cost_per_s: Rent of all hosts used, for a second.
            overflow_bytes: Missing bytes on the worst device; infinite if it cannot run.
        """
        if self.is_time:
            return overflow_bytes, step_time_s
        late_s = self.missed_s(step_time_s)
        return overflow_bytes, late_s, step_time_s * cost_per_s, step_time_s

    def missed_s(self, step_time_s: float) -> float:
        """Seconds from the deadline to the end of the last step; 0 if in time or without one."""
        if self.deadline_s is None or self.num_steps is None:
            return 0.0
        return max(step_time_s * self.num_steps - self.deadline_s, 0.0)

    def rank(self, cluster: Cluster) -> Rank:
        """Function that ranks the rows of methods on a cluster."""
        if self.is_time:
            return by_time

        def key(row: MethodRow) -> tuple[float, ...]:
            assert row.candidate is not None
            judged = row.candidate.judged  # its seconds, if it fitted
            return self.key(
                step_time_s=row.step_time_s or (0.0 if judged is None else judged.step_time_s),
                cost_per_s=cost_per_s(row.candidate.strategy, cluster),
                overflow_bytes=row.overflow_bytes,
            )

        return key

    def require_prices(self, cluster: Cluster) -> None:
        """Refuse an objective that needs prices if the cluster has none.

        Raises:
            ClusterError: names a host without a price.
        """
        if not self.is_time:
            for host in range(cluster.num_hosts):
                cluster.host_price_per_s(host)


FASTEST = Objective()
"""The default: the shortest step, whatever it costs."""


def hosts_used(strategy: Strategy, cluster: Cluster) -> tuple[int, ...]:
    """Hosts that a strategy places a group or a parameter on, ascending."""
    devices = {device for each in dict.fromkeys(strategy.decisions) for device in each.devices}
    devices |= {home for home in strategy.homes if home >= 0}
    return tuple(sorted({cluster.host_of[device] for device in devices}))


def cost_per_s(strategy: Strategy, cluster: Cluster) -> float:
    """Rent of the hosts that a strategy uses for a second, in the currency of the cluster."""
    return rent_per_s(cluster, hosts_used(strategy, cluster))


def rent_per_s(cluster: Cluster, hosts: Iterable[int]) -> float:
    """Rent of some hosts together for a second."""
    return math.fsum(cluster.host_price_per_s(host) for host in hosts)


def tokens_per_sample(graph: OpGraph) -> int | None:
    """Tokens of a sample, if the first tensor of the batch is a table of token numbers.

    Such a table has whole numbers and a row for each sample. Padding counts as tokens, because
    it is computed like them.
    """
    for tensor in graph.tensors[: graph.num_inputs]:
        if tensor.kind == TensorKind.BATCH:
            is_table = len(tensor.shape) == 2 and tensor.shape[0] == graph.batch_size
            return tensor.shape[1] if is_table and "int" in tensor.dtype else None
    return None


def steps_for(amount: int, per_step: int) -> int:
    """Number of steps for some samples or tokens; the last one may have too many.

    >>> steps_for(1000, 64)
    16
    """
    return -(-amount // per_step)


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
        num_steps: Number of steps of the run; if ``None``, the following fields are ``None``, too.
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
    graph: OpGraph, cluster: Cluster, strategy: Strategy, step_time_s: float, objective: Objective
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A trade of time for money that a search found.

    Attributes:
        hosts: Names of the hosts that are rented.
        method: Name of the method that found it.
        step_time_s: Seconds per step.
        cost_per_step: Cost of a step, in the currency of the cluster.
    """

    __pydantic_config__: ClassVar = VALUE

    hosts: Series[Name]
    method: Name
    step_time_s: PositiveSeconds
    cost_per_step: Amount


def best_trades(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """Trades that no other beats in both time and cost, fastest first."""
    kept: list[Offer] = []
    for each in sorted(offers, key=lambda offer: (offer.step_time_s, offer.cost_per_step)):
        if not kept or each.cost_per_step < kept[-1].cost_per_step:
            kept.append(each)
    return tuple(kept)


def offers_of_rows(rows: Iterable[MethodRow], cluster: Cluster) -> tuple[Offer, ...]:
    """The best trades among rows of a whole cluster."""
    return best_trades(
        offer_of(row, hosts_used(row.candidate.strategy, cluster), cluster)
        for row in rows
        if row.step_time_s is not None and row.candidate is not None
    )


def offer_of(row: MethodRow, used: Sequence[int], cluster: Cluster) -> Offer:
    """A row that fits as an offer of the hosts that it uses."""
    assert row.step_time_s is not None
    return Offer(
        hosts=tuple(cluster.hosts[host].name for host in used),
        method=row.method,
        step_time_s=row.step_time_s,
        cost_per_step=row.step_time_s * rent_per_s(cluster, used),
    )
