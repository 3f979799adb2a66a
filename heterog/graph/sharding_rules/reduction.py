"""Reductions, scans, orderings, softmax: reduced dimensions are P or blocked, the rest splits."""

from heterog.graph.op_costs import CHECK
from heterog.graph.placement import OpCall, P, Placement
from heterog.graph.sharding_rules.table import (
    Axis,
    Entry,
    RuleResult,
    Special,
    choose,
    dimension,
    dimensions,
    rule,
)


def _reduction_axes(
    call: OpCall, reduced: frozenset[int], *, summed: bool, special: Special | None = None
) -> list[Axis]:
    """Axes of a reduction over ``reduced``, whose own axes count only if it is a sum."""
    rank, count = len(call.inputs[0].shape), len(call.outputs)
    keep = call.args.get("keepdim") is True
    axes = []
    for dim in range(rank):
        target: Entry = dim if keep else dim - sum(r < dim for r in reduced)
        if dim not in reduced:
            axes.append(Axis((dim,), (target,) * count))
        elif summed:
            axes.append(Axis((dim,), (P,) * count, special))
    return axes


@rule("sum.default", "sum.dim_IntList", "nansum.default")
def _sum(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    reduced = dimensions(call, "dim", len(call.inputs[0].shape))
    axes = _reduction_axes(call, reduced, summed=True)
    return choose(call, placements, axis_size, axes, [(0,)] if "nan" not in call.kind else [])


@rule("mean.default", "mean.dim")
def _mean(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    reduced = dimensions(call, "dim", len(call.inputs[0].shape))
    axes = _reduction_axes(call, reduced, summed=True, special=Special.MEAN_TO_SUM)
    return choose(call, placements, axis_size, axes, [(0,)])


@rule("count_nonzero.default", "count_nonzero.dim_IntList")
def _count(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    reduced = dimensions(call, "dim", len(call.inputs[0].shape))
    return choose(call, placements, axis_size, _reduction_axes(call, reduced, summed=True))


@rule(
    *("amax.default", "amin.default", "max.default", "min.default", "max.dim", "min.dim"),
    *("argmax.default", "argmin.default", "median.dim", "kthvalue.default", "mode.default"),
    *("any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims"),
    *("prod.default", "prod.dim_int", "logsumexp.default", "linalg_vector_norm.default"),
    *("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"),
)
def _reduce(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    reduced = dimensions(call, "dim", len(call.inputs[0].shape))
    return choose(call, placements, axis_size, _reduction_axes(call, reduced, summed=False))


_ALONG = (
    *("_softmax.default", "_log_softmax.default", "_safe_softmax.default", "glu.default"),
    *("cumprod.default", "cummax.default", "cummin.default", "logcumsumexp.default"),
    *("sort.default", "sort.stable", "argsort.default", "argsort.stable", "topk.default"),
)
_ALONG_LINEAR = (
    *("cumsum.default", "glu_backward.default"),
    *("_softmax_backward_data.default", "_log_softmax_backward_data.default"),
)
"""Linear in the first input; for a backward, the gradient."""
_BY_NUMBERS_OF_ROWS = ("_log_softmax.default", "_log_softmax_backward_data.default")


@rule(*_ALONG, *_ALONG_LINEAR)
def _along(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    """Ops that work along one dimension and treat all others as a batch."""
    rank = len(call.inputs[0].shape)
    along = dimension(call, "dim", rank, default=-1)
    axes = [
        Axis((d,) * len(call.inputs), (d,) * len(call.outputs)) for d in range(rank) if d != along
    ]
    if call.kind in _BY_NUMBERS_OF_ROWS and rank > 1:
        inputs, outputs = ((along,) * len(metas) for metas in (call.inputs, call.outputs))
        axes.append(Axis(inputs, outputs, Special.NUMBERS_OF_ROWS))
    return choose(call, placements, axis_size, axes, [(0,)] if call.kind in _ALONG_LINEAR else [])


@rule(CHECK)
def _check(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    """What holds for every element holds for those of each part."""
    axes = [Axis((dim,), ()) for dim in range(len(call.inputs[0].shape))]
    return choose(call, placements, axis_size, axes)
