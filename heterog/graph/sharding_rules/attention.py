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
    with_shared_stream,
)

ATTENTION_KINDS = frozenset({"attention", "attention_backward"})


@rule("attention")
def _attention(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    special = Special.OWN_RANDOM_STREAM if call.args["dropout_p"] else None
    axes = [
        axis(call, (d, d), special, query=d, key=keys, value=keys, attn_mask=mask)
        for d, keys, mask in _independent(call)
    ]
    if _has_causal_rows(call, placements, "query") and special is None:
        axes.append(axis(call, (2, 2), Special.CAUSAL_ROWS, query=2))
    found = choose(call, placements, axis_size, axes)
    return with_shared_stream(found) if special else found


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
    if _has_causal_rows(call, placements, "grad_out", "query") and not call.args["dropout_p"]:
        queries = dict.fromkeys(("grad_out", "query", "out", "logsumexp"), 2)
        axes.append(axis(call, (2, P, P), Special.CAUSAL_ROWS, **queries))
    return choose(call, placements, axis_size, axes, [positions(call, "grad_out")])


def _independent(call: OpCall) -> Iterator[tuple[int, Entry, Entry]]:
    """Splittable dims of the query, with the dims in which keys and the mask have the same axis.

    Neighbouring heads share keys in grouped-query attention: they split into at most as many
    units as there are heads of keys. Queries split in this way only without a causal mask, which
    depends on their position; see ``_has_causal_rows``.
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


def _has_causal_rows(call: OpCall, placements: tuple[Placement, ...], *names: str) -> bool:
    """Whether queries with a causal mask may be split: each part one run of positions.

    The keys that a query sees depend on its position, so a device has to know where its part
    begins (``Special.CAUSAL_ROWS``). There are as many keys as queries, and no part has strides.

    Args:
        call: The op.
        placements: Placements of its inputs.
        names: Names of the arguments that tell how the queries are split.
    """
    query, key = shape_of(call, "query"), shape_of(call, "key")
    given = [placements[where] for where in positions(call, *names)]
    return (
        call.args["is_causal"] is True
        and call.args.get("attn_mask") is None
        and query[2] == key[2]
        and all(place.kind != "S" or place.outer == 1 for place in given)
    )
