"""How do our simulated baselines compare with table 1 of the HeteroG paper (CoNEXT'20)?

    python experiments/paper_tables.py --budget 20s --json
    python experiments/paper_tables.py --paper paper_tables.json   # with the paper's numbers

The paper measured real machines; we simulate the same methods on its cluster, once at 0.7 of the
NIC's line rate and once at 0.35, which is close to what its network must have delivered.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.planners.compare import compare_methods
from heterog.planners.planner import Budget
from heterog.zoo import build

# Our model and the paper's row for it.
MODELS = {
    "vgg19": "VGG-19",
    "resnet200": "ResNet200",
    "inception_v3": "Inception_v3",
    "mobilenet_v2": "MobileNet_v2",
    "nasnet_large": "NasNet",
    "transformer_6l": "Transformer (6 layers)",
    "bert_large_24l": "Bert-large (24 layers)",
    "xlnet_large_24l": "XlNet-large (24 layers)",
}
CLUSTERS = ("paper_8gpu_net035", "paper_8gpu")
METHODS = ("ev_ps", "ev_ar", "cp_ps", "cp_ar", "local_search")
PAPER_COLUMN = {
    "ev_ps": "EV-PS",
    "ev_ar": "EV-AR",
    "cp_ps": "CP-PS",
    "cp_ar": "CP-AR",
    "local_search": "HeteroG",
}


def paper_seconds(path: Path | None) -> dict[tuple[str, str], float]:
    """Seconds of table 1 by (our model, our method); empty without the file."""
    if path is None:
        return {}
    rows = json.loads(path.read_text())["table1_8gpu_s"]
    found = {}
    for model, name in MODELS.items():
        row = next(row for row in rows if row["model"] == name and row["EV-PS"] is not None)
        for method, column in PAPER_COLUMN.items():
            found[model, method] = float(row[column])
    return found


def measure(models: list[str], budget: Budget, seed: int) -> list[dict[str, Any]]:
    """One row per model, cluster and method."""
    rows: list[dict[str, Any]] = []
    for model in models:
        graph = capture(build(model))
        for cluster in CLUSTERS:
            comparison = compare_methods(
                graph, Cluster.load(cluster), METHODS, budget=budget, seed=seed
            )
            rows += comparison.to_dicts()
    return rows


def main() -> None:
    """Print a table per cluster, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--paper", type=Path, help="the paper's tables as JSON")
    arguments = parser.parse_args()
    rows = measure(arguments.models.split(","), Budget.parse(arguments.budget), arguments.seed)
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    paper = paper_seconds(arguments.paper)
    for cluster in CLUSTERS:
        print(f"\n{cluster} (seconds per step; in brackets the paper's; OOM: out of memory)\n")
        print("| model | " + " | ".join(METHODS) + " | bound |")
        print("|---" * (len(METHODS) + 2) + "|")
        for model in arguments.models.split(","):
            cells = []
            bound = 0.0
            for row in rows:
                if row["model"] == model and row["cluster"] == cluster:
                    seconds = row["step_time_s"]
                    bound = row["lower_bound_s"]
                    text = "OOM" if seconds is None else f"{seconds:.3f}"
                    theirs = paper.get((model, row["method"]))
                    cells.append(f"{text} ({theirs:.3f})" if theirs else text)
            print(f"| {model} | " + " | ".join(cells) + f" | {bound:.3f} |")


if __name__ == "__main__":
    main()
