"""Channels: which links a transfer or collective loads, and by how many times its payload.

A channel is a pair of devices (point to point) or a collective algorithm over a device set; all
collectives over one device set share its communicator, which runs one of them at a time. A channel
holds no seconds; the cost model turns traffic into time. A collective is made of *phases*
that its payload goes through.

With n devices and payload S (bytes of the whole tensor), per direction:

- ring all-reduce: every hop of the ring carries 2 (n-1)/n S, in 2 (n-1) steps (Patarasuk & Yuan
  2009).
- hierarchical all-reduce over hosts h with n_h devices: ports carry (n_h-1)/n_h S in the
  reduce-scatter and again in the all-gather; each host sends 2 (H-1)/H S in between.
- reduce-scatter with uneven slices: host h, which owns the part w_h of the tensor, sends
  (1 - w_h) S and receives (H-1) w_h S, after a reduce-scatter inside the host, in which ports
  carry (n_h-1)/n_h S. The all-gather is its mirror image. Ranks send exactly that
  (``runtime.step.routes``). NCCL's own are rings, of which each NIC carries (n-1)/n S.
- all-to-all: every device sends S/n^2 to each other, n-1 messages one after the other (pairwise
  exchange, Thakur et al. 2005, section 5). A host with n_h of them sends n_h (n - n_h)/n^2 S.

If a host has several NICs, the NICs of the members carry equal parts of the host's traffic. Limits
between two hosts (``Cluster.pairs``) carry the traffic from one to the other: rings send to the
next host alone, in a reduce-scatter each host sends every other host its slice.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import permutations

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster
from heterog.grouped import grouped
from heterog.strategy.strategy import Decision, Sync


class ChannelKind(IntEnum):
    """The kind of communication on a channel."""

    POINT_TO_POINT = 0
    ALL_REDUCE_RING = 1
    ALL_REDUCE_HIERARCHICAL = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    ALL_TO_ALL = 5

    @property
    def is_all_reduce(self) -> bool:
        """Whether every member gets the sum."""
        return self in (ChannelKind.ALL_REDUCE_RING, ChannelKind.ALL_REDUCE_HIERARCHICAL)

    @property
    def has_slices(self) -> bool:
        """Whether every member owns a slice of the payload."""
        return self in (ChannelKind.REDUCE_SCATTER, ChannelKind.ALL_GATHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One transfer route or collective over a device set.

    Attributes:
        kind: Kind of communication.
        devices: Source and destination, or the members of the collective.
        slices: Fraction of the payload that each device owns (reduce-scatter, all-gather).
        phases: For each phase, pairs of (link resource, bytes through it per payload byte).
        latency_s: Sum of the latencies of all consecutive steps.
    """

    kind: ChannelKind
    devices: tuple[int, ...]
    slices: tuple[float, ...] = ()
    phases: tuple[tuple[tuple[int, float], ...], ...]
    latency_s: float

    @property
    def sent_per_byte(self) -> float:
        """Bytes that a member sends per payload byte.

        A ring sends 2 (n - 1) / n in an all-reduce, (n - 1) / n in other collectives, and a
        transfer is sent once.
        """
        if self.kind == ChannelKind.POINT_TO_POINT:
            return 1.0
        part = 1.0 - 1.0 / len(self.devices)
        return 2.0 * part if self.kind.is_all_reduce else part

    def traffic(self) -> dict[int, float]:
        """Bytes through each link resource per payload byte, all phases together."""
        total: dict[int, float] = {}
        for phase in self.phases:
            for resource, multiple in phase:
                total[resource] = total.get(resource, 0.0) + multiple
        return total


def communicators(channels: Sequence[Channel]) -> npt.NDArray[np.int32]:
    """The communicator of each channel, by the number of the first channel that belongs to it.

    All collectives over one device set belong to one communicator, whatever their kind: ranks make
    one process group per device set, and it runs one operation at a time. A transfer has none: it
    gets its own number.

    Returns:
        # [num_channels]
    """
    first: dict[tuple[int, ...], int] = {}
    numbers = np.arange(len(channels), dtype=np.int32)
    for number, channel in enumerate(channels):
        if channel.kind != ChannelKind.POINT_TO_POINT:
            numbers[number] = first.setdefault(channel.devices, number)
    return numbers


