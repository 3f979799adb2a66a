"""How good is a policy on models and clusters that it has not seen?

    python experiments/evaluate_cluster.py --policy heldout --budget 300s --json held_out.json

By default the held-out models on the held-out clusters. For each pair: the best of 1, 16 and 64
draws, how many draws do not fit, fine-tuning, and ``agent+search``, over the best search without
the policy; and beside ``local_search`` and ``two_segment`` at small budgets, several seeds.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from heterog.agents.checkpoint import load_checkpoint
from heterog.agents.evaluation import evaluate_policy, summary
from heterog.agents.planners import AgentSearch, propose
from heterog.agents.shipped import HELD_OUT_CLUSTERS, HELD_OUT_MODELS
from heterog.agents.sources import captured
from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.planners.planner import Budget, Planner, Task, planner_by_name
from heterog.planners.portfolio import run_method
from heterog.simulator.evaluator import Evaluator


def paired(
    policy: str, graph: OpGraph, cluster: Cluster, budgets: list[str], seeds: int
) -> list[dict[str, Any]]:
    """``local_search`` and ``agent+search`` at equal evaluations, each on its own."""
    rows = []
    searches: list[Planner] = [planner_by_name("local_search"), AgentSearch(policy)]
    evaluator = Evaluator(graph, cluster)
    for budget in budgets:
        for seed in range(seeds):
            for planner in searches:
                row = run_method(
                    planner,
                    Task(evaluator=evaluator, budget=Budget.parse(budget), seed=seed),
                )
                rows.append(
                    {
                        "model": graph.name,
                        "cluster": cluster.name,
                        "method": planner.name,
                        "budget": budget,
                        "seed": seed,
                        "outcome": row.outcome,
                        "step_time_s": row.step_time_s,
                    }
                )
    return rows


def geometric_mean(values: list[float | None]) -> float:
    """Of those that there are."""
    logs = [math.log(value) for value in values if value is not None]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def main() -> None:
    """Evaluate and print one row per pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="heldout")
    parser.add_argument("--models", default=",".join(HELD_OUT_MODELS))
    parser.add_argument("--clusters", default=",".join(HELD_OUT_CLUSTERS))
    parser.add_argument("--budget", default="300s")
    parser.add_argument("--finetune", default="")
    parser.add_argument("--paired", default="", help="budgets of the paired table: 200e,600e")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    checkpoint = load_checkpoint(arguments.policy)
    document: dict[str, Any] = {"policy": arguments.policy, "rows": [], "paired": []}
    ratios: dict[str, list[float | None]] = {}
    for model in arguments.models.split(","):
        graph = captured(model, arguments.graphs)
        for name in arguments.clusters.split(","):
            cluster = Cluster.load(name)
            found = evaluate_policy(
                arguments.policy,
                checkpoint,
                graph,
                cluster,
                budget=Budget.parse(arguments.budget),
                finetune=Budget.parse(arguments.finetune) if arguments.finetune else None,
            )
            task = Task(evaluator=Evaluator(graph, cluster), budget=Budget(evaluations=10_000))
            too_large = propose(task, arguments.policy).out_of_memory
            row = summary(found.rows) | {"out_of_memory": too_large}
            row["agent_seconds"] = next(
                each.search_seconds for each in found.rows if each.method == "agent"
            )
            for key, value in row.items():
                ratios.setdefault(key, []).append(value)
            document["rows"] += found.to_dicts()
            shown = "  ".join(
                f"{key} {'-' if value is None else f'{value:.3f}'}" for key, value in row.items()
            )
            print(f"{model:16} {name:18} {shown}", flush=True)
            if arguments.paired:
                budgets = arguments.paired.split(",")
                document["paired"] += paired(
                    arguments.policy, graph, cluster, budgets, arguments.seeds
                )
    for key in ("agent_greedy", "agent_16", "agent", "agent_finetuned", "agent+search"):
        if key in ratios:
            print(f"{key}: geometric mean {geometric_mean(ratios[key]):.3f} of the best search")
    for budget in arguments.paired.split(",") if arguments.paired else []:
        rows = [row for row in document["paired"] if row["budget"] == budget]
        plain = [row["step_time_s"] for row in rows if row["method"] == "local_search"]
        led = [row["step_time_s"] for row in rows if row["method"] != "local_search"]
        both = [a / b for a, b in zip(led, plain, strict=True) if a is not None and b is not None]
        wins = sum(value < 0.995 for value in both), sum(value > 1.005 for value in both)
        print(
            f"{budget}: agent+search over local_search {geometric_mean([*both]):.4f}, "
            f"{wins[0]} better and {wins[1]} worse by more than 0.5 % of {len(both)}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1))
        print(f"rows: {arguments.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
