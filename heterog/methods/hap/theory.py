"""The background theory of a graph: the triples {needs} op {makes} of which programs consist.

A *value* is a tensor that owns its memory; a view stands for its value. A *row* is an op that runs
a kernel, or an optimizer step. A *triple* of a row gives the forms of its inputs, the forms of its
outputs, and the axis along which its work is divided. Triples come from the sharding rules alone.
Axes come from the shapes of parameters and batch and spread by closure: a form of one op is
offered to every op that a rule connects with it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from heterog.graph.batch_plan import BatchPlan, batch_plan
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.placement import OpRule, Placement
from heterog.graph.sharding_rules import RuleResult, Special
from heterog.grouped import grouped
from heterog.methods.hap.forms import (
    PARTIAL,
    WHOLE,
    Form,
    Rulebook,
    finer_splits,
    form_of,
)


class Role(IntEnum):
    """The role of a value in the search."""

    FREE = 0
    """The batch, buffers and constants, which every device has in any form."""
    PARAMETER = 1
    """A parameter: stored in the one form that its readers and its update agree on, or whole."""
    MADE = 2
    """An output of an op: converted between forms at a price."""


@dataclass(slots=True, eq=False)
class Value:
    """A tensor that owns its memory.

    Attributes:
        tensor: Number of the tensor in the graph.
        num_bytes: Size of the whole tensor.
        role: Role in the search.
        forms: Forms that it may be made or needed in, the whole form first.
    """

    tensor: int
    num_bytes: int
    role: Role
    forms: dict[Form, int] = field(default_factory=dict)

    def add(self, form: Form) -> bool:
        """Add a form; return whether it is new."""
        if form in self.forms:
            return False
        self.forms[form] = len(self.forms)
        return True


@dataclass(frozen=True, slots=True)
class Triple:
    """One way to run a row.

    Attributes:
        needs: (value, number of the form) of each input that is not free.
        makes: (value, number of the form) of each output.
        units: Axis along which its work is divided; 0 if every device does all of it.
        rule: Rule for a strategy; ``None`` if it follows from others (updates, and ops with local
            statistics, which follow the batch).
    """

    needs: tuple[tuple[int, int], ...]
    makes: tuple[tuple[int, int], ...]
    units: int
    rule: OpRule | None


@dataclass(frozen=True, slots=True)
class Read:
    """An input of a row: a value, seen through views.

    Attributes:
        value: Number of the value.
        views: Pairs (view op, number of its output), from the value to the row.
    """

    value: int
    views: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class Row:
    """A compute op or an optimizer step, with its triples.

    Attributes:
        op: Number of the op in the graph.
        is_update: Whether it is an optimizer step, which reads the parameter and the gradient.
        reads: One for each input of the op.
        writes: Value of each output.
        triples: All ways to run it, including the batch split.
    """

    op: int
    is_update: bool
    reads: tuple[Read, ...]
    writes: tuple[int, ...]
    triples: tuple[Triple, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Theory:
    """Values and rows of a graph.

    Attributes:
        graph: Graph of one training step.
        values: All values that are read or made.
        rows: Compute ops in program order, each optimizer step after them.
    """

    graph: OpGraph
    values: tuple[Value, ...]
    rows: tuple[Row, ...]

    def form(self, value: int, number: int) -> Form:
        """A form of a value by its number."""
        return list(self.values[value].forms)[number]


def build_theory(graph: OpGraph, check: Callable[[], None] = lambda: None) -> Theory:
    """All triples of a graph.

    Args:
        graph: Graph of one training step.
        check: Called at every row; an exception from it ends the work.
    """
    return _Builder(graph, check).build()


class _Builder:
    def __init__(self, graph: OpGraph, check: Callable[[], None]) -> None:
        self.graph = graph
        self.check = check
        self.plan: BatchPlan = batch_plan(graph)
        self.rules = Rulebook()
        self.values: list[Value] = []
        self.number: dict[int, int] = {}

    def build(self) -> Theory:
        graph = self.graph
        rows = [
            Row(
                op=index,
                is_update=op.phase == Phase.UPDATE,
                reads=tuple(self._read(tensor) for tensor in op.inputs),
                writes=tuple(
                    self._value(tensor)
                    for tensor in graph.outputs[index]
                    if op.phase != Phase.UPDATE
                ),
            )
            for index, op in enumerate(graph.ops)
            if not (graph.is_view[index] or graph.is_constant[index])
        ]
        self._seed()
        self._close(rows)
        for row in rows:
            self.check()
            row.triples = tuple(self._triples(row))
        return Theory(graph, tuple(self.values), tuple(rows))

    def _read(self, tensor: int) -> Read:
        views: list[tuple[int, int]] = []
        graph = self.graph
        while graph.storage[tensor] != tensor:
            view = int(graph.producer[tensor])
            views.append((view, tensor - graph.outputs[view][0]))
            tensor = graph.ops[view].inputs[0]
        return Read(self._value(tensor), tuple(reversed(views)))

    def _value(self, tensor: int) -> int:
        if tensor not in self.number:
            maker = int(self.graph.producer[tensor])
            role = Role.MADE
            if maker < 0:
                is_parameter = self.graph.tensors[tensor].kind == TensorKind.PARAMETER
                role = Role.PARAMETER if is_parameter else Role.FREE
            elif self.graph.is_constant[maker]:
                role = Role.FREE
            value = Value(tensor, int(self.graph.tensor_bytes[tensor]), role)
            value.add(WHOLE)
            self.number[tensor] = len(self.values)
            self.values.append(value)
        return self.number[tensor]

    def _seed(self) -> None:
        """Enter the axes that exist: the batch, and each dimension of each parameter."""
        graph = self.graph
        for value in self.values:
            shape = graph.tensors[value.tensor].shape
            if value.role == Role.PARAMETER:
                for dim, size in enumerate(shape):
                    if size > 1:
                        value.add(Form("S", dim, 1, size))
            elif graph.producer[value.tensor] < 0:
                place = graph.batch_placements[value.tensor]
                if place.kind == "S":
                    value.add(form_of(place, graph.batch_size))

    def _close(self, rows: list[Row]) -> None:
        """Spread forms to all ops that rules connect, until none is new."""
        touching = grouped(
            (value, number)
            for number, row in enumerate(rows)
            for value in dict.fromkeys((*(read.value for read in row.reads), *row.writes))
        )
        waiting = dict.fromkeys(range(len(rows)))
        while waiting:
            self.check()
            number = next(iter(waiting))
            del waiting[number]
            for value in self._extend(rows[number]):
                waiting.update(dict.fromkeys(touching[value]))

    def _extend(self, row: Row) -> set[int]:
        """Add the forms that one row's rules give its values; return the values that grew."""
        if row.is_update:
            return set()
        grown: set[int] = set()
        fixed = self._fixed(row.op)
        if fixed is not None:
            for place, write in zip(fixed.outputs, row.writes, strict=True):
                if place.kind in "SP":
                    self._add(write, form_of(place, self.graph.batch_size), grown)
            return grown
        for read in row.reads:
            self._refine(read, grown)
        seen = [self._seen(read) for read in row.reads]
        made = [self.values[write].forms for write in row.writes]
        for rule, units in self._split_rules(row, seen, made):
            for read, known, place in zip(row.reads, seen, rule.inputs, strict=True):
                form = form_of(place, units)
                if place.kind == "S" and form not in known:
                    source = self._before(read.views, form)
                    if source is not None:
                        self._add(read.value, source, grown)
            for write, place in zip(row.writes, rule.outputs, strict=True):
                if place.kind != "R":
                    self._add(write, form_of(place, units), grown)
        for unsplit in self._unsplit_rules(row, seen):
            for write, place in zip(row.writes, unsplit.outputs, strict=True):
                if place.kind == "P":
                    self._add(write, PARTIAL, grown)
        return grown

    def _add(self, number: int, form: Form, grown: set[int]) -> None:
        value = self.values[number]
        if value.role != Role.FREE and value.add(form):
            grown.add(number)

    def _refine(self, read: Read, grown: set[int]) -> None:
        """If a view cuts a split dimension, offer the coarser axis that passes it."""
        graph = self.graph
        if self.values[read.value].role == Role.FREE:
            return
        for form in list(self.values[read.value].forms):
            passed = form
            for position, (view, output) in enumerate(read.views):
                after = self.rules.through(graph.calls[view], passed, output)
                if after is None:
                    shape = graph.tensors[graph.ops[view].inputs[0]].shape
                    to = graph.tensors[graph.outputs[view][output]].shape
                    if passed.kind == "S":
                        for finer in finer_splits(shape, to, passed):
                            source = self._before(read.views[:position], finer)
                            if source is not None:
                                self._add(read.value, source, grown)
                    break
                passed = after

    def _seen(self, read: Read) -> dict[Form, Form]:
        """Forms of an input as its op sees them, each with the value's own form."""
        found: dict[Form, Form] = {}
        for form in self.values[read.value].forms:
            passed: Form | None = form
            for view, output in read.views:
                call = self.graph.calls[view]
                passed = self.rules.through(call, passed, output) if passed else None
            if passed is not None:
                found.setdefault(passed, form)
        return found

    def _before(self, views: Sequence[tuple[int, int]], form: Form) -> Form | None:
        source: Form | None = form
        for view, output in reversed(views):
            call = self.graph.calls[view]
            source = self.rules.before(call, source, output) if source else None
        return source

    def _split_rules(
        self, row: Row, seen: list[dict[Form, Form]], made: list[dict[Form, int]]
    ) -> Iterable[tuple[RuleResult, int]]:
        """Rules along every axis that some input or output of the row already knows."""
        known = [form for forms in seen for form in forms if form.kind == "S"]
        known += [form for forms in made for form in forms if form.kind == "S"]
        for units in dict.fromkeys(form.units for form in known):
            outers = {1, *(form.outer for form in known if form.units == units)}
            for rule in self.rules.along(self.graph.calls[row.op], units, tuple(sorted(outers))):
                if _is_known(rule.inputs, units, seen) or _is_known(rule.outputs, units, made):
                    yield rule, units

    def _unsplit_rules(self, row: Row, seen: list[dict[Form, Form]]) -> Iterable[RuleResult]:
        for rule in self.rules.unsplit(self.graph.calls[row.op]):
            partial = [forms for p, forms in zip(rule.inputs, seen, strict=True) if p.kind == "P"]
            # If one summand is partial, whole ones count as partial, too: other devices add zeros.
            is_made = not partial or any(PARTIAL in forms for forms in partial)
            if is_made and rule.special != Special.SHARED_RANDOM_STREAM:
                yield rule

    def _fixed(self, op: int) -> RuleResult | None:
        """The only rule of an op that states a rule or uses local statistics, else ``None``."""
        graph, plan = self.graph, self.plan
        outputs = tuple(plan.placements[tensor] for tensor in graph.outputs[op])
        inputs = plan.needed[op]
        is_local = any(place.kind == "L" for place in (*inputs, *outputs))
        return RuleResult(inputs, outputs) if graph.ops[op].rule is not None or is_local else None

    def _triples(self, row: Row) -> Iterable[Triple]:
        if row.is_update:
            return self._update_triples(row)
        batch = self.graph.batch_size
        fixed = self._fixed(row.op)
        if fixed is not None:
            return [self._triple(row, fixed, batch, None)]
        seen = [self._seen(read) for read in row.reads]
        made = [self.values[write].forms for write in row.writes]
        found: dict[Triple, None] = {}
        for rule, units in self._split_rules(row, seen, made):
            explicit = OpRule(inputs=rule.inputs, outputs=rule.outputs, units=units)
            found[self._triple(row, rule, units, explicit)] = None
        for rule in self._unsplit_rules(row, seen):
            explicit = OpRule(inputs=rule.inputs, outputs=rule.outputs, units=1)
            found[self._triple(row, rule, 0, explicit)] = None
        return found

    def _triple(self, row: Row, rule: RuleResult, units: int, explicit: OpRule | None) -> Triple:
        needs: dict[tuple[int, int], None] = {}  # an op may read one value twice
        for read, place in zip(row.reads, rule.inputs, strict=True):
            value = self.values[read.value]
            if value.role == Role.FREE or place.kind == "L":
                continue
            # If no form of the value gives this split, it is sliced from the whole value.
            form = self._before(read.views, form_of(place, units)) or WHOLE
            needs[read.value, value.forms.get(form, 0)] = None
        makes = tuple(
            (write, self.values[write].forms[form_of(place, units)])
            for write, place in zip(row.writes, rule.outputs, strict=True)
            if place.kind != "L"
        )
        is_split = any(place.kind == "S" for place in (*rule.inputs, *rule.outputs))
        return Triple(tuple(needs), makes, units if is_split else 0, explicit)

    def _update_triples(self, row: Row) -> list[Triple]:
        parameter, gradient = row.reads[0], row.reads[1]
        stored, made = self.values[parameter.value], self.values[gradient.value]
        found = []
        for form, number in stored.forms.items():
            source = self._before(gradient.views, form)
            if source is not None and source in made.forms:
                needs = ((parameter.value, number), (gradient.value, made.forms[source]))
                found.append(Triple(needs, (), form.units, None))
        return found


