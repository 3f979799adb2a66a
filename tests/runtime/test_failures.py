"""Jobs that go wrong on real processes: one clear error, and nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from heterog.cli import main
from heterog.cluster import Cluster
from heterog.cluster.catalog import device_type
from heterog.cluster.hardware import Device, Host, Link
from heterog.errors import HeterogError
from heterog.graph.capture import capture
from heterog.runtime.launch import LocalRank, ranks_of_this_process, run_commands, run_ranks
from heterog.runtime.rank import _listen, as_rank, join
from heterog.runtime.ranks import testbed as module
from heterog.runtime.ranks import watching
from heterog.runtime.ranks.links import CUT_S
from heterog.runtime.ranks.testbed import Testbed
from heterog.runtime.ranks.watching import (
    COMPILING,
    LaunchError,
    Limits,
    _check_alive,
    wait_for_ranks,
)
from heterog.runtime.request import RunRequest
from heterog.zoo import load_workload
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of
from tests.thorough import THOROUGH, few_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("where_models_are"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

MODEL = """
import os, time
import torch, heterog
from torch import nn

class Hanging(torch.optim.SGD):
    calls = 0
    def step(self, closure=None):
        stepped = [value.shape for group in self.param_groups for value in group["params"]]
        Hanging.calls += (16, 6) in stepped  # capture steps other tensors
        if Hanging.calls == 3 and os.environ["RANK"] == "1":
            time.sleep(600)
        return super().step(closure)

made = 0

def batch(size, value=1.0):
    return torch.full((size, 6), value), torch.zeros(size, 4)

def wrong_later():
    global made
    made += 1
    return batch(8) if made == 1 else tuple(each.double() for each in batch(8))

def make(example, optimizer=torch.optim.Adam):
    torch.manual_seed(0)
    model = lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    return heterog.Workload(model, example, nn.functional.mse_loss, optimizer, {"lr": 1e-3})

def workload(batch_size: int = 8):
    return make(batch(batch_size))

def nan(batch_size: int = 8):
    return make(lambda: batch(batch_size, float("nan")))

def wrong(batch_size: int = 8):
    return make(wrong_later)

def hanging(batch_size: int = 8):
    return make(batch(batch_size), Hanging)
"""
FOREVER = 10**6
LONG = Limits(timeout_s=600)
WAIT_S = 200.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "model.py").write_text(MODEL)
    return folder


def plan_of(folder: Path, function: str, cluster: Cluster | None = None) -> Path:
    path = folder / f"{function}.json"
    graph = capture(load_workload(f"{folder}/model.py:{function}", None))
    target = cluster or cluster_of((1.0, ["T4"]), (1.0, ["T4"]))
    make_plan(graph, target, methods=["ddp"], budget="1e").save(path)
    return path


@pytest.fixture(scope="module")
def plan(folder: Path) -> Path:
    return plan_of(folder, "workload")


@pytest.fixture
def every_rank_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that end by themselves get the time that it takes: their words are looked at."""
    monkeypatch.setattr(watching, "_GRACE_S", WAIT_S)
    monkeypatch.setattr(watching, "_KILLED_GRACE_S", WAIT_S)


class AtStep:
    """Does something once, when rank 0 has begun a step."""

    def __init__(self, number: int, action: Callable[[dict[int, int]], object]) -> None:
        self._number = number
        self._action = action
        self.pids: dict[int, int] = {}

    def __call__(self, stage: str) -> None:
        words = stage.split()
        if words[0] == "step" and int(words[1]) >= self._number and not self.pids:
            self.pids = ranks_of_this_process()
            self._action(self.pids)


