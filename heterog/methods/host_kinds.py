"""Kinds of hosts, which can take each other's place: equal devices, inner links and NICs.

What lies between hosts (``Cluster.pairs``) makes no kinds here, unlike in ``Cluster.host_kind``:
who sits behind which line is what an order of hosts decides.
"""

from heterog.cluster.topology import Cluster


def hosts_by_kind(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Hosts of each kind, kinds in order of their first host."""
    kinds: dict[object, list[int]] = {}
    for index, host in enumerate(cluster.hosts):
        devices = (cluster.devices[device] for device in cluster.host_devices(index))
        key = (
            tuple((device.type, device.usable_memory_bytes) for device in devices),
            host.intra,
            (host.nic_line_rate_bytes_per_s, host.num_nics, host.nic_latency_s, host.collectives),
        )
        kinds.setdefault(key, []).append(index)
    return tuple(map(tuple, kinds.values()))
