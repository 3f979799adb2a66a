"""What true device models do to plans: planned with data sheets, and judged with device models.

    python experiments/device_model_gain.py --json

Each model is planned twice with the same budget and seed: with the roofline prior, and with the
device models. The referee then judges both plans with the device models.
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np

import heterog
from heterog.cluster.spec import load_cluster
from heterog.cluster.topology import DEVICE_MODELS, ROOFLINE
from heterog.graph.capture import capture
from heterog.simulator.evaluator import Evaluator
from heterog.zoo import build

CLUSTERS = ("paper_8gpu", "a100_v100_16")
MODELS = ("bert_large_24l", "gpt2", "transformer_24l", "resnet50", "vgg19", "inception_v3")


def compared(cluster_name: str, model: str, budget: str) -> dict[str, Any]:
    """One model on one cluster."""
    plain = replace(load_cluster(cluster_name), calibration=ROOFLINE)
    modelled = replace(plain, calibration=DEVICE_MODELS)
    graph = capture(build(model))
    by_sheets = heterog.plan(graph, plain, budget=budget)
    by_models = heterog.plan(graph, modelled, budget=budget)
    judge = Evaluator(graph, modelled)
    old = judge.referee(by_sheets.strategy)
    assert by_models.step_time_s is not None
    return {
        "cluster": cluster_name,
        "model": model,
        "by_sheets_predicted_s": by_sheets.step_time_s,
        "by_sheets_s": old.step_time_s,
        "by_sheets_outcome": str(old.outcome),
        "by_models_s": by_models.step_time_s,
        "gain": old.step_time_s / by_models.step_time_s,
        "methods": [by_sheets.method, by_models.method],
    }


def main() -> None:
    """Compare on every cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budget", default="200e")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for cluster in arguments.clusters.split(","):
        for model in arguments.models.split(","):
            row = compared(cluster, model, arguments.budget)
            rows.append(row)
            print(f"{cluster} {model}: {row['by_sheets_s']:.4f} s planned from sheets (said "
                  f"{row['by_sheets_predicted_s']:.4f}), {row['by_models_s']:.4f} from models: "
                  f"{row['gain']:.2f}x", file=sys.stderr, flush=True)  # fmt: skip
    mean = float(np.exp(np.mean([np.log(row["gain"]) for row in rows])))
    if arguments.json:
        print(json.dumps({"rows": rows, "geometric_mean": mean}, indent=2))
    else:
        print(f"{len(rows)} cases, geometric mean {mean:.3f}x")


if __name__ == "__main__":
    main()
