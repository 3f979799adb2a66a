"""Compiles the kernels of segments with torch's inductor, equal segments once.

torch's own cache keeps compiled code across runs and ranks.
"""

import inspect
import logging
import operator
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from heterog.graph.placement import OpCall
from heterog.runtime.step.recipes import Like
from heterog.runtime.step.replays import Kernels, Replays

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Part:
    """Ops that are compiled together.

    Attributes:
        function: Its ops.
        likes: Shape, strides, dtype and device of each input.
        num_ops: Number of its ops.
        run: The compiled function; ``function`` until there is one, or if it cannot be compiled.
    """

    function: Kernels
    likes: tuple[Like, ...]
    num_ops: int
    run: Kernels = field(init=False)

    def __post_init__(self) -> None:
        self.run = self.function


class Compiler:
    """Compiles functions of tensors.

    Attributes:
        replays: The graphs from which this rank replays its parts, if it does.
        tell: Called with the progress before each part.
        seconds: Seconds that compiling has taken so far.
        num_compiled: Number of parts that were compiled.
        num_refused: Number of parts that could not be compiled.
        why: The compiler's error for the first of them.
    """

    def __init__(self, replays: Replays | None = None) -> None:
        self.replays = replays
        self.tell: Callable[[str], None] = _LOG.debug
        self.seconds = 0.0
        self.num_compiled = self.num_refused = 0
        self.why = ""
        # Each part keeps the objects alive whose identities are in its key.
        self._parts: dict[tuple[Hashable, tuple[Like, ...]], Part] = {}
        self._waiting: list[Part] = []

    def part(
        self, key: Hashable, function: Kernels, likes: tuple[Like, ...], num_ops: int
    ) -> Part:
        """An existing part with the same key and inputs, or a new one for ``compile``.

        Args:
            key: Functions with equal keys do the same with equal inputs.
            function: The function.
            likes: Shape, strides, dtype and device of each input.
            num_ops: Number of its ops.
        """
        if (key, likes) not in self._parts:
            made = self._parts[key, likes] = Part(function, likes, num_ops)
            self._waiting.append(made)
        return self._parts[key, likes]

    def compile(self) -> None:
        """Compile the new parts; parts that cannot be compiled run as they are."""
        waiting, self._waiting = self._waiting, []
        begin = time.perf_counter()
        for number, part in enumerate(waiting):
            if self.num_refused >= _REFUSED_AT_FIRST and not self.num_compiled:
                self.num_refused += len(waiting) - number  # there is no compiler here
                break
            left_s = seconds_to_compile([each.num_ops for each in waiting[number:]])
            self.tell(f"part {number + 1} of {len(waiting)}, about {left_s:.0f} s of a core left")
            try:
                part.run = _compiled(part)
                self.num_compiled += 1
            except Exception as error:  # the compiler and g++ may raise anything
                self.num_refused += 1
                self.why = self.why or _in_a_line(error)
        self.seconds += time.perf_counter() - begin
        if self.num_refused and waiting:
            _LOG.warning("%s", self.refused)

    @property
    def refused(self) -> str:
        """A line about what could not be compiled; empty if everything was."""
        if not self.num_refused:
            return ""
        return (
            f"{self.num_refused} of {self.num_refused + self.num_compiled} parts were not "
            f"compiled and run as generated Python: {self.why}"
        )


def seconds_to_compile(num_ops: Sequence[int]) -> float:
    """Seconds of one core to compile parts with these numbers of ops, if none is cached.

    >>> f"{seconds_to_compile([20] * 14):.0f}"
    '45'
    """
    return _PART_S * len(num_ops) + _OP_S * sum(num_ops)


_PART_S, _OP_S = 1.6, 0.08
"""Least squares over 25 parts of a Llama, a convolutional network and a Transformer encoder on a
CPU (torch 2.13, inductor's C++): they took 28, 27 and 16 s; this line gives 39, 17 and 15 s.
``docs/notebook/testbeds.md`` has the parts. The first part takes some 10 s more."""
_REFUSED_AT_FIRST = 2
"""Parts that are tried before it is concluded that nothing can be compiled."""


