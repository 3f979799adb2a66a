"""Normalisation layers: the normalised dimensions cannot be split, all others can.

BatchNorm is the exception: a split batch is normalised part by part
(``Special.LOCAL_STATISTICS``), and the statistics are L.
"""

from heterog.graph.placement import L, OpCall, P, Placement, R
from heterog.graph.sharding_rules.table import (
    Axis,
    Entry,
    RuleResult,
    Special,
    axis,
    choose,
    dimension,
    integers,
    positions,
    rule,
    shape_of,
)


@rule("native_layer_norm.default", "_fused_rms_norm.default")
def _layer_norm(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    batch = len(shape_of(call, "input")) - len(integers(call, "normalized_shape"))
    axes = [axis(call, (d,) * len(call.outputs), input=d) for d in range(batch)]
    return choose(call, placements, axis_size, axes)


@rule("native_layer_norm_backward.default", "_fused_rms_norm_backward.default")
def _layer_norm_backward(
    call: OpCall, placements: tuple[Placement, ...], axis_size: int
) -> RuleResult:
    batch = len(shape_of(call, "input")) - len(integers(call, "normalized_shape"))
    parameters = (P, P) if "layer_norm" in call.kind else (P,)
    axes = [
        axis(call, (d, *parameters), grad_out=d, input=d, mean=d, rstd=d) for d in range(batch)
    ]
    return choose(call, placements, axis_size, axes, [positions(call, "grad_out")])


@rule("native_group_norm.default")
def _group_norm(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    axes = [
        axis(call, (0, 0, 0), input=0),
        axis(call, (1, 1, 1), input=1, weight=0, bias=0),
    ]
    return choose(call, placements, axis_size, axes)


@rule("native_group_norm_backward.default")
def _group_norm_backward(
    call: OpCall, placements: tuple[Placement, ...], axis_size: int
) -> RuleResult:
    axes = [
        axis(call, (0, P, P), grad_out=0, input=0, mean=0, rstd=0),
        axis(call, (1, 0, 0), grad_out=1, input=1, mean=1, rstd=1, weight=0),
    ]
    return choose(call, placements, axis_size, axes, [positions(call, "grad_out")])


_STATISTICS = ("weight", "bias", "running_mean", "running_var")


@rule(
    *("native_batch_norm.default", "_native_batch_norm_legit.default"),
    *("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional.default"),
    "_native_batch_norm_legit_no_training.default",
)
def _batch_norm(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    others = len(call.outputs) - 1
    training = call.args.get("training") is True
    special = Special.LOCAL_STATISTICS if training else None
    # Without training the statistics are empty, or the running ones, unchanged.
    outputs = [0 if meta.shape != (0,) else R for meta in call.outputs[1:]]
    axes = [
        axis(call, (0, *[L if training else R] * others), special, input=0),
        axis(call, (1, *outputs), input=1, **dict.fromkeys(_STATISTICS, 0)),
    ]
    return choose(call, placements, axis_size, axes)


@rule("native_batch_norm_backward.default")
def _batch_norm_backward(
    call: OpCall, placements: tuple[Placement, ...], axis_size: int
) -> RuleResult:
    channel: dict[str, Entry] = dict.fromkeys(_STATISTICS, 0)
    if call.args["train"] is True:
        statistics = {"save_mean": L, "save_invstd": L}
        batch = axis(call, (0, P, P), Special.LOCAL_STATISTICS, grad_out=0, input=0, **statistics)
        channel.update(save_mean=0, save_invstd=0)
    else:
        batch = axis(call, (0, P, P), grad_out=0, input=0)
    axes = [batch, axis(call, (1, 0, 0), grad_out=1, input=1, **channel)]
    return choose(call, placements, axis_size, axes, [positions(call, "grad_out")])


@rule("_weight_norm_interface.default", "_weight_norm_interface_backward.default")
def _weight_norm(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    """``torch.nn.utils.weight_norm``: each slice along ``dim`` has a length of its own."""
    dim = dimension(call, "dim", len(call.inputs[0].shape))
    axes = [Axis((dim,) * len(call.inputs), (dim,) * len(call.outputs))]
    linear = [positions(call, "grad_w")] if "grad_w" in call.args else []
    return choose(call, placements, axis_size, axes, linear)
