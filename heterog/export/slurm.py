"""Target ``slurm``: the torchrun folder and a batch job that starts one process per rank."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from heterog.cluster import Cluster
from heterog.export.folder import (
    Export,
    RankEntry,
    Target,
    by_host,
    fill,
    on_used_devices,
    ranks_of,
)
from heterog.export.torchrun import runtime_folder
from heterog.grouped import grouped
from heterog.search.plan import Plan

TARGET = "slurm"
_WHAT = (
    "A Slurm job that runs the plan with heterog on whole nodes, one process per rank. Add "
    "partition, account and time to job.sbatch; its GPU types are the plan's names in small "
    'letters, those of your site are shown by sinfo -o "%G".'
)


def export_slurm(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of any plan, for the devices that it uses."""
    plan, unused = on_used_devices(plan)
    ranks = ranks_of(plan.cluster)
    folder = runtime_folder(
        plan,
        Target(TARGET, _WHAT, "sbatch job.sbatch --steps 100"),
        sources,
        ranks,
        remarks=(*unused, *_unlike_links(plan.cluster, ranks)),
    )
    own = {"job.sbatch": job_script(ranks), "slurm_rank.sh": fill("slurm_rank.sh.jinja")}
    return replace(folder, files={**folder.files, **own})


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
    kinds = grouped(
        (tuple(entry.type for entry in entries), host) for host, entries in hosts.items()
    )
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
        "job.sbatch.jinja",
        components="\n#SBATCH hetjob\n".join(components),
        node_lists="\n".join(lists),
        first_ranks=" ".join(nodes[host] for host in hosts),
        num_hosts=len(hosts),
        world_size=len(ranks),
        options=f"{het_group}{gpu_bind}",
    )


def _component(entries: Sequence[RankEntry], num_nodes: int) -> list[str]:
    """The options of hosts of one kind."""
    lines = [f"#SBATCH --nodes={num_nodes} --ntasks-per-node={len(entries)} --exclusive"]
    gpus = Counter(
        re.sub("[^a-z0-9]", "_", entry.type.lower()) for entry in entries if entry.has_gpu
    )
    if gpus:
        wanted = ",".join(f"gpu:{kind}:{count}" for kind, count in gpus.items())
        lines.append(f"#SBATCH --gres={wanted}")
    return lines
