"""Sparse matrices whose rows are cut, in flat arrays for the lowering kernel."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.errors import StrategyError
from heterog.graph.op_graph import OpGraph
from heterog.graph.sparse_pattern import SparsePattern
from heterog.lowering.kernels import by_reference

IntArray = npt.NDArray[np.int32]


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
