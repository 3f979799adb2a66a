"""Sailor's plans and ours for OPT-350M, judged by heterog's referee, beside ``heterog plan``.

    python experiments/sailor_referee.py --data DIR --table table.json --json

``table.json`` is what ``sailor_table.py --json`` prints. Plans become strategies on a cluster of
nodes with four GPUs, whose NICs have Sailor's measured rates; the device models price compute, and
memory is that of the lowered program. The model is that of ``published/models.py``: float32, with
attention written out. ``auto`` searches on the same graph and cluster.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from published.models import graph_of
from published.runs import SAILOR_MODELS
from rows import asked_of, finish, option, run, told
from sailor.inputs import Inputs, read_inputs, read_plan
from sailor.strategies import cluster_of, strategy_of
from sailor_table import SETTINGS

import heterog
from heterog.errors import HeterogError
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator

BATCH = 1024


def judged(row: Mapping[str, Any], evaluator: Evaluator) -> dict[str, Any]:
    """A row of the table by the referee; its engine's first-come order, as pipelines run."""
    found = {"setting": row["setting"], "method": row["method"], "sailors_s": row["step_time_s"]}
    begin = time.monotonic()
    try:
        plan = read_plan(row["plan_file"])
        strategy = strategy_of(plan, evaluator.graph, evaluator.cluster)
        result = evaluator.referee(strategy, Order.FIFO)
    except HeterogError as error:
        return found | {"problem": str(error)}
    return found | {
        "referee_s": result.step_time_s,
        "outcome": str(result.outcome),
        "peak_bytes": max(result.peak_memory_bytes),
        "seconds": time.monotonic() - begin,
    }


def planned(setting: str, evaluator: Evaluator, budget: str, seed: int) -> dict[str, Any]:
    """The plan of ``heterog plan`` on the same graph and cluster."""
    begin = time.monotonic()
    found = {"setting": setting, "method": f"heterog plan, auto, {budget}"}
    try:
        plan = heterog.plan(evaluator.graph, evaluator.cluster, budget=budget, seed=seed)
    except HeterogError as error:
        return found | {"problem": str(error)}
    return found | {
        "referee_s": plan.step_time_s,
        "by": plan.method,
        "seconds": time.monotonic() - begin,
    }


def rows_of(
    setting: str, rows: list[dict[str, Any]], inputs: Inputs, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All rows of a setting."""
    cluster = cluster_of(inputs, SETTINGS[setting].num_gpus)
    evaluator = Evaluator(graph_of(SAILOR_MODELS["OPT-350"], BATCH), cluster)
    found = told(judged(row, evaluator) for row in rows)
    if options.budget:
        found += told([planned(setting, evaluator, options.budget, options.seed)])
    return found


def main() -> None:
    """Judge the plans of a table."""
    options = asked_of(
        __doc__,
        option("--data", type=Path, required=True, help="folder of Sailor's inputs"),
        option("--table", type=Path, required=True, help="output of sailor_table.py"),
        option("--only", default="", help="names of settings, separated by semicolons"),
        option("--budget", default="60s", help="of auto; empty leaves it out"),
        option("--seed", type=int, default=0),
    )
    inputs = read_inputs(options.data)
    rows = json.loads(options.table.read_text())["rows"]
    found = []
    for setting in SETTINGS:
        own = [row for row in rows if row["setting"] == setting]
        if own and (not options.only or setting in options.only.split(";")):
            found += rows_of(setting, own, inputs, options)
    finish(options, {"rows": found})


if __name__ == "__main__":
    run(main)
