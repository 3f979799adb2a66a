"""The script that prints the table."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.thorough import THOROUGH

ROOT = Path(__file__).parents[2]
SAILOR = ROOT.parent / "shared" / "data" / "sailor"
needs_data = pytest.mark.skipif(not SAILOR.is_dir(), reason="the shared measurements are not here")


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / script), *options],
        capture_output=True,
        text=True,
        check=False,
    )


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


@THOROUGH
@needs_data
@pytest.mark.slow
def test_a_table_has_the_best_of_each_method() -> None:
    """Sailor's own plan has Sailor's own seconds."""
    table = run(
        "sailor_table.py",
        "--data",
        str(SAILOR),
        "--evaluations",
        "6000",
        "--only",
        "8+8",
        "--json",
    )
    rows = rows_of(table)
    assert [row["method"] for row in rows] == ["Sailor", "best even plan", "ours"]
    assert all(row["is_valid"] for row in rows)
    assert rows[0]["step_time_s"] == pytest.approx(22.990843, abs=1e-6)


@needs_data
def test_scripts_say_what_they_do_not_know(tmp_path: Path) -> None:
    done = run("sailor_table.py", "--data", str(SAILOR), "--only", "7+9")
    assert done.returncode == 2
    assert "no setting is called 7+9; there are 8+8; 16+16" in " ".join(done.stderr.split())
    done = run("sailor_table.py", "--data", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("cannot read Sailor's file")
