"""Reductions, scans, orderings, softmax, normalisation layers and losses.

A reduction over a split dimension gives P if it is a sum; otherwise the dimension cannot be split.
All other dimensions can. In a normalisation layer the normalised dimensions cannot be split, all
others can. BatchNorm is the exception: a split batch is normalised part by part
(``Special.LOCAL_STATISTICS``), and the statistics are L. A loss that is a sum or mean over the
batch becomes a partial sum.

The divisors that autograd puts into backward nodes are global already, so only ops that count
their own elements need a ``Special``.
"""

from functools import partial

from heterog.graph.op_costs import CHECK
from heterog.graph.placement import L, OpCall, P, R, kinds
from heterog.graph.sharding_rules.table import (
    Axis,
    Special,
    aligned,
    axis,
    beside,
    broadcast_axes,
    dimension,
    dimensions,
    integer,
    integers,
    mixes,
    named_dim,
    of_op,
    shape_of,
    splits,
)


def _reduction_axes(
    call: OpCall, *, summed: bool = False, special: Special | None = None
) -> list[Axis]:
    """Axes of a reduction; reduced dimensions are among them only if it is a sum."""
    rank = len(call.inputs[0].shape)
    reduced = dimensions(call, "dim", rank)
    sums = [Axis((dim,), (P,) * len(call.outputs), special) for dim in sorted(reduced)]
    return [*beside(call, rank, reduced), *(sums if summed else [])]


_SUM = partial(_reduction_axes, summed=True)
_MEAN = partial(_SUM, special=Special.MEAN_TO_SUM)
splits(*kinds("sum sum.dim_IntList"), linear=[(0,)])(_SUM)
splits(*kinds("nansum count_nonzero count_nonzero.dim_IntList"))(_SUM)
splits(*kinds("mean mean.dim"), linear=[(0,)])(_MEAN)
splits(
    *kinds(
        "amax amin {max,min,median} {max,min,median,nanmedian,any,all}.dim argmax argmin "
        "kthvalue mode any all {any,all}.dims prod prod.dim_int logsumexp linalg_vector_norm "
        "{var,std,var_mean,std_mean}.correction norm.ScalarOpt_dim aminmax"
    ),
)(_reduction_axes)


@splits("histc.default")
def _histogram(call: OpCall) -> list[Axis]:
    if call.args["min"] == call.args["max"]:
        return []  # bins between the least and the largest element
    return [Axis((dim,), (P,)) for dim in range(len(call.inputs[0].shape))]


mixes(
    *kinds("_softmax _safe_softmax glu cumprod cummax cummin logcumsumexp sort sort.stable"),
    *kinds("argsort argsort.stable topk"),
)(named_dim(default=-1))
mixes(*kinds("cumsum glu_backward _softmax_backward_data"), linear=[(0,)])(named_dim(default=-1))


@splits("_log_softmax.default")
@splits("_log_softmax_backward_data.default", linear=[(0,)])
def _log_softmax(call: OpCall) -> list[Axis]:
    rank = len(call.inputs[0].shape)
    (dim,) = named_dim(default=-1)(call, rank)
    axes = beside(call, rank, (dim,))
    if rank > 1:
        inputs, outputs = ((dim,) * len(metas) for metas in (call.inputs, call.outputs))
        axes.append(Axis(inputs, outputs, Special.NUMBERS_OF_ROWS))
    return axes


# A condition on all elements holds if it holds for the elements of each part.
mixes(CHECK, "_linalg_check_errors.default")(lambda call, rank: ())


@splits(*kinds("native_layer_norm _fused_rms_norm"))
def _layer_norm(call: OpCall) -> list[Axis]:
    batch = len(shape_of(call, "input")) - len(integers(call, "normalized_shape"))
    return [axis(call, (d,) * len(call.outputs), input=d) for d in range(batch)]


@splits(*kinds("native_layer_norm_backward _fused_rms_norm_backward"), linear=[("grad_out",)])
def _layer_norm_backward(call: OpCall) -> list[Axis]:
    batch = len(shape_of(call, "input")) - len(integers(call, "normalized_shape"))
    parameters = (P, P) if "layer_norm" in call.kind else (P,)
    return [
        axis(call, (d, *parameters), grad_out=d, input=d, rstd=d, **of_op(call, mean=d))
        for d in range(batch)
    ]


@splits("native_group_norm.default")
def _group_norm(call: OpCall) -> list[Axis]:
    return [axis(call, (0, 0, 0), input=0), axis(call, (1, 1, 1), input=1, weight=0, bias=0)]


@splits("native_group_norm_backward.default", linear=[("grad_out",)])
def _group_norm_backward(call: OpCall) -> list[Axis]:
    return [
        axis(call, (0, P, P), grad_out=0, input=0, mean=0, rstd=0),
        axis(call, (1, 0, 0), grad_out=1, input=1, mean=1, rstd=1, weight=0),
    ]


_STATISTICS = ("weight", "bias", "running_mean", "running_var")


