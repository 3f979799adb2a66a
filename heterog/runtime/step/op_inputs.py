"""The sources of tensors, and the placements in which ops need them, found once for all ranks."""

from functools import lru_cache
from typing import NamedTuple

from heterog.graph.axis_plan import BATCH_AXIS, axis_plan
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpRules, Placement


class Source(NamedTuple):
    """Where a tensor comes from, and how it is placed there.

    Attributes:
        maker: The op that makes it; -1 for a step input.
        output: Its position among the outputs of that op.
        is_view: Whether that op makes a view of its first input.
        in_batch: Placement along the batch.
        on_axis: Placement along the axis of the rule that made it, or along the batch.
        is_ruled: Whether a rule made it.
    """

    maker: int
    output: int
    is_view: bool
    in_batch: Placement
    on_axis: Placement
    is_ruled: bool


class Need(NamedTuple):
    """An input of an op, as the op needs it.

    Attributes:
        op: The op.
        position: Position among its inputs.
        tensor: The tensor.
        whole: How much of the tensor it needs; see ``AxisPlan.whole_needed``.
        in_batch: Needed placement along the batch.
        on_axis: Needed placement along the axis of the op's rule, or along the batch.
        is_ruled: Whether the op has a rule.
    """

    op: int
    position: int
    tensor: int
    whole: int
    in_batch: Placement
    on_axis: Placement
    is_ruled: bool


@lru_cache(maxsize=8)
def sources(graph: OpGraph, op_rules: OpRules = ()) -> tuple[Source, ...]:
    """The source of each tensor of a step.

    Args:
        graph: The captured step.
        op_rules: Rules of the strategy.
    """
    plan = axis_plan(graph, op_rules)
    starts, views = graph.output_start.tolist(), graph.is_view.tolist()
    axes = plan.tensor_axis.tolist()
    return tuple(
        Source(
            maker=maker,
            output=tensor - starts[maker] if maker >= 0 else tensor,
            is_view=maker >= 0 and views[maker],
            in_batch=plan.batch_placements[tensor],
            on_axis=plan.placements[tensor],
            is_ruled=axes[tensor] != BATCH_AXIS,
        )
        for tensor, maker in enumerate(graph.producer.tolist())
    )


@lru_cache(maxsize=8)
def needs(graph: OpGraph, op_rules: OpRules = ()) -> tuple[tuple[Need, ...], ...]:
    """The inputs of each op of a step.  # [num_ops][num_inputs]

    Args:
        graph: The captured step.
        op_rules: Rules of the strategy.
    """
    plan = axis_plan(graph, op_rules)
    return tuple(
        tuple(
            Need(
                op=index,
                position=position,
                tensor=tensor,
                whole=plan.whole_needed(index, position, tensor),
                in_batch=plan.batch_needed(index, position),
                on_axis=plan.needed[index][position],
                is_ruled=axis != BATCH_AXIS,
            )
            for position, tensor in enumerate(op.inputs)
        )
        for index, (op, axis) in enumerate(zip(graph.ops, plan.op_axis.tolist(), strict=True))
    )
