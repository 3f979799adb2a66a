"""Kills one of four ranks at a random step, again and again, and measures how the job goes on.

    python experiments/healing.py --kills 20 --json

Each trial trains with ``HealingJob`` on four local ranks (four hosts of one device, gloo), kills
one of them with SIGKILL at a random step and lets it go on with three. Then the same is done
without healing: four ranks train up to the step that was gone on from and save a checkpoint, three
ranks resume it with the very plan that the healed job chose. Losses have to be equal step by step.
After each trial processes, shared memory and temporary files are looked for.
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

from rows import asked_of, finish, option, progress

from heterog.cluster import Cluster, Device, Host, Link, device_type
from heterog.graph.capture import capture
from heterog.healing.job import HealingJob
from heterog.healing.options import HealOptions
from heterog.methods.planner import Budget
from heterog.runtime.launch import parent_of, ranks_of_this_process, run_ranks
from heterog.runtime.request import RunRequest
from heterog.search.plan import make_plan
from heterog.search.request import Request
from heterog.zoo import load_workload

MODEL = Path(__file__).with_name("healing_model.py")
NUM_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one kill led to.

    Attributes:
        victim: rank that was killed.
        killed_in_step: that rank 0 had begun.
        resumed_after_step: of the snapshot that was gone on from.
        method: of the new plan.
        total_s: from the kill to the end of the first step with three ranks.
        detect_s: from the last event of the ranks to their end.
        plan_s: from there to the new plan.
        move_s: from there to the state in its places, the start of processes included.
        first_step_s: from there to the end of the first step.
        most_difference: of a loss, from the run that was planned for three, relative.
        is_complete: every step counts once.
        left_behind: processes, shared memory and files that are still there.
    """

    victim: int
    killed_in_step: int
    resumed_after_step: int
    method: str
    total_s: float
    detect_s: float
    plan_s: float
    move_s: float
    first_step_s: float
    most_difference: float
    is_complete: bool
    left_behind: tuple[str, ...]


def cluster() -> Cluster:
    """Four hosts with one device each, and links that let data parallelism pay."""
    inner = Link(kind="loopback", bandwidth_bytes_per_s=100e9)
    kinds = ["V100-16GB", "V100-16GB", "T4", "T4"]
    hosts = [
        Host(name=f"h{number}", nic_line_rate_bytes_per_s=100e9, nic_latency_s=1e-7, intra=inner)
        for number in range(NUM_RANKS)
    ]
    devices = [
        Device(
            name=f"h{number}:0",
            type=device_type(kind),
            host_index=number,
            usable_memory_bytes=device_type(kind).memory_bytes,
        )
        for number, kind in enumerate(kinds)
    ]
    return Cluster(name="four_hosts", hosts=tuple(hosts), devices=tuple(devices))


def things_of_jobs() -> set[str]:
    """Processes that this process has started, temporary folders, and shared memory."""
    folders = Path(tempfile.gettempdir()).glob("heterog-*")
    found = {str(path) for path in folders if not path.name.startswith("heterog-keeper-")}
    found |= {str(path) for path in Path("/dev/shm").glob("*")}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().replace("\0", " ")
            parents = {parent_of(int(folder.name)), parent_of(parent_of(int(folder.name)))}
        except OSError:
            continue
        # Not those of other jobs on this machine.
        is_own = os.getpid() in parents or f"--pid {os.getpid()}" in words
        if "heterog." in words and is_own:
            found.add(f"{folder.name} {words[:80]}")
    return found


