"""The YAML file of a cluster: its fields, errors with their line, and writing.

    schema_version: 1
    name: lab
    efficiency: 0.7                     # usable share of every NIC's line rate
    reserved_memory: 1.0 GiB            # per device: context and communication buffers
    calibration: lab_calibration.json   # optional, relative to this file; or roofline: data sheets
    sends: overlapped                   # or blocking: who executes computes only when all is sent
    execution: eager                    # or megatron, compiled: which program runs steps
    tf32: convolutions                  # or none, everything: what of float32 uses TF32
    pairs: {}                           # optional: what lies between hosts, see cluster.pairs
    prices: {currency: USD, device_hour: {V100-16GB: 2.48, P100-12GB: 1.46}}    # optional
    hosts:
      - name: A
        devices: [{type: V100-16GB, count: 2}]
        intra: nvlink_v100              # 'heterog links', or {kind, bandwidth, latency, shared}
        nic: {line_rate: 100 Gbit/s, latency: 20 us}    # or infiniband_edr, or {kind, count}
      - name: B                         # hosts B0 and B1
        count: 2
        devices: [{type: P100-12GB, count: 2, compute_efficiency: 0.5}]
        intra: pcie3
        nic: {line_rate: 50 Gbit/s}
        testbed: {cpu_quota: 0.8}       # only for ranks that are throttled processes

``nic`` may be left out where there is one host, ``intra`` where each host has one device.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeAlias

import yaml
from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from heterog.cluster.catalog import device_type, listed_type
from heterog.cluster.fields import (
    MOST_BYTES,
    NOT_NEGATIVE,
    POSITIVE,
    Bandwidth,
    Bytes,
    BytesOrZero,
    Count,
    Dtype,
    Peaks,
    Seconds,
    Share,
    Spec,
    reading,
)
from heterog.cluster.links import intra_link, link_kinds, network_kind
from heterog.cluster.pairs import PairsError, PairsSpec, pair_limits, pairs_record
from heterog.cluster.prices import MAX_PRICE_PER_HOUR, HourlyPrices
from heterog.cluster.topology import (
    DTYPES,
    MAX_DEVICES,
    MAX_PAIRS,
    SCHEMA_VERSION,
    SHIPPED_MODELS,
    Cluster,
    Device,
    DeviceType,
    Execution,
    FrozenFlops,
    Host,
    Link,
    PairLimit,
    Sends,
    Tf32,
)
from heterog.errors import ClusterError, HeterogError, InputFileError, UnknownNameError
from heterog.files import read_bytes, write_atomically
from heterog.names import shown
from heterog.records import Int32, Name, Record, Text, field_name, parse_record
from heterog.units import (
    GIB,
    format_bytes,
    parse_bandwidth,
    parse_bytes,
    parse_flops_per_s,
    parse_seconds,
)
from heterog.yaml_files import parse_yaml

_PRESETS = resources.files("heterog.cluster") / "presets"

# Stand for links that no route can use: inside a host of one device, and out of the only host.
_UNUSED_INTRA = Link(kind="loopback", bandwidth_bytes_per_s=10e9)
_UNUSED_NIC_BYTES_PER_S = 1.25e9

_CPU = "CPU"
MAX_FILE_BYTES = 1024**2
"""Size limit of a cluster file: a hundred times what one with 512 hosts takes."""


_Location: TypeAlias = tuple[int | str, ...]
_Sends: TypeAlias = Literal["overlapped", "blocking"]
_Execution: TypeAlias = Literal["eager", "megatron", "compiled"]
_Tf32: TypeAlias = Literal["none", "convolutions", "everything"]
_Path: TypeAlias = Annotated[Text, Field(min_length=1)]


class TypeSpec(Spec):
    """A device type written out in full."""

    name: Name
    peak_flops: Peaks
    memory_bandwidth: Bandwidth
    memory: Bytes
    source: Text = "cluster file"
    compute_efficiency: Share = 0.6
    memory_efficiency: Share = 0.75
    launch_overhead: Seconds = 10e-6


class LinkSpec(Spec):
    """A link inside a host written out in full."""

    kind: Name
    bandwidth: Bandwidth
    latency: Seconds = 5e-6
    shared: bool = Field(default=False, strict=True)


class NicSpec(Spec):
    """The NICs of a host: ``count`` NICs of a line rate or of a network of the catalogue.

    Neighbouring devices share one where there are more devices than NICs; a device has several
    to itself where there are fewer.
    """

    line_rate: Bandwidth | None = None
    kind: Name | None = None
    count: Count = 1
    latency: Seconds = 20e-6

    @model_validator(mode="after")
    def _has_one_rate(self) -> "NicSpec":
        if (self.line_rate is None) == (self.kind is None):
            raise PydanticCustomError(
                "value",
                "a NIC needs either its line_rate or its kind ('heterog links' lists them)",
            )
        return self


class TestbedSpec(Spec):
    """Throttling of the ranks of a host, for a host that is a process group on one machine."""

    __test__ = False  # for pytest: a name, not a test

    cpu_quota: Share | None = None


def _name_or_mapping(value: object) -> str:
    return "name" if isinstance(value, str) else "mapping"


class DeviceSpec(Spec):
    """Some equal devices of a host; most fields override the type's number of that name."""

    type: Annotated[
        Annotated[Name, Tag("name")] | Annotated[TypeSpec, Tag("mapping")],
        Discriminator(_name_or_mapping),
    ]
    count: Count = 1
    names: list[Name] | None = None
    type_name: Name | None = None
    usable_memory: Bytes | None = None
    peak_flops: Peaks | None = None
    memory_bandwidth: Bandwidth | None = None
    compute_efficiency: Share | None = None
    memory_efficiency: Share | None = None
    launch_overhead: Seconds | None = None


