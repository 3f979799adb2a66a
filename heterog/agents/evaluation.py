"""Evaluation of a policy: zero-shot and fine-tuned, beside baselines and a long search.

The referee judges all rows. The searches do not see the policy's proposals.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from heterog.agents.finetune import FineTuned
from heterog.agents.planners import Agent, AgentSearch
from heterog.methods.planner import Budget, Planner, Problem, Progress
from heterog.search.judging import run_method
from heterog.search.portfolio import Comparison, best_row, run_methods
from heterog.search.request import GIVEN, Request, Session
from heterog.search.rows import MethodRow
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.lower_bound import lower_bound_s

LONG_SEARCH = "search"
"""Method of the row of ``auto`` without the policy: the best of all baselines and searches."""


def _long_search(
    evaluator: Evaluator, budget: Budget, seed: int, progress: Progress
) -> list[MethodRow]:
    """Rows of ``auto`` without any policy, and the best of them as ``search``."""
    # The policy is compared with these searches, so its proposals must not be among their seeds.
    request = Request(graph=evaluator.graph, cluster=evaluator.cluster, budget=budget, seed=seed)
    rows = run_methods(evaluator, request, Session(progress=progress))
    best = replace(
        best_row(rows),
        method=LONG_SEARCH,
        stage="search",
        num_evaluations=sum(row.num_evaluations for row in rows),
        search_seconds=sum(row.search_seconds for row in rows),
    )
    return [*rows, best]


def evaluate_policy(
    policy: str,
    request: Request,
    *,
    tuned: FineTuned | None = None,
    progress: Progress = lambda method, fraction, best: None,
) -> Comparison:
    """Rows of one model on one cluster.

    Args:
        policy: Name or file of the policy.
        request: Model, cluster and seed. The budget is that of ``auto`` without the policy,
            divided among its searches; ``agent+search`` has as much again. A given layout is a
            row beside the others; no search starts from it.
        tuned: The policy with a budget of fine-tuning, if it is tuned.
        progress: Function that gets every method's progress.

    Returns:
        Baselines, ``agent_greedy``, ``agent_16``, ``agent`` (64 draws), ``agent_finetuned``,
        ``agent+search``, every search without the policy, and ``search``, which is ``auto``
        without the policy. The agent's seconds do not include loading the graph and the policy.
    """
    evaluator = Evaluator(request.graph, request.cluster)
    budget, seed = request.budget, request.seed
    rows = _long_search(evaluator, budget, seed, progress)
    asked: list[Planner] = [
        *([request.given] if request.given is not None else []),
        Agent(policy, name="agent_greedy", num_samples=1, only_rows=True),
        Agent(policy, name="agent_16", num_samples=16, only_rows=True),
        Agent(policy),
    ]
    if tuned is not None:
        asked.append(tuned)
    asked.append(AgentSearch(policy))
    seeds = tuple(
        row.candidate for row in rows if row.stage == "baseline" and row.candidate is not None
    )
    for planner in asked:
        progress(planner.name, 0.0, math.inf)
        problem = Problem(evaluator=evaluator, budget=budget, seed=seed, seeds=seeds)
        rows.append(run_method(planner, problem))
    return Comparison(
        graph=request.graph,
        cluster=request.cluster,
        rows=tuple(rows),
        lower_bound_s=lower_bound_s(request.graph, request.cluster, evaluator.cost_model).seconds,
        seed=seed,
        cost_model=evaluator.cost_model,
    )


def summary(rows: Sequence[MethodRow]) -> dict[str, float | None]:
    """Ratios to the long search's step: the policy's, a given layout's, the best baseline's."""
    by_name = {row.method: row.step_time_s for row in rows}
    reference = by_name.get(LONG_SEARCH)
    baselines = [
        row.step_time_s
        for row in rows
        if row.stage == "baseline" and row.method != GIVEN and row.step_time_s is not None
    ]
    found = {row.method: row.step_time_s for row in rows if row.method.startswith("agent")}
    if GIVEN in by_name:
        found[GIVEN] = by_name[GIVEN]
    found["best_baseline"] = min(baselines, default=None)
    return {
        name: None if seconds is None or reference is None else seconds / reference
        for name, seconds in found.items()
    }
