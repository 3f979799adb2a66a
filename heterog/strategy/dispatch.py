"""All-to-all dispatch of tokens to experts: what the members of a team exchange.

Tokens are dispatched as a tensor of [experts, tokens of an expert, width], cut by tokens where it
is made and by experts where it is read (GShard, Lepikhin et al. 2021, section 3.2): each member
sends each other the tokens of the other's experts, and gets the results back, forward and
backward. Of n members each sends (n - 1)/n of what it dispatches itself. Only what experts do is
split by experts then; all else follows the batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.op_rule import OpRule, Scatter
from heterog.graph.placement import Placement, S
from heterog.graph.sharding_rules import propagate


def exchanged(
    graph: OpGraph, rules: Mapping[int, OpRule], weights: Sequence[int]
) -> dict[int, OpRule] | None:
    """Replace rules that split tokens by experts by those with which tokens are exchanged.

    Args:
        graph: One training step.
        rules: Rules of the ops that a split of the experts' weights leads to, all with as many
            units as there are experts.
        weights: Parameters with one matrix for each expert.

    Returns:
        The rules, or ``None`` where something that experts read is also read otherwise, so that it
        has to be gathered.
    """
    ops = _between_experts(graph, rules, weights)
    found = {op: rules[op] for op in ops}
    for op in sorted(ops):
        for tensor, place in zip(graph.ops[op].inputs, rules[op].inputs, strict=True):
            maker = _maker(graph, tensor)
            if maker is None or maker in ops or not _follows_samples(graph, tensor):
                continue
            if place.kind != "S":
                return None
            given = _brought(graph, maker, tensor, place, rules[op].units)
            if given is None or not _is_read_alike(graph, maker, ops, inside=True):
                return None
            if found.setdefault(maker, given) != given:
                return None
        made = graph.outputs[op]
        readers = {reader for tensor in made for reader in _readers(graph, tensor)}
        if readers <= ops or not _follows_samples(graph, made[0]):
            continue
        if readers & ops or len(made) > 1:
            return None
        back = Scatter(place=batch_plan(graph).placements[made[0]], units=graph.batch_size)
        found[op] = replace(rules[op], scatter=back)
    return found


def _between_experts(
    graph: OpGraph, rules: Mapping[int, OpRule], weights: Sequence[int]
) -> frozenset[int]:
    """Ops that read or finish parameters of experts, and all between two of them.

    Parameters of experts are those that the rules split: weights, and biases beside them.
    """
    parameters = {parameter: gradient for _, parameter, gradient in graph.updates}
    split = set(weights)
    for op, rule in rules.items():
        for tensor, place in zip(graph.ops[op].inputs, rule.inputs, strict=True):
            if place.kind == "S" and int(graph.storage[tensor]) in parameters:
                split.add(int(graph.storage[tensor]))
    made = {int(graph.producer[graph.storage[parameters[parameter]]]) for parameter in split}
    core = {
        op
        for op in rules
        if op in made or any(int(graph.storage[read]) in split for read in graph.ops[op].inputs)
    }
    whole = {
        op
        for op, rule in rules.items()
        if all(place.kind == "S" for place in rule.outputs) and op not in core
    }
    return frozenset(core | (_reached(graph, core, whole) & _reaching(graph, core, whole)))


def _reached(graph: OpGraph, core: set[int], through: set[int]) -> set[int]:
    """Ops that follow from the core by way of each other."""
    found: set[int] = set()
    for op in sorted(through):  # makers come first
        makers = {_maker(graph, tensor) for tensor in graph.ops[op].inputs}
        if makers & (core | found):
            found.add(op)
    return found


def _reaching(graph: OpGraph, core: set[int], through: set[int]) -> set[int]:
    """Ops from which the core follows by way of each other."""
    found: set[int] = set()
    for op in sorted(through, reverse=True):
        readers = {reader for tensor in graph.outputs[op] for reader in _readers(graph, tensor)}
        if readers & (core | found):
            found.add(op)
    return found


def _maker(graph: OpGraph, tensor: int) -> int | None:
    """The compute op that makes what a tensor shows; ``None`` for inputs of the step."""
    maker = int(graph.producer[graph.storage[tensor]])
    return maker if maker >= 0 else None


def _readers(graph: OpGraph, tensor: int) -> Iterator[int]:
    """Compute ops that read a tensor, also through views."""
    for reader in graph.consumers[tensor]:
        if graph.is_view[reader]:
            for shown in graph.outputs[reader]:
                yield from _readers(graph, shown)
        elif graph.ops[reader].phase != Phase.UPDATE:
            yield reader


def _follows_samples(graph: OpGraph, tensor: int) -> bool:
    return batch_plan(graph).placements[int(graph.storage[tensor])].kind == "S"


def _is_read_alike(graph: OpGraph, maker: int, ops: frozenset[int], *, inside: bool) -> bool:
    """Whether all readers of what an op makes are among some ops, or none is."""
    return all(
        (reader in ops) == inside
        for tensor in graph.outputs[maker]
        for reader in _readers(graph, tensor)
    )


def _brought(
    graph: OpGraph, maker: int, tensor: int, wanted: Placement, units: int
) -> OpRule | None:
    """The rule of an op that follows the batch, whose value is then cut by experts."""
    made = graph.outputs[maker]
    if len(made) > 1 or graph.ops[maker].phase == Phase.UPDATE:
        return None
    plan = batch_plan(graph)
    needed, places = plan.needed[maker], tuple(plan.placements[each] for each in made)
    result = propagate(graph.call(maker), needed, graph.batch_size)
    if result is None or (result.inputs, result.outputs) != (needed, places):
        return None
    for place in _cuts(graph.tensors[made[0]].shape, units):
        if _shown(graph, made[0], tensor, place, units) == wanted:
            return OpRule(
                inputs=needed,
                outputs=places,
                units=graph.batch_size,
                scatter=Scatter(place=place, units=units),
            )
    return None


def _cuts(shape: Sequence[int], units: int) -> Iterator[Placement]:
    """Ways to cut a tensor into units, those with the largest contiguous parts first."""
    ways = [
        S(dim, outer)
        for dim, size in enumerate(shape)
        for outer in range(1, size // units + 1)
        if size % (outer * units) == 0
    ]
    yield from sorted(ways, key=lambda way: (way.outer, way.dim))


def _shown(
    graph: OpGraph, value: int, tensor: int, place: Placement, units: int
) -> Placement | None:
    """Placement of a view of a value, if it follows from the value's."""
    if tensor == value:
        return place
    view = int(graph.producer[tensor])
    source = graph.ops[view].inputs[0]
    given = _shown(graph, value, source, place, units)
    if given is None:
        return None
    result = propagate(graph.call(view), (given,), units)
    if result is None or result.inputs != (given,):
        return None
    return result.outputs[tensor - graph.outputs[view][0]]
