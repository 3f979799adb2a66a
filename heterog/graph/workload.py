"""A workload: what is trained, that is model, example batch, loss and optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from heterog.errors import CaptureError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, ...] | dict[str, Tensor]"
Loss: TypeAlias = "Callable[[Any, Any], Tensor]"
Groups: TypeAlias = "Callable[[nn.Module], Iterable[Any]]"


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, one example batch, a loss and an optimizer class: one training step.

    The step is ``loss(model(*inputs), target)`` if the batch is ``(*inputs, target)``, or
    ``loss(model(**inputs), labels)`` if the batch is a dict with the key ``"labels"``. With
    ``loss=None`` the model itself returns the loss (a scalar, an object with ``.loss``, or a dict
    with ``"loss"``) when it is called with the whole batch.

    Attributes:
        model: A module, or a function without arguments that makes one. Prefer the function:
            capture then never allocates a weight.
        example_batch: A tuple or dict of tensors, or a function without arguments that makes it.
            A plan depends on shapes and dtypes only; ``heterog run`` trains on the values.
        loss: Function ``loss(output, target) -> scalar``; a mean over the batch or a sum.
        optimizer: The ``torch.optim`` class that updates the parameters, or a ``partial`` of it
            whose keyword arguments are options.
        optimizer_options: Keyword arguments of the optimizer.
        name: Name of the workload in tables and plans.
        source: Where the workload comes from, so that ranks can make it again: the name of a
            built-in model or ``path/to/file.py:function``.
        batch_dims: Batch dimension of tensors in which it is not the first one, by index (or key);
            ``None`` for a tensor that has no batch dimension. By default every tensor whose first
            dimension has the batch size is split there.
        master_dtype: Type of the master copies that the optimizer updates. The model gets them
            rounded after each step. By default the optimizer updates the parameters themselves.
        reduce_dtype: Type in which gradients are added up over devices and micro-batches; by
            default that of their parameters.
        state_dtype: Type in which the optimizer keeps its state between steps: the state is
            widened for a step and rounded after it. By default the type of the master copies or
            parameters that the optimizer updates.
        parameter_groups: Function that takes the model and returns the ``params`` of a
            ``torch.optim`` class: ``[{"params": [...], "weight_decay": 0.0}, ...]``. Options that
            a group does not state are those of ``optimizer_options``. As in torch, parameters that
            are in no group are not trained. By default all parameters are one group.
    """

    model: nn.Module | Callable[[], nn.Module]
    example_batch: Batch | Callable[[], Batch]
    loss: Loss | None
    optimizer: type[torch.optim.Optimizer]
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    name: str = "workload"
    source: str = ""
    batch_dims: Mapping[int | str, int | None] = field(default_factory=dict)
    master_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None
    parameter_groups: Groups | None = None

    def __post_init__(self) -> None:
        for what, kind in _KINDS.items():
            if not isinstance(given := getattr(self, what), kind):
                raise CaptureError(
                    f"workload '{self.name}': {what} is of type {type(given).__name__}; give a "
                    f"{'text' if kind is str else 'dict'}."
                )
        optimizer: Any = self.optimizer
        if isinstance(optimizer, partial) and not optimizer.args:
            options = {**optimizer.keywords, **self.optimizer_options}
            object.__setattr__(self, "optimizer", optimizer.func)
            object.__setattr__(self, "optimizer_options", options)
        elif not hasattr(optimizer, "__name__"):
            raise CaptureError(
                f"workload '{self.name}': the optimizer is of type {type(optimizer).__name__}; "
                "give a class, torch.optim.AdamW say, and its options as optimizer_options."
            )
        if self.parameter_groups is not None and not callable(self.parameter_groups):
            raise CaptureError(
                f"workload '{self.name}': parameter_groups is a "
                f"{type(self.parameter_groups).__name__}; give a function that is given the model "
                "and returns what the optimizer takes, a list of dicts with 'params'."
            )
        if self.loss is not None and not _takes_two(self.loss):
            raise CaptureError(
                f"workload '{self.name}': the loss is called as loss(output, target), and "
                f"{getattr(self.loss, '__name__', repr(self.loss))} cannot be; with loss=None the "
                "model returns the loss itself."
            )
        for what in ("master_dtype", "reduce_dtype", "state_dtype"):
            dtype = getattr(self, what)
            if dtype is not None and getattr(dtype, "is_floating_point", False) is not True:
                raise CaptureError(
                    f"workload '{self.name}': {what} is {dtype!r}; give a floating point dtype of "
                    "torch, torch.float32 say."
                )

    def make_model(self) -> nn.Module:
        """The module itself, made now if ``model`` is a function.

        If ``torch.compile`` has wrapped it, this is the module inside, whose ops a plan runs.
        """
        from torch import nn

        model = self.model if isinstance(self.model, nn.Module) else self.model()
        model = getattr(model, "_orig_mod", model)
        if not isinstance(model, nn.Module):
            raise CaptureError(
                f"workload '{self.name}': the model function returned {type(model).__name__}, "
                "not a torch.nn.Module."
            )
        return model

    def make_batch(self) -> Batch:
        """The example batch, made now if ``example_batch`` is a function."""
        batch: Any = self.example_batch() if callable(self.example_batch) else self.example_batch
        if not isinstance(batch, tuple | list | dict) or not batch:
            raise CaptureError(
                f"workload '{self.name}': the example batch must be a non-empty tuple or dict of "
                f"tensors, got {type(batch).__name__}."
            )
        leaves = [leaf for _, _, leaf in named_leaves(batch)]
        if leaves and all(leaf.shape[:1] == (0,) for leaf in leaves):
            raise CaptureError(f"workload '{self.name}': the example batch has no samples.")
        return tuple(batch) if isinstance(batch, list) else batch

    def step_loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """The loss of one forward pass, as the class docstring defines it."""
        if self.loss is None:
            output = model(**batch) if isinstance(batch, dict) else model(*batch)
            if isinstance(output, Mapping) and "loss" in output:
                output = output["loss"]
            loss: Tensor = getattr(output, "loss", output)
            return loss
        if isinstance(batch, dict):
            inputs = {key: value for key, value in batch.items() if key != "labels"}
            if len(inputs) == len(batch):
                raise CaptureError(
                    f"workload '{self.name}': a dict batch needs the key 'labels' for the loss; "
                    f"it has {sorted(batch)}."
                )
            return self.loss(model(**inputs), batch["labels"])
        if len(batch) < 2:
            raise CaptureError(
                f"workload '{self.name}': a tuple batch is (*inputs, target); it has one element."
            )
        return self.loss(model(*batch[:-1]), batch[-1])


