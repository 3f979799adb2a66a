"""Programs of HAP give the single-device numbers on real processes, whatever the search picks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.methods.hap.planner import Synthesis
from heterog.methods.hap.prices import SpmdPrices
from heterog.methods.hap.programs import op_rules
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.cases import SGD, assert_same, reference, train_sharded
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import ALL, cluster, graph_of, plan_of, strategy_of
from tests.thorough import one_in


def random_program(graph: OpGraph, shares: tuple[int, ...], seed: int) -> Strategy:
    """The optimum of a search under random prices of work: any program there is may come out."""
    evaluator = Evaluator(graph, cluster())
    synthesis = Synthesis(evaluator)
    prices = SpmdPrices(synthesis.work, evaluator, ALL, shares)
    rng = np.random.default_rng(seed)
    prices.__dict__["seconds"] = rng.random(synthesis.work.units.shape)
    (best, *_) = synthesis.search(prices)
    decision = Decision(devices=ALL, shares=shares, sync=Sync.RING)
    strategy = strategy_of(graph, [decision] * group_ops(graph).num_groups)
    return replace(strategy, op_rules=op_rules(synthesis.theory, best.triples, synthesis.start))


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "shares", "seed"),
    [
        ("mlp", (5, 0, 3), 0),
        ("gpt", (5, 0, 3), 1),
        ("moe", (5, 2, 1), 2),
        ("residual", (5, 2, 1), 3),
        ("language", (5, 2, 1), 4),
    ],
)
def test_any_program_gives_the_single_device_numbers(
    ranks: Ranks, tmp_path: Path, name: str, shares: tuple[int, ...], seed: int
) -> None:
    graph = graph_of(name)
    strategy = random_program(graph, shares, seed)
    assert strategy.op_rules
    path = tmp_path / "plan.json"
    plan_of(graph, strategy).save(path)
    results = ranks.run(train_sharded, name, SGD, str(path))
    assert_same(results, reference(name, SGD), atol=0.0, all_gradients=False)
