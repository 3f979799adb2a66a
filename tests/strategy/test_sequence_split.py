"""Sequences cut in unequal runs: rules, work by position, bytes, balanced runs, layouts."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.graph.axis_plan import IN_TEAM, axis_plan
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import R, S
from heterog.graph.sharding_rules import Special
from heterog.graph.workload import Workload
from heterog.strategy.layouts.experts import context_rules
from heterog.strategy.layouts.layout import LayoutError, parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.sequence_split import (
    RunCost,
    balanced_runs,
    lengths,
    run_cost,
    sequence_split,
    unit_counts,
)
from tests.runtime.sequences import MODELS, workload_of
from tests.simulator.builders import cluster_of
from tests.thorough import one_in


@cache
def graph_of(name: str) -> OpGraph:
    return capture(workload_of(name, 2))


@one_in(3)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_all_work_by_position_is_cut(name: str) -> None:
    graph = graph_of(name)
    split = sequence_split(graph, 10)
    assert split is not None
    products = ("addmm", "mm.", "bmm", "attention", "native_layer_norm", "nll_loss", "embedding")
    rules = dict(split.op_rules)
    for index, op in enumerate(graph.ops):
        if op.kind.startswith(products) and not graph.is_constant[index]:
            assert index in rules, op.kind
            assert any(place.is_split for place in rules[index].inputs), (op.kind, rules[index])


def test_only_keys_and_values_are_gathered() -> None:
    """Of the hand-made Llama: two layers, keys and values of two heads for four."""
    graph = graph_of("tiny llama")
    split = sequence_split(graph, 20)
    assert split is not None
    plan = axis_plan(graph, split.op_rules)
    gathered = {
        int(graph.storage[tensor])
        for index, op in enumerate(graph.ops)
        for position, tensor in enumerate(op.inputs)
        if op.phase != Phase.UPDATE and "float" in graph.tensors[tensor].dtype
        if plan.placements[tensor].kind == "S"
        if plan.whole_needed(index, position, tensor) == IN_TEAM
    }
    assert sum(graph.tensor_bytes[list(gathered)]) == 2 * 2 * (2 * 20 * 2 * 6) * 8


def test_units_divide_all_sequences() -> None:
    graph = graph_of("gpt")
    assert lengths(graph) == (20,)
    assert unit_counts(graph) == (20, 10, 5, 4, 2)  # 2 is also the number of samples
    assert sequence_split(graph, 3) is None
    batch = torch.rand(2, 4), torch.rand(2, 4)
    plain = capture(Workload(lambda: nn.Linear(4, 4), batch, functional.mse_loss, torch.optim.SGD))
    assert lengths(plain) == unit_counts(plain) == ()
    assert sequence_split(plain, 2) is None


def test_later_queries_of_causal_attention_cost_more() -> None:
    """The queries [u, v) of N see (v^2 - u^2) / N^2 of what all see; nothing else depends on u."""
    graph = graph_of("gpt")
    split = sequence_split(graph, 10)
    assert split is not None
    plan = axis_plan(graph, split.op_rules)
    kinds = [graph.ops[op].kind for op in plan.causal_ops]
    assert kinds == ["attention"] * 2 + ["attention_backward"] * 2
    whole, _ = plan.work(10, 2, 2)
    early, _ = plan.work(5, 2, 2)
    late, _ = plan.work(5, 2, 2, 5)
    np.testing.assert_allclose(early[plan.causal_ops], whole[plan.causal_ops] / 4)
    np.testing.assert_allclose(late[plan.causal_ops], whole[plan.causal_ops] * 3 / 4)
    others = np.setdiff1d(np.arange(graph.num_ops), plan.causal_ops)
    np.testing.assert_array_equal(early[others], late[others])
    encoder = graph_of("encoder")
    alike = sequence_split(encoder, 10)
    assert alike is not None
    assert len(axis_plan(encoder, alike.op_rules).causal_ops) == 0


def test_causal_rows_are_one_run_of_positions() -> None:
    graph = graph_of("gpt")
    split = sequence_split(graph, 10)
    assert split is not None
    first = next(i for i, op in enumerate(graph.ops) if op.kind == "attention")
    rule = dict(split.op_rules)[first]
    assert rule.inputs == (S(2), R, R)
    assert axis_plan(graph, split.op_rules).specials[first] == Special.CAUSAL_ROWS


@pytest.mark.parametrize("units", [7, 64, 1000])
def test_balanced_runs_take_equal_times(units: int) -> None:
    random = np.random.default_rng(units)
    costs = [
        RunCost(fixed_s=f, unit_s=u, rising_s=r) for f, u, r in random.uniform(0.1, 2.0, (5, 3))
    ]
    found = balanced_runs(costs, units)
    assert sum(found) == units
    assert min(found) >= 1
    ends = np.cumsum(found)
    times = [c.seconds(e - n, e) for c, e, n in zip(costs, ends, found, strict=True)]
    if units == 1000:
        assert max(times) < 1.02 * min(times)


def test_a_cost_is_read_off_both_halves() -> None:
    cost = RunCost(fixed_s=0.5, unit_s=0.25, rising_s=0.125)
    halves = cost.seconds(0, 8), cost.seconds(8, 16), cost.seconds(0, 16)
    assert run_cost(16, *halves) == cost
    assert balanced_runs([run_cost(4, 0.0, 0.0, 0.0)] * 2, 4) == (2, 2)


def test_a_layout_says_cp() -> None:
    layout = parse_layout("context_parallel_size=2,pp=2,zero=1")
    assert str(layout) == "tp=1,cp=2,pp=2,zero=1"
    cluster = cluster_of((1.0, ["T4"] * 4))
    given = place_layout(replace(layout, pp=1), graph_of("gpt"), cluster)
    assert (given.sizes.dp, given.sizes.num_devices) == (2, 4)
    assert given.strategy.decisions[0].teams == ((0, 1), (2, 3))
    assert "later positions see more keys" in " ".join(given.remarks)


def test_a_layout_for_what_cannot_be_cut_is_refused() -> None:
    cluster = cluster_of((1.0, ["T4"] * 32))
    refuse = partial(pytest.raises, LayoutError)
    with refuse(match="sequences of 20 positions have no such equal units"):
        place_layout(parse_layout("cp=32"), graph_of("gpt"), cluster)
    assert "do not divide" not in " ".join(context_rules(graph_of("gpt"), 5).remarks)
    assert "does not divide the 20 units" in context_rules(graph_of("gpt"), 3).remarks[0]
