"""Does a background job stay out of the foreground's way on real processes?

    python experiments/deeppool_testbed.py [--steps 20] --json        # Linux, as root

On testbeds of CPUs, a foreground plan of ``deeppool`` runs some steps alone and then beside a
background job on every rank: a niced process in the rank's own namespace, CPU quota and core, held
back by the governor. Measured, not simulated: the mean step beside it over the median step alone,
and the samples that the background trained on.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from heterog.cli.common import load_model_graph
from heterog.errors import HeterogError
from heterog.planners.plan import make_plan
from heterog.runtime.launch import run_ranks
from heterog.runtime.testbed import Testbed, load_testbed

WORKLOADS = Path(__file__).with_name("testbed_workloads.py")
CASES = (
    ("skew_network", "mlp", 2048, "vgg", 8),
    ("skew_both", "gpt", 48, "mlp", 64),
    ("skew_compute", "vgg", 384, "vgg", 8),
)
"""(testbed, foreground, its batch, background, its batch per rank)"""
LIMIT = 1.1


def measure(case: tuple[str, str, int, str, int], num_steps: int) -> dict[str, Any]:
    """One case: plan, run, and what both jobs did."""
    testbed, model, batch, beside, beside_batch = case
    cluster = load_testbed(testbed)
    graph = load_model_graph(f"{WORKLOADS}:{model}", batch)
    plan = make_plan(graph, cluster, methods=["deeppool"], budget="200e")
    plan = plan.with_background(load_model_graph(f"{WORKLOADS}:{beside}", beside_batch), LIMIT)
    with tempfile.TemporaryDirectory() as folder, Testbed(cluster) as bed:
        path = Path(folder) / "plan.json"
        plan.save(path)
        measured = run_ranks(
            path,
            cluster.num_devices,
            sources=[str(WORKLOADS)],
            num_steps=num_steps,
            background=plan.background,
            wrap=bed.command,
            environment=bed.environment,
        )
    assert plan.background is not None
    return {
        "testbed": testbed,
        "model": model,
        "batch": batch,
        "predicted_idle_share": plan.background.idle_share,
        **measured["background"],
        "step_times_s": measured["step_times_s"],
    }


def main() -> int:
    """Measure every case and print a table or one document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    try:
        for case in CASES:
            rows.append(measure(case, arguments.steps))
            row = rows[-1]
            print(
                f"{row['testbed']}: {case[1]} {row['step_time_alone_s']:.3f} s alone, "
                f"{row['step_time_s']:.3f} s beside {case[3]}: {row['slow_down']:.3f}x "
                f"(limit {LIMIT}x); background {row['samples_per_s']:.1f} samples/s",
                file=sys.stderr if arguments.json else sys.stdout,
                flush=True,
            )
    except HeterogError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"limit": LIMIT, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
