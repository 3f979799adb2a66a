"""Do trial moves on a job's own steps pay, as measured?

    python experiments/measured_moves.py --testbeds skew_both --models gpt --json  # Linux, as root

For each testbed, model and seed ``auto`` makes a plan for the testbed as its file describes it,
and a job trains with the plan and tries moves (``heterog run --heal --improve``). Then the first
and the last plan run on the same ranks in turn. A row has the moves that were tried and taken
back, and seconds of both plans.
"""

import shutil
import statistics
import tempfile
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from rows import asked_of, finish, option, progress, told
from testbeds import WORKLOADS, Task, measured

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.healing.job import HealingJob
from heterog.healing.options import HealOptions
from heterog.methods.planner import Budget
from heterog.runtime.ranks.testbed import Testbed, load_testbed
from heterog.runtime.ranks.watching import Limits
from heterog.runtime.request import RunRequest
from heterog.search.plan import Plan, load_plan, make_plan
from heterog.search.request import Request
from heterog.zoo import load_workload


class Enough(Exception):
    """All trials are over."""


def improved(cluster: Cluster, path: Path, num_trials: int) -> tuple[list[dict[str, Any]], Plan]:
    """What a job with a plan has tried, and the plan that it ends with."""
    last: list[Plan] = []

    def watch(stage: str) -> None:
        moves, trials = job.trained.moves, job.steering.trials
        is_over = len(moves) == job.trained.generation == sum(2 - each.is_kept for each in trials)
        num_tried = sum(move.kind == "tried" for move in moves)
        if is_over and not job.steering.num_left and num_tried == len(trials):
            last.append(load_plan(job.steering.running.path))
            raise Enough

    with Testbed(cluster) as place:
        job = HealingJob(
            RunRequest(
                plan=path,
                num_steps=10**6,
                sources=(str(path.with_name(WORKLOADS.name)),),
                limits=Limits(timeout_s=7200),
            ),
            options=HealOptions(
                search_budget="",
                back_after_s=0.0,
                slow_factor=0.0,
                first_budget="1e",
                num_trials=num_trials,
            ),
            place=place,
            progress=watch,
            say=progress,
        )
        with suppress(Enough):
            job.run()
    return [trial.to_json() for trial in job.steering.trials], last[0]


def row_of(testbed: str, model: str, seed: int, asked: Any) -> dict[str, Any]:
    """A testbed, a model and a seed."""
    cluster = load_testbed(testbed)
    with tempfile.TemporaryDirectory(prefix="moves-") as name:
        folder = Path(name)
        shutil.copy(WORKLOADS, folder)
        first = make_plan(
            Request(
                graph=capture(load_workload(f"{folder / WORKLOADS.name}:{model}", None)),
                cluster=cluster,
                known=default_methods(),
                budget=Budget.parse(asked.budget),
                seed=seed,
            )
        )
        first.save(folder / "plan.json")
        trials, last = improved(cluster, folder / "plan.json", asked.trials)
    row = {"testbed": testbed, "model": model, "seed": seed, "method": first.method}
    row |= {"trials": trials, "kept": sum(trial["is_kept"] for trial in trials), "gain": 1.0}
    if last.strategy != first.strategy:
        plans = {"first": first, "last": last}
        seconds = measured(cluster, plans, Task(model=model, rounds=asked.rounds)).seconds
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        row |= {"seconds": seconds, "gain": medians["first"] / medians["last"]}
    return row


def main() -> None:
    """Measure every testbed, model and seed."""
    asked = asked_of(
        __doc__,
        option("--testbeds", default="skew_compute,skew_network,skew_both"),
        option("--models", default="gpt"),
        option("--seeds", type=int, default=3),
        option("--trials", type=int, default=4),
        option("--budget", default="300e", help="of the first plan"),
        option("--rounds", type=int, default=8, help="of the first and the last plan in turn"),
    )
    every = product(asked.testbeds.split(","), asked.models.split(","), range(asked.seeds))
    rows = told(row_of(testbed, model, seed, asked) for testbed, model, seed in every)
    mean = statistics.geometric_mean(r["gain"] for r in rows)
    finish(asked, {"rows": rows, "geometric_mean": mean})


if __name__ == "__main__":
    main()
