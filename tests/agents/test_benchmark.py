"""The board of methods: from a stranger's file to its row, and what is not run again."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heterog import cli
from heterog.agents.benchmark.board import Board, Entry, read_results
from heterog.agents.benchmark.pair_lists import PairLine
from heterog.agents.benchmark.placers import Gdp, HeterogAgent, Placeto, Settings, heterog_actions
from heterog.agents.benchmark.rivals import RIVALS, WithoutTraining, known_rows
from heterog.agents.benchmark.row_search import Rows
from heterog.agents.benchmark.sailor import sailor_s
from heterog.agents.benchmark.statistics import (
    NO_FIT,
    estimate,
    interquartile_mean,
    probability_of_improvement,
)
from heterog.agents.benchmark.suites import SUITES, pairs_of
from heterog.agents.benchmark.tiles import (
    Node,
    doppler_units,
    equal_devices,
    graph_of,
    nodes_of,
)
from heterog.agents.checkpoint import load_checkpoint
from heterog.agents.planners import DEFAULT_POLICY, shipped_lead
from heterog.cluster import Cluster
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.errors import HeterogError, InputFileError
from heterog.files import wait_for_file
from heterog.graph.op_graph import Phase
from heterog.graph.serialize import save_graph
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Budget, Problem
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.space import StepSettings
from heterog.strategy.strategy import Decision, Sync
from tests.simulator.builders import cluster_of

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


def bench(
    capsys: pytest.CaptureFixture[str], *more: str, methods: str = "random,mine.py:Mine"
) -> list[dict[str, Any]]:
    """The rows of the tiny board."""
    command = ["bench", "agents", "--suite", "pairs.jsonl", "--budget", "20e", "--seeds", "2"]
    cli.app([*command, "--methods", methods, "--json", *more], standalone_mode=False)
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
    assert page.count('viewBox="0 0 1000 200"') == 3
    assert "http" not in page.replace("http-equiv", "")
    assert len(read_results(board)) == 6
    for line in read_results(board):
        evaluations, best_s = zip(*line["curve"], strict=True)
        assert list(evaluations) == sorted(set(evaluations))
        assert list(best_s) == sorted(set(best_s), reverse=True)
    with pytest.raises(HeterogError, match="a row is one method, auto is all of them"):
        bench(capsys, methods="auto")
    with pytest.raises(HeterogError, match="two of them are called random"):
        bench(capsys, methods="random,random")
    more = bench(capsys, "--seeds", "1:3")
    assert [line["seed"] for line in read_results(board)[6:]] == [2, 2]
    assert {row["seeds"] for row in more} == {2}


@pytest.mark.parametrize("name", RIVALS)
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


@pytest.mark.parametrize("name", ["heterog_agent", "gdp", "placeto"])
def test_an_agent_learns_that_one_device_alone_is_best(name: str) -> None:
    """By hand: the network is so slow that a step takes as long as one device computes."""
    graph, cluster = chain_graph(6), toy_cluster()
    evaluator = Evaluator(graph, cluster)
    alone = uniform_strategy(evaluator, Decision(devices=(0,), shares=(graph.batch_size,)))
    best_s = evaluator.evaluate(alone, Order.RANK).step_time_s
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=150))

    def found_s(method: str) -> float:
        best = known_rows()[method].plan(problem).candidates[0]
        return evaluator.evaluate(best.strategy, Order.RANK).step_time_s

    assert found_s(name) == best_s < found_s("random")


def test_placeto_places_its_repositorys_two_chains() -> None:
    """By hand: the first op, a transfer, six ops of the later chain, the last op beside it."""
    reads = [6 * chain + step if step else 0 for chain in (0, 1) for step in range(6)]
    chains = [Node(1.0, (maker,)) for maker in reads]
    nodes = [Node(1.0, ()), *chains, Node(1.0, (6, 12))]
    evaluator = Evaluator(graph_of("chains", nodes, travel=1.0), equal_devices(2))
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=150))
    found = known_rows()["placeto"].plan(problem).candidates[0]
    assert evaluator.evaluate(found.strategy, Order.RANK).step_time_s == pytest.approx(9e-6)


def rows_on(cluster: str) -> Rows:
    """The rows of a small problem."""
    evaluator = Evaluator(chain_graph(), Cluster.load(cluster))
    return Rows(Problem(evaluator=evaluator, budget=Budget(evaluations=50)), lambda rows: None)


def test_heterog_decides_among_its_papers_actions_and_rewards() -> None:
    """Section 4.1.2: each of M devices, and {even, proportional} x {PS, AllReduce} on all."""
    pair = rows_on("paper_8gpu").pair
    chosen = [pair.table[number] for number in heterog_actions(pair)]
    assert len(chosen) == 8 + 4
    assert [len(each.devices) for each in chosen] == [1] * 8 + [8] * 4
    assert len({(each.shares, each.sync.is_served) for each in chosen[8:]}) == 4
    agent = HeterogAgent(rows_on("paper_8gpu"), Settings())
    assert (agent.reward(4.0, True), agent.reward(4.0, False)) == (-2.0, -20.0)


def test_gdp_sees_a_graph_and_no_order_of_its_blocks() -> None:
    agent = Gdp(rows_on("paper_8gpu"), Settings())
    count = agent.pair.num_blocks
    order = torch.from_numpy(np.random.default_rng(0).permutation(count))
    place = torch.argsort(order)
    with torch.no_grad():
        straight = agent.network(agent.features, agent.edges)
        moved = agent.network(agent.features[order], place[agent.edges])
    torch.testing.assert_close(moved, straight[order])


def test_the_rewards_of_placeto_sum_up_to_what_an_episode_gained() -> None:
    rows = rows_on("paper_8gpu")
    agent = Placeto(rows, Settings())
    agent.learn()
    gained = agent.cost(agent.first) - agent.cost(list(rows.found)[-1])
    assert agent.returns[0][0] == pytest.approx(gained)


def test_a_missing_rival_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)
    evaluator = Evaluator(chain_graph(), Cluster.load("paper_8gpu"))
    with pytest.raises(HeterogError, match=r"pip install heterog\[bench\]"):
        known_rows()["cma_es"].prepare(evaluator)


def test_every_suite_names_its_pairs_once() -> None:
    for suite in SUITES:
        names = [line.pair for line in pairs_of(suite)]
        assert len(set(names)) == len(names) >= 6
    with pytest.raises(HeterogError, match="placement"):
        pairs_of("placements")


def test_a_chain_of_tiled_products_takes_its_bound_when_each_device_owns_a_tile() -> None:
    """By hand: a device's 12 products of 100 units and 7 sums of 0.01 never wait for a sum.

    DOPPLER's chain has the same work (4800.28) and the same bound (1200.07).
    """
    nodes = nodes_of("tiled_chain")
    assert (len(nodes), round(sum(node.work for node in nodes), 6)) == (76, 4800.28)
    owners = [tile for tile in range(4) for _ in range(3)]
    place = [*owners * 4, *range(4), *owners * 2]
    assert doppler_units(nodes, place) == pytest.approx(1200.07)
    assert doppler_units(nodes, [0] * 76) == pytest.approx(4800.28)
    graph, cluster = pairs_of("placement")[0].load(None)
    evaluator = Evaluator(graph, cluster)
    space = evaluator.space([Decision(devices=(d,), shares=(1,)) for d in range(4)])
    strategy = space.decode(np.array(place), StepSettings(1), step_barrier=True)
    found = evaluator.referee(strategy, Order.FIFO)
    assert found.step_time_s == pytest.approx(1200.07e-6, rel=1e-4)


def test_a_placement_is_also_judged_by_doppler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(chain_graph(), tmp_path / "chain.json")
    (tmp_path / "pairs.jsonl").write_text("chain.json paper_8gpu\n")
    command = ["bench", "agents", "--suite", "placement,pairs.jsonl", "--budget", "8e", "--seeds"]
    cli.app([*command, "1", "--methods", "random,annealing", "--json"], standalone_mode=False)
    first, other = json.loads(capsys.readouterr().out)["suites"]
    assert min(row["over_other"]["value"] for row in first["rows"]) >= 1.0
    assert [row["said"] for row in first["rows"]] == [1.0, 1.0]
    assert all(row.get("said", 0.0) in (0.0, 1.0) for row in other["rows"]), "one run of each"
    lines = read_results(tmp_path / "board.jsonl")
    assert len(lines) == 12 + 2
    for line in lines[:12]:
        name, cluster = line["pair"].split()
        work = sum(node.work for node in nodes_of(name))
        assert line["other_s"] >= 1e-6 * work / int(cluster.removeprefix("equal_"))


def test_a_value_that_is_read_elsewhere_travels_and_devices_serve_in_order_of_arrival() -> None:
    nodes = [Node(1.0, ()), Node(2.0, ()), Node(3.0, (0,)), Node(1.0, (1, 2))]
    assert doppler_units(nodes, [0, 0, 0, 0]) == 7.0
    assert doppler_units(nodes, [0, 1, 0, 0]) == 11.0  # node 1 ends at 2 and travels for 8
    assert doppler_units(nodes, [0, 1, 1, 1]) == 9.0  # node 0 ends at 1 and travels for 4


def test_sailor_counts_compute_sends_and_a_ring_one_after_another() -> None:
    """By hand on two equal devices of two hosts: replicas, two stages, and what cannot be said."""
    graph, cluster = chain_graph(), cluster_of((1e9, ["T4"]), (1e9, ["T4"]))
    evaluator = Evaluator(graph, cluster)
    kind, batch = cluster.devices[0].type, graph.batch_size
    is_update = np.array([op.phase == Phase.UPDATE for op in graph.ops])

    def seconds(samples: int) -> float:
        found = evaluator.cost_model.op_seconds(graph, kind, samples)
        return float(found[~is_update].sum())

    table = [
        Decision(devices=(0, 1), shares=(batch // 2, batch // 2)),
        Decision(devices=(0,), shares=(batch,)),
        Decision(devices=(1,), shares=(batch,)),
        Decision(devices=(0, 1), shares=(batch // 2, batch // 2), sync=Sync.ZERO3),
    ]
    space, groups = evaluator.space(table), evaluator.tables.num_groups

    def judged(*row: int) -> float | None:
        numbers = np.array(row)
        return sailor_s(evaluator, space.decode(numbers, StepSettings(1), step_barrier=True))

    updates = evaluator.cost_model.op_seconds(graph, kind, batch)[is_update].sum()
    sizes = sum(graph.tensors[each].num_bytes for _, each, _ in graph.updates)
    rate = cluster.nic_bandwidth_bytes_per_s[0]
    ring = seconds(batch // 2) + updates + sizes / rate
    assert judged(*[0] * groups) == pytest.approx(ring, rel=1e-9)
    assert judged(*[1] * groups) == pytest.approx(seconds(batch) + updates, rel=1e-9)
    half = groups // 2
    staged = judged(*[1] * half, *[2] * (groups - half))
    assert staged is not None
    sent = (staged - seconds(batch)) * rate  # once ahead, twice back, and an update
    assert 3 * 4 * batch <= sent
    assert judged(*[1] * half, *[0] * (groups - half)) is None  # a device of two stages
    assert judged(*[3] * groups) is None


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
        seeds=range(2),
        results=results,
        references={"p": 0.5},
    )
    found = {row["arm"]: row for row in board.summary()}
    assert (found["a"]["pairs"], found["a"]["seeds"]) == (2, 1)
    assert found["a"]["over_best"]["value"] == pytest.approx((1.0 / 0.5 * 1.0) ** 0.5)
    assert found["b"]["over_best"]["value"] == pytest.approx((2.0 / 0.5 * NO_FIT) ** 0.5)
    assert found["b"]["over_first"]["value"] == pytest.approx((2.0 * NO_FIT) ** 0.5)
    assert (found["b"]["do_not_fit"], found["b"]["close"], found["b"]["wall_s"]) == (1, 0, 1.0)


def test_a_row_is_given_nothing_that_an_earlier_one_has_found_out(tmp_path: Path) -> None:
    save_graph(chain_graph(), graph := tmp_path / "chain.json")
    seen = []

    def note(evaluator: Evaluator, seed: int, budget: Budget) -> dict[str, Any]:
        seen.append(evaluator.graph)
        assert "known" not in vars(evaluator.graph)
        vars(evaluator.graph)["known"] = True
        return {"step_time_s": 1.0, "evaluations": 1}

    board = Board(
        pairs=[PairLine(str(graph), "paper_8gpu", "p")],
        entries=[Entry("a", note), Entry("b", note)],
        budget=Budget(evaluations=1),
        seeds=range(1),
        results=tmp_path / "rows.jsonl",
    )
    board.run(lambda line: None)
    assert len(seen) == 2
    assert seen[0].fingerprint == seen[1].fingerprint


def test_a_row_without_training_answers_as_agent_does_with_the_same_networks() -> None:
    graph, cluster = chain_graph(num_layers=6), Cluster.load("paper_8gpu")
    shipped = load_checkpoint(DEFAULT_POLICY).policy
    row = WithoutTraining("row", lambda seed: shipped, lambda seed: shipped_lead())
    answers = []
    for method in (row, known_rows()["agent"]):
        problem = Problem(evaluator=Evaluator(graph, cluster), budget=Budget(evaluations=400))
        found = method.plan(problem)
        assert found.num_evaluations > 200  # islands, and moves
        answers.append([each.strategy for each in found.candidates])
    assert answers[0] == answers[1]


def test_two_at_once_share_the_runs_and_go_on_for_the_dead(tmp_path: Path) -> None:
    """A child begins a run; the parent makes the others first, and that one once it is killed."""
    save_graph(chain_graph(), graph := tmp_path / "chain.json")
    (tmp_path / "rows.jsonl").write_text('{"pair": ')  # a dead process did not finish it
    began, parent, made = tmp_path / "began", os.getpid(), []

    def slow(evaluator: Evaluator, seed: int, budget: Budget) -> dict[str, Any]:
        if os.getpid() != parent:
            began.touch()
            signal.pause()
        return {"step_time_s": 1.0, "evaluations": 1}

    board = Board(
        pairs=[PairLine(str(graph), "paper_8gpu", "p")],
        entries=[Entry("a", slow), Entry("b", slow)],
        budget=Budget(evaluations=1),
        seeds=range(2),
        results=tmp_path / "rows.jsonl",
    )
    child = os.fork()
    if child == 0:
        try:
            board.run(lambda line: None)
        finally:
            os._exit(1)
    wait_for_file(began, 300, "the child makes no run")

    def note(line: dict[str, Any]) -> None:
        made.append((line["arm"], line["seed"]))
        if len(made) == 3:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    board.run(note)
    assert made == [("b", 0), ("a", 1), ("b", 1), ("a", 0)]
    assert len(read_results(board.results)) == 4
    board.run(note)
    assert len(made) == 4
