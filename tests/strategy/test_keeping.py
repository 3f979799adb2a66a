"""What is kept where single ops run again, by the closed forms of Korthikanti et al. (2022)."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import LAST_OP_KIND
from heterog.lowering.tables import graph_tables
from heterog.strategy.keeping import attention_scores
from heterog.strategy.layouts.layout import parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.layouts.stages import layers_of
from tests.runtime.grids import grid_cluster
from tests.runtime.padded import padded_workload

SAMPLES, LENGTH, WIDTH, HEADS = 2, 48, 32, 4


@cache
def in_16_bits() -> OpGraph:
    return capture(
        padded_workload(SAMPLES, LENGTH, layers=3, width=WIDTH, heads=HEADS, dtype=torch.bfloat16)
    )


def kept_bytes(graph: OpGraph, recompute: str) -> float:
    """Bytes of the middle layer that the backward pass reads as its forward pass made them."""
    cluster = grid_cluster(1)
    strategy = place_layout(parse_layout(f"recompute={recompute}"), graph, cluster).strategy
    program, tables = lower(graph, cluster, strategy), graph_tables(graph, (), strategy.blocks)
    layer = np.append(layers_of(graph).of_group, -1)[tables.op_group]
    read_late = np.zeros(len(program.buffer_bytes), np.bool_)
    for task in range(program.num_tasks):
        if program.kind[task] > LAST_OP_KIND:
            continue
        if tables.op_is_backward[program.subject[task]] or program.kind[task] > 0:
            reads = slice(program.read_start[task], program.read_start[task + 1])
            read_late[program.read_buffer[reads]] = True
    maker = program.buffer_maker
    is_first = (program.kind[maker] == 0) & (tables.op_is_backward[program.subject[maker]] == 0)
    is_inside = layer[program.subject[maker]] == 1
    return float(program.buffer_bytes[read_late & is_first & is_inside].sum())


def test_scores_are_not_kept() -> None:
    """Between both: the softmax, its dropout and the mask of that, a s^2 b each, in 2 bytes.

    The paper's mask has one byte, so that it counts 5 a s^2 b; torch draws it in the dtype of
    what it masks. The mask of pairs of positions is not of a layer.
    """
    graph = in_16_bits()
    pairs = HEADS * LENGTH**2 * SAMPLES
    assert kept_bytes(graph, "none") - kept_bytes(graph, "selective") == 6 * pairs


def test_the_rest_of_a_layer() -> None:
    """34 s b h in the paper; 36 here, as the masks of two dropouts have 2 bytes instead of 1.

    The paper leaves out mean and deviation of each norm, which are smaller by the factor h.
    """
    graph = in_16_bits()
    unit = LENGTH * SAMPLES * WIDTH
    statistics = 2 * 2 * 2 * LENGTH * SAMPLES
    assert kept_bytes(graph, "selective") == 36 * unit + statistics


def test_every_other_product_is_kept() -> None:
    """The first, of query, key and value (6 s b h), and the third, the wide one (8 s b h).

    And what the next layer reads (2 s b h), which alone is kept where all is made again.
    """
    graph = in_16_bits()
    unit = LENGTH * SAMPLES * WIDTH
    assert kept_bytes(graph, "op") == 16 * unit
    assert kept_bytes(graph, "full") == 2 * unit


class Softmaxes(nn.Module):
    """Softmaxes that are no attention: gates of a mixture, and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(8, 4), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        out: Tensor = self.head(x * gates.sum(-1, keepdim=True)).softmax(-1)
        return out


def test_a_softmax_alone_is_no_attention() -> None:
    batch = (torch.zeros(8, 3, 8), torch.zeros(8, 3, 5))
    graph = capture(
        Workload(Softmaxes, batch, nn.functional.mse_loss, torch.optim.SGD, {"lr": 0.1})
    )
    assert any("softmax" in op.kind for op in graph.ops)
    assert attention_scores(graph) == ()


@pytest.mark.parametrize("family", ["Bert", "GPT2"])
def test_attention_of_transformers_is_found(family: str) -> None:
    """From the product of queries and keys to the dropout before that with the values."""
    hub = pytest.importorskip("transformers")
    config = getattr(hub, f"{family}Config")(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=8, attn_implementation="eager",
    )  # fmt: skip
    name = {"Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}[family]
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    graph = capture(
        Workload(lambda: getattr(hub, name)(config), batch, None, torch.optim.SGD, {"lr": 0.1})
    )
    found = attention_scores(graph)
    assert len(found) == 2
    for ops in found:
        kinds = [graph.ops[op].kind for op in ops]
        assert kinds[0] in ("bmm.default", "baddbmm.default")
        assert "_softmax.default" in kinds
        assert "bernoulli.p" in kinds
