"""Evaluations per second of a search with several workers, and what it finds with as many.

    python benchmarks/parallel_search.py --json
    python benchmarks/parallel_search.py --workers 1,2,ray:1,ray:2 --seconds 20 --evaluations 400

``per_s`` is what all methods of ``auto`` evaluate in a second of wall time under a budget in
seconds; ``step_time_s`` is the best step with as many evaluations for all workers together. Ray's
workers yield to other processes (``RAY_worker_niceness``, 15), so that other work on the machine
shows in their rows first.
"""

import argparse
import json
import sys
import time
from typing import Any

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget, MethodRow
from heterog.search.portfolio import run_methods
from heterog.search.request import Request, Session
from heterog.simulator.evaluator import Evaluator
from heterog.workers import open_seats
from heterog.zoo import build


def searched(
    graph: OpGraph, cluster: Cluster, workers: str, budget: Budget
) -> tuple[float, list[MethodRow]]:
    """(seconds of the search without starting workers, the rows of all methods)."""
    began_s = 0.0

    def begin(method: str, fraction: float, best_s: float) -> None:
        nonlocal began_s
        if not began_s and not method.startswith(("load", "compile")):
            began_s = time.perf_counter()

    with open_seats(workers) as seats:
        rows = run_methods(
            Evaluator(graph, cluster),
            Request(graph=graph, cluster=cluster, budget=budget),
            Session(seats=seats, progress=begin),
        )
        return time.perf_counter() - began_s, rows


def row_of(graph: OpGraph, cluster: Cluster, workers: str, options: Any) -> dict[str, Any]:
    """One line of the table."""
    seconds, rows = searched(graph, cluster, workers, Budget(seconds=options.seconds))
    num = sum(row.num_evaluations for row in rows)
    equal_s, equal = searched(graph, cluster, workers, Budget(evaluations=options.evaluations))
    return {
        "model": graph.name,
        "cluster": cluster.name,
        "workers": workers,
        "seconds": seconds,
        "evaluations": num,
        "per_s": num / seconds,
        "equal_evaluations": sum(row.num_evaluations for row in equal),
        "equal_seconds": equal_s,
        "step_time_s": min(row.step_time_s for row in equal if row.step_time_s is not None),
    }


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="bert_large_24l,resnet50")
    parser.add_argument("--cluster", default="mixed_16")
    parser.add_argument("--workers", default="1,2,ray:1,ray:2")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--evaluations", type=int, default=600)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cluster, rows = Cluster.load(options.cluster), []
    for model in options.models.split(","):
        graph = capture(build(model))
        for workers in options.workers.split(","):
            rows.append(row_of(graph, cluster, workers, options))
            print(rows[-1], file=sys.stderr)
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
