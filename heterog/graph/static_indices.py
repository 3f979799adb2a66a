"""Indices whose result has one shape, though torch reads values for it: numbers, and masks.

Of a tensor of one number (``x[:, last]``) torch makes a view of what it chooses, so that the graph
would hold just that number; while a step is captured it is not even known. Looking the place up
gives the same values. One value written by a mask (``x[mask] = token``) needs no count of places
before its backward pass, which takes a part of the gradient by the mask; choosing between both
gives the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@contextmanager
def looked_up() -> Iterator[None]:
    """Look up what unknown numbers choose, and write by masks; the rest is left to torch."""
    owner: Any = Tensor
    get, put = owner.__getitem__, owner.__setitem__

    def getitem(self: Tensor, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if any(_is_unknown(each) for each in parts):
            return get(*_chosen(self, parts))
        return get(self, index)

    def setitem(self: Tensor, index: Any, value: Any) -> None:
        rest = self.dim() - index.dim() if _is_unknown_mask(index) else -1
        if isinstance(value, Tensor) and value.dim() <= rest:
            mask = index.reshape(*index.shape, *[1] * rest)
            self.copy_(torch.where(mask, value, self))
        else:
            put(self, index, value)

    owner.__getitem__, owner.__setitem__ = getitem, setitem
    try:
        yield
    finally:
        del owner.__getitem__, owner.__setitem__  # of the class above


def _is_unknown(part: object) -> bool:
    if not isinstance(part, FakeTensor) or part.constant is not None:
        return False
    return part.dim() == 0 and part.dtype in _INTEGERS


def _is_unknown_mask(index: object) -> bool:
    return isinstance(index, FakeTensor) and index.constant is None and index.dtype == torch.bool


def _chosen(source: Tensor, parts: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
    """A tensor of which only the chosen places are left, and the index with zeros instead."""
    dim, known = 0, list(parts)
    for position, part in enumerate(parts):
        if isinstance(part, EllipsisType):
            dim = source.dim() - sum(map(_num_dims, parts[position + 1 :]))
            continue
        if _is_unknown(part):
            place = part.long()
            place = torch.where(place < 0, place + source.shape[dim], place)
            source = source.index_select(dim, place.reshape(1))
            known[position] = 0
        dim += _num_dims(part)
    return source, tuple(known)


def _num_dims(part: object) -> int:
    """Number of a tensor's dimensions that a part of an index is about."""
    if part is None or isinstance(part, bool):
        return 0
    is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if isinstance(part, Tensor) and is_mask else 1