class Killer:
    """Kills a rank when rank 0 has begun a step, and notes when training goes on.

    Args:
        step: at which.
        victim: rank that is killed.
        copy_to: file for the plan that training goes on with.
    """

    def __init__(self, step: int, victim: int, copy_to: Path) -> None:
        self.killed_s = self.on_again_s = 0.0
        self.job: HealingJob | None = None
        self._step, self._victim, self._copy_to = step, victim, copy_to
        self._steps_seen = 0

    def __call__(self, stage: str) -> None:
        """Called whenever rank 0 does something else."""
        words = stage.split()
        if words[0] != "step":
            return
        if not self.killed_s:
            if int(words[1]) >= self._step:
                self.killed_s = time.monotonic()
                os.kill(ranks_of_this_process()[self._victim], signal.SIGKILL)
            return
        assert self.job is not None
        if self.job.generation > 0 and not self.on_again_s:
            self._steps_seen += 1
            if self._steps_seen == 2:  # the first is done when the second begins
                self.on_again_s = time.monotonic()
                shutil.copy(self.job.running.path, self._copy_to)


def run_trial(folder: Path, chance: random.Random, wait: bool) -> Trial:
    """Kill one rank once."""
    plan = folder / "plan.json"
    before = things_of_jobs()
    step, victim = chance.randint(3, 300), chance.randrange(NUM_RANKS)
    killer = Killer(step + 1000 * wait, victim, folder / "left.json")
    job = HealingJob(
        RunRequest(
            plan=plan,
            num_steps=step + 1000 * wait + 20,
            sources=(str(folder / "model.py"),),
        ),
        options=HealOptions(search_budget="", back_after_s=0.0, slow_factor=0.0),
        progress=killer,
    )
    killer.job = job
    measured = job.run()
    time.sleep(1.5)  # what was killed needs a moment to be gone
    left_behind = tuple(sorted(things_of_jobs() - before))
    (move,) = [each for each in measured["moves"] if each["kind"] == "lost"]
    resumed, last = move["step"], measured["steps"][-1]
    shutil.rmtree(folder / "saved", ignore_errors=True)
    saved = folder / "saved"
    first = run_ranks(RunRequest(plan=plan, num_steps=resumed - 1, save=saved))
    left, num_steps = folder / "left.json", last - resumed - 1
    then = run_ranks(RunRequest(plan=left, num_steps=num_steps, resume=saved))
    healed = dict(zip(measured["steps"], measured["losses"], strict=True))
    expected = dict(enumerate([*first["losses"], *then["losses"]], start=1))
    return Trial(
        victim=victim,
        killed_in_step=step,
        resumed_after_step=resumed,
        method=move["method"],
        total_s=killer.on_again_s - killer.killed_s,
        detect_s=move["detect_s"],
        plan_s=move["plan_s"],
        move_s=move["move_s"],
        first_step_s=move["first_step_s"],
        most_difference=max(abs(healed[n] / expected[n] - 1.0) for n in expected),
        is_complete=measured["steps"] == list(range(1, last + 1)),
        left_behind=left_behind,
    )


def main() -> None:
    """Run the trials and print a table, or JSON."""
    arguments = asked_of(
        __doc__,
        option("--kills", type=int, default=20),
        option("--seed", type=int, default=0),
        option("--wait", action="store_true", help="kill after plans were prepared"),
    )
    chance = random.Random(arguments.seed)
    trials = []
    with tempfile.TemporaryDirectory(prefix="healing-") as name:
        folder = Path(name)
        os.chdir(folder)  # a plan's own file is run if it lies under the folder one works in
        shutil.copy(MODEL, folder / "model.py")
        graph = capture(load_workload(f"{folder}/model.py:workload", None))
        make_plan(
            Request(graph=graph, cluster=cluster(), methods=("cp_ar",), budget=Budget.parse("1e"))
        ).save(folder / "plan.json")
        for number in range(arguments.kills):
            trials.append(run_trial(folder, chance, arguments.wait))
            each = trials[-1]
            progress(
                f"{number:2} rank {each.victim} in step {each.killed_in_step}: on after step "
                f"{each.resumed_after_step} in {each.total_s:.1f} s (detect {each.detect_s:.2f}, "
                f"plan {each.plan_s:.2f}, move {each.move_s:.2f}, first step "
                f"{each.first_step_s:.3f}), {each.method}, losses off by "
                f"{each.most_difference:.1e}, complete {each.is_complete}, left "
                f"{each.left_behind or 'nothing'}"
            )
    totals = [each.total_s for each in trials]
    summary = {
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
