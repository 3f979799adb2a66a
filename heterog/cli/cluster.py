"""``heterog cluster``: make cluster files."""

from pathlib import Path
from typing import Annotated

import typer

from heterog.cli.common import JsonOption, out, print_json
from heterog.cli.outputs import YAML


def detect(
    output: Annotated[Path, typer.Option("-o", "--output", help="cluster.yaml"), YAML],
    as_json: JsonOption = False,
) -> None:
    """Write a first cluster file of this machine; its comments say what to check."""
    from heterog.cluster.spec import parse_cluster
    from heterog.files import write_atomically
    from heterog.runtime.measure.detect import cluster_yaml
    from heterog.runtime.measure.detect import detect as detect_machine

    text = cluster_yaml(detect_machine())
    found = parse_cluster(text, output)
    write_atomically(output, text.encode())
    checks = [line.strip() for line in text.splitlines() if "check: " in line]
    if as_json:
        print_json({"file": str(output), "cluster": found.to_dict(), "checks": checks})
        return
    from heterog.report.tables import clusters_table

    out.print(clusters_table([found]))
    out.print(f"cluster: {output}; check these lines:", soft_wrap=True)
    for line in checks:
        out.print(f"  {line}", soft_wrap=True, markup=False)
