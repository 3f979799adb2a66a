"""Counts the rows that devices read of each other in a sparse product whose rows are cut.

The columns that a reader reads are found once from the entries of the matrix, in order. The number
of rows that it reads in any range is then the difference of two places among them.
"""

import numpy as np
import numpy.typing as npt

from heterog.lowering.program import IntArray
from heterog.lowering.sparse_tables import matrix_of
from heterog.lowering.tables import GraphTables

_MOST_REMEMBERED = 2**25
"""Most columns that are kept, 8 bytes each; they are kept because a search repeats ranges."""


class SparseRows:
    """Counts rows by divisions, and remembers which columns are read.

    Args:
        tables: Tables of the graph and its op rules.
    """

    def __init__(self, tables: GraphTables) -> None:
        self._tables = tables
        self._matrices = [
            matrix_of(tables.sparse, each) for each in range(len(tables.sparse.axis))
        ]
        self._read: dict[tuple[int, int, int], npt.NDArray[np.int64]] = {}
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
        inner = size // int(self._tables.axis_units[axis])
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
