"""Islands beside the best uniform layout on the mixed clusters, each with the same seconds.

    python experiments/islands_table.py --json
    python experiments/islands_table.py --models bert_large_24l --clusters mixed_64 --budget 60s

For every model and cluster both methods search on their own, and the referee judges what they
found. ``gain`` is the grid's step over that of islands; the last line has the geometric mean.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import heterog.planners.portfolio as portfolio
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.serialize import load_graph
from heterog.planners.planner import Budget, Problem, planner_by_name
from heterog.simulator.evaluator import Evaluator
from heterog.zoo import build

CLUSTERS = ("mixed_16", "mixed_32", "mixed_64", "mixed_128", "mixed_256", "two_sites_32")
METHODS = ("megatron_grid", "islands")


def graph_of(model: str) -> OpGraph:
    """A zoo model, or a captured graph in a file."""
    if Path(model).suffix:
        return load_graph(Path(model))
    return capture(build(model))


def row_of(name: str, graph: OpGraph, cluster: Cluster, budget: str) -> dict[str, Any]:
    """Both methods on one case."""
    row: dict[str, Any] = {"model": name, "cluster": cluster.name}
    for method in METHODS:
        evaluator = Evaluator(graph, cluster)
        evaluator.warm_up()
        problem = Problem(evaluator=evaluator, budget=Budget.parse(budget))
        found = portfolio.run_method(planner_by_name(method), problem)
        row[method] = found.step_time_s
        row[f"{method}_evaluations"] = found.num_evaluations
        row[f"{method}_note"] = found.note
    both = row["megatron_grid"] and row["islands"]
    row["gain"] = row["megatron_grid"] / row["islands"] if both else None
    return row


def main() -> None:
    """Run the cases and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="bert_large_24l,gpt2,transformer_24l,vit_base")
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--budget", default="20s", help="of each method on each case")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for model in options.models.split(","):
        graph = graph_of(model)
        for cluster in options.clusters.split(","):
            row = row_of(graph.name, graph, Cluster.load(cluster), options.budget)
            rows.append(row)
            print(
                f"{row['model']} on {cluster}: {row['megatron_grid']} by the grid, "
                f"{row['islands']} by islands, gain {row['gain']} ({row['islands_note']})",
                file=sys.stderr,
            )
    gains = [row["gain"] for row in rows if row["gain"]]
    mean = math.exp(sum(map(math.log, gains)) / len(gains)) if gains else None
    if options.json:
        print(json.dumps({"rows": rows, "mean_gain": mean}, indent=1))
    elif mean is not None:
        print(f"geometric mean {mean:.3f} over {len(gains)}, {min(gains):.3f} to {max(gains):.3f}")


if __name__ == "__main__":
    main()
