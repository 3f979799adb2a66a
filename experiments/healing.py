"""Kills parts of a job that heals, many times in the middle of training, and measures recovery.

    python experiments/healing.py --kills 20 --json
    python experiments/healing.py --fault node --kills 20 --json

Each trial trains on four hosts of one device (gloo), kills at a random step and lets the job
continue. Faults: ``rank`` (one of four local ranks); on four raylets of this machine, ``node``
(any node: the raylet, its actor with snapshots, and its rank, by SIGKILL at once), ``first`` (the
node of rank 0), ``two`` (two nodes at once, with redundancy 2), ``leader`` (the actor that leads;
its ranks train on), ``both`` (a node and the leader), ``frozen`` (a node by SIGSTOP), ``paused``
(a node by SIGSTOP for 3 s: its ranks train on), ``cut`` (a node's link: each node is in a network
namespace, which takes root), ``command`` (the command that started the job; the next one watches
it) and ``leaving`` (SIGTERM to a node's actor, or Ray drains it; it is killed once training
continues elsewhere). Then a run without healing follows: four local ranks train up to the step
from which the job resumed and save a checkpoint, and ranks of the new plan resume it. Losses have
to be equal step by step. The script also looks for processes and temporary files left behind.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from fault_trials import (
    KINDS,
    MODEL,
    PARTS,
    PAUSE_S,
    SIGNALS,
    Trial,
    cluster,
    left_behind,
    mark_processes,
    options,
    processes,
    run_trials,
)
from namespaces import inside, namespaces, set_link
from rows import asked_of, progress

from heterog.graph.capture import capture
from heterog.healing.job import HealingJob
from heterog.healing.on_ray import heal_on_ray
from heterog.healing.options import HealOptions
from heterog.methods.planner import Budget
from heterog.runtime.launch import (
    RANKS_OWN,
    parent_of,
    ranks_of_this_process,
    run_ranks,
)
from heterog.runtime.ranks.forks import rank_forks
from heterog.runtime.request import RunRequest
from heterog.search.plan import make_plan
from heterog.search.request import Request
from heterog.workers import connect_to_ray, signals_as_exit
from heterog.zoo import load_workload

FAULTS = (
    *("rank", "node", "first", "two", "leader", "both"),
    *("frozen", "paused", "cut", "command", "leaving"),
)
NOBODY = ("leader", "command")
"""Faults of no host."""
STAYS = (*NOBODY, "paused")
"""Faults after which the same ranks train on."""
TIMES = ("detect_s", "plan_s", "move_s", "first_step_s")


class Nodes:
    """Raylets on this machine, one for each host, beside the head.

    Args:
        places: network namespace and address of the head and of each host, if they have some.
    """

    def __init__(self, places: list[tuple[str, str]] | None = None) -> None:
        from ray.cluster_utils import Cluster as Raylets

        self._places = places or [("", "")] * (1 + len(KINDS))
        os.environ["RAY_worker_niceness"] = "0"  # or ranks would yield to all else, by 15
        self._memory = {"object_store_memory": 100_000_000}
        head: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, **self._memory}
        head |= self._address(0)
        self._made: Any = Raylets(initialize_head=True, head_node_args=head)
        self._nodes = [self._add(number) for number in range(len(KINDS))]
        os.environ["RAY_ADDRESS"] = self._made.address
        self._ray = connect_to_ray()[0]

    def hit(self, fault: str, number: int) -> None:
        """Cause a fault on a node."""
        if fault == "cut":
            set_link(self._places[1 + number][0], "down")
        elif fault == "leaving":
            self.announce(number)
        else:
            self.signal(number, SIGNALS.get(fault, signal.SIGKILL))
        if fault == "paused":
            threading.Timer(PAUSE_S, self.signal, (number, signal.SIGCONT)).start()

    def announce(self, number: int) -> None:
        """Announce the end of a node: to its actor, or to Ray, which drains every second one."""
        if number % 2:
            from ray._raylet import GcsClient  # type: ignore[attr-defined]
            from ray.core.generated.autoscaler_pb2 import DrainNodeReason

            reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            client = GcsClient(address=self._made.address)
            client.drain_node(self._nodes[number].node_id, reason, "spot", 0)
            return
        for pid, (parent, words) in processes().items():
            if words.startswith("ray::HealingHost") and parent == self._raylet(number):
                os.kill(pid, signal.SIGTERM)

    def signal(self, number: int, what: signal.Signals) -> None:
        """Signal all processes of a node at once, but for those that remove their files."""
        children: dict[int, list[int]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if "heterog-cleaner" not in (folder / "cmdline").read_text():
                    children.setdefault(parent_of(int(folder.name)), []).append(int(folder.name))
            except OSError:  # it has ended
                continue
        left = [self._raylet(number)]
        while left:
            with suppress(ProcessLookupError):
                os.kill(left[-1], what)
            left += children.get(left.pop(), [])

    def replace(self, numbers: tuple[int, ...]) -> None:
        """Start nodes with the same devices."""
        for number in numbers:
            if self._places[1 + number][0]:
                set_link(self._places[1 + number][0], "up")
            self._nodes[number] = self._add(number)

    def wait(self) -> None:
        """Wait until the replaced nodes count as lost."""
        while sum(each["Alive"] for each in self._ray.nodes()) != 1 + len(KINDS):
            time.sleep(0.2)

    def close(self) -> None:
        """End all nodes."""
        self._ray.shutdown()
        self._made.shutdown()

    def _raylet(self, number: int) -> int:
        return int(self._nodes[number].all_processes["raylet"][0].process.pid)

    def _add(self, number: int) -> Any:
        given: dict[str, Any] = {"num_cpus": 1, "resources": {KINDS[number]: 1}, **self._memory}
        with inside(self._places[1 + number][0]):
            return self._made.add_node(**given, **self._address(1 + number))

    def _address(self, place: int) -> dict[str, str]:
        return {"node_ip_address": self._places[place][1]} if self._places[place][1] else {}


@contextmanager
def nodes_for(fault: str) -> Iterator[Nodes | None]:
    """Nodes, if a fault needs them."""
    with ExitStack() as stack:
        if fault == "rank":
            yield None
            return
        nodes = Nodes(stack.enter_context(namespaces(len(KINDS))) if fault == "cut" else None)
        stack.callback(nodes.close)
        yield nodes


def things_of_jobs() -> set[str]:
    """Processes of jobs, their temporary folders, and shared memory."""
    found = {str(path) for path in Path(tempfile.gettempdir()).glob("heterog-*")}
    found |= {str(path) for path in Path("/dev/shm").glob("torch*")}
    for pid, (_, words) in processes().items():
        if words.startswith(("ray::_Leader", "ray::HealingHost")) or "heterog.healing." in words:
            found.add(f"{pid} {words[:80]}")
    return found


class Fault:
    """Kills when rank 0 has begun a step, and keeps the plan with which training continues.

    Args:
        fault: what is killed.
        nodes: of the cluster, if there is one.
        step: at which.
        victims: hosts that are killed.
        copy_to: file for the plan with which training continues.
    """

    def __init__(
        self, fault: str, nodes: Nodes | None, step: int, victims: tuple[int, ...], copy_to: Path
    ) -> None:
        self.killed_s = self.again_s = self.caught_up_s = 0.0
        self._most, self._is_new = 0, False  # the last step of the ranks that the fault hits
        self._fault, self._nodes, self._step, self._victims = fault, nodes, step, victims
        self._copy_to, self._begun_s = copy_to, time.time()
        copy_to.unlink(missing_ok=True)

    def __call__(self, stage: str) -> None:
        """Called whenever rank 0 does something else."""
        words = stage.split()
        if not words or words[0] != "step":
            self._is_new |= bool(self.killed_s)
            return
        if not self._is_new:
            self._most = int(words[1])
        elif int(words[1]) > self._most:  # the one before is done
            self.caught_up_s = self.caught_up_s or time.monotonic()
        if not self.killed_s and int(words[1]) >= self._step:
            self.killed_s = time.monotonic()
            self._kill()
        elif self.killed_s and self._fault == "paused":
            self.again_s = self.again_s or time.monotonic()
        elif self.killed_s and not self._copy_to.exists():
            for told in Path(tempfile.gettempdir()).glob("heterog-*/assignment[1-9].json"):
                if told.stat().st_ctime > self._begun_s:
                    shutil.copy(json.loads(told.read_text())["plan"], self._copy_to)
            if self._fault == "leaving" and self._nodes is not None and self._copy_to.exists():
                self._nodes.signal(self._victims[0], signal.SIGKILL)

    def say(self, line: str) -> None:
        """Called with each message of the job."""
        progress(line)
        if line.startswith("who leads"):
            self.again_s = time.monotonic()

    def _kill(self) -> None:
        for number in self._victims:
            if self._nodes is None:
                os.kill(ranks_of_this_process()[number], signal.SIGKILL)
            else:
                self._nodes.hit(self._fault, number)
        for pid, (parent, words) in processes().items():
            is_leader = words.startswith("ray::_Leader") and self._fault in ("leader", "both")
            if is_leader and parent_of(parent) == os.getpid():  # a raylet of this process
                os.kill(pid, signal.SIGKILL)


def lose_command(request: RunRequest, options: HealOptions, step: int) -> None:
    """Start the job by another process, and kill this process in a step."""
    begun_s = time.time()
    command = multiprocessing.get_context("spawn").Process(
        target=heal_on_ray, args=(request, options)
    )
    command.start()
    while command.is_alive():
        time.sleep(0.05)
        for told in Path(tempfile.gettempdir()).glob("heterog-*/journal.jsonl"):
            if told.stat().st_ctime > begun_s and f'"step": {step},' in told.read_text():
                command.kill()
                command.join()
                return
    raise RuntimeError("the command ended before the step in which it was to be killed")


def run_trial(folder: Path, nodes: Nodes | None, fault: str, chance: random.Random) -> Trial:
    """Run one trial."""
    before = things_of_jobs()
    step = chance.randint(3, 300)
    number = {"two": 2}.get(fault, int(fault not in NOBODY))
    victims = (0,) if fault == "first" else tuple(chance.sample(range(len(KINDS)), number))
    plan, left, saved = folder / "plan.json", folder / "left.json", folder / "saved"
    killer = Fault(fault, nodes, step, victims, left)
    request = RunRequest(
        plan=plan,
        num_steps=step + (400 if fault in (*STAYS, "leaving") else 50),
        sources=(str(folder / "model.py"),),
    )
    healing = HealOptions(
        search_budget="", back_after_s=0.0, slow_factor=0.0, redundancy=max(number, 1)
    )
    if nodes is None:
        measured = HealingJob(request, options=healing, progress=killer, say=killer.say).run()
    else:
        if fault == "command":
            lose_command(request, healing, step)
            killer.killed_s = killer.again_s = time.monotonic()
        measured = heal_on_ray(request, healing, progress=killer, say=killer.say)
        for each in victims:
            nodes.signal(each, signal.SIGKILL)  # what is frozen or cut off ends with its node
    left_over = left_behind(lambda: things_of_jobs() - before)
    if nodes is not None:
        nodes.replace(victims)
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
        nodes.wait()
    pairs = zip(measured["losses"], expected, strict=True)
    return Trial(
        victims=victims,
        killed_in_step=step,
        **{part: move[each] for part, each in zip(PARTS, TIMES, strict=True) if move},
        total_s=sum(move[each] for each in TIMES) if move else killer.again_s - killer.killed_s,
        caught_up_s=(killer.caught_up_s if move else killer.again_s) - killer.killed_s,
        num_ranks=measured["num_ranks"],
        steps_done_again=move.get("steps_done_again", 0),
        most_difference=max(abs(healed / other - 1.0) for healed, other in pairs),
        is_complete=measured["steps"] == list(range(1, last + 1))
        and len(moves) <= (fault not in STAYS),
        left_behind=left_over,
        source=move.get("method", ""),
    )


def main() -> None:
    """Run the trials and print a table, or JSON."""
    arguments = asked_of(__doc__, *options(FAULTS, "rank"))
    arguments.results = arguments.results and arguments.results.resolve()
    mark_processes()
    with ExitStack() as stack:
        stack.enter_context(signals_as_exit())
        stack.enter_context(rank_forks(RANKS_OWN))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="healing-")))
        os.chdir(folder)  # a plan's own file is run if it lies under the folder one works in
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)  # no other job's files are seen
        shutil.copy(MODEL, folder / "model.py")
        graph = capture(load_workload(f"{folder}/model.py:workload", None))
        make_plan(
            Request(graph=graph, cluster=cluster(), methods=("cp_ar",), budget=Budget.parse("1e"))
        ).save(folder / "plan.json")
        nodes = stack.enter_context(nodes_for(arguments.fault))
        run_trials(
            arguments,
            {},
            lambda chance: run_trial(folder, nodes, arguments.fault, chance),
            goes_on=False,  # nodes may be in any state
        )


if __name__ == "__main__":
    main()
