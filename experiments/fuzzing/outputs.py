"""Calls of the command line with outputs of every kind, good and bad.

A case is a folder with inputs, links, a pipe and a device, and a call whose outputs are drawn from
the folder's names and others. Whatever the outcome, only the outputs may have changed, and a
refused call must have written nothing.
"""

import gzip
import json
import os
import random
import stat
from contextlib import chdir, suppress
from itertools import pairwise
from pathlib import Path

from heterog.cli import app
from heterog.cli.outputs import standard_streams
from heterog.errors import HeterogError

INPUTS = ("plan.json", "graph.json", "lab.yaml", "measurements.json", "m.py")
PLACES = (
    *("link.json", "hard.json", "far.json", "pipe", "to_pipe", "node", "folder", "loop"),
    *("./plan.json", "folder/../graph.json", "folder/new.json", "no/new.json", "m.py/x", ""),
    *(
        ".",
        "..",
        "new.json/",
        "a\nb.json",
        "pl\u00e4n.json",
        "\udcff.json",
        "rows.csv",
        "x\x1b.json",
    ),
    *("a" * 250 + ".json", "a" * 300, "new.html", "new.csv", "old.json", "old.html"),
)
NEW = ("new.json", "other.json", "new.json.gz", "new.html", "third.json")
PLAN = ("plan", "graph.json", "--cluster", "lab.yaml", "--method", "ev_ar", "--budget", "2e")
CALLS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    ((*PLAN, "--no-changes"), ("-o", "--trace", "--report")),
    (("report", "plan.json"), ("-o",)),
    (("capture", "graph.json"), ("-o",)),
    (("calibrate", "measurements.json", "--cluster", "lab.yaml"), ("-o",)),
    (("export", "plan.json", "--to", "ddp"), ("-o",)),
    (
        ("compare", "--models", "graph.json", "--clusters", "lab.yaml", "--methods", "ev_ar",
         "--budget", "2e"),
        ("--csv",),
    ),
)  # fmt: skip
"""Commands with the names of their outputs."""
Snapshot = dict[str, tuple[int, bytes]]


class Wrong(Exception):
    """Something was accepted that is not valid."""


def need(is_so: bool, otherwise: str) -> None:
    """Raise ``Wrong`` with a text unless something is so."""
    if not is_so:
        raise Wrong(otherwise)


def make_case(rng: random.Random, inputs: Path, target: Path) -> str:
    """Make the folder of a case; says which command it calls."""
    target.mkdir()
    for name in INPUTS:
        (target / name).write_bytes((inputs / name).read_bytes())
    for name in ("old.json", "old.html", "rows.csv"):
        (target / name).write_text("old")
    (target / "folder").mkdir()
    (target / "link.json").symlink_to(rng.choice(INPUTS))
    os.link(target / rng.choice(INPUTS), target / "hard.json")
    (target / "far.json").symlink_to("folder/far.json")
    (target / "loop").symlink_to("loop")
    os.mkfifo(target / "pipe")
    (target / "to_pipe").symlink_to("pipe")
    with suppress(PermissionError):  # only root may
        os.mknod(target / "node", 0o20666, os.makedev(1, 3))
    command, options = rng.choice(CALLS)
    call = [*command]
    for option in options:
        if len(options) == 1 or rng.random() < 0.6:
            names = rng.choice((NEW, NEW, INPUTS, PLACES))
            call += [option, rng.choice(names)]
    (target / "call").write_bytes(json.dumps(call).encode())
    return command[0]


def make_call(folder: Path) -> tuple[Path, Snapshot, list[str]]:
    """Make the call of a case; the folder, what was there before, and its outputs.

    Raises:
        HeterogError: the call was refused, and nothing has changed.
    """
    call: list[str] = json.loads((folder / "call").read_text())
    before = seen(folder)
    options = {option for _, options in CALLS for option in options}
    outputs = [name for option, name in pairwise(call) if option in options]
    try:
        with chdir(folder), standard_streams():
            app(call, prog_name="heterog")
    except SystemExit as end:
        if not end.code:
            return folder, before, outputs
        error = HeterogError(f"exit code {end.code}")  # of typer, for arguments that are none
    except HeterogError as refusal:
        error = refusal
    assert seen(folder) == before, f"{call} was refused ({error}), but changed the folder"
    raise error


def check_call(done: tuple[Path, Snapshot, list[str]]) -> None:
    """The outputs of a call were written, and nothing else."""
    folder, before, outputs = done
    after = seen(folder)
    real = {os.path.realpath(folder / name) for name in outputs}
    need(len(real) == len(outputs), f"{outputs} are fewer files")
    for name in {*before, *after}:
        path = folder / name
        inside = any(str(path).startswith(f"{each}/") for each in real)
        if os.path.realpath(path) not in real and not inside:
            need(
                before.get(name) == after.get(name),
                f"{outputs} were written, and {name} has changed",
            )
    for name in outputs:
        path = folder / name
        if path.is_dir():
            continue
        content = path.read_bytes()
        need(path.is_file() and content not in (b"", b"old"), f"{name} was not written")
        if ".json" in name and content[:1] not in (b"<", b"m"):
            json.loads(gzip.decompress(content) if name.endswith(".gz") else content)


def seen(folder: Path) -> Snapshot:
    """Every name in a folder, what it is, and its content."""
    found: Snapshot = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = b""
        if stat.S_ISREG(mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(mode):
            content = os.fsencode(os.readlink(path))
        found[str(path.relative_to(folder))] = mode, content
    return found
