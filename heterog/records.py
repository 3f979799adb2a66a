"""Strict typed records: the shape of every document that is read from a file.

A kind of file is a ``Record``: its fields, their types and their ranges. Where a dataclass of
heterog has the fields of the file, the dataclass itself is the record or a part of it: its fields
then give the bounds, too, and ``VALUE`` is its ``__pydantic_config__``. ``parse_record`` turns
JSON values into a record or reports in one line which field of which file is wrong. Relations
between fields are checked by the class, or by the reader of the kind.
"""

import base64
import binascii
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, ErrorDetails
from pydantic_core.core_schema import (
    no_info_plain_validator_function,
    no_info_wrap_validator_function,
)

from heterog.errors import HeterogError, InputFileError
from heterog.names import is_identifier, name_fault, shown, text_fault

MAX_INT32 = 2**31 - 1
_MOST_DEPTH = 16
_MOST_LISTED = 200_000
"""Most integers that a file lists one by one: each takes 100 bytes while it is read."""
_MOST_PACKED = 2**26
_MOST_SHOWN = 300


STRICT = ConfigDict(extra="forbid", strict=True)
"""No unknown field, no value of another type; ``__pydantic_config__`` of a dataclass."""
VALUE = ConfigDict(extra="forbid")
"""Like ``STRICT``, for a dataclass that is part of a record: lists become tuples, words become
enums. Its numbers and words have the types below, which are strict themselves."""


class Record(BaseModel):
    """A document or a part of one: no unknown field, no value of another type."""

    model_config = ConfigDict(**STRICT, frozen=True)


def refusing(fault_of: Callable[[Any], str | None]) -> AfterValidator:
    """Marks a field whose values a function may refuse: it returns what is wrong, or ``None``."""

    def checked(value: Any) -> Any:
        if (fault := fault_of(value)) is not None:
            raise ValueError(fault)
        return value

    return AfterValidator(checked)


def _identifier_fault(value: str) -> str | None:
    fault = "is not the name of a class: letters, digits, _ and dots"
    return None if is_identifier(value) else fault


def _json_fault(value: Any, depth: int = _MOST_DEPTH) -> str | None:
    """Faults of JSON: nested deeper than any file needs, numbers not finite, no valid text."""
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


def within(low: float, high: float, **more: Any) -> Any:
    """The bounds of an annotated number; ``more`` is what pydantic's ``Field`` takes."""
    return Field(ge=low, le=high, strict=True, **more)


def finite(low: float, high: float) -> Any:
    """The bounds of a float, which has to be finite, too."""
    return within(low, high, allow_inf_nan=False)


@dataclass(frozen=True)
class MadeBy:
    """Marks a field whose value a function makes from JSON."""

    read: Callable[[Any], object]

    def __get_pydantic_core_schema__(self, kind: object, handler: object) -> CoreSchema:
        return no_info_plain_validator_function(self.read)


