"""The rival of the device models: trees by hand, and what they say beyond their rows."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "experiments" / "fits" / "boosting.py"


@pytest.fixture(scope="module")
def boosting() -> dict[str, Any]:
    """Names of the script."""
    return runpy.run_path(str(SCRIPT))


def test_one_tree_splits_where_least_squares_are_left(boosting: dict[str, Any]) -> None:
    columns = np.array([[0.0, 5.0], [1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
    target = np.array([1.0, 3.0, 11.0, 13.0])
    settings = boosting["Settings"](rounds=1, depth=1, rate=1.0, least_rows=1)
    (tree,) = boosting["fit_boosted"](columns, target, settings).trees
    assert (tree.column, tree.threshold, tree.below, tree.above) == (0, 1.5, -5.0, 5.0)


def test_few_rows_in_a_leaf_and_equal_columns_are_not_split(boosting: dict[str, Any]) -> None:
    settings = boosting["Settings"](rounds=1, depth=3, rate=1.0, least_rows=2)
    for columns in (np.array([[0.0], [1.0], [2.0]]), np.ones((3, 1))):
        model = boosting["fit_boosted"](columns, np.array([0.0, 0.0, 9.0]), settings)
        assert model.trees == (0.0,)
        np.testing.assert_array_equal(model.predict(columns), 3.0)


def test_a_line_is_learnt_inside_and_flat_beyond(boosting: dict[str, Any]) -> None:
    columns = np.arange(32.0).reshape(-1, 1)
    settings = boosting["Settings"](rounds=200, depth=4, rate=0.1, least_rows=1)
    model = boosting["fit_boosted"](columns, columns[:, 0], settings)
    np.testing.assert_allclose(model.predict(columns), columns[:, 0], atol=0.01)
    beyond = model.predict(np.array([[31.0], [64.0], [1000.0]]))
    assert np.ptp(beyond) == 0.0
