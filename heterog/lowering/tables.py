"""The graph in flat integer arrays for the lowering kernel, computed once.

There are no views here: a tensor is named by the *value* that owns its memory, an output of a
compute op. A *slot* is one converted form of a value: for another group, along another axis, or
whole although it was made in parts.
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterog.errors import StrategyError
from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS, EVERYTHING, IN_TEAM, AxisPlan, axis_plan
from heterog.graph.grouping import CONSTANT_GROUP, Grouping, group_ops
from heterog.graph.op_costs import REORDERS_WEIGHTS
from heterog.graph.op_graph import FloatArray, IntArray, OpGraph, Phase, TensorKind
from heterog.graph.placement import ITEM_BYTES, OpRules, Placement
from heterog.graph.sharding_rules.reduction import LABEL_COUNTING_LOSSES
from heterog.grouped import grouped
from heterog.lowering.kernels import by_reference
from heterog.lowering.sparse_tables import SparseTables, sparse_tables, starts_of
from heterog.lowering.value_reads import (
    ANY_PASS,
    NO_WINDOW,
    Recut,
    Slot,
    ValueReads,
    item_bytes,
    recut_of,
    row_bytes,
)
from heterog.strategy.keeping import (
    Recomputation,
    Remake,
    Remakes,
    attention_scores,
    kept_products,
    recomputations,
    scores_again,
)
from heterog.strategy.layouts.stages import layer_runs

KIND_NUMBER = {"R": 0, "S": 1, "P": 2, "L": 3}


class Domain(IntEnum):
    """The devices over which the gradients of a parameter are summed."""

    NOBODY = -1
    """Each device has the whole gradient already."""
    ALL = 0
    """Each device has a part."""
    PEERS = 1
    """The members of a team have the same, each team has a part."""
    TEAM = 2
    """Each member of a team has a part, all teams have the same sum."""
    SLICES = 3
    """Each team has a part, and its members hold slices of it along the first axis after the
    batch; the following numbers stand for slices along the next axes."""


@by_reference
class GraphTables(NamedTuple):
    """Flat view of a graph for the kernels; one row per compute op, value, slot, parameter."""

    batch_size: int
    num_groups: int
    group_run: IntArray  # groups of a layer, or between two layers, have the same number
    axis_units: IntArray  # the batch first; EVERYWHERE for ops that split nothing
    # Compute ops: neither views nor updates, in program order.
    op_id: IntArray  # graph op of each compute op
    op_group: IntArray  # CONSTANT_GROUP for constants
    op_axis: IntArray
    op_recut: IntArray  # ``Recut`` of its only output
    value_start: IntArray  # values made by each compute op  # [num_compute_ops + 1]
    read_start: IntArray  # value reads of each compute op  # [num_compute_ops + 1]
    read_value: IntArray
    read_slot: IntArray  # -1: the value as it was made, in the reader's own group
    parameter_read_start: IntArray  # parameters read by each compute op  # [num_compute_ops + 1]
    parameter_read: IntArray
    finished_start: IntArray  # parameters that each op finishes: gradient made, last read done
    finished_parameter: IntArray
    # Recomputation; see ``keeping``.
    op_is_backward: IntArray
    op_is_late: IntArray  # 1: of the backward pass, except a buffer's write of a forward value
    op_is_weights: IntArray  # 1: of the backward pass, and no other group waits for it
    op_recomputes: IntArray  # 1: its group's recomputation, if it has one, comes before this op
    recompute_start: IntArray  # ops that each group runs again  # [num_groups + 1]
    recompute_op: IntArray
    # Ops that run again before each op, for one of the other kinds of ``Keeps``, then the next.
    partly_start: IntArray  # [2 * num_ops + 1]
    partly_op: IntArray
    # Values.
    value_op: IntArray
    value_tensor: IntArray  # graph tensor of each value
    value_axis: IntArray  # axis along which it lies: its op's, or the axis after a recut
    value_kind: IntArray  # KIND_NUMBER of the placement
    value_bytes: FloatArray  # size if it does not depend on the share, else 0
    value_bytes_per_unit: FloatArray  # of its axis
    value_moved_fraction: FloatArray  # part of the value that other groups read
    value_batch_kind: IntArray  # KIND_NUMBER along the batch: between teams if a rule made it
    value_is_outermost: IntArray  # 1 if units are contiguous in memory
    value_batch_is_outermost: IntArray  # 1 if samples are contiguous in memory
    value_is_early: IntArray  # 1 if it follows from the batch alone, before any op has run
    value_item_bytes: IntArray  # of an element, 0 if it is no floating-point number
    value_row_bytes: FloatArray  # of one number per row, if a team gathers these, else 0
    value_slot_start: IntArray  # slots of each value  # [num_values + 1]
    # Slots, sorted by value.
    slot_value: IntArray
    slot_group: IntArray
    slot_whole: IntArray  # AS_MADE, IN_TEAM or EVERYTHING
    slot_axis: IntArray  # of the reader
    slot_pass: IntArray  # pass of its readers; see ``ANY_PASS``
    slot_window: IntArray  # step, before, after, all rows; see ``WindowRow``  # [num_slots, 4]
    # Ops that make a slot's value on the reading devices, from a least size on; see ``keeping``.
    remake_start: IntArray  # [num_slots + 1]
    remake_op: IntArray
    slot_remade_from: FloatArray  # bytes that a device would receive
    sparse: "SparseTables"
    # Parameters, in the order of OpGraph.updates.
    parameter_group: IntArray
    parameter_bytes: FloatArray
    stepped_bytes: FloatArray  # in the dtype of the optimizer's own copy, if it has one
    gradient_bytes: FloatArray  # in the dtype in which gradients are added up
    gradient_item_bytes: IntArray  # of an element of the gradient
    parameter_item_bytes: IntArray
    parameter_dtype: IntArray  # number of the pair of dtypes, its own and its gradient's
    num_dtypes: int  # number of these pairs; a bucket has one pair
    parameter_workspace: FloatArray  # bytes that a kernel needs besides it while reading it
    parameter_gradient: IntArray  # value that holds the gradient
    parameter_last_value: IntArray  # value of an op that reads it after the gradient, -1 if none
    reader_start: IntArray  # values made by readers of each parameter  # [num_parameters + 1]
    reader_value: IntArray  # listed only under op rules, where readers may run on other devices
    gradient_domain: IntArray  # devices over which gradients are added up; see ``Domain``
    gradient_slot: IntArray  # slot that makes a gradient in parts whole, -1 if it need not be
    parameter_axis: IntArray  # of parameters that live in slices, -1 for whole ones
    parameter_units: FloatArray  # of that axis, 1 for whole parameters
    parameter_tensor: IntArray
    # Bytes that stay on a device: common to all devices, and per sample of the batch.
    common_bytes: float
    input_bytes_per_sample: float
    group_reads_team: IntArray  # 1: an op with a rule reads the samples of its team of the batch
    state_ratio: float


@lru_cache(maxsize=64)
def graph_tables(
    graph: OpGraph, op_rules: OpRules = (), blocks: tuple[int, ...] = ()
) -> GraphTables:
    """Build the tables of a graph under some op rules, with groups that form blocks.

    Args:
        graph: One training step.
        op_rules: See ``Strategy``.
        blocks: See ``Strategy``.
    """
    return _Builder(graph, axis_plan(graph, op_rules), group_ops(graph), blocks).build()


class _Builder:
    def __init__(
        self, graph: OpGraph, plan: AxisPlan, grouping: Grouping, blocks: tuple[int, ...]
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.grouping = grouping
        # First group of each group's block; groups of a block have one decision.
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
            for tensor in graph.outputs[index]:
                self.value_of[tensor] = len(self.values)
                self.values.append(tensor)
        self.row_of = {op: row for row, op in enumerate(self.ops)}
        self.op_group = [int(grouping.group[index]) for index in self.ops]
        self.is_backward = [graph.ops[index].phase == Phase.BACKWARD for index in self.ops]
        self.value_op = [self.row_of[int(graph.producer[tensor])] for tensor in self.values]
        self.recut = [recut_of(graph, plan, index) for index in self.ops]
        self.parameter_row = {p: row for row, (_, p, _) in enumerate(graph.updates)}
        self.parameter_axis = [
            int(plan.tensor_axis[parameter]) if parameter in plan.sharded else -1
            for _, parameter, _ in graph.updates
        ]
        # Per op, the values that it reads (and from which slot) and the parameters.
        self.reads: list[list[tuple[int, Slot | None]]] = []
        self.parameter_reads: list[list[int]] = []
        self.ways = ValueReads(
            graph, plan, grouping, self.block, self.value_of, self.parameter_row
        )
        for index in self.ops:
            entries, parameters = self.ways.of(index)
            self.reads.append(entries)
            self.parameter_reads.append(parameters)
        self.last_read = {
            parameter: row for row, rows in enumerate(self.parameter_reads) for parameter in rows
        }
        self.gradient_values = [
            self._gradient_value(parameter, gradient) for _, parameter, gradient in graph.updates
        ]
        self.gradient_slots = [self._gradient_slot(p, made) for _, p, made in graph.updates]
        self.sparse = sparse_tables(graph, self.ways.matrices)
        read_slots = [slot for entries in self.reads for _, slot in entries]
        slots = {*self.gradient_slots, *read_slots}
        self.slots = sorted(slot for slot in slots if slot is not None)
        self.slot_number = {slot: number for number, slot in enumerate(self.slots)}

    def build(self) -> GraphTables:
        tables: dict[str, Any] = {
            "batch_size": self.graph.batch_size,
            "num_groups": self.grouping.num_groups,
            "group_run": list(layer_runs(self.graph)),
            "axis_units": list(self.plan.axes),
            "sparse": self.sparse,
            **self._op_tables(),
            **self._recomputation_tables(),
            **self._value_tables(),
            **self._slot_tables(),
            **self._parameter_tables(),
            **self._gradient_tables(),
            **self._batch_tables(),
        }
        for name, values in tables.items():
            if isinstance(values, list):  # all lists are of integers
                tables[name] = np.array(values, np.int32)
        return GraphTables(**tables)

    def _op_tables(self) -> dict[str, Any]:
        graph = self.graph
        rows_of = grouped((self._last_op(row), row) for row in range(len(graph.updates)))
        finished = [rows_of.get(op, []) for op in range(len(self.ops))]
        return {
            "op_id": self.ops,
            "op_group": self.op_group,
            "op_axis": [int(self.plan.op_axis[index]) for index in self.ops],
            "op_recut": self.recut,
            "value_start": starts_of([graph.ops[index].num_outputs for index in self.ops]),
            "read_start": starts_of([len(entries) for entries in self.reads]),
            "read_value": [value for entries in self.reads for value, _ in entries],
            "read_slot": [self._number(slot) for entries in self.reads for _, slot in entries],
            "parameter_read_start": starts_of([len(rows) for rows in self.parameter_reads]),
            "parameter_read": [row for rows in self.parameter_reads for row in rows],
            "finished_start": starts_of([len(rows) for rows in finished]),
            "finished_parameter": [row for rows in finished for row in rows],
            "op_is_backward": self.is_backward,
            "op_is_late": [self._is_late(row) for row in range(len(self.ops))],
            "op_is_weights": self._makes_weights_only(),
        }

    def _is_late(self, row: int) -> bool:
        """Whether an op belongs to the backward pass.

        Tracing puts writes of buffers (running statistics, counters) at the end of the step, but a
        write of a value that the forward pass makes belongs to the forward pass.
        """
        inputs = self.graph.ops[self.ops[row]].inputs
        if not self.is_backward[row] or len(inputs) != 2:
            return self.is_backward[row]
        graph, (into, value) = self.graph, inputs
        maker = int(graph.producer[graph.storage[value]])
        is_write = (
            graph.ops[self.ops[row]].is_write and graph.tensors[into].kind == TensorKind.BUFFER
        )
        return not (is_write and (maker < 0 or graph.ops[maker].phase == Phase.FORWARD))

    def _recomputation_tables(self) -> dict[str, Any]:
        """Recomputation of each block, stored at its reader's group for the kernel."""
        rows = (
            [self.block[group] if group >= 0 else group for group in self.op_group],
            self.is_backward,
            [
                [
                    self.value_op[value]
                    for value, slot in entries
                    # A value that a team has added up or exchanged is kept, not made again.
                    if slot is None and not self.recut[self.value_op[value]]
                ]
                for entries in self.reads
            ],
        )
        makers = [self.value_op[value] for value in self.gradient_values]
        again = [Recomputation(-1, ())] * self.grouping.num_groups
        for each in recomputations(*rows, makers, self.grouping.num_groups):
            if each.reader >= 0:
                again[self.op_group[each.reader]] = each
        recomputing = {each.reader for each in again if each.ops}
        partly = self._partly(rows, makers)
        return {
            "op_recomputes": [row in recomputing for row in range(len(self.ops))],
            "recompute_start": starts_of([len(each.ops) for each in again]),
            "recompute_op": [row for each in again for row in each.ops],
            "partly_start": starts_of([len(ops) for ops in partly]),
            "partly_op": [row for ops in partly for row in ops],
        }

    def _partly(
        self, rows: tuple[list[int], list[bool], list[list[int]]], makers: list[int]
    ) -> list[tuple[int, ...]]:
        """Ops that run again before each op, for one kind of ``Keeps`` and then the next.

        Args:
            rows: Block of each op, whether it is backward, and makers of its unconverted inputs.
            makers: Ops that make gradients.
        """
        graph = self.graph
        block = [self.block[group] if group >= 0 else group for group in self.grouping.group]
        kept = {self.row_of[op] for op in kept_products(graph, block)}
        scores = [[self.row_of[op] for op in ops] for ops in attention_scores(graph)]
        found: list[tuple[int, ...]] = [() for _ in range(2 * len(self.ops))]
        num_groups = self.grouping.num_groups
        for number, each in (
            *((0, each) for each in recomputations(*rows, makers, num_groups, kept)),
            *((1, each) for each in scores_again(scores, *rows)),
        ):
            if each.ops:
                found[number * len(self.ops) + each.reader] += each.ops
        return found

    def _value_tables(self) -> dict[str, Any]:
        graph, plan, values = self.graph, self.plan, self.values
        kinds = [KIND_NUMBER[plan.placements[tensor].kind] for tensor in values]
        over_batch = [plan.batch_placements[tensor] for tensor in values]
        sizes = graph.tensor_bytes[values].astype(np.float64)
        split = np.array(kinds) == KIND_NUMBER["S"]
        units = np.array([max(plan.axes[plan.tensor_axis[tensor]], 1) for tensor in values])
        return {
            "value_op": self.value_op,
            "value_tensor": values,
            "value_axis": [int(plan.tensor_axis[tensor]) for tensor in values],
            "value_kind": kinds,
            "value_bytes": np.where(split, 0.0, sizes),
            "value_bytes_per_unit": np.where(split, sizes / units, 0.0),
            "value_moved_fraction": np.array([self._moved_fraction(each) for each in values]),
            "value_batch_kind": [KIND_NUMBER[place.kind] for place in over_batch],
            "value_is_outermost": [_is_outermost(plan.placements[t]) for t in values],
            "value_batch_is_outermost": [_is_outermost(place) for place in over_batch],
            "value_is_early": [self._is_early(tensor) for tensor in values],
            "value_item_bytes": [item_bytes(graph, tensor) for tensor in values],
            "value_row_bytes": np.array(
                [
                    row_bytes(graph, plan, tensor) if self.recut[op] == Recut.COMPLETED else 0.0
                    for tensor, op in zip(values, self.value_op, strict=True)
                ]
            ),
        }

    def _slot_tables(self) -> dict[str, Any]:
        values = [value for value, *_ in self.slots]
        starts = np.searchsorted(values, np.arange(len(self.values) + 1))
        return {
            "value_slot_start": starts.astype(np.int32),
            "slot_value": values,
            "slot_group": [slot[1] for slot in self.slots],
            "slot_whole": [slot[2] for slot in self.slots],
            "slot_axis": [slot[3] for slot in self.slots],
            "slot_pass": [slot[4] for slot in self.slots],
            "slot_window": np.array([slot[5] for slot in self.slots], np.int32).reshape(-1, 4),
            **self._remake_tables(),
        }

    def _remake_tables(self) -> dict[str, Any]:
        """Ops that fill a slot by making its value again, if possible."""
        remakes = Remakes(self.graph, self.plan, self.grouping.group, self.ways.gathered)
        found: list[Remake | None] = []
        for value, _, whole, _, _, window in self.slots:
            tensor = self.values[value]
            is_there = self.op_group[self.value_op[value]] == CONSTANT_GROUP
            may = whole == AS_MADE and window == NO_WINDOW and not is_there
            found.append(remakes.of_value(tensor, self._moved_fraction(tensor)) if may else None)
        return {
            "remake_start": starts_of([len(each.ops) if each else 0 for each in found]),
            "remake_op": [self.row_of[op] for each in found if each for op in each.ops],
            "slot_remade_from": np.array([each.least_bytes if each else 0.0 for each in found]),
        }

    def _parameter_tables(self) -> dict[str, Any]:
        graph, plan = self.graph, self.plan
        sizes = [float(graph.tensor_bytes[parameter]) for _, parameter, _ in graph.updates]
        dtypes = [(graph.tensors[p].dtype, graph.tensors[g].dtype) for _, p, g in graph.updates]
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(dtypes))}
        workspace = np.zeros(len(graph.updates))
        readers: list[list[int]] = [[] for _ in graph.updates]
        for index, rows in zip(self.ops, self.parameter_reads, strict=True):
            for row in rows:
                if graph.ops[index].kind in REORDERS_WEIGHTS:
                    workspace[row] = sizes[row]
                if len(plan.axes) > 1:
                    readers[row].extend(self.value_of[t] for t in graph.outputs[index][:1])
        units = [float(plan.axes[axis]) if axis >= 0 else 1.0 for axis in self.parameter_axis]
        return {
            "parameter_group": [int(self.grouping.group[op]) for op, _, _ in graph.updates],
            "parameter_bytes": np.array(sizes),
            "stepped_bytes": np.array(
                [
                    float(graph.tensors[p].num_elements * ITEM_BYTES[graph.stepped_dtype(p)])
                    for _, p, _ in graph.updates
                ]
            ),
            "gradient_bytes": np.array(
                [float(graph.tensor_bytes[g]) for _, _, g in graph.updates]
            ),
            "gradient_item_bytes": [item_bytes(graph, g) for _, _, g in graph.updates],
            "parameter_item_bytes": [item_bytes(graph, p) for _, p, _ in graph.updates],
            "parameter_dtype": [numbers[pair] for pair in dtypes],
            "num_dtypes": max(len(numbers), 1),
            "parameter_workspace": workspace,
            "parameter_axis": self.parameter_axis,
            "parameter_units": np.array(units),
            "parameter_tensor": [parameter for _, parameter, _ in graph.updates],
            "reader_start": starts_of([len(values) for values in readers]),
            "reader_value": [value for values in readers for value in values],
            "state_ratio": graph.optimizer_state_ratio,
        }

    def _gradient_tables(self) -> dict[str, Any]:
        last_values = []
        for row, value in enumerate(self.gradient_values):
            last = self._last_op(row)
            outputs = self.graph.outputs[self.ops[last]]
            waits = last > self.value_op[value] and len(outputs) > 0
            last_values.append(self.value_of[outputs[0]] if waits else -1)
        domains = list(map(self._domain, self.gradient_values, self.parameter_axis))
        return {
            "parameter_gradient": self.gradient_values,
            "parameter_last_value": last_values,
            "gradient_domain": domains,
            "gradient_slot": [self._number(slot) for slot in self.gradient_slots],
        }

    def _batch_tables(self) -> dict[str, Any]:
        """Bytes that stay on a device for the step: common to all devices, and of the batch."""
        graph = self.graph
        batch_bytes = float(sum(graph.tensor_bytes[tensor] for tensor in graph.batch))
        common = (
            *graph.inputs_of_kind(TensorKind.BUFFER),
            *graph.inputs_of_kind(TensorKind.CONSTANT),
            *(p for p in graph.parameters if p not in self.parameter_row),
        )
        common_bytes = float(sum(graph.tensor_bytes[tensor] for tensor in common))
        is_whole = self._batch_is_read_whole()
        return {
            "common_bytes": common_bytes + (batch_bytes if is_whole else 0.0),
            "input_bytes_per_sample": 0.0 if is_whole else batch_bytes / graph.batch_size,
            "group_reads_team": self._groups_that_read_for_teams(),
        }

    def _number(self, slot: Slot | None) -> int:
        return -1 if slot is None else self.slot_number[slot]

    def _gradient_value(self, parameter: int, gradient: int) -> int:
        storage = int(self.graph.storage[gradient])
        if storage not in self.value_of:
            raise StrategyError(
                f"the gradient of '{self.graph.tensors[parameter].name}' is not made by any op."
            )
        return self.value_of[storage]

    def _last_op(self, row: int) -> int:
        """The op that an update waits for: the maker of its gradient, or a later reader.

        An update overwrites the parameter: it must wait for ops that read it after its gradient
        is made (the other product of a batched matrix product, say).
        """
        return max(self.value_op[self.gradient_values[row]], self.last_read.get(row, -1))

    def _makes_weights_only(self) -> list[int]:
        """Flags of backward ops whose results lead only to gradients of their own group."""
        # Whether a value is read by another group, or by an op without this flag.
        leads_on = [False] * len(self.values)
        gradients = set(self.gradient_values)
        flags = [0] * len(self.ops)
        for row in range(len(self.ops) - 1, -1, -1):
            made = [self.value_of[tensor] for tensor in self.graph.outputs[self.ops[row]]]
            if self.is_backward[row] and not any(leads_on[value] for value in made):
                # An op that makes no gradient and has no readers is not deferred.
                is_read = [bool(self.graph.consumers[self.values[value]]) for value in made]
                flags[row] = int(any(is_read) or not gradients.isdisjoint(made))
            for value, _ in self.reads[row]:
                if not flags[row] or self.op_group[self.value_op[value]] != self.op_group[row]:
                    leads_on[value] = True
        return flags

    def _gradient_slot(self, parameter: int, gradient: int) -> Slot | None:
        """The slot that gathers the gradient of a whole parameter that was made in parts."""
        storage = int(self.graph.storage[gradient])
        made = self.plan.placements[storage]
        if made.kind != "S" or parameter in self.plan.sharded or storage not in self.value_of:
            return None
        maker = int(self.graph.producer[storage])
        group, axis = int(self.grouping.group[maker]), int(self.plan.op_axis[maker])
        whole = EVERYTHING if axis == BATCH_AXIS else IN_TEAM
        return self.value_of[storage], group, whole, axis, ANY_PASS, NO_WINDOW

    def _domain(self, value: int, parameter_axis: int) -> int:
        """The ``Domain`` of a gradient, by the value that holds it."""
        plan, tensor = self.plan, self.values[value]
        over_teams = plan.batch_placements[tensor].kind == "P"
        if plan.tensor_axis[tensor] == BATCH_AXIS:
            return Domain.ALL if over_teams else Domain.NOBODY
        if plan.placements[tensor].kind == "P":
            return Domain.ALL if over_teams else Domain.TEAM
        if not over_teams:
            return Domain.NOBODY
        return Domain.SLICES + parameter_axis - 1 if parameter_axis >= 0 else Domain.PEERS

    def _batch_is_read_whole(self) -> bool:
        """Whether some op needs samples of the batch that its device does not have."""
        graph, plan = self.graph, self.plan
        inputs = set(graph.batch)
        return any(
            max(self.ways.gathered[tensor], plan.whole_needed(index, position, tensor))
            == EVERYTHING
            for index in self.ops
            for position, tensor in enumerate(graph.ops[index].inputs)
            if int(graph.storage[tensor]) in inputs
        )

    def _groups_that_read_for_teams(self) -> IntArray:
        graph, plan = self.graph, self.plan
        inputs = set(graph.batch)
        found = np.zeros(self.grouping.num_groups, np.int32)
        for index in self.ops:
            is_read = any(int(graph.storage[each]) in inputs for each in graph.ops[index].inputs)
            if is_read and plan.op_axis[index] != BATCH_AXIS:
                found[self.grouping.group[index]] = 1
        return found

    def _is_early(self, tensor: int) -> bool:
        """Whether a value is the number of labels that count.

        It is an output of the loss, but follows from the labels alone, and these from the batch
        (otherwise ``batch_plan`` runs the loss on gathered inputs). It is summed over the devices
        before the step, so that each device begins its backward pass as soon as it can. If it were
        summed when the loss makes it, all devices would wait there for the slowest.
        """
        maker = int(self.graph.producer[tensor])
        return (
            self.graph.ops[maker].kind in LABEL_COUNTING_LOSSES
            and tensor == self.graph.outputs[maker][1]
        )

    def _moved_fraction(self, storage: int) -> float:
        """Fraction of a value that readers outside its group use (a slice of it, say)."""
        seen = sum(
            int(self.graph.tensor_bytes[tensor]) for tensor in self.ways.outside.get(storage, ())
        )
        size = int(self.graph.tensor_bytes[storage])
        return min(seen / size, 1.0) if size and seen else 1.0