def listening_addresses(pid: int) -> set[str]:
    """Addresses on which a process accepts TCP connections, as the kernel writes them."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(path))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found


def assert_all_gone(pids: dict[int, int]) -> None:
    assert pids
    assert not [pid for pid in pids.values() if module._start_ticks(pid) is not None]


def test_a_frozen_rank_is_named_and_the_ranks_listen_on_loopback_only(plan: Path) -> None:
    addresses: list[set[str]] = []

    def freeze(pids: dict[int, int]) -> None:
        addresses.extend(listening_addresses(pid) for pid in pids.values())
        os.kill(pids[1], signal.SIGSTOP)

    watch = AtStep(3, freeze)
    text = r"rank 1 is frozen: its process \d+ was stopped by a signal at step \d+ of 1000001; all"
    with pytest.raises(LaunchError, match=text) as caught:
        run_ranks(RunRequest(plan=plan, num_steps=FOREVER, limits=LONG), progress=watch)
    assert caught.value.lost == (1,), "a job that heals goes on without it"
    assert addresses == [{"0100007F"}, {"0100007F"}], "127.0.0.1, the store and gloo"
    assert_all_gone(watch.pids)


@pytest.mark.usefixtures("every_rank_ends")
def test_a_rank_that_is_killed_in_a_step_is_named(plan: Path) -> None:
    watch = AtStep(3, lambda pids: os.kill(pids[1], signal.SIGKILL))
    with pytest.raises(LaunchError, match=r"rank 1 was killed by signal 9 at step \d+") as caught:
        run_ranks(RunRequest(plan=plan, num_steps=FOREVER, limits=LONG), progress=watch)
    assert "rank 0: lost the connection to another rank: " in caught.value.last_words[0]
    assert_all_gone(watch.pids)


def test_a_rank_that_compiles_is_waited_for() -> None:
    compiling = SimpleNamespace(stage=f"{COMPILING}, part 2", since_s=0.0, poll=lambda: None)
    waiting = SimpleNamespace(stage="step 1 of 9", since_s=0.0, poll=lambda: None, pid=0)
    compiling.stopped_since_s = waiting.stopped_since_s = None
    _check_alive([compiling, waiting], now_s=900.0, step_timeout_s=300.0)
    compiling.stage = "step 2 of 9"
    _check_alive([compiling, waiting], now_s=901.0, step_timeout_s=300.0)
    with pytest.raises(LaunchError, match="more than 300 s"):
        _check_alive([compiling, waiting], now_s=1300.0, step_timeout_s=300.0)


def test_who_was_silent_for_long_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that were lost with it show so at once; those killed with one take a moment."""
    waited: list[float] = []
    monkeypatch.setattr(watching, "_wait_for_all", lambda ranks, limit_s: waited.append(limit_s))
    for silent_s in (0.0, 0.2, CUT_S):
        gone, there = (
            SimpleNamespace(
                stage="step 3 of 9", since_s=0.0, stopped_since_s=None, silent_s=seconds, pid=0,
                poll=lambda code=code: code, look=lambda now_s: None, last_words=str,
            )
            for code, seconds in ((-9, silent_s), (None, 0.0))
        )  # fmt: skip
        with pytest.raises(LaunchError) as caught:
            wait_for_ranks([there, gone], LONG, lambda stage: None)
        assert caught.value.lost == (1,)
    assert waited == [0.5, 0.5, 0.1]


@pytest.mark.parametrize(
    ("stage", "counts_steps", "is_ended"),
    [
        (f"{COMPILING}, part 2", True, False),
        ("step 3 of 9", True, True),
        ("step 3 of 9", False, False),  # a job that heals may train for days
        ("joining the others", False, True),
    ],
)
def test_a_job_has_its_time_besides_compiling(
    stage: str, counts_steps: bool, is_ended: bool
) -> None:
    rank = SimpleNamespace(stage=stage, since_s=time.monotonic(), stopped_since_s=None, pid=0)
    rank.silent_s = 0.0
    polls = iter(range(1000 if is_ended else 16))
    rank.look = lambda now_s: None
    rank.poll = lambda: None if next(polls, None) is not None else 0

    def wait() -> None:
        limits = Limits(timeout_s=0.2)
        wait_for_ranks([rank], limits, lambda stage: None, counts_steps=counts_steps)

    if not is_ended:
        wait()
        return
    with pytest.raises(LaunchError, match=r"did not end within 0\.2 s"):
        wait()


