"""FLOPs and bytes of ops that no counter registry prices, and the ops that cost nothing.

Torch's FLOP registry covers matrix products and attention; ``FLOPS`` has what it counts wrong or
does not know. The other ops are bound by memory bandwidth on every device, so one FLOP per element
of their largest tensor is enough, and bytes matter: each input is read once and each output
written once, except for the ops below that touch only a part of an input.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from math import prod

from heterog.graph.placement import OpCall, TensorMeta, kinds

VIEW_KINDS = frozenset(
    kinds(
        "alias as_strided detach diagonal expand lift_fresh permute select.int slice.Tensor "
        "split.Tensor split_with_sizes squeeze squeeze.dim squeeze.dims t transpose.int "
        "unbind.int unfold unsqueeze view view.dtype view_as_real view_as_complex _unsafe_view "
        "unsafe_split.Tensor unsafe_split_with_sizes _reshape_alias"
    )
)
"""Ops whose outputs share the memory of input 0: they run no kernel.

``unsafe_*`` ops are views for all but autograd. Checked against torch by a test.
"""

RESHAPES = frozenset(kinds("alias detach squeeze.dim squeeze.dims unsqueeze view _unsafe_view"))
"""Views that show all elements of input 0, in the same order."""

FLOPS_PER_ELEMENT: Mapping[str, float] = {
    # Counted on the larger of input and output; rounded counts of the textbook formulas.
    "native_layer_norm.default": 8,
    "native_layer_norm_backward.default": 14,
    "native_batch_norm.default": 8,
    "native_batch_norm_backward.default": 14,
    "_softmax.default": 5,
    "_log_softmax.default": 5,
    "_softmax_backward_data.default": 4,
    "_log_softmax_backward_data.default": 4,
    "gelu.default": 10,
    "gelu_backward.default": 15,
}

_PICK_LABELS = frozenset(kinds("nll_loss{,2d}_{forward,backward}"))
_WRITES_ONLY = frozenset(
    kinds(
        "{,new_}{full,zeros,ones} {zeros,ones,full,empty}_like scalar_tensor arange "
        "arange.{start,start_step}"
    )
)
_NO_KERNEL = frozenset(kinds("empty.memory_format empty_like new_empty {,new_}empty_strided"))
_LOOK_UPS = frozenset(kinds("embedding index_select gather"))

REORDERS_WEIGHTS = frozenset(kinds("convolution{,_backward}"))
"""Ops whose kernels keep a second copy of the weights, in blocks, while they run."""


class Copies(IntEnum):
    """What a kernel of a CPU copies into another layout while it runs."""

    NOTHING = 0
    READS_OR_RESULT = 1
    """First all that it reads, then its result: the larger of both, beside the result itself."""
    READS_AND_RESULT = 2


def copies_on_cpu(kind: str) -> Copies:
    """What kernels of a kind copy; measured with torch 2.13 (``docs/notebook/testbeds.md``).

    >>> copies_on_cpu("convolution.default").name
    'READS_OR_RESULT'
    """
    if kind in REORDERS_WEIGHTS:
        return Copies.READS_OR_RESULT
    is_upsampled = kind.startswith("upsample_") and "backward" not in kind
    return Copies.READS_AND_RESULT if is_upsampled else Copies.NOTHING


def convolution_flops(call: OpCall) -> float:
    """FLOPs of a convolution or its backward.

    2 N X_out prod(weight shape) for each product, X_out the number of output positions (input
    positions if transposed): the weight's shape already holds c_in / groups. Torch's own counter
    multiplies the weight gradient of grouped convolutions by the number of groups, seven times
    too much for all of MobileNet.

    >>> from heterog.graph.placement import TensorMeta, TensorRef
    >>> image, kernel = TensorMeta((2, 8, 5, 5), "float32"), TensorMeta((8, 1, 3, 3), "float32")
    >>> args = {"input": TensorRef(0), "weight": TensorRef(1), "transposed": False}
    >>> convolution_flops(
    ...     OpCall(kind="convolution.default", args=args, inputs=(image, kernel), outputs=(image,))
    ... ) == 2 * 2 * 25 * 8 * 9
    True
    """
    image = call.input("input")
    is_backward = call.kind == "convolution_backward.default"
    result = call.input("grad_output") if is_backward else call.outputs[0]
    positions = image if call.args["transposed"] else result
    product = 2.0 * prod(positions.shape[2:]) * image.shape[0] * call.input("weight").num_elements
    wanted = call.args.get("output_mask", (True, False, False))
    assert isinstance(wanted, tuple)
    return product * sum(bool(each) for each in wanted[:2])


GROUPED_PRODUCT = "_grouped_mm.default"
"""Products of rows, which lie together by group, with the matrix of their group."""
ROWS_PRODUCT = "heterog_rows.product.default"
ROWS_OUTER = "heterog_rows.outer.default"
"""The same for rows in any order, and the gradient of the matrices; see ``grouped_rows``."""
GROUPED_PRODUCTS = (GROUPED_PRODUCT, ROWS_PRODUCT, ROWS_OUTER)


def grouped_product_flops(call: OpCall) -> float:
    """FLOPs of products of rows with the matrix of their group.

    2 m k n, where the groups divide m rows (or, for the gradient of the matrices, k).

    >>> from heterog.graph.placement import TensorMeta, TensorRef
    >>> rows, matrices = TensorMeta((6, 4), "float32"), TensorMeta((3, 4, 8), "float32")
    >>> args = {"self": TensorRef(0), "mat2": TensorRef(1)}
    >>> grouped_product_flops(
    ...     OpCall(kind=GROUPED_PRODUCT, args=args, inputs=(rows, matrices),
    ...            outputs=(TensorMeta((6, 8), "float32"),))
    ... ) == 2 * 6 * 4 * 8
    True
    """
    left, right = (meta.shape for meta in call.inputs[:2])
    made = call.outputs[0].num_elements
    if len(left) == len(right) == 2:
        made //= call.outputs[0].shape[0]
    return 2.0 * made * left[-1]


SPARSE_PRODUCT = "heterog_sparse.product.default"
"""Rows of a constant sparse matrix times rows of features; see ``sparse_product``."""


CHECK = "heterog_check.all_true.default"
"""A check that truth values are all true; see ``value_checks``."""


def sparse_flops(call: OpCall) -> float:
    """FLOPs of a product with a sparse matrix, 2 for each entry and feature.

    >>> from heterog.graph.placement import TensorMeta, TensorRef
    >>> rows, entries = TensorMeta((1, 6, 4), "float32"), TensorMeta((10,), "int32")
    >>> args = {"dense": TensorRef(0), "columns": TensorRef(1)}
    >>> inputs = rows, entries
    >>> sparse_flops(OpCall(kind=SPARSE_PRODUCT, args=args, inputs=inputs, outputs=(rows,)))
    80.0
    """
    return 2.0 * _row_reads(call)


FLOPS: Mapping[str, Callable[[OpCall], float]] = {
    **dict.fromkeys(kinds("convolution convolution_backward"), convolution_flops),
    **dict.fromkeys(GROUPED_PRODUCTS, grouped_product_flops),
    SPARSE_PRODUCT: sparse_flops,
}
"""FLOPs of ops for which torch's registry has no counter, or a wrong one."""


