"""Do composed plans (stages, teams, caps) reach the simulated gains on real ranks?

    python experiments/testbed_teams.py --json                    # Linux, as root
    python experiments/testbed_teams.py --testbeds skew_hosts --models gpt --pairs 10

On each testbed and workload, in one job and in turn: the plan of ``auto``, the best that it finds
with teams, and ``megatron_grid``, the best uniform layout. Plans are made with a calibration of
the testbed on other workloads than these.
"""

import statistics
from typing import Any

from rows import asked_of, finish, option, told
from testbeds import Task, measured, testbed_options, testbeds_and_models, workload_of

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.methods.planner import Budget
from heterog.search.plan import plan_from_rows
from heterog.search.portfolio import best_row, run_methods
from heterog.search.request import Request
from heterog.search.rows import MethodRow
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy

TESTBEDS = ("skew_both", "skew_hosts")
MODELS = ("mlp", "gpt", "encoder")
GRID = "megatron_grid"


def strategy_of(row: MethodRow) -> Strategy | None:
    """The strategy of a row that fits."""
    return row.candidate.strategy if row.candidate is not None and row.step_time_s else None


def has_teams(strategy: Strategy) -> bool:
    """Whether a group's devices are teams of which one has several members."""
    return any(len(team) > 1 for each in strategy.decisions for team in each.teams)


def best_rows(evaluator: Evaluator, budget: Budget) -> dict[str, MethodRow]:
    """The contenders; equal ones once. The budget is each method's, not divided among them."""
    known = default_methods()
    request = Request(
        graph=evaluator.graph,
        cluster=evaluator.cluster,
        methods=known.names,
        known=known,
        budget=budget,
    )
    rows = run_methods(evaluator, request)
    teamed = [row for row in rows if (strategy := strategy_of(row)) and has_teams(strategy)]
    found = {"auto": best_row(rows)} | ({"teams": best_row(teamed)} if teamed else {})
    found[GRID] = next(row for row in rows if row.method == GRID)
    distinct: dict[Strategy, str] = {}
    for name, row in found.items():
        if (strategy := strategy_of(row)) is not None:
            distinct.setdefault(strategy, name)
    return {name: found[name] for name in distinct.values()}


def measure(cluster: Cluster, model: str, budget: Budget, num_pairs: int) -> dict[str, Any]:
    """Plan, then run all contenders on the testbed."""
    evaluator = Evaluator(capture(workload_of(model)), cluster)
    contenders = best_rows(evaluator, budget)
    plans = {key: plan_from_rows(evaluator, [row]) for key, row in contenders.items()}
    seconds = measured(cluster, plans, Task(model=model, rounds=num_pairs)).seconds
    return {
        "testbed": cluster.name,
        "model": model,
        "budget": str(budget),
        "contenders": {
            key: {
                "method": plan.method,
                "predicted_s": plan.step_time_s,
                "median_s": statistics.median(seconds[key]),
                "seconds": seconds[key],
                "has_teams": has_teams(plan.strategy),
                "num_micro": plan.strategy.num_micro_batches,
                "devices": sorted({d for each in plan.strategy.decisions for d in each.devices}),
            }
            for key, plan in plans.items()
        },
    }


def main() -> None:
    """Measure every testbed and workload."""
    arguments = asked_of(
        __doc__,
        *testbed_options(TESTBEDS, MODELS),
        option("--budget", default="1000e"),
        option("--pairs", type=int, default=10),
    )
    budget = Budget.parse(arguments.budget)
    rows = told(
        measure(cluster, model, budget, arguments.pairs)
        for cluster, model in testbeds_and_models(arguments)
    )
    finish(arguments, {"rows": rows})


if __name__ == "__main__":
    main()
