"""The rows that each row of a sparse product reads: the edges of a graph, without weights.

Full-batch graph networks multiply the features of all nodes with one sparse matrix, in which row
``i`` has an entry for each neighbour of node ``i``. Which rows a part needs then follows from the
entries, not from shapes. A ``SparsePattern`` holds them outside the tensors of a step, so that
planning counts exactly the rows sent when rows are cut among devices (arXiv 2212.05009):

    rows that travel = sum over all rows of (number of parts that read or own the row, minus 1)

This is the connectivity of a hypergraph whose nets are the rows. The number of cut edges is
larger: it counts a row once for each edge.

``Stencil`` gives the rows that a part of a convolution or pooling reads. A tensor is cut along one
of its dimensions, and every device owns some consecutive rows of it. To make the output rows
``[a, b)`` a device reads the input rows
``[max(0, a s - p), min(D, (b - 1) s - p + e (k - 1) + 1))`` for kernel ``k``, stride ``s``,
padding ``p`` and dilation ``e``. The rows among them that it does not own are its *halo*:
neighbours send them (Oyama et al. 2020, arXiv 2007.12856). No size has to divide another here, and
a halo may reach past the neighbour.

The gradient of the input rows ``[a, b)`` needs the gradients of all output rows that read any of
them (``legal.readers_window``). So each device computes its gradient alone, and no sums are sent.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.errors import GraphError, StrategyError

Int64Array = npt.NDArray[np.int64]
MOST_COLUMNS = 2**31 - 1
"""Columns are kept as 32-bit integers."""


@dataclass(frozen=True, eq=False, repr=False)
class SparsePattern:
    """The positions of the entries of a sparse matrix, row by row (CSR).

    Attributes:
        row_starts: First entry of each row, and the number of entries.  # [num_rows + 1]
        columns: Column of each entry, row by row.  # [num_entries]
        num_columns: Number of columns of the matrix.

    Raises:
        GraphError: the arrays do not form such a matrix.
    """

    row_starts: Int64Array
    columns: npt.NDArray[np.int32]
    num_columns: int

    def __post_init__(self) -> None:
        starts, columns = self.row_starts, self.columns
        if starts.ndim != 1 or columns.ndim != 1 or len(starts) < 2:
            raise GraphError(
                f"a sparse pattern has row starts of shape {starts.shape} and columns of shape "
                f"{columns.shape}; it needs one dimension each, and one row or more."
            )
        if starts[0] != 0 or starts[-1] != len(columns) or bool((np.diff(starts) < 0).any()):
            raise GraphError(
                f"the row starts of a sparse pattern must rise from 0 to its {len(columns)} "
                f"entries; they go from {int(starts[0])} to {int(starts[-1])}."
            )
        low, high = (int(columns.min()), int(columns.max())) if len(columns) else (0, 0)
        if not 1 <= self.num_columns <= MOST_COLUMNS or low < 0 or high >= self.num_columns:
            raise GraphError(
                f"a sparse pattern of {self.num_columns} columns has entries in columns {low} to "
                f"{high}; columns count from 0 to {self.num_columns - 1}."
            )
        starts.flags.writeable = columns.flags.writeable = False

    def __repr__(self) -> str:
        return f"SparsePattern({self.num_rows} x {self.num_columns}, {self.num_entries} entries)"

    @property
    def num_rows(self) -> int:
        """Number of rows of the matrix."""
        return len(self.row_starts) - 1

    @property
    def num_entries(self) -> int:
        """Number of entries of the matrix: edges of the graph, each direction counted."""
        return len(self.columns)

    @cached_property
    def key(self) -> str:
        """Hash of the entries, by which ops name the pattern.

        >>> pattern_of([0, 1], [1, 0], 2, 2).key == pattern_of([1, 0], [0, 1], 2, 2).key
        True
        """
        digest = hashlib.sha256(f"{self.num_columns};".encode())
        digest.update(np.ascontiguousarray(self.row_starts, "<i8").tobytes())
        digest.update(np.ascontiguousarray(self.columns, "<i4").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def rows(self) -> Int64Array:
        """The row of each entry.  # [num_entries]"""
        return np.repeat(np.arange(self.num_rows), np.diff(self.row_starts))

    def transposed(self) -> "SparsePattern":
        """The pattern of the transposed matrix, which the backward pass reads."""
        return pattern_of(self.columns, self.rows, self.num_columns, self.num_rows)

    def num_entries_of(self, begin: int, end: int) -> int:
        """Number of entries of the rows ``begin`` to ``end - 1``."""
        return int(self.row_starts[end] - self.row_starts[begin])

    def columns_of(self, begin: int, end: int) -> npt.NDArray[np.int32]:
        """Columns of the entries of the rows ``begin`` to ``end - 1``, in their order."""
        return self.columns[int(self.row_starts[begin]) : int(self.row_starts[end])]

    def needed(self, begin: int, end: int) -> Int64Array:
        """Columns that any of the rows ``begin`` to ``end - 1`` reads, each once, ascending.

        >>> pattern_of([0, 0, 1], [2, 0, 2], 2, 3).needed(0, 2).tolist()
        [0, 2]
        """
        found = np.zeros(self.num_columns, np.bool_)
        found[self.columns_of(begin, end)] = True
        return np.flatnonzero(found)


