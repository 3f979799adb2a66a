"""Planning time and step times on 8 to 1,024 devices of four types.

    python benchmarks/scale.py --json

For every model and size ``heterog plan`` runs as a user would run it, with ``--budget 60s`` for
``auto``, on a graph that was captured before. The row of a run has the seconds of the whole
command, and for every method its evaluations per second and its step time. Then one evaluation of
Llama-3-70B is timed, as one uniform layout on 64 to 1,024 devices of four and of eight types.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.graph.serialize import load_graph
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout
from heterog.strategy.layouts.placed import place_layout

MODELS = {
    "bert_large_24l": "bert_large_24l",
    "llama_8b": "experiments/large_models.py:llama_8b",
    "llama_70b": "experiments/large_models.py:llama_70b",
}
SIZES = (8, 64, 128, 256, 512, 1024)
TYPES = (
    ("H100-80GB", "nvlink_h100", "400 Gbit/s"),
    ("A100-80GB", "nvlink_a100", "200 Gbit/s"),
    ("A100-40GB", "nvlink_a100", "100 Gbit/s"),
    ("V100-32GB", "nvlink_v100", "50 Gbit/s"),
    ("H200-141GB", "nvlink_h100", "400 Gbit/s"),
    ("L40S-48GB", "pcie4", "100 Gbit/s"),
    ("A10-24GB", "pcie4", "50 Gbit/s"),
    ("T4-16GB", "pcie3", "25 Gbit/s"),
)
_HOST = 8  # devices of a full one


def cluster_of(devices: int, types: int) -> str:
    """A cluster file with equal numbers of devices of some types, on hosts of eight."""
    lines = ["schema_version: 1", f"name: {types}_types_{devices}", "hosts:"]
    number = 0
    for kind, link, nic in TYPES[:types]:
        left = devices // types
        while left:
            count = min(left, _HOST)
            lines.append(
                f"  - {{name: h{number}, devices: [{{type: {kind}, count: {count}}}], "
                f"intra: {link}, nic: {{line_rate: {nic}}}}}"
            )
            left, number = left - count, number + 1
    return "\n".join(lines) + "\n"


def planned(graph: Path, folder: Path, model: str, devices: int, budget: str) -> dict[str, Any]:
    """One run of the command."""
    path = folder / f"c{devices}.yaml"
    path.write_text(cluster_of(devices, 4))
    cluster = Cluster.load(path)
    command = [sys.executable, "-m", "heterog.cli", "plan", str(graph)]
    command += ["--cluster", str(path), "--budget", budget, "--json"]
    begin = time.perf_counter()
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {
        "model": model,
        "devices": devices,
        "hosts": cluster.num_hosts,
        "classes": len(set(cluster.host_kind)),
        "seconds": time.perf_counter() - begin,
        "rc": ran.returncode,
    }
    if ran.returncode:
        return row | {"error": ran.stderr.strip().splitlines()[-1:]}
    found = json.loads(ran.stdout)
    methods = [
        {
            "method": each["method"],
            "outcome": each["outcome"],
            "step_time_s": each["step_time_s"],
            "seconds": each["search_seconds"],
            "evaluations_per_s": each["num_evaluations"] / max(each["search_seconds"], 1e-9),
        }
        for each in found["methods"]
    ]
    evaluations = found["num_evaluations"]
    return row | {
        "method": found["method"],
        "step_time_s": found["step_time_s"],
        "evaluations_per_s": evaluations / max(found["search_seconds"], 1e-9),
        "methods": methods,
    }


def evaluated(graph: Path, devices: int, types: int, times: int = 5) -> dict[str, Any]:
    """Seconds of one evaluation of a uniform layout, encoded before."""
    cluster = parse_cluster(cluster_of(devices, types), Path("scale.yaml"))
    evaluator = Evaluator(load_graph(graph), cluster)
    layout = Layout(tp=8, pp=4, dp=devices // 32, num_micro=256 // max(devices // 32, 1))
    choice = evaluator.encode(place_layout(layout, evaluator.graph, cluster).strategy)
    evaluator.evaluate(choice, Order.FIFO)
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        evaluation = evaluator.evaluate(choice, Order.FIFO)
        took.append(time.perf_counter() - begin)
    return {
        "model": "llama_70b",
        "devices": devices,
        "types": types,
        "layout": str(layout),
        "evaluation_s": statistics.median(took),
        "num_tasks": evaluator.num_tasks,
        "step_time_s": evaluation.step_time_s,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--devices", default=",".join(map(str, SIZES)))
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.devices.split(",")]
    rows: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in arguments.models.split(","):
            graph = folder / f"{model}.json"
            command = [sys.executable, "-m", "heterog.cli", "capture", MODELS[model]]
            subprocess.run([*command, "-o", str(graph)], check=True, capture_output=True)
            for size in sizes:
                row = planned(graph, folder, model, size, arguments.budget)
                rows.append(row)
                print(f"{model} on {size}: {row['seconds']:.1f} s, {row.get('method')} "
                      f"{row.get('step_time_s')} {row.get('error', '')}",
                      file=sys.stderr, flush=True)  # fmt: skip
            if model == "llama_70b":
                for types in (4, 8):
                    for size in (64, 256, 1024):
                        evaluations.append(evaluated(graph, size, types))
                        print(evaluations[-1], file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"rows": rows, "evaluations": evaluations}, indent=2))


if __name__ == "__main__":
    main()
