"""Sparse matrices whose rows are cut, in flat arrays for the lowering kernel; rows of integers."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.errors import StrategyError
from heterog.graph.op_graph import IntArray, OpGraph
from heterog.graph.sparse_pattern import SparsePattern
from heterog.lowering.kernels import by_reference

_MOST_REMEMBERED = 2**25
"""Most columns that are kept, 8 bytes each; they are kept because a search repeats ranges."""


@by_reference
class SparseTables(NamedTuple):
    """Entries of the sparse matrices whose rows are cut, one after the other; see ``WindowRow``.

    A matrix appears once for each axis along which its rows are cut.
    """

    axis: IntArray  # [num_matrices]
    first_row: IntArray  # of each matrix, in ``row_starts``  # [num_matrices + 1]
    first_entry: npt.NDArray[np.int64]  # of each matrix, in ``columns``  # [num_matrices + 1]
    row_starts: npt.NDArray[np.int64]  # of all matrices; each counts its own entries from 0
    columns: IntArray
    num_columns: IntArray  # [num_matrices]


def matrix_of(sparse: SparseTables, number: int) -> SparsePattern:
    """The pattern of one of the matrices."""
    rows = slice(*sparse.first_row[number : number + 2].tolist())
    entries = slice(*sparse.first_entry[number : number + 2].tolist())
    return SparsePattern(
        sparse.row_starts[rows], sparse.columns[entries], int(sparse.num_columns[number])
    )


def sparse_tables(graph: OpGraph, matrices: dict[tuple[str, int], int]) -> SparseTables:
    """Arrays of the matrices that rules cut, in the order of their numbers."""
    by_key = {pattern.key: pattern for pattern in graph.patterns}
    missing = [key for key, _ in matrices if key not in by_key]
    if missing:
        raise StrategyError(
            f"graph '{graph.name}' has no entries of the sparse matrix {missing[0]}, whose rows a "
            "rule cuts; capture the workload again, or take a graph file that has its patterns."
        )
    found = [by_key[key] for key, _ in matrices]
    return SparseTables(
        axis=np.array([axis for _, axis in matrices], np.int32),
        first_row=starts_of([len(each.row_starts) for each in found]),
        first_entry=np.cumsum([0, *(each.num_entries for each in found)], dtype=np.int64),
        row_starts=np.concatenate([np.zeros(0, np.int64), *(each.row_starts for each in found)]),
        columns=np.concatenate([np.zeros(0, np.int32), *(each.columns for each in found)]),
        num_columns=np.array([each.num_columns for each in found], np.int32),
    )


def starts_of(counts: Sequence[int] | IntArray) -> IntArray:
    """First index of each segment, and the end of the last one, from the segments' lengths."""
    return np.concatenate([[0], np.cumsum(np.array(counts, np.int64))]).astype(np.int32)


def distinct(*columns: IntArray) -> tuple[list[tuple[int, ...]], IntArray]:
    """The distinct rows of columns of equal shape, in order, and the number of each entry's row.

    Each row is packed into one integer, because integers sort many times faster than rows.
    """
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    if prod(sizes) >= 2**63:  # far beyond any cluster and batch; sorted as rows
        flat = np.stack(columns, axis=-1).reshape(-1, len(columns))
        rows, number = np.unique(flat, axis=0, return_inverse=True)
        return [tuple(row) for row in rows.tolist()], number.astype(np.int32)
    keys = np.zeros(columns[0].shape, np.int64)
    for column, size in zip(columns, sizes, strict=True):
        keys = keys * size + column
    distinct, number = np.unique(keys.ravel(), return_inverse=True)
    places = np.unravel_index(distinct, sizes)
    return list(zip(*(place.tolist() for place in places), strict=True)), number.astype(np.int32)


class SparseRows:
    """Counts rows that devices read of each other, and remembers which columns are read.

    The columns that a reader reads are found once from the entries of the matrix, in order. The
    number of rows that it reads in any range is then the difference of two places among them.

    Args:
        sparse: The matrices.
        axis_units: Number of units of each axis.  # [num_axes]
    """

    def __init__(self, sparse: SparseTables, axis_units: IntArray) -> None:
        self._sparse, self._axis_units = sparse, axis_units
        self._matrices = [matrix_of(sparse, each) for each in range(len(sparse.axis))]
        self._read: dict[tuple[int, int, int], npt.NDArray[np.int64]] = {}
        self._num_remembered = 0

    def of(self, units: IntArray, unit_begin: IntArray) -> IntArray:
        """Number of rows of each owner that each reader reads; see ``Choice.sparse_rows``.

        Args:
            units: Units of each device.  # [num_axes - 1, num_divisions, num_devices]
            unit_begin: First unit of each device.  # [num_axes - 1, num_divisions, num_devices]
        """
        sparse, (num_divisions, num_devices) = self._sparse, units.shape[1:]
        shape = (len(sparse.axis), num_divisions, num_divisions, num_devices, num_devices)
        found = np.zeros(shape, np.int32)
        for matrix, axis in enumerate(sparse.axis.tolist()):
            begin, count = unit_begin[axis - 1], units[axis - 1]
            starts, ends = self._row_bounds(matrix, axis, begin, count, is_made=True)
            own_starts, own_ends = self._row_bounds(matrix, axis, begin, count, is_made=False)
            for reading, device in np.argwhere(ends > starts).tolist():
                read = self._columns_read(
                    matrix, int(starts[reading, device]), int(ends[reading, device])
                )
                before_end, before = np.searchsorted(read, [own_ends, own_starts])
                found[matrix, reading, :, device, :] = before_end - before
        return found

    def _row_bounds(
        self, matrix: int, axis: int, unit_begin: IntArray, units: IntArray, *, is_made: bool
    ) -> tuple[IntArray, IntArray]:
        """First row and end of each device of each division, in the result or the input."""
        pattern = self._matrices[matrix]
        size = pattern.num_rows if is_made else pattern.num_columns
        inner = size // int(self._axis_units[axis])
        begin = unit_begin * inner
        return begin, begin + units * inner

    def _columns_read(self, matrix: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Columns that some rows of a matrix read, each once, ascending."""
        key = matrix, begin, end
        if key not in self._read:
            read = self._matrices[matrix].needed(begin, end)
            if self._num_remembered + len(read) > _MOST_REMEMBERED:
                self._read.clear()
                self._num_remembered = 0
            self._num_remembered += len(read)
            self._read[key] = read
        return self._read[key]
