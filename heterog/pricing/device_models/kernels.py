"""The GPU kernels of a graph's ops: matrix products with their sizes, and streams of bytes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_costs import GROUPED_PRODUCT, GROUPED_PRODUCTS, ROWS_OUTER, ROWS_PRODUCT
from heterog.graph.op_graph import FloatArray, IntArray, OpGraph, Phase
from heterog.graph.placement import OpCall, TensorRef
from heterog.graph.sharding_rules import claims_checked
from heterog.graph.sharding_rules.table import integer
from heterog.pricing.device_models import torch_kernels
from heterog.pricing.device_models.torch_kernels import (
    Stream,
    is_depthwise,
    lies_as_matrix,
    stream_of,
)

_FACTORS = {
    "mm.default": ("self", "mat2"),
    "addmm.default": ("mat1", "mat2"),
    "bmm.default": ("self", "mat2"),
    "baddbmm.default": ("batch1", "batch2"),
    GROUPED_PRODUCT: ("self", "mat2"),
    ROWS_PRODUCT: ("rows", "matrices"),
    ROWS_OUTER: ("columns", "rows"),
}
_READS = _FACTORS | {
    "attention": ("query", "key"),
    "attention_backward": ("query", "key"),
    "convolution.default": ("input", "weight"),
    "convolution_backward.default": ("grad_output", "input", "weight"),
}
"""Arguments that determine the sizes of products."""
ALIGNED_BYTES = 16
"""Tensor cores load matrices fast whose rows begin at multiples of this."""
_DRAWS = ("bernoulli", "rand.", "rand_like.")
_NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm")
_SOFTMAXES = ("_softmax", "_log_softmax")


_BATCH, _ROWS, _COLUMNS, _DEPTH = range(4)
_SHARES_OF_CUT = (0.5, 0.25, 0.75)
_CUTS = np.array(
    [*np.eye(4)]
    + [
        share * np.eye(4)[one] + (1.0 - share) * np.eye(4)[other]
        for one, other in ((1, 2), (1, 3), (2, 3), (0, 1), (0, 2), (0, 3))
        for share in _SHARES_OF_CUT
    ]
)
"""Exponents of the share by which (batch, rows, columns, depth) are cut; single cuts first."""
_AS_NEAR = 1e-3
"""Shares of bytes that differ by less count as equal: biases and equal matrices blur them."""


class Use(IntEnum):
    """Kind of op that a product is part of, which decides the unit that computes it."""

    MATRIX = 0
    CONVOLUTION = 1
    ATTENTION = 2
    FEW_CHANNELS = 3
    """A convolution that tensor cores cannot compute."""


class Factors(NamedTuple):
    """Dtype of the factors of a product, and its use."""

    dtype: str
    use: Use


class Sizes(NamedTuple):
    """A batch of equal matrix products."""

    batch: float
    rows: float
    columns: float
    depth: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Products:
    """The matrix products of a graph; an op may hold several.

    Attributes:
        op: Op of each product.  # [num_products]
        sizes: Sizes in the whole op, as in ``Sizes``.  # [num_products, 4]
        count: Number of products of these sizes in one kernel, by its FLOPs: attention is two
            forward and five backward, half of them where it is causal.  # [num_products]
        num_bytes: Bytes that it moves in the whole op.  # [num_products]
        bytes_share: ``num_bytes`` over the bytes of the op.  # [num_products]
        matrix_share: Shares of ``num_bytes`` in the matrices rows x depth, depth x columns, and
            rows x columns.  # [num_products, 3]
        along_batch: Index of the size that scales with the batch.  # [num_products]
        alignment: Largest divisor, up to 16, of the byte offsets of the rows of all three
            matrices: tensor cores load fast at 16.  # [num_products]
        is_attention: Whether it is part of a fused attention.  # [num_products]
        slowdown: Seconds of PyTorch's kernel for the op, on tensor cores, over those of the plain
            product and its copies.  # [num_products]
        copied: Bytes that are copied for tensor cores, over ``num_bytes``: cuDNN's kernels need
            channels last.  # [num_products]
        added: Bytes of kernels that add a bias, sum its gradient, or sort rows by expert, over
            ``num_bytes``.  # [num_products]
        factors: Number of the factors in ``kinds``.  # [num_products]
        kinds: Kinds of factors.
        kind: Number shared by products that differ only in the op.  # [num_products]
    """

    op: IntArray
    sizes: FloatArray
    count: FloatArray
    num_bytes: FloatArray
    bytes_share: FloatArray
    matrix_share: FloatArray
    along_batch: IntArray
    alignment: IntArray
    is_attention: NDArray[np.bool_]
    slowdown: FloatArray
    copied: FloatArray
    added: FloatArray
    factors: IntArray
    kinds: tuple[Factors, ...]
    kind: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streams:
    """The ops without a matrix product that run kernels.

    Masks of dropouts are left out: a GPU draws a mask in the kernel that uses it.

    Attributes:
        op: Op of each.  # [num_streams]
        family: Number in ``parameters.STREAMS`` of each.  # [num_streams]
        row: Number of elements that are reduced together, 0 if none are.  # [num_streams]
        launches: Number of kernels; 0 for updates, because the optimizer updates all parameters
            in a few kernels.  # [num_streams]
        passes: Times that PyTorch's kernel moves each byte.  # [num_streams]
        blocks: Number of multiprocessors that it fills; 0 if it fills all.  # [num_streams]
        row_s_per_byte: Seconds of one multiprocessor for its rows, per byte.  # [num_streams]
        issued: Number of kernels that the host issues.  # [num_streams]
        spared: Share of the passes that is left if a compiler chooses the layout of images.
            # [num_streams]
    """

    op: IntArray
    family: IntArray
    row: FloatArray
    launches: FloatArray
    passes: FloatArray
    blocks: FloatArray
    row_s_per_byte: FloatArray
    issued: FloatArray
    spared: FloatArray


@lru_cache(maxsize=64)
def products_of(graph: OpGraph) -> Products:
    """The matrix products of a graph."""
    ops, counts, shares = [], [], []
    products: list[_Product] = []
    factors: list[Factors] = []
    for index in range(graph.num_ops):
        if graph.is_view[index] or graph.flops[index] <= 0.0:
            continue
        with _args_checked(graph, index):
            found = [each for each in _products(graph, index) if prod(each.sizes) > 0]
        for product in found:
            ops.append(index)
            products.append(product)
            counts.append(graph.flops[index] / len(found) / (2.0 * prod(product.sizes)))
            shares.append(1.0 / len(found))
            factors.append(Factors(graph.tensors[graph.ops[index].inputs[0]].dtype, product.use))
    array = np.array([each.sizes for each in products], np.float64).reshape(-1, 4)
    matrix_sizes = np.array([each.matrices for each in products], np.float64).reshape(-1, 3)
    along_batch = np.array([each.along_batch for each in products], np.int32)
    alignment = np.array([each.alignment for each in products], np.int32)
    slowdown = np.array([each.slowdown for each in products], np.float64)
    kinds = tuple(sorted(set(factors)))
    number = np.array([kinds.index(each) for each in factors], np.int32)
    num_bytes = np.maximum(graph.bytes_moved[ops], 1.0) * shares if ops else np.zeros(0)
    copied = np.array([each.copied_bytes for each in products]) / num_bytes
    added = np.array([each.added_bytes for each in products]) / num_bytes
    alike = np.column_stack(
        [
            array,
            along_batch,
            alignment,
            counts,
            num_bytes,
            shares,
            number,
            slowdown,
            copied,
            added,
        ]
    )
    return Products(
        op=np.array(ops, np.int32),
        sizes=array,
        count=np.array(counts, np.float64),
        num_bytes=num_bytes,
        bytes_share=np.array(shares, np.float64),
        matrix_share=matrix_sizes / matrix_sizes.sum(axis=1, keepdims=True),
        along_batch=along_batch,
        alignment=alignment,
        is_attention=np.array([each.use == Use.ATTENTION for each in products], np.bool_),
        slowdown=slowdown,
        copied=copied,
        added=added,
        factors=number,
        kinds=kinds,
        kind=np.unique(alike, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32),
    )


@lru_cache(maxsize=64)
def streams_of(graph: OpGraph) -> Streams:
    """The streams of a graph: ops without a matrix product."""
    runs_kernel = ~graph.is_view & ((graph.flops > 0.0) | (graph.bytes_moved > 0.0))
    runs_kernel[products_of(graph).op] = False
    runs_kernel[list(_masks(graph))] = False
    ops = np.flatnonzero(runs_kernel)
    kinds, streams = [], []
    for op in ops.tolist():
        with _args_checked(graph, op):
            kinds.append(_family(graph, op))
            streams.append(stream_of(graph, op, row=kinds[-1][1]))
    return Streams(
        op=ops.astype(np.int32),
        family=np.array([family for family, _ in kinds], np.int32),
        row=np.array([row for _, row in kinds], np.float64),
        launches=np.array([float(graph.ops[op].phase != Phase.UPDATE) for op in ops]),
        **{
            name: np.array([getattr(each, name) for each in streams], np.float64)
            for name in Stream._fields
        },
    )


def _args_checked(graph: OpGraph, op: int) -> AbstractContextManager[None]:
    """Context for code that reads the args of an op, since an imported graph may have bad ones."""
    checked = graph.ops[op]
    return claims_checked(f"the args of {checked.name} do not fit those of {checked.kind}")


def _masks(graph: OpGraph) -> Iterator[int]:
    """Ops that make random masks: random draws, and ops whose inputs are all masks."""
    from_noise: set[int] = set()
    for index, op in enumerate(graph.ops):
        is_drawn = op.kind.startswith(_DRAWS)
        if is_drawn or (op.inputs and all(tensor in from_noise for tensor in op.inputs)):
            from_noise.update(graph.outputs[index])
            yield index


def local_sizes(
    products: Products, chosen: IntArray, part: FloatArray, bytes_part: FloatArray
) -> FloatArray:
    """Sizes of parts of products of which only the work is known.

    Cuts through different sizes leave equal FLOPs but different bytes. So the cut with the nearest
    bytes is taken, or the cut of the batch if it is as near. A cut through one size is found
    exactly; cuts through two sizes are exact if they are equal or one is the cube of the other,
    else they are approximate.

    Args:
        products: Products of a graph.
        chosen: Numbers of products.  # [num_chosen]
        part: FLOPs over those of the whole op.  # [num_chosen]
        bytes_part: Bytes over those of the whole op.  # [num_chosen]

    Returns:
        (batch, rows, columns, depth) of each.  # [num_chosen, 4]
    """
    batch, rows, columns, depth = _CUTS.T[:, :, None]
    left, right, result = products.matrix_share[chosen].T
    of_cut = (
        left * part ** (batch + rows + depth)
        + right * part ** (batch + depth + columns)
        + result * part ** (batch + rows + columns)
    )
    sizes = products.sizes[chosen] * part[:, None] ** _CUTS[:, None, :]  # [cuts, chosen, 4]
    is_possible = (sizes >= 1.0 - 1e-9).all(axis=2)
    is_possible &= ~((columns > 0.0) & products.is_attention[chosen])  # heads stay whole
    off = np.abs(of_cut - bytes_part) + np.where(is_possible, 0.0, 1.0)
    number = np.arange(len(part))
    of_batch = products.along_batch[chosen]
    is_batch = off[of_batch, number] <= off.min(axis=0) + _AS_NEAR
    cut = np.where(is_batch, of_batch, np.argmin(off, axis=0))
    return np.asarray(np.maximum(sizes[cut, number], 1.0), np.float64)


class _Product(NamedTuple):
    """One product of an op; fields are as in ``Products``, but in bytes.

    ``matrices`` is the memory of the three matrices. Convolutions and attention count as aligned,
    because their kernels are no single product of matrices in memory.
    """

    sizes: Sizes
    matrices: tuple[float, float, float]
    along_batch: int
    alignment: int = ALIGNED_BYTES
    use: Use = Use.MATRIX
    slowdown: float = 1.0
    copied_bytes: float = 0.0
    added_bytes: float = 0.0


def _products(graph: OpGraph, op: int) -> Iterator[_Product]:
    """The matrix products in an op; none if an imported graph does not say enough about it."""
    call = graph.calls[op]
    if not all(isinstance(call.args.get(name), TensorRef) for name in _READS.get(call.kind, ())):
        return
    if call.kind in _FACTORS:
        left, right = (call.input(name).shape for name in _FACTORS[call.kind])
        result = call.outputs[0].shape
        if call.kind in GROUPED_PRODUCTS:
            sizes = _grouped(left, right, result)
        else:
            batch = result[0] if len(result) == 3 else 1
            sizes = Sizes(batch, result[-2], result[-1], left[-1])
        along_batch = _along_batch(graph, op, call)
        # A size along the batch is a number of rows, never the length of a row.
        numbers = [number for number in (_ROWS, _COLUMNS, _DEPTH) if number != along_batch]
        item = call.outputs[0].num_bytes / prod(result)
        alignment = gcd(ALIGNED_BYTES, *(round(sizes[each] * item) for each in numbers))
        added = 0.0
        if call.kind in (ROWS_PRODUCT, ROWS_OUTER):  # sorts rows by expert, and puts them back
            both = (*map(call.input, _FACTORS[call.kind]), call.outputs[0])
            added = 2.0 * sum(meta.num_bytes for meta in both if len(meta.shape) == 2)
        yield _Product(sizes, _matrices(sizes), along_batch, alignment, added_bytes=added)
    elif call.kind in ("attention", "attention_backward"):
        queries, keys = call.input("query").shape, call.input("key").shape
        # Scores stay on the chip. All products have this size or that of its transpose.
        sizes = Sizes(prod(queries[:-2]), queries[-2], queries[-1], keys[-2])
        keys_bytes = float(call.input("key").num_bytes + call.input("value").num_bytes)
        matrices = (0.0, keys_bytes, 2.0 * call.input("query").num_bytes)
        yield _Product(sizes, matrices, _BATCH, use=Use.ATTENTION)
    elif call.kind in ("convolution.default", "convolution_backward.default"):
        yield from _convolutions(call)


def _matrices(sizes: Sizes) -> tuple[float, float, float]:
    _, rows, columns, depth = sizes
    return rows * depth, depth * columns, rows * columns


def _along_batch(graph: OpGraph, op: int, call: OpCall) -> int:
    """Index of the size of a product that is the batch axis."""
    needed = batch_plan(graph).needed[op]
    for name, sizes in zip(
        _FACTORS[call.kind], ((_BATCH, _ROWS, _DEPTH), (_BATCH, _DEPTH, _COLUMNS)), strict=True
    ):
        place, rank = needed[call.place_of(name)], len(call.input(name).shape)
        if place.kind == "S":
            return sizes[place.dim + len(sizes) - rank]
    return _ROWS


def _grouped(left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> Sizes:
    """Products of rows with the matrix of their group; all groups are taken as equally large."""
    if len(result) == 3 and len(left) == 2:  # the gradient of the matrices: groups share k
        return Sizes(result[0], result[1], result[2], left[-1] / result[0])
    groups = right[0]
    rows = left[-2] / groups if len(left) == 2 else left[-2]
    return Sizes(groups, rows, result[-1], left[-1])


def _convolutions(call: OpCall) -> Iterator[_Product]:
    """A convolution as the product of patches with weights, or the two products of its backward.

    An image counts once in memory, although its elements are in several patches. Depthwise
    convolutions have no products: their kernels stream.
    """
    if is_depthwise(call):
        return
    weight, image = call.input("weight"), call.input("input")
    is_backward = call.kind == "convolution_backward.default"
    result = call.input("grad_output") if is_backward else call.outputs[0]
    over = image if call.args["transposed"] else result
    groups = integer(call, "groups")
    positions = over.shape[0] * prod(over.shape[2:])
    columns, depth = weight.shape[0] / groups, prod(weight.shape[1:])
    wanted = call.args.get("output_mask", (True, True, False))
    assert isinstance(wanted, tuple)
    of_image, of_weight = is_backward and bool(wanted[0]), is_backward and bool(wanted[1])
    images = 0.5 * ((1 + of_image) * image.num_bytes + result.num_bytes)
    weights = float((1 + of_weight) * weight.num_bytes)
    if not is_backward:
        added = torch_kernels.ADDED_BIAS * isinstance(call.args.get("bias"), TensorRef)
    else:
        added = torch_kernels.SUMMED_BIAS * bool(wanted[2]) / max(of_image + of_weight, 1)
    is_in_place = lies_as_matrix(call)
    in_place = torch_kernels.CONVOLUTION_IN_PLACE if is_in_place else torch_kernels.CONVOLUTION
    product = partial(
        _Product,
        use=Use.FEW_CHANNELS
        if weight.shape[1] < torch_kernels.FEWEST_CHANNELS
        else Use.CONVOLUTION,
        slowdown=in_place,
        # The copy reads and writes each image once.
        copied_bytes=0.0 if is_in_place else 2.0 * (image.num_bytes + result.num_bytes),
        added_bytes=added * result.num_bytes,
    )
    if not is_backward:
        sizes = Sizes(groups, positions, columns, depth)
        yield product(sizes, (images, weights, images), _ROWS)
    if of_image:
        sizes = Sizes(groups, positions, depth, columns)
        yield product(sizes, (images, weights, images), _ROWS)
    if of_weight:  # a sum over all positions
        sizes = Sizes(groups, columns, depth, positions)
        yield product(sizes, (images, images, weights), _DEPTH)


def _family(graph: OpGraph, op: int) -> tuple[int, float]:
    """(Number in ``STREAMS``, elements that are reduced together) of an op without products."""
    kind = graph.ops[op].kind
    if any(name in kind for name in _NORMS):
        shape = graph.calls[op].args.get("normalized_shape")
        row = 1.0
        for size in shape if isinstance(shape, tuple) else ():
            assert isinstance(size, int)
            row *= size
        return 1, row
    if kind.startswith(_SOFTMAXES):
        call = graph.calls[op]
        return 2, float(call.inputs[0].shape[integer(call, "dim", -1)])
    return 0, 0.0
