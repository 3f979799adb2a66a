"""The fields of a cluster file; ``spec`` shows a whole file.

Quantities have units, and mappings refuse unknown fields. ``pairs`` limits transfers between hosts
by lines between sites, or by measured rates:

    pairs:
      lines:
        - {between: [[A], [B0, B1]], line_rate: 5 Gbit/s, latency: 10 ms}
      matrix:
        unit: MB/s
        bandwidth: [[0, 1200, 900], [1190, 0, 910], [905, 900, 0]]     # from row to column

All transfers from the hosts of one side to the hosts of the other share a line; each direction has
its own. The matrix has a measured rate for every pair of hosts, and the file's efficiency does not
apply to it. The name of a host entry with a count means all of its hosts.

``Document`` is the YAML text of a file, and makes errors that name its line and field. Also here:
device types that a file writes out or changes, and CPUs under a testbed's quota (``throttled``).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeAlias

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from heterog.cluster.catalog import device_type
from heterog.cluster.hardware import (
    MAX_PRICE_PER_HOUR,
    MOST_BYTES,
    DeviceType,
    FrozenFlops,
    PairLimit,
)
from heterog.cluster.topology import Cluster, Execution, Sends, Tf32
from heterog.errors import HeterogError, InputFileError, nearest
from heterog.names import first_of, shown
from heterog.records import Name, Text, field_name
from heterog.units import GIB, parse_bandwidth, parse_bytes, parse_flops_per_s, parse_seconds
from heterog.yaml_files import parse_yaml

LEAST_BARE = 1e4
"""Least bandwidth, speed or size that needs no unit: no link or card has so few, and people write
Gbit/s and GiB in smaller numbers."""


def reading(parse: Callable[[Any], Any], usual: str = "") -> BeforeValidator:
    """Lets pydantic report the errors of ``parse`` for a value, with the place of that value.

    Args:
        parse: Makes the value of a number or a text.
        usual: A value with its unit, as it is usually written. Small numbers without a unit are
            then refused: 10 is meant as Gbit/s, not as 10 bytes/s.
    """

    def read(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise PydanticCustomError(
                "value", "got {text}; write a number or a text", {"text": shown(value)}
            )
        if usual and _BARE.fullmatch(str(value)) and 0 < float(value) < LEAST_BARE:
            said = {"text": value, "usual": usual}
            raise PydanticCustomError("value", "{text} has no unit; write '{usual}', say", said)
        try:
            return parse(value)
        except HeterogError as error:
            raise PydanticCustomError(
                "value", "{text}", {"text": str(error).rstrip(".")}
            ) from error
        except (ValueError, OverflowError) as error:  # float() would quote the whole text
            raise PydanticCustomError(
                "value", "{text} is no number", {"text": shown(value)}
            ) from error

    return BeforeValidator(read)


_BARE = re.compile(r"\s*\+?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
# Far above any machine, far below where sums and quotients leave the range of floats.
POSITIVE = Field(gt=0, le=1e24, allow_inf_nan=False)
NOT_NEGATIVE = Field(ge=0, le=1e6, allow_inf_nan=False)


Bandwidth: TypeAlias = Annotated[float, reading(parse_bandwidth, "10 Gbit/s"), POSITIVE]
Speed: TypeAlias = Annotated[float, reading(parse_flops_per_s, "15 TFLOP/s"), POSITIVE]
Seconds: TypeAlias = Annotated[float, reading(parse_seconds), NOT_NEGATIVE]
Bytes: TypeAlias = Annotated[int, reading(parse_bytes, "16 GiB"), Field(gt=0, le=MOST_BYTES)]
BytesOrZero: TypeAlias = Annotated[int, reading(parse_bytes), Field(ge=0, le=MOST_BYTES)]
Share: TypeAlias = Annotated[float, reading(float), Field(gt=0, le=1, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=4096, strict=True)]
Dtype: TypeAlias = Literal["float64", "float32", "float16", "bfloat16"]
Peaks: TypeAlias = Annotated[
    dict[Dtype, Speed],
    # A bare number is the float32 peak.
    BeforeValidator(lambda value: value if isinstance(value, dict) else {"float32": value}),
]


class Spec(BaseModel):
    """A mapping of the file; refuses unknown fields, naming the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, value: object) -> object:
        known = list(cls.model_fields)
        for key in value if isinstance(value, dict) else ():
            if key not in known:
                hint = nearest(str(key), known)
                raise PydanticCustomError(
                    "unknown_field",
                    "unknown field{hint} Known: {known}",
                    {"field": key, "hint": hint, "known": ", ".join(known)},
                )
        return value


