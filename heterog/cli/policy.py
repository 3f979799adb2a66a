"""``heterog policy pack`` and ``pull``: policies as folders for a hub."""

from pathlib import Path
from typing import Annotated

import typer

from heterog.cli.common import out
from heterog.cli.outputs import CACHE, POLICY


def pack(
    policy: Annotated[str, typer.Argument(help="policy.pt, or the name of a shipped one")],
    folder: Annotated[Path, typer.Argument(help="folder for weights, configuration, card"), CACHE],
) -> None:
    """Write a policy as a folder that a hub can hold."""
    from heterog.agents.checkpoint import load_checkpoint
    from heterog.agents.hub import pack as packed

    packed(load_checkpoint(policy), folder)
    out.print(f"{folder}: read its README.md before you share it", markup=False)


def pull(
    address: Annotated[str, typer.Argument(help="folder, https://..., s3://..., hf://...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="policy.pt"), POLICY],
) -> None:
    """Read a policy that was packed; nothing of it is run."""
    from heterog.agents.checkpoint import save_checkpoint
    from heterog.agents.hub import pull as pulled

    save_checkpoint(output, pulled(address))
    out.print(f"{output}: use it by --policy {output}", markup=False)