@splits(
    *kinds(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats "
        "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training"
    ),
)
def _batch_norm(call: OpCall) -> list[Axis]:
    others = len(call.outputs) - 1
    training = call.args.get("training") is True
    special = Special.LOCAL_STATISTICS if training else None
    # Without training the statistics are empty, or the running ones, unchanged.
    outputs = [0 if meta.shape != (0,) else R for meta in call.outputs[1:]]
    return [
        axis(call, (0, *[L if training else R] * others), special, input=0),
        axis(call, (1, *outputs), input=1, **of_op(call, **dict.fromkeys(_STATISTICS, 0))),
    ]


@splits("native_batch_norm_backward.default", linear=[("grad_out",)])
def _batch_norm_backward(call: OpCall) -> list[Axis]:
    channel = of_op(call, **dict.fromkeys(_STATISTICS, 0))
    if call.args["train"] is True:
        statistics = {"save_mean": L, "save_invstd": L}
        batch = axis(call, (0, P, P), Special.LOCAL_STATISTICS, grad_out=0, input=0, **statistics)
        channel.update(save_mean=0, save_invstd=0)
    else:
        batch = axis(call, (0, P, P), grad_out=0, input=0)
    return [batch, axis(call, (1, 0, 0), grad_out=1, input=1, **channel)]


@mixes("renorm.default")
@mixes(*kinds("_weight_norm_interface{,_backward}"), linear=[("grad_w",)])
def _all_but_one(call: OpCall, rank: int) -> set[int]:
    """Norms of slices, each of which has a length of its own."""
    return set(range(rank)) - {dimension(call, "dim", rank)}


NO_REDUCTION, MEAN, SUM = 0, 1, 2
"""Values of ATen's ``reduction`` argument."""


@splits(*kinds("{mse,smooth_l1,huber,soft_margin}_loss binary_cross_entropy{,_with_logits}"))
def _elementwise(call: OpCall) -> list[Axis]:
    reduction, whole = integer(call, "reduction", MEAN), shape_of(call, "self")
    special = Special.MEAN_TO_SUM if reduction == MEAN else None
    return [
        Axis(
            tuple(aligned(meta.shape, whole, dim) for meta in call.inputs),
            (P if reduction else dim,),
            special,
        )
        for dim in range(len(whole))
    ]


@splits(
    *kinds("{mse,smooth_l1,huber,soft_margin}_loss_backward binary_cross_entropy_backward"),
    linear=[("grad_output",)],
)
def _elementwise_backward(call: OpCall) -> list[Axis]:
    special = Special.MEAN_TO_SUM if integer(call, "reduction", MEAN) == MEAN else None
    return broadcast_axes(call, special)


@splits(*kinds("multi_margin_loss multilabel_margin_loss_forward"))
@splits(
    *kinds("multi_margin_loss_backward multilabel_margin_loss_backward"),
    linear=[("grad_output",)],
)
def _margins(call: OpCall) -> list[Axis]:
    if len(shape_of(call, "self")) < 2:
        return []
    reduction = integer(call, "reduction", MEAN)
    special = Special.MEAN_TO_SUM if reduction == MEAN else None
    made = P if reduction and "grad_output" not in call.args else 0
    rows = of_op(call, grad_output=R if reduction else 0, is_target=0)
    labels = (0,) * (len(call.outputs) - 1)  # which of them are there, kept for the backward pass
    return [axis(call, (made, *labels), special, self=0, target=0, **rows)]


LABEL_COUNTING_LOSSES = frozenset(kinds("nll_loss_forward nll_loss2d_forward"))
"""Losses whose second output is the total weight of the labels that count."""


@splits(*LABEL_COUNTING_LOSSES)
def _nll(call: OpCall) -> list[Axis]:
    reduction = integer(call, "reduction", MEAN)
    special = Special.NLL_GLOBAL_WEIGHT if reduction == MEAN else None
    axes = [
        # Without reduction there is no total weight: it is zero everywhere.
        axis(call, (P, P) if reduction else (own, R), special, self=dim, target=own)
        for dim, own in _label_dims(call)
    ]
    if axes:
        axes.append(axis(call, (P, R), Special.OWN_WORDS, self=1))
    return axes


@splits(*kinds("nll_loss_backward nll_loss2d_backward"), linear=[("grad_output",)])
def _nll_backward(call: OpCall) -> list[Axis]:
    reduction = integer(call, "reduction", MEAN)
    # Only a mean is divided by the weight of all labels, so that of a sum may stay partial.
    weights = (R,) if reduction in (MEAN, NO_REDUCTION) else (P, R)
    axes = [
        axis(
            call, (dim,), grad_output=R if reduction else own, self=dim, target=own,
            total_weight=weight,
        )
        for dim, own in _label_dims(call)
        for weight in weights
    ]  # fmt: skip
    if axes:
        axes.append(axis(call, (1,), Special.OWN_WORDS, self=1))
    return axes


def _label_dims(call: OpCall) -> list[tuple[int, int]]:
    """Pairs of a dimension of the log-probabilities [N, C, ...] and of the labels [N, ...].

    Empty for a single sample [C].
    """
    rank = len(shape_of(call, "self"))
    return [(0, 0), *((d, d - 1) for d in range(2, rank))] if rank > 1 else []
