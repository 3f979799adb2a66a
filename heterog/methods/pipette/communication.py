"""Pipette's models of a step (Yim et al., DATE 2024, arXiv 2405.18093), and its search for orders.

**Communication on an order of hosts.** Hosts are arranged in d rows of p columns: a row is a
pipeline, a column a stage. With rates b[i, j] from host i to host j (b[i, i] inside host i),
Pipette's objective is the sum of

    pipeline   max over rows of the sum over neighbours (i, j) of 2 P / b[i, j]
    between    2 (d - 1)/d D  x  max over the ring of the first column of 1 / b[i, j]
    inside     2 (n - 1)/n D  x  max over the first column of 1 / b[i, i]

That is ``Pricing.PUBLISHED``. ``Pricing.EXECUTED`` follows heterog's runtime, which differs in
four ways. Gradients of activations travel in the opposite direction, at the rate of that
direction. All replicas of a host send at the same time over one line; so do team members with
their gradients. The rings of all stages count. A ring goes through its hosts in the order of the
cluster, so the order decides which hosts form a ring, but not which are neighbours in it.

**Seconds of a step.** Pipette prices a layout of tp x pp x dp before anything runs. With p stages,
m micro-batches, F and B seconds of one micro-batch on one stage, E = p (F + B), k = floor(m / p),
and C and G the objective's pipeline and gradients on an order of hosts:

    k (E + C) + (p - 1)(F + B) + G,    if m < p: E + C + (m - 1)(F + B) + G

That is ``all`` in the paper's ablation. Two peculiarities are kept as published: k drops the
remainder of m / p, so that a model with m = 2p - 1 costs as much as with m = p, and only the
gradients of the first stage are priced.

**Simulated annealing over orders.** Five moves are equally likely. A worse neighbour is accepted
with probability exp(-x / T): x is the difference scaled by a power of ten into [0.1, 1), T begins
at 1 and shrinks by a thousandth in every step. Because of the scaling, the size of a loss hardly
matters; after ``COOLED`` steps no worse order is accepted. Unlike the paper, which goes on for 500
s, the search then restarts at a random order. The first run begins at the given order, so the
result is never worse.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.lowering.program import FloatArray, IntArray


def ring_payloads(members: int) -> float:
    """Payloads that each member of a ring sends in an all-reduce: 2 (n - 1)/n."""
    return 2.0 * (members - 1) / members


class Pricing(StrEnum):
    """The communication that is priced."""

    PUBLISHED = "published"
    """The communication in Pipette's objective."""
    EXECUTED = "executed"
    """The communication in heterog's runtime; see the module docstring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationVolume:
    """Bytes that a uniform pipeline sends.

    Attributes:
        num_stages: p, number of stages, and of hosts of a pipeline.
        replicas_per_host: n, number of replicas that share each host.
        message_bytes: P, bytes of one activation from stage to stage.
        gradient_bytes: D, bytes of a stage's gradients on one member of a team.
        team_size: Number of members of a team, which divide a stage's gradients.
    """

    num_stages: int
    replicas_per_host: int
    message_bytes: float
    gradient_bytes: float
    team_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Seconds of communication on an order of hosts.

    Attributes:
        pipeline_s: Round trip of messages through the slowest pipeline.
        between_s: All-reduce of gradients between hosts.
        inside_s: All-reduce of gradients inside hosts.
    """

    pipeline_s: float
    between_s: float
    inside_s: float

    @property
    def gradients_s(self) -> float:
        """All-reduce of gradients, between and inside hosts."""
        return self.between_s + self.inside_s

    @property
    def total_s(self) -> float:
        """The objective: all of these together."""
        return self.pipeline_s + self.gradients_s


class HostRates:
    """Seconds per byte between hosts.

    Args:
        bytes_per_s: Rates from each host (row) to each other (column); inside hosts: the diagonal.
    """

    def __init__(self, bytes_per_s: FloatArray) -> None:
        self.s_per_byte: FloatArray = 1.0 / bytes_per_s

    @staticmethod
    def of_cluster(cluster: Cluster) -> "HostRates":
        """Rates of a transfer that is alone, between and inside hosts."""
        nics = np.array(
            [host.nic_line_rate_bytes_per_s * cluster.efficiency for host in cluster.hosts]
        )
        rates = np.minimum.outer(nics, nics)
        for limit in cluster.pairs:
            ends = np.ix_(limit.sources, limit.targets)
            rates[ends] = np.minimum(rates[ends], limit.bandwidth_bytes_per_s)
        np.fill_diagonal(rates, [host.intra.bandwidth_bytes_per_s for host in cluster.hosts])
        return HostRates(rates)

    @property
    def num_hosts(self) -> int:
        """Number of hosts, which are the rows of the matrix."""
        return len(self.s_per_byte)

    @property
    def differ(self) -> bool:
        """Whether two pairs of hosts have different rates."""
        apart = self.s_per_byte[~np.eye(self.num_hosts, dtype=np.bool_)]
        return bool(len(apart) and apart.max() > apart.min() * (1.0 + 1e-9))

    def among(self, hosts: IntArray) -> "HostRates":
        """The rates of some hosts, renumbered."""
        return HostRates(1.0 / self.s_per_byte[np.ix_(hosts, hosts)])

    def communication(
        self, order: IntArray, volume: CommunicationVolume, pricing: Pricing = Pricing.PUBLISHED
    ) -> Communication:
        """Seconds of communication on an order of hosts.

        Args:
            order: Hosts, row by row; the pipelines are the rows.  # [num_hosts]
            volume: What the layout sends.
            pricing: Communication that is priced.
        """
        rows = order.reshape(-1, volume.num_stages)  # [num_rows, num_stages]
        return (_executed if pricing == Pricing.EXECUTED else _published)(
            self.s_per_byte, rows, volume
        )


