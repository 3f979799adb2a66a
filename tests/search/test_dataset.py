"""Solved pairs on disk."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from heterog.cli import app
from heterog.cluster import Cluster
from heterog.errors import HeterogError
from heterog.graph.serialize import save_graph
from heterog.search import portfolio
from heterog.search.dataset import SolvedPair, load_solved, solved_before
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from tests.envs.cases import language_graph

CLUSTER = "poplar_v100_t4"


def test_solved_pairs_are_kept_and_added_to(tmp_path: Path) -> None:
    save_graph(language_graph(), tmp_path / "small.json")
    asked = ["--models", str(tmp_path / "small.json"), "--clusters", CLUSTER, "--budget", "5e"]
    folder = tmp_path / "solved"
    for methods in ("cp_ar,ddp", "ddp,ev_ar"):
        done = CliRunner().invoke(app, ["dataset", str(folder), *asked, "--methods", methods])
        assert done.exit_code == 0, done.output
    (path,) = folder.iterdir()
    found = load_solved(path)
    assert {each.method for each in found.plans} == {"cp_ar", "ddp", "ev_ar"}
    times = [each.step_time_s for each in found.plans]
    assert times == sorted(times)
    evaluator = Evaluator(found.graph, found.cluster)
    for each in found.plans:
        again = evaluator.referee(each.strategy, Order[each.order.upper()])
        assert again.step_time_s == pytest.approx(each.step_time_s)
    plain = json.loads(gzip.decompress(path.read_bytes()))  # as the page for researchers reads it
    assert plain["plans"][0]["step_time_s"] == times[0]
    assert plain["graph"]["name"] == found.graph.name


def test_plans_that_another_process_adds_meanwhile_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_graph(language_graph(), tmp_path / "small.json")
    folder = tmp_path / "solved"

    def add(method: str) -> None:
        asked = ["--models", str(tmp_path / "small.json"), "--clusters", CLUSTER, "--budget", "5e"]
        app(["dataset", str(folder), *asked, "--methods", method], standalone_mode=False)

    def meanwhile(*args: Any, **keywords: Any) -> Any:
        monkeypatch.undo()
        add("ev_ar")
        return portfolio.run_methods(*args, **keywords)

    monkeypatch.setattr(portfolio, "run_methods", meanwhile)
    add("ddp")
    (path,) = folder.iterdir()
    assert {each.method for each in load_solved(path).plans} == {"ddp", "ev_ar"}


def test_another_graph_of_the_same_name_is_not_mixed_in(tmp_path: Path) -> None:
    pair = SolvedPair(graph=language_graph(), cluster=Cluster.load(CLUSTER))
    pair.save(tmp_path)
    assert solved_before(pair, tmp_path).graph.num_ops == pair.graph.num_ops
    other = replace(pair, graph=replace(pair.graph, optimizer="Other"))
    with pytest.raises(HeterogError, match="another graph of that name"):
        solved_before(other, tmp_path)
