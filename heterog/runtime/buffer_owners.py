"""Whose running statistics count: those of the first device with samples of the module."""

from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.strategy.strategy import Strategy


def buffer_owners(graph: OpGraph, strategy: Strategy) -> dict[str, int]:
    """The rank whose copy of each buffer counts, by the buffer's name.

    A module runs where its group is, so a rank without samples there has statistics that never
    change. What depends on no sample (counters) is computed wherever there are any.
    """
    group = group_ops(graph).group
    sampled = [
        [device for device, share in zip(each.devices, each.shares, strict=True) if share]
        for each in strategy.decisions
    ]
    anywhere = min(map(min, sampled))
    owners: dict[str, int] = {}
    for op, node in enumerate(graph.ops):
        owner = anywhere if group[op] == CONSTANT_GROUP else sampled[group[op]][0]
        for tensor in node.inputs:
            if graph.tensors[tensor].kind == TensorKind.BUFFER:
                owners.setdefault(graph.tensors[tensor].name, owner)
    return owners
