"""Makes the cluster that a cluster file describes, and writes such files.

A written file uses a name of the catalogue if it loads as the same value, else all numbers.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from heterog.cluster.catalog import (
    NetworkKind,
    device_type,
    intra_link,
    link_kinds,
    listed_type,
    network_kind,
)
from heterog.cluster.hardware import (
    DTYPES,
    MAX_DEVICES,
    Device,
    DeviceType,
    Host,
    HourlyPrices,
    Link,
    PairLimit,
    SlowedCollectives,
)
from heterog.cluster.schema import (
    CPU,
    LEAST_BARE,
    ClusterSpec,
    DeviceSpec,
    Document,
    HostSpec,
    LinkSpec,
    NicSpec,
    PairsError,
    base_type,
    overridden,
    pair_limits,
    pairs_record,
    throttled,
)
from heterog.cluster.topology import SHIPPED_MODELS, Cluster, Execution, Sends, Tf32
from heterog.errors import ClusterError, HeterogError, UnknownNameError
from heterog.files import write_atomically
from heterog.records import stated
from heterog.units import (
    format_bytes,
    parse_bandwidth,
    parse_bytes,
    parse_flops_per_s,
    parse_seconds,
)

# Rates of links that no route uses: inside a host of one device, and out of the only host.
_UNUSED_INTRA = Link(kind="loopback", bandwidth_bytes_per_s=10e9)
_UNUSED_NIC_BYTES_PER_S = 1.25e9
_Location: TypeAlias = tuple[int | str, ...]


class ClusterBuilder:
    """Makes the cluster that a file describes."""

    def __init__(self, spec: ClusterSpec, document: Document) -> None:
        self._spec = spec
        self._document = document
        self._types: dict[str, DeviceType] = {}
        self._listed: dict[str, list[str]] = {}  # names of types, by the name in the file
        self._host_names: set[str] = set()
        self._device_names: set[str] = set()
        self._num_hosts = sum(h.count or 1 for h in spec.hosts)

    def cluster(self) -> Cluster:
        """The cluster.

        Raises:
            InputFileError: Fields do not go together; names file, line and field.
        """
        num_devices = sum(
            (host.count or 1) * sum(entry.count for entry in host.devices)
            for host in self._spec.hosts
        )
        if num_devices > MAX_DEVICES:
            self._document.refuse(
                ("hosts",),
                f"{num_devices:,} devices are more than are planned for, {MAX_DEVICES:,}.",
            )
        hosts: list[Host] = []
        devices: list[Device] = []
        for position, spec in enumerate(self._spec.hosts):
            here = ("hosts", position)
            numbers = [""] if spec.count is None else map(str, range(spec.count))
            for name in [f"{spec.name}{number}" for number in numbers]:
                self._claim(self._host_names, "host", name, (*here, "name"))
                devices += self._devices(spec, here, name, len(hosts))
                hosts.append(self._host(spec, here, name))
        try:
            found = Cluster(
                name=self._spec.name,
                hosts=tuple(hosts),
                devices=tuple(devices),
                efficiency=self._spec.efficiency,
                calibration=self._calibration(),
                sends=self._spec.sends,
                execution=self._spec.execution,
                tf32=self._spec.tf32,
                pairs=self._pairs([host.name for host in hosts]),
            )
        except ClusterError as error:
            self._document.refuse((), str(error))
        return self._priced(found)

    def _priced(self, cluster: Cluster) -> Cluster:
        """Add the file's prices to the cluster; each of its hosts needs one."""
        spec = self._spec.prices
        if spec is None:
            return cluster
        known = {device.type.name for device in cluster.devices}
        by_type: dict[str, float] = {}
        for name, price in spec.device_hour.items():
            if name not in known and name not in self._listed:
                fault = f"no device is of type '{name}'; there are {', '.join(sorted(known))}."
                self._document.refuse(("prices", "device_hour", name), fault)
            # A type whose numbers the file overrides has another name, but the same price.
            by_type |= {each: price for each in self._listed.get(name, ()) if each not in by_type}
        by_type |= {name: price for name, price in spec.device_hour.items() if name in known}
        members = self._members([host.name for host in cluster.hosts])
        by_host: dict[str, float] = {}
        for name, price in spec.host_hour.items():
            if name not in members:
                fault = f"there is no host '{name}'; there are {', '.join(members)}."
                self._document.refuse(("prices", "host_hour", name), fault)
            # The price of a single host replaces that of all hosts that share its name.
            own = {cluster.hosts[host].name: price for host in members[name]}
            by_host = own | by_host if len(own) > 1 else by_host | own
        try:
            prices = HourlyPrices(currency=spec.currency, device_hour=by_type, host_hour=by_host)
            priced = replace(cluster, prices=prices)
            for host in range(cluster.num_hosts):
                priced.host_price_per_s(host)
        except ClusterError as error:
            self._document.refuse(("prices",), str(error))
        return priced

    def _members(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Positions of hosts, by every name that the file may use: a host's, or an entry's."""
        members = {name: [at] for at, name in enumerate(names)}
        first = 0
        for spec in self._spec.hosts:
            own = list(range(first, first + (spec.count or 1)))
            members.setdefault(spec.name, own)
            first = own[-1] + 1
        return members

    def _pairs(self, names: Sequence[str]) -> tuple[PairLimit, ...]:
        members = self._members(names)
        try:
            return pair_limits(self._spec.pairs, members, len(names), self._spec.efficiency)
        except PairsError as error:
            self._document.refuse(("pairs", *error.where), str(error))

    def _claim(self, names: set[str], what: str, name: str, here: _Location) -> None:
        if name in names:
            fault = f"there is already a {what} '{name}'; give each its own name."
            self._document.refuse(here, fault)
        names.add(name)

    def _calibration(self) -> str | None:
        if self._spec.calibration in (None, *SHIPPED_MODELS):
            return self._spec.calibration
        path = os.path.abspath(self._document.path.parent / self._spec.calibration)
        meant = re.sub(r"[\s_]+", "-", self._spec.calibration.strip().lower())
        if meant in SHIPPED_MODELS and not os.path.exists(path):
            self._document.refuse(
                ("calibration",), f"there is no file {path}; what ships is called '{meant}'."
            )
        return path

    def _host(self, spec: HostSpec, here: _Location, name: str) -> Host:
        intra, nic = spec.intra, spec.nic
        if isinstance(nic, str):
            nic = NicSpec(kind=nic)
        try:
            link = _link(intra)
        except UnknownNameError as error:
            self._document.refuse((*here, "intra"), str(error))
        if intra is None and sum(d.count for d in spec.devices) > 1:
            self._document.refuse(
                (*here, "intra"),
                "this field is required where a host has several devices; known names: "
                f"{', '.join(each.name for each in link_kinds())}.",
            )
        if nic is None and self._num_hosts > 1:
            self._document.refuse(
                (*here, "nic"), "this field is required where there are several hosts."
            )
        num_devices = sum(each.count for each in spec.devices)
        network = self._network(nic, here)
        rails = network.rails if network else 1
        num_ports = rails * (nic.count if nic else 1)
        # If there are more ports than devices, a device uses its several ports as one.
        num_nics = min(num_ports, num_devices)
        port = network.line_rate_bytes_per_s / rails if network else nic and nic.line_rate
        collectives = network.collectives if network else None
        if nic and nic.collectives:
            collectives = SlowedCollectives(**nic.collectives.model_dump())
        return Host(
            name=name,
            nic_line_rate_bytes_per_s=(port or _UNUSED_NIC_BYTES_PER_S)
            * max(1.0, num_ports / num_nics),
            num_nics=num_nics,
            nic_latency_s=nic.latency if nic else 20e-6,
            intra=link,
            cpu_quota=spec.testbed.cpu_quota,
            collectives=collectives,
        )

    def _network(self, nic: NicSpec | None, here: _Location) -> NetworkKind | None:
        """The network that a host's NIC names, if it names one."""
        if nic is None or nic.kind is None:
            return None
        try:
            return network_kind(nic.kind)
        except UnknownNameError as error:
            self._document.refuse((*here, "nic"), str(error))

    def _devices(
        self, spec: HostSpec, host_here: _Location, host: str, host_index: int
    ) -> list[Device]:
        devices: list[Device] = []
        for number, entry in enumerate(spec.devices):
            here = (*host_here, "devices", number)
            names = entry.names
            if names is None:
                names = [f"{host}:{len(devices) + i}" for i in range(entry.count)]
            elif len(names) != entry.count:
                fault = f"{len(names)} names for a count of {entry.count}; write one per device."
                self._document.refuse((*here, "names"), fault)
            kind = self._type(entry, spec.testbed.cpu_quota, here)
            usable = self._usable_memory(entry, kind, here)
            for name in names:
                self._claim(self._device_names, "device", name, (*here, "names"))
                devices.append(
                    Device(name=name, type=kind, host_index=host_index, usable_memory_bytes=usable)
                )
        return devices

    def _usable_memory(self, entry: DeviceSpec, device_type: DeviceType, here: _Location) -> int:
        size, reserved = device_type.memory_bytes, self._spec.reserved_memory
        if entry.usable_memory is not None:
            if entry.usable_memory > size:
                self._document.refuse(
                    (*here, "usable_memory"),
                    f"{format_bytes(entry.usable_memory)} is more than the {format_bytes(size)} "
                    f"of {device_type.name}; lower it.",
                )
            return entry.usable_memory
        if reserved >= size:
            self._document.refuse(
                ("reserved_memory",),
                f"{format_bytes(reserved)} leaves nothing of the {format_bytes(size)} of "
                f"{device_type.name}; lower it or give that device its usable_memory.",
            )
        return size - reserved

    def _type(self, entry: DeviceSpec, quota: float | None, here: _Location) -> DeviceType:
        """The entry's type: with its overrides, then with the quota of a catalogue CPU."""
        try:
            base = base_type(entry)
        except HeterogError as error:
            self._document.refuse((*here, "type"), str(error))
        kind = overridden(base, entry)
        if isinstance(entry.type, str) and base.name == CPU and quota is not None:
            base, kind = throttled(base, quota), throttled(kind, quota)
        if entry.type_name is not None:
            kind = replace(kind, name=entry.type_name)
        elif kind != base:
            kind = self._named(kind)
        if self._types.setdefault(kind.name, kind) != kind:
            self._document.refuse(
                (*here, "type" if entry.type_name is None else "type_name"),
                f"there is already a type '{kind.name}' with other numbers; give each its own "
                "name.",
            )
        said = entry.type if isinstance(entry.type, str) else entry.type.name
        self._listed.setdefault(said, []).append(kind.name)
        return kind

    def _named(self, device_type: DeviceType) -> DeviceType:
        """Give the overridden type the first free name; an equal one shares its name."""
        numbered = (
            replace(device_type, name=f"{device_type.name}-custom{number if number > 1 else ''}")
            for number in count(1)
        )
        return next(each for each in numbered if self._types.get(each.name, each) == each)


def _link(spec: str | LinkSpec | None) -> Link:
    if spec is None:
        return _UNUSED_INTRA
    if isinstance(spec, str):
        return intra_link(spec)
    return Link(
        kind=spec.kind,
        bandwidth_bytes_per_s=spec.bandwidth,
        latency_s=spec.latency,
        shared=spec.shared,
    )


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Writes a cluster file; see ``Cluster.save``."""
    text = yaml.dump(
        _file_record(cluster, path), sort_keys=False, default_flow_style=None, width=99
    )
    write_atomically(path, text.encode())


_USUAL = {"sends": Sends.OVERLAPPED, "execution": Execution.EAGER, "tf32": Tf32.CONVOLUTIONS}
"""What a file does not mention."""


def _file_record(cluster: Cluster, path: Path) -> dict[str, Any]:
    calibration = cluster.calibration
    if calibration is not None and calibration not in SHIPPED_MODELS:
        calibration = os.path.relpath(calibration, path.parent)
    unusual = {
        field: str(getattr(cluster, field))
        for field, usual in _USUAL.items()
        if getattr(cluster, field) != usual
    }
    return stated(
        {
            "schema_version": 1,
            "name": cluster.name,
            "efficiency": float(cluster.efficiency),
            "calibration": calibration,
            **unusual,
            "hosts": [_host_record(cluster, h) for h in range(cluster.num_hosts)],
            "pairs": pairs_record(cluster) if cluster.pairs else None,
            "prices": cluster.prices and cluster.prices.to_dict(),
        }
    )


def _host_record(cluster: Cluster, host_index: int) -> dict[str, Any]:
    host = cluster.hosts[host_index]
    named = {each.link: each.name for each in link_kinds()}
    intra: str | dict[str, Any] = named.get(host.intra, "") or {
        "kind": host.intra.kind,
        "bandwidth": _text(host.intra.bandwidth_bytes_per_s, _RATES, parse_bandwidth),
        "latency": _text(host.intra.latency_s, _TIMES, parse_seconds),
        "shared": host.intra.shared,
    }
    nic = {
        "line_rate": _text(host.nic_line_rate_bytes_per_s, _NIC_RATES, parse_bandwidth),
        "latency": _text(host.nic_latency_s, _TIMES, parse_seconds),
        "count": host.num_nics if host.num_nics > 1 else None,
        "collectives": asdict(host.collectives) if host.collectives else None,
    }
    quota = host.cpu_quota
    return stated(
        {
            "name": host.name,
            "devices": _device_records(cluster, host_index),
            "intra": intra,
            "nic": stated(nic),
            "testbed": None if quota is None else {"cpu_quota": float(quota)},
        }
    )


def _device_records(cluster: Cluster, host_index: int) -> list[dict[str, Any]]:
    """Entries of the devices; neighbours of one type and usable memory share an entry."""
    host = cluster.hosts[host_index]
    members = [cluster.devices[index] for index in cluster.host_devices[host_index]]
    are_usual = all(each.name == f"{host.name}:{i}" for i, each in enumerate(members))
    records: list[dict[str, Any]] = []
    for (kind, usable), alike in groupby(
        members, lambda device: (device.type, device.usable_memory_bytes)
    ):
        names = [device.name for device in alike]
        record = {
            "type": _type_record(kind, host.cpu_quota),
            "count": len(names),
            "usable_memory": _text(usable, _SIZES, parse_bytes),
        }
        records.append(record if are_usual else record | {"names": names})
    return records


def _type_record(of_type: DeviceType, quota: float | None) -> str | dict[str, Any]:
    """A name of the catalogue if it loads as exactly this type, else all numbers."""
    if quota is not None and of_type == throttled(device_type(CPU), quota):
        return CPU
    listed = listed_type(of_type.name)
    is_listed = listed is not None and of_type == listed.type
    if is_listed and not (quota is not None and of_type.name == CPU):
        return of_type.name
    return {
        "name": of_type.name,
        "peak_flops": {
            dtype: _text(of_type.peak_flops_per_s[dtype], _SPEEDS, parse_flops_per_s)
            for dtype in DTYPES
            if dtype in of_type.peak_flops_per_s
        },
        "memory_bandwidth": _text(of_type.memory_bandwidth_bytes_per_s, _RATES, parse_bandwidth),
        "memory": _text(of_type.memory_bytes, _SIZES, parse_bytes),
        "source": of_type.source,
        "compute_efficiency": float(of_type.compute_efficiency),
        "memory_efficiency": float(of_type.memory_efficiency),
        "launch_overhead": _text(of_type.launch_overhead_s, _TIMES, parse_seconds),
    }


_RATES = {"GB/s": 1e9, "MB/s": 1e6, "B/s": 1.0}
_NIC_RATES = {"Gbit/s": 0.125e9, "Mbit/s": 0.125e6, "B/s": 1.0}
_SIZES = {"GiB": 1024.0**3, "MiB": 1024.0**2, "B": 1.0}
_SPEEDS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "FLOP/s": 1.0}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _text(value: float, units: dict[str, float], parse: Callable[[str], float]) -> str | float:
    """A short text with a unit if it parses to exactly this value, else the value.

    Args:
        value: In SI units.
        units: Sizes of units; the last is that of ``value``.
        parse: Reads the text again.
    """
    for unit, size in units.items():
        text = f"{value / size:.6g} {unit}"
        if value >= size and parse(text) == value:
            return text
    number = value if isinstance(value, int) else float(value)
    return f"{number!r} {unit}" if number < LEAST_BARE else number