def _is_outermost(place: Placement) -> bool:
    return place.dim == 0 and place.outer == 1


def reading_ops(tables: GraphTables) -> IntArray:
    """The compute op of each read.  # [num_reads]"""
    counts = np.diff(tables.read_start)
    return np.repeat(np.arange(len(tables.op_id), dtype=np.int32), counts)


def values_read(tables: GraphTables, reads: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether some of the reads read each value.  # [num_values]"""
    found = np.zeros(len(tables.value_op), np.bool_)
    found[tables.read_value[reads]] = True
    return found


def saved_values(tables: GraphTables) -> NDArray[np.bool_]:
    """Values of forward ops that backward ops read, be it through views.  # [num_values]"""
    late: NDArray[np.bool_] = tables.op_is_backward == 1
    saved: NDArray[np.bool_] = values_read(tables, late[reading_ops(tables)])
    return saved & ~late[tables.value_op]


def block_of_groups(num_groups: int, blocks: Sequence[int]) -> tuple[int, ...]:
    """The first group of each group's block.

    >>> block_of_groups(5, (0, 3)), block_of_groups(3, ())
    ((0, 0, 0, 3, 3), (0, 1, 2))
    """
    if not blocks:
        return tuple(range(num_groups))
    first = np.array(blocks)[np.searchsorted(blocks, np.arange(num_groups), side="right") - 1]
    return tuple(int(group) for group in first)
