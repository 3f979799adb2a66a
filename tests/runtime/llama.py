"""A small language model as Llama, Qwen and Mistral are built."""

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, KEY_HEADS, PER_HEAD = 24, 4, 2, 6


class TinyLlama(nn.Module):
    """Norms that are written out, rotary positions, shared keys, a gated feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.norm = _Norm()
        self.head = nn.Linear(WIDTH, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out.flatten(0, 1)


class _Norm(nn.Module):
    """Root mean square, of its elementary parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = _Norm(), _Norm()
        self.query = nn.Linear(WIDTH, HEADS * PER_HEAD, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * PER_HEAD, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * PER_HEAD, bias=False)
        self.out = nn.Linear(HEADS * PER_HEAD, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 40, bias=False)
        self.up = nn.Linear(WIDTH, 40, bias=False)
        self.down = nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        seen = self.first_norm(x)

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, PER_HEAD).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            _rotated(heads(self.query(seen))),
            _rotated(heads(self.key(seen))),
            heads(self.value(seen)),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        seen = self.second_norm(x)
        out: Tensor = x + self.down(functional.silu(self.gate(seen)) * self.up(seen))
        return out


def _rotated(heads: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), on halves of each head."""
    place = torch.arange(heads.shape[2], dtype=heads.dtype)[:, None]
    angle = place / 100.0 ** torch.linspace(0.0, 1.0, PER_HEAD // 2)
    first, second = heads.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
