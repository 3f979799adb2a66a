"""Every rule, run in parts on uneven shares and put together again, must give the op's result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heterog.graph.grouped_rows import outer, product
from heterog.graph.op_costs import CHECK, ROWS_OUTER, ROWS_PRODUCT, SPARSE_PRODUCT
from heterog.graph.placement import (
    Arg,
    L,
    OpCall,
    P,
    Placement,
    R,
    S,
    TensorMeta,
    TensorRef,
)
from heterog.graph.sharding_rules import (
    RULES,
    RuleResult,
    Special,
    legal_rules,
    local_args,
    local_shape,
    propagate,
)
from heterog.graph.sharding_rules.pointwise import IDENTITIES, LINEAR_IN_FIRST, NONLINEAR
from heterog.graph.sharding_rules.table import axis, choose, positions, shape_of
from heterog.graph.sparse_pattern import pattern_of
from heterog.graph.sparse_product import multiply
from heterog.runtime.step.special_ops import (
    completed,
    numbers_of_rows,
    on_causal_rows,
    on_own_words,
)

aten = torch.ops.aten
Op = Callable[..., Any]


# --- from a torch call to an OpCall -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of an op: as the rules see it, and what it takes to run it."""

    call: OpCall
    op: Op
    tensors: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def run(self, args: dict[str, Arg], tensors: list[Tensor]) -> tuple[Tensor, ...]:
        keywords = {name: _with_tensors(value, tensors) for name, value in args.items()}
        return _tensors(self.op(**keywords))


def _with_tensors(value: Arg, tensors: list[Tensor]) -> Any:
    if isinstance(value, TensorRef):
        # Contiguous: linalg_lu_solve reads wrong rows if a dimension of size 1 has an odd stride.
        return tensors[value.index].clone().contiguous()
    if isinstance(value, tuple):
        return [_with_tensors(item, tensors) for item in value]
    return value


def _tensors(result: Any) -> tuple[Tensor, ...]:
    items = result if isinstance(result, tuple | list) else (result,)
    return tuple(item for item in items if isinstance(item, Tensor))


def meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def sample_of(op: Any, *args: Any, **kwargs: Any) -> Sample:
    """Record a call with schema-normalised arguments and run it."""
    named: dict[str, Any] = {}
    for position, parameter in enumerate(op._schema.arguments):
        if position < len(args):
            named[parameter.name] = args[position]
        else:
            named[parameter.name] = kwargs.get(parameter.name, parameter.default_value)
    return _sample(op.__name__, lambda **keywords: _keyword_call(op, keywords), named)


def _keyword_call(op: Any, keywords: dict[str, Any]) -> Any:
    count = sum(not parameter.kwarg_only for parameter in op._schema.arguments)
    values = list(keywords.values())
    return op(*values[:count], **dict(list(keywords.items())[count:]))


def _sample(kind: str, op: Op, named: dict[str, Any]) -> Sample:
    tensors: list[Tensor] = []

    def argument(value: Any) -> Arg:
        if isinstance(value, Tensor):
            tensors.append(value)
            return TensorRef(len(tensors) - 1)
        if isinstance(value, list | tuple):
            return tuple(argument(item) for item in value)
        return value  # type: ignore[no-any-return]

    args = {name: argument(value) for name, value in named.items()}
    with torch.random.fork_rng(devices=[]):
        keywords = {name: _with_tensors(value, tensors) for name, value in args.items()}
        outputs = _tensors(op(**keywords))
    call = OpCall(
        kind=kind,
        args=args,
        inputs=tuple(meta(tensor) for tensor in tensors),
        outputs=tuple(meta(tensor) for tensor in outputs),
    )
    return Sample(call, op, tuple(tensors), outputs)


# --- cutting and joining ------------------------------------------------------------------------


