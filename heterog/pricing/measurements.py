"""Measured seconds of ops and transfers, as ``heterog profile`` writes them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heterog.cluster.topology import Cluster
from heterog.errors import ClusterError, InputFileError
from heterog.files import write_json
from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import OpGraph, Phase
from heterog.pricing.calibration_files import LinkRecord, MeasurementsRecord, OpRecord
from heterog.records import read_record

SCHEMA_VERSION = 1
LEAST_SECONDS = 1e-7  # no clock tells less apart
COPY = "copy"
STEP = "step"
"""Kind of the rows of whole steps: seconds, and as bytes the most that tensors held."""


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

    device_type: str
    model: str
    signature: str
    kind: str
    samples: int
    flops: float
    num_bytes: float
    seconds: float
    count: int


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

    kind: str
    devices: tuple[str, ...]
    slices: tuple[int, ...]
    num_bytes: int
    seconds: float
    device_seconds: tuple[float, ...]
    while_computing: bool = False


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

    environment: Mapping[str, str]
    ops: tuple[OpMeasurement, ...]
    links: tuple[LinkMeasurement, ...] = ()
    cluster: Mapping[str, Any] | None = None

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        record = {
            "schema_version": SCHEMA_VERSION,
            "environment": dict(self.environment),
            "ops": [asdict(row) for row in self.ops],
            "links": [asdict(row) for row in self.links],
            "cluster": self.cluster,
        }
        write_json(path, record)

    @staticmethod
    def load(path: str | Path) -> "Measurements":
        """Read what ``save`` wrote.

        Raises:
            InputFileError: the file is missing, broken or of another version.
        """
        record = read_record(path, "measurements", MeasurementsRecord, versions=(SCHEMA_VERSION,))
        where = f"measurements {path}"
        if record.cluster is not None:
            try:
                Cluster.from_dict(record.cluster)
            except ClusterError as error:
                raise InputFileError(f"{where}: {error}") from error
        return Measurements(
            environment=record.environment,
            ops=tuple(op_measurement(row) for row in record.ops),
            links=tuple(link_measurement(row) for row in record.links),
            cluster=record.cluster,
        )


def op_measurement(record: OpRecord) -> OpMeasurement:
    """Make a row from its record."""
    return OpMeasurement(**dict(record))


def link_measurement(record: LinkRecord) -> LinkMeasurement:
    """Make a row from its record."""
    tuples = {key: tuple(getattr(record, key)) for key in ("devices", "slices", "device_seconds")}
    return LinkMeasurement(**{**dict(record), **tuples})


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
