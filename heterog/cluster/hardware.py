"""Devices, hosts and links, limits between hosts, and prices of hosts.

Rates are effective rates of one direction. Names, texts, rates and shares are checked here, and so
are the conditions on a cluster as a whole. Prices are per hour:

    prices:
      currency: USD
      device_hour: {V100-16GB: 2.48, T4: 0.35}     # each device of a type
      host_hour: {B: 1.90}                         # the whole host, whatever is in it

A host is rented whole: it is paid for as soon as a plan uses one of its devices, for as long as
the training takes, idle devices included. A host with a price of its own costs that price; any
other host costs the sum of its devices. Prices change no step time and no fingerprint, so a plan
stays valid when they change.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import Field

from heterog.errors import ClusterError
from heterog.names import name_fault, shown, text_fault
from heterog.records import VALUE, Flag, Int32, Word, finite, within
from heterog.units import format_bytes

_LEAST = 1e-6  # of rates in bytes/s or FLOP/s, and of shares
MAX_DEVICES = 2048
"""Limit because channels are numbered by pairs of devices: these are four million already."""
MOST_BYTES = 2**60
# Far above any machine, far below where sums and quotients leave the range of floats.
_Rate: TypeAlias = Annotated[float, finite(0.0, 1e24)]
_Latency: TypeAlias = Annotated[float, finite(0.0, 1e6)]
_Share: TypeAlias = Annotated[float, finite(0.0, 1.0)]
_Hosts: TypeAlias = Annotated[tuple[Int32, ...], Field(max_length=MAX_DEVICES)]


def check_name(name: str, what: str) -> None:
    """Refuse an empty or invalid name; ``what`` begins the message."""
    if not name:
        raise ClusterError(f"{what} has an empty name; give it one.")
    if (fault := name_fault(name)) is not None:
        raise ClusterError(f"{what} has the name {shown(name)}, which {fault}.")


def check_positive(value: float, what: str, most: float = math.inf) -> None:
    """Refuse a number that is not finite, not above 0, or above ``most``, which is 1 for a share.

    Nor may it be so small that seconds from it could leave the range of floats.
    """
    if not (math.isfinite(value) and 0 < value <= most):
        wanted = "a finite number above 0" if most == math.inf else f"above 0 and at most {most:g}"
        raise ClusterError(f"{what} is {value:g}; it must be {wanted}.")
    if value < _LEAST:
        raise ClusterError(f"{what} is {value:g}; it must be at least {_LEAST:g}.")


def check_not_negative(value: float, what: str) -> None:
    """Refuse a number that is not finite, or below 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ClusterError(f"{what} is {value:g}; it must be a finite number, 0 or above.")


