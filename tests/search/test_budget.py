"""A budget is a promise: searches end in time, each has its part, and hands over its best so far.

Time is a fake clock that every simulation advances: nothing here looks at the wall.
"""

import math
import re
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import nn

import heterog.agents.planners
import heterog.methods.hap.planner as hap
import heterog.methods.hap.segments as fold
from heterog.cluster import Cluster
from heterog.cluster.topology import ROOFLINE
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.methods.hap.a_star import Search
from heterog.methods.hap.planner import _PRICED_BY, Hap, Synthesis
from heterog.methods.local_search.planner import LocalSearch
from heterog.methods.planner import (
    Budget,
    Candidate,
    Planner,
    PlanResult,
    Problem,
    Spending,
    Stop,
    TimeUp,
)
from heterog.methods.registry import built_in_methods
from heterog.search.judging import run_method
from heterog.search.portfolio import with_noise
from heterog.search.rows import MethodRow
from heterog.search.sharing import BudgetSplit
from heterog.simulator.compile_kernels import smallest_graph
from heterog.simulator.evaluator import Evaluator
from tests.search.asking import run_methods
from tests.search.test_planners import graph as mlp

assert heterog.agents.planners  # registers the policies


class Clock:
    """Seconds that pass only when something is simulated."""

    def __init__(self, per_simulation_s: float = 1.0) -> None:
        self.now_s = 0.0
        self.per_simulation_s = per_simulation_s

    def __call__(self) -> float:
        return self.now_s


class ClockedEvaluator(Evaluator):
    """An evaluator each of whose simulations takes as long as its clock says."""

    def __init__(self, graph: OpGraph, cluster: Cluster, clock: Clock) -> None:
        super().__init__(graph, cluster)
        self.clock = clock

    def run(self, *arguments: object, **keywords: object) -> tuple[float, bool]:
        self.clock.now_s += self.clock.per_simulation_s
        return super().run(*arguments, **keywords)  # type: ignore[arg-type]


def clocked(seconds: float = 1.0) -> tuple[ClockedEvaluator, Clock]:
    clock = Clock(seconds)
    return ClockedEvaluator(mlp(), Cluster.load("paper_8gpu"), clock), clock


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.lstm = nn.LSTM(32, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0]).flatten(0, 1)  # type: ignore[no-any-return]


def token_loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(found, wanted.flatten())


@lru_cache(maxsize=1)
def unrolled_lstm() -> OpGraph:
    """Hundreds of ops that repeat no layer: where the A* search does not come to an end."""
    tokens = torch.zeros(16, 10, dtype=torch.long)
    return capture(
        Workload(LanguageModel, (tokens, tokens), token_loss, torch.optim.SGD, name="lstm")
    )


# --- parts of a budget ------------------------------------------------------------------------


def test_a_search_gets_its_part_whatever_ran_before_it() -> None:
    split = BudgetSplit(Budget(seconds=40.0), 4)
    given = []
    for spent in (100.0, 0.0, 10.0, 10.0):  # ten times too much, nothing, all of it
        given.append(split.next_part().seconds)
        split.settle(spent)
    assert given == pytest.approx([10.0, 10.0, 15.0, 20.0])


def test_what_is_left_over_is_all_that_is_shared() -> None:
    split = BudgetSplit(Budget(evaluations=1000), 5)
    for _ in range(5):
        part = split.next_part().evaluations
        assert part is not None
        assert part >= 200
        split.settle(0)
    assert part == 1000


# --- deadlines --------------------------------------------------------------------------------


def test_limits_end_a_block_at_the_first_evaluation_after_the_end() -> None:
    evaluator, clock = clocked()
    spending = Spending(Budget(seconds=2.5), evaluator, clock=clock)
    strategy = LocalSearch().plan(Problem(evaluator=evaluator, budget=Budget(evaluations=5)))
    (first, *_) = strategy.candidates
    spending = Spending(Budget(seconds=2.5), evaluator, clock=clock)
    done = 0
    with spending.limits():
        for _ in range(100):
            evaluator.evaluate(first.strategy, first.orders[0])
            done += 1
    assert done == 3
    evaluator.evaluate(first.strategy, first.orders[0])  # nothing is left behind


def test_an_inner_search_does_not_swallow_the_end_of_the_outer_one() -> None:
    evaluator, clock = clocked()
    outer = Spending(Budget(seconds=1.0), evaluator, clock=clock)
    inner = Spending(Budget(evaluations=100), evaluator, clock=clock)
    clock.now_s += 2.0
    reached = False
    with outer.limits():
        with inner.limits():
            evaluator.poll()
        reached = True
    assert not reached
    with pytest.raises(TimeUp):
        outer.check()


