"""Attention layers that the zoo's own transformers share, in plain torch and without dropout."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention with several heads (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, width: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Lets ``x`` attend to ``memory``, or to itself; both ``[batch, tokens, width]``."""
        memory = x if memory is None else memory
        heads = functional.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(memory)),
            self._split(self.value(memory)),
            is_causal=self.causal,
        )
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        batch_size, num_tokens, width = x.shape
        heads = x.view(batch_size, num_tokens, self.num_heads, width // self.num_heads)
        return heads.transpose(1, 2)  # [batch, heads, tokens, width / heads]


class FeedForward(nn.Sequential):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int, inner_width: int, activation: type[nn.Module]) -> None:
        super().__init__(
            nn.Linear(width, inner_width), activation(), nn.Linear(inner_width, width)
        )


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward layer, each on its normalised input."""

    def __init__(
        self,
        width: int,
        inner_width: int,
        num_heads: int,
        activation: type[nn.Module],
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.attention = MultiHeadAttention(width, num_heads)
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward = FeedForward(width, inner_width, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[batch, tokens, width]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out
