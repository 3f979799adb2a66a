"""Changes to torch and libraries while a step is captured, so that its shapes are static.

Some code reads values where a plan knows only shapes: distributions check their arguments, graph
layers count self loops, a module converts its weights to the dtype that they already have. Such
checks become ops of the step, or are skipped because they always hold for the captured step.

Two kinds of indexing are replaced for which torch reads values. For an index that is a
tensor of one number (``x[:, last]``) torch makes a view at that number, so the graph would contain
it; during a capture the number is unknown. ``index_select`` gives the same values. A value written
by a mask (``x[mask] = token``) becomes ``torch.where``, and rows a ``masked_scatter``, because the
backward pass of torch's op would count the places of the mask.

``plain_control_flow`` replaces ``torch.cond``, scans and ``map`` by ops that a plan can split:
both branches are computed and ``torch.where`` chooses, and loops over a dimension are unrolled. A
loop whose number of passes depends on values cannot be planned.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from types import EllipsisType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.fx.node import _side_effectful_functions
from torch.nn.attention import flex_attention
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from heterog.errors import CaptureError
from heterog.graph import sample_ops
from heterog.graph.python_state import is_of_library
from heterog.graph.value_checks import check_all, wrapped
from heterog.graph.value_numbers import is_known

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


_getitem: Callable[..., Any] = Tensor.__getitem__
_setitem: Callable[..., Any] = Tensor.__setitem__


def _look_up(self: Tensor, index: Any) -> Any:
    """Index by unknown numbers without reading values."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(_is_unknown_mask(each) and is_known(each) for each in parts):
        parts = index = tuple(_places(parts))
    if any(_is_unknown(each) for each in parts):
        return _getitem(*_chosen(self, parts))
    return _getitem(self, index)


def _write(self: Tensor, index: Any, value: Any) -> None:
    """Write by unknown masks without reading values."""
    is_mask = _is_unknown_mask(index) and index.shape == self.shape[: index.dim()]
    rest = self.dim() - index.dim() if is_mask else -1
    is_number = isinstance(value, int) or (isinstance(value, float) and self.is_floating_point())
    if rest >= 0 and (is_number or (isinstance(value, Tensor) and value.dim() <= rest)):
        self.copy_(torch.where(index.reshape(*index.shape, *[1] * rest), value, self))
    elif rest == 1 and isinstance(value, Tensor) and _are_rows(value, self.shape[-1]):
        self.copy_(self.masked_scatter(index[..., None], value))  # whose gradients count no places
    else:
        _setitem(self, index, value)


def _are_rows(value: Tensor, width: int) -> bool:
    return value.dim() == 2 and len(value) > 1 and value.shape[1] == width


def _is_unknown(part: object) -> bool:
    if not isinstance(part, FakeTensor) or part.constant is not None:
        return False
    return part.dim() == 0 and part.dtype in _INTEGERS


def _is_unknown_mask(index: object) -> bool:
    return isinstance(index, FakeTensor) and index.constant is None and index.dtype == torch.bool


def _places(parts: tuple[Any, ...]) -> Iterator[Any]:
    """Parts of an index with the places that a mask chooses, where these are known."""
    for each in parts:
        if _is_unknown_mask(each) and each.dim() and is_known(each):
            yield from each.nonzero(as_tuple=True)
        else:
            yield each


