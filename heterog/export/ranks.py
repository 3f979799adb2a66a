"""The device and samples of each rank, the script that starts a host's ranks, and their folder."""

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from heterog.cluster import Cluster
from heterog.cluster.schema import is_cpu
from heterog.export.folder import RANKS_FILE, USER_FILE, Export, digest, fill, in_markdown
from heterog.grouped import grouped
from heterog.search.plan import Plan
from heterog.units import format_seconds

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEntry:
    """One rank of a job.

    Attributes:
        rank: Number of the rank.
        device: Name of its device in the plan's cluster.
        type: Type of the device.
        kind: ``"cuda"`` or ``"cpu"``, as the scripts of other launchers read it.
        host: Name of its host in the plan's cluster.
        local_device: Position of the device among all devices of its host.
        first_sample: First sample of the global batch, if the target cuts it by rank.
        batch_size: Number of samples of the global batch, if the target cuts it by rank.
        micro_batches: The same samples by micro-batch, without empty ones.
    """

    rank: int
    device: str
    type: str
    kind: str
    host: str
    local_device: int
    first_sample: int = 0
    batch_size: int = 0
    micro_batches: tuple[int, ...] = ()

    @property
    def has_gpu(self) -> bool:
        """Whether its device is a GPU."""
        return self.kind == "cuda"


def ranks_of(
    cluster: Cluster, micro_batches: Mapping[int, tuple[int, ...]] | None = None
) -> tuple[RankEntry, ...]:
    """One rank per device; with micro-batches by device, only for devices that have some."""
    entries: list[RankEntry] = []
    first = 0
    for index, device in enumerate(cluster.devices):
        if micro_batches is not None and index not in micro_batches:
            continue
        counts = () if micro_batches is None else micro_batches[index]
        entries.append(
            RankEntry(
                rank=len(entries),
                device=device.name,
                type=device.type.name,
                kind="cpu" if is_cpu(device.type.name) else "cuda",
                host=cluster.hosts[device.host_index].name,
                local_device=cluster.host_devices(device.host_index).index(index),
                first_sample=first,
                batch_size=sum(counts),
                micro_batches=counts,
            )
        )
        first += sum(counts)
    return tuple(entries)


def by_host(ranks: Sequence[RankEntry]) -> dict[str, list[RankEntry]]:
    """The ranks of each host, in the order of the ranks."""
    return grouped((entry.host, entry) for entry in ranks)


def ranks_document(plan: Plan, target: str, ranks: Sequence[RankEntry], user_digest: str) -> bytes:
    """``ranks.json``: everything about the plan that a training script without heterog needs."""
    started = {entry.device for entry in ranks}
    document = {
        "schema_version": SCHEMA_VERSION,
        "target": target,
        "model": plan.graph.name,
        "num_parameters": plan.graph.num_parameters,
        "cluster": plan.cluster.name,
        "predicted_step_time_s": plan.step_time_s,
        "global_batch_size": plan.graph.batch_size,
        "bucket_bytes": plan.strategy.bucket_bytes,
        "first_bucket_bytes": plan.strategy.first_bucket_bytes,
        "ranks": [asdict(entry) for entry in ranks],
        "not_started": [d.name for d in plan.cluster.devices if d.name not in started],
        "user_digest": user_digest,
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def launch_script(ranks: Sequence[RankEntry], train: str = "train.py") -> bytes:
    """``launch.sh``: starts the ranks of one host.

    torchrun supports only equal numbers of ranks on all hosts (its documentation, "homogeneous
    LOCAL_WORLD_SIZE"); otherwise the script starts the processes itself, under the same variables.
    """
    hosts = by_host(ranks)
    return fill(
        "launch.sh.jinja",
        is_equal=len({len(entries) for entries in hosts.values()}) == 1,
        hosts=[
            {
                "name": shlex.quote(host),
                "ranks": [entry.rank for entry in entries],
                "devices": " ".join(", ".join(f"{e.rank} on {e.device}" for e in entries).split()),
            }
            for host, entries in hosts.items()
        ],
        unknown=shlex.quote(f"unknown host; the plan has: {', '.join(hosts)}"),
        # One host meets itself under any name, and its own may be known to nobody.
        first_host=shlex.quote(ranks[0].host) if len(hosts) > 1 else "127.0.0.1",
        world_size=len(ranks),
        train=train,
        # After "--" torchrun takes no option of the script for an abbreviation of its own.
        script=train if train.startswith("-") else f"-- {train}",
    )


_WIDTH = 100


class Target(NamedTuple):
    """A launcher or framework.

    Attributes:
        name: Its name on the command line.
        what: What its folder is, in a sentence or two.
        start: Command that starts the job.
    """

    name: str
    what: str
    start: str


def job_folder(
    plan: Plan,
    target: Target,
    ranks: tuple[RankEntry, ...],
    files: Mapping[str, bytes],
    *,
    user: str,
    not_expressed: Sequence[str],
) -> Export:
    """The folder of a job: its files, ``ranks.json``, and a page that says how to start it.

    Args:
        plan: Plan that is exported.
        target: What starts the job.
        ranks: The ranks that are started.
        files: The job's own files.
        user: What a person has to fill in.
        not_expressed: Parts of the plan that are left out, see ``Export``.
    """
    assert plan.step_time_s is not None
    idle = plan.cluster.num_devices - len(ranks)
    expect = (
        f"Fill in `user.py` ({user}); `ranks.json` says which rank runs where. Method "
        f"{in_markdown(plan.method)}, {plan.graph.batch_size} samples a step over {len(ranks)} "
        "ranks, predicted "
        f"{format_seconds(plan.step_time_s)} a step in heterog's own schedule."
    )
    if idle:
        expect += f" Not started: {idle} devices without samples."
    readme = fill(
        "readme.md.jinja",
        model=in_markdown(plan.graph.name),
        cluster=in_markdown(plan.cluster.name),
        target=target.name,
        what=_wrap(target.what),
        start=target.start,
        expect=_wrap(expect),
        not_expressed=[in_markdown(remark) for remark in not_expressed],
    )
    of_user = digest(files.get(USER_FILE, b""))
    every = {
        **files,
        RANKS_FILE: ranks_document(plan, target.name, ranks, of_user),
        "README.md": readme,
    }
    return Export(target=target.name, files=every, not_expressed=tuple(not_expressed))


def launch_command(ranks: Sequence[RankEntry]) -> str:
    """The command that calls ``launch.sh``, in a line for the README."""
    hosts = list(by_host(ranks))
    meet = f"; MASTER_ADDR is {hosts[0]}" if len(hosts) > 1 else ""
    return f"bash launch.sh HOST --steps 100    # on {', '.join(hosts)}{meet}"


def _wrap(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
