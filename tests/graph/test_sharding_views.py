"""The view rule: exact wherever it answers, and it answers wherever an exact split exists."""

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from heterog.graph.placement import Placement, S
from heterog.graph.sharding_rules import local_shape
from heterog.graph.sharding_rules.view import split_after_view

Shape = tuple[int, ...]


def owned(shape: Shape, split: Placement, units: int, first: int, share: int) -> Tensor:
    """The part of ``arange(numel).reshape(shape)`` with units ``first : first + share``."""
    whole = torch.arange(prod(shape))
    before = prod(shape[: split.dim]) * split.outer
    part = whole.reshape(before, units, -1)[:, first : first + share]
    return part.reshape(local_shape(shape, split, share, units))


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[Shape, Shape, Placement, Placement, int]:
    """Two groupings of the same factors into dimensions, and one factor split in both."""
    factors = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    split = draw(st.integers(0, len(factors) - 1))
    factors[split] = draw(st.integers(2, 5))
    first, where = _grouped(draw, factors, split)
    second, there = _grouped(draw, factors, split)
    return first, second, where, there, factors[split]


def _grouped(draw: st.DrawFn, factors: list[int], split: int) -> tuple[Shape, Placement]:
    cuts = draw(st.sets(st.integers(1, max(1, len(factors) - 1)), max_size=len(factors)))
    edges = sorted({0, len(factors), *(c for c in cuts if c < len(factors))})
    groups = [range(a, b) for a, b in pairwise(edges)]
    shape = tuple(prod(factors[i] for i in group) for group in groups)
    dim = next(d for d, group in enumerate(groups) if split in group)
    return shape, S(dim, prod(factors[i] for i in groups[dim] if i < split))


@given(regroupings(), st.data())
def test_a_regrouping_keeps_the_split_exactly(
    case: tuple[Shape, Shape, Placement, Placement, int], data: st.DataObject
) -> None:
    shape, to, split, expected, units = case
    assert split_after_view(shape, to, split, units) == expected
    first = data.draw(st.integers(0, units))
    share = data.draw(st.integers(0, units - first))
    part = owned(shape, split, units, first, share)
    viewed = part.reshape(local_shape(to, expected, share, units))
    assert torch.equal(viewed, owned(to, expected, units, first, share))


def splits(shape: Shape, units: int) -> list[Placement]:
    return [
        S(dim, outer)
        for dim, size in enumerate(shape)
        for outer in range(1, size + 1)
        if size % (outer * units) == 0
    ]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(2, 4),
)
def test_no_answer_means_there_is_none(shape: list[int], to: list[int], units: int) -> None:
    one, two = tuple(shape), tuple(to)
    one, two = (*one, prod(two)), (*two, prod(one))
    for split in splits(one, units):
        after = split_after_view(one, two, split, units)
        parts = [owned(one, split, units, unit, 1).flatten().tolist() for unit in range(units)]
        exact = [
            other
            for other in splits(two, units)
            if [owned(two, other, units, u, 1).flatten().tolist() for u in range(units)] == parts
        ]
        assert exact == ([] if after is None else [after])


def test_views_without_elements_lose_a_split_behind_them() -> None:
    assert split_after_view((2, 0, 4), (0, 4), S(2), 4) is None
    assert split_after_view((2, 0, 4), (0, 2, 4), S(0), 2) is None
    assert split_after_view((2, 0, 4), (2, 0), S(0), 2) == S(0)


def test_equal_sizes_are_not_confused() -> None:
    """Batch 4 and length 4: the split follows its dimension, not the number."""
    assert split_after_view((4, 4, 8), (16, 8), S(0), 4) == S(0)
    assert split_after_view((4, 4, 8), (16, 8), S(1), 4) == S(0, 4)
    assert split_after_view((16, 8), (4, 4, 8), S(0), 4) == S(0)
    assert split_after_view((16, 8), (4, 4, 8), S(0, 4), 4) == S(1)


def test_a_fused_weight_is_split_by_heads() -> None:
    """[3 x 6 heads x 8, D] seen per head: the split of heads is S(0, 3) of the fused rows."""
    assert split_after_view((144, 32), (3, 6, 8, 32), S(0, 3), 6) == S(1)


def test_a_split_that_straddles_dimensions_is_lost() -> None:
    assert split_after_view((6, 4), (4, 6), S(0), 6) is None
