"""What other device, link and collective models do to plans: planned by both, judged by these.

    git worktree add /tmp/before c7885f5
    python experiments/plans_by_models.py --before /tmp/before --json
    python experiments/plans_by_models.py --before /tmp/before --clusters h100_128,h100_1024

The same search, with as many evaluations, in a process that imports ``heterog`` from ``--before``
and in one that imports this one; then this one's evaluator judges both plans. ``gain`` is the
step of the plan by the models before over that of the plan by these. ``h100_N`` are N H100 in
hosts of eight behind EFA, which models before know as 3200 Gbit/s; other clusters are presets or
files. ``llama_1b:1024`` is a model at a batch of 1024. ``--folder`` keeps plans: a run that was
cut off goes on with those that are missing.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rows import asked_of, geometric_mean, option, progress

from heterog.cluster import Cluster
from heterog.search.plan import load_plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator

_PLANS = """
import json, os, sys
import heterog
from heterog.graph.capture import capture
from heterog.zoo import build
asked = json.loads(sys.argv[1])
assert heterog.__file__.startswith(asked["tree"]), heterog.__file__
for model in asked["models"]:
    paths = {name: f"{asked['folder']}/{model}-{name}.json" for name in asked["clusters"]}
    missing = [name for name in paths if not os.path.exists(paths[name])]
    zoo, _, batch = model.partition(":")
    graph = capture(build(zoo, int(batch) if batch else None)) if missing else None
    for name in missing:
        cluster = heterog.Cluster.load(asked["clusters"][name])
        try:
            found = heterog.plan(graph, cluster, method=asked["method"], budget=asked["budget"])
        except Exception as error:
            print(f"{model} on {name}: {error}", file=sys.stderr)
            continue
        found.save(paths[name])
"""


_NIC_BEFORE, _NIC = "{line_rate: 3200 Gbit/s}", "efa_p5"


def planned(tree: Path, folder: Path, asked: dict[str, Any]) -> None:
    """Write the plans that a tree of this project finds into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = asked | {"folder": str(folder), "tree": str(tree.resolve())}
    subprocess.run(
        [sys.executable, "-c", _PLANS, json.dumps(asked)],
        env=os.environ | {"PYTHONPATH": str(tree.resolve())},
        cwd=tree,  # which comes before it in the path
        check=True,
    )


def files_of(names: list[str], folder: Path, nic: str) -> dict[str, str]:
    """The file or preset of each cluster; those made here go into a folder."""
    found = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        kind, _, number = name.partition("_")
        path = Path(name)
        found[path.stem] = str(path.resolve()) if path.is_file() else name
        if kind == "h100":
            found[name] = str(folder / f"{name}.yaml")
            Path(found[name]).write_text(
                f"schema_version: 1\nname: {name}\nhosts:\n  - {{name: h, count: "
                f"{int(number) // 8}, devices: [{{type: H100, count: 8}}], intra: nvlink4, "
                f"nic: {nic}}}\n",
                encoding="utf-8",
            )
    return found


def judged(folder: Path, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Both plans of each case by the models of this tree."""
    for model in asked["models"]:
        for name, file in asked["clusters"].items():
            row: dict[str, Any] = {"model": model, "cluster": name}
            cluster = Cluster.load(file)
            for tree in ("before", "now"):
                path = folder / tree / f"{model}-{name}.json"
                if not path.is_file():
                    continue
                plan = load_plan(path)
                strategy = replace(plan.strategy, cluster=cluster.fingerprint())
                found = Evaluator(plan.graph, cluster).evaluate(strategy, Order.FIFO)
                row[tree] = found.step_time_s if found.is_ok else None
                row[f"{tree}_promised"] = plan.step_time_s
                row[f"{tree}_by"] = plan.method
            if row.get("before") and row.get("now"):
                row["gain"] = row["before"] / row["now"]
            yield row


def main() -> None:
    """Plan with both and compare."""
    options = asked_of(
        __doc__,
        option("--before", type=Path, required=True, help="a tree of another commit"),
        option("--models", default="gpt2,bert_large_24l,llama_1b,vgg19"),
        option("--clusters", default="mixed_16,mixed_64,h100_128,h100_256,h100_1024"),
        option("--method", default="megatron_grid"),
        option("--budget", default="60e", help="of each search"),
        option("--folder", type=Path, help="plans are kept here"),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = (options.folder or Path(name)).resolve()
        asked = {
            "models": options.models.split(","),
            "method": options.method,
            "budget": options.budget,
        }
        trees = ("before", options.before, _NIC_BEFORE), ("now", Path(__file__).parents[1], _NIC)
        for word, tree, nic in trees:
            asked["clusters"] = files_of(options.clusters.split(","), folder / word, nic)
            planned(tree, folder / word, asked)
        rows = []
        for row in judged(folder, asked):
            rows.append(row)
            progress(f"{row}")
    gains = [row["gain"] for row in rows if "gain" in row]
    if options.json:
        print(json.dumps({"rows": rows, "mean_gain": geometric_mean(gains)}, indent=1))
        return
    print(f"geometric mean {geometric_mean(gains):.3f} over {len(gains)}")


if __name__ == "__main__":
    main()