class HostSpec(Spec):
    """One host, or with ``count`` several equal ones, with 0, 1, ... appended to the name."""

    name: Name
    count: Count | None = None
    devices: Annotated[list[DeviceSpec], Field(min_length=1)]
    intra: (
        Annotated[
            Annotated[Name, Tag("name")] | Annotated[LinkSpec, Tag("mapping")],
            Discriminator(_name_or_mapping),
        ]
        | None
    ) = None
    nic: (
        Annotated[
            Annotated[Name, Tag("name")] | Annotated[NicSpec, Tag("mapping")],
            Discriminator(_name_or_mapping),
        ]
        | None
    ) = None
    testbed: TestbedSpec = TestbedSpec()


_Price = Annotated[float, reading(float), Field(ge=0, le=MAX_PRICE_PER_HOUR, allow_inf_nan=False)]


class PricesSpec(Spec):
    """Prices of hosts per hour; see ``cluster.prices``."""

    currency: Name
    device_hour: dict[Name, _Price] = Field(default_factory=dict)
    host_hour: dict[Name, _Price] = Field(default_factory=dict)


class ClusterSpec(Spec):
    """The whole file."""

    schema_version: Literal[1]
    name: Name
    efficiency: Share = 0.7
    reserved_memory: BytesOrZero = GIB
    calibration: _Path | None = None
    sends: _Sends = "overlapped"
    execution: _Execution = "eager"
    tf32: _Tf32 = "convolutions"
    hosts: Annotated[list[HostSpec], Field(min_length=1)]
    pairs: PairsSpec = PairsSpec()
    prices: PricesSpec | None = None


