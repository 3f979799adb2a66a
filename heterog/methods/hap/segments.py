"""Segments of the folded order in local terms, so that repeated layers share results.

Two segments with the same signature offer the same transitions: the same calls, triples and values
in the same relation to each other. Values that a segment does not touch are no part of it.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import pairwise

from heterog.graph.batch_plan import batch_plan
from heterog.methods.hap.fold import Folded, Visit
from heterog.methods.hap.prices import ValueClass
from heterog.methods.hap.theory import Role, Theory

Need = tuple[int, int]  # (position among the touched values, form)


@dataclass(frozen=True, slots=True)
class LocalTriple:
    """A triple with positions of touched values instead of values.

    Attributes:
        needs: (position, form) of each of its inputs.
        makes: (position, form) of each of its outputs.
        units: Axis along which its work is divided; 0 if every device does all of it.
    """

    needs: tuple[Need, ...]
    makes: tuple[Need, ...]
    units: int


@dataclass(frozen=True, slots=True)
class Action:
    """The options of a visit, shared by all like visits in any layer.

    Attributes:
        op: Graph op that stands for its likes when work is priced.
        is_update: Whether it is an optimizer step, which needs the parameter in its stored form.
        triples: Ways to run it.
        classes: Value class of each touched value.
        stays: Whether each touched value is carried on.
        wanted: For each touched value, the forms (bit set) that later rows may need.
        awaited: For each touched value, whether a later row makes it.
    """

    op: int
    is_update: bool
    triples: tuple[LocalTriple, ...]
    classes: tuple[int, ...]
    stays: tuple[bool, ...]
    wanted: tuple[int, ...]
    awaited: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """The possible future of a carried value.

    Attributes:
        value_class: Number of its class, which prices its conversions.
        wanted: Forms (bit set) that later rows may need.
        awaited: Whether a later row makes it.
    """

    value_class: int
    wanted: int
    awaited: bool


@dataclass(frozen=True, slots=True)
class Step:
    """An action in a segment.

    Attributes:
        action: Number of the action.
        sources: Place of each touched value among the carried ones; -1 if it is new.
        kept: Places of carried values that are not touched.
        kinds: Kinds of all values carried afterwards; -1 for those not touched yet.
    """

    action: int
    sources: tuple[int, ...]
    kept: tuple[int, ...]
    kinds: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of visits.

    Attributes:
        signature: Number that is equal for segments with the same transitions.
        steps: The visits in local terms.
        inlets: Places of the touched values in the global tuple.
        outlets: For each global place after it, (True, local place) or (False, old global place).
    """

    signature: int
    steps: tuple[Step, ...]
    inlets: tuple[int, ...]
    outlets: tuple[tuple[bool, int], ...]


