"""A cluster from JSON values, as plans and requests carry it."""

from typing import Annotated, Any

from pydantic import Field

from heterog.cluster.hardware import (
    MAX_DEVICES,
    MAX_PAIRS,
    Device,
    DeviceType,
    Host,
    Link,
    PairLimit,
    SlowedCollectives,
)
from heterog.cluster.prices import HourlyPrices
from heterog.cluster.schema import (
    MOST_BYTES,
    NOT_NEGATIVE,
    POSITIVE,
    CollectivesSpec,
    ExecutionWord,
    FilePath,
    SendsWord,
    Tf32Word,
)
from heterog.cluster.topology import SCHEMA_VERSION, Cluster, Execution, Sends, Tf32
from heterog.errors import ClusterError, InputFileError
from heterog.records import Int32, Record, parse_record

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
    collectives: CollectivesSpec | None = None


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
    calibration: FilePath | None
    sends: SendsWord = "overlapped"
    execution: ExecutionWord = "eager"
    tf32: Tf32Word = "convolutions"
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
        hosts=tuple(map(_host, found.hosts)),
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


def _host(record: _HostRecord) -> Host:
    parts: dict[str, Any] = {"intra": Link(**record.intra.model_dump())}
    if record.collectives is not None:
        parts["collectives"] = SlowedCollectives(**record.collectives.model_dump())
    return Host(**(record.model_dump() | parts))
