"""Every way to shard a layer of a graph over its devices, found once per kind of layer.

A split rarely ends at the border of a group: columns of one weight lead to rows of the next. So a
few consecutive groups are searched together (``tensor_parallel.shardings``), and the result is
used at all places where the same groups follow each other.

Some gradients need no synchronisation either: if the tensors from which a gradient is made are
smaller than itself, every device gathers these and makes the whole gradient (sufficient factors;
Xie et al. 2016). For an embedding they are the gradients of the rows that were looked up and the
rows' numbers, so that rows which no sample used are never sent; exact for every optimizer.

Experts also have rules with an all-to-all (``exchanged``). Tokens are dispatched as a tensor of
[experts, tokens of an expert, width], which is cut by tokens by its maker and by experts for its
readers (GShard, Lepikhin et al. 2021, section 3.2): each member sends every other member the
tokens of the other's experts, and gets the results back, forward and backward. Each of n members
sends (n - 1)/n of the tokens that it dispatches. Only ops of experts are then split by experts;
all others follow the batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan, placed_view
from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import CONSTANT_GROUP, alike_groups, group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import OpRule, OpRules, Placement, R, S, Scatter
from heterog.graph.sharding_rules import propagate
from heterog.grouped import grouped
from heterog.strategy.tensor_parallel import Sharding, shardings


def exchanged(
    graph: OpGraph, rules: Mapping[int, OpRule], weights: Sequence[int]
) -> dict[int, OpRule] | None:
    """Replace rules that gather tokens for experts by rules that exchange them.

    Args:
        graph: One training step.
        rules: Rules of the ops that a split of the experts' weights leads to, all with as many
            units as there are experts.
        weights: Parameters with one matrix for each expert.

    Returns:
        The rules, or ``None`` if a value that experts read has other readers too, so that it must
        be gathered.
    """
    ops = _between_experts(graph, rules, weights)
    found = {op: rules[op] for op in ops}
    for op in sorted(ops):
        for tensor, place in zip(graph.ops[op].inputs, rules[op].inputs, strict=True):
            maker = int(graph.producer[graph.storage[tensor]])
            if maker < 0 or maker in ops or not _follows_samples(graph, tensor):
                continue
            if place.kind != "S":
                return None
            given = _brought(graph, maker, tensor, place, rules[op].units)
            if given is None or not _readers(graph, maker) <= ops:
                return None
            if found.setdefault(maker, given) != given:
                return None
        made = graph.outputs[op]
        readers = _readers(graph, op)
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
    """Ops that read parameters of experts or make their gradients, and all ops between two such.

    Parameters of experts are the given weights, and parameters that the rules split, like biases.
    """
    parameters = {parameter: gradient for _, parameter, gradient in graph.updates}
    split = {
        int(graph.storage[tensor])
        for op, rule in rules.items()
        for tensor, place in zip(graph.ops[op].inputs, rule.inputs, strict=True)
        if place.kind == "S" and int(graph.storage[tensor]) in parameters
    }.union(weights)
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
    after = _linked(core, sorted(whole), partial(_makers, graph))
    before = _linked(core, sorted(whole, reverse=True), partial(_readers, graph))
    return frozenset(core | (after & before))


def _linked(core: set[int], ops: Iterable[int], neighbours: Callable[[int], set[int]]) -> set[int]:
    """Ops with a neighbour in the core, or among those found before them."""
    found: set[int] = set()
    for op in ops:
        if neighbours(op) & (core | found):
            found.add(op)
    return found


def _makers(graph: OpGraph, op: int) -> set[int]:
    """Compute ops that make what an op reads, also through views; -1 for step inputs."""
    return {int(graph.producer[graph.storage[tensor]]) for tensor in graph.ops[op].inputs}


def _readers(graph: OpGraph, op: int) -> set[int]:
    """Compute ops that read what an op makes, also through views."""
    return {
        reader
        for tensor in graph.outputs[op]
        for reader in graph.readers(tensor)
        if graph.ops[reader].phase != Phase.UPDATE
    }


def _follows_samples(graph: OpGraph, tensor: int) -> bool:
    return batch_plan(graph).placements[int(graph.storage[tensor])].kind == "S"


def _brought(
    graph: OpGraph, maker: int, tensor: int, wanted: Placement, units: int
) -> OpRule | None:
    """Rule of an op that follows the batch, with a scatter that cuts its value by experts."""
    made = graph.outputs[maker]
    if len(made) > 1 or graph.ops[maker].phase == Phase.UPDATE:
        return None
    plan = batch_plan(graph)
    needed, places = plan.needed[maker], tuple(plan.placements[each] for each in made)
    result = propagate(graph.calls[maker], needed, graph.batch_size)
    if result is None or (result.inputs, result.outputs) != (needed, places):
        return None
    for place in _cuts(graph.tensors[made[0]].shape, units):
        if placed_view(graph, tensor, {made[0]: place}, units) == wanted:
            return OpRule(
                inputs=needed,
                outputs=places,
                units=graph.batch_size,
                scatter=Scatter(place=place, units=units),
            )
    return None


def _cuts(shape: Sequence[int], units: int) -> Iterator[Placement]:
    """Ways to cut a tensor into units, the ones with the largest contiguous parts first."""
    ways = [
        S(dim, outer)
        for dim, size in enumerate(shape)
        for outer in range(1, size // units + 1)
        if size % (outer * units) == 0
    ]
    yield from sorted(ways, key=lambda way: (way.outer, way.dim))


WINDOW = 4
"""Number of consecutive groups through which a split is followed."""
LEAST_WEIGHTS = 1 / 16
"""Least ratio of weight bytes to activation bytes that a sharding moves; below it, a sharding is
not considered: it sends activations where data parallelism sends gradients."""

LEAST_PART = 0.01
"""Least fraction of a model's parameters in a kind of layer, for it to be sharded."""
MOST_FLOPS_PER_BYTE = 1.0
"""Most FLOPs per byte read and written by an op that makes a whole gradient on every device: sums
of rows, but no products of matrices."""


