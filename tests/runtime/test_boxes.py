"""Boxes of whole tensors: what they hold is what cutting tensors gives."""

from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from heterog.graph.placement import Placement
from heterog.graph.sharding_rules import local_shape
from heterog.runtime.checkpoint.boxes import (
    Box,
    Piece,
    check_tiling,
    run_pieces,
    whole_box,
    whole_piece,
)
from heterog.runtime.checkpoint.held import in_units
from heterog.runtime.step.spans import cut


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def cuts_of(rng: Random, total: int, most: int) -> list[tuple[int, int]]:
    """(begin, end) of consecutive parts of some range."""
    inner = rng.sample(range(1, total), min(rng.randint(0, most), total - 1)) if total else []
    return list(pairwise([0, *sorted(inner), total]))


def held_as(pieces: list[Piece], held: Tensor, whole: Tensor) -> int:
    """Check what pieces show of a held tensor against the whole; how many elements that is."""
    for piece in pieces:
        assert torch.equal(piece.of(held), piece.box.of(whole, whole_box(whole.shape)))
    return sum(piece.box.num_elements for piece in pieces)


@pytest.mark.parametrize("seed", range(60))
def test_runs_are_cut_into_few_boxes(seed: int) -> None:
    rng = Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
    whole = numbered(shape)
    flat = whole.reshape(-1)
    boxes = []
    for begin, end in cuts_of(rng, flat.numel(), 4):
        before = rng.randint(0, 3)
        held = torch.cat([torch.full((before,), -1), flat[begin:end]])
        pieces = run_pieces(shape, begin, end, before)
        assert held_as(pieces, held, whole) == end - begin
        assert len(pieces) <= max(2 * len(shape) - 1, 1)
        boxes += [piece.box for piece in pieces]
    check_tiling("x", shape, boxes)


@pytest.mark.parametrize("seed", range(60))
def test_slices_along_an_axis_and_runs_of_them(seed: int) -> None:
    """An axis inside another one, cut unevenly; of each slice all, or runs of its elements."""
    rng = Random(seed)
    shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    dim, outer, units = rng.randrange(len(shape)), rng.randint(1, 3), rng.randint(1, 5)
    shape[dim] = outer * units * rng.randint(1, 3)
    whole, place = numbered(tuple(shape)), Placement("S", dim, outer)
    boxes = []
    for begin, end in cuts_of(rng, units, 3):
        held = cut(whole, place, units, begin, end - begin)
        assert tuple(held.shape) == local_shape(tuple(shape), place, end - begin, units)
        own = in_units(whole_piece(held.shape), shape, place, units, begin, end - begin)
        assert held_as(own, held, whole) == held.numel()
        for first, last in cuts_of(rng, held.numel(), 2):
            pieces = [
                piece
                for each in run_pieces(held.shape, first, last)
                for piece in in_units(each, shape, place, units, begin, end - begin)
            ]
            assert held_as(pieces, held.reshape(-1)[first:last], whole) == last - first
            boxes += [piece.box for piece in pieces]
    check_tiling("x", shape, boxes)


@pytest.mark.parametrize("seed", range(60))
def test_a_tiling_that_is_wrong_in_one_box_is_found(seed: int) -> None:
    """Counted by elements: lost, doubled, moved or resized boxes are refused, nothing else."""
    rng = Random(seed)
    shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    total = torch.Size(shape).numel()
    boxes = [
        piece.box
        for begin, end in cuts_of(rng, total, 4)
        for piece in run_pieces(shape, begin, end)
    ]
    rng.shuffle(boxes)
    place = rng.randrange(len(boxes))
    offsets, sizes = list(boxes[place].offsets), list(boxes[place].sizes)
    dim = rng.randrange(len(shape))
    change = rng.choice(["lose", "double", "move", "resize", "nothing"])
    if change == "lose":
        del boxes[place]
    elif change == "double":
        boxes.append(boxes[rng.randrange(len(boxes))])
    elif change == "move":
        offsets[dim] += rng.choice([-1, 1])
    elif change == "resize":
        sizes[dim] += rng.choice([-1, 1])
    if change in ("move", "resize"):
        boxes[place] = Box(tuple(offsets), tuple(sizes))
    if change == "nothing":
        check_tiling("x", shape, boxes)
        return
    with pytest.raises(ValueError, match=r"a gap or overlap at|reaches out of its"):
        check_tiling("x", shape, boxes)


def test_more_boxes_than_can_be_looked_at_are_refused() -> None:
    sizes = (2,) * 40
    parts = [Box((first, *(0,) * 39), (1,) * 40) for first in range(2)]
    with pytest.raises(ValueError, match="x is cut into 2 parts along 40 dimensions"):
        check_tiling("x", sizes, parts)
    with pytest.raises(ValueError, match="a part of x has other dimensions than its 2"):
        check_tiling("x", (2, 2), [Box((0,), (2,))])
