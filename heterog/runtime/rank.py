"""What one rank of a job does: join the others, deploy the plan, train, report.

    torchrun --nproc-per-node 3 -m heterog.runtime.rank plan.json --steps 10

Rank and address come from the environment, as torchrun and ``heterog run`` set them.
"""

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from heterog.errors import HeterogError
from heterog.files import write_json
from heterog.planners.plan import Plan, load_plan
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.zoo import load_workload

WARM_UP_STEPS = 1


def train(
    plan: Plan, model: str, *, num_steps: int, timeout_s: float
) -> tuple[DeployedStep, dict[str, Any]]:
    """Train for some steps on the workload's example batch and measure them.

    Args:
        plan: to run; its cluster's device ``i`` is rank ``i``.
        model: zoo name or ``file.py:function``; the plan's own source if empty.
        num_steps: measured steps, after one that warms up.
        timeout_s: seconds after which a rank gives up on the others.

    Returns:
        The deployed step, and what was measured: the same on every rank.
    """
    source = model or plan.graph.source
    if not source:
        raise HeterogError("the plan does not name its model; pass --model.")
    workload = load_workload(source, None if model else plan.graph.batch_size)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    step = deploy(workload, plan)
    batch = workload.make_batch()
    losses: list[float] = []
    seconds: list[float] = []
    for number in range(WARM_UP_STEPS + num_steps):
        dist.barrier()
        begin = time.perf_counter()
        loss = float(step(batch))
        dist.barrier()  # a step is done when it is done everywhere
        if number >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - begin)
            losses.append(loss)
    median_s = statistics.median(seconds)
    return step, {
        "model": plan.graph.name,
        "cluster": plan.cluster.name,
        "method": plan.method,
        "num_ranks": dist.get_world_size(),
        "step_time_s": median_s,
        "step_time_min_s": min(seconds),
        "step_time_max_s": max(seconds),
        "step_times_s": seconds,
        "predicted_step_time_s": plan.step_time_s,
        "losses": losses,
        "throughput_samples_per_s": plan.graph.batch_size / median_s,
    }


def main() -> None:
    """Run as one rank; errors are one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--model", default="")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("-o", "--output", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank = int(os.environ.get("RANK", "0"))
    try:
        _, measured = train(
            load_plan(arguments.plan),
            arguments.model,
            num_steps=arguments.steps,
            timeout_s=arguments.timeout,
        )
    except (HeterogError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        print(f"heterog: rank {rank}: {first}", file=sys.stderr, flush=True)
        # Without the others' consent there is no orderly way to leave the process group.
        os._exit(2)
    if rank == 0:
        if arguments.output:
            write_json(arguments.output, measured)
        else:
            print(json.dumps(measured, indent=2), flush=True)
    # Leaving while others still talk aborts them.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
