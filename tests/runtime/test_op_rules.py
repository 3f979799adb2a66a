"""Ops with rules of their own give the single-device numbers: tensors split in any dimension."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.graph.axis_plan import axis_plan
from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import OpRules, P, R, S
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.search.plan import load_plan
from heterog.strategy.strategy import REPLICATED, Decision, OpRule, Strategy, Sync
from heterog.strategy.tensor_parallel import shardings
from tests.runtime.cases import (
    SGD,
    Recipe,
    Trained,
    assert_same,
    reference,
    train_sharded,
)
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import (
    ALL,
    cluster,
    graph_of,
    plan_of,
    random_strategy,
    strategy_of,
)
from tests.runtime.walks import all_sharded, decoded, moves_of, start
from tests.simulator.builders import random_rules, with_rules
from tests.strategy.merging import merge_rules
from tests.thorough import cases, one_in

UNEVEN = Decision(devices=ALL, shares=(5, 2, 1), sync=Sync.RING)
WITH_ZERO = Decision(devices=ALL, shares=(5, 0, 3), sync=Sync.RING)


def everywhere(graph: OpGraph, decision: Decision) -> Strategy:
    return strategy_of(graph, [decision] * group_ops(graph).num_groups)


def trained(
    ranks: Ranks, folder: Path, name: str, strategy: Strategy, recipe: Recipe = SGD
) -> list[Trained]:
    graph = graph_of(name, recipe.optimizer)
    path = folder / "plan.json"
    plan_of(graph, strategy).save(path)
    assert load_plan(path).strategy == strategy
    results = ranks.run(train_sharded, name, recipe, str(path))
    atol = 2e-5 if recipe.optimizer == "AdamW" else 0.0
    assert_same(results, reference(name, recipe), atol=atol, all_gradients=False)
    return results


def column_then_row(graph: OpGraph) -> tuple[tuple[int, OpRule], ...]:
    """The first Linear of the MLP by columns, the second by rows, forward and backward."""
    kinds = [op.kind for op in graph.ops]
    assert (kinds[1], kinds[5], kinds[22], kinds[32]) == (
        *("addmm.default", "addmm.default", "mm.default", "mm.default"),
    )

    def rule(inputs: tuple, output: object) -> OpRule:  # type: ignore[type-arg]
        return OpRule(inputs=inputs, outputs=(output,), units=16)  # type: ignore[arg-type]

    return (
        (1, rule((S(0), R, S(1)), S(1))),
        (2, rule((S(1),), S(1))),
        (5, rule((R, S(1), S(0)), P)),
        (22, rule((R, S(1)), S(1))),
        (24, rule((R, S(1)), S(1))),
        (30, rule((S(1), S(1)), S(1))),
        (32, rule((S(0), R), S(0))),
        (34, rule((S(1),), S(1))),
    )


@pytest.mark.distributed
@pytest.mark.parametrize("decision", [UNEVEN, WITH_ZERO])
@pytest.mark.parametrize("step_barrier", [True, False])
def test_column_then_row_parallel_layers(
    ranks: Ranks, tmp_path: Path, decision: Decision, step_barrier: bool
) -> None:
    recipe = Recipe("AdamW")  # its state is sharded like the weights
    graph = graph_of("mlp", "AdamW")
    strategy = replace(
        everywhere(graph, decision), op_rules=column_then_row(graph), step_barrier=step_barrier
    )
    results = trained(ranks, tmp_path, "mlp", strategy, recipe)
    # Both weights and the first bias are sharded: each rank holds its part of 16 columns.
    shares = [10, 4, 2] if decision is UNEVEN else [10, 0, 6]
    for result, share in zip(results, shares, strict=True):
        assert result.shapes["0.weight"] == (share, 6)
        assert result.shapes["0.bias"] == (share,)
        assert result.shapes["2.weight"] == (16, share)
        assert result.shapes["2.bias"] == (16,)


@pytest.mark.distributed
def test_parameters_stay_whole_for_an_optimizer_that_looks_at_them_whole(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Adafactor's steps follow norms of rows, columns and all: a slice would step differently."""
    graph = graph_of("mlp", "Adafactor")
    strategy = replace(everywhere(graph, UNEVEN), op_rules=column_then_row(graph))
    results = trained(ranks, tmp_path, "mlp", strategy, Recipe("Adafactor"))
    for result in results:
        assert result.shapes["0.weight"] == (16, 6)
        assert result.shapes["2.weight"] == (16, 16)


