"""How good is a policy on models and clusters that it has not seen?

    python experiments/evaluate_cluster.py --budget 300s --finetune 60s -o held_out.jsonl

By default the held-out models on the held-out clusters: for each pair, the best of 1, 16 and 64
draws, how many draws do not fit, fine-tuning, ``agent+search`` and the four baselines of the
paper, over ``auto`` without the policy.

Every row is appended to the file when it is there, and one that is there is not made again, so a
run that was stopped goes on. ``--summary`` only prints what a file holds; ``--json`` prints the
summary as one document.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rows import asked_of, finish, geometric_mean, keep_row, option, progress, read_rows, teller

from heterog.agents.checkpoint import load_checkpoint
from heterog.agents.evaluation import LONG_SEARCH, evaluate_policy, long_search
from heterog.agents.finetune import FineTuned
from heterog.agents.planners import ask
from heterog.agents.shipped import HELD_OUT_CLUSTERS, HELD_OUT_MODELS
from heterog.agents.sources import captured
from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.planner import Budget, MethodRow, Problem
from heterog.search.request import Request
from heterog.simulator.evaluator import Evaluator

PAPER_BASELINES = ("ev_ps", "ev_ar", "cp_ps", "cp_ar")
OF_POLICY = ("agent_greedy", "agent_16", "agent", "agent_finetuned", "agent+search")


def chosen(arguments: argparse.Namespace) -> Iterator[tuple[OpGraph, Cluster]]:
    """The models on the clusters, each model captured when it comes."""
    clusters = [Cluster.load(name) for name in arguments.clusters.split(",")]
    for model in arguments.models.split(","):
        progress(f"capture {model}")
        graph = captured(model, arguments.graphs)
        for cluster in clusters:
            yield graph, cluster


def evaluate_pair(
    arguments: argparse.Namespace,
    policy: str,
    graph: OpGraph,
    cluster: Cluster,
    searched: Sequence[MethodRow],
) -> dict[str, Any]:
    """Everything about one policy on one pair."""
    found = evaluate_policy(
        policy,
        Request(
            graph=graph,
            cluster=cluster,
            budget=Budget.parse(arguments.budget),
            seed=arguments.seed,
        ),
        tuned=FineTuned(load_checkpoint(policy).policy, Budget.parse(arguments.finetune))
        if arguments.finetune
        else None,
        searched=searched,
        leads_search=not arguments.no_search,
        progress=teller(),
    )
    problem = Problem(
        evaluator=Evaluator(graph, cluster), budget=Budget(evaluations=10_000), seed=arguments.seed
    )
    begin = time.perf_counter()
    proposed = ask(policy, problem)
    seconds = {each.method: each.step_time_s for each in found.rows}
    reference = seconds[LONG_SEARCH]
    baselines = [seconds[name] for name in PAPER_BASELINES]
    fitting = [value for value in baselines if value is not None]
    of_policy = [name for name in OF_POLICY if name in seconds]
    return {
        "policy": policy,
        "model": graph.name,
        "cluster": cluster.name,
        "seed": arguments.seed,
        "budget": arguments.budget,
        "finetune": arguments.finetune,
        "reference_s": reference,
        "over_reference": {name: ratio(seconds[name], reference) for name in of_policy}
        | {"paper_baselines": ratio(min(fitting, default=None), reference)},
        "agent_over_paper_baselines": ratio(seconds["agent"], min(fitting, default=None)),
        "out_of_memory": proposed.out_of_memory,
        "agent_seconds": time.perf_counter() - begin,
        "rows": found.to_dicts(),
    }


def known_search(
    rows: list[dict[str, Any]], model: str, cluster: str, arguments: argparse.Namespace
) -> list[MethodRow]:
    """Rows of the long search of a pair, without their strategies, if the file has them."""
    names = {field.name for field in fields(MethodRow)}
    asked = (model, cluster, arguments.seed, arguments.budget)
    for row in rows:
        if (row["model"], row["cluster"], row["seed"], row["budget"]) == asked:
            return [
                MethodRow(**{name: each[name] for name in names & set(each)})
                for each in row["rows"]
                if each["method"] not in OF_POLICY
            ]
    return []


def ratio(value: float | None, reference: float | None) -> float | None:
    """``None`` where either does not fit."""
    return None if value is None or reference is None else value / reference


def shown(value: float | None) -> str:
    """Three digits, or that it does not fit."""
    return "OOM" if value is None else f"{value:.3f}"


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By policy: geometric means over pairs, the worst pair, and how many do not fit."""
    document: dict[str, Any] = {}
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        names = dict.fromkeys(name for row in own for name in row["over_reference"])
        document[policy] = {
            "pairs": len(own),
            "out_of_memory_draws": sum(row["out_of_memory"] for row in own) / len(own),
            "agent_seconds_most": max(row["agent_seconds"] for row in own),
            "agent_over_paper_baselines_most": max(
                row["agent_over_paper_baselines"] or 0.0 for row in own
            ),
        } | {
            name: {
                "geometric_mean": geometric_mean(value for value in values if value is not None),
                "most": max((value for value in values if value is not None), default=None),
                "do_not_fit": sum(value is None for value in values),
            }
            for name in names
            for values in [[row["over_reference"].get(name) for row in own]]
        }
    return document


