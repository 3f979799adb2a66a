"""Executed plans give the single-device numbers: losses, gradients, weights of several steps."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import R, S
from heterog.methods.registry import built_in_methods
from heterog.strategy.strategy import Decision, OpRule, Strategy, Sync
from tests.runtime.cases import (
    MODELS,
    NORMALISED,
    SGD,
    Recipe,
    assert_same,
    count_tasks,
    reference,
    reference_with_local_statistics,
    refusal,
    train,
    train_sharded,
    train_without,
)
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import (
    ALL,
    SYNCS,
    graph_of,
    homes_of,
    plan_of,
    random_strategy,
    strategy_of,
)
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of
from tests.thorough import IS_THOROUGH, cases, one_in

NUM_RANKS = 3


def assert_trains_like_one_device(
    ranks: Ranks, folder: Path, name: str, strategy: Strategy, graph: OpGraph, recipe: Recipe = SGD
) -> None:
    path = folder / "plan.json"
    plan_of(graph, strategy).save(path)
    results = ranks.run(train, name, recipe, str(path))
    # Adam turns rounding of a gradient that is nearly zero into steps of the learning rate.
    atol = 2e-5 if recipe.optimizer == "AdamW" else 0.0
    assert_same(results, reference(name, recipe), atol=atol)


@one_in(4)
@pytest.mark.distributed
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", SYNCS)
def test_uniform(ranks: Ranks, tmp_path: Path, name: str, case: str) -> None:
    graph = graph_of(name)
    # Buckets and barrier alternate, so that each synchronisation meets both.
    turn = list(SYNCS).index(case) + list(MODELS).index(name)
    strategy = strategy_of(
        graph,
        [SYNCS[case]] * group_ops(graph).num_groups,
        homes=homes_of(graph, case),
        bucket_bytes=600 * (turn % 2),
        step_barrier=turn % 3 > 0,
    )
    assert_trains_like_one_device(ranks, tmp_path, name, strategy, graph)


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["ring", "zero share", "server"])
def test_an_op_that_needs_the_whole_batch(ranks: Ranks, tmp_path: Path, case: str) -> None:
    graph = graph_of("gathered")
    strategy = strategy_of(
        graph, [SYNCS[case]] * group_ops(graph).num_groups, homes=homes_of(graph, case)
    )
    assert_trains_like_one_device(ranks, tmp_path, "gathered", strategy, graph)


@pytest.mark.distributed
@pytest.mark.parametrize("micro", [(), ((3, 2), (0, 2), (1, 0))])
def test_a_value_that_is_the_gradient_of_several_weights(
    ranks: Ranks, tmp_path: Path, micro: tuple[tuple[int, ...], ...]
) -> None:
    """Sums over devices and micro-batches are made in place."""
    graph = graph_of("added weights")
    decisions = [SYNCS["ring"]] * group_ops(graph).num_groups
    strategy = strategy_of(graph, decisions, micro_batches=micro)
    assert_trains_like_one_device(ranks, tmp_path, "added weights", strategy, graph)


@pytest.mark.distributed
def test_a_gathered_value_that_is_the_gradient_of_several_weights(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The first weight's sum over micro-batches begins before the others wait for the gather."""
    graph = graph_of("added weights")
    decisions = [SYNCS["ring"]] * group_ops(graph).num_groups
    (product,) = (number for number, op in enumerate(graph.ops) if op.name == "mm_1")
    strategy = replace(
        strategy_of(graph, decisions, micro_batches=((4, 4), (0, 0), (0, 0))),
        op_rules=((product, OpRule(inputs=(R, S(1)), outputs=(S(1),), units=4)),),
    )
    assert_trains_like_one_device(ranks, tmp_path, "added weights", strategy, graph)


@pytest.mark.distributed
def test_the_whole_batch_and_micro_batches_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    graph = graph_of("gathered")
    micro = ((3, 2), (1, 1), (0, 1))
    strategy = strategy_of(
        graph, [SYNCS["ring"]] * group_ops(graph).num_groups, micro_batches=micro
    )
    path = tmp_path / "plan.json"
    plan_of(graph, strategy).save(path)
    text = ranks.run(refusal, "gathered", str(path))[0]
    assert "2 micro-batches cannot be combined with ops that need the whole batch" in text


