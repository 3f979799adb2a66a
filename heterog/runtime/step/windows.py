"""Ops on some of their rows: exact, given the rows of their inputs that they read.

Each function here gets, for every tensor that is cut along ``dim``, the rows at hand, and makes
exactly the requested rows. Padding is added only at the true borders of the tensor: a window is
widened, or cut, to the rows that the op reads with its padding, and the op then runs without
padding along this dimension.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heterog.graph.placement import OpCall
from heterog.graph.sharding_rules.legal import (
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    per_dim,
    stencil_of,
)
from heterog.graph.sharding_rules.table import positions
from heterog.graph.sparse_pattern import Rows, Stencil

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The rows at hand of an op's inputs, and the rows to make.

    Attributes:
        dim: The dimension that is cut, the same in all tensors that are cut.
        rows: Rows at hand of each tensor input; ``None`` if the input is whole.
        made: Rows to make of each output that is cut; ``None`` for the others.
        own: For gradients of weights, the rows of the op's output gradient that count here.
    """

    dim: int
    rows: tuple[Rows | None, ...]
    made: tuple[Rows | None, ...]
    own: Rows


def _resized(shape: Sequence[int], dim: int, num: int) -> list[int]:
    """A shape with ``num`` rows along a dimension."""
    return [*shape[:dim], num, *shape[dim + 1 :]]


def fit(tensor: Tensor, dim: int, have: Rows, want: Rows, value: float = 0.0) -> Tensor:
    """Make wanted rows of a tensor from the rows at hand; other rows have ``value``.

    >>> fit(torch.ones(2), 0, have=Rows(0, 2), want=Rows(-1, 1))
    tensor([0., 1.])
    """
    inside = have.overlap(want)
    if inside.num == 0:
        return tensor.new_full(_resized(tensor.shape, dim, want.num), value)
    if inside != have:
        tensor = tensor.narrow(dim, inside.begin - have.begin, inside.num)
    before, after = inside.begin - want.begin, want.end - inside.end
    if before or after:
        sides = [0] * (2 * (tensor.dim() - dim - 1)) + [before, after]
        return functional.pad(tensor, sides, value=value)
    return tensor.contiguous()


def run_on_windows(call: OpCall, inputs: Sequence[Tensor], windows: Windows) -> list[Tensor]:
    """Run an op that has a rule in ``heterog.graph.sharding_rules.legal``.

    Args:
        call: The op, with the shapes and arguments of the whole.
        inputs: Its tensor inputs, cut as ``windows`` says.
        windows: Rows at hand and rows to make.

    Returns:
        The outputs of the op.
    """
    local = _Local(call, inputs, windows)
    if call.kind != CONVOLUTION_BACKWARD and local.made.num == 0:
        return _nothing(local)
    return _RUN[call.kind](local)


class _Local:
    """An op's arguments by name, adapted along the cut dimension."""

    def __init__(self, call: OpCall, inputs: Sequence[Tensor], windows: Windows) -> None:
        self.call = call
        self.inputs = inputs
        self.windows = windows
        self.dim = windows.dim

    @property
    def made(self) -> Rows:
        """Rows to make of the first output, which is cut."""
        made = self.windows.made[0]
        assert made is not None
        return made

    @property
    def rank(self) -> int:
        """Number of dimensions behind samples and channels."""
        return len(self.call.inputs[0].shape) - 2

    @property
    def stencil(self) -> Stencil:
        """Rows of a convolution or pooling."""
        return stencil_of(self.call, self.dim)

    def shape(self, output: int = 0) -> list[int]:
        """Shape of the part of an output that is to be made."""
        whole = self.call.outputs[output].shape
        return [len(self.inputs[0]), *_resized(whole, self.dim, self.made.num)[1:]]

    def tensor(self, name: str) -> Tensor | None:
        where = positions(self.call, name)
        return self.inputs[where[0]] if where else None

    def given(self, name: str) -> Tensor:
        found = self.tensor(name)
        assert found is not None
        return found

    def rows(self, name: str) -> Rows:
        (where,) = positions(self.call, name)
        return self.windows.rows[where] or Rows(0, self.size(name))

    def fitted(self, name: str, want: Rows, value: float = 0.0) -> Tensor:
        return fit(self.given(name), self.dim, self.rows(name), want, value)

    def size(self, name: str) -> int:
        (where,) = positions(self.call, name)
        return self.call.inputs[where].shape[self.dim]

    def list_of(self, name: str, here: int | None = None) -> list[int]:
        """An argument with one number per dimension; ``here`` along the one that is cut."""
        numbers = list(per_dim(self.call, name, self.rank))
        return numbers if here is None else _resized(numbers, self.dim - 2, here)


# --- convolutions ----------------------------------------------------------------------------


def _convolution(local: _Local) -> list[Tensor]:
    bias = local.tensor("bias")
    if local.call.args["transposed"] is not True:
        return [_read(local, "input", bias)]
    output = _spread(local, "input")
    return [output if bias is None else output + bias.view(-1, *[1] * local.rank)]


