"""The folded graph: a forward op and its backward twins are one step.

A joint graph of forward and backward keeps every activation alive from its layer's forward pass to
its backward pass, so a search in program order would carry hundreds of values. Folded at the loss,
forward and backward of one layer are visited together, and only what crosses to the next layer is
carried: activations in the form they were made, and cotangents in the forms that were *promised*
for them, because their readers come before their makers.

The order is exact whatever ops are assigned to which step: it only changes how much is carried.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from heterog.graph.op_graph import Phase
from heterog.methods.hap.theory import Role, Row, Theory


@dataclass(frozen=True, slots=True)
class Visit:
    """One row in the folded order, with the values carried past it.

    Attributes:
        row: Number of the row in the theory.
        step: Forward position of its step.
        touched: Values that the row reads or makes, in order of first mention.
        stays: For each touched value, whether it is carried on.
        wanted: For each touched value, the forms (bit set) that later rows may need it in.
        awaited: For each touched value, whether a later row makes it.
    """

    row: int
    step: int
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

    A backward op belongs to the forward op that it shares its saved values with; of several the
    one of the same module, and the latest. No op goes before the step of a cotangent that it
    reads (steps are visited from the first forward op to the last, so cotangents flow to earlier
    steps). Optimizer steps belong to the op that makes the gradient.
    """
    graph, rows, values = theory.graph, theory.rows, theory.values
    maker = {write: number for number, row in enumerate(rows) for write in row.writes}
    touching: dict[int, list[int]] = {}
    forward = [n for n, row in enumerate(rows) if graph.ops[row.op].phase == Phase.FORWARD]
    for number in forward:
        for value in _touched(rows[number]):
            touching.setdefault(value, []).append(number)
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
        # Cotangents that it reads: it cannot be visited before they are made.
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
        if not saved:  # it only sums up a gradient: the parameter decides its step
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
"""Most values carried past all rows together, of 8 bytes each: every step of a search copies what
is carried. An RWKV of 13,900 rows carries 1.2 million, 10,000 parameters that one op reads 100."""


def fold(theory: Theory, reach: int = 6) -> Folded:
    """Order the rows step by step and determine the values carried between them.

    Args:
        theory: Theory with the rows and values.
        reach: Number of steps within which no fewer values are carried where a segment ends.

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
    needs = [_needed_forms(rows[number]) for number in order]
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
                step=step[number],
                touched=mine,
                stays=stays,
                wanted=tuple(wanted[place][value] for value in mine),
                awaited=tuple(made_at.get(value, -1) > place for value in mine),
            )
        )
        # Values touched by this row move to the end, in its order: like segments carry alike.
        carried = (
            *(value for value in carried if value not in mine),
            *(value for value, stay in zip(mine, stays, strict=True) if stay),
        )
        history.append(carried)
    return Folded(tuple(visits), tuple(history), _cut(history, order, step, reach))


def _needed_forms(row: Row) -> dict[int, int]:
    """The forms, as bit sets, in which some triple of a row needs each value."""
    found: dict[int, int] = {}
    for triple in row.triples:
        for value, form in triple.needs:
            found[value] = found.get(value, 0) | 1 << form
    return found


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
