"""One op for every kernel of fused attention, so that graphs do not depend on the device."""

from collections.abc import Mapping

from heterog.graph.placement import Arg, OpCall, TensorRef

# Every fused attention kernel becomes one op pair, so that the graph does not depend on the device
# it was captured on. Each entry lists the kernel's own argument names in canonical order.
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu.default": "attention",
    "_scaled_dot_product_flash_attention.default": "attention",
    "_scaled_dot_product_efficient_attention.default": "attention",
    "_scaled_dot_product_cudnn_attention.default": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": "attention_backward",
    "_scaled_dot_product_flash_attention_backward.default": "attention_backward",
    "_scaled_dot_product_efficient_attention_backward.default": "attention_backward",
    "_scaled_dot_product_cudnn_attention_backward.default": "attention_backward",
}


ATTENTION_ARGS = {
    "attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
    "attention_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "attn_mask", "dropout_p",
        "is_causal", "scale",
    ),
}  # fmt: skip


ATTENTION_ALIASES = {"attn_bias": "attn_mask", "grad_out_": "grad_out"}
"""Canonical names of attention arguments that some kernels name differently."""


ATTENTION_NUM_OUTPUTS = {"attention": 2, "attention_backward": 3}


def canonical_attention(
    kind: str, args: Mapping[str, Arg], inputs: list[int]
) -> tuple[dict[str, Arg], list[int]]:
    """Arguments of any attention kernel in canonical names and order."""
    by_name = {ATTENTION_ALIASES.get(name, name): value for name, value in args.items()}
    canonical: dict[str, Arg] = {}
    kept: list[int] = []
    for name in ATTENTION_ARGS[kind]:
        value = by_name.get(name)
        if isinstance(value, TensorRef):
            kept.append(inputs[value.index])
            value = TensorRef(len(kept) - 1)
        canonical[name] = value
    return canonical, kept


def attention_flops(call: OpCall) -> float:
    """Two matrix products forward (4 B H S T D), five backward (10 B H S T D)."""
    query = call.inputs[0 if call.kind == "attention" else 1].shape
    key = call.inputs[1 if call.kind == "attention" else 2].shape
    products = 2.0 if call.kind == "attention" else 5.0
    return products * 2.0 * query[0] * query[1] * query[2] * key[2] * query[3]
