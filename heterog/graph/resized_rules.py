"""Rules of ops for the same step on a batch of another shape."""

from collections.abc import Sequence
from dataclasses import replace

from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import OpGraph
from heterog.graph.op_rule import OpRule, OpRules, Scatter
from heterog.graph.placement import Placement


def resized_rules(rules: OpRules, planned: OpGraph, given: OpGraph) -> OpRules:
    """The rules of a step, for the same step with other samples or lengths.

    What a unit is stays as it was: one column, one head, one position. So there are other numbers
    of units where a dimension has another size, and other numbers of samples around positions that
    lie in one dimension with the batch. A rule for which that gives no clear answer is left as it
    is, to be refused where the graph is planned.

    Args:
        rules: for ``planned``.
        planned: the step that they were made for.
        given: the same ops on other shapes.
    """
    return tuple((op, _resized(rule, op, planned, given)) for op, rule in rules)


def _resized(rule: OpRule, op: int, planned: OpGraph, given: OpGraph) -> OpRule:
    tensors = (*planned.ops[op].inputs, *planned.outputs(op))
    along = (*batch_plan(planned).needed[op], *_made(planned, op))
    found = _places((*rule.inputs, *rule.outputs), tensors, along, rule.units, planned, given)
    if found is None:
        return rule
    places, units = found
    num_inputs = len(rule.inputs)
    resized = OpRule(inputs=places[:num_inputs], outputs=places[num_inputs:], units=units)
    if rule.scatter is None:
        return resized
    scattered = _places(
        (rule.scatter.place,),
        planned.outputs(op),
        _made(planned, op),
        rule.scatter.units,
        planned,
        given,
    )
    if scattered is None:
        return rule
    (place,), units = scattered
    return replace(resized, scatter=Scatter(place=place, units=units))


def _made(graph: OpGraph, op: int) -> tuple[Placement, ...]:
    return tuple(batch_plan(graph).placements[tensor] for tensor in graph.outputs(op))


def _places(
    places: Sequence[Placement],
    tensors: Sequence[int],
    along: Sequence[Placement],
    units: int,
    planned: OpGraph,
    given: OpGraph,
) -> tuple[tuple[Placement, ...], int] | None:
    """Placements in other shapes, and the units of their axis; ``None`` if these are unclear.

    Args:
        places: of some tensors.
        tensors: their ids, the same in both graphs.
        along: how each lies along the batch.
        units: of the axis.
        planned: the graph that the placements were made for.
        given: the other one.
    """
    found: list[Placement] = []
    counts: set[int] = set()
    for place, tensor, in_batch in zip(places, tensors, along, strict=True):
        if place.kind != "S":
            found.append(place)
            continue
        shape, other = planned.tensors[tensor].shape, given.tensors[tensor].shape
        inner, outer = shape[place.dim] // (place.outer * units), place.outer
        if in_batch.kind == "S" and in_batch.dim == place.dim and in_batch != place:
            if outer % (in_batch.outer * planned.batch_size) == 0:  # inside samples
                outer = outer // planned.batch_size * given.batch_size
            elif inner % planned.batch_size == 0:  # samples are inside
                inner = inner // planned.batch_size * given.batch_size
        if inner < 1 or other[place.dim] % (outer * inner):
            return None
        found.append(replace(place, outer=outer))
        counts.add(other[place.dim] // (outer * inner))
    if len(counts) > 1:
        return None
    return tuple(found), counts.pop() if counts else units
