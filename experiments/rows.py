"""Shared parts of scripts: arguments, rows that are kept as they are found, and output."""

import argparse
import csv
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from heterog.errors import HeterogError

Option = Callable[[argparse.ArgumentParser], object]
"""Adds an option to a script's parser."""


def option(*flags: str, **settings: Any) -> Option:
    """An option for ``asked_of``, as ``add_argument`` takes it."""
    return lambda parser: parser.add_argument(*flags, **settings)


def plain_parser(doc: str | None, *options: Option) -> argparse.ArgumentParser:
    """A parser that describes a script by its docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in options:
        each(parser)
    return parser


def script_parser(doc: str | None, *options: Option) -> argparse.ArgumentParser:
    """A parser of a script, with ``--json``."""
    as_json = option("--json", action="store_true", help="print one JSON document")
    return plain_parser(doc, *options, as_json)


def asked_of(doc: str | None, *options: Option) -> argparse.Namespace:
    """The arguments of a script's command line."""
    return script_parser(doc, *options).parse_args()


def in_words(row: Mapping[str, Any]) -> str:
    """The texts and numbers of a row in a line; its lists are in the JSON alone.

    >>> in_words({"model": "vgg19", "step_time_s": 0.123456, "errors": {"p90": 0.5}, "runs": [1]})
    'model vgg19, step_time_s 0.1235, errors (p90 0.5)'
    """
    told = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            told.append(f"{name} ({in_words(value)})")
        elif not isinstance(value, list | tuple | None):
            told.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(told)


def progress(news: object) -> None:
    """Report the progress of a script, such as a row, apart from its output."""
    line = in_words(news) if isinstance(news, Mapping) else news
    print(line, file=sys.stderr, flush=True)


def told(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows, of which each is progress as soon as it is made."""
    found = []
    for row in rows:
        progress(row)
        found.append(dict(row))
    return found


def finish(
    asked: argparse.Namespace, document: Mapping[str, Any], lines: Iterable[object] | None = None
) -> None:
    """Print the document if JSON is asked for, else lines: by default its first rows in words."""
    if asked.json:
        lines = [json.dumps(document, indent=1)]
    if lines is None:
        lists = (each for each in document.values() if isinstance(each, list))
        rows = next((each for each in lists if each and isinstance(each[0], Mapping)), [])
        lines = filter(None, map(in_words, [*rows, document]))
    for line in lines:
        print(line)


def run(main: Callable[[], object]) -> None:
    """Run a script; what a user can mend ends it in a line, with exit code 2."""
    try:
        main()
    except HeterogError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines, which may be compressed; a line that was cut off is skipped.

    There are none if the file is not there.
    """
    rows = []
    for line in text_of(path).splitlines() if path is not None and path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            progress(f"{path}: skipped a line that was cut off")
    return rows


def csv_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a table, which may be compressed."""
    return list(csv.DictReader(io.StringIO(text_of(path), newline="")))


def text_of(path: Path) -> str:
    """The text of a file, which may be compressed."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def keep_row(path: Path | None, row: dict[str, Any]) -> None:
    """Add a row to a file of JSON lines, if there is one."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def board_parser(doc: str | None, arms: str, pairs: Path | None = None) -> argparse.ArgumentParser:
    """A parser of a script whose arms are compared on a list of pairs, that of a path if any."""
    return script_parser(
        doc,
        option(
            "--pairs",
            type=Path,
            default=pairs,
            required=pairs is None,
            help="a model and a cluster a line",
        ),
        option("--arms", default=arms, help="names with commas"),
        option("--seeds", type=int, default=3),
        option("--cpu-seconds", type=float, default=20.0, help="of each row"),
        option("--graphs", type=Path, help="folder that keeps captured graphs"),
        option("--references", type=Path, help="best known step times; beside the list"),
        option("-o", "--output", type=Path, help="JSON lines, added to"),
        option("--summary", action="store_true", help="only print what the file holds"),
    )


def run_board(asked: argparse.Namespace, arms: Mapping[str, Callable[..., Any]]) -> None:
    """Make the rows that are missing, and print all of them or a table."""
    from heterog.agents.benchmark.board import Board, Entry
    from heterog.agents.benchmark.pair_lists import read_pairs
    from heterog.methods.planner import Budget

    names = asked.arms.split(",")
    if unknown := [name for name in names if name not in arms]:
        raise HeterogError(f"unknown arms {', '.join(unknown)}; known: {', '.join(arms)}")
    known = asked.references or asked.pairs.with_name(f"{asked.pairs.stem}_references.json")
    references = json.loads(known.read_text()) if known.is_file() else {}
    board = Board(
        pairs=read_pairs(asked.pairs),
        entries=[Entry(name, arms[name]) for name in names],
        budget=Budget(seconds=asked.cpu_seconds),
        seeds=range(asked.seeds),
        results=asked.output or Path(f"{Path(sys.argv[0]).stem}.{asked.pairs.stem}.jsonl"),
        graphs=asked.graphs,
        references={k: v["step_time_s"] for k, v in references.items() if v["step_time_s"]},
    )
    if not asked.summary:
        board.run(progress)
    finish(asked, {"summary": board.summary(), "rows": [*board.found().values()]})
