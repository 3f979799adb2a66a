"""Every way to shard a layer of a graph over its devices, found once per kind of layer.

A split rarely ends where a group does: the columns of one weight are the rows of the next. So a
few consecutive groups are looked at together (``tensor_parallel.shardings``), and what is found is
carried over to all places where the same groups follow each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.grouping import CONSTANT_GROUP, alike_groups, group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.op_rule import OpRule, OpRules
from heterog.strategy.tensor_parallel import shardings

WINDOW = 4
"""Consecutive groups that a split is followed through."""
LEAST_WEIGHTS = 1 / 16
"""Bytes of a group's parameters over those of its largest activation, below which it is not looked
at: a split sends activations where data parallelism sends gradients."""
MOST_SHARED = 0.75
"""Part of a sharding's FLOPs that one with more work may have too, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSharding:
    """One way to shard a kind of layer, at every place where the graph has that kind.

    Attributes:
        places: rules of the ops of each place, disjoint, in order of the forward pass.
        flops: of these ops at all places, on all devices together.
    """

    places: tuple[OpRules, ...]
    flops: float


@lru_cache(maxsize=8)
def layer_shardings(graph: OpGraph) -> tuple[LayerSharding, ...]:
    """Ways to shard the layers of a graph, those that split the most work first.

    A sharding that another one contains is left out: columns alone where columns and then rows
    are possible.
    """
    windows = _Windows(graph)
    found: dict[_Signature, list[OpRules]] = {}
    known: dict[tuple[int, ...], list[_Signature]] = {}
    for group in range(windows.num_groups):
        if not windows.is_worth_it(group):
            continue
        kind = windows.kind(group)
        if kind not in known:
            known[kind] = [
                windows.signature(each.op_rules, group)
                for each in shardings(
                    graph,
                    range(group, min(group + WINDOW, windows.num_groups)),
                    parameters=windows.parameters[group],
                )
                if _is_legal(graph, each.op_rules)
            ]
        for signature in known[kind]:
            found.setdefault(signature, []).append(windows.rules(signature, group))
    kinds = [
        LayerSharding(places=tuple(places), flops=_flops(graph, places))
        for places in found.values()
    ]
    kinds.sort(key=lambda each: -each.flops / len(each.places))
    return _different(graph, kinds)


def _flops(graph: OpGraph, places: Iterable[OpRules]) -> float:
    return float(sum(graph.ops[op].flops for rules in places for op, _ in rules))


def _different(graph: OpGraph, kinds: Sequence[LayerSharding]) -> tuple[LayerSharding, ...]:
    """Without shardings whose work is mostly in larger ones, which come first."""
    split: set[int] = set()
    kept = []
    for kind in kinds:
        first = kind.places[0]
        shared = tuple((op, rule) for op, rule in first if op in split)
        if _flops(graph, [shared]) <= MOST_SHARED * _flops(graph, [first]):
            kept.append(kind)
            split.update(op for rules in kind.places for op, _ in rules)
    return tuple(sorted(kept, key=lambda each: -each.flops))


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


def _is_legal(graph: OpGraph, rules: OpRules) -> bool:
    try:
        axis_plan(graph, rules)
    except StrategyError:
        return False
    return True
