"""Seconds of transfers and collectives from the traffic of their channels (alpha-beta model).

The phases of a collective process one chunk of the payload after another, as in NCCL, so that all
its links carry bytes at the same time and the most loaded one determines the time:

    T(S) = alpha + S max_link sum_phase (multiple / rate)

(Hockney 1994 for alpha-beta; Thakur et al. 2005 for the algorithms. Unlike there, phases over
different links overlap within an operation; operations of one communicator never do.) Each link is
*held* for its own bytes over its own rate only.

Networks on which somebody has measured NCCL between hosts (``SlowedCollectives``) are priced by
what it does there. n devices on H hosts, of which the slowest sends at R through all of its NICs,
take for a byte of payload

    ring (reduce-scatter, all-gather)   (n - 1) / n / R x ring H^ring_growth
    tree (all-reduce)                 2 (H - 1) / H / R x tree (log2 H)^tree_growth

but no less than the NICs of the members need; an all-reduce takes the lesser of a tree and twice a
ring. A ring waits for more steps the more hosts there are, a tree for 2 log2 H of them. How many
devices of a host take part matters little: 1B models in teams of 1 to 8 (``fit`` rows of the
Ultra-Scale Playbook on 64 to 256 GPUs) were 8, 2, 11 and 12 % too long in the mean with these
formulas, and 8, 25, 57 and 59 % with R of the members' NICs alone.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from heterog.cluster.topology import Cluster
from heterog.grouped import grouped
from heterog.lowering.channels import Channel
from heterog.pricing.cost_model import ChannelSeconds


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


def over_measured_nics(
    cluster: Cluster, channel: Channel, found: ChannelSeconds
) -> ChannelSeconds:
    """A collective between hosts as it was measured on their network, if it was; see the module.

    Args:
        cluster: The cluster with the links.
        channel: A channel over these links.
        found: Its seconds by rates and latencies alone.
    """
    members = grouped((cluster.host_of[device], device) for device in channel.devices)
    num_hosts, num_devices = len(members), len(channel.devices)
    is_sum = channel.kind.is_all_reduce
    if num_hosts == 1 or not (is_sum or channel.kind.has_slices):
        return found
    ring = tree = 0.0
    for host, own in members.items():
        slowed = cluster.hosts[host].collectives
        if slowed is None:
            return found
        rate = cluster.nic_bandwidth_bytes_per_s(host)
        nics = cluster.nics(own, 0)
        least = rate / sum(cluster.resources[nic].bandwidth_bytes_per_s for nic in nics)
        of_ring = max(slowed.ring * num_hosts**slowed.ring_growth, least)
        of_tree = max(slowed.tree * math.log2(num_hosts) ** slowed.tree_growth, least)
        ring = max(ring, (1.0 - 1.0 / num_devices) / rate * of_ring)
        tree = max(tree, 2.0 * (1.0 - 1.0 / num_hosts) / rate * of_tree)
    if not is_sum:
        # Slices that are not even load some links more than a ring does.
        is_even = len(set(channel.slices)) <= 1
        return found._replace(
            seconds_per_byte=ring if is_even else max(ring, found.seconds_per_byte)
        )
    hop_s = max(cluster.hosts[host].nic_latency_s for host in members)
    return found._replace(
        latency_s=min(found.latency_s, 2.0 * math.ceil(math.log2(num_hosts)) * hop_s),
        seconds_per_byte=min(tree, 2.0 * ring),
    )
