"""An exported folder: its files, and writing them whole or not at all.

Target ``torchrun``: any plan, run by heterog in a script that torchrun starts.

The device and samples of each rank, and how the ranks of a host are started.

The README of an exported folder.
"""

import ast
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from heterog.cluster import Cluster
from heterog.cluster.overrides import is_cpu
from heterog.errors import HeterogError
from heterog.files import cannot_write, read_bytes, read_json, write_atomically
from heterog.search.plan import Plan
from heterog.units import MIB, format_seconds
from heterog.user_code import trusted_source

RANKS_FILE = "ranks.json"
USER_FILE = "user.py"
_TEMPLATES = resources.files("heterog.export") / "templates"


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


class _Text(Template):
    """A template whose placeholders cannot be mistaken for the shell's: ``%%{name}``."""

    delimiter = "%%"


def fill(template: str, **values: object) -> bytes:
    """A file of ``templates/`` with its ``%%{name}`` placeholders replaced."""
    text = (_TEMPLATES / template).read_text(encoding="utf-8")
    return _Text(text).substitute(values).encode()


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
        work = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}."))
        try:
            for name, content in export.files.items():
                (work / name).write_bytes(content)
                (work / name).chmod(_mode(name))
            work.chmod(0o755)
            os.replace(work, folder)  # replaces an empty folder as well
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
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
        (folder / name).chmod(_mode(name))
        written.append(folder / name)
    return written


def _exported(folder: Path) -> dict[str, Any]:
    """The rank map of an exported folder; empty if it is none."""
    if not (folder / RANKS_FILE).is_file():
        return {}
    record = read_json(folder / RANKS_FILE, "rank map")
    return record if isinstance(record, dict) else {}


