"""Checks that the op rules of a strategy are sharding rules that its graph can follow.

Also adapts op rules to the same step on a batch of another shape (``resized_rules``).
"""

from collections.abc import Sequence
from dataclasses import replace

from heterog.errors import StrategyError
from heterog.graph.batch_plan import BatchPlan, batch_plan, counts_known_labels
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import OpRule, OpRules, P, Placement, R, Scatter, crosses
from heterog.graph.sharding_rules import RuleResult, Special, propagate
from heterog.graph.sharding_rules.legal import halo_dim


def checked_rules(
    graph: OpGraph, batch: BatchPlan, op_rules: OpRules
) -> dict[int, tuple[OpRule, RuleResult]]:
    """The rules of a strategy by op, each with the sharding rule that it names.

    A rule that keeps an op on constants whole everywhere changes nothing and is left out.

    Raises:
        StrategyError: a rule is not one of the op's sharding rules, or the op cannot have a rule;
            names the op.
    """
    ops = [op for op, _ in op_rules]
    if ops != sorted(set(ops)) or any(not 0 <= op < graph.num_ops for op in ops):
        raise StrategyError(
            f"op rules must be in ascending order of ops from 0 to {graph.num_ops - 1}, each once."
        )
    return {
        op: (rule, _checked(graph, batch, op, rule))
        for op, rule in op_rules
        if not (graph.is_constant[op] and _is_whole(rule))
    }


def op_name(graph: OpGraph, op: int) -> str:
    """An op in words, for messages."""
    return f"op {op} '{graph.ops[op].kind}' in module '{graph.ops[op].module}'"


def _is_whole(rule: OpRule) -> bool:
    return all(place == R for place in (*rule.inputs, *rule.outputs))


def _checked(graph: OpGraph, batch: BatchPlan, op: int, rule: OpRule) -> RuleResult:
    """Find the sharding rule that a strategy's rule names.

    Raises:
        StrategyError: there is no such sharding rule.
    """
    name = op_name(graph, op)
    if graph.is_view[op] or graph.ops[op].phase == Phase.UPDATE:
        what = "a view" if graph.is_view[op] else "an update"
        raise StrategyError(f"{name} is {what} and cannot have a rule; it follows its inputs.")
    if graph.is_constant[op]:
        raise StrategyError(f"{name} depends on constants alone: it is whole on every device.")
    if rule.units < 1:
        raise StrategyError(f"the rule of {name} has {rule.units} units; it must have 1 or more.")
    sizes = (len(graph.ops[op].inputs), graph.ops[op].num_outputs)
    if (len(rule.inputs), len(rule.outputs)) != sizes:
        raise StrategyError(
            f"the rule of {name} places {len(rule.inputs)} inputs and {len(rule.outputs)} "
            f"outputs; the op has {sizes[0]} and {sizes[1]}."
        )
    given, stated = graph.ops[op].rule, RuleResult(rule.inputs, rule.outputs)
    if given == (rule.inputs, rule.outputs) and (
        rule.units == graph.batch_size or _is_whole(rule)
    ):
        return stated
    result = None if given is not None else propagate(graph.calls[op], rule.inputs, rule.units)
    if result is None and _is_whole(rule):
        result = stated
    if result is None or (result.inputs, result.outputs) != (rule.inputs, rule.outputs):
        instead = "" if result is None else f"; from these inputs it would be {_written(result)}"
        raise StrategyError(
            f"{name} cannot run as {_written(stated)} along an axis of {rule.units} units"
            f"{instead}."
        )
    if result.special == Special.NLL_GLOBAL_WEIGHT and not counts_known_labels(
        graph, op, batch.follows_batch
    ):
        raise StrategyError(
            f"{name} takes a mean over labels that the model makes itself; their number is not "
            "known before the step, so it cannot be split. Leave it without a rule."
        )
    is_in_space = halo_dim(rule.inputs) is not None  # forward and backward both handle these
    if any(place.kind == "L" for place in (*rule.inputs, *rule.outputs)) and not is_in_space:
        raise StrategyError(f"{name}: local statistics follow the batch and need no rule.")
    if rule.scatter is not None:
        if result.special == Special.NUMBERS_OF_ROWS:
            raise StrategyError(
                f"{name} is completed by numbers of all its rows and cannot be cut again as well; "
                "leave out its scatter."
            )
        _check_scatter(graph, batch, op, rule, rule.scatter)
    return result


def _check_scatter(
    graph: OpGraph, batch: BatchPlan, op: int, rule: OpRule, scatter: Scatter
) -> None:
    """Refuse a scatter that cannot be made.

    Raises:
        StrategyError: the output is neither a sum over a team nor in slices, or cannot be cut that
            way.
    """
    name, place = op_name(graph, op), scatter.place
    if len(rule.outputs) != 1 or rule.outputs[0].kind not in "SP":
        raise StrategyError(
            f"{name} leaves {', '.join(map(str, rule.outputs))}: only an op with one output, a "
            "part of a sum (P) or slices (S), can be followed by a reduce-scatter or all-to-all."
        )
    (tensor,) = graph.outputs[op]
    shape, along = graph.tensors[tensor].shape, batch.placements[tensor]
    if along.kind != "S":
        raise StrategyError(
            f"{name} makes a value that does not follow the batch; it cannot be scattered."
        )
    if (
        place.kind != "S"
        or place.dim >= len(shape)
        or scatter.units < 1
        or shape[place.dim] % (place.outer * scatter.units)
    ):
        raise StrategyError(
            f"{name} makes a tensor of shape {shape}, which cannot be cut into {scatter.units} "
            f"units by {place}."
        )
    is_batch = scatter == Scatter(place=along, units=graph.batch_size)
    if not is_batch and crosses(place, scatter.units, along, graph.batch_size):
        raise StrategyError(
            f"{name}: {place} over {scatter.units} units goes across the samples of its result."
        )
    if rule.outputs == (place,) and rule.units == scatter.units:
        raise StrategyError(
            f"{name} makes slices by {place} over {scatter.units} units; its scatter names the "
            "same ones. Leave it out."
        )
    if crosses(place, scatter.units, rule.outputs[0], rule.units):
        raise StrategyError(
            f"{name}: {place} over {scatter.units} units goes across the slices that it makes, "
            f"{rule.outputs[0]} over {rule.units} units."
        )
    if is_batch and rule.outputs == (P,):
        raise StrategyError(
            f"{name} makes a part of a sum over its team, which is added up in slices of another "
            "axis than the batch; leave out its scatter."
        )


def _written(rule: RuleResult) -> str:
    return f"{', '.join(map(str, rule.inputs))} -> {', '.join(map(str, rule.outputs))}"


def resized_rules(rules: OpRules, planned: OpGraph, given: OpGraph) -> OpRules:
    """Adapt the rules of a step to the same step with other samples or lengths.

    A unit keeps its meaning: one column, one head, one position. So the number of units changes
    with the size of a dimension, and the number of samples changes around positions that share a
    dimension with the batch. A rule without a clear answer stays unchanged, and is refused when
    the graph is planned.

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
        found.append(place._replace(outer=outer))
        counts.add(other[place.dim] // (outer * inner))
    if len(counts) > 1:
        return None
    return tuple(found), counts.pop() if counts else units
