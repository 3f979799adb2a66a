"""Options of an optimizer's groups, so that all its calls in one step count as one.

Ranks may step a few parameters, or slices of them, in calls of their own, and optimizers may count
their calls in a group. So every call of a step begins with what the first one began with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Options = list[dict[str, Any]]
"""Options of each of the optimizer's parameter groups, without its parameters."""


@dataclass(slots=True)
class StepOptions:
    """Options of one step.

    Attributes:
        called: Those of when the step was called; users may have changed them since.
        begun: Those with which its first call began; ``None`` before it.
    """

    called: Options
    begun: Options | None = None


class CountedOptions:
    """Gives an optimizer the options of the step that it is called for.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._counted: set[str] = set()  # which the optimizer changes itself

    def now(self) -> Options:
        """The options as they are now."""
        return [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    @contextmanager
    def of(self, step: StepOptions) -> Iterator[None]:
        """Give the optimizer a step's options while it is called in the body."""
        if step.begun is None:
            with self._first_call(step):
                yield
            return
        groups = self._optimizer.param_groups
        own = [dict(group) for group in groups]
        for group, begun in zip(groups, step.begun, strict=True):
            _put(group, {key: _kept(value) for key, value in begun.items()})
        try:
            yield
            for group, begun, mine in zip(groups, step.begun, own, strict=True):
                for key in _changed(begun, group):
                    if key not in _changed(begun, mine):  # no call has counted in it yet
                        mine[key] = group[key]
        finally:
            for group, mine in zip(groups, own, strict=True):
                _put(group, mine)

    @contextmanager
    def _first_call(self, step: StepOptions) -> Iterator[None]:
        groups = self._optimizer.param_groups
        users = [
            _changed(group, called) - self._counted
            for group, called in zip(groups, step.called, strict=True)
        ]
        own = [
            {key: group[key] for key in each} for group, each in zip(groups, users, strict=True)
        ]
        for group, called, each in zip(groups, step.called, users, strict=True):
            group.update({key: called[key] for key in each})
        step.begun = self.now()
        try:
            yield
            for group, begun in zip(groups, step.begun, strict=True):
                self._counted |= _changed(begun, group)
        finally:
            for group, mine in zip(groups, own, strict=True):
                group.update({key: mine[key] for key in mine.keys() - self._counted})


def _changed(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """Options that are others now, or new."""
    return {
        key
        for key, value in now.items()
        if key != "params" and (key not in before or _differ(before[key], value))
    }


def _put(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Make a group have some options and no others, but for its parameters."""
    options = {**options, "params": group["params"]}
    group.clear()
    group.update(options)


def _kept(value: Any) -> Any:
    """An option that stays as it is: a tensor may be changed in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is not other and not torch.equal(one, other)
    return one is not other and bool(one != other)
