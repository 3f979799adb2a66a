"""Forms: placements of a tensor along an axis, and how forms pass through ops and views.

A form is a placement together with the axis that ``S`` splits. The batch is one axis. Every
dimension of a parameter is an axis (columns, rows, heads, the vocabulary, experts). So is every
factor into which views cut such a dimension (768 = 12 heads x 64). Axes follow from shapes alone;
nothing here knows the name of a layer.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from heterog.graph.placement import OpCall, P, Placement, R, S
from heterog.graph.sharding_rules import RuleResult, propagate
from heterog.graph.sharding_rules.view import split_after_view
from heterog.memo import kept


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """Whole, partial, or split along one axis.

    Attributes:
        kind: ``"R"``, ``"S"`` or ``"P"``.
        dim: Split dimension.
        outer: Outer factor of the split dimension (see ``Placement``).
        units: Units of the axis; 0 unless split.
    """

    kind: str
    dim: int = 0
    outer: int = 1
    units: int = 0

    @property
    def placement(self) -> Placement:
        """The placement alone."""
        return S(self.dim, self.outer) if self.kind == "S" else (R if self.kind == "R" else P)

    def __str__(self) -> str:
        return f"{self.placement}/{self.units}" if self.kind == "S" else self.kind


WHOLE = Form("R")
PARTIAL = Form("P")


def form_of(placement: Placement, units: int) -> Form:
    """The form of a placement along an axis."""
    if placement.kind == "S":
        return Form("S", placement.dim, placement.outer, units)
    return WHOLE if placement.kind == "R" else PARTIAL


def fits(shape: tuple[int, ...], form: Form) -> bool:
    """Whether a tensor of a shape can have a form."""
    if form.kind != "S":
        return True
    return (
        form.dim < len(shape)
        and shape[form.dim] > 0
        and shape[form.dim] % (form.outer * form.units) == 0
    )


class Rulebook:
    """Results of the sharding rules, computed once per distinct call of a graph."""

    @kept
    def through(self, view: OpCall, form: Form, output: int) -> Form | None:
        """The form of a view's output for a form of its input; ``None`` if there is none."""
        if form.kind == "R":
            return form
        if not fits(view.inputs[0].shape, form):
            return None
        result = propagate(view, (form.placement,), max(form.units, 1))
        if result is None or result.inputs[0] != form.placement:
            return None
        made = form_of(result.outputs[output], form.units)
        return made if made.kind == form.kind else None

    @kept
    def before(self, view: OpCall, form: Form, output: int) -> Form | None:
        """The form of a view's input that gives its output ``form``; ``None`` if none does."""
        if form.kind != "S":
            return form if self.through(view, form, output) == form else None
        shape, to = view.inputs[0].shape, view.outputs[output].shape
        trials = [Form("S", dim, form.outer, form.units) for dim in range(len(shape))]
        back = split_after_view(to, shape, form.placement, form.units)
        if back is not None and math.prod(shape) == math.prod(to):
            trials.insert(0, form_of(back, form.units))
        if form.outer != 1:
            trials += [Form("S", dim, 1, form.units) for dim in range(len(shape))]
        return next((each for each in trials if self.through(view, each, output) == form), None)

    @kept
    def along(self, call: OpCall, units: int, outers: tuple[int, ...]) -> tuple[RuleResult, ...]:
        """Rules that split an op along an axis of some number of units."""
        found: dict[RuleResult, None] = {}
        whole = [R] * len(call.inputs)
        for i, meta in enumerate(call.inputs):
            for dim, size in enumerate(meta.shape):
                for outer in outers:
                    if size == 0 or size % (outer * units):
                        continue
                    given = [*whole[:i], S(dim, outer), *whole[i + 1 :]]
                    result = propagate(call, tuple(given), units)
                    if result is not None and _is_settled(call, result, units):
                        found[result] = None
        return tuple(found)

    @kept
    def unsplit(self, call: OpCall) -> tuple[RuleResult, ...]:
        """Rules without a split: everything whole, or partial sums passed on."""
        count = len(call.inputs)
        trials = [(R,) * count]
        if 0 < count <= _MOST_PARTIAL:
            trials += [
                tuple(P if mask >> i & 1 else R for i in range(count))
                for mask in range(1, 1 << count)
            ]
        elif count:
            trials.append((P,) * count)
        found: dict[RuleResult, None] = {}
        for given in trials:
            result = propagate(call, given, 1)
            if result is None:
                return (RuleResult((R,) * count, (R,) * len(call.outputs)),)
            if result.inputs == given and all(p.kind in "RP" for p in result.outputs):
                found[result] = None
        return tuple(found)


_MOST_PARTIAL = 3
"""Most inputs for which every set of partial ones is tried; with more, all or none are partial."""


def _is_settled(call: OpCall, result: RuleResult, units: int) -> bool:
    placements = (*result.inputs, *result.outputs)
    if not any(p.kind == "S" for p in placements) or any(p.kind == "L" for p in placements):
        return False
    again = propagate(call, result.inputs, units)
    return again is not None and (again.inputs, again.outputs) == (result.inputs, result.outputs)


@lru_cache(maxsize=65536)
def finer_splits(shape: tuple[int, ...], to: tuple[int, ...], form: Form) -> tuple[Form, ...]:
    """Coarser axes along which a split survives a view as another shape.

    If a view cuts a dimension of 768 into (12, 64), a split into 768 units does not survive, but
    a split into 12 units (heads) does.

    >>> [str(form) for form in finer_splits((8, 768), (8, 12, 64), Form("S", 1, 1, 768))]
    ['S(1,1)/12']
    """
    before = math.prod(shape[: form.dim]) * form.outer
    start = 1
    found = []
    for size in to:
        if size > 0 and before % start == 0 and start * size % before == 0:
            units = math.gcd(start * size // before, form.units)
            trial = Form("S", form.dim, form.outer, units)
            if 1 < units < form.units and split_after_view(shape, to, trial.placement, units):
                found.append(trial)
        start *= size
    return tuple(dict.fromkeys(found))