def test_time_does_not_cut_a_budget_in_evaluations() -> None:
    evaluator, clock = clocked(1e6)
    spending = Spending(Budget(evaluations=3), evaluator, clock=clock)
    clock.now_s += 1e9
    spending.check()
    assert not spending.is_cut


@pytest.mark.parametrize("planner", list(built_in_methods()), ids=lambda planner: planner.name)
def test_every_method_ends_in_time_with_its_best_so_far(planner: Planner) -> None:
    evaluator, clock = clocked()
    problem = Problem(evaluator=evaluator, budget=Budget(seconds=6.0), clock=clock)
    result = planner.plan(problem)
    # At most what a strategy takes in all orders beyond the end.
    assert clock.now_s <= 6.0 + 6.0
    assert result.candidates or result.reason


@pytest.mark.parametrize("planner", list(built_in_methods()), ids=lambda planner: planner.name)
def test_every_method_stops_when_it_is_asked_to(planner: Planner) -> None:
    evaluator, clock = clocked()
    stop = Stop()
    asked = 0

    def report(fraction: float, best: float) -> None:
        nonlocal asked
        asked = evaluator.num_evaluations
        stop.request()

    problem = Problem(
        evaluator=evaluator,
        budget=Budget(evaluations=400),
        report=report,
        stop=stop,
        clock=clock,
    )
    planner.plan(problem)
    if asked:
        assert evaluator.num_evaluations <= asked + 6


def test_hap_hands_over_data_parallelism_if_there_is_no_time_for_a_program() -> None:
    evaluator, clock = clocked()
    problem = Problem(evaluator=evaluator, budget=Budget(seconds=0.5), clock=clock)
    result = Hap().plan(problem)
    assert len(result.candidates) == 1
    assert result.candidates[0].strategy.op_rules == ()
    assert "out of time" in result.note


def test_the_a_star_search_asks_for_the_time_in_all_its_loops() -> None:
    """Without it, this search had run for 13 minutes of 30 s."""
    evaluator = Evaluator(unrolled_lstm(), Cluster.load("paper_8gpu"))
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == limit:
            raise TimeUp(Spending(Budget(evaluations=1), evaluator))

    limit = math.inf
    synthesis = Synthesis(evaluator, check=check)
    devices = tuple(range(8))
    prices = synthesis._prices(devices, synthesis.starts(devices)[0], *_PRICED_BY[0])
    limit = asked + 1000
    with pytest.raises(TimeUp):
        synthesis.search(prices)


