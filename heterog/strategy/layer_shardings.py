"""Every way to shard a layer of a graph over its devices, found once per kind of layer.

A split rarely ends where a group does: the columns of one weight are the rows of the next. So a
few consecutive groups are looked at together (``tensor_parallel.shardings``), and what is found is
carried over to all places where the same groups follow each other.
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
from heterog.strategy.tensor_parallel import shardings

WINDOW = 4
"""Consecutive groups that a split is followed through."""
LEAST_WEIGHTS = 1 / 16
"""Bytes of weights over bytes of activations moved for them, below which a sharding is not
looked at: it sends activations where data parallelism sends gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSharding:
    """One way to shard a kind of layer, at every place where the graph has that kind.

    Attributes:
        places: rules of the ops of each place, disjoint, in order of the forward pass.
        weight_bytes: of the parameters of one place that live in slices.
        moved_bytes: of the activations of one place that are gathered or summed for it.
    """

    places: tuple[OpRules, ...]
    weight_bytes: float
    moved_bytes: float


@lru_cache(maxsize=8)
def layer_shardings(graph: OpGraph) -> tuple[LayerSharding, ...]:
    """Ways to shard the layers of a graph, no two for the same op.

    Of ways that exclude each other the one is taken that keeps more bytes of weights in slices for
    each byte of activations that it moves: columns and then rows rather than columns alone. They
    come in this order.
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
            known[kind] = [windows.signature(way.op_rules, group) for way in ways]
        for signature in known[kind]:
            found.setdefault(signature, []).append(windows.rules(signature, group))
    weighed = []
    for places in found.values():
        most_bytes, moved_bytes = _read_bytes(graph, places[0]), _moved_bytes(graph, places[0])
        if most_bytes >= LEAST_WEIGHTS * moved_bytes:
            weight_bytes = _weight_bytes(graph, places[0])
            if weight_bytes >= LEAST_WEIGHTS * moved_bytes:
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


def _read_bytes(graph: OpGraph, rules: OpRules) -> float:
    """Bytes of the parameters that ops with rules read: no more of them can live in slices."""
    read = {int(graph.storage[tensor]) for op, _ in rules for tensor in graph.ops[op].inputs}
    return float(sum(graph.tensor_bytes[value] for value in read & set(graph.parameters)))


def _weight_bytes(graph: OpGraph, rules: OpRules) -> float:
    """Bytes of the weights that live in slices under some rules; 0 if these are illegal."""
    try:
        sharded = axis_plan(graph, rules).sharded
    except StrategyError:
        return 0.0
    return float(sum(graph.tensor_bytes[parameter] for parameter in sharded))


def _moved_bytes(graph: OpGraph, rules: OpRules) -> float:
    """Bytes of the activations that are moved because of some rules.

    What comes in from ops that follow the batch is gathered once, what is left in parts for others
    is gathered once, and a sum is two such movements.
    """
    size, storage, batch = graph.tensor_bytes, graph.storage, batch_plan(graph)
    inside = {op for op, _ in rules}
    moved: dict[int, float] = {}
    for op, rule in rules:
        for tensor in graph.ops[op].inputs:
            value = int(storage[tensor])
            if batch.placements[value].kind == "S" and int(graph.producer[value]) not in inside:
                moved[value] = float(size[value])
        for tensor, place in zip(graph.outputs(op), rule.outputs, strict=True):
            if place.kind != "R" and not all(
                reader in inside or graph.ops[reader].phase == Phase.UPDATE
                for reader in _readers(graph, tensor)
            ):
                moved[tensor] = float(size[tensor]) * (2.0 if place.kind == "P" else 1.0)
    return max(sum(moved.values()), 1.0)


def _readers(graph: OpGraph, tensor: int) -> Iterator[int]:
    """Ops other than views that read a tensor, through all views."""
    for reader in graph.consumers[tensor]:
        if graph.is_view[reader]:
            for output in graph.outputs(reader):
                yield from _readers(graph, output)
        else:
            yield int(reader)


_Signature = tuple[tuple[tuple[int, int, int], OpRule], ...]
"""(offset of the group, its number among alike ones, position of the op in it) of each rule."""


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
        """Windows of one kind run the same ops on the same shapes."""
        return tuple(self.alike[group : group + WINDOW].tolist())

    def is_worth_it(self, group: int) -> bool:
        """Whether a group has weights that are large against what it makes."""
        tensors = self.graph.tensors
        weights = sum(tensors[parameter].meta.num_bytes for parameter in self.parameters[group])
        largest = max(
            tensors[tensor].meta.num_bytes
            for op in self.ops[group]
            for tensor in self.graph.outputs(op)
        )
        return weights >= LEAST_WEIGHTS * largest

    def signature(self, rules: OpRules, first: int) -> _Signature:
        """Rules of the window that begins with a group, wherever that window is."""
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
