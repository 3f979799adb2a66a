"""The command line: what it prints, what it writes, and one clear line for every bad input."""

import csv
import json
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import heterog
from heterog import cli
from heterog.cli.common import interrupts_told
from heterog.errors import HeterogError, InputFileError
from heterog.files import read_json, write_json
from heterog.graph.capture import capture
from heterog.zoo import load_workload
from tests.search.asking import make_plan
from tests.thorough import THOROUGH, one_in

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
pytestmark = pytest.mark.usefixtures("where_models_are")


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


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved plan of ``MODEL``, whose file lies beside it; not to be changed."""
    folder = tmp_path_factory.mktemp("planned")
    source, path = folder / "my_model.py", folder / "plan.json"
    source.write_text(MODEL)
    graph = capture(load_workload(f"{source}:workload", None))
    make_plan(graph, heterog.Cluster.load("paper_8gpu"), methods=["ddp"]).save(path)
    return path


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
    plan, trace, page = (tmp_path / name for name in ("plan.json", "trace.json", "plan.html"))
    result = run("plan", model, "--cluster", "paper_8gpu", "--budget", "200e", "--json",
                 "--no-changes", "-o", plan, "--trace", trace, "--report", page)  # fmt: skip
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert PLAN_FIELDS <= set(document)
    assert document["outcome"] == "ok"
    assert document["method"] != "auto"
    assert {gain["over"] for gain in document["gains"]} <= {"best_ddp", "tuned_uniform"}
    assert all(gain["low"] <= gain["speedup"] <= gain["high"] for gain in document["gains"])
    assert document["explanation"]["recommendation"]
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
    again = tmp_path / "again.html"
    assert json.loads(run("report", plan, "-o", again, "--json").out)["file"] == str(again)
    assert again.read_text() == page.read_text(), "the file holds all that the page shows"
    assert f"report (open it in a browser): {again}" in run("report", plan, "-o", again).out


OF_A_SCRIPT = """
import os
os.chdir("/")
torch.set_default_dtype(torch.float64)
torch.autograd.set_detect_anomaly(True)
print("not JSON")
"""


def test_a_models_file_may_be_a_script(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints, changes the working folder, and sets torch's defaults, which agents share."""
    path = tmp_path / "my_model.py"
    path.write_text(MODEL + OF_A_SCRIPT)
    monkeypatch.chdir(tmp_path)
    try:
        result = run("plan", model, "--cluster", "paper_8gpu", "--budget", "20e", "--json",
                     "--method", "cp_ar,agent", "--no-changes", "-o", "plan.json")  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
        torch.autograd.set_detect_anomaly(False)
    assert result.code == 0, result.err
    assert "not JSON" in result.err
    assert {row["method"] for row in json.loads(result.out)["methods"]} == {"cp_ar", "agent"}
    assert heterog.load_plan(tmp_path / "plan.json").graph.tensors[0].dtype == "float64"


