"""Hooks of PyTorch's optimizers: where an update ends, and what it was made of.

Losses of unlike parts of a batch have to be weighed before an update is made of them.

An optimizer with a closure, such as LBFGS, decides by the closure's value how often to call it. If
that is a loss of the rank's own samples, ranks decide differently and then wait for each other for
ever. So values of all ranks are compared before the second call in a step has any consequence.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from heterog.balance.group import RankGroup
from heterog.balance.shares import BalanceError
from heterog.balance.weights import StepWeights

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def watch_updates(weights: StepWeights, group: RankGroup) -> None:
    """Tell weights where updates end, and check closures that weigh losses, while they exist.

    The hooks are for all optimizers of the process, because a loop does not tell which it has.
    """
    held = weakref.ref(weights)

    def before(optimizer: Optimizer, arguments: Any, options: Any) -> _Arguments | None:
        weights = held()
        return None if weights is None else _with_checks(arguments, options, weights, group)

    def after(optimizer: Optimizer, arguments: Any, options: Any) -> None:
        weights = held()
        if weights is not None:
            _check_weighed(optimizer, weights)
            weights.end_update()

    for handle in (
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ):
        weakref.finalize(weights, handle.remove)


def _check_weighed(optimizer: Optimizer, weights: StepWeights) -> None:
    """Check that an update of unlike parts of a batch is not one of losses that count alike.

    Raises:
        BalanceError: no loss has been weighed since the update before.
    """
    if weights.may_update:
        return
    stepped = {
        id(each)
        for group in optimizer.param_groups
        for each in group["params"]
        if each.grad is not None  # else the batch was left out
    }
    if stepped and (weights.parameters is None or stepped & weights.parameters):
        raise BalanceError(
            "an optimizer has stepped, and no loss was weighed since its last update: ranks have "
            "unlike parts of the batch, and their gradients would count alike. Call "
            "balancer.weigh(loss).backward() instead of loss.backward(); for an optimizer of "
            "another model, give Balancer the one that is trained. check_replicas=False does "
            "without this check."
        )


def _with_checks(
    arguments: tuple[Any, ...], options: dict[str, Any], weights: StepWeights, group: RankGroup
) -> _Arguments | None:
    """The arguments of a step, optimizer first, with a closure that is checked; if it has one."""
    if callable(options.get("closure")):
        checked = _checked(options["closure"], weights, group)
        return arguments, {**options, "closure": checked}
    if len(arguments) > 1 and callable(arguments[1]):
        checked = _checked(arguments[1], weights, group)
        return (arguments[0], checked, *arguments[2:]), options
    return None


def _checked(
    closure: Callable[..., Any], weights: StepWeights, group: RankGroup
) -> Callable[..., Any]:
    num_calls = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_before = weights.num_weighed
        value = closure(*arguments, **options)
        num_calls += 1
        # Every optimizer's first step has one call, and then there is nothing to decide by it.
        if num_calls == 2 and weights.num_weighed > num_before and value is not None:
            _check_alike(float(value), group)
        return value

    return call


def _check_alike(value: float, group: RankGroup) -> None:
    """Raise an error on all ranks if they have different values."""
    every = [each for (each,) in group.gather([value])]
    if any(each != every[0] and not (each != each and every[0] != every[0]) for each in every):
        raise BalanceError(
            f"the optimizer's closure returns {every[0]:.6g} on rank 0 and "
            f"{next(each for each in every if each != every[0]):.6g} on another rank, and the "
            "optimizer decides by it: ranks would go different ways. Return "
            "balancer.mean_loss() from the closure, the loss of the whole batch (in Lightning "
            "with automatic_optimization = False and a closure of your own)."
        )
