"""Some hosts of a cluster as a cluster of their own, and their plans as ones for the whole.

A strategy that leaves hosts out takes the same time whether they are there or not: nothing runs on
them and nothing crosses their links. So a method that knows nothing of prices can be asked about
the hosts that are to be rented, and its strategy holds for the whole cluster with other numbers of
devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.strategy.strategy import Decision, Strategy

_T = TypeVar("_T")


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
        return _renumbered(strategy, self.devices, self.whole)


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
    return _renumbered(strategy, place, part)


def _renumbered(strategy: Strategy, place: Sequence[int], cluster: Cluster) -> Strategy:
    """The same strategy on other devices, in the same order.

    Args:
        strategy: Strategy to renumber, whose modes name no devices.
        place: New number of each old device; -1 if there is none, for devices that do nothing.
        cluster: The new cluster.
    """
    known: dict[Decision, Decision] = {}

    def moved(decision: Decision) -> Decision:
        if decision not in known:
            known[decision] = replace(
                decision,
                devices=tuple(place[device] for device in decision.devices),
                slice_groups=tuple(
                    tuple(place[device] for device in group) for group in decision.slice_groups
                ),
                teams=tuple(tuple(place[device] for device in team) for team in decision.teams),
            )
        return known[decision]

    schedule = strategy.schedule
    return replace(
        strategy,
        cluster=cluster.fingerprint(),
        decisions=tuple(map(moved, strategy.decisions)),
        homes=tuple(place[home] if home >= 0 else home for home in strategy.homes),
        micro_batches=_micro_batches(strategy.micro_batches, place, cluster.num_devices),
        schedule=replace(
            schedule,
            in_flight=_scattered(schedule.in_flight, place, cluster.num_devices),
            turns=_scattered(schedule.turns, place, cluster.num_devices),
        ),
    )


def _scattered(
    rows: Sequence[tuple[_T, ...]], place: Sequence[int], num_devices: int
) -> tuple[tuple[_T, ...], ...]:
    """Rows by old device as rows by new device; no rows stay no rows."""
    if not rows:
        return ()
    found: list[tuple[_T, ...]] = [()] * num_devices
    for device, row in enumerate(rows):
        if place[device] >= 0:
            found[place[device]] = row
    return tuple(found)


def _micro_batches(
    rows: tuple[tuple[int, ...], ...], place: Sequence[int], num_devices: int
) -> tuple[tuple[int, ...], ...]:
    """The table of micro-batches by new device.

    A table may hold the sizes alone, in the row of any device; rows of devices that are gone
    move to the first row, so that the sizes stay.
    """
    if not rows:
        return ()
    found = np.zeros((num_devices, len(rows[0])), np.int64)
    for device, row in enumerate(rows):
        found[max(place[device], 0)] += np.array(row)
    return tuple(tuple(row) for row in found.tolist())
