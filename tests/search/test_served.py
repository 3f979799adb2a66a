"""An asynchronous server as a row beside exact methods: asked for, priced, kept in files."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from heterog import Workload
from heterog.errors import HeterogError, StrategyError
from heterog.export.folder import ExportError
from heterog.export.uniform import uniform_micro_batches
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.healing.job import HealingJob
from heterog.methods.planner import Budget, Problem
from heterog.modes.asynchronous.method import ServedTeams, team_paces
from heterog.modes.asynchronous.value import (
    AsynchronousServer,
    Exchange,
    PushOrder,
    exchanged,
    server_of_rows,
)
from heterog.modes.averaging.method import AveragedReplicas
from heterog.modes.averaging.value import Averaging
from heterog.modes.built_in import method_of
from heterog.modes.codecs.value import Codec, CodecKind, CodecRule, Traffic, with_rules
from heterog.runtime.request import RunRequest
from heterog.search.plan import load_plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Decision, Strategy
from tests.runtime.strategies import cluster, graph_of, plan_of, strategy_of
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of

THREE = Decision(devices=(0, 1, 2), shares=(5, 2, 1), teams=((0,), (1,), (2,)))
SERVER = AsynchronousServer(staleness=2, devices=(0,), ticks=(500, 200, 100))


def strategy(decision: Decision = THREE, server: AsynchronousServer = SERVER) -> Strategy:
    graph = graph_of("mlp")
    exact = strategy_of(graph, [decision] * group_ops(graph).num_groups)
    return exact.with_mode(server)


def test_a_step_is_that_of_the_slowest_team_with_its_exchange() -> None:
    """On links so slow that compute is nothing: two teams move the weights twice, one after the
    other, and the team on the server's device moves nothing."""
    graph = graph_of("mlp")
    slow = cluster_of((0.0001, ["T4"]), (0.0001, ["T4"]), (0.0001, ["T4"]))
    evaluator = Evaluator(graph, slow)
    served = replace(strategy(), cluster=slow.fingerprint)
    paces = team_paces(evaluator, served, evaluator.encode(served))
    num_bytes = float(evaluator.tables.parameter_bytes.sum())
    move_s = num_bytes / (0.0001e9 / 8)
    assert paces[0].pull_s < 0.01 * move_s
    for pace in paces[1:]:
        assert pace.pull_s == pytest.approx(move_s, rel=0.5)
        assert pace.push_s == pytest.approx(pace.pull_s, rel=0.1)
    found = evaluator.referee(served, Order.FIFO)
    exchanges = sum(pace.pull_s + pace.push_s for pace in paces)
    assert found.step_time_s == pytest.approx(exchanges, rel=0.05)


def test_teams_of_one_host_share_its_line() -> None:
    """Four teams behind one line, the server's parts in front of two others: 4 models each way."""
    graph = graph_of("mlp")
    wide = cluster_of((0.0001, ["T4"] * 4), (0.001, ["T4"]), (0.001, ["T4"]))
    evaluator = Evaluator(graph, wide)
    decision = Decision(
        devices=tuple(range(6)),
        shares=(1, 1, 1, 1, 2, 2),
        teams=tuple((device,) for device in range(6)),
    )
    server = AsynchronousServer(staleness=3, devices=(4, 5), ticks=(1,) * 6)
    served = replace(strategy(decision, server), cluster=wide.fingerprint)
    found = evaluator.referee(served, Order.FIFO).step_time_s
    num_bytes = float(evaluator.tables.parameter_bytes.sum())
    assert found >= 4 * num_bytes / (0.0001e9 / 8) * 0.99


def test_parts_of_the_server_on_more_devices_share_the_traffic() -> None:
    graph = graph_of("mlp")
    several = replace(SERVER, devices=(0, 1, 2))
    homes = server_of_rows(graph, strategy(server=several))
    assert len(homes) == len(graph.updates)
    assert set(homes) == {0, 1, 2}
    rows = [
        row
        for each in exchanged(graph, strategy(server=several), 1, is_push=True)
        for row in each.rows
    ]
    assert sorted(rows) == list(range(len(graph.updates)))


def test_of_replicas_in_a_team_one_pushes_and_all_pull() -> None:
    graph = graph_of("mlp")
    pair = Decision(devices=(0, 1, 2), shares=(3, 4, 1), teams=((0,), (1, 2)))
    served = strategy(pair, replace(SERVER, ticks=(1, 1)))
    served.check(graph, cluster())
    every = tuple(range(len(graph.updates)))
    assert exchanged(graph, served, 1, is_push=True) == (Exchange(1, 0, every),)
    assert exchanged(graph, served, 1, is_push=False) == (
        Exchange(1, 0, every),
        Exchange(2, 0, every),
    )


