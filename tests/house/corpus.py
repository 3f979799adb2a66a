"""Answers that a move of code may not change.

    python -m tests.house.corpus record corpus.jsonl
    python -m tests.house.corpus record now.jsonl --kinds strategies plans
    python -m tests.house.corpus compare corpus.jsonl now.jsonl

200 random strategies (program hash, step time, peaks, by engine and referee), 20 plans with
budgets in evaluations, 10 runs of five steps on three ranks. Everything is compared bit by bit,
so record both files on the same machine with the same packages. An answer is a line of the file
as soon as it is known, and a recording that was stopped goes on from there.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
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

Question = tuple[str, Callable[[], object]]
"""A name, and what answers it."""

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


@cache
def evaluator_of(model: str, cluster: Cluster) -> Evaluator:
    """One evaluator for all strategies of a pair, as a search has it."""
    return Evaluator(graph_of(model), cluster)


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


def strategies() -> Iterator[Question]:
    """Program, seconds and peaks of random strategies."""

    def answer(model: str, cluster: Cluster, seed: int) -> object:
        graph = graph_of(model)
        evaluator = evaluator_of(model, cluster)
        strategy = legal_strategy(Random(f"{model} {seed}"), graph, cluster)
        choice = evaluator.encode(strategy)
        found = evaluator.evaluate(strategy), evaluator.referee(choice)
        told = [(each.step_time_s, digest(list(each.peak_memory_bytes))) for each in found]
        return [evaluator.program(choice).hash, *told]

    for model, preset in STRATEGIES:
        cluster = Cluster.load(preset)
        for seed in range(NUM_STRATEGIES):
            yield f"{model} {preset} {seed}", partial(answer, model, cluster, seed)


def plans() -> Iterator[Question]:
    """Strategies and step times that methods find."""

    def answer(model: str, preset: str, method: str) -> object:
        plan = api.plan(graph_of(model), Cluster.load(preset), method=method, budget=BUDGET)
        written = strategy_to_dict(plan.strategy)
        return [digest(written), plan.step_time_s, plan.program_hash, plan.method]

    for model, preset in PLANNED:
        for method in METHODS:
            yield f"{model} {preset} {method}", partial(answer, model, preset, method)


def heterog(*arguments: str) -> None:
    """Run the command line, which may not fail."""
    command = [sys.executable, "-m", "heterog.cli", *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def trained(saved: Path) -> list[str]:
    """Short names of what each rank saved of weights and optimizer state."""
    return [digest(path.read_bytes()) for path in sorted(saved.glob("data-*/*.distcp"))]


def runs() -> Iterator[Question]:
    """Weights of plans that ranks run."""

    def answer(folder: Path, method: str) -> object:
        model, cluster = folder / "model.py", folder / "cluster.yaml"
        model.write_text(MODEL)
        cluster.write_text(CLUSTER)
        plan, saved = folder / f"{method}.json", folder / method
        heterog(
            *("plan", f"{model}:workload", "--cluster", str(cluster), "--method", method),
            *("--budget", BUDGET, "-o", str(plan)),
        )
        heterog(
            *("run", str(plan), "--source", f"{model}:workload"),
            *("--steps", "5", "--save", str(saved)),
        )
        return trained(saved)

    with tempfile.TemporaryDirectory() as folder:
        for method in (*RUNS, *RUNS_OF_AGENT):
            yield method, partial(answer, Path(folder), method)


KINDS = {each.__name__: each for each in (strategies, plans, runs)}


def read(file: Path) -> dict[str, object]:
    """The answers of a file, by name."""
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(json.loads(line) for line in lines)


def record(file: Path, kinds: Sequence[str]) -> None:
    """Add the answers that a file lacks."""
    known = read(file)
    with file.open("a") as written:
        for kind in kinds:
            for name, answer in KINDS[kind]():
                if f"{kind} {name}" not in known:
                    written.write(json.dumps([f"{kind} {name}", answer()]) + "\n")
                    written.flush()


def differences(before: Path, now: Path) -> int:
    """Print which answers are not the same, and return their number."""
    known, found = read(before), read(now)
    other = [name for name in known if found.get(name) != known[name]]
    for name in other:
        print(f"{name}: {known[name]} before, {found.get(name)} now")
    print(f"{len(known)} answers, {len(other)} differ")
    return len(other)


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("now", type=Path)
    asked = parser.parse_args()
    if asked.what == "record":
        record(asked.file, asked.kinds)
        return 0
    return int(bool(differences(asked.before, asked.now)))


if __name__ == "__main__":
    sys.exit(main())