class ChannelTable:
    """All channels that strategies on one cluster have used, numbered.

    Channel ``src * num_devices + dst`` is the point-to-point channel from ``src`` to ``dst``. A
    collective gets the next free number when it is first asked for. So numbers of collectives
    depend on the history of calls, and ``Program.hash`` compares the channels themselves. Channels
    are made at their first use: a thousand devices have a million pairs, and a quarter of the
    collectives that candidates may use are never simulated.

    Args:
        cluster: Devices and links.
        beside: Another table of the cluster, whose collectives are not made again.
    """

    def __init__(self, cluster: Cluster, beside: "ChannelTable | None" = None) -> None:
        self.cluster = cluster
        self._known: dict[tuple[ChannelKind, tuple[int, ...], tuple[float, ...]], Channel]
        self._known = {} if beside is None else beside._known
        self.num_transfers = cluster.num_devices**2
        self._made: dict[int, Channel] = {}
        self._collectives: list[tuple[ChannelKind, tuple[int, ...], tuple[int, ...]]] = []
        self._numbers: dict[tuple[ChannelKind, tuple[int, ...], tuple[int, ...]], int] = {}

    def __len__(self) -> int:
        """Number of channel numbers in use."""
        return self.num_transfers + len(self._collectives)

    def __getitem__(self, number: int) -> Channel:
        """The channel with a number.

        Raises:
            IndexError: there is no such channel.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"there is no channel {number} among {len(self)}")
        if number not in self._made:
            if number < self.num_transfers:
                made = self._point_to_point(*divmod(int(number), self.cluster.num_devices))
            else:
                made = self._collective(*self._collectives[number - self.num_transfers])
            self._made[number] = made
        return self._made[number]

    def over_same_links(
        self, numbers: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Find sets of transfers that use the same links between devices of the same types.

        Args:
            numbers: Numbers of channels; each collective is a set of its own.

        Returns:
            Place of the first channel of each set, ascending, and the set of each channel.
        """
        cluster, is_transfer = self.cluster, numbers < self.num_transfers
        src, dst = np.divmod(np.where(is_transfer, numbers, 0), cluster.num_devices)
        links = np.array([cluster.links_of(d) for d in range(cluster.num_devices)], np.int64)
        hosts, types = np.array(cluster.host_of), np.array(cluster.type_index, np.int64)
        side = np.where(hosts[src] == hosts[dst], 2, 0)  # ports within a host, else NICs
        key = links[src, side] * len(cluster.resources) + links[dst, side + 1]
        kinds = len(cluster.device_types)
        key = (key * kinds + types[src]) * kinds + types[dst]
        key = np.where(src == dst, -1 - types[src], key)
        key = np.where(is_transfer, key, -1 - kinds - np.arange(len(numbers)))
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)
        return first[order].astype(np.int32), np.argsort(order)[number].astype(np.int32)

    def all_reduce(self, devices: tuple[int, ...], *, hierarchical: bool) -> int:
        """Number of an all-reduce channel over a device set."""
        kind = ChannelKind.ALL_REDUCE_HIERARCHICAL if hierarchical else ChannelKind.ALL_REDUCE_RING
        return self.collective(kind, devices)

    def value_reduce(self, devices: tuple[int, ...]) -> int:
        """Number of the all-reduce that sums partial values.

        It is hierarchical if several hosts take part, one with several devices: each NIC then
        carries the value 2 (H-1)/H times in 2 (H-1) steps, instead of 2 (n-1)/n in 2 (n-1).
        """
        num_hosts = len({self.cluster.devices[device].host_index for device in devices})
        return self.all_reduce(devices, hierarchical=1 < num_hosts < len(devices))

    def reduce_scatter(self, devices: tuple[int, ...], slices: tuple[int, ...]) -> int:
        """Number of a reduce-scatter channel with the given relative slices."""
        return self.collective(ChannelKind.REDUCE_SCATTER, devices, slices)

    def all_gather(self, devices: tuple[int, ...], slices: tuple[int, ...]) -> int:
        """Number of an all-gather channel with the given relative slices."""
        return self.collective(ChannelKind.ALL_GATHER, devices, slices)

    def of_values(
        self, devices: tuple[int, ...], *, scatters: bool = False, exchanges: bool = False
    ) -> tuple[int, int, int, int]:
        """Numbers of the channels over which values are summed, gathered, scattered, exchanged.

        -1 for the last two if values are never scattered or exchanged.
        """
        return (
            self.value_reduce(devices),
            self.all_gather(devices, ()),
            self.reduce_scatter(devices, ()) if scatters else -1,
            self.collective(ChannelKind.ALL_TO_ALL, devices) if exchanges else -1,
        )

    def alike(self, channel: Channel, devices: tuple[int, ...]) -> Channel:
        """A channel of the same kind over equally many other devices; it gets no number."""
        if channel.kind == ChannelKind.POINT_TO_POINT:
            src, dst = devices
            return self[src * self.cluster.num_devices + dst]
        return self._collective(channel.kind, devices, channel.slices)

    def for_decision(self, decision: Decision) -> tuple[int, ...]:
        """Channels of a decision's synchronisation, in order: none, one or two."""
        if decision.sync.is_served:
            return ()
        numbers = self.of_sync(decision.devices, decision.sync, decision.slices)
        return tuple(number for number in numbers if number >= 0)

    def of_sync(
        self, devices: tuple[int, ...], sync: Sync, slices: tuple[int, ...]
    ) -> tuple[int, int]:
        """First and second channel of a synchronisation, -1 for none.

        With servers, those for parameters in slices, which rings sum.
        """
        if len(devices) == 1:
            return -1, -1
        if sync.takes_slices:
            return self.reduce_scatter(devices, slices), self.all_gather(devices, slices)
        return self.all_reduce(devices, hierarchical=sync == Sync.HIERARCHICAL), -1

    def collective(
        self, kind: ChannelKind, devices: tuple[int, ...], slices: tuple[int, ...] = ()
    ) -> int:
        """Number of a collective of some kind, with the given relative slices if it has them."""
        key = (kind, devices, slices)
        if key not in self._numbers:
            self._numbers[key] = len(self)
            self._collectives.append(key)
        return self._numbers[key]

    def _point_to_point(self, src: int, dst: int) -> Channel:
        route = self.cluster.route(src, dst) if src != dst else ()
        return Channel(
            kind=ChannelKind.POINT_TO_POINT,
            devices=(src, dst),
            phases=(tuple((resource, 1.0) for resource in route),),
            latency_s=self.cluster.latency_s(src, dst) if src != dst else 0.0,
        )

    def _collective(
        self, kind: ChannelKind, devices: tuple[int, ...], slices: tuple[float, ...]
    ) -> Channel:
        key = kind, devices, slices
        if key not in self._known:
            self._known[key] = self._new_collective(kind, devices, slices)
        return self._known[key]

    def _new_collective(
        self, kind: ChannelKind, devices: tuple[int, ...], slices: tuple[float, ...]
    ) -> Channel:
        weights = np.array(slices or [1] * len(devices), np.float64)
        parts = tuple(float(part) for part in weights / weights.sum())
        if kind == ChannelKind.ALL_REDUCE_RING:
            phases, latency = self._ring(devices)
        elif kind == ChannelKind.ALL_TO_ALL:
            phases, latency = self._pairwise(devices)
        else:
            phases, latency = self._by_hosts(kind, devices, parts)
        return Channel(
            kind=kind,
            devices=devices,
            slices=parts if kind.has_slices else (),
            phases=tuple(phase for phase in phases if phase),
            latency_s=latency,
        )

    def _ring(self, devices: tuple[int, ...]) -> tuple[list[tuple[tuple[int, float], ...]], float]:
        count = len(devices)
        if count == 1:
            return [()], 0.0
        # Devices of a host are neighbours on the ring, so each NIC is crossed once each way.
        ring = sorted(devices, key=lambda device: (self.cluster.host_of[device], device))
        load: dict[int, float] = {}
        latency = 0.0
        multiple = 2.0 * (count - 1) / count
        members = self._members(devices)
        for src, dst in zip(ring, ring[1:] + ring[:1], strict=True):
            latency = max(latency, self.cluster.latency_s(src, dst))
            here, there = self.cluster.host_of[src], self.cluster.host_of[dst]
            if here != there:
                self._load_nics(load, members[here], 0, multiple)
                self._load_nics(load, members[there], 1, multiple)
                _add(load, self.cluster.limits_between(here, there), multiple)
            else:
                _add(load, self.cluster.route(src, dst), multiple)
        return [tuple(sorted(load.items()))], 2.0 * (count - 1) * latency

    def _pairwise(
        self, devices: tuple[int, ...]
    ) -> tuple[list[tuple[tuple[int, float], ...]], float]:
        """The one phase of an all-to-all, and the latency of its consecutive messages."""
        multiple = 1.0 / len(devices) ** 2
        load: dict[int, float] = {}
        members = self._members(devices)
        for local in members.values():
            for src, dst in permutations(local, 2):
                _add(load, self.cluster.route(src, dst), multiple)
        for (here, senders), (there, receivers) in permutations(members.items(), 2):
            sent = len(senders) * len(receivers) * multiple
            self._load_nics(load, senders, 0, sent)
            self._load_nics(load, receivers, 1, sent)
            _add(load, self.cluster.limits_between(here, there), sent)
        latency = max(
            sum(self.cluster.latency_s(device, other) for other in devices if other != device)
            for device in devices
        )
        return [tuple(sorted(load.items()))], latency

    def _members(self, devices: Sequence[int]) -> dict[int, list[int]]:
        """The members on each host."""
        return grouped((self.cluster.host_of[device], device) for device in devices)

    def _load_nics(
        self, load: dict[int, float], members: Sequence[int], side: int, multiple: float
    ) -> None:
        """Spread a host's sent (side 0) or received (1) bytes over the NICs of its members.

        Libraries do so by several rings over the same devices that leave a host by different NICs.
        """
        nics = self.cluster.nics(members, side)
        _add(load, nics, multiple / len(nics))

    def _by_hosts(
        self, kind: ChannelKind, devices: tuple[int, ...], parts: tuple[float, ...]
    ) -> tuple[list[tuple[tuple[int, float], ...]], float]:
        """Phases inside and between hosts; see the module docstring for the amounts."""
        host_of = self.cluster.host_of
        hosts = grouped((host_of[device], position) for position, device in enumerate(devices))
        inside: dict[int, float] = {}
        inside_latency = 0.0
        for members in hosts.values():
            local = [devices[position] for position in members]
            for src, dst in zip(local, local[1:] + local[:1], strict=True):
                if src != dst:
                    hop = self.cluster.latency_s(src, dst) * (len(local) - 1)
                    inside_latency = max(inside_latency, hop)
                    _add(inside, self.cluster.route(src, dst), (len(local) - 1) / len(local))
        inner = tuple(sorted(inside.items()))
        groups = [[devices[position] for position in members] for members in hosts.values()]
        owned = [sum(parts[position] for position in members) for members in hosts.values()]
        outer, outer_latency = self._between_hosts(kind, groups, owned)
        if kind == ChannelKind.ALL_REDUCE_HIERARCHICAL:
            return [inner, outer, inner], 2.0 * inside_latency + outer_latency
        if kind == ChannelKind.REDUCE_SCATTER:
            return [inner, outer], inside_latency + outer_latency
        return [outer, inner], inside_latency + outer_latency

    def _between_hosts(
        self, kind: ChannelKind, groups: Sequence[Sequence[int]], owned: Sequence[float]
    ) -> tuple[tuple[tuple[int, float], ...], float]:
        """One phase between hosts: groups of devices, and the part that each group owns."""
        count = len(groups)
        if count == 1:
            return (), 0.0
        load: dict[int, float] = {}
        for index, group in enumerate(groups):
            if kind == ChannelKind.ALL_REDUCE_HIERARCHICAL:
                sent = received = 2.0 * (count - 1) / count
            else:
                sent, received = 1.0 - owned[index], (count - 1) * owned[index]
                if kind == ChannelKind.ALL_GATHER:
                    sent, received = received, sent
            self._load_nics(load, group, 0, sent)
            self._load_nics(load, group, 1, received)
        if self.cluster.pairs:
            self._load_pairs(
                load, kind, [self.cluster.host_of[group[0]] for group in groups], owned
            )
        latency = max(
            self.cluster.latency_s(group[0], groups[(index + 1) % count][0])
            for index, group in enumerate(groups)
        )
        steps = 2 * (count - 1) if kind == ChannelKind.ALL_REDUCE_HIERARCHICAL else count - 1
        return tuple(sorted((r, m) for r, m in load.items() if m > 0.0)), steps * latency

    def _load_pairs(
        self,
        load: dict[int, float],
        kind: ChannelKind,
        hosts: Sequence[int],
        owned: Sequence[float],
    ) -> None:
        """Add the load of ``_between_hosts`` between pairs: to the next host, or to all others."""
        count, between = len(hosts), self.cluster.limits_between
        for index, here in enumerate(hosts):
            if kind == ChannelKind.ALL_REDUCE_HIERARCHICAL:
                following = hosts[(index + 1) % count]
                _add(load, between(here, following), 2.0 * (count - 1) / count)
                continue
            # Reduce-scatter: the receiver's slice; all-gather: the sender's.
            for there, part in zip(hosts, owned, strict=True):
                own = part if kind == ChannelKind.REDUCE_SCATTER else owned[index]
                for resource in between(here, there):  # none from a host to itself
                    load[resource] = load.get(resource, 0.0) + own


