"""Sets of rows, held or wanted: consecutive ones, or those that a sparse matrix reads."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heterog.graph.halo import Rows
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpCall, Placement
from heterog.graph.sharding_rules.matmul import pattern_key
from heterog.graph.sparse_pattern import SparsePattern
from heterog.graph.sparse_product import multiply
from heterog.runtime.step.spans import Span, unit_rows

RowSet = Rows | npt.NDArray[np.int64]
"""Consecutive rows, or an ascending array of row numbers."""


@lru_cache(maxsize=512)  # of each pattern, the rows of a rank and of those it sends to
def needed_rows(pattern: SparsePattern, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Rows that are read by rows ``begin`` to ``end`` of a sparse product."""
    return pattern.needed(begin, end)


def rows_of_neighbours(pattern: SparsePattern, units: Span, all_units: int) -> RowSet:
    """Rows that the rows of some units read.

    Args:
        pattern: Sparse pattern of the product.
        units: Units of its result.
        all_units: Units of the whole axis.
    """
    made = unit_rows(units, pattern.num_rows, all_units)
    return needed_rows(pattern, made.begin, made.end)


def pattern_of_placement(graph: OpGraph, place: Placement) -> SparsePattern:
    """The sparse pattern that a placement names by its key."""
    return next(each for each in graph.patterns if each.key == place.pattern)


def count(rows: RowSet) -> int:
    """Number of rows."""
    return rows.num if isinstance(rows, Rows) else len(rows)


def first(rows: RowSet) -> int:
    """The first row, -1 if there is none."""
    if isinstance(rows, Rows):
        return rows.begin
    return int(rows[0]) if len(rows) else -1


def common(have: RowSet, want: RowSet) -> RowSet:
    """Rows in both sets; at least one set is consecutive, or both are equal."""
    if isinstance(have, Rows) and isinstance(want, Rows):
        return have.overlap(want)
    if isinstance(have, Rows):
        have, want = want, have
    assert not isinstance(have, Rows)
    if not isinstance(want, Rows):
        return np.intersect1d(have, want, assume_unique=True)
    begin, end = np.searchsorted(have, [want.begin, want.end]).tolist()
    return have[begin:end]


def take(tensor: Tensor, dim: int, have: RowSet, want: RowSet) -> Tensor:
    """Select rows of a tensor.

    Args:
        tensor: A tensor that holds the rows ``have`` along ``dim``.
        dim: Dimension of the rows.
        have: Rows that it holds.
        want: Rows to select, a subset of ``have``.
    """
    if isinstance(want, Rows):
        assert isinstance(have, Rows)
        return tensor.narrow(dim, want.begin - have.begin, want.num).contiguous()
    places = want - have.begin if isinstance(have, Rows) else np.searchsorted(have, want)
    if len(places) == tensor.shape[dim]:
        return tensor.contiguous()  # they are among them, so they are all
    return tensor.index_select(dim, torch.from_numpy(places).to(tensor.device))


class _Part(NamedTuple):
    """Some rows of a sparse matrix, with columns numbered among the rows that they read."""

    row_starts: Tensor
    columns: Tensor
    entries: slice


class ProductOfRows:
    """Computes some rows of a sparse product from only the rows that they read.

    Args:
        call: The op.
        graph: Graph with the entries of the matrix.
        all_units: Units of the axis along which rows are cut.
    """

    def __init__(self, call: OpCall, graph: OpGraph, all_units: int) -> None:
        key = pattern_key(call.args)
        self._pattern = next(each for each in graph.patterns if each.key == key)
        self._all_units = all_units
        self._parts: dict[tuple[Span, torch.device], _Part] = {}

    def __call__(self, inputs: Sequence[Tensor], units: Span) -> list[Tensor]:
        """Compute the rows of some units of the result.

        Args:
            inputs: Rows of features that are read, and the whole matrix.
            units: Units of this rank.
        """
        dense, row_starts, _, weights = inputs
        if dense.is_meta:
            made = unit_rows(units, self._pattern.num_rows, self._all_units)
            return [dense.new_empty((*dense.shape[:-2], made.num, dense.shape[-1]))]
        part = self._part(units, row_starts)
        return [multiply(dense, part.row_starts, part.columns, weights[part.entries])]

    def _part(self, units: Span, row_starts: Tensor) -> _Part:
        key = units, row_starts.device
        if key not in self._parts:
            pattern = self._pattern
            made = unit_rows(units, pattern.num_rows, self._all_units)
            starts = pattern.row_starts[made.begin : made.end + 1]
            read = needed_rows(pattern, made.begin, made.end)
            places = np.searchsorted(read, pattern.columns_of(made.begin, made.end))
            arrays = (starts - starts[0], places)
            local = [torch.from_numpy(array).to(row_starts) for array in arrays]
            self._parts[key] = _Part(local[0], local[1], slice(int(starts[0]), int(starts[-1])))
        return self._parts[key]