class Segments:
    """All segments of a folded theory, with actions, kinds and value classes interned.

    Args:
        theory: Theory of a graph.
        folded: Its rows in folded order.
        check: Called at every visit; an exception from it ends the work.
    """

    def __init__(
        self, theory: Theory, folded: Folded, check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        self.theory = theory
        self.folded = folded
        self.classes: list[ValueClass] = []
        self.actions: list[Action] = []
        self.kinds: list[Kind] = []
        self._class_ids: dict[ValueClass, int] = {}
        self._action_ids: dict[Hashable, int] = {}
        self._kind_ids: dict[Kind, int] = {}
        gradients = {row.reads[1].value for row in theory.rows if row.is_update}
        self.class_of = [
            self._intern_class(
                ValueClass(v.num_bytes, tuple(v.forms), v.role, number in gradients)
            )
            for number, v in enumerate(theory.values)
        ]
        self.work_key = _work_keys(theory)
        signatures: dict[Hashable, int] = {}
        self.segments = [
            self._segment(begin, end, signatures) for begin, end in pairwise(folded.cuts)
        ]
        self.kinds_after = self._kinds_at_cuts()

    def _intern_class(self, value_class: ValueClass) -> int:
        if value_class not in self._class_ids:
            self._class_ids[value_class] = len(self.classes)
            self.classes.append(value_class)
        return self._class_ids[value_class]

    def _action(self, visit: Visit) -> int:
        row = self.theory.rows[visit.row]
        position = {value: place for place, value in enumerate(visit.touched)}
        triples = tuple(
            LocalTriple(
                tuple((position[value], form) for value, form in triple.needs),
                tuple((position[value], form) for value, form in triple.makes),
                triple.units,
            )
            for triple in row.triples
        )
        classes = tuple(self.class_of[value] for value in visit.touched)
        rest = (row.is_update, triples, classes, visit.stays, visit.wanted, visit.awaited)
        key = (self.work_key[row.op], *rest)
        if key not in self._action_ids:
            self._action_ids[key] = len(self.actions)
            self.actions.append(Action(row.op, *rest))
        return self._action_ids[key]

    def _kind(self, value_class: int, wanted: int, awaited: bool) -> int:
        kind = Kind(value_class, wanted, awaited)
        if kind not in self._kind_ids:
            self._kind_ids[kind] = len(self.kinds)
            self.kinds.append(kind)
        return self._kind_ids[kind]

    def _segment(self, begin: int, end: int, signatures: dict[Hashable, int]) -> Segment:
        visits = self.folded.visits[begin:end]
        before = self.folded.carried[begin - 1] if begin else ()
        after = self.folded.carried[end - 1]
        mine = {value for visit in visits for value in visit.touched}
        carried = tuple(value for value in before if value in mine)
        inlets = tuple(place for place, value in enumerate(before) if value in mine)
        # From here on values are places in the tuple of carried ones: layers whose values have
        # other numbers, but the same places, get the same steps and so the same signature.
        kind_of = {value: -1 for value in carried}
        steps = []
        for visit in visits:
            self._check()
            where = {value: place for place, value in enumerate(carried)}
            kept = tuple(p for p, value in enumerate(carried) if value not in visit.touched)
            sources = tuple(where.get(value, -1) for value in visit.touched)
            staying = zip(visit.touched, visit.stays, visit.wanted, visit.awaited, strict=True)
            new = []
            for value, stays, wanted, awaited in staying:
                if stays:
                    new.append(value)
                    kind_of[value] = self._kind(self.class_of[value], wanted, awaited)
            carried = (*(carried[place] for place in kept), *new)
            kinds = tuple(kind_of[value] for value in carried)
            steps.append(Step(self._action(visit), sources, kept, kinds))
        place_in = {value: place for place, value in enumerate(carried)}
        place_before = {value: place for place, value in enumerate(before)}
        outlets = tuple(
            (True, place_in[value]) if value in place_in else (False, place_before[value])
            for value in after
        )
        entering = tuple(self.class_of[before[place]] for place in inlets)
        key = (entering, tuple(steps))
        number = signatures.setdefault(key, len(signatures))
        return Segment(number, tuple(steps), inlets, outlets)

    def _kinds_at_cuts(self) -> list[tuple[int, ...]]:
        """Kinds of the values carried globally after each segment."""
        found = []
        last: dict[int, int] = {}
        for begin, end in pairwise(self.folded.cuts):
            for visit in self.folded.visits[begin:end]:
                touched = zip(visit.touched, visit.wanted, visit.awaited, strict=True)
                for value, wanted, awaited in touched:
                    last[value] = self._kind(self.class_of[value], wanted, awaited)
            found.append(tuple(last[value] for value in self.folded.carried[end - 1]))
        return found


def _work_keys(theory: Theory) -> list[Hashable]:
    """Keys of the price of each op's work, for each op of the graph."""
    graph, plan = theory.graph, batch_plan(theory.graph)
    return [
        (
            theory.call_id[index],
            float(plan.flops_fixed[index]),
            float(plan.flops_per_sample[index]),
            float(plan.bytes_fixed[index]),
            float(plan.bytes_per_sample[index]),
            op.measured_s,
        )
        for index, op in enumerate(graph.ops)
    ]


def is_parameter(segments: Segments, value_class: int) -> bool:
    """Whether a class consists of parameters."""
    return segments.classes[value_class].role == Role.PARAMETER
