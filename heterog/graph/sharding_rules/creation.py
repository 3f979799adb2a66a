"""Ops that make tensors: constants, ranges, random numbers.

A tensor made from sizes alone is R at its global size; its users slice it. One made *like*
another follows it.
"""

from heterog.graph.placement import OpCall, Placement, R
from heterog.graph.sharding_rules.table import (
    RuleResult,
    Special,
    broadcast_axes,
    choose,
    rule,
    with_shared_stream,
)

FILLS = frozenset(
    {
        *("zeros.default", "ones.default", "full.default"),
        *("new_zeros.default", "new_ones.default", "new_full.default"),
    }
)
"""Ops whose result is one value everywhere: any part of it can be made without the rest."""


@rule(
    *("zeros.default", "ones.default", "full.default", "empty.memory_format"),
    *("new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default"),
    *("empty_strided.default", "new_empty_strided.default", "scalar_tensor.default"),
    *("arange.default", "arange.start", "arange.start_step", "linspace.default", "eye.default"),
    *("eye.m", "tril_indices.default", "triu_indices.default"),
)
def _constant(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    # A tensor argument lends dtype and device only, so it may stay as it is.
    return RuleResult(placements, (R,) * len(call.outputs))


@rule("zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default")
def _like(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    output = placements[0] if placements[0].kind == "S" else R
    return RuleResult(placements, (output,))


@rule(
    *("bernoulli.default", "bernoulli.p", "bernoulli.Tensor", "rand_like.default"),
    *("randn_like.default", "randint_like.default", "randint_like.low_dtype"),
    *("native_dropout.default", "uniform.default", "normal_functional.default"),
    "exponential.default",
)
def _random_like(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    axes = broadcast_axes(call, Special.OWN_RANDOM_STREAM)
    return with_shared_stream(choose(call, placements, axis_size, axes))


@rule(
    *("rand.default", "randn.default", "randint.default", "randint.low", "randperm.default"),
    "multinomial.default",
)
def _random(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    return with_shared_stream(choose(call, placements, axis_size))
