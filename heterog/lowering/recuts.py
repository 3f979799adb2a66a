"""How a team changes what an op makes, as soon as it is made."""

from enum import IntEnum

from heterog.graph.axis_plan import AxisPlan
from heterog.graph.op_graph import OpGraph
from heterog.graph.sharding_rules import Special

_LEAST_BYTES = 4


class Recut(IntEnum):
    """How a team changes the cut of an op's only output as soon as it is made."""

    NONE = 0
    SUMMED = 1
    """Parts of a sum become slices: a reduce-scatter."""
    EXCHANGED = 2
    """Slices along one axis become slices along another: an all-to-all."""
    COMPLETED = 3
    """Slices are made once a number of each row of all members is there: an all-gather."""


def recut_of(graph: OpGraph, plan: AxisPlan, op: int) -> Recut:
    """How a team changes what an op makes."""
    made = graph.outputs[op]
    if plan.specials[op] == Special.NUMBERS_OF_ROWS:
        return Recut.COMPLETED
    if plan.scattered.intersection(made):
        return Recut.SUMMED
    return Recut.EXCHANGED if plan.exchanged.keys() & set(made) else Recut.NONE


def row_bytes(graph: OpGraph, plan: AxisPlan, tensor: int) -> float:
    """Bytes of a number of each row, in float32 at least, where a team gathers these."""
    if recut_of(graph, plan, int(graph.producer[tensor])) != Recut.COMPLETED:
        return 0.0
    meta = graph.tensors[tensor].meta
    num_rows = meta.num_elements / meta.shape[plan.placements[tensor].dim]
    return num_rows * max(item_bytes(graph, tensor), _LEAST_BYTES)


def item_bytes(graph: OpGraph, tensor: int) -> int:
    """Bytes of each element of a tensor; 0 if it has no floating-point numbers."""
    meta = graph.tensors[tensor]
    if "float" not in meta.dtype or not meta.meta.num_elements:
        return 0
    return int(graph.tensor_bytes[tensor]) // meta.meta.num_elements
