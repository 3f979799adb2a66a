"""Clusters: devices on hosts, and the links that transfers between them use.

Rates are effective rates of one direction. Two resources are one bottleneck each: a transfer
inside a host uses the out port of its source and the in port of its destination (or the one bus
of the host), a transfer between hosts uses the out side of one NIC and the in side of the other.
The switch between the hosts never blocks, unless a ``PairLimit`` limits some of them: a line
between two sites, or the rate that was measured for a pair of hosts.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from heterog.cluster.prices import HourlyPrices
from heterog.errors import ClusterError
from heterog.names import name_fault, shown, text_fault
from heterog.units import format_bytes

DTYPES = ("float64", "float32", "float16", "bfloat16")
SCHEMA_VERSION = 1
_LEAST = 1e-6  # of rates in bytes/s or FLOP/s, and of shares


class FrozenFlops(Mapping[str, float]):
    """Peak FLOP/s by dtype name: a mapping that is hashable, ordered by dtype and picklable."""

    __slots__ = ("_items",)

    def __init__(self, peaks: Mapping[str, float]) -> None:
        self._items = {dtype: float(peaks[dtype]) for dtype in sorted(peaks)}

    def __getitem__(self, dtype: str) -> float:
        return self._items[dtype]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


DEVICE_MODELS = "device-models"
ROOFLINE = "roofline"
SHIPPED_MODELS = (DEVICE_MODELS, ROOFLINE)
"""Values in place of a calibration's path: models of GPU types that ship with the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One kind of device and the numbers of its roofline.

    Attributes:
        name: Unique inside a cluster.
        peak_flops_per_s: Peak by dtype name; "float32" (without TF32) is always there, another
            dtype only where the hardware has it.
        memory_bandwidth_bytes_per_s: Peak of the data sheet.
        memory_bytes: Whole size; what a job may use is ``Device.usable_memory_bytes``.
        source: Where the numbers come from.
        compute_efficiency: Share of the peak FLOP/s that a large kernel reaches.
        memory_efficiency: Share of the peak memory bandwidth that a large kernel reaches.
        launch_overhead_s: Time of a kernel that does nothing.
    """

    name: str
    peak_flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    source: str
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.75
    launch_overhead_s: float = 10e-6

    def __post_init__(self) -> None:
        _check_name(self.name, "a device type")
        _check_text(self.source, f"the source of device type '{self.name}'")
        what = f"device type '{self.name}'"
        if "float32" not in self.peak_flops_per_s:
            raise ClusterError(f"{what} has no peak FLOP/s for float32; every type needs one.")
        for dtype, peak in self.peak_flops_per_s.items():
            if dtype not in DTYPES:
                raise ClusterError(
                    f"{what} has a peak for unknown dtype {shown(dtype)}; "
                    f"known: {', '.join(DTYPES)}."
                )
            _check_positive(peak, f"peak FLOP/s ({dtype}) of {what}")
        _check_positive(self.memory_bandwidth_bytes_per_s, f"memory bandwidth of {what}")
        _check_positive(self.memory_bytes, f"memory size of {what}")
        _check_share(self.compute_efficiency, f"compute efficiency of {what}")
        _check_share(self.memory_efficiency, f"memory efficiency of {what}")
        _check_not_negative(self.launch_overhead_s, f"launch overhead of {what}")
        object.__setattr__(self, "peak_flops_per_s", FrozenFlops(self.peak_flops_per_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between the devices of one host.

    Attributes:
        kind: A word for people: "nvlink", "nvswitch", "pcie3", "pcie4", "loopback", ...
        bandwidth_bytes_per_s: Effective rate per direction.
        latency_s: Time of an empty transfer.
        shared: False gives every device its own full-duplex port of that bandwidth; True is one
            bus per host, which all transfers in both directions share.
    """

    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float = 5e-6
    shared: bool = False

    def __post_init__(self) -> None:
        _check_name(self.kind, "a kind of link")
        _check_positive(self.bandwidth_bytes_per_s, f"bandwidth of link '{self.kind}'")
        _check_not_negative(self.latency_s, f"latency of link '{self.kind}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a cluster.

    Attributes:
        name: Unique in the cluster, for example "A:0".
        type: Its kind.
        host_index: Position of its host in ``Cluster.hosts``.
        usable_memory_bytes: Memory size less what contexts and communication buffers take.
    """

    name: str
    type: DeviceType
    host_index: int
    usable_memory_bytes: int

    def __post_init__(self) -> None:
        _check_name(self.name, "a device")
        _check_positive(self.usable_memory_bytes, f"usable memory of device '{self.name}'")
        if self.usable_memory_bytes > self.type.memory_bytes:
            raise ClusterError(
                f"device '{self.name}' has {format_bytes(self.usable_memory_bytes)} of usable "
                f"memory but its type '{self.type.name}' has only "
                f"{format_bytes(self.type.memory_bytes)}; lower usable_memory."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine: its NICs (full duplex, shared by its devices) and its inner link.

    Attributes:
        name: Unique in the cluster.
        nic_line_rate_bytes_per_s: Line rate of one NIC per direction; ``Cluster.efficiency`` of it
            is usable.
        num_nics: Number of NICs; neighbouring devices share one.
        nic_latency_s: Time of an empty transfer to another host.
        intra: The link between the devices of this host.
        cpu_quota: Share of one core that each rank gets on a testbed; None where unlimited.
    """

    name: str
    nic_line_rate_bytes_per_s: float
    num_nics: int = 1
    nic_latency_s: float = 20e-6
    intra: Link
    cpu_quota: float | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, "a host")
        _check_positive(self.nic_line_rate_bytes_per_s, f"NIC line rate of host '{self.name}'")
        if self.num_nics < 1:
            raise ClusterError(f"host '{self.name}' has {self.num_nics} NICs; it needs one.")
        _check_not_negative(self.nic_latency_s, f"NIC latency of host '{self.name}'")
        if self.cpu_quota is not None:
            _check_share(self.cpu_quota, f"CPU quota of host '{self.name}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLimit:
    """A limit that all transfers from some hosts to some others share besides their NICs.

    Attributes:
        sources: Positions in ``Cluster.hosts`` of the hosts that send.
        targets: Positions of the hosts that receive; none is among ``sources``.
        bandwidth_bytes_per_s: Effective rate of this direction, for all transfers together.
        latency_s: Time of an empty transfer, if it is longer than that of the NICs.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    @property
    def is_shared(self) -> bool:
        """Whether it concerns more than one pair of hosts."""
        return len(self.sources) > 1 or len(self.targets) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResource:
    """A resource for at most one full-rate flow, such as "A nic out" or "A:0 port in"."""

    name: str
    bandwidth_bytes_per_s: float
    host_index: int


class Sends(StrEnum):
    """Whether the executing program computes while its messages are being sent."""

    OVERLAPPED = "overlapped"
    """It computes meanwhile: heterog's own runtime."""
    BLOCKING = "blocking"
    """It waits until activations and their gradients are sent: Megatron-LM's 1F1B."""


class Execution(StrEnum):
    """The program that runs steps, on which the time of kernels depends."""

    EAGER = "eager"
    """PyTorch op by op, as in heterog's own runtime and in FSDP."""
    MEGATRON = "megatron"
    """Megatron-LM under DeepSpeed, of 2022, whose host takes longer."""
    COMPILED = "compiled"
    """PyTorch with ``torch.compile``: inductor makes one kernel of several ops."""


class Tf32(StrEnum):
    """Which products of float32 the program makes with TF32, where the hardware has it."""

    NONE = "none"
    """None: ``torch.backends.cudnn.allow_tf32 = False``."""
    CONVOLUTIONS = "convolutions"
    """Convolutions, as PyTorch does by default."""
    EVERYTHING = "everything"
    """Matrix products too: ``torch.backends.cuda.matmul.allow_tf32 = True``."""


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
        calibration: Path of measured cost tables, or one of ``SHIPPED_MODELS``: measured models of
            such GPUs, or data sheets alone. ``None`` means the former.
        sends: Behaviour of the executing program while it sends; predictions follow it.
        execution: The program that runs steps; device models follow it.
        tf32: Which products of float32 that program makes with TF32; likewise.
        pairs: Limits between hosts besides their NICs.
        prices: Prices of hosts, if the file has any.
        device_types: The distinct types by value, in order of first appearance.
        type_index: Position in ``device_types``, per device.
        host_of: Position in ``hosts``, per device.
        host_kind: Number of its kind, per host: hosts of one kind have the same devices, link and
            NICs, and are on the same side of every limit that several hosts share. Rates measured
            between two single hosts make no kinds: every host would be one.
        resources: All resources that a transfer can occupy.

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
    device_types: tuple[DeviceType, ...] = field(init=False, repr=False, compare=False)
    type_index: tuple[int, ...] = field(init=False, repr=False, compare=False)
    host_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    host_kind: tuple[int, ...] = field(init=False, repr=False, compare=False)
    resources: tuple[LinkResource, ...] = field(init=False, repr=False, compare=False)
    _host_devices: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _port_of: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    _nic_of: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    _between: dict[tuple[int, int], tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _device_index: dict[str, int] = field(init=False, repr=False, compare=False)
    _fingerprint: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "pairs", tuple(self.pairs))
        _check_cluster(self)
        _check_pairs(self)
        types: dict[DeviceType, int] = {}
        type_index = tuple(types.setdefault(d.type, len(types)) for d in self.devices)
        members: list[list[int]] = [[] for _ in self.hosts]
        for index, device in enumerate(self.devices):
            members[device.host_index].append(index)
        kinds: dict[tuple[object, ...], int] = {}
        derived: dict[str, object] = {
            "device_types": tuple(types),
            "type_index": type_index,
            "host_of": tuple(d.host_index for d in self.devices),
            "host_kind": tuple(
                kinds.setdefault(
                    (*_kind_of(host, [self.devices[d] for d in own]), _sides(self.pairs, index)),
                    len(kinds),
                )
                for index, (host, own) in enumerate(zip(self.hosts, members, strict=True))
            ),
            "_host_devices": tuple(tuple(m) for m in members),
            "_device_index": {d.name: i for i, d in enumerate(self.devices)},
        }
        nics, derived["_nic_of"] = _nic_resources(self, members)
        inner, derived["_port_of"] = _inner_resources(self, len(nics))
        between, derived["_between"] = _pair_resources(self, len(nics) + len(inner))
        derived["resources"] = nics + inner + between
        for attribute, value in derived.items():
            object.__setattr__(self, attribute, value)
        text = json.dumps(_identity(self), sort_keys=True, separators=(",", ":"), allow_nan=False)
        fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        object.__setattr__(self, "_fingerprint", fingerprint)

    @property
    def num_devices(self) -> int:
        """Number of devices on all hosts."""
        return len(self.devices)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self.hosts)

    def host_devices(self, host_index: int) -> tuple[int, ...]:
        """Indices of the devices of one host."""
        return self._host_devices[host_index]

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
        types = [self.devices[device].type.name for device in self.host_devices(host_index)]
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

    def nic_bandwidth_bytes_per_s(self, host_index: int) -> float:
        """Usable rate of all NICs of a host together, per direction."""
        host = self.hosts[host_index]
        return host.nic_line_rate_bytes_per_s * host.num_nics * self.efficiency

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
        """Time of an empty transfer: the slowest of the NICs and limits, or the inner link."""
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
        """The resource of the first of ``pairs``; these come last."""
        return len(self.resources) - len(self.pairs)

    def bottleneck_bytes_per_s(self, src: int, dst: int) -> float:
        """Rate of a transfer that runs alone; infinite for a device and itself."""
        return min(
            (self.resources[r].bandwidth_bytes_per_s for r in self.route(src, dst)),
            default=math.inf,
        )

    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical JSON that a planner can see."""
        return self._fingerprint

    def describe_difference(self, other: "Cluster") -> str | None:
        """The first host or device that differs from ``other``, or None if there is none.

        None exactly where the fingerprints are equal.
        """
        mine, theirs = _identity(self), _identity(other)
        if mine == theirs:
            return None
        for what, plural in (("host", "hosts"), ("device", "devices")):
            for here, there in zip(mine[plural], theirs[plural], strict=False):
                if here != there:
                    return _describe_pair(what, here, there)
            if len(mine[plural]) != len(theirs[plural]):
                return _describe_count(what, mine[plural], theirs[plural])
        if self.efficiency != other.efficiency:
            return f"NIC efficiency is {self.efficiency:g}, not {other.efficiency:g}"
        return "what lies between hosts (pairs) differs"

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
        from heterog.cluster.spec import save_cluster  # the file format is built on this module

        save_cluster(self, Path(path))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, without reference to the catalogue or to presets."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "efficiency": float(self.efficiency),
            "calibration": self.calibration,
            "sends": str(self.sends),
            "execution": str(self.execution),
            "tf32": str(self.tf32),
            "device_types": [_type_to_dict(t) for t in self.device_types],
            "hosts": [_host_to_dict(h) for h in self.hosts],
            "devices": [
                {
                    "name": d.name,
                    "type_index": t,
                    "host_index": d.host_index,
                    "usable_memory_bytes": int(d.usable_memory_bytes),
                }
                for d, t in zip(self.devices, self.type_index, strict=True)
            ],
        } | self._optional_parts()

    def _optional_parts(self) -> dict[str, Any]:
        """Fields that most clusters' files do not have."""
        pairs = {"pairs": [_limit_to_dict(limit) for limit in self.pairs]} if self.pairs else {}
        return pairs | ({} if self.prices is None else {"prices": self.prices.to_dict()})

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "Cluster":
        """The inverse of ``to_dict``.

        Raises:
            ClusterError: A field is missing, unknown or makes no sense.
        """
        from heterog.cluster.spec import cluster_from_dict  # its records are built on this module

        return cluster_from_dict(record)


