"""``heterog cluster``: make cluster files."""

from pathlib import Path
from typing import Annotated

import typer

from heterog.cli.common import JsonOption, print_result
from heterog.cli.outputs import YAML


def detect(
    output: Annotated[Path, typer.Option("-o", "--output", help="cluster.yaml"), YAML],
    as_json: JsonOption = False,
) -> None:
    """Write a first cluster file of this machine; its comments say what to check."""
    from heterog.cluster.spec import parse_cluster
    from heterog.files import write_atomically
    from heterog.report.tables import clusters_table
    from heterog.runtime.measure.detect import cluster_yaml
    from heterog.runtime.measure.detect import detect as detect_machine

    text = cluster_yaml(detect_machine())
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
