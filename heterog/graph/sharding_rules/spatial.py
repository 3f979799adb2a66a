"""Convolutions, pooling and resampling of images: batch and channels may be split."""

from heterog.graph.placement import OpCall, P, R, kinds
from heterog.graph.sharding_rules.local import AFFINE_GRIDS
from heterog.graph.sharding_rules.table import (
    Axis,
    Special,
    axis,
    integer,
    mixes,
    positions,
    splits,
)


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


_PLANAR = kinds("max_pool{2,3}d_with_indices {adaptive,fractional}_max_pool{2,3}d")
_PLANAR_LINEAR = kinds(
    "avg_pool1d max_unpool{2,3}d max_pool{2,3}d_with_indices_backward "
    "{adaptive,fractional}_max_pool{2,3}d_backward {,_adaptive_}avg_pool{2,3}d{,_backward} "
    "{reflection,replication}_pad{1,2,3}d{,_backward} upsample_nearest{1,2,3}d{,_backward} "
    "upsample_{linear1,bilinear2,trilinear3,bicubic2}d{,_backward} "
    "_upsample_nearest_exact{1,2,3}d{,_backward}"
)
"""Linear in the first input: the image, or the gradient of the output."""


@mixes(*_PLANAR)
@mixes(*_PLANAR_LINEAR, linear=[(0,)])
def _planar(call: OpCall, rank: int) -> range:
    """Ops that treat each image plane separately."""
    plane = next(size for size in (1, 2, 3) if f"{size}d" in call.kind)
    return range(rank - plane, rank)


@mixes(*kinds("pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im"), linear=[(0,)])
def _blocks(call: OpCall, rank: int) -> range:
    """Ops that mix channels and positions."""
    # im2col maps [C, H, W] to [blocks, positions], col2im the other way.
    return range(rank - (2 if call.kind == "col2im.default" else 3), rank)


mixes(*AFFINE_GRIDS, linear=[(0,)])(lambda call, rank: range(1, rank))


@splits(*kinds("grid_sampler_2d grid_sampler_3d"), linear=[("input",)])
def _grid_sampler(call: OpCall) -> list[Axis]:
    return [axis(call, (0,), input=0, grid=0), axis(call, (1,), input=1)]


@splits(*kinds("grid_sampler_2d_backward grid_sampler_3d_backward"), linear=[("grad_output",)])
def _grid_sampler_backward(call: OpCall) -> list[Axis]:
    return [
        axis(call, (0, 0), grad_output=0, input=0, grid=0),
        axis(call, (1, P), grad_output=1, input=1),
    ]
