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

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import DEVICE_MODELS, ROOFLINE, Cluster
from heterog.errors import InputFileError
from heterog.files import MAX_JSON_BYTES, read_json, write_json
from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import FloatArray, OpGraph
from heterog.lowering.channels import Channel, ChannelKind, ChannelTable
from heterog.pricing.calibration_files import CalibrationRecord, KindRecord, TypeRecord
from heterog.pricing.collectives import alpha_beta
from heterog.pricing.cost_model import ChannelSeconds, CostModel
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.device_models.run_file import RUNS, read_run_models
from heterog.pricing.intervals import MEDIAN_OF_NORMAL
from heterog.pricing.link_fits import LinkFit, fit_links, measured_as, measured_channel
from heterog.pricing.measurements import (
    SCHEMA_VERSION,
    STEP,
    LinkMeasurement,
    Measurements,
    OpMeasurement,
    op_kind,
)
from heterog.pricing.op_fits import KindFit, TypeFit, fit_type, held_out_error, signatures
from heterog.pricing.roofline import Roofline
from heterog.records import parse_record
from heterog.strategy.strategy import REPLICATED, Strategy

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
            for index, signature in enumerate(signatures(graph)):
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

    def in_teams(self, members: int) -> CostModel:
        """The same: what was measured holds the host."""
        return self

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
        kind = measured_as(channel.kind)
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
            channel = measured_channel(table, ChannelKind[row.kind.upper()], devices, row.slices)
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
