"""Islands: unlike pipelines, against exhaustive search and by hand."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from heterog.cluster import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.methods.islands.composing import (
    Composition,
    Estimator,
    Island,
    Structure,
    islands_of,
    partitions,
    stages_of,
    structures,
)
from heterog.methods.islands.planner import CompositionSearch
from heterog.methods.islands.slices import Slices, kinds_of
from heterog.methods.islands.variants import Prospects, in_a_v
from heterog.methods.planner import Budget, Problem
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Recompute
from tests.simulator.builders import cluster_of, linear_chain
from tests.strategy.test_layouts import GRAPH, graph_of

MIXED = cluster_of((25.0, ["V100-16GB"] * 2), (10.0, ["T4"] * 2))


def problem_of(cluster: Cluster, evaluations: int, graph: OpGraph = GRAPH) -> Problem:
    evaluator = Evaluator(graph, cluster)
    return Problem(evaluator=evaluator, budget=Budget(evaluations=evaluations))


@pytest.mark.parametrize(("count", "bell"), [(1, 1), (2, 2), (3, 5), (4, 15)])
def test_partitions_are_as_many_as_bell_says(count: int, bell: int) -> None:
    found = list(partitions(range(count)))
    assert len({frozenset(map(frozenset, each)) for each in found}) == len(found) == bell


def test_structures_of_many_kinds_are_few() -> None:
    assert len(list(structures(range(4)))) < 100
    assert list(structures(range(6))) == [
        ((0, 1, 2, 3, 4, 5),),
        *[((kind,),) for kind in range(6)],
        ((0,), (1,), (2,), (3,), (4,), (5,)),
    ]


def test_all_kinds_together_and_each_alone_come_before_all_other_structures() -> None:
    found = list(structures(range(3)))
    assert found[:4] == [((0, 1, 2),), ((0,),), ((1,),), ((2,),)]
    assert len(found) == len(set(found)) == 21


def test_hosts_are_divided_into_teams_and_stages() -> None:
    cluster = cluster_of(*[(10.0, ["T4"] * 4)] * 2)
    slices = Slices(Evaluator(GRAPH, cluster))
    (kind,) = kinds_of(cluster)
    assert (kind.hosts, kind.size) == ((0, 1), 4)
    found = {(each.hosts, each.members, each.stages) for each in islands_of(slices, 0)}
    assert found == {
        (hosts, members, stages)
        for hosts in (1, 2)
        for members in (1, 2, 4)
        if members <= slices.most_members
        for stages in (1, 2, 4, 8)
        if stages <= min(slices.num_layers, 4 * hosts // members)
    }
    stages = stages_of((Island(0, 2, 2, 2),), slices)
    assert [(stage.teams, stage.hosts) for stage in stages] == [(2, 1), (2, 1)]


def test_a_host_of_unlike_cards_is_a_kind_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hand over micro-batches inside the host, and each gets the layers it is fast for."""
    cluster = cluster_of((10.0, ["V100-16GB", "T4", "V100-16GB", "T4"]))
    kinds = kinds_of(cluster)
    assert [(kind.hosts, kind.devices) for kind in kinds] == [((0,), ((0, 2),)), ((0,), ((1, 3),))]
    slices = Slices(Evaluator(GRAPH, cluster))
    inside = cluster.hosts[0].intra.bandwidth_bytes_per_s
    pool = Island(0, 1, 1, 1), Island(1, 1, 1, 1)
    message_s = Estimator(slices)._message_seconds(pool, False)
    assert message_s == pytest.approx(slices.boundary_bytes / inside)
    # One takes a second for a layer and the other three: eight layers are six and two.
    each = np.ones(slices.num_layers)
    monkeypatch.setattr(slices, "seconds", lambda kind, *_, **__: (1.0 + 2.0 * kind) * each)
    whole = Composition((pool,), 2, Recompute.NONE, 0, samples=(GRAPH.batch_size,))
    found = Estimator(slices).cut(whole)
    assert found is not None
    assert found[1].layers == ((6, 2),)


