"""The command line: what it prints, what it writes, and one clear line for every bad input."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import heterog
from heterog import cli
from heterog.errors import InputFileError
from heterog.files import read_json, write_json

MODEL = """
import torch
from torch import nn
from torch.nn import functional
import heterog

def workload(batch_size: int = 64) -> heterog.Workload:
    model = lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    batch = (torch.zeros(batch_size, 1024), torch.zeros(batch_size, 8))
    return heterog.Workload(model, batch, functional.mse_loss, torch.optim.Adam)

def not_a_workload() -> int:
    return 3

def value_dependent() -> heterog.Workload:
    class Branch(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x
    batch = (torch.zeros(64, 8), torch.zeros(64, 8))
    return heterog.Workload(lambda: Branch(8, 8), batch, functional.mse_loss, torch.optim.SGD,
                            {"lr": 0.1})
"""


class Result:
    """Exit code and both streams of one call."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["heterog", *map(str, arguments)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        streams = capsys.readouterr()
        assert isinstance(code, int)
        return Result(code, streams.out, streams.err)

    return call


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return f"{path}:workload"


PLAN_FIELDS = {
    "step_time_s", "throughput_samples_per_s", "method", "outcome", "peak_memory_bytes",
    "search_seconds", "num_evaluations", "lower_bound_s", "batch_size", "seed", "budget",
    "step_barrier", "order", "calibration", "methods", "strategy",
}  # fmt: skip
ROW_FIELDS = {
    "model", "cluster", "method", "stage", "outcome", "step_time_s", "lower_bound_s",
    "peak_memory_bytes", "num_evaluations", "search_seconds", "batch_size", "seed",
}  # fmt: skip


def test_plan_prints_one_document_and_writes_whole_files(
    run: Run, model: str, tmp_path: Path
) -> None:
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    result = run("plan", model, "--cluster", "paper_8gpu", "--budget", "200e", "--json",
                 "-o", plan, "--trace", trace)  # fmt: skip
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert PLAN_FIELDS <= set(document)
    assert document["outcome"] == "ok"
    assert document["method"] != "auto"
    assert len(document["peak_memory_bytes"]) == 8
    assert document["throughput_samples_per_s"] == pytest.approx(64 / document["step_time_s"])
    assert all(ROW_FIELDS <= set(row) for row in document["methods"])
    times = [row["step_time_s"] for row in document["methods"] if row["step_time_s"]]
    assert document["step_time_s"] == min(times) >= document["lower_bound_s"]
    loaded = heterog.load_plan(plan)
    assert loaded.step_time_s == document["step_time_s"]
    assert sorted(loaded.task_order) == list(range(len(loaded.task_order)))
    assert loaded.timeline().finish.max() == pytest.approx(loaded.step_time_s)
    assert json.loads(trace.read_text())["traceEvents"]


def test_same_seed_and_evaluations_print_the_same_strategy(run: Run, model: str) -> None:
    call = ("plan", model, "--cluster", "paper_8gpu", "--budget", "150e", "--json", "--seed", "3")
    first, second = json.loads(run(*call).out), json.loads(run(*call).out)
    assert first["strategy"] == second["strategy"]
    assert first["step_time_s"] == second["step_time_s"]


def test_tables_for_people(run: Run, model: str) -> None:
    result = run("plan", model, "--cluster", "paper_8gpu", "--method", "ddp,ev_ps")
    assert result.code == 0, result.err
    assert "ddp" in result.out
    assert "ev_ps" in result.out
    assert "cp_ar" not in result.out
    assert "bert_large_24l" in run("models").out
    assert "paper_8gpu" in run("clusters").out
    assert {"name", "num_parameters"} <= set(json.loads(run("models", "--json").out)[0])
    assert len(json.loads(run("clusters", "--json").out)) == 10


def test_capture_then_plan_from_the_file(run: Run, model: str, tmp_path: Path) -> None:
    graph = tmp_path / "graph.json.gz"
    result = run("capture", model, "--batch-size", 32, "-o", graph, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["batch_size"] == 32
    result = run("plan", graph, "--cluster", "paper_8gpu", "--method", "ddp", "--json")
    assert json.loads(result.out)["batch_size"] == 32
    wrong = run("plan", graph, "--cluster", "paper_8gpu", "--batch-size", 64)
    assert wrong.code == 2
    assert "captured with batch size 32" in wrong.err


def test_compare_prints_rows_and_writes_csv(run: Run, model: str, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    result = run("compare", "--models", model, "--clusters", "paper_8gpu,rtx_mixed", "--budget",
                 "100e", "--csv", table, "--json")  # fmt: skip
    assert result.code == 0, result.err
    rows = json.loads(result.out)["rows"]
    assert all(ROW_FIELDS <= set(row) for row in rows)
    for cluster in ("paper_8gpu", "rtx_mixed"):
        mine = [row for row in rows if row["cluster"] == cluster]
        auto = next(row for row in mine if row["method"] == "auto")
        assert auto["picked_from"]
        assert auto["step_time_s"] == min(row["step_time_s"] for row in mine if row["step_time_s"])
    with table.open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


BAD_CLUSTERS = {
    "zero bandwidth": ("line_rate: 0 Gbit/s", r"line_rate|bandwidth"),
    "negative bandwidth": ("line_rate: -5 Gbit/s", r"line_rate|bandwidth"),
    "unknown field": ("line_rat: 5 Gbit/s", "line_rat"),
    "not yaml": ("line_rate: [5", "line"),
}


@pytest.mark.parametrize("case", BAD_CLUSTERS)
def test_bad_cluster_files_name_file_line_and_field(
    run: Run,
    model: str,
    tmp_path: Path,
    case: str,
) -> None:
    nic, text = BAD_CLUSTERS[case]
    path = tmp_path / "bad.yaml"
    path.write_text(
        "schema_version: 1\nname: bad\nhosts:\n"
        "  - name: a\n    devices: [{type: V100-16GB, count: 1}]\n    nic: {" + nic + "}\n"
        "  - name: b\n    devices: [{type: T4, count: 1}]\n    nic: {line_rate: 5 Gbit/s}\n"
    )
    result = run("plan", model, "--cluster", path)
    assert result.code == 2
    assert "bad.yaml" in result.err
    assert any(word in result.err for word in text.split("|"))
    assert len(result.err.strip().splitlines()) <= 2, "a progress line at most, and the error"


def bad_inputs(model: str, folder: Path) -> dict[str, tuple[tuple[object, ...], str]]:
    at = ("--cluster", "paper_8gpu")
    source = model.removesuffix(":workload")
    return {
        "model": (("plan", "bert_lage_24l", *at), "did you mean 'bert_large_24l'"),
        "cluster": (("plan", model, "--cluster", "paper_8gpus"), "did you mean 'paper_8gpu'"),
        "method": (("plan", model, *at, "--method", "dpp"), "did you mean 'ddp'"),
        "methods": (("compare", "--models", model, "--clusters", "paper_8gpu", "--methods", "dpp"),
                    "unknown method 'dpp'"),
        "order": (("plan", model, *at, "--order", "fastest"), "unknown order 'fastest'"),
        "budget": (("plan", model, *at, "--budget", "0s"), "allows no search"),
        "budget text": (("plan", model, *at, "--budget", "soon"), "cannot read budget"),
        "batch": (("plan", model, *at, "--batch-size", 4), "batch of 4 is smaller than the 8"),
        "batch 0": (("plan", model, *at, "--batch-size", 0), "batch size"),
        "output": (("plan", model, *at, "-o", folder / "no" / "plan.json"), "does not exist"),
        "output folder": (("plan", model, *at, "-o", folder), "is a folder"),
        "trace": (("plan", model, *at, "--trace", folder / "no" / "t.json"), "does not exist"),
        "csv": (("compare", "--models", model, "--clusters", "paper_8gpu", "--csv",
                 folder / "no" / "rows.csv"), "does not exist"),
        "no function": (("plan", f"{source}:nothing", *at), "nothing"),
        "no workload": (("plan", f"{source}:not_a_workload", *at), "Workload"),
        "no file": (("plan", folder / "absent.json", *at), "absent.json"),
        "empty names": (("compare", "--models", ",", "--clusters", "paper_8gpu"), "empty list"),
        "values": (("plan", f"{source}:value_dependent", *at), "depends on tensor values"),
    }  # fmt: skip


@pytest.mark.parametrize("case", bad_inputs("m.py:workload", Path(".")))
def test_bad_input_is_one_clear_line_and_leaves_no_file(
    run: Run,
    model: str,
    tmp_path: Path,
    case: str,
) -> None:
    arguments, text = bad_inputs(model, tmp_path)[case]
    before = {path.name for path in tmp_path.iterdir() if path.name != "__pycache__"}
    result = run(*arguments)
    assert result.code == 2
    assert text in result.err
    assert result.out == ""
    error = [line for line in result.err.splitlines() if line.startswith("heterog: ")]
    assert len(error) == 1
    assert "Traceback" not in result.err
    after = {path.name for path in tmp_path.iterdir() if path.name != "__pycache__"}
    assert after == before


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda plan: plan.pop("strategy"), "field 'strategy' is missing"),
        (lambda plan: plan.update(schema_version=99), "schema_version 99"),
        (lambda plan: plan["strategy"].update(graph="0123"), "made for graph 0123"),
        (lambda plan: plan["strategy"].update(cluster="4567"), "made for cluster 4567"),
        (lambda plan: plan["strategy"]["decisions"][0].update(shares=[1] * 8), "8 samples in all"),
        (lambda plan: plan["strategy"]["decisions"][0].update(sync="telepathy"), "TELEPATHY"),
        (lambda plan: plan["graph"]["ops"]["kind"].pop(), "op"),
    ],
)
def test_damaged_plans_are_refused(
    run: Run, model: str, tmp_path: Path, damage: Callable[[Any], object], text: str
) -> None:
    path = tmp_path / "plan.json"
    run("plan", model, "--cluster", "paper_8gpu", "--method", "ddp", "-o", path)
    record = read_json(path, "plan")
    damage(record)
    write_json(path, record)
    with pytest.raises(heterog.errors.HeterogError, match=text) as caught:
        heterog.load_plan(path)
    assert "plan.json" in str(caught.value)


def test_a_cut_off_plan_is_refused(run: Run, model: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run("plan", model, "--cluster", "paper_8gpu", "--method", "ddp", "-o", path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputFileError, match="not valid JSON"):
        heterog.load_plan(path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--steps", "0"), "measure at least one step"),
        (("--testbed", "skew_bth"), "did you mean 'skew_both'"),
        (("--testbed", "skew_both"), "made for another cluster than the testbed"),
        (("--timeout", "soon"), "soon"),
    ],
)
def test_run_refuses_what_cannot_run(
    run: Run, model: str, tmp_path: Path, options: tuple[str, ...], text: str
) -> None:
    path = tmp_path / "plan.json"
    run("plan", model, "--cluster", "paper_8gpu", "--method", "ddp", "-o", path)
    result = run("run", path, *options)
    assert result.code == 2
    assert text in result.err
    assert result.err.count("heterog: ") == 1


def test_run_refuses_a_missing_plan(run: Run, tmp_path: Path) -> None:
    result = run("run", tmp_path / "no.json")
    assert result.code == 2
    assert "no.json" in result.err
