"""Every op of a graph as the loops that inductor, the compiler of torch.compile, makes of it.

A *step* is a view, a loop over the elements of its result (pointwise), a loop that reduces rows or
columns, or a kernel of its own. Norms, softmax and losses are several steps: a layer norm is a
reduction over rows and a pointwise loop. The table follows ``torch/_inductor/lowering.py`` and
``decomposition.py`` of torch 2.13; an op that it does not know is a kernel of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from heterog.graph.op_costs import RESHAPES
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import ITEM_BYTES, OpCall, TensorRef
from heterog.graph.sharding_rules import claims_checked
from heterog.graph.sharding_rules.pointwise import IDENTITIES, LINEAR_IN_FIRST, NONLINEAR
from heterog.graph.sharding_rules.table import dimension, dimensions

SAME = ""
"""Order of reading a value: the same in which a step loops over its own elements."""
ROWS = "rows"
"""Order of reading a value: one of its elements serves a whole row of the step."""
_LEAST_REDUCED = 8
"""Fewest elements of a sum that is a loop; smaller ones are written out (inductor's
``unroll_reductions_threshold``)."""
_MOST_JOINED = 8
"""Most tensors of a ``cat`` that is one loop (``max_pointwise_cat_inputs`` of inductor)."""


class Work(StrEnum):
    """Kind of a step for the compiler."""

    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    OWN = "own"
    """A kernel that nothing is fused with."""


class Read(NamedTuple):
    """A value that a step reads, and in which order: ``SAME``, ``ROWS``, or another by name."""

    value: int
    order: str = SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        op: Index of its op in the graph.
        work: Kind of the step.
        reads: Values that it reads, in order.
        makes: Numbers of the values that it makes.
        reduced: Number of elements that a reduction turns into one; 1 if it is none.
        order: Order in which a reduction goes through what it reads: ``ROWS``, or another by name.
        is_heavy: Whether it takes exponentials or logarithms, which a CPU does not compute twice.
        is_random: Whether it must not be computed twice, because it draws random numbers.
        is_recomputable: Whether the backward pass may compute it again.
        is_fusible: Whether it may be one kernel with what it reads and with what reads it.
        is_joined: Whether it may only be one kernel with what it reads.
        is_part: Whether its result is part of a larger tensor in memory.
        adds_up: Whether several iterations write one element, so that no reader may be fused.
    """

    op: int
    work: Work
    reads: tuple[Read, ...]
    makes: tuple[int, ...]
    reduced: int = 1
    order: str = ROWS
    is_heavy: bool = False
    is_random: bool = False
    is_recomputable: bool = True
    is_fusible: bool = True
    is_joined: bool = False
    is_part: bool = False
    adds_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor between steps: its shape and the bytes of an element."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.num_elements * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """All steps of a graph, updates left out.

    Attributes:
        steps: Steps in the order of their ops.
        values: Inputs of the graph, then the values that steps make.
        of_tensor: Number of the value of each tensor of the graph.
        maker: Number of the step that makes each value, -1 for inputs.
    """

    steps: tuple[Step, ...]
    values: tuple[Value, ...]
    of_tensor: tuple[int, ...]
    maker: tuple[int, ...]


@lru_cache(maxsize=16)
def steps_of(graph: OpGraph, *, on_gpu: bool = True) -> Steps:
    """The steps of a graph's forward and backward ops.

    Args:
        graph: One training step.
        on_gpu: Whether it runs on a GPU, where a convolution's bias gradient is a sum of its own.
    """
    return _Lowering(graph, on_gpu=on_gpu).run()


@dataclass(slots=True)
class _Lowering:
    """Writes one op after the other as steps."""

    graph: OpGraph
    on_gpu: bool
    steps: list[Step] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)
    of_tensor: list[int] = field(default_factory=list)
    op: int = 0

    def run(self) -> Steps:
        """Write all ops but updates."""
        for tensor in self.graph.tensors[: self.graph.num_inputs]:
            self.of_tensor.append(self.value(tensor.shape, ITEM_BYTES[tensor.dtype], -1))
        for index, op in enumerate(self.graph.ops):
            self.op = index
            if op.phase == Phase.UPDATE:
                self.of_tensor.extend([-1] * op.num_outputs)
                continue
            call = self.graph.call(index)
            # In an imported graph an op may claim anything.
            with claims_checked(f"the args of {op.name or op.kind} do not fit those of {op.kind}"):
                made = self.view(call) if self.graph.is_view[index] else self.kernel(call)
                assert len(made) == op.num_outputs, f"it has {op.num_outputs} outputs"
            self.of_tensor.extend(made)
        return Steps(
            steps=tuple(self.steps),
            values=tuple(self.values),
            of_tensor=tuple(self.of_tensor),
            maker=tuple(self.maker),
        )

    def kernel(self, call: OpCall) -> list[int]:
        """Write an op that is no view; returns the value of each of its outputs."""
        lower = _TABLE.get(call.kind)
        if lower is None or (call.inputs and not call.args):
            return self.own(call)
        return lower(self, call)

    def value(self, shape: tuple[int, ...], item_bytes: int, maker: int) -> int:
        """Add a value; returns its number."""
        self.values.append(Value(shape=shape, item_bytes=item_bytes))
        self.maker.append(maker)
        return len(self.values) - 1

    def input(self, position: int) -> int:
        """Number of the value of an input of the op."""
        return self.of_tensor[self.graph.ops[self.op].inputs[position]]

    def named(self, call: OpCall, name: str) -> int | None:
        """Number of the value of an argument, if it is a tensor."""
        given = call.args.get(name)
        return self.input(given.index) if isinstance(given, TensorRef) else None

    def all_inputs(self, call: OpCall) -> list[int]:
        """Numbers of the values of all inputs."""
        return [self.input(position) for position in range(len(call.inputs))]

    def add(
        self, work: Work, reads: Sequence[Read], made: Sequence[Value], **traits: object
    ) -> list[int]:
        """Add a step; returns the values that it makes."""
        values = [self.value(each.shape, each.item_bytes, len(self.steps)) for each in made]
        self.steps.append(
            Step(op=self.op, work=work, reads=tuple(reads), makes=tuple(values), **traits)  # type: ignore[arg-type]
        )
        return values

    def own(self, call: OpCall) -> list[int]:
        """Add a kernel of its own; returns the values that it makes."""
        made = [Value(shape=m.shape, item_bytes=ITEM_BYTES[m.dtype]) for m in call.outputs]
        reads = [Read(value) for value in self.all_inputs(call)]
        return self.add(Work.OWN, reads, made, is_recomputable=False, is_fusible=False)

    def pointwise(
        self,
        reads: Iterable[int | Read | None],
        shape: tuple[int, ...],
        item_bytes: int,
        **traits: object,
    ) -> int:
        """Add a loop over the elements of its result; returns the value that it makes."""
        found = [
            Read(each, _broadcast(self.values[each].shape, shape))
            if isinstance(each, int)
            else each
            for each in reads
            if each is not None
        ]
        made = [Value(shape=shape, item_bytes=item_bytes)]
        return self.add(Work.POINTWISE, found, made, **traits)[0]

    def reduction(
        self,
        reads: Iterable[int | Read | None],
        over: tuple[int, ...],
        reduced: Iterable[int],
        item_bytes: int,
        *,
        shape: tuple[int, ...] | None = None,
        is_heavy: bool = False,
    ) -> int:
        """Add a loop that reduces some dimensions of the shape that it goes over.

        Args:
            reads: Values that the sum is made of, each read at every element of ``over``.
            over: Shape that it goes over.
            reduced: Dimensions of it that are reduced.
            item_bytes: Bytes of an element of the result.
            shape: Shape of the result; by default ``over`` with 1 for what is reduced.
            is_heavy: Whether it takes exponentials or logarithms, see ``Step``.
        """
        dims = frozenset(reduced)
        count = prod(size for dim, size in enumerate(over) if dim in dims)
        kept = tuple(1 if dim in dims else size for dim, size in enumerate(over))
        found = [
            Read(each, _broadcast(self.values[each].shape, over))
            if isinstance(each, int)
            else each
            for each in reads
            if each is not None
        ]
        made = [Value(shape=kept if shape is None else shape, item_bytes=item_bytes)]
        is_written_out = count < _LEAST_REDUCED and prod(kept) > 1
        if count <= 1 or is_written_out:
            apart = [read if count == 1 else Read(read.value, "strided") for read in found]
            return self.add(Work.POINTWISE, apart, made, is_heavy=is_heavy)[0]
        order = _order(over, dims)
        return self.add(
            Work.REDUCTION, found, made, reduced=count, order=order, is_heavy=is_heavy
        )[0]

    def view(self, call: OpCall) -> list[int]:
        """Add a view: each output is the first input in another order."""
        source = self.input(0)
        made = []
        for number, output in enumerate(call.outputs):
            order = _order_of_view(call, number)
            value = Value(shape=output.shape, item_bytes=self.values[source].item_bytes)
            made.extend(self.add(Work.VIEW, [Read(source, order)], [value]))
        return made


def _broadcast(shape: tuple[int, ...], to: tuple[int, ...]) -> str:
    """Order in which a loop over ``to`` reads a value of a shape that is broadcast to it.

    >>> _broadcast((4, 1), (4, 3)), _broadcast((3,), (4, 3)), _broadcast((12,), (4, 3))
    ('rows', 'broadcast(3,)', '')
    """
    if prod(shape) == prod(to):
        return SAME
    padded = (1,) * (len(to) - len(shape)) + shape
    first = next((d for d in range(len(to)) if padded[d] != to[d]), len(to))
    if len(shape) <= len(to) and all(size == 1 for size in padded[first:]):
        return ROWS
    return f"broadcast{shape}"


def _order(over: tuple[int, ...], dims: frozenset[int]) -> str:
    """Name of the order in which a reduction goes through its elements.

    >>> _order((4, 1, 3), frozenset({2})), _order((4, 3), frozenset({0}))
    ('rows', 'r4,3')
    """
    runs = [
        (is_reduced, prod(over[dim] for dim in group))
        for is_reduced, group in groupby(
            (dim for dim in range(len(over)) if over[dim] != 1), lambda dim: dim in dims
        )
    ]
    flags = [is_reduced for is_reduced, _ in runs]
    if flags == sorted(flags):
        return ROWS
    return ",".join(f"{'r' if is_reduced else ''}{size}" for is_reduced, size in runs)


def _order_of_view(call: OpCall, number: int) -> str:
    """Order in which a view's output reads its input."""
    shape, to = call.inputs[0].shape, call.outputs[number].shape
    if call.kind in RESHAPES or call.kind.startswith("squeeze"):
        return SAME
    if call.kind == "expand.default":
        return _broadcast(shape, to)
    if prod(shape) == prod(to) and not _moves_dimensions(call):
        return SAME
    args = ",".join(str(value) for value in call.args.values() if not isinstance(value, TensorRef))
    return f"{call.kind}({args})#{number}"


