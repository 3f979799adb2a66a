"""Optimizers of one's own that look at one element, at a parameter, or at all of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heterog.graph.op_graph import UpdateScope

LOOKS: dict[str, UpdateScope] = {
    "momentum": UpdateScope.ELEMENT,
    "second moment": UpdateScope.ELEMENT,
    "sign": UpdateScope.ELEMENT,
    "new memory": UpdateScope.ELEMENT,
    "own norm": UpdateScope.PARAMETER,
    "trust ratio": UpdateScope.PARAMETER,
    "centred": UpdateScope.PARAMETER,
    "rows": UpdateScope.PARAMETER,
    "no decay of vectors": UpdateScope.PARAMETER,
    "calls": UpdateScope.PARAMETER,
    "calls in a group": UpdateScope.ELEMENT,
    "group's norm": UpdateScope.MODEL,
    "norm of all": UpdateScope.MODEL,
    "clip of all": UpdateScope.MODEL,
    "estimated step": UpdateScope.MODEL,
    "largest": UpdateScope.MODEL,
}
"""What an ``Own`` optimizer can look at, and its scope if it looks at nothing else."""


def scope_of(looks: Sequence[str]) -> UpdateScope:
    """The widest scope of all that an optimizer looks at."""
    order = list(UpdateScope)
    return max((LOOKS[look] for look in looks), key=order.index, default=UpdateScope.ELEMENT)


class Own(torch.optim.Optimizer):
    """Gradients go through everything that it looks at, one after the other."""

    def __init__(self, params: Any, lr: float = 0.01, looks: Sequence[str] = ()) -> None:
        super().__init__(params, {"lr": lr})
        self.looks = tuple(looks)
        self.calls = 0
        self.estimate, self.product = 1e-3, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all parameters with a gradient."""
        assert closure is None
        self.calls += 1
        groups = [
            [value for value in group["params"] if value.grad is not None]
            for group in self.param_groups
        ]
        update = {value: value.grad.clone() for group in groups for value in group}
        for look in self.looks:
            self._look(look, groups, update)
        for group, values in zip(self.param_groups, groups, strict=True):
            group["calls"] = group.get("calls", 0) + bool(values)
            rate = group["lr"]
            if "calls" in self.looks:
                rate = rate / (1 + self.calls)
            if "calls in a group" in self.looks:
                rate = rate / max(group["calls"], 1) ** 0.5
            for value in values:
                if "new memory" in self.looks:
                    value.data = value.data - rate * update[value]
                else:
                    value.sub_(update[value], alpha=rate)

    def _look(self, look: str, groups: list[list[Tensor]], update: dict[Tensor, Tensor]) -> None:
        if look == "norm of all":
            self._scale(update, list(update), 1.0)
        elif look == "clip of all":
            total = torch.stack([each.norm() for each in update.values()]).norm()
            self._scale(update, list(update) if total > 1.0 else [], 1.0)
        elif look == "group's norm":
            for values in groups:
                self._scale(update, values, 0.5)
        elif look == "largest":
            most = max(float(each.abs().max()) for each in update.values())
            for each in update.values():
                each.div_(most + 1e-3)
        elif look == "estimated step":
            self._estimate(update)
        else:
            for value, each in update.items():
                each.copy_(self._of_one(look, value, each))

    def _scale(self, update: dict[Tensor, Tensor], values: list[Tensor], power: float) -> None:
        if values:
            total = torch.stack([update[value].norm() for value in values]).norm()
            for value in values:
                update[value].div_(total**power + 1e-6)

    def _estimate(self, update: dict[Tensor, Tensor]) -> None:
        """Step size from inner products over all parameters, as D-Adaptation and Prodigy do."""
        sums = 0.0
        for value, each in update.items():
            state = self.state[value]
            if "first" not in state:
                state["first"], state["sum"] = value.clone(), torch.zeros_like(value)
            self.product += self.estimate * float((each * (state["first"] - value)).sum())
            state["sum"].add_(each, alpha=self.estimate)
            sums += float(state["sum"].abs().sum())
        self.estimate = max(self.estimate, self.product / max(sums, 1e-12))
        for each in update.values():
            each.mul_(self.estimate)

    def _of_one(self, look: str, value: Tensor, each: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.state[value]
        if look == "momentum":
            state["momentum"] = state.get("momentum", torch.zeros_like(each)) * 0.9 + each
            return state["momentum"]
        if look == "second moment":
            state["square"] = state.get("square", torch.zeros_like(each)) * 0.9 + each.square()
            return each / (state["square"].sqrt() + 1e-8)
        norm: Tensor = torch.linalg.vector_norm(each) + 1e-6
        if look == "sign":
            return each.sign() + 0.1 * each
        if look == "own norm":
            return each / norm
        if look == "trust ratio":
            return each.mul(torch.linalg.vector_norm(value) / norm)
        if look == "centred" and each.dim() > 1:
            return each - each.mean()
        if look == "rows" and each.dim() > 1:
            return each / (each.square().mean(dim=-1, keepdim=True).sqrt() + 1e-6)
        if look == "no decay of vectors" and each.dim() > 1:
            return each + 0.1 * value
        return each


class AdamW(Own):
    """Has the name of one of torch's, and looks at whole parameters."""

    def __init__(self, params: Any, lr: float = 0.01, looks: Sequence[str] = ()) -> None:
        super().__init__(params, lr, ("own norm", *looks))


class Lookahead(torch.optim.AdamW):
    """AdamW that goes back half of the way after every third call."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr=lr)
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, and sometimes go back."""
        super().step(closure)
        self.calls += 1
        with torch.no_grad():
            for value, state in self.state.items():
                if "slow" not in state:
                    state["slow"] = value.clone()
                if self.calls % 3 == 0:
                    state["slow"].lerp_(value, 0.5)
                    value.copy_(state["slow"])
