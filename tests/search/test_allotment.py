"""What a budget in seconds is for besides searches: measured, kept back, and left out if it must.

Time is the fake clock of ``test_budget``.
"""

import math
from collections.abc import Callable

import pytest

import heterog.search.issue_order as issue_order
from heterog.graph.capture import capture_step
from heterog.lowering.program import FIRST_LINK_KIND
from heterog.methods.planner import Budget, Candidate, Spending, TimeUp
from heterog.runtime.measure.rehearsal import rehearsal_of
from heterog.search.allotment import (
    EXPLANATION_S,
    LAST_S,
    LATE,
    MOST_KEPT,
    NOISE_PART,
    NOISE_S,
    REHEARSAL_OP_S,
    REHEARSAL_S,
    WRITING_OP_S,
    Allotment,
)
from heterog.search.issue_order import IssuedStep, IssuedSteps, issued_step
from heterog.search.portfolio import UNPLAYED
from heterog.search.rows import MethodRow
from heterog.search.sharing import BudgetSplit
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy
from tests.runtime.cases import workload_of
from tests.runtime.strategies import cluster, graph_of
from tests.search.asking import make_plan, run_methods
from tests.search.test_budget import clocked

BASELINES = ("ev_ar", "ddp", "model_parallel")


def best_of(evaluator: Evaluator) -> Candidate:
    (row,) = run_methods(evaluator, ["ddp"], budget=Budget(evaluations=1))
    assert row.candidate is not None
    return row.candidate


def many_turns(patch: pytest.MonkeyPatch, number: int) -> None:
    """Have every strategy take a number of turns."""
    patch.setattr(issue_order, "num_turns", lambda program: number)


def test_a_command_s_start_takes_at_most_a_tenth() -> None:
    _, clock = clocked(0.01)
    for started_s, taken_s in ((0.0, 0.0), (0.7, 0.7), (25.0, 1.0)):
        allotment = Allotment(Budget(seconds=10.0), clock=clock, started_s=lambda s=started_s: s)  # type: ignore[misc]
        allotment.begin()
        assert allotment.search_s([]) == pytest.approx(10.0 * (1.0 - NOISE_PART) - taken_s)
    endless = Allotment(Budget(evaluations=3), clock=clock, started_s=lambda: 25.0)
    endless.begin()
    assert math.isinf(endless.search_s([]))


def test_what_follows_is_kept_back_by_turns_and_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, clock = clocked(0.01)
    found = best_of(evaluator)
    num_ops, turns = evaluator.graph.num_ops, 60_000
    many_turns(monkeypatch, turns)
    for is_explained, is_rehearsed in ((True, True), (False, True), (True, False)):
        allotment = Allotment(Budget(seconds=10.0), is_explained=is_explained, clock=clock)
        assert allotment.search_s([]) == pytest.approx(10.0 * (1.0 - NOISE_PART))
        allotment.follow(IssuedSteps(evaluator), is_rehearsed=is_rehearsed)
        clock.now_s += 1.0
        left_s = allotment.search_s([found])  # 0.01 s for the order, as one simulation makes it
        follows_s = (turns * REHEARSAL_S + num_ops * REHEARSAL_OP_S) * is_rehearsed
        follows_s += turns * NOISE_S
        follows_s += (turns * EXPLANATION_S + num_ops * WRITING_OP_S + LAST_S) * is_explained
        assert left_s == pytest.approx(10.0 - 1.0 - 0.01 - max(follows_s - 10.0 * LATE, 0.0))
        again_s = allotment.search_s([found])
        assert again_s == pytest.approx(left_s), "the order is made once"


def test_time_is_kept_for_what_buying_would_save_if_it_suffices_for_one_thing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluator, clock = clocked(0.0)
    found = best_of(evaluator)
    many_turns(monkeypatch, 15_000)
    left = []
    for budget_s in (2.0, 5.0):
        for with_changes in (False, True):
            budget = Budget(seconds=budget_s)
            allotment = Allotment(
                budget, is_explained=True, with_changes=with_changes, clock=clock
            )
            allotment.follow(IssuedSteps(evaluator), is_rehearsed=True)
            left.append(allotment.search_s([found]))
    assert left[0] == pytest.approx(left[1])  # 0.16 s are less than 15,000 times 2e-5 s
    assert left[3] == pytest.approx(left[2] - 0.4)


def test_turns_are_tasks_and_pairs_that_exchange_something() -> None:
    """A sum over three devices is three pairs, a transfer one."""
    evaluator = Evaluator(graph_of("mlp"), cluster())
    for method, sets in (("ev_ar", 3), ("ev_ps", 0)):
        (row,) = run_methods(evaluator, [method], budget=Budget(evaluations=1))
        assert row.candidate is not None
        asked = row.candidate.strategy, row.candidate.orders[0]
        step = issued_step(evaluator, *asked)
        links = step.program.kind >= FIRST_LINK_KIND
        sizes = [len(step.program.channels[c].devices) for c in step.program.channel[links]]
        assert (3 in sizes) == (sets == 3)
        expected = step.program.num_tasks + sum({2: 1, 3: 3}[size] for size in sizes)
        assert IssuedSteps(evaluator).num_turns(*asked) == expected