def _in_a_line(error: Exception) -> str:
    """What a compiler's error says first, and the first error of g++ that it quotes."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    quoted = (each.partition("error: ")[2] for each in lines[1:])
    return ": ".join(filter(None, (lines[0], next(filter(None, quoted), ""))))[:200]


def _compiled(part: Part) -> Kernels:
    try:
        return _inductor(part.function, part.likes)
    except Exception as error:
        if not _remove_half_written(error):
            raise
        return _inductor(part.function, part.likes)


def _remove_half_written(error: Exception) -> bool:
    """Remove the library of torch's cache that could not be loaded; returns whether there was one.

    A process that is killed while it compiles leaves a part of a file, which torch would later
    take for a compiled library.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    named = re.search(r"(/\S+\.so): ", str(error))
    path = Path(named.group(1)) if named else None
    if path is None or not path.is_file() or Path(cache_dir()) not in path.parents:
        return False
    path.unlink()
    return True


def _inductor(function: Kernels, likes: Sequence[Like]) -> Kernels:
    # Imported here only, because it takes seconds.
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    def compiled(graph: fx.GraphModule, given: list[Tensor]) -> Kernels:
        with config.patch(
            # Folding makes zeros of NaNs times 0, and gives out an input as its sum with zeros:
            # two values would share memory that the plan changes in place.
            joint_graph_constant_folding=False,
            # Costs time, and is no use to numbers that only products of matrices read.
            emulate_precision_casts=reads_rounded(graph) or config.emulate_precision_casts,
        ):
            return boxed(compile_fx(graph, given))

    return as_compiled(function, likes, compiled)


def is_computed_otherwise(call: OpCall) -> bool:
    """Whether inductor's numbers are not the op's, so that it stays outside of compiled parts.

    In torch 2.13 (``torch.compile`` as well) gradients of average pooling are divided by whole
    windows where ``ceil_mode`` lets windows end behind the image. Nearest neighbours are where the
    scale says, which the ops do not ask if sizes are doubled, and their gradients where sizes say.
    """
    if re.match(r"avg_pool\dd_backward\.", call.kind):
        return bool(call.args["ceil_mode"])
    if not re.match(r"upsample_nearest\dd(_backward)?\.", call.kind):
        return False
    output: Any = call.args["output_size"]
    given: Any = call.args.get("input_size", call.inputs[0].shape)
    scales = [value for name, value in call.args.items() if name.startswith("scales")]
    sizes = zip(output, given[2:], scales, strict=True)
    return any(
        large % small or scale not in (None, large / small) for large, small, scale in sizes
    )


def reads_rounded(graph: fx.GraphModule) -> bool:
    """Whether numbers that are rounded to half precision are then read by ops of other dtypes.

    Inductor would have these read the numbers as they were before: ``x - x.bfloat16()`` is zero.
    What is computed of such numbers in half precision counts as they do, unless it is a product of
    matrices: its kernel reads and writes rounded numbers.
    """
    owner: dict[fx.Node, fx.Node] = {}  # what made the memory of each node
    rounded: set[fx.Node] = set()
    for node in graph.graph.nodes:
        owner[node] = owner[node.all_input_nodes[0]] if _is_in_memory_of_first(node) else node
        if _PRODUCT.match(str(node.target)):
            continue
        made, given = _tensors([node]), _tensors(node.all_input_nodes)
        dtypes = {each.dtype for each in made}
        is_read = any(owner[each] in rounded for each in node.all_input_nodes)
        if is_read and not dtypes <= _HALF:
            return True
        others = [each for each in given if each.dtype not in dtypes]
        rounds = node.target in _CONVERSIONS or any(each.is_floating_point() for each in others)
        if dtypes <= _HALF and (is_read or (others and rounds)):
            rounded.add(owner[node])
    return False


def _tensors(nodes: Sequence[fx.Node]) -> list[Tensor]:
    """What nodes of a trace make; some make several tensors."""
    made = tree_leaves([node.meta.get("val") for node in nodes])
    return [each for each in made if isinstance(each, Tensor)]


