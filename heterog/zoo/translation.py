"""The encoder-decoder transformer for translation (Vaswani et al. 2017), in plain torch.

Widths of the paper's base model; one embedding serves source, target and output. There is no
dropout, so that a training step is deterministic. Unlike the paper, every sub-layer normalises its
input and not its output, because 24 + 24 layers do not train the other way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.workload import Workload
from heterog.zoo.attention import EncoderLayer, FeedForward, MultiHeadAttention
from heterog.zoo.tokens import token_workload

VOCABULARY = 50_000
NUM_TOKENS = 32
WIDTH = 512
INNER_WIDTH = 2048
NUM_HEADS = 8


def transformer_6l(batch_size: int) -> Workload:
    """The transformer with 6 + 6 layers, 32 source and 32 target tokens per sentence."""
    return _workload("transformer_6l", 6, batch_size)


def transformer_24l(batch_size: int) -> Workload:
    """The transformer with 24 + 24 layers, 32 source and 32 target tokens per sentence."""
    return _workload("transformer_24l", 24, batch_size)


def _workload(name: str, num_layers: int, batch_size: int) -> Workload:
    num_tokens = dict.fromkeys(("input_ids", "decoder_input_ids", "labels"), NUM_TOKENS)
    return token_workload(
        name, lambda: Transformer(num_layers), batch_size, VOCABULARY, num_tokens
    )


class DecoderLayer(nn.Module):
    """Causal attention over the target, attention over the source, a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = MultiHeadAttention(WIDTH, NUM_HEADS, causal=True)
        self.cross_norm = nn.LayerNorm(WIDTH)
        self.cross_attention = MultiHeadAttention(WIDTH, NUM_HEADS)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward(WIDTH, INNER_WIDTH, nn.ReLU)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Maps the target ``x`` and the encoded source ``memory`` to the shape of ``x``."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.cross_attention(self.cross_norm(x), memory)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Transformer(nn.Module):
    """The whole encoder-decoder model with its one tied embedding."""

    positions: Tensor

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.register_buffer("positions", sinusoids(NUM_TOKENS, WIDTH), persistent=False)
        self.encoder = nn.ModuleList(
            EncoderLayer(WIDTH, INNER_WIDTH, NUM_HEADS, nn.ReLU) for _ in range(num_layers)
        )
        self.encoder_norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(num_layers))
        self.decoder_norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """Maps source and target ``[batch, tokens]`` to logits ``[batch, tokens, 50000]``."""
        memory = self._embed(input_ids)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoder_norm(memory)
        x = self._embed(decoder_input_ids)
        for layer in self.decoder:
            x = layer(x, memory)
        return functional.linear(self.decoder_norm(x), self.embedding.weight)

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(token_ids)
        return embedded * math.sqrt(WIDTH) + self.positions


def sinusoids(num_tokens: int, width: int) -> Tensor:
    """The position codes of the paper's section 3.5, ``[num_tokens, width]``.

    PE[pos, 2i] = sin(pos / 10000^(2i/width)) and PE[pos, 2i+1] = cos of the same.
    """
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    angle = torch.arange(num_tokens)[:, None] * frequency  # [num_tokens, width / 2]
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)
