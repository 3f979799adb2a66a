"""What transfers occupy: sides of NICs, ports inside hosts and limits between hosts."""

from collections.abc import Sequence
from dataclasses import dataclass

from heterog.cluster.hardware import Device, Host, PairLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResource:
    """A resource for at most one full-rate flow, such as "A nic out" or "A:0 port in"."""

    name: str
    bandwidth_bytes_per_s: float
    host_index: int


def pair_resources(
    hosts: Sequence[Host], pairs: Sequence[PairLimit], first: int
) -> tuple[tuple[LinkResource, ...], dict[tuple[int, int], tuple[int, ...]]]:
    """Limits between hosts, numbered from ``first`` on, and those of each pair of hosts."""
    between: dict[tuple[int, int], tuple[int, ...]] = {}
    resources = []
    for number, limit in enumerate(pairs):
        sides = [
            hosts[side[0]].name + (f" and {len(side) - 1} more" if side[1:] else "")
            for side in (limit.sources, limit.targets)
        ]
        resources.append(
            LinkResource(
                # Numbered, since calibrations know links by their names.
                name=f"{sides[0]} to {sides[1]} limit {number}",
                bandwidth_bytes_per_s=limit.bandwidth_bytes_per_s,
                host_index=limit.sources[0],
            )
        )
        for source in limit.sources:
            for target in limit.targets:
                between[source, target] = (*between.get((source, target), ()), first + number)
    return tuple(resources), between


def nic_resources(
    hosts: Sequence[Host], host_devices: Sequence[Sequence[int]], efficiency: float
) -> tuple[tuple[LinkResource, ...], tuple[tuple[int, int], ...]]:
    """The sides of all NICs, and for each device the indices of its own (out, in).

    Host by host, so with one NIC each host h has 2h (out) and 2h + 1 (in).
    """
    resources: list[LinkResource] = []
    nic_of = [(0, 0)] * sum(map(len, host_devices))
    for index, host in enumerate(hosts):
        rate = host.nic_line_rate_bytes_per_s * efficiency
        members = host_devices[index]
        for place, device in enumerate(members):
            first = len(resources) + 2 * (place * host.num_nics // len(members))
            nic_of[device] = first, first + 1
        for number in range(host.num_nics):
            name = f"{host.name} nic" if host.num_nics == 1 else f"{host.name} nic{number}"
            resources += [
                LinkResource(name=f"{name} {side}", bandwidth_bytes_per_s=rate, host_index=index)
                for side in ("out", "in")
            ]
    return tuple(resources), tuple(nic_of)


def inner_resources(
    hosts: Sequence[Host], devices: Sequence[Device], first: int
) -> tuple[tuple[LinkResource, ...], tuple[tuple[int, int], ...]]:
    """Ports inside hosts, numbered from ``first`` on, and for each device its own (out, in).

    If the link is shared, both are the bus.
    """
    resources: list[LinkResource] = []
    bus_of: dict[int, int] = {}
    port_of: list[tuple[int, int]] = []
    for device in devices:
        index = device.host_index
        host = hosts[index]
        names = [f"{device.name} port out", f"{device.name} port in"]
        if host.intra.shared:
            if index in bus_of:
                port_of.append((bus_of[index], bus_of[index]))
                continue
            bus_of[index] = first + len(resources)
            names = [f"{host.name} bus"]
        port_of.append((first + len(resources), first + len(resources) + len(names) - 1))
        resources += [
            LinkResource(
                name=name,
                bandwidth_bytes_per_s=host.intra.bandwidth_bytes_per_s,
                host_index=index,
            )
            for name in names
        ]
    return tuple(resources), tuple(port_of)
