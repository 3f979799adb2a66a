"""Fused scaled-dot-product attention, one rule pair for all of its kernels.

``attention``: (query, key, value, attn_mask?), each [B, H, S, D], to (out, logsumexp [B, H, S]).
``attention_backward``: (grad_out, query, key, value, out, logsumexp, attn_mask?) to
(grad_query, grad_key, grad_value).
"""

from collections.abc import Iterator

from heterog.graph.placement import OpCall, P, Placement, R, TensorRef
from heterog.graph.sharding_rules.table import (
    Entry,
    RuleResult,
    Special,
    aligned,
    axis,
    choose,
    positions,
    rule,
    shape_of,
)


@rule("attention")
def _attention(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    special = Special.OWN_RANDOM_STREAM if call.args["dropout_p"] else None
    axes = [
        axis(call, (d, d), special, query=d, key=keys, value=keys, attn_mask=mask)
        for d, keys, mask in _independent(call)
    ]
    shared = Special.SHARED_RANDOM_STREAM if special else None
    return choose(call, placements, axis_size, axes, replicated=shared)


@rule("attention_backward")
def _attention_backward(
    call: OpCall, placements: tuple[Placement, ...], axis_size: int
) -> RuleResult:
    axes = []
    for d, keys, mask in _independent(call):
        # Every query adds to the gradient of keys and values it shares with others.
        gradient = keys if isinstance(keys, int) else P
        queries = dict.fromkeys(("grad_out", "query", "out", "logsumexp"), d)
        outputs = (d, gradient, gradient)
        axes.append(axis(call, outputs, key=keys, value=keys, attn_mask=mask, **queries))
    return choose(call, placements, axis_size, axes, [positions(call, "grad_out")])


def _independent(call: OpCall) -> Iterator[tuple[int, Entry, Entry]]:
    """Splittable dims of the query, with where keys and the mask carry them.

    Neighbouring heads share keys in grouped-query attention: they split into as many units as
    there are heads of keys, or fewer. Queries split only without a causal mask, which depends on
    their position.
    """
    query, key = shape_of(call, "query"), shape_of(call, "key")
    scores = (*query[:3], key[2])
    ref = call.args.get("attn_mask")
    mask = call.inputs[ref.index].shape if isinstance(ref, TensorRef) else ()
    yield 0, 0, aligned(mask, scores, 0)
    if key[1] and query[1] % key[1] == 0:
        yield 1, 1, aligned(mask, scores, 1)
    if call.args["is_causal"] is not True:
        yield 2, R, aligned(mask, scores, 2)
