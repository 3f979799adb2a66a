"""The page of first steps, followed literally: its files are saved, its commands are run.

Only the installation is a rehearsal: pip reads the folder and its extra as on a new machine, but
downloads and installs nothing, since the tests already run in an environment that has it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_python import ForkedPython

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "start.md").read_text()
FENCE = re.compile(r"^```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(kind, title, body) for kind, title, body in FENCE.findall(PAGE)]
COMMANDS = [line for kind, _, body in BLOCKS if kind == "bash" for line in body.splitlines()]


def run(command: str, folder: Path, *commands: Path) -> str:
    """What a command of the page prints; it is given to the shell as it stands there.

    Args:
        command: with its arguments.
        folder: where it is run.
        commands: folders whose commands come before those of this environment.
    """
    places = [*map(str, commands), str(Path(sys.executable).parent), os.environ["PATH"]]
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": os.pathsep.join(places), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_page_has_an_installation_a_plan_and_a_script() -> None:
    assert [line.split()[0] for line in COMMANDS] == ["pip", "heterog", "torchrun"]
    assert {title for _, title, _ in BLOCKS if title} == {"my_model.py", "lab.yaml", "balanced.py"}


def test_what_is_installed_exists() -> None:
    install = COMMANDS[0]
    # As written, but for what would change this environment.
    options = "--dry-run --no-deps --no-index --no-build-isolation --disable-pip-version-check"
    said = run(f"python -m {install} {options}", ROOT)
    assert "does not provide the extra" not in said
    assert re.search(r"Would install heterog-", said)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stranger_gets_a_plan_and_a_balanced_script(
    tmp_path: Path, python: ForkedPython
) -> None:
    # The two commands as pip makes them, and ranks, but none imports torch again.
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, module in (("heterog", "heterog.cli"), ("torchrun", "torch.distributed.run")):
        (commands / name).write_text(
            f'#!/bin/sh\nPYTHON_EXEC={python.command} exec {python.command} -m {module} "$@"\n'
        )
        (commands / name).chmod(0o755)
    for _, title, body in BLOCKS:
        if title:
            (tmp_path / title).write_text(body)
    plan, script = COMMANDS[1:]
    said = run(plan, tmp_path, commands)
    for line in ("do ", "memory", "where"):
        assert re.search(rf"^{line}", said, re.MULTILINE), said
    assert (tmp_path / "plan.json").is_file()
    assert "<html" in (tmp_path / "plan.html").read_text()[:500]
    dealt = re.findall(r"^ +\d+(?:-\d+)? +(\d+) +(\d+)", said, re.MULTILINE)
    assert any(int(fast) > int(slow) for fast, slow in dealt), f"the faster card has more: {said}"
    lines = re.findall(
        r"rank (\d): (\d+) of 48 samples, loss ([\d.]+)", run(script, tmp_path, commands)
    )
    assert sorted((rank, samples) for rank, samples, _ in lines) == [("0", "36"), ("1", "12")]
    assert len({loss for *_, loss in lines}) == 1
