"""Every op of a graph as the loops that inductor, the compiler of torch.compile, makes of it.

Norms, softmax and losses are several steps: a layer norm is a reduction over rows and a pointwise
loop. The table follows ``torch/_inductor/lowering.py`` and
``decomposition.py`` of torch 2.13; an op that it does not know is a kernel of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import prod

from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import ITEM_BYTES, OpCall
from heterog.graph.sharding_rules.pointwise import IDENTITIES, LINEAR_IN_FIRST, NONLINEAR
from heterog.graph.sharding_rules.table import dimension, dimensions
from heterog.pricing.device_models.fusion.steps import (
    ROWS,
    Read,
    Steps,
    StepWriter,
    Value,
    Work,
    Write,
    broadcast_order,
)

_MOST_JOINED = 8
"""Most tensors of a ``cat`` that is one loop (``max_pointwise_cat_inputs`` of inductor)."""


@lru_cache(maxsize=16)
def steps_of(graph: OpGraph, *, on_gpu: bool = True) -> Steps:
    """The steps of a graph's forward and backward ops.

    Args:
        graph: One training step.
        on_gpu: Whether it runs on a GPU, where a convolution's bias gradient is a sum of its own.
    """
    return StepWriter(graph, _TABLE, on_gpu=on_gpu).run()


_Reads = list[int | Read | None]
_TABLE: dict[str, Write] = {}
_HEAVY = ("exp", "log", "sigmoid", "tanh", "gelu", "silu", "softplus", "mish", "elu")
_NO_REDUCTION, _MASK_BYTES, _STATISTIC_BYTES = 0, 1, 4


def _lowers(*kinds: str) -> Callable[[Write], Write]:
    def enter(function: Write) -> Write:
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
def _elementwise(writer: StepWriter, call: OpCall) -> list[int]:
    heavy = call.kind.startswith(_HEAVY)
    inputs = writer.all_inputs(call)
    if call.kind.startswith("copy"):
        inputs = inputs[1:]
    if call.kind.startswith("nll_loss"):  # compares the labels with the number of each class
        inputs.remove(writer.input(1))
    return [
        writer.pointwise(inputs, output.shape, ITEM_BYTES[output.dtype], is_heavy=heavy)
        for output in call.outputs
    ]


@_lowers(
    *("zeros.default", "ones.default", "full.default", "new_zeros.default", "new_ones.default"),
    *("new_full.default", "empty.memory_format", "new_empty.default", "empty_strided.default"),
    *("new_empty_strided.default", "scalar_tensor.default", "arange.default", "arange.start"),
    *("arange.start_step", "linspace.default", "eye.default", "eye.m", "zeros_like.default"),
    *("ones_like.default", "full_like.default", "empty_like.default"),
)
def _constant(writer: StepWriter, call: OpCall) -> list[int]:
    return [writer.pointwise([], call.outputs[0].shape, _item(call))]


@_lowers(
    *("bernoulli.default", "bernoulli.p", "bernoulli.Tensor", "rand_like.default"),
    *("randn_like.default", "rand.default", "randn.default", "uniform.default"),
)
def _random(writer: StepWriter, call: OpCall) -> list[int]:
    item = _MASK_BYTES if call.kind.startswith("bernoulli") else _item(call)
    shape = call.outputs[0].shape
    return [writer.pointwise([], shape, item, is_random=True, is_recomputable=False)]


@_lowers("native_dropout.default")
def _dropout(writer: StepWriter, call: OpCall) -> list[int]:
    shape = call.outputs[0].shape
    mask = writer.pointwise([], shape, _MASK_BYTES, is_random=True, is_recomputable=False)
    return [writer.pointwise([writer.input(0), mask], shape, _item(call)), mask]


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
def _elsewhere(writer: StepWriter, call: OpCall) -> list[int]:
    """One loop that reads its first input in an order of its own."""
    shape = call.outputs[0].shape
    inputs = writer.all_inputs(call)
    first = Read(inputs[0], call.kind)
    others = [
        each if prod(writer.values[each].shape) == prod(shape) else Read(each, call.kind)
        for each in inputs[1:]
    ]
    again = call.kind.startswith(("index.", "gather", "slice", "select", "flip", "constant_pad"))
    return [
        writer.pointwise(
            [first, *others], shape, _item(call), is_recomputable=again, is_fusible=again
        )
    ]


@_lowers("max_pool2d_with_indices.default")
def _max_pool(writer: StepWriter, call: OpCall) -> list[int]:
    reads = [Read(writer.input(0), "window")]
    shape = call.outputs[0].shape
    return [
        writer.pointwise(reads, shape, item, is_recomputable=False, is_fusible=False)
        for item in (_item(call), _MASK_BYTES)
    ]


@_lowers("cat.default", "stack.default")
def _cat(writer: StepWriter, call: OpCall) -> list[int]:
    """One loop if the inputs are few and all are loops, else a copy of each into its part."""
    inputs = writer.all_inputs(call)
    item, shape = _item(call), call.outputs[0].shape
    makers = [writer.steps[writer.maker[each]] for each in inputs if writer.maker[each] >= 0]
    are_loops = call.kind == "cat.default" and all(step.work == Work.POINTWISE for step in makers)
    if are_loops and len(inputs) <= _MOST_JOINED:
        reads = [Read(each, f"part{number}") for number, each in enumerate(inputs)]
        traits = {"is_recomputable": False, "is_joined": True}
        return [writer.pointwise(reads, shape, item, **traits)]
    parts = [
        writer.pointwise(
            [each], writer.values[each].shape, item, is_recomputable=False, is_part=True
        )
        for each in inputs
    ]
    reads = [Read(each, f"part{number}") for number, each in enumerate(parts)]
    return writer.add(Work.VIEW, reads, [Value(shape=shape, item_bytes=item)])


@_lowers("threshold_backward.default")
def _relu_backward(writer: StepWriter, call: OpCall) -> list[int]:
    """A mask, which is all that has to be kept of the forward pass, and a choice by it."""
    shape = call.outputs[0].shape
    mask = writer.pointwise([writer.input(1)], call.inputs[1].shape, _MASK_BYTES)
    return [writer.pointwise([writer.input(0), mask], shape, _item(call))]


@_lowers("embedding_dense_backward.default")
def _embedding_backward(writer: StepWriter, call: OpCall) -> list[int]:
    table = call.outputs[0].shape
    zeros = writer.pointwise([], table, _item(call), is_fusible=False)
    return [_added_into(writer, zeros, call, [writer.input(0), writer.input(1)])]


@_lowers(
    *("index_put.default", "_unsafe_index_put.default", "index_add.default"),
    *("scatter_add.default", "scatter.src", "scatter.value", "scatter_reduce.two"),
)
def _scatter(writer: StepWriter, call: OpCall) -> list[int]:
    inputs = writer.all_inputs(call)
    copied = writer.pointwise([inputs[0]], call.outputs[0].shape, _item(call), is_fusible=False)
    return [_added_into(writer, copied, call, inputs[1:])]


def _added_into(writer: StepWriter, target: int, call: OpCall, inputs: Sequence[int]) -> int:
    """A loop over the largest of its inputs that writes to scattered places of the target."""
    over = max((writer.values[each] for each in inputs), key=lambda value: value.num_elements)
    reads = [Read(each, broadcast_order(writer.values[each].shape, over.shape)) for each in inputs]
    made = Value(shape=over.shape, item_bytes=over.item_bytes)
    return writer.add(
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
def _reduced(writer: StepWriter, call: OpCall) -> list[int]:
    over = call.inputs[0].shape
    dims = dimensions(call, "dim", len(over))
    return [
        writer.reduction(
            [writer.input(0)], over, dims, ITEM_BYTES[output.dtype], shape=output.shape
        )
        for output in call.outputs
    ]


@_lowers("logsumexp.default")
def _logsumexp(writer: StepWriter, call: OpCall) -> list[int]:
    over = call.inputs[0].shape
    dims = dimensions(call, "dim", len(over))
    _, total = _row_sums(writer, writer.input(0), over, dims)
    return [writer.pointwise([total], call.outputs[0].shape, _item(call), is_heavy=True)]


def _row_sums(
    writer: StepWriter, value: int, over: tuple[int, ...], dims: Iterable[int]
) -> tuple[int, int]:
    """Largest element, and sum of exponentials."""
    dims = frozenset(dims)
    most = writer.reduction([value], over, dims, _STATISTIC_BYTES)
    return most, writer.reduction([value, most], over, dims, _STATISTIC_BYTES, is_heavy=True)


@_lowers("_softmax.default", "_log_softmax.default", "_safe_softmax.default")
def _softmax(writer: StepWriter, call: OpCall) -> list[int]:
    over = call.inputs[0].shape
    value = writer.input(0)
    most, total = _row_sums(writer, value, over, {dimension(call, "dim", len(over), -1)})
    return [writer.pointwise([value, most, total], over, _item(call), is_heavy=True)]


@_lowers("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def _softmax_backward(writer: StepWriter, call: OpCall) -> list[int]:
    over = call.inputs[0].shape
    gradient, result = writer.input(0), writer.input(1)
    of_log = call.kind.startswith("_log")
    reads = [gradient] if of_log else [gradient, result]
    dims = {dimension(call, "dim", len(over), -1)}
    total = writer.reduction(reads, over, dims, _STATISTIC_BYTES)
    return [writer.pointwise([gradient, result, total], over, _item(call), is_heavy=of_log)]


@_lowers("native_layer_norm.default", "_fused_rms_norm.default")
def _layer_norm(writer: StepWriter, call: OpCall) -> list[int]:
    value, over = writer.input(0), call.inputs[0].shape
    normalized = call.args["normalized_shape"]
    assert isinstance(normalized, tuple)
    dims = range(len(over) - len(normalized), len(over))
    weights = [writer.named(call, "weight"), writer.named(call, "bias")]
    made = [
        writer.reduction([value], over, dims, ITEM_BYTES[output.dtype], shape=output.shape)
        for output in call.outputs[1:]
    ]
    rows = [Read(each, ROWS) for each in made]
    return [writer.pointwise([value, *rows, *weights], over, _item(call)), *made]


@_lowers("native_layer_norm_backward.default", "_fused_rms_norm_backward.default")
def _layer_norm_backward(writer: StepWriter, call: OpCall) -> list[int]:
    gradient, value = writer.input(0), writer.input(1)
    over = call.inputs[1].shape
    normalized = call.args["normalized_shape"]
    assert isinstance(normalized, tuple)
    first = len(over) - len(normalized)
    weight = writer.named(call, "weight")
    given = [writer.named(call, name) for name in ("mean", "rstd")]
    rows = [Read(each, ROWS) for each in given if each is not None]
    of_rows = range(first, len(over))
    sums = [writer.reduction([gradient, weight, value, *rows], over, of_rows, _STATISTIC_BYTES)]
    if len(given) == len(rows):  # rms norms have no mean to take off
        sums.append(writer.reduction([gradient, weight], over, of_rows, _STATISTIC_BYTES))
    made = [writer.pointwise([gradient, weight, value, *rows, *sums], over, _item(call))]
    of_columns: tuple[_Reads, ...] = ([gradient, value, *rows], [gradient])
    for reads in of_columns[: len(call.outputs) - 1]:
        shape = call.outputs[len(made)].shape
        made.append(writer.reduction(reads, over, range(first), _item(call), shape=shape))
    return made


@_lowers("native_group_norm.default")
def _group_norm(writer: StepWriter, call: OpCall) -> list[int]:
    value, shape = writer.input(0), call.inputs[0].shape
    groups = call.args["group"]
    assert isinstance(groups, int)
    over = (shape[0], groups, prod(shape) // shape[0] // groups)
    stats = [
        writer.reduction([value], over, {2}, _STATISTIC_BYTES, shape=call.outputs[1].shape)
        for _ in range(2)
    ]
    weights = [writer.named(call, "weight"), writer.named(call, "bias")]
    reads: _Reads = [value, *(Read(each, ROWS) for each in stats), *_along_channels(weights)]
    return [writer.pointwise(reads, shape, _item(call)), *stats]


@_lowers("native_group_norm_backward.default")
def _group_norm_backward(writer: StepWriter, call: OpCall) -> list[int]:
    gradient, value = writer.input(0), writer.input(1)
    shape = call.inputs[0].shape
    over = (shape[0], shape[1], prod(shape[2:]))
    sums = [
        writer.reduction(reads, over, {2}, _STATISTIC_BYTES)
        for reads in ([gradient, value], [gradient])
    ]
    made = [
        writer.pointwise(
            [gradient, value, *(Read(each, ROWS) for each in sums)], shape, _item(call)
        )
    ]
    for output in call.outputs[1:]:
        item = ITEM_BYTES[output.dtype]
        made.append(writer.reduction(sums, over[:2], {0}, item, shape=output.shape))
    return made


def _along_channels(values: Iterable[int | None]) -> list[Read]:
    """Values with an element for each channel."""
    return [Read(each, "channels") for each in values if each is not None]


@_lowers(
    *("native_batch_norm.default", "_native_batch_norm_legit.default"),
    *("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional.default"),
    *("_native_batch_norm_legit_no_training.default", "cudnn_batch_norm.default"),
)
def _batch_norm(writer: StepWriter, call: OpCall) -> list[int]:
    value, shape = writer.input(0), call.inputs[0].shape
    weights = [writer.named(call, "weight"), writer.named(call, "bias")]
    running = [writer.named(call, "running_mean"), writer.named(call, "running_var")]
    trains = "no_training" not in call.kind and call.args.get("training") is not False
    stats: list[int] = []
    if trains:
        over = (shape[0], shape[1], prod(shape[2:]))
        stats = [
            writer.reduction([value], over, {0, 2}, _STATISTIC_BYTES, shape=(shape[1],))
            for _ in range(2)
        ]
    reads: _Reads = [value, *_along_channels([*(stats or running), *weights])]
    made = [writer.pointwise(reads, shape, _item(call))]
    made += stats
    for output in call.outputs[len(made) :]:
        reads_here = [*stats, *running]
        made.append(writer.pointwise(reads_here, output.shape, ITEM_BYTES[output.dtype]))
    return made


@_lowers("native_batch_norm_backward.default")
def _batch_norm_backward(writer: StepWriter, call: OpCall) -> list[int]:
    gradient, value = writer.input(0), writer.input(1)
    shape = call.inputs[0].shape
    over = (shape[0], shape[1], prod(shape[2:]))
    mean, deviation = (writer.named(call, name) for name in ("save_mean", "save_invstd"))
    weight = writer.named(call, "weight")
    of_sums: tuple[_Reads, ...] = ([gradient], [gradient, value, *_along_channels([mean])])
    sums = [
        writer.reduction(reads, over, {0, 2}, _STATISTIC_BYTES, shape=(shape[1],))
        for reads in of_sums
    ]
    stats = _along_channels([mean, deviation, weight, *sums])
    made = [writer.pointwise([gradient, value, *stats], shape, _item(call))]
    if len(call.outputs) > 1:
        made.append(writer.pointwise([sums[1], deviation], (shape[1],), _STATISTIC_BYTES))
    return [*made, *sums[:1]][: len(call.outputs)]


# --- losses and convolutions ---------------------------------------------------------------------


@_lowers(
    *("mse_loss.default", "smooth_l1_loss.default", "huber_loss.default"),
    *("binary_cross_entropy.default", "binary_cross_entropy_with_logits.default"),
    *("soft_margin_loss.default",),
)
def _loss(writer: StepWriter, call: OpCall) -> list[int]:
    over = call.inputs[0].shape
    heavy = "entropy" in call.kind or "soft" in call.kind
    inputs = writer.all_inputs(call)
    if call.args.get("reduction") == _NO_REDUCTION:
        return [writer.pointwise(inputs, over, _item(call), is_heavy=heavy)]
    made = writer.reduction(inputs, over, range(len(over)), _item(call), shape=(), is_heavy=heavy)
    return [made]


@_lowers("nll_loss_forward.default", "nll_loss2d_forward.default")
def _label_loss(writer: StepWriter, call: OpCall) -> list[int]:
    labels = writer.input(1)
    over = call.inputs[1].shape
    everything = range(len(over))
    chosen = Read(writer.input(0), "labels")
    if call.args.get("reduction") == _NO_REDUCTION:
        return [writer.pointwise([chosen, labels], over, _item(call)), labels]
    total = writer.reduction([labels], over, everything, _item(call), shape=())
    loss = writer.reduction([chosen, labels], over, everything, _item(call), shape=())
    return [writer.pointwise([loss, total], (), _item(call)), total]


@_lowers("convolution_backward.default")
def _convolution_backward(writer: StepWriter, call: OpCall) -> list[int]:
    made = writer.own(call)
    wanted = call.args.get("output_mask")
    if not writer.on_gpu or not isinstance(wanted, tuple) or not wanted[2]:
        return made
    shape = call.inputs[0].shape
    over = (shape[0], shape[1], prod(shape[2:]))
    output = call.outputs[-1]
    item = ITEM_BYTES[output.dtype]
    summed = writer.reduction([writer.input(0)], over, {0, 2}, item, shape=output.shape)
    return [*made[:-1], summed]