@THOROUGH
def test_a_step_that_never_ends_ends_the_job(folder: Path) -> None:
    watch = AtStep(1, lambda pids: None)
    limits = Limits(timeout_s=600, step_timeout_s=2)
    request = RunRequest(plan=plan_of(folder, "hanging"), num_steps=9, limits=limits)
    with pytest.raises(LaunchError) as caught:
        run_ranks(request, progress=watch)
    assert str(caught.value) == (
        "a step has taken more than 2 s (ranks 0 and 1 at step 3 of 10); all ranks were ended. "
        "Raise `step_timeout_s` if a step takes that long."
    )
    assert_all_gone(watch.pids)


@pytest.mark.usefixtures("every_rank_ends")
def test_a_loss_that_is_not_a_number_is_an_error_on_every_rank(folder: Path) -> None:
    with pytest.raises(LaunchError, match=r"exit code 2; .* the loss of step 1 is nan") as caught:
        run_ranks(RunRequest(plan=plan_of(folder, "nan"), num_steps=2, limits=LONG))
    for rank in range(2):
        assert f"heterog: rank {rank}: the loss of step 1 is nan" in caught.value.last_words[rank]


@THOROUGH
@pytest.mark.usefixtures("every_rank_ends")
def test_a_batch_of_another_dtype_is_an_error_on_every_rank(folder: Path) -> None:
    with pytest.raises(LaunchError, match=r"exit code 2") as caught:
        run_ranks(RunRequest(plan=plan_of(folder, "wrong"), num_steps=2, limits=LONG))
    for rank in range(2):
        words = caught.value.last_words[rank]
        assert words.startswith(f"heterog: rank {rank}: ")
        assert "(8, 6) torch.float64; the step was planned with (8, 6) float32" in words


def test_a_port_in_use_is_named(plan: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = rf"rank 0 failed .* cannot listen on port {port} of 127.0.0.1: Address already in"
        with pytest.raises(LaunchError, match=text):
            run_ranks(RunRequest(plan=plan, num_steps=1, limits=LONG, port=port))
        with pytest.raises(HeterogError, match=f"port {port}"):
            _listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "RANK is not set; start ranks with torchrun or 'heterog run'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', not a number"),
        (
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "HETEROG_PORT_FILE": "/n",
            },
            r"rank 0 did not say where to meet within 0.1 s",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            r"rank 0 did not listen on port 1 of 127.0.0.1 within 0.1 s",
        ),
    ],
)
def test_joining_needs_to_know_where(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HeterogError, match=text):
        join(0.1)


LAUNCHER = """
import sys
from heterog.runtime.launch import run_commands
run_commands(["-c", "import sys, time; time.sleep(600)", sys.argv[1]], 2)
"""


@pytest.mark.parametrize("number", few_of([signal.SIGKILL, signal.SIGINT, signal.SIGTERM], 1))
def test_no_rank_survives_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    def ranks() -> list[str]:
        found = subprocess.run(
            ["pgrep", "-f", f"time.sleep.600. {tmp_path}$"],
            capture_output=True,
            text=True,
            check=False,
        )
        return found.stdout.split()

    def wait_for(how_many: int) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while len(ranks()) != how_many:
            assert time.monotonic() < deadline_s, ranks()
            time.sleep(0.02)

    temporary = tmp_path / "tmp"
    temporary.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    wait_for(2)
    assert list(temporary.iterdir())
    launcher.send_signal(number)
    launcher.wait(WAIT_S)
    wait_for(0)
    deadline_s = time.monotonic() + WAIT_S
    while left := list(temporary.iterdir()):
        assert time.monotonic() < deadline_s, f"{left} is left behind"
        time.sleep(0.02)