def test_a_search_that_takes_too_many_steps_is_given_up_for_a_narrow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What bounds a budget in evaluations, which no time cuts; and the same every time."""
    monkeypatch.setattr(hap, "_MOST_EXTENSIONS", 5_000)
    found = []
    for _ in range(2):
        # With the kernels of device models, rules do not pay here.
        cluster = replace(Cluster.load("paper_8gpu"), calibration=ROOFLINE)
        evaluator = Evaluator(unrolled_lstm(), cluster)
        problem = Problem(evaluator=evaluator, budget=Budget(evaluations=40))
        result = Hap().plan(problem)
        assert "narrow searches after 5,000 steps" in result.note
        found.append([each.strategy for each in result.candidates])
    assert found[0] == found[1]
    assert any(strategy.op_rules for strategy in found[0])


def test_a_graph_too_wide_to_search_gets_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "_MOST_CARRIED", 10)
    evaluator = Evaluator(unrolled_lstm(), Cluster.load("paper_8gpu"))
    result = Hap().plan(Problem(evaluator=evaluator, budget=Budget(evaluations=4)))
    assert re.search(r"data parallelism only: [\d,]+ values are carried", result.note)
    assert all(not each.strategy.op_rules for each in result.candidates)


def test_a_narrow_search_follows_few_states_and_says_that_it_is_no_proof() -> None:
    evaluator = Evaluator(unrolled_lstm(), Cluster.load("paper_8gpu"))
    synthesis = Synthesis(evaluator)
    devices = tuple(range(8))
    prices = synthesis._prices(devices, synthesis.starts(devices)[0], *_PRICED_BY[0])
    result = Search(synthesis.segments, prices, 2, most_at_cut=2).run()
    assert len(result.programs) == 1
    assert not result.is_exact
    assert not result.is_given_up


# --- the portfolio ----------------------------------------------------------------------------


def test_auto_spends_its_budget_and_no_more() -> None:
    evaluator, clock = clocked(0.02)
    prepared = evaluator.num_evaluations
    rows = run_methods(evaluator, ["auto"], budget=Budget(seconds=20.0), clock=clock)
    assert clock.now_s <= 20.0 * 1.05
    assert clock.now_s >= 20.0 * 0.7
    assert evaluator.num_evaluations > prepared
    searches = [row for row in rows if row.stage != "baseline"]
    assert min(row.num_evaluations for row in searches) > 20
    assert not any(row.starved for row in searches)


def test_a_method_that_overspends_takes_nothing_from_the_others() -> None:
    class Greedy(Planner):
        name = "greedy"
        stage = "search"

        def plan(self, problem: Problem) -> PlanResult:
            clock.now_s += 100.0
            return PlanResult(candidates=(), num_evaluations=0, search_seconds=100.0)

    evaluator, clock = clocked(0.01)
    split = BudgetSplit(Budget(seconds=10.0), 2)
    parts = []
    for planner in (Greedy(), LocalSearch()):
        problem = Problem(evaluator=evaluator, budget=split.next_part(), clock=clock)
        parts.append(problem.budget.seconds)
        row = run_method(planner, problem)
        split.settle(row.search_seconds)
    assert parts == [5.0, 5.0]
    assert row.num_evaluations > 100


def test_libraries_are_loaded_before_the_clock_of_a_method_runs() -> None:
    """``agent`` was given 14.7 s of 5 s: it imported torch on its own time."""
    evaluator, clock = clocked(0.001)
    order: list[str] = []

    class Slow(Planner):
        name = "slow"
        stage = "search"

        def prepare(self, evaluator: Evaluator) -> None:
            order.append("prepare")
            clock.now_s += 1000.0

        def plan(self, problem: Problem) -> PlanResult:
            order.append("plan")
            assert not problem.spend().is_over
            return PlanResult(candidates=(), num_evaluations=0, search_seconds=0.0, reason="none")

    known = built_in_methods().having(Slow())
    rows = run_methods(evaluator, ["slow"], known=known, budget=Budget(seconds=1.0), clock=clock)
    assert order == ["prepare", "plan"]
    assert rows[0].search_seconds < 1.0


def test_a_starved_method_says_so() -> None:
    evaluator, clock = clocked()
    problem = Problem(evaluator=evaluator, budget=Budget(seconds=4.0), clock=clock)
    row = run_method(built_in_methods()["two_segment"], problem)
    assert row.starved
    assert "starved" in row.note
    assert "a larger budget" in row.note
    relaxed = replace(problem, evaluator=clocked(1e-9)[0], budget=Budget(evaluations=30))
    assert not run_method(built_in_methods()["two_segment"], relaxed).starved


@pytest.mark.parametrize("seconds", [0.5, 3.0, 10.0])
def test_local_search_is_never_worse_than_its_seeds(seconds: float) -> None:
    """It was listed as ``ok`` and slower than plain data parallelism after two evaluations."""
    evaluator, clock = clocked()
    seeds: list[Candidate] = []
    best: MethodRow | None = None
    for name in ("ev_ps", "cp_ar", "ddp", "tuned_uniform"):
        whole = Problem(evaluator=evaluator, budget=Budget(evaluations=100), clock=clock)
        row = run_method(built_in_methods()[name], whole)
        assert row.candidate is not None
        seeds.append(row.candidate)
        if best is None or (row.step_time_s or math.inf) < (best.step_time_s or math.inf):
            best = row
    assert best is not None
    problem = Problem(
        evaluator=evaluator, budget=Budget(seconds=seconds), seeds=tuple(seeds), clock=clock
    )
    found = run_method(LocalSearch(), problem)
    assert found.step_time_s is not None
    assert best.step_time_s is not None
    assert found.step_time_s <= best.step_time_s


def test_a_stop_ends_the_portfolio_after_the_first_strategy() -> None:
    evaluator, clock = clocked()
    stop = Stop()
    stop.request()
    rows = run_methods(evaluator, ["auto"], budget=Budget(evaluations=500), stop=stop, clock=clock)
    assert len(rows) == 1
    assert rows[0].outcome == "ok"


def test_noise_that_there_is_no_time_for_is_left_out_of_all_rows() -> None:
    evaluator, clock = clocked()
    rows = run_methods(evaluator, ["ddp", "cp_ar"], budget=Budget(evaluations=10), clock=clock)
    nothing = Spending(Budget(seconds=0.5), evaluator, clock=clock)
    clock.now_s += 1.0
    assert all(not row.noisy_step_times_s for row in with_noise(evaluator, rows, nothing))
    assert any(row.noisy_step_times_s for row in with_noise(evaluator, rows))


def test_the_same_budget_in_evaluations_gives_the_same_rows() -> None:
    def reached() -> list[tuple[str, float | None, int]]:
        evaluator = Evaluator(smallest_graph(), Cluster.load("hap_v100_p100"))
        rows = run_methods(evaluator, ["auto"], budget=Budget(evaluations=80))
        return [(row.method, row.step_time_s, row.num_evaluations) for row in rows]

    assert reached() == reached()
