"""The calibrated cost model: measurements on real devices correct the roofline.

Seconds of an op at a local share come from the first of these sources that exists:

1. its *curve*: this very op was measured at several shares; seconds are interpolated between
   them (piecewise linear over the samples);
2. its *kind*: ops of the same kind were measured at other sizes. ``a + b FLOPs + c bytes`` with
   a, b, c >= 0 is fitted to their relative errors, then multiplied by the fit's error at the
   measurements nearest in size (Gaussian weights in log FLOPs and log bytes);
3. the *device*: the same fit over the measurements of all kinds.

2 outside the measured sizes and 3 are *extrapolated*, and ``extrapolated`` says for which ops.

Links: a NIC's rate is the one that transfers over it reached. A collective takes ``latency x l +
bytes x b`` where the factors l and b of its kind are fitted to measured collectives over those
rates. Communication also takes compute time from its members: for every byte (*drag*), on a CPU
the time of the threads that move bytes, measured while nothing else ran; and for every operation
(*overhead*), measured with small ones while all members computed.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import DEVICE_MODELS, ROOFLINE, Cluster
from heterog.errors import ClusterError, InputFileError
from heterog.files import MAX_JSON_BYTES, read_json, write_json
from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import FloatArray, OpGraph, Phase
from heterog.records import parse_record, read_record
from heterog.simulator.calibration_files import (
    CalibrationRecord,
    KindRecord,
    LinkRecord,
    MeasurementsRecord,
    OpRecord,
    TypeRecord,
)
from heterog.simulator.collectives import alpha_beta
from heterog.simulator.cost_model import ChannelSeconds, CostModel
from heterog.simulator.device_models.model import DeviceModels
from heterog.simulator.device_models.run_file import RUNS, read_run_models
from heterog.simulator.intervals import MEDIAN_OF_NORMAL
from heterog.simulator.roofline import Roofline
from heterog.strategy.channels import Channel, ChannelKind, ChannelTable
from heterog.strategy.strategy import REPLICATED, Strategy

SCHEMA_VERSION = 1
_NEAR = math.log(2.0)  # sizes within a factor of 2 inform each other
_FAR = math.log(3.0)  # beyond this factor from anything measured, a size is extrapolated
_SHRINK = 0.1  # weight of "the fit is right", where one measurement of the same size has 1
_LEAST_SECONDS = 1e-7  # no clock tells less apart
_COPY = "copy"
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
    tensors = [*op.inputs, *graph.outputs(index)]
    shapes = [(graph.tensors[tensor].shape, graph.tensors[tensor].dtype) for tensor in tensors]
    places = [*plan.needed[index], *(plan.placements[tensor] for tensor in graph.outputs(index))]
    args = sorted((name, str(value)) for name, value in op.args.items() if name != "device")
    text = f"{op_kind(graph, index)}{args}{shapes}{places}{graph.batch_size}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache(maxsize=16)
def _signatures(graph: OpGraph) -> tuple[str, ...]:
    return tuple(op_signature(graph, index) for index in range(graph.num_ops))


@lru_cache(maxsize=16)
def _members(graph: OpGraph) -> Mapping[str, list[int]]:
    """Ops of each kind, by kind."""
    members: dict[str, list[int]] = {}
    for index in range(graph.num_ops):
        members.setdefault(op_kind(graph, index), []).append(index)
    return members


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFit:
    """Seconds of ops of one kind on one device type, from measurements at several sizes.

    Attributes:
        coefficients: Seconds, seconds per FLOP, seconds per byte.
        log_flops: Logarithm of 1 + FLOPs of each measurement.
        log_bytes: Logarithm of 1 + bytes of each measurement.
        log_ratio: Logarithm of each measurement's seconds over those of the fit.
    """

    coefficients: tuple[float, float, float]
    log_flops: tuple[float, ...]
    log_bytes: tuple[float, ...]
    log_ratio: tuple[float, ...]

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
    return np.maximum(base + per_flop * flops + per_byte * num_bytes, _LEAST_SECONDS)


def fit_kind(flops: FloatArray, num_bytes: FloatArray, seconds: FloatArray) -> KindFit:
    """Fit one kind to its measurements by non-negative least squares of relative errors."""
    from scipy.optimize import nnls  # takes 0.3 s, which ranks need not wait for

    seconds = np.maximum(seconds, _LEAST_SECONDS)
    columns = np.stack([np.ones_like(seconds), flops, num_bytes], axis=1) / seconds[:, None]
    scale = np.maximum(columns.max(0), 1e-300)
    solution, _ = nnls(columns / scale, np.ones_like(seconds))
    base, per_flop, per_byte = (solution / scale).tolist()
    fit = _linear((base, per_flop, per_byte), flops, num_bytes)
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
        any_kind: Fit to ops of all kinds, for kinds never measured.
        copy_s: Fixed seconds and seconds per byte of copies.
    """

    kinds: Mapping[str, KindFit]
    curves: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]
    any_kind: KindFit
    copy_s: tuple[float, float]

    def work_seconds(
        self, graph: OpGraph, flops: FloatArray, num_bytes: FloatArray
    ) -> tuple[FloatArray, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Seconds by kind of ops that do this much work, and whether each is extrapolated."""
        is_far = np.ones(graph.num_ops, np.bool_)
        seconds = np.empty(graph.num_ops)
        for kind, indices in _members(graph).items():
            fit = self.kinds.get(kind, self.any_kind)
            seconds[indices], distance = fit.seconds(flops[indices], num_bytes[indices])
            if kind in self.kinds:
                is_far[indices] = distance > _FAR
        return seconds, is_far


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """The fits to measurements of links and collectives.

    Attributes:
        rates: Measured bytes/s of link resources, by name.
        factors: Factors of the latency and of the bytes' time, by channel kind.
        drag: Seconds of compute lost per payload byte, by channel kind and device type.
        overhead: Seconds of compute that an operation takes from a member for each other member,
            by channel kind and device type.
        loaded: Factor of the latency while a member computes, by channel kind.
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    factors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    drag: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    loaded: Mapping[str, float] = field(default_factory=dict)
    overhead: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


_RUN_SPREAD = 0.05
"""Error of the logarithm of a step's seconds where every op is known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """A cost model fitted to measurements; see the module.

    Attributes:
        name: Name that is shown with every prediction.
        types: Fits of each device type, by name.
        links: Fits to the links of the measured cluster.
        held_out_error: Errors on data unseen by a first fit, by device type: of ops, and of
            whole models; see the function ``held_out_error``.
    """

    name: str
    types: Mapping[str, TypeFit]
    links: LinkFit
    held_out_error: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def op_seconds(self, graph: OpGraph, device_type: DeviceType, samples: int) -> FloatArray:
        """Seconds of every op at a local share; see ``CostModel``."""
        return self._op_seconds(graph, device_type, samples)[0]

    def extrapolated(
        self, graph: OpGraph, device_type: DeviceType, samples: int
    ) -> tuple[list[str], float]:
        """Op kinds never measured near these sizes, and their part of the predicted seconds."""
        seconds, is_far = self._op_seconds(graph, device_type, samples)
        kinds = {op_kind(graph, int(index)) for index in np.flatnonzero(is_far & (seconds > 0))}
        return sorted(kinds), float(seconds[is_far].sum() / max(seconds.sum(), 1e-300))

    def _op_seconds(
        self, graph: OpGraph, device_type: DeviceType, samples: int
    ) -> tuple[FloatArray, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Seconds of every op, and whether each is extrapolated."""
        fit = self.types.get(device_type.name)
        if fit is None:
            return Roofline().op_seconds(graph, device_type, samples), ~graph.is_view
        plan = batch_plan(graph)
        flops = plan.flops_fixed + samples * plan.flops_per_sample
        num_bytes = plan.bytes_fixed + samples * plan.bytes_per_sample
        seconds, is_far = fit.work_seconds(graph, flops, num_bytes)
        if fit.curves:
            for index, signature in enumerate(_signatures(graph)):
                curve = fit.curves.get(signature)
                if curve is not None:
                    seconds[index] = np.interp(samples, *curve)
                    is_far[index] = not curve[0][0] / 2 <= samples <= curve[0][-1] * 2
        return np.where(graph.is_view, 0.0, seconds), is_far & ~graph.is_view

    def work_seconds(
        self, graph: OpGraph, device_type: DeviceType, flops: FloatArray, num_bytes: FloatArray
    ) -> FloatArray:
        """Seconds of parts of ops; see ``CostModel``.

        Always extrapolated: parts along other axes than the batch are not measured. The fit of
        the op's kind is applied to the part's own FLOPs and bytes.
        """
        fit = self.types.get(device_type.name)
        if fit is None:
            return Roofline().work_seconds(graph, device_type, flops, num_bytes)
        return np.where(graph.is_view, 0.0, fit.work_seconds(graph, flops, num_bytes)[0])

    def spread(self, graph: OpGraph, device_type: DeviceType) -> float:
        """The error on models that a first fit had not seen; else the roofline's spread."""
        errors = self.held_out_error.get(device_type.name, (math.nan, math.nan))
        known = [error for error in reversed(errors) if not math.isnan(error)]
        if not known:
            return Roofline().spread(graph, device_type)
        return math.hypot(_RUN_SPREAD, known[0] / MEDIAN_OF_NORMAL)

    def copy_seconds(self, device_type: DeviceType) -> tuple[float, float]:
        """Fixed seconds and seconds per byte of copies and sums."""
        fit = self.types.get(device_type.name)
        return Roofline().copy_seconds(device_type) if fit is None else fit.copy_s

    def channel_seconds(self, cluster: Cluster, channel: Channel) -> ChannelSeconds:
        """Alpha-beta seconds over measured rates, corrected for the kind of channel."""
        cost = alpha_beta(cluster, channel, self.links.rates)
        kind = _measured_as(channel.kind)
        latency, per_byte = self.links.factors.get(kind, (1.0, 1.0))
        loaded = max(latency, self.links.loaded.get(kind, 0.0))
        return ChannelSeconds(
            cost.latency_s * latency,
            cost.seconds_per_byte * per_byte,
            {resource: seconds * per_byte for resource, seconds in cost.held.items()},
            drag=self.links.drag.get(kind, {}),
            loaded_latency_s=cost.latency_s * loaded,
            overhead_s={
                name: seconds * (len(channel.devices) - 1)
                for name, seconds in self.links.overhead.get(kind, {}).items()
            },
        )

    def save(self, path: str | Path) -> None:
        """Write as JSON, for the field ``calibration`` of a cluster file."""
        record = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        record["held_out_error"] = {  # JSON has no NaN
            kind: [None if math.isnan(error) else error for error in errors]
            for kind, errors in self.held_out_error.items()
        }
        write_json(path, record)

    @staticmethod
    def load(path: str | Path) -> "Calibration":
        """Read what ``save`` wrote.

        Raises:
            InputFileError: the file is missing, broken or of another version.
        """
        value = read_json(path, "calibration", MAX_JSON_BYTES)
        return _calibration_of(value, f"calibration {path}")


def _calibration_of(value: object, where: str) -> Calibration:
    record = parse_record(value, CalibrationRecord, where, versions=(SCHEMA_VERSION,))
    links = record.links
    return Calibration(
        name=record.name,
        types={name: _type_fit(each) for name, each in record.types.items()},
        links=LinkFit(
            rates=links.rates,
            factors={kind: (each[0], each[1]) for kind, each in links.factors.items()},
            drag=links.drag,
            loaded=links.loaded,
            overhead=links.overhead,
        ),
        held_out_error={
            kind: (_number_or_nan(errors[0]), _number_or_nan(errors[1]))
            for kind, errors in record.held_out_error.items()
        },
    )


def cost_model_of(cluster: Cluster) -> CostModel:
    """The cost model that a cluster names: a calibration, the roofline, or device models.

    Raises:
        InputFileError: the named file is missing or broken.
    """
    if cluster.calibration in (None, DEVICE_MODELS):
        return DeviceModels(cluster.execution).on(cluster)
    if cluster.calibration == ROOFLINE:
        return Roofline()
    found = _load_once(cluster.calibration)
    return found.on(cluster) if isinstance(found, DeviceModels) else found


@lru_cache(maxsize=8)
def _load_once(path: str) -> CostModel:
    value = read_json(path, "calibration", MAX_JSON_BYTES)
    where = f"calibration {path}"
    if isinstance(value, dict) and value.get("kind") == RUNS:
        return read_run_models(value, where)
    return _calibration_of(value, where)


def calibrate(
    measurements: Measurements, cluster: Cluster | None = None, *, name: str = "calibration"
) -> Calibration:
    """Fit a cost model.

    Args:
        measurements: Measurements of ops, and of links if a cluster is given.
        cluster: The cluster whose links were measured.
        name: Name of the result.

    Raises:
        InputFileError: there are no ops to fit.
    """
    if not measurements.ops:
        raise InputFileError("the measurements hold no op; run 'heterog profile' first.")
    by_type: dict[str, list[OpMeasurement]] = {}
    for row in measurements.ops:
        if row.kind == STEP:
            continue
        by_type.setdefault(row.device_type, []).append(row)
    return Calibration(
        name=name,
        types={kind: fit_type(rows) for kind, rows in by_type.items()},
        links=fit_links(measurements.links, cluster) if cluster else LinkFit(),
        held_out_error={kind: held_out_error(rows) for kind, rows in by_type.items()},
    )


def fit_type(rows: Sequence[OpMeasurement]) -> TypeFit:
    """Fit the measurements of one device type."""
    kinds: dict[str, list[OpMeasurement]] = {}
    curves: dict[str, dict[int, list[OpMeasurement]]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
        if row.kind != _COPY:
            curves.setdefault(row.signature, {}).setdefault(row.samples, []).append(row)
    fits = {kind: fit_kind(*_columns(members)) for kind, members in kinds.items()}
    any_kind = fit_kind(*_columns(rows))
    fixed, _, per_byte = fits.pop(_COPY, any_kind).coefficients
    return TypeFit(
        kinds=fits,
        curves={
            signature: (
                tuple(float(samples) for samples in sorted(points)),
                tuple(_mean_seconds(points[samples]) for samples in sorted(points)),
            )
            for signature, points in curves.items()
        },
        any_kind=any_kind,
        copy_s=(fixed, per_byte),
    )


def held_out_error(rows: Sequence[OpMeasurement], *, folds: int = 5) -> tuple[float, float]:
    """Errors of ops and of whole models on measurements that the fit has not seen.

    For the first, each fold leaves out a part of the ops, by signature, and the error is the sum
    of |predicted - measured| over the sum of measured seconds. For the second each model is left
    out whole; the error is the mean, over models and shares, of that of the sum over a model's
    ops. NaN where there is only one op or model.

    Args:
        rows: Measurements of one device type.
        folds: Number of parts that the ops are divided into.
    """
    rows = [row for row in rows if row.kind != _COPY]
    pairs = [
        pair
        for fold in range(folds)
        for pair in _predict_left_out(rows, lambda row: int(row.signature, 16) % folds, fold)
    ]
    measured = sum(row.seconds * row.count for row, _ in pairs)
    wrong = sum(abs(predicted - row.seconds) * row.count for row, predicted in pairs)
    of_ops = wrong / measured if pairs else math.nan  # one op alone cannot be left out
    models = sorted({row.model for row in rows})
    of_models: list[float] = []
    for model in models if len(models) > 1 else ():
        pairs = _predict_left_out(rows, lambda row: row.model, model)
        for samples in sorted({row.samples for row, _ in pairs}):
            share = [pair for pair in pairs if pair[0].samples == samples]
            measured = sum(row.seconds * row.count for row, _ in share)
            predicted = sum(seconds * row.count for row, seconds in share)
            of_models.append(abs(predicted - measured) / measured)
    return of_ops, float(np.mean(of_models)) if of_models else math.nan


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


def fit_links(rows: Iterable[LinkMeasurement], cluster: Cluster) -> LinkFit:
    """Fit rates, latencies and drag to measured transfers and collectives.

    Raises:
        ClusterError: the measurements name devices that the cluster does not have.
    """
    table = ChannelTable(cluster)
    loaded: dict[str, list[float]] = {}
    overhead: dict[str, dict[str, list[float]]] = {}
    by_channel: dict[Channel, list[LinkMeasurement]] = {}
    for row in rows:
        devices = tuple(cluster.device_index(name) for name in row.devices)
        channel = _channel(table, ChannelKind[row.kind.upper()], devices, row.slices)
        if row.while_computing:
            loaded.setdefault(row.kind, []).append(
                row.seconds / max(channel.latency_s, _LEAST_SECONDS)
            )
            for device, seconds in zip(devices, row.device_seconds, strict=True):
                overhead.setdefault(row.kind, {}).setdefault(
                    cluster.devices[device].type.name, []
                ).append(seconds / (len(devices) - 1))
            continue
        by_channel.setdefault(channel, []).append(row)
    rates = _link_rates(
        cluster,
        {
            channel: _seconds_per_byte(members)
            for channel, members in by_channel.items()
            if channel.kind == ChannelKind.POINT_TO_POINT
        },
    )
    factors: dict[str, tuple[float, float]] = {}
    drag: dict[str, dict[str, list[float]]] = {}
    by_kind: dict[ChannelKind, list[tuple[float, float, float]]] = {}
    for channel, members in by_channel.items():
        cost = alpha_beta(cluster, channel, rates)
        for row in members:
            entry = (cost.latency_s, cost.seconds_per_byte * row.num_bytes, row.seconds)
            by_kind.setdefault(channel.kind, []).append(entry)
        largest = max(members, key=lambda row: row.num_bytes)
        lost = drag.setdefault(channel.kind.name.lower(), {})
        for device, seconds in zip(channel.devices, largest.device_seconds, strict=True):
            name = cluster.devices[device].type.name
            lost.setdefault(name, []).append(seconds / largest.num_bytes)
    for kind, entries in by_kind.items():
        factors[kind.name.lower()] = _factors(*np.array(entries).T)
    return LinkFit(
        rates=rates,
        factors=factors,
        drag=_means(drag),
        overhead=_means(overhead),
        # A geometric mean, as values spread over orders of magnitude: who is stopped when varies.
        loaded={kind: float(np.exp(np.mean(np.log(values)))) for kind, values in loaded.items()},
    )


def _link_rates(cluster: Cluster, seconds_per_byte: Mapping[Channel, float]) -> dict[str, float]:
    """Bytes/s of link resources, from transfers that ran alone.

    A transfer gives only the rate of the slowest link of its route. Links that are never the
    slowest keep their nominal rate, times the mean fraction that measured links reach of theirs.
    """
    found: dict[str, list[float]] = {}
    for channel, seconds in seconds_per_byte.items():
        way = [cluster.resources[resource] for resource in channel.traffic()]
        slowest = min(link.bandwidth_bytes_per_s for link in way)
        for link in way:
            if link.bandwidth_bytes_per_s <= 1.01 * slowest:
                found.setdefault(link.name, []).append(1.0 / seconds)
    rates = {name: float(np.median(values)) for name, values in found.items()}
    nominal = {link.name: link.bandwidth_bytes_per_s for link in cluster.resources}
    if rates:
        ratio = float(np.mean([rate / nominal[name] for name, rate in rates.items()]))
        rates = {name: rates.get(name, rate * ratio) for name, rate in nominal.items()}
    return rates


def _measured_as(kind: ChannelKind) -> str:
    """Name under which a kind of channel was measured.

    Both all-reduces are one call of the communication library, which chooses for itself. Ranks
    run an all-to-all by the same sends as an all-gather.
    """
    if kind == ChannelKind.ALL_REDUCE_HIERARCHICAL:
        kind = ChannelKind.ALL_REDUCE_RING
    if kind == ChannelKind.ALL_TO_ALL:
        kind = ChannelKind.ALL_GATHER
    return kind.name.lower()


def _factors(latency: FloatArray, payload: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Factors of the nominal seconds of latency and payload that fit the measurements.

    Medians, as a process that is stopped for a moment makes single measurements meaningless: the
    payload's over the large ones, then the latency's over the small ones.
    """
    is_large = payload >= 0.5 * payload.max()
    is_small = payload <= 2.0 * payload.min()
    of_payload = np.median(seconds[is_large] / payload[is_large])
    rest = seconds[is_small] - of_payload * payload[is_small]
    of_latency = np.median(rest / np.maximum(latency[is_small], _LEAST_SECONDS))
    # Small messages may pass a shaper unhindered; a search would make use of it.
    return max(float(of_latency), 1.0), float(of_payload)


def _channel(
    table: ChannelTable, kind: ChannelKind, devices: tuple[int, ...], slices: tuple[int, ...]
) -> Channel:
    if kind == ChannelKind.POINT_TO_POINT:
        number = devices[0] * table.cluster.num_devices + devices[1]
    elif kind == ChannelKind.REDUCE_SCATTER:
        number = table.reduce_scatter(devices, slices)
    elif kind == ChannelKind.ALL_GATHER:
        number = table.all_gather(devices, slices)
    else:
        number = table.all_reduce(
            devices, hierarchical=kind == ChannelKind.ALL_REDUCE_HIERARCHICAL
        )
    return table[number]


def _seconds_per_byte(rows: Sequence[LinkMeasurement]) -> float:
    """Seconds per byte of the largest payload; latency is fitted later, with the factors."""
    largest = max(rows, key=lambda row: row.num_bytes)
    return largest.seconds / largest.num_bytes


def _columns(rows: Sequence[OpMeasurement]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """FLOPs, bytes and seconds of measurements."""
    table = np.array([(row.flops, row.num_bytes, row.seconds) for row in rows], np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def _mean_seconds(rows: Sequence[OpMeasurement]) -> float:
    """Mean over calls."""
    return sum(row.seconds * row.count for row in rows) / sum(row.count for row in rows)


def _means(by_kind: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Mean loss of each device type, at least 0: a clock may show gains, which do not exist."""
    return {
        kind: {name: max(_mean(values), 0.0) for name, values in by_type.items()}
        for kind, by_type in by_kind.items()
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _kind_fit(record: KindRecord) -> KindFit:
    base, per_flop, per_byte = record.coefficients
    return KindFit(
        coefficients=(base, per_flop, per_byte),
        log_flops=tuple(record.log_flops),
        log_bytes=tuple(record.log_bytes),
        log_ratio=tuple(record.log_ratio),
    )


def _type_fit(record: TypeRecord) -> TypeFit:
    return TypeFit(
        kinds={kind: _kind_fit(each) for kind, each in record.kinds.items()},
        curves={
            signature: (tuple(samples), tuple(seconds))
            for signature, (samples, seconds) in record.curves.items()
        },
        any_kind=_kind_fit(record.any_kind),
        copy_s=(record.copy_s[0], record.copy_s[1]),
    )


def _number_or_nan(value: float | None) -> float:
    """Read NaN, which JSON does not have, from ``None``."""
    return math.nan if value is None else value


def link_error(rows: Iterable[LinkMeasurement], cluster: Cluster) -> dict[str, float]:
    """Error of each kind of transfer and collective at a payload that the fit has not seen.

    The second-largest payload of each kind is left out. Sum of |predicted - measured| over sum of
    measured seconds; kinds with fewer than three payloads have no error.

    Raises:
        ClusterError: the measurements name devices that the cluster does not have.
    """
    payloads: dict[str, set[int]] = {}
    rows = [row for row in rows if not row.while_computing]
    for row in rows:
        payloads.setdefault(row.kind, set()).add(row.num_bytes)
    left_out = {kind: sorted(sizes)[-2] for kind, sizes in payloads.items() if len(sizes) > 2}
    kept = [row for row in rows if left_out.get(row.kind) != row.num_bytes]
    model = Calibration(name="without one payload", types={}, links=fit_links(kept, cluster))
    table = ChannelTable(cluster)
    wrong, measured = dict.fromkeys(left_out, 0.0), dict.fromkeys(left_out, 0.0)
    for row in rows:
        if left_out.get(row.kind) == row.num_bytes:
            devices = tuple(cluster.device_index(name) for name in row.devices)
            channel = _channel(table, ChannelKind[row.kind.upper()], devices, row.slices)
            cost = model.channel_seconds(cluster, channel)
            predicted = cost.latency_s + cost.seconds_per_byte * row.num_bytes
            wrong[row.kind] += abs(predicted - row.seconds)
            measured[row.kind] += row.seconds
    return {kind: wrong[kind] / measured[kind] for kind in left_out}


def extrapolated_by(
    model: Calibration, graph: OpGraph, cluster: Cluster, strategy: Strategy
) -> dict[str, float]:
    """Fraction of a strategy's compute time in each op kind that was never measured near its size.

    Seconds of all devices together. Micro-batches are taken as one.

    Returns:
        Fractions of all compute seconds by op kind, the largest first; empty if all was measured.
    """
    group = group_ops(graph).group
    home_of = {op: home for (op, _, _), home in zip(graph.updates, strategy.homes, strict=True)}
    total = 0.0
    by_kind: dict[str, float] = {}
    for device, device_type in enumerate(
        cluster.device_types[number] for number in cluster.type_index
    ):
        local = np.zeros(graph.num_ops, np.int64)
        for op in range(graph.num_ops):
            decision = strategy.decisions[int(group[op])]
            if home_of.get(op, REPLICATED) not in (REPLICATED, device):
                continue
            if op in home_of and home_of[op] == device:
                local[op] = graph.batch_size  # an update is the same for any share
            elif device in decision.devices:
                local[op] = decision.shares[decision.devices.index(device)]
        for samples in np.unique(local[local > 0]):
            seconds, is_far = model._op_seconds(graph, device_type, int(samples))
            chosen = local == samples
            total += float(seconds[chosen].sum())
            for op in np.flatnonzero(chosen & is_far & (seconds > 0)).tolist():
                name = op_kind(graph, op)
                by_kind[name] = by_kind.get(name, 0.0) + float(seconds[op])
    return {
        name: seconds / total
        for name, seconds in sorted(by_kind.items(), key=lambda entry: -entry[1])
    }
