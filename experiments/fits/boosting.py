"""Gradient boosting of regression trees: a baseline that knows nothing about GPUs.

Least squares, as in Friedman (2001), algorithms 1 and 2: each tree is fitted to the residuals of
the trees before it, and a share of it is added. Splits are exact: every value between two rows is
tried.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How trees are grown.

    Attributes:
        rounds: Number of trees.
        depth: Most splits between the root of a tree and a leaf.
        rate: Share of each tree that is added.
        least_rows: Least number of rows in a leaf.
    """

    rounds: int
    depth: int
    rate: float
    least_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Node of a tree: rows whose column is at most a threshold go ``below``."""

    column: int
    threshold: float
    below: "Tree"
    above: "Tree"


Tree = Split | float
"""A split, or the value of a leaf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boosted:
    """Sum of a constant and of a share of each tree."""

    constant: float
    rate: float
    trees: tuple[Tree, ...]

    def predict(self, columns: Floats) -> Floats:
        """Predicted target of each row.

        Args:
            columns: Values of the columns.  # [num_rows, num_columns]
        """
        found = np.full(len(columns), self.constant)
        for tree in self.trees:
            found += self.rate * _values(tree, columns)
        return found


def fit_boosted(columns: Floats, target: Floats, settings: Settings) -> Boosted:
    """Trees fitted one after the other.

    Args:
        columns: Values of the columns.  # [num_rows, num_columns]
        target: What is to be predicted.  # [num_rows]
        settings: How trees are grown.

    >>> x = np.arange(8.0).reshape(-1, 1)
    >>> step = (x[:, 0] > 3.5).astype(float)
    >>> one = Settings(rounds=1, depth=1, rate=1.0, least_rows=1)
    >>> fit_boosted(x, step, one).predict(x).tolist()
    [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    """
    constant = float(target.mean())
    left = target - constant
    trees: list[Tree] = []
    for _ in range(settings.rounds):
        tree = _fit_tree(columns, left, settings.depth, settings.least_rows)
        trees.append(tree)
        left = left - settings.rate * _values(tree, columns)
    return Boosted(constant=constant, rate=settings.rate, trees=tuple(trees))


def _fit_tree(columns: Floats, target: Floats, depth: int, least_rows: int) -> Tree:
    best = None if depth == 0 else _best_split(columns, target, least_rows)
    if best is None:
        return float(target.mean())
    column, threshold = best
    is_below = columns[:, column] <= threshold
    below, above = (
        _fit_tree(columns[chosen], target[chosen], depth - 1, least_rows)
        for chosen in (is_below, ~is_below)
    )
    return Split(column=column, threshold=threshold, below=below, above=above)


def _best_split(columns: Floats, target: Floats, least_rows: int) -> tuple[int, float] | None:
    """Column and threshold that leave the least squares; ``None`` if no split is allowed.

    Squares within two parts are least where sum^2 / number, added up over both, is largest.
    """
    number = np.arange(1, len(target))
    best, found = float(target.sum()) ** 2 / len(target) + 1e-12, None
    for column in range(columns.shape[1]):
        order = np.argsort(columns[:, column], kind="stable")
        value, sums = columns[order, column], np.cumsum(target[order])
        gain = sums[:-1] ** 2 / number + (sums[-1] - sums[:-1]) ** 2 / (len(target) - number)
        is_allowed = (value[1:] > value[:-1]) & (number >= least_rows)
        is_allowed &= len(target) - number >= least_rows
        gain[~is_allowed] = -np.inf
        if len(gain) and gain.max() > best:
            at = int(gain.argmax())
            best, found = float(gain[at]), (column, float(value[at] + value[at + 1]) / 2.0)
    return found


def _values(tree: Tree, columns: Floats) -> Floats:
    """Value of the leaf that each row falls into.  # [num_rows]"""
    if not isinstance(tree, Split):
        return np.full(len(columns), tree)
    is_below = columns[:, tree.column] <= tree.threshold
    found = np.empty(len(columns))
    found[is_below] = _values(tree.below, columns[is_below])
    found[~is_below] = _values(tree.above, columns[~is_below])
    return found
