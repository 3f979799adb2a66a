"""Elementwise ops, and ops that make tensors: constants, ranges, random numbers.

An elementwise op may be split along every dimension of its output. A tensor made from sizes alone
is R at its global size, and its readers slice it. A tensor made *like* another has that one's
placement.
"""

from heterog.graph.placement import L, OpCall, Placement, R
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
    with_shared_stream,
)

NONLINEAR = (
    *("abs.default", "sign.default", "sgn.default", "exp.default", "exp2.default"),
    *("expm1.default", "log.default", "log2.default", "log10.default", "log1p.default"),
    *("sqrt.default", "rsqrt.default", "reciprocal.default", "square.default"),
    *("sin.default", "cos.default", "tan.default", "asin.default", "acos.default"),
    *("atan.default", "atan2.default", "sinh.default", "cosh.default", "tanh.default"),
    *("asinh.default", "acosh.default", "atanh.default", "sigmoid.default", "logit.default"),
    *("erf.default", "erfc.default", "erfinv.default", "lgamma.default", "digamma.default"),
    *("ceil.default", "floor.default", "round.default", "round.decimals", "trunc.default"),
    *("frac.default", "relu.default", "gelu.default", "silu.default", "elu.default"),
    *("celu.default", "selu.default", "mish.default", "hardtanh.default", "relu6.default"),
    *("hardswish.default", "hardsigmoid.default", "hardshrink.default", "softshrink.default"),
    *("leaky_relu.default", "softplus.default", "threshold.default"),
    *("log_sigmoid_forward.default", "_prelu_kernel.default"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"),
    *("add.Scalar", "sub.Scalar", "rsub.Scalar", "rsub.Tensor"),
    *("div.Tensor_mode", "div.Scalar_mode", "floor_divide.default", "floor_divide.Scalar"),
    *("remainder.Tensor", "remainder.Scalar", "fmod.Tensor", "fmod.Scalar"),
    *("maximum.default", "minimum.default", "fmax.default", "fmin.default"),
    *("max.other", "min.other"),
    *("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_min.Tensor"),
    *("clamp_max.default", "clamp_max.Tensor", "nan_to_num.default"),
    *("eq.Tensor", "eq.Scalar", "ne.Tensor", "ne.Scalar", "lt.Tensor", "lt.Scalar"),
    *("le.Tensor", "le.Scalar", "gt.Tensor", "gt.Scalar", "ge.Tensor", "ge.Scalar"),
    *("logical_and.default", "logical_or.default", "logical_not.default", "logical_xor.default"),
    *("bitwise_and.Tensor", "bitwise_and.Scalar", "bitwise_or.Tensor", "bitwise_or.Scalar"),
    *("bitwise_xor.Tensor", "bitwise_xor.Scalar", "bitwise_not.default"),
    *("__and__.Tensor", "__or__.Tensor", "__and__.Scalar", "__or__.Scalar"),
    *("bitwise_left_shift.Tensor_Scalar", "bitwise_right_shift.Tensor_Scalar"),
    *("bitwise_left_shift.Tensor", "bitwise_right_shift.Tensor"),
    *("__lshift__.Scalar", "__rshift__.Scalar", "__lshift__.Tensor", "__rshift__.Tensor"),
    *("isnan.default", "isinf.default", "isfinite.default"),
    *("addcmul.default", "addcdiv.default", "logaddexp.default", "xlogy.Tensor"),
    *("xlogy.Scalar_Other", "hypot.default", "heaviside.default", "where.Scalar"),
    *("masked_fill.Tensor", "fill.Scalar", "fill.Tensor", "angle.default", "polar.default"),
    *("logaddexp2.default", "sinc.default", "copysign.Tensor", "signbit.default", "ldexp.Tensor"),
    *("polygamma.default", "igamma.default", "igammac.default", "special_erfcx.default"),
    *("i0.default", "special_i0e.default", "special_i1.default", "special_i1e.default"),
    *("special_ndtri.default", "special_log_ndtr.default", "special_entr.default"),
    *("_standard_gamma_grad.default", "_dirichlet_grad.default"),
)
"""Not linear in any input, so a P input is made R first."""

IDENTITIES = (
    *("alias.default", "detach.default", "clone.default", "lift_fresh.default"),
    *("lift_fresh_copy.default", "contiguous.default", "positive.default"),
)

LINEAR_IN_FIRST = (
    *("neg.default", "mul.Scalar", "div.Scalar", "div.Tensor", "real.default"),
    *("threshold_backward.default", "gelu_backward.default", "silu_backward.default"),
    *("hardtanh_backward.default", "leaky_relu_backward.default", "elu_backward.default"),
    *("hardswish_backward.default", "hardsigmoid_backward.default", "mish_backward.default"),
    *("softplus_backward.default", "sigmoid_backward.default", "tanh_backward.default"),
    *("log_sigmoid_backward.default", "logit_backward.default", "hardshrink_backward.default"),
    *("softshrink_backward.default", "native_dropout_backward.default"),
    *("_prelu_kernel_backward.default", "rrelu_with_noise_backward.default"),
)
"""Linear in the first input (the output's gradient), whatever the others are."""

PLUS_NUMBER = frozenset({"add.Tensor", "sub.Tensor", "add.Scalar", "sub.Scalar", "rsub.Scalar"})
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


splits("_to_copy.default", "_conj.default", linear=_if_it_commutes)(broadcast_axes)
splits("mul.Tensor", linear=lambda call: [(i,) for i in range(len(call.inputs))])(broadcast_axes)
splits(
    *("add.Tensor", "sub.Tensor", "lerp.Scalar", "complex.default"),
    # A Python number as second argument would be added once per device.
    linear=lambda call: [(0, 1)] if len(call.inputs) == 2 else [],
)(broadcast_axes)
splits("lerp.Tensor", linear=[("self", "end")])(broadcast_axes)
splits(
    *("where.self", "where.ScalarOther", "where.ScalarSelf"),
    linear=_if_numbers_are_zero,
)(broadcast_axes)
splits(
    "masked_fill.Scalar",
    linear=lambda call: [(0,)] if call.args["value"] == 0 else [],
)(broadcast_axes)


@splits(
    "fake_quantize_per_tensor_affine_cachemask.default",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
    "fake_quantize_per_channel_affine_cachemask.default",
)
def _rounded(call: OpCall) -> list[Axis]:
    # One scale for all elements, or for each channel; torch refuses to round no channels.
    rank = len(call.outputs[0].shape)
    channel = dimension(call, "axis", rank) if "axis" in call.args else -1
    return [axis(call, (d, d), self=d) for d in range(rank) if d != channel]


@splits("bucketize.Tensor", "isin.Tensor_Tensor")
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


FILLS = frozenset(
    {
        *("zeros.default", "ones.default", "full.default"),
        *("new_zeros.default", "new_ones.default", "new_full.default"),
    }
)
"""Ops whose output has one value everywhere: a device can make any part of it alone."""


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
    *("exponential.default", "_standard_gamma.default", "poisson.default", "binomial.default"),
    *("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor"),
    *("cauchy.default", "geometric.default", "log_normal.default"),
    "rrelu_with_noise_functional.default",
)
def _random_like(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    axes = broadcast_axes(call, Special.OWN_RANDOM_STREAM)
    return with_shared_stream(choose(call, placements, axis_size, axes))


@rule(
    *("rand.default", "randn.default", "randint.default", "randint.low", "randperm.default"),
)
def _random(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    return with_shared_stream(choose(call, placements, axis_size))


@rule("multinomial.default", "_sample_dirichlet.default")
def _random_rows(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    """Draws of each row, by the probabilities along the last dimension."""
    rows = range(len(call.inputs[0].shape) - 1)
    axes = [Axis((d,), (d,), Special.OWN_RANDOM_STREAM) for d in rows]
    return with_shared_stream(choose(call, placements, axis_size, axes))
