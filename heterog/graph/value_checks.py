"""Checks of values at every run of a step, because its capture assumed that they hold.

Models often read values only to raise an error: lengths that fit, labels that exist, no NaN. While
a step is captured no value is known. ``answered_guards`` answers so that the code goes on, and
inserts an op into the step that checks the answer. ``spread_checks`` makes such an op look at
elements instead of sums over them, so that every device checks its own part of the batch and
nothing is sent.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import has_side_effect
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from heterog.graph.guards import guard_of_answer, guard_of_truth, is_number_of_guard
from heterog.graph.traced_constants import insert_before, node_read

_Truth = Callable[..., Tensor]
Wrapped = tuple[tuple[Any, str, Callable[..., Callable[..., Any]], Any], ...]
"""Functions by owner and name, with their wrappers and what these are told."""

_LIBRARY: Any = torch.library.Library("heterog_check", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("all_true(Tensor condition, str message) -> ()")


def _check(condition: Tensor, message: str) -> None:
    torch._assert_async(condition.all(), message)


_LIBRARY.impl("all_true", _check, "CompositeExplicitAutograd")
torch.library.register_fake("heterog_check::all_true", lambda condition, message: None)
_ALL_TRUE = torch.ops.heterog_check.all_true.default
has_side_effect(_ALL_TRUE)


def check_all(condition: Tensor, message: str) -> None:
    """Check that a condition holds everywhere, also when a captured step runs.

    Args:
        condition: Truth values of any shape.
        message: Text of the error.

    Raises:
        RuntimeError: it does not hold; only for tensors whose values are known.
    """
    _ALL_TRUE(condition.detach().bool(), message)


@contextmanager
def answered_guards() -> Iterator[None]:
    """Answer guards on unknown values, and check the answers in the step.

    Other reads of unknown values are left to torch, which refuses them; see
    ``heterog.graph.guards``. Functions of tensors are replaced in the body, because torch does not
    call a ``TorchFunctionMode`` in the backward pass.
    """
    # Torch caches the functions that ``torch.device`` applies to: fill it before replacing them.
    _device_constructors()
    with wrapped(_INSTEAD):
        yield


@contextmanager
def wrapped(functions: Wrapped) -> Iterator[None]:
    """Context in which functions are replaced by what their wrappers make of them."""
    with ExitStack() as stack:
        for owner, name, wrap, how in functions:
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name), how)))
        yield


def _asked(function: Callable[..., Any], truth_of: _Truth | None) -> Callable[..., Any]:
    """Wrap a function that reads values, so that it answers guards on unknown values.

    Args:
        function: Function of tensors that returns a number or a ``bool``.
        truth_of: Computes the same truth as a tensor; ``None`` if the function returns a number.
    """

    @functools.wraps(function)
    def asked(*args: Any, **keywords: Any) -> Any:
        is_unknown = any(isinstance(each, FakeTensor) and each.constant is None for each in args)
        if not is_unknown:
            return function(*args, **keywords)
        if truth_of is _itself and (known := getattr(args[0], _ANSWER, None)) is not None:
            return known
        frame = sys._getframe(1)
        if truth_of is None:
            if is_number_of_guard(frame):
                return args[0].detach().reshape(())
            return function(*args, **keywords)
        guard = guard_of_truth(frame) if truth_of is _itself else guard_of_answer(frame)
        if guard is None:
            return function(*args, **keywords)
        if guard.raises:
            with torch.no_grad():
                truth = truth_of(*args, **keywords).bool()
                holds = truth if guard.wanted else truth.logical_not()
                check_all(holds, f"{guard.text} does not hold")
        return guard.wanted

    return asked


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _are_equal(input: Tensor, other: Tensor) -> Tensor:
    if input.shape != other.shape:
        return torch.zeros((), dtype=torch.bool)
    return (input == other).all()


def _are_close(*args: Any, **keywords: Any) -> Tensor:
    return torch.isclose(*args, **keywords).all()


_UNIT, _ANSWER = "_heterog_is_drawn_from_unit", "_heterog_answer"
"""Attributes of fake tensors: that ``torch.rand`` drew it; the truth that it has for any draw."""


def _marked(function: Callable[..., Any], _: object) -> Callable[..., Any]:
    """Wrap ``torch.rand`` so that its results are marked as draws."""

    @functools.wraps(function)
    def draw(*args: Any, **keywords: Any) -> Any:
        drawn = function(*args, **keywords)
        setattr(drawn, _UNIT, True)
        return drawn

    return draw


def _compared_with_bounds(function: Callable[..., Any], is_less: object) -> Callable[..., Any]:
    """Wrap a comparison so that a draw in [0, 1) compared with a bound has a known answer."""

    @functools.wraps(function)
    def compare(self: Tensor, other: Any) -> Any:
        result = function(self, other)
        if isinstance(other, int | float) and getattr(self, _UNIT, False):
            if other <= 0 or other >= 1:
                setattr(result, _ANSWER, (other >= 1) is is_less)
        return result

    return compare


class _GoesOn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what a function of torch asks before it raises an error, so that it goes on.

    Args:
        text: What it checks.
    """

    def __init__(self, text: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._text = text

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            check_all(args[0].logical_not(), self._text)
            return False
        return func(*args, **(kwargs or {}))


def _going_on(function: Callable[..., Any], text: object) -> Callable[..., Any]:
    """A function that checks values itself, whose checks the step makes."""

    @functools.wraps(function)
    def called(*args: Any, **keywords: Any) -> Any:
        with _GoesOn(str(text)):
            return function(*args, **keywords)

    return called


_OVERLAP = "the windows of torch.istft do not overlap everywhere"
_INSTEAD: Wrapped = (
    (Tensor, "item", _asked, None),
    (Tensor, "__bool__", _asked, _itself),
    (Tensor, "__contains__", _asked, lambda values, value: torch.eq(values, value).any()),
    (Tensor, "equal", _asked, _are_equal),
    (Tensor, "allclose", _asked, _are_close),
    (torch, "equal", _asked, _are_equal),
    (torch, "allclose", _asked, _are_close),
    (torch, "is_nonzero", _asked, lambda input: input),
    # LayerDrop calls these: with p = 0 no layer is ever left out.
    (torch, "rand", _marked, None),
    (Tensor, "__lt__", _compared_with_bounds, True),
    (Tensor, "__ge__", _compared_with_bounds, False),
    (torch, "istft", _going_on, _OVERLAP),
    (Tensor, "istft", _going_on, _OVERLAP),
)
"""Functions that read values, by owner and name, with their wrappers and what these are told."""


def spread_checks(module: fx.GraphModule) -> None:
    """Make checks of reduced values look at the elements instead.

    Some conditions hold for the whole batch if they hold for every part: ``all`` is true, ``any``
    is false, a maximum is small enough, a count is zero. Then each device checks its part, and
    nothing is sent. Values in other conditions are made whole on every device.

    Args:
        module: Traced step, whose checks are replaced.
    """
    for node in list(module.graph.nodes):
        if node.target is _ALL_TRUE:
            condition, message = node.args
            parts = list(_Spread(module, node).parts(condition, holds=True))
            if parts != [condition]:
                for part in parts:
                    insert_before(module, node, _ALL_TRUE, (part, message))
                module.graph.erase_node(node)


class _Spread:
    """Finds conditions on elements that together are equal to a condition on all of them."""

    def __init__(self, module: fx.GraphModule, check: fx.Node) -> None:
        self._module = module
        self._check = check

    def parts(self, node: fx.Node, *, holds: bool) -> Iterator[fx.Node]:
        """Nodes that are true everywhere if and only if a node is true (or false) everywhere.

        Args:
            node: Truth values.
            holds: Whether they must be true; else they must be false.
        """
        kind = _kind(node)
        if kind in _SAME_VALUES or kind == ("all" if holds else "any"):
            yield from self.parts(node_read(node), holds=holds)
        elif kind in _NOT and _dtype(node_read(node)) == torch.bool:
            yield from self.parts(node_read(node), holds=not holds)
        elif kind in (_AND if holds else _OR) and _are_truths(node):
            for each in node.all_input_nodes:
                yield from self.parts(each, holds=holds)
        elif (counted := _counted(node, holds=holds)) is not None:
            yield from self.parts(counted, holds=False)
        elif (extreme := _extreme(node, holds=holds)) is not None:
            each = self._insert(node.target, (node_read(extreme), node.args[1]))
            yield from self.parts(each, holds=holds)
        else:
            yield node if holds else self._insert(torch.ops.aten.logical_not.default, (node,))

    def _insert(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        return insert_before(self._module, self._check, target, args)


_NOT = ("logical_not", "bitwise_not")
_AND = ("logical_and", "bitwise_and", "__and__")
_OR = ("logical_or", "bitwise_or", "__or__")
_SAME_VALUES = ("alias", "detach", "lift_fresh", "clone", "view", "_unsafe_view")
_MAXIMUM = ("max.default", "amax.default")
_MINIMUM = ("min.default", "amin.default")


def _kind(node: fx.Node) -> str:
    """Name of an op of torch without its overload; empty for anything else."""
    target = node.target
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return str(target).split(".")[1] if is_aten else ""


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _are_truths(node: fx.Node) -> bool:
    """Whether an op with two inputs reads truth values, and no numbers."""
    inputs = node.all_input_nodes
    return len(node.args) == len(inputs) and all(_dtype(each) == torch.bool for each in inputs)


def _compared(node: fx.Node) -> tuple[str, fx.Node, Any] | None:
    """The comparison, the compared node and the number, if a node compares with a number."""
    is_scalar = str(node.target).endswith(".Scalar") and len(node.args) == 2
    if not is_scalar or _kind(node) not in ("eq", "ne", "lt", "le", "gt", "ge"):
        return None
    left = node_read(node)
    while _kind(left) in _SAME_VALUES:
        left = node_read(left)
    return _kind(node), left, node.args[1]


def _counted(node: fx.Node, *, holds: bool) -> fx.Node | None:
    """Truth values that must all be false, if a node compares their count with zero."""
    compared = _compared(node)
    if compared is None or (compared[0], compared[2], holds) not in (
        *(("eq", 0, True), ("le", 0, True), ("lt", 1, True)),
        *(("ne", 0, False), ("gt", 0, False), ("ge", 1, False)),
    ):
        return None
    counting = compared[1]
    if _kind(counting) not in ("sum", "count_nonzero"):
        return None
    source = node_read(counting)
    while _kind(source) == "_to_copy" and _dtype(source) != torch.bool:
        source = node_read(source)  # booleans converted to numbers to be counted
    return source if _dtype(source) == torch.bool else None


def _extreme(node: fx.Node, *, holds: bool) -> fx.Node | None:
    """The compared maximum or minimum, if comparing its elements gives the same answer."""
    compared = _compared(node)
    if compared is None:
        return None
    kind, extreme, _ = compared
    bounds_above = kind in (("le", "lt") if holds else ("gt", "ge"))
    bounds_below = kind in (("ge", "gt") if holds else ("lt", "le"))
    of_which = _MAXIMUM if bounds_above else _MINIMUM if bounds_below else ()
    if str(extreme.target).removeprefix("aten.") not in of_which:
        return None
    # With a NaN among the elements the maximum is NaN, and no comparison with it is true.
    dtype = _dtype(extreme)
    return extreme if holds or (dtype is not None and not dtype.is_floating_point) else None
