"""The board of methods: from a stranger's file to its row, and what is not run again."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterog import cli
from heterog.agents.benchmark.board import Board, Entry, read_results
from heterog.agents.benchmark.pair_lists import PairLine
from heterog.agents.benchmark.rivals import known_rows
from heterog.agents.benchmark.statistics import (
    NO_FIT,
    estimate,
    interquartile_mean,
    probability_of_improvement,
)
from heterog.cluster import Cluster
from heterog.envs.toy import chain_graph
from heterog.errors import HeterogError, InputFileError
from heterog.graph.serialize import save_graph
from heterog.methods.planner import Budget, Problem
from heterog.simulator.evaluator import Evaluator

PAGE = Path(__file__).parents[2] / "docs" / "for" / "agents.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of one pair, and the method of the page."""
    monkeypatch.chdir(tmp_path)
    save_graph(chain_graph(), tmp_path / "chain.json")
    (tmp_path / "pairs.jsonl").write_text("chain.json paper_8gpu\n")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(next(each for each in blocks if "class Mine" in each))
    return tmp_path


def bench(capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    """The rows of the tiny board."""
    command = ["bench", "agents", "--suite", "pairs.jsonl", "--budget", "20e", "--seeds", "2"]
    cli.app([*command, "--methods", "random,mine.py:Mine", "--json", *more], standalone_mode=False)
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def test_the_method_of_the_page_gets_its_row(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = bench(capsys)
    assert [row["arm"] for row in rows] == ["mine", "random"]
    assert rows[0]["quality"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert rows[0]["beats_first"]["value"] == 1.0
    board = folder / "board.jsonl"
    whole = board.read_text()
    board.write_text(whole[:-20])  # stopped within a line
    bench(capsys)
    again = read_results(board)
    assert board.read_text().startswith(whole[: whole[:-1].rfind("\n") + 1])
    assert len(again) == 4
    (folder / "mine.py").write_text((folder / "mine.py").read_text() + "# changed\n")
    bench(capsys, "--report", "board.html")
    page = (folder / "board.html").read_text()
    assert "1.000 [1.000, 1.000]" in page
    assert page.count('viewBox="0 0 1000 200"') == 2
    assert "http" not in page.replace("http-equiv", "")
    assert len(read_results(board)) == 6


@pytest.mark.parametrize("name", ["random", "annealing", "tpe", "cma_es", "tree", "ppo"])
def test_a_rival_keeps_its_budget_and_is_repeated_by_its_seed(name: str) -> None:
    if name in ("tpe", "cma_es"):
        pytest.importorskip({"tpe": "optuna", "cma_es": "cmaes"}[name])
    method, found = known_rows()[name], []
    for _ in range(2):
        evaluator = Evaluator(chain_graph(), Cluster.load("paper_8gpu"))
        problem = Problem(evaluator=evaluator, budget=Budget(evaluations=3), seed=1)
        found.append(method.plan(problem))
    assert found[0].num_evaluations == found[1].num_evaluations == 3
    assert found[0].candidates == found[1].candidates
    assert found[0].candidates


def test_a_missing_rival_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)
    evaluator = Evaluator(chain_graph(), Cluster.load("paper_8gpu"))
    with pytest.raises(HeterogError, match=r"pip install heterog\[bench\]"):
        known_rows()["cma_es"].prepare(evaluator)


def test_a_line_that_is_no_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "board.jsonl"
    path.write_text('{"pair": 1}\n{}\n')
    with pytest.raises(InputFileError, match=r"line 1: no run of a board"):
        read_results(path)


def test_intervals_hold_the_number_and_are_points_without_spread() -> None:
    rng = np.random.default_rng(1)
    scores = rng.uniform(0.5, 1.0, size=(6, 5))
    found = estimate(interquartile_mean, scores)
    assert found.low < found.value < found.high
    same = estimate(probability_of_improvement, np.ones((3, 4)), np.ones((3, 4)))
    assert (same.low, same.value, same.high) == (0.5, 0.5, 0.5)


def test_arms_are_compared_on_what_all_of_them_have(tmp_path: Path) -> None:
    times = {"a": (1.0, 2.0), "b": (2.0, None)}
    rows = [
        {"pair": pair, "arm": arm, "seed": 0, "step_time_s": times[arm][number]}
        for number, pair in enumerate(("p", "q"))
        for arm in times
    ]
    rows.append({"pair": "p", "arm": "a", "seed": 1, "step_time_s": 9.0})  # b has none yet
    results = tmp_path / "kept.jsonl"
    spent = {"cpu_s": 1.0, "evaluations": 2}
    results.write_text("".join(json.dumps(row | spent) + "\n" for row in rows))

    def never(*asked: object) -> dict[str, Any]:
        raise AssertionError(asked)

    board = Board(
        pairs=[PairLine("", "", "p"), PairLine("", "", "q")],
        entries=[Entry("a", never), Entry("b", never)],
        budget=Budget(seconds=1.0),
        num_seeds=2,
        results=results,
        references={"p": 0.5},
    )
    found = {row["arm"]: row for row in board.summary()}
    assert (found["a"]["pairs"], found["a"]["seeds"]) == (2, 1)
    assert found["a"]["over_best"]["value"] == pytest.approx((1.0 / 0.5 * 1.0) ** 0.5)
    assert found["b"]["over_best"]["value"] == pytest.approx((2.0 / 0.5 * NO_FIT) ** 0.5)
    assert found["b"]["over_first"]["value"] == pytest.approx((2.0 * NO_FIT) ** 0.5)
    assert (found["b"]["do_not_fit"], found["b"]["close"], found["b"]["wall_s"]) == (1, 0, 1.0)
