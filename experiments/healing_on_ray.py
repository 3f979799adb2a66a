"""Kills nodes of a Ray cluster in the middle of a job that heals, and measures how it goes on.

    python experiments/healing_on_ray.py --fault node --kills 20 --json

Four raylets of this machine are the four hosts of ``healing.py``, each in a process group that is
killed with SIGKILL as a whole: the raylet, the host's actor with its snapshots, and its rank.
Faults: ``node`` (any), ``first`` (that of rank 0), ``two`` (at once, with redundancy 2),
``leader`` (the actor that leads; its ranks train on meanwhile) and ``both`` of a node and the
leader. Losses are compared with those
of local runs: of the plan up to the step that was gone on from, and of the new plan from there.
"""

import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import ray.cluster_utils
from healing import MODEL, NUM_RANKS, cluster
from rows import asked_of, finish, option, progress

from heterog.graph.capture import capture
from heterog.healing.on_ray import heal_on_ray
from heterog.healing.options import HealOptions
from heterog.methods.planner import Budget
from heterog.runtime.launch import parent_of, run_ranks, signals_as_exit
from heterog.runtime.request import RunRequest
from heterog.search.plan import make_plan
from heterog.search.request import Request
from heterog.zoo import load_workload

KINDS = ("V100", "V100", "T4", "T4")
MEMORY = {"object_store_memory": 100_000_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one fault led to.

    Attributes:
        victims: numbers of the nodes; empty for the leader.
        killed_in_step: that rank 0 had begun.
        resumed_after_step: of the snapshot that was gone on from; -1 if ranks were not stopped.
        total_s: from the last event before the fault to the end of the first step after it; for
            the leader, from the kill until it says that it is there again.
        detect_s: part of it until the ranks were ended.
        plan_s: part of it for the new plan.
        move_s: part of it until the state was in its places, the start of processes included.
        steps_done_again: that no complete snapshot had.
        most_difference: of a loss, from the runs that it is compared with, relative.
        is_complete: every step counts once.
        left_behind: processes and folders that are still there.
    """

    victims: tuple[int, ...]
    killed_in_step: int
    resumed_after_step: int
    total_s: float
    detect_s: float
    plan_s: float
    move_s: float
    steps_done_again: int
    most_difference: float
    is_complete: bool
    left_behind: tuple[str, ...]


class Nodes:
    """Raylets of this machine; ``victims`` of them are replaced after each trial."""

    def __init__(self) -> None:
        head = {"num_cpus": 1, "include_dashboard": False, **MEMORY}
        self._made: Any = ray.cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._add(kind) for kind in KINDS]
        ray.init(
            address=self._made.address,
            namespace="heterog",
            log_to_driver=False,
            logging_level="error",
        )

    def kill(self, number: int) -> None:
        """End a node with all that runs there, at once."""
        raylet = self._nodes[number].all_processes["raylet"][0].process.pid
        for pid in _family(raylet):
            os.kill(pid, signal.SIGKILL)

    def replace(self, number: int) -> None:
        """Start a node with the same devices."""
        self._nodes[number] = self._add(KINDS[number])

    def wait(self) -> None:
        """Wait until the cluster has all devices, and only these."""
        while sum(each["Alive"] for each in ray.nodes()) != 1 + NUM_RANKS:
            time.sleep(0.2)

    def close(self) -> None:
        """End all nodes."""
        ray.shutdown()
        self._made.shutdown()

    def _add(self, kind: str) -> Any:
        return self._made.add_node(num_cpus=1, resources={kind: 1}, **MEMORY)


def _family(pid: int) -> list[int]:
    """A process and all that it has started, and they; not who removes their files."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if "heterog-cleaner" not in (folder / "cmdline").read_text():
                children.setdefault(parent_of(int(folder.name)), []).append(int(folder.name))
        except OSError:  # it has ended
            continue
    found, new = [], [pid]
    while new:
        found.append(new.pop())
        new += children.get(found[-1], [])
    return found


def _things() -> set[str]:
    """Actors, ranks and folders of jobs."""
    found = {str(path) for path in Path(tempfile.gettempdir()).glob("heterog-*")}
    found |= set(ray.util.list_named_actors())
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if "heterog.healing.rank" in words or "ray::_Leader" in words:
            found.add(f"{folder.name} {words[:60].strip()}")
    return found


class Fault:
    """Kills when rank 0 has begun a step, and keeps the plan that is gone on with."""

    def __init__(
        self,
        nodes: Nodes,
        victims: tuple[int, ...],
        step: int,
        copy_to: Path,
        *,
        with_leader: bool,
    ) -> None:
        self.killed_s = self.again_s = 0.0
        self._begun_s = time.time()
        self._nodes, self._victims, self._step, self._copy_to = nodes, victims, step, copy_to
        self._with_leader = with_leader

    def __call__(self, stage: str) -> None:
        """Called whenever rank 0 does something else."""
        words = stage.split()
        if not words or words[0] != "step":
            return
        if not self.killed_s and int(words[1]) >= self._step:
            self.killed_s = time.monotonic()
            for number in self._victims:
                self._nodes.kill(number)
            for each in _things() if self._with_leader else ():
                if "ray::_Leader" in each:
                    os.kill(int(each.split()[0]), signal.SIGKILL)
        elif self.killed_s and not self._copy_to.exists():
            for told in Path(tempfile.gettempdir()).glob("heterog-*/journal1.json"):
                if told.stat().st_ctime > self._begun_s:
                    shutil.copy(told.with_name("plan1.json"), self._copy_to)

    def say(self, line: str) -> None:
        """Called with what the job says."""
        progress(line)
        if "who leads" in line:
            self.again_s = time.monotonic()


def run_trial(folder: Path, nodes: Nodes, fault: str, chance: random.Random) -> Trial:
    """Kill once."""
    before = _things()
    step = chance.randint(20, 300)
    number = {"leader": 0, "two": 2}.get(fault, 1)
    victims = (0,) if fault == "first" else tuple(chance.sample(range(NUM_RANKS), number))
    left = folder / "left.json"
    left.unlink(missing_ok=True)
    killer = Fault(nodes, victims, step, left, with_leader=fault in ("leader", "both"))
    plan = folder / "plan.json"
    request = RunRequest(
        plan=plan,
        num_steps=step + (2000 if fault == "leader" else 100),
        sources=(str(folder / "model.py"),),
    )
    options = HealOptions(
        search_budget="", back_after_s=0.0, slow_factor=0.0, redundancy=max(number, 1)
    )
    measured = heal_on_ray(request, options, progress=killer, say=killer.say)
    moves = measured["moves"]
    move = moves[-1] if moves else {}
    time.sleep(2.0)  # what was killed needs a moment to be gone
    last, resumed = measured["steps"][-1], move.get("step", -1)
    if moves:
        saved = folder / "saved"
        shutil.rmtree(saved, ignore_errors=True)
        first = run_ranks(RunRequest(plan=plan, num_steps=resumed - 1, save=saved))
        then = run_ranks(RunRequest(plan=left, num_steps=last - resumed - 1, resume=saved))
        expected = [*first["losses"], *then["losses"]]
    else:
        expected = run_ranks(RunRequest(plan=plan, num_steps=last - 1))["losses"]
    result = Trial(
        victims=victims,
        killed_in_step=step,
        resumed_after_step=resumed,
        total_s=sum(move[each] for each in ("detect_s", "plan_s", "move_s", "first_step_s"))
        if moves
        else killer.again_s - killer.killed_s,
        detect_s=move.get("detect_s", 0.0),
        plan_s=move.get("plan_s", 0.0),
        move_s=move.get("move_s", 0.0),
        steps_done_again=move.get("steps_done_again", 0),
        most_difference=max(
            abs(healed - other) / abs(other)
            for healed, other in zip(measured["losses"], expected, strict=True)
        ),
        is_complete=measured["steps"] == list(range(1, last + 1)) and len(moves) <= 1,
        left_behind=tuple(sorted(_things() - before)),
    )
    for number in victims:
        nodes.replace(number)
    nodes.wait()
    return result


def main() -> None:
    """Run the trials and print a table, or JSON."""
    arguments = asked_of(
        __doc__,
        option("--fault", choices=("node", "first", "two", "leader", "both"), default="node"),
        option("--kills", type=int, default=20),
        option("--seed", type=int, default=0),
    )
    chance = random.Random(arguments.seed)
    trials = []
    with signals_as_exit(), tempfile.TemporaryDirectory(prefix="healing-") as name:
        folder = Path(name)
        os.chdir(folder)  # a plan's own file is run if it lies under the folder one works in
        shutil.copy(MODEL, folder / "model.py")
        graph = capture(load_workload(f"{folder}/model.py:workload", None))
        make_plan(
            Request(graph=graph, cluster=cluster(), methods=("cp_ar",), budget=Budget.parse("1e"))
        ).save(folder / "plan.json")
        nodes = Nodes()
        try:
            for _ in range(arguments.kills):
                trials.append(run_trial(folder, nodes, arguments.fault, chance))
                progress(str(trials[-1]))
        finally:
            nodes.close()
    totals = [each.total_s for each in trials]
    summary = {
        "fault": arguments.fault,
        "kills": len(trials),
        "median_s": statistics.median(totals),
        "most_s": max(totals),
        "most_steps_done_again": max(each.steps_done_again for each in trials),
        "most_difference": max(each.most_difference for each in trials),
        "all_complete": all(each.is_complete for each in trials),
        "nothing_left": not any(each.left_behind for each in trials),
    }
    finish(arguments, summary | {"trials": [asdict(each) for each in trials]}, [summary])


if __name__ == "__main__":
    main()