@lru_cache(maxsize=8)
def layer_shardings(graph: OpGraph) -> tuple[tuple[OpRules, ...], ...]:
    """Ways to shard the layers of a graph, no two for the same op.

    Ways are sorted by bytes of weights that need no synchronisation per byte of activations that
    they move. Of ways that share an op the first is taken: columns and then rows rather than
    columns alone.

    Returns:
        For each way, which is for one kind of layer, the rules at every place where the graph has
        that kind: disjoint, in order of the forward pass.
    """
    windows = _Windows(graph)
    found: dict[_Signature, list[OpRules]] = {}
    known: dict[tuple[int, ...], list[_Signature]] = {}
    for group in range(windows.num_groups):
        if not windows.is_worth_it(group):
            continue
        kind = windows.kind(group)
        if kind not in known:
            ways = shardings(
                graph,
                range(group, min(group + WINDOW, windows.num_groups)),
                parameters=windows.parameters.get(group, ()),
            )
            known[kind] = [
                windows.signature(rules, group) for way in ways for rules in _rules(graph, way)
            ]
        for signature in known[kind]:
            found.setdefault(signature, []).append(windows.rules(signature, group))
    for group, rules in _gathered_gradients(graph, windows):
        found.setdefault(windows.signature(rules, group), []).append(rules)
    weighed = []
    least_bytes = LEAST_PART * sum(graph.tensor_bytes[parameter] for parameter in graph.parameters)
    for places in found.values():
        moved = moved_bytes(graph, places[0])
        least = max(LEAST_WEIGHTS * moved, least_bytes / len(places))
        # An upper bound first, because the weights themselves take a propagation.
        if _read_bytes(graph, places[0]) >= least:
            weights = weight_bytes(graph, places[0])
            if weights >= least:
                weighed.append((weights / moved, places))
    result = []
    split: set[int] = set()
    for _, places in sorted(weighed, key=lambda pair: -pair[0]):
        free = []
        for rules in places:
            ops = {op for op, _ in rules}
            if split.isdisjoint(ops):
                free.append(rules)
                split |= ops
        if free:
            result.append(tuple(free))
    return tuple(result)


def _rules(graph: OpGraph, way: Sharding) -> Iterator[OpRules]:
    """The rules of a way to shard; for experts also the rules that exchange tokens."""
    yield way.op_rules
    if way.placement == S(0) and len(graph.tensors[way.parameter].shape) == 3:
        rules = exchanged(graph, dict(way.op_rules), [way.parameter])
        if rules is not None:
            yield tuple(sorted(rules.items()))


def _gathered_gradients(graph: OpGraph, windows: "_Windows") -> Iterator[tuple[int, OpRules]]:
    """Pairs of group and rule for gradients that each device makes whole from gathered tensors.

    Only where the work is small, because every device then does all of it.
    """
    placements = batch_plan(graph).placements
    for _, parameter, gradient in graph.updates:
        maker = int(graph.producer[graph.storage[gradient]])
        if maker < 0 or windows.group[maker] == CONSTANT_GROUP:
            continue
        inputs = tuple(R for _ in graph.ops[maker].inputs)
        rules = ((maker, OpRule(inputs=inputs, outputs=(R,), units=1)),)
        result = propagate(graph.calls[maker], inputs, graph.batch_size)
        if placements[gradient].kind != "P" or result is None or result.outputs != (R,):
            continue  # nothing to synchronise, or no such rule
        moved, size = moved_bytes(graph, rules), float(graph.tensor_bytes[parameter])
        is_cheap = graph.ops[maker].flops <= MOST_FLOPS_PER_BYTE * (moved + size)
        if is_cheap and moved <= size:
            yield int(windows.group[maker]), rules