@pytest.mark.usefixtures("every_rank_ends")
def test_the_rank_that_failed_by_itself_is_blamed(tmp_path: Path) -> None:
    """Not the one that lost its connection to it, nor the one that gloo aborted for it."""
    code = (
        "import os, sys, time; r = os.environ['RANK']; time.sleep(0.5 * (r == '2'));"
        "print({'0': 'Connection closed by peer', '1': '', '2': 'heterog: rank 2: no'}[r]);"
        "sys.stdout.flush(); os.abort() if r == '1' else sys.exit(2)"
    )
    with pytest.raises(LaunchError) as caught:
        run_commands(["-c", code], 3)
    assert str(caught.value) == "rank 2 failed with exit code 2; the others were ended. no"
    assert caught.value.last_words[0] == "Connection closed by peer"


def test_bad_files_are_refused_before_any_rank_starts(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a))

    def said(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["heterog", "run", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err

    cut = tmp_path / "cut.json"
    cut.write_bytes(plan.read_bytes()[:-50])
    assert "cut.json is not valid JSON" in said(cut)
    assert "cannot read checkpoint" in said(plan, "--resume", tmp_path / "nowhere")
    missing = tmp_path / "missing" / "folder"
    assert f"the folder {missing.parent} does not exist" in said(plan, "--save", missing)
    assert not started


_REASON = module.is_supported()


def unshaped(num_ranks: int) -> Cluster:
    """A testbed that leaves its ranks all of their speed."""
    hosts = tuple(
        Host(
            name=f"h{index}",
            nic_line_rate_bytes_per_s=125e6,
            nic_latency_s=20e-6,
            intra=Link(kind="loopback", bandwidth_bytes_per_s=10e9),
        )
        for index in range(num_ranks)
    )
    devices = tuple(
        Device(
            name=f"h{index}", type=device_type("CPU"), host_index=index, usable_memory_bytes=2**30
        )
        for index in range(num_ranks)
    )
    return Cluster(name="unshaped", hosts=hosts, devices=devices, efficiency=1.0)


@THOROUGH
@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
def test_a_testbed_is_gone_after_a_rank_was_killed_in_it(folder: Path) -> None:
    cluster = unshaped(2)
    addresses: list[set[str]] = []

    def kill(pids: dict[int, int]) -> None:
        addresses.extend(listening_addresses(pid) for _, pid in sorted(pids.items()))
        os.kill(pids[0], signal.SIGKILL)

    watch = AtStep(2, kill)
    plan = plan_of(folder, "workload", cluster)
    request = RunRequest(plan=plan, num_steps=FOREVER, limits=LONG)
    with pytest.raises(LaunchError, match="rank 0 was killed by sig"), Testbed(cluster) as bed:
        run_ranks(request, place=bed, progress=watch)
    place = [socket.inet_aton(bed.address(rank))[::-1].hex().upper() for rank in range(2)]
    assert addresses == [{place[0]}, {place[1]}], "each on the interface of its host only"
    assert_all_gone(watch.pids)
    assert not list(Path("/run/netns").glob(f"{bed.name}*"))
    assert not (module._cpu_controller().root / bed.name).exists()


def test_a_disk_without_room_is_blamed_for_lost_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tmp_path / "job" / "rank0.err"
    words.parent.mkdir()
    words.touch()
    rank = LocalRank(SimpleNamespace(), words, words)  # type: ignore[arg-type]
    assert rank.last_words() == ""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    assert rank.last_words() == f"What it said is lost: {tmp_path} (TMPDIR) has no room."
    words.write_text("heterog: it said this\n")
    assert rank.last_words() == "heterog: it said this"


def test_a_models_code_that_ends_its_rank_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others would lose their connection to it, and be blamed for that."""
    ended = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("os._exit", ended)
    with pytest.raises(KeyboardInterrupt), as_rank(1):
        sys.exit(0)
    ended.assert_called_once_with(2)
    assert capsys.readouterr().err.endswith("heterog: rank 1: SystemExit: 0\n")
