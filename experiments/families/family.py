"""A model family: a small workload, its batches, and the tolerance of its comparison."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heterog.graph.workload import Batch as Batch
from heterog.graph.workload import Workload

BATCH = 8
"""Samples of the global batch: uneven over three ranks, divisible by two micro-batches."""

FLOAT64 = 1e-6
"""Largest allowed error of families in double precision, relative to how far weights moved."""
FLOAT32 = 2e-3
"""The same in single precision: sums over other groups of samples round differently."""
BFLOAT16 = 0.15
"""The same for bf16, at least: three times what rounding does on one device."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    Attributes:
        name: of the family.
        says: what is special about it.
        build: makes the workload; its batch is a function that draws from torch's generator.
        tolerance: largest allowed error of a weight, relative to how far the weights moved.
        is_random: the step draws random numbers; the reference is given the same ones.
        is_quick: cheap enough for the test suite.
        refused: a part of the text with which capture refuses it; empty if it runs.
    """

    name: str
    says: str
    build: Callable[[], Workload]
    tolerance: float = FLOAT64
    is_random: bool = False
    is_quick: bool = False
    refused: str = ""

    def workload(self) -> Workload:
        """The workload, with the same weights in every process."""
        made = self.build()

        def seeded() -> nn.Module:
            torch.manual_seed(0)
            return made.make_model()

        return replace(made, model=seeded, example_batch=self.batch(0), name=self.name)

    def batch(self, step: int) -> Batch:
        """The batch of a step; another one for every step."""
        torch.manual_seed(100 + step)
        return self.build().make_batch()


_OPTIONS = ("tolerance", "is_random", "is_quick", "refused")

FAMILIES: dict[str, Family] = {}
"""Every family by its name."""


def enter(*families: Family) -> None:
    """Enter families in ``FAMILIES``."""
    for each in families:
        assert each.name not in FAMILIES, f"two families are called {each.name}"
        FAMILIES[each.name] = each


def family(
    name: str, **options: Any
) -> Callable[[Callable[[], Workload]], Callable[[], Workload]]:
    """Enter a family whose workload the decorated function makes."""

    def entered(build: Callable[[], Workload]) -> Callable[[], Workload]:
        enter(Family(name, build.__doc__ or "", build, **options))
        return build

    return entered


class Parts(nn.Module):
    """A model of named modules, parameters and buffers, and a function that runs it."""

    def __init__(self, parts: Mapping[str, nn.Module | Tensor], run: Callable[..., Any]) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self._run = run

    def forward(self, *batch: Tensor) -> Any:
        return self._run(self, *batch)


def trained(
    name: str,
    parts: Callable[[], Mapping[str, nn.Module | Tensor]],
    batch: Callable[[], Batch],
    *,
    dtype: torch.dtype | None = torch.float64,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a family whose forward pass is the decorated function, called with the model first.

    Args:
        name: of the family.
        parts: makes what the model consists of.
        batch: makes a batch.
        dtype: of weights and buffers; ``None`` leaves each as it is made.
        options: of ``Family``, and those of the workload as for ``sgd``.
    """
    own = {key: options.pop(key) for key in _OPTIONS if key in options}

    def entered(run: Callable[..., Any]) -> Callable[..., Any]:
        def model() -> nn.Module:
            return Parts(parts(), run).to(dtype)

        enter(Family(name, run.__doc__ or "", partial(sgd, model, batch, **options), **own))
        return run

    return entered


def sgd(model: Callable[[], nn.Module], batch: Callable[[], Batch], **options: object) -> Workload:
    """A workload with momentum: its numbers show errors of gradients as they are.

    Adam divides by a gradient's size, and turns the rounding of one that is zero into steps.
    """
    settings: dict[str, object] = {
        "loss": None,
        "optimizer": torch.optim.SGD,
        "optimizer_options": {"lr": 0.05, "momentum": 0.9},
    }
    return Workload(model, batch, **(settings | options))  # type: ignore[arg-type]
