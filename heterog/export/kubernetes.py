"""Target ``kubernetes``: the torchrun folder, and a Job per host that runs it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from heterog.export.folder import Export, ExportError
from heterog.export.ranks import RankEntry, by_host, ranks_of
from heterog.export.torchrun import Target, runtime_folder
from heterog.export.used import on_used_devices
from heterog.search.plan import Plan
from heterog.units import format_bytes

TARGET = "kubernetes"
PLAN_FILE = "plan.json.gz"
CONFIG_MAP_LIMIT_BYTES = 2**20
"""Kubernetes documentation, "ConfigMaps": the data stored in one cannot exceed 1 MiB."""
HOST_LABEL = "heterog/host"
IMAGE = "heterog:latest"
_PORT = 29500
_MOUNT = "/job"
_MAX_NAME = 63  # of a DNS label (RFC 1123)
_WHAT = (
    "A Kubernetes Job for each host, which runs the plan with heterog. Label the nodes (kubectl "
    f"label node NODE {HOST_LABEL}=NAME), and put an image with Python, torch and heterog for "
    f"{IMAGE} in kustomization.yaml."
)


def export_kubernetes(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of any plan, for the devices that it uses."""
    plan, unused = on_used_devices(plan)
    ranks = ranks_of(plan.cluster)
    name = _dns_label(f"heterog-{plan.graph.name}", 24)
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
    files = {
        **made.files,
        "kubernetes.yaml": _yaml(manifests(name, hosts, by_host(ranks), config_map=fits)),
        "kustomization.yaml": _yaml([kustomization(name, sorted(made.files) if fits else [])]),
    }
    return Export(target=TARGET, files=files, not_expressed=made.not_expressed)


def kustomization(name: str, files: Sequence[str]) -> dict[str, Any]:
    """A document that makes the ConfigMap from the folder's files, edits included, on apply."""
    document: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["kubernetes.yaml"],
        "images": [{"name": "heterog", "newName": "heterog", "newTag": "latest"}],
    }
    if files:
        document["configMapGenerator"] = [{"name": name, "files": list(files)}]
        document["generatorOptions"] = {"disableNameSuffixHash": True}
    return document


def manifests(
    name: str,
    labels: Mapping[str, str],
    hosts: Mapping[str, Sequence[RankEntry]],
    *,
    config_map: bool,
) -> list[dict[str, Any]]:
    """A headless Service, by which the pods find rank 0, and one Job per host."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "selector": {"app": name},
            "ports": [{"name": "rendezvous", "port": _PORT}],
            # The ranks look for each other before any of them is ready.
            "publishNotReadyAddresses": True,
        },
    }
    master = f"{labels[next(iter(hosts))]}.{name}"
    volume: dict[str, Any] = {"name": "job"}
    if config_map:
        volume["configMap"] = {"name": name}
    else:
        volume["persistentVolumeClaim"] = {"claimName": name}
    jobs = [
        _job(name, labels[host], host, entries, master, volume) for host, entries in hosts.items()
    ]
    return [service, *jobs]


def _job(
    name: str,
    label: str,
    host: str,
    entries: Sequence[RankEntry],
    master: str,
    volume: Mapping[str, Any],
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "ranks",
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
    num_gpus = sum(entry.has_gpu for entry in entries)
    if num_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": num_gpus}}
    pod = {
        "hostname": label,
        "subdomain": name,
        "restartPolicy": "Never",
        "nodeSelector": {HOST_LABEL: label},
        "containers": [container],
        # NCCL's shared memory does not fit into a container's default of 64 MiB.
        "volumes": [dict(volume), {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-{label}", "labels": {"app": name}},
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,  # a rank that is restarted alone finds no others
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }


def _host_labels(hosts: Mapping[str, object], name: str) -> dict[str, str]:
    """Each host's name in a form that Kubernetes allows.

    Raises:
        ExportError: two hosts would have the same one.
    """
    limit = _MAX_NAME - len(name) - 1
    labels = {host: _dns_label(host, limit) for host in hosts}
    seen: dict[str, str] = {}
    for host, label in labels.items():
        if label in seen:
            raise ExportError(
                f"hosts '{seen[label]}' and '{host}' would both be '{label}' in Kubernetes (small "
                f"letters, digits and '-', at most {limit}); rename one in the cluster file."
            )
        seen[label] = host
    return labels


def _dns_label(text: str, limit: int) -> str:
    """A name of at most ``limit`` small letters, digits and dashes.

    >>> _dns_label("Rack 1_A", 63)
    'rack-1-a'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:limit].strip("-") or "x"


class _Dumper(yaml.SafeDumper):
    """Writes every value out: aliases are valid YAML, but hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(documents: Sequence[Mapping[str, Any]]) -> bytes:
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True)
    return text.encode()
