"""Which values every op reads, and in which form: as they were made, or through a slot.

A *slot* is one converted form of a value: for another group, along another axis, or whole although
it was made in parts.

``Recut`` says how a team changes the cut of an op's output as soon as it is made.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum

from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS, IN_TEAM, AxisPlan
from heterog.graph.grouping import CONSTANT_GROUP, Grouping
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.sharding_rules import Special
from heterog.graph.sharding_rules.matmul import ATTENTION_KINDS

ANY_PASS, FORWARD_PASS, BACKWARD_PASS = 0, 1, 2
"""Readers that a slot serves: all, or those of one pass. Slots of one pass are for values that a
team gathers, slices of sums or the keys and values of all positions: the backward pass gathers
them again, so that no device keeps the whole in between (Korthikanti et al. 2022, section
4.2.2)."""

WindowRow = tuple[int, int, int, int]
"""A window in the kernel's form: its three numbers, and the total number of rows.

All 0 for slots that need no rows of others. If a sparse matrix names the rows, the first number is
-1 minus the number of the matrix in ``SparseTables``."""
NO_WINDOW: WindowRow = (0, 0, 0, 0)
Slot = tuple[int, int, int, int, int, WindowRow]
"""Value, reading group, how much of the value is needed, axis and pass of the readers, window."""


class ValueReads:
    """How the ops of a graph read values.

    Args:
        graph: One training step.
        plan: Placements of its tensors.
        grouping: Groups of its ops.
        block: First group of each group's block.
        value_of: Number of each value, by the tensor that owns its memory.
        parameter_row: Number of each trained parameter, by tensor.

    Attributes:
        gathered: For each tensor that is a view, how much of the viewed value its views need.
        matrices: Number of each (sparse matrix, axis) whose rows are cut, for ops given to ``of``.
        outside: Tensors (views) by which other groups read a value, for ops given to ``of``.
    """

    def __init__(
        self,
        graph: OpGraph,
        plan: AxisPlan,
        grouping: Grouping,
        block: Sequence[int],
        value_of: Mapping[int, int],
        parameter_row: Mapping[int, int],
    ) -> None:
        self.graph, self.plan, self.grouping, self.block = graph, plan, grouping, block
        self.value_of, self.parameter_row = value_of, parameter_row
        # Lists: looking up a single element is faster than in an array.
        self._group, self._axis = grouping.group.tolist(), plan.op_axis.tolist()
        self._storage, self._producer = graph.storage.tolist(), graph.producer.tolist()
        self.gathered = self._gathered_views()
        self.matrices: dict[tuple[str, int], int] = {}
        self.outside: dict[int, set[int]] = {}

    def of(self, index: int) -> tuple[list[tuple[int, Slot | None]], list[int]]:
        """Values and parameters that a compute op reads, each once per way of reading it."""
        graph, plan = self.graph, self.plan
        group, axis = self._group[index], self._axis[index]
        entries: dict[tuple[int, Slot | None], None] = {}
        parameters: dict[int, None] = {}
        for position, tensor in enumerate(graph.ops[index].inputs):
            storage = self._storage[tensor]
            if storage in self.parameter_row:
                parameters.setdefault(self.parameter_row[storage])
            if storage not in self.value_of:
                continue
            value = self.value_of[storage]
            maker = self._group[self._producer[storage]]
            whole = max(self.gathered[tensor], plan.whole_needed(index, position, tensor))
            is_near = maker != CONSTANT_GROUP and self.block[maker] == self.block[group]
            if maker != CONSTANT_GROUP and not is_near:
                self.outside.setdefault(storage, set()).add(tensor)
            window = self._window(index, position, tensor)
            is_cut_alike = whole == AS_MADE and plan.tensor_axis[storage] == axis
            if maker == CONSTANT_GROUP or (is_near and is_cut_alike and window == NO_WINDOW):
                entries.setdefault((value, None))
            else:
                readers = self._pass_of_readers(index, storage, whole)
                entries.setdefault((value, (value, group, whole, axis, readers, window)))
        return list(entries), list(parameters)

    def _gathered_views(self) -> list[int]:
        """Make ``gathered``."""
        graph, plan = self.graph, self.plan
        gathered = [AS_MADE] * len(graph.tensors)
        for index, op in enumerate(graph.ops):
            if graph.is_view[index]:
                source = op.inputs[0]
                whole = max(gathered[source], plan.whole_needed(index, 0, source))
                for tensor in graph.outputs[index]:
                    gathered[tensor] = whole
        return gathered

    def _window(self, index: int, position: int, tensor: int) -> WindowRow:
        """The rows that an op reads, if its device may lack some of them."""
        plan, graph = self.plan, self.graph
        needed = plan.needed[index][position]
        if needed.kind != "H" or not plan.is_brought(index, position, tensor):
            return NO_WINDOW
        size = graph.tensors[tensor].shape[needed.dim]
        if needed.pattern:
            matrix = needed.pattern, int(plan.op_axis[index])
            number = self.matrices.setdefault(matrix, len(self.matrices))
            return -1 - number, 0, 0, size
        window, own = needed.window, size // plan.axes[int(plan.op_axis[index])]
        assert window is not None
        is_there = window.step == own and max(window.before, window.after) <= 0
        return NO_WINDOW if is_there else (*window, size)

    def _pass_of_readers(self, reader: int, storage: int, whole: int) -> int:
        """The passes whose readers share the conversion of a value for one reader."""
        graph, plan = self.graph, self.plan
        is_gathered = whole == IN_TEAM and plan.placements[storage].kind == "S"
        axis = int(plan.tensor_axis[storage])
        # Attention along positions reads the keys and values of all positions.
        is_context = graph.ops[reader].kind in ATTENTION_KINDS and axis != BATCH_AXIS
        if not is_gathered or not (is_context or axis in plan.scatter_axes):
            return ANY_PASS
        if graph.ops[int(graph.producer[storage])].phase == Phase.BACKWARD:
            return ANY_PASS
        is_backward = graph.ops[reader].phase == Phase.BACKWARD
        return BACKWARD_PASS if is_backward else FORWARD_PASS


_LEAST_BYTES = 4


class Recut(IntEnum):
    """How a team changes the cut of an op's only output as soon as it is made."""

    NONE = 0
    SUMMED = 1
    """Parts of a sum become slices: a reduce-scatter."""
    EXCHANGED = 2
    """Slices along one axis become slices along another: an all-to-all."""
    COMPLETED = 3
    """Slices are completed by one number per row from each member: an all-gather."""


def recut_of(graph: OpGraph, plan: AxisPlan, op: int) -> Recut:
    """How a team changes the cut of an op's outputs."""
    made = graph.outputs[op]
    if plan.specials[op] == Special.NUMBERS_OF_ROWS:
        return Recut.COMPLETED
    if plan.scattered.intersection(made):
        return Recut.SUMMED
    return Recut.EXCHANGED if plan.exchanged.keys() & set(made) else Recut.NONE


def row_bytes(graph: OpGraph, plan: AxisPlan, tensor: int) -> float:
    """Bytes of one number per row of a value that members complete, in float32 at least."""
    meta = graph.tensors[tensor]
    num_rows = meta.num_elements / meta.shape[plan.placements[tensor].dim]
    return num_rows * max(item_bytes(graph, tensor), _LEAST_BYTES)


def item_bytes(graph: OpGraph, tensor: int) -> int:
    """Bytes of each element of a tensor; 0 if it is not of floating-point numbers."""
    meta = graph.tensors[tensor]
    if "float" not in meta.dtype or not meta.num_elements:
        return 0
    return int(graph.tensor_bytes[tensor]) // meta.num_elements
