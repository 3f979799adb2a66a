"""What the trace that inductor gets must not have, because inductor computes something else."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.capture import capture
from heterog.graph.workload import Workload
from heterog.runtime.step.compiled import (
    _SPELT_OUT,
    _inductor,
    as_compiled,
    is_computed_otherwise,
    reads_rounded,
)
from heterog.runtime.step.recipes import Like
from heterog.runtime.step.replays import Kernels
from tests.thorough import few_of

ATEN = torch.ops.aten
HARMLESS = {"layout", "device", "pin_memory", "memory_format", "out", "implicit"}
"""Keyword arguments that change no number."""
NEVER_TRACED = {
    "rounding_mode": "of a product whose weights are packed, as they are in inference only",
    "out_dtype": "of numbers that are quantised for inference",
}
NOT_COMPILED = {ATEN.randperm.default}
"""Ops that draw random numbers are never in a compiled part."""


def ignored(pattern: Any) -> Iterator[tuple[Any, str]]:
    """Ops in a pattern of inductor, with keyword arguments that it leaves out."""
    from torch._inductor.pattern_matcher import MultiOutputPattern, PatternExpr

    inner = pattern.outputs if isinstance(pattern, MultiOutputPattern) else ()
    if hasattr(pattern, "kwargs"):
        inner = [*pattern.args, *pattern.kwargs.values()]
        for op in pattern.fns:
            for argument in op._schema.arguments if hasattr(op, "_schema") else ():
                if argument.kwarg_only and argument.name not in HARMLESS | {*pattern.kwargs}:
                    yield op, argument.name
    stack = list(inner)
    while stack:
        each = stack.pop()
        if isinstance(each, PatternExpr):
            yield from ignored(each)
        elif isinstance(each, list | tuple):
            stack += each


def test_arguments_that_patterns_ignore_are_spelt_out() -> None:
    from torch._inductor.fx_passes import joint_graph, post_grad

    post_grad.lazy_init()  # once a process, called as inductor calls it
    joint_graph.lazy_init(torch.device("cpu"))
    passes = [*post_grad.pass_patterns, *joint_graph.pass_patterns, joint_graph.early_patterns]
    entries = [e for each in passes for found in each.patterns.values() for e in found]
    assert len(entries) > 100
    found = {each for entry in entries for each in ignored(entry.pattern)}
    assert (ATEN.add.Tensor, "alpha") in found
    for op, name in found:
        is_out = op._overloadname.endswith("out")  # which no functional trace has
        assert is_out or name in NEVER_TRACED or op in NOT_COMPILED | {*_SPELT_OUT}, (op, name)


def like(value: Tensor) -> Like:
    return Like(value.shape, value.stride(), value.dtype, value.device)


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    return [x, y, torch.randint(1, 9, (4, 4))]


def sums(given: Sequence[Tensor]) -> list[Tensor]:
    x, y, n = given
    return [
        ATEN.add(x, x @ y, alpha=0.1),
        ATEN.add(x @ y, x, alpha=3),
        ATEN.add_(x * 1, y @ x, alpha=0.1),
        ATEN.sub_(x * 1, y @ x, alpha=0.1),
        ATEN.add(x, n, alpha=0.1),
        ATEN.add(n, 2, alpha=3),
        x + y,
    ]


def shifted(given: Sequence[Tensor]) -> list[Tensor]:
    """Scores less a part of their maximum."""
    x, *_ = given
    scores = 3.0 * x
    highest = scores.amax(-1, keepdim=True)
    return [ATEN.sub(scores, highest, alpha=0.5), ATEN.rsub(highest, scores, alpha=0.5)]


def counted(given: Sequence[Tensor]) -> list[Tensor]:
    """Cumulative sums of ones, as positions are made, in another dtype."""
    *_, n = given
    ones = torch.ones(4, 4)
    return [
        ATEN.cumsum(ones, 1, dtype=torch.long) + n,
        ATEN.cumsum(ones > 0, 0, dtype=torch.int32),
        ATEN.cumsum(n, 0, dtype=torch.float64),
        ATEN.sum(n, [0], dtype=torch.float32),
        ATEN.sum(n > 0, [0], True, dtype=torch.int32),
    ]


def rounded(given: Sequence[Tensor]) -> list[Tensor]:
    """What a rounding to half precision leaves out."""
    x = given[0].float() * 2
    half, less = x.half(), x.bfloat16()
    return [x - half, less.view(-1, 2).float().abs(), x > less]


def rounded_parts(given: Sequence[Tensor]) -> list[Tensor]:
    """The same of some of the numbers, which are moved, computed with or written in place."""
    x, y, n = given
    left, right = x.bfloat16().chunk(2, -1)
    kept = torch.zeros(4, 4, dtype=torch.bfloat16)
    kept[1:].copy_(x[1:])
    return [
        x[:, :2] - left,
        right.double(),
        x + (-x.bfloat16()).double(),
        x.flip(0) - x.bfloat16().flip(0),
        x - kept,
        y - torch.ops.prims.convert_element_type(y, torch.float16),
        torch.zeros(4, 4, dtype=torch.float16).add_(x) - x,
        (n + 1000) - (n + 1000).bfloat16().long(),
    ]


def multiplied(given: Sequence[Tensor]) -> list[Tensor]:
    """Products of rounded numbers, whose kernels read rounded numbers and write them."""
    x, y, _ = given
    left, right = x.bfloat16(), y.bfloat16()
    product = torch.addmm(right[0], left, right.t())
    return [product.double() + x, torch.bmm(left[None], right[None]).double(), left * 2]


def chosen(given: Sequence[Tensor]) -> list[Tensor]:
    """Numbers that were in half precision before, and integers that are indices only."""
    held = torch.zeros(9, 4, dtype=torch.bfloat16)
    *_, n = given
    return [held[n[0]].float(), held.half().clone()]


def not_numbers(given: Sequence[Tensor]) -> list[Tensor]:
    """No number times zero is none."""
    x, *_ = given
    return [(x / (x - x)) * 0, x.log() * 0]


def unchanged(given: Sequence[Tensor]) -> list[Tensor]:
    """Sums and products that equal an input, in memory of their own."""
    x, *_ = given
    twice = x * 2
    return [
        x + torch.zeros_like(x),
        x - torch.zeros_like(x),
        torch.ones_like(x) * x,
        *(twice, twice.clone(), x * 2),
    ]


def normalised(given: Sequence[Tensor]) -> list[Tensor]:
    """Norms of half precision whose weights, and so means, are in single precision."""
    x = given[0].bfloat16()
    weight, bias = given[1][:2].float()
    layer = ATEN.native_layer_norm(x, [4], weight, bias, 1e-5)
    group = ATEN.native_group_norm(x[None], weight, bias, 1, 4, 4, 2, 1e-5)
    return [*layer, *group]


SPELT_OUT = [sums, shifted, counted, normalised]


def check(function: Kernels, compiler: Callable[[Kernels, list[Like]], Kernels]) -> None:
    """What is compiled computes what the ops compute, to the last dtype."""
    given = inputs()
    made = list(compiler(function, [like(each) for each in given])(list(given)))
    wanted = list(function(given))
    for one, other in zip(made, wanted, strict=True):
        eps = torch.finfo(other.dtype).eps if other.is_floating_point() else 0.0
        limit = max(1e-12, 4 * eps)  # sums in another order
        torch.testing.assert_close(one, other, rtol=limit, atol=limit, equal_nan=True)
    assert len({each.data_ptr() for each in [*given, *made]}) == len(given) + len(made)


@pytest.mark.parametrize("function", SPELT_OUT)
def test_ops_are_spelt_out_as_they_compute(function: Kernels) -> None:
    def traced(function: Kernels, likes: list[Like]) -> Kernels:
        return as_compiled(function, likes, ops_of)

    def ops_of(graph: torch.fx.GraphModule, _given: list[Tensor]) -> Kernels:
        calls = [node for node in graph.graph.nodes if node.target in _SPELT_OUT]
        assert calls
        assert not any({"alpha", "dtype"} & {*node.kwargs} for node in calls)
        made = [each.meta["val"].dtype for each in graph.graph.output_node().all_input_nodes]
        assert made == [each.dtype for each in function(inputs())]
        return lambda given: list(graph(*given))

    check(function, traced)


def reads(function: Kernels) -> list[bool]:
    """Whether each result of a function reads rounded numbers; nothing is compiled."""
    given, found = inputs(), list[bool]()

    def see(graph: torch.fx.GraphModule, _given: list[Tensor]) -> Kernels:
        graph.graph.eliminate_dead_code()
        found.append(reads_rounded(graph))
        return function

    def one(given: Sequence[Tensor]) -> list[Tensor]:
        return [function(list(given))[len(found)]]

    while len(found) < len(function(given)):
        as_compiled(one, [like(each) for each in given], see)
    return found


@pytest.mark.parametrize("function", [rounded, rounded_parts])
def test_it_is_seen_where_rounded_numbers_are_read(function: Kernels) -> None:
    assert all(reads(function)), reads(function)


@pytest.mark.parametrize("function", [multiplied, chosen])
def test_what_reads_no_rounded_numbers_costs_no_time(function: Kernels) -> None:
    assert not any(reads(function)), reads(function)


class Resized(nn.Module):
    """Pooled, and as large again."""

    def __init__(self, scale: float, *, ceil: bool) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(3, 2, 1), nn.AvgPool2d(3, 2, 1, ceil_mode=ceil)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(self.pool(self.first(x)), scale_factor=self.scale)


@pytest.mark.parametrize(
    ("scale", "ceil", "differ"),
    [
        (2.0, False, []),
        (1.7, False, ["upsample_nearest2d.default", "upsample_nearest2d_backward.default"]),
        (2.0, True, ["avg_pool2d_backward.default"]),
    ],
)
def test_ops_that_inductor_computes_otherwise(scale: float, ceil: bool, differ: list[str]) -> None:
    x = torch.zeros(2, 3, 8, 8)
    target = Resized(scale, ceil=ceil)(x).detach()
    model = Resized(scale, ceil=ceil)
    workload = Workload(model, (x, target), functional.mse_loss, torch.optim.SGD, {"lr": 0.1})
    graph = capture(workload)
    assert [call.kind for call in graph.calls if is_computed_otherwise(call)] == differ


@pytest.mark.parametrize(
    "function",
    few_of([rounded, rounded_parts, *SPELT_OUT, not_numbers, unchanged], 1),
)
def test_inductor_computes_what_ops_do(function: Kernels) -> None:
    """It takes some seconds for each."""
    check(function, _inductor)
