"""How much does a cluster train with a background job, against data parallelism with one task?

    python experiments/deeppool_multiplex.py [--profiles DIR] [--json]

The question of DeepPool (Park et al., MLSys 2022), who report 1.2 to 2.3 times the throughput on
eight A100. Foreground: a model at a small global batch, planned by the burst-parallel program
(corrected mode) under several amplification limits. Background: a replica of the same model on
every GPU, with a batch of its own, so that samples of both count alike; it may lengthen the
foreground's step by a tenth. Throughput is samples per second of both together, over those of
data parallelism with the foreground alone.

With ``--profiles``, times are DeepPool's own measurements of layers on an A100; else, and besides,
the step is simulated op by op on clusters of this project.

Assumptions: a GPU runs one op at a time, so nothing is gained from sharing its multiprocessors;
switching is free; the background sends nothing; GPUs are busy during an all-reduce (in the
profiles' table; op by op they may compute); the plan with the highest throughput counts.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from deeppool_costs import Profile, ProfiledCosts, load_model
from deeppool_models import Layer
from rows import progress, script_parser

from heterog.cli.common import load_model_graph
from heterog.cluster import Cluster
from heterog.errors import HeterogError
from heterog.graph.op_graph import FloatArray
from heterog.methods.deeppool import BurstPlan, Chain, fork_join, layers_of, search
from heterog.methods.deeppool.planner import GroupCosts, plan_places
from heterog.methods.planner import Budget
from heterog.search.background import DEFAULT_SLOW_DOWN, best_allowance, plan_background
from heterog.search.portfolio import best_row, run_methods
from heterog.search.request import Request
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.multiplex import Foreground, make_foreground
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES

LIMITS = (math.inf, 5.0, 2.5, 2.0, 1.5)
PROFILED = (("vgg", 32), ("wrn", 32), ("inception", 32))
GPUS = (2, 4, 8)
SIMULATED = (
    ("vgg19", 32, 8, "homogeneous_8xa100"),
    ("resnet50", 32, 8, "homogeneous_8xa100"),
    ("vgg19", 32, 8, "paper_8gpu"),
    ("bert_base", 64, 8, "paper_8gpu"),
)
"""(model, global batch, background's batch, cluster)"""
BACKGROUND_BATCH = 8
"""Of the artifact's example; profiles have 8 samples for all three models."""
BYTES_PER_US = 2.66e5
LATENCY_US = 240.0


def profiled_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """One row per model, number of GPUs and limit."""
    for model, batch in PROFILED:
        layers, profile = load_model(folder, model)
        chain = fork_join([layer.previous for layer in layers])
        alone_costs = _costs(layers, profile, BACKGROUND_BATCH, 1, is_baseline=False)
        ops = _ops(alone_costs, len(layers))
        for num_gpus in GPUS:
            baseline = _costs(layers, profile, batch, num_gpus, is_baseline=True)
            even = search(baseline, chain, limit=math.inf, num_devices=num_gpus, fork=False)
            single = batch / even.time
            costs = _costs(layers, profile, batch, num_gpus, is_baseline=False)
            for limit in LIMITS:
                plan = search(costs, chain, limit=limit, num_devices=num_gpus)
                foreground = foreground_of_places(costs, chain, plan, num_gpus)
                _, both = best_allowance(foreground, [ops] * num_gpus, DEFAULT_SLOW_DOWN)
                done = float(both.ops.sum()) / len(ops) * BACKGROUND_BATCH
                total = (batch + done) / both.step_seconds
                yield {
                    "source": "measured A100 layers",
                    "model": model,
                    "cluster": f"{num_gpus} A100",
                    "batch": batch,
                    "limit": limit,
                    "single_task_step_s": even.time / 1e6,
                    "alone_step_s": foreground.step_seconds / 1e6,
                    "step_s": both.step_seconds / 1e6,
                    "slow_down": both.step_seconds / foreground.step_seconds,
                    "background_samples_per_s": done / both.step_seconds * 1e6,
                    "throughput_ratio": total / single,
                }


def _costs(
    layers: list[Layer], profile: Profile, batch: int, num_gpus: int, *, is_baseline: bool
) -> ProfiledCosts:
    return ProfiledCosts(
        layers,
        profile,
        batch=batch,
        num_devices=num_gpus,
        bytes_per_us=BYTES_PER_US,
        latency_us=LATENCY_US,
        is_baseline=is_baseline,
        faithful=False,
    )


def _ops(costs: ProfiledCosts, num_layers: int) -> FloatArray:
    """Microseconds of the layers of one step on one GPU, forward and then backward."""
    whole = np.array([costs.compute(layer, 1) for layer in range(num_layers)])
    share = np.array([costs.forward_share(layer, 1) for layer in range(num_layers)])
    ops: FloatArray = np.concatenate([whole * share, (whole * (1.0 - share))[::-1]])
    return ops[ops > 0]


def foreground_of_places(
    costs: ProfiledCosts, chain: Chain, plan: BurstPlan, num_devices: int
) -> Foreground:
    """The step of a plan: layers forward and backward, transfers between them, in its order."""
    device: list[int] = []
    start: list[float] = []
    finish: list[float] = []
    waits: list[list[int]] = []
    free = [0.0] * num_devices

    def add(own: int, seconds: float, needed: list[int]) -> int:
        begin = max([finish[each] for each in needed] + ([free[own]] if own >= 0 else [0.0]))
        device.append(own)
        start.append(begin)
        finish.append(begin + seconds)
        waits.append(needed)
        if own >= 0:
            free[own] = finish[-1]
        return len(device) - 1

    def layer_tasks(layer: int, seconds: float, sources: list[tuple[int, list[int]]]) -> list[int]:
        needed: list[int] = []
        for source, done in sources:
            low, high = min(source, layer), max(source, layer)
            moved = costs.transfer(low, plan.places[low], high, plan.places[high]) / 2.0
            needed += [add(-1, moved, done)] if moved > 0 else done
        first, width = plan.places[layer]
        return [add(own, seconds, needed) for own in range(first, first + width)]

    order = list(layers_of(chain))
    readers: dict[int, list[int]] = {layer: [] for layer in order}
    for layer in order:
        for source in costs.layers[layer].previous:
            readers[source].append(layer)
    forward: dict[int, list[int]] = {}
    for layer in order:
        width = plan.places[layer][1]
        seconds = costs.compute(layer, width) * costs.forward_share(layer, width)
        sources = [(source, forward[source]) for source in costs.layers[layer].previous]
        forward[layer] = layer_tasks(layer, seconds, sources)
    backward: dict[int, list[int]] = {}
    for layer in reversed(order):
        width = plan.places[layer][1]
        seconds = costs.compute(layer, width) * (1.0 - costs.forward_share(layer, width))
        seconds += costs.synchronise(layer, width)
        sources = [(reader, backward[reader]) for reader in readers[layer]]
        sources = sources or [(layer, forward[layer])]
        backward[layer] = layer_tasks(layer, seconds, sources)
    return make_foreground(
        np.array(device), np.array(start), np.array(finish), waits, num_devices=num_devices
    )


def simulated_rows() -> Iterator[dict[str, Any]]:
    """One row per case and limit, simulated op by op."""
    for model, batch, background_batch, cluster_name in SIMULATED:
        cluster = Cluster.load(cluster_name)
        graph = load_model_graph(model, batch)
        background = load_model_graph(model, background_batch)
        evaluator = Evaluator(graph, cluster)
        baselines = ["ev_ps", "ev_ar", "cp_ps", "cp_ar", "ddp"]
        single = best_row(
            run_methods(
                evaluator,
                Request(
                    graph=evaluator.graph,
                    cluster=evaluator.cluster,
                    methods=tuple(baselines),
                    budget=Budget(evaluations=1),
                ),
            )
        )
        if single.step_time_s is None:
            continue
        costs = GroupCosts(evaluator)
        for limit in LIMITS:
            places = plan_places(costs, limit, 0.5, fork=False).places
            strategy = costs.strategy(places, DEFAULT_BUCKET_BYTES, True)
            order = min(Order, key=lambda each: evaluator.referee(strategy, each).preference)
            planned = plan_background(evaluator, strategy, order, background)
            total = batch / planned.step_time_s + planned.total_samples_per_s
            yield {
                "source": "simulated ops",
                "model": model,
                "cluster": cluster_name,
                "batch": batch,
                "limit": limit,
                "single_task": single.method,
                "single_task_step_s": single.step_time_s,
                "alone_step_s": planned.step_time_alone_s,
                "step_s": planned.step_time_s,
                "slow_down": planned.slow_down,
                "background_samples_per_s": planned.total_samples_per_s,
                "throughput_ratio": total / (batch / single.step_time_s),
            }


def best_of_cases(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The row with the highest throughput of each case."""
    best: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["source"], row["model"], row["cluster"])
        if key not in best or row["throughput_ratio"] > best[key]["throughput_ratio"]:
            best[key] = row
    return list(best.values())


def main() -> int:
    """Print the table."""
    parser = script_parser(__doc__)
    parser.add_argument("--profiles", type=Path, help="folder of DeepPool's *.prof files")
    parser.add_argument("--no-simulation", action="store_true", help="profiles only")
    arguments = parser.parse_args()
    try:
        rows = list(profiled_rows(arguments.profiles)) if arguments.profiles else []
        rows += [] if arguments.no_simulation else list(simulated_rows())
    except HeterogError as error:
        progress(f"error: {error}")
        return 2
    chosen = best_of_cases(rows)
    for row in rows:
        row["is_best"] = row in chosen
        row["limit"] = None if math.isinf(row["limit"]) else row["limit"]
    if arguments.json:
        print(json.dumps({"paper": [1.2, 2.3], "rows": rows}, indent=1))
        return 0
    print("ms per step: data parallelism alone, planned alone, planned with background;")
    print("throughput of both jobs over data parallelism alone (paper: 1.2 to 2.3), * the best\n")
    for row in rows:
        limit = "none" if row["limit"] is None else f"{row['limit']:g}"
        steps = [row[key] * 1e3 for key in ("single_task_step_s", "alone_step_s", "step_s")]
        print(
            f"{row['model']:10} {row['cluster']:18} limit {limit:4}"
            f" {steps[0]:8.2f} {steps[1]:8.2f} {steps[2]:8.2f}   {row['throughput_ratio']:.2f}"
            f"{' *' if row['is_best'] else ''}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