def _row_reads(call: OpCall) -> float:
    """Elements that a sparse product reads: for each entry, one row of features per sample."""
    dense = call.input("dense").shape
    return float(prod(dense[:-2]) * call.input("columns").num_elements * dense[-1])


def _table_of(call: OpCall) -> TensorMeta:
    """The table of an op on bags of its rows, or its gradient."""
    return call.input("weight") if "weight" in call.args else call.outputs[0]


def elementwise_flops(call: OpCall) -> float:
    """FLOPs of an op that the registry does not know: a few per element of its largest tensor."""
    if call.kind in VIEW_KINDS or call.kind in _WRITES_ONLY or call.kind in _NO_KERNEL:
        return 0.0
    largest = max((meta.num_elements for meta in (*call.inputs, *call.outputs)), default=0)
    if call.kind.startswith("_embedding_bag"):
        return float(call.input("indices").num_elements * prod(_table_of(call).shape[1:]))
    if call.kind in _LOOK_UPS:
        return 0.0
    return FLOPS_PER_ELEMENT.get(call.kind, 1.0) * largest


def bytes_read_and_written(call: OpCall) -> tuple[float, float]:
    """Bytes that an op reads and writes at global size, in that order."""
    if call.kind in VIEW_KINDS or call.kind in _NO_KERNEL:
        return 0.0, 0.0
    written = float(sum(meta.num_bytes for meta in call.outputs))
    if call.kind in _WRITES_ONLY:
        return 0.0, written
    sizes = [meta.num_bytes for meta in call.inputs]
    if call.kind == SPARSE_PRODUCT:
        # A row is read once for each entry: rows of a huge graph do not stay in a cache.
        item = call.outputs[0].num_bytes / max(call.outputs[0].num_elements, 1)
        return float(_row_reads(call) * item + sum(sizes[1:])), written
    if call.kind in _LOOK_UPS or call.kind == "index.Tensor":
        # Only the chosen rows are read, as many bytes as are written, plus the indices.
        return float(written + sum(sizes[1:])), written
    if call.kind.startswith("_embedding_bag"):
        table = _table_of(call)
        rows = float(call.input("indices").num_elements * table.num_bytes / max(table.shape[0], 1))
        if call.kind == "_embedding_bag_backward.default":  # as of an embedding
            return sum(sizes) + rows, written + rows
        return sum(sizes) - table.num_bytes + rows, written
    if call.kind in _PICK_LABELS:
        # The forward pass reads only the scores of the labels, the backward pass no score.
        whole = sizes.pop(call.place_of("self"))
        rows = whole / max(call.input("self").shape[1], 1)
        return float(sum(sizes) + rows * ("backward" not in call.kind)), written
    if call.kind == "embedding_dense_backward.default":
        # Zero the table, then read, add and write one row per index.
        return float(sum(sizes) + sizes[0]), written + sizes[0]
    return float(sum(sizes)), written
