"""The calibrated cost model: measurements on real devices correct the roofline.

Seconds of an op at a local share come from the first of these sources that exists:

1. its *curve*: the same op was measured at several shares; seconds are interpolated between
   these (piecewise linear over the samples);
2. its *kind*: ops of the same kind were measured at other sizes. ``a + b FLOPs + c bytes`` with
   a, b, c >= 0 is fitted by relative errors, then multiplied by the fit's error at the
   measurements nearest in size (Gaussian weights in log FLOPs and log bytes);
3. the *device*: the same fit over the measurements of all kinds.

Seconds from source 2 outside the measured sizes and from source 3 are *extrapolated*;
``extrapolated`` lists such ops.

Links: the rate of a NIC is the rate that transfers over it reached. A collective takes ``latency x
l + bytes x b``; the factors l and b of its kind are fitted to measured collectives at the measured
rates. Communication also takes compute time from its members. *Drag* is the time per byte: on a
CPU that of the threads that move bytes, measured while nothing else ran. *Overhead* is the time
per operation, measured with small operations while all members computed.

The file that ``calibration`` of a cluster names may instead hold device models that were fitted to
recorded runs (``save_run_models``).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field, Strict

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import DEVICE_MODELS, ROOFLINE, Cluster, Execution
from heterog.errors import InputFileError
from heterog.files import MAX_JSON_BYTES, read_json, write_json
from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import FloatArray, OpGraph
from heterog.grouped import grouped
from heterog.lowering.channels import Channel, ChannelKind, ChannelTable
from heterog.pricing.cost_model import ChannelSeconds, CostModel, alpha_beta
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.device_models.parameters import InTraining
from heterog.pricing.intervals import MEDIAN_OF_NORMAL
from heterog.pricing.op_fits import (
    LEAST_SECONDS,
    SCHEMA_VERSION,
    STEP,
    Factor,
    LinkKind,
    LinkMeasurement,
    Measurements,
    TypeFit,
    fit_type,
    held_out_error,
    op_kind,
    signatures,
)
from heterog.pricing.roofline import Roofline
from heterog.records import VALUE, Count, Flag, Name, Record, Text, finite, parse_record
from heterog.strategy.strategy import REPLICATED, Strategy

RUNS = "runs"
"""Value of the field ``kind`` in files of device models; other calibrations lack this field."""

_Factor = Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)]
_Spread = Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)]


class _FactorsRecord(Record):
    products: _Factor
    fused_attention: _Factor
    streams: _Factor
    float32: _Factor
    spread: _Spread


class _RunsRecord(Record):
    schema_version: int
    kind: Literal["runs"]
    name: Text
    execution: Annotated[Execution, Strict(False)]
    host_s: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
    per_member: Annotated[float, Field(ge=0.0, le=1e3, allow_inf_nan=False)] = 0.0
    num_runs: Count
    types: dict[Name, _FactorsRecord]


def save_run_models(path: Path, models: DeviceModels, name: str, num_runs: int) -> None:
    """Write fitted device models."""
    types = {
        kind: {name: getattr(each, name) for name in _FactorsRecord.model_fields}
        for kind, each in models.own_factors.items()
    }
    document = {
        "schema_version": 1,
        "kind": RUNS,
        "name": name,
        "execution": str(models.execution),
        "host_s": models.host.issue_s,
        "per_member": models.host.per_member,
        "num_runs": num_runs,
        "types": types,
    }
    write_json(path, document, indent=2)


def read_run_models(value: object, where: str) -> DeviceModels:
    """The device models that a parsed JSON document describes.

    Raises:
        InputFileError: a field is missing, unknown or wrong.
    """
    record = parse_record(value, _RunsRecord, where, versions=(1,))
    return DeviceModels(
        record.execution,
        host_s=record.host_s,
        per_member=record.per_member,
        in_training={
            kind: InTraining(**each.model_dump(), measured_on=kind)
            for kind, each in record.types.items()
        },
        name=f"device models, {record.num_runs} own runs",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """The fits to measurements of links and collectives.

    Attributes:
        rates: Measured bytes/s of link resources, by name.
        factors: Factors on the nominal seconds of latency and of bytes, by channel kind; those of
            pairs if pairs were measured.
        among_many: The same among more than two members, where such sets were measured. A member
            of a pair waits for one other member, one of a ring for all in turn.
        drag: Seconds of compute lost per payload byte, by channel kind and device type.
        overhead: Seconds of compute that an operation takes from a member for each other member,
            by channel kind and device type.
        loaded: Factor of the latency while a member computes, by channel kind.
    """

    __pydantic_config__: ClassVar = VALUE

    rates: Mapping[Text, Annotated[float, finite(1e-6, 1e24)]]
    factors: Mapping[LinkKind, tuple[Factor, Factor]]
    drag: Mapping[LinkKind, Mapping[Name, Factor]]
    loaded: Mapping[LinkKind, Factor]
    overhead: Mapping[LinkKind, Mapping[Name, Factor]] = field(default_factory=dict)
    among_many: Mapping[LinkKind, tuple[Factor, Factor]] = field(default_factory=dict)


def fit_links(rows: Iterable[LinkMeasurement], cluster: Cluster) -> LinkFit:
    """Fit rates, latencies and drag to measured transfers and collectives.

    Raises:
        ClusterError: the measurements name devices that the cluster does not have.
    """
    table = ChannelTable(cluster)
    measured = [(row, *_measured_channel(table, row)) for row in rows]
    loaded = grouped(
        (row.kind, row.seconds / max(channel.latency_s, LEAST_SECONDS))
        for row, _, channel in measured
        if row.while_computing
    )
    overhead = [
        (row.kind, cluster.devices[device].type.name, seconds / (len(devices) - 1))
        for row, devices, _ in measured
        if row.while_computing
        for device, seconds in zip(devices, row.device_seconds, strict=True)
    ]
    by_channel = grouped((channel, row) for row, _, channel in measured if not row.while_computing)
    largest = {
        channel: max(members, key=lambda row: row.num_bytes)
        for channel, members in by_channel.items()
    }
    # Latencies are fitted later, with the factors.
    rates = _link_rates(
        cluster,
        {
            channel: row.seconds / row.num_bytes
            for channel, row in largest.items()
            if channel.kind == ChannelKind.POINT_TO_POINT
        },
    )
    costs = {channel: alpha_beta(cluster, channel, rates) for channel in by_channel}
    timed = [
        (channel, (cost.latency_s, cost.seconds_per_byte * row.num_bytes, row.seconds))
        for channel, cost in costs.items()
        for row in by_channel[channel]
    ]
    of_pairs = _factors_of_kinds(each for each in timed if len(each[0].devices) == 2)
    drag = [
        (channel.kind.name.lower(), cluster.devices[device].type.name, seconds / row.num_bytes)
        for channel, row in largest.items()
        for device, seconds in zip(channel.devices, row.device_seconds, strict=True)
    ]
    return LinkFit(
        rates=rates,
        factors=_factors_of_kinds(timed) | of_pairs,
        among_many=_factors_of_kinds(each for each in timed if len(each[0].devices) > 2),
        drag=_means(drag),
        overhead=_means(overhead),
        # A geometric mean: values spread over orders of magnitude, as processes are stopped at
        # any time.
        loaded={kind: float(np.exp(np.mean(np.log(values)))) for kind, values in loaded.items()},
    )


def _link_rates(cluster: Cluster, seconds_per_byte: Mapping[Channel, float]) -> dict[str, float]:
    """Bytes/s of link resources, from transfers that ran alone.

    A transfer measures only the slowest link of its route. Links that are never the slowest get
    their nominal rate times the mean ratio of measured to nominal rates.
    """
    found: list[tuple[str, float]] = []
    for channel, seconds in seconds_per_byte.items():
        way = [cluster.resources[resource] for resource in channel.traffic()]
        most = 1.01 * min(link.bandwidth_bytes_per_s for link in way)
        found += [(e.name, 1.0 / seconds) for e in way if e.bandwidth_bytes_per_s <= most]
    rates = {name: float(np.median(values)) for name, values in grouped(found).items()}
    nominal = {link.name: link.bandwidth_bytes_per_s for link in cluster.resources}
    if rates:
        ratio = float(np.mean([rate / nominal[name] for name, rate in rates.items()]))
        rates = {name: rates.get(name, rate * ratio) for name, rate in nominal.items()}
    return rates


def measured_as(kind: ChannelKind) -> str:
    """Name under which a kind of channel was measured.

    Both kinds of all-reduce are one call of the communication library, which chooses the algorithm
    itself. Ranks run an all-to-all by the same sends as an all-gather inside a host.
    """
    if kind == ChannelKind.ALL_REDUCE_HIERARCHICAL:
        kind = ChannelKind.ALL_REDUCE_RING
    if kind == ChannelKind.ALL_TO_ALL:
        kind = ChannelKind.ALL_GATHER
    return kind.name.lower()


def _factors_of_kinds(
    timed: Iterable[tuple[Channel, tuple[float, float, float]]],
) -> dict[str, tuple[float, float]]:
    """Factors of each kind of channel.

    Args:
        timed: Channels with nominal seconds of latency and payload, and measured seconds.
    """
    by_kind = grouped((channel.kind.name.lower(), seconds) for channel, seconds in timed)
    return {kind: _factors(*np.array(each).T) for kind, each in by_kind.items()}


def _factors(latency: FloatArray, payload: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Factors on the nominal seconds of latency and payload that fit the measurements.

    The factor of the payload is a median over large payloads, then that of the latency is a median
    over small ones. Medians, because a process that is stopped for a moment spoils a measurement.
    """
    is_large = payload >= 0.5 * payload.max()
    is_small = payload <= 2.0 * payload.min()
    of_payload = np.median(seconds[is_large] / payload[is_large])
    rest = seconds[is_small] - of_payload * payload[is_small]
    of_latency = np.median(rest / np.maximum(latency[is_small], LEAST_SECONDS))
    # Small messages may pass a traffic shaper unhindered; a search would exploit a factor below 1.
    return max(float(of_latency), 1.0), float(of_payload)