def _is_known(
    placements: Sequence[Placement], units: int, forms: Sequence[Collection[Form]]
) -> bool:
    """Whether any of the splits is a form that its tensor has."""
    return any(
        place.kind == "S" and form_of(place, units) in known
        for place, known in zip(placements, forms, strict=True)
    )


def batch_triple(theory: Theory, row: Row, placements: BatchPlan) -> int:
    """Number of the triple that a row has under the batch plan (data parallelism)."""
    graph = theory.graph
    if row.is_update:
        return 0
    wanted = (
        placements.needed[row.op],
        tuple(placements.placements[tensor] for tensor in graph.outputs[row.op]),
    )
    for number, triple in enumerate(row.triples):
        if triple.rule is None:
            return number
        is_split = any(p.kind == "S" for p in (*wanted[0], *wanted[1]))
        if (triple.rule.inputs, triple.rule.outputs) == wanted and (
            not is_split or triple.rule.units == graph.batch_size
        ):
            return number
    return _nearest(row, wanted, graph.batch_size)


def _nearest(
    row: Row, wanted: tuple[tuple[Placement, ...], tuple[Placement, ...]], batch: int
) -> int:
    """Number of the triple along the batch that is wanted, else of the first whole one."""
    for number, triple in enumerate(row.triples):
        rule = triple.rule
        if rule is not None and triple.units == batch and rule.outputs == wanted[1]:
            return number
    return next(number for number, triple in enumerate(row.triples) if triple.units == 0)
