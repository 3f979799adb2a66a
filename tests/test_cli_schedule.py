"""``heterog schedule``: what it prints, and one clear line for bad input."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from heterog import cli
from heterog.envs.toy import chain_graph
from heterog.graph.serialize import save_graph


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """Two jobs that want all devices, and one that wants the impossible."""
    save_graph(chain_graph(num_layers=2, width=4096, batch_size=2048), tmp_path / "chain.json")
    model = f"model: {tmp_path / 'chain.json'}, steps: 1000"
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "schema_version: 1\njobs:\n"
        f"  - {{name: long, {model}, every: 1 s, count: 2}}\n"
        f"  - {{name: soon, {model}, arrives: 1000, deadline: 1 ms}}\n"
    )
    return path


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["heterog", "schedule", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def test_schedule_says_who_gets_what(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(jobs), "--cluster", "paper_8gpu", "--rule", "most", "--methods", "cp_ar")
    code, out, _ = call(monkeypatch, capsys, *words, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    assert [job["outcome"] for job in found["jobs"]] == ["accepted", "no room", "too late"]
    assert len(found["jobs"][0]["devices"]) == 8
    assert found["blocking_rate"] == pytest.approx(2 / 3)
    code, out, _ = call(monkeypatch, capsys, *words, "--json", "--wait")
    first, second, _ = json.loads(out)["jobs"]
    assert second["outcome"] == "accepted"
    assert second["starts_s"] == first["ends_s"]
    code, out, _ = call(monkeypatch, capsys, *words)
    assert code == 0
    assert "2 of 3 blocked (66.7%)" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rule", "mots"), "unknown rule 'mots'; did you mean 'most'"),
        (("--methods", "cp_ra"), "unknown method 'cp_ra'; did you mean 'cp_ar'"),
        (("--cluster", "no_such"), "unknown cluster 'no_such'"),
    ],
)
def test_bad_input_is_one_line(
    jobs: Path,
    words: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = call(monkeypatch, capsys, str(jobs), "--cluster", "paper_8gpu", *words)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_a_job_that_fits_nowhere_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_graph(chain_graph(num_layers=1, width=131072, batch_size=2), tmp_path / "wide.json")
    path = tmp_path / "jobs.yaml"
    path.write_text(
        f"schema_version: 1\njobs: [{{name: a, model: {tmp_path / 'wide.json'}, steps: 1}}]"
    )
    code, out, err = call(
        monkeypatch, capsys, str(path), "--cluster", "paper_8gpu", "--methods", "cp_ar"
    )
    assert (code, out) == (2, "")
    assert "does not fit into the memory of cluster 'paper_8gpu'" in err
    assert len([line for line in err.splitlines() if line.startswith("heterog:")]) == 1
