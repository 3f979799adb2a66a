"""How an input is read in every step: noted in the first, followed in the others."""

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Begin(Enum):
    """What a recipe begins with."""

    HELD = 0
    PARAMETER = 1
    BATCH = 2
    MODEL_BUFFER = 3


class Like(NamedTuple):
    """What tensors have in common that kernels can be compiled for."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Tensor) -> "Like":
        """What a tensor is like."""
        return cls(value.shape, value.stride(), value.dtype, value.device)


class Recipe(NamedTuple):
    """How an op's input is read in every step, noted in the first.

    Attributes:
        begin: Whether it begins with a buffer, a parameter, a tensor of the batch, or a buffer of
            the model.
        key: Number of the buffer, or the tensor's id.
        like: What the tensor is like that it begins with.
        steps: Functions of a tensor and their further arguments, in order: views and cuts.
    """

    begin: Begin
    key: int
    like: Like
    steps: tuple[tuple[Callable[..., Tensor], tuple[Any, ...]], ...]


class Notes:
    """Notes of one reading; ``fails`` if it does something else than views and cuts."""

    def __init__(self) -> None:
        self.begin: tuple[Begin, int, Like] | None = None
        self.steps: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = []
        self.fails = False

    def recipe(self) -> Recipe | None:
        """What was noted, if that is all there is to it."""
        if self.fails or self.begin is None:
            return None
        return Recipe(*self.begin, tuple(self.steps))
