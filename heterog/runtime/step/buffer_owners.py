"""Owners of buffers: running statistics are those of the first device that runs the module."""

from typing import NamedTuple

from heterog.graph.axis_plan import BATCH_AXIS, axis_plan
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.graph.placement import Placement
from heterog.runtime.step.spans import Spans, spans_of_groups
from heterog.strategy.strategy import Strategy


class SplitBuffer(NamedTuple):
    """A buffer of which each member of a team updates its own units.

    Attributes:
        placement: Position of the units in the buffer.
        spans: Units of each device.
        members: Members of the owner's team, which together hold all units.
    """

    placement: Placement
    spans: Spans
    members: tuple[int, ...]


class Buffers(NamedTuple):
    """Rank whose copy of each buffer counts, by name of the buffer.

    Attributes:
        owners: Rank whose copy counts.
        split: Buffers that rules split; their owner holds only its own units of them.
    """

    owners: dict[str, int]
    split: dict[str, SplitBuffer]


def buffers_of(graph: OpGraph, strategy: Strategy) -> Buffers:
    """Find which rank's copy of each buffer counts.

    A module runs where its group is, so a rank that computes none of it has statistics that never
    change. A constant that is made of a buffer is made everywhere; whoever writes the buffer then
    says where it changes. Buffers that depend on no sample (counters) are updated wherever there
    are samples.
    """
    group = group_ops(graph).group
    plan = axis_plan(graph, strategy.op_rules)
    spans = spans_of_groups(strategy, plan.axes)
    anywhere = min(map(_first, spans[BATCH_AXIS]))
    found = Buffers({}, {})
    constant: dict[str, int] = {}
    for op, node in enumerate(graph.ops):
        own, axis = int(group[op]), int(plan.op_axis[op])
        for tensor, place in zip(node.inputs, plan.needed[op], strict=True):
            name = graph.tensors[tensor].name
            if graph.tensors[tensor].kind != TensorKind.BUFFER:
                continue
            if own == CONSTANT_GROUP:
                constant.setdefault(name, anywhere)
                continue
            found.owners.setdefault(name, _first(spans[axis][own]))
            if axis != BATCH_AXIS and place.kind == "S":
                of_group = spans[axis][own]
                owner = found.owners[name]
                found.split.setdefault(name, SplitBuffer(place, of_group, of_group.team_of(owner)))
    return Buffers(constant | found.owners, found.split)


def _first(spans: Spans) -> int:
    """The first device that has work in any micro-batch."""
    return next(d for d in spans.devices if any(shares[d] for shares in spans.shares))
