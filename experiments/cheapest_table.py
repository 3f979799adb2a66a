"""The cheapest plan beside the fastest one: time and money, on three models and three clusters.

    python experiments/cheapest_table.py --budget 8s

Prices are an example of the size of public on-demand lists (USD an hour for each GPU, nothing for
hosts): they are assumptions of this table, not data of the package.
"""

import argparse
from dataclasses import replace

from heterog.cluster import Cluster
from heterog.cluster.prices import HourlyPrices
from heterog.graph.capture import capture_step
from heterog.planners.objective import Aim, Objective
from heterog.planners.plan import Plan, make_plan
from heterog.zoo import load_workload

PRICES = HourlyPrices(
    currency="USD",
    device_hour={"A100-40GB": 2.93, "V100-16GB": 2.48, "P100-16GB": 1.46, "T4": 0.35},
)
MODELS = "vgg19,resnet50,bert_base"
CLUSTERS = "poplar_v100_t4,hap_v100_p100_16,a100_v100_16"
STEPS = 100_000
HALFWAY = 0.5
"""Of the logarithm between the fastest and the cheapest time: the deadline of the third column."""


def priced(name: str) -> Cluster:
    """A preset with prices; a type that has none is an error that names it."""
    cluster = Cluster.load(name)
    known = dict(PRICES.device_hour)
    prices = {
        each.name: next(price for like, price in known.items() if like[:4] == each.name[:4])
        if each.name not in known
        else known[each.name]
        for each in cluster.device_types
    }
    return replace(cluster, prices=replace(PRICES, device_hour=prices))


def cell(plan: Plan) -> str:
    """Hours, money and the number of hosts."""
    if plan.cost is None or plan.cost.total_s is None:
        return plan.outcome
    return (
        f"{plan.cost.total_s / 3600:.1f} h, {plan.cost.total:,.0f} USD, "
        f"{len(plan.cost.hosts)} of {plan.cluster.num_hosts} hosts"
    )


def main() -> None:
    """Print a row for each model and cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="8s")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--clusters", default=CLUSTERS)
    asked = parser.parse_args()
    print("| model | cluster | fastest | cheapest | cheapest before a deadline between |")
    print("| --- | --- | --- | --- | --- |")
    for model in asked.models.split(","):
        graph = capture_step(load_workload(model, None)).graph
        for name in asked.clusters.split(","):
            cluster = priced(name)
            run = Objective(num_steps=STEPS)
            fastest = make_plan(graph, cluster, budget=asked.budget, objective=run)
            cheap = replace(run, aim=Aim.COST)
            cheapest = make_plan(graph, cluster, budget=asked.budget, objective=cheap)
            if fastest.step_time_s is None or cheapest.step_time_s is None:
                print(f"| {model} | {name} | {fastest.outcome} | {cheapest.outcome} | |")
                continue
            ratio = cheapest.step_time_s / fastest.step_time_s
            until_s = STEPS * fastest.step_time_s * ratio**HALFWAY
            between = make_plan(
                graph, cluster, budget=asked.budget, objective=replace(cheap, deadline_s=until_s)
            )
            cells = [cell(fastest), cell(cheapest), f"{until_s / 3600:.1f} h: {cell(between)}"]
            print(f"| {model} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
