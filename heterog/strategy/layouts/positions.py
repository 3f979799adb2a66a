"""Sequence parallelism: activations between two split matrix products are split by position.

Megatron-LM's form of it (Korthikanti et al. 2022, section 4.2): where a team would add up parts of
a sum on all its members, each member gets the sum for its own positions alone (a reduce-scatter),
and norms, dropouts and residuals work on these. The next matrix product gathers them. That sends
as many bytes as before, and keeps less of everything in between.
"""

from collections.abc import Sequence
from dataclasses import replace

from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.op_rule import OpRule, Scatter
from heterog.graph.placement import P, R, S, needs_no_transfer
from heterog.graph.sharding_rules import propagate


def along_positions(
    graph: OpGraph, groups: Sequence[int], rules: dict[int, OpRule]
) -> dict[int, OpRule]:
    """Make sums over teams end in slices of positions, with rules for the ops that follow.

    Args:
        graph: One training step.
        groups: Groups whose teams do this.
        rules: Rules of the ops of these groups that are split.
    """
    found = dict(rules)
    group, chosen = group_ops(graph).group, set(groups)
    lies: dict[int, Scatter] = {}  # tensors that are split along positions
    for index, op in enumerate(graph.ops):
        if int(group[index]) not in chosen or op.phase == Phase.UPDATE:
            continue
        if index in found:
            slices = _slices_of_sum(graph, index, found)
            if slices is not None:
                found[index] = replace(found[index], scatter=slices)
                lies[graph.outputs[index][0]] = slices
            continue
        units = {lies[tensor].units for tensor in op.inputs if tensor in lies}
        if len(units) != 1:
            continue
        (size,) = units
        given = tuple(lies[tensor].place if tensor in lies else R for tensor in op.inputs)
        result = propagate(graph.call(index), given, size)
        if result is None or not needs_no_transfer(given, result.inputs):
            continue
        made = zip(graph.outputs[index], result.outputs, strict=True)
        if any(place == P and _read_in_slices(graph, each, rules) for each, place in made):
            continue  # the gradient of a table in slices: a sum would make all of it
        if not graph.is_view[index]:
            found[index] = OpRule(inputs=result.inputs, outputs=result.outputs, units=size)
        for tensor, place in zip(graph.outputs[index], result.outputs, strict=True):
            if place.kind == "S":
                lies[tensor] = Scatter(place=place, units=size)
    return found


def _read_in_slices(graph: OpGraph, tensor: int, rules: dict[int, OpRule]) -> bool:
    """Whether an op reads slices of a tensor."""
    return any(
        read.kind == "S" and graph.storage[each] == graph.storage[tensor]
        for reader in graph.readers(tensor)
        if reader in rules
        for each, read in zip(graph.ops[reader].inputs, rules[reader].inputs, strict=True)
    )


def _slices_of_sum(graph: OpGraph, op: int, rules: dict[int, OpRule]) -> Scatter | None:
    """Slices of positions in which an op's partial sums can be summed, if they can."""
    if rules[op].outputs != (P,):
        return None
    (tensor,) = graph.outputs[op]
    if _is_read_in_parts(graph, tensor, rules):
        return None
    shape, along = graph.tensors[tensor].shape, batch_plan(graph).placements[tensor]
    batch = graph.batch_size
    if along.kind != "S" or len(shape) not in (2, 3):
        return None
    if len(shape) == 3 and along.outer == 1 and along.dim < 2 and shape[along.dim] == batch:
        place, units = S(1 - along.dim), shape[1 - along.dim]  # (batch, positions, ...) or turned
    elif len(shape) == 2 and along == S(0):
        place, units = S(0, batch), shape[0] // batch  # positions inside samples
    elif len(shape) == 2 and along.dim == 0 and shape[0] == along.outer * batch:
        place, units = S(0), along.outer  # samples inside positions
    else:
        return None
    return Scatter(place=place, units=units) if units > 1 else None


def _is_read_in_parts(graph: OpGraph, tensor: int, rules: dict[int, OpRule]) -> bool:
    """Whether an op reads partial sums directly, to add others to them."""
    return any(
        read == P and graph.storage[each] == graph.storage[tensor]
        for reader in graph.readers(tensor)
        if reader in rules
        for each, read in zip(graph.ops[reader].inputs, rules[reader].inputs, strict=True)
    )
