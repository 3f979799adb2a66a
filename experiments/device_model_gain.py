"""What true device models do to plans: planned with data sheets, and judged with device models.

    python experiments/device_model_gain.py --save gains.json --json

Each model is planned twice with the same budget and seed: with the roofline prior, and with the
device models. The referee then judges both plans with the device models. Cases that are in the
file of ``--save`` already are not planned again, so that a run may be stopped and go on later;
``--cpu-seconds`` counts budgets in seconds of this process, so that other work on the machine does
not shorten searches. Without ``--json`` the rows are a table in Markdown.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mixed_table import CLUSTERS, Setting, asked

from heterog.cluster.spec import load_cluster
from heterog.cluster.topology import DEVICE_MODELS, ROOFLINE
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.planners.planner import Budget
from heterog.planners.registry import AUTO
from heterog.simulator.evaluator import Evaluator
from heterog.zoo import build

MODELS = (
    "bert_large_24l", "bert_base", "gpt2", "transformer_24l", "vit_base", "llama_1b", "bert_moe",
    "resnet50", "vgg19", "inception_v3",
)  # fmt: skip


def compared(cluster_name: str, graph: OpGraph, setting: Setting) -> dict[str, Any]:
    """One model on one cluster.

    Where no plan from sheets fits by the judge, there is no gain to state: it is infinite.
    """
    plain = replace(load_cluster(cluster_name), calibration=ROOFLINE)
    modelled = replace(plain, calibration=DEVICE_MODELS)
    by_sheets = asked(AUTO, setting, graph, plain)
    by_models = asked(AUTO, setting, graph, modelled)
    assert by_sheets.candidate is not None
    assert by_models.step_time_s is not None
    old = Evaluator(graph, modelled).referee(by_sheets.candidate.strategy)
    return {
        "by_sheets_predicted_s": by_sheets.step_time_s,
        "by_sheets_s": old.step_time_s if old.is_ok else None,
        "by_sheets_outcome": str(old.outcome),
        "by_models_s": by_models.step_time_s,
        "gain": old.step_time_s / by_models.step_time_s if old.is_ok else None,
        "methods": [by_sheets.method, by_models.method],
    }


def geometric_mean(rows: Sequence[dict[str, Any]]) -> float:
    """Of the gains of rows that have one; not a number if none has."""
    gains = [row["gain"] for row in rows if row["gain"] is not None]
    return float(np.exp(np.mean(np.log(gains)))) if gains else math.nan


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows in Markdown, in milliseconds."""
    lines = [
        "| model, cluster | from sheets: said | judged | from device models | gain | methods |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        judged = "does not fit" if row["gain"] is None else f"{1e3 * row['by_sheets_s']:.1f}"
        gain = "" if row["gain"] is None else f"{row['gain']:.2f}"
        lines.append(
            f"| {row['model']}, {row['cluster']} | {1e3 * row['by_sheets_predicted_s']:.1f} "
            f"| {judged} | {1e3 * row['by_models_s']:.1f} | {gain} | {', '.join(row['methods'])} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Compare on every cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budget", default="20s", help="of each of both searches")
    parser.add_argument(
        "--cpu-seconds", action="store_true", help="budgets in this process's time"
    )
    parser.add_argument("--save", type=Path, help="file that keeps rows between runs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    saved: Path | None = arguments.save
    rows: list[dict[str, Any]] = []
    if saved is not None and saved.is_file():
        rows = json.loads(saved.read_text())["rows"]
    setting = Setting(
        budget=Budget.parse(arguments.budget),
        pair=(AUTO, AUTO),
        with_row=True,
        clock=time.process_time if arguments.cpu_seconds else time.perf_counter,
    )
    done = {(row["cluster"], row["model"], row["budget"]) for row in rows}
    for model in arguments.models.split(","):
        clusters = [
            name
            for name in arguments.clusters.split(",")
            if (name, model, arguments.budget) not in done
        ]
        graph = capture(build(model)) if clusters else None
        for cluster in clusters:
            assert graph is not None
            row = {"cluster": cluster, "model": model, "budget": arguments.budget}
            row |= compared(cluster, graph, setting)
            rows.append(row)
            print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)
            if saved is not None:
                saved.write_text(json.dumps({"rows": rows}, indent=2))
    mean = geometric_mean(rows)
    if arguments.json:
        print(json.dumps({"rows": rows, "geometric_mean": mean}, indent=2))
    else:
        print(f"{table(rows)}\n\n{len(rows)} cases, geometric mean {mean:.3f}x")


if __name__ == "__main__":
    main()
