"""Loses a whole host of a job that runs on several, and measures how training goes on.

    python -m experiments.healing_hosts --json      as root, on Linux with network namespaces

Three hosts are network namespaces of this machine, joined by virtual cables; the second one has
two devices. ``heterog run --heal --rendezvous`` runs in each, as a person would start it. Then the
second host is lost, in one of two ways: all its processes are killed at the same moment (the
command, the ranks, the keeper), or its cable is cut, after which its processes live on and nobody
hears of them. Training has to go on with the two ranks that are left. In the first case the
command is started there again, and the host has to be taken in.

Then the same is done without healing, each plan resumed from a checkpoint of the one before.
Losses have to be equal step by step.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from heterog.cluster import Cluster, Device, Host, Link, device_type
from heterog.graph.capture import capture
from heterog.planners.plan import load_plan, make_plan
from heterog.runtime.launch import run_ranks
from heterog.runtime.testbed import Testbed, is_supported
from heterog.zoo import load_workload

MODEL = Path(__file__).with_name("healing_model.py")
DEVICES = (1, 2, 1)
"""Number of devices of each host."""
VICTIM = 1
LOST_IN_STEP = 40
PORT = 29400
WAYS = ("killed", "cut off")
_WAIT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the loss of a host led to.

    Attributes:
        way: How it was lost.
        total_s: Seconds from the loss to the end of the first step with what was left.
        detect_s: From the last event of the ranks to their end.
        plan_s: From there to the new plan.
        move_s: From there to the state in its places, the start of processes included.
        first_step_s: From there to the end of the first step.
        num_ranks: Number of ranks after each change of plan.
        steps_done_again: Number of steps repeated after the loss.
        most_difference: Of a loss, from runs that were planned so, relative.
        is_complete: Every step counts once.
        left_behind: Processes that are still there.
    """

    way: str
    total_s: float
    detect_s: float
    plan_s: float
    move_s: float
    first_step_s: float
    num_ranks: tuple[int, ...]
    steps_done_again: int
    most_difference: float
    is_complete: bool
    left_behind: tuple[str, ...]


def cluster() -> Cluster:
    """Hosts that are joined by lines so fast, on paper, that data parallelism pays."""
    inner = Link(kind="loopback", bandwidth_bytes_per_s=100e9)
    hosts = [
        Host(name=f"h{number}", nic_line_rate_bytes_per_s=100e9, nic_latency_s=1e-7, intra=inner)
        for number in range(len(DEVICES))
    ]
    # So slow, on paper, that it pays to take a host in again.
    kind = device_type("T4")
    slow = {dtype: 1e9 for dtype in kind.peak_flops_per_s}
    kind = replace(kind, name="slow", peak_flops_per_s=slow, launch_overhead_s=1e-6)
    devices = [
        Device(
            name=f"h{host}:{number}",
            type=kind,
            host_index=host,
            usable_memory_bytes=kind.memory_bytes,
        )
        for host, count in enumerate(DEVICES)
        for number in range(count)
    ]
    return Cluster(name="three_hosts", hosts=tuple(hosts), devices=tuple(devices))


