"""How far are predicted step times and memory from measured ones?

    python experiments/simulator_fidelity.py --json        # Linux, as root

Each testbed is calibrated on the workloads of ``calibration_workloads.py``. Then six strategies of
each workload of ``testbed_workloads.py``, none of which was calibrated on, are predicted and run
in turn on the testbed: median of the steps, and the most bytes that each rank's allocator held.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import finish, progress, script_parser
from scipy.stats import spearmanr
from testbed_calibration import add_testbeds, testbeds_and_models
from testbed_rounds import report, results_of_ranks, seconds_in_turn

from heterog.cluster import Cluster
from heterog.graph.capture import capture, capture_step
from heterog.methods.planner import Budget
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.measure.peak_memory import peak_bytes
from heterog.runtime.rank import end_together, join
from heterog.search.plan import load_plan, make_plan
from heterog.search.request import Request
from heterog.zoo import load_workload

TESTBEDS = ("skew_compute", "skew_network", "skew_both")
MODELS = ("mlp", "vgg", "gpt", "encoder")
METHODS = ("ddp", "cp_ar", "cp_ps", "single_device", "model_parallel", "local_search")
HERE = Path(__file__).parent
_NOTHING_BYTES = 64 * 1024  # a rank that takes no part holds the loss


def serve(folder: Path, model: str, methods: Sequence[str], num_steps: int) -> None:
    """One rank: all plans in turn; writes seconds and peak bytes."""
    torch.set_num_threads(1)
    join(timeout_s=1800)
    workload = load_workload(f"{HERE / 'testbed_workloads.py'}:{model}", None)
    batch = workload.make_batch()
    captured = capture_step(workload)
    steps = {
        method: DeployedStep(workload, load_plan(folder / f"{method}.json"), captured=captured)
        for method in methods
    }
    seconds = seconds_in_turn(
        {method: partial(step, batch) for method, step in steps.items()}, num_steps
    )
    peaks = {method: peak_bytes(step, batch) for method, step in steps.items()}
    report(folder, {"seconds": seconds, "peaks": peaks})
    end_together()


def measure(
    cluster: Cluster, model: str, methods: Sequence[str], num_steps: int
) -> list[dict[str, Any]]:
    """Rows of one model on one testbed."""
    graph = capture(load_workload(f"{HERE / 'testbed_workloads.py'}:{model}", None))
    plans = {
        method: make_plan(
            Request(graph=graph, cluster=cluster, methods=(method,), budget=Budget.parse("500e"))
        )
        for method in methods
    }
    arguments = ["--models", model, "--steps", str(num_steps), "--methods", ",".join(methods)]
    parts = results_of_ranks(__file__, cluster, plans, arguments)
    return [
        {
            "testbed": cluster.name,
            "model": model,
            "method": method,
            "predicted_step_time_s": plan.step_time_s,
            "step_time_s": statistics.median(parts[0]["seconds"][method]),
            "step_times_s": parts[0]["seconds"][method],
            "predicted_peak_memory_bytes": list(plan.peak_memory_bytes),
            "peak_memory_bytes": [part["peaks"][method] for part in parts],
        }
        for method, plan in plans.items()
    ]


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    predicted, measured = row["predicted_step_time_s"], row["step_time_s"]
    memory = " ".join(
        f"{p / max(m, 1):.2f}"
        for p, m in zip(row["predicted_peak_memory_bytes"], row["peak_memory_bytes"], strict=True)
    )
    return (
        f"{row['testbed']:13} {row['model']:8} {row['method']:15} predicted {predicted:.3f} s, "
        f"measured {measured:.3f}, ratio {predicted / measured:.2f}, memory {memory}"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The errors over all rows, and over the strategies of each testbed and model."""
    predicted = np.array([row["predicted_step_time_s"] for row in rows])
    measured = np.array([row["step_time_s"] for row in rows])
    error = predicted / measured - 1.0
    settings = sorted({(row["testbed"], row["model"]) for row in rows})
    correlations, regrets = [], []
    for setting in settings:
        chosen = [i for i, row in enumerate(rows) if (row["testbed"], row["model"]) == setting]
        correlations.append(float(spearmanr(predicted[chosen], measured[chosen]).statistic))
        best = chosen[int(np.argmin(predicted[chosen]))]
        regrets.append(float(measured[best] / measured[chosen].min() - 1.0))
    memory = np.array(
        [
            p / m
            for row in rows
            for p, m in zip(
                row["predicted_peak_memory_bytes"], row["peak_memory_bytes"], strict=True
            )
            if m > _NOTHING_BYTES
        ]
    )
    return {
        "mape_step_time": float(np.abs(error).mean()),
        "bias": float(error.mean()),
        "spearman": float(spearmanr(predicted, measured).statistic),
        "spearman_within_setting": float(np.mean(correlations)),
        "top1_regret": float(np.mean(regrets)),
        "top1_regret_max": float(np.max(regrets)),
        "mape_peak_memory": float(np.abs(memory - 1.0).mean()),
        "memory_ratio_min": float(memory.min()),
        "memory_ratio_max": float(memory.max()),
    }


def main() -> None:
    """Calibrate, predict, measure, compare."""
    parser = script_parser(__doc__)
    add_testbeds(parser, TESTBEDS, MODELS)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    if arguments.rank_folder:
        serve(Path(arguments.rank_folder), arguments.models, methods, arguments.steps)
        return
    rows: list[dict[str, Any]] = []
    for cluster, model in testbeds_and_models(arguments):
        found = measure(cluster, model, methods, arguments.steps)
        rows += found
        for row in found:
            progress(line(row))
    result = summary(rows)
    finish(
        arguments,
        {**result, "rows": rows},
        (f"{key:25} {value:.3f}" for key, value in result.items()),
    )


if __name__ == "__main__":
    main()
