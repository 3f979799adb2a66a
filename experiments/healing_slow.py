"""Cuts the CPU time of one rank during a run and measures what a healing job does about it.

    python -m experiments.healing_slow --json      as root, on Linux with cgroups

Four ranks train, each in a cgroup with 45 % of a core. When steps have been measured, the share of
one is cut: to half of it, or to a tenth. The job has to notice that by itself, to decide what is
fastest (give it less, leave it out, stay), to change its mind if that does not keep its promise,
and to go on for ``--after`` steps without a change. In the third trial the rank then gets its
share back.

Then the same is done without healing: the first plan up to the step that was gone on from, a
checkpoint, and the plan that the job chose, resumed from it. Losses have to be equal step by step.
And the alternatives are run, with the rank as slow, to see whether the job chose the faster one.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from heterog.cluster import Cluster, Device, Host, Link, device_type
from heterog.graph.capture import capture
from heterog.healing.job import HealingJob
from heterog.healing.options import HealOptions, Move
from heterog.healing.planning import Planning
from heterog.healing.question import FIRST_METHODS, Question
from heterog.planners.plan import load_plan, make_plan
from heterog.runtime.launch import run_ranks
from heterog.runtime.testbed import Testbed, is_supported
from heterog.zoo import load_workload

MODEL = Path(__file__).with_name("healing_model.py")
BATCH = 1536
NUM_RANKS = 4
QUOTA = 0.45
CORE_FLOPS_PER_S = 40e9
"""About what one core here does in float32 products of this size."""
VICTIM = 2
BEFORE_STEPS = 48
TRIALS = {"half": (0.22,), "a tenth": (0.045,), "half for a while": (0.22, QUOTA)}
"""Shares of a core that the rank has one after another; the next when the job has settled."""
BACK_AFTER_S = 30.0
"""Seconds until a rank that was left out is tried again, if its share will ever be larger."""
MOST_MOVES = 8
"""Number of changes of plan after which a trial ends: it swings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of plan.

    Attributes:
        quota: Share of a core that the rank had by then.
        why: What the job said.
        kind: ``"slow"``, ``"quick"`` or ``"back"``.
        num_ranks: Number of ranks of the new plan.
        shares: Samples of each device, under the new plan.
        noticed_s: Seconds from the last cut until the ranks stopped and the line was said.
        noticed_steps: Steps that were done meanwhile.
        changed_s: Seconds from there to the end of the first step of the new plan.
        step: Number of the last step before the new plan.
    """

    quota: float
    why: str
    kind: str
    num_ranks: int
    shares: tuple[int, ...]
    noticed_s: float
    noticed_steps: int
    changed_s: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What happened after the cuts.

    Attributes:
        name: Name of the trial.
        changes: Changes of plan, in order.
        steps_after: Steps that were done after the last of them.
        before_s: Mean step time before the cut.
        slow_s: Mean step time after the first cut, until the job reacted.
        after_s: Mean step time after the last change.
        rebalanced_s: Mean step time of a plan that gives the slow rank less, run on its own.
        left_out_s: Mean step time of a plan without the slow rank, run on its own.
        most_difference: Of a loss, from the runs that were planned so, relative.
        is_complete: Every step counts once.
    """

    name: str
    changes: tuple[Change, ...]
    steps_after: int
    before_s: float
    slow_s: float
    after_s: float
    rebalanced_s: float
    left_out_s: float
    most_difference: float
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """When the rank got another share of a core, and how often the plan had changed by then."""

    time_s: float
    step: int
    num_moves: int


class _Enough(Exception):
    """Enough steps were done after the last change."""


