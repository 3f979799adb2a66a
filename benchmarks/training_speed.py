"""How fast is training, and where does the time go?

    python benchmarks/training_speed.py --json

The benchmark trains by policy gradients on vgg19 and paper_8gpu, with rewards scored op by op, one
process per core. Then it plays random episodes of ``heterog/Improve-v0`` there, eight environments
in each process. Shares are of CPU time: *simulator* is scoring strategies, *network* is the
forward and backward pass and the optimizer, the rest is drawing, encoding, and waiting. Rates
count CPU seconds, so they are those of idle cores, whatever else the machine runs.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from heterog.agents.config import Algorithm, TrainingConfig
from heterog.agents.learner import GradientLearner
from heterog.agents.reinforce import Reinforce
from heterog.agents.sources import PairSource, captured
from heterog.agents.training import Trainer
from heterog.cluster import Cluster
from heterog.envs.pair import Pair
from heterog.envs.registration import IMPROVE
from heterog.garbage import settled

NUM_ENVS = 8


def measure(seed: int, model: str, cluster: str, steps: int) -> dict[str, float]:
    """Train for some steps and count, then walk through environments."""
    torch.set_num_threads(1)

    def tell(text: str) -> None:
        print(f"process {seed}: {text}", file=sys.stderr, flush=True)

    tell(f"capture {model}")
    source = PairSource(
        graphs=[captured(model, None)], clusters=[Cluster.load(cluster)], generated=0.0, seed=seed
    )
    config = TrainingConfig(
        algorithm=Algorithm.REINFORCE, num_pairs=8, num_steps=steps, num_validation=1,
        search_evaluations=50, check_every=steps, seed=seed,
    )  # fmt: skip
    learner = Trainer(source, config).learner
    assert isinstance(learner, GradientLearner)
    for index in range(config.num_pairs):
        assert learner.pair(index).baseline_s > 0.0  # made before the clock starts
    spent = {"simulator": 0.0, "learner": 0.0}
    learner.advance(0)
    restore = [
        _timed(Pair, "score", spent, "simulator"),
        _timed(Reinforce, "step", spent, "learner"),
    ]
    tell(f"{steps} steps")
    before = learner.num_evaluations
    begin, cpu = time.perf_counter(), time.process_time()
    with settled():  # as a training runs
        for number in range(steps):
            learner.advance(number)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    for undo in restore:
        undo()
    tell(f"{steps} steps of {NUM_ENVS} environments")
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "evaluations": float(learner.num_evaluations - before),
        "simulator_s": spent["simulator"],
        "network_s": cpu_s - spent["learner"],
        **walk(seed, source, steps),
    }


def _timed(owner: type, name: str, spent: dict[str, float], key: str) -> Any:
    """Count the CPU seconds of a method; returns a function that restores the method."""
    method = getattr(owner, name)

    def timed(*arguments: Any) -> Any:
        begin = time.process_time()
        try:
            return method(*arguments)
        finally:
            spent[key] += time.process_time() - begin

    setattr(owner, name, timed)
    return lambda: setattr(owner, name, method)


def walk(seed: int, source: PairSource, steps: int) -> dict[str, float]:
    """Random moves in environments side by side."""
    pairs = [(source.graphs[0], source.clusters[0])]
    envs: Any = gym.make_vec(IMPROVE, NUM_ENVS, pairs=pairs)
    rng = np.random.default_rng(seed)
    envs.reset(seed=seed)
    for _ in range(5):
        envs.step(rng.integers(envs.single_action_space.n, size=NUM_ENVS))
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        envs.step(rng.integers(envs.single_action_space.n, size=NUM_ENVS))
    return {
        "moves": float(NUM_ENVS * steps),
        "walk_s": time.perf_counter() - begin,
        "walk_cpu_s": time.process_time() - cpu,
    }


def main() -> None:
    """Run one process per core and print the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="vgg19")
    parser.add_argument("--cluster", default="paper_8gpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        asked = (arguments.model, arguments.cluster, arguments.steps)
        found = pool.starmap(measure, [(seed, *asked) for seed in range(arguments.processes)])
    cpu_s = sum(row["cpu_s"] for row in found)
    simulator = sum(row["simulator_s"] for row in found) / cpu_s
    network = sum(row["network_s"] for row in found) / cpu_s
    document = {
        "processes": arguments.processes,
        "evaluations_per_s": sum(row["evaluations"] / row["seconds"] for row in found),
        "evaluations_per_s_by_cpu": sum(row["evaluations"] / row["cpu_s"] for row in found),
        "share_simulator": simulator,
        "share_network": network,
        "share_elsewhere": 1.0 - simulator - network,
        "moves_per_s": sum(row["moves"] / row["walk_s"] for row in found),
        "moves_per_s_by_cpu": sum(row["moves"] / row["walk_cpu_s"] for row in found),
    }
    if arguments.json:
        print(json.dumps(document, indent=2))
        return
    for name, value in document.items():
        print(f"{name:24} {value:8.2f}")


if __name__ == "__main__":
    main()
