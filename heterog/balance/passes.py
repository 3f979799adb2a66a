"""Follows backward passes and updates of a model: those that the balancer knows nothing of.

A loop can forget to weigh one of its losses, to step an optimizer, or to give it the parameters
that are trained. Nothing fails then: ranks count alike although they have unlike parts of the
batch, or weights stay as they were. So hooks on a few parameters note which backward passes add to
their gradients, those of weighed losses or others. What is found is warned of, not refused: a loss
of weights alone needs no weight, and a loop may have its own ways to weigh or to update.
"""

import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from heterog.balance.shares import BalanceError
from heterog.balance.speeds import after_backward
from heterog.errors import HeterogWarning
from heterog.runtime.step.alike import Replicas, compared_after

MOST_HOOKS = 16
"""Parameters of each wrapped model that have a hook: a call of one takes about a microsecond."""
LEAST_LOSSES, LEAST_PASSES = 8, 2
"""Weighed losses, and passes over the data, by which a model has been updated: few loops add up
gradients of more."""

_MARK = "heterog.weighed"
_MOST_NODES = 16
_EVERY: "WeakSet[Passes]" = WeakSet()
"""Those of all balancers: a loss that one of them has weighed is weighed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A module that is wrapped for itself, until it is updated.

    Attributes:
        module: The module.
        own: Identities of its parameters that are trained.
        hooked: Those that have a hook; none where all are sharded.
        replicas: Its weights, and those from which training began.
    """

    module: nn.Module
    own: frozenset[int]
    hooked: frozenset[int]
    replicas: Replicas


