"""A product with a constant sparse matrix as a module: sums over the neighbours in a graph.

The matrix is known before training (the edges of one huge graph, normalised). So plans know
exactly which rows of other devices a device reads when rows are cut. The backward pass multiplies
with the transposed matrix: the gradient of a row is the sum over *all* rows that have read it, on
any device. (In the released code of DistGNN, dmlc/dgl at 0892e38, it is not: gradients of copies
of a node stay apart.)
"""

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from heterog.errors import GraphError
from heterog.graph.sparse_pattern import SparsePattern, pattern_of

_LIBRARY: Any = torch.library.Library("heterog_sparse", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "product(Tensor dense, Tensor row_starts, Tensor columns, Tensor weights, str pattern)"
    " -> Tensor"
)


def multiply(
    dense: Tensor, row_starts: Tensor, columns: Tensor, weights: Tensor, pattern: str = ""
) -> Tensor:
    """Rows of a sparse matrix (CSR) times rows of features.

    Args:
        dense: Features.  # [..., num_columns, num_features]
        row_starts: First entry of each row, and the number of entries.  # [num_rows + 1]
        columns: Column of each entry.  # [num_entries]
        weights: Weight of each entry.  # [num_entries]
        pattern: Key of the entries; not used here, but by plans.

    Returns:
        # [..., num_rows, num_features]
    """
    num_rows = row_starts.shape[0] - 1
    *samples, num_columns, num_features = dense.shape
    if dense.numel() == 0 or columns.shape[0] == 0 or num_rows == 0:
        return dense.new_zeros((*samples, num_rows, num_features))
    flat = dense.reshape(-1, num_columns, num_features)
    with warnings.catch_warnings(action="ignore"):  # torch calls its CSR tensors a beta feature
        matrix = torch.sparse_csr_tensor(
            row_starts, columns, weights.to(dense.dtype), (num_rows, num_columns)
        )
        made = torch.stack([matrix @ sample for sample in flat])
    return made.reshape(*samples, num_rows, num_features)


_LIBRARY.impl("product", multiply, "CompositeExplicitAutograd")
torch.library.register_fake(
    "heterog_sparse::product",
    lambda dense, row_starts, columns, weights, pattern: dense.new_empty(
        (*dense.shape[:-2], row_starts.shape[0] - 1, dense.shape[-1])
    ),
    lib=_LIBRARY,
)


