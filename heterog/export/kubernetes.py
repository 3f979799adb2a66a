"""Target ``kubernetes``: the torchrun folder, run as Kubeflow's TrainJob or as a JobSet."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import yaml

from heterog import __version__
from heterog.export.folder import (
    Export,
    ExportError,
    RankEntry,
    Target,
    by_host,
    on_used_devices,
    ranks_of,
)
from heterog.export.torchrun import runtime_folder
from heterog.grouped import grouped
from heterog.search.plan import Plan
from heterog.units import format_bytes

TARGET = "kubernetes"
PLAN_FILE = "plan.json.gz"
CONFIG_MAP_LIMIT_BYTES = 2**20
"""Kubernetes documentation, "ConfigMaps": the data stored in one cannot exceed 1 MiB."""
HOST_LABEL = "heterog/host"
IMAGE = "heterog:latest"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
_TRAINER_API = "trainer.kubeflow.org/v1alpha1"
_PORT = 29500
_MOUNT = "/job"
_MAX_NAME = 63  # of a DNS label (RFC 1123)
_NAME_TAIL = len("--0-0-xxxxx")
"""A pod of a JobSet is called ``JOBSET-HOST-0-0-`` and five letters."""
_WHAT = (
    "A TrainJob of Kubeflow Trainer with a pod for each host, which runs the plan with heterog; "
    "jobset.yaml is the same for clusters with JobSet alone (name it in kustomization.yaml). "
    f"Label the nodes (kubectl label node NODE {HOST_LABEL}=NAME), build the Dockerfile and put "
    f"your name of the image for {IMAGE} in kustomization.yaml. With Kueue, the label "
    f"{QUEUE_LABEL} names your queue."
)
_DOCKERFILE = """\
# The image of the ranks: every host needs the same versions. The job's files are mounted.
FROM python:3.12-slim
RUN pip install --no-cache-dir torch=={torch} heterog=={heterog}
WORKDIR {mount}
"""


def export_kubernetes(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of any plan, for the devices that it uses."""
    plan, unused = on_used_devices(plan)
    ranks = ranks_of(plan.cluster)
    name = dns_label(f"heterog-{plan.graph.name}", 24)
    hosts = _host_labels(by_host(ranks), name)

    def folder(remarks: tuple[str, ...]) -> Export:
        return runtime_folder(
            plan,
            # Server side: kubectl's own record of what it applied may not exceed 256 KiB.
            Target(TARGET, _WHAT, "kubectl apply --server-side -k ."),
            sources,
            ranks,
            remarks=(*unused, *remarks),
            plan_file=PLAN_FILE,
        )

    made = folder(())
    num_bytes = sum(len(content) for content in made.files.values())
    fits = num_bytes <= CONFIG_MAP_LIMIT_BYTES
    if not fits:
        made = folder(
            (
                f"The files as a ConfigMap: they are {format_bytes(num_bytes)} together, a "
                f"ConfigMap holds {format_bytes(CONFIG_MAP_LIMIT_BYTES)}. The pods mount the "
                f"PersistentVolumeClaim '{name}': make it and copy this folder there first.",
            )
        )
    spec = jobset_spec(name, hosts, by_host(ranks), config_map=fits)
    own = {
        "trainjob.yaml": _yaml(train_job(name, spec)),
        "jobset.yaml": _yaml([_resource("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec)]),
        "kustomization.yaml": _yaml([kustomization(name, sorted(made.files) if fits else [])]),
        "Dockerfile": _DOCKERFILE.format(
            torch=version("torch").partition("+")[0], heterog=__version__, mount=_MOUNT
        ).encode(),
    }
    return replace(made, files={**made.files, **own})


def kustomization(name: str, files: Sequence[str]) -> dict[str, Any]:
    """A document that makes the ConfigMap from the folder's files, edits included, on apply."""
    config_map = {
        "configMapGenerator": [{"name": name, "files": list(files)}],
        "generatorOptions": {"disableNameSuffixHash": True},
    }
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["trainjob.yaml"],
        "images": [{"name": "heterog", "newName": "heterog", "newTag": "latest"}],
        **(config_map if files else {}),
    }


def train_job(name: str, spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A TrainingRuntime, as hosts are unlike, and the TrainJob that runs it."""
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    return [
        _resource(_TRAINER_API, "TrainingRuntime", name, {"template": {"spec": spec}}),
        _resource(_TRAINER_API, "TrainJob", name, {"runtimeRef": runtime}),
    ]


def _resource(api: str, kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if kind != "TrainingRuntime":
        metadata["labels"] = {QUEUE_LABEL: "default"}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def jobset_spec(
    name: str,
    labels: Mapping[str, str],
    hosts: Mapping[str, Sequence[RankEntry]],
    *,
    config_map: bool,
) -> dict[str, Any]:
    """A JobSet's fields: a Job per host, whose pods find rank 0 by the JobSet's own service."""
    first = next(iter(hosts))
    claim = {"persistentVolumeClaim": {"claimName": name}}
    volume = {"name": "job", **({"configMap": {"name": name}} if config_map else claim)}
    jobs = []
    for host, entries in hosts.items():
        pod = _pod(host, labels[host], entries, f"{name}-{labels[first]}-0-0.{name}", volume)
        job: dict[str, Any] = {
            # A rank that is restarted alone finds no peers: the JobSet restarts all or none.
            "spec": {"completions": 1, "parallelism": 1, "backoffLimit": 0, "template": pod}
        }
        if host == first:
            job["metadata"] = {"labels": {_ANCESTOR_LABEL: "trainer"}}
        jobs.append({"name": labels[host], "replicas": 1, "template": job})
    return {
        # The ranks look for each other before any of them is ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": jobs,
    }


def _pod(
    host: str, label: str, entries: Sequence[RankEntry], master: str, volume: Mapping[str, Any]
) -> dict[str, Any]:
    """The template of a host's pod."""
    container: dict[str, Any] = {
        "name": "node",  # as Kubeflow Trainer calls it
        "image": IMAGE,
        "command": ["bash", f"{_MOUNT}/launch.sh", host],
        "env": [
            {"name": "MASTER_ADDR", "value": master},
            {"name": "MASTER_PORT", "value": str(_PORT)},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},  # a ConfigMap is read-only
        ],
        "volumeMounts": [
            {"name": "job", "mountPath": _MOUNT},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "nodeSelector": {HOST_LABEL: label},
        "containers": [container],
        # NCCL's shared memory does not fit into a container's default of 64 MiB.
        "volumes": [volume, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    num_gpus = sum(entry.has_gpu for entry in entries)
    if num_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": num_gpus}}
        gpu_taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        pod["tolerations"] = [gpu_taint]
    return {"spec": pod}


def _host_labels(hosts: Mapping[str, object], name: str) -> dict[str, str]:
    """Each host's name in a form that Kubernetes allows.

    Raises:
        ExportError: two hosts would have the same one.
    """
    limit = _MAX_NAME - len(name) - _NAME_TAIL
    labels = {host: dns_label(host, limit) for host in hosts}
    for label, alike in grouped((label, host) for host, label in labels.items()).items():
        if len(alike) > 1:
            raise ExportError(
                f"hosts '{alike[0]}' and '{alike[1]}' would both be '{label}' in Kubernetes "
                f"(small letters, digits and '-', at most {limit}); rename one in the cluster "
                "file."
            )
    return labels


def dns_label(text: str, limit: int) -> str:
    """A name of at most ``limit`` small letters, digits and dashes.

    >>> dns_label("Rack 1_A", 63)
    'rack-1-a'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:limit].strip("-") or "x"


def _yaml(documents: Sequence[Mapping[str, Any]]) -> bytes:
    plain = json.loads(json.dumps(documents))  # no value twice, which YAML would refer to
    return yaml.safe_dump_all(plain, sort_keys=False, explicit_start=True).encode()
