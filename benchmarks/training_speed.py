"""How fast is training, and where does the time go?

    python benchmarks/training_speed.py --json

Policy gradients on generated clusters, scored op by op, one process per core. Shares are of wall
time: *simulator* is scoring strategies, *network* is the forward and backward pass and the
optimizer, the rest is drawing, encoding, and waiting.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from typing import Any

import torch

from heterog.agents.config import Algorithm, TrainingConfig
from heterog.agents.learner import GradientLearner
from heterog.agents.reinforce import Reinforce
from heterog.agents.sources import PairSource, captured
from heterog.agents.training import Trainer
from heterog.envs.pair import Pair, Score

MODELS = ("vgg19", "resnet50", "mobilenet_v2")


def measure(seed: int, steps: int) -> dict[str, float]:
    """Train for some steps and count."""
    torch.set_num_threads(1)

    def tell(text: str) -> None:
        print(f"process {seed}: {text}", file=sys.stderr, flush=True)

    graphs = []
    for name in MODELS:
        tell(f"capture {name}")
        graphs.append(captured(name, None))
    source = PairSource(graphs=graphs, seed=seed)
    config = TrainingConfig(
        algorithm=Algorithm.REINFORCE, num_pairs=16, num_steps=steps, num_validation=1,
        search_evaluations=50, check_every=steps, seed=seed,
    )  # fmt: skip
    trainer = Trainer(source, config)
    tell(f"baselines of {config.num_pairs} pairs")
    learner = trainer.learner
    assert isinstance(learner, GradientLearner)
    for index in range(config.num_pairs):
        assert learner.pair(index).baseline_s > 0.0  # made before the clock starts
    spent = {"simulator": 0.0, "learner": 0.0}
    score, step = Pair.score, Reinforce.step

    def timed_score(self: Pair, row: Any) -> Score:
        begin = time.perf_counter()
        try:
            return score(self, row)
        finally:
            spent["simulator"] += time.perf_counter() - begin

    def timed_step(self: Reinforce, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return step(self, *arguments)
        finally:
            spent["learner"] += time.perf_counter() - begin

    learner.advance(0)
    # mypy has no word for a method that takes the same arguments as another.
    setattr(Pair, "score", timed_score)  # noqa: B010
    setattr(Reinforce, "step", timed_step)  # noqa: B010
    tell(f"{steps} steps")
    before = learner.num_evaluations
    begin = time.perf_counter()
    for number in range(steps):
        learner.advance(number)
    seconds = time.perf_counter() - begin
    setattr(Pair, "score", score)  # noqa: B010
    setattr(Reinforce, "step", step)  # noqa: B010
    return {
        "seconds": seconds,
        "evaluations": float(learner.num_evaluations - before),
        "simulator_s": spent["simulator"],
        "network_s": seconds - spent["learner"],
    }


def main() -> None:
    """Run one process per core and print the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes) as pool:
        asked = [(seed, arguments.steps) for seed in range(arguments.processes)]
        found = pool.starmap(measure, asked)
    seconds = sum(row["seconds"] for row in found)
    simulator = sum(row["simulator_s"] for row in found) / seconds
    network = sum(row["network_s"] for row in found) / seconds
    document = {
        "processes": arguments.processes,
        "evaluations_per_s": sum(row["evaluations"] / row["seconds"] for row in found),
        "share_simulator": simulator,
        "share_network": network,
        "share_elsewhere": 1.0 - simulator - network,
    }
    if arguments.json:
        print(json.dumps(document, indent=2))
        return
    for name, value in document.items():
        print(f"{name:20} {value:8.2f}")


if __name__ == "__main__":
    main()
