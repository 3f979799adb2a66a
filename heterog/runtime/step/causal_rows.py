"""Causal attention of some queries: those of the part of a sequence that one device has.

The queries ``[first, first + n)`` see all keys before ``first``, and of the ``n`` keys from there
on each query sees those up to its own. So two calls of the captured kernel do it, one without a
mask and one causal, and no mask tensor is made. Their outputs are weighted by what the kernel
keeps, the logarithms of the sums of exponents; given those of both together, the backward kernel
finds each part's gradients alone (the two identities of ring attention, Liu et al. 2023). Keys
behind the last query are never looked at: early positions cost less.

Kernels of other devices keep other things. There it is one call, with a mask that ends at the last
query; torch has a kind of mask for it that fused kernels know and that is not written out.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from heterog.graph.placement import OpCall
from heterog.graph.sharding_rules.table import positions

Kernel = Callable[[Sequence[Tensor], bool], list[Tensor]]
"""Runs the op on some tensor inputs, with a causal mask or without one."""

MaskedKernel = Callable[[Sequence[Tensor], Tensor], list[Tensor]]
"""Runs the op on some tensor inputs with a mask."""

_ROWS = 2  # of queries, keys and values [B, H, S, D]


def on_causal_rows(
    call: OpCall, kernel: Kernel, inputs: Sequence[Tensor], first: int
) -> list[Tensor]:
    """Run causal attention, or its backward, on some of the queries and all keys.

    Args:
        call: The op.
        kernel: Function that runs the op.
        inputs: Its tensor inputs; those that belong to queries hold only the local ones.
        first: Position of the first local query.

    Returns:
        The outputs of the op: for queries the local rows, for keys and values parts of a sum.
    """
    run = _backward if "grad_out" in call.args else _forward
    return run(call, kernel, list(inputs), first)


def on_masked_rows(
    call: OpCall, kernel: MaskedKernel, inputs: Sequence[Tensor], first: int
) -> list[Tensor]:
    """Do the same with one call of a kernel that takes masks.

    Args:
        call: The op.
        kernel: Function that runs the op with a mask.
        inputs: Its tensor inputs; those that belong to queries hold only the local ones.
        first: Position of the first local query.
    """
    (query,), (key,) = positions(call, "query"), positions(call, "key")
    num, rows = inputs[query].shape[_ROWS], inputs[key].shape[_ROWS]
    # Here, because it imports torch's compiler: a second, for every rank and every plan.
    from torch.nn.attention.bias import causal_lower_right

    seen = first + num
    made = kernel(_with_keys(call, list(inputs), 0, seen), causal_lower_right(num, seen))
    if "grad_out" not in call.args:
        return made
    unseen = [0, 0, 0, rows - seen]
    return [made[0], *(pad(each, unseen) for each in made[1:])]


def _forward(call: OpCall, kernel: Kernel, inputs: list[Tensor], first: int) -> list[Tensor]:
    (query,) = positions(call, "query")
    num = inputs[query].shape[_ROWS]
    own = kernel(_with_keys(call, inputs, first, num), True)
    if first == 0:
        return own
    before = kernel(_with_keys(call, inputs, 0, first), False)
    (out, sums), (earlier, earlier_sums) = own, before
    total = torch.logaddexp(sums, earlier_sums)
    wide = torch.promote_types(out.dtype, total.dtype)
    parts = ((out, sums), (earlier, earlier_sums))
    mixed = sum(each.to(wide) * (of - total).exp().unsqueeze(-1) for each, of in parts)
    assert isinstance(mixed, Tensor)
    return [torch.empty_like(out).copy_(mixed), total]


def _backward(call: OpCall, kernel: Kernel, inputs: list[Tensor], first: int) -> list[Tensor]:
    (query,), (key,) = positions(call, "query"), positions(call, "key")
    num, rows = inputs[query].shape[_ROWS], inputs[key].shape[_ROWS]
    of_query, of_key, of_value = kernel(_with_keys(call, inputs, first, num), True)
    if first > 0:
        earlier = kernel(_with_keys(call, inputs, 0, first), False)
        of_query = of_query + earlier[0]
        of_key = torch.cat((earlier[1], of_key), _ROWS)
        of_value = torch.cat((earlier[2], of_value), _ROWS)
    unseen = [0, 0, 0, rows - first - num]
    return [of_query, pad(of_key, unseen), pad(of_value, unseen)]


def _with_keys(call: OpCall, inputs: list[Tensor], first: int, num: int) -> list[Tensor]:
    """The inputs with only some of the keys and values."""
    keys = positions(call, "key", "value")
    return [
        each.narrow(_ROWS, first, num) if where in keys else each
        for where, each in enumerate(inputs)
    ]
