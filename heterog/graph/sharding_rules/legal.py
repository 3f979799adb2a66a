"""Finds the rule of an op for given placements (``propagate``), or all rules (``legal_rules``).

Also has the rules of ops whose parts read rows that neighbours own: a split with halo
(``halo_rule``). A tensor is cut along a dimension of space (or time, in one-dimensional models)
into the parts that the devices of a team own. A rule states the rows of each input that a device's
output rows need, as a ``Window`` that grows with the units of the axis. Only ``halo_rule`` returns
these rules, so that searches over plain splits do not find them.

A rule whose window is no wider than the owned rows needs no rows of others, as with BatchNorm:
each part is normalised by statistics of its own (``Special.LOCAL_STATISTICS``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import combinations, product

from heterog.errors import GraphError
from heterog.graph.op_costs import SPARSE_PRODUCT
from heterog.graph.placement import (
    H,
    L,
    OpCall,
    P,
    Placement,
    R,
    S,
    TensorMeta,
    Window,
    kinds,
)
from heterog.graph.sharding_rules.matmul import product_of_rows
from heterog.graph.sharding_rules.table import (
    RULES,
    Rule,
    RuleResult,
    Special,
    integers,
    positions,
)
from heterog.graph.sparse_pattern import Stencil

CONVOLUTION = "convolution.default"
CONVOLUTION_BACKWARD = "convolution_backward.default"


def per_dim(call: OpCall, name: str, rank: int) -> tuple[int, ...]:
    """An argument of one number for each dimension of space; a single number is repeated."""
    given = integers(call, name)
    return given * rank if len(given) == 1 else given


def stencil_of(call: OpCall, dim: int) -> Stencil:
    """The stencil of a convolution or pooling; a backward op has that of its forward op.

    A transposed convolution has the stencil of the convolution whose input gradient it computes.
    """
    rank, at = len(call.inputs[0].shape) - 2, dim - 2
    if call.kind.startswith("convolution"):
        (weight,) = positions(call, "weight")
        kernel = call.inputs[weight].shape[dim]
    else:
        kernel = per_dim(call, "kernel_size", rank)[at]
    stride = per_dim(call, "stride", rank)
    dilation = per_dim(call, "dilation", rank)
    return Stencil(
        kernel=kernel,
        stride=stride[at] if stride else kernel,
        padding=per_dim(call, "padding", rank)[at],
        dilation=dilation[at] if dilation else 1,
    )


def read_window(stencil: Stencil, rows: int) -> Window:
    """Window of input rows that is read for ``rows`` output rows per unit.

    >>> read_window(Stencil(kernel=3, padding=1), rows=4)
    Window(step=4, before=1, after=1)
    """
    after = stencil.reach - stencil.stride - stencil.padding
    return Window(rows * stencil.stride, stencil.padding, after)


def readers_window(stencil: Stencil, rows: int) -> Window | None:
    """Window of output rows that read any of ``rows`` input rows per unit.

    ``None`` if the stride does not divide ``rows``.
    """
    if rows % stencil.stride:
        return None
    before = (stencil.reach - 1 - stencil.padding) // stencil.stride
    return Window(rows // stencil.stride, before, (stencil.padding - 1) // stencil.stride + 1)


def widened(window: Window, rows: int, units: int) -> Window:
    """Widen a window to include the own rows, ``rows`` per unit, of each of ``units`` units."""
    drift = units * (window.step - rows)
    return Window(window.step, max(window.before, 0, drift), max(window.after, 0, -drift))


def halo_rule(call: OpCall, dim: int, units: int) -> RuleResult | None:
    """Find the rule of an op whose tensors are cut along a dimension of space.

    Args:
        call: The op.
        dim: Dimension, counted in the op's first output; 2 is the first after channels.
        units: Number of units of the axis; they must divide the rows of every tensor that is cut.

    Returns:
        The rule; ``None`` if the op has none for ``dim``, or the units do not divide its rows.
    """
    found = _RULES.get(call.kind)
    first = 0 if call.kind == SPARSE_PRODUCT else 2
    if found is None or units < 1 or not first <= dim < len(call.inputs[0].shape):
        return None
    result = found(call, dim, units)
    if result is None:
        return None
    pairs = (
        *zip(call.inputs, result.inputs, strict=True),
        *zip(call.outputs, result.outputs, strict=True),
    )
    divides = all(not meta.shape[place.dim] % units for meta, place in pairs if place.is_split)
    return result if divides else None


_HaloRule = Callable[[OpCall, int, int], RuleResult | None]


def _rows(call: OpCall, name: str, dim: int, units: int) -> int:
    (where,) = positions(call, name)
    return call.inputs[where].shape[dim] // units


def _named(call: OpCall, **places: Placement) -> tuple[Placement, ...]:
    """Placements of the inputs by argument name; those not named are whole."""
    placed = {at: place for name, place in places.items() for at in positions(call, name)}
    return tuple(placed.get(at, R) for at in range(len(call.inputs)))


def _convolution(call: OpCall, dim: int, units: int) -> RuleResult | None:
    stencil, rows = stencil_of(call, dim), call.outputs[0].shape[dim] // units
    find = readers_window if call.args["transposed"] is True else read_window
    window = find(stencil, rows)
    if window is None:
        return None
    return RuleResult(_named(call, input=H(dim, window)), (S(dim),))


def _convolution_backward(call: OpCall, dim: int, units: int) -> RuleResult | None:
    stencil = stencil_of(call, dim)
    rows, gradients = (_rows(call, name, dim, units) for name in ("input", "grad_output"))
    mask = call.args["output_mask"]
    assert isinstance(mask, tuple)
    is_transposed = call.args["transposed"] is True
    read: Placement = S(dim)
    gradient: Placement = S(dim)
    if is_transposed:
        wide = read_window(stencil, rows)
        gradient = H(dim, widened(wide, gradients, units) if mask[2] else wide)
    else:
        read = H(dim, read_window(stencil, gradients)) if mask[1] else read
        if mask[0]:
            window = readers_window(stencil, rows)
            if window is None:
                return None
            keeps_own = mask[1] or mask[2]
            gradient = H(dim, widened(window, gradients, units) if keeps_own else window)
        elif not mask[1]:
            return None
    made = tuple(
        place for place, wanted in zip((S(dim), P, P), mask, strict=True) if wanted is True
    )
    return RuleResult(_named(call, input=read, grad_output=gradient), made)


def _pool(call: OpCall, dim: int, units: int) -> RuleResult | None:
    rank = 2 if "2d" in call.kind else 3
    if call.args["ceil_mode"] is True or len(call.inputs[0].shape) != rank + 2:
        return None
    stencil = stencil_of(call, dim)
    if "backward" not in call.kind:
        window = read_window(stencil, call.outputs[0].shape[dim] // units)
        return RuleResult((H(dim, window),), (S(dim),) * len(call.outputs))
    readers = readers_window(stencil, _rows(call, "self", dim, units))
    if readers is None:
        return None
    halo = H(dim, readers)
    return RuleResult(_named(call, grad_output=halo, self=S(dim), indices=halo), (S(dim),))


def _upsample(call: OpCall, dim: int, units: int) -> RuleResult | None:
    is_backward = "backward" in call.kind
    large, small = call.outputs[0].shape, call.inputs[0].shape
    if is_backward:
        large, small = small, large
    factor = large[dim] // small[dim]
    is_whole = all(many % few == 0 for many, few in zip(large[2:], small[2:], strict=True))
    if not is_whole or call.args.get("align_corners") is True:
        return None
    # Blending reads one row on either side, whatever the factor.
    reach = int("nearest" not in call.kind and factor > 1)
    step = small[dim] // units
    window = Window(step, reach, reach)
    if is_backward:
        window = Window(step * factor, reach * factor, reach * factor)
    return RuleResult((H(dim, window),), (S(dim),))


def _batch_norm(call: OpCall, dim: int, units: int) -> RuleResult | None:
    is_backward = "backward" in call.kind
    if call.args.get("train" if is_backward else "training") is not True:
        return None
    own = H(dim, Window(_rows(call, "input", dim, units), 0, 0))
    if is_backward:
        inputs = _named(call, grad_out=own, input=own, save_mean=L, save_invstd=L)
        made: tuple[Placement, ...] = (S(dim), P, P)
    else:
        inputs, made = _named(call, input=own), (S(dim), L, L, L, L)
    return RuleResult(inputs, made[: len(call.outputs)], Special.LOCAL_STATISTICS)


_RULES: dict[str, _HaloRule] = {
    CONVOLUTION: _convolution,
    CONVOLUTION_BACKWARD: _convolution_backward,
    **dict.fromkeys(
        kinds("avg_pool{2,3}d{,_backward} max_pool{2,3}d_with_indices{,_backward}"), _pool
    ),
    **dict.fromkeys(kinds("upsample_nearest{1,2,3}d{,_backward}"), _upsample),
    **dict.fromkeys(kinds("upsample_{linear1,bilinear2,trilinear3}d{,_backward}"), _upsample),
    **dict.fromkeys(kinds("native_batch_norm{,_backward}"), _batch_norm),
    **dict.fromkeys(kinds("_native_batch_norm_legit{,_functional}"), _batch_norm),
    SPARSE_PRODUCT: product_of_rows,
}

RUNS_ON_WINDOWS = frozenset(kind for kind in _RULES if "batch_norm" not in kind)
"""Ops that cannot run unchanged on a window: ``heterog.runtime.step.windows`` runs them."""


def halo_dim(placements: tuple[Placement, ...]) -> int | None:
    """The dimension along which some inputs have halos; ``None`` if no input has."""
    return next((place.dim for place in placements if place.kind == "H"), None)


def propagate(
    call: OpCall, placements: tuple[Placement, ...], axis_size: int
) -> RuleResult | None:
    """Find how to run an op whose inputs have given placements along one mesh axis.

    Args:
        call: The op.
        placements: Placement of each tensor input.
        axis_size: Number of units (batch rows, say) that the axis divides.

    Returns:
        The rule that fits the placements with the fewest elements moved: split if an input is
        split along an axis of the op, partial if the op is linear in the partial inputs, and
        everything replicated otherwise. ``None`` if the table does not know the op: then only
        running it replicated is right, and for an op that draws random numbers not even that.

    Raises:
        GraphError: the op has other arguments or inputs than its kind has.
    """
    dim = halo_dim(placements)
    found = RULES.get(call.kind)
    try:
        if dim is not None:
            return halo_rule(call, dim, axis_size)
        return _applied(found, call, placements, axis_size) if found else None
    except _FAULTS as error:
        raise _unfit(f"the args do not fit the sharding rule of {call.kind}", error) from error


_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


@contextmanager
def claims_checked(fault: str) -> Iterator[None]:
    """Context for code that reads the args of an op: in an imported graph they may be anything.

    Args:
        fault: Description of the fault if the code fails on them, without a full stop.

    Raises:
        GraphError: the code fails on them.
    """
    try:
        yield
    except _FAULTS as error:
        raise _unfit(fault, error) from error


def _unfit(fault: str, error: Exception) -> GraphError:
    return GraphError(f"{fault} ({type(error).__name__}: {' '.join(str(error).split())}).")


@lru_cache(maxsize=1 << 15)
def _applied(
    found: Rule, call: OpCall, placements: tuple[Placement, ...], axis_size: int
) -> RuleResult:
    """Result of a rule, cached: ops of repeated layers share one call (``OpGraph.call``)."""
    return found(call, placements, axis_size)


def legal_rules(
    call: OpCall, axis_size: int, outers: Sequence[int] = (1,)
) -> tuple[RuleResult, ...]:
    """All rules of an op, for searches over programs.

    Tries R, P and every split S(dim, outer) on one and on two inputs at a time, with all others R,
    if ``outer x axis_size`` divides the dimension. Keeps the rules that need no conversion.

    Args:
        call: The op.
        axis_size: Number of units that the axis divides.
        outers: Outer factors to try.
    """
    found: dict[RuleResult, None] = {}
    for placements in _trials(call, axis_size, outers):
        result = propagate(call, placements, axis_size)
        if result is None:
            return ()
        if result not in found:
            # Slicing an R input is free, so the result may split inputs that the trial had whole.
            settled = propagate(call, result.inputs, axis_size)
            # If all outputs are L, the op got statistics for which it has no rule.
            local = all(output == L for output in result.outputs) and bool(result.outputs)
            if settled is not None and settled.inputs == result.inputs and not local:
                found[settled] = None
    return tuple(found)


_MOST_PAIRED = 6
"""Most inputs for which pairs are tried; longer lists (of cat, say) have one split input only."""


def _trials(
    call: OpCall, axis_size: int, outers: Sequence[int]
) -> Iterator[tuple[Placement, ...]]:
    count = len(call.inputs)
    whole = [R] * count
    # BatchNorm's saved statistics exist only as local ones where the batch is split.
    saved = positions(call, "save_mean", "save_invstd")
    local = [L if i in saved else R for i in range(count)]
    options = [_options(meta, axis_size, outers) for meta in call.inputs]
    yield tuple(whole)
    yield (P,) * count
    for i in range(count):
        for base in (whole, local) if saved else (whole,):
            for one in options[i]:
                yield (*base[:i], one, *base[i + 1 :])
    if count <= _MOST_PAIRED:
        for i, j in combinations(range(count), 2):
            for one, two in product(options[i], options[j]):
                yield (*whole[:i], one, *whole[i + 1 : j], two, *whole[j + 1 :])


def _options(meta: TensorMeta, axis_size: int, outers: Sequence[int]) -> list[Placement]:
    splits = [
        S(dim, outer)
        for dim, size in enumerate(meta.shape)
        for outer in outers
        if size and size % (outer * axis_size) == 0
    ]
    return [*splits, P]
