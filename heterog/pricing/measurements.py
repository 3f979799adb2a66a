"""Measured seconds of ops and transfers, as ``heterog profile`` writes them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AfterValidator, Field

from heterog.cluster.topology import Cluster
from heterog.errors import ClusterError, InputFileError
from heterog.files import write_json
from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import OpGraph, Phase
from heterog.lowering.channels import ChannelKind
from heterog.records import (
    VALUE,
    Amount,
    Count,
    Flag,
    Int32,
    Name,
    Number,
    NumBytes,
    PositiveSeconds,
    Series,
    Text,
    read_record,
)

SCHEMA_VERSION = 1
LEAST_SECONDS = 1e-7  # no clock tells less apart
COPY = "copy"
STEP = "step"
"""Kind of the rows of whole steps: seconds, and as bytes the most that tensors held."""
_WITHOUT_SIGNATURE = (COPY, STEP)
"""Kinds of rows that do not belong to a single op."""
_MOST_MEMBERS = 512


def _checked_kind(value: str) -> str:
    known = [kind.name.lower() for kind in ChannelKind]
    if value not in known:
        raise ValueError(f"is none of {', '.join(known)}")
    return value


LinkKind: TypeAlias = Annotated[Text, AfterValidator(_checked_kind)]
"""Name of a kind of channel, lower case."""
Signature: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$", strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMeasurement:
    """One op (or copy) measured at one local share on one device type.

    Attributes:
        device_type: Name of the device type.
        model: Name of the workload that it was measured in.
        signature: Hash of the op at global size; see ``op_signature``.
        kind: ATen kind, ``update.CLASS``, ``copy`` or ``step``.
        samples: Number of samples of the local share.
        flops: FLOPs of the share.
        num_bytes: Bytes moved for the share; for a ``step``, the most bytes that tensors held.
        seconds: Mean seconds of a call.
        count: Number of calls.
    """

    __pydantic_config__: ClassVar = VALUE

    device_type: Name
    model: Text
    signature: Signature
    kind: Text
    samples: Count
    flops: Amount
    num_bytes: Amount
    seconds: PositiveSeconds
    count: Count

    def __post_init__(self) -> None:
        if not self.signature and self.kind not in _WITHOUT_SIGNATURE:
            raise ValueError("has no signature of its op")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """One transfer or collective measured on a cluster.

    Attributes:
        kind: Name of the ``ChannelKind``, lower case.
        devices: Names of source and destination, or of the members.
        slices: Relative slice of each member (reduce-scatter and all-gather).
        num_bytes: Payload.
        seconds: Median seconds.
        device_seconds: Compute time that it took from each device, in the order of ``devices``: on
            a CPU the process's CPU time over its quota, less its own computing.
        while_computing: Whether it was one of several small ones issued at once while all members
            computed; its numbers are then what each adds to the queue.
    """

    __pydantic_config__: ClassVar = VALUE

    kind: LinkKind
    devices: Annotated[tuple[Name, ...], Field(min_length=2, max_length=_MOST_MEMBERS)]
    slices: Annotated[tuple[Int32, ...], Field(max_length=_MOST_MEMBERS)]
    num_bytes: NumBytes
    seconds: PositiveSeconds
    device_seconds: Annotated[tuple[Number, ...], Field(max_length=_MOST_MEMBERS)]
    while_computing: Flag = False

    def __post_init__(self) -> None:
        members = len(self.devices)
        if len(set(self.devices)) < members:
            raise ValueError("names a device twice")
        if self.kind == "point_to_point" and members != 2:
            raise ValueError(f"is between two devices, not {members}")
        if len(self.device_seconds) != members:
            raise ValueError(
                f"has {len(self.device_seconds)} device_seconds for {members} devices"
            )
        if len(self.slices) not in (0, members):
            raise ValueError(f"has {len(self.slices)} slices for {members} devices")
        if self.slices and not sum(self.slices):
            raise ValueError("has slices that are all 0")
        if not self.num_bytes:
            raise ValueError("has a payload of 0 bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements of ``heterog profile``.

    Attributes:
        environment: Versions and processors, for people.
        ops: Measured ops and copies.
        links: Measured transfers and collectives.
        cluster: The cluster of the links, as ``Cluster.to_dict`` describes it; ``None`` if nothing
            was measured between devices.
    """

    __pydantic_config__: ClassVar = VALUE

    environment: Mapping[str, Text]
    ops: Series[OpMeasurement]
    links: Series[LinkMeasurement] = ()
    cluster: Mapping[str, Any] | None = None

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})

    @staticmethod
    def load(path: str | Path) -> "Measurements":
        """Read what ``save`` wrote.

        Raises:
            InputFileError: the file is missing, broken or of another version.
        """
        found = read_record(path, "measurements", Measurements, versions=(SCHEMA_VERSION,))
        if found.cluster is not None:
            try:
                Cluster.from_dict(found.cluster)
            except ClusterError as error:
                raise InputFileError(f"measurements {path}: {error}") from error
        return found


def merge(parts: Sequence[Measurements]) -> Measurements:
    """Combine the rows of several measurements; the environment is that of the first.

    Raises:
        ClusterError: links of several clusters were measured.
    """
    clusters = [Cluster.from_dict(part.cluster) for part in parts if part.cluster is not None]
    for other in clusters[1:]:
        difference = clusters[0].describe_difference(other)
        if difference is not None:
            raise ClusterError(
                f"links were measured on different clusters ({difference}); make a calibration of "
                "each."
            )
    return Measurements(
        environment=parts[0].environment,
        ops=tuple(row for part in parts for row in part.ops),
        links=tuple(row for part in parts for row in part.links),
        cluster=clusters[0].to_dict() if clusters else None,
    )


def op_kind(graph: OpGraph, index: int) -> str:
    """Kind under which an op is measured; for an update it names the optimizer."""
    op = graph.ops[index]
    return f"update.{graph.optimizer}" if op.phase == Phase.UPDATE else op.kind


def op_signature(graph: OpGraph, index: int) -> str:
    """Hash of all that determines an op's seconds, besides the device and the share."""
    op = graph.ops[index]
    plan = batch_plan(graph)
    tensors = [*op.inputs, *graph.outputs[index]]
    shapes = [(graph.tensors[tensor].shape, graph.tensors[tensor].dtype) for tensor in tensors]
    places = [*plan.needed[index], *(plan.placements[tensor] for tensor in graph.outputs[index])]
    args = sorted((name, str(value)) for name, value in op.args.items() if name != "device")
    text = f"{op_kind(graph, index)}{args}{shapes}{places}{graph.batch_size}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
