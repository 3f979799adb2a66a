"""Values that follow from the batch alone, which their readers make instead of receiving them.

Every device has the batch. A mask of pairs of positions, which the first stage of a pipeline makes
of a few numbers per sample, is a quarter of what is sent between stages at 4,096 tokens. The few
cheap ops that make it run again on the devices of each stage instead.
"""

from collections.abc import Sequence
from typing import NamedTuple

from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS, EVERYWHERE, AxisPlan
from heterog.graph.grouping import CONSTANT_GROUP
from heterog.graph.op_graph import IntArray, OpGraph, Phase, TensorKind
from heterog.graph.sharding_rules import Special
from heterog.memo import kept

MOST_WORK = 8.0
"""Most bytes that the ops move, and FLOPs that they do, per byte that is not sent: the memory of
an H100 moves 3,350 GB/s, its NVLink 450 GB/s in each direction, and other links are slower."""
BYTES_PER_LAUNCH = 2.0**16
"""Fewest bytes per op that are worth it: 100 Gbit/s moves as many in the 5 microseconds that a
launch takes."""
_HARMLESS = frozenset({None, Special.OWN_ROWS, Special.AS_RESHAPE})


class Remake(NamedTuple):
    """How a value is made where it is read.

    Attributes:
        ops: Graph ops, in program order; the last one makes the value.
        least_bytes: Size of what a device would receive from which this is worth it.
    """

    ops: tuple[int, ...]
    least_bytes: float


class Remakes:
    """Finds the ops by which values that follow from the batch are made where they are read.

    Args:
        graph: One training step.
        plan: Placements under the rules of a strategy.
        group: Group of each op.
        gathered: How much of its value is needed by the views through which each tensor shows it.
    """

    def __init__(
        self, graph: OpGraph, plan: AxisPlan, group: IntArray, gathered: Sequence[int]
    ) -> None:
        self._graph = graph
        self._plan = plan
        self._group = group
        self._gathered = gathered

    def of_value(self, tensor: int, moved_fraction: float) -> Remake | None:
        """The ops that make a value again; ``None`` if it is sent.

        Args:
            tensor: The value.
            moved_fraction: Fraction of it that readers elsewhere use.
        """
        graph = self._graph
        if self._plan.batch_placement(tensor).kind != "S":
            return None  # every device has as much of it, often a single number
        ops = self._ops(int(graph.producer[tensor]))
        if ops is None:
            return None
        size = moved_fraction * float(graph.tensor_bytes[tensor])
        work = max(float(each[list(ops)].sum()) for each in (graph.bytes_moved, graph.flops))
        if work > MOST_WORK * size:
            return None
        return Remake(tuple(sorted(ops)), len(ops) * BYTES_PER_LAUNCH)

    @kept
    def _ops(self, op: int) -> frozenset[int] | None:
        """An op and those before it that follow from the batch; ``None`` if not all do."""
        graph, plan = self._graph, self._plan
        axis = int(plan.op_axis[op])
        if not self._is_cheap(op) or (axis != BATCH_AXIS and plan.axes[axis] != EVERYWHERE):
            return None
        found = {op}
        for position, tensor in enumerate(graph.ops[op].inputs):
            storage = int(graph.storage[tensor])
            maker = int(graph.producer[storage])
            if maker < 0:
                if self._changes(storage):
                    return None
                continue
            if self._group[maker] == CONSTANT_GROUP:
                continue
            whole = max(self._gathered[tensor], plan.whole_needed(op, position, tensor))
            before = self._ops(maker)
            if whole != AS_MADE or plan.tensor_axis[storage] != axis or before is None:
                return None
            found |= before
        return frozenset(found)

    def _is_cheap(self, op: int) -> bool:
        """Whether an op does the same to each sample of the batch, wherever it runs."""
        plan, outputs = self._plan, self._graph.outputs[op]
        return (
            self._graph.ops[op].phase == Phase.FORWARD
            and len(outputs) > 0
            and all(plan.batch.follows_batch[tensor] for tensor in outputs)
            and plan.specials[op] in _HARMLESS
            and plan.batch.specials[op] in _HARMLESS
            and plan.scattered.isdisjoint(outputs)
        )

    def _changes(self, tensor: int) -> bool:
        """Whether an input of the step is a buffer that may be written during it."""
        if self._graph.tensors[tensor].kind != TensorKind.BUFFER:
            return False
        return any(
            self._graph.ops[reader].is_write
            or self._plan.batch.specials[reader] == Special.LOCAL_STATISTICS
            for reader in self._graph.readers(tensor)
        )
