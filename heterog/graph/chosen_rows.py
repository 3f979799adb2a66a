"""Rows that a mask chooses (``x[mask]``), kept at their places while a step is captured.

How many rows a mask chooses is a value, and a plan needs static shapes. Most code computes
something for each chosen row and then a sum or mean: ``F.mse_loss(out[mask], target[mask])``. A
captured step computes the same for all rows, with ones (zeros for whole numbers) in those that the
mask leaves out, and adds up the chosen ones. The gradient of every other row is zero, not NaN: no
function here has an infinite derivative at what it gets for them.

Anything else (``sort``, ``cat``, ``len``) asks for the number of rows, which torch then refuses.
"""

import math
from collections.abc import Callable
from functools import partial, partialmethod
from types import EllipsisType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from heterog.graph.value_checks import check_all

_ELEMENTWISE = frozenset(
    "add radd sub rsub mul rmul truediv div true_divide rtruediv rdiv pow rpow neg abs exp log "
    "log1p sqrt rsqrt square sigmoid logsigmoid softplus tanh relu gelu silu clamp minimum "
    "maximum where eq ne lt le gt ge and or xor invert logical_and logical_or logical_not "
    "isfinite isnan float double half bfloat16 long int bool to type_as detach".split()
)
"""Functions of one element of each argument, without the underscores around operators."""
_STEEP = frozenset(
    "truediv div true_divide rtruediv rdiv pow rpow exp log log1p sqrt rsqrt norm normalize "
    "cosine_similarity".split()
)
"""Functions that may be infinite, or have infinite derivatives, at rows that are not chosen."""
_OF_DIMS = {
    **dict.fromkeys("sum mean softmax log_softmax logsumexp argmax".split(), (1, None)),
    **{"gather": (1, None), "norm": (2, None), "normalize": (2, 1), "cosine_similarity": (2, 1)},
}
"""Functions along dimensions: the position of that argument, and its default."""
_SUMS = frozenset("sum mean".split())
_LOSSES = frozenset(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits".split()
)
_WEIGHTS = dict.fromkeys("mse_loss l1_loss huber_loss".split(), "weight")
"""Losses whose mean is divided by the sum of their weights."""
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs eq ne lt le gt ge and or xor "
    "invert"
).split()


