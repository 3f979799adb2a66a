"""Schema of a graph's file: its records, each checked alone (``serialize`` explains them)."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Strict, Tag, ValidationInfo, field_validator

from heterog.errors import GraphError
from heterog.graph.op_graph import MAX_BATCH_SIZE
from heterog.graph.placement import Arg, TensorRef
from heterog.graph.sparse_pattern import MOST_COLUMNS, SparsePattern
from heterog.names import shown
from heterog.records import (
    Amount,
    Identifier,
    Int32,
    Many,
    Name,
    Record,
    Seconds,
    Text,
    field_name,
)

_MOST_ARG_DEPTH = 8


_Share = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]


class _TensorRecord(Record):
    shape: list[Int32]
    dtype: str
    kind: Literal["activation", "parameter", "buffer", "batch", "constant", "gradient"] = (
        "activation"
    )
    name: Text = ""
    placement: str | None = None
    batch_dim: Int32 | None = None


class RuleRecord(Record):
    """Placements that the file states for an op."""

    inputs: list[str]
    outputs: list[str]


_Point = Annotated[tuple[_Share, Seconds], Strict(False)]  # JSON has lists only
_Curve = Annotated[list[_Point], Field(min_length=1, max_length=1000)]
_Measured = Annotated[
    Annotated[Seconds, Tag("<seconds>")] | Annotated[_Curve, Tag("<points>")],
    Discriminator(lambda value: "<points>" if isinstance(value, list) else "<seconds>"),
]


class OpRecord(Record):
    """An op of the file."""

    kind: Text | int
    inputs: list[int | str]
    outputs: list[int | str] | None = None
    phase: Literal["forward", "backward", "update"] | None = None
    module: Text | int = ""
    args: dict[str, Any] = Field(default_factory=dict)
    flops: Amount = 0.0
    bytes_read: Amount | None = None
    bytes_written: Amount | None = None
    rule: RuleRecord | None = None
    batch_dims: list[Int32 | None] | None = None
    measured_s: dict[Name, _Measured] = Field(default_factory=dict)
    name: Text = ""


class _PatternRecord(Record):
    num_columns: Annotated[int, Field(ge=1, le=MOST_COLUMNS)]
    row_entries: Many[Annotated[int, Field(ge=0, le=MOST_COLUMNS)]]
    columns: Many[Int32]

    def pattern(self) -> SparsePattern:
        """Check the entries and make the pattern."""
        starts = np.zeros(len(self.row_entries) + 1, np.int64)
        np.cumsum(np.array(self.row_entries, np.int64), out=starts[1:])
        return SparsePattern(starts, np.array(self.columns, np.int32), self.num_columns)


_Ratio = Annotated[float, Field(ge=0.0, le=1e3, allow_inf_nan=False)]


class GraphRecord(Record):
    """The whole file."""

    schema_version: int
    name: Name
    source: Text = ""
    batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]
    optimizer: Identifier
    optimizer_state_ratio: _Ratio
    loss: int | str
    kinds: Many[Text] = Field(default_factory=list)
    modules: Many[Text] = Field(default_factory=list)
    tensors: Many[_TensorRecord]
    ops: Many[OpRecord]
    patterns: list[_PatternRecord] = Field(default_factory=list)
    master_dtype: Text = ""
    optimizer_step_ratios: list[_Ratio] = Field(
        default_factory=lambda: [0.0, 0.0], min_length=2, max_length=2
    )
    update_scope: Literal["element", "parameter", "model"] | None = None

    @field_validator("tensors", "ops", mode="before")
    @classmethod
    def _of_columns(cls, value: object, info: ValidationInfo) -> object:
        """Convert columns to a list of records; returns anything else unchanged."""
        if not isinstance(value, dict):
            return value
        lengths = {name: len(v) if isinstance(v, list) else -1 for name, v in value.items()}
        if len(set(lengths.values())) > 1 or -1 in lengths.values():
            raise GraphError(
                f"the columns of '{info.field_name}' must be lists of one length; they have "
                + ", ".join(
                    f"{field_name([name])}: {n if n >= 0 else 'no list'}"
                    for name, n in list(lengths.items())[:20]
                )
                + "."
            )
        return [
            {name: entry for name, entry in zip(value, row, strict=True) if entry is not None}
            for row in zip(*value.values(), strict=True)
        ]


def arg_to_json(value: Arg) -> Any:
    """An argument of an op as JSON values."""
    if isinstance(value, TensorRef):
        return {"t": int(value.index)}
    if isinstance(value, tuple):
        return [arg_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"f": str(value)}
    return value


def arg_from_json(
    value: object, num_inputs: int, op: Callable[[], str], depth: int = _MOST_ARG_DEPTH
) -> Arg:
    """The inverse of ``arg_to_json`` for an op with ``num_inputs`` inputs.

    Raises:
        GraphError: no op has such an argument.
    """
    if isinstance(value, list) and depth > 0:
        return tuple(arg_from_json(item, num_inputs, op, depth - 1) for item in value)
    if value is None or isinstance(value, bool):
        return value
    # JSON can spell half a character, which cannot be written to a file.
    if isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value):
        return value
    if isinstance(value, int) and value.bit_length() <= 64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, dict) and len(value) == 1:
        reference, special = value.get("t"), value.get("f")
        if type(reference) is int and 0 <= reference < num_inputs:
            return TensorRef(reference)
        if special in ("inf", "-inf", "nan"):
            return float(special)
    text = str(value)[:60] if isinstance(value, dict) and len(value) == 1 else shown(value)
    raise GraphError(
        f'{op()} has the argument {text}; an object must be {{"t": n}} with n below its '
        f'{num_inputs} inputs, or {{"f": "inf"}}, "-inf" or "nan", and lists nest at most '
        f"{_MOST_ARG_DEPTH} deep."
    )