def _moves_dimensions(call: OpCall) -> bool:
    """Whether a view of all elements changes their order."""
    shape = call.inputs[0].shape
    order = list(range(len(shape)))
    if call.kind == "t.default":
        order.reverse()
    elif call.kind == "transpose.int":
        one, other = dimension(call, "dim0", len(shape)), dimension(call, "dim1", len(shape))
        order[one], order[other] = order[other], order[one]
    elif call.kind == "permute.default":
        dims = call.args["dims"]
        assert isinstance(dims, tuple)
        order = [dim % len(shape) for dim in dims if isinstance(dim, int)]
    elif call.kind in ("as_strided.default", "unfold.default"):
        return True
    long = [dim for dim in order if shape[dim] != 1]
    return long != sorted(long)


# --- the table -----------------------------------------------------------------------------------

_Reads = list[int | Read | None]
_Lower = Callable[[_Lowering, OpCall], list[int]]
_TABLE: dict[str, _Lower] = {}
_HEAVY = ("exp", "log", "sigmoid", "tanh", "gelu", "silu", "softplus", "mish", "elu")
_NO_REDUCTION, _MASK_BYTES, _STATISTIC_BYTES = 0, 1, 4


def _lowers(*kinds: str) -> Callable[[_Lower], _Lower]:
    def enter(function: _Lower) -> _Lower:
        _TABLE.update(dict.fromkeys(kinds, function))
        return function

    return enter