class ChosenRows:
    """What ``source[mask]`` would be: all rows, of which a mask chooses some.

    Attributes:
        rows: ``[n, ...]``, all rows.
        mask: ``[n]``, which of them are chosen.
    """

    def __init__(self, rows: Tensor, mask: Tensor, given: tuple[Tensor, int]) -> None:
        self.rows = rows
        self.mask = mask
        self._given = given  # the mask as the step has it, and how often it had been written to

    @classmethod
    def of(cls, source: Tensor, mask: Tensor) -> "ChosenRows":
        """Choose rows by a mask whose shape is that of the first dimensions."""
        rows = source.flatten(0, mask.dim() - 1)
        made = cls(rows, mask.flatten().clone(), (mask, mask._version))
        return made._with(made._filled(int(rows.is_floating_point())))

    def in_place_of(self, target: Tensor, mask: Tensor) -> Tensor:
        """The target after these rows are written to where a mask is true."""
        self._check_same(mask)
        lacking = target.dim() - mask.dim() + 1 - self.rows.dim()
        if lacking < 0:
            self.refuse()
        rows = self.rows.reshape(len(self.rows), *[1] * lacking, *self.rows.shape[1:])
        rows = rows.expand(-1, *target.shape[mask.dim() :]).reshape(target.shape)
        chosen = mask.reshape(*mask.shape, *[1] * (target.dim() - mask.dim()))
        return torch.where(chosen, rows, target)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute a function for all rows, or a sum over the chosen ones."""
        given = args, dict(kwargs or {})
        first = next(each for each in pytree.tree_leaves(given) if isinstance(each, cls))
        if first.rows.requires_grad and not torch.is_grad_enabled():
            first.refuse()  # an autograd.Function, whose backward pass would not be called
        said = getattr(func, "__name__", "")
        name, is_in_place = said.strip("_"), said.endswith("_") and not said.endswith("__")
        if is_in_place and name in _STEEP:
            first.refuse()  # it would change a copy
        if name in _ELEMENTWISE:
            return first._of_rows(func, given, name in _STEEP)
        if args[:1] != (first,):
            first.refuse()
        if name in _LOSSES:
            return first._loss(func, name, *given)
        if name == "linear" and first.rows.dim() > 1:
            return first._with(func(first.rows, *args[1:], **given[1]))
        place, default = _OF_DIMS.get(name, (len(args), None))
        dims = args[place] if len(args) > place else given[1].get("dim", default)
        is_sum = name in _SUMS and len(args) < 3 and given[1].keys() <= {"dim"}
        if is_sum and dims in (None, 0, -first.rows.dim()):
            return first._reduced(name, columns=dims is not None)
        if name not in _OF_DIMS or not first._is_within(dims):
            first.refuse()
        return first._of_rows(func, given, name in _STEEP)

    def __getitem__(self, index: Any) -> "ChosenRows":
        parts = index if isinstance(index, tuple) else (index,)
        is_plain = all(isinstance(each, int | slice) for each in parts[1:])
        is_within = isinstance(parts[0], EllipsisType | slice) and parts[0] in (..., slice(None))
        if not is_plain or not is_within or len(parts) > self.rows.dim():
            self.refuse()
        return self._with(self.rows[index])

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "requires_grad", "ndim"):
            return getattr(self.rows, name)
        function = getattr(Tensor, name)  # an AttributeError, as of a tensor
        return partial(_method, self, function) if callable(function) else self.refuse()

    def __len__(self) -> int:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Ask for the number of rows, which torch refuses while values are unknown."""
        self.mask.nonzero()
        raise AssertionError("the mask is known")

    def _loss(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """A loss of chosen rows; labels of others are those that cross entropy ignores."""
        reduction, target = kwargs.get("reduction", "mean"), args[1] if len(args) > 1 else None
        others = [kwargs.get(each) for each in ("size_average", "reduce", _WEIGHTS.get(name, ""))]
        if any(each is not None for each in others):
            self.refuse()
        if name not in ("cross_entropy", "nll_loss"):
            kwargs["reduction"] = "none"
            found = self._of_rows(func, (args, kwargs), steep=False)
            return found if reduction == "none" else found._reduced(reduction)
        if not isinstance(target, ChosenRows) or target.dtype.is_floating_point:
            self.refuse()
        self._check_same(target)
        ignored = kwargs.get("ignore_index", -100)
        found = func(self.rows, target._filled(ignored), *args[2:], **kwargs)
        return self._with(found) if reduction == "none" else found

    def _reduced(self, reduction: str, *, columns: bool = False) -> Tensor:
        """The sum or mean of all that is chosen, or of each column."""
        rows, over = self._filled(0), 0 if columns else tuple(range(self.rows.dim()))
        if reduction != "mean":
            return rows.sum(over)
        if not rows.is_floating_point():
            self.refuse()
        exact = torch.promote_types(rows.dtype, torch.float32)
        number = self.mask.sum(dtype=exact) * (1 if columns else math.prod(rows.shape[1:]))
        return (rows.sum(over, dtype=exact) / number).to(rows.dtype)

    def _of_rows(self, func: Callable[..., Any], given: Any, steep: bool) -> "ChosenRows":
        """A function of each row; other tensors are alike for all rows."""

        def all_rows(value: Any) -> Any:
            if isinstance(value, ChosenRows) and value.rows.dim() == self.rows.dim():
                self._check_same(value)
                return value._filled(1) if steep and value.dtype != torch.bool else value.rows
            if isinstance(value, ChosenRows) or (
                isinstance(value, Tensor) and not is_for_all_rows(value, self.rows.dim())
            ):
                self.refuse()
            return value

        args, kwargs = pytree.tree_map(all_rows, given)
        return self._with(func(*args, **kwargs))

    def _filled(self, number: int) -> Tensor:
        mask = self.mask.reshape(-1, *[1] * (self.rows.dim() - 1))
        return torch.where(mask, self.rows, number)

    def _is_within(self, dims: Any) -> bool:
        """Whether dimensions are those inside a row."""
        each = (dims,) if isinstance(dims, int) else dims or ()
        return bool(each) and all(dim % self.rows.dim() for dim in each)

    def _with(self, rows: Any) -> "ChosenRows":
        if not isinstance(rows, Tensor) or rows.shape[:1] != self.mask.shape:
            self.refuse()
        return ChosenRows(rows, self.mask, self._given)

    def _check_same(self, other: "ChosenRows | Tensor") -> None:
        """Check that another mask chooses the same rows."""
        mask, version = other._given if isinstance(other, ChosenRows) else (other, other._version)
        if mask is self._given[0] and version == self._given[1]:
            return
        flat = other.mask if isinstance(other, ChosenRows) else other.flatten()
        if flat.shape != self.mask.shape:
            self.refuse()
        check_all(flat == self.mask, "two masks choose other rows; a plan needs one mask for both")


def is_for_all_rows(value: Tensor, num_dims: int) -> bool:
    """Whether a tensor is broadcast to rows ``[n, ...]`` of so many dimensions, whatever ``n``."""
    return value.dim() < num_dims or (value.dim() == num_dims and len(value) == 1)


def _method(chosen: ChosenRows, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return ChosenRows.__torch_function__(function, (), (chosen, *args), kwargs)


for _name in _OPERATORS:
    setattr(ChosenRows, f"__{_name}__", partialmethod(_method, getattr(Tensor, f"__{_name}__")))