def test_the_servers_memory_is_counted_and_replicas_keep_no_state() -> None:
    """Two messages on each replica; weights, state and two for each team on the server."""
    evaluator = Evaluator(graph_of("mlp"), cluster())
    plain = replace(strategy(), modes=()).with_mode(Averaging(every=2))
    before = evaluator.referee(plain, Order.FIFO).peak_memory_bytes
    after = evaluator.referee(strategy(), Order.FIFO).peak_memory_bytes
    size = float(evaluator.tables.parameter_bytes.sum()) * 1.04
    state = evaluator.tables.state_ratio
    assert state > 0
    assert after[1] - before[1] == pytest.approx((2 - state) * size, abs=2)
    assert after[0] - before[0] == pytest.approx(9 * size, abs=2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"decision": Decision(devices=(0, 1), shares=(5, 3))}, "an asynchronous server needs at"),
        ({"decision": replace(THREE, shares=(5, 0, 3))}, r"islands get \[5, 0, 3\] samples"),
        ({"server": replace(SERVER, ticks=(1, 1))}, "ticks for 2 teams, but there are 3"),
        (
            {
                "decision": Decision(devices=(0, 1), shares=(5, 3), teams=((0,), (1,))),
                "server": AsynchronousServer(staleness=1, devices=(2,), ticks=(1, 1)),
            },
            "add one of these to the server",
        ),
        (
            {
                "decision": Decision(devices=(0, 1), shares=(5, 3), teams=((0,), (1,))),
                "server": AsynchronousServer(staleness=1, devices=(0, 2), ticks=(1, 1)),
            },
            r"of which \[2\] train nothing",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        strategy(**change).check(graph_of("mlp"), cluster())  # type: ignore[arg-type]


def test_a_device_that_would_serve_nothing_is_refused() -> None:
    def one_weight() -> nn.Module:
        return nn.Linear(4, 4, bias=False)

    batch = torch.zeros(8, 4), torch.zeros(8, 4)
    graph = capture(Workload(one_weight, batch, nn.functional.mse_loss, torch.optim.SGD, {}))
    exact = strategy_of(graph, [THREE] * group_ops(graph).num_groups)
    with pytest.raises(StrategyError, match=r"its 1 parameters leave none for \[1, 2\]"):
        exact.with_mode(replace(SERVER, devices=(0, 1, 2))).check(graph, cluster())


def test_a_server_goes_with_nothing_else_that_is_not_exact() -> None:
    graph = graph_of("mlp")
    with pytest.raises(StrategyError, match="parameters averaged every 2 steps"):
        strategy().with_mode(Averaging(every=2)).check(graph, cluster())
    rule = CodecRule(traffic=Traffic.GRADIENTS, devices=(0, 1), codec=Codec(kind=CodecKind.FP16))
    with pytest.raises(StrategyError, match="and fp16 on gradients between devices"):
        with_rules(strategy(), (rule,)).check(graph, cluster())


def test_a_strategy_survives_its_file_and_hostile_ones_are_refused() -> None:
    document = strategy_to_dict(strategy())
    assert strategy_from_dict(document) == strategy()
    by_arrival = strategy(server=replace(SERVER, order=PushOrder.ARRIVAL))
    assert strategy_from_dict(strategy_to_dict(by_arrival)) == by_arrival
    assert "asynchronous" not in strategy_to_dict(replace(strategy(), modes=()))
    own = document["asynchronous"]
    hostile: list[dict[str, object]] = [{"staleness": -1}, {"ticks": []}, {"ticks": [0]}]
    hostile += [{"devices": "0"}, {"more": 1}, {"order": "any"}]
    for wrong in hostile:
        with pytest.raises(StrategyError):
            strategy_from_dict(document | {"asynchronous": own | wrong})


@pytest.mark.parametrize(
    "text",
    [
        *("server", "server=", "server=x", "server=-1", "server=1,rate=1", "server=1,order=any"),
        *("server=1,order=arrival,order=arrival", "server=1,"),
    ],
)
def test_words_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(HeterogError, match="`asynchronous`"):
        method_of(text)


def test_words_are_read() -> None:
    found = method_of("server=3")
    assert isinstance(found, ServedTeams)
    assert found.staleness == 3
    assert found.order == PushOrder.PLANNED
    by_arrival = method_of("server=3,order=arrival")
    assert isinstance(by_arrival, ServedTeams)
    assert by_arrival.order == PushOrder.ARRIVAL
    assert isinstance(method_of("average=8"), AveragedReplicas)


def test_it_is_a_row_of_its_own_and_never_comes_unasked(tmp_path: Path) -> None:
    graph = graph_of("mlp")
    unlike = cluster_of((0.001, ["T4"]), (0.001, ["T4"]), (0.001, ["P100-16GB"]))
    plan = make_plan(
        graph, unlike, methods=("cp_ar",), budget="10e", asynchronous=ServedTeams(staleness=2)
    )
    assert [row.method for row in plan.rows] == ["cp_ar", "server"]
    assert "not exact: gradients pushed to a server" in plan.rows[1].note
    assert "as the best exact plan" in plan.rows[1].note
    candidate = plan.rows[1].candidate
    assert candidate is not None
    server = candidate.strategy.mode(AsynchronousServer)
    assert server is not None
    assert server.staleness == 2
    assert max(server.ticks) == 1000
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").strategy == plan.strategy


def test_a_larger_staleness_is_never_planned_slower() -> None:
    graph = graph_of("mlp")
    unlike = cluster_of((0.01, ["T4"]), (0.02, ["T4"]), (0.01, ["P100-16GB"]))
    seconds = []
    for staleness in (0, 1, 4):
        evaluator = Evaluator(graph, unlike)
        problem = Problem(evaluator=evaluator, budget=Budget(evaluations=60))
        found = ServedTeams(staleness).plan(problem).candidates[0]
        seconds.append(evaluator.referee(found.strategy, Order.FIFO).step_time_s)
    assert seconds[1] <= seconds[0] * (1 + 1e-6)
    assert seconds[2] <= seconds[1] * (1 + 1e-6)


def test_what_cannot_serve_refuses_the_plan(tmp_path: Path) -> None:
    """Other launchers would train exactly, and healing keeps copies of one model."""
    plan = plan_of(graph_of("mlp"), strategy())
    with pytest.raises(ExportError, match="pushed to a server on device 0 in a planned order"):
        uniform_micro_batches(plan, "ddp")
    plan.save(tmp_path / "plan.json")
    with pytest.raises(HeterogError, match="exactly; run it without `heal`"):
        HealingJob(RunRequest(plan=tmp_path / "plan.json"))
