"""Every layer's sharding is found once per kind and carried over to all places."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpRules, R
from heterog.graph.workload import Workload
from heterog.strategy.layer_shardings import (
    LEAST_WEIGHTS,
    layer_shardings,
    moved_bytes,
    weight_bytes,
)
from tests.runtime.strategies import graph_of
from tests.strategy.merging import merge_rules


class InputFirst(nn.Module):
    """A layer whose weight is (input, output), as GPT-2's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def feed_forwards() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Sequential(InputFirst(64, 256), nn.ReLU(), InputFirst(256, 64), nn.LayerNorm(64))
            for _ in range(3)
        )
    )


def captured(batch_size: int) -> OpGraph:
    batch = (torch.zeros(batch_size, 64), torch.zeros(batch_size, 64))
    return capture(Workload(feed_forwards, batch, functional.mse_loss, torch.optim.Adam))


def captured_words(rows: int) -> OpGraph:
    def words() -> nn.Module:
        return nn.Sequential(nn.Embedding(rows, 16), nn.Flatten(), nn.Linear(4 * 16, 8))

    batch = (torch.zeros(16, 4, dtype=torch.long), torch.zeros(16, 8))
    return capture(Workload(words, batch, functional.mse_loss, torch.optim.SGD))


def sharded_names(graph: OpGraph, places: tuple[OpRules, ...]) -> list[list[str]]:
    return [
        sorted(graph.tensors[parameter].name for parameter in axis_plan(graph, rules).sharded)
        for rules in places
    ]


def test_columns_then_rows_wherever_the_layer_is() -> None:
    graph = captured(16)
    first, others = sorted(layer_shardings(graph), key=len)
    assert sharded_names(graph, first) == [["0.0.weight", "0.2.weight"]]
    assert sharded_names(graph, others) == [[f"{i}.0.weight", f"{i}.2.weight"] for i in (1, 2)]
    for places in (first, others):
        assert weight_bytes(graph, places[0]) == 2 * 64 * 256 * 4
    activation = 16 * 64 * 4
    # The input and the gradient of the output are gathered, the output is summed; the gradient of
    # the input is summed too, except for that of the model's own input.
    assert moved_bytes(graph, first[0]) == (1 + 1 + 2) * activation
    assert moved_bytes(graph, others[0]) == (1 + 1 + 2 + 2) * activation


@pytest.mark.parametrize("name", ["gpt", "moe", "language", "mlp"])
def test_places_are_disjoint_and_legal_together(name: str) -> None:
    graph = graph_of(name)
    found = layer_shardings(graph)
    ops = [op for places in found for rules in places for op, _ in rules]
    assert len(ops) == len(set(ops)) > 0
    plan = axis_plan(graph, merge_rules(*(rules for places in found for rules in places)))
    assert plan.sharded


def test_weights_that_are_small_against_activations_are_left_alone() -> None:
    per_sample = 4 * 64 * 4  # the first layer's bytes moved
    too_large = int(2 * 64 * 256 * 4 / (LEAST_WEIGHTS * per_sample)) + 1
    assert layer_shardings(captured(too_large)) == ()


def test_rows_that_were_looked_up_are_fewer_than_an_embedding_has() -> None:
    """64 numbers of 8 bytes and 64 rows of 16 floats stand for a gradient of 4,096 rows."""
    graph = captured_words(rows=4096)
    first = layer_shardings(graph)[0][0]
    ((op, rule),) = first
    assert graph.ops[op].kind == "embedding_dense_backward.default"
    assert (rule.inputs, rule.outputs) == ((R, R), (R,))
    assert weight_bytes(graph, first) == 4096 * 16 * 4
    assert moved_bytes(graph, first) == 64 * (16 * 4 + 8)
    lookups = [rules for places in layer_shardings(captured_words(rows=32)) for rules in places]
    kinds = {graph.ops[op].kind for rules in lookups for op, _ in rules if len(rules) == 1}
    assert "embedding_dense_backward.default" not in kinds  # 32 rows are fewer than 64 look-ups


def test_experts_are_sharded_with_their_tokens_exchanged() -> None:
    """Of both ways the one that moves less: each token to its experts alone, and back."""
    graph = graph_of("moe")
    rules = [rule for places in layer_shardings(graph) for rules in places for _, rule in rules]
    assert sum(rule.scatter is not None for rule in rules) == 4
    assert not any(place.kind == "P" for rule in rules for place in rule.outputs)


def test_groups_that_only_check_are_left_alone() -> None:
    """An inverse asks whether it exists in an op without an output, in a group of its own."""

    class Inverted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = torch.linalg.inv(x) @ self.layer(x)
            return made

    batch = torch.zeros(16, 4, 4), torch.zeros(16, 4, 4)
    graph = capture(Workload(Inverted, batch, functional.mse_loss, torch.optim.SGD))
    assert any(not any(graph.outputs[op] for op in ops) for ops in group_ops(graph).ops)
    assert layer_shardings(graph) == ()