@pytest.mark.distributed
@pytest.mark.parametrize("step_barrier", [True, False])
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_hybrid_one_group_on_the_last_device(
    ranks: Ranks, tmp_path: Path, name: str, step_barrier: bool
) -> None:
    graph = graph_of(name, "AdamW")
    groups = group_ops(graph).num_groups
    decisions = [SYNCS["ring"]] * groups
    decisions[groups // 2] = Decision(devices=(2,), shares=(8,))
    strategy = strategy_of(graph, decisions, step_barrier=step_barrier)
    assert_trains_like_one_device(ranks, tmp_path, name, strategy, graph, Recipe("AdamW"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_with_uneven_counts(ranks: Ranks, tmp_path: Path, name: str) -> None:
    graph = graph_of(name)
    micro = ((3, 2), (0, 2), (1, 0))
    decision = Decision(devices=ALL, shares=(5, 2, 1), sync=Sync.RING)
    strategy = strategy_of(
        graph, [decision] * group_ops(graph).num_groups, micro_batches=micro, bucket_bytes=600
    )
    assert_trains_like_one_device(ranks, tmp_path, name, strategy, graph)


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("case", ["ring", "uneven slices", "zero share", "server"])
def test_batch_norm_keeps_local_statistics(
    ranks: Ranks, tmp_path: Path, name: str, case: str
) -> None:
    graph = graph_of(name)
    strategy = strategy_of(
        graph,
        [SYNCS[case]] * group_ops(graph).num_groups,
        homes=homes_of(graph, case),
        bucket_bytes=600,
        step_barrier=name == "normalised",
    )
    path = tmp_path / "plan.json"
    plan_of(graph, strategy).save(path)
    results = ranks.run(train, name, SGD, str(path))
    wanted = reference_with_local_statistics(name, SYNCS[case].shares)
    assert_same(results, wanted, rtol=1e-8, loss_rtol=1e-9)


@pytest.mark.distributed
def test_every_method_of_the_spine_on_four_ranks(four_ranks: Ranks, tmp_path: Path) -> None:
    """At the shares that each method itself gives to unequal devices."""
    unequal = cluster_of((1.0, ["V100-16GB"]), (1.0, ["T4", "T4"]), (10.0, ["GTX-1080-Ti"]))
    # Batches of eight on four devices are not cut along space or positions, which test_volumes and
    # test_sequences do.
    apart = ("spatial", "sequences")
    methods = [planner.name for planner in built_in_methods() if planner.name not in apart]
    methods = methods if IS_THOROUGH else methods[::4]
    for number, method in enumerate(methods):
        name = list(MODELS)[number % len(MODELS)]
        plan = make_plan(
            graph_of(name), unequal, methods=[method], budget="20e", step_barrier=number % 2 == 0
        )
        path = tmp_path / f"{method}.json"
        plan.save(path)
        # Where rules cut parameters, ranks have gradients of their slices.
        work = train_sharded if plan.strategy.op_rules else train
        results = four_ranks.run(work, name, SGD, str(path))
        assert_same(results, reference(name), all_gradients=work is train)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ALL_REDUCE", "PULL", "ACCUMULATE", "UPDATE"])
def test_a_program_without_one_task_is_noticed(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """The comparison above would see a task that is missing: it ablates itself."""
    graph = graph_of("mlp")
    groups = group_ops(graph).num_groups
    decisions = [SYNCS["ring"]] * groups
    homes = None
    micro: tuple[tuple[int, ...], ...] = ()
    if kind == "PULL":
        decisions = [SYNCS["server"]] * groups
        homes = (0,) * len(graph.updates)
    if kind == "ACCUMULATE":
        micro = ((3, 2), (1, 1), (0, 1))
    strategy = strategy_of(graph, decisions, homes=homes, micro_batches=micro)
    path = tmp_path / "plan.json"
    plan_of(graph, strategy).save(path)
    wanted = reference("mlp")
    for only in (0, ranks.run(count_tasks, str(path), kind)[0] - 1):
        results = [
            result
            for result in ranks.run(train_without, "mlp", str(path), kind, only)
            if result is not None
        ]
        if len(results) == NUM_RANKS:
            with pytest.raises(AssertionError):
                assert_same(results, wanted)


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("name", MODELS)
def test_random_strategies(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    graph = graph_of(name)

    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=cases(6, 3))
    def check(seed: int) -> None:
        strategy = random_strategy(Random(seed), graph)
        folder = tmp_path_factory.mktemp("plan")
        assert_trains_like_one_device(ranks, folder, name, strategy, graph)

    check()
