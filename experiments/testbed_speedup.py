"""Does a searched plan beat the real DistributedDataParallel on unequal machines?

    python experiments/testbed_speedup.py --json        # Linux, as root
    python experiments/testbed_speedup.py --method agent --json   # a policy's plan instead
    python experiments/testbed_speedup.py --execution compiled --json

On each testbed and workload, in one job and in turn: the plan of ``auto``, that of
``tuned_uniform``, DDP with even batches, and, every second time, DDP with batches in proportion to
the CPU quotas. Gains are measured, not simulated, with the predicted gains beside them. Plans are
made with a calibration of the testbed on other workloads than these. With ``--execution compiled``
our steps are compiled, and DDP runs under ``torch.compile``, whose seconds no calibration of our
steps predicts. So both kinds of DDP also run as plans, and predicted gains are gains over these.
"""

import statistics
from dataclasses import replace
from typing import Any

from rows import finish, option, script_parser, told
from testbeds import Task, measured, plan_of, testbed_options, testbeds_and_models, workload_of

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.methods.planner import Budget
from heterog.search.plan import make_plan
from heterog.search.request import Request
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.strategy.strategy import Decision

TESTBEDS = ("skew_compute", "skew_network", "skew_both")
MODELS = ("mlp", "vgg", "gpt", "encoder")
TUNED, DDP, PROPORTIONAL = "tuned_uniform", "ddp", "proportional_ddp"
PLANNED = {DDP: "planned_ddp", PROPORTIONAL: "planned_proportional_ddp"}
_RARELY = 2


def measure(
    cluster: Cluster, model: str, asked: str, budget: str, num_pairs: int
) -> dict[str, Any]:
    """Plan, then run all contenders on the testbed."""
    graph = capture(workload_of(model))
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
    quotas = tuple(host.cpu_quota or 1.0 for host in cluster.hosts)
    shares = {
        DDP: split_evenly(graph.batch_size, len(quotas)),
        PROPORTIONAL: split_in_proportion(graph.batch_size, quotas),
    }
    task = Task(
        model=model,
        rounds=num_pairs,
        shares=shares,
        every=dict.fromkeys((PROPORTIONAL, *PLANNED.values()), _RARELY),
        execution=cluster.execution,
    )
    evaluator = Evaluator(graph, cluster)
    decision = Decision(devices=tuple(range(len(quotas))), shares=shares[PROPORTIONAL])
    plans[PROPORTIONAL] = plan_of(
        evaluator,
        replace(plans[DDP].strategy, decisions=(decision,) * len(plans[DDP].strategy.decisions)),
    )
    run = {name: plans[name] for name in (asked, TUNED)}
    run |= {planned: plans[name] for name, planned in PLANNED.items()}
    seconds = measured(cluster, run, task).seconds
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    ours, tuned, ddp, proportional = (
        plans[name].step_time_s for name in (asked, TUNED, DDP, PROPORTIONAL)
    )
    return {
        "testbed": cluster.name,
        "model": model,
        "method": plan.method,
        "predicted_step_time_s": ours,
        "predicted_over_tuned_uniform": tuned / ours if tuned and ours else None,
        "predicted_over_ddp": ddp / ours if ddp and ours else None,
        "predicted_over_proportional_ddp": proportional / ours if proportional and ours else None,
        "execution": cluster.execution,
        "step_time_s": medians[asked],
        "tuned_uniform_step_time_s": medians[TUNED],
        "speedup_over_tuned_uniform": medians[TUNED] / medians[asked],
        "ddp_step_time_s": medians[DDP],
        "proportional_ddp_step_time_s": medians[PROPORTIONAL],
        "speedup_over_ddp": medians[DDP] / medians[asked],
        "speedup_over_proportional_ddp": medians[PROPORTIONAL] / medians[asked],
        **{f"speedup_over_{each}": medians[each] / medians[asked] for each in PLANNED.values()},
        "num_pairs": num_pairs,
        "seconds": seconds,
    }


def main() -> None:
    """Measure every testbed and workload."""
    parser = script_parser(
        __doc__,
        *testbed_options(TESTBEDS, MODELS),
        option("--method", default="auto", help="whose plan is compared"),
        option("--budget", default="4000e"),
        option("--pairs", type=int, default=20),
    )
    arguments = parser.parse_args()
    if arguments.pairs < _RARELY:
        parser.error(f"--pairs {arguments.pairs}: proportional DDP runs once in {_RARELY} rounds")
    if arguments.method in (TUNED, DDP):
        parser.error(f"{arguments.method} is measured anyway; ask for another method's plan.")
    rows = told(
        measure(cluster, model, arguments.method, arguments.budget, arguments.pairs)
        for cluster, model in testbeds_and_models(arguments)
    )
    means = {}
    for other in ("ddp", TUNED):
        gains = [row[f"speedup_over_{other}"] for row in rows]
        means[f"geometric_mean_over_{other}"] = statistics.geometric_mean(gains)
        means[f"least_over_{other}"] = min(gains)
    finish(arguments, {"rows": rows, **means})


if __name__ == "__main__":
    main()
