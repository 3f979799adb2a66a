"""Jobs of real processes: they train together, and they end together with a clear error."""

import subprocess
from pathlib import Path

import pytest

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.planners.plan import make_plan
from heterog.runtime.launch import LaunchError, run_ranks
from heterog.zoo import load_workload
from tests.simulator.builders import cluster_of

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

def wider(batch_size: int = 8) -> heterog.Workload:
    return make(32, batch_size)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return f"{path}:workload"


def two_devices() -> Cluster:
    return cluster_of((1.0, ["T4"]), (1.0, ["T4"]))


@pytest.fixture
def plan(tmp_path: Path, model: str) -> Path:
    path = tmp_path / "plan.json"
    graph = capture(load_workload(model, None))
    make_plan(graph, two_devices(), methods=["ddp"], budget="1e").save(path)
    return path


def left_over(plan: Path) -> str:
    return subprocess.run(
        ["pgrep", "-f", f"heterog.runtime.rank {plan}"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout


@pytest.mark.distributed
def test_ranks_train_together_and_are_measured(plan: Path) -> None:
    measured = run_ranks(plan, 2, num_steps=4, timeout_s=120)
    assert measured["num_ranks"] == 2
    assert len(measured["step_times_s"]) == len(measured["losses"]) == 4
    assert measured["step_time_min_s"] <= measured["step_time_s"] <= measured["step_time_max_s"]
    assert measured["losses"] == sorted(measured["losses"], reverse=True), "it learns"
    assert left_over(plan) == ""


@pytest.mark.distributed
def test_a_killed_rank_ends_the_job(plan: Path) -> None:
    def wrap(rank: int, command: list[str]) -> list[str]:
        return ["sh", "-c", "sleep 1; kill -9 $$"] if rank == 1 else command

    with pytest.raises(LaunchError, match="rank 1 was killed by signal 9; the others were ended"):
        run_ranks(plan, 2, num_steps=2, timeout_s=60, wrap=wrap)
    assert left_over(plan) == ""


@pytest.mark.distributed
def test_a_rank_that_hangs_ends_the_job(plan: Path) -> None:
    def wrap(rank: int, command: list[str]) -> list[str]:
        return ["sleep", "600"] if rank == 1 else command

    with pytest.raises(LaunchError, match=r"ranks \[0, 1\] did not end within 6 s"):
        run_ranks(plan, 2, num_steps=2, timeout_s=6, wrap=wrap)
    assert left_over(plan) == ""


@pytest.mark.distributed
def test_a_plan_for_another_model_is_refused_by_every_rank(plan: Path, model: str) -> None:
    other = model.replace(":workload", ":wider")
    with pytest.raises(LaunchError, match=r"made for another step .*\(16, 6\).*\(32, 6\)"):
        run_ranks(plan, 2, model=other, num_steps=1, timeout_s=60)
    assert left_over(plan) == ""
