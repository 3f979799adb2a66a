"""Which devices step which parameters, and whether the optimizer trains right like that."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from heterog.graph.axis_plan import axis_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import IntArray, OpGraph, UpdateScope

if TYPE_CHECKING:
    from heterog.strategy.strategy import Strategy


def scope_fault(graph: OpGraph, strategy: "Strategy", scope: UpdateScope) -> str:
    """Why an optimizer of a scope would train otherwise under a strategy; empty if it does not.

    Args:
        graph: Graph that the strategy was made for, perhaps for an optimizer of another scope.
        strategy: Strategy in question.
        scope: What the optimizer looks at.
    """
    groups = [int(group_ops(graph).group[op]) for op, _, _ in graph.updates]
    decisions = [strategy.decisions[group] for group in groups]
    in_slices = any(each.sync.is_sharded and len(each.devices) > 1 for each in decisions)
    if scope != UpdateScope.ELEMENT and (in_slices or axis_plan(graph, strategy.op_rules).sharded):
        return f"it updates slices of parameters, but {needs_whole(graph, scope)}"
    if scope != UpdateScope.MODEL or not groups:
        return ""
    num_devices = 1 + max(max(each.devices) for each in strategy.decisions)
    num_devices = max(num_devices, 1 + max(strategy.homes))
    members = np.zeros((len(groups), num_devices), np.bool_)
    for row, decision in enumerate(decisions):
        members[row, list(decision.devices)] = True
    return apart_fault(graph, np.array(strategy.homes, np.int32), members)


def needs_whole(graph: OpGraph, scope: UpdateScope | None = None) -> str:
    """Why parameters have to be whole where they are updated.

    Args:
        graph: The graph.
        scope: What the optimizer looks at; by default that of the graph's.
    """
    if graph.written:
        name = graph.tensors[min(graph.written)].name
        return f"the step itself writes to '{name}', which has to be whole"
    return f"{graph.optimizer} {(scope or graph.scope).words}"


def apart_fault(graph: OpGraph, homes: IntArray, members: npt.NDArray[np.bool_]) -> str:
    """Why an optimizer that looks at all parameters would not see all; empty if it does.

    Args:
        graph: The graph.
        homes: Device that updates each parameter, negative if all members do.
            # [num_parameters]
        members: Devices that hold each parameter.  # [num_parameters, num_devices]
    """
    steps = members.copy()
    served = np.flatnonzero(homes >= 0)
    steps[served] = False
    steps[served, homes[served]] = True
    if (steps == steps[:1]).all():
        return ""
    counts = steps.sum(axis=0)
    device = int(np.where(counts > 0, counts, len(steps) + 1).argmin())
    return (
        f"{graph.optimizer} {UpdateScope.MODEL.words}, but device {device} would step "
        f"{counts[device]} of {len(steps)}: each device that steps any has to step all of them, "
        "as in data parallelism, or one server does"
    )
