"""An exported folder: its table of ranks, the script that starts a host's ranks, its README.

It is written completely or not at all. ``on_used_devices`` removes idle devices from a plan, so
that no job reserves them.
"""

import hashlib
import json
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from heterog.cluster import Cluster
from heterog.cluster.schema import is_cpu
from heterog.errors import HeterogError
from heterog.explain.decided import LoweredStrategy
from heterog.explain.wording import types_in_words
from heterog.files import cannot_write, moved_to, read_json, write_atomically
from heterog.grouped import grouped
from heterog.lowering import lower
from heterog.search.cheapest import on_part
from heterog.search.issue_order import issued_step
from heterog.search.plan import Plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.units import format_seconds

RANKS_FILE = "ranks.json"
SCHEMA_VERSION = 1
USER_FILE = "user.py"
# Comments are <# #>, because the shell's ${#list[@]} has jinja2's usual mark.
_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("heterog.export"),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    comment_start_string="<#",
    comment_end_string="#>",
)


class ExportError(HeterogError):
    """A plan that a target cannot express, or a folder that cannot be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The content of an exported folder, before anything is written.

    Attributes:
        target: Name of the target.
        files: Content by file name; ``user.py`` is the file that people edit.
        not_expressed: A sentence for each part of the plan that the target leaves out.
    """

    target: str
    files: Mapping[str, bytes]
    not_expressed: tuple[str, ...] = ()


def fill(template: str, **values: object) -> bytes:
    """A file made by jinja2 from a template of ``templates/``; every variable has to be given."""
    return _TEMPLATES.get_template(template).render(values).encode()


def in_docstring(text: str) -> str:
    r"""A text for a template's docstring in three double quotes, which it cannot end or escape.

    >>> print(in_docstring('a "b" \\'))
    a \"b\" \\
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in escaped)


def in_markdown(text: str) -> str:
    r"""A text for a page in Markdown, where it makes no link, code, tag or emphasis.

    >>> print(in_markdown("see [x](http://y) <b>"))
    see \[x\](http://y) \<b\>
    """
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", line)


def digest(content: bytes) -> str:
    """A hash that tells an edited file from the exported one."""
    return hashlib.sha256(content).hexdigest()[:16]


def check_folder(folder: Path, target: str, *, overwrite: bool) -> None:
    """Refuse a folder whose content an export would mix with or destroy.

    Raises:
        ExportError: it is a file, not empty, or holds something else than this target's export.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ExportError(f"cannot export to {folder}: it is not a folder; name another one.")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise ExportError(f"cannot export to {folder}: the folder {parent} does not exist.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise ExportError(
            f"{folder} is not empty; name another folder, or pass `overwrite` to renew an export."
        )
    found = _exported(folder).get("target")
    if found != target:
        what = f"an export to {found}" if found else f"no export (no {RANKS_FILE})"
        raise ExportError(
            f"{folder} holds {what}, which an export to {target} does not overwrite; name another "
            "folder."
        )


def write_folder(export: Export, folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write an export; a new folder appears with all its files or not at all.

    An existing export is renewed file by file. Its ``user.py`` stays as it is if somebody edited
    it, and so does every file that the export does not have.

    Returns:
        The files written.

    Raises:
        ExportError: as ``check_folder``.
        InputFileError: the system refuses.
    """
    check_folder(folder, export.target, overwrite=overwrite)
    if folder.exists() and any(folder.iterdir()):
        return _renew(export, folder)
    try:
        with moved_to(folder.absolute(), is_folder=True) as work:
            for name, content in export.files.items():
                (work / name).write_bytes(content)
                _let_run(work / name)
    except OSError as error:
        raise cannot_write(folder, error, sum(map(len, export.files.values()))) from error
    return [folder / name for name in export.files]


def _renew(export: Export, folder: Path) -> list[Path]:
    user = folder / USER_FILE
    edited = user.exists() and digest(user.read_bytes()) != _exported(folder).get("user_digest")
    written = []
    for name, content in export.files.items():
        if name == USER_FILE and edited:
            continue
        write_atomically(folder / name, content)
        _let_run(folder / name)
        written.append(folder / name)
    return written


def _exported(folder: Path) -> dict[str, Any]:
    """The rank map of an exported folder; empty if it is none."""
    if not (folder / RANKS_FILE).is_file():
        return {}
    record = read_json(folder / RANKS_FILE, "rank map")
    return record if isinstance(record, dict) else {}


def _let_run(path: Path) -> None:
    """Let those run a script who may read it."""
    mode = path.stat().st_mode
    if path.suffix == ".sh":
        path.chmod(mode | (mode & 0o444) >> 2)


def on_used_devices(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan on a cluster without idle devices, and remarks on what is not reserved.

    Nothing runs on idle devices and nothing crosses their links, so the step stays as it is. Idle
    devices of a host with several types stay: a launcher counts the devices of a host, and would
    give the plan others. They also stay in a plan with a background job or a mode, because both
    may name devices.
    """
    cluster = plan.cluster
    if plan.background is not None or plan.strategy.modes:
        return plan, ()
    program = lower(plan.graph, cluster, plan.strategy, num_steps=1)
    idle = set(LoweredStrategy(program, plan.strategy, plan.graph).idle)
    for host in range(cluster.num_hosts):
        members = set(cluster.host_devices[host])
        if not members <= idle and len({cluster.devices[each].type for each in members}) > 1:
            idle -= members
    if not idle:
        return plan, ()
    left = [device for device in range(cluster.num_devices) if device not in idle]
    part = cluster.part(left)
    strategy = on_part(plan.strategy, cluster, left, part)
    step = issued_step(Evaluator(plan.graph, part), strategy, Order[plan.order.upper()])

    def peaks(found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(found[device] for device in left) if found else ()

    smaller = replace(
        plan,
        cluster=part,
        strategy=strategy,
        task_order=step.task_order,
        sent_before=step.sent_before,
        program_hash=step.program.hash,
        peak_memory_bytes=peaks(plan.peak_memory_bytes),
        rows=tuple(
            replace(row, peak_memory_bytes=peaks(row.peak_memory_bytes), candidate=None)
            for row in plan.rows
        ),
    )
    unused = types_in_words(cluster, idle)
    return smaller, (f"Devices without work: {unused} not used by the plan, and not reserved.",)


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
                local_device=cluster.host_devices[device.host_index].index(index),
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
