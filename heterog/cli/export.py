"""``heterog export``: a plan as a folder for another launcher or framework."""

from pathlib import Path
from typing import Annotated

import typer

from heterog.cli import completion
from heterog.cli.common import JsonOption, PlanArgument, SourceOption, print_result
from heterog.cli.outputs import FOLDER, not_replaced


def export(
    plan: PlanArgument,
    target: Annotated[
        str,
        typer.Option(
            "--to",
            help=f"one of {', '.join(completion.TARGETS)}",
            autocompletion=completion.targets,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="folder to make"), FOLDER],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="renew an export; an edited user.py is kept")
    ] = False,
    sources: SourceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as a folder for other launchers."""
    from heterog.export import check_folder, check_target, make_export, write_folder
    from heterog.search.plan import load_plan

    check_target(target)
    check_folder(output, target, overwrite=overwrite)
    made = make_export(load_plan(plan), target, sources=sources or ())
    for path in (plan, *(sources or ())):
        not_replaced(path, "an input", *(output / name for name in made.files))
    written = write_folder(made, output, overwrite=overwrite)
    document = {
        "target": target,
        "folder": str(output),
        "files": [str(path) for path in written],
        "not_expressed": list(made.not_expressed),
    }
    print_result(
        as_json,
        document,
        f"{target}: {len(written)} files in {output}; its README.md says how to start it.",
        *(f"not expressed: {remark}" for remark in made.not_expressed),
    )
