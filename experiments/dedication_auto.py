"""Does ``auto`` find better plans with ``pipette`` and ``dedication``, in the same time?

    python experiments/dedication_auto.py --json

Eight hosts of two GPUs with rates between them drawn at random (lognormal around 4 GB/s, every
tenth pair ten times as slow), alike and mixed. ``auto`` is run with the two methods and without
them, on the same seconds and seed; the referee judges. Times of a search depend on the machine,
so that small differences between two runs are chance. With ``--grid``, ``pipette`` alone stands
beside ``megatron_grid``, on a budget in evaluations, which can be had again.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from rows import finish, progress, script_parser

from heterog.cluster import Cluster, PairLimit
from heterog.cluster.spec import parse_cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget, Problem
from heterog.methods.registry import built_in_methods
from heterog.search.judging import run_method
from heterog.search.portfolio import best_row, run_methods
from heterog.search.request import Request
from heterog.simulator.evaluator import Evaluator
from heterog.zoo import build

MODELS = (("gpt2", 32), ("bert_large_24l", 64), ("resnet50", 256))
CLUSTERS = {"alike": ("V100-16GB", "V100-16GB"), "mixed": ("A100-40GB", "V100-16GB")}
NEW = ("pipette", "dedication")
EVALUATIONS = 60
NUM_HOSTS = 8
MEAN_RATE, SPREAD, SLOW_PART, SLOWED = 4e9, 0.2, 0.1, 10.0
"""Bytes per second, standard deviation of the logarithm, part of pairs, how much slower."""


def cluster_of(kinds: tuple[str, str], seed: int) -> Cluster:
    """Hosts of two kinds in turns, with a random matrix."""
    text = "schema_version: 1\nname: drawn\nefficiency: 1.0\nhosts:\n"
    for number in range(NUM_HOSTS):
        text += (
            f"  - {{name: h{number}, devices: [{{type: {kinds[number % 2]}, count: 2}}], "
            "intra: nvlink_v100, nic: {line_rate: 100 Gbit/s}}\n"
        )
    rng = np.random.default_rng(seed)
    pairs = []
    for i in range(NUM_HOSTS):
        for j in range(i):
            slower = SLOWED if rng.random() < SLOW_PART else 1.0
            for source, target in ((i, j), (j, i)):
                rate = MEAN_RATE * float(np.exp(rng.normal(0.0, SPREAD))) / slower
                pairs.append(
                    PairLimit(sources=(source,), targets=(target,), bandwidth_bytes_per_s=rate)
                )
    return replace(parse_cluster(text, Path("drawn.yaml")), pairs=tuple(pairs))


def both(graph: OpGraph, cluster: Cluster, budget: Budget, seed: int) -> dict[str, object]:
    """``auto`` with the two methods and without them."""
    row: dict[str, object] = {}
    for said, without in (("with", ()), ("without", NEW)):
        evaluator = Evaluator(graph, cluster)
        found = run_methods(
            evaluator,
            Request(
                graph=evaluator.graph,
                cluster=evaluator.cluster,
                methods=("auto",),
                budget=budget,
                seed=seed,
            ),
            without=without,
        )
        best = best_row(found)
        row[f"{said}_s"], row[f"{said}_method"] = best.step_time_s, best.method
        row |= {f"{each.method}_s": each.step_time_s for each in found if each.method in NEW}
    return row


def beside_grid(graph: OpGraph, cluster: Cluster, seed: int) -> dict[str, object]:
    """``pipette`` and ``megatron_grid``, each on at most ``EVALUATIONS``."""
    row: dict[str, object] = {}
    for method in ("pipette", "megatron_grid"):
        problem = Problem(
            evaluator=Evaluator(graph, cluster), budget=Budget(evaluations=EVALUATIONS), seed=seed
        )
        found = run_method(built_in_methods()[method], problem)
        row[f"{method}_s"] = found.step_time_s
        row[f"{method}_evaluations"] = found.num_evaluations
    return row


def main() -> None:
    """Print the rows."""
    parser = script_parser(__doc__)
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--seeds", type=int, default=1, help="matrices for each model and cluster")
    parser.add_argument("--grid", action="store_true", help="pipette beside megatron_grid instead")
    arguments = parser.parse_args()
    rows = []
    for model, batch_size in MODELS:
        graph = capture(build(model, batch_size))
        for name, kinds in CLUSTERS.items():
            for seed in range(arguments.seeds):
                cluster = cluster_of(kinds, seed)
                if arguments.grid:
                    found = beside_grid(graph, cluster, seed)
                else:
                    found = both(graph, cluster, Budget.parse(arguments.budget), seed)
                rows.append({"model": model, "cluster": name, "seed": seed} | found)
                progress(json.dumps(rows[-1]))
    finish(arguments, {"rows": rows})


if __name__ == "__main__":
    main()
