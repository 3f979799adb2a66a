"""A policy's searches beside searches without it, at equal evaluations.

Every run is on its own: it gets no baseline, and its enumeration or its draws count. Runs of one
(model, cluster, seed) are compared with each other, by the referee's step times.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from heterog.agents.planners import AgentSearch
from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.local_search.planner import LocalSearch
from heterog.methods.planner import Budget, Planner, PlanResult, Problem
from heterog.methods.two_segment import TwoSegment
from heterog.search.judging import run_method
from heterog.simulator.evaluator import Evaluator

PLAIN = "local_search"
ENUMERATION = "two_segment+local_search"
LED = "agent+search"
MATTERS = 0.005
"""Relative difference of step times from which one run counts as better."""

Key = tuple[str, str, str, str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search.

    Attributes:
        model: Name of the model.
        cluster: Name of the cluster.
        method: ``local_search``, ``two_segment+local_search`` or ``agent+search``.
        policy: Policy of ``agent+search``; empty for the others.
        budget: Evaluations allowed.
        seed: Seed of the search.
        step_time_s: Step time by the referee; ``None`` if it does not fit.
        num_evaluations: Evaluations made.
        seconds: Wall time, the referee's final judgement included.
    """

    model: str
    cluster: str
    method: str
    policy: str
    budget: int
    seed: int
    step_time_s: float | None
    num_evaluations: int
    seconds: float

    @property
    def key(self) -> Key:
        """Everything that identifies the run: its question and method."""
        return self.model, self.cluster, self.method, self.policy, self.budget, self.seed

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON values."""
        return asdict(self)


class EnumerationSearch(Planner):
    """``two_segment`` for at most half of the budget, then ``local_search`` from what it found."""

    name = ENUMERATION
    stage = "search"

    def plan(self, problem: Problem) -> PlanResult:
        """Enumerate, then search."""
        assert problem.budget.evaluations is not None
        first = TwoSegment().plan(replace(problem, budget=problem.budget.part(0.5)))
        left = max(problem.budget.evaluations - first.num_evaluations, 1)
        seeds = (*problem.seeds, *first.candidates)
        then = LocalSearch().plan(replace(problem, budget=Budget(evaluations=left), seeds=seeds))
        return PlanResult(
            candidates=(*then.candidates, *first.candidates[:1]),
            num_evaluations=first.num_evaluations + then.num_evaluations,
        )


def paired_runs(
    pairs: Sequence[tuple[OpGraph, Cluster]],
    policies: Sequence[str],
    *,
    budgets: Sequence[int],
    longer: Sequence[int] = (),
    seeds: Sequence[int] = (0,),
    done: Collection[Key] = (),
) -> Iterator[Run]:
    """Runs that are not done yet: seed by seed and budget by budget, over all pairs.

    Args:
        pairs: Models and clusters.
        policies: Names or files of policies.
        budgets: Evaluations of all three methods.
        longer: More budgets for ``local_search`` only, which it needs to catch up.
        seeds: Seeds of the searches.
        done: Keys of runs to leave out.
    """
    plain: list[tuple[Planner, str]] = [(LocalSearch(), ""), (EnumerationSearch(), "")]
    led: list[tuple[Planner, str]] = [(AgentSearch(policy), policy) for policy in policies]
    evaluators: dict[int, Evaluator] = {}
    for seed in seeds:
        for budget in sorted({*budgets, *longer}):
            methods = [*plain, *led] if budget in budgets else plain[:1]
            for number, (graph, cluster) in enumerate(pairs):
                for planner, policy in methods:
                    key = graph.name, cluster.name, planner.name, policy, budget, seed
                    if key in done:
                        continue
                    if number not in evaluators:
                        evaluators[number] = Evaluator(graph, cluster)
                        evaluators[number].warm_up()
                    allowed = Budget(evaluations=budget)
                    begin = time.perf_counter()
                    row = run_method(
                        planner, Problem(evaluator=evaluators[number], budget=allowed, seed=seed)
                    )
                    yield Run(
                        model=graph.name,
                        cluster=cluster.name,
                        method=planner.name,
                        policy=policy,
                        budget=budget,
                        seed=seed,
                        step_time_s=row.step_time_s,
                        num_evaluations=row.num_evaluations,
                        seconds=time.perf_counter() - begin,
                    )


def against(runs: Sequence[Run], budget: int, policy: str, rival: str) -> dict[str, float]:
    """``agent+search`` compared with a rival at one budget.

    Returns:
        ``ratio``, the geometric mean over pairs and seeds where both fit; ``low`` and ``high``,
        its 95 % interval when pairs are resampled (bootstrap); ``better`` and ``worse`` by more
        than 0.5 %, where a strategy that does not fit is worse; ``count`` of all.
    """
    found = _by_case(runs)
    logs: dict[tuple[str, str], list[float]] = {}
    better = worse = count = 0
    for model, cluster, seed in sorted({(r.model, r.cluster, r.seed) for r in runs}):
        mine = found.get((model, cluster, LED, policy, budget, seed))
        theirs = found.get((model, cluster, rival, "", budget, seed))
        if mine is None or theirs is None:
            continue
        count += 1
        better += mine < theirs * (1.0 - MATTERS)
        worse += theirs < mine * (1.0 - MATTERS)
        if math.isfinite(mine) and math.isfinite(theirs):
            logs.setdefault((model, cluster), []).append(math.log(mine / theirs))
    if not logs:
        return {"count": float(count), "better": float(better), "worse": float(worse)}
    means = np.array([np.mean(values) for values in logs.values()])
    rng = np.random.default_rng(0)
    drawn = means[rng.integers(len(means), size=(2000, len(means)))].mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {
        "ratio": math.exp(means.mean()),
        "low": math.exp(low),
        "high": math.exp(high),
        "better": float(better),
        "worse": float(worse),
        "count": float(count),
    }


def evaluations_needed(runs: Sequence[Run], budget: int, policy: str) -> dict[str, Any]:
    """Evaluations with which ``local_search`` is as good as ``agent+search`` with ``budget``.

    From the geometric means over the pairs and seeds for which every budget of
    ``local_search`` is present and fits, linear between budgets on logarithmic scales.

    Returns:
        ``evaluations`` (``None`` if the longest search is not as good), ``times`` the budget,
        ``longest`` budget tried, and ``count`` of pairs and seeds.
    """
    found = _by_case(runs)
    budgets = sorted({run.budget for run in runs if run.method == PLAIN})
    cases = sorted({(run.model, run.cluster, run.seed) for run in runs})
    lines, levels = [], []
    for model, cluster, seed in cases:
        mine = found.get((model, cluster, LED, policy, budget, seed), math.inf)
        line = [found.get((model, cluster, PLAIN, "", each, seed), math.inf) for each in budgets]
        if all(map(math.isfinite, (mine, *line))):
            levels.append(math.log(mine))
            lines.append(np.log(line))
    longest = float(budgets[-1]) if budgets else 0.0
    result: dict[str, Any] = {"longest": longest, "count": len(lines), "evaluations": None}
    if not lines:
        return result
    # A longer search that is worse by chance does not make a shorter one worse.
    means = np.minimum.accumulate(np.mean(lines, axis=0))
    level = float(np.mean(levels))
    reached = np.flatnonzero(means <= level)
    if len(reached):
        last = int(reached[0])
        needed = math.log(budgets[last])
        if last and means[last - 1] > means[last]:
            part = (means[last - 1] - level) / (means[last - 1] - means[last])
            before = math.log(budgets[last - 1])
            needed = before + part * (needed - before)
        result["evaluations"] = math.exp(needed)
        result["times"] = math.exp(needed) / budget
    return result


def _by_case(runs: Sequence[Run]) -> Mapping[Key, float]:
    return {run.key: math.inf if run.step_time_s is None else run.step_time_s for run in runs}