def _measured_channel(
    table: ChannelTable, row: LinkMeasurement
) -> tuple[tuple[int, ...], Channel]:
    """Devices and channel of a measured transfer or collective."""
    kind = ChannelKind[row.kind.upper()]
    devices = tuple(table.cluster.device_index(name) for name in row.devices)
    if kind == ChannelKind.POINT_TO_POINT:
        number = devices[0] * table.cluster.num_devices + devices[1]
    else:
        number = table.collective(kind, devices, row.slices if kind.has_slices else ())
    return devices, table[number]


def _means(losses: Iterable[tuple[str, str, float]]) -> dict[str, dict[str, float]]:
    """Mean loss of each device type by kind, at least 0: a negative loss is an error of the clock.

    Args:
        losses: Kind of channel, device type and loss.
    """
    by_kind = grouped((kind, (name, loss)) for kind, name, loss in losses)
    return {
        kind: {name: max(fmean(values), 0.0) for name, values in grouped(pairs).items()}
        for kind, pairs in by_kind.items()
    }


_RUN_SPREAD = 0.05
"""Standard deviation of log seconds of a step whose ops were all measured."""
_Error: TypeAlias = Annotated[float, finite(0.0, 1e12)] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """A cost model fitted to measurements; see the module.

    Attributes:
        name: Name that is shown with every prediction.
        types: Fits of each device type, by name.
        links: Fits to the links of the measured cluster.
        held_out_error: Errors on data unseen by a first fit, by device type: of ops, and of
            whole models; see the function ``held_out_error``.
        compiled: Whether compiled steps were measured; then all other steps are extrapolated,
            else compiled steps are.
    """

    __pydantic_config__: ClassVar = VALUE

    name: Text
    types: Mapping[Name, TypeFit]
    links: LinkFit
    held_out_error: Mapping[Name, tuple[_Error, _Error]]
    compiled: Flag = False

    def op_seconds(self, graph: OpGraph, device_type: DeviceType, samples: int) -> FloatArray:
        """Seconds of every op at a local share; see ``CostModel``."""
        return self._op_seconds(graph, device_type, samples)[0]

    def _op_seconds(
        self, graph: OpGraph, device_type: DeviceType, samples: int
    ) -> tuple[FloatArray, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Seconds of every op, and whether each is extrapolated."""
        fit = self.types.get(device_type.name)
        if fit is None:
            return Roofline().op_seconds(graph, device_type, samples), ~graph.is_view
        seconds, is_far = fit.work_seconds(graph, *batch_plan(graph).work(samples))
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

        These seconds are always extrapolated, since parts along other axes than the batch are not
        measured. The fit of the op's kind is applied to the part's FLOPs and bytes.
        """
        fit = self.types.get(device_type.name)
        if fit is None:
            return Roofline().work_seconds(graph, device_type, flops, num_bytes)
        return np.where(graph.is_view, 0.0, fit.work_seconds(graph, flops, num_bytes)[0])

    def in_teams(self, members: int) -> CostModel:
        """This model: measured seconds of ops include those of the host."""
        return self

    def alone(self) -> CostModel:
        """This model: ops were measured on one device."""
        return self

    def spread(self, graph: OpGraph, device_type: DeviceType) -> float:
        """Spread from the error on models left out of a fit; the roofline's if there is none.

        What is extrapolated for any share of the batch is known no better than by a roofline: in
        that part, ops of a few kinds err alike, so their errors do not cancel out.
        """
        roofline = Roofline().spread(graph, device_type)
        errors = self.held_out_error.get(device_type.name, ())
        known = [error for error in reversed(errors) if error is not None]
        if not known:
            return roofline
        seconds, is_far = self._op_seconds(graph, device_type, graph.batch_size)
        for parts in (2, 4, 8, 16):  # a plan gives a device a share of the batch
            share = max(1, graph.batch_size // parts)
            is_far &= self._op_seconds(graph, device_type, share)[1]
        extrapolated = float(seconds[is_far].sum()) / max(float(seconds.sum()), LEAST_SECONDS)
        return math.hypot(_RUN_SPREAD, known[0] / MEDIAN_OF_NORMAL, extrapolated * roofline)

    def copy_seconds(self, device_type: DeviceType) -> tuple[float, float]:
        """Fixed seconds and seconds per byte of copies and sums."""
        fit = self.types.get(device_type.name)
        return Roofline().copy_seconds(device_type) if fit is None else fit.copy_s

    def channel_seconds(self, cluster: Cluster, channel: Channel) -> ChannelSeconds:
        """Alpha-beta seconds over measured rates, corrected for the kind of channel."""
        cost = alpha_beta(cluster, channel, self.links.rates)
        kind = measured_as(channel.kind)
        factors = dict(self.links.factors)
        if len(channel.devices) > 2:
            factors |= self.links.among_many
        latency, per_byte = factors.get(kind, (1.0, 1.0))
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
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})

    @staticmethod
    def load(path: str | Path) -> "Calibration":
        """Read what ``save`` wrote.

        Raises:
            InputFileError: the file is missing, broken or of another version.
        """
        value = read_json(path, "calibration", MAX_JSON_BYTES)
        return parse_record(value, Calibration, f"calibration {path}", versions=(SCHEMA_VERSION,))


