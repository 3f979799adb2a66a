"""Published layouts on small models: what a program does is what the textbook says."""

import csv
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.thorough import THOROUGH

SCRIPT = Path(__file__).parents[1] / "experiments" / "published_layouts.py"
COLUMNS = ("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers",
           "sequence length", "tensor parallelism", "data parallelism", "pipeline parallelism",
           "iteration time (ms)")  # fmt: skip


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The script, in this process: the imports of another one would take most of the time."""

    def call(*options: str) -> dict[str, Any]:
        monkeypatch.syspath_prepend(str(SCRIPT.parent))
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, "--json"])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


def test_programs_do_what_the_textbook_says(run: Run, tmp_path: Path) -> None:
    """As many heads as samples, more teams than a host has room for, one replica and many."""
    rows = [
        # GPUs, batch, micro-batch, h, a, l, s, tp, dp, pp
        (1, 8, 2, 64, 8, 4, 32, 1, 1, 1, 1.0),
        (4, 8, 1, 64, 8, 4, 32, 4, 1, 1, 1.0),
        (8, 8, 1, 64, 8, 4, 32, 2, 2, 2, 1.0),
        (8, 8, 2, 64, 8, 4, 32, 1, 2, 4, 1.0),
        (32, 64, 1, 64, 8, 4, 32, 2, 4, 4, 1.0),
    ]
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as target:
        csv.writer(target).writerows([COLUMNS, *rows])
    found = run("--vtrain", str(file))
    assert found["expressible"] == found["agreeing"] == 1.0
    assert found["num_rows"] == len(rows)
    for row in found["rows"]:
        assert row["simulated_s"] > 0.0
        assert all(each["off"] < 1e-6 for each in row["compared"].values()), row["compared"]
    largest = max(found["rows"], key=lambda row: row["devices"])["compared"]
    assert all(each["program"] > 0.0 for each in largest.values())


@THOROUGH
@pytest.mark.slow
def test_unlike_pipelines_on_mixed_cards(run: Run, tmp_path: Path) -> None:
    """One copy over two stages with teams of two and four, one on a single team."""

    def replicas(*entries: tuple[str, int]) -> list[Any]:
        return [[[[card, count, "zone"]], count] for card, count in entries]

    layers = list(range(26))
    row = {
        "pipeline_list": [
            {
                "num_stages": 2,
                "layers_per_stage": [layers[:11], layers[11:]],
                "tmp_per_stage": [replicas(("Titan-RTX", 2)), replicas(("RTX-2080", 4))],
                "dp": [1, 1],
            },
            {
                "num_stages": 1,
                "layers_per_stage": [layers],
                "tmp_per_stage": [replicas(("RTX-3090", 2))],
                "dp": [1],
            },
        ],
        "mbs": 1,
        "gbs": 8,
        "real": 1.0,
        "file": "OPT-350/mixed.json",
    }
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row]))
    found = run("--sailor", str(file))
    assert found["expressible"] == found["agreeing"] == 1.0
    (judged,) = found["rows"]
    assert judged["compared"]["data_bytes"]["program"] > 0.0


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
    """What ``_MaskedOnAView`` of the experiment prices is what autograd runs, by torch itself."""
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