def test_what_a_person_runs_today_is_a_row_beside_ours(
    run: Run, model: str, tmp_path: Path
) -> None:
    output = tmp_path / "plan.json"
    result = run("plan", model, "--cluster", "paper_8gpu", "--method", "tuned_uniform", "--json",
                 "--budget", "5e", "--no-changes", "--layout", "dp=2,zero=1,micro_batch=8",
                 "-o", output)  # fmt: skip
    assert result.code == 0, result.err
    document = json.loads(result.out)
    row = next(row for row in document["methods"] if row["method"] == "given")
    assert row["outcome"] == "ok"
    assert "6 of 8 devices have no work" in row["note"]
    given = document["explanation"]["given"]
    assert given["step_time_s"] == row["step_time_s"]
    assert given["gain"]["speedup"] == row["step_time_s"] / document["step_time_s"]
    assert {each["what"] for each in given["differences"]} >= {"micro-batches", "gradients"}
    assert any("Your layout" in words for words in document["explanation"]["paragraphs"])
    assert heterog.load_plan(output).gain_over_given is not None
    compared = run("compare", "--models", model, "--clusters", "paper_8gpu", "--methods", "ddp",
                   "--budget", "5e", "--layout", "dp=7", "--json")  # fmt: skip
    rows = json.loads(compared.out)["rows"]
    assert [row["outcome"] for row in rows if row["method"] == "given"] == ["not_applicable"]


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ("pp=3", "give dp=2"),
        ("tpp=3", "did you mean 'tp'"),
        ("nowhere.toml", "No such file"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_line(
    run: Run, model: str, layout: str, problem: str
) -> None:
    result = run("plan", model, "--cluster", "paper_8gpu", "--layout", layout)
    assert result.code == 2
    assert problem in result.err
    assert len(result.err.splitlines()) <= 2


def test_the_answer_is_short_and_plain_in_a_pipe(run: Run, model: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("plan.json", "trace.json", "plan.html")]
    result = run("plan", model, "--cluster", "paper_8gpu", "--budget", "50e", "--method",
                 "pipeline,ddp", "--background", model, "--background-batch", 8,
                 "-o", files[0], "--trace", files[1], "--report", files[2])  # fmt: skip
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert len(lines) <= 15, result.out
    assert "\x1b" not in result.out, "no colours where nobody sees them"
    labels = [line.split()[0] for line in lines[1:] if not line.startswith(" ")]
    assert labels == ["do", "gain", "memory", "where", "limits", "also", "files", "more"]
    assert lines[0].startswith("workload on paper_8gpu: ")
    for path in files:
        assert path.exists()
        assert str(path) in result.out


@THOROUGH
def test_plan_puts_a_background_job_beside(run: Run, model: str, tmp_path: Path) -> None:
    call = ("plan", model, "--cluster", "paper_8gpu", "--budget", "1e", "--method", "ev_ar",
            "--background", model, "--background-batch", 8)  # fmt: skip
    document = json.loads(run(*call, "--slow-down", 1.05, "--json").out)
    beside = document["background"]
    assert beside["batch_size"] == 8
    assert 1.0 <= beside["slow_down"] <= beside["limit"] == 1.05
    assert beside["total_samples_per_s"] == pytest.approx(sum(beside["samples_per_s"]))
    assert beside["total_samples_per_s"] > 0
    assert beside["step_time_alone_s"] == pytest.approx(document["step_time_s"])
    plan = tmp_path / "plan.json"
    shown = run(*call, "-o", plan)
    assert "batch 8 on each of 8 devices" in " ".join(shown.out.split())
    few = run("run", plan, "--steps", 2)
    assert (few.code, "too few beside a background job" in few.err) == (2, True)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--background-batch", 8), "--background-batch without --background"),
        (
            ("--background", "vgg19", "--slow-down", 0.9),
            "--slow-down is 0.9; it must be 1 or more",
        ),
    ],
)
def test_background_options_that_make_no_sense(
    run: Run, model: str, options: tuple[object, ...], error: str
) -> None:
    result = run("plan", model, "--cluster", "paper_8gpu", *options)
    assert (result.code, error in result.err) == (2, True), result.err


@THOROUGH
def test_same_seed_and_evaluations_print_the_same_strategy(run: Run, model: str) -> None:
    call = ("plan", model, "--cluster", "paper_8gpu", "--budget", "40e", "--json", "--seed", "3")
    first, second = json.loads(run(*call).out), json.loads(run(*call).out)
    assert first["strategy"] == second["strategy"]
    assert first["step_time_s"] == second["step_time_s"]


def test_tables_for_people(run: Run, model: str) -> None:
    call = ("plan", model, "--cluster", "paper_8gpu", "--method", "ddp,ev_ps", "--no-changes")
    result = run(*call, "--explain")
    assert result.code == 0, result.err
    assert "ddp" in result.out
    assert "ev_ps" in result.out
    assert "cp_ar" not in result.out
    assert "In short: " in result.out
    short = run(*call)
    assert result.out.startswith(short.out.split("more ")[0]), "what is explained comes first"
    assert "bert_large_24l" in run("models").out
    assert "paper_8gpu" in run("clusters").out
    assert {"name", "num_parameters"} <= set(json.loads(run("models", "--json").out)[0])


