"""``heterog check``: whether a script with a balancer divides its samples without a trace."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from heterog.cli.common import JsonOption, print_json, progress_line
from heterog.errors import HeterogError

if TYPE_CHECKING:
    from heterog.balance.check import Verdict

MOST_LINES = 12
"""Lines of a script's traceback that are shown."""
MOST_NAMES = 5
"""Parameters that are named."""


def check(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS]...",
            help="a training script that torchrun could start, and its own arguments",
        ),
    ],
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m")
    ] = False,
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="processes of this machine")] = 2,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="updates of each optimizer, then ranks end")
    ] = 3,
    shares: Annotated[
        list[str] | None,
        typer.Option(
            "--shares",
            help="division to compare with all samples on rank 0: 3,1; twice: both divisions",
        ),
    ] = None,
    timeout: Annotated[str, typer.Option("--timeout", help="of each run")] = "600s",
    as_json: JsonOption = False,
) -> None:
    """Run a script with its samples divided in two ways, and compare the updates.

    The exit code is 0 if they are equal, 1 if not, or if random numbers hide it, and 2 if the
    script fails. It runs in this folder. It is stopped before it changes, moves or removes a
    file that was there; what libraries change outside of Python (HDF5, SQLite) is named after it.
    """
    from heterog.balance.check import CheckRequest, ScriptError
    from heterog.balance.check import check as checked
    from heterog.units import parse_seconds

    request = CheckRequest(
        script=script[0],
        arguments=tuple(script[1:]),
        is_module=module,
        num_ranks=ranks,
        num_updates=steps,
        shares=tuple(map(_numbers, shares or ())),
        timeout_s=parse_seconds(timeout),
    )
    try:
        with progress_line(as_json) as show:
            verdict = checked(request, lambda stage: show(stage, 0.0, float("inf")))
    except ScriptError as error:
        sys.stderr.writelines(error.trace.splitlines(keepends=True)[-MOST_LINES:])
        raise
    if as_json:
        # JSON has no numbers that are infinite.
        print_json(json.loads(json.dumps(asdict(verdict)), parse_constant=lambda _: None))
    else:
        _print_verdict(verdict)
    if verdict.answer != "equal":
        raise typer.Exit(1)


def _print_verdict(verdict: "Verdict") -> None:
    print(f"{verdict.answer.upper()}: {verdict.text}")
    for name, apart in list(verdict.names.items())[:MOST_NAMES]:
        print(f"    {apart:8.1%}  {name}")
    if len(verdict.names) > MOST_NAMES:
        print(f"    and {len(verdict.names) - MOST_NAMES} more")
    for line in filter(None, (verdict.advice, *verdict.notes)):
        print(line)


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers in a text with commas.

    Raises:
        HeterogError: there is something else.
    """
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError as error:
        raise HeterogError(
            f"`shares` {text!r}: give whole numbers with commas, one for each rank."
        ) from error
