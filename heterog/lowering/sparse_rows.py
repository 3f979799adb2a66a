"""Numbers of rows that devices read of each other when the rows of a sparse matrix are cut.

Every reader's rows are counted once from the entries of the matrix, exactly: for each column how
many of those before it are read. What it reads of any other range of rows is then a difference.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from heterog.lowering.program import IntArray
from heterog.lowering.tables import GraphTables

_MOST_REMEMBERED = 2**25
"""Most counts that are kept, 8 bytes each: a search needs the same ranges of rows again."""


class HasUnits(Protocol):
    """A division, with the units of each device along every axis but the batch."""

    @property
    def units(self) -> IntArray:
        """Number of units.  # [num_axes - 1, num_devices]"""

    @property
    def unit_begin(self) -> IntArray:
        """First unit.  # [num_axes - 1, num_devices]"""


class SparseRows:
    """Counts rows by divisions, and remembers earlier counts.

    Args:
        tables: Tables of the graph and its op rules.
    """

    def __init__(self, tables: GraphTables) -> None:
        self._tables = tables
        self._before: dict[tuple[int, int, int], npt.NDArray[np.int64]] = {}
        self._num_remembered = 0

    def of(self, divisions: Sequence[HasUnits]) -> IntArray:
        """Number of rows of each owner that each reader reads; see ``Choice.sparse_rows``."""
        unit_begin = [each.unit_begin for each in divisions]
        units = [each.units for each in divisions]
        sparse, num_divisions = self._tables.sparse, len(units)
        num_devices = units[0].shape[1]
        shape = (len(sparse.axis), num_divisions, num_divisions, num_devices, num_devices)
        found = np.zeros(shape, np.int32)
        for matrix, axis in enumerate(sparse.axis.tolist()):
            starts, ends = self._row_bounds(matrix, axis, unit_begin, units, is_made=True)
            own_starts, own_ends = self._row_bounds(matrix, axis, unit_begin, units, is_made=False)
            for reading, device in np.argwhere(ends > starts).tolist():
                begin, end = int(starts[reading, device]), int(ends[reading, device])
                before = self._read_before(matrix, begin, end)
                found[matrix, reading, :, device, :] = before[own_ends] - before[own_starts]
        return found

    def _row_bounds(
        self,
        matrix: int,
        axis: int,
        unit_begin: Sequence[IntArray],
        units: Sequence[IntArray],
        *,
        is_made: bool,
    ) -> tuple[IntArray, IntArray]:
        """First and last row of each device of each division, of the result or of the input."""
        sparse = self._tables.sparse
        size = int(sparse.num_columns[matrix])
        if is_made:
            size = int(sparse.first_row[matrix + 1] - sparse.first_row[matrix]) - 1
        inner = size // int(self._tables.axis_units[axis])
        begin = np.stack([each[axis - 1] for each in unit_begin]) * inner
        return begin, begin + np.stack([each[axis - 1] for each in units]) * inner

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
