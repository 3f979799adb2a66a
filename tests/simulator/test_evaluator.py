"""Parts of the evaluator that no strategy shows by itself."""

import numpy as np
import pytest

from heterog.simulator.evaluator import _distinct


@pytest.mark.parametrize("most", [(3, 5, 2, 4), (2**20, 2**20, 2**20, 2**20)])
def test_distinct_rows_are_those_of_numpy(most: tuple[int, ...]) -> None:
    """As numbers, and as rows where the numbers would be too large."""
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, size, (4, 3, 50)).astype(np.int32) for size in most]
    for column in columns:
        column[:, :, 25:] = column[:, :, :25]
    rows, number = _distinct(*columns)
    flat = np.stack(columns, axis=-1).reshape(-1, len(columns))
    expected, of_entry = np.unique(flat, axis=0, return_inverse=True)
    assert rows == [tuple(row) for row in expected.tolist()]
    assert number.tolist() == of_entry.ravel().tolist()


def test_nothing_has_no_rows() -> None:
    rows, number = _distinct(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.int32))
    assert rows == []
    assert len(number) == 0
