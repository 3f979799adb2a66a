"""How many samples each BatchNorm sees: its statistics are those of a replica's own samples."""

from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.sharding_rules import Special
from heterog.runtime.spans import spans_of_groups
from heterog.strategy.strategy import Strategy


def batch_norm_samples(graph: OpGraph, strategy: Strategy) -> dict[str, dict[int, int]]:
    """The fewest samples over which each BatchNorm takes its statistics on each device.

    Args:
        graph: the captured step.
        strategy: made for it.

    Returns:
        By module path, then by device; the smallest micro-batch counts, and devices without
        samples, where the statistics never change, are left out.
    """
    specials = batch_plan(graph).specials
    group = group_ops(graph).group
    (of_groups,) = spans_of_groups(strategy, (graph.batch_size,))
    found: dict[str, dict[int, int]] = {}
    for index, op in enumerate(graph.ops):
        if op.phase != Phase.FORWARD or specials[index] != Special.LOCAL_STATISTICS:
            continue
        spans = of_groups[int(group[index])]
        counts = {
            device: min(row[device] for row in spans.shares if row[device])
            for device in spans.devices
            if any(row[device] for row in spans.shares)
        }
        found[op.module] = counts
    return found