class LineSpec(Spec):
    """A line between two sets of hosts, in both directions unless ``one_way`` is set."""

    between: Annotated[
        list[Annotated[list[Name], Field(min_length=1)]], Field(min_length=2, max_length=2)
    ]
    bandwidth: Bandwidth | None = None
    line_rate: Bandwidth | None = None
    latency: Seconds = 0.0
    one_way: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _has_one_rate(self) -> "LineSpec":
        if (self.line_rate is None) == (self.bandwidth is None):
            raise PydanticCustomError(
                "value",
                "a line needs either its line_rate, of which the file's efficiency is usable, or "
                "its bandwidth as measured",
            )
        return self


class MatrixSpec(Spec):
    """Rates from each host (row) to each other one (column); the diagonal is ignored."""

    bandwidth: Annotated[
        list[list[Annotated[float, Field(ge=0, le=1e24, allow_inf_nan=False)]]],
        Field(min_length=2),
    ]
    hosts: list[Name] | None = None
    unit: str = "B/s"
    latency: Seconds = 0.0


class PairsSpec(Spec):
    """All limits between hosts besides their NICs."""

    lines: list[LineSpec] = Field(default_factory=list)
    matrix: MatrixSpec | None = None


class PairsError(ValueError):
    """A field that does not fit the hosts.

    Attributes:
        where: Path to the field inside ``pairs``.
    """

    def __init__(self, where: tuple[int | str, ...], fault: str) -> None:
        super().__init__(fault)
        self.where = where


def pair_limits(
    spec: PairsSpec, hosts: Mapping[str, Sequence[int]], num_hosts: int, efficiency: float
) -> tuple[PairLimit, ...]:
    """Make the limits that a file describes.

    Args:
        spec: Field ``pairs`` of the file.
        hosts: Positions of hosts by name; an entry with a count has several.
        num_hosts: Number of hosts of the cluster.
        efficiency: Usable fraction of line rates.

    Raises:
        PairsError: a host is unknown, or the matrix has another size than its hosts.
    """
    found: list[PairLimit] = []
    for number, line in enumerate(spec.lines):
        sides = [
            _members(names, hosts, ("lines", number, "between", side))
            for side, names in enumerate(line.between)
        ]
        rate = line.bandwidth or (line.line_rate or 0.0) * efficiency
        ways = [sides] if line.one_way else [sides, sides[::-1]]
        found += [
            PairLimit(
                sources=source, targets=target, bandwidth_bytes_per_s=rate, latency_s=line.latency
            )
            for source, target in ways
        ]
    if spec.matrix is not None:
        found += _of_matrix(spec.matrix, hosts, num_hosts)
    return tuple(found)


def _members(
    names: Sequence[str], hosts: Mapping[str, Sequence[int]], here: tuple[int | str, ...]
) -> tuple[int, ...]:
    """Positions of the named hosts, each once."""
    for name in names:
        if name not in hosts:
            raise PairsError(
                here, f"there is no host '{name}'; the hosts are {first_of(list(hosts))}."
            )
    return tuple(dict.fromkeys(host for name in names for host in hosts[name]))


