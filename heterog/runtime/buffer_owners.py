"""Whose running statistics count: those of the first device that computes the module."""

from typing import NamedTuple

from heterog.graph.axis_plan import BATCH_AXIS, axis_plan
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.graph.placement import Placement
from heterog.runtime.spans import Spans, spans_of_groups
from heterog.strategy.strategy import Strategy


class SplitBuffer(NamedTuple):
    """A buffer of which each member of a team steps its own units.

    Attributes:
        placement: of the units.
        spans: units of each device.
        members: of the owner's team, which together have all of it.
    """

    placement: Placement
    spans: Spans
    members: tuple[int, ...]


def buffer_owners(graph: OpGraph, strategy: Strategy) -> dict[str, int]:
    """The rank whose copy of each buffer counts, by the buffer's name.

    A module runs where its group is, so a rank that computes none of it has statistics that never
    change. What depends on no sample (counters) is computed wherever there are any.
    """
    group = group_ops(graph).group
    plan = axis_plan(graph, strategy.op_rules)
    spans = spans_of_groups(strategy, plan.axes)
    anywhere = min(map(_first, spans[BATCH_AXIS]))
    owners: dict[str, int] = {}
    for op, node in enumerate(graph.ops):
        own = int(group[op])
        of_op = int(plan.op_axis[op])
        for tensor in node.inputs:
            if graph.tensors[tensor].kind == TensorKind.BUFFER:
                owner = anywhere if own == CONSTANT_GROUP else _first(spans[of_op][own])
                owners.setdefault(graph.tensors[tensor].name, owner)
    return owners


def split_buffers(graph: OpGraph, strategy: Strategy) -> dict[str, SplitBuffer]:
    """The buffers that rules split, by name: their owner has its own units of them alone."""
    group = group_ops(graph).group
    plan = axis_plan(graph, strategy.op_rules)
    spans = spans_of_groups(strategy, plan.axes)
    found: dict[str, SplitBuffer] = {}
    for op, node in enumerate(graph.ops):
        axis = int(plan.op_axis[op])
        for tensor, place in zip(node.inputs, plan.needed[op], strict=True):
            meta = graph.tensors[tensor]
            if meta.kind != TensorKind.BUFFER or axis == BATCH_AXIS or place.kind != "S":
                continue
            own = spans[axis][int(group[op])]
            members = own.team_of(_first(own))
            found.setdefault(meta.name, SplitBuffer(place, own, members))
    return found


def _first(spans: Spans) -> int:
    """The first device that works on something in any micro-batch."""
    return next(d for d in spans.devices if any(shares[d] for shares in spans.shares))
