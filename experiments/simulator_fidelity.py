"""What are the errors of predicted step times and memory?

    python experiments/simulator_fidelity.py --json        # Linux, as root

Each testbed is calibrated on workloads of ``testbed_workloads.py``. Then six strategies of each of
four other workloads there, which are not in the calibration, are predicted and run in turn on the
testbed: median of the steps, and the most bytes that each rank's allocator held.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from rows import asked_of, finish, option, told
from scipy.stats import spearmanr
from testbeds import Task, measured, testbed_options, testbeds_and_models, workload_of

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.methods.planner import Budget
from heterog.search.plan import make_plan
from heterog.search.request import Request

TESTBEDS = ("skew_compute", "skew_network", "skew_both")
MODELS = ("mlp", "vgg", "gpt", "encoder")
METHODS = ("ddp", "cp_ar", "cp_ps", "single_device", "model_parallel", "local_search")
_NOTHING_BYTES = 64 * 1024  # a rank that takes no part holds the loss


def measure(
    cluster: Cluster, model: str, methods: Sequence[str], num_steps: int
) -> list[dict[str, Any]]:
    """Rows of one model on one testbed."""
    graph = capture(workload_of(model))
    plans = {
        method: make_plan(
            Request(graph=graph, cluster=cluster, methods=(method,), budget=Budget.parse("500e"))
        )
        for method in methods
    }
    found = measured(cluster, plans, Task(model=model, rounds=num_steps, peaks=methods))
    return [
        {
            "testbed": cluster.name,
            "model": model,
            "method": method,
            "predicted_step_time_s": plan.step_time_s,
            "step_time_s": statistics.median(found.seconds[method]),
            "step_times_s": found.seconds[method],
            "predicted_peak_memory_bytes": list(plan.peak_memory_bytes),
            "peak_memory_bytes": found.peaks[method],
        }
        for method, plan in plans.items()
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The errors over all rows, and over the strategies of each testbed and model."""
    predicted = np.array([row["predicted_step_time_s"] for row in rows])
    actual = np.array([row["step_time_s"] for row in rows])
    error = predicted / actual - 1.0
    settings = sorted({(row["testbed"], row["model"]) for row in rows})
    correlations, regrets = [], []
    for setting in settings:
        chosen = [i for i, row in enumerate(rows) if (row["testbed"], row["model"]) == setting]
        correlations.append(float(spearmanr(predicted[chosen], actual[chosen]).statistic))
        best = chosen[int(np.argmin(predicted[chosen]))]
        regrets.append(float(actual[best] / actual[chosen].min() - 1.0))
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
        "spearman": float(spearmanr(predicted, actual).statistic),
        "spearman_within_setting": float(np.mean(correlations)),
        "top1_regret": float(np.mean(regrets)),
        "top1_regret_max": float(np.max(regrets)),
        "mape_peak_memory": float(np.abs(memory - 1.0).mean()),
        "memory_ratio_min": float(memory.min()),
        "memory_ratio_max": float(memory.max()),
    }


def main() -> None:
    """Calibrate, predict, measure, compare."""
    arguments = asked_of(
        __doc__,
        *testbed_options(TESTBEDS, MODELS),
        option("--methods", default=",".join(METHODS)),
        option("--steps", type=int, default=5),
    )
    methods = arguments.methods.split(",")
    rows: list[dict[str, Any]] = []
    for cluster, model in testbeds_and_models(arguments):
        rows += told(measure(cluster, model, methods, arguments.steps))
    finish(arguments, {**summary(rows), "rows": rows})


if __name__ == "__main__":
    main()
