"""Rules of ops for the same step on a batch of another shape."""

from collections.abc import Sequence
from dataclasses import replace

from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpRule, OpRules, Placement, Scatter


def resized_rules(rules: OpRules, planned: OpGraph, given: OpGraph) -> OpRules:
    """Adapt the rules of a step to the same step with other samples or lengths.

    The meaning of a unit stays: one column, one head, one position. So there are other numbers of
    units where a dimension has another size, and other numbers of samples around positions that
    share a dimension with the batch. A rule for which that gives no clear answer stays unchanged,
    to be refused where the graph is planned.

    Args:
        rules: Rules for ``planned``.
        planned: The step that they were made for.
        given: The same ops on other shapes.
    """
    return tuple((op, _resized(rule, op, planned, given)) for op, rule in rules)


def _resized(rule: OpRule, op: int, planned: OpGraph, given: OpGraph) -> OpRule:
    tensors = (*planned.ops[op].inputs, *planned.outputs[op])
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
        planned.outputs[op],
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
    return tuple(batch_plan(graph).placements[tensor] for tensor in graph.outputs[op])


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
        places: Placements of some tensors.
        tensors: Their ids, the same in both graphs.
        along: Placement of each tensor along the batch.
        units: Number of units of the axis.
        planned: The graph that the placements were made for.
        given: The other graph.
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
