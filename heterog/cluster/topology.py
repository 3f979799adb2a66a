"""Clusters: devices on hosts, and the routes of transfers between them.

Rates are effective rates of one direction. A transfer occupies resources (``LinkResource``); any
of them may be its bottleneck. Inside a host these are the out port of its source and the in port
of its destination (or the one bus of the host), between hosts the out side of one NIC and the in
side of the other. The switch between the hosts never blocks, unless a ``PairLimit`` limits some
hosts: a line between two sites, or the rate that was measured for a pair of hosts.

This module also has the settings of the program that runs steps on which predictions depend, and
the fingerprint of a cluster's record, with the difference of two records in words.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

from heterog.cluster.hardware import (
    Device,
    DeviceType,
    Host,
    HourlyPrices,
    PairLimit,
    check_cluster,
    check_name,
    check_pairs,
    check_positive,
)
from heterog.errors import ClusterError
from heterog.files import as_path
from heterog.grouped import grouped
from heterog.names import first_of


def identity(record: dict[str, Any]) -> dict[str, Any]:
    """The part of a cluster's record that the fingerprint covers; devices have full types."""
    types = [{k: v for k, v in t.items() if k != "source"} for t in record["device_types"]]
    devices = [
        {
            "name": d["name"],
            "host": record["hosts"][d["host_index"]]["name"],
            "type": types[d["type_index"]],
            "usable_memory_bytes": d["usable_memory_bytes"],
        }
        for d in record["devices"]
    ]
    # Clusters without limits keep the fingerprint that they had before limits existed.
    pairs = {"pairs": record["pairs"]} if "pairs" in record else {}
    seen = {"efficiency": record["efficiency"], "hosts": record["hosts"], "devices": devices}
    return seen | pairs


