"""The table of sharding rules, and the function that picks a split for given placements.

A rule names the *axes* of its op: the indices that may be split, and the dimension of each in
every input and output. ``mm`` (``[m, k] x [k, n]``) has three: ``m`` is dimension 0 of the first
input and of the output, ``n`` is dimension 1 of the second input and of the output, ``k`` is
summed, so splitting it leaves a partial sum. The given placements decide which axis is used:
``choose`` takes the axis that needs the fewest elements moved.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import inf, prod
from typing import Any

from heterog.graph.placement import L, OpCall, P, Placement, R, S, TensorMeta, TensorRef


class Special(StrEnum):
    """The change that keeps an op exact when it runs on a device's part.

    Attributes:
        MEAN_TO_SUM: the op divides by the number of elements it sees. Multiply its first output by
            ``share / axis_size``; a device with ``share == 0`` uses zeros instead (its own mean
            would be 0 / 0). Holds for the mean forward (outputs P) and for the backward of mean
            losses (output S), whose divisor is the local count in the same way.
        NLL_GLOBAL_WEIGHT: ``nll_loss_forward`` with mean reduction. Run it with
            ``reduction = 2`` (sum); output 1 is then the local total weight, a P. All-reduce it,
            and divide output 0 by the result: that is a P whose sum is the mean over all labels
            that are not ignored. The backward needs no change, only the all-reduced total weight.
        BIAS_ON_ONE_RANK: the outputs are summed over devices and micro-batches, so the summand
            must enter once: replace it by zeros on all devices but one, and in all micro-batches
            but the first. The summand is the argument ``bias`` (convolution, linear), the inputs
            that are R or the number (``add``, ``sub``, ``cat``, ``stack``), or ``self`` (every
            other op, such as a tensor into which a part is written).
        LOCAL_STATISTICS: BatchNorm over the local part, as data-parallel training does it. Run
            the op unchanged; each part is normalised alone, not the whole batch.
        OWN_ROWS: one index of the op counts the samples of the batch (or says where their bags of
            indices begin, or is a place among the rows of its own sample), and every sample looks
            into its own rows. Subtract where the rows of the device's first sample begin.
        CAUSAL_ROWS: causal attention of some queries, which see the keys up to their own position.
            Keys before the device's first query need no mask, the keys from there on do.
        OWN_WORDS: look-ups in some rows of a table, or the choice of the labels' logits among
            some classes. Words of other devices give zeros, so the sum over devices is complete.
        NUMBERS_OF_ROWS: an op along the rows of a matrix, on some of its columns. Each device
            computes one number per row from its columns, gathers the numbers of all devices, and
            makes its columns with them: the logarithm of the exponentials' sum for log-softmax,
            the sum of a gradient for its backward.
        AS_RESHAPE: a squeeze that would also drop the split dimension on a device whose part of
            it has size 1. Reshape to the local shape of the output instead.
        OWN_RANDOM_STREAM: random numbers of a split tensor. Each device draws from a generator of
            its own: the distribution is that of the op, but the numbers differ.
        SHARED_RANDOM_STREAM: random numbers that all devices must share: draw them from generators
            in the same state, or on one device and broadcast.
        OF_WHOLE_BATCH: of several samples, by values that follow from the batch alone. Run the op
            and its inputs on the whole batch, which every rank has; every micro-batch gets the
            same values.
    """

    MEAN_TO_SUM = "mean_to_sum"
    NLL_GLOBAL_WEIGHT = "nll_global_weight"
    BIAS_ON_ONE_RANK = "bias_on_one_rank"
    LOCAL_STATISTICS = "local_statistics"
    OWN_ROWS = "own_rows"
    CAUSAL_ROWS = "causal_rows"
    OWN_WORDS = "own_words"
    NUMBERS_OF_ROWS = "numbers_of_rows"
    AS_RESHAPE = "as_reshape"
    OWN_RANDOM_STREAM = "own_random_stream"
    OF_WHOLE_BATCH = "of_whole_batch"
    SHARED_RANDOM_STREAM = "shared_random_stream"


INSIDE_TEAMS = frozenset({Special.CAUSAL_ROWS, Special.OWN_WORDS, Special.NUMBERS_OF_ROWS})
"""Changes for which a device must know where its units begin, or which devices have the others.
Members of a team know this, devices with samples of the batch do not."""
_OF_RUNS = frozenset({Special.CAUSAL_ROWS, Special.OWN_WORDS})
"""Changes by where a part begins, which must be one run of consecutive positions or words."""


@dataclass(frozen=True, slots=True)
class RuleResult:
    """One legal way to run an op along one mesh axis.

    Attributes:
        inputs: Needed placement of each tensor input. If it differs from the given placement, the
            caller converts: R to S slices, S to R gathers, P to R all-reduces; P to S and S to
            another S go through R. L is needed only of an input that is L already.
        outputs: Resulting placement of each output.
        special: Change of the op on a part; ``None`` if it needs none.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    special: Special | None = None


