"""Jobs of real processes that lose a rank: training goes on, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError, InputFileError
from heterog.files import read_json, write_atomically, write_json
from heterog.graph.capture import capture
from heterog.healing import checkpoints, on_torchrun, rank
from heterog.healing.choices import Choice, Question
from heterog.healing.job import HealingJob
from heterog.healing.loop import HealingLoop, _heard, _said
from heterog.healing.on_torchrun import heal, read_healing
from heterog.healing.options import HealOptions
from heterog.healing.planning import NEAR, Planning
from heterog.healing.record import Trained, read_events, write_event
from heterog.healing.shelf import Moment, to_go_on_from
from heterog.runtime.launch import ranks_of_this_process
from heterog.runtime.ranks.host_places import HOST, RankHas
from heterog.runtime.ranks.watching import Limits
from heterog.runtime.request import RunRequest
from heterog.search.plan import load_plan
from heterog.zoo import load_workload
from tests.healing.elastic_loop import BATCH_SIZE, NUM_SAMPLES, Numbers, make_model, train
from tests.runtime.ranks import FORKS
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of
from tests.thorough import THOROUGH

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
MODEL = """
import torch, heterog
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))

def workload(batch_size: int = 12):
    generator = torch.Generator().manual_seed(1)
    batch = (
        torch.randn(batch_size, 6, generator=generator),
        torch.randn(batch_size, 4, generator=generator),
    )
    return heterog.Workload(make, batch, nn.functional.mse_loss, torch.optim.Adam, {"lr": 1e-3})
"""
WAIT_S = 300.0
TYPES = (1e6, ["T4"])  # a NIC so fast that data parallelism is what pays


def three() -> Cluster:
    return cluster_of(TYPES, TYPES, TYPES, latency_s=1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "model.py").write_text(MODEL)
    graph = capture(load_workload(f"{folder}/model.py:workload", None))
    make_plan(graph, three(), methods=["cp_ar"], budget="1e").save(folder / "plan.json")
    return folder


def losses_of_one_process(folder: Path, num_steps: int) -> list[float]:
    workload = load_workload(f"{folder}/model.py:workload", None)
    model = workload.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, targets = workload.make_batch()
    assert isinstance(targets, torch.Tensor)
    losses = []
    for _ in range(num_steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


class Enough(Exception):
    """A job has shown what was to be seen, and some steps were done since."""


def endless_job(folder: Path, progress: Callable[[str], None], **options: Any) -> HealingJob:
    """A job that ends by an error of ``progress`` alone."""
    request = RunRequest(
        plan=folder / "plan.json",
        num_steps=10**6,
        sources=(str(folder / "model.py"),),
        limits=Limits(timeout_s=600),
    )
    return HealingJob(request, options=HealOptions(search_budget="", **options), progress=progress)


def is_cleared(job: HealingJob) -> bool:
    """Whether a job that ran here has left neither ranks nor snapshots."""
    return not ranks_of_this_process() and not job._crew.host.shelf.folder.exists()


def test_training_begins_anew_only_if_no_snapshot_was_complete_and_says_so() -> None:
    trained, said = Trained(), list[str]()

    def begin(newest: Moment | None = None, checkpoint: str = "") -> str:
        return to_go_on_from(newest, checkpoint, was_kept=trained.was_kept, say=said.append)

    trained.hear({"event": "snapshot", "at_s": 1.0, "num_bytes": 5, "copy_s": 0.1})
    trained.hear({"event": "taken up", "at_s": 1.0, "step": 0})
    assert begin() == ""
    assert said.pop() == "no snapshot was complete yet: training begins anew"
    trained.hear({"event": "kept", "at_s": 1.0, "step": 3})
    assert begin(Moment(0, 3, 2), "folder") == ""
    assert not said
    assert begin(checkpoint="folder") == "folder"
    assert said.pop() == "no complete snapshot is left: on from checkpoint folder"
    with pytest.raises(HeterogError, match="the state is lost: no complete snapshot is left"):
        begin()


def job_of(folder: Path, crew: Any, said: list[str], **options: Any) -> HealingJob:
    """A job in its second generation, without ranks."""
    request = RunRequest(plan=folder / "plan.json", sources=(str(folder / "model.py"),))
    job = HealingJob(request, options=HealOptions(**options), crew=crew, say=said.append)
    job.steering, job.trained.generation = mock.Mock(), 1
    job.steering.running = Choice(path="plan.json", method="", devices=(0, 1, 2))
    return job


def test_a_job_begins_anew_only_if_no_snapshot_was_complete(folder: Path) -> None:
    crew, said, moment = mock.Mock(), list[str](), Moment(0, 3, 2)
    job = job_of(folder, crew, said)
    crew.newest.return_value = None
    assert job._decide().moment is None
    assert said.pop().endswith("training begins anew")
    assert crew.newest.call_args.args[1] == 0.0, "nobody can have any"
    crew.newest.return_value = moment
    assert job._decide().moment == moment
    crew.newest.return_value = None
    with pytest.raises(HeterogError, match="the state is lost"):
        job._decide()
    assert crew.newest.call_args.args[1] > 0


def test_a_checkpoint_of_an_earlier_job_is_not_gone_on_from(folder: Path, tmp_path: Path) -> None:
    """Who leads the job is lost before it has written one into the folder."""
    said: list[str] = []
    job = job_of(folder, mock.Mock(), said, checkpoint=str(tmp_path))
    index = tmp_path / "checkpoint.json"
    index.touch()
    begun = Trained(checkpoint_ns=job._checkpoint_ns(), is_running=True)
    job._go_on(begun)
    assert job._resume == ""
    os.utime(index, ns=(5, 5))  # written meanwhile, by whatever clock
    job._go_on(begun)
    assert job._resume == str(tmp_path)


def test_lines_without_an_end_are_not_read(tmp_path: Path) -> None:
    """Of a rank that was killed, or of a disk that was full, to whose journal others append."""
    path = tmp_path / "journal"
    write_event(path, "began", generation=0)
    with path.open("a") as file:
        file.write('{"event": "step", "at')
    assert [each["event"] for each in read_events(path)[0]] == ["began"]
    write_event(path, "began", generation=1)
    assert [each["generation"] for each in read_events(path)[0]] == [0, 1]


def test_a_full_disk_delays_what_a_rank_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healing: Any = mock.Mock(_journal=tmp_path / "journal", _untold=[])
    monkeypatch.setattr(rank, "write_events", mock.Mock(side_effect=OSError(28, "no space")))
    rank.HealingRank._write(healing, "step", step=1)
    monkeypatch.undo()
    rank.HealingRank._write(healing, "step", step=2)
    assert [each["step"] for each in read_events(healing._journal)[0]] == [1, 2]


@THOROUGH
def test_a_rank_is_lost_and_comes_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed; on with two ranks, then with three again, whatever that saves."""
    monkeypatch.setattr(Choice, "saved_s", lambda *_: 1.0)
    killed: list[int] = []

    def watch(stage: str) -> None:
        words = stage.split()
        if words[0] != "step":
            return
        number, moves = int(words[1]), job.trained.moves
        if number >= 20 and not killed:
            killed.append(ranks_of_this_process()[1])
            os.kill(killed[0], signal.SIGKILL)
        if len(moves) == job.trained.generation == 2 and number > moves[-1].step + 5 > 5:
            raise Enough

    job = endless_job(folder, watch, back_after_s=1.0)
    with pytest.raises(Enough):
        job.run()
    lost, back = job.trained.moves
    assert (lost.kind, lost.num_ranks, lost.why[:13]) == ("lost", 2, "B:0 was lost ")
    assert lost.step >= 10, "some steps were in memory elsewhere"
    assert (back.kind, back.num_ranks, back.steps_done_again) == ("back", 3, 0)
    steps = sorted(job.trained.losses)
    assert steps == list(range(1, steps[-1] + 1)), "none twice, none missing"
    expected = losses_of_one_process(folder, steps[-1])
    assert [job.trained.losses[step] for step in steps] == pytest.approx(expected, rel=1e-3)
    assert is_cleared(job)