def _kind_of(host: Host, devices: Iterable[Device]) -> tuple[object, ...]:
    """The properties that equal hosts share: all but names and quotas."""
    return (
        tuple((device.type, device.usable_memory_bytes) for device in devices),
        host.intra,
        (host.nic_line_rate_bytes_per_s, host.num_nics, host.nic_latency_s),
    )


def _sides(pairs: Iterable[PairLimit], host: int) -> tuple[tuple[int, bool], ...]:
    """The shared limits that a host belongs to, and on which side."""
    return tuple(
        (number, host in limit.sources)
        for number, limit in enumerate(pairs)
        if limit.is_shared and host in (*limit.sources, *limit.targets)
    )


def _check_name(name: str, what: str) -> None:
    if not name:
        raise ClusterError(f"{what} has an empty name; give it one.")
    if (fault := name_fault(name)) is not None:
        raise ClusterError(f"{what} has the name {shown(name)}, which {fault}.")


def _check_text(text: str, what: str) -> None:
    if (fault := text_fault(text)) is not None:
        raise ClusterError(f"{what}, {shown(text)}, {fault}.")


def _check_positive(value: float, what: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ClusterError(f"{what} is {value:g}; it must be a finite number above 0.")
    _check_least(value, what)


def _check_not_negative(value: float, what: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ClusterError(f"{what} is {value:g}; it must be a finite number, 0 or above.")


def _check_share(value: float, what: str) -> None:
    if not 0 < value <= 1:
        raise ClusterError(f"{what} is {value:g}; it must be above 0 and at most 1.")
    _check_least(value, what)


def _check_least(value: float, what: str) -> None:
    """Check that seconds that follow from a rate stay within the range of floats."""
    if value < _LEAST:
        raise ClusterError(f"{what} is {value:g}; it must be at least {_LEAST:g}.")


MAX_DEVICES = 2048
"""Limit because channels are numbered by pairs of devices: there would be four million."""


def _check_cluster(cluster: Cluster) -> None:
    _check_name(cluster.name, "a cluster")
    if len(cluster.devices) > MAX_DEVICES:
        raise ClusterError(
            f"cluster '{cluster.name}' has {len(cluster.devices):,} devices; at most "
            f"{MAX_DEVICES:,} are planned for."
        )
    _check_share(cluster.efficiency, f"NIC efficiency of cluster '{cluster.name}'")
    if not cluster.devices:
        raise ClusterError(f"cluster '{cluster.name}' has no device; it needs at least one.")
    for what, names in (
        ("hosts", [h.name for h in cluster.hosts]),
        ("devices", [d.name for d in cluster.devices]),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                raise ClusterError(
                    f"cluster '{cluster.name}' has {count} {what} named '{name}'; "
                    "give each its own name."
                )
    previous = 0
    for device in cluster.devices:
        if not 0 <= device.host_index < len(cluster.hosts):
            raise ClusterError(
                f"device '{device.name}' is on host number {device.host_index} but cluster "
                f"'{cluster.name}' has hosts 0 to {len(cluster.hosts) - 1}."
            )
        if device.host_index < previous:
            raise ClusterError(
                f"device '{device.name}' of host '{cluster.hosts[device.host_index].name}' comes "
                f"after devices of host '{cluster.hosts[previous].name}'; list devices host by "
                "host, in the order of the hosts."
            )
        previous = device.host_index
    used = {d.host_index for d in cluster.devices}
    for index, host in enumerate(cluster.hosts):
        if index not in used:
            raise ClusterError(f"host '{host.name}' has no device; add one or remove the host.")
    by_name: dict[str, DeviceType] = {}
    for device in cluster.devices:
        if by_name.setdefault(device.type.name, device.type) != device.type:
            raise ClusterError(
                f"device '{device.name}' has a type named '{device.type.name}' with other numbers "
                "than an earlier one of that name; give it another name."
            )


MAX_PAIRS = 128 * 127
"""Limit: a measured matrix of 128 hosts; each entry is one link in the simulation."""


def _check_pairs(cluster: Cluster) -> None:
    where = f"of cluster '{cluster.name}'"
    if len(cluster.pairs) > MAX_PAIRS:
        raise ClusterError(
            f"{len(cluster.pairs):,} limits between hosts {where} are more than the {MAX_PAIRS:,} "
            "of a matrix for 128 hosts; leave out pairs that are as fast as their NICs."
        )
    for number, limit in enumerate(cluster.pairs):
        what = f"limit {number} between hosts {where}"
        for hosts in (limit.sources, limit.targets):
            if not hosts or len(set(hosts)) < len(hosts):
                raise ClusterError(f"{what} names no host, or one twice, on one of its sides.")
            if not all(0 <= host < len(cluster.hosts) for host in hosts):
                raise ClusterError(
                    f"{what} names a host that there is not; they are 0 to "
                    f"{len(cluster.hosts) - 1}."
                )
        if both := set(limit.sources) & set(limit.targets):
            name = cluster.hosts[min(both)].name
            raise ClusterError(f"{what} has host '{name}' on both sides; it can be on one.")
        _check_positive(limit.bandwidth_bytes_per_s, f"bandwidth of {what}")
        _check_not_negative(limit.latency_s, f"latency of {what}")


def _pair_resources(
    cluster: Cluster, first: int
) -> tuple[tuple[LinkResource, ...], dict[tuple[int, int], tuple[int, ...]]]:
    """Limits between hosts, numbered from ``first`` on, and those of each pair of hosts."""
    between: dict[tuple[int, int], tuple[int, ...]] = {}
    resources = []
    for number, limit in enumerate(cluster.pairs):
        sides = [
            cluster.hosts[hosts[0]].name + (f" and {len(hosts) - 1} more" if hosts[1:] else "")
            for hosts in (limit.sources, limit.targets)
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


def _nic_resources(
    cluster: Cluster, host_devices: Sequence[Sequence[int]]
) -> tuple[tuple[LinkResource, ...], tuple[tuple[int, int], ...]]:
    """The sides of all NICs, and for each device the indices of its own (out, in).

    Host by host, so with one NIC each host h has 2h (out) and 2h + 1 (in).
    """
    resources: list[LinkResource] = []
    nic_of = [(0, 0)] * cluster.num_devices
    for index, host in enumerate(cluster.hosts):
        rate = host.nic_line_rate_bytes_per_s * cluster.efficiency
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


def _inner_resources(
    cluster: Cluster, first: int
) -> tuple[tuple[LinkResource, ...], tuple[tuple[int, int], ...]]:
    """Ports inside hosts, numbered from ``first`` on, and for each device its own (out, in).

    If the link is shared, both are the bus.
    """
    resources: list[LinkResource] = []
    bus_of: dict[int, int] = {}
    port_of: list[tuple[int, int]] = []
    for device in cluster.devices:
        index = device.host_index
        host = cluster.hosts[index]
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


def _type_to_dict(device_type: DeviceType) -> dict[str, Any]:
    return {
        "name": device_type.name,
        "peak_flops_per_s": dict(device_type.peak_flops_per_s),
        "memory_bandwidth_bytes_per_s": float(device_type.memory_bandwidth_bytes_per_s),
        "memory_bytes": int(device_type.memory_bytes),
        "source": device_type.source,
        "compute_efficiency": float(device_type.compute_efficiency),
        "memory_efficiency": float(device_type.memory_efficiency),
        "launch_overhead_s": float(device_type.launch_overhead_s),
    }


def _host_to_dict(host: Host) -> dict[str, Any]:
    nics = {"num_nics": int(host.num_nics)} if host.num_nics > 1 else {}
    return {
        "name": host.name,
        "nic_line_rate_bytes_per_s": float(host.nic_line_rate_bytes_per_s),
        **nics,
        "nic_latency_s": float(host.nic_latency_s),
        "intra": {
            "kind": host.intra.kind,
            "bandwidth_bytes_per_s": float(host.intra.bandwidth_bytes_per_s),
            "latency_s": float(host.intra.latency_s),
            "shared": host.intra.shared,
        },
        "cpu_quota": None if host.cpu_quota is None else float(host.cpu_quota),
    }


def _limit_to_dict(limit: PairLimit) -> dict[str, Any]:
    return {
        "sources": list(map(int, limit.sources)),
        "targets": list(map(int, limit.targets)),
        "bandwidth_bytes_per_s": float(limit.bandwidth_bytes_per_s),
        "latency_s": float(limit.latency_s),
    }


def _identity(cluster: Cluster) -> dict[str, Any]:
    """The record that the fingerprint covers; devices have their type in full, hosts a name."""
    record = cluster.to_dict()
    types = [{k: v for k, v in t.items() if k != "source"} for t in record["device_types"]]
    devices = [
        {
            "name": d["name"],
            "host": cluster.hosts[d["host_index"]].name,
            "type": types[d["type_index"]],
            "usable_memory_bytes": d["usable_memory_bytes"],
        }
        for d in record["devices"]
    ]
    # Clusters without limits keep their fingerprint from before there were any.
    pairs = {"pairs": record["pairs"]} if "pairs" in record else {}
    seen = {"efficiency": record["efficiency"], "hosts": record["hosts"], "devices": devices}
    return seen | pairs


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
