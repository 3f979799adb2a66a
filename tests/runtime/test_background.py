"""The process beside a rank: what it sees, how much it dares, and that it really trains."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heterog.envs.toy import chain_graph
from heterog.errors import HeterogError
from heterog.runtime.launch import HEARTBEAT, run_commands, run_ranks
from heterog.runtime.ranks.background import Governor, LowPriorityThread, StepWatch, Trainer
from heterog.runtime.request import RunRequest
from heterog.search.background import BackgroundPlan
from heterog.zoo import load_workload
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of

WAIT_S = 300.0
JOB = """
import torch
from torch import nn
from torch.nn import functional
import heterog

def job(batch_size: int = 8) -> heterog.Workload:
    torch.manual_seed(0)
    batch = (torch.randn(batch_size, 16), torch.randn(batch_size, 4))
    model = lambda: nn.Linear(16, 4)
    return heterog.Workload(model, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.05})
"""


def test_the_governor_waits_until_it_knows_how_long_a_step_takes_alone() -> None:
    governor = Governor(1.1, num_alone=3)
    for seconds in (1.0, 5.0):
        governor.observe(seconds)
        assert (governor.duty, governor.alone_s) == (0.0, 0.0)
    governor.observe(1.2)
    assert governor.alone_s == 1.2
    assert governor.duty > 0


def test_the_governor_backs_off_from_slow_steps_and_comes_back() -> None:
    governor = Governor(1.1, num_alone=1)
    governor.observe(1.0)
    before = governor.duty
    governor.observe(1.08)
    backed_off = governor.duty
    assert backed_off < before
    for _ in range(20):
        governor.observe(1.0)
    assert governor.duty == 1.0


def test_the_governor_rests_while_the_mean_is_over_the_limit() -> None:
    governor = Governor(1.1, num_alone=1)
    governor.observe(1.0)
    for _ in range(8):
        governor.observe(2.0)
    assert governor.duty < 0.01


@pytest.mark.parametrize("harm", [0.02, 0.1, 0.4, 1.0])
def test_the_mean_slow_down_stays_under_the_limit(harm: float) -> None:
    """A foreground that is slowed down in proportion to what the background takes."""
    governor = Governor(1.1, num_alone=1)
    governor.observe(1.0)
    taken, steps = 0.0, []
    for _ in range(60):
        steps.append(1.0 + harm * governor.duty)
        taken += governor.duty
        governor.observe(steps[-1])
    assert sum(steps) / len(steps) <= 1.1
    assert taken > 0.5, "the background gets something done"


def test_steps_are_seen_by_the_heartbeat(tmp_path: Path) -> None:
    heartbeat = tmp_path / "stage"
    watch = StepWatch(heartbeat)
    assert watch.steps() == []

    def beat(stage: str, at: float) -> list[float]:
        heartbeat.write_text(stage)
        os.utime(heartbeat, (at, at))
        return watch.steps()

    assert beat("capturing the model", 5.0) == []
    assert beat("step 7 of 20", 10.0) == [], "the first step warms up"
    assert beat("step 8 of 20", 13.0) == []
    assert beat("step 9 of 20", 14.0) == pytest.approx([1.0])
    assert beat("step 9 of 20", 14.0) == []
    assert beat("step 11 of 20", 18.0) == pytest.approx([2.0, 2.0])
    assert beat("leaving", 19.0) == []


def test_a_thread_trains_until_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    trainer = Trainer(load_workload(f"{tmp_path / 'job.py'}:job", 8), torch.device("cpu"))
    governor = Governor(1.1, num_alone=1)
    thread = LowPriorityThread(trainer, torch.device("cpu"), governor)
    thread.start()
    assert thread.steps == 0, "not before it knows how long the foreground takes alone"
    governor.observe(1.0)
    deadline_s = time.monotonic() + WAIT_S
    while thread.steps < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert thread.stop() >= 3


def has_lowest_priority(pid: int) -> bool:
    is_idle = not hasattr(os, "SCHED_IDLE") or os.sched_getscheduler(pid) == os.SCHED_IDLE
    return is_idle and os.getpriority(os.PRIO_PROCESS, pid) == 19


def give_priority(pid: int) -> None:
    """All threads of a process run like any others again, if the system lets us."""
    for thread in map(int, os.listdir(f"/proc/{pid}/task") if hasattr(os, "SCHED_IDLE") else ()):
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, 0)


def test_the_process_trains_beside_a_rank(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    heartbeat, output = tmp_path / "stage", tmp_path / "done.json"
    words, model = tmp_path / "words", f"{tmp_path / 'job.py'}:job"
    with words.open("w") as sink:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "heterog.runtime.ranks.background"),
                *(model, "8", "2", str(output)),
            ],
            env={**os.environ, HEARTBEAT: str(heartbeat)},
            stderr=sink,
        )
    try:
        number, deadline_s, is_lowest = 1, time.monotonic() + WAIT_S, False
        while time.monotonic() < deadline_s and process.poll() is None:
            heartbeat.write_text(f"step {number} of 999")
            number += 1
            time.sleep(0.1)
            if not is_lowest and has_lowest_priority(process.pid):
                is_lowest = True
                give_priority(process.pid)  # else it would wait as long as anything else runs
            if output.exists() and json.loads(output.read_text())["steps"] >= 5:
                break
        assert process.poll() is None, words.read_text()
        assert is_lowest
        done = json.loads(output.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert done["steps"] >= 5
    assert done["samples"] == 8 * done["steps"]
    assert done["last_loss"] < done["first_loss"]


def test_too_few_steps_to_compare_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = BackgroundPlan(
        model="job",
        source="job.py:job",
        batch_size=8,
        limit=1.1,
        allowance_s=0.0,
        step_time_alone_s=1.0,
        step_time_s=1.0,
        idle_share=(0.5,),
        samples_per_s=(1.0,),
        shortage=("",),
    )
    plan = make_plan(chain_graph(), cluster_of((1.0, ["CPU"])), methods=["ddp"], budget="1e")
    monkeypatch.setattr(RunRequest, "load", lambda _: replace(plan, background=background))
    with pytest.raises(HeterogError, match=r"3 steps are too few .* measure 9 or more"):
        run_ranks(RunRequest(plan=tmp_path / "plan.json", num_steps=3))


ALONE = """
import time
from pathlib import Path

def process_of(path):
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    return path.read_text()

def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True

failed, _ = map(process_of, [Path("failed"), Path("trains")])
while not has_ended(failed):
    time.sleep(0.01)
"""
"""A rank that goes on until a process beside it has ended, and another one has begun."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_beside_a_rank_ends_with_it_and_its_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def beside(number: int) -> list[str]:
        name = "trains" if number else "failed"
        end = "time.sleep(1000)" if number else "sys.exit('heterog: no such model')"
        begin = f"import os, sys, time; open('{name}', 'w').write(str(os.getpid()))"
        return ["-c", f"{begin}; {end}"]

    failed = run_commands(["-c", ALONE], 2, beside=beside)
    assert failed == {0: "no such model"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("trains").read_text()), 0)