_KINDS = {"name": str, "source": str, "optimizer_options": Mapping, "batch_dims": Mapping}


def _takes_two(function: Any) -> bool:
    """Whether something can be called with two arguments, as far as its signature tells.

    A class such as nn.CrossEntropyLoss is refused: calling it makes a loss and computes none.
    """
    if not callable(function) or isinstance(function, type):
        return False
    try:
        with suppress(ValueError):  # functions of other languages may have no signature
            inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def named_leaves(batch: Any) -> list[tuple[int | str, str, Tensor]]:
    """Position or key, name and tensor, for every tensor of a batch; names come from the keys."""
    import torch
    from torch.utils import _pytree as pytree

    return [
        (key, f"batch.{key}.{position}" if position else f"batch.{key}", leaf)
        for key, item in (batch.items() if isinstance(batch, dict) else enumerate(batch))
        for position, leaf in enumerate(pytree.tree_leaves(item))
        if isinstance(leaf, torch.Tensor)
    ]


_PLAIN = (bool, int, float, complex, str, bytes, Enum, type(None))


def plain_entries(batch: Any) -> dict[str, Any]:
    """Numbers, strings and the like in a batch, which are constants of its step, by path."""
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves_with_path(batch, is_leaf=lambda value: value is None)
    return {pytree.keystr(path): each for path, each in leaves if isinstance(each, _PLAIN)}
