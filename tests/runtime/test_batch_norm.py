"""How many samples each BatchNorm sees."""

from heterog.graph.grouping import group_ops
from heterog.runtime.batch_norm import batch_norm_samples
from heterog.strategy.strategy import Decision
from tests.runtime.strategies import ALL, SYNCS, graph_of, strategy_of


def test_samples_are_the_shares() -> None:
    graph = graph_of("normalised")
    decisions = [SYNCS["zero share"]] * group_ops(graph).num_groups
    found = batch_norm_samples(graph, strategy_of(graph, decisions))
    assert found == {"features.1": {0: 5, 2: 3}, "features.5": {0: 5, 2: 3}}


def test_the_smallest_micro_batch_counts() -> None:
    graph = graph_of("normalised")
    decision = Decision(devices=ALL, shares=(5, 2, 1))
    micro = ((3, 2), (0, 2), (1, 0))
    strategy = strategy_of(graph, [decision] * group_ops(graph).num_groups, micro_batches=micro)
    assert batch_norm_samples(graph, strategy)["features.1"] == {0: 2, 1: 2, 2: 1}


def test_a_model_without_batch_norm_has_none() -> None:
    graph = graph_of("mlp")
    decisions = [SYNCS["ring"]] * group_ops(graph).num_groups
    assert batch_norm_samples(graph, strategy_of(graph, decisions)) == {}