def _add(load: dict[int, float], resources: Iterable[int], multiple: float) -> None:
    """Add bytes per payload byte to the load of each resource."""
    for resource in resources:
        load[resource] = load.get(resource, 0.0) + multiple


def proportional_slices(cluster: Cluster, devices: tuple[int, ...]) -> tuple[int, ...]:
    """Slices in proportion to the rate of each device's host NIC, divided among its devices.

    Slices are integers, about 1000 for a device of average rate; devices of a host get equal ones.
    """
    hosts = [cluster.host_of[device] for device in devices]
    of_host = {
        host: cluster.nic_bandwidth_bytes_per_s[host] / count
        for host, count in Counter(hosts).items()
    }
    rates = [of_host[host] for host in hosts]
    scale = 1000.0 / (sum(rates) / len(rates))
    return tuple(max(round(rate * scale), 1) for rate in rates)


def balanced_slices(cluster: Cluster, devices: tuple[int, ...]) -> tuple[int, ...]:
    """Slices for which a reduce-scatter and an all-gather load every NIC equally long.

    NIC h carries 1 + w_h (H - 2) payloads per direction; equal times T r_h with sum w_h = 1 give
    T = (2 H - 2) / sum r and w_h = (T r_h - 1) / (H - 2). Hosts too slow for a positive slice get
    none, and the others are solved again. With H <= 2 slices do not matter and are equal.
    """
    hosts = sorted({cluster.host_of[device] for device in devices})
    rates = np.array([cluster.nic_bandwidth_bytes_per_s[host] for host in hosts])
    weights: npt.NDArray[np.float64] = np.full(len(hosts), 1.0 / len(hosts))
    if len(hosts) > 2:
        active = np.ones(len(hosts), np.bool_)
        while True:
            # sum over active of (T r - 1) / (H - 2) = 1
            time = (len(hosts) - 2 + active.sum()) / rates[active].sum()
            weights = np.where(active, (time * rates - 1.0) / (len(hosts) - 2), 0.0)
            if (weights >= -1e-12).all():
                break
            active &= weights > 0.0
    per_host = {host: float(weight) for host, weight in zip(hosts, weights, strict=True)}
    members = [cluster.host_of[device] for device in devices]
    count = Counter(members)
    parts = [1000.0 * len(hosts) * max(per_host[h], 0.0) / count[h] for h in members]
    return tuple(round(part) for part in parts)