def _chosen(source: Tensor, parts: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
    """Reduce a tensor to the places that unknown numbers choose, and the index to zeros there."""
    dim, known = 0, list(parts)
    for position, part in enumerate(parts):
        if isinstance(part, EllipsisType):
            dim = source.dim() - sum(map(_num_dims, parts[position + 1 :]))
            continue
        if _is_unknown(part):
            place = part.long()
            place = torch.where(place < 0, place + source.shape[dim], place)
            source = source.index_select(dim, place.reshape(1))
            known[position] = 0
        dim += _num_dims(part)
    return source, tuple(known)


def _num_dims(part: object) -> int:
    """Number of dimensions that a part of an index consumes."""
    if part is None or isinstance(part, bool):
        return 0
    is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if isinstance(part, Tensor) and is_mask else 1


@contextmanager
def statistics_of_unread_norms() -> Iterator[None]:
    """Make tracing keep a BatchNorm whose result is not read, for its running statistics."""
    added = {torch.ops.aten.native_batch_norm.default} - _side_effectful_functions
    _side_effectful_functions.update(added)
    try:
        yield
    finally:
        _side_effectful_functions.difference_update(added)


def _check_in_the_step(error_type: type[Exception], cond: Tensor, message: Any = None) -> None:
    """``torch._check_tensor_all`` as an op of the step, which checks values at each run."""
    text = message() if callable(message) else str(message or "a check of values failed")
    check_all(cond, text)


_detect_causal: Callable[..., bool] = transformer._detect_is_causal_mask


def _is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Make ``nn.Transformer`` use a mask whose values are unknown as it is.

    It would ask whether the mask is the causal one, only to choose a kernel that needs none.
    """
    if is_causal is None and isinstance(mask, FakeTensor) and not is_known(mask):
        return False
    return _detect_causal(mask, is_causal, size)


def _known_positions() -> AbstractContextManager[object]:
    """Let ``transformers`` read positions that a step makes of sizes alone, as in training.

    It would not read fake tensors, and make a mask where one device makes none. The two are not
    the same for a model that relies on the mask to be causal.
    """
    utils = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(utils, "is_fake_tensor"):
        return nullcontext()

    def is_fake_tensor(tensor: object) -> bool:
        return isinstance(tensor, FakeTensor) and not is_known(tensor)

    return mock.patch.object(utils, "is_fake_tensor", is_fake_tensor)


_torchs_fill_diagonal: Callable[..., Tensor] = Tensor.fill_diagonal_


def _fill_diagonal(self: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    """Fill a view of a diagonal, which can be traced without a write by strides."""
    if self.dim() != 2 or wrap:
        return _torchs_fill_diagonal(self, fill_value, wrap)
    self.diagonal().fill_(fill_value)
    return self


def _jacobian_by_reverse(func: Any, argnums: Any, *, has_aux: bool = False, **_: Any) -> Any:
    """Make ``torch.func.hessian`` differentiate backward twice, which gives the same.

    Torch's own way, forward over backward, has no backward pass on fake tensors.
    """
    return eager_transforms.jacrev(func, argnums, has_aux=has_aux)


_torchs_instance_norm: Callable[..., Tensor] = torch.instance_norm


def _instance_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Tensor:
    """An instance norm that steps its running statistics, if any, by ops that a plan sees.

    Torch has a batch norm step a repeated copy of them in place, and takes its mean over samples.
    """
    use_input_stats, momentum, *_ = rest
    if use_input_stats and mean is not None and x.dim() > 2:
        with torch.no_grad():
            found = torch.var_mean(x.detach(), tuple(range(2, x.dim())), correction=1)
            for kept, now in zip((var, mean), found, strict=True):
                kept.copy_((1 - momentum) * kept + momentum * now.mean(0))
        mean = var = None
    return _torchs_instance_norm(x, weight, bias, mean, var, *rest)


_apply: Callable[..., nn.Module] = nn.Module._apply


def _apply_if_needed(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
    """Make a module that is converted to its own dtype keep its tensors, as on a real device.

    torch would try to replace fake tensors even by themselves, and fails.
    """
    with torch.no_grad():
        if all(fn(each) is each for each in [*self.parameters(recurse), *self.buffers(recurse)]):
            return self
    return _apply(self, fn, recurse)


_CALL_ONLY = SimpleNamespace(apply=lambda function, preserve_rng_state, *args: function(*args))
"""Makes ``torch.utils.checkpoint`` only call its function: plans decide what is recomputed.

Traced unchanged, the second forward pass would be separate ops: dropout would draw other numbers
in it, and BatchNorm would move its statistics twice."""


def _grouped_product(
    mode: FakeTensorMode,
    func: object,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Make fake grouped matrix products accept the dtypes of the CPU's kernel.

    torch's own shape function knows only the GPU's kernel, and refuses all but bf16.
    """
    make: Callable[..., Tensor] = _create_grouped_mm_output_tensor
    with mode:
        return make(mat_a, mat_b, offs, out_dtype)


_OWN_LOOPS = (
    "a graph has self loops of its own; its layers were captured for one without. Remove them "
    "from the data (torch_geometric.utils.remove_self_loops), or add all that are wanted there "
    "and build the layers with add_self_loops=False."
)


def _graphs_without_self_loops() -> AbstractContextManager[object]:
    """Make PyG's layers assume graphs without self loops; the step checks that this holds.

    They drop existing loops before they add one for each node, so the number of edges would
    depend on values. Without loops nothing is dropped, and shapes are static.
    """
    loops: Any = sys.modules.get("torch_geometric.utils.loop")
    if loops is None:
        return nullcontext()
    drop, add = loops.remove_self_loops, loops.add_remaining_self_loops

    def check(edge_index: Tensor) -> None:
        check_all(edge_index[0] != edge_index[1], _OWN_LOOPS)

    def drop_none(edge_index: Tensor, edge_attr: Tensor | None = None) -> Any:
        if edge_index.layout != torch.strided:
            return drop(edge_index, edge_attr)
        check(edge_index)
        return edge_index, edge_attr

    def add_all(edge_index: Tensor, *args: Any, **keywords: Any) -> Any:
        if edge_index.layout != torch.strided:
            return add(edge_index, *args, **keywords)
        check(edge_index)
        return loops.add_self_loops(edge_index, *args, **keywords)

    return everywhere({drop: drop_none, add: add_all})


@contextmanager
def everywhere(instead: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace functions in every module that has imported them.

    Modules of libraries are searched only under the function's own name; files of the user may
    have imported it under any name.
    """
    replaced = {id(function) for function in instead}
    own = [(function.__name__, function) for function in instead]
    users: list[tuple[dict[str, Any], str, Callable[..., Any]]] = []
    for module in list(sys.modules.values()):  # there are thousands, so each visit must be cheap
        names: dict[str, Any] = getattr(module, "__dict__", {})
        if is_of_library(names.get("__file__") or ""):
            for name, each in own:
                if names.get(name) is each:
                    users.append((names, name, each))
        elif not replaced.isdisjoint(map(id, names.values())):
            users += [(names, name, each) for name, each in names.items() if id(each) in replaced]
    for names, name, function in users:
        names[name] = instead[function]
    try:
        yield
    finally:
        for names, name, function in users:
            names[name] = function


_INSTEAD: tuple[tuple[Any, str, Any], ...] = (
    (Tensor, "__getitem__", _look_up),
    (Tensor, "__setitem__", _write),
    (Tensor, "fill_diagonal_", _fill_diagonal),
    (nn.Module, "_apply", _apply_if_needed),
    (torch, "instance_norm", _instance_norm),
    (torch, "_check_tensor_all_with", _check_in_the_step),
    (transformer, "_detect_is_causal_mask", _is_causal_mask),
    (eager_transforms, "jacfwd", _jacobian_by_reverse),
    (torch.utils.checkpoint, "_checkpoint_hook", lambda frame: nullcontext()),
    (torch.utils.checkpoint, "CheckpointFunction", _CALL_ONLY),
    (Distribution, "_validate_args", False),  # its checks read values
)
"""Attributes of torch, by owner and name, and what they are while a step is captured."""


@contextmanager
def with_static_shapes(model: nn.Module) -> Iterator[None]:
    """Context in which all changes for static shapes apply.

    Embeddings return dense gradients, which sums over devices need. A sparse gradient is a dense
    one whose other rows are zero, and optimizers that accept both (SGD, Adagrad) change a weight
    in the same way by either.
    """
    dense = [
        (module, "sparse", False)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    products = {torch.ops.aten._grouped_mm.default: _grouped_product}
    with ExitStack() as stack:
        for owner, name, value in (*_INSTEAD, *dense):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(wrapped(sample_ops.INSTEAD))
        stack.enter_context(mock.patch.dict(op_implementations_dict, products))
        stack.enter_context(_graphs_without_self_loops())
        stack.enter_context(_known_positions())
        yield


@contextmanager
def plain_control_flow() -> Iterator[None]:
    """Context in which control flow computes with plain ops; compiled functions run eagerly."""
    instead: dict[str, Callable[..., Any]] = {
        "cond": _cond,
        "scan": _scan,
        "associative_scan": _associative_scan,
        "map": lambda f, xs, *args: _stacked([f(each, *args) for each in _slices(xs, 0)], 0),
        "while_loop": _while_loop,
    }
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        for name, plain in instead.items():
            place = sys.modules.get(f"torch._higher_order_ops.{name}")
            if (function := getattr(place, name, None)) is not None:
                functions[function] = plain
        stack.enter_context(everywhere(functions))
        stack.enter_context(mock.patch.multiple(flex_attention, **_IN_FLEX_ATTENTION))
        yield


def _cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()
) -> Any:
    """Compute both branches and choose with ``torch.where``."""
    if not isinstance(pred, Tensor):
        return true_fn(*operands) if pred else false_fn(*operands)
    one, other = true_fn(*operands), false_fn(*operands)
    chosen = pred.reshape(())
    return pytree.tree_map(lambda a, b: torch.where(chosen, a, b), one, other)


def _scan(
    combine_fn: Callable[..., Any], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    """Unroll a scan: one pass for each slice."""
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
    """Combine slices one after the other."""
    made = list(accumulate(_slices(xs, dim, reverse=reverse), combine_fn))
    return _stacked(made[::-1] if reverse else made, dim)


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
    """Flex attention as products and a softmax, because its kernel has no backward pass on a CPU.

    Unlike torch's own path without a kernel, which calls the user's functions for one score at a
    time (``vmap``), this calls them once for all scores, with indices that broadcast.
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
        scores = torch.where(block_mask[-1](*indices), score_mod(scores, *indices), -torch.inf)
    weights = torch._safe_softmax(scores, -1).to(query.dtype)
    in_bits = 1 / math.log(2)
    return weights @ value, scores.logsumexp(-1) * in_bits, scores.amax(-1) * in_bits


class _OneScore(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses ops that give another result for all scores at once than for one score."""

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
"""Ops that are not elementwise, but give the same for all scores at once as for one score."""

_IN_FLEX_ATTENTION: dict[str, Any] = {
    "_validate_device": lambda *_: None,
    "flex_attention_hop": _all_scores,
    "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
}
"""Replacements in torch's module, which then still checks its arguments but calls ours."""


def _slices(xs: Any, dim: int, *, reverse: bool = False) -> Iterator[Any]:
    (length,) = {each.shape[dim] for each in pytree.tree_leaves(xs) if isinstance(each, Tensor)}
    places = range(length)
    for place in reversed(places) if reverse else places:
        cut = partial(Tensor.select, dim=dim, index=place)
        yield pytree.tree_map_only(Tensor, cut, xs)


def _stacked(made: list[Any], dim: int) -> Any:
    return pytree.tree_map(lambda *each: torch.stack(each, dim), *made)
