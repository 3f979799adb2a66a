"""Drafts are legal plans, priced by a closed form; what is tried is judged by the referee."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from heterog.agents.beginnings import Beginnings, DraftAgent, chosen
from heterog.agents.draft_estimates import DraftEstimates
from heterog.agents.drafter import Drafter
from heterog.agents.drafts import Draft, Stage, balanced_starts
from heterog.agents.planners import Agent, drafts_budget
from heterog.cluster import Cluster
from heterog.envs.toy import chain_graph
from heterog.methods.local_search.planner import Search
from heterog.methods.planner import Budget, Problem
from heterog.simulator.evaluator import Evaluator


def problem(seed: int = 0, evaluations: int = 1000) -> Problem:
    evaluator = Evaluator(chain_graph(num_layers=6), Cluster.load("paper_8gpu"))
    return Problem(evaluator=evaluator, budget=Budget(evaluations=evaluations), seed=seed)


def drafter(seed: int = 0) -> Drafter:
    return Drafter(Search(problem(seed)), np.random.default_rng(seed))


def test_every_draft_and_variant_is_a_legal_strategy() -> None:
    made = drafter()
    search = made.search
    drafts = made.drawn(60)
    drafts += [each for draft in drafts[:10] for each in made.near(draft, 6)]
    kinds = {(len(d.stages) > 1, d.is_disjoint, d.num_micro > 1) for d in drafts}
    assert {(False, True, False), (True, True, True), (True, False, False)} <= kinds
    for draft in drafts:
        strategy = search._strategy(made.state(draft))
        strategy.check(made.graph, made.cluster)
        devices = {d for decision in strategy.decisions for d in decision.devices}
        of_stages = {d for stage in draft.stages for d in stage.devices}
        assert devices <= of_stages | {d for shard in draft.shards for d in shard.devices}
        assert draft.shards or devices == of_stages


def test_the_same_seed_draws_the_same_drafts() -> None:
    assert drafter(3).drawn(20) == drafter(3).drawn(20) != drafter(4).drawn(20)


def test_balanced_cuts_are_within_a_group_of_the_best() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        groups = rng.random(7)
        speeds = rng.uniform(0.5, 2.0, 3)
        seconds = np.concatenate([[0.0], np.cumsum(groups)])[None] / speeds[:, None]

        def slowest(starts: tuple[int, ...], seconds: np.ndarray = seconds) -> float:
            bounds = (*starts, 7)
            return max(
                float(seconds[s, last] - seconds[s, first])
                for s, (first, last) in enumerate(itertools.pairwise(bounds))
            )

        best = min(slowest((0, a, b)) for a, b in itertools.combinations(range(1, 7), 2))
        starts = balanced_starts(seconds)
        assert len(set(starts)) == 3
        assert slowest(starts) <= best + groups.max() / speeds.min()


def test_the_closed_form_is_the_compute_of_one_device() -> None:
    made = drafter()
    draft = Draft((Stage((0,)),), (0,))
    expected = made.seconds[made.types[0], -1, -1]
    assert DraftEstimates(made).estimate_s(draft) == pytest.approx(expected)
    twice = replace(draft, stages=(Stage((0,)), Stage((1,))), starts=(0, 3))
    assert DraftEstimates(made).estimate_s(twice) >= expected  # and the message between them


def test_what_is_chosen_is_different_and_has_the_best() -> None:
    scores = np.array([0.0, 3.0, 1.0, 2.0, -1.0])
    found = chosen(scores, 4, np.random.default_rng(0))
    assert len(set(found)) == 4
    assert found[:2] == [1, 3]
    assert sorted(chosen(scores, 9, np.random.default_rng(0))) == [0, 1, 2, 3, 4]
    shapes = ["a", "b", "b", "b", "a"]
    assert chosen(scores, 3, np.random.default_rng(0), shapes, most=1)[:2] == [1, 0]


def test_what_is_tried_is_judged_by_the_referee() -> None:
    search = Search(problem())
    beginnings = Beginnings(search, 0, limit=math.inf)
    beginnings.begin(40, 5)
    beginnings.go_on(20, 3)
    assert 5 < len(beginnings.found) <= 8
    best = beginnings.best()[0]
    strategy = search._strategy(best.state)
    judged = search.evaluator.referee(strategy, best.state.order)
    assert judged.step_time_s == pytest.approx(best.cost)


def test_an_answer_is_the_same_again_and_better_than_one_device() -> None:
    def answer() -> tuple[float, int]:
        asked = problem()
        found = DraftAgent().plan(asked)
        judged = asked.evaluator.referee(found.candidates[0].strategy)
        return judged.step_time_s, found.num_evaluations

    assert answer() == answer()
    made = drafter()
    alone = made.search._strategy(made.state(Draft((Stage((0,)),), (0,))))
    assert answer()[0] <= made.evaluator.referee(alone).step_time_s


def test_an_agent_hands_over_drafts_beside_its_draws_once() -> None:
    asked = problem(evaluations=600)
    plain = Agent(num_samples=4, drafts=False).plan(asked)
    both = Agent(num_samples=4).plan(again := replace(asked, memory={}))
    later = Agent(num_samples=4).plan(again)
    assert both.num_evaluations > plain.num_evaluations
    assert later.num_evaluations < both.num_evaluations
    judged = [
        min(each.judged.step_time_s for each in a.candidates if each.judged) for a in (both, plain)
    ]
    assert judged[0] <= judged[1]


@pytest.mark.parametrize(("left_s", "drafts_s"), [(59.3, 0.25), (0.1, 0.1)])
def test_drafts_have_what_draws_have_left_of_the_seconds_of_an_answer(
    left_s: float, drafts_s: float
) -> None:
    budget = drafts_budget(Budget(seconds=left_s), num_devices=4, spent_s=0.7)
    assert budget.seconds == pytest.approx(drafts_s)


def test_an_answer_in_seconds_is_finished_until_they_are_over_from_what_was_known() -> None:
    known = DraftAgent().plan(problem()).candidates
    now = itertools.count()
    asked = replace(problem(), budget=Budget(seconds=3000.0), clock=lambda: float(next(now)))
    spending = asked.spend()
    found = DraftAgent().plan(replace(asked, seeds=known))
    assert spending.seconds > 0.9 * 3000.0  # a look at the clock takes a second here
    best = [
        min(e.judged.step_time_s for e in each if e.judged) for each in (found.candidates, known)
    ]
    assert best[0] <= best[1]
