"""Recorded runs as a table in a file: model, cluster, layout, and measurements.

A CSV file with a head line and a row for each run:

``model``
    a zoo name or a captured graph (``.json``, ``.json.gz``); no Python file, which would be run.
``batch_size``
    samples of a step; empty for the model's own.
``cluster``
    a preset or a cluster file.
``layout``
    as ``heterog plan`` takes it: ``tp=2,pp=2,micro_batch=1``; empty for data parallelism.
``seconds``
    seconds of a step: the median of many, warm.
``peak_bytes``
    the largest peak of a device; empty if not recorded.
``execution``
    program that ran it: ``eager``, ``megatron`` or ``compiled``; empty for what the cluster file
    says.
``family``
    name under which errors are reported together; empty for the model's name.

Other columns are ignored. What a column would say of every row may be given once instead.
"""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from heterog.errors import InputFileError
from heterog.files import read_bytes
from heterog.names import shown
from heterog.records import Count, NumBytes, PositiveSeconds, Record, Text, parse_record

COLUMNS = (
    "model",
    "batch_size",
    "cluster",
    "layout",
    "seconds",
    "peak_bytes",
    "execution",
    "family",
)
_NUMBERS = {"batch_size": int, "seconds": float, "peak_bytes": int}
_MOST_BYTES = 64 * 2**20
_MOST_ROWS = 100_000


class RecordedRun(Record):
    """One row of the table; see the module.

    Attributes:
        line: Line of the file, for messages.
        model: Zoo name or file, or what was given for all rows.
        batch_size: Samples of a step; ``None`` for the model's own.
        cluster: Preset or file, or what was given for all rows.
        layout: Layout as text; empty for data parallelism.
        seconds: Seconds of a step.
        peak_bytes: Largest peak of a device; ``None`` if not recorded.
        execution: Program that ran it; empty for that of the cluster.
        family: Name under which errors are reported together; never empty.
    """

    line: Count
    model: Annotated[Text, Field(min_length=1, max_length=1000)]
    batch_size: Count | None
    cluster: Annotated[Text, Field(min_length=1, max_length=1000)]
    layout: Annotated[Text, Field(max_length=10_000)]
    seconds: PositiveSeconds
    peak_bytes: NumBytes | None
    execution: Literal["", "eager", "megatron", "compiled"] = ""
    family: Annotated[Text, Field(min_length=1, max_length=1000)]


def read_runs(path: Path, *, model: str = "", cluster: str = "") -> list[RecordedRun]:
    """The runs of a file.

    Args:
        path: Path of the table.
        model: Model of all rows, in place of the column; a person may name a Python file here.
        cluster: Cluster of all rows, in place of the column.

    Raises:
        InputFileError: the file cannot be read, a column is missing, or a value is wrong.
    """
    given = {name: value for name, value in (("model", model), ("cluster", cluster)) if value}
    content = read_bytes(path, "runs", _MOST_BYTES)
    try:
        text = content.decode("utf-8-sig")
        found = _rows(csv.DictReader(io.StringIO(text, newline="")), path, given)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputFileError(f"cannot read runs {path}: {error}.") from error
    if not found:
        raise InputFileError(f"runs {path}: there is no row after the head line.")
    return found


def _rows(
    reader: "csv.DictReader[str]", path: Path, given: Mapping[str, str]
) -> list[RecordedRun]:
    columns = [*(reader.fieldnames or ()), *given]
    missing = [name for name in ("model", "cluster", "seconds") if name not in columns]
    if missing:
        raise InputFileError(
            f"runs {path}: there is no column {shown(missing[0])}; the head line is "
            f"{shown(','.join(reader.fieldnames or ()))}."
        )
    found: list[RecordedRun] = []
    for row in reader:
        if len(found) == _MOST_ROWS:
            raise InputFileError(f"runs {path}: more than {_MOST_ROWS} rows.")
        if None in row.values() or None in row:
            raise InputFileError(
                f"runs {path}, line {reader.line_num}: as many values as columns are needed."
            )
        where = f"runs {path}, line {reader.line_num}"
        run = _run({**row, **given}, where, reader.line_num)
        if "model" not in given and (run.model.endswith(".py") or ":" in run.model):
            raise InputFileError(
                f"{where}: {shown(run.model)} is Python code, which a table does not get to run; "
                "if you trust it, give it by `model`."
            )
        found.append(run)
    return found


def _run(row: Mapping[str, str], where: str, line: int) -> RecordedRun:
    values: dict[str, object] = {"line": line}
    for name in COLUMNS:
        text = row.get(name, "").strip()
        if name not in _NUMBERS:
            values[name] = text
            continue
        try:
            values[name] = _NUMBERS[name](text) if text else None
        except ValueError:
            raise InputFileError(f"{where}: {name} is {shown(text)}, not a number.") from None
    values["family"] = values["family"] or values["model"]
    return parse_record(values, RecordedRun, where)