class _Product(torch.autograd.Function):
    """The op and, as its backward pass, the op with the transposed matrix."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, *matrices: Any) -> Tensor:
        ctx.save_for_backward(*matrices[4:7])
        ctx.pattern = matrices[7]
        made: Tensor = torch.ops.heterog_sparse.product(dense, *matrices[:4])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        made = torch.ops.heterog_sparse.product(
            gradient.contiguous(), *ctx.saved_tensors, ctx.pattern
        )
        return (made, *[None] * 8)


class SparseProduct(nn.Module):
    """Multiplies the rows of features with a constant sparse matrix.

    Make it from arrays (or tensors) whose values are known when the model is made, because edges
    are read while a step is captured. Weights are constants: buffers that ``state_dict`` leaves
    out, as they follow from the graph.

    Args:
        rows: Row of each entry: the node that reads.
        columns: Column of each entry: the node that is read.
        weights: Weight of each entry; ``None`` for all 1.
        num_rows: Number of rows of the matrix.
        num_columns: Number of columns of the matrix; ``None`` for as many as rows.

    Attributes:
        pattern: Positions of the entries.
        backward_pattern: Pattern of the transposed matrix; the same object if it is equal.

    Raises:
        GraphError: an entry lies outside of the matrix, or values are not known.
    """

    row_starts: Tensor
    columns: Tensor
    weights: Tensor
    back_row_starts: Tensor
    back_columns: Tensor
    back_weights: Tensor

    def __init__(
        self,
        rows: npt.ArrayLike | Tensor,
        columns: npt.ArrayLike | Tensor,
        weights: npt.ArrayLike | Tensor | None = None,
        *,
        num_rows: int,
        num_columns: int | None = None,
    ) -> None:
        super().__init__()
        at, to = _known(rows).astype(np.int64), _known(columns).astype(np.int64)
        width = num_rows if num_columns is None else num_columns
        self.pattern = pattern_of(at, to, num_rows, width)
        values = np.ones(len(at)) if weights is None else _known(weights)
        if values.shape != at.shape:
            raise GraphError(
                f"a sparse product has {len(at)} entries and weights of shape {values.shape}; it "
                "needs one for each entry."
            )
        values = values[np.lexsort((to, at))]
        back = self.pattern.transposed()
        # In the order of the transposed pattern.
        back_values = values[np.lexsort((self.pattern.rows, self.pattern.columns))]
        is_symmetric = back.key == self.pattern.key and np.array_equal(values, back_values)
        self.backward_pattern = self.pattern if is_symmetric else back
        dtype = torch.get_default_dtype()
        own, other = ("", self.pattern, values), ("back_", self.backward_pattern, back_values)
        for prefix, pattern, entries in (own,) if is_symmetric else (own, other):
            kind = np.int32 if pattern.num_entries <= np.iinfo(np.int32).max else np.int64
            for name, array in (("row_starts", pattern.row_starts), ("columns", pattern.columns)):
                self.register_buffer(
                    prefix + name, torch.from_numpy(array.astype(kind)), persistent=False
                )
            self.register_buffer(
                prefix + "weights", torch.from_numpy(entries).to(dtype), persistent=False
            )
        self.is_symmetric = is_symmetric

    @property
    def patterns(self) -> tuple[SparsePattern, ...]:
        """The pattern of the product and that of its backward pass."""
        return self.pattern, self.backward_pattern

    def forward(self, dense: Tensor) -> Tensor:
        """Multiply with features of every column; leading dimensions are samples."""
        if dense.dim() < 2 or dense.shape[-2] != self.pattern.num_columns:
            raise GraphError(
                f"a sparse product of {self.pattern.num_columns} columns was given features of "
                f"shape {tuple(dense.shape)}; the last dimension but one must be its columns."
            )
        own = (self.row_starts, self.columns, self.weights)
        back = own
        if not self.is_symmetric:
            back = (self.back_row_starts, self.back_columns, self.back_weights)
        made: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            dense, *own, self.pattern.key, *back, self.backward_pattern.key
        )
        return made

    def extra_repr(self) -> str:
        """Rows, columns and entries."""
        pattern = self.pattern
        return f"{pattern.num_rows} x {pattern.num_columns}, {pattern.num_entries} entries"


def gcn_product(sources: npt.ArrayLike, targets: npt.ArrayLike, num_nodes: int) -> SparseProduct:
    """Make the matrix of graph convolutions (Kipf and Welling 2017): D^-1/2 (A + I) D^-1/2.

    D has the degrees of A + I, by rows.

    Args:
        sources: Node that each edge comes from; give both directions of an undirected edge.
        targets: Node that each edge leads to.
        num_nodes: Number of nodes of the graph.
    """
    loops = np.arange(num_nodes)
    at = np.concatenate([_known(targets).astype(np.int64), loops])
    to = np.concatenate([_known(sources).astype(np.int64), loops])
    pattern_of(at, to, num_nodes, num_nodes)  # refuses other nodes
    scale = np.bincount(at, minlength=num_nodes) ** -0.5
    return SparseProduct(at, to, scale[at] * scale[to], num_rows=num_nodes)


def mean_product(sources: npt.ArrayLike, targets: npt.ArrayLike, num_nodes: int) -> SparseProduct:
    """Make the mean over all neighbours (GraphSAGE, Hamilton et al. 2017); 0 without any.

    Args:
        sources: Node that each edge comes from.
        targets: Node that each edge leads to.
        num_nodes: Number of nodes of the graph.
    """
    at, to = _known(targets).astype(np.int64), _known(sources).astype(np.int64)
    pattern_of(at, to, num_nodes, num_nodes)  # refuses other nodes
    return SparseProduct(at, to, 1.0 / np.bincount(at, minlength=1)[at], num_rows=num_nodes)


def _known(values: npt.ArrayLike | Tensor) -> npt.NDArray[Any]:
    """Convert values to an array; fake tensors have no values."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    try:
        return values.detach().cpu().numpy()
    except (RuntimeError, NotImplementedError) as error:
        raise GraphError(
            "the entries of a sparse product must be known when the model is made: give numpy "
            "arrays, or tensors that were made outside of the function that makes the model."
        ) from error
