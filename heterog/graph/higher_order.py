"""Control flow of torch (``torch.cond``, scans, ``map``) as ops that a plan can share out.

While a step is captured a branch is computed both ways and chosen from, loops over a dimension
become their passes. A loop whose number of passes depends on values cannot be planned.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from heterog.errors import CaptureError
from heterog.graph.static_shapes import everywhere

_PLACES = {
    "cond": "torch._higher_order_ops.cond",
    "scan": "torch._higher_order_ops.scan",
    "associative_scan": "torch._higher_order_ops.associative_scan",
    "map": "torch._higher_order_ops.map",
    "while_loop": "torch._higher_order_ops.while_loop",
}
"""Python module of each function."""


@contextmanager
def plain_control_flow() -> Iterator[None]:
    """Context in which these functions compute with plain ops; compiled functions run eagerly."""
    instead: dict[str, Callable[..., Any]]
    instead = {"cond": _cond, "scan": _scan, "associative_scan": _associative_scan, "map": _map}
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        for name, place in _PLACES.items():
            function = getattr(sys.modules.get(place), name, None)
            if function is not None:
                stack.enter_context(everywhere(function, instead.get(name, _while_loop)))
        yield


def _cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()
) -> Any:
    """Both branches, of which ``torch.where`` chooses."""
    if not isinstance(pred, Tensor):
        return true_fn(*operands) if pred else false_fn(*operands)
    one, other = true_fn(*operands), false_fn(*operands)
    chosen = pred.reshape(())
    return pytree.tree_map(lambda a, b: torch.where(chosen, a, b), one, other)


def _scan(
    combine_fn: Callable[..., Any], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    """One pass for each slice, in turn."""
    carry, made = init, []
    for each in _slices(xs, dim, reverse=reverse):
        carry, output = combine_fn(carry, each)
        made.append(output)
    return carry, _stacked(made[::-1] if reverse else made, 0)


def _associative_scan(
    combine_fn: Callable[..., Any],
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    """Sums of what came before, one after the other."""
    made: list[Any] = []
    for each in _slices(xs, dim, reverse=reverse):
        made.append(combine_fn(made[-1], each) if made else each)
    return _stacked(made[::-1] if reverse else made, dim)


def _map(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    return _stacked([f(each, *args) for each in _slices(xs, 0, reverse=False)], 0)


def _while_loop(*_: Any, **__: Any) -> Any:
    raise CaptureError(
        "torch.while_loop runs as often as values say, and a plan needs to know how often. Run a "
        "fixed number of passes, and keep with torch.where what passes after the end would change."
    )


def _slices(xs: Any, dim: int, *, reverse: bool) -> Iterator[Any]:
    (length,) = {each.shape[dim] for each in pytree.tree_leaves(xs) if isinstance(each, Tensor)}
    places = range(length)
    for place in reversed(places) if reverse else places:
        yield pytree.tree_map_only(Tensor, partial(_slice, dim, place), xs)


def _slice(dim: int, place: int, each: Tensor) -> Tensor:
    return each.select(dim, place)


def _stacked(made: list[Any], dim: int) -> Any:
    return pytree.tree_map(lambda *each: torch.stack(each, dim), *made)
