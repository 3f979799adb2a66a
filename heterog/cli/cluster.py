"""``heterog cluster``: make cluster files."""

from pathlib import Path
from typing import Annotated

import typer

from heterog.cli.common import JsonOption, print_result
from heterog.cli.outputs import YAML
from heterog.errors import UnknownNameError


def detect(
    output: Annotated[Path, typer.Option("-o", "--output", help="cluster.yaml"), YAML],
    on: Annotated[
        str,
        typer.Option(
            "--on",
            help="of what: local (this machine), ray (nodes of RAY_ADDRESS), torchrun (it starts "
            "this on each machine) or slurm (nodes of this job)",
        ),
    ] = "local",
    as_json: JsonOption = False,
) -> None:
    """Write a first cluster file of this machine or of several; its comments say what to check."""
    from heterog.cluster.spec import parse_cluster
    from heterog.files import write_atomically
    from heterog.report.tables import clusters_table
    from heterog.runtime.measure.detect import cluster_yaml
    from heterog.runtime.measure.detect import detect as detect_machine

    if on == "local":
        machines = [detect_machine()]
    elif on in ("ray", "torchrun", "slurm"):
        from heterog.runtime.measure.detect_hosts import detect_on

        machines = detect_on(on)
        if not machines:
            return  # a rank of torchrun that is not the first
    else:
        raise UnknownNameError("engine", on, ("local", "ray", "torchrun", "slurm"))
    text = cluster_yaml(*machines)
    found = parse_cluster(text, output)
    write_atomically(output, text.encode())
    checks = [line.strip() for line in text.splitlines() if "check: " in line]
    print_result(
        as_json,
        {"file": str(output), "cluster": found.to_dict(), "checks": checks},
        clusters_table([found]),
        f"cluster: {output}; check these lines:",
        *(f"  {line}" for line in checks),
    )
