"""Arrays of integers in files."""

import base64
import zlib
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import Field

from heterog import records
from heterog.errors import InputFileError
from heterog.records import Int32, Integers, Record, packed, parse_record

_Pair = Annotated[list[Int32], Field(min_length=2, max_length=2)]


class Arrays(Record):
    """A document with an array of numbers, and one of pairs."""

    numbers: Annotated[npt.NDArray[np.int32], Integers(Int32)]
    pairs: Annotated[npt.NDArray[np.int32], Integers(_Pair, (2,))]


def read(numbers: Any, pairs: Any) -> Arrays:
    return parse_record({"numbers": numbers, "pairs": pairs}, Arrays, "file f")


@pytest.mark.parametrize("most_listed", [0, 1000])
@pytest.mark.parametrize("size", [0, 1, 100])
def test_arrays_are_read_as_written(
    monkeypatch: pytest.MonkeyPatch, most_listed: int, size: int
) -> None:
    monkeypatch.setattr(records, "_MOST_LISTED", most_listed)
    rng = np.random.default_rng(size)
    numbers = rng.permutation(size).astype(np.int32)
    pairs = rng.integers(0, 2**31 - 1, (size, 2), np.int32, endpoint=True)
    written = packed(numbers), packed(pairs)
    assert isinstance(written[0], str) == (size > most_listed)
    found = read(*written)
    np.testing.assert_array_equal(found.numbers, numbers)
    np.testing.assert_array_equal(found.pairs, pairs)
    assert found.numbers.dtype == found.pairs.dtype == np.int32


def text_of(*steps: int) -> str:
    return base64.b64encode(zlib.compress(np.array(steps, "<i4").tobytes())).decode()


@pytest.mark.parametrize(
    "text",
    [
        "é",
        "AAAA",
        text_of(1, 2)[:-8],
        base64.b64encode(zlib.compress(b"12345")).decode(),
        text_of(-1),
        text_of(2**31 - 1, 1),
        text_of(*[0] * 200),
    ],
    ids=["no base64", "not compressed", "cut off", "odd bytes", "negative", "too large", "long"],
)
def test_a_damaged_array_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(records, "_MOST_PACKED", 100)
    with pytest.raises(InputFileError, match="'numbers' is no packed array of integers"):
        read(text, [])


def test_pairs_are_whole() -> None:
    with pytest.raises(InputFileError, match="'pairs' is no packed array"):
        read([], text_of(1, 2, 3))
