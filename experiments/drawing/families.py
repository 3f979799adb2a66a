"""Families of drawn models, and what their functions draw with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog import Workload

TRAIN, VALIDATION, TEST = "train", "validation", "test"


@dataclass(frozen=True, slots=True)
class Draw:
    """The random numbers of one model.

    Attributes:
        rng: where they come from.
        batch_size: the batch size that is asked for; drawn if there is none.
    """

    rng: np.random.Generator
    batch_size: int | None = None

    def size(self, low: int, high: int, step: int = 1) -> int:
        """A log-uniform size, rounded to a multiple of ``step``."""
        drawn = float(np.exp(self.rng.uniform(np.log(low), np.log(high))))
        return max(round(drawn / step), 1) * step

    def pick(self, *options: Any) -> Any:
        """One of the options."""
        return options[int(self.rng.integers(len(options)))]

    def batch(self, low: int, high: int) -> int:
        """The batch size."""
        drawn = self.size(low, high, 8)
        return self.batch_size or drawn


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, and what its members are for."""

    split: str
    build: Callable[[Draw], Workload]


FAMILIES: dict[str, Family] = {}
"""Every family by its name."""


def family(split: str) -> Callable[[Callable[[Draw], Workload]], Callable[[Draw], Workload]]:
    """Enter the decorated function in ``FAMILIES``."""

    def enter(build: Callable[[Draw], Workload]) -> Callable[[Draw], Workload]:
        FAMILIES[build.__name__] = Family(split, build)
        return build

    return enter


def flat_loss(output: Any, labels: Tensor) -> Tensor:
    """Mean cross-entropy over all positions, or mean square error of what is not classes."""
    logits: Tensor = getattr(output, "logits", output)
    if labels.is_floating_point():
        return functional.mse_loss(logits, labels)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def tensors(
    model: Callable[[], nn.Module],
    *shapes: tuple[int, ...],
    dtypes: str = "fl",
    dtype: torch.dtype = torch.float32,
) -> Workload:
    """A workload on zeros of some shapes, labels last; ``dtypes``: f or l (long) for each."""

    def example() -> tuple[Tensor, ...]:
        kinds = {"f": dtype, "l": torch.long}
        return tuple(
            torch.zeros(shape, dtype=kinds[kind])
            for shape, kind in zip(shapes, dtypes, strict=True)
        )

    return Workload(
        model=lambda: model().to(dtype),
        example_batch=example,
        loss=flat_loss,
        optimizer=torch.optim.Adam,
    )


def precision(draw: Draw) -> torch.dtype:
    """Half of the models of tokens are in bfloat16."""
    return draw.pick(torch.float32, torch.bfloat16)
