"""Paired searches: who is compared with whom, and what the numbers mean."""

import math
from dataclasses import replace

import pytest
from paired_runs import (
    ENUMERATION,
    LED,
    PLAIN,
    Run,
    against,
    evaluations_needed,
    paired_runs,
)

from tests.envs.cases import language_graph, mixed_cluster


def run(
    method: str, budget: int, seconds: float | None, *, seed: int = 0, model: str = "a"
) -> Run:
    return Run(
        model=model, cluster="c", method=method, policy="p" if method == LED else "",
        budget=budget, seed=seed, step_time_s=seconds, num_evaluations=budget, seconds=0.0,
    )  # fmt: skip


def test_runs_are_made_once_and_stay_within_their_budget() -> None:
    pairs = [(language_graph(), mixed_cluster())]
    runs = list(paired_runs(pairs, ["heldout"], budgets=[60], longer=[80]))
    assert [(each.method, each.budget) for each in runs] == [
        (PLAIN, 60), (ENUMERATION, 60), (LED, 60), (PLAIN, 80)
    ]  # fmt: skip
    assert all(each.step_time_s is not None for each in runs)
    # A search that is asked for 60 may end its last round of the referee.
    assert all(each.num_evaluations <= 1.3 * each.budget for each in runs)
    done = {each.key for each in runs[:2]}
    again = list(paired_runs(pairs, ["heldout"], budgets=[60], longer=[80], done=done))
    assert [replace(each, seconds=0.0) for each in again] == [
        replace(each, seconds=0.0) for each in runs[2:]
    ]


def test_ratios_are_means_over_pairs_and_not_fitting_is_worse() -> None:
    runs = [
        run(LED, 10, 1.0), run(PLAIN, 10, 2.0),  # 0.5
        run(LED, 10, 4.0, model="b"), run(PLAIN, 10, 2.0, model="b"),  # 2 and 0.5: 1 on average
        run(LED, 10, 1.0, model="b", seed=1), run(PLAIN, 10, 2.0, model="b", seed=1),
        run(LED, 10, 1.0, model="c"), run(PLAIN, 10, None, model="c"),
        run(LED, 10, 1.001, model="d"), run(PLAIN, 10, 1.0, model="d"),  # no difference
        run(LED, 10, 1.0, model="e"),  # nobody to compare with
    ]  # fmt: skip
    found = against(runs, 10, "p", PLAIN)
    assert found["ratio"] == pytest.approx((0.5 * 1.0 * 1.001) ** (1 / 3))
    assert found["low"] <= found["ratio"] <= found["high"]
    assert (found["better"], found["worse"], found["count"]) == (3, 1, 5)
    assert against(runs, 20, "p", PLAIN) == {"count": 0.0, "better": 0.0, "worse": 0.0}


def test_evaluations_needed_are_read_off_the_line_of_plain_search() -> None:
    """Step time 1 / sqrt(budget): half the time needs four times the evaluations."""
    runs = [run(PLAIN, budget, budget**-0.5) for budget in (100, 1000, 10_000)]
    needed = evaluations_needed([*runs, run(LED, 100, 0.05)], 100, "p")
    assert needed["evaluations"] == pytest.approx(400.0)
    assert needed["times"] == pytest.approx(4.0)
    never = evaluations_needed([*runs, run(LED, 100, 0.009)], 100, "p")
    assert (never["evaluations"], never["longest"]) == (None, 10_000)
    assert evaluations_needed([run(PLAIN, 100, None), run(LED, 100, 1.0)], 100, "p")["count"] == 0
    assert math.isclose(evaluations_needed([*runs, run(LED, 100, 1.0)], 100, "p")["times"], 1.0)