def _item(call: OpCall, output: int = 0) -> int:
    return ITEM_BYTES[call.outputs[output].dtype]


@_lowers(
    *(*NONLINEAR, *IDENTITIES, *LINEAR_IN_FIRST),
    *("_to_copy.default", "mul.Tensor", "add.Tensor", "sub.Tensor", "lerp.Scalar"),
    *("where.self", "where.ScalarOther", "where.ScalarSelf", "masked_fill.Scalar"),
    *("tril.default", "triu.default", "nll_loss_backward.default", "copy_.default"),
    *("mse_loss_backward.default", "smooth_l1_loss_backward.default"),
    *("huber_loss_backward.default", "binary_cross_entropy_backward.default"),
    *("soft_margin_loss_backward.default", "nll_loss2d_backward.default", "copy.default"),
)
def _elementwise(lowering: _Lowering, call: OpCall) -> list[int]:
    heavy = call.kind.startswith(_HEAVY)
    inputs = lowering.all_inputs(call)
    if call.kind.startswith("copy"):
        inputs = inputs[1:]
    if call.kind.startswith("nll_loss"):  # compares the labels with the number of each class
        inputs.remove(lowering.input(1))
    return [
        lowering.pointwise(inputs, output.shape, ITEM_BYTES[output.dtype], is_heavy=heavy)
        for output in call.outputs
    ]


