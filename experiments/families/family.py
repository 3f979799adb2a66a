"""What a model family is: a workload in small, batches to train it on, and how equal is equal."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from heterog.graph.workload import Workload

Batch = tuple[Tensor, ...] | dict[str, Tensor]

BATCH = 8
"""Samples of the global batch: uneven over three ranks, divisible by two micro-batches."""

FLOAT64 = 1e-6
"""Largest allowed error of families in double precision, relative to how far weights moved."""
FLOAT32 = 2e-3
"""The same in single precision: sums over other groups of samples round differently."""
BFLOAT16 = 0.15
"""The same for bf16, at least: three times what rounding does on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Attributes:
        name: of the family.
        build: makes the workload; its batch is a function that draws from torch's generator.
        tolerance: largest allowed error of a weight, relative to how far the weights moved.
        is_random: the step draws random numbers; the reference is given the same ones.
        is_quick: cheap enough for the test suite.
        refused: a part of the text with which capture refuses it; empty if it runs.
    """

    name: str
    build: Callable[[], Workload]
    tolerance: float
    is_random: bool
    is_quick: bool
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


FAMILIES: dict[str, Family] = {}
"""Every family by its name."""


def family(
    name: str,
    *,
    tolerance: float = FLOAT64,
    is_random: bool = False,
    is_quick: bool = False,
    refused: str = "",
) -> Callable[[Callable[[], Workload]], Callable[[], Workload]]:
    """Enter the decorated function in ``FAMILIES``."""

    def enter(build: Callable[[], Workload]) -> Callable[[], Workload]:
        assert name not in FAMILIES, f"two families are called {name}"
        FAMILIES[name] = Family(
            name=name,
            build=build,
            tolerance=tolerance,
            is_random=is_random,
            is_quick=is_quick,
            refused=refused,
        )
        return build

    return enter


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
