"""Graphs cut by rows or features: bytes that travel, work by entries, where which is better."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from torch import nn

from heterog.cluster import Cluster
from heterog.errors import StrategyError
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_costs import SPARSE_PRODUCT
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpRules, neighbours
from heterog.graph.sparse_pattern import SparsePattern, entry_shares, pattern_of
from heterog.lowering import lower
from heterog.lowering.program import Program, TaskKind
from heterog.methods.planner import Budget, Problem
from heterog.methods.unit_search import Spatial
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.spatial_split import feature_rules, feature_splits, row_rules, row_splits
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from heterog.zoo import build
from heterog.zoo.graphs import Edges, GraphConvolutions, GraphSage, full_batch, skewed_graph
from tests.graph.test_sparse_product import rows_received
from tests.simulator.builders import cluster_of

NODES = 240
WIDTHS = (6, 12, 4)


@cache
def gcn() -> OpGraph:
    return capture(
        full_batch("gcn", GraphConvolutions, num_nodes=NODES, mean_degree=6, widths=WIDTHS)
    )


@cache
def sage() -> OpGraph:
    """One way only: what the backward pass reads are other rows than in the forward pass."""
    whole = skewed_graph(NODES, 6, community=30)
    first = whole.sources < whole.targets
    edges = Edges(whole.sources[first], whole.targets[first], NODES)
    return capture(full_batch("sage", on(edges, GraphSage), num_nodes=NODES, widths=WIDTHS))


def on(
    edges: Edges, layers: Callable[[Edges, tuple[int, ...]], nn.Module] = GraphConvolutions
) -> Callable[[Edges, tuple[int, ...]], nn.Module]:
    """Layers on a graph of the test's own."""

    def network(_: Edges, widths: tuple[int, ...]) -> nn.Module:
        return layers(edges, widths)

    return network


def strategy(graph: OpGraph, cluster: Cluster, rules: OpRules, parts: tuple[int, ...]) -> Strategy:
    devices = tuple(range(len(parts)))
    shares = (graph.batch_size, *(0,) * (len(parts) - 1))
    decision = Decision(
        devices=devices, shares=shares, teams=(devices,), parts=parts, sync=Sync.RING
    )
    return Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=(decision,) * group_ops(graph).num_groups,
        homes=(REPLICATED,) * len(graph.updates),
        op_rules=rules,
    )


def total_bytes(program: Program, kind: TaskKind) -> float:
    return float(program.num_bytes[program.kind == kind].sum())


def volume(pattern: SparsePattern, parts: tuple[int, ...]) -> int:
    return sum(map(sum, rows_received(pattern, parts, parts)))


@pytest.mark.parametrize("parts", [(120, 80, 40), (1, 238, 1), (0, 200, 40), (60,) * 4])
def test_sent_bytes_are_the_volume_times_features(parts: tuple[int, ...]) -> None:
    """The connectivity of the parts, for each layer, forward and backward."""
    cluster = cluster_of((1.0, ["T4"] * len(parts)))
    graph = gcn()
    program = lower(graph, cluster, strategy(graph, cluster, row_rules(graph, NODES), parts))
    (pattern,) = graph.patterns
    rows = volume(pattern, parts)
    assert total_bytes(program, TaskKind.SEND) == 2 * rows * (WIDTHS[1] + WIDTHS[2]) * 4
    assert total_bytes(program, TaskKind.GATHER_VALUE) == 0
    graph = sage()
    program = lower(graph, cluster, strategy(graph, cluster, row_rules(graph, NODES), parts))
    there, back = graph.patterns
    rows = volume(there, parts) + volume(back, parts)
    assert total_bytes(program, TaskKind.SEND) == rows * (WIDTHS[1] + WIDTHS[2]) * 4


def test_the_published_graph_of_eight_nodes_sends_four_rows() -> None:
    pairs = [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (3, 5), (4, 5), (5, 6), (6, 7), (4, 7)]
    one, other = np.array([*pairs, (2, 5), (2, 4)]).T
    edges = Edges(np.concatenate([one, other]), np.concatenate([other, one]), 8)
    graph = capture(full_batch("eight", on(edges), num_nodes=8, widths=(3, 5, 2)))
    cluster = cluster_of((1.0, ["T4", "T4"]))
    program = lower(graph, cluster, strategy(graph, cluster, row_rules(graph, 8), (1, 1)))
    sends = program.kind == TaskKind.SEND
    # Two rows each way, of 5 and 2 features, forward and backward.
    assert sorted(program.num_bytes[sends].tolist()) == [2 * 2 * 4.0] * 4 + [2 * 5 * 4.0] * 4


