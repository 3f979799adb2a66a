"""The folded order of a graph, and its segments, through which repeated layers share results.

In program order, every activation is alive from its layer's forward pass to its backward pass, so
that a search would carry hundreds of values. The *folded* order visits a forward op and its
backward ops together, as one step. Then only values that cross to the next layer are carried:
activations in the form in which they were made, and cotangents in the forms that were *promised*
for them, because their readers come before their makers. Any assignment of ops to steps gives an
exact search; it only changes how many values are carried.

A segment is a run of visits, described by places of values instead of their numbers. Segments with
the same signature offer the same transitions: the same calls, triples and values in the same
relation to each other. A segment leaves out values that it does not touch.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import Phase
from heterog.grouped import grouped
from heterog.methods.hap.programs import ValueClass, form_sets
from heterog.methods.hap.theory import Role, Row, Theory, Triple


@dataclass(frozen=True, slots=True)
class Visit:
    """One row in the folded order, with the values carried past it.

    Attributes:
        row: Number of the row in the theory.
        touched: Values that the row reads or makes, in order of first mention.
        stays: For each touched value, whether it is carried on.
        wanted: For each touched value, the forms (bit set) in which later rows may need it.
        awaited: For each touched value, whether a later row makes it.
    """

    row: int
    touched: tuple[int, ...]
    stays: tuple[bool, ...]
    wanted: tuple[int, ...]
    awaited: tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """The rows in folded order, cut where little is carried.

    Attributes:
        visits: Every row exactly once.
        carried: Values carried after each visit.  # [num_visits]
        cuts: Visits before which a segment begins: first 0, last the number of visits.
    """

    visits: tuple[Visit, ...]
    carried: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]


def assign_steps(theory: Theory) -> list[int]:
    """The step (number of the forward row) of every row.

    A backward op belongs to the forward op that touches its saved values; among several, those of
    the same module are preferred, then the latest. Steps are visited from the first forward op to
    the last, and cotangents flow to earlier steps, so the step of an op is not after that of a
    cotangent that it reads. Optimizer steps belong to the op that makes the gradient.
    """
    graph, rows, values = theory.graph, theory.rows, theory.values
    maker = {write: number for number, row in enumerate(rows) for write in row.writes}
    forward = [n for n, row in enumerate(rows) if graph.ops[row.op].phase == Phase.FORWARD]
    touching = grouped((value, number) for number in forward for value in _touched(rows[number]))
    last = forward[-1] if forward else 0
    updated = {
        row.reads[1].value: row.reads[0].value for row in rows if row.is_update
    }  # gradient value to parameter value
    step = [0] * len(rows)
    for number, row in enumerate(rows):
        phase = graph.ops[row.op].phase
        if phase == Phase.FORWARD:
            step[number] = number
            continue
        made_by = [maker[read.value] for read in row.reads if read.value in maker]
        # Makers of cotangents that it reads: their steps bound its own.
        late = [m for m in made_by if graph.ops[rows[m].op].phase != Phase.FORWARD]
        bound = min((step[m] for m in late), default=last)
        saved = [
            read.value
            for read in row.reads
            if values[read.value].role == Role.PARAMETER
            or (read.value in maker and maker[read.value] not in late)
        ]
        if row.is_update:
            step[number] = bound
            continue
        if not saved:  # it only sums a gradient: the parameter decides its step
            saved = [updated[write] for write in row.writes if write in updated]
        step[number] = _twin(theory, row, saved, touching, bound)
    return step


def _twin(
    theory: Theory, row: Row, saved: Sequence[int], touching: dict[int, list[int]], bound: int
) -> int:
    candidates: set[int] | None = None
    for value in saved:
        here = {number for number in touching.get(value, ()) if number <= bound}
        candidates = here if candidates is None else candidates & here
    if not candidates:
        spread = [n for value in saved for n in touching.get(value, ()) if n <= bound]
        return max(spread, default=bound)
    module = theory.graph.ops[row.op].module
    same = [n for n in candidates if theory.graph.ops[theory.rows[n].op].module == module]
    return max(same or candidates)


def _touched(row: Row) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*(read.value for read in row.reads), *row.writes)))


class TooWideError(Exception):
    """A graph carries so many values past so many rows that no search of it would end."""


_MOST_CARRIED = 20_000_000
"""Most values (8 bytes each) carried past all rows together: every step of a search copies them.
An RWKV of 13,900 rows carries 1.2 million, 10,000 parameters that one op reads 100 million."""


def fold(theory: Theory, reach: int = 6) -> Folded:
    """Order the rows step by step and determine the values carried between them.

    Args:
        theory: Theory with the rows and values.
        reach: A segment ends where no fewer values are carried within this number of steps.

    Raises:
        TooWideError: a search would take hours.
    """
    step = assign_steps(theory)
    maker = {write: number for number, row in enumerate(theory.rows) for write in row.writes}

    def place(number: int) -> tuple[int, int, int]:
        """Sort key: forward op first, then backward ops, each update after its gradient."""
        row = theory.rows[number]
        after = maker.get(row.reads[1].value, number) if row.is_update else number
        return step[number], after, number

    order = sorted(range(len(theory.rows)), key=place)
    return fold_in_order(theory, order, step, reach)


def fold_in_order(
    theory: Theory, order: Sequence[int], step: Sequence[int], reach: int = 6
) -> Folded:
    """Like ``fold`` for a given order of the rows."""
    rows, values = theory.rows, theory.values
    touched = {
        number: tuple(v for v in _touched(rows[number]) if values[v].role != Role.FREE)
        for number in order
    }
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    made_at: dict[int, int] = {}
    for place, number in enumerate(order):
        for value in touched[number]:
            last[value] = place
            first.setdefault(value, place)
        for value in rows[number].writes:
            made_at[value] = place
    num_carried = sum(end - first[value] for value, end in last.items())
    if num_carried > _MOST_CARRIED:
        raise TooWideError(f"{num_carried:,} values are carried past rows, too many to search")
    # The forms in which some triple of a row needs each value.
    needs = [
        form_sets(pair for triple in rows[number].triples for pair in triple.needs)
        for number in order
    ]
    wanted = _wanted_after(needs, touched, order)
    visits: list[Visit] = []
    carried: tuple[int, ...] = ()
    history: list[tuple[int, ...]] = []
    for place, number in enumerate(order):
        mine = touched[number]
        stays = tuple(last[value] > place for value in mine)
        visits.append(
            Visit(
                row=number,
                touched=mine,
                stays=stays,
                wanted=tuple(wanted[place][value] for value in mine),
                awaited=tuple(made_at.get(value, -1) > place for value in mine),
            )
        )
        # Values touched by this row move to the end, in its order, so that like segments agree.
        carried = (
            *(value for value in carried if value not in mine),
            *(value for value, stay in zip(mine, stays, strict=True) if stay),
        )
        history.append(carried)
    return Folded(tuple(visits), tuple(history), _cut(history, order, step, reach))


def _wanted_after(
    needs: Sequence[dict[int, int]], touched: dict[int, tuple[int, ...]], order: Sequence[int]
) -> list[dict[int, int]]:
    """For each place, the forms in which later rows may need the values used there."""
    later: dict[int, int] = {}
    found: list[dict[int, int]] = [{}] * len(order)
    for place in range(len(order) - 1, -1, -1):
        found[place] = {value: later.get(value, 0) for value in touched[order[place]]}
        for value, forms in needs[place].items():
            later[value] = later.get(value, 0) | forms
    return found


def _cut(
    history: Sequence[tuple[int, ...]], order: Sequence[int], step: Sequence[int], reach: int
) -> tuple[int, ...]:
    """Cut between steps where no fewer values are carried anywhere near."""
    between = [
        place for place in range(len(history) - 1) if step[order[place]] != step[order[place + 1]]
    ]
    cuts = [0]
    for position, place in enumerate(between):
        near = between[max(position - reach, 0) : position + reach + 1]
        if len(history[place]) <= min(len(history[other]) for other in near):
            cuts.append(place + 1)
    return (*cuts, len(history))


@dataclass(frozen=True, slots=True)
class Action:
    """The options of a visit, shared by all like visits in any layer.

    Attributes:
        op: Graph op whose work prices all like ops.
        is_update: Whether it is an optimizer step, which needs the parameter in its stored form.
        triples: Ways to run it, with positions among the touched values instead of values.
        classes: Value class of each touched value.
        stays: Whether each touched value is carried on.
        wanted: For each touched value, the forms (bit set) that later rows may need.
    """

    op: int
    is_update: bool
    triples: tuple[Triple, ...]
    classes: tuple[int, ...]
    stays: tuple[bool, ...]
    wanted: tuple[int, ...]


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
        self.actions: list[Action] = []
        self._action_ids: dict[Hashable, int] = {}
        self._kind_ids: dict[Kind, int] = {}
        gradients = {row.reads[1].value for row in theory.rows if row.is_update}
        class_ids: dict[ValueClass, int] = {}
        self.class_of = [
            class_ids.setdefault(
                ValueClass(v.num_bytes, tuple(v.forms), v.role, number in gradients),
                len(class_ids),
            )
            for number, v in enumerate(theory.values)
        ]
        self.classes = tuple(class_ids)
        self.work_key = _work_keys(theory)
        signatures: dict[Hashable, int] = {}
        self.segments = [
            self._segment(begin, end, signatures) for begin, end in pairwise(folded.cuts)
        ]
        self.kinds_after = self._kinds_at_cuts()
        self.kinds = tuple(self._kind_ids)

    def _action(self, visit: Visit) -> int:
        row = self.theory.rows[visit.row]
        position = {value: place for place, value in enumerate(visit.touched)}
        triples = tuple(
            Triple(
                tuple((position[value], form) for value, form in triple.needs),
                tuple((position[value], form) for value, form in triple.makes),
                triple.units,
                rule=None,
            )
            for triple in row.triples
        )
        classes = tuple(self.class_of[value] for value in visit.touched)
        rest = (row.is_update, triples, classes, visit.stays, visit.wanted)
        key = (self.work_key[row.op], *rest)
        if key not in self._action_ids:
            self._action_ids[key] = len(self.actions)
            self.actions.append(Action(row.op, *rest))
        return self._action_ids[key]

    def _kind(self, value_class: int, wanted: int, awaited: bool) -> int:
        return self._kind_ids.setdefault(Kind(value_class, wanted, awaited), len(self._kind_ids))

    def _segment(self, begin: int, end: int, signatures: dict[Hashable, int]) -> Segment:
        visits = self.folded.visits[begin:end]
        before = self.folded.carried[begin - 1] if begin else ()
        after = self.folded.carried[end - 1]
        mine = {value for visit in visits for value in visit.touched}
        carried = tuple(value for value in before if value in mine)
        inlets = tuple(place for place, value in enumerate(before) if value in mine)
        # From here on, values are places in the tuple of carried values: layers with other values
        # at the same places get the same steps, and so the same signature.
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
            graph.calls[index],
            float(plan.flops_fixed[index]),
            float(plan.flops_per_sample[index]),
            float(plan.bytes_fixed[index]),
            float(plan.bytes_per_sample[index]),
            op.measured_s,
        )
        for index, op in enumerate(graph.ops)
    ]