def _convolve(
    local: _Local, window: Tensor, bias: Tensor | None, more: list[int] | None = None
) -> Tensor:
    """Convolve, without padding of the cut dimension; transposed if there is output padding."""
    found: Tensor = _aten.convolution(
        window, local.given("weight"), bias, local.list_of("stride"), local.list_of("padding", 0),
        local.list_of("dilation"), more is not None, more or [0] * local.rank,
        local.call.args["groups"],
    )  # fmt: skip
    return found


def _read(local: _Local, name: str, bias: Tensor | None = None) -> Tensor:
    """Rows of a convolution: each reads its stencil's rows of an input."""
    return _convolve(local, local.fitted(name, local.stencil.span(local.made)), bias)


def _spread(local: _Local, name: str) -> Tensor:
    """Rows of a transposed convolution: each row of an input adds to its stencil's rows."""
    window, weight, have = local.given(name), local.given("weight"), local.rows(name)
    shape = local.shape()
    if have.num == 0:  # none adds to these
        return window.new_zeros(shape)
    numbers = (local.list_of("stride"), local.list_of("padding", 0), local.list_of("dilation"))
    more = []
    for each, (step, pad, gap) in enumerate(zip(*numbers, strict=True), 2):
        made_of = (window.shape[each] - 1) * step - 2 * pad + gap * (weight.shape[each] - 1) + 1
        more.append(0 if each == local.dim else shape[each] - made_of)
    begun = _convolve(local, window, None, more)
    return fit(begun, local.dim, local.stencil.span(have), local.made)


def _convolution_backward(local: _Local) -> list[Tensor]:
    masks: Any = local.call.args["output_mask"]
    wants_input, wants_weight, wants_bias = masks
    outputs: list[Tensor] = []
    if wants_input:
        outputs.append(_input_gradient(local))
    if wants_weight:
        outputs.append(_weight_gradient(local))
    if wants_bias:
        own = local.fitted("grad_output", local.windows.own)
        outputs.append(own.sum([0, *range(2, own.dim())]))
    return outputs


def _input_gradient(local: _Local) -> Tensor:
    """A convolution of the gradients, transposed if the op itself is not."""
    shape = local.shape()
    if local.made.num == 0:
        return local.inputs[0].new_empty(shape)
    if local.call.args["transposed"] is not True:
        return _spread(local, "grad_output")
    gradient = _read(local, "grad_output")
    for each in range(2, len(shape)):  # without what only the output's padding reads
        gradient = gradient.narrow(each, 0, shape[each])
    return gradient


def _weight_gradient(local: _Local) -> Tensor:
    """The part of the weight's gradient from some rows of the output.

    For a transposed convolution, it is the part from this rank's rows of the input.
    """
    stencil, weight = local.stencil, local.given("weight")
    is_transposed = local.call.args["transposed"] is True
    if is_transposed:
        own = local.rows("input")
        window, gradient = local.given("input"), local.fitted("grad_output", stencil.span(own))
    else:
        own = local.windows.own
        window = local.fitted("input", stencil.span(own))
        gradient = local.fitted("grad_output", own)
    if own.num == 0:
        return torch.zeros_like(weight)
    found = _aten.convolution_backward(
        gradient, window, weight, None, local.list_of("stride"), local.list_of("padding", 0),
        local.list_of("dilation"), is_transposed, local.list_of("output_padding", 0),
        local.call.args["groups"], [False, True, False],
    )  # fmt: skip
    result: Tensor = found[1]
    return result


# --- pooling ---------------------------------------------------------------------------------


def _pool_args(local: _Local) -> tuple[list[int], list[int], list[int]]:
    """(kernel, stride, padding) of a pooling, without padding along the cut dimension."""
    kernel = local.list_of("kernel_size")
    return kernel, local.list_of("stride") or kernel, local.list_of("padding", 0)


def _nothing(local: _Local) -> list[Tensor]:
    """Outputs with the wanted number of rows, if there is nothing to compute."""
    return [
        local.inputs[0].new_zeros(local.shape(number), dtype=getattr(torch, meta.dtype))
        for number, meta in enumerate(local.call.outputs)
    ]


def _in_places(local: _Local, rows: Rows, stencil: Stencil) -> Tensor | None:
    """Mask of the kernel's rows that count for each output row; ``None`` if all always do.

    ``count_include_pad=False`` divides by the rows inside the tensor only.
    """
    args = local.call.args
    if args["count_include_pad"] is True or args["divisor_override"] is not None:
        return None
    name = "grad_output" if "grad_output" in args else "self"
    size = local.size("self")
    counts = [
        stencil.needed(Rows(row, row + 1), size).num / stencil.kernel
        for row in range(rows.begin, rows.end)
    ]
    shape = _resized([1] * len(local.call.inputs[0].shape), local.dim, rows.num)
    return local.given(name).new_tensor(counts).view(shape)


