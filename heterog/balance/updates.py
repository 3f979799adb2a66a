"""Follows updates of optimizers and steps of loops.

Hooks of PyTorch's optimizers check that losses of unlike parts of a batch were weighed before an
update uses their gradients. An optimizer with a closure, such as LBFGS, decides by the closure's
value how often to call it. If the value is a loss of the rank's own samples, ranks decide
differently and then wait for each other for ever. So values of all ranks are compared before the
second call in a step has any consequence.

``OpenSteps`` has the current step of each loop: several if loops are nested or run side by side.
"""

import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from heterog.balance.group import RankGroup
from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError, Deal
from heterog.balance.weights import StepWeights
from heterog.errors import HeterogWarning

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def watch_updates(weights: StepWeights, group: RankGroup) -> None:
    """Tell ``weights`` where updates end, and check closures that weigh losses.

    The hooks exist as long as ``weights``. They are for all optimizers of the process, because a
    balancer does not know the loop's own.
    """
    held = weakref.ref(weights)

    def before(optimizer: Optimizer, arguments: Any, options: Any) -> _Arguments | None:
        weights = held()
        if weights is None:
            return None
        return with_closure(arguments, options, partial(_checked, weights=weights, group=group))

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
    """Check that losses were weighed before an update, if ranks have unlike parts of the batch.

    Raises:
        BalanceError: no loss has been weighed since the update before.
    """
    if not weights.checks_updates:
        return
    weights.passes.check_update(optimizer)
    if weights.may_update:
        return
    stepped = {
        id(each)
        for group in optimizer.param_groups
        for each in group["params"]
        if each.grad is not None  # without gradients the loop has left the batch out
    }
    if stepped and (weights.parameters is None or stepped & weights.parameters):
        raise BalanceError(
            "an optimizer has stepped, and no loss was weighed since its last update: ranks have "
            "unlike parts of the batch, and their gradients would count alike. Call "
            "balancer.weigh(loss).backward() instead of loss.backward(); for an optimizer of "
            "another model, give Balancer the one that is trained. check_replicas=False does "
            "without this check."
        )


def with_closure(
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    change: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> _Arguments | None:
    """The arguments of a step, optimizer first, with its closure changed; ``None`` without one."""
    if callable(options.get("closure")):
        return arguments, {**options, "closure": change(options["closure"])}
    if len(arguments) > 1 and callable(arguments[1]):
        return (arguments[0], change(arguments[1]), *arguments[2:]), options
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
        # With one call nothing depends on its value, and every optimizer's first step has one.
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


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """The current step of a loop: its batch and the state of its training.

    Attributes:
        sampler: Sampler of the loop's loader.
        deal: How the batch is dealt.
        has_gradients: Whether it began with gradients enabled, as no validation does.
        trains: Whether a loss of it was weighed for a backward pass.
        is_timed: Whether no other loop has run inside this step.
        is_left: Whether another loop has trained for several steps since.
        outer_weights: Weights of this step's losses while another loop runs inside it.
        thread: Identifier of the thread that the loop runs in.
    """

    sampler: ShareSampler
    deal: Deal
    has_gradients: bool
    trains: bool = False
    is_timed: bool = True
    is_left: bool = False
    outer_weights: tuple[Any, ...] | None = None
    thread: int = field(default_factory=threading.get_ident)


class OpenSteps:
    """Finds the step of a loss, for loops that validate inside a step or zip loaders."""

    def __init__(self) -> None:
        self._steps: list[OpenStep] = []
        self._has_begun = False

    @property
    def current(self) -> OpenStep:
        """The step begun last.

        Raises:
            BalanceError: no loop is in a step.
        """
        if not self._steps:
            raise BalanceError(
                "the pass is over: a loss was weighed after the last step of its loader. A loop "
                "that takes batches ahead weighs each with the wrong step; take a batch when the "
                "one before is done."
                if self._has_begun
                else "no batch yet: take batches from balancer.loader(dataset), whose steps it "
                "follows. Loaders that a framework made of it are not followed."
            )
        return self._steps[-1]

    @property
    def is_inside(self) -> bool:
        """Whether a loop is in a step."""
        return bool(self._steps)

    def back_to_training(self) -> OpenStep:
        """The step of a training loss; a validation that began inside this step is over."""
        if any(step.has_gradients for step in self._steps):
            while not self._steps[-1].has_gradients:
                self._steps.pop()
        return self.current

    def of(self, sampler: ShareSampler) -> OpenStep | None:
        """The step that the loop of a sampler is in."""
        return next((step for step in self._steps if step.sampler is sampler), None)

    def begin_pass(self) -> None:
        """Note that a loop begins, inside the open steps if there are any."""
        for step in self._steps:
            step.is_timed = False

    def begin(self, sampler: ShareSampler, deal: Deal) -> None:
        """Open a step; the previous step of the same loop ends."""
        before = self.of(sampler)
        if before is not None:
            index = self._steps.index(before)
            for step in self._steps[:index]:
                step.is_left |= before.trains
            del self._steps[index]
        self._steps.append(
            OpenStep(sampler=sampler, deal=deal, has_gradients=torch.is_grad_enabled())
        )
        self._has_begun = True

    def end_pass(self, sampler: ShareSampler) -> None:
        """Close the step that the loop of a sampler is in."""
        self._steps = [step for step in self._steps if step.sampler is not sampler]

    def check_alone(self, rank: int) -> None:
        """Check that the weight of a training loss does not depend on the step that it is of.

        Raises:
            BalanceError: loops are in several steps, and this rank's part of them differs; or the
                loop takes its batches in another thread.
        """
        if self.current.thread != threading.get_ident():
            raise BalanceError(
                "the loader's batches are taken in another thread than the one that weighs their "
                "losses, so a loss may be weighed with the step of a later batch. Loop over the "
                "loader itself; workers load ahead: balancer.loader(dataset, num_workers=2)."
            )
        parts = {
            (each.deal.samples[rank], sum(each.deal.samples))
            for each in self._steps
            if each is self.current or (each.has_gradients and not each.is_left)
        }
        (own, total), *others = parts
        if any(own * each[1] != each[0] * total for each in others):
            told = " and ".join(f"{part[0]} of {part[1]} samples" for part in sorted(parts))
            raise BalanceError(
                f"this rank has {told} in steps of several loaders at once, so the weight of a "
                "loss is unknown. Loop over the loaders one after another, or give all of them "
                "drop_last=True; validate under torch.no_grad()."
            )


class LeftOut:
    """Warns once of a batch that this rank has left out in the middle of a pass.

    Steps of loops that take several batches for an update, begin later in an epoch, or validate
    are none of these.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_trained = 0  # steps in a row
        self._deal: Deal | None = None  # of the step left out
        self._has_warned = False

    def end_step(self, step: OpenStep) -> None:
        """Note whether a step of the training loop has trained."""
        if step.trains:
            self._num_trained += 1
            return
        if step.has_gradients and self._num_trained > 1:
            self._deal = step.deal
        self._num_trained = 0

    def end_pass(self) -> None:
        """Note that a pass ends."""
        self._num_trained, self._deal = 0, None

    def train(self) -> None:
        """Warn if a step was left out before this one, which trains."""
        if self._deal is None or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"rank {self._rank} weighed no loss in step {self._deal.step} of epoch "
            f"{self._deal.epoch}: other ranks that did wait for it, or take its next gradients "
            "for those of this step. Leave a batch out on all ranks alike, by "
            "balancer.mean_loss(); a rank that skips its samples alone weighs a loss of 0 times "
            "theirs.",
            HeterogWarning,
            stacklevel=4,
        )