def test_what_is_needed_whichever_strategy_wins_is_done_first_and_counts() -> None:
    evaluator, clock = clocked(0.01)

    def work() -> None:
        clock.now_s += 2.0

    allotment = Allotment(Budget(seconds=10.0), clock=clock)
    allotment.follow(IssuedSteps(evaluator), is_rehearsed=True, ahead=work)
    before_s = allotment.search_s([])
    allotment.begin()
    assert allotment.search_s([]) == pytest.approx(before_s - 2.0)


def test_searches_keep_a_part_however_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, clock = clocked(1.0)
    many_turns(monkeypatch, 10_000_000)
    allotment = Allotment(Budget(seconds=10.0), is_explained=True, clock=clock)
    allotment.follow(IssuedSteps(evaluator), is_rehearsed=True)
    found = best_of(evaluator)
    allotment.begin()
    assert allotment.search_s([found]) == pytest.approx(10.0 * (1.0 - MOST_KEPT) - 1.0)
    clock.now_s += 100.0
    for seconds in (allotment.trial_s, allotment.changes_s):
        assert 0.0 < seconds < 0.01


def test_a_budget_in_evaluations_keeps_nothing_back() -> None:
    allotment = Allotment(Budget(evaluations=5), is_explained=True)
    assert math.isinf(allotment.search_s([]))
    assert math.isinf(allotment.trial_s)


def test_searches_share_what_is_left_where_one_took_too_long() -> None:
    split = BudgetSplit(Budget(seconds=40.0), 4)
    assert split.next_part(40.0).seconds == pytest.approx(10.0)
    split.settle(22.0)
    assert split.next_part(18.0).seconds == pytest.approx(6.0)
    split.settle(6.0)
    # Not less than half of an equal part, whatever was spent before.
    assert split.next_part(1.0).seconds == pytest.approx(5.0)


def test_named_methods_share_the_seconds_of_a_plan() -> None:
    """Their baselines alone might each have taken the whole budget."""
    evaluator, clock = clocked(0.02)
    run_methods(
        evaluator,
        ["local_search", "two_segment"],
        budget=Budget(seconds=20.0),
        allotment=Allotment(Budget(seconds=20.0), clock=clock),
    )
    assert 10.0 < clock.now_s <= 20.0 * 1.05


def slow_plan(seconds: float) -> MethodRow:
    """The winner of a plan of 10 s whose rehearsal takes some time."""
    evaluator, clock = clocked(0.001)

    def rehearse(strategy: Strategy, issued: IssuedStep, check: Callable[[], None]) -> str:
        clock.now_s += seconds
        check()
        return ""

    budget = Budget(seconds=10.0)
    plan = make_plan(
        evaluator.graph,
        evaluator.cluster,
        methods=BASELINES,
        budget=budget,
        evaluator=evaluator,
        rehearse=rehearse,
        allotment=Allotment(budget, clock=clock),
    )
    row = next(row for row in plan.rows if row.method == plan.method)
    assert plan.outcome == "ok"
    return row


@pytest.mark.parametrize(("seconds", "is_cut"), [(1.0, False), (1000.0, True)])
def test_a_rehearsal_that_time_does_not_suffice_for_says_so(seconds: float, is_cut: bool) -> None:
    row = slow_plan(seconds)
    assert row.is_rehearsed is not is_cut
    assert (UNPLAYED in row.note) is is_cut


def test_the_order_of_a_strategy_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Strategy] = []

    def counted(evaluator: Evaluator, strategy: Strategy, order: Order) -> IssuedStep:
        made.append(strategy)
        return issued_step(evaluator, strategy, order)

    monkeypatch.setattr(issue_order, "issued_step", counted)
    slow_plan(1.0)
    assert made
    assert len(made) == len(set(made))


def test_a_rehearsal_on_ranks_ends_when_it_is_asked_to() -> None:
    captured = capture_step(workload_of("own loss"))
    evaluator, clock = clocked()
    spending = Spending(Budget(seconds=1.0), evaluator, clock=clock)
    own = Evaluator(captured.graph, evaluator.cluster)
    (row,) = run_methods(own, ["ddp"], budget=Budget(evaluations=1))
    assert row.candidate is not None
    issued = issued_step(own, row.candidate.strategy, row.candidate.orders[0])
    assert rehearsal_of(captured)(row.candidate.strategy, issued, spending.check) == ""
    clock.now_s += 2.0
    with pytest.raises(TimeUp):
        rehearsal_of(captured)(row.candidate.strategy, issued, spending.check)


def test_an_answer_under_a_long_budget_is_a_few_seconds_late_at_most() -> None:
    now = [0.0]
    for seconds in (10.0, 60.0, 3600.0):
        allotment = Allotment(Budget(seconds=seconds), clock=lambda: now[0])
        allotment.begin()
        assert allotment.trial_s == pytest.approx(seconds + min(0.17 * seconds, 6.0))