def lines_of(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line per policy and pair, then the means."""
    for row in rows:
        ratios = "  ".join(f"{k} {shown(v)}" for k, v in row["over_reference"].items())
        yield (
            f"{row['policy']:8} {row['model']:16} {row['cluster']:17} {ratios}  "
            f"draws that do not fit {row['out_of_memory']:.0%}  {row['agent_seconds']:.2f} s"
        )
    for policy, found in summarise(rows).items():
        for name, value in found.items():
            if isinstance(value, dict):
                yield (
                    f"{policy:8} {name:16} geometric mean {shown(value['geometric_mean'])}, most "
                    f"{shown(value['most'])}, {value['do_not_fit']} of {found['pairs']} do not fit"
                )


def run_pairs(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The table of pairs: rows of the file and new ones."""
    rows = read_rows(arguments.output)
    if arguments.summary:
        return rows
    names = ("policy", "model", "cluster", "seed", "budget", "finetune")
    done = {tuple(row[name] for name in names) for row in rows}
    asked = (arguments.seed, arguments.budget, arguments.finetune)
    for graph, cluster in chosen(arguments):
        # Once for all policies, also for those of earlier runs.
        searched = known_search(rows, graph.name, cluster.name, arguments)
        for policy in arguments.policy.split(","):
            if (policy, graph.name, cluster.name, *asked) in done:
                continue
            progress(f"{policy}: {graph.name} on {cluster.name}")
            searched = searched or long_search(
                Evaluator(graph, cluster),
                budget=Budget.parse(arguments.budget),
                seed=arguments.seed,
                progress=teller(),
                clock=time.process_time if arguments.cpu_seconds else time.perf_counter,
            )
            rows.append(evaluate_pair(arguments, policy, graph, cluster, searched))
            keep_row(arguments.output, rows[-1])
    return rows


def main() -> None:
    """Evaluate, and print."""
    arguments = asked_of(
        __doc__,
        option("--policy", default="heldout", help="names or files with commas"),
        option("--models", default=",".join(HELD_OUT_MODELS)),
        option("--clusters", default=",".join(HELD_OUT_CLUSTERS)),
        option("--budget", default="300s", help="of auto without the policy; or 5000e"),
        option("--cpu-seconds", action="store_true", help="budget of auto in this process's time"),
        option("--finetune", default="", help="60s, say; none if empty"),
        option("--no-search", action="store_true", help="leaves agent+search out"),
        option("--seed", type=int, default=0),
        option("--graphs", type=Path, help="folder that keeps captured graphs"),
        option("-o", "--output", type=Path, help="JSON lines, added to"),
        option("--summary", action="store_true", help="only print what the file holds"),
    )
    rows = run_pairs(arguments)
    finish(arguments, summarise(rows), lines_of(rows))


if __name__ == "__main__":
    main()
