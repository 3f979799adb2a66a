"""Jobs of real processes: they train together, and they end together with a clear error."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterog.cli import main
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.runtime import launch
from heterog.runtime.launch import ranks_of_this_process, run_ranks
from heterog.runtime.ranks.place import HERE, Place
from heterog.runtime.ranks.watching import LaunchError, Limits
from heterog.runtime.request import RunRequest
from heterog.search.plan import load_plan
from heterog.strategy.tensor_parallel import shardings
from heterog.zoo import load_workload
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of, plan_by_hand
from tests.thorough import THOROUGH

pytestmark = pytest.mark.usefixtures("where_models_are")
MODEL = """
import torch, heterog
from torch import nn

def make(width: int, batch_size: int) -> heterog.Workload:
    torch.manual_seed(0)
    batch = (torch.randn(batch_size, 6), torch.randn(batch_size, 4))
    model = lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4))
    return heterog.Workload(model, batch, nn.functional.mse_loss, torch.optim.Adam)

def workload(batch_size: int = 8) -> heterog.Workload:
    return make(16, batch_size)

def not_a_number(batch_size: int = 8) -> heterog.Workload:
    same = make(16, batch_size)
    batch = (torch.full((batch_size, 6), float("nan")), torch.zeros(batch_size, 4))
    return heterog.Workload(same.model, batch, same.loss, same.optimizer)

def whole_norms() -> heterog.Workload:  # of one batch size, which a plan of it has, too
    same = make(16, 8)
    return heterog.Workload(same.model, same.make_batch(), same.loss, torch.optim.Adafactor)

def wider(batch_size: int = 8) -> heterog.Workload:
    return make(32, batch_size)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    path = folder / "model.py"
    path.write_text(MODEL)
    return f"{path}:workload"


def two_devices() -> Cluster:
    return cluster_of((1.0, ["T4"]), (1.0, ["T4"]))


@pytest.fixture(scope="module")
def plan(folder: Path, model: str) -> Path:
    path = folder / "plan.json"
    graph = capture(load_workload(model, None))
    make_plan(graph, two_devices(), methods=["ddp"], budget="1e").save(path)
    return path


@pytest.mark.distributed
def test_ranks_train_together_are_measured_saved_and_resumed(
    plan: Path, model: str, tmp_path: Path
) -> None:
    saved = tmp_path / "checkpoint"
    seen: list[str] = []
    request = RunRequest(
        plan=plan, num_steps=4, save=saved, limits=Limits(timeout_s=120), record=True
    )
    measured = run_ranks(request, progress=seen.append)
    assert "capturing the model" in seen
    assert measured["num_steps_before"] == 0
    assert measured["num_ranks"] == 2
    assert len(measured["step_times_s"]) == 4
    assert len(measured["losses"]) == 5, "the step that warms up is trained, too"
    assert measured["step_time_min_s"] <= measured["step_time_s"] <= measured["step_time_max_s"]
    assert measured["losses"] == sorted(measured["losses"], reverse=True), "it learns"
    assert not ranks_of_this_process()
    loaded = load_plan(plan)
    timeline = loaded.measured_timeline(measured["tasks"])
    assert np.isfinite(timeline.finish).all(), "every task was recorded"
    assert timeline.seconds <= 2.0 * measured["step_times_s"][-1]
    for task in range(timeline.program.num_tasks):
        assert 0.0 <= timeline.start[task] <= timeline.finish[task]
        if timeline.is_compute(task):
            makers = timeline.program.dependencies(task)
            assert all(timeline.start[task] >= timeline.start[maker] for maker in makers)
    more = run_ranks(
        replace(
            request,
            model=model.replace(":workload", ":not_a_number"),
            num_steps=2,
            save=None,
            resume=saved,
            allow_nonfinite=True,
        )
    )
    assert more["num_steps_before"] == 5, "the one that warms up trains, too"
    assert more["losses"] == [None] * 3


@THOROUGH
@pytest.mark.distributed
def test_state_of_an_optimizer_that_looks_at_whole_parameters_is_saved(
    model: str, tmp_path: Path
) -> None:
    """Adafactor keeps sums over rows and columns: rules leave its parameters whole."""
    graph = capture(load_workload(model.replace(":workload", ":whole_norms"), None))
    even = make_plan(graph, two_devices(), methods=["ddp"], budget="1e").strategy
    sharded = shardings(graph, range(len(even.decisions)))[0]
    path = tmp_path / "sharded.json"
    plan_by_hand(graph, two_devices(), replace(even, op_rules=sharded.op_rules)).save(path)
    run_ranks(RunRequest(plan=path, num_steps=1, save=tmp_path / "c"))
    assert (tmp_path / "c").is_dir()


def test_the_options_of_the_command_reach_the_ranks(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[RunRequest] = []

    def run(request: RunRequest, place: Place, progress: Callable[[str], None]) -> dict[str, Any]:
        given.append(request)
        assert place is HERE
        for stage in ("joining the others", "step 1 of 2", "step 2 of 2"):
            progress(stage)
        times = dict.fromkeys(("step_time_s", "step_time_min_s", "step_time_max_s"), 0.1)
        losses = {"losses": [1.0, None], "step_times_s": [0.1, 0.1]}
        return {"model": "m", "num_ranks": 2, **losses, **times}

    monkeypatch.setattr(launch, "run_ranks", run)
    options = ("--save", "a", "--resume", "b", "--port", "7", "--step-timeout", "2m")
    monkeypatch.setattr(sys, "argv", ["heterog", "run", str(plan), *options, "--allow-nonfinite"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code in (None, 0)
    assert given == [
        RunRequest(
            plan=plan,
            limits=Limits(timeout_s=300.0, step_timeout_s=120.0),
            port=7,
            save=Path("a"),
            resume=Path("b"),
            allow_nonfinite=True,
            record=True,
        )
    ]
    printed = capsys.readouterr()
    assert "loss 1.0000 -> nan" in printed.out.replace("\n", " ")
    assert "checkpoint: a" in printed.out
    assert printed.err == "joining the others ...\ntraining ...\n"


@THOROUGH
@pytest.mark.distributed
def test_a_rank_that_hangs_ends_the_job(plan: Path) -> None:
    class Hanging(Place):
        def command(self, rank: int, argv: Sequence[str]) -> list[str]:
            return ["sleep", "600"] if rank == 1 else [*argv]

    with pytest.raises(LaunchError, match=r"ranks \[0, 1\] did not end within 6 s"):
        run_ranks(RunRequest(plan=plan, limits=Limits(timeout_s=6)), place=Hanging())
    assert not ranks_of_this_process()


@THOROUGH
@pytest.mark.distributed
def test_a_plan_for_another_model_is_refused_by_every_rank(plan: Path, model: str) -> None:
    other = model.replace(":workload", ":wider")
    with pytest.raises(LaunchError, match=r"made for another step .*\(16, 6\).*\(32, 6\)"):
        run_ranks(RunRequest(plan=plan, model=other, num_steps=1))
    assert not ranks_of_this_process()
