"""What does a policy reach on a model that it has not seen, and how fast does it catch up?

    python experiments/leave_one_out.py --models vgg19,bert_base,gpt2 --cluster paper_8gpu

As the paper's table 6: for each model, train on the others, then fine-tune on it; beside that,
train on it alone from scratch. Minutes until within 2 % of the best that any of them found.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from heterog.agents.config import PolicyConfig
from heterog.agents.finetune import FineTuned
from heterog.agents.policy import Policy
from heterog.agents.sources import PairSource, captured
from heterog.agents.training import Trainer, TrainingConfig
from heterog.cluster import Cluster
from heterog.planners.planner import Budget, Task
from heterog.planners.portfolio import run_method
from heterog.simulator.evaluator import Evaluator


def curve(policy: Policy, task: Task, seconds: float) -> tuple[list[tuple[float, float]], Any]:
    """((seconds, best step so far), final row) of fine-tuning a policy."""
    points: list[tuple[float, float]] = []
    begin = time.perf_counter()

    def report(fraction: float, best: float) -> None:
        if not points or best < points[-1][1]:
            points.append((time.perf_counter() - begin, best))

    asked = Task(evaluator=task.evaluator, budget=task.budget, seed=task.seed, report=report)
    row = run_method(FineTuned(policy, Budget(seconds=seconds)), asked)
    return points, row


def main() -> None:
    """Leave each model out once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="vgg19,resnet50,bert_base,gpt2,transformer_6l")
    parser.add_argument("--cluster", default="paper_8gpu")
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    graphs = [captured(name, arguments.graphs) for name in arguments.models.split(",")]
    cluster = Cluster.load(arguments.cluster)
    config = TrainingConfig(
        num_pairs=arguments.pairs, num_steps=arguments.steps, seed=arguments.seed
    )
    rows = []
    for graph in graphs:
        others = [other for other in graphs if other is not graph]
        begin = time.perf_counter()
        trained = Trainer(PairSource(graphs=others, seed=arguments.seed), config).run()
        pretraining_s = time.perf_counter() - begin
        torch.manual_seed(arguments.seed)
        fresh = Policy(PolicyConfig()).eval()
        task = Task(evaluator=Evaluator(graph, cluster), budget=Budget(seconds=1.0))
        tuned, tuned_row = curve(trained.checkpoint.policy, task, arguments.seconds)
        scratch, scratch_row = curve(fresh, task, arguments.seconds)
        best = min(points[-1][1] for points in (tuned, scratch) if points)
        reached = {
            name: next((at for at, value in points if value <= 1.02 * best), None)
            for name, points in (("pretrained", tuned), ("scratch", scratch))
        }
        rows.append(
            {
                "model": graph.name,
                "pretraining_s": pretraining_s,
                "pretrained_step_time_s": tuned_row.step_time_s,
                "scratch_step_time_s": scratch_row.step_time_s,
                "seconds_to_2_percent": reached,
                "pretrained_curve": tuned,
                "scratch_curve": scratch,
            }
        )
        print(f"{graph.name:16} within 2 % after {reached}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
