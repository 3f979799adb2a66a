"""Seconds of transfers and collectives from the traffic of their channels (alpha-beta model).

The phases of a collective process one chunk of the payload after another, as in NCCL, so that all
its links carry bytes at the same time and the most loaded one determines the time:

    T(S) = alpha + S max_link sum_phase (multiple / rate)

(Hockney 1994 for alpha-beta; Thakur et al. 2005 for the algorithms. Unlike there, phases over
different links overlap within an operation; operations of one communicator never do.) Each link is
*held* for its own bytes over its own rate only.
"""

from collections.abc import Mapping
from types import MappingProxyType

from heterog.cluster.topology import Cluster
from heterog.simulator.cost_model import ChannelSeconds
from heterog.strategy.channels import Channel


def alpha_beta(
    cluster: Cluster, channel: Channel, measured: Mapping[str, float] = MappingProxyType({})
) -> ChannelSeconds:
    """Compute the seconds of a channel from the cluster's effective rates and latencies.

    Args:
        cluster: The cluster with the links.
        channel: A channel over these links.
        measured: Bytes/s of link resources by name, instead of the cluster's own.
    """
    held: dict[int, float] = {}
    for phase in channel.phases:
        for resource, multiple in phase:
            link = cluster.resources[resource]
            seconds = multiple / measured.get(link.name, link.bandwidth_bytes_per_s)
            held[resource] = held.get(resource, 0.0) + seconds
    return ChannelSeconds(channel.latency_s, max(held.values(), default=0.0), held)
