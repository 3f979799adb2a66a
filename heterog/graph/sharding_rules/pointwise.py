"""Elementwise ops, and ops that make tensors: constants, ranges, random numbers.

An elementwise op may be split along every dimension of its output. A tensor made from sizes alone
is R at its global size, and its readers slice it. A tensor made *like* another has that one's
placement.
"""

from functools import partial

from heterog.graph.placement import L, OpCall, Placement, R, kinds
from heterog.graph.sharding_rules.table import (
    Axis,
    RuleResult,
    Special,
    axis,
    broadcast_axes,
    choose,
    dimension,
    of_op,
    rule,
    splits,
)

NONLINEAR = kinds(
    "abs sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan "
    "asin acos atan atan2 sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv lgamma "
    "digamma ceil floor round round.decimals trunc frac relu gelu silu elu celu selu mish "
    "hardtanh relu6 hardswish hardsigmoid hardshrink softshrink leaky_relu softplus threshold "
    "log_sigmoid_forward _prelu_kernel pow.{Tensor_Scalar,Tensor_Tensor,Scalar} {add,sub}.Scalar "
    "rsub.{Scalar,Tensor} div.{Tensor,Scalar}_mode floor_divide floor_divide.Scalar "
    "{remainder,fmod}.{Tensor,Scalar} maximum minimum fmax fmin {max,min}.other clamp{,_min,_max} "
    "clamp{,_min,_max}.Tensor nan_to_num {eq,ne,lt,le,gt,ge}.{Tensor,Scalar} "
    "logical_{and,or,not,xor} bitwise_{and,or,xor}.{Tensor,Scalar} bitwise_not "
    "{__and__,__or__,__lshift__,__rshift__}.{Tensor,Scalar} "
    "bitwise_{left,right}_shift.{Tensor,Tensor_Scalar} isnan isinf isfinite addcmul addcdiv "
    "logaddexp xlogy.{Tensor,Scalar_Other} hypot heaviside where.Scalar masked_fill.Tensor "
    "fill.{Scalar,Tensor} angle polar logaddexp2 sinc copysign.Tensor signbit ldexp.Tensor "
    "polygamma igamma igammac special_erfcx i0 special_{i0e,i1,i1e,ndtri,log_ndtr,entr} "
    "_standard_gamma_grad _dirichlet_grad"
)
"""Not linear in any input, so a P input is made R first."""

IDENTITIES = kinds("alias detach clone lift_fresh lift_fresh_copy contiguous positive")

LINEAR_IN_FIRST = kinds(
    "neg {mul,div}.Scalar div.Tensor real {threshold,gelu,silu,hardtanh,leaky_relu,elu}_backward "
    "{hardswish,hardsigmoid,mish,softplus,sigmoid,tanh,log_sigmoid,logit,hardshrink}_backward "
    "{softshrink,native_dropout,_prelu_kernel,rrelu_with_noise}_backward"
)
"""Linear in the first input (the output's gradient), whatever the others are."""

PLUS_NUMBER = frozenset(kinds("add.Tensor sub.Tensor add.Scalar sub.Scalar rsub.Scalar"))
"""Sums, which may be of a tensor and a number ``other``."""


splits(*NONLINEAR)(broadcast_axes)
splits(*IDENTITIES, *LINEAR_IN_FIRST, linear=[(0,)])(broadcast_axes)
splits("copy.default", linear=[(1,), (0, 1)])(broadcast_axes)  # the first lends only its shape


def _if_it_commutes(call: OpCall) -> list[tuple[int]]:
    # Rounding to an integer does not commute with sums; torch cannot add numbers of eight bits.
    source, target = call.inputs[0].dtype, call.outputs[0].dtype
    is_float = ("float" in target or "complex" in target) and "float8" not in source + target
    return [(0,)] if is_float or source == target else []


