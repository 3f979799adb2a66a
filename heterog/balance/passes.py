"""Follows backward passes and updates of a model: those that the balancer knows nothing of.

A loop can forget to weigh one of its losses, to step an optimizer, or to give it the parameters
that are trained. Nothing fails then: ranks count alike although they have unlike parts of the
batch, or weights stay as they were. So hooks on a few parameters note which backward passes reach
them, those of weighed losses or others. At the end of a pass over the data, weights are compared
with those of before.
"""

import warnings
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from heterog.balance.shares import BalanceError
from heterog.balance.speeds import after_backward
from heterog.errors import HeterogWarning
from heterog.runtime.step.alike import Replicas

MOST_HOOKS = 16
"""Parameters of each wrapped model that have a hook: a call of one takes about a microsecond."""
LEAST_LOSSES, MOST_LOSSES = 8, 512
"""Weighed losses by which weights have moved at the end of a pass, and anywhere: few loops add up
gradients of more."""

_MARK = "heterog.weighed"
_MOST_NODES = 16
_UNWEIGHED = (
    "{}: ranks have unlike parts of the batch, and their gradients would count alike. Weigh every "
    "loss, and call backward() on what weigh() returns: balancer.weigh(loss).backward(). "
    "check_replicas=False does without this check."
)


class Passes:
    """Notes which backward passes reach parameters of a model, and whether its weights move.

    Attributes:
        is_weighed: Whether the backward pass that runs began with a weighed loss.
    """

    def __init__(self) -> None:
        self.is_weighed = False
        self._hooks: list[Any] = []
        self._followed: list[ref[nn.Parameter]] = []
        self._left: dict[int, int] = {}  # versions of gradients after a pass
        self._parts: list[tuple[nn.Module, set[int], Replicas]] = []
        self._now: dict[int, bool] = {}  # that the pass has reached, and whether without gradient
        self._weighed: set[int] = set()  # identities of parameters, since their last update
        self._others: set[int] = set()
        self._trained: set[int] = set()  # that a weighed pass has ever reached
        self._has_warned = self._has_told_of_change = False

    def watch(self, model: nn.Module) -> None:
        """Follow this model, whose weights are those from which training begins."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._parts, self._followed, self._left = [], [], [], {}
        self._weighed, self._others, self._trained = set(), set(), set()
        for part in wrapped_parts(model):
            own = [each for each in part.parameters() if each.requires_grad and not each.is_meta]
            chosen = own[:: max(1, -(-len(own) // MOST_HOOKS))]
            self._hooks += [
                each.register_hook(partial(_reached, ref(self), ref(each)))  # type: ignore[no-untyped-call]
                for each in chosen
            ]
            self._followed += map(ref, chosen)
            held = [_held(each) for each in own]
            if any(each.numel() for each in held):
                self._parts.append((part, set(map(id, chosen)), Replicas(held)))

    def follow(self, loss: Tensor) -> None:
        """Take the backward pass of this loss for a weighed one."""
        node: Any = loss.grad_fn
        if node is not None:
            node.metadata[_MARK] = True
        loss.register_hook(partial(_begun, ref(self)))  # type: ignore[no-untyped-call]

    def reached(self, parameter: nn.Parameter) -> None:
        """Note that the pass that runs computes the gradient of a parameter."""
        if not self._now:  # whether a loss in it was weighed is known at its end
            after_backward(partial(_sort, ref(self)))
        self._now[id(parameter)] = parameter.grad is None

    def sort(self) -> None:
        """Note the gradients now, and whether a weighed pass has reached them."""
        self._left = {id(each): each._version for each in self._gradients()}
        now, self._now = self._now, {}
        if not self.is_weighed:
            self._others |= set(now)
            return
        self._weighed |= set(now)
        self._trained |= set(now)
        # What another pass had left there was cleared since.
        self._others -= {each for each, is_new in now.items() if is_new}

    def warn_if_changed(self) -> None:
        """Warn once if something has changed gradients that are about to be averaged."""
        known = [(each._version, self._left.get(id(each))) for each in self._gradients()]
        is_changed = any(then is not None and now != then for now, then in known)
        if self._has_told_of_change or not is_changed:
            return
        self._has_told_of_change = True
        warnings.warn(
            "gradients were changed between the backward pass and average_gradients(): clipping "
            "and GradScaler.unscale_ then see a rank's own gradients, where one process has those "
            "of the whole batch. Average first (a factor alike on all ranks does no harm).",
            HeterogWarning,
            stacklevel=4,
        )

    def _gradients(self) -> Iterator[Tensor]:
        for held in self._followed:
            parameter = held()
            if parameter is not None and parameter.grad is not None:
                yield parameter.grad

    def check_update(self, stepped: set[int], *, is_unlike: bool) -> None:
        """Check that weighed losses gave the gradients of an update.

        Warns once if only some of the losses were weighed.

        Args:
            stepped: Identities of the parameters with gradients.
            is_unlike: Whether ranks have unlike parts of the batch, so that weights matter.

        Raises:
            BalanceError: none of the losses was weighed.
        """
        weighed, others = self._weighed & stepped, self._others & stepped
        self._weighed -= stepped
        self._others -= stepped
        if not others or not is_unlike:
            return
        if not weighed:
            told = "an optimizer has stepped with gradients of a loss that was not weighed"
            raise BalanceError(_UNWEIGHED.format(told))
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "two backward passes gave the gradients of an update, and the loss of one was not "
                "weighed: it counts alike on all ranks, which have unlike parts of the batch. "
                "Weigh it, too, unless it is of weights alone (a penalty).",
                HeterogWarning,
                stacklevel=4,
            )

    def end_step(self, num_losses: int, *, is_end: bool) -> None:
        """Warn once of a model whose weights are still what they were when training began.

        Args:
            num_losses: Number of losses that were weighed for a backward pass so far.
            is_end: Whether a pass over the data ends, with which loops update.

        Raises:
            BalanceError: weights have moved, and no loss was ever weighed.
        """
        if not num_losses and any(any(replicas.ways()) for *_, replicas in self._parts):
            raise BalanceError(_UNWEIGHED.format("weights have moved, and no loss was weighed"))
        if num_losses < (LEAST_LOSSES if is_end else MOST_LOSSES):
            return
        parts, self._parts = self._parts, []  # looked at once: later they have moved
        for part, chosen, replicas in parts:
            is_trained = len(parts) == 1 or bool(chosen & self._trained)
            if not is_trained or any(replicas.ways()):
                continue
            inner = part.module if isinstance(part, DistributedDataParallel) else part
            warnings.warn(
                f"no weight of {type(inner).__name__} has changed in {num_losses} weighed losses. "
                "Call optimizer.step() after the backward pass, while the gradients are there "
                "(zero_grad() after that, or before the backward pass), and make the optimizer of "
                "this model's parameters: those of a copy, or of the time before fully_shard, are "
                "others.",
                HeterogWarning,
                stacklevel=4,
            )


def check_not_weighed(loss: Tensor) -> None:
    """Check that a loss has not been weighed before.

    Raises:
        BalanceError: one of the last nodes of its graph is the result of ``weigh``.
    """
    waiting: deque[Any] = deque([loss.grad_fn])
    for _ in range(_MOST_NODES):
        node = waiting.popleft() if waiting else None
        if node is None:
            continue
        if _MARK in node.metadata:
            raise BalanceError(
                "the loss has been weighed already, or is a sum with one that has: it would count "
                "by this rank's samples twice. Weigh each loss once, in the step of its batch, "
                "and add the results."
            )
        waiting.extend(each for each, _ in node.next_functions)


def wrapped_parts(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that are wrapped for themselves, or the whole model."""
    found = list(_outermost(model))
    return found or [model]


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, DistributedDataParallel | FSDPModule | FullyShardedDataParallel):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def _held(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a parameter."""
    data = parameter.data
    return data.to_local() if isinstance(data, DTensor) else data


@unserializable_hook  # type: ignore[untyped-decorator]
def _reached(passes: "ref[Passes]", parameter: "ref[nn.Parameter]", _: Tensor) -> None:
    known, own = passes(), parameter()
    # A pass that is differentiated itself gives a loss (a gradient penalty), no update.
    if known is not None and own is not None and not torch.is_grad_enabled():
        known.reached(own)


def _begun(passes: "ref[Passes]", _: Tensor) -> None:
    known = passes()
    if known is not None:
        known.is_weighed = True
        after_backward(partial(_ended, passes))


def _sort(passes: "ref[Passes]") -> None:
    known = passes()
    if known is not None:
        known.sort()


def _ended(passes: "ref[Passes]") -> None:
    known = passes()
    if known is not None:
        known.sort()
        known.is_weighed = False
