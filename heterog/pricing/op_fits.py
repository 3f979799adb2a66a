"""Measurements of ops and transfers that ``heterog profile`` writes, and fits to those of ops.

Each device type has a fit for each op kind; ``calibration`` says when which fit is used.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
from pydantic import Field

from heterog.cluster.topology import Cluster
from heterog.errors import ClusterError, InputFileError
from heterog.files import read_json, write_json
from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import FloatArray, OpGraph, Phase
from heterog.grouped import grouped
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
    Seconds,
    Series,
    Text,
    finite,
    parse_record,
    refusing,
)

SCHEMA_VERSION = 1
LEAST_SECONDS = 1e-7  # no clock resolves less
COPY = "copy"
STEP = "step"
"""Kind of rows that measure whole steps; their bytes are the most bytes that tensors held."""
_WITHOUT_SIGNATURE = (COPY, STEP)
"""Kinds of rows that do not belong to a single op."""
_MOST_MEMBERS = 512


def _kind_fault(value: str) -> str | None:
    known = [kind.name.lower() for kind in ChannelKind]
    return None if value in known else f"is none of {', '.join(known)}"


LinkKind: TypeAlias = Annotated[Text, refusing(_kind_fault)]
"""Name of a kind of channel, lower case."""
Signature: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$", strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpMeasurement:
    """One op (or copy) measured at one local share on one device type.

    Attributes:
        device_type: Name of the device type.
        model: Name of the workload that it was measured in.
        signature: Hash of the op at its global size; see ``op_signature``.
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
        device_seconds: Compute time that each device lost to it, in the order of ``devices``: on a
            CPU, the process's CPU time over its quota, less the CPU time of compute.
        while_computing: Whether it was one of several small operations issued at once while all
            members computed; seconds are then what each operation adds to the queue.
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
        environment: Versions and processors, only shown to people.
        ops: Measured ops and copies.
        links: Measured transfers and collectives.
        cluster: The cluster of the links, as ``Cluster.to_dict`` describes it; ``None`` if no link
            was measured.
        compiled: Whether ops were measured as parts of compiled segments.
    """

    __pydantic_config__: ClassVar = VALUE

    environment: Mapping[str, Text]
    ops: Series[OpMeasurement]
    links: Series[LinkMeasurement] = ()
    cluster: Mapping[str, Any] | None = None
    compiled: Flag = False

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})

    @staticmethod
    def load(path: str | Path) -> "Measurements":
        """Read a file that ``save`` wrote.

        Raises:
            InputFileError: the file is missing, broken or of another version.
        """
        found = parse_record(
            read_json(path, "measurements"),
            Measurements,
            f"measurements {path}",
            versions=(SCHEMA_VERSION,),
        )
        if found.cluster is not None:
            try:
                Cluster.from_dict(found.cluster)
            except ClusterError as error:
                raise InputFileError(f"measurements {path}: {error}") from error
        return found


def merge(parts: Sequence[Measurements]) -> Measurements:
    """Combine the rows of several measurements; keep the environment of the first.

    Raises:
        ClusterError: links of several clusters were measured.
        InputFileError: ops were compiled in some parts and not in others.
    """
    if len({part.compiled for part in parts if part.ops}) > 1:
        raise InputFileError(
            "some of the measurements are of compiled steps, others are not; make a calibration "
            "of each."
        )
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
        compiled=any(part.compiled for part in parts if part.ops),
    )


def op_kind(graph: OpGraph, index: int) -> str:
    """Kind under which an op is measured; for an update it names the optimizer."""
    op = graph.ops[index]
    return f"update.{graph.optimizer}" if op.phase == Phase.UPDATE else op.kind


def op_signature(graph: OpGraph, index: int) -> str:
    """Hash of everything that determines an op's seconds, except the device and the share."""
    op = graph.ops[index]
    plan = batch_plan(graph)
    tensors = [*op.inputs, *graph.outputs[index]]
    shapes = [(graph.tensors[tensor].shape, graph.tensors[tensor].dtype) for tensor in tensors]
    places = [*plan.needed[index], *(plan.placements[tensor] for tensor in graph.outputs[index])]
    args = sorted((name, str(value)) for name, value in op.args.items() if name != "device")
    text = f"{op_kind(graph, index)}{args}{shapes}{places}{graph.batch_size}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_NEAR = math.log(2.0)  # Gaussian width: measurements within a factor of 2 correct each other