def test_the_step_is_captured_where_ranks_are_forked_off(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each job, and what ranks of any generation of it get is that."""
    monkeypatch.setattr(rank, "_captured", {})
    plan, run_file = folder / "plan.json", tmp_path / "run.json"
    RunRequest(plan=plan, sources=(str(folder / "model.py"),)).write(run_file)
    rank.warm(str(plan))
    assert not rank._captured, "there is an accelerator"
    rank.warm(str(plan), str(run_file))
    (captured,) = rank._captured.values()
    assert captured.graph.fingerprint == load_plan(plan).graph.fingerprint
    rank.warm(str(plan), str(run_file))
    assert rank._captured == {tmp_path: captured}


def test_planning_for_a_slow_device_gives_it_less(folder: Path) -> None:
    """The process that plans, asked in this process: what is slow gets fewer samples."""
    plan = folder / "plan.json"
    planning = Planning(plan)
    planning.capture(f"{folder}/model.py:workload")
    assert len(planning.busy_s) == 3
    running = Choice(path=str(plan), method="", devices=(0, 1, 2))

    def ask(lost: tuple[int, ...], slow: dict[int, float]) -> tuple[Choice, list[int]]:
        question = Question(
            devices=tuple(each for each in range(3) if each not in lost), slow=slow, budget="2s",
            steps_left=10**9, restart_s=1.0, running=running, path=str(folder / "next.json"),
        )  # fmt: skip
        answer = planning.answer(question)
        devices = [0] * (3 - len(lost))
        made = load_plan(folder / "next.json")
        for decision in made.strategy.decisions:
            for device, share in zip(decision.devices, decision.shares, strict=True):
                devices[device] += share
        return answer, devices

    nominal, _ = ask((), {})
    slow, shares = ask((), {1: 4.0})
    assert slow.stay_step_s > nominal.stay_step_s
    assert slow.step_time_s <= slow.stay_step_s
    assert shares[1] <= min(shares[0], shares[2])
    without, _ = ask((1,), {1: 4.0})
    assert without.stay_step_s == pytest.approx(slow.stay_step_s)
    assert without.step_time_s > 0
    assert (without.devices, without.slow) == ((0, 2), {})

    tried = Question(
        devices=(0, 1, 2), slow={1: 1.2}, methods=(), budget="60e", steps_left=10**9,
        restart_s=1.0, running=running, path=str(folder / "near.json"),
        tried=(str(plan), str(folder / "next.json")),
    )  # fmt: skip
    answer = planning.answer(tried)
    decided = [load_plan(path).strategy.decisions for path in (answer.path, *tried.tried)]
    assert decided[0] not in decided[1:]
    assert answer.step_time_s <= NEAR * answer.stay_step_s


@THOROUGH
def test_a_job_tries_a_move_and_its_losses_stay_those_of_one_device(folder: Path) -> None:
    def watch(stage: str) -> None:
        moves, trials = job.trained.moves, job.steering.trials
        is_over = (
            len(moves) == job.trained.generation == sum(2 - trial.is_kept for trial in trials)
        )
        if trials and is_over and max(job.trained.losses) > moves[-1].step + 3 > 3:
            raise Enough

    job = endless_job(
        folder, watch, back_after_s=0.0, slow_factor=0.0, first_budget="1e", num_trials=1
    )
    with pytest.raises(Enough):
        job.run()
    kinds = [move.kind for move in job.trained.moves]
    assert kinds == [
        k for t in job.steering.trials for k in ("tried", *["taken back"] * (not t.is_kept))
    ]
    assert not any(move.steps_done_again for move in job.trained.moves)
    steps = sorted(job.trained.losses)
    assert steps == list(range(1, steps[-1] + 1))
    losses = [job.trained.losses[step] for step in steps]
    expected = losses_of_one_process(folder, steps[-1])
    assert losses == pytest.approx(expected, rel=1e-3, abs=1e-6 * expected[0])
    assert is_cleared(job)


def start_agent(number: int, port: int, log: Path, plan: Path | None = None) -> ForkServerProcess:
    """One of torchrun's agents; on one machine each stands for a host."""
    process = FORKS.Process(target=run_agent, args=(number, port, log, plan))
    process.start()
    return process


def run_agent(number: int, port: int, log: Path, plan: Path | None) -> None:
    """What ``heterog.heal`` does, whose workers are forked: they need not import torch."""
    from heterog.healing.agent import mend_torchrun

    mend_torchrun()
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ |= {"TMPDIR": str(log.parent), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    tempfile.tempdir = None  # which was read from the environment before
    settings = {"is_host": number == 0, "last_call_timeout": 1}
    settings |= {"keep_alive_interval": 1, "keep_alive_max_attempt": 5}
    config = LaunchConfig(
        min_nodes=1 if plan is None else 2,
        max_nodes=2 if plan is None else 3,
        nproc_per_node=1,
        run_id="healing",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_backend="c10d",
        rdzv_configs=settings,
        max_restarts=20,
        monitor_interval=0.1,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    if plan is None:
        elastic_launch(config, train)(log, log.with_name("pace"))
    else:
        elastic_launch(config, heal_plan)(plan)


def heal_plan(run_file: Path) -> None:
    """A rank of a plan, as ``-m heterog.heal`` makes it."""
    from heterog.healing.on_torchrun import main

    sys.argv = ["heal", str(run_file)]
    main()


def kill(agent: ForkServerProcess) -> None:
    """End an agent and its worker at once."""
    worker = subprocess.run(
        ["pgrep", "-P", str(agent.pid)], capture_output=True, text=True, check=False
    )
    for pid in (agent.pid, *map(int, worker.stdout.split())):
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    agent.join()


def set_pace(pace: Path, seconds: float) -> None:
    """Say how long a step takes; whole at once, as ranks read it at any time."""
    write_atomically(pace, str(seconds).encode())


def wait_for_ranks(log: Path, num_ranks: int, num_steps: int) -> int:
    """Wait until the last steps of the log were done by so many ranks, and one of them is kept.

    Returns:
        Number of lines of the log.
    """
    deadline_s = time.monotonic() + WAIT_S
    while True:
        # Of what is being written, no part of a line.
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        last = [json.loads(line) for line in lines[-num_steps:]]
        if [each["ranks"] for each in last] == [num_ranks] * num_steps and last[-1]["is_kept"]:
            return len(lines)
        assert time.monotonic() < deadline_s, f"{len(lines)} steps, at last {last[-1:]}"
        time.sleep(0.05)


def test_a_loop_under_torchrun_loses_a_host_and_takes_it_in_again(
    tmp_path: Path,
) -> None:
    """Two hosts, one, and two again, in the middle of epochs: every sample once, same losses."""
    from heterog.runtime.launch import free_port

    log, pace, port = tmp_path / "log.jsonl", tmp_path / "pace", free_port()
    set_pace(pace, 0.02)
    agents = [start_agent(number, port, log) for number in range(2)]
    try:
        first = wait_for_ranks(log, 2, 12)
        set_pace(pace, 0.3)  # while agents notice and start
        kill(agents[1])
        wait_for_ranks(log, 1, 2)
        agents.append(start_agent(2, port, log))
        wait_for_ranks(log, 2, 3)
        set_pace(pace, 0.02)
        (tmp_path / "enough").touch()
        for agent in (agents[0], agents[2]):
            agent.join(WAIT_S)
            assert agent.exitcode == 0
    finally:
        for agent in agents:
            if agent.is_alive():  # a failure: workers outlive it
                kill(agent)
    told = [json.loads(line) for line in log.read_text().splitlines()]
    last = {each["step"]: each for each in told}
    assert list(last) == list(range(1, len(last) + 1)), "none twice, none missing"
    ranks = [each["ranks"] for each in last.values()]
    changes = [after for before, after in zip([0, *ranks], ranks, strict=False) if before != after]
    assert changes[-3:] == [2, 1, 2]  # a busy machine may start the first host alone
    lost = [each for each in told[first:] if each["ranks"] == 1]
    assert lost
    assert all(each["from"].endswith("in memory") for each in lost)
    assert told[-1]["from"].endswith("in memory")
    joined = next(each for each in told[told.index(lost[-1]) :] if each["ranks"] == 2)
    assert joined["step"] == lost[-1]["step"] + 1, "no step again for a host that joins"
    shares = {tuple(each["shares"]) for each in told if each["ranks"] == 2}
    assert shares == {(BATCH_SIZE // 2, BATCH_SIZE // 2)}
    num_epochs = max(each["epoch"] for each in told) + 1
    for epoch in range(num_epochs):
        dealt = [i for each in last.values() if each["epoch"] == epoch for i in each["indices"]]
        assert sorted(dealt) == list(range(NUM_SAMPLES))
    assert len(last) == num_epochs * -(-NUM_SAMPLES // BATCH_SIZE)
    assert [each["loss"] for each in last.values()] == pytest.approx(
        losses_over([each["indices"] for each in last.values()]), rel=1e-9
    )
    deadline_s = time.monotonic() + WAIT_S
    own = [f"heterog-loop-{os.getuid()}-{agent.pid}-*" for agent in agents]
    while left := [each for name in own for each in Path(tempfile.gettempdir()).glob(name)]:
        assert time.monotonic() < deadline_s, f"{left} are left behind"
        time.sleep(0.05)


@pytest.mark.parametrize("state", [{"a"}, {"deep": [object()]}])
def test_a_loop_is_refused_whose_state_no_snapshot_can_hold(state: object) -> None:
    layer = type("Keeps", (nn.Identity,), {"get_extra_state": lambda _: state})()
    keeps = mock.Mock(state_dict=lambda: state)
    with mock.patch("torch.distributed.is_initialized", return_value=True):
        with pytest.raises(HeterogError, match=r"can hold _extra_state of the model .*JSON"):
            HealingLoop(layer, mock.Mock(), mock.Mock())
        with pytest.raises(HeterogError, match=r"can hold average of the others .*JSON"):
            HealingLoop(nn.Identity(), mock.Mock(), mock.Mock(), others={"average": keeps})


def test_a_loop_is_refused_whose_checkpoints_could_not_be_written(tmp_path: Path) -> None:
    """Before it trains; what fails later is told, as by a plan's job."""
    (tmp_path / "file").touch()
    with pytest.raises(InputFileError, match="file"):
        HealingLoop(
            nn.Identity(), mock.Mock(), mock.Mock(), checkpoint=str(tmp_path / "file" / "saved")
        )


def test_a_loop_ends_its_steps_and_says_why_no_checkpoint_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = mock.Mock()
    service.answer_to.side_effect = HeterogError("no room")
    monkeypatch.setattr(checkpoints, "Service", lambda module: service)
    loop: Any = mock.MagicMock(_checkpoint=str(tmp_path / "saved"), _checkpoint_s=-1.0, _rank=0)
    loop.num_steps, loop._writing, loop._silent_s = 0, None, 7.0
    waits: list[float] = []
    monkeypatch.setattr("heterog.healing.loop.set_silence", waits.append)
    loop._writer.end_step.return_value = [True, False]
    for _ in range(2):
        HealingLoop.end_step(loop)
        loop._writing._writing.join()
    assert capsys.readouterr().err == "heterog: no checkpoint was written: no room\n"
    assert waits == [7.0], "from the second step on: in the first one ranks compile"


def test_a_loop_is_refused_whose_ranks_keep_different_tensors() -> None:
    """A rank that lacks a tensor would be the one to write it."""
    average = mock.Mock(state_dict=lambda: {"weights": [torch.ones(2), torch.ones(3)]})
    group = mock.Mock(get_rank=lambda: 0, get_world_size=lambda: 2)

    def gather(value: Any) -> list[Any]:
        return [value, ["b:0", {"average of the others": 1}]]

    with (
        mock.patch("heterog.healing.loop.dist", group),
        mock.patch("heterog.healing.loop.gather", gather),
        pytest.raises(HeterogError, match=r"average of the others has 2 .* 0 and 1 on rank 1"),
    ):
        HealingLoop(nn.Identity(), mock.Mock(), mock.Mock(), others={"average": average})


def test_states_of_other_objects_are_held_as_they_are() -> None:
    """JSON alone has no tensors and tuples, and makes texts of numbers that are keys."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    average = torch.optim.swa_utils.AveragedModel(model)
    states = {
        "scheduler": scheduler.state_dict(),
        "average": dict(average.state_dict()),
        "optimizer": optimizer.state_dict(),
        "deep": {(1, "a"): [None, float("inf"), torch.tensor(2.0)], "heterog.tuple": ()},
    }
    tensors: list[torch.Tensor] = []
    said = json.dumps(_said(states, tensors))
    read = {f"objects.{number}": value for number, value in enumerate(tensors)}
    heard = _heard(json.loads(said), read)
    torch.testing.assert_close(heard, states, rtol=0, atol=0)
    assert heard["scheduler"]["milestones"] == {2: 1, 5: 1}
    assert heard["optimizer"]["param_groups"][0]["betas"] == (0.8, 0.9)
    of_others = {"others": {"scheduler": {"last_epoch": 3}}, "num_steps": 3}
    assert _heard(of_others, {}) == of_others, "as loops of 0.3 wrote it"


def test_a_plan_under_torchrun_goes_on_without_a_host(folder: Path, tmp_path: Path) -> None:
    """Three hosts, of which that of rank 0 is lost: another one decides, and takes up parts."""
    from heterog.runtime.launch import free_port

    asked: dict[str, Any] = {
        "plan": str(folder / "plan.json"),
        "model": f"{folder}/model.py:workload",
    }
    asked |= {"num_steps": 400, "output": str(tmp_path / "out.json"), "heal": {"redundancy": 1}}
    write_json(tmp_path / "run.json", asked)
    port = free_port()
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    agents = [
        start_agent(number, port, tmp_path / "log", tmp_path / "run.json")
        for number in range(1, 4)
    ]
    try:
        deadline_s = time.monotonic() + WAIT_S
        while not any(
            each["event"] == "step" and each["step"] >= 20 for each in journals(tmp_path)
        ):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        first = next(
            path
            for path in tmp_path.glob("heterog-loop-*/journal.jsonl")
            if read_events(path)[0][0]["host"] == "A"
        )
        gone = next(each for each in agents if f"-{each.pid}-" in first.parent.name)
        kill(gone)
        for agent in set(agents) - {gone}:
            agent.join(WAIT_S)
            assert agent.exitcode == 0
    finally:
        for agent in agents:
            if agent.is_alive():
                kill(agent)
        del store
    step = 0
    for event in journals(tmp_path):
        step = event["step"] if event["event"] in ("step", "taken up") else step
        # Others go on from a snapshot of a step although this host's rank ends within it.
        assert event["event"] != "snapshot" or event["step"] == step, "said before it is kept"
    output = read_json(tmp_path / "out.json", "output")
    (move,) = output["moves"]
    assert (move["kind"], move["why"], move["num_ranks"]) == ("lost", "A:0 lost", 2)
    assert output["steps"] == list(range(1, 402))
    expected = losses_of_one_process(folder, 401)
    assert output["losses"] == pytest.approx(expected, rel=1e-3, abs=1e-6 * expected[0])


def alone(monkeypatch: pytest.MonkeyPatch, folder: Path, say: Callable[[Any], list[Any]]) -> None:
    """Let ranks of torchrun be one, which hears what others say by a function."""
    monkeypatch.setattr(on_torchrun, "folder_of_host", lambda: folder)
    monkeypatch.setattr(on_torchrun, "gather", say)
    monkeypatch.setattr(on_torchrun, "any_rank", lambda *values: list(values))
    for name in ("meet", "join", "set_silence", "end_cut_links", "Service"):
        monkeypatch.setattr(on_torchrun, name, mock.Mock())


def test_ranks_that_wait_for_a_plan_go_on_talking(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody would see that a host is cut off, which what is sent there tells."""
    alone(monkeypatch, tmp_path, lambda value: [value])
    monkeypatch.setattr(on_torchrun, "say_to_all", lambda *said: [said[2]])
    for name, value in {"RANK": "0", "GROUP_RANK": "0", "LOCAL_RANK": "0", HOST: ""}.items():
        monkeypatch.setenv(name, value)
    request = RunRequest(plan=folder / "plan.json", sources=(str(folder / "model.py"),))
    generation = on_torchrun.Generation(request, HealOptions())
    is_over, lost = threading.Event(), RuntimeError("Connection closed by peer")
    monkeypatch.setattr(generation, "_plan_text", lambda: is_over.wait(WAIT_S))  # it takes long
    monkeypatch.setattr(on_torchrun, "any_rank", mock.Mock(side_effect=[[False], lost]))
    try:
        with pytest.raises(RuntimeError, match="Connection closed"):
            generation.decide()
    finally:
        is_over.set()


@pytest.mark.parametrize(("timeout_s", "waits_s"), [(60.0, 300.0), (1800.0, 1800.0)])
def test_a_plan_may_take_as_long_as_anything_else(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float,
    waits_s: float,
) -> None:
    alone(monkeypatch, tmp_path, lambda value: [value])
    monkeypatch.setattr(on_torchrun, "say_to_all", lambda *said: [said[2]])
    for name, value in {"RANK": "0", "GROUP_RANK": "0", "LOCAL_RANK": "0", HOST: ""}.items():
        monkeypatch.setenv(name, value)
    request = RunRequest(
        plan=folder / "plan.json",
        sources=(str(folder / "model.py"),),
        limits=Limits(timeout_s=timeout_s),
    )
    generation = on_torchrun.Generation(request, HealOptions())
    generation.devices = generation.devices[:1]  # for which there is no plan yet
    assert isinstance(generation.planning, mock.Mock)
    waited: list[float] = []

    def answer_to(number: int, most_s: float) -> None:
        waited.append(most_s)
        if number:
            (tmp_path / "left-0.json").write_text("{}")

    generation.planning.ask.return_value = 1
    generation.planning.answer_to.side_effect = answer_to
    assert generation._plan_text() == "{}"
    assert waited == [waits_s, waits_s]


def test_a_host_reports_that_came_before_rank_0_of_the_plan(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has the losses of all steps; a host that joins later does not, whatever its devices."""
    own = [RankHas(machine=machine, device="") for machine in range(3)]
    known = [(-1, -1), (4, 0), (4, 0)]  # the last generation of each host, and the first
    told = [[*each, each[0] > 0, []] for each in known]
    alone(monkeypatch, tmp_path, lambda value: told if isinstance(value, list) else [value])
    texts = [json.dumps(asdict(each)) for each in own]
    monkeypatch.setattr(on_torchrun, "say_to_all", lambda *_: texts)
    monkeypatch.setattr(on_torchrun, "own_place", lambda: own[0])
    request = RunRequest(plan=folder / "plan.json", sources=(str(folder / "model.py"),))
    found = []
    for number in range(3):
        monkeypatch.setenv("RANK", str(number))
        found.append(on_torchrun.Generation(request, HealOptions()))
    assert [each.is_first for each in found] == [True, False, False]
    assert [each.reports for each in found] == [False, True, False]
    assert [each.number for each in found] == [5, 5, 5]
    resumed = replace(request, resume=tmp_path)
    found[0].request = resumed
    write_json(tmp_path / "checkpoint.json", {"num_steps": 0})
    monkeypatch.setattr(found[0], "_plan_text", lambda: "{}")
    assert found[0].decide().checkpoint == str(tmp_path), "there is no snapshot to go on from"
    found[0].request = request
    with pytest.raises(HeterogError, match="the state is lost: no complete snapshot is left"):
        found[0].decide()
    slept: list[float] = []
    every, found[0].devices = found[0].devices, found[0].devices[:2]
    with monkeypatch.context() as waiting:
        waiting.setattr("time.sleep", slept.append)
        with pytest.raises(HeterogError, match="the state is lost"):
            found[0].decide()
    assert slept, "the third host may have it"
    found[0].devices, found[0]._was_kept = every, False
    assert found[0].decide().moment is None, "none was complete, so training begins anew"
    assert "training begins anew" in capsys.readouterr().err


def test_a_host_that_has_begun_with_a_snapshot_tells_that_there_was_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that gave it may be lost before it is read, and so before there is another."""
    told: list[Any] = []

    def say(value: Any) -> list[Any]:
        told.append(value)
        return [value]

    alone(monkeypatch, tmp_path, say)
    monkeypatch.setattr(on_torchrun, "say_to_all", lambda *said: [said[2]])
    for name, value in {"RANK": "0", "GROUP_RANK": "0", "LOCAL_RANK": "0", HOST: ""}.items():
        monkeypatch.setenv(name, value)
    request = RunRequest(plan=folder / "plan.json", sources=(str(folder / "model.py"),))
    about = {"generation": 4, "devices": [0], "host": "A"}
    for was_kept, has_settled in ((False, False), (True, False), (False, True)):
        journal = tmp_path / "journal.jsonl"
        journal.unlink(missing_ok=True)
        write_event(journal, "began", **about, was_kept=was_kept)
        if has_settled:
            write_event(journal, "kept", step=3)
        on_torchrun.Generation(request, HealOptions())
    assert [kept for _, _, kept, _ in told] == [False, True, True]


def test_a_plan_that_heals_says_what_torchrun_has_to_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = tmp_path / "run.json"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(HeterogError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        heal(run_file)
    write_json(run_file, {"plan": "plan.json", "num_steps": 7, "heal": {"redundancy": 2}})
    request, options = read_healing(run_file)
    assert (request.plan, request.num_steps, options.redundancy) == (Path("plan.json"), 7, 2)
    for wrong, words in (({"redundant": 2}, "redundant"), ({"checkpoint": "c"}, "on Ray")):
        write_json(run_file, {"plan": "plan.json", "heal": wrong})
        with pytest.raises(HeterogError, match=words):
            read_healing(run_file)


def test_an_agent_says_how_it_ends(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Torchrun alone tells the end of a job to an agent that waits by an error."""
    from torch.distributed import DistStoreError
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

    from heterog.healing import agent, elastic
    from heterog.healing.elastic import path_of_host

    given: list[list[str]] = []
    loop = tmp_path / "loop.py"
    loop.touch()

    def ends(error: Exception) -> Any:
        monkeypatch.setattr(agent, "torchrun", mock.Mock(side_effect=error))
        with pytest.raises(SystemExit) as ended:
            agent.run_agent(["--rdzv-id", "job", str(loop)], "rank.py")
        return ended.value.code

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv(elastic.ROUND, "0")  # which this changes
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(SimpleElasticAgent, "_rendezvous", agent._join)
    monkeypatch.setattr("torch.distributed.run.run_script_path", elastic.run_script)
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", agent._shutdown)
    dynamic: Any = agent.__dict__["dynamic"]  # which this changes, too
    handlers = dynamic.DynamicRendezvousHandler
    monkeypatch.setattr(handlers, "num_nodes_waiting", agent._num_waiting)
    monkeypatch.setattr(dynamic, "get_method_name", dynamic.get_method_name)
    monkeypatch.setattr(dynamic, "_delay", agent._delay)
    monkeypatch.setattr(dynamic._BackendRendezvousStateHolder, "_sanitize", agent._sanitize)
    c10d: Any = agent.__dict__["c10d"]
    monkeypatch.setattr(c10d, "_matches_machine_hostname", agent._is_own_name)
    assert ends(RendezvousClosedError()) == 2, "it has never had ranks"
    path_of_host().mkdir()
    assert ends(RendezvousClosedError()) == 0
    assert capsys.readouterr().err.count("the job is over; a new one needs another") == 2
    assert "--rdzv-endpoint: RendezvousTimeoutError()" in ends(RendezvousTimeoutError())
    stopped = SignalException("", signal.SIGTERM)
    assert ends(stopped) == "heterog: SIGTERM ended this host's part of the job."
    assert ends(HeterogError("rank 1: why")) == 2
    assert capsys.readouterr().err == "heterog: the job has ended: rank 1: why\n"
    monkeypatch.setattr(agent, "torchrun", given.append)
    run_file = str(tmp_path / "run.json")
    model = f"{folder}/model.py:workload"
    write_json(Path(run_file), {"plan": str(folder / "plan.json"), "model": model})
    monkeypatch.setattr(rank, "_captured", {})
    agent.run_agent(["--max-restarts", "7", run_file], "rank.py")
    assert given[0][-3:] == ["7", "rank.py", run_file]
    assert list(rank._captured) == [path_of_host()], "ranks that are forked off need not capture"
    own = [str(loop), "--config", "config.json"]
    agent.run_agent(own, "rank.py")
    assert given[1][-3:] == own, "the file is its script's"
    for wrong, words in (
        ([str(tmp_path / "none.json")], "none.json"),
        ([run_file, "--steps", "7"], "run.json is followed by --steps 7; options of torchrun"),
        (["--steps=7", run_file], "unrecognized arguments: --steps=7; options of torchrun"),
        ([f"{loop}x"], "there is no script"),
    ):
        with pytest.raises(SystemExit, match="2"):
            agent.run_agent(wrong, "rank.py")
        said = capsys.readouterr().err
        assert words in said, "before ranks are started"
        assert said.count("\n") == 1

    stuck = mock.Mock()
    LocalElasticAgent._stop_workers(stuck, mock.Mock())
    stuck._shutdown.assert_called_once_with()
    LocalElasticAgent._shutdown(stuck)
    (_, seconds), _ = stuck._pcontext.close.call_args
    assert elastic.LEAVE_S < seconds < 10, (
        "other hosts cannot meet before a rank that is stuck ends"
    )

    # Python searches all modules for each caller in the stack, while others write to the store.
    monkeypatch.setattr("inspect.stack", mock.Mock(side_effect=AssertionError("it takes long")))
    handlers._record(mock.Mock(), "what an agent writes to the store")
    waits: list[Any] = []
    monkeypatch.setattr(agent, "_delay", waits.append)
    dynamic._delay(seconds=(0, 0.3))
    dynamic._delay(seconds=1)
    assert waits == [(0, 0.3), agent._LOOK_S], "looks at whether hosts have met come sooner"

    join = mock.Mock(side_effect=[DistStoreError("wait timeout after 30000ms"), None])
    monkeypatch.setattr(agent, "_join", join)
    group = mock.Mock()
    group.spec.rdzv_handler._store.check.return_value = False
    SimpleElasticAgent._rendezvous(mock.Mock(), group)
    assert join.call_count == 2, "who was to say where ranks meet was lost"

    monkeypatch.setattr(agent, "_num_waiting", lambda handler: 0)
    handler = group.spec.rdzv_handler
    assert agent._num_outside(handler) == 0
    state = handler._state_holder.state
    state.round, state.participants = "that of others", {"another": 0}
    assert agent._num_outside(handler) == 1, "or it would train on alone"
    state.participants = {}
    assert agent._num_outside(handler) == 0, "no others have met: they were late, too"


_IN_WORKER = "rank 1: KeyError: 'Caught KeyError in DataLoader worker process 0.'"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("raise ValueError('a bug')", "rank 1: ValueError: a bug"),
        ("import sys; sys.exit('usage: loop.py')", "rank 1: SystemExit: usage: loop.py"),
        ("raise RuntimeError('Connection reset by peer')", ""),
        ("import torch.distributed as d; raise d.DistStoreError('no answer')", ""),
        ("raise OSError('no room')", "SIGTERM"),
        ("import torch; raise torch.AcceleratorError('it fell off the bus')", "SIGTERM"),
        ("import torch; raise torch.OutOfMemoryError('tried to allocate')", "SIGTERM"),
        ("import torch; torch.empty(1 << 50)", "SIGTERM"),
        ("raise MemoryError", "SIGTERM"),
        (
            "raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed.')",
            "SIGTERM",
        ),
        ("raise RuntimeError('DataLoader worker (pid(s) 7) exited unexpectedly')", "SIGTERM"),
        ("raise KeyError('Caught KeyError in DataLoader worker process 0.')", _IN_WORKER),
    ],
)
def test_an_error_of_a_script_ends_the_job_unless_another_rank_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, left: str
) -> None:
    """Torchrun alone would start the same again and again."""
    from heterog.healing import agent, elastic

    script, killed = tmp_path / "loop.py", mock.Mock()
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(elastic, "folder_of_host", lambda: tmp_path)
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(os, "kill", killed)
    for name, value in {"TORCHELASTIC_RUN_ID": "job", elastic.ROUND: "1", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt):
        elastic.run_script(str(script), "given")
    assert sys.argv == [str(script), "given"]
    if left == "SIGTERM":  # this host alone leaves
        killed.assert_called_once_with(os.getppid(), signal.SIGTERM)
        return
    told = tmp_path / elastic.ERROR
    assert (told.read_text() if told.exists() else "") == left
    assert not killed.called
    if not left:
        return
    # Its agent tells those of other hosts, one of which waits for a meeting that is closed now.
    monkeypatch.setattr(agent, "path_of_host", lambda: tmp_path)
    kept: dict[str, bytes] = {}
    store = mock.Mock(check=lambda keys: keys[0] in kept, get=kept.__getitem__)
    store.set = lambda key, value: kept.update({key: value.encode()})
    own, group = mock.Mock(), mock.Mock()
    group.spec.rdzv_handler._store = store
    monkeypatch.setattr(agent, "_join", own)
    monkeypatch.setattr(agent, "_shutdown", lambda *_: told.write_text("told to end"))
    agent._end_ranks(mock.Mock())
    with pytest.raises(HeterogError, match=left):
        agent._join_again(mock.Mock(), group)
    (tmp_path / agent._TOLD).unlink()
    store.check = mock.Mock(side_effect=[False, True, True])
    own.side_effect = RendezvousClosedError
    with pytest.raises(HeterogError, match=left):
        agent._join_again(mock.Mock(), group)
    store.check = mock.Mock(return_value=False)
    with pytest.raises(RendezvousClosedError):
        agent._join_again(mock.Mock(), group)


def test_an_agent_that_was_late_does_not_take_itself_for_lost() -> None:
    """After a pause of all agents each would otherwise drop itself, and start its ranks anew."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

    from heterog.healing import agent

    own, other, wrong = (dynamic._NodeDesc(f"10.0.0.{each}", 1, 0) for each in (1, 2, 3))
    second = timedelta(seconds=1)
    settings = dynamic.RendezvousSettings("job", 2, 2, dynamic.RendezvousTimeout(), second, 3)
    holder = dynamic._BackendRendezvousStateHolder(mock.Mock(), settings)
    state: Any = holder.state
    long_ago = datetime.now(UTC) - 10 * second
    state.complete, state.participants = True, {own: 0, other: 1, wrong: 2}
    state.last_heartbeats = {own: long_ago, other: long_ago, wrong: long_ago}
    holder.node = own  # type: ignore[attr-defined]
    agent._drop_others(holder)
    seen = holder.seen  # type: ignore[attr-defined]
    seen |= {node: (sign, at - 4 * second) for node, (sign, at) in seen.items()}
    state.last_heartbeats[wrong] -= second  # its clock is wrong, and it gave a sign since
    agent._drop_others(holder)
    assert (state.round, state.participants) == (0, {own: 0, wrong: 2})
    assert state.last_heartbeats == {own: long_ago, wrong: long_ago - second}, "as they told"
    context = dynamic._RendezvousContext(own, state, settings)
    assert dynamic._should_keep_alive(context), "its next sign of life is due"


def journals(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of a plan have done."""
    return [
        event
        for path in folder.glob("heterog-loop-*/journal.jsonl")
        for event in read_events(path)[0]
    ]


def losses_over(batches: list[list[int]]) -> list[float]:
    """One process that trains on the same batches."""
    data, model, losses = Numbers(), make_model(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.8, 0.99))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for indices in batches:
        samples = [data[index] for index in indices]
        inputs = torch.stack([each[0] for each in samples])
        targets = torch.stack([each[1] for each in samples])
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses
