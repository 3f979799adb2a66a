"""Do composed plans (stages, teams, caps) hold on real ranks what the simulator promises?

    python experiments/testbed_teams.py --json                    # Linux, as root
    python experiments/testbed_teams.py --testbeds skew_hosts --models gpt --pairs 10

On each testbed and workload, in one job and in turn: the plan of ``auto``, the best that it finds
with teams, the best that it finds without them, and ``megatron_grid``, the best uniform layout.
Then a pipeline over all hosts without caps and with those of 1F1B: the most bytes that each rank
held, beside what was predicted. Plans are made with a calibration of the testbed on other
workloads than these.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from rows import asked_of, finish, option, progress
from testbeds import Task, measured, testbed_options, testbeds_and_models, workload_of

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.methods import pipeline, teams
from heterog.methods.hap import planner as hap
from heterog.methods.planner import Budget, Candidate, MethodRow, Planner, PlanResult, Problem
from heterog.search.judging import run_method
from heterog.search.plan import plan_from_rows
from heterog.search.portfolio import best_row, run_methods
from heterog.search.request import Request
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.layouts.layout import LayoutError, parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.layouts.stages import layers_of
from heterog.strategy.schedules import AS_IT_COMES, caps_of_stages
from heterog.strategy.strategy import Strategy

TESTBEDS = ("skew_both", "skew_hosts")
MODELS = ("mlp", "gpt", "encoder")
GRID = "megatron_grid"
PIPELINES = ("uncapped", "capped")
_MICRO = 8


@contextmanager
def no_teams() -> Iterator[None]:
    """Searches find nothing that teams could share."""
    teams.rules_of_model.cache_clear()
    refusal = LayoutError("nothing is shared here")
    with (
        patch.object(teams, "team_rules", side_effect=refusal),
        patch.object(hap, "host_sizes", return_value=[]),
    ):
        yield
    teams.rules_of_model.cache_clear()


def has_teams(strategy: Strategy) -> bool:
    """Whether a group's devices are teams of which one has several members."""
    return any(len(team) > 1 for each in strategy.decisions for team in each.teams)


class Stated(Planner):
    """A strategy as a method.

    Args:
        name: of the method.
        strategy: that it answers.
    """

    stage = "baseline"

    def __init__(self, name: str, strategy: Strategy) -> None:
        self.name = name
        self._strategy = strategy

    def plan(self, problem: Problem) -> PlanResult:
        """The strategy, first come, first served."""
        del problem
        return PlanResult(
            candidates=(Candidate(strategy=self._strategy, orders=(Order.FIFO,)),),
            num_evaluations=0,
            search_seconds=0.0,
        )


class TeamedPipeline(Planner):
    """Pipelines whose stages all have teams inside hosts."""

    name = "teamed_pipeline"
    stage = "search"

    def plan(self, problem: Problem) -> PlanResult:
        """What the enumeration of pipelines finds where every point has teams."""
        return _Teamed(problem).run(problem, reason="no host has several devices")


class _Teamed(pipeline._Enumeration):
    """Points with teams of whole hosts, to begin with."""

    def _balanced(
        self, stages: pipeline.Stages, num_micro: int, order: Order
    ) -> Iterator[pipeline._Point]:
        for point in super()._balanced(stages, num_micro, order):
            sizes = tuple(teams.host_sizes(self.cluster, self.cluster.num_devices)[:1])
            yield replace(point, teams=sizes * len(stages))

    def is_possible(self, point: pipeline._Point) -> bool:
        return super().is_possible(point) and bool(point.teams)


def best_rows(evaluator: Evaluator, budget: Budget) -> dict[str, MethodRow]:
    """The contenders: ``auto``, ``teams``, ``no_teams`` and the grid; equal ones once.

    The budget is each method's, not divided among them.
    """
    known = default_methods()
    request = Request(
        graph=evaluator.graph,
        cluster=evaluator.cluster,
        methods=known.names,
        known=known,
        budget=budget,
    )
    rows = run_methods(evaluator, request)
    found = {"auto": best_row(rows)}
    problem = Problem(evaluator=evaluator, budget=budget)
    teamed = [
        row for row in rows if row.candidate is not None and has_teams(row.candidate.strategy)
    ]
    teamed.append(run_method(TeamedPipeline(), problem))
    teamed = [row for row in teamed if row.step_time_s]
    if teamed:
        found["teams"] = best_row(teamed)
    with no_teams():
        named = tuple(name for name in known.names if name != GRID)
        plain = run_methods(
            Evaluator(evaluator.graph, evaluator.cluster), replace(request, methods=named)
        )
    found["no_teams"] = best_row(plain)
    found[GRID] = next(row for row in rows if row.method == GRID)
    seen: set[Strategy] = set()
    distinct = {}
    for name, row in found.items():
        if row.candidate is not None and row.step_time_s and row.candidate.strategy not in seen:
            seen.add(row.candidate.strategy)
            distinct[name] = row
    return distinct


def pipelines(evaluator: Evaluator) -> dict[str, MethodRow]:
    """A stage for each host, eight micro-batches, as they come and with the caps of 1F1B."""
    graph, cluster = evaluator.graph, evaluator.cluster
    hosts = [cluster.host_devices(host) for host in range(cluster.num_hosts)]
    dp = len(hosts[0])
    layout = parse_layout(f"pp={len(hosts)},dp={dp},num_micro={_MICRO}")
    try:
        given = place_layout(layout, graph, cluster).strategy
    except LayoutError:
        layers = split_evenly(len(layers_of(graph).names), len(hosts))
        layout = replace(layout, layers=layers)
        given = place_layout(layout, graph, cluster).strategy
    capped = caps_of_stages(hosts, cluster.num_devices)
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=1))
    return {
        name: run_method(Stated(name, replace(given, schedule=schedule)), problem)
        for name, schedule in zip(PIPELINES, (AS_IT_COMES, capped), strict=True)
    }


def measure(cluster: Cluster, model: str, budget: Budget, num_pairs: int) -> dict[str, Any]:
    """Plan, then run all contenders on the testbed."""
    graph = capture(workload_of(model))
    evaluator = Evaluator(graph, cluster)
    contenders = best_rows(evaluator, budget)
    plans = contenders | pipelines(evaluator)
    task = Task(model=model, rounds=num_pairs, peaks=PIPELINES, untimed=PIPELINES)
    files = {key: plan_from_rows(evaluator, [row]) for key, row in plans.items()}
    found = measured(cluster, files, task)
    return {
        "testbed": cluster.name,
        "model": model,
        "budget": str(budget),
        "contenders": {
            key: _contender(row, found.seconds[key]) for key, row in contenders.items()
        },
        "peaks": {
            key: {
                "predicted_bytes": list(plans[key].peak_memory_bytes),
                "bytes": found.peaks[key],
            }
            for key in PIPELINES
        },
    }


def _contender(row: MethodRow, seconds: list[float]) -> dict[str, Any]:
    assert row.candidate is not None
    strategy = row.candidate.strategy
    return {
        "method": row.method,
        "predicted_s": row.step_time_s,
        "median_s": statistics.median(seconds),
        "seconds": seconds,
        "has_teams": has_teams(strategy),
        "num_micro": strategy.num_micro_batches,
        "devices": sorted({d for each in strategy.decisions for d in each.devices}),
    }


def told(row: dict[str, Any]) -> Iterator[str]:
    """A row for people."""
    for name, found in row["contenders"].items():
        spread = f"{min(found['seconds']):.3f} to {max(found['seconds']):.3f}"
        yield (
            f"{row['testbed']:11} {row['model']:8} {name:13} by {found['method']:14} "
            f"{found['median_s']:.3f} s ({spread}; predicted {found['predicted_s']:.3f}), "
            f"{found['num_micro']} micro-batches{', teams' * found['has_teams']}"
        )
    for name, peak in row["peaks"].items():
        pairs = zip(peak["predicted_bytes"], peak["bytes"], strict=True)
        ratios = " ".join(f"{predicted / max(held, 1):.2f}" for predicted, held in pairs)
        held = " ".join(f"{count / 2**20:.0f}" for count in peak["bytes"])
        who = f"{row['testbed']:11} {row['model']:8} {name}"
        yield f"{who}: {held} MiB, predicted over it {ratios}"


def main() -> None:
    """Measure every testbed and workload."""
    arguments = asked_of(
        __doc__,
        *testbed_options(TESTBEDS, MODELS),
        option("--budget", default="1000e"),
        option("--pairs", type=int, default=10),
    )
    rows = []
    for cluster, model in testbeds_and_models(arguments):
        budget = Budget.parse(arguments.budget)
        rows.append(measure(cluster, model, budget, arguments.pairs))
        progress("\n".join(told(rows[-1])))
    finish(arguments, {"rows": rows})


if __name__ == "__main__":
    main()
