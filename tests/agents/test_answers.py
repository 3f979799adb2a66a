"""An answer begins by rows or islands, and moves finish it until its budget is over."""

import itertools
from dataclasses import replace

import pytest

from heterog.agents.planners import (
    BY_ROWS,
    ISLANDS_PART,
    Agent,
    answer_limit_s,
    of_an_answer,
    policy_methods,
)
from heterog.cluster import Cluster
from heterog.envs.toy import chain_graph
from heterog.methods.islands.planner import Islands
from heterog.methods.planner import Budget, PlanResult, Problem
from heterog.simulator.evaluator import Evaluator


def problem(evaluations: int = 300, cluster: str = "paper_8gpu") -> Problem:
    evaluator = Evaluator(chain_graph(num_layers=6), Cluster.load(cluster))
    return Problem(evaluator=evaluator, budget=Budget(evaluations=evaluations))


def best_s(asked: Problem, found: PlanResult) -> float:
    referee = asked.evaluator.referee
    return min(referee(each.strategy, each.orders[0]).step_time_s for each in found.candidates)


@pytest.mark.parametrize("cluster", ["paper_8gpu", "mixed_32"])  # rows, islands
def test_an_answer_is_the_same_again_and_no_worse_than_what_it_began_from(cluster: str) -> None:
    asked = [problem(cluster=cluster) for _ in range(3)]
    found = [Agent().plan(each) for each in asked[:2]]
    assert found[0].candidates == found[1].candidates
    assert found[0].num_evaluations <= 300 + 6  # as ``test_policies_keep_to_small_budgets``
    is_by_rows = asked[2].evaluator.cluster.num_devices in BY_ROWS
    begins, part = (Agent(only_rows=True), 0.5) if is_by_rows else (Islands(), ISLANDS_PART)
    begun = begins.plan(replace(asked[2], budget=asked[2].budget.part(part)))
    assert best_s(asked[0], found[0]) <= best_s(asked[2], begun)


def test_beside_other_methods_an_answer_is_rows_alone() -> None:
    asked = problem()
    rows = Agent(only_rows=True).plan(asked)
    seeds = Islands().plan(problem()).candidates
    assert Agent().plan(replace(asked, seeds=seeds, memory={})).candidates == rows.candidates


@pytest.mark.parametrize(("asked_s", "given_s"), [(60.0, answer_limit_s(4)), (0.1, 0.1)])
def test_an_answer_takes_at_most_its_seconds(asked_s: float, given_s: float) -> None:
    assert of_an_answer(Budget(seconds=asked_s), 4).seconds == given_s


def test_moves_finish_an_answer_until_its_seconds_are_over() -> None:
    now = itertools.count(step=1e-4)  # a look at the clock takes so long here
    asked = replace(problem(), budget=Budget(seconds=60.0), clock=lambda: next(now))
    spending = asked.spend()
    Agent().plan(asked)
    assert 0.9 * answer_limit_s(8) < spending.seconds < 1.2 * answer_limit_s(8)


def test_an_answer_keeps_what_it_began_from_when_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, begun = [0.0], Islands().plan(problem(cluster="mixed_32"))

    def plan(self: Islands, asked: Problem) -> PlanResult:
        now[0] = 100.0
        return begun

    monkeypatch.setattr(Islands, "plan", plan)
    asked = replace(problem(cluster="mixed_32"), budget=Budget(seconds=60.0), clock=lambda: now[0])
    assert Agent().plan(asked).candidates == begun.candidates


@pytest.mark.parametrize("evaluations", [1, 3, 10, 70])
def test_an_answer_keeps_to_its_evaluations(evaluations: int) -> None:
    for cluster in ("paper_8gpu", "mixed_32"):
        found = Agent().plan(problem(evaluations, cluster))
        assert found.candidates
        assert found.num_evaluations <= evaluations + 1


def test_an_answer_begins_by_the_rows_of_a_policy_of_ones_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On 32 devices, too, where ``islands`` begins beside the default policy."""
    monkeypatch.setattr(Islands, "plan", lambda self, asked: pytest.fail("islands began"))
    agent, _ = policy_methods("heldout")
    assert agent.plan(problem(cluster="mixed_32")).candidates


def test_an_answer_begins_by_rows_where_islands_find_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = PlanResult(candidates=(), num_evaluations=0)
    monkeypatch.setattr(Islands, "plan", lambda self, asked: nothing)
    asked, alone = (problem(cluster="mixed_32") for _ in range(2))
    rows = Agent(only_rows=True).plan(replace(alone, budget=alone.budget.part(0.5)))
    assert best_s(asked, Agent().plan(asked)) <= best_s(alone, rows)


def test_an_answer_begins_by_islands_where_rows_find_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = PlanResult(candidates=(), num_evaluations=0)
    monkeypatch.setattr(Agent, "_rows", lambda self, asked: nothing)
    asked, alone = problem(), problem()
    islands = Islands().plan(replace(alone, budget=alone.budget.part(ISLANDS_PART)))
    assert best_s(asked, Agent().plan(asked)) <= best_s(alone, islands)
