"""What does a policy reach on a model that it has not seen, and how fast does it catch up?

    python experiments/leave_one_out.py --models vgg19,bert_base,gpt2 -o left_out.jsonl

As the paper's table 6: for each model, train on the others, then fine-tune on it; beside that,
train on it alone from scratch. Seconds until within 2 % of the best that any of them found, or
never within the time (the paper: 21 to 48 minutes pre-trained, 82 to 245 from scratch).

A model's row is appended to the file when it is there, and one that is there is not made again.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from rows import keep_row, progress, read_rows, script_parser

from heterog.agents.config import PolicyConfig, TrainingConfig
from heterog.agents.finetune import FineTuned
from heterog.agents.planners import Agent
from heterog.agents.policy import Policy
from heterog.agents.sources import PIPELINED_PART, PairSource, captured
from heterog.agents.training import Report, Trainer
from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget, MethodRow, Problem
from heterog.search.judging import run_method
from heterog.simulator.evaluator import Evaluator
from heterog.workers import Workers, open_workers

CLOSE = 0.02


def told(model: str) -> Report:
    """Progress on stderr, at most a line each five seconds for a stage."""
    begin = time.perf_counter()
    last: dict[str, float] = {}

    def report(stage: str, fraction: float, text: str) -> None:
        now = time.perf_counter()
        if fraction < 1.0 and now - last.get(stage, -1e9) < 5.0:
            return
        last[stage] = now
        progress(f"{model}: {now - begin:7.1f} s {stage} {fraction:4.0%} {text}")

    return report


def curve(
    policy: Policy, problem: Problem, budget: Budget, report: Report, name: str
) -> tuple[list[tuple[float, float]], MethodRow]:
    """((seconds, best coarse step so far), final row) of fine-tuning a policy."""
    points: list[tuple[float, float]] = []
    begin = time.perf_counter()

    def note(fraction: float, best: float) -> None:
        report(name, fraction, f"best {best:.4f} s")
        if not points or best < points[-1][1]:
            points.append((time.perf_counter() - begin, best))

    asked = Problem(
        evaluator=problem.evaluator, budget=problem.budget, seed=problem.seed, report=note
    )
    return points, run_method(FineTuned(policy, budget), asked)


def leave_out(
    graph: OpGraph,
    others: list[OpGraph],
    cluster: Cluster,
    config: TrainingConfig,
    budget: Budget,
    workers: Workers,
) -> dict[str, Any]:
    """The row of one model."""
    report = told(graph.name)
    begin = time.perf_counter()
    source = PairSource(graphs=others, pipelined=PIPELINED_PART, seed=config.seed)
    trained = Trainer(source, config, workers=workers, report=report).run()
    pretraining_s = time.perf_counter() - begin
    policy = trained.checkpoint.policy
    torch.manual_seed(config.seed)
    fresh = Policy(PolicyConfig()).eval()
    evaluator = Evaluator(graph, cluster)
    evaluator.warm_up()
    problem = Problem(evaluator=evaluator, budget=Budget(seconds=1.0), seed=config.seed)
    zero_shot = [
        run_method(Agent(each, name=name), problem)
        for each, name in ((policy, "pretrained"), (fresh, "scratch"))
    ]
    tuned, tuned_row = curve(policy, problem, budget, report, "pretrained")
    scratch, scratch_row = curve(fresh, problem, budget, report, "scratch")
    best = min((points[-1][1] for points in (tuned, scratch) if points), default=0.0)
    return {
        "model": graph.name,
        "cluster": cluster.name,
        "seed": config.seed,
        "budget": str(budget),
        "pairs": config.num_pairs,
        "steps": config.num_steps,
        "pretraining_s": pretraining_s,
        "zero_shot_step_time_s": zero_shot[0].step_time_s,
        "untrained_step_time_s": zero_shot[1].step_time_s,
        "pretrained_step_time_s": tuned_row.step_time_s,
        "scratch_step_time_s": scratch_row.step_time_s,
        "seconds_to_2_percent": {
            name: next((at for at, value in points if value <= (1.0 + CLOSE) * best), None)
            for name, points in (("pretrained", tuned), ("scratch", scratch))
        },
        "pretrained_curve": tuned,
        "scratch_curve": scratch,
    }


def main() -> None:
    """Leave each model out once."""
    parser = script_parser(__doc__)
    parser.add_argument("--models", default="vgg19,resnet50,bert_base,gpt2,transformer_6l")
    parser.add_argument("--cluster", default="paper_8gpu")
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--finetune", default="60s", help="for each of the two; or 5000e")
    parser.add_argument("--graphs", type=Path, help="folder that keeps captured graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", default="1", help="processes, ray, or ray:N")
    parser.add_argument("-o", "--output", type=Path, help="JSON lines, added to")
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    if len(names) < 2:
        parser.error("leaving one out needs two models or more.")
    graphs = []
    for name in names:
        progress(f"capture {name}")
        graphs.append(captured(name, arguments.graphs))
    cluster = Cluster.load(arguments.cluster)
    config = TrainingConfig(
        num_pairs=arguments.pairs, num_steps=arguments.steps, seed=arguments.seed
    )
    budget = Budget.parse(arguments.finetune)
    rows = read_rows(arguments.output)
    made = {(row["model"], row["cluster"], row["seed"], row["budget"]) for row in rows}
    with open_workers(arguments.workers) as workers:
        for graph in graphs:
            if (graph.name, cluster.name, config.seed, str(budget)) in made:
                continue
            others = [other for other in graphs if other is not graph]
            rows.append(leave_out(graph, others, cluster, config, budget, workers))
            keep_row(arguments.output, rows[-1])
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    print("| left out | untrained | zero-shot | fine-tuned | from scratch | s to 2 % (scratch) |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        times = [
            row[f"{name}_step_time_s"]
            for name in ("untrained", "zero_shot", "pretrained", "scratch")
        ]
        reached = [row["seconds_to_2_percent"][name] for name in ("pretrained", "scratch")]
        cells = ["OOM" if value is None else f"{value:.4f} s" for value in times]
        within = ["never" if value is None else f"{value:.1f}" for value in reached]
        print(f"| {row['model']} | {' | '.join(cells)} | {within[0]} ({within[1]}) |")


if __name__ == "__main__":
    main()
