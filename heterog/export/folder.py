"""An exported folder, which is written completely or not at all.

``on_used_devices`` removes idle devices from a plan, so that no job reserves them.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from heterog.errors import HeterogError
from heterog.explain.decided import LoweredStrategy
from heterog.explain.wording import types_in_words
from heterog.files import cannot_write, moved_to, read_json, write_atomically
from heterog.lowering import lower
from heterog.search.cheapest import on_part
from heterog.search.issue_order import issued_step
from heterog.search.plan import Plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator

RANKS_FILE = "ranks.json"
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
                (work / name).chmod(_mode(name))
            work.chmod(0o755)
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
        members = set(cluster.host_devices(host))
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
