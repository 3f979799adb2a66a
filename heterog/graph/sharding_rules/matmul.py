"""Matrix products: rows, columns, batch, and the contracted index (which leaves partial sums)."""

from heterog.graph.placement import OpCall, P, Placement
from heterog.graph.sharding_rules.table import (
    Axis,
    RuleResult,
    Special,
    aligned,
    axis,
    choose,
    positions,
    rule,
    shape_of,
)


@rule("mm.default")
def _mm(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    axes = [
        axis(call, (0,), self=0),
        axis(call, (1,), mat2=1),
        axis(call, (P,), self=1, mat2=0),
    ]
    return choose(call, placements, axis_size, axes, [(0,), (1,)])


@rule("bmm.default")
def _bmm(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    axes = [
        axis(call, (0,), self=0, mat2=0),
        axis(call, (1,), self=1),
        axis(call, (2,), mat2=2),
        axis(call, (P,), self=2, mat2=1),
    ]
    return choose(call, placements, axis_size, axes, [(0,), (1,)])


@rule("dot.default", "vdot.default")
def _dot(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    return choose(call, placements, axis_size, [Axis((0, 0), (P,))], [(0,), (1,)])


@rule("mv.default")
def _mv(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    axes = [axis(call, (0,), self=0), axis(call, (P,), self=1, vec=0)]
    return choose(call, placements, axis_size, axes, [(0,), (1,)])


@rule("addmm.default")
def _addmm(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    bias, out = shape_of(call, "self"), call.outputs[0].shape
    axes = [
        axis(call, (0,), self=aligned(bias, out, 0), mat1=0),
        axis(call, (1,), self=aligned(bias, out, 1), mat2=1),
        axis(call, (P,), Special.BIAS_ON_ONE_RANK, mat1=1, mat2=0),
        axis(call, (P,), self=P, mat1=1, mat2=0),
    ]
    linear = [positions(call, "self", "mat1"), positions(call, "self", "mat2")]
    return choose(call, placements, axis_size, axes, linear, summand=positions(call, "self"))


@rule("baddbmm.default")
def _baddbmm(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    bias, out = shape_of(call, "self"), call.outputs[0].shape
    axes = [
        axis(call, (0,), self=aligned(bias, out, 0), batch1=0, batch2=0),
        axis(call, (1,), self=aligned(bias, out, 1), batch1=1),
        axis(call, (2,), self=aligned(bias, out, 2), batch2=2),
        axis(call, (P,), Special.BIAS_ON_ONE_RANK, batch1=2, batch2=1),
        axis(call, (P,), self=P, batch1=2, batch2=1),
    ]
    linear = [positions(call, "self", "batch1"), positions(call, "self", "batch2")]
    return choose(call, placements, axis_size, axes, linear, summand=positions(call, "self"))


@rule("linear.default")
def _linear(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    last, bias = len(shape_of(call, "input")) - 1, positions(call, "bias")
    special = Special.BIAS_ON_ONE_RANK if bias else None
    axes = [axis(call, (d,), input=d) for d in range(last)]
    axes.append(axis(call, (last,), weight=0, bias=0))
    axes.append(axis(call, (P,), special, input=last, weight=1))
    linear = [positions(call, "input", "bias"), positions(call, "weight", "bias")]
    return choose(call, placements, axis_size, axes, linear, summand=bias)