def cluster() -> Cluster:
    """Four hosts of one device each, whose ranks may use 45 % of a core."""
    kind = device_type("CPU")
    kind = replace(
        kind,
        peak_flops_per_s={dtype: QUOTA * CORE_FLOPS_PER_S for dtype in kind.peak_flops_per_s},
        memory_bandwidth_bytes_per_s=QUOTA * kind.memory_bandwidth_bytes_per_s,
        launch_overhead_s=kind.launch_overhead_s / QUOTA,
    )
    hosts = [
        Host(
            name=f"h{number}",
            nic_line_rate_bytes_per_s=1e9,
            nic_latency_s=50e-6,
            intra=Link(kind="loopback", bandwidth_bytes_per_s=1e9),
            cpu_quota=QUOTA,
        )
        for number in range(NUM_RANKS)
    ]
    devices = [
        Device(name=f"h{number}:0", type=kind, host_index=number, usable_memory_bytes=2**30)
        for number in range(NUM_RANKS)
    ]
    return Cluster(name="quotas", hosts=tuple(hosts), devices=tuple(devices), efficiency=1.0)


class Throttler:
    """Cuts the rank's share at a step, and again whenever the job has reacted."""

    def __init__(self, bed: Testbed, quotas: Sequence[float], after: int, folder: Path) -> None:
        self.job: HealingJob | None = None
        self.cuts: list[_Cut] = []
        self.said_s: list[float] = []
        self.plans: list[Path] = []
        self._bed, self._quotas, self._after, self._folder = bed, quotas, after, folder

    def __call__(self, stage: str) -> None:
        """Called whenever rank 0 does something else."""
        words = stage.split()
        if words[0] != "step":
            return
        assert self.job is not None
        moves, number = self.job.trained.moves, int(words[1])
        if moves and not moves[-1].first_step_s:
            return  # it is not yet known which step the new ranks have gone on from
        if len(moves) > len(self.plans):
            self.plans.append(self._folder / f"chosen{len(moves)}.json")
            shutil.copy(self.job.running.path, self.plans[-1])
        moves_before = self.cuts[-1].num_moves if self.cuts else 0
        if not self.cuts:
            has_settled = number >= BEFORE_STEPS
        else:
            has_settled = len(moves) > moves_before and number > moves[-1].step + self._after
        if len(moves) >= MOST_MOVES or (has_settled and len(self.cuts) == len(self._quotas)):
            raise _Enough
        if has_settled:
            self._bed.throttle(VICTIM, self._quotas[len(self.cuts)])
            self.cuts.append(_Cut(time_s=time.monotonic(), step=number, num_moves=len(moves)))

    def say(self, text: str) -> None:
        """Called with each line for people."""
        print(text, file=sys.stderr, flush=True)
        assert self.job is not None
        if len(self.job.trained.moves) > len(self.said_s):
            self.said_s.append(time.monotonic())


def _mean_s(job: HealingJob, first: int, last: int) -> float:
    return statistics.fmean(s for n, s in job.trained.seconds.items() if first <= n <= last)


def shares_of(plan: Path, devices: Sequence[int]) -> tuple[int, ...]:
    """Most samples that each device of the whole cluster has of any op."""
    shares = [0] * NUM_RANKS
    for decision in load_plan(plan).strategy.decisions:
        for rank, share in zip(decision.devices, decision.shares, strict=True):
            shares[devices[rank]] = max(shares[devices[rank]], share)
    return tuple(shares)


def expected_losses(
    folder: Path, moves: Sequence[Move], plans: Sequence[Path], last: int
) -> dict[int, float | None]:
    """Losses of runs that were planned so: each plan resumes a checkpoint of the one before."""
    expected: dict[int, float | None] = {}
    begin, saved = 0, None
    for number, plan in enumerate([folder / "plan.json", *plans]):
        end = moves[number].step if number < len(moves) else last
        following = folder / f"saved{number}"
        shutil.rmtree(following, ignore_errors=True)
        told = run_ranks(
            plan,
            load_plan(plan).cluster.num_devices,
            num_steps=end - begin - 1,
            resume=saved,
            save=following,
        )
        # A run says nothing of the step that warms it up.
        expected |= dict(zip(range(begin + 2, end + 1), told["losses"], strict=True))
        begin, saved = end, following
    return expected


