"""The format of measurements and calibrations on disk, with the bounds of their numbers."""

from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from heterog.lowering.channels import ChannelKind
from heterog.records import (
    Amount,
    Count,
    Int32,
    Many,
    Name,
    Number,
    NumBytes,
    PositiveSeconds,
    Record,
    Seconds,
    Text,
)

WITHOUT_SIGNATURE = ("copy", "step")
"""Kinds of rows that do not belong to a single op."""


def _checked_kind(value: str) -> str:
    known = [kind.name.lower() for kind in ChannelKind]
    if value not in known:
        raise ValueError(f"is none of {', '.join(known)}")
    return value


_LinkKind = Annotated[str, AfterValidator(_checked_kind)]
_Rate = Annotated[float, Field(ge=1e-6, le=1e24, allow_inf_nan=False)]
_Factor = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]
_Log = Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)]
_LogRatio = Annotated[float, Field(ge=-50.0, le=50.0, allow_inf_nan=False)]
_Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")]


class OpRecord(Record):
    """One measured op."""

    device_type: Name
    model: Text
    signature: _Signature
    kind: Text
    samples: Count
    flops: Amount
    num_bytes: Amount
    seconds: PositiveSeconds
    count: Count

    @model_validator(mode="after")
    def _is_of_an_op(self) -> "OpRecord":
        if not self.signature and self.kind not in WITHOUT_SIGNATURE:
            raise ValueError("has no signature of its op")
        return self


class LinkRecord(Record):
    """One measured transfer or collective."""

    kind: _LinkKind
    devices: Annotated[list[Name], Field(min_length=2, max_length=512)]
    slices: Annotated[list[Int32], Field(max_length=512)]
    num_bytes: NumBytes
    seconds: PositiveSeconds
    device_seconds: Annotated[list[Number], Field(max_length=512)]
    while_computing: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> "LinkRecord":
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
        return self


class MeasurementsRecord(Record):
    """The file that ``heterog profile`` writes."""

    schema_version: int
    environment: dict[str, Text]
    ops: Many[OpRecord]
    links: Many[LinkRecord] = Field(default_factory=list)
    cluster: dict[str, Any] | None = None


class KindRecord(Record):
    """A fit to ops of one kind."""

    coefficients: Annotated[list[_Factor], Field(min_length=3, max_length=3)]
    log_flops: Annotated[Many[_Log], Field(min_length=1)]
    log_bytes: Annotated[Many[_Log], Field(min_length=1)]
    log_ratio: Annotated[Many[_LogRatio], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_of_one_length(self) -> "KindRecord":
        if not len(self.log_flops) == len(self.log_bytes) == len(self.log_ratio):
            raise ValueError("has log_flops, log_bytes and log_ratio of different lengths")
        return self


_Curve = Annotated[list[Many[Seconds]], Field(min_length=2, max_length=2)]


class TypeRecord(Record):
    """A fit to one device type."""

    kinds: dict[Text, KindRecord]
    curves: dict[_Signature, _Curve]
    any_kind: KindRecord
    copy_s: Annotated[list[_Factor], Field(min_length=2, max_length=2)]

    @model_validator(mode="after")
    def _has_curves(self) -> "TypeRecord":
        for signature, (samples, seconds) in self.curves.items():
            rises = all(before < after for before, after in pairwise(samples))
            if not samples or len(samples) != len(seconds) or not rises or samples[0] <= 0.0:
                raise ValueError(
                    f"has a curve '{signature}' that is not rising samples with a time each"
                )
        return self


_PerType = dict[Name, _Factor]


class LinkFitRecord(Record):
    """A fit to links."""

    rates: dict[Text, _Rate]
    factors: dict[_LinkKind, Annotated[list[_Factor], Field(min_length=2, max_length=2)]]
    drag: dict[_LinkKind, _PerType]
    loaded: dict[_LinkKind, _Factor]
    overhead: dict[_LinkKind, _PerType] = Field(default_factory=dict)


_Error = Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]


class CalibrationRecord(Record):
    """The file that ``heterog calibrate`` writes."""

    schema_version: int
    name: Text
    types: dict[Name, TypeRecord]
    links: LinkFitRecord
    held_out_error: dict[Name, Annotated[list[_Error | None], Field(min_length=2, max_length=2)]]
