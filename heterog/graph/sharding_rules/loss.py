"""Losses: a sum or mean over the batch becomes a partial sum.

The divisors that autograd puts into backward nodes are global already; only ops that count
their own elements need a ``Special``.
"""

from heterog.graph.placement import OpCall, P, Placement, R
from heterog.graph.sharding_rules.table import (
    Axis,
    RuleResult,
    Special,
    aligned,
    axis,
    broadcast_axes,
    choose,
    integer,
    positions,
    rule,
    shape_of,
)

NO_REDUCTION, MEAN, SUM = 0, 1, 2
"""Values of ATen's ``reduction`` argument."""


@rule(
    *("mse_loss.default", "smooth_l1_loss.default", "huber_loss.default"),
    *("binary_cross_entropy.default", "binary_cross_entropy_with_logits.default"),
    *("soft_margin_loss.default",),
)
def _elementwise(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    reduction, whole = integer(call, "reduction", MEAN), shape_of(call, "self")
    special = Special.MEAN_TO_SUM if reduction == MEAN else None
    axes = [
        Axis(
            tuple(aligned(meta.shape, whole, dim) for meta in call.inputs),
            (P if reduction else dim,),
            special,
        )
        for dim in range(len(whole))
    ]
    return choose(call, placements, axis_size, axes)


@rule(
    *("mse_loss_backward.default", "smooth_l1_loss_backward.default"),
    *("huber_loss_backward.default", "binary_cross_entropy_backward.default"),
    *("soft_margin_loss_backward.default",),
)
def _elementwise_backward(
    call: OpCall, placements: tuple[Placement, ...], axis_size: int
) -> RuleResult:
    special = Special.MEAN_TO_SUM if integer(call, "reduction", MEAN) == MEAN else None
    gradient = [positions(call, "grad_output")]
    return choose(call, placements, axis_size, broadcast_axes(call, special), gradient)


LABEL_COUNTING_LOSSES = frozenset({"nll_loss_forward.default", "nll_loss2d_forward.default"})
"""Losses whose second output is the total weight of the labels that count."""


@rule(*LABEL_COUNTING_LOSSES)
def _nll(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    reduction = integer(call, "reduction", MEAN)
    special = Special.NLL_GLOBAL_WEIGHT if reduction == MEAN else None
    axes = [
        # Without reduction there is no total weight: it is zero everywhere.
        axis(call, (P, P) if reduction else (own, R), special, self=dim, target=own)
        for dim, own in _label_dims(call)
    ]
    if _has_runs_of_classes(call, placements):
        axes.append(axis(call, (P, R), Special.OWN_WORDS, self=1))
    return choose(call, placements, axis_size, axes)


@rule("nll_loss_backward.default", "nll_loss2d_backward.default")
def _nll_backward(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    reduced = integer(call, "reduction", MEAN) != 0
    axes = [
        axis(call, (dim,), grad_output=R if reduced else own, self=dim, target=own)
        for dim, own in _label_dims(call)
    ]
    if _has_runs_of_classes(call, placements):
        axes.append(axis(call, (1,), Special.OWN_WORDS, self=1))
    return choose(call, placements, axis_size, axes, [positions(call, "grad_output")])


def _has_runs_of_classes(call: OpCall, placements: tuple[Placement, ...]) -> bool:
    """Whether each part has classes that follow one another, if it has some of them."""
    is_run = all(placements[place].outer == 1 for place in positions(call, "self"))
    return is_run and len(shape_of(call, "self")) > 1


def _label_dims(call: OpCall) -> list[tuple[int, int]]:
    """Pairs of a dimension of the log-probabilities [N, C, ...] and of the labels [N, ...]."""
    rank = len(shape_of(call, "self"))
    return [(0, 0), *((d, d - 1) for d in range(2, rank))] if rank > 1 else []