@_lowers(
    *("zeros.default", "ones.default", "full.default", "new_zeros.default", "new_ones.default"),
    *("new_full.default", "empty.memory_format", "new_empty.default", "empty_strided.default"),
    *("new_empty_strided.default", "scalar_tensor.default", "arange.default", "arange.start"),
    *("arange.start_step", "linspace.default", "eye.default", "eye.m", "zeros_like.default"),
    *("ones_like.default", "full_like.default", "empty_like.default"),
)
def _constant(lowering: _Lowering, call: OpCall) -> list[int]:
    return [lowering.pointwise([], call.outputs[0].shape, _item(call))]


@_lowers(
    *("bernoulli.default", "bernoulli.p", "bernoulli.Tensor", "rand_like.default"),
    *("randn_like.default", "rand.default", "randn.default", "uniform.default"),
)
def _random(lowering: _Lowering, call: OpCall) -> list[int]:
    item = _MASK_BYTES if call.kind.startswith("bernoulli") else _item(call)
    shape = call.outputs[0].shape
    return [lowering.pointwise([], shape, item, is_random=True, is_recomputable=False)]


@_lowers("native_dropout.default")
def _dropout(lowering: _Lowering, call: OpCall) -> list[int]:
    shape = call.outputs[0].shape
    mask = lowering.pointwise([], shape, _MASK_BYTES, is_random=True, is_recomputable=False)
    return [lowering.pointwise([lowering.input(0), mask], shape, _item(call)), mask]


