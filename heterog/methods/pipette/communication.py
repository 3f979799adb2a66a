"""Seconds that a uniform pipeline communicates on an order of hosts, by measured rates.

Hosts are laid out as d rows of p columns: a row is a pipeline, a column has one stage. With rates
b[i, j] from host i to host j (b[i, i] inside host i), Pipette's objective is the sum of

    pipeline   max over rows of the sum over neighbours (i, j) of 2 P / b[i, j]
    between    2 (d - 1)/d D  x  max over the ring of the first column of 1 / b[i, j]
    inside     2 (n - 1)/n D  x  max over the first column of 1 / b[i, i]

That is ``Pricing.PUBLISHED``. What heterog runs differs in four ways, which ``Pricing.EXECUTED``
follows: gradients of activations travel against the activations and take the rate of that
direction; all replicas of a host send at the same time over one line, and so do the members of
teams with their gradients; the rings of all stages count; and a ring goes through its hosts in
the order of the cluster, so that an order decides who is in a ring and not who is next to whom.
"""

from dataclasses import dataclass
from enum import StrEnum

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
class Traffic:
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
        assert bytes_per_s.ndim == 2, "a matrix of hosts by hosts"
        assert (bytes_per_s > 0.0).all(), "every pair of hosts has a rate"
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
        self, order: IntArray, traffic: Traffic, pricing: Pricing = Pricing.PUBLISHED
    ) -> Communication:
        """Seconds of communication on an order of hosts.

        Args:
            order: Hosts, row by row; the pipelines are the rows.  # [num_hosts]
            traffic: Traffic of the layout.
            pricing: Communication that is priced.
        """
        rows = order.reshape(-1, traffic.num_stages)  # [num_rows, num_stages]
        return (_executed if pricing == Pricing.EXECUTED else _published)(
            self.s_per_byte, rows, traffic
        )


def _published(inverse: FloatArray, rows: IntArray, traffic: Traffic) -> Communication:
    first = rows[:, 0]
    hops = inverse[rows[:, :-1], rows[:, 1:]]
    slowest = inverse[first, np.roll(first, -1)].max() if len(rows) > 1 else 0.0
    return Communication(
        pipeline_s=2.0 * traffic.message_bytes * float(hops.sum(axis=1).max(initial=0.0)),
        between_s=ring_payloads(len(rows)) * traffic.gradient_bytes * float(slowest),
        inside_s=ring_payloads(traffic.replicas_per_host)
        * traffic.gradient_bytes
        * float(inverse[first, first].max()),
    )


def _executed(inverse: FloatArray, rows: IntArray, traffic: Traffic) -> Communication:
    hops = inverse[rows[:, :-1], rows[:, 1:]] + inverse[rows[:, 1:], rows[:, :-1]]
    rings = np.sort(rows, axis=0)
    slowest = inverse[rings, np.roll(rings, -1, axis=0)].max() if len(rows) > 1 else 0.0
    message_bytes = traffic.message_bytes * traffic.replicas_per_host
    return Communication(
        pipeline_s=message_bytes * float(hops.sum(axis=1).max(initial=0.0)),
        between_s=ring_payloads(len(rows))
        * traffic.gradient_bytes
        * traffic.team_size
        * float(slowest),
        inside_s=ring_payloads(traffic.replicas_per_host)
        * traffic.gradient_bytes
        * float(inverse[rows, rows].max()),
    )