def pattern_of(
    rows: npt.ArrayLike, columns: npt.ArrayLike, num_rows: int, num_columns: int
) -> SparsePattern:
    """Make the pattern of entries in any order; a repeated entry stays repeated.

    Args:
        rows: Row of each entry.
        columns: Column of each entry.
        num_rows: Number of rows of the matrix.
        num_columns: Number of columns of the matrix.

    Raises:
        GraphError: an entry lies outside of the matrix, or the arrays do not match.

    >>> pattern_of([1, 0, 1], [0, 1, 1], 2, 2).row_starts.tolist()
    [0, 1, 3]
    """
    at, to = np.asarray(rows, np.int64), np.asarray(columns, np.int64)
    if at.ndim != 1 or at.shape != to.shape:
        raise GraphError(
            f"a sparse pattern was given rows of shape {at.shape} and columns of shape "
            f"{to.shape}; it needs one of each for every entry."
        )
    for what, found, size in (("row", at, num_rows), ("column", to, num_columns)):
        if size < 1 or (len(found) and not 0 <= found.min() <= found.max() < size):
            low, high = (int(found.min()), int(found.max())) if len(found) else (0, -1)
            raise GraphError(
                f"a sparse pattern of {size} {what}s has entries in {what}s {low} to {high}; "
                f"{what}s count from 0 to {size - 1}."
            )
    order = np.lexsort((to, at))
    starts = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(at, minlength=num_rows), out=starts[1:])
    return SparsePattern(starts, to[order].astype(np.int32), num_columns)


def entry_shares(pattern: SparsePattern, weights: Sequence[float], units: int) -> tuple[int, ...]:
    """Divide units of rows so that entries, not rows, are in proportion to weights.

    The work of a row is its number of entries. Cuts are at units, ``num_rows / units`` rows each.

    Args:
        pattern: Pattern of the product; the units must divide its rows.
        weights: Weights of the parts, for example speeds.
        units: Number of units of rows, at least as many as there are parts.

    >>> star = pattern_of([0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0], 4, 4)
    >>> entry_shares(star, (1, 1), 4)
    (1, 3)
    """
    if units < len(weights) or pattern.num_rows % units:
        raise GraphError(
            f"{pattern.num_rows} rows cannot be cut at {units} units for {len(weights)} parts; "
            "the units must divide the rows, and there must be one for each part."
        )
    before = pattern.row_starts[:: pattern.num_rows // units]
    wanted = np.cumsum(weights)[:-1] / sum(weights) * pattern.num_entries
    cuts = np.searchsorted(before, wanted).astype(np.int64)
    # Cut at the nearer of the two unit borders, and leave at least one unit for each part.
    cuts -= (wanted - before[np.maximum(cuts - 1, 0)] < before[cuts] - wanted) & (cuts > 0)
    parts = np.arange(1, len(weights))
    cuts = np.maximum.accumulate(np.maximum(cuts - parts, 0)) + parts
    cuts = np.minimum(cuts, units - len(weights) + parts)
    return tuple(np.diff([0, *cuts.tolist(), units]).tolist())


class Rows(NamedTuple):
    """Consecutive rows ``begin`` to ``end - 1`` of a tensor; none if ``begin == end``."""

    begin: int
    end: int

    @property
    def num(self) -> int:
        """Number of rows."""
        return self.end - self.begin

    def clipped(self, size: int) -> "Rows":
        """The rows that exist in a tensor of ``size`` rows."""
        begin = min(max(self.begin, 0), size)
        return Rows(begin, max(begin, min(self.end, size)))

    def overlap(self, other: "Rows") -> "Rows":
        """Rows that are in both."""
        begin = max(self.begin, other.begin)
        return Rows(begin, max(begin, min(self.end, other.end)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stencil:
    """The rows that a convolution or pooling reads, along one dimension, for each output row.

    Attributes:
        kernel: Number of rows of the kernel.
        stride: Number of rows between positions of the kernel.
        padding: Number of rows added before the first one, and after the last.
        dilation: Distance in rows between the kernel's own rows.

    Raises:
        StrategyError: a number is out of range.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        if min(self.kernel, self.stride, self.dilation) < 1 or self.padding < 0:
            raise StrategyError(
                f"a kernel of {self.kernel} rows with stride {self.stride}, padding "
                f"{self.padding} and dilation {self.dilation} cannot be split; kernel, stride and "
                "dilation must be 1 or more, padding 0 or more."
            )

    @property
    def reach(self) -> int:
        """Number of rows from the first to the last that one output row reads."""
        return self.dilation * (self.kernel - 1) + 1

    def span(self, made: Rows) -> Rows:
        """Input rows that some output rows read, including padding.

        >>> Stencil(kernel=3, padding=1).span(Rows(0, 4))
        Rows(begin=-1, end=5)
        """
        if made.num == 0:
            return Rows(0, 0)
        begin = made.begin * self.stride - self.padding
        return Rows(begin, begin + (made.num - 1) * self.stride + self.reach)

    def needed(self, made: Rows, size: int) -> Rows:
        """Input rows, of ``size`` in all, that some output rows read."""
        return self.span(made).clipped(size)