_FAR = math.log(3.0)  # a size farther than a factor of 3 from every measurement is extrapolated
_SHRINK = 0.1  # weight of the uncorrected fit; a measurement of the same size has weight 1
_FITS = 20  # then random measurements are those of the fit in the mean to 0.5 %
Factor: TypeAlias = Annotated[float, finite(0.0, 1e9)]
_Logs: TypeAlias = Annotated[Series[Annotated[float, finite(0.0, 100.0)]], Field(min_length=1)]
_LogRatios: TypeAlias = Annotated[
    Series[Annotated[float, finite(-50.0, 50.0)]], Field(min_length=1)
]


@lru_cache(maxsize=16)
def signatures(graph: OpGraph) -> tuple[str, ...]:
    """The signature of every op."""
    return tuple(op_signature(graph, index) for index in range(graph.num_ops))


@lru_cache(maxsize=16)
def _members(graph: OpGraph) -> Mapping[str, list[int]]:
    """Ops of each kind."""
    return grouped((op_kind(graph, index), index) for index in range(graph.num_ops))


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFit:
    """Seconds of ops of one kind on one device type, from measurements at several sizes.

    Attributes:
        coefficients: Seconds, seconds per FLOP, seconds per byte.
        log_flops: Logarithm of 1 + FLOPs of each measurement.
        log_bytes: Logarithm of 1 + bytes of each measurement.
        log_ratio: Logarithm of each measurement's seconds over the seconds of the fit.
    """

    __pydantic_config__: ClassVar = VALUE

    coefficients: tuple[Factor, Factor, Factor]
    log_flops: _Logs
    log_bytes: _Logs
    log_ratio: _LogRatios

    def __post_init__(self) -> None:
        if not len(self.log_flops) == len(self.log_bytes) == len(self.log_ratio):
            raise ValueError("has log_flops, log_bytes and log_ratio of different lengths")

    def seconds(self, flops: FloatArray, num_bytes: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Seconds of ops, and their distance in log size to the nearest measurement."""
        fit = _linear(self.coefficients, flops, num_bytes)
        across = np.log1p(flops)[:, None] - np.array(self.log_flops)
        down = np.log1p(num_bytes)[:, None] - np.array(self.log_bytes)
        distance = np.hypot(across, down)
        weight = np.exp(-0.5 * (distance / _NEAR) ** 2)
        correction = (weight @ np.array(self.log_ratio)) / (weight.sum(1) + _SHRINK)
        return fit * np.exp(correction), distance.min(1)


def _linear(
    coefficients: tuple[float, float, float], flops: FloatArray, num_bytes: FloatArray
) -> FloatArray:
    base, per_flop, per_byte = coefficients
    return np.maximum(base + per_flop * flops + per_byte * num_bytes, LEAST_SECONDS)


def fit_kind(
    flops: FloatArray, num_bytes: FloatArray, seconds: FloatArray, *, is_of_many: bool = False
) -> KindFit:
    """Fit one kind to its measurements by non-negative least squares of relative errors.

    Errors are relative to measured seconds. So no fit that is too short is off by more than 1, and
    one to ops of many kinds (``is_of_many``) would be as quick as the quickest of them: its errors
    are relative to the fit before, so that measured seconds are those of the fit in the mean.
    """
    from scipy.optimize import nnls  # imported here: ranks need not wait 0.3 s for it

    seconds = like = np.maximum(seconds, LEAST_SECONDS)
    columns = np.stack([np.ones_like(seconds), flops, num_bytes], axis=1)
    scale = np.maximum((columns / seconds[:, None]).max(0), 1e-300)
    for _ in range(_FITS if is_of_many else 1):
        solution, _ = nnls(columns / like[:, None] / scale, seconds / like)
        base, per_flop, per_byte = (solution / scale).tolist()
        fit = _linear((base, per_flop, per_byte), flops, num_bytes)
        like = np.sqrt(like * fit)  # or it would go to and fro between two fits
    return KindFit(
        coefficients=(base, per_flop, per_byte),
        log_flops=tuple(np.log1p(flops).tolist()),
        log_bytes=tuple(np.log1p(num_bytes).tolist()),
        log_ratio=tuple(np.log(seconds / fit).tolist()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeFit:
    """The fits to all measurements of one device type.

    Attributes:
        kinds: Fit of each op kind.
        curves: Curve of each op signature: (samples, seconds) in order of samples.
        any_kind: Fit to ops of all kinds, for kinds that were never measured.
        copy_s: Fixed seconds and seconds per byte of copies.
    """

    __pydantic_config__: ClassVar = VALUE

    kinds: Mapping[Text, KindFit]
    curves: Mapping[Signature, tuple[Series[Seconds], Series[Seconds]]]
    any_kind: KindFit
    copy_s: tuple[Factor, Factor]

    def __post_init__(self) -> None:
        for signature, (samples, seconds) in self.curves.items():
            rises = all(before < after for before, after in pairwise(samples))
            if not samples or len(samples) != len(seconds) or not rises or samples[0] <= 0.0:
                raise ValueError(
                    f"has a curve '{signature}' that is not rising samples with a time each"
                )

    def work_seconds(
        self, graph: OpGraph, flops: FloatArray, num_bytes: FloatArray
    ) -> tuple[FloatArray, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Seconds of ops with this work by their kinds, and whether each is extrapolated."""
        is_far = np.ones(graph.num_ops, np.bool_)
        seconds = np.empty(graph.num_ops)
        for kind, indices in _members(graph).items():
            fit = self.kinds.get(kind, self.any_kind)
            seconds[indices], distance = fit.seconds(flops[indices], num_bytes[indices])
            if kind in self.kinds:
                is_far[indices] = distance > _FAR
        return seconds, is_far


def fit_type(rows: Sequence[OpMeasurement]) -> TypeFit:
    """Fit the measurements of one device type."""
    kinds = grouped((row.kind, row) for row in rows)
    curves = grouped((row.signature, row) for row in rows if row.kind != COPY)
    fits = {kind: fit_kind(*_columns(members)) for kind, members in kinds.items()}
    any_kind = fit_kind(*_columns(rows), is_of_many=True)
    fixed, _, per_byte = fits.pop(COPY, any_kind).coefficients
    return TypeFit(
        kinds=fits,
        curves={signature: _curve(members) for signature, members in curves.items()},
        any_kind=any_kind,
        copy_s=(fixed, per_byte),
    )


def held_out_error(
    rows: Sequence[OpMeasurement], *, folds: int = 5
) -> tuple[float | None, float | None]:
    """Errors of ops and of whole models on measurements left out of a fit.

    For ops, each fold leaves out a part of the signatures; the error is the sum of |predicted -
    measured| over the sum of measured seconds. For models, each is left out whole; the error is
    the mean over models and shares of the relative error of the summed seconds of a model's ops.
    An error is ``None`` if there is only one op or model.

    Args:
        rows: Measurements of one device type.
        folds: Number of parts that the ops are divided into.
    """
    rows = [row for row in rows if row.kind != COPY]
    pairs = [
        pair
        for fold in range(folds)
        for pair in _predict_left_out(rows, lambda row: int(row.signature, 16) % folds, fold)
    ]
    measured = sum(row.seconds * row.count for row, _ in pairs)
    wrong = sum(abs(predicted - row.seconds) * row.count for row, predicted in pairs)
    of_ops = wrong / measured if pairs else None  # one op alone cannot be left out
    models = sorted({row.model for row in rows})
    of_models: list[float] = []
    for model in models if len(models) > 1 else ():
        pairs = _predict_left_out(rows, lambda row: row.model, model)
        for samples in sorted({row.samples for row, _ in pairs}):
            share = [pair for pair in pairs if pair[0].samples == samples]
            measured = sum(row.seconds * row.count for row, _ in share)
            predicted = sum(seconds * row.count for row, seconds in share)
            of_models.append(abs(predicted - measured) / measured)
    return of_ops, float(np.mean(of_models)) if of_models else None


def _predict_left_out(
    rows: Sequence[OpMeasurement], key: Callable[[OpMeasurement], Any], left_out: Any
) -> list[tuple[OpMeasurement, float]]:
    """The rows with a key, each with the seconds that a fit to the others predicts."""
    kept = [row for row in rows if key(row) != left_out]
    if not kept:
        return []
    fit = fit_type(kept)
    pairs = []
    for row in rows:
        if key(row) == left_out:
            kind = fit.kinds.get(row.kind, fit.any_kind)
            seconds, _ = kind.seconds(np.array([row.flops]), np.array([row.num_bytes]))
            pairs.append((row, float(seconds[0])))
    return pairs


def _columns(rows: Sequence[OpMeasurement]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """FLOPs, bytes and seconds of measurements."""
    table = np.array([(row.flops, row.num_bytes, row.seconds) for row in rows], np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def _curve(rows: Sequence[OpMeasurement]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    points = sorted(grouped((row.samples, row) for row in rows).items())
    return (
        tuple(float(samples) for samples, _ in points),
        tuple(_mean_seconds(members) for _, members in points),
    )


def _mean_seconds(rows: Sequence[OpMeasurement]) -> float:
    """Mean over calls."""
    return sum(row.seconds * row.count for row in rows) / sum(row.count for row in rows)
