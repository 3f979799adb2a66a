"""Kills parts of a job that heals in the middle of training, again and again, and measures it.

    python experiments/healing.py --kills 20 --json
    python experiments/healing.py --fault node --kills 20 --json

Each trial trains on four hosts of one device (gloo), kills at a random step and lets the job go
on. Faults: ``rank`` (one of four local ranks); on four raylets of this machine, ``node`` (any:
the raylet, its actor with snapshots, and its rank, by SIGKILL at once), ``first`` (that of rank
0), ``two`` (at once, with redundancy 2), ``leader`` (the actor that leads; its ranks train on) and
``both`` of a node and the leader. Then the same is done without healing: four local ranks train up
to the step that was gone on from and save a checkpoint, and ranks of the new plan resume it.
Losses have to be equal step by step. Processes and temporary files that stay are looked for.
"""

import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rows import asked_of, finish, option, progress

from heterog.cluster import Cluster, Device, Host, Link, device_type
from heterog.graph.capture import capture
from heterog.healing.job import HealingJob
from heterog.healing.on_ray import heal_on_ray
from heterog.healing.options import HealOptions
from heterog.methods.planner import Budget
from heterog.runtime.launch import parent_of, ranks_of_this_process, run_ranks, signals_as_exit
from heterog.runtime.request import RunRequest
from heterog.search.plan import make_plan
from heterog.search.request import Request
from heterog.workers import connect_to_ray
from heterog.zoo import load_workload