DTYPES = ("float64", "float32", "float16", "bfloat16")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One kind of device and the numbers of its roofline.

    Attributes:
        name: Unique inside a cluster.
        peak_flops_per_s: Peak by dtype name; "float32" (without TF32) is always there, another
            dtype only if the hardware has it.
        memory_bandwidth_bytes_per_s: Peak of the data sheet.
        memory_bytes: Whole size; a job may use ``Device.usable_memory_bytes`` of it.
        source: Where the numbers come from.
        compute_efficiency: Share of the peak FLOP/s that a large kernel reaches.
        memory_efficiency: Share of the peak memory bandwidth that a large kernel reaches.
        launch_overhead_s: Time of a kernel that does nothing.
    """

    __pydantic_config__: ClassVar = VALUE

    name: Word
    peak_flops_per_s: Mapping[Word, _Rate]
    memory_bandwidth_bytes_per_s: _Rate
    memory_bytes: Annotated[int, within(1, MOST_BYTES)]
    source: Word
    compute_efficiency: _Share = 0.6
    memory_efficiency: _Share = 0.75
    launch_overhead_s: _Latency = 10e-6

    def __post_init__(self) -> None:
        check_name(self.name, "a device type")
        what = f"device type '{self.name}'"
        if (fault := text_fault(self.source)) is not None:
            raise ClusterError(f"the source of {what}, {shown(self.source)}, {fault}.")
        if "float32" not in self.peak_flops_per_s:
            raise ClusterError(f"{what} has no peak FLOP/s for float32; every type needs one.")
        for dtype, peak in self.peak_flops_per_s.items():
            if dtype not in DTYPES:
                raise ClusterError(
                    f"{what} has a peak for unknown dtype {shown(dtype)}; "
                    f"known: {', '.join(DTYPES)}."
                )
            check_positive(peak, f"peak FLOP/s ({dtype}) of {what}")
        check_positive(self.memory_bandwidth_bytes_per_s, f"memory bandwidth of {what}")
        check_positive(self.memory_bytes, f"memory size of {what}")
        check_positive(self.compute_efficiency, f"compute efficiency of {what}", most=1)
        check_positive(self.memory_efficiency, f"memory efficiency of {what}", most=1)
        check_not_negative(self.launch_overhead_s, f"launch overhead of {what}")
        object.__setattr__(self, "peak_flops_per_s", FrozenFlops(self.peak_flops_per_s))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {
            "name": self.name,
            "peak_flops_per_s": dict(self.peak_flops_per_s),
            "memory_bandwidth_bytes_per_s": float(self.memory_bandwidth_bytes_per_s),
            "memory_bytes": int(self.memory_bytes),
            "source": self.source,
            "compute_efficiency": float(self.compute_efficiency),
            "memory_efficiency": float(self.memory_efficiency),
            "launch_overhead_s": float(self.launch_overhead_s),
        }


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

    __pydantic_config__: ClassVar = VALUE

    kind: Word
    bandwidth_bytes_per_s: _Rate
    latency_s: _Latency = 5e-6
    shared: Flag = False

    def __post_init__(self) -> None:
        check_name(self.kind, "a kind of link")
        check_positive(self.bandwidth_bytes_per_s, f"bandwidth of link '{self.kind}'")
        check_not_negative(self.latency_s, f"latency of link '{self.kind}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a cluster.

    Attributes:
        name: Unique in the cluster, for example "A:0".
        type: Its kind.
        host_index: Position of its host in ``Cluster.hosts``.
        usable_memory_bytes: Memory size minus the reserve for contexts and communication buffers.
    """

    name: str
    type: DeviceType
    host_index: int
    usable_memory_bytes: int

    def __post_init__(self) -> None:
        check_name(self.name, "a device")
        check_positive(self.usable_memory_bytes, f"usable memory of device '{self.name}'")
        if self.usable_memory_bytes > self.type.memory_bytes:
            raise ClusterError(
                f"device '{self.name}' has {format_bytes(self.usable_memory_bytes)} of usable "
                f"memory but its type '{self.type.name}' has only "
                f"{format_bytes(self.type.memory_bytes)}; lower usable_memory."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowedCollectives:
    """How much longer NCCL's collectives between hosts take than the rate of their NICs says.

    With H hosts, a ring through all devices (reduce-scatter, all-gather) takes
    ``ring`` H ^ ``ring_growth`` times as long, and a tree over the hosts (all-reduce)
    ``tree`` (log2 H) ^ ``tree_growth`` times. If only some devices of a host take part, the rate
    is still that of all its NICs, up to the rate of the devices' own.
    """

    __pydantic_config__: ClassVar = VALUE

    ring: _Rate
    ring_growth: _Latency
    tree: _Rate
    tree_growth: _Latency

    def __post_init__(self) -> None:
        check_positive(self.ring, "'ring' of slowed collectives")
        check_positive(self.tree, "'tree' of slowed collectives")
        check_not_negative(self.ring_growth, "'ring_growth' of slowed collectives")
        check_not_negative(self.tree_growth, "'tree_growth' of slowed collectives")


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
        cpu_quota: Share of one core that each rank gets on a testbed; None if unlimited.
        collectives: Measured slowdown of collectives over these NICs; None if not measured.
    """

    __pydantic_config__: ClassVar = VALUE

    name: Word
    nic_line_rate_bytes_per_s: _Rate
    num_nics: Annotated[int, within(1, MAX_DEVICES)] = 1
    nic_latency_s: _Latency = 20e-6
    intra: Link
    cpu_quota: _Share | None = None
    collectives: SlowedCollectives | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "a host")
        check_positive(self.nic_line_rate_bytes_per_s, f"NIC line rate of host '{self.name}'")
        if self.num_nics < 1:
            raise ClusterError(f"host '{self.name}' has {self.num_nics} NICs; it needs one.")
        check_not_negative(self.nic_latency_s, f"NIC latency of host '{self.name}'")
        if self.cpu_quota is not None:
            check_positive(self.cpu_quota, f"CPU quota of host '{self.name}'", most=1)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        nics = {"num_nics": int(self.num_nics)} if self.num_nics > 1 else {}
        measured = {"collectives": asdict(self.collectives)} if self.collectives else {}
        return {
            "name": self.name,
            "nic_line_rate_bytes_per_s": float(self.nic_line_rate_bytes_per_s),
            **nics,
            "nic_latency_s": float(self.nic_latency_s),
            "intra": {
                "kind": self.intra.kind,
                "bandwidth_bytes_per_s": float(self.intra.bandwidth_bytes_per_s),
                "latency_s": float(self.intra.latency_s),
                "shared": self.intra.shared,
            },
            "cpu_quota": None if self.cpu_quota is None else float(self.cpu_quota),
            **measured,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLimit:
    """A limit that all transfers from some hosts to some other hosts share, besides NICs.

    Attributes:
        sources: Positions in ``Cluster.hosts`` of the hosts that send.
        targets: Positions of the hosts that receive; none is among ``sources``.
        bandwidth_bytes_per_s: Effective rate of this direction, for all transfers together.
        latency_s: Time of an empty transfer, if it is longer than the latency of the NICs.
    """

    __pydantic_config__: ClassVar = VALUE

    sources: _Hosts
    targets: _Hosts
    bandwidth_bytes_per_s: _Rate
    latency_s: _Latency = 0.0

    @property
    def is_shared(self) -> bool:
        """Whether it limits more than one pair of hosts."""
        return len(self.sources) > 1 or len(self.targets) > 1

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {
            "sources": list(map(int, self.sources)),
            "targets": list(map(int, self.targets)),
            "bandwidth_bytes_per_s": float(self.bandwidth_bytes_per_s),
            "latency_s": float(self.latency_s),
        }


def check_cluster(cluster: str, hosts: Sequence[Host], devices: Sequence[Device]) -> None:
    """Check that names are unique, and that devices are listed host by host, on every host.

    Raises:
        ClusterError: They are not.
    """
    if len(devices) > MAX_DEVICES:
        raise ClusterError(
            f"cluster '{cluster}' has {len(devices):,} devices; at most "
            f"{MAX_DEVICES:,} are planned for."
        )
    if not devices:
        raise ClusterError(f"cluster '{cluster}' has no device; it needs at least one.")
    _check_names(cluster, "hosts", [host.name for host in hosts])
    _check_names(cluster, "devices", [device.name for device in devices])
    _check_places(cluster, hosts, devices)
    by_name: dict[str, DeviceType] = {}
    for device in devices:
        if by_name.setdefault(device.type.name, device.type) != device.type:
            raise ClusterError(
                f"device '{device.name}' has a type named '{device.type.name}' with other numbers "
                "than an earlier one of that name; give it another name."
            )


def _check_names(cluster: str, what: str, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ClusterError(
                f"cluster '{cluster}' has {count} {what} named '{name}'; give each its own name."
            )


def _check_places(cluster: str, hosts: Sequence[Host], devices: Sequence[Device]) -> None:
    previous = 0
    for device in devices:
        if not 0 <= device.host_index < len(hosts):
            raise ClusterError(
                f"device '{device.name}' is on host number {device.host_index} but cluster "
                f"'{cluster}' has hosts 0 to {len(hosts) - 1}."
            )
        if device.host_index < previous:
            raise ClusterError(
                f"device '{device.name}' of host '{hosts[device.host_index].name}' comes "
                f"after devices of host '{hosts[previous].name}'; list devices host by "
                "host, in the order of the hosts."
            )
        previous = device.host_index
    used = {device.host_index for device in devices}
    for index, host in enumerate(hosts):
        if index not in used:
            raise ClusterError(f"host '{host.name}' has no device; add one or remove the host.")


MAX_PAIRS = 128 * 127
"""Limit: a measured matrix of 128 hosts; each entry is one link in the simulation."""


def check_pairs(cluster: str, hosts: Sequence[Host], pairs: Sequence[PairLimit]) -> None:
    """Check that limits between hosts name existing hosts, each on one side only.

    Raises:
        ClusterError: They do not.
    """
    where = f"of cluster '{cluster}'"
    if len(pairs) > MAX_PAIRS:
        raise ClusterError(
            f"{len(pairs):,} limits between hosts {where} are more than the {MAX_PAIRS:,} "
            "of a matrix for 128 hosts; leave out pairs that are as fast as their NICs."
        )
    for number, limit in enumerate(pairs):
        what = f"limit {number} between hosts {where}"
        for side in (limit.sources, limit.targets):
            if not side or len(set(side)) < len(side):
                raise ClusterError(f"{what} names no host, or one twice, on one of its sides.")
            if not all(0 <= host < len(hosts) for host in side):
                raise ClusterError(
                    f"{what} names a host that there is not; they are 0 to {len(hosts) - 1}."
                )
        if both := set(limit.sources) & set(limit.targets):
            name = hosts[min(both)].name
            raise ClusterError(f"{what} has host '{name}' on both sides; it can be on one.")
        check_positive(limit.bandwidth_bytes_per_s, f"bandwidth of {what}")
        check_not_negative(limit.latency_s, f"latency of {what}")


MAX_PRICE_PER_HOUR = 1e9
"""Far above any machine, far below where sums over steps leave the range of floats."""
_MOST_CURRENCY = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class HourlyPrices:
    """Prices per hour, by the names of device types and hosts.

    Attributes:
        currency: Name of the currency for people, for example ``"USD"``.
        device_hour: Price of each device of a type for an hour, by name of the type.
        host_hour: Price of a whole host for an hour, by name of the host.

    >>> HourlyPrices(currency="USD", device_hour={"T4": 0.35}).of_host("a", ["T4", "T4"])
    0.7
    """

    __pydantic_config__: ClassVar = VALUE

    currency: Word
    device_hour: Mapping[Word, float] | tuple[tuple[str, float], ...] = ()
    host_hour: Mapping[Word, float] | tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.currency or len(self.currency) > _MOST_CURRENCY:
            raise ClusterError(
                f"prices have the currency {shown(self.currency)}; give 1 to {_MOST_CURRENCY} "
                "characters, USD say."
            )
        if (fault := name_fault(self.currency)) is not None:
            raise ClusterError(f"the currency of prices, {shown(self.currency)}, {fault}.")
        for field in ("device_hour", "host_hour"):
            given = dict(getattr(self, field))
            for name, price in given.items():
                if not (math.isfinite(price) and 0.0 <= price <= MAX_PRICE_PER_HOUR):
                    raise ClusterError(
                        f"the price of '{name}' is {price:g} an hour; it must be a finite number "
                        f"from 0 to {MAX_PRICE_PER_HOUR:g}."
                    )
            prices = tuple(sorted((name, float(price)) for name, price in given.items()))
            object.__setattr__(self, field, prices)

    def of_host(self, host: str, device_types: Collection[str]) -> float | None:
        """Price of a host for an hour; ``None`` if it or one of its devices has no price.

        Args:
            host: Name of the host.
            device_types: Name of the type of each of its devices.
        """
        own = dict(self.host_hour)
        if host in own:
            return own[host]
        by_type = dict(self.device_hour)
        if not all(name in by_type for name in device_types):
            return None
        return math.fsum(by_type[name] for name in device_types)

    def to_dict(self) -> dict[str, object]:
        """Convert to JSON values in the form of a cluster file."""
        return {
            "currency": self.currency,
            "device_hour": dict(self.device_hour),
            "host_hour": dict(self.host_hour),
        }