def _mode(name: str) -> int:
    return 0o755 if name.endswith(".sh") else 0o644


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
    hosts: dict[str, list[RankEntry]] = {}
    for entry in ranks:
        hosts.setdefault(entry.host, []).append(entry)
    return hosts


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
    equal = len({len(entries) for entries in hosts.values()}) == 1
    cases = []
    for node, (host, entries) in enumerate(hosts.items()):
        if equal:
            action = (
                f'exec "$python" -m torch.distributed.run --nnodes {len(hosts)} '
                f"--nproc-per-node {len(entries)} --node-rank {node} "
                '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" '
                f'{train} "$@"'
            )
        else:
            action = f"ranks=({' '.join(str(entry.rank) for entry in entries)})"
        devices = ", ".join(f"{entry.rank} on {entry.device}" for entry in entries)
        cases.append(f"  # ranks: {_one_line(devices)}\n  {shlex.quote(host)}) {action} ;;")
    return fill(
        "launch_torchrun.sh.tmpl" if equal else "launch_ranks.sh.tmpl",
        cases="\n".join(cases),
        hosts=shlex.quote(f"unknown host; the plan has: {', '.join(hosts)}"),
        first_host=shlex.quote(ranks[0].host),
        world_size=len(ranks),
        train=train,
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


_WIDTH = 100


def readme(
    plan: Plan,
    target: str,
    *,
    what: str,
    start: str,
    user: str,
    num_ranks: int,
    not_expressed: Sequence[str],
) -> bytes:
    """A page with a description of the folder, how to start it and what to expect.

    Args:
        plan: Plan that was exported.
        target: Name of the target.
        what: A sentence or two about the folder.
        start: Command that starts the job.
        user: What has to be filled in in ``user.py``.
        num_ranks: Number of ranks that are started.
        not_expressed: Parts of the plan that are left out, see ``Export``.
    """
    assert plan.step_time_s is not None
    idle = plan.cluster.num_devices - num_ranks
    expect = (
        f"Fill in `user.py` ({user}); `ranks.json` says which rank runs where. Method "
        f"{in_markdown(plan.method)}, {plan.graph.batch_size} samples a step over {num_ranks} "
        "ranks, predicted "
        f"{format_seconds(plan.step_time_s)} a step in heterog's own schedule."
    )
    if idle:
        expect += f" Not started: {idle} devices without samples."
    return fill(
        "readme.md.tmpl",
        model=in_markdown(plan.graph.name),
        cluster=in_markdown(plan.cluster.name),
        target=target,
        what=_wrap(what),
        start=start,
        expect=_wrap(expect),
        not_expressed="\n".join(f"- {in_markdown(remark)}" for remark in not_expressed)
        or "- nothing",
    )


def launch_command(ranks: Sequence[RankEntry]) -> str:
    """The command that calls ``launch.sh``, in a line for the README."""
    hosts = list(by_host(ranks))
    return f"bash launch.sh HOST --steps 100    # on {', '.join(hosts)}; MASTER_ADDR is {hosts[0]}"


def _wrap(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


TARGET = "torchrun"
MODEL_FILE = "model.py"
_MOST_MODEL_BYTES = 16 * MIB
_WHAT = (
    "A script that runs the plan with heterog: every operator where it was planned, the numbers "
    "of one device. Every host needs this folder and the same versions of torch and heterog."
)
_FROM_ZOO = """\
    from heterog.zoo import load_workload

    return load_workload({source!r}, batch_size)"""
_FROM_FILE = """\
    from heterog.zoo import load_workload

    return load_workload(f"{{HERE / {file!r}}}:{function}", batch_size, must_take=False)"""
_TO_FILL_IN = """\
    raise SystemExit(
        "user.py: fill in workload(): return the heterog.Workload that the plan was made for."
    )"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCode:
    """The code in ``user.py`` that makes the workload.

    Attributes:
        body: Body of the function ``workload``.
        to_do: What a person has to fill in.
        model_file: The user's own file, to be copied; empty if there is none.
        remarks: Sentences about anything that could not be copied.
    """

    body: str
    to_do: str
    model_file: bytes = b""
    remarks: tuple[str, ...] = ()


def export_torchrun(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of any plan."""
    ranks = ranks_of(plan.cluster)
    return runtime_folder(plan, Target(TARGET, _WHAT, launch_command(ranks)), sources, ranks)


class Target(NamedTuple):
    """Another launcher of ranks.

    Attributes:
        name: Its name on the command line.
        what: What its folder is, in a sentence.
        start: Command that starts the ranks.
    """

    name: str
    what: str
    start: str


def runtime_folder(
    plan: Plan,
    target: Target,
    sources: Sequence[str],
    ranks: tuple[RankEntry, ...],
    *,
    remarks: tuple[str, ...] = (),
    plan_file: str = "plan.json",
) -> Export:
    """The files that all targets with heterog at run time have in common."""
    code = workload_code(trusted_source(plan.graph.source, sources, "the plan"))
    not_expressed = (*code.remarks, *remarks)
    user = fill(
        "torchrun_user.py.tmpl",
        model=in_docstring(plan.graph.name),
        source=in_docstring(plan.graph.source) or "not named in the plan",
        optimizer=plan.graph.optimizer,
        batch_size=plan.graph.batch_size,
        workload=code.body,
    )
    files = {
        plan_file: plan_content(plan, compressed=plan_file.endswith(".gz")),
        "train.py": fill("torchrun_train.py.tmpl", plan_file=plan_file),
        USER_FILE: user,
        RANKS_FILE: ranks_document(plan, target.name, ranks, digest(user)),
        "launch.sh": launch_script(ranks),
        "README.md": readme(
            plan,
            target.name,
            what=target.what,
            start=target.start,
            user=code.to_do,
            num_ranks=len(ranks),
            not_expressed=not_expressed,
        ),
    }
    if code.model_file:
        files[MODEL_FILE] = code.model_file
    return Export(target=target.name, files=files, not_expressed=not_expressed)


def plan_content(plan: Plan, *, compressed: bool = False) -> bytes:
    """The plan as the content of its file."""
    with tempfile.TemporaryDirectory(prefix="heterog-") as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        content = path.read_bytes()
    return gzip.compress(content, mtime=0) if compressed else content


def workload_code(source: str) -> WorkloadCode:
    """Code that makes a source's workload again, in a folder that may be on another machine."""
    name, colon, function = source.rpartition(":")
    if not colon:
        if not source:
            remark = "The workload: the plan does not name its source; fill in user.py."
            return _to_fill_in(remark)
        return WorkloadCode(body=_FROM_ZOO.format(source=source), to_do="`batches()`: the data")
    path = Path(name)
    if not path.is_file():
        return _to_fill_in(
            f"The workload: its file {path} is not on this machine; fill in user.py."
        )
    content = read_bytes(path, "model file", _MOST_MODEL_BYTES)
    beside = _modules_beside(path, content)
    remarks: tuple[str, ...] = ()
    if beside:
        remarks = (
            f"The modules {', '.join(beside)} that {path.name} imports from its own folder: copy "
            f"them beside {MODEL_FILE}.",
        )
    return WorkloadCode(
        body=_FROM_FILE.format(file=MODEL_FILE, function=function),
        to_do=f"`batches()`: the data; {MODEL_FILE} is a copy of {in_markdown(path.name)}",
        model_file=content,
        remarks=remarks,
    )


def _to_fill_in(remark: str) -> WorkloadCode:
    return WorkloadCode(
        body=_TO_FILL_IN, to_do="`workload()` and `batches()`: the data", remarks=(remark,)
    )


def _modules_beside(path: Path, content: bytes) -> list[str]:
    """Modules in the file's own folder that it imports."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # whoever runs it gets the error
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    folder = path.parent
    return sorted(
        name
        for name in names
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
    )
