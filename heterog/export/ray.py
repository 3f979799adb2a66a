"""Target ``ray``: the plan for a Ray cluster that runs, or for one that KubeRay makes for it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from heterog.export.folder import (
    Export,
    RankEntry,
    Target,
    by_host,
    fill,
    on_used_devices,
    ranks_of,
)
from heterog.export.kubernetes import dns_label
from heterog.export.torchrun import MODEL_FILE, runtime_folder
from heterog.grouped import grouped
from heterog.search.plan import Plan

TARGET = "ray"
_PLAN_FILE = "plan.json.gz"
_WHAT = (
    "A job that trains with the plan on a Ray cluster and goes on when nodes are lost. Its nodes "
    "say what they have: ray start --resources with the names of the plan's device types and how "
    "many there are. rayjob.yaml is the same with KubeRay, which starts such a cluster for it."
)
_DATA = (
    "The data of `batches()`: on Ray heterog trains on the batch that the workload makes; make it "
    "from your data there."
)
_NOT_HERE = ("train.py", "launch.sh")
"""Files with which other targets start ranks; Ray needs none of them."""


def export_ray(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of any plan, for the devices that it uses."""
    plan, unused = on_used_devices(plan)
    ranks = ranks_of(plan.cluster)
    folder = runtime_folder(
        plan,
        Target(TARGET, _WHAT, "bash submit.sh --steps 1000"),
        sources,
        ranks,
        remarks=(*unused, _DATA),
        plan_file=_PLAN_FILE,
    )
    function = plan.graph.source.rpartition(":")[2]
    has_file = MODEL_FILE in folder.files and function.isidentifier()
    command = {"plan": _PLAN_FILE, "model": f"{MODEL_FILE}:{function}" if has_file else ""}
    name = dns_label(f"heterog-{plan.graph.name}", 40)
    files = {key: content for key, content in folder.files.items() if key not in _NOT_HERE}
    added = {
        "submit.sh": fill("ray_submit.sh.jinja", **command),
        "rayjob.yaml": fill(
            "rayjob.yaml.jinja",
            name=name,
            **command,
            groups="\n".join(f"      - {json.dumps(each)}" for each in _groups(ranks, name)),
        ),
    }
    return replace(folder, files={**files, **added})


def _groups(ranks: Sequence[RankEntry], name: str) -> list[dict[str, Any]]:
    """A worker group of KubeRay for each kind of host, in JSON, which YAML contains."""
    hosts = by_host(ranks).values()
    kinds = grouped((tuple(sorted(entry.type for entry in own)), own) for own in hosts)
    groups = []
    for number, (kind, alike) in enumerate(kinds.items()):
        has = json.dumps({each: kind.count(each) for each in dict.fromkeys(kind)})
        container: dict[str, Any] = {
            "name": "node",
            "image": "heterog:latest",
            "volumeMounts": [{"name": "job", "mountPath": "/job"}],
        }
        if num_gpus := sum(entry.has_gpu for entry in alike[0]):
            container["resources"] = {"limits": {"nvidia.com/gpu": num_gpus}}
        groups.append(
            {
                "groupName": dns_label(f"{number}-{kind[0]}", 40),
                "replicas": len(alike),
                "minReplicas": len(alike),
                "maxReplicas": len(alike),
                "rayStartParams": {"resources": f"'{has}'"},
                "template": {
                    "spec": {
                        "containers": [container],
                        "volumes": [{"name": "job", "configMap": {"name": name}}],
                    }
                },
            }
        )
    return groups