def step_time_of_alternative(
    folder: Path, bed: Testbed, factor: float, lost: tuple[int, ...]
) -> float:
    """Mean step time of what the job could have chosen, with the rank as slow as it is now."""
    planning, plan = Planning(), folder / "plan.json"
    planning.answer({"whole": str(plan), "source": f"{folder}/model.py:workload"})
    devices = [each for each in range(NUM_RANKS) if each not in lost]
    question = Question(
        lost=lost,
        slow={VICTIM: factor},
        methods=FIRST_METHODS,
        budget=HealOptions().first_budget,
        steps_left=10**6,
        restart_s=0.0,
        running=str(plan),
        running_on=tuple(range(NUM_RANKS)),
        path=str(folder / "alternative.json"),
    )
    planning.answer(question.to_request())
    told = run_ranks(
        folder / "alternative.json",
        len(devices),
        num_steps=100,
        wrap=lambda rank, command: bed.command(devices[rank], command),
    )
    return statistics.fmean(told["step_times_s"])


def run_trial(name: str, folder: Path, after: int) -> Trial:
    """Cut the share of one rank, once or up and down."""
    plan, quotas = folder / "plan.json", TRIALS[name]
    with Testbed(cluster(), has_network=False) as bed:
        throttler = Throttler(bed, quotas, after, folder)
        job = HealingJob(
            plan,
            num_steps=10**6,
            sources=[str(folder / "model.py")],
            options=HealOptions(
                search_budget="", back_after_s=BACK_AFTER_S if len(quotas) > 1 else 0.0
            ),
            timeout_s=400.0,
            wrap=bed.command,
            environment=bed.environment,
            progress=throttler,
            say=throttler.say,
        )
        throttler.job = job
        try:
            job.run()
        except _Enough:
            pass
        moves = job.trained.moves
        factor = QUOTA / quotas[0]
        bed.throttle(VICTIM, quotas[0])
        rebalanced_s = step_time_of_alternative(folder, bed, factor, ())
        left_out_s = step_time_of_alternative(folder, bed, factor, (VICTIM,))
    last = max(job.trained.losses)
    expected = expected_losses(folder, moves, throttler.plans, last)
    healed = job.trained.losses
    changes = []
    for number, move in enumerate(moves):
        at = max(n for n, cut in enumerate(throttler.cuts) if cut.num_moves <= number)
        is_out = move.num_ranks < NUM_RANKS
        devices = [each for each in range(NUM_RANKS) if not (is_out and each == VICTIM)]
        changes.append(
            Change(
                quota=quotas[at],
                why=move.why,
                kind=move.kind,
                num_ranks=move.num_ranks,
                shares=shares_of(throttler.plans[number], devices),
                noticed_s=throttler.said_s[number] - throttler.cuts[at].time_s,
                noticed_steps=move.step - throttler.cuts[at].step,
                changed_s=move.plan_s + move.move_s + move.first_step_s,
                step=move.step,
            )
        )
    return Trial(
        name=name,
        changes=tuple(changes),
        steps_after=last - moves[-1].step,
        before_s=_mean_s(job, BEFORE_STEPS // 2, throttler.cuts[0].step - 1),
        slow_s=_mean_s(job, throttler.cuts[0].step + 1, moves[0].step),
        after_s=_mean_s(job, moves[-1].step + 2, last),
        rebalanced_s=rebalanced_s,
        left_out_s=left_out_s,
        most_difference=max(
            abs((healed[step] or 0.0) / loss - 1) for step, loss in expected.items() if loss
        ),
        is_complete=sorted(healed) == list(range(1, last + 1)),
    )


def main() -> None:
    """Run the trials and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--after", type=int, default=200, help="steps after the last change")
    parser.add_argument("--only", default="", choices=["", *TRIALS])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    reason = is_supported()
    if reason is not None:
        sys.exit(reason)
    trials = []
    with tempfile.TemporaryDirectory(prefix="healing-") as name:
        folder = Path(name)
        os.chdir(folder)  # a plan's own file is run if it lies under the folder one works in
        shutil.copy(MODEL, folder / "model.py")
        graph = capture(load_workload(f"{folder}/model.py:workload", BATCH))
        make_plan(graph, cluster(), methods=["cp_ar"], budget="1e").save(folder / "plan.json")
        for each in TRIALS:
            if arguments.only in ("", each):
                trials.append(run_trial(each, folder, arguments.after))
                print(trials[-1], file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"trials": [asdict(each) for each in trials]}, indent=2))


if __name__ == "__main__":
    main()
