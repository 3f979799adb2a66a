"""Boxes of a whole tensor, which describe the part that a rank holds under any layout.

A box is a range in each dimension. A slice along an axis is one box, or several if the axis lies
inside another one (the three parts of a fused projection). ZeRO cuts runs of elements of the
flattened tensor; a run is at most one box, and two more for each dimension but the first.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from torch import Tensor

_MAX_CORNERS = 1 << 22
"""Most corners of boxes that ``check_tiling`` checks: a second or two. 512 slices of a tensor of
four dimensions have 57,344."""


class Box(NamedTuple):
    """A range in each dimension of a tensor: first indices and sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements in it."""
        return math.prod(self.sizes)

    def overlap(self, other: "Box") -> "Box | None":
        """The intersection of two boxes, if any."""
        low = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + b, c + d) - first for first, a, b, c, d in zip(low, *self, *other, strict=True)
        )
        return Box(low, sizes) if min(sizes, default=1) > 0 else None

    def of(self, tensor: Tensor, outer: "Box") -> Tensor:
        """View this box in a tensor that holds a box around it."""
        for dim, (begin, first, size) in enumerate(
            zip(self.offsets, outer.offsets, self.sizes, strict=True)
        ):
            tensor = tensor.narrow(dim, begin - first, size)
        return tensor


def whole_box(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


class Piece(NamedTuple):
    """A box of a whole tensor, and its position in a tensor that a rank holds.

    Attributes:
        box: Box of the whole tensor.
        held: The same elements as a box of the held tensor, or of a run of its elements.
        shape: Shape of the held tensor, or of the run seen as a tensor.
        begin: For a run, its first element in the held tensor, which is flat; -1 if it is no run.
    """

    box: Box
    held: Box
    shape: tuple[int, ...]
    begin: int = -1

    def of(self, held: Tensor) -> Tensor:
        """View the piece in the tensor that holds it."""
        if self.begin >= 0:
            held = held.narrow(0, self.begin, math.prod(self.shape)).view(self.shape)
        return self.held.of(held, whole_box(self.shape))


def whole_piece(shape: Sequence[int]) -> Piece:
    """The piece of a tensor that is held whole."""
    box = whole_box(shape)
    return Piece(box, box, box.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A box of a tensor, which a rank saves.

    Attributes:
        whole: Name of the whole tensor.
        shape: Shape of the whole tensor.
        box: Box that is saved.
        value: Its elements, in the shape of the box.
    """

    whole: str
    shape: tuple[int, ...]
    box: Box
    value: Tensor

    @staticmethod
    def of_whole(name: str, value: Tensor) -> "Entry":
        """A whole tensor."""
        shape = tuple(value.shape)
        return Entry(whole=name, shape=shape, box=whole_box(shape), value=value)

    @property
    def name(self) -> str:
        """Name of the entry: ``model.weight``, or ``model.weight[10:20,0:8]`` for a part."""
        if self.box.sizes == self.shape:
            return self.whole
        ranges = [f"{first}:{first + size}" for first, size in zip(*self.box, strict=True)]
        return f"{self.whole}[{','.join(ranges)}]"


def run_pieces(shape: Sequence[int], begin: int, end: int, at: int = 0) -> list[Piece]:
    """The boxes of a run of elements of a flattened tensor.

    Args:
        shape: Shape of the tensor.
        begin: First element of the run.
        end: Element after its last.
        at: Position of the run in the flat tensor that holds it.

    >>> [piece.box for piece in run_pieces((4, 3), 2, 10)]  # doctest: +NORMALIZE_WHITESPACE
    [Box(offsets=(0, 2), sizes=(1, 1)), Box(offsets=(1, 0), sizes=(2, 3)),
     Box(offsets=(3, 0), sizes=(1, 1))]
    """
    pieces = []
    for box in _boxes_of_run(tuple(shape), begin, end):
        pieces.append(Piece(box, whole_box(box.sizes), box.sizes, at))
        at += box.num_elements
    return pieces


def _boxes_of_run(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Boxes of the rest of a row, whole rows, and the start of a row; rows are cut in turn."""
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # inside one row
        yield from _in_row(last, shape, begin, end)
        return
    yield from _in_row(first - 1, shape, begin, first * row)
    if first < last:
        rest = shape[1:]
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    yield from _in_row(last, shape, last * row, end)


def _in_row(index: int, shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    start = index * math.prod(shape[1:])
    for box in _boxes_of_run(shape[1:], begin - start, end - start):
        yield Box((index, *box.offsets), (1, *box.sizes))


def check_tiling(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Check that every element of a tensor is in exactly one of some boxes.

    A corner of a box has the sign -1 if an odd number of its coordinates are upper ends. These
    signed corners determine the box: they are the mixed derivative of the function that is 1
    inside. So boxes tile the whole if and only if their corners add up to its corners.

    Raises:
        ValueError: they do not tile the whole, or are too many to check.
    """
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise ValueError(f"a part of {name} has other dimensions than its {len(shape)}")
        ends = zip(box.offsets, box.sizes, shape, strict=True)
        if any(begin < 0 or size < 1 or begin + size > end for begin, size, end in ends):
            raise ValueError(f"a part of {name} reaches out of its {tuple(shape)}")
    cut = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes)]
    if len(boxes) << len(cut) > _MAX_CORNERS:
        raise ValueError(f"{name} is cut into {len(boxes)} parts along {len(cut)} dimensions")
    total: Counter[tuple[int, ...]] = Counter()
    for sign, each in (*((1, box) for box in boxes), (-1, whole_box(shape))):
        for upper in product((0, 1), repeat=len(cut)):
            corner = tuple(
                each.offsets[dim] + end * each.sizes[dim]
                for dim, end in zip(cut, upper, strict=True)
            )
            total[corner] += sign * (-1) ** sum(upper)
    wrong = sorted(corner for corner, count in total.items() if count)
    if wrong:
        at = dict(zip(cut, wrong[0], strict=True))
        where = [at.get(dim, 0) for dim in range(len(shape))]
        raise ValueError(f"the parts of {name} leave a gap or overlap at {where}")
