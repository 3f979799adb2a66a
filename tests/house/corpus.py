"""Answers that a move of code may not change.

    python -m tests.house.corpus record corpus.json
    python -m tests.house.corpus compare corpus.json

200 random strategies (program hash, step time, peaks, by engine and referee), 20 plans with
budgets in evaluations, 10 runs of five steps on three ranks. Everything is compared bit by bit,
so record and compare on the same machine with the same packages.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

from heterog import api
from heterog.cluster import Cluster
from heterog.errors import StrategyError
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.serialize import strategy_to_dict
from heterog.strategy.strategy import Strategy
from heterog.zoo import load_workload
from tests.simulator.builders import (
    random_strategy,
    with_random_slice_groups,
    with_random_teams,
)

Answers = dict[str, object]

STRATEGIES = (
    ("mobilenet_v2", "paper_8gpu"),
    ("transformer_6l", "paper_12gpu"),
    ("bert_base", "mixed_16"),
    ("bert_moe", "rtx_mixed"),
)
NUM_STRATEGIES = 50
"""Of each of the four pairs."""
PLANNED = (("mobilenet_v2", "paper_8gpu"), ("bert_base", "mixed_16"))
METHODS = (
    *("auto", "cp_ar", "tuned_uniform", "two_segment", "pipeline", "local_search"),
    *("megatron_grid", "islands", "hap", "agent"),
)
RUNS = ("ev_ar", "ev_ps", "cp_ar", "cp_ps", "ddp", "model_parallel", "pipeline", "local_search")
RUNS_OF_AGENT = ("agent", "auto")
BUDGET = "60e"
CLUSTER = """
schema_version: 1
name: corpus
hosts:
  - {name: a, devices: [{type: CPU, count: 2}], intra: pcie4, nic: {line_rate: 10 Gbit/s}}
  - {name: b, devices: [{type: CPU}], nic: {line_rate: 1 Gbit/s}}
"""
MODEL = """
import torch
from torch import nn
import heterog

def workload():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    batch = (torch.randn(12, 32), torch.randn(12, 32))
    return heterog.Workload(model, batch, nn.functional.mse_loss, torch.optim.AdamW)
"""


@cache
def graph_of(model: str) -> OpGraph:
    """The captured graph of a model of the zoo."""
    return capture(load_workload(model, None))


def digest(value: object) -> str:
    """A short name of a value's text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def legal_strategy(rng: Random, graph: OpGraph, cluster: Cluster) -> Strategy:
    """A random strategy, in teams or slice groups where it stays legal so."""
    plain = random_strategy(rng, graph, cluster)
    refined = rng.choice((with_random_teams, with_random_slice_groups))(rng, plain)
    try:
        refined.check(graph, cluster)
    except StrategyError:
        return plain
    return refined


def strategies() -> Iterator[tuple[str, object]]:
    """Program, seconds and peaks of random strategies."""
    for model, preset in STRATEGIES:
        graph, cluster = graph_of(model), Cluster.load(preset)
        evaluator = Evaluator(graph, cluster)
        for seed in range(NUM_STRATEGIES):
            strategy = legal_strategy(Random(f"{model} {seed}"), graph, cluster)
            choice = evaluator.encode(strategy)
            found = evaluator.evaluate(strategy), evaluator.referee(choice)
            told = [(each.step_time_s, digest(list(each.peak_memory_bytes))) for each in found]
            yield f"{model} {preset} {seed}", [evaluator.program(choice).hash, *told]


def plans() -> Iterator[tuple[str, object]]:
    """Strategies and step times that methods find."""
    for model, preset in PLANNED:
        graph, cluster = graph_of(model), Cluster.load(preset)
        for method in METHODS:
            plan = api.plan(graph, cluster, method=method, budget=BUDGET)
            written = strategy_to_dict(plan.strategy)
            yield (
                f"{model} {preset} {method}",
                [
                    digest(written),
                    plan.step_time_s,
                    plan.program_hash,
                    plan.method,
                ],
            )


def heterog(*arguments: str) -> None:
    """Run the command line, which may not fail."""
    command = [sys.executable, "-m", "heterog.cli", *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def trained(saved: Path) -> list[str]:
    """Short names of what each rank saved of weights and optimizer state."""
    return [digest(path.read_bytes()) for path in sorted(saved.glob("data-*/*.distcp"))]


def runs() -> Iterator[tuple[str, object]]:
    """Weights of plans that ranks run."""
    with tempfile.TemporaryDirectory() as folder:
        model, cluster = Path(folder) / "model.py", Path(folder) / "cluster.yaml"
        model.write_text(MODEL)
        cluster.write_text(CLUSTER)
        for method in (*RUNS, *RUNS_OF_AGENT):
            plan, saved = Path(folder) / f"{method}.json", Path(folder) / method
            heterog(
                *("plan", f"{model}:workload", "--cluster", str(cluster), "--method", method),
                *("--budget", BUDGET, "-o", str(plan)),
            )
            heterog(
                *("run", str(plan), "--source", f"{model}:workload"),
                *("--steps", "5", "--save", str(saved)),
            )
            yield method, trained(saved)


def answers() -> Answers:
    """All answers; long work, so each kind says when it is done."""
    found: Answers = {}
    for kind in (strategies, plans, runs):
        part = {f"{kind.__name__} {name}": value for name, value in kind()}
        print(f"{kind.__name__}: {len(part)}", file=sys.stderr, flush=True)
        found |= part
    return found


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    found: Answers = json.loads(json.dumps(answers()))
    if asked.what == "record":
        asked.file.write_text(json.dumps(found, indent=0))
        print(f"{len(found)} answers")
        return 0
    known: Answers = json.loads(asked.file.read_text())
    other = [name for name in known if found.get(name) != known[name]]
    for name in other:
        print(f"{name}: {known[name]} before, {found.get(name)} now")
    print(f"{len(known)} answers, {len(other)} differ")
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
