"""Tables of recorded runs: what they may say, and what is refused in one line."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.cluster.spec import load_cluster
from heterog.cluster.topology import ROOFLINE
from heterog.errors import InputFileError
from heterog.fidelity.comparison import RecordedRun, read_runs
from heterog.fidelity.run_fit import cases_of, compared
from heterog.graph.capture import capture
from heterog.graph.workload import Workload

HEAD = "model,batch_size,cluster,layout,seconds,peak_bytes,family,remark\n"


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    return path


def test_every_column_is_read_and_others_are_ignored(tmp_path: Path) -> None:
    path = table(tmp_path, HEAD + 'gpt2,8,lab.yaml,"tp=2,dp=2",0.25,1000,small,by night\n')
    (run,) = read_runs(path)
    assert (run.line, run.model, run.batch_size, run.cluster) == (2, "gpt2", 8, "lab.yaml")
    assert (run.layout, run.seconds, run.peak_bytes) == ("tp=2,dp=2", 0.25, 1000)
    assert run.family == "small"


def test_what_is_empty_or_missing_has_a_meaning(tmp_path: Path) -> None:
    path = table(tmp_path, "\ufeffmodel,cluster,seconds,batch_size\ngpt2,lab.yaml,0.25,\n")
    (run,) = read_runs(path)
    assert (run.batch_size, run.layout, run.peak_bytes, run.family) == (None, "", None, "gpt2")


def test_a_row_may_say_which_program_ran_it(tmp_path: Path) -> None:
    path = table(tmp_path, "model,cluster,seconds,execution\ngpt2,lab,1,compiled\ngpt2,lab,1,\n")
    assert [run.execution for run in read_runs(path)] == ["compiled", ""]


def test_a_compiled_run_is_predicted_faster_and_other_prices_know_no_programs() -> None:
    def model() -> nn.Module:
        # Enough to fuse that it outweighs what a compiled pass takes to enter.
        chain = [each for _ in range(8) for each in (nn.GELU(), nn.LayerNorm(256), nn.Tanh())]
        return nn.Sequential(nn.Linear(256, 256), *chain)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:  # so large that kernels outlast the host
        return torch.zeros(2**18, 256), torch.zeros(2**18, 256)

    graph = capture(Workload(model, batch, functional.mse_loss, torch.optim.SGD, name="m"))
    cluster = load_cluster("homogeneous_8xa100")
    rows = [
        RecordedRun(
            line=2, model="m", batch_size=None, cluster="c", layout="", seconds=1.0,
            peak_bytes=None, execution=execution, family="m",
        )
        for execution in ("eager", "compiled")
    ]  # fmt: skip
    found = [compared(*case) for case in cases_of(rows, lambda *_: graph, lambda _: cluster)]
    assert found[1].predicted_s < found[0].predicted_s
    priced = replace(cluster, calibration=ROOFLINE)
    with pytest.raises(InputFileError, match="execution eager is for device models"):
        list(cases_of(rows, lambda *_: graph, lambda _: priced))


def test_what_is_given_once_stands_in_for_a_column(tmp_path: Path) -> None:
    path = table(tmp_path, "seconds,model\n0.25,gpt2\n0.5,gpt2\n")
    runs = read_runs(path, model="mine.py:workload", cluster="lab.yaml")
    assert [(run.model, run.cluster) for run in runs] == [("mine.py:workload", "lab.yaml")] * 2


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no column 'model'"),
        ("model,cluster\ngpt2,lab\n", "no column 'seconds'"),
        (HEAD, "there is no row"),
        (HEAD + "gpt2,8,lab,,fast,,,\n", "line 2: seconds is 'fast', not a number"),
        (HEAD + "gpt2,8,lab,,0.0,,,\n", "line 2: .*seconds"),
        (HEAD + "gpt2,8,lab,,nan,,,\n", "line 2: .*seconds"),
        (HEAD + "gpt2,8,lab,,inf,,,\n", "line 2: .*seconds"),
        (HEAD + "gpt2,0,lab,,1.0,,,\n", "line 2: .*batch_size"),
        (HEAD + "gpt2,8.5,lab,,1.0,,,\n", "line 2: batch_size is '8.5'"),
        (HEAD + "gpt2,8,lab,,1.0,-1,,\n", "line 2: .*peak_bytes"),
        (HEAD + ",8,lab,,1.0,,,\n", "line 2: .*model"),
        ("execution," + HEAD + "jit,gpt2,8,lab,,1.0,,,\n", "line 2: .*execution"),
        (HEAD + "gpt2,8,lab\n", "line 2: as many values as columns"),
        (HEAD + "gpt2,8,lab,,1.0,,,,,\n", "line 2: as many values as columns"),
        (HEAD + "/tmp/x.py:make,8,lab,,1.0,,,\n", "line 2: '/tmp/x.py:make' is Python code"),
        (HEAD + "x.py,8,lab,,1.0,,,\n", "line 2: 'x.py' is Python code"),
    ],
)
def test_what_cannot_be_is_refused_by_line(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(InputFileError, match=fault):
        read_runs(table(tmp_path, text))


def test_devices_and_other_bytes_are_no_table(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="not a regular file"):
        read_runs(Path("/dev/zero"))
    (tmp_path / "runs.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InputFileError, match="cannot read"):
        read_runs(tmp_path / "runs.csv")
