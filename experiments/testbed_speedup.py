"""Does a searched plan beat the real DistributedDataParallel on unequal machines?

    python experiments/testbed_speedup.py --json        # Linux, as root
    python experiments/testbed_speedup.py --method agent --json   # a policy's plan instead

On each testbed and workload, in one job and in turn: the plan of ``auto``, that of
``tuned_uniform``, DDP with even batches, and, every fourth time, DDP with batches in proportion to
the CPU quotas. Measured, not simulated, with the predicted gains beside. Plans are made with a
calibration of the testbed, on other workloads than these.
"""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import finish, geometric_mean, progress, script_parser
from testbed_calibration import add_testbeds, testbeds_and_models
from testbed_rounds import report, results_of_ranks, seconds_in_turn
from torch.nn.parallel import DistributedDataParallel

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.graph.capture import capture

# Registers ``agent`` and ``agent+search``.
from heterog.methods.planner import Budget
from heterog.runtime.deploy import deploy
from heterog.runtime.rank import end_together, join
from heterog.search.plan import load_plan, make_plan
from heterog.search.request import Request
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.zoo import load_workload

TESTBEDS = ("skew_compute", "skew_network", "skew_both")
MODELS = ("mlp", "vgg", "gpt", "encoder")
WORKLOADS = Path(__file__).with_name("testbed_workloads.py")
TUNED, DDP = "tuned_uniform", "ddp"
_RARELY = 4


def serve(folder: Path, model: str, asked: str, num_pairs: int) -> None:
    """One rank: all contenders in turn; rank 0 writes the seconds."""
    torch.set_num_threads(1)
    join(timeout_s=1800)
    rank = dist.get_rank()
    workload = load_workload(f"{WORKLOADS}:{model}", None)
    batch = workload.make_batch()
    assert isinstance(batch, tuple)
    contenders: dict[str, Callable[[], Any]] = {}
    for method in (asked, TUNED):
        plan = load_plan(folder / f"{method}.json")
        contenders[method] = partial(deploy(workload, plan), batch)
    size = plan.graph.batch_size
    quotas = tuple(host.cpu_quota or 1.0 for host in plan.cluster.hosts)
    for key, shares in (
        (DDP, split_evenly(size, len(quotas))),
        ("proportional_ddp", split_in_proportion(size, quotas)),
    ):
        contenders[key] = _ddp_step(model, shares, rank)
    seconds = seconds_in_turn(contenders, num_pairs, every={"proportional_ddp": _RARELY})
    report(folder, seconds)
    end_together()


def _ddp_step(model: str, shares: tuple[int, ...], rank: int) -> Callable[[], None]:
    """A training step of the real DDP on this rank's part of the batch."""
    workload = load_workload(f"{WORKLOADS}:{model}", None)
    replica = DistributedDataParallel(workload.make_model())
    optimizer = workload.optimizer(replica.parameters(), **dict(workload.optimizer_options))
    batch = workload.make_batch()
    assert isinstance(batch, tuple)
    begin = sum(shares[:rank])
    local = tuple(each[begin : begin + shares[rank]] for each in batch)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(workload.step_loss(replica, local))
        optimizer.step()

    return step


def measure(
    cluster: Cluster, model: str, asked: str, budget: str, num_pairs: int
) -> dict[str, Any]:
    """Plan, then run all contenders on the testbed."""
    graph = capture(load_workload(f"{WORKLOADS}:{model}", None))
    plans = {
        name: make_plan(
            Request(
                graph=graph,
                cluster=cluster,
                methods=(name,),
                known=default_methods(),
                budget=Budget.parse(budget),
            )
        )
        for name in (asked, TUNED, DDP)
    }
    plan = plans[asked]
    arguments = ["--models", model, "--method", asked, "--pairs", str(num_pairs)]
    seconds = results_of_ranks(__file__, cluster, plans, arguments)[0]
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    ours, tuned, ddp = (plans[name].step_time_s for name in (asked, TUNED, DDP))
    return {
        "testbed": cluster.name,
        "model": model,
        "method": plan.method,
        "predicted_step_time_s": ours,
        "predicted_over_tuned_uniform": tuned / ours if tuned and ours else None,
        "predicted_over_ddp": ddp / ours if ddp and ours else None,
        "step_time_s": medians[asked],
        "tuned_uniform_step_time_s": medians[TUNED],
        "speedup_over_tuned_uniform": medians[TUNED] / medians[asked],
        "ddp_step_time_s": medians[DDP],
        "proportional_ddp_step_time_s": medians["proportional_ddp"],
        "speedup_over_ddp": medians[DDP] / medians[asked],
        "speedup_over_proportional_ddp": medians["proportional_ddp"] / medians[asked],
        "num_pairs": num_pairs,
        "seconds": seconds,
    }


def main() -> None:
    """Measure every testbed and workload."""
    parser = script_parser(__doc__)
    add_testbeds(parser, TESTBEDS, MODELS)
    parser.add_argument("--method", default="auto", help="whose plan is compared")
    parser.add_argument("--budget", default="4000e")
    parser.add_argument("--pairs", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.pairs < _RARELY:
        parser.error(f"--pairs {arguments.pairs}: proportional DDP runs once in {_RARELY} rounds")
    if arguments.rank_folder:
        serve(Path(arguments.rank_folder), arguments.models, arguments.method, arguments.pairs)
        return
    if arguments.method in (TUNED, DDP):
        parser.error(f"{arguments.method} is measured anyway; ask for another method's plan.")
    rows = []
    for cluster, model in testbeds_and_models(arguments):
        row = measure(cluster, model, arguments.method, arguments.budget, arguments.pairs)
        rows.append(row)
        progress(
            f"{cluster.name:13} {model:8} {row['method']:15} {row['step_time_s']:.3f} s "
            f"(predicted {row['predicted_step_time_s']:.3f}), DDP "
            f"{row['ddp_step_time_s']:.3f}, proportional "
            f"{row['proportional_ddp_step_time_s']:.3f}, tuned uniform "
            f"{row['tuned_uniform_step_time_s']:.3f}: "
            f"{row['speedup_over_ddp']:.2f}x over DDP, "
            f"{row['speedup_over_tuned_uniform']:.2f}x over that"
        )
    means = {}
    for other in ("ddp", TUNED):
        gains = [row[f"speedup_over_{other}"] for row in rows]
        means[f"geometric_mean_over_{other}"] = geometric_mean(gains)
        means[f"least_over_{other}"] = min(gains)
    finish(
        arguments,
        {"rows": rows, **means},
        [", ".join(f"{name} {value:.2f}x" for name, value in means.items())],
    )


if __name__ == "__main__":
    main()
