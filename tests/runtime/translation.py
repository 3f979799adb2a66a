"""An encoder and a decoder in the manner of T5 (Raffel et al. 2020), small enough for tests.

Root-mean-square norms before each sub-layer, attention without biases or scaling but with a
learned bias by distance that all layers of a stack share, a mask over the padding of the source,
and one embedding for source, target and output.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, INNER, HEADS, VOCABULARY = 8, 16, 2, 13
NUM_DISTANCES = 4
PADDING = 0


class TinyT5(nn.Module):
    """Two layers of an encoder, two of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.distance = nn.Embedding(NUM_DISTANCES, HEADS)
        self.encoder = nn.ModuleList(_Layer(crosses=False) for _ in range(2))
        self.encoder_norm = nn.RMSNorm(WIDTH)
        self.decoder = nn.ModuleList(_Layer(crosses=True) for _ in range(2))
        self.decoder_norm = nn.RMSNorm(WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Maps tokens ``[batch, source]`` and ``[batch, target]`` to flat logits."""
        is_padding = (source == PADDING)[:, None, None, :]
        unseen = torch.zeros(is_padding.shape).masked_fill(is_padding, -1e9)
        bias = self._bias(source.shape[1]) + unseen
        memory = self.embedding(source)
        for layer in self.encoder:
            memory = layer(memory, bias)
        memory = self.encoder_norm(memory)
        length = target.shape[1]
        is_seen = torch.ones(length, length, dtype=torch.bool).tril()
        later = torch.where(is_seen, self._bias(length), torch.tensor(-1e9))  # as transformers do
        x = self.embedding(target)
        for layer in self.decoder:
            x = layer(x, later, memory, unseen)
        logits = functional.linear(self.decoder_norm(x), self.embedding.weight)
        return logits.flatten(0, 1)

    def _bias(self, length: int) -> Tensor:
        """What is added for the distance of two positions, ``[1, heads, length, length]``."""
        places = torch.arange(length)
        distance = (places[:, None] - places[None, :]).abs().clamp(max=NUM_DISTANCES - 1)
        bias: Tensor = self.distance(distance).permute(2, 0, 1)[None]
        return bias


class _Layer(nn.Module):
    """Self-attention, attention over the encoder where there is one, a gated feed-forward."""

    def __init__(self, *, crosses: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), _Attention()
        if crosses:
            self.cross_norm, self.cross = nn.RMSNorm(WIDTH), _Attention()
        self.inner_norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.into = nn.Linear(WIDTH, INNER, bias=False)
        self.out = nn.Linear(INNER, WIDTH, bias=False)

    def forward(
        self, x: Tensor, bias: Tensor, memory: Tensor | None = None, unseen: Tensor | None = None
    ) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, bias)
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory, unseen)
        normed = self.inner_norm(x)
        out: Tensor = x + self.out(functional.gelu(self.gate(normed)) * self.into(normed))
        return out


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        def by_heads(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], HEADS, -1).transpose(1, 2)

        query = by_heads(self.query(x))
        key, value = by_heads(self.key(memory)), by_heads(self.value(memory))
        weights = (query @ key.transpose(2, 3) + bias).softmax(-1)
        out: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return out
