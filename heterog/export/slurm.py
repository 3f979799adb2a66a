"""Target ``slurm``: the torchrun folder and a batch job that starts one process per rank.

Target ``kubernetes``: the torchrun folder, and a Job per host that runs it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from heterog.cluster import Cluster
from heterog.export.folder import (
    Export,
    ExportError,
    RankEntry,
    Target,
    by_host,
    fill,
    ranks_of,
    runtime_folder,
)
from heterog.search.plan import Plan
from heterog.units import format_bytes

SLURM_TARGET = "slurm"
_SLURM = (
    "A Slurm job that runs the plan with heterog on whole nodes, one process per rank. Add "
    "partition, account and time to job.sbatch; its GPU types are the plan's names in small "
    'letters, those of your site are shown by sinfo -o "%G".'
)

Kind = tuple[str, ...]
"""Device types of a host: hosts of one kind can replace each other."""


def export_slurm(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of any plan."""
    ranks = ranks_of(plan.cluster)
    folder = runtime_folder(
        plan,
        Target(SLURM_TARGET, _SLURM, "sbatch job.sbatch --steps 100"),
        sources,
        ranks,
        remarks=_unlike_links(plan.cluster, ranks),
    )
    files = {
        **folder.files,
        "job.sbatch": job_script(ranks),
        "slurm_rank.sh": fill("slurm_rank.sh.tmpl"),
    }
    return Export(target=SLURM_TARGET, files=files, not_expressed=folder.not_expressed)


def _unlike_links(cluster: Cluster, ranks: Sequence[RankEntry]) -> tuple[str, ...]:
    """A remark about hosts that Slurm may exchange although their links differ."""
    links = {
        host.name: (host.nic_line_rate_bytes_per_s, host.num_nics, host.intra)
        for host in cluster.hosts
    }
    remarks = []
    for members in _by_kind(by_host(ranks)):
        unlike = [host for host in members if links[host] != links[members[0]]]
        if unlike:
            remarks.append(
                f"Which node is '{members[0]}' and which '{unlike[0]}': they have the same "
                "devices but other links; name the nodes with --nodelist in job.sbatch; Slurm "
                "lists them sorted."
            )
    return tuple(remarks)


def _by_kind(hosts: Mapping[str, Sequence[RankEntry]]) -> list[list[str]]:
    """Groups of hosts with the same devices, in the order of their first rank."""
    kinds: dict[Kind, list[str]] = {}
    for host, entries in hosts.items():
        kinds.setdefault(tuple(entry.type for entry in entries), []).append(host)
    return list(kinds.values())


def job_script(ranks: Sequence[RankEntry]) -> bytes:
    """``job.sbatch``: a plain job for hosts of one kind, a heterogeneous job for several.

    Equal numbers of devices are not enough for a plain job: the ranks of a fast host could run
    on a slow one.
    """
    hosts = by_host(ranks)
    groups = _by_kind(hosts)
    components, lists, nodes = [], [], {}
    for number, members in enumerate(groups):
        components.append("\n".join(_component(hosts[members[0]], len(members))))
        variable = "SLURM_JOB_NODELIST"
        if len(groups) > 1:
            variable += f"_HET_GROUP_{number}"
        lists.append(f'mapfile -t group{number} < <(scontrol show hostnames "${variable}")')
        for position, host in enumerate(members):
            nodes[host] = f"${{group{number}[{position}]}}={hosts[host][0].rank}"
    het_group = f" --het-group={','.join(map(str, range(len(groups))))}" if len(groups) > 1 else ""
    gpu_bind = " --gpu-bind=none" if any(entry.has_gpu for entry in ranks) else ""
    return fill(
        "job.sbatch.tmpl",
        components="\n#SBATCH hetjob\n".join(components),
        node_lists="\n".join(lists),
        first_ranks=" ".join(nodes[host] for host in hosts),
        num_hosts=len(hosts),
        world_size=len(ranks),
        options=f"{het_group}{gpu_bind}",
    )


def _component(entries: Sequence[RankEntry], num_nodes: int) -> list[str]:
    """The options of hosts of one kind."""
    lines = [
        f"#SBATCH --nodes={num_nodes} --ntasks-per-node={len(entries)} --exclusive",
    ]
    gpus = Counter(_gpu_type(entry.type) for entry in entries if entry.has_gpu)
    if gpus:
        wanted = ",".join(f"gpu:{kind}:{count}" for kind, count in gpus.items())
        lines.append(f"#SBATCH --gres={wanted}")
    return lines


def _gpu_type(name: str) -> str:
    """A type in a form that Slurm allows."""
    return "".join(
        letter if letter.isascii() and letter.isalnum() else "_" for letter in name.lower()
    )


KUBERNETES_TARGET = "kubernetes"
PLAN_FILE = "plan.json.gz"
CONFIG_MAP_LIMIT_BYTES = 2**20
"""Kubernetes documentation, "ConfigMaps": the data stored in one cannot exceed 1 MiB."""
HOST_LABEL = "heterog/host"
IMAGE = "heterog:latest"
_PORT = 29500
_MOUNT = "/job"
_MAX_NAME = 63  # of a DNS label (RFC 1123)
_KUBERNETES = (
    "A Kubernetes Job for each host, which runs the plan with heterog. Label the nodes (kubectl "
    f"label node NODE {HOST_LABEL}=NAME), and put an image with Python, torch and heterog for "
    f"{IMAGE} in kustomization.yaml."
)


def export_kubernetes(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of any plan."""
    ranks = ranks_of(plan.cluster)
    name = _dns_label(f"heterog-{plan.graph.name}", 24)
    hosts = _host_labels(by_host(ranks), name)

    def folder(remarks: tuple[str, ...]) -> Export:
        return runtime_folder(
            plan,
            # Server side: kubectl's own record of what it applied may not exceed 256 KiB.
            Target(KUBERNETES_TARGET, _KUBERNETES, "kubectl apply --server-side -k ."),
            sources,
            ranks,
            remarks=remarks,
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
    return Export(target=KUBERNETES_TARGET, files=files, not_expressed=made.not_expressed)


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
