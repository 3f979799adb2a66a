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


class Buffers(NamedTuple):
    """Whose copies of buffers count, by the buffers' names.

    Attributes:
        owners: the rank whose copy counts.
        split: those that rules split: their owner has its own units of them alone.
    """

    owners: dict[str, int]
    split: dict[str, SplitBuffer]


def buffers_of(graph: OpGraph, strategy: Strategy) -> Buffers:
    """Whose copy of each buffer counts.

    A module runs where its group is, so a rank that computes none of it has statistics that never
    change. What depends on no sample (counters) is computed wherever there are any.
    """
    group = group_ops(graph).group
    plan = axis_plan(graph, strategy.op_rules)
    spans = spans_of_groups(strategy, plan.axes)
    anywhere = min(map(_first, spans[BATCH_AXIS]))
    found = Buffers({}, {})
    for op, node in enumerate(graph.ops):
        own, axis = int(group[op]), int(plan.op_axis[op])
        for tensor, place in zip(node.inputs, plan.needed[op], strict=True):
            name = graph.tensors[tensor].name
            if graph.tensors[tensor].kind != TensorKind.BUFFER:
                continue
            owner = anywhere if own == CONSTANT_GROUP else _first(spans[axis][own])
            found.owners.setdefault(name, owner)
            if axis != BATCH_AXIS and place.kind == "S":
                of_group = spans[axis][own]
                found.split.setdefault(name, SplitBuffer(place, of_group, of_group.team_of(owner)))
    return found


def _first(spans: Spans) -> int:
    """The first device that works on something in any micro-batch."""
    return next(d for d in spans.devices if any(shares[d] for shares in spans.shares))
