"""Strict typed records: the shape of every document that is read from a file.

A kind of file is a ``Record``: its fields, their types and their ranges. ``parse_record`` turns
JSON values into one or reports in one line which field of which file is wrong. Relations between
fields are checked by the reader of the kind, which also makes the objects that the rest of
heterog works with.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails

from heterog.errors import InputFileError
from heterog.files import MAX_JSON_BYTES, read_json
from heterog.names import is_identifier, name_fault, shown, text_fault

MAX_INT32 = 2**31 - 1
_MOST_DEPTH = 16
_MOST_SHOWN = 300


STRICT = ConfigDict(extra="forbid", strict=True)
"""No unknown field, no value of another type; ``__pydantic_config__`` of a dataclass."""


class Record(BaseModel):
    """A document or a part of one: no unknown field, no value of another type."""

    model_config = ConfigDict(**STRICT, frozen=True)


def _checked_name(value: str) -> str:
    if (fault := name_fault(value)) is not None:
        raise ValueError(fault)
    return value


def _checked_text(value: str) -> str:
    if (fault := text_fault(value)) is not None:
        raise ValueError(fault)
    return value


def _checked_identifier(value: str) -> str:
    if not is_identifier(value):
        raise ValueError("is not the name of a class: letters, digits, _ and dots")
    return value


def _checked_json(value: Any) -> Any:
    """JSON nested no deeper than any file needs, with finite numbers and printable text."""
    if (fault := _json_fault(value, _MOST_DEPTH)) is not None:
        raise ValueError(fault)
    return value


def _json_fault(value: Any, depth: int) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a finite number"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"has {value.bit_length()} bits; numbers have at most 64"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "is not valid Unicode"
        return None
    if not isinstance(value, dict | list):
        return None
    if depth == 0:
        return f"nests more than {_MOST_DEPTH} levels deep"
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    return next(
        (why for each in inside if (why := _json_fault(each, depth - 1)) is not None), None
    )


_T = TypeVar("_T")

Many: TypeAlias = Annotated[list[_T], FailFast()]
"""A list that is refused at its first wrong entry: there may be millions."""
Name: TypeAlias = Annotated[str, AfterValidator(_checked_name)]
"""A legal name; see ``names``."""
Text: TypeAlias = Annotated[str, AfterValidator(_checked_text)]
"""One printable line, perhaps an empty one."""
Identifier: TypeAlias = Annotated[str, AfterValidator(_checked_identifier)]
Json: TypeAlias = Annotated[Any, AfterValidator(_checked_json)]
"""Any value of JSON, not nested deeply."""
Int32: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT32)]
"""A count or an index in the kernels' range."""
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_INT32)]
NumBytes: TypeAlias = Annotated[int, Field(ge=0, le=2**53)]
"""Up to 8 PiB, which a float still represents exactly."""
Amount: TypeAlias = Annotated[float, Field(ge=0.0, le=1e24, allow_inf_nan=False)]
"""FLOPs or bytes: far above any step, far below values whose sum would overflow."""
Seconds: TypeAlias = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]
"""Up to thirty years."""
PositiveSeconds: TypeAlias = Annotated[float, Field(gt=0.0, le=1e9, allow_inf_nan=False)]
Number: TypeAlias = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]

_R = TypeVar("_R", bound=Record)
_V = TypeVar("_V")


def read_record(
    path: str | Path,
    what: str,
    kind: type[_R],
    *,
    versions: tuple[int, ...] = (1,),
    most_bytes: int = MAX_JSON_BYTES,
) -> _R:
    """Read a file of a kind.

    Args:
        path: JSON file, compressed or not.
        what: Kind of file in words, for messages.
        kind: Record of the kind.
        versions: Values of ``schema_version`` that this heterog reads.
        most_bytes: Largest size, unpacked.

    Raises:
        InputFileError: the file cannot be read, or a field is missing, unknown or wrong.
    """
    value = read_json(path, what, most_bytes)
    return parse_record(value, kind, f"{what} {path}", versions=versions)


def parse_record(
    value: object, kind: type[_R], where: str, *, versions: tuple[int, ...] = ()
) -> _R:
    """The record of JSON values.

    Args:
        value: Value of a JSON text.
        kind: Class of the record.
        where: Beginning of every message: the kind and name of the file.
        versions: Values of ``schema_version`` that are read, if the record has one.

    Raises:
        InputFileError: a field is missing, unknown or wrong.
    """
    if not isinstance(value, dict):
        raise InputFileError(f"{where} holds {shown(value)}, not a JSON object.")
    version = value.get("schema_version")
    if versions and (type(version) is not int or version not in versions):
        reads = " to ".join(map(str, sorted({versions[0], versions[-1]})))
        raise InputFileError(
            f"{where} has schema_version {shown(version)}; this heterog reads {reads}."
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise InputFileError(f"{where}: {first_fault(error)}") from error
    except RecursionError as error:
        raise InputFileError(f"{where}: it is nested too deeply.") from error


def parse_dataclass(value: object, kind: type[_V], where: str) -> _V:
    """The dataclass of JSON values, such as a request.

    Args:
        value: Value of a JSON text.
        kind: The class; with ``STRICT`` as its ``__pydantic_config__`` no field may be unknown or
            of another type.
        where: Beginning of every message.

    Raises:
        InputFileError: a field is missing, unknown or wrong.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value))
    except ValidationError as error:
        raise InputFileError(f"{where}: {first_fault(error)}") from error


def first_fault(error: ValidationError) -> str:
    """The first fault of a record, in words, and the number of further ones."""
    errors = error.errors(include_url=False)
    more = f" ({len(errors) - 1} more after this one)" if len(errors) > 1 else ""
    return f"{_in_words(errors[0])}{more}."


def _in_words(details: ErrorDetails) -> str:
    field = field_name(details["loc"])
    kind = details["type"]
    if kind == "missing":
        return f"field '{field}' is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown field '{field}'"
    if kind == "value_error":
        return f"field '{field}' {details['ctx']['error']}"
    message = details["msg"].removeprefix("Input ")
    return f"field '{field}' {message[:1].lower()}{message[1:]}, got {shown(details['input'])}"


def field_name(place: Sequence[int | str]) -> str:
    """The place of a fault as ``ops.3.kind``, without pydantic's own additions."""
    text = ".".join(str(part) for part in place if part not in _BRANCHES)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


# The branches of a union ("int", "str") are no fields of the file.
_BRANCHES = frozenset({"int", "str", "float", "list", "bool", "[key]", "<seconds>", "<points>"})
