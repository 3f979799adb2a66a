"""Does ``auto`` find better plans with ``pipette`` and ``dedication``, in the same time?

    python experiments/dedication_auto.py --json

Eight hosts of two GPUs with rates between them drawn at random (lognormal around 4 GB/s, every
tenth pair ten times as slow), alike and mixed. ``auto`` is run with the two methods and without
them, on the same seconds and seed; the referee judges. Times of a search depend on the machine,
so that small differences between two runs are chance.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from heterog.cluster import Cluster, PairLimit
from heterog.cluster.spec import parse_cluster
from heterog.graph.capture import capture
from heterog.planners.planner import Budget
from heterog.planners.portfolio import best_row, run_methods
from heterog.simulator.evaluator import Evaluator
from heterog.zoo import build

MODELS = (("gpt2", 32), ("bert_large_24l", 64), ("resnet50", 256))
CLUSTERS = {"alike": ("V100-16GB", "V100-16GB"), "mixed": ("A100-40GB", "V100-16GB")}
NEW = ("pipette", "dedication")
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


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--seeds", type=int, default=1, help="matrices for each model and cluster")
    arguments = parser.parse_args()
    rows = []
    for model, batch_size in MODELS:
        graph = capture(build(model, batch_size))
        for name, kinds in CLUSTERS.items():
            for seed in range(arguments.seeds):
                row: dict[str, object] = {"model": model, "cluster": name, "seed": seed}
                cluster = cluster_of(kinds, seed)
                for said, without in (("with", ()), ("without", NEW)):
                    found = run_methods(
                        Evaluator(graph, cluster),
                        ["auto"],
                        budget=Budget.parse(arguments.budget),
                        seed=seed,
                        without=without,
                    )
                    best = best_row(found)
                    row[f"{said}_s"], row[f"{said}_method"] = best.step_time_s, best.method
                    for each in found:
                        if each.method in NEW:
                            row[f"{each.method}_s"] = each.step_time_s
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
