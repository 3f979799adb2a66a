"""The scripts that print the table and judge its plans, and plans as strategies."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sailor.inputs import Inputs
from sailor.strategies import cluster_of

from heterog.errors import StrategyError
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
def test_a_table_is_judged_by_the_referee(tmp_path: Path) -> None:
    """Every plan of a setting is said as a strategy."""
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
    (tmp_path / "table.json").write_text(table.stdout)
    options = ("--data", str(SAILOR), "--table", str(tmp_path / "table.json"), "--budget", "")
    judged = rows_of(run("sailor_referee.py", *options, "--json"))
    assert [row["method"] for row in judged] == [row["method"] for row in rows]
    for row in judged:
        # The referee knows nothing of Sailor's seconds: near is enough to see no plan misread.
        assert 0.6 < row["referee_s"] / row["sailors_s"] < 1.4, row
        assert 0.0 < row["peak_bytes"] < 48e9


@needs_data
def test_scripts_say_what_they_do_not_know(tmp_path: Path) -> None:
    done = run("sailor_table.py", "--data", str(SAILOR), "--only", "7+9")
    assert done.returncode == 2
    assert "no setting is called 7+9; there are 8+8; 16+16" in " ".join(done.stderr.split())
    done = run("sailor_table.py", "--data", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("cannot read Sailor's file")


def test_clusters_have_sailors_rates(inputs: Inputs) -> None:
    cluster = cluster_of(inputs, {"A100-40": 8, "V100-16": 4})
    assert [device.type.name for device in cluster.devices] == 8 * ["A100-40GB"] + 4 * [
        "V100-16GB"
    ]
    assert cluster.num_hosts == 3
    with pytest.raises(StrategyError, match="6 A100-40 do not fill nodes of 4"):
        cluster_of(inputs, {"A100-40": 6})
