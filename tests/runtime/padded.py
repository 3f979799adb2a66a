"""A small language model with a padding mask, whose attention is written out and has dropout."""

import math

import torch
from torch import Tensor, nn

from heterog.graph.workload import Workload

WORDS = 11


class Attention(nn.Module):
    """Scores, the mask, a softmax, dropout, and the sum of values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.projections = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.projections(x).chunk(3, -1)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        weights = self.dropout((scores + mask).softmax(-1))
        mixed: Tensor = self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return mixed


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, dropout)
        self.drops = nn.ModuleList(nn.Dropout(dropout) for _ in range(2))
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.drops[0](self.attention(self.norms[0](x), mask))
        wide = nn.functional.gelu(self.wide(self.norms[1](x)))
        result: Tensor = x + self.drops[1](self.back(wide))
        return result


class Padded(nn.Module):
    """Makes the mask of pairs of positions from a small mask of positions, for all layers."""

    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x, length = self.embedding(tokens), tokens.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril() & mask[:, None].bool()
        pairs = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -1e9)[:, None]
        for layer in self.layers:
            x = layer(x, pairs)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def padded_batch(samples: int, length: int, step: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (samples, length), generator=random)
    mask = (torch.arange(length) < length - torch.arange(samples)[:, None] % 3).long()
    return {"tokens": tokens, "mask": mask, "labels": tokens.roll(-1, 1)}


def padded_workload(
    samples: int = 8,
    length: int = 6,
    *,
    layers: int = 2,
    width: int = 8,
    heads: int = 2,
    dropout: float = 0.1,
    dtype: torch.dtype = torch.float64,
) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return Padded(layers, width, heads, dropout).to(dtype)

    return Workload(
        seeded, padded_batch(samples, length), None, torch.optim.SGD, {"lr": 0.1},
        name="padded",
    )  # fmt: skip
