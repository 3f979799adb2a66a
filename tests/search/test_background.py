"""Background jobs beside a plan: closed forms, the limit, memory, and the plan's file."""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.errors import HeterogError
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.methods.data_parallel import even_shares, uniform_strategy
from heterog.search.background import BackgroundPlan, best_allowance, plan_background
from heterog.search.plan import load_plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.multiplex import make_foreground
from heterog.strategy.strategy import Decision
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of


@lru_cache(maxsize=4)
def graph(batch: int) -> OpGraph:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))

    example = (torch.zeros(batch, 1024), torch.zeros(batch, 1024))
    return capture(
        Workload(model, example, functional.mse_loss, torch.optim.SGD, source="mine.py:job")
    )


def evaluator(cluster: Cluster | None = None) -> Evaluator:
    return Evaluator(graph(256), cluster or cluster_of((1.0, ["T4"]), (1.0, ["T4"])))


def on_first_device(own: Evaluator) -> tuple[Evaluator, Decision]:
    return own, Decision(devices=(0,), shares=(256,))


def test_a_free_device_trains_the_background_alone() -> None:
    own, decision = on_first_device(evaluator())
    strategy = uniform_strategy(own, decision)
    planned = plan_background(own, strategy, Order.FIFO, graph(8), limit=1.0)
    device_type = own.cluster.device_types[0]
    alone_s = float(own.cost_model.op_seconds(graph(8), device_type, 8).sum())
    # It stops for an op that does not fit before the step's end: at most one per step is missing.
    assert planned.samples_per_s[1] == pytest.approx(8 / alone_s, rel=0.1)
    assert planned.samples_per_s[0] == 0.0, "a chain on one device leaves no gap"
    assert planned.idle_share == pytest.approx((0.0, 1.0))
    assert planned.slow_down == pytest.approx(1.0)
    assert planned.devices == (0, 1)


@pytest.mark.parametrize("limit", [1.0, 1.02, 1.1, 2.0])
def test_the_foreground_stays_under_the_limit(limit: float) -> None:
    own = evaluator()
    strategy = uniform_strategy(own, Decision(devices=(0, 1), shares=even_shares(own)))
    planned = plan_background(own, strategy, Order.FIFO, graph(32), limit=limit)
    assert 1.0 - 1e-9 <= planned.slow_down <= limit + 1e-9
    assert planned.total_samples_per_s > 0, "devices wait for each other's gradients"


def test_more_slow_down_never_gives_less_background() -> None:
    own = evaluator()
    strategy = uniform_strategy(own, Decision(devices=(0, 1), shares=even_shares(own)))
    rates = [
        plan_background(own, strategy, Order.FIFO, graph(32), limit=limit).total_samples_per_s
        for limit in (1.0, 1.05, 1.2, 2.0)
    ]
    assert all(after >= before * 0.999 for before, after in pairwise(rates))


def test_the_best_allowance_by_hand() -> None:
    # One device: 4 s of compute, then 6 s of waiting; ops of 4 s. One fits into the gap; a second
    # begins at 8 and ends at 12 instead of 10.
    foreground = make_foreground(
        np.array([0, -1]),
        np.array([0.0, 4.0]),
        np.array([4.0, 10.0]),
        [(), (0,)],
        num_devices=1,
    )
    ops = [np.array([4.0])]
    allowance, both = best_allowance(foreground, ops, 1.1)
    assert (allowance, both.step_seconds, both.ops[0]) == pytest.approx((0.0, 10.0, 1.0))
    allowance, both = best_allowance(foreground, ops, 1.2)
    assert (allowance, both.step_seconds, both.ops[0]) == pytest.approx((4.0, 12.0, 2.0))


def test_a_device_without_room_is_left_out_and_says_why() -> None:
    cluster = cluster_of((1.0, ["T4"]), (1.0, ["T4"]))
    devices = (cluster.devices[0], replace(cluster.devices[1], usable_memory_bytes=2**22))
    own = Evaluator(graph(256), replace(cluster, devices=devices))
    strategy = uniform_strategy(own, Decision(devices=(0,), shares=(256,)))
    planned = plan_background(own, strategy, Order.FIFO, graph(32))
    assert planned.devices == (0,)
    assert "GiB of memory short" in planned.shortage[1]
    assert planned.samples_per_s[1] == 0.0


def test_a_limit_below_one_is_refused() -> None:
    own, decision = on_first_device(evaluator())
    with pytest.raises(HeterogError, match=r"limit of 0.9 is below 1"):
        plan_background(own, uniform_strategy(own, decision), Order.FIFO, graph(8), limit=0.9)


def test_plans_keep_their_background(tmp_path: Path) -> None:
    cluster = cluster_of((1.0, ["T4"]), (1.0, ["T4"]))
    plan = make_plan(graph(256), cluster, methods=["ev_ar"], budget="1e")
    assert plan.summary()["background"] is None
    both = plan.with_background(graph(8), 1.1)
    both.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json").background
    assert loaded == both.background
    assert isinstance(loaded, BackgroundPlan)
    assert loaded.source == "mine.py:job"
    assert both.summary()["background"]["slow_down"] == loaded.slow_down
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").background is None