def _of_matrix(
    matrix: MatrixSpec, hosts: Mapping[str, Sequence[int]], num_hosts: int
) -> Iterator[PairLimit]:
    """One limit for every pair of different hosts."""
    try:
        unit = parse_bandwidth(f"1 {matrix.unit}")
    except HeterogError as error:
        raise PairsError(("matrix", "unit"), str(error)) from error
    order = tuple(range(num_hosts))
    if matrix.hosts is not None:
        order = _members(matrix.hosts, hosts, ("matrix", "hosts"))
    for row, rates in enumerate(matrix.bandwidth):
        if len(rates) != len(order) or len(matrix.bandwidth) != len(order):
            raise PairsError(
                ("matrix", "bandwidth", row),
                f"{len(matrix.bandwidth)} rows, this one of {len(rates)} rates, for "
                f"{len(order)} hosts; write a row and a column for each host.",
            )
        for column, rate in enumerate(rates):
            if row == column:
                continue
            if rate <= 0.0:
                raise PairsError(
                    ("matrix", "bandwidth", row),
                    f"the rate to host {column} is {rate:g}; it must be above 0. Hosts that "
                    "cannot reach each other have no place in one cluster.",
                )
            yield PairLimit(
                sources=(order[row],),
                targets=(order[column],),
                bandwidth_bytes_per_s=rate * unit,
                latency_s=matrix.latency,
            )


def pairs_record(cluster: Cluster) -> dict[str, Any]:
    """The limits of a cluster as a record for ``pair_limits``: a matrix if possible, or lines."""
    pairs, count = cluster.pairs, cluster.num_hosts
    ends = [(limit.sources, limit.targets) for limit in pairs]
    every = [
        ((row,), (column,)) for row in range(count) for column in range(count) if row != column
    ]
    latencies = {limit.latency_s for limit in pairs}
    if len(pairs) > 2 and ends == every and len(latencies) == 1:
        rates = iter(float(limit.bandwidth_bytes_per_s) for limit in pairs)
        rows = [
            [0.0 if row == column else next(rates) for column in range(count)]
            for row in range(count)
        ]
        latency = {"latency": latencies.pop()} if latencies != {0.0} else {}
        return {"matrix": {"bandwidth": rows, **latency}}
    names = [host.name for host in cluster.hosts]
    return {
        "lines": [
            {
                "between": [
                    [names[host] for host in side] for side in (each.sources, each.targets)
                ],
                "bandwidth": float(each.bandwidth_bytes_per_s),
                "latency": float(each.latency_s),
                "one_way": True,
            }
            for each in pairs
        ]
    }


FilePath: TypeAlias = Annotated[Text, Field(min_length=1)]


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


class CollectivesSpec(Spec):
    """Measured slowdown of collectives over a host's NICs; see ``SlowedCollectives``."""

    ring: Annotated[float, POSITIVE]
    ring_growth: Annotated[float, NOT_NEGATIVE]
    tree: Annotated[float, POSITIVE]
    tree_growth: Annotated[float, NOT_NEGATIVE]


class NicSpec(Spec):
    """The NICs of a host: ``count`` NICs of a line rate or of a network of the catalogue.

    Neighbouring devices share a NIC if there are more devices than NICs. If there are fewer
    devices, each has several NICs to itself.
    """

    line_rate: Bandwidth | None = None
    kind: Name | None = None
    count: Count = 1
    latency: Seconds = 20e-6
    collectives: CollectivesSpec | None = None

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

    __test__ = False  # pytest would collect the class because of its name

    cpu_quota: Share | None = None


def _name_or_mapping(value: object) -> str:
    return "name" if isinstance(value, str) else "mapping"


class DeviceSpec(Spec):
    """Some equal devices of a host; most fields override the number of that name of the type."""

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
    """Prices of hosts per hour; see ``HourlyPrices``."""

    currency: Name
    device_hour: dict[Name, _Price] = Field(default_factory=dict)
    host_hour: dict[Name, _Price] = Field(default_factory=dict)