def test_capture_then_plan_from_the_file(run: Run, model: str, tmp_path: Path) -> None:
    graph = tmp_path / "graph.json.gz"
    result = run("capture", model, "--batch-size", 32, "-o", graph, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["batch_size"] == 32
    call = ("plan", graph, "--cluster", "paper_8gpu", "--method", "ddp", "--no-changes")
    result = run(*call, "--json")
    assert json.loads(result.out)["batch_size"] == 32
    wrong = run("plan", graph, "--cluster", "paper_8gpu", "--batch-size", 64)
    assert wrong.code == 2
    assert "captured with batch size 32" in wrong.err


def test_compare_prints_rows_and_writes_csv(run: Run, model: str, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    result = run("compare", "--models", model, "--clusters", "paper_8gpu,rtx_mixed", "--budget",
                 "10e", "--csv", table, "--json")  # fmt: skip
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
        "seed": (("plan", model, *at, "--seed", -1), "'--seed'"),
        "budget": (("plan", model, *at, "--budget", "0s"), "allows no search"),
        "budget text": (("plan", model, *at, "--budget", "soon"), "cannot read budget"),
        "batch 0": (("plan", model, *at, "--batch-size", 0), "batch size"),
        "output": (("plan", model, *at, "-o", folder / "no" / "plan.json"), "does not exist"),
        "output folder": (("plan", model, *at, "-o", folder), "is a folder"),
        "trace": (("plan", model, *at, "--trace", folder / "no" / "t.json"), "does not exist"),
        "report": (("plan", model, *at, "--report", folder / "no" / "p.html"), "does not exist"),
        "no plan": (("report", folder / "absent.json", "-o", folder / "p.html"), "absent.json"),
        "page": (("report", "plan.json", "-o", folder / "no" / "p.html"), "does not exist"),
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
    said = ("heterog: ", "Error: ")  # ours, and typer's about options
    error = [line for line in result.err.splitlines() if line.startswith(said)]
    assert len(error) == 1
    assert "Traceback" not in result.err
    after = {path.name for path in tmp_path.iterdir() if path.name != "__pycache__"}
    assert after == before


@one_in(3)
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda plan: plan.pop("strategy"), "field 'strategy' is missing"),
        (lambda plan: plan.update(schema_version=99), "schema_version 99"),
        (lambda plan: plan["strategy"].update(graph="0123"), "made for graph 0123"),
        (lambda plan: plan["strategy"].update(cluster="4567"), "made for cluster 4567"),
        (lambda plan: plan["strategy"]["decisions"][0].update(shares=[1] * 8), "8 samples in all"),
        (lambda plan: plan["strategy"]["decisions"][0].update(sync="telepathy"), "telepathy"),
        (lambda plan: plan["graph"]["ops"]["kind"].pop(), "op"),
    ],
)
def test_damaged_plans_are_refused(
    planned: Path, tmp_path: Path, damage: Callable[[Any], object], text: str
) -> None:
    path = tmp_path / "plan.json"
    record = read_json(planned, "plan")
    damage(record)
    write_json(path, record)
    with pytest.raises(heterog.errors.HeterogError, match=text) as caught:
        heterog.load_plan(path)
    assert "plan.json" in str(caught.value)


def test_a_cut_off_plan_is_refused(planned: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(planned.read_bytes()[:-100])
    with pytest.raises(InputFileError, match="not valid JSON"):
        heterog.load_plan(path)


@one_in(2)
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
    run: Run, planned: Path, options: tuple[str, ...], text: str
) -> None:
    result = run("run", planned, *options)
    assert result.code == 2
    assert text in result.err
    assert result.err.count("heterog: ") == 1


