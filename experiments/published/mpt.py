"""MPT with FSDP, as llm-foundry's published runs trained it: the model, and its rows.

Settings that the rows lack are from llm-foundry's configurations of these sizes: a vocabulary of
50368, learned positions, no biases, GELU, an MLP four times as wide, the head tied to the
embedding, fused attention. Parameters and gradients are gathered and reduced in 16 bits. Hosts
have eight GPUs and eight NICs, together at the rate that the section of the table names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from rows import csv_rows
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.strategy.layouts.layout import Layout, Recompute
from published.hosts import IN_A_HOST, alike_hosts

VOCABULARY = 50368
SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24),
    "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip
"""Width, heads and layers."""
_CARDS = {
    "a100_40gb": ("A100-40GB", "nvlink_a100", 200),
    "a100_80gb": ("A100-80GB", "nvlink_a100", 200),
    "h100_80gb": ("H100", "nvlink4", 400),
}
"""Type, links inside a host, and Gbit/s of each of its eight NICs."""


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP.  # [batch, tokens, width]"""
        batch, length, width = x.shape
        queries, keys, values = (
            each.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for each in self.queries_keys_values(self.norm_1(x)).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """The language model."""

    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits.  # [batch, tokens, vocabulary]"""
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.words.weight)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in float32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@lru_cache(maxsize=2)
def graph_of(name: str, length: int, batch: int) -> OpGraph:
    """One captured training step in bfloat16, of a model without memory."""
    width, heads, layers = SIZES[name]
    tokens = torch.zeros(batch, length, dtype=torch.int64)

    def make() -> nn.Module:
        with torch.device("meta"):
            return Mpt(width, heads, layers, length).bfloat16()

    return capture(
        Workload(
            model=make,
            example_batch=(tokens, tokens),
            loss=loss,
            optimizer=torch.optim.AdamW,
            name=f"mpt_{name}",
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table.

    Attributes:
        model: name in ``SIZES``.
        length: tokens of a sequence.
        card: GPU type.
        batch: sequences of a step.
        cluster: that it ran on.
        layout: how.
        measured_s: seconds of a step, from tokens per second; sequences per second are rounded.
    """

    model: str
    length: int
    card: str
    batch: int
    cluster: Cluster
    layout: Layout
    measured_s: float

    @property
    def name(self) -> str:
        """For messages."""
        return (
            f"mpt_{self.model}, {self.length} tokens, batch {self.batch}, "
            f"{self.cluster.num_devices} {self.card}, {self.layout}"
        )


def rows_of(path: Path, split: str) -> Iterator[Row]:
    """The rows of a split in 16 bits; no parameters of 8-bit training are known."""
    for row in csv_rows(path):
        is_known = row["Model"] in SIZES and row["GPU"] in _CARDS
        if row["split"] == split and is_known and "bf16" in row["Precision"]:
            yield _row(row)


def _row(row: dict[str, str]) -> Row:
    count, length, batch = (int(row[key]) for key in ("# GPUs", "SeqLen (T)", "GlobalBatchSize"))
    card, inside, rate = _CARDS[row["GPU"]]
    nic = f"{{line_rate: {rate} Gbit/s, count: {IN_A_HOST}}}"
    return Row(
        model=row["Model"],
        length=length,
        card=card,
        batch=batch,
        cluster=alike_hosts(card, count, intra=inside, nic=nic),
        layout=Layout(
            dp=count,
            micro_batch=int(row["MicroBatchSize"]),
            zero={"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}.get(row["Sharding Strategy"], 0),
            recompute=Recompute("full" if row["Activation Checkpointing"] == "True" else "none"),
        ),
        measured_s=batch * length / float(row["Throughput (T/s)"]),
    )