def _is_in_memory_of_first(node: fx.Node) -> bool:
    """Whether it makes a view of its first input, writes it or is one of its tensors."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return bool(node.all_input_nodes) and (node.target.is_view or node.target._schema.is_mutable)


_HALF = {torch.bfloat16, torch.float16}
_CONVERSIONS = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy_.default,
    torch.ops.prims.convert_element_type.default,
)
"""Ops that round integers, too; to other ops integers are indices."""
_PRODUCT = re.compile(r"aten\.(\w*mm|convolution\w*|\w*attention\w*)\.")
"""Names of products of matrices and of their gradients."""


def boxed(made: Any) -> Kernels:
    """Torch's inner function, which takes a list and so can drop inputs early."""
    while inspect.isfunction(made) and made.__code__.co_flags & inspect.CO_VARARGS:
        made = made.__wrapped__  # type: ignore[attr-defined]
    kernels: Kernels = made
    return kernels


def as_compiled(
    function: Kernels,
    likes: Sequence[Like],
    backend: Callable[[fx.GraphModule, list[Tensor]], Kernels],
) -> Kernels:
    """Trace a function with inputs of some shapes, and give the graph to a compiler.

    Args:
        function: The function.
        likes: Shape, strides, dtype and device of each input.
        backend: Compiles the graph, given example inputs without memory.
    """
    # torch uses its caches only in an environment of shapes.
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=True):
            given = [
                torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device=each.device)
                for each in likes
            ]
        trace = make_fx(lambda *inputs: tuple(function(list(inputs))), _SPELT_OUT)
        return backend(trace(*given), given)


def _spelt_out(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A sum or difference whose second summand has a factor, which is a product of its own.

    The product has the dtype in which ``torch.add`` takes both summands.
    """

    def call(value: Tensor, other: Any, *, alpha: float = 1) -> Any:
        if alpha == 1:
            return NotImplemented
        is_tensor = isinstance(other, Tensor)
        scaled = (other.to(torch.result_type(value, other)) if is_tensor else other) * alpha
        return combine(value, scaled)

    return call


_sub = _spelt_out(operator.sub)


def _sum(
    value: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    return NotImplemented if dtype is None else value.to(dtype).sum(dim, keepdim).to(dtype)


def _cumulative_sum(value: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return NotImplemented if dtype is None else value.to(dtype).cumsum(dim).to(dtype)


def _wide_norm(norm: Callable[..., Any], at: int) -> Callable[..., Any]:
    """A norm that converts its input to the dtype of its weight, the argument at a place."""

    def call(value: Tensor, *given: Any) -> Any:
        weight: Tensor | None = given[at]
        if weight is None or weight.dtype == value.dtype:
            return NotImplemented
        wide = norm(value.to(weight.dtype), *given)
        return wide[0].to(value.dtype), *wide[1:]

    return call


_SPELT_OUT: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    torch.ops.aten.add.Tensor: _spelt_out(operator.add),
    torch.ops.aten.add_.Tensor: _spelt_out(Tensor.add_),
    torch.ops.aten.sub.Tensor: _sub,
    torch.ops.aten.sub_.Tensor: _spelt_out(Tensor.sub_),
    torch.ops.aten.rsub.Tensor: lambda value, other, **alpha: _sub(other, value, **alpha),
    torch.ops.aten.sum.dim_IntList: _sum,
    torch.ops.aten.cumsum.default: _cumulative_sum,
    torch.ops.aten.native_layer_norm.default: _wide_norm(torch.ops.aten.native_layer_norm, 1),
    torch.ops.aten.native_group_norm.default: _wide_norm(torch.ops.aten.native_group_norm, 0),
}
"""Ops with their keyword arguments, and with conversions of their inputs, as ops of their own.

A pattern of inductor matches ops whatever arguments they have beside those that it names, and what
it puts in their place does without (torch 2.13, ``torch.compile`` as well): ``x.add(a @ b,
alpha=0.1)`` adds ten times too much, ``x.sub(x.amax(1, True), alpha=0.5)`` of an ``x`` with a
factor takes twice too much off, and ``ones.cumsum(1, dtype=torch.long)`` is no integer. Norms of
numbers in half precision keep means in single precision if their weights are in it, and inductor
would round these.
"""
