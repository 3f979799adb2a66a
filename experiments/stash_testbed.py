"""Pipelines that do not wait on a testbed: seconds a step beside what was predicted.

    python experiments/stash_testbed.py --json                            # Linux, as root
    python experiments/stash_testbed.py --words "stash=4,micro_batches=4" --num-steps 30

Each of ``--words`` is planned as ``--asynchronous`` would, with a calibration of the testbed on
other workloads, and its row is run though exact plans may be faster. Every row runs alone, because
batches stay under way between its steps. Told is the median over the later half of the steps, on
the rank where it is longest.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from testbed_calibration import calibrated
from testbed_rounds import report, results_of_ranks

from heterog.cluster import Cluster
from heterog.graph.capture import capture, capture_step
from heterog.planners.plan import Plan, load_plan, make_plan, plan_from_rows
from heterog.planners.served import asynchronous_method
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.rank import end_together, join
from heterog.runtime.testbed import load_testbed
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.stash import stages_of
from heterog.zoo import load_workload

TESTBED = str(Path(__file__).with_name("slow_network.yaml"))
WORKLOADS = Path(__file__).with_name("testbed_workloads.py")
WORDS = "stash=1 stash=1,micro_batches=4 stash=4,micro_batches=4"


def stashed_plan(cluster: Cluster, model: str, words: str, budget: str) -> Plan:
    """The row that some words ask for, as a plan."""
    graph = capture(load_workload(f"{WORKLOADS}:{model}", None))
    asked = asynchronous_method(words)
    both = make_plan(graph, cluster, budget=budget, methods=("cp_ar",), asynchronous=asked)
    row = next(row for row in both.rows if row.method == asked.name)
    evaluator = Evaluator(graph, cluster)
    return plan_from_rows(evaluator, [row], budget=budget, seed=0, search_seconds=0.0)


def serve(folder: Path, model: str, num_steps: int) -> None:
    """One rank: the steps of a plan, one after another."""
    torch.set_num_threads(1)
    join(timeout_s=1800)
    workload = load_workload(f"{WORKLOADS}:{model}", None)
    batch, captured = workload.make_batch(), capture_step(workload)
    step = DeployedStep(workload, load_plan(folder / "plan.json"), captured=captured)
    dist.barrier()
    seconds = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - begin)
    step.settle()
    report(folder, seconds)
    step.close()
    end_together()


def measure(cluster: Cluster, words: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan a row and run it."""
    plan = stashed_plan(cluster, arguments.model, words, arguments.budget)
    options = ["--model", arguments.model, "--num-steps", str(arguments.num_steps)]
    by_rank = results_of_ranks(__file__, cluster, {"plan": plan}, options)
    half = arguments.num_steps // 2
    return {
        "testbed": cluster.name,
        "model": arguments.model,
        "words": words,
        "stages": stages_of(plan.strategy),
        "predicted_s": plan.step_time_s,
        "median_s": max(statistics.median(seconds[half:]) for seconds in by_rank),
        "peak_memory_bytes": max(plan.peak_memory_bytes),
        "seconds": by_rank,
    }


def main() -> None:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--testbed", default=TESTBED)
    parser.add_argument("--model", default="vgg")
    parser.add_argument("--words", default=WORDS, help="as for --asynchronous, with blanks")
    parser.add_argument("--budget", default="200e")
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--uncalibrated", action="store_true", help="plan by data sheets")
    parser.add_argument("--folder", default="", help="keeps calibrations here, and uses old ones")
    parser.add_argument("--rank-folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_folder:
        serve(Path(arguments.rank_folder), arguments.model, arguments.num_steps)
        return
    scratch = tempfile.TemporaryDirectory()
    cluster = load_testbed(arguments.testbed)
    if not arguments.uncalibrated:
        cluster = calibrated(arguments.testbed, Path(arguments.folder or scratch.name))
    rows = []
    for words in arguments.words.split():
        rows.append(measure(cluster, words, arguments))
        row = rows[-1]
        off = row["predicted_s"] / row["median_s"] - 1.0
        print(
            f"{row['testbed']:13} {row['model']:5} {words:24} {row['median_s']:.3f} s a step "
            f"(predicted {row['predicted_s']:.3f}, {off:+.1%}), "
            f"{row['peak_memory_bytes'] / 2**20:.0f} MiB",
            file=sys.stderr,
            flush=True,
        )
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
