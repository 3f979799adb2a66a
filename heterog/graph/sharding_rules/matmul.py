"""Matrix products, distances, factorisations, Fourier transforms, attention, sparse products.

A matrix product splits along rows, columns, batch, and the contracted index, which leaves partial
sums. One pair of rules serves all kernels of fused scaled-dot-product attention:

``attention``: (query, key, value, attn_mask?), each [B, H, S, D], to (out, logsumexp [B, H, S]).
``attention_backward``: (grad_out, query, key, value, out, logsumexp, attn_mask?) to
(grad_query, grad_key, grad_value).

A constant sparse matrix is whole on every device. Its product splits along samples and features,
where nothing is sent, or along rows: a device then reads the rows that its own entries name
(``neighbours``), which others may own.
"""

from collections.abc import Iterator, Mapping

from heterog.graph.op_costs import ROWS_OUTER, ROWS_PRODUCT, SPARSE_PRODUCT
from heterog.graph.placement import Arg, OpCall, P, R, S, TensorRef, kinds, neighbours
from heterog.graph.sharding_rules.table import (
    Axis,
    Entry,
    RuleResult,
    Special,
    aligned,
    axis,
    broadcast_axes,
    dimension,
    dimensions,
    integers,
    mixes,
    positions,
    shape_of,
    splits,
)


@splits("mm.default", linear=[(0,), (1,)])
def _mm(call: OpCall) -> list[Axis]:
    return [axis(call, (0,), self=0), axis(call, (1,), mat2=1), axis(call, (P,), self=1, mat2=0)]


@splits("bmm.default", linear=[(0,), (1,)])
def _bmm(call: OpCall) -> list[Axis]:
    return [
        axis(call, (0,), self=0, mat2=0),
        axis(call, (1,), self=1),
        axis(call, (2,), mat2=2),
        axis(call, (P,), self=2, mat2=1),
    ]


@splits(*kinds("dot vdot"), linear=[(0,), (1,)])
def _dot(call: OpCall) -> list[Axis]:
    return [Axis((0, 0), (P,))]


@splits("mv.default", linear=[(0,), (1,)])
def _mv(call: OpCall) -> list[Axis]:
    return [axis(call, (0,), self=0), axis(call, (P,), self=1, vec=0)]


@splits("addmm.default", linear=[("self", "mat1"), ("self", "mat2")], summand="self")
def _addmm(call: OpCall) -> list[Axis]:
    bias, out = shape_of(call, "self"), call.outputs[0].shape
    return [
        axis(call, (0,), self=aligned(bias, out, 0), mat1=0),
        axis(call, (1,), self=aligned(bias, out, 1), mat2=1),
        axis(call, (P,), Special.BIAS_ON_ONE_RANK, mat1=1, mat2=0),
        axis(call, (P,), self=P, mat1=1, mat2=0),
    ]


@splits("baddbmm.default", linear=[("self", "batch1"), ("self", "batch2")], summand="self")
def _baddbmm(call: OpCall) -> list[Axis]:
    bias, out = shape_of(call, "self"), call.outputs[0].shape
    return [
        axis(call, (0,), self=aligned(bias, out, 0), batch1=0, batch2=0),
        axis(call, (1,), self=aligned(bias, out, 1), batch1=1),
        axis(call, (2,), self=aligned(bias, out, 2), batch2=2),
        axis(call, (P,), Special.BIAS_ON_ONE_RANK, batch1=2, batch2=1),
        axis(call, (P,), self=P, batch1=2, batch2=1),
    ]


@splits("linear.default", linear=[("input", "bias"), ("weight", "bias")], summand="bias")
def _linear(call: OpCall) -> list[Axis]:
    last = len(shape_of(call, "input")) - 1
    special = Special.BIAS_ON_ONE_RANK if positions(call, "bias") else None
    axes = [axis(call, (d,), input=d) for d in range(last)]
    axes.append(axis(call, (last,), weight=0, bias=0))
    axes.append(axis(call, (P,), special, input=last, weight=1))
    return axes