def cost_model_of(cluster: Cluster) -> CostModel:
    """The cost model that a cluster names: a calibration, the roofline, or device models.

    Raises:
        InputFileError: the named file is missing or broken.
    """
    if cluster.calibration in (None, DEVICE_MODELS):
        return DeviceModels(cluster.execution).on(cluster)
    if cluster.calibration == ROOFLINE:
        return Roofline()
    return model_on(_load_once(cluster.calibration), cluster)


def model_on(model: CostModel, cluster: Cluster) -> CostModel:
    """A cost model on a cluster; device models take from it what uses TF32, for example."""
    return model.on(cluster) if isinstance(model, DeviceModels) else model


@lru_cache(maxsize=8)
def _load_once(path: str) -> CostModel:
    value = read_json(path, "calibration", MAX_JSON_BYTES)
    where = f"calibration {path}"
    if isinstance(value, dict) and value.get("kind") == RUNS:
        return read_run_models(value, where)
    return parse_record(value, Calibration, where, versions=(SCHEMA_VERSION,))


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
    by_type = grouped((row.device_type, row) for row in measurements.ops if row.kind != STEP)
    return Calibration(
        name=name,
        types={kind: fit_type(rows) for kind, rows in by_type.items()},
        links=fit_links(measurements.links, cluster)
        if cluster
        else LinkFit(rates={}, factors={}, drag={}, loaded={}),
        held_out_error={kind: held_out_error(rows) for kind, rows in by_type.items()},
        compiled=measurements.compiled,
    )