@dataclass(frozen=True)
class Integers:
    """Marks an array of 32-bit integers that ``packed`` has written.

    Attributes:
        row: Type of the entries of a list in JSON.
        shape: Shape of a row; empty for single integers.
    """

    row: Any
    shape: tuple[int, ...] = ()

    def __get_pydantic_core_schema__(
        self, kind: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        list_of = Annotated[list[self.row], FailFast()]  # type: ignore[name-defined]
        return no_info_wrap_validator_function(self._read, handler.generate_schema(list_of))

    def _read(self, value: object, listed: Callable[[Any], list[Any]]) -> npt.NDArray[np.int32]:
        if not isinstance(value, str):
            return np.array(listed(value), np.int32).reshape(-1, *self.shape)
        try:
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(
                base64.b64decode(value, validate=True), 4 * _MOST_PACKED
            )
            steps = np.frombuffer(content, "<i4").reshape(-1, *self.shape)
        except (binascii.Error, zlib.error, ValueError) as error:
            raise ValueError("is no packed array of integers") from error
        rows = steps.cumsum(0, dtype=np.int64)
        is_whole = unpacking.eof and not unpacking.unused_data
        if not is_whole or (rows.size and not 0 <= rows.min() <= rows.max() <= MAX_INT32):
            raise ValueError("is no packed array of integers")
        return rows.astype(np.int32)


def packed(rows: npt.NDArray[np.int32]) -> list[Any] | str:
    """An array of integers as JSON: a list, or text where that would take too much memory.

    The text is base64 of the compressed differences between rows, as little-endian integers.
    """
    if rows.size <= _MOST_LISTED:
        listed: list[Any] = rows.tolist()
        return listed
    steps = np.diff(rows, axis=0, prepend=np.zeros_like(rows[:1])).astype("<i4")
    return base64.b64encode(zlib.compress(steps.tobytes())).decode()


def member_of(kind: Iterable[Enum]) -> MadeBy:
    """Marks a field that names a member of an enumeration, in small letters."""
    known = {each.name.lower(): each for each in kind}

    def read(word: object) -> Enum:
        if not isinstance(word, str) or word not in known:
            raise ValueError(f"is {shown(word)}, none of {', '.join(known)}")
        return known[word]

    return MadeBy(read)


Many: TypeAlias = Annotated[list[_T], FailFast()]
"""A list that is refused at its first wrong entry: there may be millions."""
Series: TypeAlias = Annotated[tuple[_T, ...], FailFast()]
"""Like ``Many``, for a tuple in a dataclass."""
Flag: TypeAlias = Annotated[bool, Strict()]
Word: TypeAlias = Annotated[str, Strict()]
Name: TypeAlias = Annotated[str, Strict(), refusing(name_fault)]
"""A legal name; see ``names``."""
Text: TypeAlias = Annotated[str, Strict(), refusing(text_fault)]
"""One printable line, perhaps an empty one."""
Identifier: TypeAlias = Annotated[str, Strict(), refusing(_identifier_fault)]
Json: TypeAlias = Annotated[Any, refusing(_json_fault)]
"""Any value of JSON, not nested deeply."""
Int32: TypeAlias = Annotated[int, within(0, MAX_INT32)]
"""A count or an index in the kernels' range."""
Count: TypeAlias = Annotated[int, within(1, MAX_INT32)]
NumBytes: TypeAlias = Annotated[int, within(0, 2**53)]
"""Up to 8 PiB, which a float still represents exactly."""
Amount: TypeAlias = Annotated[float, finite(0.0, 1e24)]
"""FLOPs or bytes: far above any step, far below values whose sum would overflow."""
Seconds: TypeAlias = Annotated[float, finite(0.0, 1e9)]
"""Up to thirty years."""
PositiveSeconds: TypeAlias = Annotated[
    float, Field(gt=0.0, le=1e9, allow_inf_nan=False, strict=True)
]
Number: TypeAlias = Annotated[float, finite(-1e30, 1e30)]
Share: TypeAlias = Annotated[float, finite(0.0, 1.0)]

_V = TypeVar("_V")


def parse_record(
    value: object, kind: type[_V], where: str, *, versions: tuple[int, ...] = ()
) -> _V:
    """The record of JSON values.

    Args:
        value: Value of a JSON text.
        kind: Class of the record; or a dataclass, which has no field for the version.
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
        if is_dataclass(kind) and versions:
            value = {key: each for key, each in value.items() if key != "schema_version"}
        return cast(_V, _adapter(cast(type, kind)).validate_python(value))
    except ValidationError as error:
        raise InputFileError(f"{where}: {first_fault(error)}") from error
    except HeterogError as error:  # of a class that checks its own fields
        raise InputFileError(f"{where}: {error}") from error
    except RecursionError as error:
        raise InputFileError(f"{where}: it is nested too deeply.") from error


def stated(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record that have a value; a file leaves the others out.

    >>> stated({"name": "a", "price": None})
    {'name': 'a'}
    """
    return {name: value for name, value in record.items() if value is not None}


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


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
        return cast(_V, _adapter(cast(type, kind)).validate_json(json.dumps(value)))
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
    if kind == "dataclass_type":  # pydantic's message would name a class
        return f"field '{field}' should be a valid dictionary, got {shown(details['input'])}"
    message = details["msg"].removeprefix("Input ")
    return f"field '{field}' {message[:1].lower()}{message[1:]}, got {shown(details['input'])}"


def field_name(place: Sequence[int | str]) -> str:
    """The place of a fault as ``ops.3.kind``, without pydantic's own additions."""
    text = ".".join(str(part) for part in place if part not in _BRANCHES)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


# The branches of a union ("int", "str") are no fields of the file.
_BRANCHES = frozenset({"int", "str", "float", "list", "bool", "[key]", "<seconds>", "<points>"})