MODEL = Path(__file__).with_name("healing_model.py")
KINDS = ("V100-16GB", "V100-16GB", "T4", "T4")
FAULTS = ("rank", "node", "first", "two", "leader", "both")
TIMES = ("detect_s", "plan_s", "move_s", "first_step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one fault led to.

    Attributes:
        victims: hosts that were killed; none where only the leader was.
        killed_in_step: that rank 0 had begun.
        move: of ``HealOptions``: what was gone on with; none if ranks were not stopped.
        total_s: from the last event before the fault to the end of the first step after it; where
            ranks train on, from the kill of the leader until it says that it is there again.
        most_difference: of a loss, from the runs without healing, relative.
        is_complete: every step counts once, and the plan was changed once at most.
        left_behind: processes and files that are still there.
    """

    victims: tuple[int, ...]
    killed_in_step: int
    move: dict[str, Any]
    total_s: float
    most_difference: float
    is_complete: bool
    left_behind: tuple[str, ...]


def cluster() -> Cluster:
    """Four hosts with one device each, and links that let data parallelism pay."""
    inner = Link(kind="loopback", bandwidth_bytes_per_s=100e9)
    hosts = [
        Host(name=f"h{number}", nic_line_rate_bytes_per_s=100e9, nic_latency_s=1e-7, intra=inner)
        for number in range(len(KINDS))
    ]
    devices = [
        Device(
            name=f"h{number}:0",
            type=device_type(kind),
            host_index=number,
            usable_memory_bytes=device_type(kind).memory_bytes,
        )
        for number, kind in enumerate(KINDS)
    ]
    return Cluster(name="four_hosts", hosts=tuple(hosts), devices=tuple(devices))


class Nodes:
    """Raylets of this machine, one for each host, beside the head."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as Raylets

        self._memory = {"object_store_memory": 100_000_000}
        head = {"num_cpus": 1, "include_dashboard": False, **self._memory}
        self._made: Any = Raylets(initialize_head=True, head_node_args=head)
        self._nodes = [self._add(kind) for kind in KINDS]
        os.environ["RAY_ADDRESS"] = self._made.address
        self._ray = connect_to_ray()[0]

    def kill(self, number: int) -> None:
        """End a node with all that runs there, at once; not who removes their files."""
        children: dict[int, list[int]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if "heterog-cleaner" not in (folder / "cmdline").read_text():
                    children.setdefault(parent_of(int(folder.name)), []).append(int(folder.name))
            except OSError:  # it has ended
                continue
        left = [self._nodes[number].all_processes["raylet"][0].process.pid]
        while left:
            os.kill(left[-1], signal.SIGKILL)
            left += children.get(left.pop(), [])

    def replace(self, numbers: tuple[int, ...]) -> None:
        """Start nodes with the same devices, and wait until the old ones count as lost."""
        for number in numbers:
            self._nodes[number] = self._add(KINDS[number])
        while sum(each["Alive"] for each in self._ray.nodes()) != 1 + len(KINDS):
            time.sleep(0.2)

    def close(self) -> None:
        """End all nodes."""
        self._ray.shutdown()
        self._made.shutdown()

    def _add(self, kind: str) -> Any:
        return self._made.add_node(num_cpus=1, resources={kind: 1}, **self._memory)


@contextmanager
def nodes_for(fault: str) -> Iterator[Nodes | None]:
    """Nodes, if a fault needs them."""
    nodes = None if fault == "rank" else Nodes()
    try:
        yield nodes
    finally:
        if nodes is not None:
            nodes.close()


def things_of_jobs() -> set[str]:
    """Processes of jobs, their temporary folders, and shared memory."""
    folders = Path(tempfile.gettempdir()).glob("heterog-*")
    found = {str(path) for path in folders if not path.name.startswith("heterog-keeper-")}
    found |= {str(path) for path in Path("/dev/shm").glob("torch*")}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if words.startswith(("ray::_Leader", "ray::HealingHost")) or "heterog.healing." in words:
            found.add(f"{folder.name} {words[:80].strip()}")
    return found


class Fault:
    """Kills when rank 0 has begun a step, and keeps the plan that is gone on with.

    Args:
        fault: what is killed.
        nodes: of the cluster, if there is one.
        step: at which.
        victims: hosts that are killed.
        copy_to: file for the plan that training goes on with.
    """

    def __init__(
        self, fault: str, nodes: Nodes | None, step: int, victims: tuple[int, ...], copy_to: Path
    ) -> None:
        self.killed_s = self.again_s = 0.0
        self._fault, self._nodes, self._step, self._victims = fault, nodes, step, victims
        self._copy_to, self._begun_s = copy_to, time.time()
        copy_to.unlink(missing_ok=True)

    def __call__(self, stage: str) -> None:
        """Called whenever rank 0 does something else."""
        words = stage.split()
        if not words or words[0] != "step":
            return
        if not self.killed_s and int(words[1]) >= self._step:
            self.killed_s = time.monotonic()
            self._kill()
        elif self.killed_s and not self._copy_to.exists():
            for told in Path(tempfile.gettempdir()).glob("heterog-*/assignment[1-9].json"):
                if told.stat().st_ctime > self._begun_s:
                    shutil.copy(json.loads(told.read_text())["plan"], self._copy_to)

    def say(self, line: str) -> None:
        """Called with what the job says."""
        progress(line)
        if line.startswith("who leads"):
            self.again_s = time.monotonic()

    def _kill(self) -> None:
        for number in self._victims:
            if self._nodes is None:
                os.kill(ranks_of_this_process()[number], signal.SIGKILL)
            else:
                self._nodes.kill(number)
        for each in things_of_jobs() if self._fault in ("leader", "both") else ():
            pid = int(each.split()[0]) if "ray::_Leader" in each else 0
            if pid and parent_of(parent_of(pid)) == os.getpid():  # a raylet of this process
                os.kill(pid, signal.SIGKILL)


def run_trial(
    folder: Path, nodes: Nodes | None, fault: str, chance: random.Random, wait: bool
) -> Trial:
    """Kill once."""
    before = things_of_jobs()
    step = chance.randint(3, 300) + 1000 * wait
    number = {"leader": 0, "two": 2}.get(fault, 1)
    victims = (0,) if fault == "first" else tuple(chance.sample(range(len(KINDS)), number))
    plan, left, saved = folder / "plan.json", folder / "left.json", folder / "saved"
    killer = Fault(fault, nodes, step, victims, left)
    request = RunRequest(
        plan=plan,
        num_steps=step + (400 if fault == "leader" else 50),
        sources=(str(folder / "model.py"),),
    )
    options = HealOptions(
        search_budget="", back_after_s=0.0, slow_factor=0.0, redundancy=max(number, 1)
    )
    if nodes is None:
        measured = HealingJob(request, options=options, progress=killer, say=killer.say).run()
    else:
        measured = heal_on_ray(request, options, progress=killer, say=killer.say)
    time.sleep(2.0)  # what was killed needs a moment to be gone
    left_behind = tuple(sorted(things_of_jobs() - before))
    moves, last = measured["moves"], measured["steps"][-1]
    move = moves[-1] if moves else {}
    if move:
        shutil.rmtree(saved, ignore_errors=True)
        resumed = move["step"]
        first = run_ranks(RunRequest(plan=plan, num_steps=resumed - 1, save=saved))
        then = run_ranks(RunRequest(plan=left, num_steps=last - resumed - 1, resume=saved))
        expected = [*first["losses"], *then["losses"]]
    else:
        expected = run_ranks(RunRequest(plan=plan, num_steps=last - 1))["losses"]
    if nodes is not None:
        nodes.replace(victims)
    pairs = zip(measured["losses"], expected, strict=True)
    return Trial(
        victims=victims,
        killed_in_step=step,
        move=move,
        total_s=sum(move[each] for each in TIMES) if move else killer.again_s - killer.killed_s,
        most_difference=max(abs(healed / other - 1.0) for healed, other in pairs),
        is_complete=measured["steps"] == list(range(1, last + 1)) and len(moves) <= 1,
        left_behind=left_behind,
    )


def main() -> None:
    """Run the trials and print a table, or JSON."""
    arguments = asked_of(
        __doc__,
        option("--fault", choices=FAULTS, default="rank"),
        option("--kills", type=int, default=20),
        option("--seed", type=int, default=0),
        option("--wait", action="store_true", help="kill after plans were prepared"),
    )
    fault, chance = arguments.fault, random.Random(arguments.seed)
    trials = []
    with signals_as_exit(), tempfile.TemporaryDirectory(prefix="healing-") as name:
        folder = Path(name)
        os.chdir(folder)  # a plan's own file is run if it lies under the folder one works in
        shutil.copy(MODEL, folder / "model.py")
        graph = capture(load_workload(f"{folder}/model.py:workload", None))
        make_plan(
            Request(graph=graph, cluster=cluster(), methods=("cp_ar",), budget=Budget.parse("1e"))
        ).save(folder / "plan.json")
        with nodes_for(fault) as nodes:
            for number in range(arguments.kills):
                trials.append(run_trial(folder, nodes, fault, chance, arguments.wait))
                progress(f"{number:2} {trials[-1]}")
    totals = [each.total_s for each in trials]
    summary = {
        "fault": fault,
        "kills": len(trials),
        "median_s": statistics.median(totals),
        "most_s": max(totals),
        "most_difference": max(each.most_difference for each in trials),
        "all_complete": all(each.is_complete for each in trials),
        "nothing_left": not any(each.left_behind for each in trials),
    }
    finish(arguments, summary | {"trials": [asdict(each) for each in trials]}, [summary])


if __name__ == "__main__":
    main()
