"""Layers are sharded as Megatron-LM does it, without knowing what they are called."""

from collections.abc import Sequence

import pytest

from heterog.graph.axis_plan import axis_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.strategy import tensor_parallel
from heterog.strategy.tensor_parallel import shardings
from tests.runtime.strategies import graph_of
from tests.strategy.merging import merge_rules
from tests.thorough import few_of


def groups_of(graph: OpGraph, beginning: str) -> list[int]:
    names = group_ops(graph).names
    return [number for number, name in enumerate(names) if name.startswith(beginning)]


@pytest.mark.parametrize(
    ("name", "beginning", "weight", "units", "others"),
    [
        # Fused query, key and value by heads, then the output by rows: its bias stays whole.
        ("gpt", "blocks.0", "query_key_value.weight", 2, ["query_key_value.bias", "out.weight"]),
        (
            *("gpt", "blocks.1", "feed_forward.0.weight", 16),
            ["feed_forward.0.bias", "feed_forward.2.weight"],
        ),
        ("language", "layers.0", "linear1.weight", 16, ["linear1.bias", "linear2.weight"]),
        (
            *("language", "", "layers.0.self_attn.in_proj_weight", 2),
            ["self_attn.in_proj_bias", "self_attn.out_proj.weight"],
        ),
        ("moe", "experts", "weight_in", 4, ["weight_out", "bias_in", "bias_out"]),
        ("gpt", "head", "head.weight", 13, []),
    ],
)  # fmt: skip
def test_what_a_split_leads_to(
    name: str, beginning: str, weight: str, units: int, others: list[str]
) -> None:
    graph = graph_of(name)
    found = next(
        each
        for each in shardings(graph, groups_of(graph, beginning))
        if graph.tensors[each.parameter].name.endswith(weight)
    )
    assert found.units == units
    plan = axis_plan(graph, found.op_rules)  # every rule is legal
    names = {graph.tensors[parameter].name for parameter in plan.sharded}
    assert len(names) == 1 + len(others)
    assert all(any(each.endswith(wanted) for each in names) for wanted in [weight, *others])


def test_one_sum_forward_and_one_backward() -> None:
    graph = graph_of("gpt")
    for weight in ("query_key_value.weight", "feed_forward.0.weight"):
        found = next(
            each
            for each in shardings(graph, groups_of(graph, "blocks.0"))
            if graph.tensors[each.parameter].name.endswith(weight)
        )
        sums = [op for op, rule in found.op_rules if rule.outputs[0].kind == "P"]
        phases = [graph.ops[op].phase.name for op in sums]
        assert phases == ["FORWARD", "BACKWARD"]


def test_regions_are_merged_in_order_of_their_ops() -> None:
    graph = graph_of("gpt")
    parts = [shardings(graph, groups_of(graph, f"blocks.{i}"))[0].op_rules for i in (1, 0)]
    merged = merge_rules(*parts)
    assert [op for op, _ in merged] == sorted(op for part in parts for op, _ in part)


def test_what_has_no_weights_cannot_be_sharded() -> None:
    graph = graph_of("mlp")
    assert shardings(graph, [1]) == ()  # a ReLU


@pytest.mark.parametrize("model", few_of(["gpt", "moe", "translation"], 2))
def test_what_reads_nothing_split_has_nothing_to_follow(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(model)
    count = group_ops(graph).num_groups
    # The end of the encoder and the start of the decoder show what all of the long model does.
    groups = range(count) if count < 32 else range(count // 4, 3 * count // 4)
    quick = shardings(graph, groups)

    class Everything(tensor_parallel.Region):
        """Has every op looked at, whatever it reads."""

        def __init__(self, graph: OpGraph, ops: Sequence[int]) -> None:
            super().__init__(graph, ops)
            self.readers = {tensor: list(ops) for tensor in range(len(graph.tensors))}

    monkeypatch.setattr(tensor_parallel, "Region", Everything)
    assert quick
    assert shardings(graph, groups) == quick
