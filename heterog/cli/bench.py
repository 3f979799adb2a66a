"""``heterog bench agents``: methods on suites of models and clusters, with intervals."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.cli.common import (
    JsonOption,
    err,
    load_methods,
    print_result,
    termination_as_interrupt,
)
from heterog.cli.outputs import HTML, LINES
from heterog.errors import HeterogError

if TYPE_CHECKING:
    from heterog.agents.benchmark.board import Entry, Scored

ROWS = "random,thumb,untrained,local_search,agent,agent+search"


def agents(
    suite: Annotated[
        str,
        typer.Option(
            "--suite",
            help="paper, families, scale, layouts, placement, or pairs.jsonl; several with commas",
        ),
    ] = "families",
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="random, annealing, tpe, cma_es, tree, heterog_agent, gdp, placeto, ppo, "
            "maskable_ppo, thumb, untrained, or as of compare",
        ),
    ] = ROWS,
    budget: Annotated[
        str, typer.Option("--budget", help="of each run: 2000e (evaluations), or 20s of CPU time")
    ] = "2000e",
    seeds: Annotated[
        str,
        typer.Option("--seeds", help="runs of each method on each pair, or from:to of others"),
    ] = "10",
    results: Annotated[
        Path,
        typer.Option("--results", help="file of runs, which goes on; graphs beside it"),
        LINES,
    ] = Path("board.jsonl"),
    report: Annotated[
        Path | None, typer.Option("--report", help="page.html of quality, profiles and time"), HTML
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods on a suite; what was stopped goes on."""
    asked = _seeds(seeds)
    suites = suite.split(",")
    if report is not None and len(suites) > 1:
        raise HeterogError(f"--report is of one suite, not of {suite}; ask for one at a time.")
    from heterog.methods.planner import Budget

    common = {
        "entries": _entries(methods),
        "budget": Budget.parse(budget),
        "seeds": asked,
        "results": results,
    }
    with termination_as_interrupt():
        made = [_made(name, common) for name in suites]
    if report is not None:
        from heterog.agents.benchmark.page import write_board_page

        write_board_page(report, f"{suite}, {budget} a run", made[0])
    about = {"budget": budget, "results": str(results)}
    found = {name: scored.summary() for name, scored in zip(suites, made, strict=True)}
    documents = [{"suite": name} | about | {"rows": rows} for name, rows in found.items()]
    words = [line for name, rows in found.items() for line in (name, *_table(rows))]
    print_result(as_json, documents[0] if len(suites) == 1 else {"suites": documents}, *words)


def _seeds(text: str) -> range:
    """The seeds that are asked for: so many, or those from a first to before a last one.

    >>> _seeds("10"), _seeds("10:20")
    (range(0, 10), range(10, 20))
    """
    first, _, end = text.rpartition(":")
    try:
        found = range(int(first or "0"), int(end))
    except ValueError:
        found = range(0)
    if not found or found.start < 0:
        raise HeterogError(f"--seeds {text} names no seeds; give a number as 10, or 10:20.")
    return found


def _made(suite: str, common: dict[str, Any]) -> "Scored":
    """What a suite's board has after the runs that were missing."""
    from heterog.agents.benchmark.board import Board
    from heterog.agents.benchmark.suites import pairs_of

    graphs = common["results"].with_suffix(".graphs")
    board = Board(pairs=pairs_of(suite), graphs=graphs, **common)
    board.run(_tell)
    return board.scored()


def _tell(line: dict[str, Any]) -> None:
    took = line["step_time_s"]
    said = "does not fit" if took is None else f"{1e3 * took:.1f} ms"
    err.print(f"{line['pair']}, seed {line['seed']}: {line['arm']} {said}", markup=False)


def _entries(methods: str) -> "list[Entry]":
    """The methods that are named, and what made each."""
    import heterog
    from heterog.agents.benchmark.board import Entry, code_of, judged
    from heterog.agents.benchmark.rivals import known_rows
    from heterog.user_code import is_from_file, split_source

    entries = []
    for name in methods.split(","):
        names, known = load_methods(name, among=known_rows())
        own = is_from_file(name)
        code = code_of(split_source(name, "method")[0]) if own else heterog.__version__
        planner = known[names[0]]
        entries.append(Entry(planner.name, partial(judged, planner), code))
    return entries


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The board in words, best first."""
    if not rows:
        return ["no pair has a run of every method, one of which fits"]
    title = f"{rows[0]['pairs']} pairs, {rows[0]['seeds']} seeds; 1 is the best known step"
    lines = [title, f"{'method':20} {'quality':22} {'beats the first':22} {'CPU':>9} evaluations"]
    for row in rows:
        quality, beats = (
            "{value:.3f} [{low:.3f}, {high:.3f}]".format(**row[name])
            for name in ("quality", "beats_first")
        )
        misfits = f", {row['do_not_fit']} do not fit" if row["do_not_fit"] else ""
        lines.append(
            f"{row['arm']:20} {quality:22} {beats:22} {row['cpu_s']:7.1f} s "
            f"{row['evaluations']:.0f}{misfits}"
        )
    return lines
