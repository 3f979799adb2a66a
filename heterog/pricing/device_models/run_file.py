"""Device models fitted to recorded runs, as a file for ``calibration`` of a cluster."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from heterog.cluster.execution import Execution
from heterog.files import write_json
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.device_models.parameters import InTraining
from heterog.records import Count, Name, Record, Text, parse_record

RUNS = "runs"
"""Value of the field ``kind``, which no other calibration has."""

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
    execution: Literal["eager", "megatron", "compiled"]
    host_s: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
    per_member: Annotated[float, Field(ge=0.0, le=1e3, allow_inf_nan=False)] = 0.0
    num_runs: Count
    types: dict[Name, _FactorsRecord]


def save_run_models(path: Path, models: DeviceModels, name: str, num_runs: int) -> None:
    """Write fitted device models."""
    types = {
        kind: {
            "products": each.products,
            "fused_attention": each.fused_attention,
            "streams": each.streams,
            "float32": each.float32,
            "spread": each.spread,
        }
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
    """Device models of JSON values.

    Raises:
        InputFileError: a field is missing, unknown or wrong.
    """
    record = parse_record(value, _RunsRecord, where, versions=(1,))
    return DeviceModels(
        Execution(record.execution),
        host_s=record.host_s,
        per_member=record.per_member,
        in_training={
            kind: InTraining(**each.model_dump(), measured_on=kind)
            for kind, each in record.types.items()
        },
        name=f"device models, {record.num_runs} own runs",
    )
