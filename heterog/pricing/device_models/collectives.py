"""Seconds of collectives inside a host: latency, a pipeline that fills, and a plateau.

    T(S, n) = latency + hop (n - 1) + min(fill + fill_hop (n - 1), W fill_s_per_byte) + W / rate
    W = rounds S (n - 1) / n
    rate = bandwidth of a link x efficiency x (n / 8)^growth

S is the payload in bytes (of an all-to-all, what each member has), n the members, rounds 2 for an
all-reduce and 1 for others. NCCL has
protocols of low latency and low bandwidth for small payloads and the reverse for large ones, and
takes the faster: the lesser of two lines, which is what the third term makes of the sum (NCCL's
tuning model, ``ncclTopoTuneModel``). Rates grow with members because a switch adds up (NVLS) and
more channels run.
"""

from dataclasses import dataclass

import numpy as np

from heterog.graph.op_graph import FloatArray

_MEMBERS = 8


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """Parameters of one operation among GPUs of one type, as in the formula of the module."""

    rounds: float
    latency_s: float
    hop_s: float
    fill_s: float
    fill_hop_s: float
    fill_s_per_byte: float
    efficiency: float
    growth: float

    def alone_s(self, members: FloatArray) -> FloatArray:
        """Seconds of an empty payload.  # [...]"""
        return np.asarray(self.latency_s + self.hop_s * (members - 1.0))

    def most_fill_s(self, members: FloatArray) -> FloatArray:
        """Longest time that filling takes, in seconds.  # [...]"""
        return np.asarray(self.fill_s + self.fill_hop_s * (members - 1.0))

    def rate(self, members: FloatArray, bandwidth_bytes_per_s: float) -> FloatArray:
        """Bytes per second over a link on the plateau.  # [...]"""
        grown = (np.asarray(members) / _MEMBERS) ** self.growth
        return np.asarray(bandwidth_bytes_per_s * self.efficiency * grown)

    def sent_per_byte(self, members: FloatArray) -> FloatArray:
        """Bytes sent over each link per byte of payload.  # [...]"""
        return np.asarray(self.rounds * (members - 1.0) / members)

    def seconds(
        self, payload: FloatArray, members: FloatArray, bandwidth_bytes_per_s: float
    ) -> FloatArray:
        """Seconds of operations.

        Args:
            payload: Bytes of each operation.  # [num_operations]
            members: Number of members of each operation.  # [num_operations]
            bandwidth_bytes_per_s: Bandwidth of a link, one way.
        """
        sent = payload * self.sent_per_byte(members)
        fill = np.minimum(self.most_fill_s(members), sent * self.fill_s_per_byte)
        plateau = sent / self.rate(members, bandwidth_bytes_per_s)
        return np.asarray(self.alone_s(members) + fill + plateau)