def fingerprint_of(record: dict[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 of the canonical JSON of ``identity``."""
    text = json.dumps(identity(record), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def difference(record: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first host or device in which the records of two clusters differ, in words."""
    mine, theirs = identity(record), identity(other)
    if mine == theirs:
        return None
    for what, plural in (("host", "hosts"), ("device", "devices")):
        for here, there in zip(mine[plural], theirs[plural], strict=False):
            if here != there:
                return _describe_pair(what, here, there)
        if len(mine[plural]) != len(theirs[plural]):
            return _describe_count(what, mine[plural], theirs[plural])
    if mine["efficiency"] != theirs["efficiency"]:
        return f"NIC efficiency is {mine['efficiency']:g}, not {theirs['efficiency']:g}"
    return "what lies between hosts (pairs) differs"


def _describe_pair(what: str, here: dict[str, Any], there: dict[str, Any]) -> str:
    if here["name"] != there["name"]:
        return f"{what} '{here['name']}' is in the place of {what} '{there['name']}'"
    one = {"num_nics": 1}  # the only field that may be left out
    here, there = one | here, one | there
    key = next(k for k in here if here[k] != there[k])
    a, b = here[key], there[key]
    if isinstance(a, dict) and a.get("name") == b.get("name"):
        inner = next(k for k in a if a[k] != b[k])
        key, a, b = f"{key} {inner}", a[inner], b[inner]
    elif isinstance(a, dict):
        a, b = a["name"], b["name"]
    return f"{what} '{here['name']}': {key.replace('_', ' ')} is {a}, not {b}"


def _describe_count(what: str, here: list[dict[str, Any]], there: list[dict[str, Any]]) -> str:
    longer, where = (here, "this") if len(here) > len(there) else (there, "the other")
    extra = longer[min(len(here), len(there))]["name"]
    return f"{len(here)} {what}s, not {len(there)}: {what} '{extra}' is only in {where} cluster"


class Sends(StrEnum):
    """Whether the executing program computes while its messages are being sent."""

    OVERLAPPED = "overlapped"
    """It computes meanwhile, as heterog's own runtime does."""
    BLOCKING = "blocking"
    """It waits until activations and their gradients are sent, as Megatron-LM's 1F1B does."""


class Execution(StrEnum):
    """The program that runs steps; the time of kernels depends on it."""

    EAGER = "eager"
    """PyTorch op by op, as in heterog's own runtime and in FSDP."""
    MEGATRON = "megatron"
    """Megatron-LM under DeepSpeed, of 2022; its host code takes longer to issue kernels."""
    COMPILED = "compiled"
    """PyTorch with ``torch.compile``: inductor makes one kernel of several ops."""
    GRAPHS = "graphs"
    """The same, and a GPU's kernels are replayed from CUDA graphs: ``mode="reduce-overhead"``."""

    @property
    def compiles(self) -> bool:
        """Whether inductor makes the kernels."""
        return self in (Execution.COMPILED, Execution.GRAPHS)


class Tf32(StrEnum):
    """Which float32 products the program computes in TF32, if the hardware has it."""

    NONE = "none"
    """None: ``torch.backends.cudnn.allow_tf32 = False``."""
    CONVOLUTIONS = "convolutions"
    """Convolutions, as PyTorch does by default."""
    EVERYTHING = "everything"
    """Matrix products too: ``torch.backends.cuda.matmul.allow_tf32 = True``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResource:
    """A resource for at most one full-rate flow, such as "A nic out" or "A:0 port in"."""

    name: str
    bandwidth_bytes_per_s: float
    host_index: int


def pair_resources(
    hosts: Sequence[Host], pairs: Sequence[PairLimit], first: int
) -> tuple[tuple[LinkResource, ...], dict[tuple[int, int], tuple[int, ...]]]:
    """Resources of limits between hosts, and their indices for each pair of hosts.

    Args:
        hosts: Hosts of the cluster.
        pairs: The limits.
        first: Index of the first of these resources.
    """

    def named(side: Sequence[int]) -> str:
        return first_of([hosts[host].name for host in side], most=1)

    resources = tuple(
        LinkResource(
            # Numbered, because calibrations identify links by their names.
            name=f"{named(limit.sources)} to {named(limit.targets)} limit {number}",
            bandwidth_bytes_per_s=limit.bandwidth_bytes_per_s,
            host_index=limit.sources[0],
        )
        for number, limit in enumerate(pairs)
    )
    between = grouped(
        ((source, target), first + number)
        for number, limit in enumerate(pairs)
        for source in limit.sources
        for target in limit.targets
    )
    return resources, {ends: tuple(numbers) for ends, numbers in between.items()}


def nic_resources(
    hosts: Sequence[Host], host_devices: Sequence[Sequence[int]], efficiency: float
) -> tuple[tuple[LinkResource, ...], tuple[tuple[int, int], ...]]:
    """The sides of all NICs, and for each device the indices of its NIC's (out, in).

    They are ordered by host: if every host has one NIC, host h has 2h (out) and 2h + 1 (in).
    """
    resources = tuple(
        LinkResource(
            name=f"{host.name} nic{number if host.num_nics > 1 else ''} {side}",
            bandwidth_bytes_per_s=host.nic_line_rate_bytes_per_s * efficiency,
            host_index=index,
        )
        for index, host in enumerate(hosts)
        for number in range(host.num_nics)
        for side in ("out", "in")
    )
    before = [0, *accumulate(host.num_nics for host in hosts)]
    firsts = [
        2 * (before[index] + place * hosts[index].num_nics // len(members))
        for index, members in enumerate(host_devices)
        for place in range(len(members))
    ]
    return resources, tuple((first, first + 1) for first in firsts)


def inner_resources(
    hosts: Sequence[Host], devices: Sequence[Device], first: int
) -> tuple[tuple[LinkResource, ...], tuple[tuple[int, int], ...]]:
    """Ports inside hosts, with indices from ``first`` on, and each device's own (out, in).

    If the link is shared, both are the bus.
    """
    ends = [
        (f"{hosts[device.host_index].name} bus",) * 2
        if hosts[device.host_index].intra.shared
        else (f"{device.name} port out", f"{device.name} port in")
        for device in devices
    ]
    host_of = {
        name: device.host_index
        for device, names in zip(devices, ends, strict=True)
        for name in names
    }
    resources = tuple(
        LinkResource(
            name=name,
            bandwidth_bytes_per_s=hosts[host].intra.bandwidth_bytes_per_s,
            host_index=host,
        )
        for name, host in host_of.items()
    )
    place = {name: first + number for number, name in enumerate(host_of)}
    return resources, tuple((place[out], place[into]) for out, into in ends)


SCHEMA_VERSION = 1
DEVICE_MODELS = "device-models"
ROOFLINE = "roofline"
SHIPPED_MODELS = (DEVICE_MODELS, ROOFLINE)
"""Cost models that ship with the package; ``Cluster.calibration`` names them instead of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices on hosts joined by one switch, which blocks only where ``pairs`` says so.

    Two clusters with the same fingerprint are the same to a planner: the fingerprint covers every
    number and every host and device name, but not the cluster's own name, the sources of numbers,
    the path of the calibration, the executing program and its settings, and prices.

    Attributes:
        name: Name for people.
        hosts: At least one, each with at least one device.
        devices: Listed host by host.
        efficiency: Usable share of every NIC's line rate.
        calibration: Path of measured cost tables, or one of ``SHIPPED_MODELS``: models fitted to
            measurements of GPU types, or data sheets alone. ``None`` means these fitted models.
        sends: Behaviour of the executing program while it sends; predictions depend on it.
        execution: The program that runs steps; device models depend on it.
        tf32: Which float32 products that program computes in TF32; device models depend on it.
        pairs: Limits between hosts besides their NICs.
        prices: Prices of hosts, if the file has any.
        num_hosts: Number of hosts.
        num_devices: Number of devices on all hosts.
        device_types: The distinct types by value, in order of first appearance.
        type_index: Position in ``device_types``, per device.
        host_of: Position in ``hosts``, per device.
        host_devices: Indices of the devices of each host.
        host_kind: Number of the kind of each host: hosts of one kind have the same devices, link
            and NICs, and are on the same side of every limit that several hosts share. Rates
            between two single hosts are ignored, because every host would be a kind of its own.
        nic_bandwidth_bytes_per_s: Usable rate of all NICs of each host together, per direction.
        resources: All resources that a transfer can occupy.
        fingerprint: First 16 hex digits of the SHA-256 of the canonical JSON of ``identity``.

    >>> cluster = Cluster.load("paper_8gpu")
    >>> cluster.num_devices, cluster.devices[2].name
    (8, 'B:0')
    >>> [cluster.resources[r].name for r in cluster.route(0, 2)]
    ['A nic out', 'B nic in']
    """

    name: str
    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    efficiency: float = 0.7
    calibration: str | None = None
    sends: Sends = Sends.OVERLAPPED
    execution: Execution = Execution.EAGER
    tf32: Tf32 = Tf32.CONVOLUTIONS
    pairs: tuple[PairLimit, ...] = ()
    prices: HourlyPrices | None = None
    num_hosts: int = field(init=False, repr=False, compare=False)
    num_devices: int = field(init=False, repr=False, compare=False)
    device_types: tuple[DeviceType, ...] = field(init=False, repr=False, compare=False)
    type_index: tuple[int, ...] = field(init=False, repr=False, compare=False)
    host_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    host_devices: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    host_kind: tuple[int, ...] = field(init=False, repr=False, compare=False)
    nic_bandwidth_bytes_per_s: tuple[float, ...] = field(init=False, repr=False, compare=False)
    resources: tuple[LinkResource, ...] = field(init=False, repr=False, compare=False)
    fingerprint: str = field(init=False, repr=False, compare=False)
    _port_of: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    _nic_of: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    _between: dict[tuple[int, int], tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _device_index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for given in ("hosts", "devices", "pairs"):
            object.__setattr__(self, given, tuple(getattr(self, given)))
        check_name(self.name, "a cluster")
        check_positive(self.efficiency, f"NIC efficiency of cluster '{self.name}'", most=1)
        check_cluster(self.name, self.hosts, self.devices)
        check_pairs(self.name, self.hosts, self.pairs)
        types: dict[DeviceType, int] = {}
        type_index = tuple(types.setdefault(d.type, len(types)) for d in self.devices)
        by_host = grouped((device.host_index, i) for i, device in enumerate(self.devices))
        members = list(by_host.values())
        kinds: dict[tuple[object, ...], int] = {}
        derived: dict[str, object] = {
            "num_hosts": len(self.hosts),
            "num_devices": len(self.devices),
            "device_types": tuple(types),
            "type_index": type_index,
            "host_of": tuple(d.host_index for d in self.devices),
            "host_kind": tuple(
                kinds.setdefault(
                    (
                        *kind_of_host(host, [self.devices[d] for d in own]),
                        _sides(self.pairs, index),
                    ),
                    len(kinds),
                )
                for index, (host, own) in enumerate(zip(self.hosts, members, strict=True))
            ),
            "host_devices": tuple(tuple(m) for m in members),
            "nic_bandwidth_bytes_per_s": tuple(
                host.nic_line_rate_bytes_per_s * host.num_nics * self.efficiency
                for host in self.hosts
            ),
            "_device_index": {d.name: i for i, d in enumerate(self.devices)},
        }
        nics, derived["_nic_of"] = nic_resources(self.hosts, members, self.efficiency)
        inner, derived["_port_of"] = inner_resources(self.hosts, self.devices, len(nics))
        between, derived["_between"] = pair_resources(
            self.hosts, self.pairs, len(nics) + len(inner)
        )
        derived["resources"] = nics + inner + between
        for attribute, value in derived.items():
            object.__setattr__(self, attribute, value)
        object.__setattr__(self, "fingerprint", fingerprint_of(self.to_dict()))

    def part(self, devices: Iterable[int]) -> "Cluster":
        """The cluster of some devices, in ascending order, their hosts and limits between them.

        Raises:
            ClusterError: there is no device.
        """
        left = sorted(set(devices))
        hosts = sorted({self.host_of[device] for device in left})
        if not hosts:
            raise ClusterError(f"no device of '{self.name}' is left.")
        if len(left) == self.num_devices:
            return self
        place = {host: number for number, host in enumerate(hosts)}

        def kept(members: Sequence[int]) -> tuple[int, ...]:
            return tuple(place[host] for host in members if host in place)

        limits = [
            replace(limit, sources=kept(limit.sources), targets=kept(limit.targets))
            for limit in self.pairs
        ]
        return replace(
            self,
            hosts=tuple(self.hosts[host] for host in hosts),
            devices=tuple(
                replace(self.devices[device], host_index=place[self.host_of[device]])
                for device in left
            ),
            pairs=tuple(limit for limit in limits if limit.sources and limit.targets),
        )

    def host_price_per_s(self, host_index: int) -> float:
        """Price of a whole host per second, in the currency of ``prices``.

        Raises:
            ClusterError: There are no prices, or none for this host.
        """
        host = self.hosts[host_index]
        if self.prices is None:
            raise ClusterError(
                f"cluster '{self.name}' has no prices; add to its file, for example, "
                "'prices: {currency: USD, device_hour: {"
                f"{self.devices[0].type.name}: 2.50}}}}'."
            )
        types = [self.devices[device].type.name for device in self.host_devices[host_index]]
        price = self.prices.of_host(host.name, types)
        if price is None:
            raise ClusterError(
                f"cluster '{self.name}' has no price for host '{host.name}'; add it to host_hour, "
                f"or {', '.join(dict.fromkeys(types))} to device_hour (0 for what is yours)."
            )
        return price / 3600.0

    def device_index(self, name: str) -> int:
        """Position of a device by its name.

        Raises:
            ClusterError: No device has this name.
        """
        if name not in self._device_index:
            raise ClusterError(
                f"cluster '{self.name}' has no device '{name}'; it has "
                f"{', '.join(self._device_index)}."
            )
        return self._device_index[name]

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Indices of the resources that a transfer from device ``src`` to device ``dst`` uses.

        Empty for a device and itself. Devices of one host never use the NIC.
        """
        src_host, dst_host = self.host_of[src], self.host_of[dst]
        if src == dst:
            return ()
        if src_host != dst_host:
            limits = self._between.get((src_host, dst_host), ())
            return self._nic_of[src][0], *limits, self._nic_of[dst][1]
        out_port, in_port = self._port_of[src][0], self._port_of[dst][1]
        return (out_port,) if out_port == in_port else (out_port, in_port)

    def limits_between(self, src_host: int, dst_host: int) -> tuple[int, ...]:
        """Indices of the resources between two hosts besides their NICs."""
        return self._between.get((src_host, dst_host), ())

    def nics(self, devices: Iterable[int], side: int) -> tuple[int, ...]:
        """Indices of the distinct NIC sides of some devices: 0 for out, 1 for in."""
        return tuple(dict.fromkeys(self._nic_of[device][side] for device in devices))

    def links_of(self, device: int) -> tuple[int, int, int, int]:
        """Indices of a device's own links: NIC out and in, port out and in."""
        return *self._nic_of[device], *self._port_of[device]

    def is_nic(self, resource: int) -> bool:
        """Whether a resource is a side of a NIC; these come first."""
        return resource < 2 * sum(host.num_nics for host in self.hosts)

    def is_between(self, resource: int) -> bool:
        """Whether a resource is one of ``pairs``; these come last."""
        return resource >= self._first_pair

    def latency_s(self, src: int, dst: int) -> float:
        """Time of an empty transfer: the longest of NICs and limits, or that of the inner link."""
        if src == dst:
            return 0.0
        src_host, dst_host = self.hosts[self.host_of[src]], self.hosts[self.host_of[dst]]
        if src_host is dst_host:
            return src_host.intra.latency_s
        between = self._between.get((self.host_of[src], self.host_of[dst]), ())
        return max(
            src_host.nic_latency_s,
            dst_host.nic_latency_s,
            *(self.pairs[resource - self._first_pair].latency_s for resource in between),
        )

    @property
    def _first_pair(self) -> int:
        """Index of the resource of the first of ``pairs``; these come last."""
        return len(self.resources) - len(self.pairs)

    def bottleneck_bytes_per_s(self, src: int, dst: int) -> float:
        """Rate of a transfer that runs alone; infinite for a device and itself."""
        return min(
            (self.resources[r].bandwidth_bytes_per_s for r in self.route(src, dst)),
            default=math.inf,
        )

    def describe_difference(self, other: "Cluster") -> str | None:
        """The first difference from another cluster in words; None if fingerprints are equal."""
        return difference(self.to_dict(), other.to_dict())

    @staticmethod
    def load(source: str | Path) -> "Cluster":
        """Reads a preset by its name, or a YAML file by its path.

        Raises:
            UnknownNameError: Neither a preset nor a file.
            InputFileError: The file cannot be read or says something that makes no sense.
        """
        from heterog.cluster.spec import load_cluster  # the file format is built on this module

        return load_cluster(source)

    def save(self, path: str | Path) -> None:
        """Writes a YAML file from which ``load`` makes an equal cluster.

        Raises:
            InputFileError: The file cannot be written.
        """
        from heterog.cluster.building import (
            save_cluster,  # the file format is built on this module
        )

        save_cluster(self, as_path(path))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, without reference to the catalogue or to presets."""
        pairs = {"pairs": [limit.to_dict() for limit in self.pairs]} if self.pairs else {}
        prices = {} if self.prices is None else {"prices": self.prices.to_dict()}
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "efficiency": float(self.efficiency),
            "calibration": self.calibration,
            "sends": str(self.sends),
            "execution": str(self.execution),
            "tf32": str(self.tf32),
            "device_types": [each.to_dict() for each in self.device_types],
            "hosts": [host.to_dict() for host in self.hosts],
            "devices": [
                {
                    "name": d.name,
                    "type_index": t,
                    "host_index": d.host_index,
                    "usable_memory_bytes": int(d.usable_memory_bytes),
                }
                for d, t in zip(self.devices, self.type_index, strict=True)
            ],
            **pairs,
            **prices,
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "Cluster":
        """The inverse of ``to_dict``.

        Raises:
            ClusterError: A field is missing, unknown or makes no sense.
        """
        from heterog.cluster.spec import cluster_from_dict  # its records are built on this module

        return cluster_from_dict(record)


def kind_of_host(host: Host, devices: Iterable[Device]) -> tuple[object, ...]:
    """The properties that equal hosts share: all but names and quotas."""
    return (
        tuple((device.type, device.usable_memory_bytes) for device in devices),
        host.intra,
        (host.nic_line_rate_bytes_per_s, host.num_nics, host.nic_latency_s, host.collectives),
    )


def _sides(pairs: Iterable[PairLimit], host: int) -> tuple[tuple[int, bool], ...]:
    """The shared limits that a host belongs to, and on which side."""
    return tuple(
        (number, host in limit.sources)
        for number, limit in enumerate(pairs)
        if limit.is_shared and host in (*limit.sources, *limit.targets)
    )