Rule = Callable[[OpCall, tuple[Placement, ...], int], RuleResult]

RULES: dict[str, Rule] = {}


def rule(*kinds: str) -> Callable[[Rule], Rule]:
    """Enter the decorated function in ``RULES`` under every one of ``kinds``."""

    def enter(function: Rule) -> Rule:
        for kind in kinds:
            assert kind not in RULES, f"two rules for {kind}"
            RULES[kind] = function
        return function

    return enter


_Inputs = Sequence[Sequence[int | str]]
"""Sets of inputs, each given by its position or by argument name."""


def splits(
    *kinds: str,
    linear: _Inputs | Callable[[OpCall], _Inputs] = (),
    summand: str = "",
    draws: Callable[[OpCall], bool] | None = None,
) -> Callable[["_Axes"], "_Axes"]:
    """Enter a rule in ``RULES`` that splits an op along axes which the decorated function finds.

    Args:
        kinds: Kinds of the ops.
        linear: As in ``choose``, for all calls or by a function of the call.
        summand: As in ``choose``; an argument name.
        draws: Whether a call draws random numbers: without a split all devices draw the same
            ones. ``None`` if no call does.
    """

    def enter(function: _Axes) -> _Axes:
        @lru_cache(maxsize=1 << 13)
        def of(call: OpCall) -> tuple[list[Axis], list[list[int]], tuple[int, ...]]:
            groups = [
                [
                    place
                    for each in group
                    for place in (positions(call, each) if isinstance(each, str) else (each,))
                ]
                for group in (linear(call) if callable(linear) else linear)
            ]
            return function(call), groups, positions(call, summand)

        def chosen(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
            axes, groups, base = of(call)
            found = choose(call, placements, axis_size, axes, groups, summand=base)
            if draws is not None and found.special is None and draws(call):
                found = replace(found, special=Special.SHARED_RANDOM_STREAM)
            return found

        rule(*kinds)(chosen)
        return function

    return enter


def mixes(*kinds: str, into: bool = False, **how: Any) -> Callable[["_Mixed"], "_Mixed"]:
    """Enter a rule of ops that mix some dimensions, and treat all others as a batch.

    The decorated function finds those dimensions by the rank of the first input, or of the first
    output with ``into``. Further arguments are those of ``splits``.
    """

    def enter(mixed: _Mixed) -> _Mixed:
        def axes(call: OpCall) -> list[Axis]:
            rank = len((call.outputs if into else call.inputs)[0].shape)
            return beside(call, rank, mixed(call, rank))

        splits(*kinds, **how)(axes)
        return mixed

    return enter


Entry = int | Placement
"""A dimension that carries the axis, or the placement of a tensor that does not."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One index of an op that may be split.

    Attributes:
        inputs: For each tensor input, the dimension that carries the index, or R (or L).
        outputs: The dimension of each output that carries the index; P if the op sums over it.
        special: Change of the op on a part; see ``Special``.
        units: A count that must be cut evenly as well, such as the groups of a convolution.
    """

    inputs: tuple[Entry, ...]
    outputs: tuple[Entry, ...]
    special: Special | None = None
    units: int = 0


_Axes = Callable[[OpCall], list[Axis]]
_Mixed = Callable[[OpCall, int], Collection[int]]


def beside(call: OpCall, rank: int, mixed: Collection[int]) -> list[Axis]:
    """Axes of an op that mixes some dimensions of ``rank``, and treats all others as a batch.

    A tensor of a smaller rank lacks the mixed ones, one of a larger rank has more at its end.
    """
    kept = [dim for dim in range(rank) if dim not in mixed]

    def placed(metas: Iterable[TensorMeta], place: int) -> tuple[Entry, ...]:
        return tuple(place if len(meta.shape) < rank else kept[place] for meta in metas)

    places = range(len(kept))
    return [Axis(placed(call.inputs, each), placed(call.outputs, each)) for each in places]


def axis(
    call: OpCall,
    outputs: Sequence[Entry],
    special: Special | None = None,
    units: int = 0,
    /,
    **inputs: Entry,
) -> Axis:
    """Make an ``Axis`` with inputs by argument name; those not named are R, as are absent ones.

    ``outputs`` may list one entry for each output the op can have: those masked out by the
    call's ``output_mask`` are dropped.

    Raises:
        KeyError: the op has no argument of that name, because torch has renamed it, say.
    """
    entries: list[Entry] = [R] * len(call.inputs)
    for name, entry in inputs.items():
        if name not in call.args:
            raise KeyError(f"no argument '{name}', which another version of torch may name so")
        ref = call.args[name]
        if isinstance(ref, TensorRef):
            entries[ref.index] = entry
    return Axis(tuple(entries), tuple(_unmasked(call, outputs)), special, units)


def of_op(call: OpCall, **inputs: Entry) -> dict[str, Entry]:
    """Entries of those arguments that the op has, in a rule of several ops."""
    return {name: entry for name, entry in inputs.items() if name in call.args}


def _unmasked(call: OpCall, outputs: Sequence[Entry]) -> Iterable[Entry]:
    mask = call.args.get("output_mask")
    if not isinstance(mask, tuple) or len(outputs) == len(call.outputs):
        return outputs
    return [output for output, wanted in zip(outputs, mask, strict=True) if wanted]


def choose(
    call: OpCall,
    placements: tuple[Placement, ...],
    axis_size: int,
    axes: Iterable[Axis] = (),
    linear: Iterable[Sequence[int]] = (),
    *,
    summand: Sequence[int] = (),
    extra: Iterable[RuleResult] = (),
) -> RuleResult:
    """Choose the legal rule that moves the fewest elements for given placements of the inputs.

    A rule that splits the op is preferred to one that does not: a whole output may move less now,
    but then every later op finds its inputs whole.

    Args:
        call: The op.
        placements: Placements of its tensor inputs.
        axis_size: Number of units that the mesh axis divides.
        axes: Indices of the op that may be split.
        linear: Sets of inputs (by position) in which the op is jointly linear: if these are P and
            all others R, the outputs are P.
        summand: The input of such a set that is only added; it may be R too, if it enters once.
        extra: Further splits that hold only for these placements.
    """

    def moved(candidate: RuleResult) -> float:
        return _moved_elements(call.inputs, placements, candidate.inputs)

    best = min([*extra, *_splits(call, placements, axis_size, axes)], key=moved, default=None)
    if best is not None and moved(best) < inf:
        return best
    partials = _partials(call, placements, linear, summand)
    return min([*partials, _whole(call, placements)], key=moved)


def _splits(
    call: OpCall, placements: tuple[Placement, ...], axis_size: int, axes: Iterable[Axis]
) -> Iterable[RuleResult]:
    splits = [(i, p.dim, p.outer) for i, p in enumerate(placements) if p.kind == "S"]
    if not splits:
        return
    for one in axes:
        for outer in dict.fromkeys(outer for i, dim, outer in splits if one.inputs[i] == dim):
            inputs = tuple(
                _placed(entry, outer, given)
                for entry, given in zip(one.inputs, placements, strict=True)
            )
            outputs = tuple(_placed(entry, outer, R) for entry in one.outputs)
            if (
                one.units % (outer * axis_size) == 0
                and (outer == 1 or one.special not in _OF_RUNS)
                and _divides(call.inputs, inputs, axis_size)
                and _divides(call.outputs, outputs, axis_size)
            ):
                yield RuleResult(inputs, outputs, one.special)


def _placed(entry: Entry, outer: int, given: Placement) -> Placement:
    if isinstance(entry, int):
        return S(entry, outer)
    return L if given == L and entry == R else entry


def _divides(
    metas: tuple[TensorMeta, ...], placements: tuple[Placement, ...], axis_size: int
) -> bool:
    return all(
        meta.shape[p.dim] % (p.outer * axis_size) == 0
        for meta, p in zip(metas, placements, strict=True)
        if p.kind == "S"
    )


def _partials(
    call: OpCall,
    placements: tuple[Placement, ...],
    linear: Iterable[Sequence[int]],
    summand: Sequence[int],
) -> Iterable[RuleResult]:
    if P not in placements:
        return
    for group in linear:
        partial = {i for i in group if placements[i] == P}
        missing = set(group) - partial
        if partial and missing <= set(summand):
            inputs = tuple(P if i in partial else R for i in range(len(placements)))
            special = Special.BIAS_ON_ONE_RANK if missing else None
            yield RuleResult(inputs, (P,) * len(call.outputs), special)


def _whole(call: OpCall, placements: tuple[Placement, ...]) -> RuleResult:
    # Local statistics cannot become a replicated tensor, so outputs computed from them are local.
    output = L if L in placements else R
    inputs = tuple(L if given == L else R for given in placements)
    return RuleResult(inputs, (output,) * len(call.outputs))


def _moved_elements(
    metas: tuple[TensorMeta, ...], given: tuple[Placement, ...], wanted: tuple[Placement, ...]
) -> float:
    """Elements the conversions move: once to gather or reduce-scatter, twice to all-reduce."""
    total = 0.0
    for meta, have, want in zip(metas, given, wanted, strict=True):
        if have == want or (have == R and want.kind == "S"):
            continue
        if have.kind in "RL" or want.kind in "PL":
            return inf
        total += prod(meta.shape) * (2 if have == P and want == R else 1)
    return total


def shape_of(call: OpCall, name: str) -> tuple[int, ...]:
    """Global shape of the tensor argument ``name``."""
    return call.input(name).shape


def positions(call: OpCall, *names: str) -> tuple[int, ...]:
    """Positions in ``call.inputs`` of the tensor arguments ``names``; absent ones left out."""
    refs = (call.args.get(name) for name in names)
    return tuple(ref.index for ref in refs if isinstance(ref, TensorRef))


def integer(call: OpCall, name: str, default: int = 0) -> int:
    """The integer argument ``name``; ``default`` if it is None or missing."""
    value = call.args.get(name)
    return value if isinstance(value, int) else default


def integers(call: OpCall, name: str) -> tuple[int, ...]:
    """The argument ``name`` as a tuple of integers; empty if it is None or missing."""
    value = call.args.get(name)
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, tuple):
        return ()
    return tuple(item for item in value if isinstance(item, int))


