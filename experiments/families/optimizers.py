"""Optimizers that are not elementwise: they read whole tensors, groups, or everything."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from families.family import Family, enter, sgd
from families.found import features_and_classes
from families.training import network
from heterog.graph.workload import Workload


class _Own(torch.optim.Optimizer):
    """An optimizer whose options are a learning rate and what a subclass needs."""

    def __init__(self, params: Any, lr: float = 0.1, **options: float) -> None:
        super().__init__(params, {"lr": lr} | options)
        self.size, self.gained = 1e-2, 0.0

    def members(self) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
        """Parameters with a gradient, each with its group and that gradient."""
        return [
            (group, each, each.grad)
            for group in self.param_groups
            for each in group["params"]
            if each.grad is not None
        ]

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, with where it began and a sum of its gradients."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(begin=parameter.clone(), total=torch.zeros_like(parameter))
        return state


class DAdaptation(_Own):
    """A step size from inner products over all parameters (Defazio and Mishchenko, 2023)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        moved = 0.0
        for _, each, slope in self.members():
            state = self.start(each)
            self.gained += self.size * float((slope * (state["begin"] - each)).sum())
            state["total"].add_(slope, alpha=self.size)
            moved += float(state["total"].abs().sum())
        self.size = max(self.size, self.gained / max(moved, 1e-12))
        for group, each, slope in self.members():
            each.add_(slope, alpha=-group["lr"] * self.size)


class Prodigy(DAdaptation):
    """The same with gradients divided by their root mean square, element by element."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for _, each, slope in self.members():
            square = self.start(each).setdefault("square", torch.zeros_like(each))
            square.mul_(0.9).addcmul_(slope, slope, value=0.1)
            slope.div_(square.sqrt() + 1e-8)
        super().step()


class Lars(_Own):
    """LARS with one trust ratio for each group of parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for group in self.param_groups:
            members = [each for each in group["params"] if each.grad is not None]
            if members:
                weights = torch.cat([each.flatten() for each in members]).norm()
                slopes = torch.cat([each.grad.flatten() for each in members]).norm()
                for each in members:
                    each.sub_(group["lr"] * weights / (slopes + 1e-9) * each.grad)


class Stable(torch.optim.AdamW):
    """AdamW that divides each gradient by its norm."""

    def step(self, closure: Any = None) -> Any:
        """Update all parameters."""
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.div_(each.grad.norm() + 1e-6)
        return super().step(closure)


def _trained_by(optimizer: type[torch.optim.Optimizer], lr: float, **more: Any) -> Workload:
    return sgd(
        lambda: network(8, 16, 16, 4).double(), features_and_classes,
        loss=functional.cross_entropy, optimizer=optimizer, optimizer_options={"lr": lr}, **more,
    )  # fmt: skip


def _first_and_rest(model: nn.Module) -> list[dict[str, Any]]:
    """The first layer, and all others with half the learning rate."""
    first, *rest = model.children()
    return [
        {"params": list(first.parameters())},
        {"params": [each for layer in rest for each in layer.parameters()], "lr": 0.05},
    ]


enter(
    Family(
        "d_adaptation",
        "One step size for all parameters, found while training.",
        lambda: _trained_by(DAdaptation, 10.0),
    ),
    Family("prodigy", "D-Adaptation for Adam.", lambda: _trained_by(Prodigy, 1.0)),
    Family(
        "lars_over_groups",
        "A trust ratio for each of two groups.",
        lambda: _trained_by(Lars, 0.1, parameter_groups=_first_and_rest),
    ),
    Family(
        "stable_adamw",
        "A subclass of AdamW that looks at whole parameters.",
        lambda: _trained_by(Stable, 0.01),
    ),
)
