"""Control flow of torch (``torch.cond``, scans, ``map``) as ops that a plan can share out.

While a step is captured a branch is computed both ways and chosen from, loops over a dimension
become their passes. A loop whose number of passes depends on values cannot be planned.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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
        functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        for name, place in _PLACES.items():
            function = getattr(sys.modules.get(place), name, None)
            if function is not None:
                functions[function] = instead.get(name, _while_loop)
        stack.enter_context(everywhere(functions))
        stack.enter_context(mock.patch.multiple(flex_attention, **_IN_FLEX_ATTENTION))
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


def _all_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Flex attention as products and a softmax: its kernel has no backward pass on a CPU.

    Unlike torch's own way without a kernel, which calls the functions of the user for one score
    at a time (``vmap``), they are called for all, with indices that broadcast.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    repeats = query.shape[1] // key.shape[1]
    key, value = (
        each.repeat_interleave(repeats, 1).expand(len(query), -1, -1, -1) for each in (key, value)
    )
    scores = query.to(exact) @ key.to(exact).transpose(-2, -1) * scale
    indices = [
        torch.arange(size).view([-1 if dim == each else 1 for each in range(4)])
        for dim, size in enumerate(scores.shape)
    ]
    with _OneScore():  # type: ignore[no-untyped-call]
        kept = block_mask[-1](*indices)
        scores = torch.where(kept, score_mod(scores, *indices), -torch.inf)
    weights = torch._safe_softmax(scores, -1).to(query.dtype)
    in_bits = 1 / math.log(2)
    return weights @ value, scores.logsumexp(-1) * in_bits, scores.amax(-1) * in_bits


class _OneScore(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what would see all scores where a function is written for one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        is_of_tensors = func.namespace == "aten" and torch.Tag.pointwise not in func.tags
        if is_of_tensors and name not in _OF_ONE_SCORE:
            raise CaptureError(
                f"a score_mod or mask_mod of flex attention calls {name}, which is not computed "
                "element by element. Compute a table with it before, which the function indexes, "
                "or attend with scaled_dot_product_attention and a mask."
            )
        return func(*args, **(kwargs or {}))


_OF_ONE_SCORE = (
    *("index", "detach", "alias", "lift_fresh", "lift_fresh_copy", "clone", "_to_copy", "copy"),
    *("new_ones", "new_zeros", "new_full", "ones", "zeros", "full", "scalar_tensor"),
    *("ones_like", "zeros_like", "full_like", "expand", "select"),
)
"""Ops besides those on elements that mean the same for all scores as for one."""

_IN_FLEX_ATTENTION: dict[str, Any] = {
    "_validate_device": lambda *_: None,
    "flex_attention_hop": _all_scores,
    "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
}
"""What is replaced in torch's module, so that it checks its arguments and calls ours."""


def _slices(xs: Any, dim: int, *, reverse: bool) -> Iterator[Any]:
    (length,) = {each.shape[dim] for each in pytree.tree_leaves(xs) if isinstance(each, Tensor)}
    places = range(length)
    for place in reversed(places) if reverse else places:
        yield pytree.tree_map_only(Tensor, partial(_slice, dim, place), xs)


def _slice(dim: int, place: int, each: Tensor) -> Tensor:
    return each.select(dim, place)


def _stacked(made: list[Any], dim: int) -> Any:
    return pytree.tree_map(lambda *each: torch.stack(each, dim), *made)