def dimension(call: OpCall, name: str, rank: int, default: int = 0) -> int:
    """The dimension argument ``name`` of a tensor of ``rank`` dimensions, counted from 0."""
    return integer(call, name, default) % max(rank, 1)


def dimensions(call: OpCall, name: str, rank: int) -> frozenset[int]:
    """The dimensions argument ``name`` counted from 0; all of them if None, empty or missing."""
    given = integers(call, name)
    return frozenset(d % max(rank, 1) for d in given) if given else frozenset(range(rank))


def named_dim(name: str = "dim", default: int = 0) -> Callable[[OpCall, int], tuple[int]]:
    """The one dimension that an argument names, for ``mixes``."""
    return lambda call, rank: (dimension(call, name, rank, default),)


def aligned(shape: tuple[int, ...], to: tuple[int, ...], dim: int) -> Entry:
    """Dimension of ``shape`` that broadcasts as dimension ``dim`` of ``to``; R if it has none."""
    own = dim - len(to) + len(shape)
    return own if own >= 0 and shape[own] == to[dim] else R


@lru_cache(maxsize=1 << 13)
def broadcast_axes(call: OpCall, special: Special | None = None) -> list[Axis]:
    """The axes of an elementwise op: one per dimension of its first output."""
    whole = call.outputs[0].shape
    return [
        Axis(
            tuple(aligned(meta.shape, whole, dim) for meta in call.inputs),
            tuple(aligned(meta.shape, whole, dim) for meta in call.outputs),
            special,
        )
        for dim in range(len(whole))
    ]