def link_error(rows: Iterable[LinkMeasurement], cluster: Cluster) -> dict[str, float]:
    """Error of each kind of transfer and collective at a payload that the fit has not seen.

    The second-largest payload of each kind is left out. The error is the sum of |predicted -
    measured| over the sum of measured seconds; kinds with fewer than three payloads have none.

    Raises:
        ClusterError: the measurements name devices that the cluster does not have.
    """
    rows = [row for row in rows if not row.while_computing]
    payloads = grouped(sorted({(row.kind, row.num_bytes) for row in rows}))
    left_out = {kind: sizes[-2] for kind, sizes in payloads.items() if len(sizes) > 2}
    kept = [row for row in rows if left_out.get(row.kind) != row.num_bytes]
    links = fit_links(kept, cluster)
    model = Calibration(name="without one payload", types={}, links=links, held_out_error={})
    table = ChannelTable(cluster)
    wrong, measured = dict.fromkeys(left_out, 0.0), dict.fromkeys(left_out, 0.0)
    for row in rows:
        if left_out.get(row.kind) == row.num_bytes:
            _, channel = _measured_channel(table, row)
            cost = model.channel_seconds(cluster, channel)
            predicted = cost.latency_s + cost.seconds_per_byte * row.num_bytes
            wrong[row.kind] += abs(predicted - row.seconds)
            measured[row.kind] += row.seconds
    return {kind: wrong[kind] / measured[kind] for kind in left_out}


def extrapolated_by(
    model: Calibration, graph: OpGraph, cluster: Cluster, strategy: Strategy
) -> dict[str, float]:
    """Share of a strategy's compute seconds in each op kind that was never measured near its size.

    Seconds are summed over devices; micro-batches are taken as one. All ops are extrapolated if
    steps are compiled and measurements are not, or the reverse.

    Returns:
        Share of all compute seconds by op kind, the largest first; empty if all was measured.
    """
    group = group_ops(graph).group
    home_of = {op: home for (op, _, _), home in zip(graph.updates, strategy.homes, strict=True)}
    total = 0.0
    by_kind: dict[str, float] = {}
    runs_otherwise = model.compiled != cluster.execution.compiles
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
            for op in np.flatnonzero(chosen & (is_far | runs_otherwise) & (seconds > 0)).tolist():
                name = op_kind(graph, op)
                by_kind[name] = by_kind.get(name, 0.0) + float(seconds[op])
    return {
        name: seconds / total
        for name, seconds in sorted(by_kind.items(), key=lambda entry: -entry[1])
    }
