"""Methods that search at the same time: the same plans however the processes are scheduled."""

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heterog.cli import app
from heterog.cluster import Cluster
from heterog.graph.serialize import save_graph
from heterog.methods.planner import Budget
from heterog.methods.registry import built_in_methods
from heterog.search.conformance import load_planner
from heterog.search.judging import can_be_sent, deal
from heterog.search.rows import MethodRow
from heterog.simulator.evaluator import Evaluator
from heterog.workers import Seats, open_seats
from tests.search.asking import run_methods
from tests.search.test_planners import graph as mlp
from tests.test_interrupt import started, wait_for
from tests.thorough import IS_THOROUGH, THOROUGH, cases

BUDGET = Budget(evaluations=cases(240, 40))
TARGET = "paper_8gpu"


def rows_of(seats: Seats | None, budget: Budget = BUDGET) -> list[MethodRow]:
    evaluator = Evaluator(mlp(), Cluster.load(TARGET))
    return run_methods(evaluator, ["auto"], budget=budget, seed=3, seats=seats)


def test_every_method_is_dealt_and_searches_at_random_are_everywhere() -> None:
    known = [each for each in built_in_methods() if can_be_sent(each)]
    for num_seats in (1, 2, 3, 64):
        dealt = deal(known, num_seats)
        for planner in known:
            times = sum(planner in seat for seat in dealt)
            assert times == (num_seats if planner.is_random else 1), planner.name
        assert all(seat == sorted(seat, key=known.index) for seat in dealt), "in their order"


@pytest.mark.distributed
def test_two_seats_search_as_much_as_one_and_always_the_same() -> None:
    alone = rows_of(None)
    with open_seats("2") as seats:
        first = rows_of(seats)
        second = rows_of(seats) if IS_THOROUGH else first
        seconds, quick = cases(15, 10) / 10, list[MethodRow]()
        while seconds < 60 and not any(row.step_time_s for row in quick):
            quick = rows_of(seats, Budget(seconds=seconds))
            seconds *= 3  # on a busy machine nothing may be found in one
    told = [(row.method, row.step_time_s, row.num_evaluations) for row in first]
    assert told == [(row.method, row.step_time_s, row.num_evaluations) for row in second]
    assert [row.method for row in first] == [row.method for row in alone]
    for row, other in zip(first, alone, strict=True):
        assert row.num_evaluations <= 1.1 * other.num_evaluations + 2, row.method
        if row.stage == "baseline" and row.method != "megatron_grid":
            assert row.step_time_s == other.step_time_s, row.method
    best = min(row.step_time_s or 1e9 for row in alone)
    assert min(row.step_time_s or 1e9 for row in first) <= 1.02 * best
    # How far a second takes them depends on the machine.
    assert [row.method for row in quick] == [row.method for row in alone]
    assert any(row.step_time_s for row in quick)


OWN = """
from heterog.methods.planner import Planner, PlanResult

class Own:
    name, stage = "own_here", "search"

    def plan(self, problem):
        return PlanResult(candidates=problem.seeds[:1], num_evaluations=0, search_seconds=0.0)

class Derived(Own, Planner):
    pass
"""


@pytest.mark.parametrize("name", ["Own", "Derived"])
def test_a_method_of_ones_own_is_not_sent_to_workers(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert not can_be_sent(load_planner(f"{tmp_path / 'own.py'}:{name}", built_in_methods()))


@THOROUGH
@pytest.mark.distributed
def test_a_method_of_ones_own_runs_here_beside_workers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    save_graph(mlp(), tmp_path / "graph.json")
    said = CliRunner().invoke(
        app,
        [
            *("plan", str(tmp_path / "graph.json"), "--cluster", TARGET, "--workers", "2"),
            *("--method", f"tuned_uniform,{tmp_path / 'own.py'}:Own,auto", "--budget", "60e"),
            *("--no-changes", "--json"),
        ],
    )
    assert said.exit_code == 0, said.output
    methods = {row["method"]: row for row in json.loads(said.stdout)["methods"]}
    assert methods["own_here"]["outcome"] == "ok"


@THOROUGH
@pytest.mark.distributed
def test_interrupted_workers_hand_over_their_best(tmp_path: Path) -> None:
    save_graph(mlp(), tmp_path / "graph.json")
    process = started(
        tmp_path, "plan", "graph.json", "--cluster", "hap_v100_p100", "--workers", "2",
        "--budget", "1h", "-o", "plan.json",
    )  # fmt: skip
    wait_for(process, lambda line: "2 at a time" in line and "methods" in line)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "written to plan.json" in err.splitlines()[-1]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["graph.json", "plan.json"]
