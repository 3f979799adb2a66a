"""What does Poplar gain over even ZeRO on real processes of unequal speed?

    python experiments/poplar_testbed.py --json        # Linux, as root

On a testbed, for each stage of ZeRO, Poplar's plan is compared with the same stage with equal
shares, as few micro-steps as fit and 25 MiB buckets. Where Poplar's plan has more micro-steps,
equal shares with equally many are measured too: the remaining gain is that of the shares. All
plans of a workload run in one job and in turn, so other load on the machine affects all of them.
Gains are measured, not simulated, with the predicted gains beside them. Plans are made with a
calibration of the testbed on other workloads than these.
"""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rows import asked_of, finish, option, run, told
from testbeds import FOLDER, Task, calibrated, measured, workload_of

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.methods.planner import Budget, Planner, Problem
from heterog.methods.poplar import STAGES, EvenZero, Poplar
from heterog.search.judging import run_method
from heterog.search.plan import Plan, plan_from_rows
from heterog.simulator.evaluator import Evaluator

CASES = (("vgg", 768), ("gpt", 192), ("encoder", 144), ("mlp", 8192))
"""(workload, samples per step): twice its own batch, so that steps take a second."""


def make_plans(cluster: Cluster, model: str, batch_size: int, budget: Budget) -> dict[str, Plan]:
    """Plans for every stage: ``poplar0``, ``even0``, maybe ``even_steps0`` and so on."""
    evaluator = Evaluator(capture(workload_of(model, batch_size)), cluster)
    problem = Problem(evaluator=evaluator, budget=budget)

    def made(planner: Planner) -> Plan:
        row = run_method(planner, problem)
        plan = plan_from_rows(evaluator, [row])
        return replace(plan, budget=str(budget), search_seconds=row.search_seconds)

    plans: dict[str, Plan] = {}
    for stage in STAGES:
        plans[f"even{stage}"] = even = made(EvenZero(stage))
        plans[f"poplar{stage}"] = ours = made(Poplar(stage))
        num_micro = ours.strategy.num_micro_batches
        if num_micro != even.strategy.num_micro_batches:
            plans[f"even_steps{stage}"] = made(EvenZero(stage, num_micro))
    return plans


def measure(
    cluster: Cluster, model: str, batch_size: int, budget: Budget, num_pairs: int
) -> list[dict[str, Any]]:
    """Rows of one workload: plan, then run all plans on the testbed."""
    plans = make_plans(cluster, model, batch_size, budget)
    task = Task(model=model, rounds=num_pairs, batch_size=batch_size)
    seconds = measured(cluster, plans, task).seconds
    return [_row(plans, seconds, stage) for stage in STAGES]


def _row(
    plans: Mapping[str, Plan], seconds: Mapping[str, list[float]], stage: int
) -> dict[str, Any]:
    ours = plans[f"poplar{stage}"]
    row: dict[str, Any] = {
        "testbed": ours.cluster.name,
        "model": ours.graph.name,
        "batch_size": ours.graph.batch_size,
        "zero_stage": stage,
        "samples": ours.strategy.decisions[0].shares,
        "num_micro": ours.strategy.num_micro_batches,
        "bucket_bytes": ours.strategy.bucket_bytes,
    }
    for name in ("poplar", "even", "even_steps"):
        key = f"{name}{stage}"
        if key in plans:
            row[f"predicted_{name}_step_time_s"] = plans[key].step_time_s
            row[f"{name}_step_time_s"] = statistics.median(seconds[key])
            row[f"{name}_seconds"] = seconds[key]
    row["predicted_gain"] = row["predicted_even_step_time_s"] / row["predicted_poplar_step_time_s"]
    row["gain"] = row["even_step_time_s"] / row["poplar_step_time_s"]
    same_steps = row.get("even_steps_step_time_s", row["even_step_time_s"])
    row["gain_of_shares"] = same_steps / row["poplar_step_time_s"]
    pairs = zip(seconds[f"even{stage}"], seconds[f"poplar{stage}"], strict=True)
    row["gains"] = [even / poplar for even, poplar in pairs]
    return row


def main() -> None:
    """Calibrate, plan, measure, compare."""
    arguments = asked_of(
        __doc__,
        option("--testbed", default="skew_compute"),
        option("--cases", default=",".join(f"{name}:{size}" for name, size in CASES)),
        option("--budget", default="40e"),
        option("--pairs", type=int, default=20),
        FOLDER,
    )
    cases = [case.split(":") for case in arguments.cases.split(",")]
    rows: list[dict[str, Any]] = []
    budget = Budget.parse(arguments.budget)
    with tempfile.TemporaryDirectory() as scratch:
        cluster = calibrated(arguments.testbed, Path(arguments.folder or scratch))
        for model, batch_size in cases:
            rows += told(measure(cluster, model, int(batch_size), budget, arguments.pairs))
    gains = [row["gain"] for row in rows]
    means = {"geometric_mean": statistics.geometric_mean(gains), "least": min(gains)}
    finish(arguments, means | {"rows": rows})


if __name__ == "__main__":
    run(main)