class Passes:
    """Notes which backward passes reach parameters of a model, and whether it is updated.

    Attributes:
        is_weighed: Whether the backward pass that runs began with a weighed loss.
    """

    def __init__(self) -> None:
        self.is_weighed = False
        self._model: nn.Module | None = None  # that is to be followed from the next batch on
        self._hooks: list[Any] = []
        self._hooked: dict[int, nn.Parameter] = {}
        self._parts: list[_Part] = []  # that no optimizer has updated
        self._is_unlike = False
        self._now: set[int] = set()  # identities of parameters that the pass has reached
        self._others: set[int] = set()  # that have gradients of losses that were not weighed
        self._trained: set[int] = set()  # that a weighed pass has ever reached
        self._num_steps = self._num_passes = 0
        self._has_warned = False
        _EVERY.add(self)

    def watch(self, model: nn.Module) -> None:
        """Follow this model from the next batch on, when it is loaded and in its place."""
        self._model = model

    def begin_batch(self, *, is_unlike: bool) -> None:
        """Begin a step.

        Args:
            is_unlike: Whether ranks have unlike parts of the batch, so that weights matter.
        """
        self._is_unlike = is_unlike
        model, self._model = self._model, None
        if model is not None:
            self._begin(model)

    def begin_step(self) -> None:
        """Forget a backward pass that has ended in an error."""
        self.is_weighed, self._now = False, set()

    def _begin(self, model: nn.Module) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked, self._parts = [], {}, []
        self._others, self._trained = set(), set()
        self._num_steps = self._num_passes = 0
        for part in wrapped_parts(model):
            own = [
                each
                for each in part.parameters()
                if each.requires_grad and not each.is_meta and not is_lazy(each)
            ]
            whole = [each for each in own if each.is_leaf and not isinstance(each, DTensor)]
            hooked = {id(each): each for each in whole[:: max(1, -(-len(whole) // MOST_HOOKS))]}
            self._hooks += [
                each.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(_reached, ref(self))
                )
                for each in hooked.values()
            ]
            self._hooked |= hooked
            held = [_held(each) for each in own]
            if any(each.numel() for each in held):
                self._parts.append(
                    _Part(part, frozenset(map(id, own)), frozenset(hooked), Replicas(held))
                )

    def follow(self, loss: Tensor) -> None:
        """Take the backward pass of this loss for a weighed one."""
        node: Any = loss.grad_fn
        if node is not None:
            node.metadata[_MARK] = True
        loss.register_hook(_begun)  # type: ignore[no-untyped-call]

    def reached(self, parameter: Tensor) -> None:
        """Note that the pass that runs has added to the gradient of a parameter."""
        if not self._now:  # whether a loss in it was weighed is known at its end
            after_backward(partial(_sort, ref(self)))
        self._now.add(id(parameter))

    def sort(self) -> None:
        """Note whether it was a weighed pass that has reached parameters."""
        now, self._now = self._now, set()
        if self.is_weighed:
            self._trained |= now
        elif self._is_unlike:
            self._others |= now

    def forget_cleared(self) -> None:
        """Forget passes whose gradients the loop has cleared since."""
        if self._others:
            self._others = {each for each in self._others if _has_gradient(self._hooked[each])}

    def check_update(self, optimizer: Optimizer) -> None:
        """Note an update, and warn once if a loss that gave it gradients was not weighed."""
        if self._parts:
            self._parts = [each for each in self._parts if not _updates(optimizer, each.own)]
        if not self._others:
            return
        stepped = self._others & {
            id(each) for group in optimizer.param_groups for each in group["params"]
        }
        if self._is_unlike and any(_has_gradient(self._hooked[each]) for each in stepped):
            self._warn("an optimizer has stepped with gradients of a loss that was not weighed")
        self._others -= stepped

    def _warn(self, told: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{told}: it counts alike on all ranks, which have unlike parts of the batch. "
                "Weigh every loss that depends on samples, and call backward() on what weigh() "
                "returns: balancer.weigh(loss).backward(). A loss of weights alone (a penalty) "
                "needs no weight.",
                HeterogWarning,
                stacklevel=6,
            )

    def end_step(self, num_losses: int, *, is_end: bool) -> None:
        """Warn once of a model that was never updated, or only by losses that were not weighed.

        Args:
            num_losses: Number of losses that were weighed for a backward pass so far.
            is_end: Whether a pass over the data ends.
        """
        if not self._parts:
            return
        self._num_steps += 1
        if not num_losses:
            looks = bool(self._others) and compared_after(self._num_steps)
            # A weight that is infinite or NaN has moved by NaN, which is not more than 0.
            if looks and any(way > 0 for part in self._parts for way in part.replicas.ways()):
                self._warn("weights have moved by a loss that was not weighed")
            return
        self._num_passes += is_end
        if self._num_passes < LEAST_PASSES or num_losses < LEAST_LOSSES:
            return
        parts, self._parts = self._parts, []  # looked at once: later they have moved
        for part in parts:
            is_trained = not part.hooked or bool(part.hooked & self._trained)
            if not is_trained or any(way != 0 for way in part.replicas.ways()):
                continue
            whole = part.module
            inner = whole.module if isinstance(whole, DistributedDataParallel) else whole
            warnings.warn(
                f"no weight of {type(inner).__name__} has changed in {LEAST_PASSES} passes over "
                f"the data ({num_losses} weighed losses), and no optimizer has stepped with its "
                "gradients. Unless you accumulate them for longer, or warm up without updates: "
                "call optimizer.step() after the backward pass, while the gradients are there "
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
    """What this rank holds of a parameter: itself, so that it may get other data."""
    data = parameter.data
    return data.to_local() if isinstance(data, DTensor) else parameter


def _has_gradient(parameter: nn.Parameter) -> bool:
    """Whether a parameter has a gradient that is not all zeros."""
    gradient = parameter.grad
    if gradient is None:
        return False
    return bool((gradient._values() if gradient.is_sparse else gradient).any())


def _updates(optimizer: Optimizer, parameters: frozenset[int]) -> bool:
    """Whether a step of an optimizer has used a gradient of some of the parameters."""
    return any(
        each.grad is not None and id(each) in parameters
        for group in optimizer.param_groups
        for each in group["params"]
    )


def _reached(passes: "ref[Passes]", parameter: Tensor) -> None:
    known = passes()
    if known is not None:
        known.reached(parameter)


def _sort(passes: "ref[Passes]") -> None:
    known = passes()
    if known is not None:
        known.sort()


def _begun(_: Tensor) -> None:
    for known in list(_EVERY):
        known.forget_cleared()
        known.is_weighed = True
    after_backward(_ended)


def _ended() -> None:
    for known in list(_EVERY):
        known.sort()
        known.is_weighed = False
