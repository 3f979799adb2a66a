"""Predictions beside a few published runs, by the script that compares all of them."""

import csv
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.thorough import IS_THOROUGH, THOROUGH, cases

ROOT = Path(__file__).parents[1]
MEASURED = ROOT.parent / "shared" / "data" / "measured"


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the shared measurements are not here")
def test_runs_that_nobody_fitted_are_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of MPT and Megatron a few rows each, and of Sailor the runs on one and two nodes."""
    wanted: dict[str, Callable[[dict[str, str]], bool]] = {
        "mpt_fsdp.csv": lambda row: row["Model"] == "760m" and row["# GPUs"] in ("16", "64"),
        "vtrain_one_node.csv": lambda row: (
            row["pipeline parallelism"] == row["tensor parallelism"] == "1"
            and row["# GPUs"] == "4" and row["hidden size"] == "1024"
        ),
    }  # fmt: skip
    for name, is_wanted in wanted.items():
        with (MEASURED / name).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if row["split"] == "test" and is_wanted(row)]
        if not IS_THOROUGH:  # a capture for each of their models
            continue
        rows = rows[: cases(4, 1)]
        assert rows, name
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    few = [
        run
        for run in json.loads((MEASURED / "sailor_gh200_opt.json").read_text())
        if run["N"] <= 2
    ][: cases(4, 1)]
    (tmp_path / "sailor_few.json").write_text(json.dumps(few))
    script = ROOT / "experiments" / "published_runs.py"
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "--data", str(tmp_path), "--json"])
    # In this process: the imports of another one would take half of the time.
    runpy.run_path(str(script), run_name="__main__")
    families = {each["name"]: each for each in json.loads(capsys.readouterr().out)["families"]}
    others = ("MPT with FSDP, A100-40GB", "MPT with FSDP, H100", "vTrain, one node")
    for name in others if IS_THOROUGH else ():
        assert families[name]["mape"] < 0.1, name
        assert families[name]["interval_coverage"] is not None
    assert families["Sailor, few"]["mape"] < 0.25
    assert families["Sailor, few"]["memory_mape"] < 0.08


@THOROUGH
@pytest.mark.skipif(not MEASURED.is_dir(), reason="the shared measurements are not here")
def test_errors_of_peaks_that_ship_are_those_of_four_runs(tmp_path: Path) -> None:
    """Fitted again to the runs on one and two nodes; of the others, three kinds are predicted."""
    name = "sailor_gh200_opt.json"
    runs = json.loads((MEASURED / name).read_text())
    few = [run for run in runs if run["N"] <= 2 or run["N"] == 4]
    (tmp_path / name).write_text(json.dumps(few))
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "peak_errors.py"), "--data", str(tmp_path),
         "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["fitted"].pop("spread") == pytest.approx(found["ships"].pop("spread"), rel=0.01)
    assert found["fitted"] == found["ships"]
    assert found["num_tested"] == found["num_inside"] == 3


class _Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the ops that read or write tensors of one number of elements."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = size
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        of_size = [
            each for each in (*args, found)
            if isinstance(each, torch.Tensor) and each.numel() == self.size
        ]  # fmt: skip
        if of_size:
            self.names.append(op.overloadpacket.__name__)
        return found


def test_masking_a_view_in_place_copies_its_gradient() -> None:
    """What ``_MaskedOnAView`` of the models prices is what autograd runs, by torch itself."""
    batch, heads, length, width = 2, 3, 8, 5
    query, key, value = (torch.randn(batch * heads, length, width) for _ in range(3))
    query.requires_grad_()
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = torch.baddbmm(
        torch.empty(batch * heads, length, length), query, key.transpose(1, 2), beta=0.0, alpha=0.5
    )
    seen = scores.view(batch, heads, length, length)
    seen.masked_fill_(later, -1e4)
    weights = seen.softmax(-1).view(scores.shape)
    with _Noted(scores.numel()) as noted:
        torch.autograd.grad((weights @ value).sum(), query)
    views = {"view", "as_strided", "detach", "transpose", "expand", "_unsafe_view"}
    ran = [name for name in noted.names if name not in views | {"new_empty_strided"}]
    after = ran[ran.index("_softmax_backward_data") + 1 :]
    masking = ["new_zeros", "copy_", "copy_", "clone", "masked_fill", "copy_"]
    assert after[: len(masking)] == masking
    assert set(after[len(masking) :]) == {"bmm"}
    passes = {"new_zeros": 1, "copy_": 2, "clone": 2, "masked_fill": 4}  # a clone and a fill
    priced = 2 * 5 + 2
    assert sum(passes[name] for name in masking) == priced + passes["new_zeros"]
