"""``heterog report``: plans as one HTML page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterog.cli import completion
from heterog.cli.common import JsonOption, print_result
from heterog.cli.outputs import HTML

if TYPE_CHECKING:
    from heterog.report.side_by_side import NamedPlan


def report(
    plans: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN",
            help="files that 'heterog plan -o' wrote; several are put side by side",
            autocompletion=completion.plans,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="plan.html"), HTML],
    as_json: JsonOption = False,
) -> None:
    """Write a plan, or several side by side, as an HTML page.

    The page explains the plan and needs no network.
    """
    from heterog.search.plan import load_plan

    if len(plans) == 1:
        load_plan(plans[0]).report(output)
    else:
        from heterog.report.side_by_side import write_comparison_page

        write_comparison_page(output, _named(plans))
    document = {"file": str(output), "bytes": output.stat().st_size}
    print_result(as_json, document, f"report (open it in a browser): {output}")


def _named(paths: list[Path]) -> "list[NamedPlan]":
    """The plans with the names of their files, or their paths if names are the same."""
    from heterog.report.side_by_side import NamedPlan
    from heterog.search.plan import load_plan

    stems = [path.name.removesuffix(".gz").removesuffix(".json") for path in paths]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
    return [
        NamedPlan(name=name, plan=load_plan(path)) for name, path in zip(names, paths, strict=True)
    ]
