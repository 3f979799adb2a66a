"""Kinds of recomputation: what differs, what each frees, and that searches gain by them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from torch import Tensor, nn, optim, zeros

from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering.tables import graph_tables
from heterog.methods import pipeline, recomputing, repair
from heterog.methods.local_search import neighbours
from heterog.methods.planner import Budget, Problem
from heterog.methods.recomputing import freed_bytes, kinds_worth_trying, runs_again
from heterog.methods.registry import built_in_methods
from heterog.search.judging import run_method
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.stages import layer_blocks, layers_of
from heterog.strategy.strategy import Decision, Keeps
from tests.methods.test_repair import with_memory
from tests.runtime.padded import padded_workload
from tests.simulator.builders import cluster_of, strategy_of
from tests.strategy.test_keeping import SAMPLES, in_16_bits, kept_bytes
from tests.strategy.test_layouts import GRAPH

NESTED = (Keeps.ALL_BUT_SCORES, Keeps.PRODUCTS, Keeps.NOTHING)
WORDS = dict(zip(NESTED, ("selective", "op", "full"), strict=True))
TWO = cluster_of((10.0, ["T4"] * 2), (10.0, ["T4"] * 2))


def convolutions() -> OpGraph:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))
            return out

    batch = zeros(4, 8, 16, 16), zeros(4, 4)
    return capture(Workload(Convolutions, batch, nn.functional.mse_loss, optim.SGD, {"lr": 0.1}))


@cache
def written_out() -> OpGraph:
    return capture(padded_workload(16, 64, layers=6, width=64, heads=4))


def test_kinds_that_change_nothing_are_not_tried() -> None:
    assert kinds_worth_trying(written_out()) == NESTED
    assert kinds_worth_trying(GRAPH) == NESTED[1:]  # no scores
    assert kinds_worth_trying(convolutions()) == NESTED[2:]  # only the head is such a product


@pytest.mark.parametrize("keeps", NESTED)
def test_what_is_freed_is_what_the_program_does_not_keep(keeps: Keeps) -> None:
    graph = in_16_bits()
    tables = graph_tables(graph, (), layer_blocks(graph))
    of_sample, once = freed_bytes(tables, keeps)
    freed = (SAMPLES * of_sample + once)[np.array(layers_of(graph).of_group) == 1].sum()
    assert freed == kept_bytes(graph, "none") - kept_bytes(graph, WORDS[keeps])
    place = NESTED.index(keeps)
    for cheaper in NESTED[:place]:
        assert (runs_again(tables, keeps) | ~runs_again(tables, cheaper)).all()


def everything_alone(patch: pytest.MonkeyPatch) -> None:
    """Have searches know no kind but the one that makes everything again."""
    for module in (recomputing, repair, neighbours, pipeline):
        patch.setattr(module, "kinds_worth_trying", lambda graph: (Keeps.NOTHING,))


@pytest.mark.parametrize("room", [0.05, 0.2, 0.4, 0.6, 0.8])
def test_repaired_plans_are_never_slower_than_with_everything_made_again(
    room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for some part of what is held beyond what layers hold that make all again."""
    graph = written_out()
    whole = Decision(devices=(0, 1, 2, 3), shares=(4, 4, 4, 4))
    most, least = (
        max(Evaluator(graph, TWO).evaluate(each, Order.FIFO).peak_memory_bytes)
        for each in (
            strategy_of(graph, TWO, whole),
            replace(
                strategy_of(graph, TWO, replace(whole, recompute=True)),
                blocks=layer_blocks(graph),
            ),
        )
    )
    tight = with_memory(TWO, [least + room * (most - least)] * 4)
    evaluator, budget = Evaluator(graph, tight), Budget(evaluations=300)
    strategy = strategy_of(graph, tight, whole)
    found = repair.repair(evaluator, strategy, Order.FIFO, budget=budget)
    everything_alone(monkeypatch)
    before = repair.repair(evaluator, strategy, Order.FIFO, budget=budget)
    now, then = (evaluator.referee(each, Order.FIFO) for each in (found, before))
    assert now.is_ok
    assert then.is_ok
    assert now.step_time_s <= then.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("method", ["megatron_grid", "islands", "pipette"])
def test_searches_are_faster_where_less_has_to_be_made_again(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other product may be kept where not everything fits."""
    evaluator = Evaluator(written_out(), with_memory(TWO, [14e6] * 4))

    def seconds() -> float:
        budget = Budget(evaluations=100)
        row = run_method(built_in_methods()[method], Problem(evaluator=evaluator, budget=budget))
        assert row.step_time_s is not None
        return row.step_time_s

    now = seconds()
    everything_alone(monkeypatch)
    assert now < seconds()