@splits("linalg_cross.default", linear=[("self",), ("other",)])
def _cross(call: OpCall) -> list[Axis]:
    rank = len(call.outputs[0].shape)
    along = dimension(call, "dim", rank, -1)
    return [each for d, each in enumerate(broadcast_axes(call)) if d != along]


@splits("_trilinear.default", linear=[("i1",), ("i2",), ("i3",)])
def _trilinear(call: OpCall) -> list[Axis]:
    """Sums of products of three tensors; ``expandN`` are the dimensions that one does not have."""
    absent = [integers(call, f"expand{each}") for each in (1, 2, 3)]
    summed, axes, out = integers(call, "sumdim"), [], 0
    for dim in range(len(call.inputs[0].shape) + len(absent[0])):
        inputs = (R if dim in each else dim - sum(d < dim for d in each) for each in absent)
        axes.append(Axis(tuple(inputs), (P if dim in summed else out,)))
        out += dim not in summed
    return axes


@splits("_cdist_forward.default")
def _distances(call: OpCall) -> list[Axis]:
    """Distances of rows: x1 [..., P, M] and x2 [..., R, M] to [..., P, R]."""
    one, other, out = shape_of(call, "x1"), shape_of(call, "x2"), call.outputs[0].shape
    rows, columns = len(out) - 2, len(out) - 1
    batch = [
        axis(call, (d,), x1=aligned(one, (*out[:-1], one[-1]), d), x2=aligned(other, out, d))
        for d in range(rows)
    ]
    return [
        *batch,
        axis(call, (rows,), x1=len(one) - 2),
        axis(call, (columns,), x2=len(other) - 2),
    ]


@splits("_cdist_backward.default", linear=[(0,)])
def _distances_backward(call: OpCall) -> list[Axis]:
    one, other, out = shape_of(call, "x1"), shape_of(call, "x2"), call.outputs[0].shape
    rows, columns = len(out) - 2, len(out) - 1
    gradient = "grad" if "grad" in call.args else "grad_output"  # since torch 2.14

    def along(d: int, x1: Entry, x2: Entry, made: Entry) -> Axis:
        return axis(call, (made,), x1=x1, x2=x2, cdist=d, **{gradient: d})

    batch = []
    for d in range(rows):
        points = aligned(other, (*out[:rows], *other[-2:]), d)  # they may be those of all samples
        batch.append(along(d, aligned(one, out, d), points, d))
    return [*batch, along(rows, len(one) - 2, R, rows), along(columns, R, len(other) - 2, P)]


@splits(
    *kinds(
        "linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex _linalg_det _linalg_slogdet "
        "_linalg_solve_ex _linalg_svd _linalg_eigh linalg_qr linalg_eig linalg_matrix_exp "
        "cholesky_inverse linalg_pinv.atol_rtol_tensor"
    ),
)
def _per_matrix(call: OpCall) -> list[Axis]:
    """Ops on each matrix of a batch: only dimensions before the matrix that all inputs have."""
    batch, vectors = call.inputs[0].shape[:-2], call.inputs[0].shape[:-1]
    for meta in call.inputs:
        may_be_vectors = call.kind == "_linalg_solve_ex.default" or meta.dtype == "int32"  # pivots
        is_of_each = len(meta.shape) == len(batch) + 2 and meta.shape[:-2] == batch
        if not is_of_each and not (may_be_vectors and meta.shape == vectors):
            return []

    def made(dim: int) -> tuple[Entry, ...]:
        return tuple(dim if meta.shape[: len(batch)] == batch else R for meta in call.outputs)

    return [Axis((d,) * len(call.inputs), made(d)) for d in range(len(batch))]


@splits("cholesky_solve.default", linear=[("self",)])
@splits(*kinds("linalg_solve_triangular linalg_lu_solve"), linear=[("B",)])
def _solved(call: OpCall) -> list[Axis]:
    """Solutions for each matrix of a batch, and for each right side of a matrix."""
    sides = "self" if call.kind == "cholesky_solve.default" else "B"
    rank = len(call.outputs[0].shape)
    if len(shape_of(call, sides)) < rank:
        return _per_matrix(call)
    dim = rank - 1 if call.args.get("left") is not False else rank - 2
    return [*_per_matrix(call), axis(call, (dim,), **{sides: dim})]