def _published(inverse: FloatArray, rows: IntArray, volume: CommunicationVolume) -> Communication:
    first = rows[:, 0]
    hops = inverse[rows[:, :-1], rows[:, 1:]]
    slowest = inverse[first, np.roll(first, -1)].max() if len(rows) > 1 else 0.0
    return Communication(
        pipeline_s=2.0 * volume.message_bytes * float(hops.sum(axis=1).max(initial=0.0)),
        between_s=ring_payloads(len(rows)) * volume.gradient_bytes * float(slowest),
        inside_s=ring_payloads(volume.replicas_per_host)
        * volume.gradient_bytes
        * float(inverse[first, first].max()),
    )


def _executed(inverse: FloatArray, rows: IntArray, volume: CommunicationVolume) -> Communication:
    hops = inverse[rows[:, :-1], rows[:, 1:]] + inverse[rows[:, 1:], rows[:, :-1]]
    rings = np.sort(rows, axis=0)
    slowest = inverse[rings, np.roll(rings, -1, axis=0)].max() if len(rows) > 1 else 0.0
    message_bytes = volume.message_bytes * volume.replicas_per_host
    return Communication(
        pipeline_s=message_bytes * float(hops.sum(axis=1).max(initial=0.0)),
        between_s=ring_payloads(len(rows))
        * volume.gradient_bytes
        * volume.team_size
        * float(slowest),
        inside_s=ring_payloads(volume.replicas_per_host)
        * volume.gradient_bytes
        * float(inverse[rows, rows].max()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformCosts(CommunicationVolume):
    """A layout in the terms of the model: its volume and its seconds.

    Attributes:
        num_micro: m, number of micro-batches of a replica.
        forward_s: F, forward pass of one micro-batch on one stage, the team's sums included.
        backward_s: B, backward pass, likewise.
    """

    num_micro: int
    forward_s: float
    backward_s: float


def latency_s(costs: UniformCosts, measured: Communication) -> float:
    """Seconds of a step.

    Args:
        costs: Costs of the layout.
        measured: Communication on an order of hosts.
    """
    stages, micro = costs.num_stages, costs.num_micro
    both_s = costs.forward_s + costs.backward_s
    rounds = micro // stages
    # Every p micro-batches pay for a round trip.
    pipeline_s = rounds * (stages * both_s + measured.pipeline_s) + (stages - 1) * both_s
    if not rounds:
        pipeline_s = (micro - 1 + stages) * both_s + measured.pipeline_s
    return pipeline_s + measured.gradients_s


FIRST_TEMPERATURE = 1.0
COOLING = 0.999
COOLED = 5_000
"""Steps of a run: at T = 0.999^5000 = 0.007, the least scaled loss, 0.1, is accepted once in three
million times."""
_MOST_KNOWN = 10_000
"""Most orders whose cost is cached: all neighbours for few hosts, little memory for many."""


def anneal(
    cost_of: Callable[[IntArray], float],
    start: IntArray,
    rng: np.random.Generator,
    *,
    num_steps: int,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[int, ...]:
    """Search for the order of the least cost.

    Args:
        cost_of: Function to minimise, which depends on the order alone.
        start: Order to start from.
        rng: Generator of everything random.
        num_steps: Most neighbours to price.
        is_over: Function called before each step; if true, the best order so far is returned.
    """

    @lru_cache(_MOST_KNOWN)  # a cold run prices the few neighbours of one order repeatedly
    def known_cost(order: bytes) -> float:
        return cost_of(np.frombuffer(order, start.dtype))

    best, least = start, known_cost(start.tobytes())
    order, cost = best, least
    temperature = FIRST_TEMPERATURE
    step = 0
    while step < num_steps and len(start) > 1 and not is_over():
        if step and step % COOLED == 0:
            order = rng.permutation(start)
            cost, temperature = known_cost(order.tobytes()), FIRST_TEMPERATURE
        neighbour = moved(order, rng)
        found = known_cost(neighbour.tobytes())
        step += 1
        if found <= cost or rng.random() < math.exp(-scaled(found - cost) / temperature):
            order, cost = neighbour, found
        if found < least:
            best, least = neighbour, found
        temperature *= COOLING
    return tuple(best.tolist())


def scaled(difference: float) -> float:
    """A positive difference times the power of ten that brings it into [0.1, 1).

    >>> scaled(0.1), scaled(250.0), scaled(0.003)
    (0.1, 0.25, 0.3)
    """
    return float(difference / 10.0 ** (math.floor(math.log10(difference)) + 1))


def moved(order: IntArray, rng: np.random.Generator) -> IntArray:
    """A neighbour: a segment reversed or moved or both, an element moved, or two swapped."""
    count = len(order)
    # One call for all draws, because this runs in every step.
    draws = rng.random(4) * (5, count, count - 1, 1e9)
    kind, first, apart, place = map(int, draws.tolist())
    second = (first + 1 + apart) % count
    begin, end = min(first, second), max(first, second) + 1
    if kind < 2:
        result = order.copy()
        if kind == 0:
            result[begin:end] = order[begin:end][::-1]
        else:
            result[first], result[second] = order[second], order[first]
        return result
    if kind == 2:
        begin, end = first, first + 1
    segment = order[begin:end]
    rest = np.concatenate([order[:begin], order[end:]])
    place %= len(rest) + 1
    if kind == 4:
        segment = segment[::-1]
    return np.concatenate([rest[:place], segment, rest[place:]])
