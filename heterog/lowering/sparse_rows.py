"""Counts the rows that devices read of each other in a sparse product whose rows are cut.

Every reader's rows are counted once from the entries of the matrix, exactly: for each column, how
many of the columns before it are read. The number of rows read in any range is then a difference.
"""

import numpy as np
import numpy.typing as npt

from heterog.lowering.program import IntArray
from heterog.lowering.tables import GraphTables

_MOST_REMEMBERED = 2**25
"""Most counts that are kept, 8 bytes each; they are kept because a search repeats ranges."""


class SparseRows:
    """Counts rows by divisions, and remembers earlier counts.

    Args:
        tables: Tables of the graph and its op rules.
    """

    def __init__(self, tables: GraphTables) -> None:
        self._tables = tables
        self._before: dict[tuple[int, int, int], npt.NDArray[np.int64]] = {}
        self._num_remembered = 0

    def of(self, units: IntArray, unit_begin: IntArray) -> IntArray:
        """Number of rows of each owner that each reader reads; see ``Choice.sparse_rows``.

        Args:
            units: Units of each device.  # [num_axes - 1, num_divisions, num_devices]
            unit_begin: First unit of each device.  # [num_axes - 1, num_divisions, num_devices]
        """
        sparse, (num_divisions, num_devices) = self._tables.sparse, units.shape[1:]
        shape = (len(sparse.axis), num_divisions, num_divisions, num_devices, num_devices)
        found = np.zeros(shape, np.int32)
        for matrix, axis in enumerate(sparse.axis.tolist()):
            begin, count = unit_begin[axis - 1], units[axis - 1]
            starts, ends = self._row_bounds(matrix, axis, begin, count, is_made=True)
            own_starts, own_ends = self._row_bounds(matrix, axis, begin, count, is_made=False)
            for reading, device in np.argwhere(ends > starts).tolist():
                before = self._read_before(
                    matrix, int(starts[reading, device]), int(ends[reading, device])
                )
                found[matrix, reading, :, device, :] = before[own_ends] - before[own_starts]
        return found

    def _row_bounds(
        self, matrix: int, axis: int, unit_begin: IntArray, units: IntArray, *, is_made: bool
    ) -> tuple[IntArray, IntArray]:
        """First row and end of each device of each division, in the result or the input."""
        sparse = self._tables.sparse
        size = int(sparse.num_columns[matrix])
        if is_made:
            size = int(sparse.first_row[matrix + 1] - sparse.first_row[matrix]) - 1
        inner = size // int(self._tables.axis_units[axis])
        begin = unit_begin * inner
        return begin, begin + units * inner

    def _read_before(self, matrix: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """For each column, the number of columns before it that some rows of a matrix read."""
        key = matrix, begin, end
        if key not in self._before:
            sparse = self._tables.sparse
            size = int(sparse.num_columns[matrix])
            first, row = int(sparse.first_entry[matrix]), int(sparse.first_row[matrix])
            entries = first + sparse.row_starts[[row + begin, row + end]]
            is_read = np.zeros(size, np.bool_)
            is_read[sparse.columns[entries[0] : entries[1]]] = True
            if self._num_remembered + size > _MOST_REMEMBERED:
                self._before.clear()
                self._num_remembered = 0
            self._num_remembered += size
            self._before[key] = np.concatenate([[0], np.cumsum(is_read, dtype=np.int64)])
        return self._before[key]
