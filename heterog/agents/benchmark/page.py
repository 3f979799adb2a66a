"""A board as one self-contained HTML page, in the style of a plan's page."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from heterog.agents.benchmark.board import Line, Scored
from heterog.agents.benchmark.statistics import Array
from heterog.errors import HeterogError
from heterog.files import write_atomically
from heterog.report.facts import chip, section, table
from heterog.report.html import fill_page
from heterog.report.lanes import CATEGORIES
from heterog.report.pictures import plot, x_of, y_of

WORST = 2.0
"""Ratio to the best known step time at the right edge of the profiles."""
_HEADS = (
    *("arm", "quality, 95 %", "", "beats the first", "over the best known", "do not fit"),
    *("CPU s", "by another's rules"),
)


def write_board_page(path: Path, title: str, scored: Scored) -> None:
    """Write a board as one self-contained file.

    Raises:
        HeterogError: no pair has a run of every arm.
        InputFileError: the file cannot be written.
    """
    rows = scored.summary()
    if not rows:
        raise HeterogError(
            "no pair has a run of every method yet, one of which fits; run the board first."
        )
    arms = [row["arm"] for row in rows]
    counts = f"pairs: {len(scored.pairs)}, seeds: {scored.num_seeds}"
    under = f"{counts}; a quality of 1 is the best known step time"
    numbers = (
        section("arms", "Quality beside time", _table(rows), note=under),
        section(
            "profiles",
            "Performance profiles",
            _profiles(scored, arms),
            note="Part of all runs whose step is at most so many times the best known one.",
        ),
        _curves(scored, arms),
        section("time", "Time against quality", _times(rows), note="CPU seconds of a run."),
    )
    page = fill_page(
        "plans.html.jinja",
        title=f"heterog: {title}",
        heading=title,
        notes=(),
        numbers="".join(numbers),
        plans=(),
    )
    write_atomically(path, page.encode())


def _table(rows: Sequence[Line]) -> str:
    cells = [
        (
            f"{_chip(number)}{escape(row['arm'])}",
            "{value:.3f} [{low:.3f}, {high:.3f}]".format(**row["quality"]),
            _interval(number, row["quality"]),
            "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["beats_first"]),
            "{value:.3f} [{low:.3f}, {high:.3f}]".format(**row["over_best"]),
            str(row["do_not_fit"]),
            f"{row['cpu_s']:.2f}",
            over_other(row),
        )
        for number, row in enumerate(rows)
    ]
    return table(_HEADS, cells, numbers=(1, 3, 4, 5, 6, 7))


def over_other(row: Line) -> str:
    """An arm's step times over the best ones by another referee, and the part of runs judged."""
    if "over_other" not in row:
        return ""
    ratio: str = "{value:.3f} [{low:.3f}, {high:.3f}]".format(**row["over_other"])
    said: float = row["said"]
    return ratio if said == 1.0 else f"{ratio} of {said:.0%}"


def _chip(number: int) -> str:
    return chip(f"c{number % len(CATEGORIES)}")


def _path(number: int, drawn: str, told: str) -> str:
    """A path in the colour of an arm; dashed once colours repeat."""
    dashes = ' stroke-dasharray="6 5"' * (number >= len(CATEGORIES))
    return (
        f'<path d="{drawn}" stroke="var(--c{number % len(CATEGORIES)})"{dashes}>'
        f"<title>{escape(told)}</title></path>"
    )


def _interval(number: int, quality: Line) -> str:
    low, value, high = (200.0 * quality[name] for name in ("low", "value", "high"))
    drawn = f"M{low:.1f} 6H{max(high, low + 0.1):.1f}M{value:.1f} 1V11"
    return (
        '<svg role="img" aria-label="interval" width="200" height="12" fill="none" '
        f'stroke-width="2">{_path(number, drawn, "from 0 to 1")}</svg>'
    )


def _profiles(scored: Scored, arms: Sequence[str]) -> str:
    lines = [_path(number, _staircase(scored.scores[arm]), arm) for number, arm in enumerate(arms)]
    widths = "1", "times the best known step", f"{WORST:g}"
    return plot(reversed(lines), "performance profiles", ("100 %", "0 %"), widths, _keys(arms))


def _curves(scored: Scored, arms: Sequence[str]) -> str:
    """Quality of the best answer so far over evaluations, for arms whose runs have curves."""
    lines = [line for rows in scored.runs.values() for row in rows for line in row]
    most = int(max(line["evaluations"] for line in lines))
    drawn = []
    for number, arm in enumerate(arms):
        curve = scored.curve(arm, most)
        if curve is not None:
            points = [
                f"{x_of(at / most)} {y_of(value)}" for at, value in enumerate(curve.tolist())
            ]
            drawn.append(_path(number, "M" + "L".join(points), arm))
    if not drawn:
        return ""
    widths = "0", "evaluations", f"{most}"
    return section(
        "curves",
        "Quality of the best so far",
        plot(reversed(drawn), "quality over evaluations", ("1", "0"), widths, _keys(arms)),
        note="Interquartile mean of all runs; 0 before the first answer that fits.",
    )


def _staircase(scores: Array) -> str:
    """Part of all runs whose ratio to the best step time is at most each ratio."""
    ratios = np.sort(1.0 / np.maximum(scores.reshape(-1), 1e-9))
    drawn = [f"M{x_of(0.0)} {y_of(0.0)}"]
    for count, ratio in enumerate(ratios[ratios <= WORST].tolist(), 1):
        drawn.append(f"H{x_of((ratio - 1.0) / (WORST - 1.0))}V{y_of(count / len(ratios))}")
    return "".join(drawn) + f"H{x_of(1.0)}"


def _times(rows: Sequence[Line]) -> str:
    """A dot for each arm, seconds on a logarithmic scale."""
    logs = [math.log10(max(row["cpu_s"], 1e-3)) for row in rows]
    first, last = math.floor(min(logs)), math.ceil(max(logs) + 1e-9)
    lines = []
    for number, (row, at) in enumerate(zip(rows, logs, strict=True)):
        x, quality = x_of((at - first) / (last - first)), row["quality"]
        drawn = (
            f"M{x} {y_of(quality['low'])}V{y_of(quality['high'])}M{x} {y_of(quality['value'])}h0.1"
        )
        told = f"{row['arm']}: {quality['value']:.3f} in {row['cpu_s']:.2f} s"
        lines.append(_path(number, drawn, told))
    widths = f"{10.0**first:g} s", "CPU seconds of a run", f"{10.0**last:g} s"
    keys = _keys([row["arm"] for row in rows])
    return plot(lines, "quality against seconds", ("1", "0"), widths, keys)


def _keys(arms: Sequence[str]) -> Iterator[str]:
    for number, arm in enumerate(arms):
        yield f"<li>{_chip(number)}{escape(arm)}</li>"
