"""How much is left to gain at most, and of what is the gap made?

    python experiments/bounds.py --json

Per model: the bound by compute and by the longest path (``simulator.lower_bound``), the bound that
counts launches and waiting (``simulator.sample_path``), the same for strategies without
micro-batches, and the best uniform data parallelism by the referee: it is at most that many times
above what any strategy can reach. Strategies that give ops rules of their own (Megatron, HAP) may
split more than the batch; the last bound holds for them, too.
"""

import argparse
import json
import sys

from search_gain import MODELS

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.planners.compare import compare_methods
from heterog.planners.planner import Budget
from heterog.simulator.lower_bound import lower_bound_s
from heterog.simulator.roofline import Roofline
from heterog.simulator.sample_path import sample_path_s
from heterog.zoo import build


def main() -> None:
    """Bounds of every model on a cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--cluster", default="paper_8gpu")
    parser.add_argument("--method", default="tuned_uniform")
    parser.add_argument("--budget", default="300e", help="of the method")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cluster = Cluster.load(arguments.cluster)
    rows = []
    for model in arguments.models.split(","):
        graph = capture(build(model))
        found = lower_bound_s(graph, cluster, Roofline())
        compared = compare_methods(
            graph, cluster, methods=(arguments.method,), budget=Budget.parse(arguments.budget)
        )
        seconds = next(row.step_time_s for row in compared.rows if row.method == arguments.method)
        row = {
            "model": model,
            "compute_s": found.compute_s,
            "path_s": found.path_s,
            "sample_path_s": sample_path_s(graph, cluster, Roofline()),
            "one_pass_s": sample_path_s(graph, cluster, Roofline(), one_pass=True),
            "sample_path_with_op_rules_s": sample_path_s(
                graph, cluster, Roofline(), with_op_rules=True
            ),
            arguments.method: seconds,
        }
        rows.append(row)
        texts = (f"{k} {v:.4f}" for k, v in row.items() if isinstance(v, float))
        print(f"{model:16} {'  '.join(texts)}", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"cluster": cluster.name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
