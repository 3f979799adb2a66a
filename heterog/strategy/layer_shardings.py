"""Every way to shard a layer of a graph over its devices, found once per kind of layer.

A split rarely ends where a group does: the columns of one weight are the rows of the next. So a
few consecutive groups are looked at together (``tensor_parallel.shardings``), and what is found is
carried over to all places where the same groups follow each other.

A gradient that is small to explain need not be synchronised either: where the tensors that it is
made from are smaller than itself, every device gathers those and makes it whole (sufficient
factors; Xie et al. 2016). For an embedding these are the rows that were looked up and their
numbers, so that rows nobody has touched are never sent; exact for every optimizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import CONSTANT_GROUP, alike_groups, group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.op_rule import OpRule, OpRules
from heterog.graph.placement import R, S
from heterog.graph.sharding_rules import propagate
from heterog.strategy.dispatch import exchanged
from heterog.strategy.tensor_parallel import Sharding, shardings

WINDOW = 4
"""Number of consecutive groups through which a split is followed."""
LEAST_WEIGHTS = 1 / 16
"""Least ratio of weight bytes to activation bytes moved for them; below it, a sharding is not
considered: it sends activations where data parallelism sends gradients."""

LEAST_PART = 0.01
"""Least fraction of a model's parameters in a kind of layer, for it to be sharded."""
MOST_FLOPS_PER_BYTE = 1.0
"""Most FLOPs per byte read and written for which every device may do all of the work of making
a gradient whole: sums of rows, but no products of matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSharding:
    """A way to shard a kind of layer, at every place where the graph has that kind.

    Attributes:
        places: Rules of the ops of each place, disjoint, in order of the forward pass.
        weight_bytes: Bytes of the parameters of one place whose gradients need no synchronisation:
            they live in slices, or each device makes the whole gradient.
        moved_bytes: Bytes of the activations of one place that are gathered or summed for it.
    """

    places: tuple[OpRules, ...]
    weight_bytes: float
    moved_bytes: float


@lru_cache(maxsize=8)
def layer_shardings(graph: OpGraph) -> tuple[LayerSharding, ...]:
    """Ways to shard the layers of a graph, no two for the same op.

    Of ways that exclude each other, the one is taken that keeps more bytes of weights in slices
    for each byte of activations that it moves: columns and then rows rather than columns alone.
    The ways are sorted in this order.
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
                parameters=windows.parameters[group],
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
        most_bytes, moved_bytes = _read_bytes(graph, places[0]), _moved_bytes(graph, places[0])
        if most_bytes >= max(LEAST_WEIGHTS * moved_bytes, least_bytes / len(places)):
            weight_bytes = _weight_bytes(graph, places[0])
            if weight_bytes >= max(LEAST_WEIGHTS * moved_bytes, least_bytes / len(places)):
                weighed.append(((weight_bytes, moved_bytes), places))
    weighed.sort(key=lambda pair: -pair[0][0] / pair[0][1])
    result = []
    split: set[int] = set()
    for (weight_bytes, moved_bytes), places in weighed:
        free = []
        for rules in places:
            ops = {op for op, _ in rules}
            if split.isdisjoint(ops):
                free.append(rules)
                split |= ops
        if free:
            result.append(
                LayerSharding(
                    places=tuple(free), weight_bytes=weight_bytes, moved_bytes=moved_bytes
                )
            )
    return tuple(result)


def _rules(graph: OpGraph, way: Sharding) -> Iterator[OpRules]:
    """The rules of a way to shard; of experts also those by which tokens are exchanged."""
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
        result = propagate(graph.call(maker), inputs, graph.batch_size)
        if placements[gradient].kind != "P" or result is None or result.outputs != (R,):
            continue  # nothing to synchronise, or no such rule
        moved_bytes, size = _moved_bytes(graph, rules), float(graph.tensor_bytes[parameter])
        is_cheap = graph.ops[maker].flops <= MOST_FLOPS_PER_BYTE * (moved_bytes + size)
        if is_cheap and moved_bytes <= size:
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


def _weight_bytes(graph: OpGraph, rules: OpRules) -> float:
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


def _moved_bytes(graph: OpGraph, rules: OpRules) -> float:
    """Bytes of the activations that are moved because of some rules.

    Inputs from ops that follow the batch are gathered once, outputs left in parts for others are
    gathered once, and a sum is two such movements. Two devices that exchange a value move half as
    much as if they gathered it.
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
        self.ops: list[list[int]] = [[] for _ in range(self.num_groups)]
        self.position: dict[int, int] = {}
        for op, group in enumerate(grouping.group.tolist()):
            if group != CONSTANT_GROUP:
                self.position[op] = len(self.ops[group])
                self.ops[group].append(op)
        self.parameters: list[list[int]] = [[] for _ in range(self.num_groups)]
        for op, parameter, _ in graph.updates:
            self.parameters[int(grouping.group[op])].append(parameter)

    def kind(self, group: int) -> tuple[int, ...]:
        """Kinds of a window's groups; equal windows run the same ops on the same shapes."""
        return tuple(self.alike[group : group + WINDOW].tolist())

    def is_worth_it(self, group: int) -> bool:
        """Whether a group's weights are large compared with its outputs."""
        tensors = self.graph.tensors
        weights = sum(tensors[parameter].meta.num_bytes for parameter in self.parameters[group])
        largest = max(
            tensors[tensor].meta.num_bytes
            for op in self.ops[group]
            for tensor in self.graph.outputs[op]
        )
        return weights >= LEAST_WEIGHTS * largest

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
