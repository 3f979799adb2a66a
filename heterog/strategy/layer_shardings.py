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
from heterog.graph.grouping import CONSTANT_GROUP, alike_groups, group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.op_rule import OpRule, OpRules
from heterog.strategy.tensor_parallel import shardings

WINDOW = 4
"""Consecutive groups that a split is followed through."""
LEAST_WEIGHTS = 1 / 16
"""Bytes of a group's parameters over those of its largest activation, below which it is not looked
at: a split sends activations where data parallelism sends gradients."""


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
    weighed = [
        (bytes_, places) for places in found.values() if (bytes_ := _bytes(graph, places[0]))[0]
    ]
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


def _bytes(graph: OpGraph, rules: OpRules) -> tuple[float, float]:
    """Bytes of the weights that live in slices under some rules, and of what is moved for them.

    What comes in from ops that follow the batch is gathered once, what is left in parts for others
    is gathered once, and a sum is two such movements.
    """
    try:
        plan = axis_plan(graph, rules)
    except StrategyError:
        return 0.0, 1.0
    size, storage = graph.tensor_bytes, graph.storage
    inside = {op for op, _ in rules}
    moved: dict[int, float] = {}
    for op, rule in rules:
        for tensor in graph.ops[op].inputs:
            made_of = int(storage[tensor])
            if plan.placements[made_of].kind == "S" and made_of not in plan.sharded:
                if int(graph.producer[made_of]) not in inside:
                    moved[made_of] = float(size[made_of])
        for tensor, place in zip(graph.outputs(op), rule.outputs, strict=True):
            if place.kind != "R" and not all(
                reader in inside or graph.ops[reader].phase == Phase.UPDATE
                for reader in _readers(graph, tensor)
            ):
                moved[tensor] = float(size[tensor]) * (2.0 if place.kind == "P" else 1.0)
    weights = float(sum(size[parameter] for parameter in plan.sharded))
    return weights, max(sum(moved.values()), 1.0)


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
