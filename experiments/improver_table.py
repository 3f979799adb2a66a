"""Does local search get further where a policy leads its moves? At equal CPU seconds.

    python experiments/improver_table.py --pairs FILE --cpu-seconds 20 --json

FILE is a list as ``pair_lists`` reads it. For each pair, the baselines make starts in a quarter of
the seconds; from these, each arm and seed searches. Arms: ``learned`` (the shipped policy),
``blind`` (local search as it is without one), ``untrained`` (the same network with random weights,
the same moves and turns) and ``NAME=FILE`` for a policy of your own. Rows in the file of ``-o``
are not made again.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rows import finish, geometric_mean, keep_row, progress, read_rows, script_parser

from heterog.agents.benchmark.pair_lists import read_pairs
from heterog.agents.improver import SHIPPED, Improver, led_by, load_improver
from heterog.methods.local_search.planner import Lead, LocalSearch, Search
from heterog.methods.planner import Budget, Candidate, Problem
from heterog.methods.registry import built_in_methods
from heterog.search.judging import run_method
from heterog.simulator.evaluator import Evaluator

START_PART = 0.25
KEY = ("pair", "arm", "seed", "cpu_seconds")
NUM_DRAWS = 10_000


def starts_of(evaluator: Evaluator, seconds: float) -> tuple[Candidate, ...]:
    """What the baselines find, each in an equal part of the seconds."""
    graph, cluster = evaluator.graph, evaluator.cluster
    methods = [
        each
        for each in built_in_methods()
        if each.stage == "baseline" and each.joins_auto(graph, cluster)
    ]
    budget = Budget(seconds=seconds / len(methods))
    problem = Problem(evaluator=evaluator, budget=budget, clock=time.process_time)
    rows = [run_method(each, problem) for each in methods]
    return tuple(row.candidate for row in rows if row.candidate is not None)


def lead_of(arm: str, seed: int) -> Lead | None:
    """What leads the moves of an arm; ``None`` for blind ones."""
    if arm == "blind":
        return None
    if arm == "untrained":
        return led_by(Improver.untrained(seed))
    return led_by(load_improver(arm.partition("=")[2] or SHIPPED))


def searched(
    evaluator: Evaluator, starts: Sequence[Candidate], arm: str, seed: int, seconds: float
) -> dict[str, Any]:
    """The best step of a search by the referee, and how it came to it."""
    curve: list[tuple[float, float]] = []
    counted, begin = evaluator.num_evaluations, time.process_time()
    search = LocalSearch(lead_of(arm, seed))
    problem = Problem(
        evaluator=evaluator,
        budget=Budget(seconds=seconds),
        seed=seed,
        seeds=tuple(starts),
        clock=time.process_time,
        report=lambda fraction, best: curve.append((time.process_time() - begin, best)),
    )
    found = search.plan(problem)
    spent = time.process_time() - begin
    num_evaluations = evaluator.num_evaluations - counted
    judged = [evaluator.referee(each.strategy, each.orders[0]) for each in found.candidates]
    fitting = [each.step_time_s for each in judged if each.is_ok]
    return {
        "step_time_s": min(fitting, default=None),
        "cpu_s": round(spent, 3),
        "evaluations": num_evaluations,
        "curve": [(round(at_s, 2), best) for at_s, best in curve],
    }


def gains(rows: Sequence[dict[str, Any]], arm: str) -> dict[str, float]:
    """Mean logarithm of an arm's step over the blind one's, of each pair."""
    blind = {
        (row["pair"], row["seed"]): row["step_time_s"] for row in rows if row["arm"] == "blind"
    }
    logs: dict[str, list[float]] = {}
    for row in rows:
        other = blind.get((row["pair"], row["seed"]))
        if row["arm"] == arm and other and row["step_time_s"]:
            logs.setdefault(row["pair"], []).append(float(np.log(row["step_time_s"] / other)))
    return {pair: float(np.mean(each)) for pair, each in logs.items()}


def interval(logs: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval over pairs of the geometric mean."""
    rng, values = np.random.default_rng(0), np.array(logs)
    draws = rng.choice(values, (NUM_DRAWS, len(values))).mean(axis=1)
    low, high = np.exp(np.quantile(draws, (0.025, 0.975)))
    return float(low), float(high)


def main() -> None:
    """Make what is missing, print rows or a table."""
    parser = script_parser(__doc__)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--cpu-seconds", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default="learned,blind")
    parser.add_argument("-o", "--rows", type=Path, default=Path("improver_table.jsonl"))
    parser.add_argument("--graphs", type=Path, help="folder that keeps captured graphs")
    asked = parser.parse_args()
    made(asked)
    rows = read_rows(asked.rows)
    finish(asked, {"rows": rows}, table(rows))


def made(asked: argparse.Namespace) -> None:
    """Make the rows that are missing."""
    for line in read_pairs(asked.pairs):
        wanted = [
            (line.pair, arm.partition("=")[0], seed, asked.cpu_seconds, arm)
            for seed in range(asked.seeds)
            for arm in asked.arms.split(",")
        ]
        known = {tuple(row[name] for name in KEY) for row in read_rows(asked.rows)}
        missing = [each for each in wanted if each[:4] not in known]
        if not missing:
            continue
        evaluator = Evaluator(*line.load(asked.graphs))
        evaluator.warm_up()
        starts = starts_of(evaluator, START_PART * asked.cpu_seconds)
        Search(Problem(evaluator=evaluator, budget=Budget(evaluations=1)))  # what arms share
        for *key, arm in missing:
            row = searched(evaluator, starts, arm, key[2], asked.cpu_seconds)
            progress(f"{key} {row['step_time_s']} {row['evaluations']}")
            keep_row(asked.rows, dict(zip(KEY, key, strict=True)) | row)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each arm's step over the blind one's."""
    lines = ["| arm | pairs | step over blind | 95 % |", "|---|---|---|---|"]
    for arm in dict.fromkeys(row["arm"] for row in rows if row["arm"] != "blind"):
        logs = list(gains(rows, arm).values())
        if logs:
            low, high = interval(logs)
            mean = geometric_mean(np.exp(logs))
            lines.append(f"| {arm} | {len(logs)} | {mean:.3f} | {low:.3f} to {high:.3f} |")
    return lines


if __name__ == "__main__":
    main()
