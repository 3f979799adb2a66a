"""Groups: ops that share one decision.

Modules are the natural unit: a person can read a plan by module, and a parameter, its gradient
and its update belong together. The module tree is cut until no group holds more than
``MAX_SHARE_OF_WORK`` of the step's work, or cannot be divided further. Then groups are joined
whose decisions must agree: all readers of one parameter (tied weights), an op that makes a
gradient and the parameter's group, and local statistics with their readers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from heterog.graph.batch_plan import BatchPlan, batch_plan
from heterog.graph.op_graph import FloatArray, IntArray, OpGraph, Phase
from heterog.graph.placement import OpCall
from heterog.grouped import grouped

MAX_SHARE_OF_WORK = 1 / 64
"""Fraction of the work above which a module is cut into its children."""
MAX_GROUPS = 400
MAX_BLOCKS = 48
"""Most blocks of a graph; longer chains of decisions are slow to sample and to score."""
CONSTANT_GROUP = -1
"""Group of ops that depend on neither batch nor parameters: they run wherever they are read."""

# Balance of FLOPs against bytes for weighing modules only: about a V100's FLOP per byte.
_FLOPS_PER_BYTE = 17.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouping:
    """The group of every op.

    Attributes:
        group: Group index of each op, ``CONSTANT_GROUP`` for constants.  # [num_ops]
        names: Module path that names each group, in order of first forward op.
    """

    group: IntArray
    names: tuple[str, ...]

    @cached_property
    def num_groups(self) -> int:
        """Number of groups that a strategy decides about."""
        return len(self.names)

    @cached_property
    def ops(self) -> tuple[tuple[int, ...], ...]:
        """Ops of each group, in the order in which they run."""
        found = grouped((group, op) for op, group in enumerate(self.group.tolist()))
        return tuple(tuple(found[group]) for group in range(self.num_groups))


@lru_cache(maxsize=64)
def group_ops(graph: OpGraph) -> Grouping:
    """Cut a graph into groups; see the module docstring for the rule.

    A graph of the same step on another batch takes the groups of ``OpGraph.grouped_like``: the
    work of its modules may differ, but the strategy was made for those groups.
    """
    if graph.grouped_like is not None:
        return group_ops(graph.grouped_like)
    plan = batch_plan(graph)
    labels = _cut_module_tree(graph)
    parent = _join(graph, plan, labels)
    first: dict[str, int] = {}
    group = np.full(graph.num_ops, CONSTANT_GROUP, np.int32)
    for index in range(graph.num_ops):
        if not graph.is_constant[index]:
            group[index] = first.setdefault(_find(parent, labels[index]), len(first))
    return Grouping(group=group, names=tuple(first))


@lru_cache(maxsize=64)
def blocks_of(graph: OpGraph) -> IntArray:
    """Block of each group: at most ``MAX_BLOCKS`` ranges of groups, by compute and parameters."""
    grouping = group_ops(graph)

    def of_groups(ops: IntArray, what: FloatArray) -> FloatArray:
        groups = grouping.group[ops]
        inside = groups >= 0
        return np.bincount(groups[inside], what[inside], grouping.num_groups).astype(np.float64)

    ops = np.flatnonzero(~graph.is_view & (graph.phases != Phase.UPDATE)).astype(np.int32)
    work = graph.flops[ops] + _FLOPS_PER_BYTE * graph.bytes_moved[ops]
    updates = np.array(graph.updates, np.int32).reshape(-1, 3)
    sizes = graph.tensor_bytes[updates[:, 1]].astype(np.float64)
    return cut_blocks(of_groups(ops, work), of_groups(updates[:, 0], sizes))


def block_starts(graph: OpGraph) -> IntArray:
    """First group of each of a graph's blocks, and the number of groups.  # [num_blocks + 1]"""
    block = blocks_of(graph)
    return np.searchsorted(block, np.arange(block[-1] + 2)).astype(np.int32)


def cut_blocks(work: FloatArray, state: FloatArray, most: int = MAX_BLOCKS) -> IntArray:
    """Block of each group: neighbours are joined, the lightest pair first.

    Args:
        work: Compute of each group, in any unit.  # [num_groups]
        state: Bytes of the parameters of each group.  # [num_groups]
        most: Most blocks.
    """
    shares = np.stack([work / max(work.sum(), 1e-30), state / max(state.sum(), 1e-30)])
    weights = list(shares.T)
    sizes = [1] * len(weights)
    while len(weights) > most:
        # A block is decided as a whole, so neither compute nor parameters may accumulate in one.
        lightest = int(np.argmin([float((a + b).max()) for a, b in pairwise(weights)]))
        weights[lightest] = weights[lightest] + weights.pop(lightest + 1)
        sizes[lightest] += sizes.pop(lightest + 1)
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


@lru_cache(maxsize=16)
def alike_groups(graph: OpGraph) -> IntArray:
    """Kind of each group, as a number: repeated layers give groups of the same kind.

    Groups are alike if they make the same calls in the same order, so that op rules of one group
    are legal in the other. Attention with a mask and attention without one are not alike.

    Returns:
        # [num_groups]
    """
    grouping = group_ops(graph)
    parts: list[list[object]] = [[] for _ in range(grouping.num_groups)]
    known: dict[OpCall, object] = {}
    for index, op in enumerate(graph.ops):
        if grouping.group[index] != CONSTANT_GROUP:
            call = graph.calls[index]
            if call not in known:
                known[call] = _all_but_factors(call)
            parts[grouping.group[index]].append((known[call], op.rule))
    kinds: dict[tuple[object, ...], int] = {}
    return np.array([kinds.setdefault(tuple(ops), len(kinds)) for ops in parts], np.int32)