def _if_numbers_are_zero(call: OpCall) -> list[tuple[str, str]]:
    branches = (call.args["self"], call.args["other"])
    numbers = [each for each in branches if isinstance(each, int | float)]
    return [("self", "other")] if all(number == 0 for number in numbers) else []


splits(*kinds("_to_copy _conj"), linear=_if_it_commutes)(broadcast_axes)
splits("mul.Tensor", linear=lambda call: [(i,) for i in range(len(call.inputs))])(broadcast_axes)
splits(
    *kinds("add.Tensor sub.Tensor lerp.Scalar complex"),
    # A Python number as second argument would be added once per device.
    linear=lambda call: [(0, 1)] if len(call.inputs) == 2 else [],
)(broadcast_axes)
splits("lerp.Tensor", linear=[("self", "end")])(broadcast_axes)
splits(
    *kinds("where.self where.ScalarOther where.ScalarSelf"),
    linear=_if_numbers_are_zero,
)(broadcast_axes)
splits(
    "masked_fill.Scalar",
    linear=lambda call: [(0,)] if call.args["value"] == 0 else [],
)(broadcast_axes)


@splits(
    *kinds(
        "fake_quantize_per_tensor_affine_cachemask "
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams "
        "fake_quantize_per_channel_affine_cachemask"
    ),
)
def _rounded(call: OpCall) -> list[Axis]:
    # One scale for all elements, or for each channel; torch refuses to round no channels.
    rank = len(call.outputs[0].shape)
    channel = dimension(call, "axis", rank) if "axis" in call.args else -1
    return [axis(call, (d, d), self=d) for d in range(rank) if d != channel]


@splits(*kinds("bucketize.Tensor isin.Tensor_Tensor"))
def _in_whole(call: OpCall) -> list[Axis]:
    # The boundaries (or the set) are searched as a whole, whatever their number.
    rank = len(call.outputs[0].shape)
    return [axis(call, (d,), **of_op(call, self=d, elements=d)) for d in range(rank)]


@rule("copy_.default")
def _copy_into(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    # The written tensor keeps its place, except that running statistics become local.
    target, source = placements
    if L in placements:
        return RuleResult((target, L if source == L else R), (L,))
    return choose(call, (target, R), axis_size, broadcast_axes(call))


FILLS = frozenset(kinds("zeros ones full new_zeros new_ones new_full"))
"""Ops whose output has one value everywhere: a device can make any part of it alone."""


@rule(
    *kinds(
        "zeros ones full empty.memory_format new_zeros new_ones new_full new_empty "
        "empty_strided new_empty_strided scalar_tensor arange arange.start arange.start_step "
        "linspace eye eye.m tril_indices triu_indices"
    ),
)
def _constant(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    # A tensor argument lends dtype and device only, so it may stay as it is.
    return RuleResult(placements, (R,) * len(call.outputs))


@rule(*kinds("zeros_like ones_like full_like empty_like"))
def _like(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    output = placements[0] if placements[0].kind == "S" else R
    return RuleResult(placements, (output,))


splits(
    *kinds(
        "bernoulli bernoulli.{p,Tensor} {rand,randn,randint}_like randint_like.low_dtype uniform"
    ),
    *kinds("native_dropout normal_functional cauchy exponential _standard_gamma poisson binomial"),
    *kinds("normal.{Tensor_Tensor,Tensor_float,float_Tensor} geometric log_normal"),
    "rrelu_with_noise_functional.default",
    draws=lambda call: True,
)(partial(broadcast_axes, special=Special.OWN_RANDOM_STREAM))
splits(*kinds("rand randn randint randint.low randperm"), draws=lambda call: True)(lambda call: [])


@splits(*kinds("multinomial _sample_dirichlet"), draws=lambda call: True)
def _random_rows(call: OpCall) -> list[Axis]:
    """Draws of each row, by the probabilities along the last dimension."""
    rows = range(len(call.inputs[0].shape) - 1)
    return [Axis((d,), (d,), Special.OWN_RANDOM_STREAM) for d in rows]
