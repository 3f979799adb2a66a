"""Writes the tables of ``docs/notebook/board.md`` from the runs that are kept.

    python -m website.board_page

Runs are lines of ``experiments/measured/board.jsonl``, which ``heterog bench agents --results``
adds to. A table has the methods with as many seeds on all pairs of its suite.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from heterog.agents.benchmark.board import Board, Entry, Line, read_results
from heterog.agents.benchmark.page import over_other
from heterog.agents.benchmark.suites import SUITES, pairs_of
from heterog.methods.planner import Budget

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/notebook/board.md", ROOT / "experiments/measured/board.jsonl"
BEGIN, END = "<!-- tables: python -m website.board_page -->", "<!-- end of the tables -->"
FIRST = "random"
"""Method that the others are compared with."""
_HEADS = (
    "row", "quality, 95 %", "beats `random`", "over the best known step, 95 %", "do not fit",
    "CPU s", "wall s", "evaluations", "by another's rules",
)  # fmt: skip


def _never(*asked: object) -> Line:
    raise AssertionError(asked)


def boards_of(suite: str, budget: str, lines: list[Line]) -> Iterator[Board]:
    """A suite's boards: for each number of whole seeds, the methods that have as many."""
    pairs = pairs_of(suite)
    names = {pair.pair for pair in pairs}
    seeds: dict[str, dict[int, set[str]]] = {}
    for line in lines:
        if line["pair"] in names and line.get("budget") == budget:
            seeds.setdefault(line["arm"], {}).setdefault(line["seed"], set()).add(line["pair"])
    whole = {arm: sum(got == names for got in found.values()) for arm, found in seeds.items()}
    codes = {line["arm"]: line.get("code", "") for line in lines}
    for count in sorted({*whole.values()} - {0}, reverse=True):
        kept = sorted((a for a in whole if whole[a] >= count), key=lambda arm: arm != FIRST)
        if FIRST in kept:
            yield Board(
                pairs=pairs,
                entries=[Entry(arm, _never, codes[arm]) for arm in kept],
                budget=Budget.parse(budget),
                seeds=range(count),
                results=RESULTS,
            )


def _cells(row: dict[str, Any]) -> list[str]:
    """Cells of a row."""
    names = "quality", "beats_first", "over_best"
    quality, beats, over = (
        "{value:.3f} [{low:.3f}, {high:.3f}]".format(**row[name]) for name in names
    )
    spent = f"{row['cpu_s']:.2f}", f"{row['wall_s']:.2f}", f"{row['evaluations']:.0f}"
    return [
        f"`{row['arm']}`",
        quality,
        beats,
        over,
        str(row["do_not_fit"]),
        *spent,
        over_other(row),
    ]


def tables() -> Iterator[str]:
    """Lines of all tables."""
    lines = read_results(RESULTS)
    budgets = sorted({line["budget"] for line in lines})
    for suite, budget in product(SUITES, budgets):
        for board in boards_of(suite, budget, lines):
            rows = board.summary()
            cells = [_cells(row) for row in rows]
            count = len(board.seeds)
            seeds = f"{count} seed" + "s" * (count > 1)
            yield from (f"### `{suite}`, {budget} a run, {seeds}", "")
            yield from map(_line, (_HEADS, ["---"] * len(_HEADS), *cells))
            yield ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def written(page: str) -> str:
    """The page with its tables made anew."""
    head, _, rest = page.partition(BEGIN)
    return "\n".join((head + BEGIN, "", *tables(), END)) + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
