"""Recipes: how an input is read in every step, noted in the first and followed in the others."""

from collections.abc import Callable, Sequence
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
    """How an op's input is read in every step, noted in the first.

    Attributes:
        begin: Whether it begins with a buffer, a parameter, a tensor of the batch, or a buffer of
            the model.
        key: Number of the buffer, or the tensor's id.
        like: Properties of the first tensor.
        steps: Functions of a tensor and their further arguments, in order: views and cuts.
        is_view: Whether the result shares the memory of the first tensor.
    """

    begin: Begin
    key: int
    like: Like
    steps: tuple["Step", ...]
    is_view: bool


class Notes:
    """Notes of one reading; ``fails`` if it takes more than views and cuts."""

    def __init__(self) -> None:
        self.begin: tuple[Begin, int, Tensor] | None = None
        self.steps: list[Step] = []
        self.fails = False

    def recipe(self, read: Tensor) -> Recipe | None:
        """The recipe of a tensor that was read; ``None`` if the notes are not complete."""
        if self.fails or self.begin is None:
            return None
        begin, key, value = self.begin
        like = Like.of(value)
        is_view = read.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        steps = shortened(self.steps, like) if is_view else self.steps
        return Recipe(begin, key, like, tuple(steps), is_view)


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
