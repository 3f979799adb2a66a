"""Some hosts of a cluster as a cluster of their own, and their plans as ones for the whole.

A strategy that leaves hosts out takes the same time whether they are there or not: nothing runs on
them and nothing crosses their links. So a method that knows nothing of prices can be asked about
the hosts that are to be rented, and its strategy holds for the whole cluster with other numbers of
devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from heterog.cluster.topology import Cluster
from heterog.methods.changes import renumbered
from heterog.strategy.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class HostSubset:
    """Some hosts of a cluster.

    Attributes:
        whole: The whole cluster.
        hosts: Positions of the hosts that may be used, ascending.
    """

    whole: Cluster
    hosts: tuple[int, ...]

    @property
    def name(self) -> str:
        """Names of the hosts, or of the first few and how many more there are."""
        names = [self.whole.hosts[host].name for host in self.hosts]
        return (
            ", ".join(names)
            if len(names) <= 4
            else f"{', '.join(names[:3])} and " + (f"{len(names) - 3} more")
        )

    @property
    def is_whole(self) -> bool:
        """Whether these are all hosts."""
        return len(self.hosts) == self.whole.num_hosts

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Device of the whole cluster for each device of the part."""
        return tuple(d for host in self.hosts for d in self.whole.host_devices(host))

    @cached_property
    def part(self) -> Cluster:
        """The cluster of these hosts alone, with the lines that still have hosts on both sides."""
        return self.whole.part(self.devices)

    def lifted(self, strategy: Strategy) -> Strategy:
        """A strategy for the part as one for the whole cluster, where other hosts do nothing."""
        if self.is_whole:
            return strategy
        return renumbered(strategy, self.devices, self.whole)


def on_part(strategy: Strategy, whole: Cluster, devices: Sequence[int], part: Cluster) -> Strategy:
    """A strategy that uses some devices alone, on the cluster of these.

    Args:
        strategy: Strategy for the whole cluster, whose modes name no devices.
        whole: The whole cluster.
        devices: Device of the whole cluster for each device of the part.
        part: The part.
    """
    place = [-1] * whole.num_devices
    for number, device in enumerate(devices):
        place[device] = number
    return renumbered(strategy, place, part)
