"""Fused attention on devices other than the one it was captured on.

The graph holds one canonical pair of ops, with the arguments of the CPU's kernels. What a forward
kernel keeps for its backward kernel differs from device to device, so here the backward op runs
the forward pass again and asks autograd: right on every device, for one more forward pass.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """The output, and a placeholder for the value that the backward op gets and does not use."""
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        # The CPU's kernels take several query heads for one of keys unasked.
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    # Shaped like the logarithms of sums that CPU kernels keep, so that it can be split alike.
    return output, query.new_zeros(query.shape[:-1], dtype=torch.float32)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    with torch.enable_grad():
        query, key, value = (each.detach().requires_grad_() for each in (query, key, value))
        output, _ = attention(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        return torch.autograd.grad(output, (query, key, value), grad_out)


ATTENTION: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"attention": attention, "attention_backward": attention_backward}
)
"""Functions that run canonical ops; arguments are in the order of the CPU kernels'."""
