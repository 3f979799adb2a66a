"""Tables of arms beside one another on a list of pairs: ``--pairs FILE``, rows, intervals.

A row has ``pair``, ``arm``, ``seed``, ``step_time_s`` (``null`` if nothing fits), ``cpu_s`` and
``evaluations``. Rows are appended to a file when they are there, and none that is there is made
again, so a run that was stopped goes on.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rows import finish, keep_row, progress, read_rows

from heterog.agents.benchmark.pair_lists import read_pairs
from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget
from heterog.simulator.evaluator import Evaluator

NO_FIT = 3.0
"""Ratio that counts where nothing fits."""
CLOSE = 1.15
"""Ratio up to which an answer is close."""

Found = tuple[float | None, int]
"""(step time by the referee, evaluations)."""
Arm = Callable[[Evaluator, int, Budget], Found]
"""What an arm does with an evaluator whose kernels are loaded, a seed, and a budget."""


def add_table(parser: argparse.ArgumentParser, arms: Sequence[str], cpu_seconds: float) -> None:
    """Add the options of such a table."""
    parser.add_argument("--pairs", type=Path, required=True, help="a model and a cluster a line")
    parser.add_argument("--arms", default=",".join(arms), help="names with commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cpu-seconds", type=float, default=cpu_seconds, help="of each row")
    parser.add_argument("--graphs", type=Path, help="folder that keeps captured graphs")
    parser.add_argument("--references", type=Path, help="best known step times; beside the list")
    parser.add_argument("-o", "--output", type=Path, help="JSON lines, added to")
    parser.add_argument("--summary", action="store_true", help="only print what the file holds")


def run_table(asked: argparse.Namespace, arms: Mapping[str, Arm]) -> None:
    """Make the rows that are missing, and print all of them or a summary."""
    names = asked.arms.split(",")
    if unknown := [name for name in names if name not in arms]:
        raise SystemExit(f"unknown arms {', '.join(unknown)}; known: {', '.join(arms)}")
    script = Path(sys.argv[0]).stem
    output = asked.output or Path(f"{script}.{asked.pairs.stem}.jsonl")
    rows = read_rows(output)
    lines = read_pairs(asked.pairs)
    done = {(row["pair"], row["arm"], row["seed"]) for row in rows}
    budget = Budget(seconds=asked.cpu_seconds)
    for seed in range(0 if asked.summary else asked.seeds):
        for line in lines:
            missing = [name for name in names if (line.pair, name, seed) not in done]
            graph, cluster = line.load(asked.graphs) if missing else (None, None)
            for name in missing:
                assert graph is not None
                assert cluster is not None
                row = {"pair": line.pair, "arm": name, "seed": seed}
                row |= _made(arms[name], graph, cluster, seed, budget)
                rows.append(row)
                keep_row(output, row)
                progress(f"{line.pair}: {name}, seed {seed}: {row['step_time_s']}")
    wanted = {line.pair for line in lines}
    rows = [row for row in rows if row["pair"] in wanted and row["arm"] in names]
    summary = summarise(rows, names, _references(asked))
    finish(asked, {"rows": rows, "summary": summary}, _words(summary))


def _made(
    arm: Arm, graph: OpGraph, cluster: Cluster, seed: int, budget: Budget
) -> dict[str, float | int | None]:
    evaluator = Evaluator(graph, cluster)
    evaluator.warm_up()
    begin = time.process_time()
    step_time_s, evaluations = arm(evaluator, seed, budget)
    cpu_s = time.process_time() - begin
    return {"step_time_s": step_time_s, "cpu_s": cpu_s, "evaluations": evaluations}


def _references(asked: argparse.Namespace) -> dict[str, float]:
    """The best known step times by pair, if there is a file of them."""
    path = asked.references or asked.pairs.with_name(f"{asked.pairs.stem}_references.json")
    if not path.is_file():
        return {}
    known = json.loads(path.read_text())
    return {pair: each["step_time_s"] for pair, each in known.items() if each["step_time_s"]}


def summarise(
    rows: Sequence[dict[str, Any]], arms: Sequence[str], references: Mapping[str, float]
) -> dict[str, Any]:
    """By arm: ratio to the best that is known, beside the first arm, with 95 % intervals.

    Only pairs and seeds that every arm has count. Intervals are of the bootstrap over pairs, whose
    seeds are averaged before. What does not fit counts as ``NO_FIT``.
    """
    cases = {(row["pair"], row["seed"], row["arm"]): row["step_time_s"] for row in rows}
    asked = {(pair, seed) for pair, seed, _ in cases}
    whole = sorted(c for c in asked if all((*c, arm) in cases for arm in arms))
    best = dict(references)
    for (pair, _, _), seconds in cases.items():
        if seconds is not None:
            best[pair] = min(best.get(pair, math.inf), seconds)
    pairs = [pair for pair in dict.fromkeys(pair for pair, _ in whole) if pair in best]
    logs: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
    misfits = {arm: sum(cases[(*c, arm)] is None for c in whole) for arm in arms}
    for arm in arms:
        logs[arm] = np.array(
            [
                np.mean(
                    [
                        math.log((cases[(*c, arm)] or NO_FIT * best[pair]) / best[pair])
                        for c in whole
                        if c[0] == pair
                    ]
                )
                for pair in pairs
            ]
        )
    return {
        "pairs": len(pairs),
        "runs": len(whole),
        "arms": {
            arm: {
                "over_best_known": _interval(logs[arm]),
                "over_first_arm": _interval(logs[arm] - logs[arms[0]]),
                "close": int((logs[arm] <= math.log(CLOSE)).sum()),
                "do_not_fit": misfits[arm],
            }
            for arm in arms
        }
        if pairs
        else {},
    }


def _interval(logs: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """Geometric mean, and its 95 % interval when pairs are drawn again."""
    rng = np.random.default_rng(0)
    drawn = logs[rng.integers(len(logs), size=(4000, len(logs)))].mean(axis=1)
    return [float(np.exp(x)) for x in (logs.mean(), *np.quantile(drawn, [0.025, 0.975]))]


def _words(summary: Mapping[str, Any]) -> list[str]:
    lines = [f"{summary['pairs']} pairs, {summary['runs']} runs of each arm"]
    for arm, found in summary["arms"].items():
        known, first = (
            "{:.3f} [{:.3f}, {:.3f}]".format(*found[name])
            for name in ("over_best_known", "over_first_arm")
        )
        lines.append(
            f"{arm:24} {known} of the best known, {first} of the first arm, {found['close']} "
            f"within {CLOSE - 1:.0%}, {found['do_not_fit']} do not fit"
        )
    return lines
