"""Seconds of transfers and collectives from the traffic of their channels (alpha-beta model).

A channel's phases follow one another; within a phase the most loaded link decides:

    T(S) = alpha + S sum_phase max_link (multiple / rate)

(Hockney 1994 for alpha-beta; Thakur et al. 2005 for the algorithms.) Each link is *held* for its
own bytes over its own rate only.
"""

from collections.abc import Mapping
from types import MappingProxyType

from heterog.cluster.topology import Cluster
from heterog.simulator.cost_model import ChannelSeconds
from heterog.strategy.channels import Channel


def alpha_beta(
    cluster: Cluster, channel: Channel, measured: Mapping[str, float] = MappingProxyType({})
) -> ChannelSeconds:
    """Seconds of a channel from the cluster's effective rates and latencies.

    Args:
        cluster: the links.
        channel: over them.
        measured: bytes/s of link resources by name, instead of the cluster's own.
    """
    seconds_per_byte = 0.0
    held: dict[int, float] = {}
    for phase in channel.phases:
        slowest = 0.0
        for resource, multiple in phase:
            link = cluster.resources[resource]
            seconds = multiple / measured.get(link.name, link.bandwidth_bytes_per_s)
            held[resource] = held.get(resource, 0.0) + seconds
            slowest = max(slowest, seconds)
        seconds_per_byte += slowest
    return ChannelSeconds(channel.latency_s, seconds_per_byte, held)
