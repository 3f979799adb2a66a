"""Grids of devices: a cluster of equal ones, and ops that every member of a team does."""

from collections.abc import Collection

from heterog.cluster import Cluster
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import OpRule, OpRules, R
from tests.simulator.builders import cluster_of


def grid_cluster(num_devices: int) -> Cluster:
    return cluster_of(*[(1.0, ["T4"])] * num_devices)


def done_by_all(graph: OpGraph, groups: Collection[int]) -> OpRules:
    """Rules by which every member of a team does all of each op of some groups."""
    group = group_ops(graph).group
    return tuple(
        (
            index,
            OpRule(
                inputs=tuple(R for _ in op.inputs),
                outputs=tuple(R for _ in range(op.num_outputs)),
                units=1,
            ),
        )
        for index, op in enumerate(graph.ops)
        if int(group[index]) in groups
        and int(group[index]) != CONSTANT_GROUP
        and op.phase != Phase.UPDATE
        and not graph.is_view[index]
    )
