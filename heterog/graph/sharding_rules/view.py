"""Ops that rearrange elements: views, permutations, cutting and joining."""

from collections.abc import Iterable
from math import prod

from heterog.graph.placement import OpCall, Placement, R, S, kinds
from heterog.graph.sharding_rules.table import (
    Axis,
    RuleResult,
    Special,
    aligned,
    beside,
    choose,
    dimension,
    dimensions,
    integer,
    integers,
    mixes,
    named_dim,
    rule,
    splits,
)


def split_after_view(
    shape: tuple[int, ...], to: tuple[int, ...], split: Placement, axis_size: int
) -> Placement | None:
    """Placement of a split of ``shape`` when its elements are read in order as shape ``to``.

    A split is a factorisation of all elements as ``before x axis_size x after``; it survives if
    some dimension of ``to`` starts within ``before`` and ends beyond ``before x axis_size``.

    Returns:
        The split of ``to``, or ``None`` if the parts are no longer evenly strided there.

    >>> str(split_after_view((8, 6, 4), (48, 4), S(1), 6))  # [B, T, D] -> [B*T, D], T split
    'S(0,8)'
    """
    before = prod(shape[: split.dim]) * split.outer
    start = 1
    for dim, size in enumerate(to):
        if not before * start * size:  # no elements
            return None
        if before % start == 0 and start * size % (before * axis_size) == 0:
            return S(dim, before // start)
        start *= size
    return None


_SQUEEZES = kinds("squeeze squeeze.dim squeeze.dims")


@rule(*kinds("view _unsafe_view reshape view_copy unsqueeze flatten.using_ints"), *_SQUEEZES)
def _view(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    extra, given = [], placements[0]
    shape, to = call.inputs[0].shape, call.outputs[0].shape
    if given.kind == "S" and (after := split_after_view(shape, to, given, axis_size)):
        squeezed = dimensions(call, "dim", len(shape)) if call.kind in _SQUEEZES else ()
        shrinks = given.dim in squeezed and shape[given.dim] == axis_size
        extra = [RuleResult(placements, (after,), Special.AS_RESHAPE if shrinks else None)]
    return choose(call, placements, axis_size, linear=[(0,)], extra=extra)


@splits(*kinds("permute transpose.int t"), linear=[(0,)])
def _permute(call: OpCall) -> list[Axis]:
    rank = len(call.inputs[0].shape)
    order = list(range(rank))
    if call.kind == "permute.default":
        order = [d % rank for d in integers(call, "dims")]
    elif call.kind == "t.default":
        order.reverse()
    elif rank:
        one, two = dimension(call, "dim0", rank), dimension(call, "dim1", rank)
        order[one], order[two] = two, one
    return [Axis((source,), (target,)) for target, source in enumerate(order)]


@splits("expand.default", linear=[(0,)])
def _expand(call: OpCall) -> list[Axis]:
    shape, to = call.inputs[0].shape, call.outputs[0].shape
    return [Axis((aligned(shape, to, dim),), (dim,)) for dim in range(len(to))]


@rule("repeat.default")
def _repeat(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    repeats, given = integers(call, "repeats"), placements[0]
    new = len(repeats) - len(call.inputs[0].shape)
    axes = [Axis((d - new,), (d,)) for d in range(new, len(repeats)) if repeats[d] == 1]
    extra = []
    if given.kind == "S" and repeats[given.dim + new] > 1:
        # All samples come again and again: each device repeats its own.
        again = S(given.dim + new, given.outer * repeats[given.dim + new])
        extra = [RuleResult(placements, (again,))]
    return choose(call, placements, axis_size, axes, linear=[(0,)], extra=extra)


# Without dims, roll shifts the flattened tensor and flip does not occur.
mixes(*kinds("flip roll rot90"), linear=[(0,)])(lambda call, rank: dimensions(call, "dims", rank))
mixes(*kinds("tril triu"), linear=[(0,)])(lambda call, rank: (rank - 2, rank - 1))


@mixes(
    "constant_pad_nd.default",
    linear=lambda call: [(0,)] if call.args["value"] in (0, None) else [],
)
def _pad(call: OpCall, rank: int) -> set[int]:
    pad = integers(call, "pad")
    return {rank - 1 - i // 2 for i, amount in enumerate(pad) if amount != 0}


@rule(*kinds("cat concat stack"))
def _cat(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    every, rank = range(len(call.inputs)), len(call.outputs[0].shape)
    along = dimension(call, "dim", rank)
    # A stack makes the dimension. A tensor of shape [0] joins anything (caches start with one)
    # and has nothing to split.
    makes = call.kind == "stack.default"
    axes = [
        Axis(
            tuple(
                d - (makes and d > along) if len(meta.shape) == rank - makes else R
                for meta in call.inputs
            ),
            (d,),
        )
        for d in range(rank)
        if d != along
    ]
    extra = () if makes else _cat_of_splits(call, placements, axis_size, along)
    return choose(call, placements, axis_size, axes, [every], summand=every, extra=extra)


def _cat_of_splits(
    call: OpCall, placements: tuple[Placement, ...], axis_size: int, along: int
) -> Iterable[RuleResult]:
    """Join tensors that are split in the joined dimension, if their outer blocks line up.

    [q; k; v], each S(d, 1) with equal sizes, is S(d, 3): the fused weight split by heads.
    """
    sizes = [meta.shape[along] for meta in call.inputs if len(meta.shape) > along]
    given = [
        size // p.outer
        for size, p in zip(sizes, placements, strict=False)
        if p.kind == "S" and p.dim == along
    ]
    for block in dict.fromkeys(given):
        if len(sizes) == len(call.inputs) and all(size and size % block == 0 for size in sizes):
            inputs = tuple(S(along, size // block) for size in sizes)
            yield RuleResult(inputs, (S(along, sum(sizes) // block),))


@rule(*kinds("split.sizes {,unsafe_}split.Tensor {,unsafe_}split_with_sizes {,unsafe_}chunk"))
def _split(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    shape = call.inputs[0].shape
    along, extra = dimension(call, "dim", len(shape)), []
    if placements[0].kind == "S" and placements[0].dim == along and "chunk" not in call.kind:
        block = shape[along] // placements[0].outer
        pieces = [meta.shape[along] for meta in call.outputs]
        if all(piece % block == 0 for piece in pieces):
            extra = [RuleResult(placements, tuple(S(along, p // block) for p in pieces))]
    axes = beside(call, len(shape), (along,))
    return choose(call, placements, axis_size, axes, [(0,)], extra=extra)


mixes(*kinds("unbind.int select.int"), linear=[(0,)])(named_dim())
mixes("select_backward.default", linear=[(0,)], into=True)(named_dim())


@rule(*kinds("slice.Tensor slice_backward"))
def _slice(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    shape, to, given = call.inputs[0].shape, call.outputs[0].shape, placements[0]
    along, extra = dimension(call, "dim", len(shape)), []
    if given.kind == "S" and given.dim == along and integer(call, "step", 1) == 1:
        # Whole blocks of the outer factor, such as q out of a fused qkv, stay evenly split.
        block = shape[along] // given.outer
        start = slice_start(call)
        if start % block == 0 and to[along] % block == 0 and to[along]:
            extra = [RuleResult(placements, (S(along, to[along] // block),))]
    axes = beside(call, len(shape), (along,))
    return choose(call, placements, axis_size, axes, [(0,)], extra=extra)


def slice_start(call: OpCall) -> int:
    """First index that a slice (or its backward) takes of the dimension, counted from 0."""
    whole = (call.outputs if call.kind == "slice_backward.default" else call.inputs)[0].shape
    size = whole[dimension(call, "dim", len(whole))]
    start = integer(call, "start")
    return min(max(start + size if start < 0 else start, 0), size)


mixes(*kinds("slice_scatter select_scatter"), linear=[(0, 1)], summand="self")(named_dim())


@mixes("diagonal.default", linear=[(0,)])
@mixes("diagonal_backward.default", linear=[(0,)], into=True)
@mixes("diagonal_scatter.default", linear=[(0, 1)], summand="self")
def _diagonal(call: OpCall, rank: int) -> set[int]:
    return {dimension(call, "dim1", rank), dimension(call, "dim2", rank, 1)}


@mixes("diag_embed.default", linear=[(0,)], into=True)
def _of_diagonals(call: OpCall, rank: int) -> set[int]:
    return {dimension(call, "dim1", rank, -2), dimension(call, "dim2", rank, -1)}


mixes("unfold.default", linear=[(0,)])(named_dim("dimension"))
mixes("unfold_backward.default", linear=[(0,)], into=True)(named_dim())
mixes("view_as_real.default", linear=[(0,)])(lambda call, rank: ())
mixes("view_as_complex.default", linear=[(0,)])(lambda call, rank: (rank - 1,))


@splits(*kinds("as_strided _reshape_alias"), linear=[(0,)])
@splits("as_strided_scatter.default", linear=[(0, 1)], summand="self")
def _strided(call: OpCall) -> list[Axis]:
    # Strides describe memory, not dimensions, so such a view is taken of the whole tensor.
    return []
