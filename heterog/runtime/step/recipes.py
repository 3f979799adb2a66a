"""Recipes: how an input is read, found when its op first runs and followed in every step."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Begin(Enum):
    """The kind of tensor that a recipe begins with."""

    HELD = 0
    PARAMETER = 1
    BATCH = 2
    MODEL_BUFFER = 3
    FOLLOWS_BATCH = 4
    ZERO = 5


class Like(NamedTuple):
    """The properties of a tensor for which a kernel is compiled."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Tensor) -> "Like":
        """The properties of a tensor."""
        return cls(value.shape, value.stride(), value.dtype, value.device)


Step = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A function of a tensor, and its further arguments."""


class Recipe(NamedTuple):
    """How an op's input is read in every step.

    Attributes:
        begin: Whether it begins with a buffer, a parameter, a tensor of the batch, a buffer of
            the model, a tensor that follows from the batch, or a zero of a tensor's dtype.
        key: Number of the buffer, or the tensor's id.
        steps: Functions of a tensor and their further arguments, in order.
        is_simple: Whether it takes no more than views and cuts.
        like: Properties of the first tensor, as in the first step.
        is_view: Whether the result shares the memory of the first tensor.
    """

    begin: Begin
    key: int
    steps: tuple[Step, ...]
    is_simple: bool
    like: Like
    is_view: bool


def followed(value: Tensor, steps: Iterable[Step]) -> Tensor:
    """What the steps of a recipe make of its first tensor."""
    for function, arguments in steps:
        value = function(value, *arguments)
    return value


def shortened(steps: Sequence[Step], like: Like) -> list[Step]:
    """Views of a tensor in fewer calls.

    >>> x = torch.zeros(2, 3)
    >>> flat, back = (Tensor.reshape, ((6,),)), (Tensor.reshape, ((2, 3),))
    >>> shortened([flat, back, (torch.t, ()), (torch.t, ())], Like.of(x))
    []
    """
    made: list[Step] = []
    for function, arguments in steps:
        before = made[-1][0] if made else None
        if function is torch.detach:
            continue
        if function is torch.t and before is torch.t:
            made.pop()
            continue
        if function is Tensor.reshape:
            if before is Tensor.reshape:
                made.pop()
            if not made and arguments == (tuple(like.shape),):
                continue
        made.append((function, arguments))
    return made