def _all_but_factors(call: OpCall) -> object:
    """A call without float arguments, which sharding rules ignore and which differ by layer."""
    args = {name: "" if isinstance(arg, float) else arg for name, arg in call.args.items()}
    return call.kind, str(args), call.inputs, call.outputs


def _cut_module_tree(graph: OpGraph) -> list[str]:
    """Label of each op: the path of the module whose group it joins."""
    work = graph.flops + _FLOPS_PER_BYTE * graph.bytes_moved
    weight: dict[str, float] = {}
    children: dict[str, set[str]] = {}
    for op, cost in zip(graph.ops, work, strict=True):
        path = op.module
        while True:
            weight[path] = weight.get(path, 0.0) + float(cost)
            if not path:
                break
            above = path.rpartition(".")[0]
            children.setdefault(above, set()).add(path)
            path = above
    limit = weight.get("", 0.0) * MAX_SHARE_OF_WORK
    opened: set[str] = set()
    # Heaviest first, so that the cap on the number of groups cuts where it matters.
    frontier = [""]
    num_leaves = 1
    while frontier:
        frontier.sort(key=lambda path: (weight[path], path))
        path = frontier.pop()
        inside = children.get(path, set())
        if not inside or (weight[path] <= limit and path) or num_leaves > MAX_GROUPS:
            continue
        own = weight[path] - sum(weight[child] for child in inside)
        if path and own > weight[path] / 2:
            continue  # a module with most of its work outside its children stays whole
        opened.add(path)
        num_leaves += len(inside) - 1
        frontier.extend(inside)
    return _labels_of_ops(graph, {path: _leaf(path, opened) for path in weight}, opened)


def _leaf(path: str, opened: set[str]) -> str:
    """The first unopened module on the way from the root to ``path`` (or ``path`` itself)."""
    parts = path.split(".")
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth])
        if prefix not in opened:
            return prefix
    return path


def _labels_of_ops(graph: OpGraph, leaf_of: dict[str, str], opened: set[str]) -> list[str]:
    """Label each op; an op that runs directly in an opened module follows a neighbour.

    It takes the label of the op inside that module which made its last such input (for a residual
    add or the loss), else of the maker of its first labelled input. Without either, it takes the
    label of its first reader.
    """
    labels: list[str] = []
    for op in graph.ops:
        label = leaf_of[op.module]
        if label in opened:
            producers = [int(graph.producer[t]) for t in op.inputs if graph.producer[t] >= 0]
            own = [labels[p] for p in producers if labels[p] not in opened]
            near = [name for name in own if name.startswith(op.module)]
            # The nearest neighbour inside the module, else any, else the module itself.
            label = (near or own or [label])[-1 if near else 0]
        labels.append(label)
    for index, op in enumerate(graph.ops):
        # Tracing puts writes to the model's buffers at the end of the step, outside any module.
        if op.is_write and graph.producer[op.inputs[-1]] >= 0:
            labels[index] = labels[int(graph.producer[op.inputs[-1]])]
    for index in range(graph.num_ops - 1, -1, -1):
        if labels[index] in opened:  # first ops of an opened module: follow their first reader
            readers = [r for t in graph.outputs[index] for r in graph.consumers[t]]
            labels[index] = next((labels[r] for r in readers), labels[index])
    return labels


def _join(graph: OpGraph, plan: BatchPlan, labels: list[str]) -> dict[str, str]:
    """Join labels (by union-find) whose ops must be decided together."""
    parent = {label: label for label in labels}

    def join(ops: Iterable[int]) -> None:
        roots = [_find(parent, labels[op]) for op in ops if not graph.is_constant[op]]
        for root in roots[1:]:
            parent[_find(parent, root)] = _find(parent, roots[0])

    storage = graph.storage
    readers = grouped(
        (tensor, index)
        for index, op in enumerate(graph.ops)
        for tensor in dict.fromkeys(int(storage[t]) for t in op.inputs)
    )
    for parameter in graph.parameters:
        join(readers.get(parameter, []))
    for update, _, gradient in graph.updates:
        made = int(graph.producer[storage[gradient]])
        if made >= 0:
            join([update, made])
    for index, op in enumerate(graph.ops):
        if op.is_write and op.phase != Phase.UPDATE:
            # A buffer of the model is updated on the devices that read it: others would keep the
            # old value.
            join([index, *_readers_through_constants(graph, readers, int(storage[op.inputs[0]]))])
    for tensor, place in enumerate(plan.placements):
        if place.kind == "L" and graph.producer[tensor] >= 0:
            join([int(graph.producer[tensor]), *readers.get(tensor, [])])
    return parent


def _readers_through_constants(
    graph: OpGraph, readers: Mapping[int, Sequence[int]], source: int
) -> list[int]:
    """Ops that read a tensor, or a constant computed from it."""
    found: dict[int, None] = {}
    waiting = [source]
    while waiting:
        for op in readers.get(waiting.pop(), ()):
            if op not in found:
                found[op] = None
                if graph.is_constant[op]:
                    waiting.extend(dict.fromkeys(int(graph.storage[t]) for t in graph.outputs[op]))
    return list(found)


def _find(parent: dict[str, str], label: str) -> str:
    while parent[label] != label:
        parent[label] = parent[parent[label]]
        label = parent[label]
    return label