def sharding_of(graph: OpGraph, names: str, *, parameter: str = "") -> OpRules:
    """The best rules for the groups whose names begin so."""
    grouping = group_ops(graph)
    groups = [number for number, each in enumerate(grouping.names) if each.startswith(names)]
    found = [
        each
        for each in shardings(graph, groups)
        if graph.tensors[each.parameter].name.endswith(parameter)
    ]
    return found[0].op_rules


def sharded_names(graph: OpGraph, rules: OpRules) -> set[str]:
    return {graph.tensors[parameter].name for parameter in axis_plan(graph, rules).sharded}


@pytest.mark.distributed
@pytest.mark.parametrize("decision", [UNEVEN, WITH_ZERO])
def test_heads_and_feed_forward_of_a_gpt(ranks: Ranks, tmp_path: Path, decision: Decision) -> None:
    """Two heads on three devices: one of them has none."""
    graph = graph_of("gpt")
    rules = merge_rules(
        *(
            sharding_of(graph, f"blocks.{block}", parameter=weight)
            for block in range(2)
            for weight in ("query_key_value.weight", "feed_forward.0.weight")
        )
    )
    assert sharded_names(graph, rules) == {
        f"blocks.{block}.{name}"
        for block in range(2)
        for name in (
            *("query_key_value.weight", "query_key_value.bias", "out.weight"),
            *("feed_forward.0.weight", "feed_forward.0.bias", "feed_forward.2.weight"),
        )
    }
    strategy = replace(everywhere(graph, decision), op_rules=rules, bucket_bytes=600)
    results = trained(ranks, tmp_path, "gpt", strategy)
    heads = {UNEVEN: (1, 1, 0), WITH_ZERO: (1, 0, 1)}[decision]
    for result, count in zip(results, heads, strict=True):
        assert result.shapes["blocks.0.query_key_value.weight"] == (12 * count, 8)


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "groups", "parameter", "sharded"),
    [
        ("language", "layers.0", "linear1.weight", ("linear1.weight", "linear1.bias")),
        ("gpt", "head", "head.weight", ("head.weight",)),
        ("moe", "experts", "weight_in", ("weight_in", "weight_out", "bias_in")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sync", [Sync.RING, Sync.PARAMETER_SERVER])
def test_encoder_vocabulary_and_experts(
    ranks: Ranks, tmp_path: Path, name: str, groups: str, parameter: str,
    sharded: tuple[str, ...], sync: Sync,
) -> None:  # fmt: skip
    graph = graph_of(name)
    rules = sharding_of(graph, groups, parameter=parameter)
    for ending in sharded:
        assert any(each.endswith(ending) for each in sharded_names(graph, rules))
    homes = tuple(
        REPLICATED if sync == Sync.RING else row % 3 for row in range(len(graph.updates))
    )
    strategy = replace(everywhere(graph, replace(UNEVEN, sync=sync)), homes=homes)
    strategy = with_rules(graph, strategy, rules)
    trained(ranks, tmp_path, name, strategy, Recipe(max_grad_norm=0.5))


@pytest.mark.distributed
def test_sufficient_factors_are_sent_instead_of_gradients(ranks: Ranks, tmp_path: Path) -> None:
    """Each device multiplies the gathered factors of a weight gradient: nothing to synchronise."""
    graph = graph_of("mlp")
    products = [
        op
        for op in range(graph.num_ops)
        if graph.ops[op].kind == "mm.default" and len(graph.ops[op].args) == 2
    ]
    makers = {int(graph.producer[graph.storage[gradient]]) for _, _, gradient in graph.updates}
    factors = OpRule(inputs=(R, R), outputs=(R,), units=1)
    rules = tuple((op, factors) for op in products if op in makers)
    assert len(rules) == 3
    strategy = replace(everywhere(graph, UNEVEN), op_rules=rules)
    trained(ranks, tmp_path, "mlp", strategy)
    program = lower(graph, cluster(), strategy)
    biases = [
        row for row, (_, p, _) in enumerate(graph.updates) if "bias" in graph.tensors[p].name
    ]
    reduced = program.kind == TaskKind.ALL_REDUCE
    assert sorted(program.subject[reduced].tolist()) == biases


@pytest.mark.distributed
def test_sharded_in_one_place_and_batch_split_elsewhere(ranks: Ranks, tmp_path: Path) -> None:
    """One block's layers are sharded over two devices; the rest is data parallel on all three."""
    graph = graph_of("gpt")
    grouping = group_ops(graph)
    pair = Decision(devices=(1, 2), shares=(3, 5))
    alone = Decision(devices=(2,), shares=(8,))
    decisions = [
        pair if name.startswith("blocks.0") else alone if name == "head" else UNEVEN
        for name in grouping.names
    ]
    rules = merge_rules(
        sharding_of(graph, "blocks.0", parameter="feed_forward.0.weight"),
        sharding_of(graph, "blocks.0", parameter="query_key_value.weight"),
        sharding_of(graph, "head"),
    )
    strategy = replace(strategy_of(graph, decisions), op_rules=rules)
    trained(ranks, tmp_path, "gpt", strategy)


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mlp", "gpt", "moe", "residual", "encodings"])
def test_random_legal_rules(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    graph = graph_of(name)

    @given(seed=st.integers(0, 2**32 - 1))
    @settings(max_examples=cases(4, 2))
    def check(seed: int) -> None:
        rng = Random(seed)
        strategy = replace(random_strategy(rng, graph), micro_batches=())
        strategy = with_rules(graph, strategy, random_rules(rng, graph))
        trained(ranks, tmp_path_factory.mktemp("plan"), name, strategy)

    check()


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_a_walk_of_the_local_search_from_sharded_layers(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """Some layers sharded, some not, on other devices each, some recomputing."""
    graph = graph_of(name)
    moves = moves_of(graph, seed=1)
    state = start(moves, all_sharded(graph))
    for _ in range(60):
        moved = moves.of(state)
        state = moved if moved.rules else state
    trained(ranks, tmp_path, name, decoded(moves, state))


@pytest.mark.distributed
@pytest.mark.parametrize("decision", [UNEVEN, WITH_ZERO])
def test_what_is_repeated_for_every_sample_is_made_for_the_own_ones(
    ranks: Ranks, tmp_path: Path, decision: Decision
) -> None:
    """Nothing that the batch splits goes in; all who read it take the rows of their samples."""
    graph = graph_of("encodings")
    batch = batch_plan(graph)
    products = [
        op
        for op, node in enumerate(graph.ops)
        if node.kind == "mm.default" and node.phase == Phase.FORWARD
    ]
    assert all(batch.needed[op] == (S(0), R) for op in products)
    strategy = everywhere(graph, decision)
    program = lower(graph, cluster(), strategy)
    assert not (program.kind == TaskKind.GATHER_VALUE).any()
    trained(ranks, tmp_path, "encodings", strategy)


@pytest.mark.distributed
def test_rows_of_an_embedding_are_gathered_instead_of_its_gradient(
    ranks: Ranks, tmp_path: Path
) -> None:
    graph = graph_of("gpt")
    rules = tuple(
        (op, OpRule(inputs=(R, R), outputs=(R,), units=1))
        for op, node in enumerate(graph.ops)
        if node.kind == "embedding_dense_backward.default"
    )
    assert rules
    strategy = replace(everywhere(graph, UNEVEN), op_rules=rules)
    program = lower(graph, cluster(), strategy)
    reduced = set(program.subject[program.kind == TaskKind.ALL_REDUCE].tolist())
    made = {tensor for op, _ in rules for tensor in graph.outputs[op]}
    looked_up = {
        number
        for number, (_, _, gradient) in enumerate(graph.updates)
        if int(graph.storage[gradient]) in made
    }
    assert looked_up
    assert not looked_up & reduced
    trained(ranks, tmp_path, "gpt", strategy)
