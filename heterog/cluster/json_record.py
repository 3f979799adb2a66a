"""A cluster from JSON values, as plans and requests carry it."""

from typing import Annotated

from pydantic import Field

from heterog.cluster.hardware import (
    MAX_DEVICES,
    MAX_PAIRS,
    MOST_BYTES,
    Device,
    DeviceType,
    Host,
    HourlyPrices,
    PairLimit,
)
from heterog.cluster.schema import (
    ExecutionWord,
    FilePath,
    SendsWord,
    Tf32Word,
)
from heterog.cluster.topology import SCHEMA_VERSION, Cluster, Execution, Sends, Tf32
from heterog.errors import ClusterError, InputFileError
from heterog.records import Int32, Record, parse_record


class _DeviceRecord(Record):
    name: str
    type_index: Int32
    host_index: Int32
    usable_memory_bytes: Annotated[int, Field(gt=0, le=MOST_BYTES)]


class _ClusterRecord(Record):
    schema_version: int
    name: str
    efficiency: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    calibration: FilePath | None
    sends: SendsWord = "overlapped"
    execution: ExecutionWord = "eager"
    tf32: Tf32Word = "convolutions"
    device_types: Annotated[list[DeviceType], Field(max_length=MAX_DEVICES)]
    hosts: Annotated[list[Host], Field(max_length=MAX_DEVICES)]
    devices: Annotated[list[_DeviceRecord], Field(max_length=MAX_DEVICES)]
    pairs: Annotated[list[PairLimit], Field(default_factory=list, max_length=MAX_PAIRS)]
    prices: HourlyPrices | None = None


def cluster_from_dict(record: object) -> Cluster:
    """A cluster from JSON values; see ``Cluster.from_dict``."""
    try:
        found = parse_record(record, _ClusterRecord, "cluster record", versions=(SCHEMA_VERSION,))
    except InputFileError as error:
        raise ClusterError(str(error)) from error
    types = found.device_types
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
        hosts=tuple(found.hosts),
        devices=tuple(devices),
        efficiency=found.efficiency,
        calibration=found.calibration,
        sends=Sends(found.sends),
        execution=Execution(found.execution),
        tf32=Tf32(found.tf32),
        pairs=tuple(found.pairs),
        prices=found.prices,
    )
