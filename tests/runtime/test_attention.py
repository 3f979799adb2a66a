"""Attention on devices other than the captured one: the same numbers as the captured kernels."""

import pytest
import torch

from heterog.runtime.attention import attention, attention_backward

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_same_as_the_captured_kernels(is_causal: bool, masked: bool) -> None:
    if masked and is_causal:
        pytest.skip("a mask or causal, not both")
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(3, 1, 5, 5, dtype=torch.float64) if masked else None
    rest = {"attn_mask": mask, "scale": 0.3}
    wanted, kept = FORWARD(query, key, value, 0.0, is_causal, **rest)
    found, unused = attention(query, key, value, 0.0, is_causal, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(found, wanted)
    assert unused.shape == kept.shape
    gradient = torch.randn_like(wanted)
    wanted_back = BACKWARD(gradient, query, key, value, wanted, kept, 0.0, is_causal, **rest)
    found_back = attention_backward(
        gradient, query, key, value, found, unused, 0.0, is_causal, attn_mask=mask, scale=0.3
    )
    for mine, theirs in zip(found_back, wanted_back, strict=True):
        torch.testing.assert_close(mine, theirs)
