"""What the lowering kernel knows about a graph, in flat integer arrays, computed once.

Views are gone here: a tensor is named by the *value* that owns its memory, an output of a compute
op. A *slot* is one way in which a value is needed somewhere else than where it was made: by
another group, along another axis, or whole although it was made in parts.
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.errors import StrategyError
from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS, EVERYTHING, IN_TEAM, AxisPlan, axis_plan
from heterog.graph.grouping import CONSTANT_GROUP, Grouping, group_ops
from heterog.graph.op_costs import REORDERS_WEIGHTS
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.op_rule import OpRules
from heterog.graph.placement import Placement
from heterog.graph.sharding_rules.loss import LABEL_COUNTING_LOSSES
from heterog.strategy.recomputation import Recomputation, recomputations

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]

KIND_NUMBER = {"R": 0, "S": 1, "P": 2, "L": 3}


class Domain(IntEnum):
    """Over which devices the gradients of a parameter are added up."""

    NOBODY = -1
    """Each device has the whole gradient already."""
    ALL = 0
    """Each device has a part."""
    PEERS = 1
    """The members of a team have the same, each team has a part."""
    TEAM = 2
    """Each member of a team has a part, all teams have the same sum."""
    SLICES = 3
    """Each team has a part, of which its members hold slices along the first axis after the
    batch; along the next axes the numbers after this one."""


class GraphTables(NamedTuple):
    """Flat view of a graph for the kernels; one row per compute op, value, slot, parameter."""

    batch_size: int
    num_groups: int
    axis_units: IntArray  # the batch first; EVERYWHERE for ops that split nothing
    # Compute ops: neither views nor updates, in program order.
    op_id: IntArray  # graph op of each compute op
    op_group: IntArray  # CONSTANT_GROUP for constants
    op_axis: IntArray
    value_start: IntArray  # values made by each compute op  # [num_compute_ops + 1]
    read_start: IntArray  # value reads of each compute op  # [num_compute_ops + 1]
    read_value: IntArray
    read_slot: IntArray  # -1: the value as it lies in the reader's own group
    parameter_read_start: IntArray  # parameters read by each compute op  # [num_compute_ops + 1]
    parameter_read: IntArray
    finished_start: IntArray  # parameters that each op finishes: gradient made, last read done
    finished_parameter: IntArray
    # Recomputation; see ``recomputation``.
    op_is_backward: IntArray
    op_is_weights: IntArray  # 1: of the backward pass, and no other group waits for it
    op_recomputes: IntArray  # 1: before it its group's recomputation happens, if it has one
    recompute_start: IntArray  # ops that each group runs again  # [num_groups + 1]
    recompute_op: IntArray
    # Values.
    value_op: IntArray
    value_tensor: IntArray  # graph tensor of each value
    value_kind: IntArray  # KIND_NUMBER of the placement
    value_bytes: FloatArray  # size where it does not depend on the share
    value_bytes_per_unit: FloatArray  # of its op's axis
    value_moved_fraction: FloatArray  # part of the value that other groups read
    value_batch_kind: IntArray  # KIND_NUMBER along the batch: between teams if a rule made it
    value_is_outermost: IntArray  # 1 if units are contiguous in memory
    value_batch_is_outermost: IntArray  # 1 if samples are
    value_is_early: IntArray  # 1 if it follows from the batch alone, before any op has run
    value_slot_start: IntArray  # slots of each value  # [num_values + 1]
    # Slots, sorted by value.
    slot_value: IntArray
    slot_group: IntArray
    slot_whole: IntArray  # AS_MADE, IN_TEAM or EVERYTHING
    slot_axis: IntArray  # of the reader
    # Parameters, in the order of OpGraph.updates.
    parameter_group: IntArray
    parameter_bytes: FloatArray
    parameter_workspace: FloatArray  # bytes that a kernel needs beside it while it reads it
    parameter_gradient: IntArray  # value that holds the gradient
    parameter_last_value: IntArray  # value made by an op that reads it after that, -1 if none
    reader_start: IntArray  # values made by readers of each parameter  # [num_parameters + 1]
    reader_value: IntArray  # listed only under op rules, where readers may run on other devices
    gradient_domain: IntArray  # which devices' gradients are added up; see ``Domain``
    gradient_slot: IntArray  # where a gradient made in parts is whole, -1 if it need not be
    parameter_axis: IntArray  # of parameters that live in slices, -1 for whole ones
    parameter_units: FloatArray  # of that axis, 1 for whole ones
    parameter_tensor: IntArray
    # Bytes that stay on a device: what every device holds, what comes with the batch.
    common_bytes: float
    input_bytes_per_sample: float
    group_reads_team: IntArray  # 1: an op with a rule reads the samples of its team of the batch
    batch_is_whole: bool  # some op reads samples that its device has no share of
    state_ratio: float


@lru_cache(maxsize=64)
def graph_tables(
    graph: OpGraph, op_rules: OpRules = (), blocks: tuple[int, ...] = ()
) -> GraphTables:
    """Build the tables of a graph whose ops run by some rules, and whose groups form blocks.

    Args:
        graph: one training step.
        op_rules: see ``Strategy``.
        blocks: see ``Strategy``.
    """
    return _Builder(graph, axis_plan(graph, op_rules), group_ops(graph), blocks).build()


_Slot = tuple[int, int, int, int]
"""(value, reading group, how much of it is needed, the reader's axis)."""


class _Builder:
    def __init__(
        self, graph: OpGraph, plan: AxisPlan, grouping: Grouping, blocks: tuple[int, ...]
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.grouping = grouping
        # First group of each group's block, whose groups lie alike and recompute together.
        self.block = block_of_groups(grouping.num_groups, blocks)
        self.ops = [
            index
            for index, op in enumerate(graph.ops)
            if not graph.is_view[index] and op.phase != Phase.UPDATE
        ]
        # An op without outputs or effects was removed by capture; imported graphs may have some.
        self.value_of: dict[int, int] = {}
        self.values: list[int] = []
        for index in self.ops:
            for tensor in graph.outputs(index):
                self.value_of[tensor] = len(self.values)
                self.values.append(tensor)
        self.gathered = self._gathered_views()

    def _gathered_views(self) -> list[int]:
        """How much of a value the views need through which each tensor looks at it."""
        graph, plan = self.graph, self.plan
        gathered = [AS_MADE] * len(graph.tensors)
        for index, op in enumerate(graph.ops):
            if graph.is_view[index]:
                source = op.inputs[0]
                whole = max(gathered[source], plan.whole_needed(index, 0, source))
                for tensor in graph.outputs(index):
                    gathered[tensor] = whole
        return gathered

    def build(self) -> GraphTables:
        graph, plan = self.graph, self.plan
        row_of = {op: row for row, op in enumerate(self.ops)}
        parameter_row = {parameter: row for row, (_, parameter, _) in enumerate(graph.updates)}
        slots: dict[_Slot, None] = {}
        reads: list[list[tuple[int, _Slot | None]]] = []
        parameter_reads: list[list[int]] = []
        outside: dict[int, set[int]] = {}
        for index in self.ops:
            entries, parameters = self._reads_of(index, parameter_row, outside)
            for _, slot in entries:
                if slot is not None:
                    slots.setdefault(slot)
            reads.append(entries)
            parameter_reads.append(parameters)
        for _, parameter, gradient in graph.updates:
            slot = self._gradient_slot(parameter, gradient)
            if slot is not None:
                slots.setdefault(slot)
        ordered = sorted(slots)
        slot_number = {slot: number for number, slot in enumerate(ordered)}
        last_read = {
            parameter: row
            for row, parameters in enumerate(parameter_reads)
            for parameter in parameters
        }
        finished: list[list[int]] = [[] for _ in self.ops]
        gradient_values: list[int] = []
        gradient_slots: list[int] = []
        last_values: list[int] = []
        for row, (_, parameter, gradient) in enumerate(graph.updates):
            storage = int(graph.storage[gradient])
            if storage not in self.value_of:
                raise StrategyError(
                    f"the gradient of '{graph.tensors[parameter].name}' is not made by any op."
                )
            gradient_values.append(self.value_of[storage])
            slot = self._gradient_slot(parameter, gradient)
            gradient_slots.append(-1 if slot is None else slot_number[slot])
            made = row_of[int(graph.producer[storage])]
            # An update overwrites the parameter: it must wait for ops that read it after its
            # gradient is made (the other product of a batched matrix product, say).
            last = max(made, last_read.get(row, -1))
            outputs = graph.outputs(self.ops[last])
            last_values.append(self.value_of[outputs[0]] if last > made and outputs else -1)
            finished[last].append(row)
        op_group = [int(self.grouping.group[index]) for index in self.ops]
        is_backward = [graph.ops[index].phase == Phase.BACKWARD for index in self.ops]
        value_op = [row_of[int(graph.producer[tensor])] for tensor in self.values]
        again = self._by_group_of_reader(
            recomputations(
                [self.block[group] if group >= 0 else group for group in op_group],
                is_backward,
                [
                    [value_op[value] for value, slot in entries if slot is None]
                    for entries in reads
                ],
                [value_op[value] for value in gradient_values],
                self.grouping.num_groups,
            ),
            op_group,
        )
        recomputing = {each.reader for each in again if each.ops}
        kinds = [KIND_NUMBER[plan.placements[tensor].kind] for tensor in self.values]
        sizes = graph.tensor_bytes[self.values].astype(np.float64)
        split = np.array(kinds) == KIND_NUMBER["S"]
        units = np.array([max(plan.axes[plan.tensor_axis[tensor]], 1) for tensor in self.values])
        sharded = [parameter in plan.sharded for _, parameter, _ in graph.updates]
        parameter_axis = [
            int(plan.tensor_axis[parameter]) if parameter in plan.sharded else -1
            for _, parameter, _ in graph.updates
        ]
        readers: list[list[int]] = [[] for _ in graph.updates]
        if len(plan.axes) > 1:
            for index, parameters in zip(self.ops, parameter_reads, strict=True):
                for parameter in parameters:
                    readers[parameter].extend(self.value_of[t] for t in graph.outputs(index)[:1])
        workspace = np.zeros(len(graph.updates))
        for index, parameters in zip(self.ops, parameter_reads, strict=True):
            if graph.ops[index].kind in REORDERS_WEIGHTS:
                for row in parameters:
                    workspace[row] = float(graph.tensor_bytes[graph.updates[row][1]])
        batch_bytes = float(
            sum(graph.tensor_bytes[tensor] for tensor in graph.inputs_of_kind(TensorKind.BATCH))
        )
        batch_whole = self._batch_is_read_whole()
        return GraphTables(
            batch_size=graph.batch_size,
            num_groups=self.grouping.num_groups,
            axis_units=_ints(list(plan.axes)),
            op_id=_ints(self.ops),
            op_group=_ints(op_group),
            op_axis=_ints([int(plan.op_axis[index]) for index in self.ops]),
            value_start=_starts([graph.ops[index].num_outputs for index in self.ops]),
            read_start=_starts([len(entries) for entries in reads]),
            read_value=_ints([value for entries in reads for value, _ in entries]),
            read_slot=_ints(
                [-1 if s is None else slot_number[s] for entries in reads for _, s in entries]
            ),
            parameter_read_start=_starts([len(rows) for rows in parameter_reads]),
            parameter_read=_ints([row for rows in parameter_reads for row in rows]),
            finished_start=_starts([len(rows) for rows in finished]),
            finished_parameter=_ints([row for rows in finished for row in rows]),
            op_is_backward=_ints([int(flag) for flag in is_backward]),
            op_is_weights=_ints(self._makes_weights_only(reads, is_backward, gradient_values)),
            op_recomputes=_ints([int(row in recomputing) for row in range(len(self.ops))]),
            recompute_start=_starts([len(each.ops) for each in again]),
            recompute_op=_ints([row for each in again for row in each.ops]),
            value_op=_ints(value_op),
            value_tensor=_ints(self.values),
            value_kind=_ints(kinds),
            value_bytes=np.where(split, 0.0, sizes),
            value_bytes_per_unit=np.where(split, sizes / units, 0.0),
            value_moved_fraction=np.array(
                [self._moved_fraction(tensor, outside) for tensor in self.values]
            ),
            value_batch_kind=_ints(
                [KIND_NUMBER[plan.batch_placement(tensor).kind] for tensor in self.values]
            ),
            value_is_outermost=_ints([_is_outermost(plan.placements[t]) for t in self.values]),
            value_batch_is_outermost=_ints(
                [_is_outermost(plan.batch_placement(t)) for t in self.values]
            ),
            value_is_early=_ints([int(self._is_early(tensor)) for tensor in self.values]),
            value_slot_start=np.searchsorted(
                [slot[0] for slot in ordered], np.arange(len(self.values) + 1)
            ).astype(np.int32),
            slot_value=_ints([slot[0] for slot in ordered]),
            slot_group=_ints([slot[1] for slot in ordered]),
            slot_whole=_ints([slot[2] for slot in ordered]),
            slot_axis=_ints([slot[3] for slot in ordered]),
            parameter_group=_ints([int(self.grouping.group[op]) for op, _, _ in graph.updates]),
            parameter_bytes=np.array(
                [float(graph.tensor_bytes[parameter]) for _, parameter, _ in graph.updates]
            ),
            parameter_workspace=workspace,
            parameter_gradient=_ints(gradient_values),
            parameter_last_value=_ints(last_values),
            gradient_domain=_ints(list(map(self._domain, gradient_values, parameter_axis))),
            reader_start=_starts([len(values) for values in readers]),
            reader_value=_ints([value for values in readers for value in values]),
            gradient_slot=_ints(gradient_slots),
            parameter_axis=_ints(parameter_axis),
            parameter_units=np.array(
                [
                    float(plan.axes[axis]) if in_slices else 1.0
                    for axis, in_slices in zip(parameter_axis, sharded, strict=True)
                ]
            ),
            parameter_tensor=_ints([parameter for _, parameter, _ in graph.updates]),
            common_bytes=(batch_bytes if batch_whole else 0.0)
            + float(
                sum(
                    graph.tensor_bytes[tensor]
                    for tensor in (
                        *graph.inputs_of_kind(TensorKind.BUFFER),
                        *graph.inputs_of_kind(TensorKind.CONSTANT),
                        *(p for p in graph.parameters if p not in parameter_row),
                    )
                )
            ),
            group_reads_team=self._groups_that_read_for_teams(),
            batch_is_whole=batch_whole,
            input_bytes_per_sample=0.0 if batch_whole else batch_bytes / graph.batch_size,
            state_ratio=graph.optimizer_state_ratio,
        )

    def _by_group_of_reader(
        self, again: list[Recomputation], op_group: list[int]
    ) -> list[Recomputation]:
        """The recomputation of each block where the kernel looks for it: its reader's group."""
        found = [Recomputation(-1, ())] * self.grouping.num_groups
        for each in again:
            if each.reader >= 0:
                found[op_group[each.reader]] = each
        return found

    def _reads_of(
        self, index: int, parameter_row: dict[int, int], outside: dict[int, set[int]]
    ) -> tuple[list[tuple[int, _Slot | None]], list[int]]:
        """Values and parameters that a compute op reads, each once per way of reading it."""
        graph, plan = self.graph, self.plan
        group, axis = int(self.grouping.group[index]), int(plan.op_axis[index])
        entries: dict[tuple[int, _Slot | None], None] = {}
        parameters: dict[int, None] = {}
        for position, tensor in enumerate(graph.ops[index].inputs):
            storage = int(graph.storage[tensor])
            if storage in parameter_row:
                parameters.setdefault(parameter_row[storage])
            if storage not in self.value_of:
                continue
            value = self.value_of[storage]
            producer = int(graph.producer[storage])
            maker = int(self.grouping.group[producer])
            whole = max(self.gathered[tensor], plan.whole_needed(index, position, tensor))
            is_near = maker != CONSTANT_GROUP and self.block[maker] == self.block[group]
            if maker != CONSTANT_GROUP and not is_near:
                outside.setdefault(storage, set()).add(tensor)
            as_made = is_near and whole == AS_MADE and plan.op_axis[producer] == axis
            if maker == CONSTANT_GROUP or as_made:
                entries.setdefault((value, None))
            else:
                entries.setdefault((value, (value, group, whole, axis)))
        return list(entries), list(parameters)

    def _makes_weights_only(
        self,
        reads: list[list[tuple[int, _Slot | None]]],
        is_backward: list[bool],
        gradient_values: list[int],
    ) -> list[int]:
        """Ops of the backward pass whose results lead to gradients of their own group alone."""
        graph = self.graph
        groups = [int(self.grouping.group[index]) for index in self.ops]
        maker = [row for row, index in enumerate(self.ops) for _ in graph.outputs(index)]
        leads_on = [False] * len(
            self.values
        )  # another group or an op that is not such a one reads
        gradients = set(gradient_values)
        flags = [0] * len(self.ops)
        for row in range(len(self.ops) - 1, -1, -1):
            made = [self.value_of[tensor] for tensor in graph.outputs(self.ops[row])]
            if is_backward[row] and not any(leads_on[value] for value in made):
                # An op that nothing reads but that makes no gradient either is left where it is.
                flags[row] = int(any(value in gradients or self._is_read(value) for value in made))
            for value, _ in reads[row]:
                if not flags[row] or groups[maker[value]] != groups[row]:
                    leads_on[value] = True
        return flags

    def _is_read(self, value: int) -> bool:
        return bool(self.graph.consumers[self.values[value]])

    def _gradient_slot(self, parameter: int, gradient: int) -> _Slot | None:
        """Where the gradient of a whole parameter is whole that was made in parts."""
        storage = int(self.graph.storage[gradient])
        made = self.plan.placements[storage]
        if made.kind != "S" or parameter in self.plan.sharded or storage not in self.value_of:
            return None
        maker = int(self.graph.producer[storage])
        group, axis = int(self.grouping.group[maker]), int(self.plan.op_axis[maker])
        whole = EVERYTHING if axis == BATCH_AXIS else IN_TEAM
        return self.value_of[storage], group, whole, axis

    def _domain(self, value: int, parameter_axis: int) -> int:
        """The ``Domain`` of a gradient, by the value that holds it."""
        plan, tensor = self.plan, self.values[value]
        over_teams = plan.batch_placement(tensor).kind == "P"
        if plan.tensor_axis[tensor] == BATCH_AXIS:
            return Domain.ALL if over_teams else Domain.NOBODY
        if plan.placements[tensor].kind == "P":
            return Domain.ALL if over_teams else Domain.TEAM
        if not over_teams:
            return Domain.NOBODY
        return Domain.SLICES + parameter_axis - 1 if parameter_axis >= 0 else Domain.PEERS

    def _batch_is_read_whole(self) -> bool:
        """Whether an op needs samples that it has no share of."""
        graph, plan = self.graph, self.plan
        inputs = set(graph.inputs_of_kind(TensorKind.BATCH))
        return any(
            max(self.gathered[tensor], plan.whole_needed(index, position, tensor)) == EVERYTHING
            for index in self.ops
            for position, tensor in enumerate(graph.ops[index].inputs)
            if int(graph.storage[tensor]) in inputs
        )

    def _groups_that_read_for_teams(self) -> IntArray:
        graph, plan = self.graph, self.plan
        inputs = set(graph.inputs_of_kind(TensorKind.BATCH))
        found = np.zeros(self.grouping.num_groups, np.int32)
        for index in self.ops:
            is_read = any(int(graph.storage[each]) in inputs for each in graph.ops[index].inputs)
            if is_read and plan.op_axis[index] != BATCH_AXIS:
                found[self.grouping.group[index]] = 1
        return found

    def _is_early(self, tensor: int) -> bool:
        """Whether a value is the number of labels that count.

        It is an output of the loss, but follows from the labels alone, and these from the batch
        (``batch_plan`` runs a loss on gathered inputs where they do not). Summed over the devices
        before the step, it lets each device begin its backward pass as soon as it can; summed
        where the loss makes it, all would wait there for the slowest.
        """
        maker = int(self.graph.producer[tensor])
        return (
            self.graph.ops[maker].kind in LABEL_COUNTING_LOSSES
            and tensor == self.graph.outputs(maker)[1]
        )

    def _moved_fraction(self, storage: int, outside: dict[int, set[int]]) -> float:
        """Part of a value that readers outside its group look at (a slice of it, say)."""
        seen = sum(int(self.graph.tensor_bytes[tensor]) for tensor in outside.get(storage, ()))
        size = int(self.graph.tensor_bytes[storage])
        return min(seen / size, 1.0) if size and seen else 1.0


def _is_outermost(place: Placement) -> bool:
    return place.dim == 0 and place.outer == 1


def block_of_groups(num_groups: int, blocks: Sequence[int]) -> tuple[int, ...]:
    """The first group of each group's block.

    >>> block_of_groups(5, (0, 3)), block_of_groups(3, ())
    ((0, 0, 0, 3, 3), (0, 1, 2))
    """
    if not blocks:
        return tuple(range(num_groups))
    first = np.array(blocks)[np.searchsorted(blocks, np.arange(num_groups), side="right") - 1]
    return tuple(int(group) for group in first)


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, np.int32)


def _starts(counts: list[int]) -> IntArray:
    return np.concatenate([[0], np.cumsum(np.array(counts, np.int64))]).astype(np.int32)