def _read_bytes(graph: OpGraph, rules: OpRules) -> float:
    """Bytes of the parameters that ops with rules read, or whose gradients they make."""
    near = {int(graph.storage[tensor]) for op, _ in rules for tensor in graph.ops[op].inputs}
    made = {tensor for op, _ in rules for tensor in graph.outputs[op]}
    near |= {
        parameter
        for _, parameter, gradient in graph.updates
        if int(graph.storage[gradient]) in made
    }
    return float(sum(graph.tensor_bytes[value] for value in near & set(graph.parameters)))


def weight_bytes(graph: OpGraph, rules: OpRules) -> float:
    """Bytes of the parameters that need no synchronisation under some rules; 0 if illegal."""
    try:
        plan = axis_plan(graph, rules)
    except StrategyError:
        return 0.0
    before = batch_plan(graph).placements
    free = plan.sharded | {
        parameter
        for _, parameter, gradient in graph.updates
        if before[gradient].kind == "P" and plan.placements[gradient].kind == "R"
    }
    return float(sum(graph.tensor_bytes[parameter] for parameter in free))


def moved_bytes(graph: OpGraph, rules: OpRules) -> float:
    """Bytes of the activations that are moved because of some rules.

    Inputs from ops that follow the batch are gathered once, and so are split outputs that other
    ops read; a sum counts twice. Two devices that exchange a value move half as much as if they
    gathered it.
    """
    size, storage, batch = graph.tensor_bytes, graph.storage, batch_plan(graph)
    inside, batch_size = {op for op, _ in rules}, graph.batch_size
    moved: dict[int, float] = {}
    for op, rule in rules:
        is_exchanged = rule.scatter is not None and rule.outputs[0].kind == "S"
        if is_exchanged:
            (made,) = graph.outputs[op]
            moved[made] = 0.5 * float(size[made])
        for tensor in () if is_exchanged and rule.units == batch_size else graph.ops[op].inputs:
            value = int(storage[tensor])
            times = {"S": 1.0, "P": 2.0}.get(batch.placements[value].kind, 0.0)
            if times and int(graph.producer[value]) not in inside:
                moved[value] = times * float(size[value])
        for tensor, place in zip(graph.outputs[op], rule.outputs, strict=True):
            if is_exchanged:
                continue
            if place.kind != "R" and not all(
                reader in inside or graph.ops[reader].phase == Phase.UPDATE
                for reader in graph.readers(tensor)
            ):
                moved[tensor] = float(size[tensor]) * (2.0 if place.kind == "P" else 1.0)
    return max(sum(moved.values()), 1.0)


_Signature = tuple[tuple[tuple[int, int, int], OpRule], ...]
"""For each rule: offset of the group, its kind, and position of the op in it."""


class _Windows:
    """Runs of consecutive groups of a graph."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        grouping = group_ops(graph)
        self.num_groups = grouping.num_groups
        self.group = grouping.group
        self.alike = alike_groups(graph)
        self.ops = grouping.ops
        self.position = {op: place for ops in self.ops for place, op in enumerate(ops)}
        self.parameters = grouped(
            (int(grouping.group[op]), parameter) for op, parameter, _ in graph.updates
        )

    def kind(self, group: int) -> tuple[int, ...]:
        """Kinds of a window's groups; equal windows run the same ops on the same shapes."""
        return tuple(self.alike[group : group + WINDOW].tolist())

    def is_worth_it(self, group: int) -> bool:
        """Whether a group's weights are large compared with its outputs."""
        tensors = self.graph.tensors
        weights = sum(tensors[each].num_bytes for each in self.parameters.get(group, ()))
        outputs = [tensor for op in self.ops[group] for tensor in self.graph.outputs[op]]
        largest = max((tensors[each].num_bytes for each in outputs), default=0)
        return 0 < LEAST_WEIGHTS * largest <= weights  # some ops only check, and have no output

    def signature(self, rules: OpRules, first: int) -> _Signature:
        """Rules of the window that begins with a group, independent of its position."""
        return tuple(
            ((group - first, int(self.alike[group]), self.position[op]), rule)
            for op, rule in rules
            for group in (int(self.group[op]),)
        )

    def rules(self, signature: _Signature, first: int) -> OpRules:
        """The rules of a signature in the window that begins with a group."""
        placed = [
            (self.ops[first + offset][position], rule) for (offset, _, position), rule in signature
        ]
        return tuple(sorted(placed, key=lambda pair: pair[0]))
