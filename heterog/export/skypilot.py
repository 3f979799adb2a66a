"""Target ``skypilot``: the torchrun folder, and a task that SkyPilot runs on any cloud."""

import shlex
from collections.abc import Sequence
from dataclasses import replace

from heterog.export.folder import (
    Export,
    ExportError,
    Target,
    by_host,
    fill,
    on_used_devices,
    ranks_of,
)
from heterog.export.kubernetes import dns_label
from heterog.export.torchrun import runtime_folder
from heterog.search.plan import Plan

TARGET = "skypilot"
_WHAT = (
    "A SkyPilot task that runs the plan with heterog, on nodes that it rents. GPU types are as "
    "`sky show-gpus` names them; add a cloud or region to sky.yaml."
)
_NAMES = {
    "V100-16GB": "V100", "V100-PCIe-16GB": "V100", "V100-PCIe-32GB": "V100-32GB",
    "P100-16GB": "P100", "P100-12GB": "P100", "A100-40GB": "A100", "A100-PCIe-40GB": "A100",
    "A100-PCIe-80GB": "A100-80GB", "H100-80GB": "H100", "H100-SXM": "H100", "H200-141GB": "H200",
    "RTX-3090": "RTX3090", "RTX-4090": "RTX4090", "RTX-A6000": "RTXA6000",
}  # fmt: skip
"""SkyPilot's names of GPUs that have another name here (its catalog, ``sky show-gpus``)."""


def export_skypilot(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of a plan whose hosts are alike.

    Raises:
        ExportError: hosts have other devices than the first; a task's nodes are all alike.
    """
    plan, unused = on_used_devices(plan)
    ranks = ranks_of(plan.cluster)
    hosts = by_host(ranks)
    types = {host: [entry.type for entry in entries] for host, entries in hosts.items()}
    first = next(iter(hosts))
    for host, found in types.items():
        if len(set(found)) > 1:
            raise ExportError(
                f"skypilot rents nodes whose devices are alike, and '{host}' has "
                f"{', '.join(found)}. Export to kubernetes or slurm."
            )
        if found != types[first]:
            raise ExportError(
                f"skypilot rents alike nodes for a task, and '{host}' has {', '.join(found)} "
                f"where '{first}' has {', '.join(types[first])}. Export to kubernetes or slurm."
            )
    folder = runtime_folder(
        plan,
        Target(TARGET, _WHAT, "sky launch sky.yaml --env STEPS=1000"),
        sources,
        ranks,
        remarks=unused,
    )
    kind = types[first][0]
    resources = f"accelerators: {_NAMES.get(kind, kind)}:{len(types[first])}"
    task = fill(
        "sky.yaml.jinja",
        name=dns_label(f"heterog-{plan.graph.name}", 40),
        num_nodes=len(hosts),
        resources=resources if ranks[0].has_gpu else f"cpus: {len(types[first])}+",
        hosts=" ".join(map(shlex.quote, hosts)),
    )
    return replace(folder, files={**folder.files, "sky.yaml": task})
