"""What ``auto`` makes of the policy beside the other methods, on pairs that no policy has seen.

    python experiments/auto_agent.py -o now.jsonl
    python experiments/auto_agent.py -o now.jsonl --beside before.jsonl   # of another commit

For every model, cluster and seed: ``auto`` with all methods, then ``agent`` alone. Budgets are in
seconds of this process, so that other work on the machine does not shorten searches. Rows that are
in the file are not made again. The rows of another commit are made by this file with that commit's
package (``PYTHONPATH``).
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

# Registers ``agent`` and ``agent+search``, which ``auto`` asks, too.
from heterog.agents.planners import default_methods
from heterog.agents.sources import captured
from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget, Problem
from heterog.search.judging import run_method
from heterog.search.portfolio import best_row, run_methods
from heterog.search.request import Request, Session
from heterog.simulator.evaluator import Evaluator

MODELS = "xlnet_large_24l,llama_1b,nasnet_large"
CLUSTERS = "mixed_16,mixed_32,mixed_64"
KEY = ("model", "cluster", "seed")


def row_of(graph: OpGraph, cluster: str, seed: int, budget: Budget) -> dict[str, Any]:
    """Steps of ``auto``, of ``agent`` in it and alone, and the answers that ``agent`` gave."""
    where = Cluster.load(cluster)
    rows = run_methods(
        Evaluator(graph, where),
        Request(graph=graph, cluster=where, known=default_methods(), budget=budget, seed=seed),
        Session(clock=time.process_time),
    )
    best = best_row(rows)
    inside = next(row for row in rows if row.method == "agent")
    evaluator = Evaluator(graph, Cluster.load(cluster))
    evaluator.warm_up()
    problem = Problem(evaluator=evaluator, budget=budget, clock=time.process_time)
    agent = default_methods()["agent"]
    agent.prepare(evaluator)
    alone = run_method(agent, problem)
    return {
        "auto_s": best.step_time_s,
        "by": best.method,
        "agent_in_auto_s": inside.step_time_s,
        "agent_in_auto_seconds": inside.search_seconds,
        "agent_in_auto_evaluations": inside.num_evaluations,
        "agent_alone_s": alone.step_time_s,
        "agent_alone_seconds": alone.search_seconds,
    }


def read(path: Path | None) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows of a file by model, cluster and seed."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {tuple(row[name] for name in KEY): row for row in rows}


def ms(seconds: float | None) -> str:
    """Milliseconds with a digit."""
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def main() -> None:
    """Make what is missing, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--clusters", default=CLUSTERS)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--budget", default="20s")
    parser.add_argument("-o", "--rows", type=Path, default=Path("auto_agent.jsonl"))
    parser.add_argument("--beside", type=Path, help="rows of another commit")
    parser.add_argument("--graphs", type=Path, help="folder that keeps captured graphs")
    asked = parser.parse_args()
    for model in asked.models.split(","):
        for cluster in asked.clusters.split(","):
            for seed in map(int, asked.seeds.split(",")):
                key = (model, cluster, seed)
                if key not in read(asked.rows):
                    graph = captured(model, asked.graphs)
                    row = dict(zip(KEY, key, strict=True))
                    row |= row_of(graph, cluster, seed, Budget.parse(asked.budget))
                    with asked.rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    now, before, gains = read(asked.rows), read(asked.beside), []
    print("| model, cluster, seed | auto, by | agent in it | agent alone | auto before | gain |")
    print("|---|---|---|---|---|---|")
    for key, row in now.items():
        then = before.get(key, {}).get("auto_s")
        gains += [then / row["auto_s"]] if then and row["auto_s"] else []
        cells = [f"{ms(row['auto_s'])}, {row['by']}", ms(row["agent_in_auto_s"])]
        cells += [ms(row["agent_alone_s"]), ms(then), f"{gains[-1]:.3f}" if then else "-"]
        print(f"| {', '.join(map(str, key))} | {' | '.join(cells)} |")
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        print(f"\nGeometric mean {mean:.3f} over {len(gains)}, least {min(gains):.3f}.")


if __name__ == "__main__":
    main()
