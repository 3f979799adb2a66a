"""Fields of a cluster file: quantities with units, and mappings that refuse unknown fields."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from heterog.errors import HeterogError
from heterog.names import shown
from heterog.units import parse_bandwidth, parse_bytes, parse_flops_per_s, parse_seconds


def reading(parse: Callable[[Any], Any]) -> BeforeValidator:
    """Lets pydantic report the errors of ``parse`` for a value, with the place of that value."""

    def read(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise PydanticCustomError(
                "value", "got {text}; write a number or a text", {"text": shown(value)}
            )
        try:
            return parse(value)
        except HeterogError as error:
            raise PydanticCustomError(
                "value", "{text}", {"text": str(error).rstrip(".")}
            ) from error
        except (ValueError, OverflowError) as error:  # of float, which quotes all of a text
            raise PydanticCustomError(
                "value", "{text} is no number", {"text": shown(value)}
            ) from error

    return BeforeValidator(read)


# Far above any machine, far below where sums and quotients leave the range of floats.
POSITIVE = Field(gt=0, le=1e24, allow_inf_nan=False)
NOT_NEGATIVE = Field(ge=0, le=1e6, allow_inf_nan=False)
MOST_BYTES = 2**60

Bandwidth: TypeAlias = Annotated[float, reading(parse_bandwidth), POSITIVE]
Speed: TypeAlias = Annotated[float, reading(parse_flops_per_s), POSITIVE]
Seconds: TypeAlias = Annotated[float, reading(parse_seconds), NOT_NEGATIVE]
Bytes: TypeAlias = Annotated[int, reading(parse_bytes), Field(gt=0, le=MOST_BYTES)]
BytesOrZero: TypeAlias = Annotated[int, reading(parse_bytes), Field(ge=0, le=MOST_BYTES)]
Share: TypeAlias = Annotated[float, reading(float), Field(gt=0, le=1, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=4096, strict=True)]
Dtype: TypeAlias = Literal["float64", "float32", "float16", "bfloat16"]
Peaks: TypeAlias = Annotated[
    dict[Dtype, Speed],
    # A bare number is the float32 peak.
    BeforeValidator(lambda value: value if isinstance(value, dict) else {"float32": value}),
]


class Spec(BaseModel):
    """A mapping of the file; refuses unknown fields, naming the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, value: object) -> object:
        known = list(cls.model_fields)
        for key in value if isinstance(value, dict) else ():
            if key not in known:
                close = get_close_matches(str(key), known, n=1, cutoff=0.4)
                hint = f"; did you mean '{close[0]}'?" if close else "."
                raise PydanticCustomError(
                    "unknown_field",
                    "unknown field{hint} Known: {known}",
                    {"field": key, "hint": hint, "known": ", ".join(known)},
                )
        return value
