"""A run in a file: the same plan, and one clear line for what is no run."""

import json
from pathlib import Path
from typing import Any

import pytest

from heterog import cli

MODEL = """
import heterog, torch

def workload(batch_size: int = 8) -> heterog.Workload:
    batch = torch.zeros(batch_size, 16), torch.zeros(batch_size, 4)
    return heterog.Workload(lambda: torch.nn.Linear(16, 4), batch,
                            torch.nn.functional.mse_loss, torch.optim.SGD, name="small")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "m.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["heterog", "plan", *arguments])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_saved_run_gives_the_same_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["m.py:workload", "--cluster", "rtx_mixed", "--method", "cp_ar,local_search"]
    said += ["--budget", "20e", "--seed", "3", "--no-changes", "-o", "a.json"]
    assert plan(monkeypatch, *said, "--save-config", "run.yaml") == 0
    text = (folder / "run.yaml").read_text()
    assert "seed: 3\n" in text
    assert "no_changes: true\n" in text
    (folder / "run.yaml").write_text(text + "batch-size: 16\n")
    assert plan(monkeypatch, "run.yaml", "--batch-size", "8", "-o", "b.json") == 0

    def content(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / name).read_text())
        return {key: found[key] for key in ("task_order", "strategy", "step_time_s", "seed")}

    assert content("a.json") == content("b.json")
    assert plan(monkeypatch, "run.yaml", "-o", "c.json") == 0
    assert json.loads((folder / "c.json").read_text())["batch_size"] == 16


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sed: 3", "unknown setting in bad.yaml 'sed'; did you mean 'seed'?"),
        ("seed: true", "'seed' is True; it must be a number or a text"),
        ("no_changes: 3", "'no_changes' is 3; it must be true or false"),
        ("cluster: {a: 1}", "'cluster' is {'a': 1}"),
        ("- a", "not settings with names"),
        ("seed: 3", "does not say 'model'"),
        ("", "the file is empty"),
        ("save_config: a.yaml", "unknown setting"),
    ],
)
def test_what_is_no_run_is_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    problem: str,
) -> None:
    (folder / "bad.yaml").write_text(text)
    assert plan(monkeypatch, "bad.yaml", "--cluster", "rtx_mixed") == 2
    error = capsys.readouterr().err
    assert problem in error
    assert len(error.splitlines()) == 1


def test_a_run_file_is_not_written_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "model: m.py:workload\ncluster: bad.yaml\n"
    (folder / "bad.yaml").write_text(text)
    for option in ("--save-config", "-o"):
        assert plan(monkeypatch, "bad.yaml", option, "bad.yaml") == 2
        assert "cannot write bad.yaml" in capsys.readouterr().err
    assert (folder / "bad.yaml").read_text() == text