def cut(
    tensor: Tensor, placement: Placement, shares: tuple[int, ...], generator: torch.Generator
) -> list[Tensor]:
    if placement.kind == "R":
        return [tensor] * len(shares)
    if placement.kind == "P":
        return _summands(tensor, len(shares), generator)
    d, outer = placement.dim, placement.outer
    before, after = tensor.shape[:d], tensor.shape[d + 1 :]
    blocks = tensor.reshape(*before, outer, sum(shares), -1, *after)
    return [
        part.reshape(*before, tensor.shape[d] // sum(shares) * share, *after)
        for part, share in zip(torch.split(blocks, list(shares), dim=d + 1), shares, strict=True)
    ]


def _summands(tensor: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    if tensor.is_floating_point():
        noise = [torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)]
        noise += [torch.randn_like(tensor) for _ in range(count - 2)]
    else:
        noise = [torch.ones_like(tensor)] * (count - 1)
    return [*noise, tensor - torch.stack(noise).sum(0).to(tensor.dtype)]


def joined(
    parts: list[Tensor], placement: Placement, shares: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    if placement.kind == "P":
        return torch.stack(parts).sum(0)
    d, outer, units = placement.dim, placement.outer, sum(shares)
    inner = shape[d] // (outer * units)
    blocks = [
        part.reshape(*shape[:d], outer, share * inner, *shape[d + 1 :])
        for part, share in zip(parts, shares, strict=True)
    ]
    return torch.cat(blocks, dim=d + 1).reshape(shape)


# --- one rule on every rank ---------------------------------------------------------------------

_REFUSES_EMPTY = (
    *("split.Tensor", "unsafe_split.Tensor", "convolution", "native_group_norm", "attention"),
    *("native_batch_norm", "_native_batch_norm", "max_pool", "avg_pool", "adaptive_max_pool"),
    "fractional_max_pool",
    *(
        "im2col",
        "col2im",
        "pixel",
        "grid_sampler",
        "_adaptive_avg_pool",
        "upsample",
        "_upsample",
        "reflection_pad",
        "replication_pad",
        "max_unpool",
        "_fft",
        "_cdist_backward",
        "_weight_norm_interface",
    ),
)
"""Kinds that accept parts of size 0 in the batch dimension only."""


_REFUSES_EMPTY_BATCH = ("native_batch_norm_backward.default", "pixel_unshuffle.default")
"""The first kills the process (SIGFPE), the second returns its input."""


def skips(sample: Sample, result: RuleResult, share: int) -> bool:
    """Whether a device without a share has to leave the op out."""
    split = [p for p in result.inputs if p.kind == "S"]
    rank = len(sample.call.inputs[0].shape)
    batch = bool(split) and split[0].dim == 0 and result.inputs[0].kind == "S" and rank > 3
    batch = batch and sample.call.kind not in _REFUSES_EMPTY_BATCH
    refuses = sample.call.kind.startswith(_REFUSES_EMPTY)
    return share == 0 and refuses and bool(split) and not batch


def run_in_parts(
    sample: Sample, result: RuleResult, shares: tuple[int, ...], generator: torch.Generator
) -> list[tuple[Tensor, ...]]:
    """What each rank computes under ``result``, by the documented meaning of its special."""
    units = sum(shares)
    pieces = [
        cut(tensor, placement, shares, generator)
        for tensor, placement in zip(sample.tensors, result.inputs, strict=True)
    ]
    ranks: list[tuple[Tensor, ...]] = []
    for rank, share in enumerate(shares):
        args = local_args(sample.call, result, share, units)
        tensors = [piece[rank] for piece in pieces]
        if result.special == Special.BIAS_ON_ONE_RANK and rank != 0:
            for place in _summands_of(sample.call, result):
                tensors[place] = torch.zeros_like(tensors[place])
        if result.special == Special.NLL_GLOBAL_WEIGHT:
            args["reduction"] = 2
        if skips(sample, result, share):
            outputs = _nothing(sample, result, units)
        elif result.special == Special.CAUSAL_ROWS:
            outputs = _on_causal_rows(sample, args, tensors, sum(shares[:rank]), units)
        elif result.special == Special.OWN_WORDS:
            outputs = _on_own_words(sample, result, args, tensors, shares[: rank + 1], units)
        elif result.special == Special.NUMBERS_OF_ROWS:
            outputs = _completed(sample, pieces, rank)
        elif result.special == Special.AS_RESHAPE:
            shape = tuple(sample.outputs[0].shape)
            outputs = (tensors[0].reshape(local_shape(shape, result.outputs[0], share, units)),)
        else:
            outputs = sample.run(args, tensors)
        if result.special == Special.MEAN_TO_SUM:
            mean = outputs[0] * (share / units) if share else torch.zeros_like(outputs[0])
            outputs = (mean, *outputs[1:])
        ranks.append(outputs)
    if result.special == Special.NLL_GLOBAL_WEIGHT:
        weight = sum(outputs[1] for outputs in ranks)
        ranks = [(outputs[0] / weight, outputs[1]) for outputs in ranks]
    return ranks


def _summands_of(call: OpCall, result: RuleResult) -> Sequence[int]:
    """The inputs that must enter a sum over ranks once."""
    if "tensors" in call.args:
        return [place for place, needed in enumerate(result.inputs) if needed == R]
    return positions(call, "bias" if "bias" in call.args else "self")


def _on_own_words(
    sample: Sample, result: RuleResult, args: dict[str, Any], tensors: list[Tensor],
    shares: tuple[int, ...], units: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    def kernel(given: Sequence[Tensor], instead: Mapping[str, Any]) -> Sequence[Tensor]:
        return sample.run({**args, **instead}, list(given))

    (split,) = [each for each, place in enumerate(result.inputs) if place.kind == "S"]
    size = sample.call.inputs[split].shape[result.inputs[split].dim] // units
    words = range(sum(shares[:-1]) * size, sum(shares) * size)
    return tuple(on_own_words(sample.call, kernel, tensors, words))


def _completed(sample: Sample, pieces: list[list[Tensor]], rank: int) -> tuple[Tensor, ...]:
    given = [[piece[each] for piece in pieces] for each in range(len(pieces[0]))]
    numbers = [numbers_of_rows(sample.call, inputs) for inputs in given if inputs[0].numel()]
    return (completed(sample.call, given[rank], numbers),)


def _on_causal_rows(
    sample: Sample, args: dict[str, Any], tensors: list[Tensor], first: int, units: int
) -> tuple[Tensor, ...]:
    def kernel(given: Sequence[Tensor], instead: Mapping[str, Any]) -> Sequence[Tensor]:
        return sample.run({**args, **instead}, list(given))

    rows = shape_of(sample.call, "query")[2] // units
    return tuple(on_causal_rows(sample.call, kernel, tensors, first * rows))


def _nothing(sample: Sample, result: RuleResult, units: int) -> tuple[Tensor, ...]:
    return tuple(
        output
        if placement == R
        else torch.zeros(local_shape(tuple(output.shape), placement, 0, units), dtype=output.dtype)
        for output, placement in zip(sample.outputs, result.outputs, strict=True)
    )


_UNINITIALISED = ("empty", "new_empty")
_RANDOM = (Special.OWN_RANDOM_STREAM, Special.SHARED_RANDOM_STREAM)


def check(
    sample: Sample, result: RuleResult, shares: tuple[int, ...], generator: torch.Generator
) -> None:
    """Assert that the ranks' outputs are parts of the op's outputs, as ``result`` says."""
    ranks = run_in_parts(sample, result, shares, generator)
    units = sum(shares)
    for i, (whole, placement) in enumerate(zip(sample.outputs, result.outputs, strict=True)):
        parts = [outputs[i] for outputs in ranks]
        for part, share in zip(parts, shares, strict=True):
            wanted = local_shape(tuple(whole.shape), placement, share, units)
            assert tuple(part.shape) == wanted, f"output {i}: {tuple(part.shape)} for {wanted}"
        if result.special in _RANDOM or sample.call.kind.startswith(_UNINITIALISED):
            continue
        if placement == R:
            for part in parts:
                torch.testing.assert_close(part, whole, equal_nan=True)
        elif placement != L:
            got = joined(parts, placement, shares, tuple(whole.shape))
            torch.testing.assert_close(got, whole, equal_nan=True)


def axis_sizes(call: OpCall) -> list[int]:
    sizes = {size for tensor in call.inputs for size in tensor.shape}
    return [n for n in range(2, 7) if any(size % n == 0 for size in sizes if size)]


def uneven_shares(units: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    """Two ways to give ``units`` to three ranks, the second with an empty one."""
    one = int(torch.randint(1, units, (), generator=generator))
    two = int(torch.randint(0, units - one + 1, (), generator=generator))
    return [(one, two, units - one - two), (units - one, 0, one)]


# --- samples ------------------------------------------------------------------------------------


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Make:
    """Random tensors for samples, reproducible."""

    def __init__(self) -> None:
        self.generator = _generator(7)

    def real(self, *shape: int) -> Tensor:
        """Values in (0.1, 0.9), where every elementwise function is defined."""
        uniform = torch.rand(shape, dtype=torch.float64, generator=self.generator)
        return 0.1 + 0.8 * uniform

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        return self.below(2, *shape).bool()


def overload(kind: str) -> Any:
    name, _, version = kind.partition(".")
    return getattr(getattr(aten, name), version)


def elementwise_samples(kind: str, make: Make) -> Iterator[Sample]:
    """Calls built from the schema alone: all of one shape, then with broadcast operands."""
    op = overload(kind)
    logical = kind.startswith(("bitwise", "logical", "__"))
    for shapes in ([(5, 3, 6)] * 4, [(5, 3, 6), (3, 1), (6,), (5, 3, 6)]):
        args: list[Any] = []
        tensors = iter(shapes)
        for parameter in op._schema.arguments:
            if parameter.kwarg_only:
                break
            if str(parameter.type) == "Tensor":
                shape = next(tensors)
                if parameter.name in ("mask", "condition"):
                    args.append(make.mask(*shape))
                elif kind == "fill.Tensor" and args:
                    args.append(make.real())
                elif kind == "masked_fill.Tensor" and parameter.name == "value":
                    args.append(make.real())
                elif logical:
                    args.append(make.below(4, *shape))
                else:
                    args.append(make.real(*shape))
            elif parameter.default_value is None and "?" not in str(parameter.type):
                args.append(3 if logical else _number(str(parameter.type)))
            else:
                args.append(parameter.default_value)
        if sum(isinstance(arg, Tensor) for arg in args) > 1 or shapes[1] == (5, 3, 6):
            yield sample_of(op, *args)


def _number(kind: str) -> int | float | bool:
    if kind == "bool":
        return True
    return 2 if kind == "int" else 0.5


_SPECIAL_ELEMENTWISE = {
    "round.decimals",
    "where.Scalar",
    "clamp.Tensor",
    "clamp.default",
    "div.Tensor_mode",
    "div.Scalar_mode",
    "log_sigmoid_backward.default",
    "native_dropout_backward.default",
    "bitwise_left_shift.Tensor_Scalar",
    "bitwise_right_shift.Tensor_Scalar",
    "_prelu_kernel_backward.default",
    "rrelu_with_noise_backward.default",
    "bitwise_left_shift.Tensor",
    "bitwise_right_shift.Tensor",
    "__lshift__.Scalar",
    "__lshift__.Tensor",
    "__rshift__.Scalar",
    "__rshift__.Tensor",
    "gelu.default",
    "gelu_backward.default",
    "polygamma.default",
}


def all_samples() -> dict[str, list[Sample]]:
    make = Make()
    found: dict[str, list[Sample]] = {}
    for kind in (*NONLINEAR, *LINEAR_IN_FIRST, *IDENTITIES):
        if kind not in _SPECIAL_ELEMENTWISE:
            found[kind] = list(elementwise_samples(kind, make))
    for source in (
        more_elementwise,
        view_calls,
        matmul_calls,
        matrix_calls,
        spatial_calls,
        norm_calls,
        reduction_calls,
        loss_calls,
        indexing_calls,
        creation_calls,
    ):
        for kind, *args in source(make):
            keywords = args.pop() if args and isinstance(args[-1], dict) else {}
            found.setdefault(kind, []).append(sample_of(overload(kind), *args, **keywords))
    for of_our_own in (fused_samples, sparse_samples, expert_samples, check_samples):
        for sample in of_our_own(make):
            found.setdefault(sample.call.kind, []).append(sample)
    return found


Call = tuple[Any, ...]
"""Kind, positional arguments, and a dict of keyword-only ones at the end if there are any."""


def more_elementwise(make: Make) -> Iterator[Call]:
    x, y, mask = make.real(5, 3, 6), make.real(5, 3, 6), make.mask(5, 3, 6)
    whole = make.below(9, 5, 3, 6)
    yield "where.Scalar", mask, 1.0, 2.0
    yield "where.self", mask, x, y
    yield "where.self", make.mask(3, 6), x, make.real()
    yield "where.ScalarOther", mask, x, 0.0
    yield "where.ScalarOther", mask, x, 1.0
    yield "where.ScalarSelf", mask, 0.0, x
    yield "clamp.Tensor", x, y, None
    yield "clamp.Tensor", x, None, make.real(3, 1)
    yield "clamp.default", x, 0.3, 0.7
    yield "round.decimals", x, {"decimals": 1}
    yield "div.Tensor_mode", x, y, {"rounding_mode": "floor"}
    yield "div.Scalar_mode", x, 0.3, {"rounding_mode": "trunc"}
    yield "gelu.default", x
    yield "gelu.default", x, {"approximate": "tanh"}
    yield "gelu_backward.default", x, y, {"approximate": "tanh"}
    yield "log_sigmoid_backward.default", x, y, torch.exp(-y.abs())
    yield "native_dropout_backward.default", x, mask, 2.0
    yield "_prelu_kernel_backward.default", x, y, make.real(1, 3, 1)
    for trains in (True, False):
        noise = make.real(5, 3, 6)
        yield "rrelu_with_noise_backward.default", x, y - 0.5, noise, 0.1, 0.3, trains, False
    for kind in ("left", "right"):
        yield f"bitwise_{kind}_shift.Tensor_Scalar", whole, 1
        yield f"bitwise_{kind}_shift.Tensor", whole, make.below(3, 3, 1)
    for kind in ("l", "r"):
        yield f"__{kind}shift__.Scalar", whole, 1
        yield f"__{kind}shift__.Tensor", whole, make.below(3, 3, 1)
    yield "bucketize.Tensor", x, make.real(6).sort().values
    yield "isin.Tensor_Tensor", whole, make.below(9, 5)
    yield "polygamma.default", 1, x
    yield "lerp.Tensor", x, y, make.real(3, 6)
    yield "complex.default", x, y
    yield "_to_copy.default", x, {"dtype": torch.float32}
    yield "_to_copy.default", 10 * x, {"dtype": torch.int64}
    yield "_to_copy.default", whole, {"dtype": torch.float64}
    yield "_conj.default", torch.complex(x, y)
    for kind in ("add.Tensor", "sub.Tensor"):
        yield kind, x, y
        yield kind, x, make.real(6), {"alpha": 3}
        yield kind, x, 2.0
        yield kind, make.real(5, 1, 6), make.real(3, 1)
    yield "mul.Tensor", x, y
    yield "mul.Tensor", x, make.real()
    yield "mul.Tensor", x, 2.0
    yield "lerp.Scalar", x, y, 0.3
    yield "masked_fill.Scalar", x, mask, 0
    yield "masked_fill.Scalar", x, make.mask(5, 1, 1), float("-inf")
    yield "copy.default", x, y
    yield "copy.default", x, make.real(6)
    yield "copy_.default", x, y
    yield "copy_.default", x, make.real(6)


def view_calls(make: Make) -> Iterator[Call]:
    x, flat, square = make.real(5, 6, 4), make.real(30, 4), make.real(5, 6, 6)
    for kind in ("view.default", "_unsafe_view.default", "reshape.default", "view_copy.default"):
        yield kind, x, (30, 4)
        yield kind, x, (5, -1)
        yield kind, flat, (5, 6, 2, 2)
        yield kind, x, (6, 5, 4)
    yield "flatten.using_ints", x, 1
    yield "squeeze.default", make.real(5, 1, 6, 1)
    yield "squeeze.dim", make.real(5, 1, 6, 1), 1
    yield "squeeze.dim", x, 1
    yield "squeeze.dims", make.real(5, 1, 6, 1), (1, 3)
    yield "unsqueeze.default", x, 1
    yield "unsqueeze.default", x, -1
    yield "permute.default", x, (2, 0, -2)
    yield "transpose.int", x, 0, -1
    yield "t.default", flat
    yield "t.default", make.real(5)
    yield "expand.default", make.real(5, 1, 4), (3, -1, 6, 4)
    yield "expand.default", make.real(), (5, 4)
    yield "repeat.default", x, (2, 1, 3, 1)
    yield "flip.default", x, (0, -1)
    yield "roll.default", x, (1, 2), (1, 2)
    yield "roll.default", x, (7,)
    yield "tril.default", square
    yield "triu.default", square, 1
    yield "constant_pad_nd.default", x, (1, 2, 0, 0), 0
    yield "constant_pad_nd.default", x, (0, 0, 1, 1), 0.5
    yield "constant_pad_nd.default", x, (0, 0, 0, -1)
    for kind in ("cat.default", "concat.default"):
        yield kind, (x, make.real(5, 6, 4), make.real(5, 6, 4)), -1
        yield kind, (x, make.real(5, 12, 4)), 1
        yield kind, (x, make.real(5, 7, 4)), 1
        yield kind, (make.real(0), x), 1
    yield "stack.default", (x, make.real(5, 6, 4)), 1
    yield "stack.default", (x, make.real(5, 6, 4)), -1
    for kind in ("split.Tensor", "unsafe_split.Tensor"):
        yield kind, x, 2, 1
        yield kind, x, 4, 1
    for kind in ("split_with_sizes.default", "unsafe_split_with_sizes.default", "split.sizes"):
        yield kind, x, (2, 4), 1
        yield kind, x, (1, 5), -2
    for kind in ("chunk.default", "unsafe_chunk.default"):
        yield kind, x, 3, 1
    yield "unbind.int", x, 1
    yield "select.int", x, 1, 2
    yield "select.int", x, -1, -1
    yield "select_backward.default", x, (5, 3, 6, 4), 1, 2
    yield "slice.Tensor", x
    yield "slice.Tensor", x, 1, 2, 4
    yield "slice.Tensor", x, 1, -3, 2**63 - 1
    yield "slice.Tensor", x, 1, 1, 6, 2
    yield "slice.Tensor", x, 1, 0, 2**63 - 1
    yield "slice_backward.default", x, (5, 12, 4), 1, 6, 12, 1
    yield "slice_backward.default", x, (5, 8, 4), -2, 1, 7, 1
    yield "slice_backward.default", x, (5, 6, 4), 1, 0, 2**63 - 1, 1
    yield "slice_scatter.default", x, make.real(5, 2, 4), 1, 2, 4
    yield "select_scatter.default", x, make.real(5, 4), 1, 3
    yield "diagonal.default", square, 1, 1, 2
    yield "diagonal.default", square, 0, 2, 0
    yield "diagonal_scatter.default", square, make.real(5, 5), 1, 1, 2
    yield "diagonal_scatter.default", square, make.real(6, 5), 0, 2, 0
    yield "diagonal_backward.default", make.real(5, 5), (5, 6, 6), 1, 1, 2
    yield "diagonal_backward.default", make.real(6, 5), (5, 6, 6), 0, 2, 0
    yield "diag_embed.default", x
    yield "diag_embed.default", x, 1, 0, 2
    yield "rot90.default", x, 1, (1, 2)
    yield "unfold_backward.default", make.real(5, 2, 4, 3), (5, 6, 4), 1, 3, 2
    yield "channel_shuffle.default", make.real(5, 6, 2, 3), 2
    yield "unfold.default", x, 1, 3, 2
    yield "view_as_real.default", torch.complex(x, x)
    yield "view_as_complex.default", make.real(5, 6, 2)
    yield "as_strided.default", x, (5, 4), (24, 1)
    yield "_reshape_alias.default", x, (30, 4), (4, 1)
    yield "as_strided_scatter.default", x, make.real(5, 4), (5, 4), (24, 1)


def matmul_calls(make: Make) -> Iterator[Call]:
    a, b = make.real(6, 10), make.real(10, 4)
    yield "mm.default", a, b
    yield "addmm.default", make.real(4), a, b
    yield "addmm.default", make.real(6, 4), a, b, {"alpha": 2, "beta": 3}
    yield "addmm.default", make.real(6, 1), a, b
    yield "mv.default", a, make.real(10)
    yield "dot.default", make.real(6), make.real(6)
    yield "vdot.default", make.real(6), make.real(6)
    c, d = make.real(5, 6, 4), make.real(5, 4, 3)
    yield "bmm.default", c, d
    yield "baddbmm.default", make.real(6, 3), c, d
    yield "baddbmm.default", make.real(5, 1, 3), c, d
    yield "linear.default", make.real(5, 6, 4), make.real(3, 4), make.real(3)
    yield "linear.default", make.real(5, 6, 4), make.real(3, 4)


def matrix_calls(make: Make) -> Iterator[Call]:
    """Distances, Fourier transforms, and ops on each matrix of a batch."""
    one, other = make.real(5, 6, 4), make.real(5, 3, 4)
    yield "_cdist_forward.default", one, other, 2.0, None
    yield "_cdist_forward.default", one[0], other[0], 1.0, None
    between = aten._cdist_forward(one, other, 2.0, None)
    yield "_cdist_backward.default", make.real(5, 6, 3), one, other, 2.0, between
    points = make.real(10, 4)  # of all samples
    far = aten._cdist_forward(one, points, 1.0, None)
    yield "_cdist_forward.default", one, points, 1.0, None
    yield "_cdist_backward.default", make.real(5, 6, 10), one, points, 1.0, far
    yield "_cdist_backward.default", far.mT.contiguous(), points, one, 1.0, far.mT.contiguous()
    yield "linalg_cross.default", make.real(5, 3, 6), make.real(5, 3, 6), {"dim": 1}
    yield "linalg_cross.default", make.real(1, 6, 3), make.real(5, 6, 3)
    left, right, weight = make.real(5, 4), make.real(5, 3), make.real(6, 4, 3)
    yield "_trilinear.default", left, weight, right, [1, 3], [0], [1, 2], [2, 3]
    yield "_trilinear.default", one, one, one, [], [], [], [1]
    signal = make.real(5, 6, 4)
    spectrum = aten._fft_r2c(signal, [1], 0, True)
    yield "_fft_r2c.default", signal, [1], 0, True
    yield "_fft_r2c.default", signal, [0, 2], 2, False
    yield "_fft_c2r.default", spectrum, [1], 2, 6
    yield "_fft_c2c.default", spectrum, [2], 0, True
    matrix = make.real(5, 2, 4, 4) + 4 * torch.eye(4)
    symmetric, columns = matrix @ matrix.mT, make.real(5, 2, 4, 3)
    for kind in ("linalg_inv_ex", "linalg_lu_factor_ex", "_linalg_det", "_linalg_slogdet"):
        yield f"{kind}.default", matrix
    for kind in ("linalg_eig", "linalg_qr", "_linalg_svd", "linalg_matrix_exp"):
        yield f"{kind}.default", matrix
    for kind in ("linalg_cholesky_ex", "_linalg_eigh", "cholesky_inverse"):
        yield f"{kind}.default", symmetric
    yield "linalg_pinv.atol_rtol_tensor", matrix
    yield "_linalg_solve_ex.default", matrix, columns
    yield "_linalg_solve_ex.default", matrix[:, 0], columns[:, 0, :, 0]
    yield "_linalg_solve_ex.default", matrix, columns[0, 0]
    yield "linalg_solve_triangular.default", matrix, columns, {"upper": True}
    yield "linalg_solve_triangular.default", matrix[:1, :1], columns[:1, :1], {"upper": True}
    rows = columns.mT.contiguous()
    yield "linalg_solve_triangular.default", matrix, rows, {"upper": False, "left": False}
    yield "cholesky_solve.default", columns, symmetric
    cube = make.real(4, 4, 4) + 4 * torch.eye(4)  # as many matrices as rows
    for kind in ("_linalg_solve_ex", "linalg_solve_triangular"):
        more = {"upper": True} if "triangular" in kind else {}
        yield f"{kind}.default", cube, cube[0], more
    yield "_linalg_solve_ex.default", cube, make.real(4, 6)
    yield "cholesky_solve.default", cube, cube[0]
    yield "linalg_qr.default", matrix, "r"
    factors, pivots, codes = aten.linalg_lu_factor_ex(matrix)
    yield "linalg_lu_solve.default", factors, pivots, columns
    yield "_linalg_check_errors.default", codes, "linalg.inv", {"is_matrix": False}


def spatial_calls(make: Make) -> Iterator[Call]:
    image, same = make.real(5, 4, 7, 7), [1, 1]
    plain = (same, same, same, False, [0, 0])
    turned = (same, same, same, True, [0, 0])
    for groups, transposed in ((1, False), (1, True), (4, False), (2, False), (4, True)):
        channels = (4, 6) if transposed and groups == 1 else (8, 4 // groups)
        if transposed and groups > 1:
            channels = (4, 2)
        weight = make.real(*channels, 3, 3)
        bias = make.real(channels[1] * groups if transposed else channels[0])
        settings = turned if transposed else plain
        yield "convolution.default", image, weight, bias, *settings, groups
        yield "convolution.default", image, weight, None, *settings, groups
        out = aten.convolution.default(image, weight, None, *settings, groups)
        for mask in ([True, True, True], [False, True, False]):
            gradient = make.real(*out.shape)
            sizes = [out.shape[1]]
            yield (
                "convolution_backward.default",
                *(gradient, image, weight, sizes, *settings, groups, mask),
            )
    fraction = ([2, 2], [3, 3])
    out, indices = aten.fractional_max_pool2d(image, *fraction, make.real(5, 4, 2))
    yield "fractional_max_pool2d.default", image, *fraction, make.real(5, 4, 2)
    yield "fractional_max_pool2d_backward.default", out, image, *fraction, indices
    voxels, fraction = make.real(5, 4, 6, 6, 6), ([2, 2, 2], [3, 3, 3])
    out, indices = aten.fractional_max_pool3d(voxels, *fraction, make.real(5, 4, 3))
    yield "fractional_max_pool3d.default", voxels, *fraction, make.real(5, 4, 3)
    yield "fractional_max_pool3d_backward.default", out, voxels, *fraction, indices
    yield "affine_grid_generator.default", make.real(5, 2, 3), (5, 4, 6, 3), False
    yield "affine_grid_generator_backward.default", make.real(5, 6, 3, 2), (5, 4, 6, 3), False
    window = ([3, 3], [2, 2], [1, 1])
    out, indices = aten.max_pool2d_with_indices(image, *window)
    yield "max_pool2d_with_indices.default", image, *window
    yield "max_pool2d_with_indices.default", image[0], *window
    yield (
        "max_pool2d_with_indices_backward.default",
        *(out, image, *window, [1, 1], False, indices),
    )
    yield "avg_pool2d.default", image, *window
    yield "avg_pool2d_backward.default", out, image, *window, False, True, None
    yield "_adaptive_avg_pool2d.default", image, [3, 2]
    yield "_adaptive_avg_pool2d_backward.default", make.real(5, 4, 3, 2), image
    adaptive, chosen = aten.adaptive_max_pool2d(image, [3, 2])
    yield "adaptive_max_pool2d.default", image, [3, 2]
    yield "adaptive_max_pool2d_backward.default", adaptive, image, chosen
    yield "avg_pool1d.default", make.real(5, 4, 7), [3]
    video = make.real(5, 4, 4, 4, 4)
    small, where = aten.max_pool3d_with_indices(video, [2, 2, 2], [2, 2, 2])
    cube = ([2, 2, 2], [2, 2, 2], [0, 0, 0])
    yield "max_pool3d_with_indices.default", video, *cube
    yield (
        "max_pool3d_with_indices_backward.default",
        *(small, video, *cube, [1, 1, 1], False, where),
    )
    yield "avg_pool3d.default", video, *cube
    yield "avg_pool3d_backward.default", small, video, *cube, False, True, None
    yield "_adaptive_avg_pool3d.default", video, [2, 2, 2]
    yield "_adaptive_avg_pool3d_backward.default", small, video
    chosen = aten.adaptive_max_pool3d(video, [2, 2, 2])[1]
    yield "adaptive_max_pool3d.default", video, [2, 2, 2]
    yield "adaptive_max_pool3d_backward.default", small, video, chosen
    big = make.real(5, 4, 9, 9)
    for name in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
        yield f"{name}.default", image, [9, 9]
        yield f"{name}_backward.default", big, [9, 9], [5, 4, 7, 7]
    for name in ("upsample_bilinear2d", "upsample_bicubic2d"):
        yield f"{name}.default", image, [9, 9], False
        yield f"{name}_backward.default", big, [9, 9], [5, 4, 7, 7], False
    for name in ("reflection_pad2d", "replication_pad2d"):
        yield f"{name}.default", image, [1, 1, 1, 1]
        yield f"{name}_backward.default", big, image, [1, 1, 1, 1]
    for name, corners in (("upsample_nearest1d", ()), ("upsample_linear1d", (False,))):
        yield f"{name}.default", make.real(5, 4, 7), [9], *corners
        yield f"{name}_backward.default", make.real(5, 4, 9), [9], [5, 4, 7], *corners
    yield "pixel_shuffle.default", make.real(5, 8, 4, 6), 2
    yield "pixel_unshuffle.default", make.real(5, 8, 4, 6), 2
    yield "im2col.default", image, [3, 3], [1, 1], [1, 1], [1, 1]
    yield "im2col.default", image[0], [3, 3], [1, 1], [1, 1], [1, 1]
    yield "col2im.default", make.real(5, 36, 49), [7, 7], [3, 3], [1, 1], [1, 1], [1, 1]
    grid, sampled = make.real(5, 6, 3, 2), make.real(5, 4, 6, 3)
    yield "grid_sampler_2d.default", image, grid, 0, 0, False
    yield "grid_sampler_2d_backward.default", sampled, image, grid, 0, 0, False, [True, True]
    points, taken = make.real(5, 2, 3, 3, 3), make.real(5, 4, 2, 3, 3)
    yield "grid_sampler_3d.default", video, points, 0, 0, False
    yield "grid_sampler_3d_backward.default", taken, video, points, 0, 0, False, [True, True]
    large = make.real(5, 4, 6, 6, 6)
    for name, corners in (
        ("upsample_nearest3d", ()),
        ("_upsample_nearest_exact3d", ()),
        ("upsample_trilinear3d", (False,)),
    ):
        yield f"{name}.default", video, [6, 6, 6], *corners
        yield f"{name}_backward.default", large, [6, 6, 6], [5, 4, 4, 4, 4], *corners
    for name in ("reflection_pad3d", "replication_pad3d"):
        yield f"{name}.default", video, [1] * 6
        yield f"{name}_backward.default", large, video, [1] * 6
    yield "replication_pad1d.default", make.real(5, 4, 7), [1, 1]
    yield "replication_pad1d_backward.default", make.real(5, 4, 9), make.real(5, 4, 7), [1, 1]
    yield "_upsample_nearest_exact1d.default", make.real(5, 4, 7), [9]
    yield "_upsample_nearest_exact1d_backward.default", make.real(5, 4, 9), [9], [5, 4, 7]
    yield "max_unpool2d.default", out, indices, [7, 7]
    yield "max_unpool3d.default", small, where, [4, 4, 4], [2, 2, 2], [0, 0, 0]
    yield "reflection_pad1d.default", make.real(5, 4, 7), [1, 1]
    yield "reflection_pad1d_backward.default", make.real(5, 4, 9), make.real(5, 4, 7), [1, 1]


def norm_calls(make: Make) -> Iterator[Call]:
    x, w, b = make.real(5, 3, 6), make.real(6), make.real(6)
    yield "native_layer_norm.default", x, [6], w, b, 1e-5
    yield "native_layer_norm.default", x, [3, 6], None, None, 1e-5
    _, mean, rstd = aten.native_layer_norm(x, [6], w, b, 1e-5)
    for mask in ([True, True, True], [True, False, False]):
        yield "native_layer_norm_backward.default", x.flip(0), x, [6], mean, rstd, w, b, mask
    yield "_fused_rms_norm.default", x, [6], w, 1e-5
    y, w, b = make.real(5, 12, 7), make.real(12), make.real(12)
    yield "native_group_norm.default", y, w, b, 5, 12, 7, 6, 1e-5
    yield "native_group_norm.default", y, None, None, 5, 12, 7, 4, 1e-5
    _, mean, rstd = aten.native_group_norm(y, w, b, 5, 12, 7, 6, 1e-5)
    yield (
        "native_group_norm_backward.default",
        *(y.flip(0), y, mean, rstd, w, 5, 12, 7, 6, [True, True, True]),
    )
    for g in (make.real(5, 1, 1), make.real(1, 1, 7)):
        dim = 0 if len(g) == 5 else 2
        _, lengths = aten._weight_norm_interface(y, g, dim)
        yield "_weight_norm_interface.default", y, g, dim
        yield "_weight_norm_interface_backward.default", y.flip(0), y, g, lengths, dim
    z = make.real(5, 6, 7, 7)
    w, b, average, variance = make.real(6), make.real(6), make.real(6), make.real(6)
    for training in (True, False):
        settings = (training, 0.1, 1e-5)
        yield "native_batch_norm.default", z, w, b, average, variance, *settings
        yield "_native_batch_norm_legit.default", z, w, b, average, variance, *settings
        yield "_native_batch_norm_legit_functional.default", z, w, b, average, variance, *settings
        _, mean, rstd = aten.native_batch_norm(
            z, w, b, average.clone(), variance.clone(), *settings
        )
        yield (
            "native_batch_norm_backward.default",
            *(z.flip(0), z, w, average, variance, mean, rstd, training, 1e-5, [True] * 3),
        )
    yield "_native_batch_norm_legit.no_stats", z, w, b, True, 0.1, 1e-5
    yield "_native_batch_norm_legit_no_training.default", z, w, b, average, variance, 0.1, 1e-5


def reduction_calls(make: Make) -> Iterator[Call]:
    x, whole = make.real(5, 6, 4), make.below(5, 5, 6, 4)
    for kind in ("sum.default", "mean.default", "nansum.default", "count_nonzero.default"):
        yield kind, x
    yield "sum.default", whole
    yield "sum.dim_IntList", x, (0, -1)
    yield "sum.dim_IntList", x, (1,), True
    yield "sum.dim_IntList", x, None
    yield "mean.dim", x, (-2, -1), True
    yield "mean.dim", x, (0,)
    yield "count_nonzero.dim_IntList", whole, (1,)
    for kind in ("amax.default", "amin.default"):
        yield kind, x, (0, 2)
    for kind in ("max", "min", "any", "all", "prod"):
        yield f"{kind}.default", x
    for kind in ("max.dim", "min.dim", "any.dim", "all.dim", "median.dim", "prod.dim_int"):
        yield kind, x, 1, True
    for kind in ("any.dims", "all.dims"):
        yield kind, x, (0, 1)
    for kind in ("argmax.default", "argmin.default"):
        yield kind, x, 1
        yield kind, x
    yield "kthvalue.default", x, 2, 1
    yield "mode.default", whole, 1
    yield "logsumexp.default", x, (1,)
    yield "linalg_vector_norm.default", x, 2, (1,)
    yield "linalg_vector_norm.default", x
    yield "norm.ScalarOpt_dim", x, 2, [1], True
    yield "norm.ScalarOpt_dim", x, None, [0, 2]
    yield "nanmedian.dim", x, 1
    yield "median.default", x
    yield "aminmax.default", x, {"dim": 1}
    yield "aminmax.default", x
    yield "renorm.default", x, 2, 1, 0.5
    for kind in ("var", "std", "var_mean", "std_mean"):
        yield f"{kind}.correction", x, (1,), {"correction": 1, "keepdim": True}
        yield f"{kind}.correction", x
    for kind in ("_softmax", "_log_softmax"):
        yield f"{kind}.default", x, -1, False
        yield f"{kind}_backward_data.default", x.flip(0), x, 1, torch.float64
    yield "_safe_softmax.default", x, -1
    yield "glu.default", x, 1
    yield "glu_backward.default", make.real(5, 3, 4), x, 1
    yield "glu.default", x
    for kind in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        yield f"{kind}.default", x, 1
    for kind in ("sort", "argsort"):
        yield f"{kind}.default", x
        yield f"{kind}.stable", x, {"stable": True, "dim": 1}
    yield "topk.default", x, 2
    yield "topk.default", x, 2, 1


def loss_calls(make: Make) -> Iterator[Call]:
    x, y = make.real(5, 6), make.real(5, 6)
    elementwise: dict[str, tuple[Any, ...]] = {
        "mse_loss": (),
        "soft_margin_loss": (),
        "smooth_l1_loss": (0.5,),
        "huber_loss": (0.5,),
    }
    for reduction in (0, 1, 2):
        gradient = make.real(5, 6) if reduction == 0 else make.real()
        for kind, settings in elementwise.items():
            yield f"{kind}.default", x, y, reduction, *settings
            yield f"{kind}_backward.default", gradient, x, y, reduction, *settings
        margins = (x, make.below(6, 5), 1, 1.0, make.real(6), reduction)
        yield "multi_margin_loss.default", *margins
        one_each = make.real(5) if reduction == 0 else make.real()
        yield "multi_margin_loss_backward.default", one_each, *margins
        sets = make.below(7, 5, 6) - 1
        yield "multilabel_margin_loss_forward.default", x, sets, reduction
        _, is_target = aten.multilabel_margin_loss_forward(x, sets, reduction)
        given = (x, sets, reduction, is_target)
        yield "multilabel_margin_loss_backward.default", one_each, *given
        yield "binary_cross_entropy.default", x, y, make.real(5, 6), reduction
        yield "binary_cross_entropy.default", x, y, None, reduction
        yield "binary_cross_entropy_backward.default", gradient, x, y, None, reduction
        yield "binary_cross_entropy_with_logits.default", x, y, None, make.real(6), reduction
        log, weight = make.real(10, 6).log(), make.real(6)
        labels = make.below(6, 10)
        labels[::3] = -100
        for w in (weight, None):
            total = aten.nll_loss_forward(log, labels, w, reduction, -100)[1]
            yield "nll_loss_forward.default", log, labels, w, reduction, -100
            gradient = make.real(10) if reduction == 0 else make.real()
            yield (
                "nll_loss_backward.default",
                *(gradient, log, labels, w, reduction, -100, total),
            )
        log, labels = make.real(5, 6, 4, 3).log(), make.below(6, 5, 4, 3)
        total = aten.nll_loss2d_forward(log, labels, weight, reduction, 2)[1]
        yield "nll_loss2d_forward.default", log, labels, weight, reduction, 2
        gradient = make.real(5, 4, 3) if reduction == 0 else make.real()
        yield (
            "nll_loss2d_backward.default",
            *(gradient, log, labels, weight, reduction, 2, total),
        )
    yield "nll_loss_forward.default", make.real(6), torch.tensor(2), None, 1, -100


def indexing_calls(make: Make) -> Iterator[Call]:
    table, tokens = make.real(9, 6), make.below(9, 5, 3)
    yield "embedding.default", table, tokens
    yield "embedding.default", table, tokens, 2
    for by_frequency in (False, True):
        yield (
            "embedding_dense_backward.default",
            *(make.real(5, 3, 6), tokens, 9, 2, by_frequency),
        )
    x, narrow = make.real(5, 6, 4), make.below(6, 5, 3, 4)
    yield "gather.default", x, 1, narrow
    yield "gather.default", x, 1, make.below(6, 4, 3, 4)
    source = make.real(5, 3, 4)
    # Every index names a place of its own, so that the order of writing does not matter.
    once = make.real(5, 6, 4).argsort(1)[:, :3]
    yield "scatter.src", x, 1, once, source
    yield "scatter.src", x, 1, once[:4], source
    yield "scatter.value", x, 1, once, 0
    yield "scatter.value", x, 1, once, 3.0
    yield "scatter_add.default", x, 1, narrow, source
    yield "scatter_add.default", x, 1, narrow[:, :2], source
    yield "scatter_reduce.two", x, 1, narrow, source, "amax"
    yield "scatter.reduce", x, 1, narrow, source, {"reduce": "multiply"}
    yield "scatter.value_reduce", x, 1, narrow, 2.0, {"reduce": "multiply"}
    few = make.below(6, 3)
    yield "index_copy.default", x, 1, torch.tensor([4, 0, 2]), source
    for value in (0, 3.0):
        yield "index_fill.int_Scalar", x, 1, few, value
    yield "index_fill.int_Tensor", x, 1, few, make.real()
    yield "index_select.default", x, 1, few
    yield "index_add.default", x, 1, few, source, {"alpha": 2}
    yield "index_reduce.default", x, 1, few, source, "amax"
    table, rows, begins = make.real(9, 6), make.below(9, 12), torch.arange(0, 12, 4)
    for mode, weights in ((0, make.real(12)), (1, None), (2, None)):
        bags = table, rows, begins, False, mode, False, weights
        yield "_embedding_bag.default", *bags
        _, *kept = aten._embedding_bag(*bags)
        gradient, rest = make.real(3, 6), (9, False, mode, False, weights)
        yield "_embedding_bag_backward.default", gradient, rows, begins, *kept, *rest
    kept = aten._embedding_bag(table, rows, begins, False, 0, False, make.real(12))[1]
    yield (
        "_embedding_bag_per_sample_weights_backward.default",
        *(make.real(3, 6), table, rows, begins, kept, 0),
    )
    for kind in ("index.Tensor", "_unsafe_index.Tensor"):
        yield kind, x, (None, few)
        yield kind, x, (make.below(5, 2, 3), make.below(6, 3))
        yield kind, x, (make.below(5, 3), None, make.below(4, 2, 1))
        yield kind, x, (None, make.below(6, 2, 3), make.below(4, 1, 3))
    yield "index.Tensor", x, (make.mask(5),)
    apart = (torch.tensor([0, 3, 1]), None, torch.tensor([[1], [3]]))
    for kind in ("index_put.default", "_unsafe_index_put.default", "_index_put_impl_.default"):
        for adds in (True, False):
            yield kind, x, (None, torch.tensor([4, 0, 2])), make.real(5, 3, 4), adds
            yield kind, x, (torch.tensor([0, 3, 1]), torch.tensor([4, 0, 2])), make.real(4), adds
            yield kind, x, apart, make.real(2, 1, 6), adds
    yield "index_put.default", x, (make.mask(5),), make.real(), False
    yield "nonzero.default", tokens
    yield "masked_select.default", x, make.mask(5, 6, 4)
    yield "masked_scatter.default", x, make.mask(5, 6, 4), make.real(120)
    yield "bincount.default", make.below(6, 10)
    yield "_unique2.default", tokens
    yield "unique_dim.default", tokens, 0
    yield "searchsorted.Tensor", make.real(6).sort().values, x
    yield "searchsorted.Tensor", make.real(5, 6, 3).sort().values, x
    unsorted = make.real(5, 6, 3)
    yield "searchsorted.Tensor", unsorted, x, {"sorter": unsorted.argsort()}
    yield "_pdist_forward.default", make.real(5, 4)
    yield "_pdist_backward.default", make.real(10), make.real(5, 4), 2.0, make.real(10)
    yield "histc.default", x
    yield "histc.default", x, 7, -1.0, 2.0
    yield "take.default", x, few
    yield "put.default", make.real(9), few, make.real(*few.shape)
    yield "put.default", make.real(9), few, make.real(*few.shape), True
    yield "put.default", make.real(9), few, make.real(few.numel()), True
    yield "block_diag.default", [make.real(5, 4), make.real(3, 2)]
    yield "repeat_interleave.Tensor", make.below(3, 5)


def creation_calls(make: Make) -> Iterator[Call]:
    x = make.real(5, 6)
    for name in ("zeros", "ones"):
        yield f"{name}.default", (5, 6)
        yield f"new_{name}.default", x, (5, 3)
        yield f"{name}_like.default", x
    yield "full.default", (5, 6), 2.0
    yield "new_full.default", x, (5, 3), 2.0
    yield "full_like.default", x, 2.0
    yield "empty.memory_format", (5, 6)
    yield "new_empty.default", x, (5, 3)
    yield "empty_like.default", x
    yield "empty_strided.default", (5, 6), (6, 1)
    yield "new_empty_strided.default", x, (5, 6), (6, 1)
    yield "scalar_tensor.default", 2.0
    yield "arange.default", 5
    yield "arange.start", 1, 5
    yield "arange.start_step", 1, 5, 2
    yield "linspace.default", 0, 1, 5
    yield "eye.default", 5
    yield "eye.m", 5, 3
    yield "tril_indices.default", 5, 3
    yield "triu_indices.default", 5, 3
    yield "bernoulli.default", x
    yield "bernoulli.p", x, 0.5
    yield "bernoulli.Tensor", x, make.real(6)
    for name in ("rand_like", "randn_like", "uniform", "normal_functional", "exponential"):
        yield f"{name}.default", x
    yield "randint_like.default", x, 5
    yield "randint_like.low_dtype", x, 2, 5
    yield "native_dropout.default", x, 0.5, True
    rounded, scale, zero = "fake_quantize_per_tensor_affine_cachemask", torch.tensor(0.1), 0
    yield f"{rounded}.default", x, 0.1, zero, -8, 7
    one, is_on = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    yield f"_{rounded}_tensor_qparams.default", x, scale, one, is_on, -8, 7
    by_channel = "fake_quantize_per_channel_affine_cachemask.default"
    yield by_channel, x, make.real(6).float(), torch.zeros(6, dtype=torch.int32), 1, -8, 7
    yield "rand.default", (5, 6)
    yield "randn.default", (5, 6)
    yield "randint.default", 5, (5, 6)
    yield "randint.low", 2, 5, (5, 6)
    yield "randperm.default", 5
    yield "multinomial.default", x, 2
    yield "cauchy.default", x
    yield "log_normal.default", x
    yield "geometric.default", x, 0.5
    for name in ("_standard_gamma", "poisson", "_sample_dirichlet"):
        yield f"{name}.default", x.abs() + 1
    yield "binomial.default", torch.full_like(x, 3), x.sigmoid()
    yield "normal.Tensor_Tensor", x, x.abs()
    yield "normal.Tensor_float", x, 1.0
    yield "normal.float_Tensor", 0.0, x.abs()
    yield "rrelu_with_noise_functional.default", x, torch.ones_like(x), 0.1, 0.3, True


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    groups = query.shape[1] // max(key.shape[1], 1) or 1
    keys, values = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, keys, values, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Any:
    groups = query.shape[1] // max(key.shape[1], 1) or 1
    keys, values = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = kernel(
        *(grad_out, query, keys, values, out, logsumexp, dropout_p, is_causal),
        attn_mask=attn_mask,
        scale=scale,
    )
    one, *rest = grads
    return one, *(g.unflatten(1, (-1, groups)).sum(2) if groups > 1 else g for g in rest)


def attention_samples(make: Make) -> Iterator[Sample]:
    mask = make.real(3, 1, 6, 5)
    for heads, masked, causal in (
        (4, None, False),
        (4, None, True),
        (4, mask, False),
        (4, mask[:1], False),
        (4, mask[0, 0], False),
        (2, None, False),
    ):
        query, keys = make.real(3, 4, 6, 8), make.real(3, heads, 6 if causal else 5, 8)
        tensors = {"query": query, "key": keys, "value": make.real(*keys.shape)}
        settings = {"dropout_p": 0.0, "is_causal": causal, "scale": None}
        forward = _sample("attention", attention, {**tensors, "attn_mask": masked, **settings})
        yield forward
        out, logsumexp = forward.outputs
        saved = {"out": out, "logsumexp": logsumexp, "attn_mask": masked}
        gradient = {"grad_out": make.real(*out.shape)}
        yield _sample(
            "attention_backward", attention_backward, {**gradient, **tensors, **saved, **settings}
        )


def rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """The fused backward exists on GPUs only; this is its formula for one normalised dim."""
    scaled, normal = grad_out * weight, input * rstd
    grad_input = rstd * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    grad_weight = (grad_out * normal).flatten(0, -2).sum(0)
    pairs = zip((grad_input, grad_weight), output_mask, strict=True)
    return tuple(gradient if wanted else None for gradient, wanted in pairs)


def fused_samples(make: Make) -> Iterator[Sample]:
    yield from attention_samples(make)
    x, weight = make.real(5, 3, 6), make.real(6)
    rstd = aten._fused_rms_norm(x, [6], weight, 1e-5)[1]
    tensors = {"grad_out": make.real(5, 3, 6), "input": x, "normalized_shape": [6]}
    for mask in ([True, True], [False, True]):
        named = {**tensors, "rstd": rstd, "weight": weight, "output_mask": mask}
        yield _sample("_fused_rms_norm_backward.default", rms_norm_backward, named)


def sparse_samples(make: Make) -> Iterator[Sample]:
    at, to = np.array([0, 0, 2, 3, 3, 3]), np.array([1, 4, 0, 0, 2, 4])
    pattern = pattern_of(at, to, 4, 5)
    matrix = {
        "row_starts": torch.from_numpy(pattern.row_starts),
        "columns": torch.from_numpy(pattern.columns),
        "weights": make.real(6),
        "pattern": pattern.key,
    }
    for dense in (make.real(5, 6), make.real(3, 5, 4)):
        yield _sample(SPARSE_PRODUCT, multiply, {"dense": dense, **matrix})


def expert_samples(make: Make) -> Iterator[Sample]:
    ids = torch.tensor([2, 0, 3, 3, 0, 2])  # no row for expert 1
    rows, weights = make.real(6, 4), make.real(4, 4, 6)
    yield _sample(ROWS_PRODUCT, product, {"rows": rows, "matrices": weights, "ids": ids})
    columns = {"columns": make.real(4, 6), "rows": rows, "ids": ids, "experts": 4}
    yield _sample(ROWS_OUTER, outer, columns)


def check_samples(make: Make) -> Iterator[Sample]:
    for shape in ((5, 3, 6), (4,), ()):
        condition = torch.ones(shape, dtype=torch.bool)
        yield _sample(CHECK, _check_alone, {"condition": condition, "message": "it holds"})


def _check_alone(condition: Tensor, message: str) -> None:
    assert condition.all(), message


SAMPLES = all_samples()
# --- tests --------------------------------------------------------------------------------------


def test_an_argument_that_torch_has_renamed_is_no_reason_to_read_it_whole() -> None:
    shapes = TensorMeta((4, 3), "float32"), TensorMeta((4, 3), "float32")
    args = {"gradient": TensorRef(0), "self": TensorRef(1)}
    call = OpCall(kind="renamed.default", args=args, inputs=shapes, outputs=shapes[:1])
    assert axis(call, (0,), gradient=0, self=0).inputs == (0, 0)
    with pytest.raises(KeyError, match=r"no argument 'grad', which another version of torch may"):
        axis(call, (0,), grad=0, self=0)


def test_every_rule_has_a_sample() -> None:
    assert sorted(RULES) == sorted(SAMPLES)


_UNSET_ON_NOTHING = {"multi_margin_loss.default", "multilabel_margin_loss_forward.default"}
"""torch returns memory that nobody has written for no samples. Ranks without any do not run it."""


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_parts_make_the_whole(kind: str) -> None:
    generator = _generator(sum(map(ord, kind)))
    for sample in SAMPLES[kind]:
        for units in axis_sizes(sample.call):
            for result in legal_rules(sample.call, units, outers=(1, 2)):
                if result.special == Special.LOCAL_STATISTICS:
                    continue
                for shares in uneven_shares(units, generator):
                    if kind in _UNSET_ON_NOTHING and 0 in shares:
                        continue
                    try:
                        check(sample, result, shares, generator)
                    except Exception as error:
                        inputs = [tensor.shape for tensor in sample.call.inputs]
                        rule = f"{_text(result.inputs)} -> {_text(result.outputs)}"
                        error.add_note(f"{kind} {inputs}, {rule}, shares {shares}")
                        raise


_GATHERS_SUMS = frozenset(
    {
        *("_pdist_backward.default", "masked_select.default", "scatter.reduce"),
        *("scatter.value_reduce", "nll_loss_forward.default", "nll_loss2d_forward.default"),
        *("ldexp.Tensor", "polar.default", "xlogy.Tensor", "xlogy.Scalar_Other"),
        *("nan_to_num.default", "nansum.default"),
        *("new_empty.default", "empty_like.default", "new_empty_strided.default"),
    }
)
"""Linear ops that nobody has met on a partial sum, the last line but one: of numbers only; and
memory that nobody has written, which may hold anything."""


def _is_linear(sample: Sample, generator: torch.Generator) -> bool:
    """Whether the outputs are linear in the first input, by two random values of it."""
    first, *others = sample.tensors
    one, other = (torch.randn(first.shape, dtype=first.dtype, generator=generator) for _ in "12")
    try:
        made = [
            sample.run(dict(sample.call.args), [value, *others])
            for value in (one, other, 2 * one - 3 * other)
        ]
    except RuntimeError:  # a probability that is negative, say
        return False
    is_sum = all(torch.allclose(z, 2 * x - 3 * y) for x, y, z in zip(*made, strict=True))
    return is_sum and any(bool(each.any()) for each in made[0])


@pytest.mark.parametrize("kind", sorted(set(SAMPLES) - _GATHERS_SUMS))
def test_what_is_linear_keeps_partial_sums(kind: str) -> None:
    with torch.random.fork_rng(devices=[]):
        for sample in SAMPLES[kind]:
            involved = (*sample.tensors[:1], *sample.outputs)
            if not sample.tensors or not all(each.is_floating_point() for each in involved):
                continue
            given = (P, *[R] * (len(sample.tensors) - 1))
            result = propagate(sample.call, given, 2)
            keeps = result is not None and result.inputs == given and set(result.outputs) == {P}
            assert keeps or not _is_linear(sample, _generator(7))


@pytest.mark.parametrize(
    "kind",
    [
        *("cat.default", "stack.default", "slice_scatter.default", "select_scatter.default"),
        *("diagonal_scatter.default", "index_put.default", "scatter.src"),
        *("as_strided_scatter.default", "index_add.default", "addmm.default"),
    ],
)
def test_a_partial_sum_stays_one_beside_what_all_ranks_have(kind: str) -> None:
    """A gradient that is written into zeros, say: ``rfft`` pads its filter to a length."""
    sample = SAMPLES[kind][0]
    numbers = [place for place, each in enumerate(sample.tensors) if each.is_floating_point()]
    given = tuple(P if place == numbers[1] else R for place in range(len(sample.tensors)))
    result = propagate(sample.call, given, 2)
    assert result == RuleResult(given, (P,), Special.BIAS_ON_ONE_RANK)


def _text(placements: tuple[Placement, ...]) -> str:
    return ", ".join(map(str, placements))


def find(kind: str, **args: Arg) -> Sample:
    """The first sample of a kind whose arguments have these values."""
    return next(
        sample
        for sample in SAMPLES[kind]
        if all(sample.call.args[name] == value for name, value in args.items())
    )


@pytest.mark.parametrize(
    ("sample", "claim"),
    [
        (find("_softmax.default", dim=-1), RuleResult((S(2),), (S(2),))),
        (find("_softmax.default", dim=-1), RuleResult((P,), (P,))),
        (find("mm.default"), RuleResult((S(1), S(0)), (R,))),
        (find("addmm.default"), RuleResult((R, S(1), S(0)), (P,))),
        (find("mean.default"), RuleResult((S(0),), (P,))),
        (find("mse_loss_backward.default", reduction=1), RuleResult((R, S(0), S(0)), (S(0),))),
        (find("add.Tensor", other=2.0), RuleResult((P,), (P,))),
        (find("mul.Tensor"), RuleResult((P, P), (P,))),
        (find("cumsum.default"), RuleResult((S(1),), (S(1),))),
        (find("cat.default", dim=1), RuleResult((S(1), S(1)), (S(1),))),
        (find("nll_loss_forward.default", reduction=1), RuleResult((S(0), S(0), R), (P, P))),
        (find("attention", is_causal=True), RuleResult((S(2), R, R), (S(2), S(2)))),
        (find("convolution.default"), RuleResult((S(1), S(1), R), (P,))),
    ],
    ids=lambda value: value.call.kind if isinstance(value, Sample) else "",
)
def test_a_wrong_rule_is_caught(sample: Sample, claim: RuleResult) -> None:
    split = next((i for i, p in enumerate(claim.inputs) if p.kind == "S"), None)
    units = sample.call.inputs[split].shape[claim.inputs[split].dim] if split is not None else 3
    with pytest.raises(AssertionError):
        check(sample, claim, (units - 1, 1), _generator())


def test_layer_norm_over_a_split_dimension_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
        axes = [axis(call, (2, R, R), input=2, weight=0, bias=0)]
        return choose(call, placements, axis_size, axes)

    kind = "native_layer_norm.default"
    monkeypatch.setitem(RULES, kind, wrong)
    sample = find(kind)
    claims = [r for r in legal_rules(sample.call, 6) if S(2) in r.inputs]
    assert claims
    for claim in claims:
        args = local_args(sample.call, claim, 3, 6) | {"normalized_shape": (3,)}
        halves = [
            cut(t, p, (3, 3), _generator())
            for t, p in zip(sample.tensors, claim.inputs, strict=True)
        ]
        parts = [sample.run(args, [half[rank] for half in halves])[0] for rank in (0, 1)]
        assert not torch.allclose(torch.cat(parts, dim=2), sample.outputs[0])


def propagated(kind: str, shapes: list[tuple[int, ...]], given: str, axis_size: int) -> str:
    """The rule for a call whose arguments are its tensors alone, as text."""
    op = overload(kind)
    call = sample_of(op, *(torch.ones(shape) for shape in shapes)).call
    return propagated_call(call, given, axis_size)


def propagated_call(call: OpCall, given: str, axis_size: int) -> str:
    result = propagate(call, tuple(map(placement_of, given.split())), axis_size)
    assert result is not None
    special = f" {result.special}" if result.special else ""
    return f"{_words(result.inputs)} -> {_words(result.outputs)}{special}"


def placement_of(text: str) -> Placement:
    if text in ("R", "P", "L"):
        return {"R": R, "P": P, "L": L}[text]
    dim, _, outer = text.removeprefix("S").partition("/")
    return S(int(dim), int(outer or 1))


def _words(placements: tuple[Placement, ...]) -> str:
    """``S0`` for S(0, 1) and ``S0/3`` for S(0, 3)."""
    return " ".join(
        f"S{p.dim}" + (f"/{p.outer}" if p.outer > 1 else "") if p.kind == "S" else p.kind
        for p in placements
    )


@pytest.mark.parametrize(
    ("kind", "shapes", "given", "expected"),
    [
        # Data parallel: activations stay split, parameters stay whole, their gradients are sums.
        ("mm.default", [(6, 4), (4, 8)], "S0 R", "S0 R -> S0"),
        ("mm.default", [(4, 6), (6, 8)], "S1 S0", "S1 S0 -> P"),
        ("addmm.default", [(8,), (6, 4), (4, 8)], "R S0 R", "R S0 R -> S0"),
        ("add.Tensor", [(6, 4), (4,)], "S0 R", "S0 R -> S0"),
        ("add.Tensor", [(5, 6, 4), (6, 4)], "S1 R", "S1 S0 -> S1"),
        # Tensor parallel: columns, then rows, whose bias is added once.
        ("mm.default", [(4, 4), (4, 6)], "R S1", "R S1 -> S1"),
        ("mm.default", [(4, 6), (6, 4)], "S1 R", "S1 S0 -> P"),
        ("addmm.default", [(4,), (8, 6), (6, 4)], "R S1 S0", "R S1 S0 -> P bias_on_one_rank"),
        ("mm.default", [(6, 4), (4, 12)], "R S1/2", "R S1/2 -> S1/2"),
        # Sums of sums.
        ("add.Tensor", [(6, 4), (6, 4)], "P P", "P P -> P"),
        ("add.Tensor", [(6, 4), (6, 4)], "P R", "R R -> R"),
        ("add.Tensor", [(6, 4), (6, 4)], "P S0", "S0 S0 -> S0"),
        ("mul.Tensor", [(6, 4), ()], "P R", "P R -> P"),
        ("mul.Tensor", [(6, 4), (6, 4)], "P P", "P R -> P"),
        ("mul.Tensor", [(6, 4), (6, 1)], "P S0", "S0 S0 -> S0"),
        ("addmm.default", [(4,), (8, 6), (6, 4)], "R P R", "R P R -> P bias_on_one_rank"),
        ("div.Tensor", [(6, 4), ()], "R P", "R R -> R"),
        ("relu.default", [(6, 4)], "P", "R -> R"),
        ("mm.default", [(6, 4), (4, 8)], "P R", "P R -> P"),
        # Two splits that do not fit: the smaller tensor is gathered.
        ("mm.default", [(6, 4), (4, 60)], "S0 S1", "R S1 -> S1"),
        ("mm.default", [(60, 4), (4, 6)], "S0 S1", "S0 R -> S0"),
        # Statistics of the local part never leave the device, nor does what follows from them.
        ("mul.Tensor", [(6,), ()], "L R", "L R -> L"),
        ("copy_.default", [(6,), (6,)], "R L", "R L -> L"),
        ("copy_.default", [(6,), (6,)], "R S0", "R R -> R"),
        ("mul.Tensor", [(6, 4), (4,)], "S0 L", "S0 L -> S0"),
        # Constants follow what they are like.
        ("zeros_like.default", [(6, 4)], "S0", "S0 -> S0"),
        ("zeros_like.default", [(6, 4)], "P", "P -> R"),
        # Random numbers.
        ("bernoulli.default", [(6, 4)], "S0", "S0 -> S0 own_random_stream"),
        ("bernoulli.default", [(6, 4)], "R", "R -> R shared_random_stream"),
    ],
)
def test_propagation(kind: str, shapes: list[tuple[int, ...]], given: str, expected: str) -> None:
    assert propagated(kind, shapes, given, axis_size=6) == expected


@pytest.mark.parametrize(
    ("sample", "axis_size", "given", "expected"),
    [
        (find("native_batch_norm.default", training=True), 5, "S0 R R R R", "local_statistics"),
        (find("attention"), 4, "S1 S1 S1", "S1 S1 S1 -> S1 S1"),
        (find("attention"), 3, "S0 S0 S0", "S0 S0 S0 -> S0 S0"),
        (find("split.Tensor", dim=1), 2, "S1/3", "S1/3 -> S1 S1 S1"),
        (find("cat.default", dim=-1), 4, "S2 S2 S2", "S2 S2 S2 -> S2/3"),
        (find("squeeze.default"), 5, "S0", "S0 -> S0 as_reshape"),
        (find("embedding_dense_backward.default"), 5, "S0 S0", "S0 S0 -> P"),
        (find("embedding.default"), 3, "S0 R", "S0 R -> P own_words"),
        (find("nll_loss_backward.default", reduction=1), 10, "R S0 S0 R P", "-> S0"),
        (find("nll_loss_backward.default", reduction=2), 10, "R S0 S0 R P", "R S0 S0 R P -> S0"),
        (find("nll_loss_backward.default", reduction=0), 10, "P S0 S0 R R", "S0 S0 S0 R R -> S0"),
        (find("mean.default"), 5, "S0", "S0 -> P mean_to_sum"),
        (find("mean.default"), 5, "P", "P -> P"),
        (find("topk.default"), 4, "S2", "R -> R R"),
        (find("repeat.default"), 6, "S1", "S1 -> S2/3"),
        (find("linalg_solve_triangular.default", left=False), 3, "R S2", "R S2 -> S2"),
    ],
)
def test_propagation_of_samples(sample: Sample, axis_size: int, given: str, expected: str) -> None:
    assert expected in propagated_call(sample.call, given, axis_size)


def test_grouped_query_attention_splits_by_heads_of_keys() -> None:
    sample = next(s for s in SAMPLES["attention"] if s.call.inputs[1].shape[1] == 2)
    assert propagated_call(sample.call, "S1 R R", 4) == "R R R -> R R"
    assert propagated_call(sample.call, "S1 R R", 2) == "S1 S1 S1 -> S1 S1"
    assert propagated_call(sample.call, "S0 S0 S0", 3) == "S0 S0 S0 -> S0 S0"


def test_an_unknown_op_has_no_rule() -> None:
    call = OpCall(kind="_nested_view.default", args={}, inputs=(), outputs=())
    assert propagate(call, (), 4) is None
    assert legal_rules(call, 4) == ()


def test_local_args_rewrite_sizes_of_split_outputs() -> None:
    view = find("view.default", size=(5, -1))
    result = RuleResult((S(0),), (S(0),))
    assert local_args(view.call, result, 2, 5)["size"] == (2, 24)
    assert local_args(view.call, RuleResult((R,), (R,)), 2, 5)["size"] == (5, -1)


def test_local_args_rewrite_counts() -> None:
    depthwise = find("convolution.default", groups=4)
    result = RuleResult((S(1), S(0), S(0)), (S(1),))
    assert local_args(depthwise.call, result, 3, 4)["groups"] == 3
    group_norm = find("native_group_norm.default", group=6)
    batch = RuleResult((S(0), R, R), (S(0), S(0), S(0)))
    args = local_args(group_norm.call, batch, 2, 5)
    assert (args["N"], args["C"], args["group"]) == (2, 12, 6)


def test_local_args_keep_blocks_of_a_fused_tensor() -> None:
    """The second of three blocks, taken of the part: 2 of 6 becomes 1 of 3."""
    sliced = find("slice.Tensor", start=2, end=4)
    result = RuleResult((S(1, 3),), (S(1),))
    assert propagate(sliced.call, result.inputs, 2) == result
    args = local_args(sliced.call, result, 1, 2)
    assert (args["start"], args["end"]) == (1, 2)


def test_batch_norm_backward_is_the_sum_over_parts() -> None:
    """Local statistics: the gradient is that of normalising every part by itself."""
    sample, shares = find("native_batch_norm_backward.default", train=True), (3, 2)
    upstream, x, weight = sample.tensors[:3]
    result = next(r for r in legal_rules(sample.call, 5) if r.special == Special.LOCAL_STATISTICS)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    parts = [
        torch.nn.functional.batch_norm(part, None, None, leaves[1], training=True)
        for part in torch.split(leaves[0], list(shares))
    ]
    expected = torch.autograd.grad(torch.cat(parts), leaves, upstream)
    ranks = []
    for rank, part in enumerate(torch.split(x, list(shares))):
        saved = aten.native_batch_norm(part, weight, None, None, None, True, 0.1, 1e-5)[1:]
        local = [
            cut(t, p, shares, _generator())[rank]
            for t, p in zip(sample.tensors[:5], result.inputs[:5], strict=True)
        ]
        args = local_args(sample.call, result, shares[rank], 5)
        ranks.append(sample.run(args, [*local, *saved]))
    grad_input, grad_weight, _ = zip(*ranks, strict=True)
    torch.testing.assert_close(torch.cat(grad_input), expected[0])
    torch.testing.assert_close(sum(grad_weight), expected[1])


# --- DTensor as a second opinion ----------------------------------------------------------------

_KNOWN_DIFFERENCES = {
    "convolution": "DTensor splits the batch only; channels are a contraction like mm's",
    "convolution_backward": "as convolution",
    "native_group_norm": "DTensor splits the batch only; groups of channels are independent",
    "native_batch_norm": "without training no statistics are computed: theirs says split, ours R",
    "_native_batch_norm_legit": "as native_batch_norm",
    "_native_batch_norm_legit_functional": "as native_batch_norm",
    "_native_batch_norm_legit_no_training": "as native_batch_norm",
    "native_batch_norm_backward": "as native_batch_norm",
    "grid_sampler_2d": "DTensor splits the batch only; the grid samples every channel alike",
    "grid_sampler_2d_backward": "as grid_sampler_2d",
    "grid_sampler_3d": "as grid_sampler_2d",
    "grid_sampler_3d_backward": "as grid_sampler_2d",
    "_linalg_check_errors": "DTensor knows no ops without outputs",
    "linalg_cross": "DTensor does not broadcast",
    "linalg_solve_triangular": "DTensor splits matrices only; right sides are independent",
    "linalg_lu_solve": "as linalg_solve_triangular",
    "cholesky_solve": "as linalg_solve_triangular",
    "embedding": "their partial sums are of a kind of their own, with a mask",
    "index_put": "DTensor does not use that accumulation is a sum over the values",
    "_index_put_impl_": "as index_put",
}
_SPECIALS_OF_OURS = (Special.BIAS_ON_ONE_RANK, Special.LOCAL_STATISTICS, Special.NUMBERS_OF_ROWS)
"""DTensor changes no op, so it cannot have these."""


def test_dtensor_knows_our_rules() -> None:
    try:
        theirs = _dtensor_strategies()
    except (ImportError, AttributeError) as error:
        pytest.skip(f"DTensor's registry has moved: {error}")
    checked = 0
    for kind, samples in SAMPLES.items():
        name = kind.partition(".")[0]
        if kind in (SPARSE_PRODUCT, ROWS_PRODUCT, ROWS_OUTER, CHECK):
            continue  # an op of our own
        for sample in samples:
            if False in _as_tuple(sample.call.args.get("output_mask")):
                continue
            known = theirs(kind, sample)
            for units in axis_sizes(sample.call) if known is not None else ():
                for result in legal_rules(sample.call, units):
                    ours = tuple(map(str, result.outputs + result.inputs))
                    checked += 1
                    if known is None or ours in known or _beyond_dtensor(result):
                        continue
                    assert name in _KNOWN_DIFFERENCES, f"{kind}: {ours} not in {known}"
    assert checked > 1000


def _as_tuple(value: Arg) -> tuple[Arg, ...]:
    return value if isinstance(value, tuple) else ()


def _beyond_dtensor(result: RuleResult) -> bool:
    """Rules DTensor need not list: all R, changed ops, and linearity in more inputs than its."""
    whole = {p.kind for p in result.inputs + result.outputs} <= {"R"}
    linear = {p.kind for p in result.inputs} <= {"R", "P"} and set(result.outputs) == {P}
    return whole or linear or result.special in _SPECIALS_OF_OURS


def _dtensor_strategies() -> Callable[[str, Sample], set[tuple[str, ...]] | None]:
    """DTensor's rules for a call, as text; None for ops without a single-dimension strategy."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta as DTensorMeta

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    strategies = propagator.op_single_dim_strategy_funcs

    def seen(value: Arg, tensors: tuple[Tensor, ...]) -> Any:
        if isinstance(value, TensorRef):
            tensor = tensors[value.index]
            return DTensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        if isinstance(value, tuple):
            return [seen(item, tensors) for item in value]
        return value

    def word(placement: Any) -> str:
        if hasattr(placement, "dim"):
            return str(S(placement.dim))
        # A mean of means is our sum of parts: the special says how to weigh them.
        partial = getattr(placement, "reduce_op", None) in ("sum", "avg")
        return "P" if partial else "R" if placement.is_replicate() else str(placement)

    def known(kind: str, sample: Sample) -> set[tuple[str, ...]] | None:
        op: Any = overload(kind) if "." in kind else None
        if op not in strategies:
            return None
        values: list[Any] = [seen(value, sample.tensors) for value in sample.call.args.values()]
        parameters = op._schema.arguments
        count = sum(not parameter.kwarg_only for parameter in parameters)
        pairs = list(zip(parameters, values, strict=True))
        keywords = {p.name: value for p, value in pairs[count:] if value is not None}
        # The dispatcher leaves trailing defaults out, and strategies count on it.
        while count and pairs[count - 1][0].has_default_value() and _is_default(pairs[count - 1]):
            count -= 1
        rows = strategies[op].func(op, tuple(values[:count]), keywords)
        return {tuple(map(word, row)) for row in rows}

    return known


def _is_default(pair: tuple[Any, Any]) -> bool:
    parameter, value = pair
    return isinstance(value, int | float | None | str) and value == parameter.default_value
