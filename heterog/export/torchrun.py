"""Target ``torchrun``: any plan, run by heterog in a script that torchrun starts."""

import ast
import gzip
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heterog.export.folder import (
    USER_FILE,
    Export,
    RankEntry,
    Target,
    fill,
    in_docstring,
    in_markdown,
    job_folder,
    launch_command,
    launch_script,
    ranks_of,
)
from heterog.files import read_bytes
from heterog.search.plan import Plan
from heterog.units import MIB
from heterog.user_code import trusted_source

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


def runtime_folder(
    plan: Plan,
    target: Target,
    sources: Sequence[str],
    ranks: tuple[RankEntry, ...],
    *,
    remarks: tuple[str, ...] = (),
    plan_file: str = "plan.json",
    templates: str = "torchrun",
    **words: object,
) -> Export:
    """The files that all targets with heterog at run time have in common.

    Args:
        plan: Plan to export.
        target: The launcher.
        sources: Files that the person named.
        ranks: The ranks that it starts.
        remarks: Sentences about what it does not express.
        plan_file: Name of the plan in the folder.
        templates: Beginning of the names of the templates of ``train.py`` and ``user.py``.
        words: What else the template of ``train.py`` asks for.
    """
    code = workload_code(trusted_source(plan.graph.source, sources, "the plan"))
    files = {
        plan_file: plan_content(plan, compressed=plan_file.endswith(".gz")),
        "train.py": fill(f"{templates}_train.py.jinja", plan_file=plan_file, **words),
        USER_FILE: user_file(f"{templates}_user.py.jinja", plan, workload=code.body),
        "launch.sh": launch_script(ranks),
        **({MODEL_FILE: code.model_file} if code.model_file else {}),
    }
    not_expressed = (*code.remarks, *remarks)
    return job_folder(plan, target, ranks, files, user=code.to_do, not_expressed=not_expressed)


def user_file(template: str, plan: Plan, **words: str) -> bytes:
    """``user.py`` from a template that names the plan's model."""
    return fill(
        template,
        model=in_docstring(plan.graph.name),
        source=in_docstring(plan.graph.source) or "not named in the plan",
        optimizer=plan.graph.optimizer,
        batch_size=plan.graph.batch_size,
        **words,
    )


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
            return _to_fill_in("The workload: the plan does not name its source; fill in user.py.")
        return WorkloadCode(body=_FROM_ZOO.format(source=source), to_do="`batches()`: the data")
    path = Path(name)
    if not path.is_file():
        return _to_fill_in(
            f"The workload: its file {path} is not on this machine; fill in user.py."
        )
    content = read_bytes(path, "model file", _MOST_MODEL_BYTES)
    beside = _modules_beside(path, content)
    remark = (
        f"The modules {', '.join(beside)} that {path.name} imports from its own folder: copy "
        f"them beside {MODEL_FILE}."
    )
    return WorkloadCode(
        body=_FROM_FILE.format(file=MODEL_FILE, function=function),
        to_do=f"`batches()`: the data; {MODEL_FILE} is a copy of {in_markdown(path.name)}",
        model_file=content,
        remarks=(remark,) if beside else (),
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
    every = list(ast.walk(tree))
    names = [alias.name for node in every if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in every if isinstance(node, ast.ImportFrom)]
    return sorted(
        name
        for name in {name.partition(".")[0] for name in names} - {""}
        if (path.with_name(f"{name}.py")).is_file()
        or (path.with_name(name) / "__init__.py").is_file()
    )
