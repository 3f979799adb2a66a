"""The number of samples in the statistics of each BatchNorm.

Without a sharding rule these are a replica's own samples. With a rule (channels are split, or
each member of a team computes the whole op) they are all samples of the team.
"""

import warnings

from heterog.graph.axis_plan import axis_plan
from heterog.graph.batch_plan import batch_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.sharding_rules import Special
from heterog.runtime.step.spans import spans_of_groups
from heterog.strategy.strategy import Strategy


def batch_norm_samples(graph: OpGraph, strategy: Strategy) -> dict[str, dict[int, int]]:
    """Find the fewest samples over which each BatchNorm takes its statistics on each device.

    Args:
        graph: The captured step.
        strategy: Strategy for that step.

    Returns:
        Number of samples by module path, then by device; the smallest micro-batch counts.
        Devices without samples, where the statistics never change, are left out.
    """
    warnings.warn(
        "batch_norm_samples goes with the next release, and nothing takes its place.",
        FutureWarning,
        stacklevel=2,
    )
    specials = batch_plan(graph).specials
    group = group_ops(graph).group
    plan = axis_plan(graph, strategy.op_rules)
    spans_of = spans_of_groups(strategy, plan.axes)
    found: dict[str, dict[int, int]] = {}
    for index, op in enumerate(graph.ops):
        if op.phase != Phase.FORWARD or specials[index] != Special.LOCAL_STATISTICS:
            continue
        spans = spans_of[int(plan.op_axis[index])][int(group[index])]
        seen: dict[int, list[int]] = {}
        for micro, shares in enumerate(spans.shares):
            for device, share in shares.items():
                if share:
                    seen.setdefault(device, []).append(spans.samples(micro, device)[1])
        found[op.module] = {device: min(counts) for device, counts in sorted(seen.items())}
    return found
