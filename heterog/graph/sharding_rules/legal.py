"""Finding the rule of an op for given placements, and all of its rules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import combinations, product

from heterog.errors import GraphError
from heterog.graph.placement import L, OpCall, P, Placement, R, S, TensorMeta
from heterog.graph.sharding_rules.halo import halo_dim, halo_rule
from heterog.graph.sharding_rules.table import RULES, Rule, RuleResult, positions


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
        split on a dimension the op treats as a batch, partial if the op is linear in the partial
        inputs, and everything replicated otherwise. ``None`` if the table does not know the op:
        then only running it replicated is right, and for an op that draws random numbers not
        even that.

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
    """Result of a rule, kept: the ops of repeated layers are one call (``OpGraph.call``)."""
    return found(call, placements, axis_size)


def legal_rules(
    call: OpCall, axis_size: int, outers: Sequence[int] = (1,)
) -> tuple[RuleResult, ...]:
    """All rules of an op, for searches over programs.

    Tries R, P and every split S(dim, outer) whose dimension ``outer x axis_size`` divides on one
    and on two inputs at a time, all others R, and keeps those that need no conversion.

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
            # Slices come for free, so a trial may have been completed to a rule of its own.
            settled = propagate(call, result.inputs, axis_size)
            # All L says that an op was given statistics it has no rule for, not how to run it.
            local = all(output == L for output in result.outputs) and bool(result.outputs)
            if settled is not None and settled.inputs == result.inputs and not local:
                found[settled] = None
    return tuple(found)


_MOST_PAIRED = 6
"""Most inputs for which pairs are tried; longer lists (of cat, say) are uniform or one split."""


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
                yield _with(base, {i: one})
    if count <= _MOST_PAIRED:
        for i, j in combinations(range(count), 2):
            for one, two in product(options[i], options[j]):
                yield _with(whole, {i: one, j: two})


def _options(meta: TensorMeta, axis_size: int, outers: Sequence[int]) -> list[Placement]:
    splits = [
        S(dim, outer)
        for dim, size in enumerate(meta.shape)
        for outer in outers
        if size and size % (outer * axis_size) == 0
    ]
    return [*splits, P]


def _with(base: Sequence[Placement], changes: dict[int, Placement]) -> tuple[Placement, ...]:
    return tuple(changes.get(i, placement) for i, placement in enumerate(base))
