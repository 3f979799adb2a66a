"""What people run today, executed: layouts on four real ranks give the numbers of one device."""

from pathlib import Path

import pytest

from heterog.graph.axis_plan import axis_plan
from heterog.graph.grouping import group_ops
from heterog.graph.sharding_rules import Special
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.strategy.layouts.layout import parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.layouts.stages import layers_of
from heterog.strategy.layouts.tensor import team_rules
from tests.runtime.grids import grid_cluster
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import graph_of
from tests.runtime.test_rehearsal import verdict
from tests.runtime.test_teams import trained_alike
from tests.simulator.builders import plan_by_hand
from tests.thorough import THOROUGH, one_in


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tied", "tp=2,sp=true,num_micro=2"),
        ("tied, chosen", "tp=2,num_micro=2"),
        pytest.param("tied", "tp=4", marks=THOROUGH),
    ],
)
def test_a_team_shares_the_words_of_a_tied_table(
    four_ranks: Ranks, tmp_path: Path, name: str, text: str
) -> None:
    """Look-ups, logits, their cross entropy and the table's state are in slices of 13 words."""
    graph, cluster = graph_of(name), grid_cluster(4)
    given = place_layout(parse_layout(text), graph, cluster)
    sharded = axis_plan(graph, given.strategy.op_rules).sharded
    assert "embedding.weight" in {graph.tensors[each].name for each in sharded}
    program = lower(graph, cluster, given.strategy)
    gathered = program.num_bytes[program.kind == TaskKind.GATHER_VALUE]
    logits = graph.batch_size * 5 * 13 * 4 / given.sizes.dp / given.sizes.num_micro
    assert logits not in gathered.tolist()
    trained_alike(four_ranks, tmp_path, name, given.strategy)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("smoothed labels", "tp=2,sp=true,num_micro=2"),
        pytest.param("weighted labels", "tp=4", marks=THOROUGH),
        pytest.param("pseudo-labels", "tp=2", marks=THOROUGH),
        pytest.param("gpt", "tp=4,num_micro=2", marks=THOROUGH),
    ],
)
def test_a_team_shares_the_words_of_a_cross_entropy(
    four_ranks: Ranks, tmp_path: Path, name: str, text: str
) -> None:
    """Log-softmax and the choice of labels are by words; numbers of rows are gathered."""
    graph, cluster = graph_of(name), grid_cluster(4)
    given = place_layout(parse_layout(text), graph, cluster)
    plan, kinds = axis_plan(graph, given.strategy.op_rules), [each.kind for each in graph.ops]
    for op, (kind, special) in enumerate(zip(kinds, plan.specials, strict=True)):
        if "log_softmax" in kind:
            assert special == Special.NUMBERS_OF_ROWS, op
        if "nll_loss" in kind:
            assert special == Special.OWN_WORDS, op
    assert not any("logits" in each for each in given.remarks)
    assert verdict(name, plan_by_hand(graph, cluster, given.strategy)) == ""
    trained_alike(four_ranks, tmp_path, name, given.strategy)


def test_eight_heads_of_eight_samples_are_shared_by_eight() -> None:
    """Heads and samples are two axes, also where there are as many of both."""
    graph = graph_of("as many heads as samples")
    rules = dict(team_rules(graph, tuple(range(group_ops(graph).num_groups)), members=8).op_rules)
    attention = [op for op, each in enumerate(graph.ops) if "attention" in each.kind]
    assert graph.batch_size == 8
    assert {rules[op].units for op in attention if op in rules} == {8}


@one_in(3)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt", "tp=2,zero=1,micro_batch=2,recompute=full"),
        ("gpt", "tp=2,pp=2,schedule=gpipe,micro_batch=4"),
        ("gpt", "zero=3,micro_batch=1"),
        ("gpt", "dp_replicate=2,dp_shard=2,micro_batch=1"),
        ("gpt", "pp=2,recompute=full,recompute_every=2"),
        ("llama", "dp_replicate=2,zero=2,recompute=full"),
        ("mlp", "dp_replicate=2,zero=1,num_micro=2"),
        ("gpt", "tp=2,sp=true"),
        ("gpt", "tp=2,pp=2,micro_batch=2,recompute=full,sp=true"),
        ("llama", "tp=2,zero=2,micro_batch=4"),
        ("translation", "tp=2,sp=true,zero=3,micro_batch=2"),
        ("llama", "tp=2,pp=2,micro_batch=2,recompute=full,sp=true"),
        ("gpt", "cp=2,pp=2,micro_batch=2"),
        ("as many heads as samples", "tp=4,sp=true,num_micro=2"),
        ("llama", "cp=4,zero=1,recompute=full"),
        ("moe", "ep=2,zero=1,num_micro=2"),
        ("moe", "ep=4,recompute=full"),
        ("moe", "ep=2,dispatch=allgather"),
        ("moe", "ep=2,tp=2,zero=1,num_micro=2"),
        ("moe", "ep=2,cp=2"),
        ("mlp", "tp=4,num_micro=2"),
        ("mlp", "tp=2,pp=2,layers=3-2,num_micro=4"),
        # Each of these has its parts in the ones above.
        pytest.param("gpt", "tp=2,pp=2,micro_batch=2,recompute=full", marks=THOROUGH),
        pytest.param("gpt", "pp=2,zero=1,recompute=full", marks=THOROUGH),
        pytest.param("llama", "tp=4,sp=true", marks=THOROUGH),
    ],
)
def test_a_layout_is_executed(four_ranks: Ranks, tmp_path: Path, name: str, text: str) -> None:
    graph, cluster = graph_of(name), grid_cluster(4)
    given = place_layout(parse_layout(text), graph, cluster)
    assert given.sizes.num_devices == 4
    if "full" in text and layers_of(graph).names:
        program = lower(graph, cluster, given.strategy)
        assert (program.kind == TaskKind.RECOMPUTE).any()
    trained_alike(four_ranks, tmp_path, name, given.strategy)