class Commands:
    """The command on each host, and what its ranks are known to do."""

    def __init__(self, bed: Testbed, folder: Path, num_steps: int) -> None:
        self._bed, self._folder, self._num_steps = bed, folder, num_steps
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.plans: dict[int, Path] = {}

    def first_rank(self, host: int) -> int:
        """Rank of a host's first device in the whole cluster."""
        return sum(DEVICES[:host])

    def start(self, host: int) -> None:
        """Start the command on a host."""
        own = self._folder / f"h{host}"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        words = [sys.executable, "-m", "heterog.cli", "run", "plan.json", "--heal", "--json"]
        words += ["--rendezvous", f"{self._bed.address(0)}:{PORT}", "--host", f"h{host}"]
        words += ["--steps", str(self._num_steps), "--source", "model.py", "--back-after", "1s"]
        words += ["--slow-factor", "0"]  # what is measured is the loss of a host alone
        rank = self.first_rank(host)
        with (own / "out").open("wb") as out, (own / "err").open("wb") as err:
            self.processes[host] = subprocess.Popen(
                self._bed.command(rank, words),
                cwd=self._folder,
                env={
                    **os.environ,
                    "TMPDIR": str(own),
                    "HETEROG_TOKEN": "a secret of these hosts alone",
                    "PYTHONPATH": str(Path(__file__).parents[1]),
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def step(self, generation: int) -> int:
        """The step that rank 0 of a generation, which is on the first host, is in; 0 for none."""
        for path in (self._folder / "h0").glob(f"heterog-*/{generation}.rank0.stage"):
            words = path.read_text().split()
            if words[:1] == ["step"]:
                return int(words[1])
        return 0

    def wait_for_step(self, generation: int, more_than: int) -> float:
        """Wait until rank 0 has begun a later step; returns the time."""
        deadline_s = time.monotonic() + _WAIT_S
        while self.step(generation) <= more_than:
            if time.monotonic() > deadline_s or self.processes[0].poll() is not None:
                said = (self._folder / "h0/err").read_text()
                raise TimeoutError(f"no step {more_than + 1} in generation {generation}: {said}")
            self.keep_plans()
            time.sleep(0.005)
        return time.monotonic()

    def keep_plans(self) -> None:
        """Copy the plans that generations run, which are gone when the job ends."""
        for path in (self._folder / "h0").glob("heterog-*/*.plan.json"):
            generation = int(path.name.partition(".")[0])
            copy = self._folder / f"plan{generation}.json"
            if generation not in self.plans:
                shutil.copy(path, copy)
                self.plans[generation] = copy

    def wait_for_end(self, hosts: Sequence[int]) -> list[int | None]:
        """Wait until the commands of some hosts have ended; returns their exit codes."""
        deadline_s = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline_s:
            self.keep_plans()
            codes = [self.processes[host].poll() for host in hosts]
            if None not in codes:
                break
            time.sleep(0.02)
        return codes

    def lose(self, host: int, way: str) -> None:
        """Kill all processes of a host at once, or cut its cable."""
        if way == "cut off":
            namespace = f"{self._bed.name}_h{host}"
            words = ["ip", "-n", namespace, "link", "set", "eth0", "down"]
            subprocess.run(words, check=True)
            return
        for pid in self.pids(host):
            os.kill(pid, signal.SIGKILL)
        self.processes[host].wait()

    def pids(self, host: int) -> list[int]:
        """Processes of a host."""
        return self._bed.processes(self.first_rank(host))


def expected_losses(
    plans: Sequence[Path], steps: Sequence[int], last: int, folder: Path
) -> dict[int, float]:
    """Losses of runs that were planned so, each resumed from a checkpoint of the one before."""
    expected: dict[int, float] = {}
    begin, saved = 0, None
    for number, plan in enumerate(plans):
        end = steps[number] if number < len(steps) else last
        following = folder / f"saved{number}"
        told = run_ranks(
            plan,
            load_plan(plan).cluster.num_devices,
            num_steps=end - begin - 1,
            sources=[str(folder / "model.py")],
            resume=saved,
            save=following,
        )
        expected |= dict(zip(range(begin + 2, end + 1), told["losses"], strict=True))
        begin, saved = end, following
    return expected


def run_trial(folder: Path, way: str, num_steps: int) -> Trial:
    """Lose the host once."""
    with Testbed(cluster()) as bed:
        commands = Commands(bed, folder, num_steps)
        for host in range(len(DEVICES)):
            commands.start(host)
        commands.wait_for_step(0, LOST_IN_STEP)
        lost_s = time.monotonic()
        commands.lose(VICTIM, way)
        commands.wait_for_step(1, 0)
        again_s = commands.wait_for_step(1, commands.step(1))
        if way == "killed":
            commands.start(VICTIM)
            commands.wait_for_step(2, 0)
        codes = commands.wait_for_end((0, 2))
        time.sleep(1.5)  # what was killed needs a moment to be gone
        left = [
            Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            for host in range(len(DEVICES))
            for pid in commands.pids(host)
            if way == "killed" or host != VICTIM
        ]
        for host in range(len(DEVICES)):
            print((folder / f"h{host}/err").read_text(), file=sys.stderr)
        if codes != [0, 0]:
            raise RuntimeError(f"the commands ended with {codes}")
        measured: dict[str, Any] = json.loads((folder / "h0/out").read_text())
    moves, last = measured["moves"], measured["steps"][-1]
    healed = dict(zip(measured["steps"], measured["losses"], strict=True))
    plans = [plan for generation, plan in sorted(commands.plans.items()) if generation > 0]
    if len(plans) != len(moves):
        raise RuntimeError(f"{len(moves)} changes of plan, but {len(plans)} plans were seen")
    expected = expected_losses(
        [folder / "plan.json", *plans], [move["step"] for move in moves], last, folder
    )
    lost = moves[0]
    return Trial(
        way=way,
        total_s=again_s - lost_s,
        detect_s=lost["detect_s"],
        plan_s=lost["plan_s"],
        move_s=lost["move_s"],
        first_step_s=lost["first_step_s"],
        num_ranks=tuple(move["num_ranks"] for move in moves),
        steps_done_again=lost["steps_done_again"],
        most_difference=max(abs(healed[step] / loss - 1) for step, loss in expected.items()),
        is_complete=measured["steps"] == list(range(1, last + 1)),
        left_behind=tuple(left),
    )


def prepare(folder: Path) -> None:
    """Write the model and the first plan."""
    shutil.copy(MODEL, folder / "model.py")
    graph = capture(load_workload(f"{folder}/model.py:workload", None))
    make_plan(graph, cluster(), methods=["cp_ar"], budget="1e").save(folder / "plan.json")


def main() -> None:
    """Run the trials and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--way", default="", choices=["", *WAYS])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    reason = is_supported()
    if reason is not None:
        sys.exit(reason)
    trials = []
    for way in WAYS:
        if arguments.way in ("", way):
            with tempfile.TemporaryDirectory(prefix="healing-") as name:
                folder = Path(name)
                os.chdir(folder)
                prepare(folder)
                trials.append(run_trial(folder, way, arguments.steps))
                os.chdir("/")
            print(trials[-1], file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"trials": [asdict(each) for each in trials]}, indent=2))


if __name__ == "__main__":
    main()