class ClusterSpec(Spec):
    """The whole file."""

    schema_version: Literal[1]
    name: Name
    efficiency: Share = 0.7
    reserved_memory: BytesOrZero = GIB
    calibration: FilePath | None = None
    sends: Sends = Sends.OVERLAPPED
    execution: Execution = Execution.EAGER
    tf32: Tf32 = Tf32.CONVOLUTIONS
    hosts: Annotated[list[HostSpec], Field(min_length=1)]
    pairs: PairsSpec = PairsSpec()
    prices: PricesSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A YAML text with the places of its fields."""

    path: Path
    root: yaml.Node
    value: object

    @staticmethod
    def parse(text: str, path: Path) -> "Document":
        """Read the text of a file.

        Raises:
            InputFileError: It is no YAML.
        """
        root, value = parse_yaml(
            text, path, what="a cluster file", if_empty="see 'heterog clusters'"
        )
        return Document(path=path, root=root, value=value)

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
                # Other steps are pydantic's own (the branch of a union), and not in the file.
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
        if location and location[-1] == "mapping":  # pydantic's own step: the branch of a union
            location = location[:-1]
        more = f" ({len(errors) - 1} more after this one)" if len(errors) > 1 else ""
        self.refuse(location, _fault(errors[0]) + more)


def _pair(node: yaml.MappingNode, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    # The last one, because fields of a merge key come before the node's own fields.
    return next((pair for pair in reversed(node.value) if pair[0].value == key), None)


_FAULTS = {
    "model_type": "got {got}; write a mapping of fields.",
    "dict_type": "got {got}; write a mapping of fields.",
    "list_type": "got {got}; write a list.",
    "missing": "this field is required.",
    "string_type": "got {got}; write a text, in quotes if YAML reads it as something else.",
    "value": "{message}.",
    "unknown_field": "{message}.",
    "value_error": "{got} {error}.",
}
_LIMITS = {
    "greater_than": "{got} is not above {gt:g}.",
    "greater_than_equal": "{got} is not at least {ge:g}.",
    "less_than_equal": "{got} is not at most {le:g}.",
    "finite_number": "{got} is not a finite number.",
}
"""What to say of pydantic's errors, by kind; a number that is not finite breaks every limit."""


def _fault(error: ErrorDetails) -> str:
    """A sentence with the error and what to write instead."""
    kind, got, message = error["type"], shown(error["input"]), error["msg"]
    is_float = isinstance(error["input"], float)
    if kind in (*_LIMITS, "int_type", "value") and is_float and not math.isfinite(error["input"]):
        kind = "finite_number"
    words = (_FAULTS | _LIMITS).get(kind)
    if words is None:
        return f"got {got}; {message[0].lower()}{message[1:]}."
    return words.format(got=got, message=message, **error.get("ctx", {}))


CPU = "CPU"


def base_type(entry: DeviceSpec) -> DeviceType:
    """The type that an entry names or writes out.

    Raises:
        UnknownNameError: The catalogue has no such type.
        ClusterError: Its numbers make no sense.
    """
    spec = entry.type
    if isinstance(spec, str):
        return device_type(spec)
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


def overridden(base: DeviceType, entry: DeviceSpec) -> DeviceType:
    """The type with the entry's numbers; ``base`` itself if they change nothing."""
    given = {
        "peak_flops_per_s": FrozenFlops(
            dict([*base.peak_flops_per_s.items(), *(entry.peak_flops or {}).items()])
        ),
        "memory_bandwidth_bytes_per_s": entry.memory_bandwidth,
        "compute_efficiency": entry.compute_efficiency,
        "memory_efficiency": entry.memory_efficiency,
        "launch_overhead_s": entry.launch_overhead,
    }
    changed = {k: v for k, v in given.items() if v is not None and v != getattr(base, k)}
    if not changed:
        return base
    return replace(base, **changed, source=f"{base.source}; cluster file")  # type: ignore[arg-type]


def throttled(kind: DeviceType, quota: float) -> DeviceType:
    """A core that runs only ``quota`` of the time, so that everything takes 1 / quota as long."""
    if quota == 1:
        return kind
    return replace(
        kind,
        name=f"{kind.name}@{quota:g}",
        peak_flops_per_s={d: p * quota for d, p in kind.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s * quota,
        launch_overhead_s=kind.launch_overhead_s / quota,
    )


def is_cpu(type_name: str) -> bool:
    """Whether a type of device is a CPU core, throttled or not.

    >>> is_cpu("CPU@0.4")
    True
    """
    return type_name.partition("@")[0] == CPU