@_lowers(
    *("index.Tensor", "_unsafe_index.Tensor", "gather.default", "index_select.default"),
    *("embedding.default", "flip.default", "roll.default", "repeat.default"),
    *("constant_pad_nd.default", "slice_backward.default", "select_backward.default"),
    *("slice_scatter.default", "select_scatter.default", "diagonal_backward.default"),
    *("bucketize.Tensor", "pixel_shuffle.default", "reflection_pad2d.default"),
    *("avg_pool2d.default", "avg_pool2d_backward.default", "_adaptive_avg_pool2d.default"),
    *("_adaptive_avg_pool2d_backward.default", "max_pool2d_with_indices_backward.default"),
    *("upsample_nearest2d.default", "upsample_nearest2d_backward.default"),
    *("upsample_bilinear2d.default",),
)
def _elsewhere(lowering: _Lowering, call: OpCall) -> list[int]:
    """One loop that reads its first input in an order of its own."""
    shape = call.outputs[0].shape
    inputs = lowering.all_inputs(call)
    first = Read(inputs[0], call.kind)
    others = [
        each if prod(lowering.values[each].shape) == prod(shape) else Read(each, call.kind)
        for each in inputs[1:]
    ]
    again = call.kind.startswith(("index.", "gather", "slice", "select", "flip", "constant_pad"))
    return [
        lowering.pointwise(
            [first, *others], shape, _item(call), is_recomputable=again, is_fusible=again
        )
    ]


@_lowers("max_pool2d_with_indices.default")
def _max_pool(lowering: _Lowering, call: OpCall) -> list[int]:
    reads = [Read(lowering.input(0), "window")]
    shape = call.outputs[0].shape
    return [
        lowering.pointwise(reads, shape, item, is_recomputable=False, is_fusible=False)
        for item in (_item(call), _MASK_BYTES)
    ]


@_lowers("cat.default", "stack.default")
def _cat(lowering: _Lowering, call: OpCall) -> list[int]:
    """One loop if the inputs are few and all are loops, else a copy of each into its part."""
    inputs = lowering.all_inputs(call)
    item, shape = _item(call), call.outputs[0].shape
    makers = [lowering.steps[lowering.maker[each]] for each in inputs if lowering.maker[each] >= 0]
    are_loops = call.kind == "cat.default" and all(step.work == Work.POINTWISE for step in makers)
    if are_loops and len(inputs) <= _MOST_JOINED:
        reads = [Read(each, f"part{number}") for number, each in enumerate(inputs)]
        traits = {"is_recomputable": False, "is_joined": True}
        return [lowering.pointwise(reads, shape, item, **traits)]
    parts = [
        lowering.pointwise(
            [each], lowering.values[each].shape, item, is_recomputable=False, is_part=True
        )
        for each in inputs
    ]
    reads = [Read(each, f"part{number}") for number, each in enumerate(parts)]
    return lowering.add(Work.VIEW, reads, [Value(shape=shape, item_bytes=item)])


@_lowers("threshold_backward.default")
def _relu_backward(lowering: _Lowering, call: OpCall) -> list[int]:
    """A mask, which is all that has to be kept of the forward pass, and a choice by it."""
    shape = call.outputs[0].shape
    mask = lowering.pointwise([lowering.input(1)], call.inputs[1].shape, _MASK_BYTES)
    return [lowering.pointwise([lowering.input(0), mask], shape, _item(call))]


@_lowers("embedding_dense_backward.default")
def _embedding_backward(lowering: _Lowering, call: OpCall) -> list[int]:
    table = call.outputs[0].shape
    zeros = lowering.pointwise([], table, _item(call), is_fusible=False)
    return [_added_into(lowering, zeros, call, [lowering.input(0), lowering.input(1)])]


@_lowers(
    *("index_put.default", "_unsafe_index_put.default", "index_add.default"),
    *("scatter_add.default", "scatter.src", "scatter.value", "scatter_reduce.two"),
)
def _scatter(lowering: _Lowering, call: OpCall) -> list[int]:
    inputs = lowering.all_inputs(call)
    copied = lowering.pointwise([inputs[0]], call.outputs[0].shape, _item(call), is_fusible=False)
    return [_added_into(lowering, copied, call, inputs[1:])]


