"""The steps that loops are in: one, or more where one loop runs inside another or beside it."""

from dataclasses import dataclass
from typing import Any

import torch

from heterog.balance.dealing import Deal
from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """A batch that a loop has, and what it has done with it.

    Attributes:
        sampler: Sampler of the loop's loader.
        deal: How the batch is dealt.
        has_gradients: Whether it began with gradients enabled, as no validation does.
        trains: Whether a loss of it was weighed for a backward pass.
        is_timed: Whether no other loop has run inside this step.
        is_left: Whether another loop has trained for several steps since.
        outer_weights: Weights of this step's losses while another loop runs inside it.
    """

    sampler: ShareSampler
    deal: Deal
    has_gradients: bool
    trains: bool = False
    is_timed: bool = True
    is_left: bool = False
    outer_weights: tuple[Any, ...] | None = None


class OpenSteps:
    """Finds the step that a loss is of, for loops that validate inside a step or zip loaders."""

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
        """The step of a loss to train with: validation that began inside it is over."""
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
        """Open a step; it ends the one before of the same loop."""
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
        """Check that a loss to train with can be of one step only, as far as weights go.

        Raises:
            BalanceError: loops are in several steps, of which this rank has different parts.
        """
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