mixes(*kinds("_fft_{r2c,c2r,c2c}"), linear=[("self",)])(
    lambda call, rank: dimensions(call, "dim", rank)
)


ATTENTION_KINDS = frozenset({"attention", "attention_backward"})


@splits("attention", draws=lambda call: bool(call.args["dropout_p"]))
def _attention(call: OpCall) -> list[Axis]:
    special = Special.OWN_RANDOM_STREAM if call.args["dropout_p"] else None
    axes = [
        axis(call, (d, d), special, query=d, key=keys, value=keys, attn_mask=mask)
        for d, keys, mask in _independent(call)
    ]
    if _has_causal_rows(call) and special is None:
        axes.append(axis(call, (2, 2), Special.CAUSAL_ROWS, query=2))
    return axes


@splits("attention_backward", linear=[("grad_out",)])
def _attention_backward(call: OpCall) -> list[Axis]:
    axes = []
    for d, keys, mask in _independent(call):
        # Every query adds to the gradient of keys and values it shares with others.
        gradient = keys if isinstance(keys, int) else P
        queries = dict.fromkeys(("grad_out", "query", "out", "logsumexp"), d)
        outputs = (d, gradient, gradient)
        axes.append(axis(call, outputs, key=keys, value=keys, attn_mask=mask, **queries))
    if _has_causal_rows(call) and not call.args["dropout_p"]:
        queries = dict.fromkeys(("grad_out", "query", "out", "logsumexp"), 2)
        axes.append(axis(call, (2, P, P), Special.CAUSAL_ROWS, **queries))
    return axes


def _independent(call: OpCall) -> Iterator[tuple[int, Entry, Entry]]:
    """Splittable dims of the query, each with the dims of keys and mask that have the same axis.

    In grouped-query attention neighbouring heads share keys, so heads split into at most as many
    units as there are heads of keys. Positions of queries split here only without a causal mask,
    which depends on the position; see ``_has_causal_rows``.
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


def _has_causal_rows(call: OpCall) -> bool:
    """Whether queries with a causal mask may be split.

    The keys that a query sees depend on its position, so a device has to know where its part
    begins (``Special.CAUSAL_ROWS``). There must be as many keys as queries.
    """
    return (
        call.args["is_causal"] is True
        and call.args.get("attn_mask") is None
        and shape_of(call, "query")[2] == shape_of(call, "key")[2]
    )


@splits(SPARSE_PRODUCT, linear=[(0,)])
def _product(call: OpCall) -> list[Axis]:
    rank = len(call.outputs[0].shape)
    others = (R,) * (len(call.inputs) - 1)
    return [Axis((dim, *others), (dim,)) for dim in range(rank) if dim != rank - 2]


@splits(ROWS_PRODUCT, linear=[("rows",), ("matrices",)])
def _product_of_experts(call: OpCall) -> list[Axis]:
    return [
        axis(call, (0,), rows=0, ids=0),
        axis(call, (1,), matrices=2),
        axis(call, (P,), rows=1, matrices=1),
    ]


@splits(ROWS_OUTER, linear=[("columns",), ("rows",)])
def _gradient_of_experts(call: OpCall) -> list[Axis]:
    return [
        axis(call, (P,), columns=1, rows=0, ids=0),
        axis(call, (1,), columns=0),
        axis(call, (2,), rows=1),
    ]


def product_of_rows(call: OpCall, dim: int, units: int) -> RuleResult | None:
    """The rule of a sparse product whose rows are cut; ``None`` along other dimensions.

    Args:
        call: The op.
        dim: Dimension that is cut, of the features and of the result.
        units: Number of units of the axis.
    """
    if dim != len(call.outputs[0].shape) - 2:
        return None
    others = (R,) * (len(call.inputs) - 1)
    return RuleResult((neighbours(dim, pattern_key(call.args)), *others), (S(dim),))


def pattern_key(args: Mapping[str, Arg]) -> str:
    """Key of the entries that a sparse product multiplies with; empty for other ops."""
    key = args.get("pattern")
    return key if isinstance(key, str) else ""