def _added_into(lowering: _Lowering, target: int, call: OpCall, inputs: Sequence[int]) -> int:
    """A loop over the largest of its inputs that writes to scattered places of the target."""
    over = max((lowering.values[each] for each in inputs), key=lambda value: value.num_elements)
    reads = [Read(each, _broadcast(lowering.values[each].shape, over.shape)) for each in inputs]
    made = Value(shape=over.shape, item_bytes=over.item_bytes)
    return lowering.add(
        Work.POINTWISE,
        [*reads, Read(target, call.kind)],
        [made],
        is_recomputable=False,
        is_fusible=False,
        adds_up=True,
    )[0]


# --- reductions ----------------------------------------------------------------------------------


@_lowers(
    *("sum.default", "sum.dim_IntList", "nansum.default", "mean.default", "mean.dim"),
    *("amax.default", "amin.default", "max.default", "min.default", "max.dim", "min.dim"),
    *("argmax.default", "argmin.default", "any.default", "any.dim", "any.dims", "all.default"),
    *("all.dim", "all.dims", "prod.default", "prod.dim_int", "count_nonzero.default"),
    *("linalg_vector_norm.default", "var.correction", "std.correction"),
    *("var_mean.correction", "std_mean.correction"),
)
def _reduced(lowering: _Lowering, call: OpCall) -> list[int]:
    over = call.inputs[0].shape
    dims = dimensions(call, "dim", len(over))
    return [
        lowering.reduction(
            [lowering.input(0)], over, dims, ITEM_BYTES[output.dtype], shape=output.shape
        )
        for output in call.outputs
    ]


@_lowers("logsumexp.default")
def _logsumexp(lowering: _Lowering, call: OpCall) -> list[int]:
    over = call.inputs[0].shape
    dims = dimensions(call, "dim", len(over))
    _, total = _row_sums(lowering, lowering.input(0), over, dims)
    return [lowering.pointwise([total], call.outputs[0].shape, _item(call), is_heavy=True)]


def _row_sums(
    lowering: _Lowering, value: int, over: tuple[int, ...], dims: Iterable[int]
) -> tuple[int, int]:
    """Largest element, and sum of exponentials."""
    dims = frozenset(dims)
    most = lowering.reduction([value], over, dims, _STATISTIC_BYTES)
    return most, lowering.reduction([value, most], over, dims, _STATISTIC_BYTES, is_heavy=True)


@_lowers("_softmax.default", "_log_softmax.default", "_safe_softmax.default")
def _softmax(lowering: _Lowering, call: OpCall) -> list[int]:
    over = call.inputs[0].shape
    value = lowering.input(0)
    most, total = _row_sums(lowering, value, over, {dimension(call, "dim", len(over), -1)})
    return [lowering.pointwise([value, most, total], over, _item(call), is_heavy=True)]