def test_files_that_only_a_plan_names_are_a_question(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    call = ("plan", model, "--cluster", "paper_8gpu", "--method", "ddp", "--no-changes")
    run(*call, "-o", path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    file = model.rpartition(":")[0]
    for command in (("run", path), ("export", path, "--to", "torchrun", "-o", tmp_path / "job")):
        result = run(*command)
        assert result.code == 2
        assert f"if you trust it, add --source {file}." in result.err
        assert result.err.count("\n") == 1
    done = run("export", path, "--to", "torchrun", "-o", tmp_path / "job", "--source", file)
    assert done.code == 0, done.err
    assert (tmp_path / "job" / "model.py").read_text() == Path(file).read_text()


def test_run_refuses_a_missing_plan(run: Run, tmp_path: Path) -> None:
    result = run("run", tmp_path / "no.json")
    assert result.code == 2
    assert "no.json" in result.err


# --- profile, calibrate, detect ------------------------------------------------------------------


@pytest.fixture
def quick_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    from heterog.runtime.measure import op_profiler, profiler

    monkeypatch.setattr(op_profiler, "_LEAST_SECONDS", 0.02)
    monkeypatch.setattr(profiler, "SHARES", (1.0, 0.5))


LAB = """
schema_version: 1
name: lab
calibration: calibration.json
hosts:
  - name: a
    devices: [{type: CPU, count: 2}]
    intra: {kind: shared memory, bandwidth: 5 GB/s}
"""


@pytest.mark.usefixtures("quick_profile")
def test_profile_then_calibrate_then_plan(run: Run, model: str, tmp_path: Path) -> None:
    measurements, calibration = tmp_path / "measurements.json", tmp_path / "calibration.json"
    result = run("profile", model, "-o", measurements, "--device-type", "CPU", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["device_types"] == ["CPU"]
    assert document["num_ops"] > 5
    assert document["num_link_measurements"] == 0
    assert not (tmp_path / "measurements.json.partial").exists()
    result = run("calibrate", measurements, "-o", calibration, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["name"] == "calibration"
    assert document["device_types"]["CPU"]["error_ops"] >= 0
    assert document["device_types"]["CPU"]["error_models"] is None, "there is one model only"
    assert "addmm.default" in document["device_types"]["CPU"]["kinds"]
    (tmp_path / "lab.yaml").write_text(LAB)
    call = ("plan", model, "--cluster", tmp_path / "lab.yaml", "--budget", "20e", "--no-changes")
    document = json.loads(run(*call, "--json").out)
    assert document["calibration"] == "calibration"
    assert document["extrapolated"] == {"share": 0.0, "kinds": []}
    assert "every op was measured near its size" in " ".join(run(*call).out.split())
    other = Path(model.partition(":")[0])
    other.write_text(MODEL.replace("nn.ReLU", "nn.GELU"))
    document = json.loads(run(*call, "--json").out)
    assert 0 < document["extrapolated"]["share"] < 1
    assert sorted(document["extrapolated"]["kinds"]) == ["gelu.default", "gelu_backward.default"]
    assert "of the compute time is extrapolated (gelu" in " ".join(run(*call).out.split())
    table = run("calibrate", measurements, measurements, "-o", calibration)
    assert "error, new ops" in table.out
    assert "calibration: calibration.json" in table.out


def test_a_roofline_plan_says_nothing_about_extrapolation(run: Run, model: str) -> None:
    call = ("plan", model, "--cluster", "paper_8gpu", "--method", "ddp", "--no-changes")
    assert json.loads(run(*call, "--json").out)["extrapolated"] is None
    assert "extrapolated" not in run(*call).out


@pytest.mark.usefixtures("quick_profile")
def test_an_interrupted_profile_goes_on(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heterog.runtime.measure import op_profiler, profiler

    real, samples = op_profiler.profile_ops, list[int]()

    def interrupted(*arguments: Any) -> Any:
        samples.append(arguments[2])
        if samples == [64, 32]:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(profiler, "profile_ops", interrupted)
    output = tmp_path / "m.json"
    call = ("profile", model, "-o", output, "--device-type", "CPU")
    assert run(*call).code == 130
    assert not output.exists()
    assert (tmp_path / "m.json.partial").is_dir()
    result = run(*call)
    assert result.code == 0, result.err
    assert samples == [64, 32, 32], "what was done is not done again"
    assert "workload, batch 32 ..." in result.err
    assert "workload on CPU" in result.out
    assert output.exists()
    assert not (tmp_path / "m.json.partial").exists()


def linked(folder: Path, *, cluster: bool) -> Path:
    """A file of measurements between the devices of a testbed."""
    from heterog.pricing.op_fits import LinkMeasurement, Measurements, OpMeasurement
    from heterog.runtime.ranks.testbed import load_testbed

    lab = load_testbed("skew_both")
    ops = tuple(
        OpMeasurement(device_type="CPU@0.8", model=f"m{i % 2}", signature=f"{i:x}", kind="mm",
                      samples=1, flops=1e6 * i, num_bytes=1e4 * i, seconds=1e-5 * i, count=1)
        for i in range(1, 9)
    )  # fmt: skip
    links = tuple(
        LinkMeasurement(kind="point_to_point", devices=way, slices=(), num_bytes=size,
                        seconds=1e-3 + size / 5e6, device_seconds=(0.0, 0.0))
        for way in (("a", "b"), ("b", "a"))
        for size in (10_000, 100_000, 1_000_000)
    )  # fmt: skip
    path = folder / "links.json"
    described = lab.to_dict() if cluster else None
    Measurements(environment={}, ops=ops, links=links, cluster=described).save(path)
    return path


def test_calibrate_fits_links_of_the_cluster_that_was_measured(run: Run, tmp_path: Path) -> None:
    measurements, output = linked(tmp_path, cluster=True), tmp_path / "fitted.json.gz"
    result = run("calibrate", measurements, "-o", output, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["name"] == "fitted"
    assert document["links"]["point_to_point"]["measurements"] == 6
    assert document["links"]["point_to_point"]["error"] < 0.05
    assert document["link_rates_bytes_per_s"]["b nic out"] == pytest.approx(5e6, rel=0.01)
    assert "point to point" in run("calibrate", measurements, "-o", output).out
    unnamed = linked(tmp_path, cluster=False)
    result = run("calibrate", unnamed, "-o", tmp_path / "no.json")
    assert (result.code, result.out) == (2, "")
    assert "holds links, but not of which cluster; pass --cluster" in result.err
    assert not (tmp_path / "no.json").exists()
    assert run("calibrate", unnamed, "-o", output, "--cluster", "skew_both").code == 0
    wrong = run("calibrate", unnamed, "-o", output, "--cluster", "paper_8gpu")
    assert wrong.code == 2
    assert "has no device 'a'" in wrong.err


def test_detect_writes_a_cluster_that_loads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heterog.runtime.measure.detect._MEASURE_S", 0.02)
    path = tmp_path / "cluster.yaml"
    result = run("cluster", "detect", "-o", path, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    cluster = heterog.Cluster.load(path)
    assert heterog.Cluster.from_dict(document["cluster"]) == cluster
    assert document["checks"]
    cluster.save(tmp_path / "again.yaml")
    assert heterog.Cluster.load(tmp_path / "again.yaml") == cluster
    assert "check these lines" in run("cluster", "detect", "-o", path).out


def bad_measuring(model: str, folder: Path) -> dict[str, tuple[tuple[object, ...], str]]:
    at = ("-o", folder / "m.json")
    return {
        "model": (("profile", "bert_lage_24l", *at), "did you mean 'bert_large_24l'"),
        "graph": (("profile", "graph.json", *at), "saved graph, which cannot be run"),
        "names": (("profile", ",", *at), "empty list"),
        "batch": (("profile", model, *at, "--batch-size", 0), "batch size"),
        "output": (("profile", model, "-o", folder / "no" / "m.json"), "does not exist"),
        "timeout": (("profile", model, *at, "--timeout", "soon"), "soon"),
        "testbed": (("profile", model, *at, "--testbed", "skew_bth"), "mean 'skew_both'"),
        "both": (("profile", model, *at, "--testbed", "skew_both", "--cluster", "paper_8gpu"),
                 "a testbed has its own"),
        "type": (("profile", model, *at, "--testbed", "skew_both", "--device-type", "CPU"),
                 "a testbed has its own"),
        "cluster": (("profile", model, *at, "--cluster", "paper_8gpus"), "did you mean"),
        "no measurements": (("calibrate", folder / "no.json", *at), "no.json"),
        "not measurements": (("calibrate", model.partition(":")[0], *at), "not valid JSON"),
        "no folder": (("calibrate", "x.json", "-o", folder / "no" / "c.json"), "does not exist"),
        "detect": (("cluster", "detect", "-o", folder / "no" / "c.yaml"), "does not exist"),
    }  # fmt: skip


@pytest.mark.parametrize("case", bad_measuring("m.py:workload", Path(".")))
def test_bad_input_for_measuring_is_one_clear_line_and_leaves_no_file(
    run: Run, model: str, tmp_path: Path, case: str
) -> None:
    arguments, text = bad_measuring(model, tmp_path)[case]
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert text in result.err
    assert result.err.count("heterog: ") == len(result.err.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"my_model.py", "__pycache__"}


def test_ranks_need_a_cluster_to_measure_links(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run("profile", model, "-o", tmp_path / "m.json")
    assert result.code == 2
    assert "between the devices of a cluster: pass --cluster" in result.err


# --- recorded runs -------------------------------------------------------------------------------

TWO_GPUS = (
    "schema_version: 1\nname: lab\nhosts:\n"
    "  - {name: A, devices: [{type: A100-80GB, count: 2}], intra: nvlink_a100}\n"
)


def recorded(tmp_path: Path, model: str, run: Run, factor: float) -> Path:
    """A table of runs that take so many times what is predicted."""
    (tmp_path / "lab.yaml").write_text(TWO_GPUS)
    ways = [(layout, batch) for layout in ("dp=2", "tp=2") for batch in (64, 256)]
    lines = [f"{layout},{batch},0.001,{2**30}" for layout, batch in ways]
    table = tmp_path / "runs.csv"
    head = "layout,batch_size,seconds,peak_bytes\n"
    table.write_text(head + "\n".join(lines) + "\n")
    called = run("fidelity", table, "--model", model, "--cluster", tmp_path / "lab.yaml", "--json")
    assert called.code == 0, called.err
    predicted = {
        each["name"].split(", ")[1] + each["name"].split(", ")[-1]: each["predicted_s"]
        for each in json.loads(called.out)["runs"]
    }
    rows = [
        f"{layout},{batch},{factor * predicted[f'batch {batch}{layout}']},{2**30}"
        for layout, batch in ways
    ]
    table.write_text(head + "\n".join(rows) + "\n")
    return table


def test_predictions_are_held_against_recorded_runs(run: Run, model: str, tmp_path: Path) -> None:
    table = recorded(tmp_path, model, run, factor=1.25)
    call = ("fidelity", table, "--model", model, "--cluster", tmp_path / "lab.yaml")
    document = json.loads(run(*call, "--json").out)
    (family,) = document["families"]
    assert family["num_runs"] == 4
    assert family["mape"] == pytest.approx(0.2)
    assert family["bias"] == pytest.approx(-0.2)
    assert family["spearman"] == pytest.approx(1.0)
    assert family["pairs"]["ordered"] == family["pairs"]["number"]
    assert family["memory_mape"] is not None
    ends = [each["interval_bytes"] for each in document["runs"]]
    assert all(low < each["predicted_bytes"] < high
               for (low, high), each in zip(ends, document["runs"], strict=True))  # fmt: skip
    inside = [low <= 2**30 <= high for low, high in ends]
    assert family["memory_coverage"] == sum(inside) / 4
    plain = run(*call)
    assert plain.code == 0
    assert "4 runs, mean error 20.0%" in plain.out


def test_a_fit_that_is_worse_on_runs_left_out_keeps_the_old_one(
    run: Run, model: str, tmp_path: Path
) -> None:
    """Of one run that took 0.7 and 1.4 times as long as predicted nothing can be learnt."""
    table = recorded(tmp_path, model, run, factor=1.0)
    head, row, *_ = table.read_text().splitlines()
    layout, batch, seconds, peak = row.split(",")
    rows = [f"{layout},{batch},{factor * float(seconds)},{peak}" for factor in (0.7, 1.4)]
    table.write_text("\n".join([head, *rows]) + "\n")
    old = tmp_path / "mine.json"
    old.write_text("the old fit")
    lab = ("--model", model, "--cluster", tmp_path / "lab.yaml")
    found = run("calibrate", "--runs", table, *lab, "-o", old)
    assert found.code == 2
    assert "a fit to these 2 runs is worse on runs left out" in found.err
    assert "nothing was written" in found.err
    assert old.read_text() == "the old fit"


def test_device_models_are_fitted_to_recorded_runs(run: Run, model: str, tmp_path: Path) -> None:
    table = recorded(tmp_path, model, run, factor=1.5)
    call = ("calibrate", "--runs", table, "--model", model, "-o", tmp_path / "mine.json")
    found = run(*call, "--cluster", tmp_path / "lab.yaml", "--json")
    assert found.code == 0, found.err
    errors = json.loads(found.out)["mape"]
    assert errors["before"] == pytest.approx(1.0 / 3.0, rel=1e-3)
    assert errors["after"] < 0.1
    (tmp_path / "fitted.yaml").write_text(
        TWO_GPUS.replace("name: lab", "name: lab\ncalibration: mine.json", 1)
    )
    again = ("fidelity", table, "--model", model, "--cluster", tmp_path / "fitted.yaml", "--json")
    (family,) = json.loads(run(*again).out)["families"]
    assert family["mape"] == pytest.approx(errors["after"], abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("calibrate", "-o", "x.json"), "one of them"),
        (("calibrate", "m.json", "--runs", "r.csv", "-o", "x.json"), "one of them"),
        (("calibrate", "--runs", "none.csv", "-o", "x.json"), "none.csv"),
        (("calibrate", "--runs", "none.csv", "-o", "none/x.json"), "does not exist"),
        (("fidelity", "none.csv"), "none.csv"),
    ],
)
def test_runs_that_cannot_be_read_are_told_in_a_line(
    run: Run, arguments: tuple[str, ...], fault: str
) -> None:
    found = run(*arguments)
    assert found.code == 2
    assert fault in found.err
    assert len(found.err.splitlines()) == 1
    assert not Path("x.json").exists()


def test_a_layout_that_does_not_fit_is_told_by_line(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(TWO_GPUS)
    (tmp_path / "runs.csv").write_text("layout,seconds\ndp=2,1.0\ntp=3,1.0\n")
    found = run("fidelity", tmp_path / "runs.csv", "--model", model,
                "--cluster", tmp_path / "lab.yaml")  # fmt: skip
    assert found.code == 2
    assert "line 3 of the runs" in found.err


def test_a_step_time_has_an_interval(run: Run, model: str, tmp_path: Path) -> None:
    call = ("plan", model, "--cluster", "paper_8gpu", "--budget", "1e", "--method", "ev_ar")
    found = run(*call, "--no-changes", "-o", tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    low, high = document["interval_s"]
    assert low < document["step_time_s"] < high
    assert re.search(r"a step \([0-9.]+ to [0-9.]+\)", found.out)
    document["interval_s"] = [high, 2.0 * high]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    refused = run("report", tmp_path / "plan.json", "-o", tmp_path / "plan.html")
    assert refused.code == 2
    assert "interval_s" in refused.err


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda plan: plan["methods"][0].update(seed=plan["seed"] + 1), "seed"),
        (lambda plan: plan["methods"][0].update(lower_bound_s=plan["lower_bound_s"] + 1e-9),
         "lower_bound_s"),
        (lambda plan: plan.update(step_time_s=plan["step_time_s"] + 1e-9), "step_time_s"),
        (lambda plan: plan["peak_memory_bytes"].append(plan["peak_memory_bytes"].pop() + 1),
         "peak_memory_bytes"),
        (lambda plan: plan.update(
            throughput_samples_per_s=plan["throughput_samples_per_s"] * (1.0 + 1e-5)),
         "throughput_samples_per_s"),
    ],
)  # fmt: skip
def test_what_a_plan_says_twice_is_the_same_to_the_last_digit(
    planned: Path, tmp_path: Path, change: Callable[[Any], object], field: str
) -> None:
    """Or to a millionth where it is computed again."""
    path = tmp_path / "plan.json"
    plan = json.loads(planned.read_text())
    for each in (plan, *plan["methods"]):
        each["seed"] = 2**40  # so that 1 is less than a millionth of it
    path.write_text(json.dumps(plan))
    assert heterog.load_plan(path).seed == 2**40
    change(plan)
    path.write_text(json.dumps(plan))
    with pytest.raises(InputFileError, match=field):
        heterog.load_plan(path)


def test_peaks_have_intervals(run: Run, model: str, tmp_path: Path) -> None:
    """They are printed, saved, checked when they are read, and on the page."""
    path = tmp_path / "plan.json"
    call = ("plan", model, "--cluster", "paper_8gpu", "--budget", "1e", "--method", "ev_ar")
    found = run(*call, "--no-changes", "-o", path)
    assert re.search(r"iB \([0-9.]+ to [0-9.]+\) of [0-9.]+ GiB", found.out)
    document = json.loads(path.read_text())
    ends = document["peak_intervals_bytes"]
    assert len(ends) == 8
    for peak, (low, high) in zip(document["peak_memory_bytes"], ends, strict=True):
        assert low < peak < high
    assert document["fit_probability"] > 0.9
    page = ("report", path, "-o", tmp_path / "plan.html")
    assert run(*page).code == 0
    told = (tmp_path / "plan.html").read_text()
    assert "by the errors of 4 runs on GH200" in told
    assert "80 % interval" in told
    changes: list[tuple[str, object, str]] = [
        ("peak_intervals_bytes", [[1, 2]] * 8, "'peak_intervals_bytes' is [["),
        ("peak_intervals_bytes", ends[:-1], "'peak_intervals_bytes' is [["),
        ("peak_intervals_bytes", [each[::-1] for each in ends], "'peak_intervals_bytes' is [["),
        ("fit_probability", 0.5, "'fit_probability' is 0.5"),
        ("fit_probability", None, "'fit_probability' is None"),
        ("peak_errors", None, "what it describes says []"),
        ("peak_errors", document["peak_errors"] | {"num_runs": 1}, "peak_errors.num_runs"),
        ("peak_errors", document["peak_errors"] | {"spread": 0.0}, "peak_errors.spread"),
    ]
    for field, value, fault in changes:
        path.write_text(json.dumps(document | {field: value}))
        refused = run(*page)
        assert refused.code == 2
        assert fault in refused.err, field


def test_plans_of_earlier_versions_have_no_intervals_of_peaks(
    run: Run, planned: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    document = json.loads(planned.read_text())
    for field in ("peak_intervals_bytes", "fit_probability", "peak_errors"):
        del document[field]
    path.write_text(json.dumps(document))
    assert run("report", path, "-o", tmp_path / "plan.html").code == 0
    told = (tmp_path / "plan.html").read_text()
    assert "by the errors of" not in told
    assert "peak memory" not in told


@interrupts_told()
def fail_after_ctrl_c(error: Exception, cause: Exception | None = None) -> None:
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    raise error from cause


def test_an_error_after_a_ctrl_c_that_was_dealt_with_is_told() -> None:
    """It became "interrupted"."""
    try:
        with pytest.raises(HeterogError, match="the disk is full"):
            fail_after_ctrl_c(HeterogError("the disk is full"))
    except KeyboardInterrupt:  # which would end pytest
        pytest.fail("the error was not told")


def test_an_error_that_a_library_makes_of_a_ctrl_c_is_an_interrupt() -> None:
    made = ValueError("no schema")
    with pytest.raises(KeyboardInterrupt):
        fail_after_ctrl_c(made)
    with pytest.raises(KeyboardInterrupt):  # as a user's file is reported that imports the library
        fail_after_ctrl_c(InputFileError("mine.py: ValueError: no schema"), made)
