"""How much does Poplar gain over even ZeRO, at each stage, on unequal devices?

    python experiments/poplar_table.py --json

Predicted by the referee. The paper reports 1.02 to 3.92 times the throughput of other systems on
clusters of these kinds of devices, with 2 million tokens per step; here the baseline is even ZeRO
of the same stage with the fewest micro-steps that fit, and the batch is stated in each row.
"""

import argparse
import json
import sys
from functools import cache

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.planners.judging import run_method
from heterog.planners.planner import Budget, MethodRow, Planner, Problem
from heterog.planners.poplar import STAGES, EvenZero, Poplar
from heterog.simulator.evaluator import Evaluator
from heterog.zoo import build

PAPER = (1.02, 3.92)
CLUSTERS = ("a100_v100_16", "poplar_v100_t4", "poplar_a800_v100s")
CASES = (("bert_large_24l", 256), ("llama_1b", 128))


@cache
def graph_of(model: str, batch_size: int) -> OpGraph:
    """A captured step."""
    return capture(build(model, batch_size))


def rows_of(
    model: str, batch_size: int, cluster: str, evaluations: int
) -> list[dict[str, object]]:
    """Poplar and even ZeRO at every stage."""
    evaluator = Evaluator(graph_of(model, batch_size), Cluster.load(cluster))
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=evaluations))

    def judged(planner: Planner) -> MethodRow:
        return run_method(planner, problem)

    rows: list[dict[str, object]] = []
    for stage in STAGES:
        ours, even = judged(Poplar(stage)), judged(EvenZero(stage))
        gain = None
        if ours.step_time_s and even.step_time_s:
            gain = even.step_time_s / ours.step_time_s
        strategy = ours.candidate.strategy if ours.candidate else None
        rows.append(
            {
                "model": model,
                "batch_size": batch_size,
                "cluster": cluster,
                "zero_stage": stage,
                "even_step_time_s": even.step_time_s,
                "even_outcome": even.outcome,
                "poplar_step_time_s": ours.step_time_s,
                "poplar_outcome": ours.outcome,
                "gain": gain,
                "samples": strategy.decisions[0].shares if strategy else (),
                "slices": strategy.decisions[0].slices if strategy else (),
                "num_micro": strategy.num_micro_batches if strategy else 0,
                "num_evaluations": ours.num_evaluations,
                "search_seconds": ours.search_seconds,
            }
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default=",".join(model for model, _ in CASES))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--evaluations", type=int, default=40)
    arguments = parser.parse_args()
    rows = []
    for model, batch_size in CASES:
        for cluster in arguments.clusters.split(","):
            if model in arguments.models.split(","):
                print(f"{model}, batch {batch_size}, {cluster}", file=sys.stderr)
                rows += rows_of(model, batch_size, cluster, arguments.evaluations)
    if arguments.json:
        print(json.dumps({"paper_gain": PAPER, "rows": rows}, indent=2))
        return
    print(f"{'model':15} {'cluster':18} stage   even s  poplar s   gain  samples per device")
    for row in rows:
        seconds = [
            f"{row[key]:8.3f}" if row[key] else f"{str(row[outcome])[:8]:>8}"
            for key, outcome in (
                ("even_step_time_s", "even_outcome"),
                ("poplar_step_time_s", "poplar_outcome"),
            )
        ]
        gain = f"{row['gain']:6.2f}" if row["gain"] else "     -"
        print(
            f"{row['model']:15} {row['cluster']:18} {row['zero_stage']:5} {' '.join(seconds)} "
            f"{gain}  {row['samples']} in {row['num_micro']}"
        )
    print(f"paper: {PAPER[0]} to {PAPER[1]}")


if __name__ == "__main__":
    main()