@_lowers("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def _softmax_backward(lowering: _Lowering, call: OpCall) -> list[int]:
    over = call.inputs[0].shape
    gradient, result = lowering.input(0), lowering.input(1)
    of_log = call.kind.startswith("_log")
    reads = [gradient] if of_log else [gradient, result]
    dims = {dimension(call, "dim", len(over), -1)}
    total = lowering.reduction(reads, over, dims, _STATISTIC_BYTES)
    return [lowering.pointwise([gradient, result, total], over, _item(call), is_heavy=of_log)]


@_lowers("native_layer_norm.default", "_fused_rms_norm.default")
def _layer_norm(lowering: _Lowering, call: OpCall) -> list[int]:
    value, over = lowering.input(0), call.inputs[0].shape
    normalized = call.args["normalized_shape"]
    assert isinstance(normalized, tuple)
    dims = range(len(over) - len(normalized), len(over))
    weights = [lowering.named(call, "weight"), lowering.named(call, "bias")]
    made = [
        lowering.reduction([value], over, dims, ITEM_BYTES[output.dtype], shape=output.shape)
        for output in call.outputs[1:]
    ]
    rows = [Read(each, ROWS) for each in made]
    return [lowering.pointwise([value, *rows, *weights], over, _item(call)), *made]


@_lowers("native_layer_norm_backward.default", "_fused_rms_norm_backward.default")
def _layer_norm_backward(lowering: _Lowering, call: OpCall) -> list[int]:
    gradient, value = lowering.input(0), lowering.input(1)
    over = call.inputs[1].shape
    normalized = call.args["normalized_shape"]
    assert isinstance(normalized, tuple)
    first = len(over) - len(normalized)
    weight = lowering.named(call, "weight")
    given = [lowering.named(call, name) for name in ("mean", "rstd")]
    rows = [Read(each, ROWS) for each in given if each is not None]
    of_rows = range(first, len(over))
    sums = [lowering.reduction([gradient, weight, value, *rows], over, of_rows, _STATISTIC_BYTES)]
    if len(given) == len(rows):  # rms norms have no mean to take off
        sums.append(lowering.reduction([gradient, weight], over, of_rows, _STATISTIC_BYTES))
    made = [lowering.pointwise([gradient, weight, value, *rows, *sums], over, _item(call))]
    of_columns: tuple[_Reads, ...] = ([gradient, value, *rows], [gradient])
    for reads in of_columns[: len(call.outputs) - 1]:
        shape = call.outputs[len(made)].shape
        made.append(lowering.reduction(reads, over, range(first), _item(call), shape=shape))
    return made


@_lowers("native_group_norm.default")
def _group_norm(lowering: _Lowering, call: OpCall) -> list[int]:
    value, shape = lowering.input(0), call.inputs[0].shape
    groups = call.args["group"]
    assert isinstance(groups, int)
    over = (shape[0], groups, prod(shape) // shape[0] // groups)
    stats = [
        lowering.reduction([value], over, {2}, _STATISTIC_BYTES, shape=call.outputs[1].shape)
        for _ in range(2)
    ]
    weights = [lowering.named(call, "weight"), lowering.named(call, "bias")]
    reads: _Reads = [value, *(Read(each, ROWS) for each in stats), *_along_channels(weights)]
    return [lowering.pointwise(reads, shape, _item(call)), *stats]


@_lowers("native_group_norm_backward.default")
def _group_norm_backward(lowering: _Lowering, call: OpCall) -> list[int]:
    gradient, value = lowering.input(0), lowering.input(1)
    shape = call.inputs[0].shape
    over = (shape[0], shape[1], prod(shape[2:]))
    sums = [
        lowering.reduction(reads, over, {2}, _STATISTIC_BYTES)
        for reads in ([gradient, value], [gradient])
    ]
    made = [
        lowering.pointwise(
            [gradient, value, *(Read(each, ROWS) for each in sums)], shape, _item(call)
        )
    ]
    for output in call.outputs[1:]:
        item = ITEM_BYTES[output.dtype]
        made.append(lowering.reduction(sums, over[:2], {0}, item, shape=output.shape))
    return made


def _along_channels(values: Iterable[int | None]) -> list[Read]:
    """Values with an element for each channel."""
    return [Read(each, "channels") for each in values if each is not None]


@_lowers(
    *("native_batch_norm.default", "_native_batch_norm_legit.default"),
    *("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional.default"),
    *("_native_batch_norm_legit_no_training.default", "cudnn_batch_norm.default"),
)
def _batch_norm(lowering: _Lowering, call: OpCall) -> list[int]:
    value, shape = lowering.input(0), call.inputs[0].shape
    weights = [lowering.named(call, "weight"), lowering.named(call, "bias")]
    running = [lowering.named(call, "running_mean"), lowering.named(call, "running_var")]
    trains = "no_training" not in call.kind and call.args.get("training") is not False
    stats: list[int] = []
    if trains:
        over = (shape[0], shape[1], prod(shape[2:]))
        stats = [
            lowering.reduction([value], over, {0, 2}, _STATISTIC_BYTES, shape=(shape[1],))
            for _ in range(2)
        ]
    reads: _Reads = [value, *_along_channels([*(stats or running), *weights])]
    made = [lowering.pointwise(reads, shape, _item(call))]
    made += stats
    for output in call.outputs[len(made) :]:
        reads_here = [*stats, *running]
        made.append(lowering.pointwise(reads_here, output.shape, ITEM_BYTES[output.dtype]))
    return made


@_lowers("native_batch_norm_backward.default")
def _batch_norm_backward(lowering: _Lowering, call: OpCall) -> list[int]:
    gradient, value = lowering.input(0), lowering.input(1)
    shape = call.inputs[0].shape
    over = (shape[0], shape[1], prod(shape[2:]))
    mean, deviation = (lowering.named(call, name) for name in ("save_mean", "save_invstd"))
    weight = lowering.named(call, "weight")
    of_sums: tuple[_Reads, ...] = ([gradient], [gradient, value, *_along_channels([mean])])
    sums = [
        lowering.reduction(reads, over, {0, 2}, _STATISTIC_BYTES, shape=(shape[1],))
        for reads in of_sums
    ]
    stats = _along_channels([mean, deviation, weight, *sums])
    made = [lowering.pointwise([gradient, value, *stats], shape, _item(call))]
    if len(call.outputs) > 1:
        made.append(lowering.pointwise([sums[1], deviation], (shape[1],), _STATISTIC_BYTES))
    return [*made, *sums[:1]][: len(call.outputs)]


# --- losses and convolutions ---------------------------------------------------------------------


@_lowers(
    *("mse_loss.default", "smooth_l1_loss.default", "huber_loss.default"),
    *("binary_cross_entropy.default", "binary_cross_entropy_with_logits.default"),
    *("soft_margin_loss.default",),
)
def _loss(lowering: _Lowering, call: OpCall) -> list[int]:
    over = call.inputs[0].shape
    heavy = "entropy" in call.kind or "soft" in call.kind
    inputs = lowering.all_inputs(call)
    if call.args.get("reduction") == _NO_REDUCTION:
        return [lowering.pointwise(inputs, over, _item(call), is_heavy=heavy)]
    made = lowering.reduction(
        inputs, over, range(len(over)), _item(call), shape=(), is_heavy=heavy
    )
    return [made]


@_lowers("nll_loss_forward.default", "nll_loss2d_forward.default")
def _label_loss(lowering: _Lowering, call: OpCall) -> list[int]:
    labels = lowering.input(1)
    over = call.inputs[1].shape
    everything = range(len(over))
    chosen = Read(lowering.input(0), "labels")
    if call.args.get("reduction") == _NO_REDUCTION:
        return [lowering.pointwise([chosen, labels], over, _item(call)), labels]
    total = lowering.reduction([labels], over, everything, _item(call), shape=())
    loss = lowering.reduction([chosen, labels], over, everything, _item(call), shape=())
    return [lowering.pointwise([loss, total], (), _item(call)), total]


@_lowers("convolution_backward.default")
def _convolution_backward(lowering: _Lowering, call: OpCall) -> list[int]:
    made = lowering.own(call)
    wanted = call.args.get("output_mask")
    if not lowering.on_gpu or not isinstance(wanted, tuple) or not wanted[2]:
        return made
    shape = call.inputs[0].shape
    over = (shape[0], shape[1], prod(shape[2:]))
    output = call.outputs[-1]
    item = ITEM_BYTES[output.dtype]
    summed = lowering.reduction([lowering.input(0)], over, {0, 2}, item, shape=output.shape)
    return [*made[:-1], summed]
