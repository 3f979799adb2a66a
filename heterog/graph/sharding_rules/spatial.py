"""Convolutions, pooling and resampling of images: batch and channels may be split."""

from heterog.graph.placement import OpCall, P, R
from heterog.graph.sharding_rules.local import AFFINE_GRIDS
from heterog.graph.sharding_rules.table import Axis, Special, axis, integer, positions, splits


@splits("convolution.default", linear=[("input", "bias"), ("weight", "bias")], summand="bias")
def _convolution(call: OpCall) -> list[Axis]:
    groups = integer(call, "groups", 1)
    axes = [axis(call, (0,), input=0)]
    if groups > 1:
        axes.append(axis(call, (1,), None, groups, input=1, weight=0, bias=0))
    else:
        # A transposed convolution's weight is [in, out, ...] instead of [out, in, ...].
        transposed = int(call.args["transposed"] is True)
        special = Special.BIAS_ON_ONE_RANK if positions(call, "bias") else None
        axes.append(axis(call, (1,), weight=transposed, bias=0))
        axes.append(axis(call, (P,), special, input=1, weight=1 - transposed))
    return axes


@splits("convolution_backward.default", linear=[("grad_output",)])
def _convolution_backward(call: OpCall) -> list[Axis]:
    groups = integer(call, "groups", 1)
    axes = [axis(call, (0, P, P), grad_output=0, input=0)]
    if groups > 1:
        axes.append(axis(call, (1, 0, 0), None, groups, grad_output=1, input=1, weight=0))
    else:
        transposed = int(call.args["transposed"] is True)
        axes.append(axis(call, (P, transposed, 0), grad_output=1, weight=transposed))
        axes.append(axis(call, (1, 1 - transposed, R), input=1, weight=1 - transposed))
    return axes


_PLANAR = (
    *("max_pool2d_with_indices.default", "max_pool3d_with_indices.default"),
    *("adaptive_max_pool2d.default", "adaptive_max_pool3d.default"),
    *("fractional_max_pool2d.default", "fractional_max_pool3d.default"),
)
_PLANAR_LINEAR = (
    *("avg_pool2d.default", "avg_pool3d.default", "avg_pool1d.default"),
    *("_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default"),
    *("avg_pool2d_backward.default", "avg_pool3d_backward.default"),
    *("_adaptive_avg_pool2d_backward.default", "_adaptive_avg_pool3d_backward.default"),
    *("max_pool2d_with_indices_backward.default", "max_pool3d_with_indices_backward.default"),
    *("adaptive_max_pool2d_backward.default", "adaptive_max_pool3d_backward.default"),
    *("fractional_max_pool2d_backward.default", "fractional_max_pool3d_backward.default"),
    *("upsample_nearest2d.default", "upsample_nearest2d_backward.default"),
    *("upsample_bilinear2d.default", "upsample_bilinear2d_backward.default"),
    *("upsample_bicubic2d.default", "upsample_bicubic2d_backward.default"),
    *("_upsample_nearest_exact2d.default", "_upsample_nearest_exact2d_backward.default"),
    *("reflection_pad2d.default", "reflection_pad2d_backward.default"),
    *("replication_pad2d.default", "replication_pad2d_backward.default"),
    *("upsample_nearest1d.default", "upsample_nearest1d_backward.default"),
    *("upsample_linear1d.default", "upsample_linear1d_backward.default"),
    *("reflection_pad1d.default", "reflection_pad1d_backward.default"),
    *("reflection_pad3d.default", "reflection_pad3d_backward.default"),
    *("replication_pad1d.default", "replication_pad1d_backward.default"),
    *("replication_pad3d.default", "replication_pad3d_backward.default"),
    *("upsample_nearest3d.default", "upsample_nearest3d_backward.default"),
    *("upsample_trilinear3d.default", "upsample_trilinear3d_backward.default"),
    *("_upsample_nearest_exact1d.default", "_upsample_nearest_exact1d_backward.default"),
    *("_upsample_nearest_exact3d.default", "_upsample_nearest_exact3d_backward.default"),
    *("max_unpool2d.default", "max_unpool3d.default"),
)
"""Linear in the first input: the image, or the gradient of the output."""


@splits(*_PLANAR)
@splits(*_PLANAR_LINEAR, linear=[(0,)])
def _planar(call: OpCall) -> list[Axis]:
    """Ops that treat each image plane separately: all dimensions before the plane may be split."""
    plane = next(rank for rank in (1, 2, 3) if f"{rank}d" in call.kind)
    leading = range(len(call.inputs[0].shape) - plane)
    return [Axis((d,) * len(call.inputs), (d,) * len(call.outputs)) for d in leading]


@splits(
    "pixel_shuffle.default",
    "pixel_unshuffle.default",
    "channel_shuffle.default",
    "im2col.default",
    "col2im.default",
    linear=[(0,)],
)
def _blocks(call: OpCall) -> list[Axis]:
    """Ops that mix channels and positions: only dimensions before them may be split."""
    shape = call.inputs[0].shape
    # im2col maps [C, H, W] to [blocks, positions], col2im the other way.
    item = 2 if call.kind == "col2im.default" else 3
    return [Axis((d,), (d,)) for d in range(len(shape) - item)]


@splits(*AFFINE_GRIDS, linear=[(0,)])
def _affine_grid(call: OpCall) -> list[Axis]:
    return [Axis((0,), (0,))]


@splits("grid_sampler_2d.default", "grid_sampler_3d.default", linear=[("input",)])
def _grid_sampler(call: OpCall) -> list[Axis]:
    return [axis(call, (0,), input=0, grid=0), axis(call, (1,), input=1)]


@splits(
    *("grid_sampler_2d_backward.default", "grid_sampler_3d_backward.default"),
    linear=[("grad_output",)],
)
def _grid_sampler_backward(call: OpCall) -> list[Axis]:
    return [
        axis(call, (0, 0), grad_output=0, input=0, grid=0),
        axis(call, (1, P), grad_output=1, input=1),
    ]