def preset_names() -> tuple[str, ...]:
    """Names of the built-in clusters."""
    files = (entry.name for entry in _PRESETS.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def load_cluster(source: str | Path) -> Cluster:
    """Reads a preset by its name, or a file by its path; see ``Cluster.load``."""
    if isinstance(source, str) and source in preset_names():
        text = (_PRESETS / f"{source}.yaml").read_text(encoding="utf-8")
        return parse_cluster(text, Path(f"{source}.yaml"))
    path = Path(source)
    looks_like_name = path.name == str(source) and not path.suffix
    if isinstance(source, str) and looks_like_name and not path.exists():
        raise UnknownNameError("cluster", source, preset_names())
    try:
        text = read_bytes(path, "cluster file", MAX_FILE_BYTES).decode()
    except InputFileError as error:
        raise InputFileError(
            f"{error} Give a YAML file or one of: {', '.join(preset_names())}."
        ) from error
    except UnicodeDecodeError as error:
        raise InputFileError(
            f"cannot read cluster file {path}: it is not UTF-8 text. Give a YAML file or one of: "
            f"{', '.join(preset_names())}."
        ) from error
    return parse_cluster(text, path)


def parse_cluster(text: str, path: Path) -> Cluster:
    """Makes a cluster from the text of a cluster file.

    Args:
        text: YAML.
        path: Where it was read; named in errors, and ``calibration`` is relative to its folder.

    Raises:
        InputFileError: Names file, line and field.
    """
    document = _Document.parse(text, path)
    try:
        spec = ClusterSpec.model_validate(document.value)
    except ValidationError as error:
        document.refuse_all(error.errors())
    return _Builder(spec, document).cluster()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A YAML text with the places of its fields."""

    path: Path
    root: yaml.Node
    value: object

    @staticmethod
    def parse(text: str, path: Path) -> "_Document":
        root, value = parse_yaml(
            text, path, what="a cluster file", if_empty="see 'heterog clusters'"
        )
        return _Document(path=path, root=root, value=value)

    def line_and_field(self, location: Sequence[int | str]) -> tuple[int, str]:
        """Line of the field (or of its missing parent) and its name, as in hosts[0].nic."""
        node, line, shown = self.root, self.root.start_mark.line, ""
        for position, step in enumerate(location):
            last = position == len(location) - 1
            if isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                if step < len(node.value):
                    node = node.value[step]
                    line, shown = node.start_mark.line, f"{shown}[{step}]"
            elif isinstance(node, yaml.MappingNode):
                found = _pair(node, str(step))
                if found is not None:
                    line, node = found[0].start_mark.line, found[1]
                # Elsewhere a step is pydantic's own (which branch of a union): not in the file.
                if found is not None or last:
                    shown = f"{shown}.{step}" if shown else str(step)
        return line + 1, shown

    def refuse(self, location: Sequence[int | str], fault: str) -> NoReturn:
        """Raises InputFileError with file, line and field."""
        line, field = self.line_and_field(location)
        where = f"{self.path}, line {line}" + (f", {field_name([field])}" if field else "")
        raise InputFileError(f"{where}: {fault}")

    def refuse_all(self, errors: Sequence[ErrorDetails]) -> NoReturn:
        """Raises InputFileError about the first error and counts the others."""
        location = errors[0]["loc"]
        if errors[0]["type"] == "unknown_field":
            location = (*location, str(errors[0]["ctx"]["field"]))
        if location and location[-1] == "mapping":  # pydantic's own: which branch of a union
            location = location[:-1]
        more = f" ({len(errors) - 1} more after this one)" if len(errors) > 1 else ""
        self.refuse(location, _fault(errors[0]) + more)


def _pair(node: yaml.MappingNode, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    # The last one, because what a merge key brings in comes before the node's own fields.
    return next((pair for pair in reversed(node.value) if pair[0].value == key), None)


def _fault(error: ErrorDetails) -> str:
    """A sentence with the error and what to write instead."""
    kind, got, context = error["type"], shown(error["input"]), error.get("ctx", {})
    if kind in ("model_type", "dict_type"):
        return f"got {got}; write a mapping of fields."
    if kind == "list_type":
        return f"got {got}; write a list."
    if kind == "missing":
        return "this field is required."
    if kind == "string_type":
        return f"got {got}; write a text, in quotes if YAML reads it as something else."
    if kind in ("value", "unknown_field"):
        return f"{error['msg']}."
    if kind == "value_error":
        return f"{got} {context['error']}."
    limits = {
        "greater_than": "above {gt:g}",
        "greater_than_equal": "at least {ge:g}",
        "less_than_equal": "at most {le:g}",
        "finite_number": "a finite number",
    }
    if isinstance(error["input"], float) and math.isinf(error["input"]):
        return f"{got} is not a finite number."
    if kind in limits:
        return f"{got} is not {limits[kind].format(**context)}."
    return f"got {got}; {error['msg'][0].lower()}{error['msg'][1:]}."


class _Builder:
    """Makes the cluster that a spec describes."""

    def __init__(self, spec: ClusterSpec, document: _Document) -> None:
        self._spec = spec
        self._document = document
        self._types: dict[str, DeviceType] = {}
        self._listed: dict[str, list[str]] = {}  # names of types by what the file calls them
        self._host_names: set[str] = set()
        self._device_names: set[str] = set()
        self._num_hosts = sum(h.count or 1 for h in spec.hosts)

    def cluster(self) -> Cluster:
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
            names = [spec.name]
            if spec.count is not None:
                names = [f"{spec.name}{i}" for i in range(spec.count)]
            for name in names:
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
                sends=Sends(self._spec.sends),
                execution=Execution(self._spec.execution),
                tf32=Tf32(self._spec.tf32),
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
            # A type with other numbers has another name, but not another price.
            by_type |= {each: price for each in self._listed.get(name, ()) if each not in by_type}
        by_type |= {name: price for name, price in spec.device_hour.items() if name in known}
        members = self._members()
        by_host: dict[str, float] = {}
        for name, price in spec.host_hour.items():
            if name not in members:
                fault = f"there is no host '{name}'; there are {', '.join(members)}."
                self._document.refuse(("prices", "host_hour", name), fault)
            # The price of a single host replaces that of all hosts that share its name.
            own = {host: price for host in members[name]}
            by_host = own | by_host if len(own) > 1 else by_host | own
        try:
            prices = HourlyPrices(currency=spec.currency, device_hour=by_type, host_hour=by_host)
            priced = replace(cluster, prices=prices)
            for host in range(cluster.num_hosts):
                priced.host_price_per_s(host)
        except ClusterError as error:
            self._document.refuse(("prices",), str(error))
        return priced

    def _members(self) -> dict[str, list[str]]:
        """Hosts by every name that the file may use: their own, or an entry's with a count."""
        members: dict[str, list[str]] = {}
        for spec in self._spec.hosts:
            own = (
                [spec.name]
                if spec.count is None
                else [f"{spec.name}{number}" for number in range(spec.count)]
            )
            members.update({name: [name] for name in own})
            members.setdefault(spec.name, own)
        return members

    def _pairs(self, names: Sequence[str]) -> tuple[PairLimit, ...]:
        positions: dict[str, list[int]] = {name: [at] for at, name in enumerate(names)}
        first = 0
        for spec in self._spec.hosts:
            members = list(range(first, first + (spec.count or 1)))
            positions.setdefault(spec.name, members)
            first = members[-1] + 1
        try:
            return pair_limits(self._spec.pairs, positions, len(names), self._spec.efficiency)
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
                ("calibration",),
                f"there is no file {path}; what ships is called '{meant}'.",
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
        # A device with several of them to itself sends through them as through one.
        num_ports = nic.count if nic else 1
        num_nics = min(num_ports, sum(each.count for each in spec.devices))
        return Host(
            name=name,
            nic_line_rate_bytes_per_s=self._line_rate(nic, here) * max(1.0, num_ports / num_nics),
            num_nics=num_nics,
            nic_latency_s=nic.latency if nic else 20e-6,
            intra=link,
            cpu_quota=spec.testbed.cpu_quota,
        )

    def _line_rate(self, nic: NicSpec | None, here: _Location) -> float:
        if nic is None:
            return _UNUSED_NIC_BYTES_PER_S
        try:
            port = nic.line_rate or network_kind(nic.kind or "").line_rate_bytes_per_s
        except UnknownNameError as error:
            self._document.refuse((*here, "nic"), str(error))
        return port

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
            base = device_type(entry.type) if isinstance(entry.type, str) else _full(entry.type)
        except HeterogError as error:
            self._document.refuse((*here, "type"), str(error))
        kind = _overridden(base, entry)
        if isinstance(entry.type, str) and base.name == _CPU and quota is not None:
            base, kind = _throttled(base, quota), _throttled(kind, quota)
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
        for number in count(1):
            candidate = replace(
                device_type, name=f"{device_type.name}-custom{number if number > 1 else ''}"
            )
            if self._types.get(candidate.name, candidate) == candidate:
                return candidate
        raise AssertionError("unreachable: count() does not end")


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


def _full(spec: TypeSpec) -> DeviceType:
    return DeviceType(
        name=spec.name,
        peak_flops_per_s={dtype: peak for dtype, peak in spec.peak_flops.items()},
        memory_bandwidth_bytes_per_s=spec.memory_bandwidth,
        memory_bytes=spec.memory,
        source=spec.source,
        compute_efficiency=spec.compute_efficiency,
        memory_efficiency=spec.memory_efficiency,
        launch_overhead_s=spec.launch_overhead,
    )


def _merged(peaks: Mapping[str, float], given: Mapping[Dtype, float] | None) -> FrozenFlops:
    merged = dict(peaks)
    for dtype, peak in (given or {}).items():
        merged[dtype] = peak
    return FrozenFlops(merged)


def _overridden(base: DeviceType, entry: DeviceSpec) -> DeviceType:
    """The type with the entry's numbers; ``base`` itself where these change nothing."""
    given = {
        "peak_flops_per_s": _merged(base.peak_flops_per_s, entry.peak_flops),
        "memory_bandwidth_bytes_per_s": entry.memory_bandwidth,
        "compute_efficiency": entry.compute_efficiency,
        "memory_efficiency": entry.memory_efficiency,
        "launch_overhead_s": entry.launch_overhead,
    }
    changed = {k: v for k, v in given.items() if v is not None and v != getattr(base, k)}
    if not changed:
        return base
    return replace(base, **changed, source=f"{base.source}; cluster file")  # type: ignore[arg-type]


def _throttled(device_type: DeviceType, quota: float) -> DeviceType:
    """A core that runs only ``quota`` of the time, so that everything takes 1 / quota as long."""
    if quota == 1:
        return device_type
    return replace(
        device_type,
        name=f"{device_type.name}@{quota:g}",
        peak_flops_per_s={d: p * quota for d, p in device_type.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=device_type.memory_bandwidth_bytes_per_s * quota,
        launch_overhead_s=device_type.launch_overhead_s / quota,
    )


_Rate = Annotated[float, POSITIVE]
_Latency = Annotated[float, NOT_NEGATIVE]
_Part = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
_Size = Annotated[int, Field(gt=0, le=MOST_BYTES)]


class _TypeRecord(Record):
    name: str
    peak_flops_per_s: dict[str, _Rate]
    memory_bandwidth_bytes_per_s: _Rate
    memory_bytes: _Size
    source: str
    compute_efficiency: _Part
    memory_efficiency: _Part
    launch_overhead_s: _Latency


class _LinkRecord(Record):
    kind: str
    bandwidth_bytes_per_s: _Rate
    latency_s: _Latency
    shared: bool


class _HostRecord(Record):
    name: str
    nic_line_rate_bytes_per_s: _Rate
    num_nics: Annotated[int, Field(ge=1, le=MAX_DEVICES)] = 1
    nic_latency_s: _Latency
    intra: _LinkRecord
    cpu_quota: _Part | None


class _DeviceRecord(Record):
    name: str
    type_index: Int32
    host_index: Int32
    usable_memory_bytes: _Size


class _LimitRecord(Record):
    sources: Annotated[list[Int32], Field(max_length=MAX_DEVICES)]
    targets: Annotated[list[Int32], Field(max_length=MAX_DEVICES)]
    bandwidth_bytes_per_s: _Rate
    latency_s: _Latency


class _PricesRecord(Record):
    currency: str
    device_hour: dict[str, float]
    host_hour: dict[str, float]


class _ClusterRecord(Record):
    schema_version: int
    name: str
    efficiency: _Part
    calibration: _Path | None
    sends: _Sends = "overlapped"
    execution: _Execution = "eager"
    tf32: _Tf32 = "convolutions"
    device_types: Annotated[list[_TypeRecord], Field(max_length=MAX_DEVICES)]
    hosts: Annotated[list[_HostRecord], Field(max_length=MAX_DEVICES)]
    devices: Annotated[list[_DeviceRecord], Field(max_length=MAX_DEVICES)]
    pairs: Annotated[list[_LimitRecord], Field(default_factory=list, max_length=MAX_PAIRS)]
    prices: _PricesRecord | None = None


def cluster_from_dict(record: object) -> Cluster:
    """A cluster from JSON values; see ``Cluster.from_dict``."""
    try:
        found = parse_record(record, _ClusterRecord, "cluster record", versions=(SCHEMA_VERSION,))
    except InputFileError as error:
        raise ClusterError(str(error)) from error
    types = [DeviceType(**each.model_dump()) for each in found.device_types]
    devices = []
    for number, each in enumerate(found.devices):
        if each.type_index >= len(types):
            raise ClusterError(
                f"cluster record: field 'devices.{number}.type_index' is {each.type_index}, but "
                f"there are {len(types)} types."
            )
        devices.append(
            Device(
                name=each.name,
                type=types[each.type_index],
                host_index=each.host_index,
                usable_memory_bytes=each.usable_memory_bytes,
            )
        )
    return Cluster(
        name=found.name,
        hosts=tuple(
            Host(**(each.model_dump() | {"intra": Link(**each.intra.model_dump())}))
            for each in found.hosts
        ),
        devices=tuple(devices),
        efficiency=found.efficiency,
        calibration=found.calibration,
        sends=Sends(found.sends),
        execution=Execution(found.execution),
        tf32=Tf32(found.tf32),
        pairs=tuple(
            PairLimit(
                sources=tuple(each.sources),
                targets=tuple(each.targets),
                bandwidth_bytes_per_s=each.bandwidth_bytes_per_s,
                latency_s=each.latency_s,
            )
            for each in found.pairs
        ),
        prices=None if found.prices is None else HourlyPrices(**found.prices.model_dump()),
    )


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Writes a cluster file; see ``Cluster.save``."""
    text = yaml.dump(
        _file_record(cluster, path), sort_keys=False, default_flow_style=None, width=99
    )
    write_atomically(path, text.encode())


def _file_record(cluster: Cluster, path: Path) -> dict[str, Any]:
    record: dict[str, Any] = {
        "schema_version": 1,
        "name": cluster.name,
        "efficiency": float(cluster.efficiency),
    }
    if cluster.calibration is not None:
        is_path = cluster.calibration not in SHIPPED_MODELS
        record["calibration"] = (
            os.path.relpath(cluster.calibration, path.parent) if is_path else cluster.calibration
        )
    if cluster.sends != Sends.OVERLAPPED:
        record["sends"] = str(cluster.sends)
    if cluster.execution != Execution.EAGER:
        record["execution"] = str(cluster.execution)
    if cluster.tf32 != Tf32.CONVOLUTIONS:
        record["tf32"] = str(cluster.tf32)
    record["hosts"] = [_host_record(cluster, h) for h in range(cluster.num_hosts)]
    if cluster.pairs:
        record["pairs"] = pairs_record(cluster)
    if cluster.prices is not None:
        record["prices"] = cluster.prices.to_dict()
    return record


def _host_record(cluster: Cluster, host_index: int) -> dict[str, Any]:
    host = cluster.hosts[host_index]
    named = {each.link: each.name for each in link_kinds()}
    intra: str | dict[str, Any] = named.get(
        host.intra,
        "",
    ) or {
        "kind": host.intra.kind,
        "bandwidth": _text(host.intra.bandwidth_bytes_per_s, _RATES, parse_bandwidth),
        "latency": _text(host.intra.latency_s, _TIMES, parse_seconds),
        "shared": host.intra.shared,
    }
    nic: dict[str, Any] = {
        "line_rate": _text(host.nic_line_rate_bytes_per_s, _NIC_RATES, parse_bandwidth),
        "latency": _text(host.nic_latency_s, _TIMES, parse_seconds),
    }
    if host.num_nics > 1:
        nic["count"] = host.num_nics
    record: dict[str, Any] = {
        "name": host.name,
        "devices": _device_records(cluster, host_index),
        "intra": intra,
        "nic": nic,
    }
    if host.cpu_quota is not None:
        record["testbed"] = {"cpu_quota": float(host.cpu_quota)}
    return record


def _device_records(cluster: Cluster, host_index: int) -> list[dict[str, Any]]:
    """Entries of the devices; neighbours of one type and usable memory share an entry."""
    host = cluster.hosts[host_index]
    records: list[dict[str, Any]] = []
    previous: tuple[DeviceType, int] | None = None
    members = cluster.host_devices(host_index)
    usual_names = [f"{host.name}:{i}" for i in range(len(members))]
    are_usual = [cluster.devices[i].name for i in members] == usual_names
    for index in members:
        device = cluster.devices[index]
        if (device.type, device.usable_memory_bytes) != previous:
            previous = (device.type, device.usable_memory_bytes)
            records.append(
                {
                    "type": _type_record(device.type, host.cpu_quota),
                    "count": 0,
                    "usable_memory": _text(device.usable_memory_bytes, _SIZES, parse_bytes),
                }
                | ({} if are_usual else {"names": []})
            )
        records[-1]["count"] += 1
        if not are_usual:
            records[-1]["names"].append(device.name)
    return records


def _type_record(of_type: DeviceType, quota: float | None) -> str | dict[str, Any]:
    """A name of the catalogue if it loads as exactly this type, else all numbers."""
    if quota is not None and of_type == _throttled(device_type(_CPU), quota):
        return _CPU
    listed = listed_type(of_type.name)
    is_listed = listed is not None and of_type == listed.type
    if is_listed and not (quota is not None and of_type.name == _CPU):
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


_RATES = {"GB/s": 1e9, "MB/s": 1e6}
_NIC_RATES = {"Gbit/s": 0.125e9, "Mbit/s": 0.125e6}
_SIZES = {"GiB": 1024.0**3, "MiB": 1024.0**2}
_SPEEDS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3}


def _text(value: float, units: dict[str, float], parse: Callable[[str], float]) -> str | float:
    """A short text with a unit if it parses to exactly this value, else the value."""
    for unit, size in units.items():
        text = f"{value / size:.6g} {unit}"
        if value >= size and parse(text) == value:
            return text
    return value if isinstance(value, int) else float(value)