def _average_pool(local: _Local) -> list[Tensor]:
    stencil, args = local.stencil, local.call.args
    window = local.fitted("self", stencil.span(local.made))
    rest = (False, args["count_include_pad"], args["divisor_override"])
    output: Tensor = _op(local)(window, *_pool_args(local), *rest)
    counted = _in_places(local, local.made, stencil)
    return [output if counted is None else output / counted]


def _average_pool_backward(local: _Local) -> list[Tensor]:
    have = local.rows("grad_output")
    if have.num == 0:
        return _nothing(local)
    stencil, args = local.stencil, local.call.args
    gradient = local.given("grad_output")
    counted = _in_places(local, have, stencil)
    if counted is not None:
        gradient = gradient / counted
    span = stencil.span(have)
    shape = _resized(local.given("self").shape, local.dim, span.num)
    rest = (False, args["count_include_pad"], args["divisor_override"])
    found = _op(local)(gradient, gradient.new_empty(shape), *_pool_args(local), *rest)
    return [fit(found, local.dim, span, local.made)]


def _moved(indices: Tensor, local: _Local, shape: Sequence[int], by: int, onto: int) -> Tensor:
    """Indices into planes of a shape, shifted by ``by`` rows, for planes with ``onto`` rows."""
    rows, flat = shape[local.dim], math.prod(shape[local.dim + 1 :])
    inside, above = indices % flat, indices // flat
    row, outer = above % rows + by, above // rows
    return (outer * onto + row) * flat + inside


def _max_pool(local: _Local) -> list[Tensor]:
    span = local.stencil.span(local.made)
    window = local.fitted("self", span, float("-inf"))
    output, indices = _op(local)(window, *_pool_args(local), local.list_of("dilation"), False)
    return [output, _moved(indices, local, window.shape, span.begin, local.size("self"))]


def _max_pool_backward(local: _Local) -> list[Tensor]:
    have = local.rows("grad_output")
    if have.num == 0:
        return _nothing(local)
    span, own = local.stencil.span(have), local.given("self").shape
    whole = _resized(own, local.dim, local.size("self"))
    indices = _moved(local.given("indices"), local, whole, -span.begin, span.num)
    gradient = local.given("grad_output")
    read = gradient.new_empty(_resized(own, local.dim, span.num))
    found = _op(local)(
        gradient, read, *_pool_args(local), local.list_of("dilation"), False, indices.contiguous()
    )
    return [fit(found, local.dim, span, local.made)]


def _op(local: _Local) -> Callable[..., Any]:
    name, _, overload = local.call.kind.partition(".")
    found: Callable[..., Any] = getattr(getattr(_aten, name), overload)
    return found


# --- upsampling ------------------------------------------------------------------------------


def _upsample(local: _Local) -> list[Tensor]:
    """Repeat or blend rows, then cut off the rows that the window's edges falsify."""
    have = local.rows("self")
    factor = local.call.outputs[0].shape[local.dim] // local.size("self")
    sizes = _resized(local.call.outputs[0].shape, local.dim, have.num * factor)[2:]
    output = _op(local)(local.given("self"), sizes, *_resampling(local))
    return [fit(output, local.dim, Rows(have.begin * factor, have.end * factor), local.made)]


def _upsample_backward(local: _Local) -> list[Tensor]:
    whole = local.call.outputs[0].shape
    have = local.rows("grad_output")
    factor = local.size("grad_output") // whole[local.dim]
    seen = Rows(have.begin // factor, have.end // factor)
    gradient = local.given("grad_output")
    input_size = [len(gradient), *_resized(whole, local.dim, seen.num)[1:]]
    found = _op(local)(gradient, list(gradient.shape[2:]), input_size, *_resampling(local))
    return [fit(found, local.dim, seen, local.made)]


def _resampling(local: _Local) -> list[Any]:
    """Arguments after the sizes, from which scales follow."""
    args = local.call.args
    corners = [args["align_corners"]] if "align_corners" in args else []
    return [*corners, *[None] * local.rank]


_RUN: dict[str, Callable[[_Local], list[Tensor]]] = {
    CONVOLUTION: _convolution,
    CONVOLUTION_BACKWARD: _convolution_backward,
    **{f"avg_pool{rank}d.default": _average_pool for rank in (2, 3)},
    **{f"avg_pool{rank}d_backward.default": _average_pool_backward for rank in (2, 3)},
    **{f"max_pool{rank}d_with_indices.default": _max_pool for rank in (2, 3)},
    **{f"max_pool{rank}d_with_indices_backward.default": _max_pool_backward for rank in (2, 3)},
    **{f"upsample_nearest{rank}d.default": _upsample for rank in (1, 2, 3)},
    **{f"upsample_nearest{rank}d_backward.default": _upsample_backward for rank in (1, 2, 3)},
    **{
        f"upsample_{name}.default": _upsample for name in ("linear1d", "bilinear2d", "trilinear3d")
    },
    **{
        f"upsample_{name}_backward.default": _upsample_backward
        for name in ("linear1d", "bilinear2d", "trilinear3d")
    },
}
