"""What a rehearsal makes of methods' rows; plans for batches smaller than the cluster."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

import heterog
from heterog.cluster import Cluster
from heterog.graph.capture import capture_step
from heterog.methods.planner import Budget, Problem
from heterog.methods.registry import AUTO, built_in_methods
from heterog.pricing.roofline import Roofline
from heterog.runtime.measure.rehearsal import rehearsal_of
from heterog.search.issue_order import IssuedStep
from heterog.search.judging import run_method
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy
from tests.runtime.cases import batch_of, capture_case, workload_of
from tests.search.asking import compare_methods, make_plan
from tests.simulator.builders import linear_chain
from tests.thorough import THOROUGH, few_of, one_in

CLUSTER = Cluster.load("paper_8gpu")
BASELINES = ("ev_ar", "ddp", "model_parallel")


def test_the_next_best_wins_where_the_best_cannot_run() -> None:
    graph = capture_case(workload_of("own loss")).graph
    asked: list[Strategy] = []

    def only_the_second(strategy: Strategy, issued: IssuedStep, check: Callable[[], None]) -> str:
        asked.append(strategy)
        return "rank 1 waits for rank 2" if len(asked) == 1 else ""

    plain = make_plan(graph, CLUSTER, methods=BASELINES, budget="10e")
    plan = make_plan(graph, CLUSTER, methods=BASELINES, budget="10e", rehearse=only_the_second)
    assert plan.outcome == "ok"
    assert plan.method != plain.method
    assert asked[0] == plain.strategy
    rows = {row.method: row for row in plan.rows}
    assert rows[plain.method].outcome == "cannot_run"
    assert rows[plain.method].shortage == "rank 1 waits for rank 2"
    assert rows[plan.method].is_rehearsed


def test_a_plan_that_cannot_run_says_why_and_is_saved(tmp_path: object) -> None:
    graph = capture_case(workload_of("own loss")).graph
    plan = make_plan(
        graph, CLUSTER, methods=("ddp",), budget="10e", rehearse=lambda *_: "rank 0 is alone"
    )
    assert (plan.outcome, plan.step_time_s) == ("cannot_run", None)
    assert plan.shortage == "rank 0 is alone"
    plan.save(f"{tmp_path}/plan.json")
    assert heterog.load_plan(f"{tmp_path}/plan.json").outcome == "cannot_run"


def test_compare_rehearses_every_row() -> None:
    captured = capture_case(workload_of("own loss"))
    found = compare_methods(
        captured.graph, CLUSTER, [*BASELINES, AUTO], budget=Budget(evaluations=5)
    ).rehearsed(rehearsal_of(captured))
    assert all(row.is_rehearsed for row in found.rows if row.outcome == "ok")
    assert found.rows[-1].method == AUTO


@THOROUGH
@pytest.mark.parametrize("name", few_of(["contrastive", "pseudo-labels", "gathered"], 1))
def test_no_method_cuts_a_batch_that_is_needed_whole(name: str) -> None:
    graph = capture_case(workload_of(name)).graph
    found = compare_methods(graph, CLUSTER, [AUTO], budget=Budget(evaluations=20))
    for row in found.rows:
        if row.outcome == "cannot_run":
            assert "need the whole batch" in row.shortage
        elif row.candidate is not None:
            assert row.candidate.strategy.num_micro_batches == 1, row.method


@one_in(2)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_smaller_than_the_number_of_devices(batch: int) -> None:
    workload = workload_of("own loss")
    few = tuple(tensor[:batch] for tensor in batch_of("own loss", 0))
    captured = capture_step(replace(workload, example_batch=few))
    found = compare_methods(
        captured.graph, CLUSTER, [AUTO], budget=Budget(evaluations=10)
    ).rehearsed(rehearsal_of(captured))
    assert {row.method for row in found.rows} == {
        AUTO,
        *(each.name for each in built_in_methods()),
    }
    assert found.rows[-1].outcome == "ok"
    for row in found.rows:
        assert row.outcome in ("ok", "not_applicable"), (row.method, row.shortage)


def test_compare_rehearses_with_the_cost_model_that_it_simulated_with() -> None:
    captured = capture_case(workload_of("mlp"))
    cost_model = Roofline()
    found = compare_methods(
        captured.graph, CLUSTER, ["ddp"], budget=Budget(evaluations=1), cost_model=cost_model
    )
    with mock.patch("heterog.search.portfolio.Evaluator", wraps=Evaluator) as made:
        found.rehearsed(rehearsal_of(captured))
    made.assert_called_once_with(captured.graph, CLUSTER, cost_model)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_pipeline_of_a_tiny_batch(batch: int) -> None:
    problem = Problem(
        evaluator=Evaluator(linear_chain(("a", "b", "c"), batch_size=batch), CLUSTER),
        budget=Budget(evaluations=20),
    )
    found = built_in_methods()["pipeline"].plan(problem)
    assert found.candidates
    assert all(c.strategy.num_micro_batches <= batch for c in found.candidates)


def test_a_pipeline_of_a_model_in_one_piece_says_why_it_does_not_apply() -> None:
    problem = Problem(
        evaluator=Evaluator(linear_chain(("a",)), CLUSTER), budget=Budget(evaluations=5)
    )
    row = run_method(built_in_methods()["pipeline"], problem)
    assert row.outcome == "not_applicable"
    assert "every stage needs a group of layers, and the model has 1" in row.shortage
