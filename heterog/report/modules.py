"""A strategy by module: parameters, ops, devices, shares, synchronisation."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from heterog.cluster.topology import Cluster
from heterog.explain.lowered import IN_SLICES, MADE_WHOLE, Lowered
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering import lower
from heterog.strategy.strategy import REPLICATED, Decision, Strategy
from heterog.strategy.sync import TRAITS


@dataclass(slots=True)
class ModuleNode:
    """One module with everything below it.

    Attributes:
        name: Last part of the path, or several parts if a module only contains another.
        children: Submodules in the order in which they first run.
        parameter_bytes: Bytes of parameters in the module and below it.
        num_ops: Number of ops that cost something, likewise.
        weight: FLOPs under each decision, likewise: the weights of mixed shares.
        recomputed: Whether outputs of its ops are made again for the backward pass, likewise.
        syncs: Synchronisations of its parameters, in words, likewise.
    """

    name: str
    children: dict[str, "ModuleNode"] = field(default_factory=dict)
    parameter_bytes: int = 0
    num_ops: int = 0
    weight: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = field(default_factory=dict)
    recomputed: set[bool] = field(default_factory=set)
    syncs: dict[str, None] = field(default_factory=dict)

    def shares(self, num_devices: int) -> list[float]:
        """Mean samples on each device, weighted by FLOPs.  # [num_devices]"""
        total = sum(self.weight.values())
        mean = [0.0] * num_devices
        for (devices, shares), weight in self.weight.items():
            for device, share in zip(devices, shares, strict=True):
                mean[device] += share * weight / total
        return mean


def module_tree(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> ModuleNode:
    """The modules of a graph as a tree, each with the decisions for its ops."""
    root = ModuleNode("(root)")
    group = group_ops(graph).group.tolist()
    for index, op in enumerate(graph.ops):
        if group[index] == CONSTANT_GROUP or graph.is_view[index]:
            continue
        decision = strategy.decisions[group[index]]
        placed = (decision.devices, decision.shares)
        for node in _path(root, op.module):
            node.num_ops += 1
            node.recomputed.add(decision.recompute)
            # Not zero, also for an op without FLOPs: it is placed as well.
            node.weight[placed] = node.weight.get(placed, 0.0) + op.flops + 1.0
    ways = Lowered(lower(graph, cluster, strategy, num_steps=1), strategy, graph).ways
    for (op_index, tensor, _), home, way in zip(graph.updates, strategy.homes, ways, strict=True):
        words = _sync(strategy.decisions[group[op_index]], home, cluster)
        words = way if way in (IN_SLICES, MADE_WHOLE) else words
        for node in _path(root, _owner(graph, tensor, graph.ops[op_index].module)):
            node.parameter_bytes += int(graph.tensor_bytes[tensor])
            node.syncs[words] = None
    _join_chains(root)
    return root


def _path(root: ModuleNode, module: str) -> Iterator[ModuleNode]:
    """The nodes from the root to a module, created if missing."""
    node = root
    yield node
    for part in filter(None, module.split(".")):
        node = node.children.setdefault(part, ModuleNode(part))
        yield node


def _owner(graph: OpGraph, tensor: int, module: str) -> str:
    """The module that a parameter is an attribute of; the op's if the name does not tell."""
    return graph.tensors[tensor].name.rpartition(".")[0] or module


def _sync(decision: Decision, home: int, cluster: Cluster) -> str:
    if len(decision.devices) == 1:
        alone = home in (REPLICATED, decision.devices[0])
        return "none needed" if alone else f"updated on {cluster.devices[home].name}"
    if decision.sync.is_served:
        return f"parameter server on {cluster.devices[home].name}"
    return TRAITS[decision.sync].words


def _join_chains(node: ModuleNode) -> None:
    """Join modules that only contain one other: ``encoder`` and ``layer`` become one row."""
    for key, child in list(node.children.items()):
        while len(child.children) == 1:
            only = next(iter(child.children.values()))
            if (only.num_ops, only.parameter_bytes) != (child.num_ops, child.parameter_bytes):
                break
            only.name = f"{child.name}.{only.name}"
            child = node.children[key] = only
        _join_chains(child)