def test_layers_on_one_device_take_what_their_ops_take() -> None:
    evaluator = Evaluator(GRAPH, MIXED)
    slices = Slices(evaluator)
    seconds = slices.seconds(0, 1, 4, Recompute.NONE, False)
    of_ops = evaluator.cost_model.op_seconds(GRAPH, MIXED.device_types[0], 4)
    inside = [op for op in range(GRAPH.num_ops) if slices._layer_of_op[op] >= 0]
    assert seconds.sum() == pytest.approx(of_ops[inside].sum())
    assert slices.state_bytes.sum() == pytest.approx(
        sum(GRAPH.tensor_bytes[p] for _, p, _ in GRAPH.updates)
        * (2.0 + evaluator.tables.state_ratio)
    )


def test_a_balanced_pipeline_is_estimated_by_hand() -> None:
    """Two equal stages, no messages to speak of: (m + 2/3) halves of a micro-batch."""
    cluster = cluster_of(*[(1e6, ["T4"])] * 2)
    slices = Slices(Evaluator(GRAPH, cluster))
    estimator = Estimator(slices)
    pool = (Island(0, 1, 2, 2),)
    point = Composition((pool,), 8, recompute=Recompute.NONE, zero=0)
    whole = slices.seconds(0, 1, GRAPH.batch_size // 8, Recompute.NONE, False).sum()
    found = estimator.pool_seconds(pool, GRAPH.batch_size, point)
    assert found == pytest.approx((8 + 2 / 3) * whole / 2)


@pytest.mark.parametrize(
    ("hosts", "stages", "returns", "in_a_v", "times"),
    [
        (2, 2, 0, False, 1),  # outputs one way, gradients the other
        (3, 3, 0, False, 2),  # the host in the middle sends both
        (3, 12, 0, False, 2),
        (8, 8, 0, False, 2),
        (2, 2, 2, False, 2),  # a shared head: outputs come back
        (2, 2, 0, True, 2),
        (4, 1, 0, False, 0),
    ],
)
def test_a_host_between_others_sends_both_ways(
    hosts: int, stages: int, returns: int, in_a_v: bool, times: int
) -> None:
    slices = Slices(Evaluator(GRAPH, cluster_of(*[(1.0, ["T4"] * 4)] * hosts)))
    slices.num_returns = returns
    found = Estimator(slices)._message_seconds((Island(0, 1, stages, hosts),), in_a_v)
    of_nic_s = slices.boundary_bytes / slices.kinds[0].nic_bytes_per_s
    assert found == pytest.approx(times * of_nic_s)


def test_one_device_is_estimated_the_same_in_every_cluster() -> None:
    """A strategy on one device exchanges nothing, which makes kernels slower beside it."""
    graph = linear_chain(batch_size=64, width=1024)
    tensors = tuple(replace(tensor, dtype="bfloat16") for tensor in graph.tensors)
    graph = replace(graph, tensors=tensors)
    whole = cluster_of((10.0, ["A100-40GB"]), (10.0, ["T4"]))
    pool = (Island(0, 1, 1, 1),)
    point = Composition((pool,), 1, Recompute.NONE, 0, samples=(64,))
    estimates = []
    for cluster in (whole, whole.part((0,))):
        estimator = Estimator(Slices(Evaluator(graph, cluster)))
        found = estimator.cut(point)
        assert found is not None
        estimates.append((found[0], estimator.pool_seconds(pool, 64, point)))
    assert estimates[0] == estimates[1]


@pytest.mark.parametrize(("num_micro", "zero"), [(4, 0), (4, 1), (8, 0)])
def test_memory_is_estimated_as_it_is_simulated(num_micro: int, zero: int) -> None:
    """State, and activations of the micro-batches that are under way, on every stage."""
    graph = graph_of(batch_size=64)
    cluster = cluster_of(*[(1e6, ["T4"] * 2)] * 2)
    search = CompositionSearch(problem_of(cluster, 4, graph))
    pool = (Island(0, 1, 2, 2),)
    start = Composition((pool,), num_micro, Recompute.NONE, zero, samples=(graph.batch_size,))
    found = search.estimator.cut(start)
    assert found is not None
    stages, point = stages_of(pool, search.slices), found[1]
    memory = search.estimator._memory(stages, graph.batch_size / num_micro, point)
    ends = np.cumsum((0, *point.layers[0]))
    simulated = search.simulate(point)
    assert simulated is not None
    for stage, (first, end) in enumerate(pairwise(ends)):
        peak = max(simulated.peak_memory_bytes[2 * stage : 2 * stage + 2])
        assert memory[first:end, stage].sum() == pytest.approx(peak, rel=0.3)


def test_the_most_promising_structure_is_descended_for_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However short the time is, and however few evaluations there are."""
    search = CompositionSearch(problem_of(MIXED, 4))
    descents: list[Composition] = []
    monkeypatch.setattr(search, "_descend", descents.append)
    search.estimate()
    starts = {structure: list(search._starts(structure)) for structure in structures((0, 1))}
    least = min(starts, key=lambda each: min(map(search._estimated, starts[each])))
    assert descents[: len(starts[least])] == starts[least]
    monkeypatch.setattr("heterog.methods.islands.planner.ESTIMATES_OF_ONE", 0)
    descents.clear()
    CompositionSearch(problem_of(MIXED, 4)).estimate()
    assert descents == []


def test_slow_links_hide_no_composition_of_one_host() -> None:
    """A descent from all hosts stops where each single change sends more over slow links."""
    whole = cluster_of(*[(0.01, ["V100-16GB"] * 4)] * 3)
    least = []
    for cluster in (whole, whole.part(whole.host_devices[0])):
        search = CompositionSearch(problem_of(cluster, 100))
        search.estimate()
        least.append(search.least_s)
    assert least[0] <= least[1] * (1.0 + 1e-9)


def exhaustive(search: CompositionSearch, most_micro: int) -> Iterator[Composition]:
    """Every composition with every cut and every split of the samples."""
    layers, batch_size = search.slices.num_layers, search.evaluator.graph.batch_size
    for structure in structures(range(len(search.slices.kinds))):
        options = [[search.variants.options[kind] for kind in pool] for pool in structure]
        for pools in product(*(product(*pool) for pool in options)):
            counts = [sum(island.stages for island in pool) for pool in pools]
            if max(counts) > layers:
                continue
            cuts = [
                [
                    tuple(np.diff((0, *inner, layers)).tolist())
                    for inner in combinations(range(1, layers), count - 1)
                ]
                for count in counts
            ]
            for num_micro in [1 << power for power in range(most_micro.bit_length())]:
                units = batch_size // num_micro
                splits = [(units,)] if len(pools) == 1 else [
                    (first, units - first) for first in range(1, units)
                ]  # fmt: skip
                for (recompute, zero), split, cut in product(
                    search.variants.manners, splits, product(*cuts)
                ):
                    yield Composition(
                        tuple(pools),
                        num_micro,
                        recompute,
                        zero,
                        tuple(unit * num_micro for unit in split),
                        cut,
                    )


def test_it_is_as_good_as_exhaustive_search() -> None:
    cluster = cluster_of((25.0, ["V100-16GB"]), (10.0, ["T4"] * 2))
    graph = graph_of(5, batch_size=16)
    every = CompositionSearch(problem_of(cluster, 10**6, graph))
    for point in exhaustive(every, 4):
        every.simulate(point)
    assert len(every.found) > 500
    best = every.found[every.best(1)[0]].step_time_s
    searched = CompositionSearch(problem_of(cluster, 120, graph))
    with searched.spending.limits():
        searched.search()
    found = searched.found[searched.best(1)[0]].step_time_s
    assert found <= best * 1.03
    assert len(searched.found) * 4 < len(every.found)


def test_a_search_that_is_cut_short_has_refined_its_best() -> None:
    search = CompositionSearch(problem_of(MIXED, 40))
    with search.spending.limits():
        search.search()
    assert any(point not in search.found for point in search.ranked)  # it was cut short
    varied = search.prospects.varied
    assert any(
        set(search.variants.beside(point, fits=True)) & set(search.found) for point in varied
    )


ONE = Composition(
    ((Island(0, 1, 2, 2),),), 4, Recompute.NONE, 0, samples=(16,), layers=((4, 4),)
)  # fmt: skip


def test_the_variant_that_promises_most_comes_first() -> None:
    """A composition that takes twice its estimate has variants that take twice theirs."""
    micro = [replace(ONE, num_micro=count) for count in (8, 16)]
    other, better = replace(ONE, zero=1), replace(ONE, zero=1, num_micro=8)
    estimates = {ONE: 1.0, micro[0]: 0.9, micro[1]: 0.8, other: 2.0, better: 1.4}
    prospects, done = Prospects(estimates.__getitem__), set[Composition]()
    prospects.vary(ONE, 2.0, micro)
    prospects.vary(other, 2.4, [better])
    order = []
    while (point := prospects.next(done.__contains__)) is not None:
        order.append(point)
        done.add(point)
    assert order == [micro[1], better, micro[0]]
    assert prospects.varied == {ONE, other}


def test_chunks_in_a_v_idle_for_a_quarter_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal stages without messages: m turns and 2/3 of one, or 1/6 of one in a V."""
    slices = Slices(Evaluator(GRAPH, cluster_of(*[(1e9, ["T4"])] * 2)))
    monkeypatch.setattr(slices, "seconds", lambda *_, **__: np.ones(slices.num_layers))
    estimator, half = Estimator(slices), slices.num_layers // 2
    layers = ((half, slices.num_layers - half),)
    point = replace(ONE, samples=(GRAPH.batch_size,), layers=layers)
    for other, idle in ((point, 1), (replace(point, splits_backward=True), 2 / 3)):
        assert estimator.seconds(other) == pytest.approx((4 + idle) * half, rel=1e-3)
    assert estimator.seconds(in_a_v(point)) == pytest.approx((4 + 1 / 6) * half, rel=1e-3)


def kinds_in(point: Composition) -> Structure:
    return tuple(tuple(island.kind for island in pool) for pool in point.pools)


def test_divisions_are_varied_by_whole_islands() -> None:
    """Without one, with another one, as a replica or a stage of its own, on other hosts."""
    search = CompositionSearch(problem_of(MIXED, 4))
    alone = search.estimator.cut(
        Composition(((Island(0, 1, 1, 1),),), 4, Recompute.NONE, 0, samples=(GRAPH.batch_size,))
    )
    assert alone is not None
    found = {kinds_in(each) for each in search.variants.beside(alone[1], fits=True)}
    assert {((0,),), ((0, 1),), ((1, 0),), ((0,), (1,))} <= found
    pools = (Island(0, 1, 1, 1),), (Island(1, 1, 1, 1),)
    both = replace(alone[1], pools=pools, samples=(8, 8), layers=((8,), (8,)))
    found = {kinds_in(each) for each in search.variants.beside(both, fits=True)}
    assert {((0,),), ((1,),)} <= found


def test_the_best_is_the_best_by_the_referee(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine is too quick for one division, another one is returned first."""
    search = CompositionSearch(problem_of(MIXED, 60))
    with search.spending.limits():
        search.search()
    first, second = search._best_of_divisions(2)
    ratios = {(first.pools, first.in_a_v): 50.0, (second.pools, second.in_a_v): 1.0}
    monkeypatch.setattr(search, "judged", ratios)
    assert search.returned()[0].pools == second.pools
