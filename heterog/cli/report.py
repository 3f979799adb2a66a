"""``heterog report``: a plan as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from heterog.cli.common import JsonOption, out, print_json


def report(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    output: Annotated[Path, typer.Option("-o", "--output", help="plan.html")],
    as_json: JsonOption = False,
) -> None:
    """Write a plan as one HTML page that explains it and needs no network."""
    from heterog.files import check_writable
    from heterog.planners.plan import load_plan

    check_writable(output)
    load_plan(plan).report(output)
    if as_json:
        print_json({"file": str(output), "bytes": output.stat().st_size})
        return
    out.print(f"report (open it in a browser): {output}", soft_wrap=True)
