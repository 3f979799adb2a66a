"""Compares predictions with recorded runs: reads a table of runs, and has statistics of errors.

The table is a CSV file with a head line and a row for each run:

``model``
    a zoo name or a captured graph (``.json``, ``.json.gz``); no Python file, because reading the
    table would run it.
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
    program that ran it: ``eager``, ``megatron``, ``compiled`` or ``graphs``; empty for that of
    the cluster file.
``family``
    name under which errors are reported together; empty for the model's name.

Other columns are ignored. A model or cluster that all rows share may be given once instead.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from scipy.stats import binomtest, spearmanr

from heterog.errors import InputFileError
from heterog.files import read_bytes
from heterog.grouped import grouped
from heterog.names import shown
from heterog.pricing.intervals import COVERAGE, Interval
from heterog.records import Count, NumBytes, PositiveSeconds, Record, Text, parse_record

_DIFFERENT = 0.05
"""Relative difference of step times below which two runs count as equally good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run with its measurement and prediction.

    Attributes:
        family: Name under which errors of runs are reported together.
        name: Name of the run.
        measured_s: Measured seconds of a step.
        predicted_s: Predicted seconds of a step.
        interval_s: Interval around the prediction; ``None`` if none was made.
        measured_bytes: Largest measured peak of a device; ``None`` if none was recorded.
        predicted_bytes: Largest predicted peak of a device.
        interval_bytes: Interval around the predicted peak; ``None`` if none was made.
        choice: Name shared by runs that are alternatives: other layouts of one model, cluster and
            batch. Empty if there are none.
        is_doubtful: Whether the row contradicts physics; errors are given with and without it.
    """

    family: str
    name: str
    measured_s: float
    predicted_s: float
    interval_s: Interval | None = None
    measured_bytes: float | None = None
    predicted_bytes: float | None = None
    interval_bytes: Interval | None = None
    choice: str = ""
    is_doubtful: bool = False

    @property
    def error(self) -> float:
        """Error of the predicted seconds, as a share of the measured ones; above 0 if too long."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of alternatives whose measured seconds differ enough to count.

    Attributes:
        number: Number of pairs.
        ordered: Number of pairs that the prediction orders rightly.
    """

    number: int
    ordered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyErrors:
    """Statistics of the errors of a family of runs.

    Attributes:
        name: Name of the family.
        num_runs: Number of runs in it.
        mape: Mean absolute error, as a share of the measured seconds.
        median: Median of the absolute errors.
        p90: Their 90th percentile.
        bias: Median of the signed errors.
        spearman: Spearman's rank correlation of measured and predicted seconds; ``None`` for fewer
            than three runs, or equal ones.
        interval_coverage: Share of the runs inside their intervals.
        interval_width: Median of (high - low) / predicted.
        is_coverage_sound: Whether a binomial test at 95 % does not reject ``COVERAGE``.
        memory_mape: Mean absolute error of the largest peak.
        memory_coverage: Share of the recorded peaks inside their intervals.
        memory_width: Median of (high - low) / predicted of these intervals.
        is_memory_coverage_sound: Result of the same binomial test of ``memory_coverage``.
        pairs: Pairs of alternatives.
        regret: Regret of the alternative with the shortest prediction, and of the five shortest.
    """

    name: str
    num_runs: int
    mape: float
    median: float
    p90: float
    bias: float
    spearman: float | None
    interval_coverage: float | None
    interval_width: float | None
    is_coverage_sound: bool | None
    memory_mape: float | None
    memory_coverage: float | None
    memory_width: float | None
    is_memory_coverage_sound: bool | None
    pairs: Pairs | None
    regret: tuple[float, float] | None


def family_errors(name: str, runs: Sequence[Compared]) -> FamilyErrors:
    """Errors of a family of at least one run; pairs are those of ``ordered_pairs``.

    >>> near = Compared(family="", name="a", measured_s=1.0, predicted_s=1.1)
    >>> far = Compared(family="", name="b", measured_s=2.0, predicted_s=1.6)
    >>> round(family_errors("both", [near, far]).mape, 3)
    0.15
    """
    error = np.array([run.error for run in runs])
    measured = np.array([run.measured_s for run in runs])
    predicted = np.array([run.predicted_s for run in runs])
    of_memory = [
        abs(run.predicted_bytes / run.measured_bytes - 1.0)
        for run in runs
        if run.measured_bytes and run.predicted_bytes
    ]
    part, width, is_sound = _coverage(
        [(run.measured_s, run.predicted_s, run.interval_s) for run in runs]
    )
    part_of_peaks, width_of_peaks, is_sound_of_peaks = _coverage(
        [(run.measured_bytes, run.predicted_bytes, run.interval_bytes) for run in runs]
    )
    pairs = ordered_pairs(runs)
    first, of_five = regret(runs), regret(runs, liked=5)
    has_ranks = len(runs) > 2 and np.ptp(measured) > 0.0 and np.ptp(predicted) > 0.0
    return FamilyErrors(
        name=name,
        num_runs=len(runs),
        mape=float(np.abs(error).mean()),
        median=float(np.median(np.abs(error))),
        p90=float(np.quantile(np.abs(error), 0.9)),
        bias=float(np.median(error)),
        spearman=float(spearmanr(measured, predicted).statistic) if has_ranks else None,
        interval_coverage=part,
        interval_width=width,
        is_coverage_sound=is_sound,
        memory_mape=float(np.mean(of_memory)) if of_memory else None,
        memory_coverage=part_of_peaks,
        memory_width=width_of_peaks,
        is_memory_coverage_sound=is_sound_of_peaks,
        pairs=pairs if pairs.number else None,
        regret=None if first is None or of_five is None else (first, of_five),
    )


def in_words(errors: FamilyErrors) -> str:
    """One line about the errors of a family."""
    text = (
        f"{errors.name}: {errors.num_runs} run{'s' * (errors.num_runs > 1)}, mean error "
        f"{errors.mape:.1%}, median {errors.median:.1%}, 90th percentile {errors.p90:.1%}, bias "
        f"{errors.bias:+.1%}"
    )
    if errors.interval_coverage is not None and errors.interval_width is not None:
        text += f"; {errors.interval_coverage:.0%} inside intervals of {errors.interval_width:.0%}"
    if errors.memory_mape is not None:
        text += f"; memory {errors.memory_mape:.1%}"
    if errors.memory_coverage is not None and errors.memory_width is not None:
        text += f", {errors.memory_coverage:.0%} inside intervals of {errors.memory_width:.0%}"
    if errors.pairs is not None:
        text += f"; {errors.pairs.ordered} of {errors.pairs.number} pairs ordered rightly"
    if errors.regret is not None:
        text += "; the best-liked takes {:.1%} longer than the best, of five {:.1%}".format(
            *errors.regret
        )
    return text


def ordered_pairs(runs: Sequence[Compared]) -> Pairs:
    """Pairs of alternatives that differ, and how many of them their predictions order rightly.

    >>> one = Compared(family="", name="a", choice="x", measured_s=1.0, predicted_s=1.2)
    >>> two = Compared(family="", name="b", choice="x", measured_s=2.0, predicted_s=1.1)
    >>> ordered_pairs([one, two])
    Pairs(number=1, ordered=0)
    """
    number = ordered = 0
    for alternatives in _alternatives(runs):
        for one, other in combinations(alternatives, 2):
            fast, slow = sorted((one, other), key=lambda run: run.measured_s)
            if slow.measured_s > (1.0 + _DIFFERENT) * fast.measured_s:
                number += 1
                ordered += fast.predicted_s < slow.predicted_s
    return Pairs(number=number, ordered=ordered)


def regret(
    runs: Sequence[Compared], *, liked: int = 1, subset: int = 20, draws: int = 200
) -> float | None:
    """How much longer the best of the ``liked`` shortest predictions takes than the best of all.

    The mean over random subsets of each set of alternatives, as a share of the best one's seconds;
    ``None`` if no run has an alternative.

    Args:
        runs: The runs.
        liked: Number of alternatives, with the shortest predictions, that would be tried.
        subset: Number of alternatives in a subset.
        draws: Number of subsets of each set.

    >>> one = Compared(family="", name="a", choice="x", measured_s=1.0, predicted_s=1.2)
    >>> two = Compared(family="", name="b", choice="x", measured_s=1.5, predicted_s=1.1)
    >>> regret([one, two]), regret([one, two], liked=2)
    (0.5, 0.0)
    """
    random = np.random.default_rng(0)
    lost = []
    for alternatives in _alternatives(runs):
        measured = np.array([run.measured_s for run in alternatives])
        predicted = np.array([run.predicted_s for run in alternatives])
        for _ in range(draws):
            drawn = random.permutation(len(alternatives))[:subset]
            best = drawn[np.argsort(predicted[drawn], kind="stable")[:liked]]
            lost.append(measured[best].min() / measured[drawn].min() - 1.0)
    return float(np.mean(lost)) if lost else None


def _alternatives(runs: Sequence[Compared]) -> list[list[Compared]]:
    """Sets of at least two runs that are alternatives to each other."""
    of_choice = grouped((run.choice, run) for run in runs if run.choice)
    return [members for members in of_choice.values() if len(members) > 1]


def _coverage(
    runs: Sequence[tuple[float | None, float | None, Interval | None]],
) -> tuple[float, float, bool] | tuple[None, None, None]:
    """Coverage by (measured, predicted, interval) of each run; those lacking one are skipped.

    Returns:
        Share of measurements inside their intervals, median width of these as a share of the
        prediction, and whether a binomial test does not reject ``COVERAGE``.
    """
    found = [
        (interval.low <= measured <= interval.high, (interval.high - interval.low) / predicted)
        for measured, predicted, interval in runs
        if measured and predicted and interval is not None
    ]
    if not found:
        return None, None, None
    inside, widths = zip(*found, strict=True)
    is_sound = bool(binomtest(sum(inside), len(inside), COVERAGE).pvalue > 0.05)
    return sum(inside) / len(inside), float(np.median(widths)), is_sound


_NUMBERS = {"batch_size": int, "seconds": float, "peak_bytes": int}
_MOST_BYTES = 64 * 2**20
_MOST_ROWS = 100_000


class RecordedRun(Record):
    """One row of the table; see the module.

    Attributes:
        line: Line of the file, for messages.
        model: Zoo name or file, from the row or given for all rows.
        batch_size: Samples of a step; ``None`` for the model's own.
        cluster: Preset or file, from the row or given for all rows.
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
    execution: Literal["", "eager", "megatron", "compiled", "graphs"] = ""
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
    for name in [each for each in RecordedRun.model_fields if each not in values]:
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
