"""Values that one group makes and another reads, and their bytes for the whole batch."""

import numpy as np

from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.tables import GraphTables


def moved_bytes(tables: GraphTables) -> FloatArray:
    """Bytes of every value for the whole batch that other devices need.  # [num_values]"""
    size = tables.value_bytes + tables.batch_size * tables.value_bytes_per_unit
    return np.asarray(size * tables.value_moved_fraction)


def moved_between_groups(tables: GraphTables) -> tuple[IntArray, IntArray, FloatArray]:
    """Makers, readers and bytes of the values that leave their group.  # [num_moved] each"""
    maker, reader = tables.op_group[tables.value_op[tables.slot_value]], tables.slot_group
    real = (maker >= 0) & (reader >= 0) & (maker != reader)
    return maker[real], reader[real], moved_bytes(tables)[tables.slot_value][real]


def group_edges(tables: GraphTables) -> tuple[IntArray, FloatArray]:
    """Pairs of maker and reader, each once, and the bytes of all values between them.

    Returns:
        # [2, num_edges], [num_edges]
    """
    maker, reader, moved = moved_between_groups(tables)
    key = maker.astype(np.int64) * tables.num_groups + reader
    unique, inverse = np.unique(key, return_inverse=True)
    pairs = np.stack(np.divmod(unique, tables.num_groups)).astype(np.int32)
    return pairs, np.bincount(inverse, moved, len(unique)).astype(np.float64)