def test_the_smaller_volume_is_faster_on_a_slow_link() -> None:
    """Rows win while few are read elsewhere, features where nearly all are: the crossover.

    Rows: 2 V (H + C) elements, V the connectivity. Features, with a column and a row of weights:
    one all-reduce of the scores, 2 (p - 1) N C elements on a ring of p devices.
    """
    nodes, (_, hidden, classes) = 1200, WIDTHS
    cluster = cluster_of(*[(8e6 / 1e9, ["T4"])] * 3)
    parts, winners = (400, 400, 400), []
    for outside in (0.01, 0.1, 1.0):
        edges = skewed_graph(nodes, 8, community=400, outside=outside, skew=0.2)
        graph = capture(full_batch("gcn", on(edges), num_nodes=nodes, widths=WIDTHS))
        by_rows = strategy(graph, cluster, row_rules(graph, nodes), parts)
        by_features = strategy(graph, cluster, feature_rules(graph, hidden), (4, 4, 4))
        evaluator = Evaluator(graph, cluster)
        seconds = [
            evaluator.evaluate(each, Order.FIFO).step_time_s for each in (by_rows, by_features)
        ]
        rows = volume(graph.patterns[0], parts)
        of_rows, of_features = 2 * rows * (hidden + classes), 2 * 2 * nodes * classes
        if max(of_rows, of_features) > 2 * min(of_rows, of_features):
            assert (seconds[0] < seconds[1]) == (of_rows < of_features), (outside, seconds)
        winners.append(seconds[0] < seconds[1])
        program = lower(graph, cluster, by_features)
        assert total_bytes(program, TaskKind.SEND) == 0
        assert total_bytes(program, TaskKind.REDUCE_VALUE) == nodes * classes * 4
    assert winners[0]
    assert not winners[-1]
    assert winners == sorted(winners, reverse=True)


def test_rows_cost_their_entries() -> None:
    """Half of all entries are in a sixteenth of the rows: equal entries beat equal rows."""
    nodes, hubs = 2048, 128
    one, other = (each.ravel() for each in np.indices((hubs, nodes)))
    edges = Edges(np.concatenate([one, other]), np.concatenate([other, one]), nodes)
    graph = capture(full_batch("hubs", on(edges), num_nodes=nodes, widths=(4, 64, 4)))
    cluster = cluster_of((1e4, ["T4", "T4"]))
    (pattern,) = graph.patterns
    rules, evaluator = row_rules(graph, nodes), Evaluator(graph, cluster)
    assert len(row_splits(graph)) == 2  # at every row, and at 256 units

    def busy(parts: tuple[int, ...]) -> float:
        chosen = strategy(graph, cluster, rules, parts)
        return evaluator.evaluate(chosen, Order.FIFO).step_time_s

    by_entries = entry_shares(pattern, (1, 1), nodes)
    assert by_entries[0] < nodes / 8
    assert busy(by_entries) < busy((nodes // 2, nodes // 2)) < busy((nodes - 1, 1))


def test_the_planner_cuts_a_graph() -> None:
    graph = build("gcn_2l")
    captured = capture(graph)
    assert captured.num_parameters == 34_960
    cluster = cluster_of((100.0, ["T4", "T4", "P100-16GB"]))
    assert Spatial.joins_auto(captured, cluster)
    found = Spatial().plan(
        Problem(evaluator=Evaluator(captured, cluster), budget=Budget(evaluations=12))
    )
    assert found.candidates
    alone = Decision(devices=(0,), shares=(1,))
    strategies = [each.strategy for each in found.candidates]
    evaluator = Evaluator(captured, cluster)
    single = replace(strategies[0], decisions=(alone,) * len(strategies[0].decisions), op_rules=())
    best = min(evaluator.evaluate(each).step_time_s for each in strategies)
    assert best < evaluator.evaluate(single).step_time_s


def test_rules_of_neighbours_are_written_read_and_checked() -> None:
    graph, cluster = gcn(), cluster_of((1.0, ["T4", "T4"]))
    chosen = strategy(graph, cluster, row_rules(graph, NODES), (3, 1))
    assert strategy_from_dict(strategy_to_dict(chosen)) == chosen
    (pattern,) = graph.patterns
    assert str(neighbours(1, pattern.key)) == f"H(1,@{pattern.key})"
    other = pattern_of([0], [0], NODES, NODES).key
    ((first, rule), *_) = [
        each for each in chosen.op_rules if graph.ops[each[0]].kind == SPARSE_PRODUCT
    ]
    wrong = replace(rule, inputs=(neighbours(1, other), *rule.inputs[1:]))
    rules = tuple((op, wrong if op == first else had) for op, had in chosen.op_rules)
    with pytest.raises(StrategyError, match=f"from these inputs it would be .*@{pattern.key}"):
        replace(chosen, op_rules=rules).check(graph, cluster)
    with pytest.raises(StrategyError, match="has no entries of the sparse matrix"):
        lower(replace(graph, patterns=()), cluster, chosen)
    record = strategy_to_dict(chosen)
    record["rules"] = [
        each | {"inputs": [text.replace("@", "@@") for text in each["inputs"]]}
        for each in record["rules"]
    ]
    with pytest.raises(StrategyError, match=r"H\(dim,@key\) for one of a sparse product"):
        strategy_from_dict(record)


def test_features_are_cut_where_a_layer_has_enough() -> None:
    found = feature_splits(gcn())
    assert [each.units for each in found] == [12, 4]
    assert all(each.entries is None for each in found)
    assert {each.units for each in row_splits(gcn())} == {NODES}
