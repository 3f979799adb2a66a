"""A program as one rank sees it: layouts, buffers and tasks, looked up and fixed at deployment."""

import copy
from collections.abc import Sequence

import numpy as np

from heterog.graph.axis_plan import BATCH_AXIS, axis_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import Placement
from heterog.runtime.slices import SlicedBucket, sliced_buckets
from heterog.strategy.channels import Channel
from heterog.strategy.layout import axis_shares, batch_shares, micro_shares
from heterog.strategy.program import FIRST_LINK_KIND, Program, TaskKind
from heterog.strategy.strategy import Strategy
from heterog.strategy.tables import graph_tables

_KINDS = {int(kind): kind for kind in TaskKind}
# Looked up for every task; Python 3.11 takes its time for a member of an enum.
_GATHER_PARAMETERS, _REDUCE_VALUE = TaskKind.GATHER_PARAMETERS, TaskKind.REDUCE_VALUE
_ENDS_UPDATE = frozenset({TaskKind.UPDATE, TaskKind.PULL})

Near = dict[tuple[int, bool], int]
"""Buffer of each value that a task reads, by (value, whether it was made whole)."""


def gathered(bucket: int) -> tuple[int, bool]:
    """Stands for a value: the parameters of a bucket, gathered for some ops."""
    return -2 - bucket, True


class Layout:
    """Which units of an axis (the samples of the batch, mostly) each device owns.

    Attributes:
        devices: of the groups.
        shares: units of each device, per micro-batch.
        begins: first unit of each device within the micro-batch.
        axis: number of the axis; 0 is the batch.
        units: units of the whole axis.
    """

    def __init__(
        self,
        devices: tuple[int, ...],
        shares: Sequence[Sequence[int]],
        *,
        axis: int = BATCH_AXIS,
        units: int = 0,
    ) -> None:
        self.devices = devices
        self.axis = axis
        self.units = units
        self.shares = [dict(zip(devices, row, strict=True)) for row in shares]
        self.begins: list[dict[int, int]] = []
        for row in shares:
            begin = 0
            begins = {}
            for device, count in zip(devices, row, strict=True):
                begins[device] = begin
                begin += int(count)
            self.begins.append(begins)

    def range(self, micro: int, device: int) -> tuple[int, int]:
        """(first unit within the micro-batch, number of units) of a device."""
        return self.begins[micro].get(device, 0), int(self.shares[micro].get(device, 0))

    def first(self, micro: int) -> int:
        """First device that has a share."""
        return next(device for device, count in self.shares[micro].items() if count)


def layouts_of_groups(strategy: Strategy, axes: Sequence[int] = (0,)) -> list[list[Layout]]:
    """Layout of each group along each axis; equal devices and shares have the same object.

    Args:
        strategy: with a decision for every group.
        axes: units of each axis; the batch first.
    """
    known: dict[tuple[tuple[int, ...], tuple[int, ...], int], Layout] = {}
    for decision in strategy.decisions:
        for axis, units in enumerate(axes):
            key = (decision.devices, decision.shares, axis)
            if key in known:
                continue
            if axis == BATCH_AXIS:
                own = batch_shares(decision.shares, units) if units else decision.shares
                shares = micro_shares(
                    decision.layout._replace(shares=own),
                    strategy.micro_batches,
                    strategy.micro_sizes,
                ).tolist()
            else:
                shares = [axis_shares(units, decision.shares)]
            known[key] = Layout(decision.devices, shares, axis=axis, units=max(units, 1))
    return [
        [known[decision.devices, decision.shares, axis] for decision in strategy.decisions]
        for axis in range(len(axes))
    ]


def sharded_parameters(graph: OpGraph, strategy: Strategy) -> dict[int, tuple[Placement, Layout]]:
    """Placement and layout of parameters that live in slices, by row of ``graph.updates``."""
    plan = axis_plan(graph, strategy.op_rules)
    layouts = layouts_of_groups(strategy, plan.axes)
    group = group_ops(graph).group
    return {
        row: (
            plan.placements[parameter],
            layouts[int(plan.tensor_axis[parameter])][int(group[op])],
        )
        for row, (op, parameter, _) in enumerate(graph.updates)
        if parameter in plan.sharded
    }


class RankProgram:
    """The program of a strategy, seen from one rank.

    Args:
        graph: the captured step.
        strategy: of the plan.
        program: lowered from both.
        rank: this rank; ranks are device indices.

    Attributes:
        plan: placements of the graph's tensors along the batch and the axes of rules.
        tables: the graph in flat arrays.
        kinds: of the program's tasks.
        num_micro: micro-batches of the step.
        micro_begin: first sample of each micro-batch.
        value_of: value by the tensor that owns its memory.
        sharded: placement and layout of the parameters that live in slices, by row.
        parameters_of_value: rows of ``graph.updates`` whose gradient a value holds.
        accumulated: (row, micro-batch) of the gradients that this rank adds to those before.
        bucket_members: rows of each bucket, in the order in which they lie in it.
        bucket_begin: first element of each row in its bucket.
        sliced: buckets that are updated in slices, by number.
        sliced_of_tensor: the same by tensor id of the parameters in them.
    """

    def __init__(self, graph: OpGraph, strategy: Strategy, program: Program, rank: int) -> None:
        self.graph = graph
        self.strategy = strategy
        self.program = program
        self.plan = axis_plan(graph, strategy.op_rules)
        self.tables = graph_tables(graph, strategy.op_rules, strategy.blocks)
        self.num_micro = strategy.num_micro_batches
        self._group = group_ops(graph).group
        self._layouts = layouts_of_groups(strategy, self.plan.axes)
        self.sharded = sharded_parameters(graph, strategy)
        sizes = [sum(row.values()) for row in self._layouts[BATCH_AXIS][0].shares]
        self.micro_begin = [sum(sizes[:micro]) for micro in range(len(sizes))]
        self.value_of = {
            int(tensor): value for value, tensor in enumerate(self.tables.value_tensor)
        }
        self.parameters_of_value: dict[int, list[int]] = {}
        for row, value in enumerate(self.tables.parameter_gradient):
            self.parameters_of_value.setdefault(int(value), []).append(row)
        self.bucket_members: dict[int, list[int]] = {}
        self.bucket_begin: dict[int, int] = {}
        self._fill_buckets()
        self.sliced: dict[int, SlicedBucket] = {
            bucket.number: bucket for bucket in sliced_buckets(graph, strategy, program)
        }
        self.sliced_of_tensor: dict[int, SlicedBucket] = {
            graph.updates[row][1]: bucket for bucket in self.sliced.values() for row in bucket.rows
        }
        # As lists: single elements are looked up for every task.
        self.kinds = [_KINDS[kind] for kind in program.kind.tolist()]
        self._read_start: list[int] = program.read_start.tolist()
        self._read_buffer: list[int] = program.read_buffer.tolist()
        self._buffer_start: list[int] = program.buffer_start.tolist()
        self._reads_of: dict[int, list[int]] = {}
        self._near_of: dict[int, Near] = {}
        self._value_in_buffer: dict[int, tuple[int, bool]] = {}
        self._look_from(rank)

    def seen_from(self, rank: int) -> "RankProgram":
        """The same program as another rank sees it; what all ranks see alike is shared."""
        other = copy.copy(self)
        other._look_from(rank)
        return other

    def _look_from(self, rank: int) -> None:
        """Note what depends on the rank."""
        program = self.program
        self.rank = rank
        adds = (program.kind == TaskKind.ACCUMULATE) & (program.device == rank)
        self.accumulated = frozenset(
            zip(program.subject[adds].tolist(), program.micro[adds].tolist(), strict=True)
        )
        member = np.array([rank in channel.devices for channel in program.channels], np.bool_)
        is_mine = np.where(
            program.kind < FIRST_LINK_KIND, program.device == rank, member[program.channel]
        )
        self._takes_part: list[bool] = is_mine.tolist()

    def _fill_buckets(self) -> None:
        filled: dict[int, int] = {}
        for row, (_, parameter, _) in enumerate(self.graph.updates):
            bucket = int(self.program.bucket[row])
            if bucket >= 0:
                self.bucket_members.setdefault(bucket, []).append(row)
                begin = self.bucket_begin[row] = filled.get(bucket, 0)
                filled[bucket] = begin + self.graph.tensors[parameter].meta.num_elements

    def layout_of_op(self, op: int) -> Layout | None:
        """Layout of an op's group along the op's axis; ``None`` for constants."""
        group = int(self._group[op])
        return self._layouts[int(self.plan.op_axis[op])][group] if group >= 0 else None

    def layout_of_slot(self, slot: int) -> Layout:
        """Layout of the group that a slot brings its value to.

        A value that is split lies along its own axis there, any other one where its reader runs.
        """
        tensor = self.tables.value_tensor[self.tables.slot_value[slot]]
        is_split = self.plan.placements[tensor].kind == "S"
        axis = self.plan.tensor_axis[tensor] if is_split else self.tables.slot_axis[slot]
        return self._layouts[int(axis)][int(self.tables.slot_group[slot])]

    def owners(self, row: int) -> list[int]:
        """Devices whose copies of a parameter count: home or first replica, or all slices."""
        if row in self.sharded:
            _, layout = self.sharded[row]
            return [device for device, count in layout.shares[0].items() if count]
        home = self.strategy.homes[row]
        if home >= 0:
            return [home]
        group = int(self._group[self.graph.updates[row][0]])
        return [self.strategy.decisions[group].devices[0]]

    def gradient_is_gathered(self, row: int, layout: Layout) -> bool:
        """Whether a gradient is made in parts on a layout, and a collective makes it whole."""
        return bool(self.tables.gradient_slot[row] >= 0) and len(layout.devices) > 1

    def samples_in(self, layout: Layout, micro: int) -> tuple[int, int]:
        """(first, number) of this rank's units of the whole axis in a micro-batch."""
        begin, count = layout.range(micro, self.rank)
        return (begin + self.micro_begin[micro] if layout.axis == BATCH_AXIS else begin), count

    def sliced_bucket(self, row: int) -> SlicedBucket | None:
        """The bucket in which a parameter is updated in slices, if it is."""
        return self.sliced.get(int(self.program.bucket[row]))

    def senders(self, bucket: SlicedBucket, micro: int) -> list[int]:
        """Devices that have gradients to scatter: those with samples."""
        layout = self._layouts[BATCH_AXIS][int(self._group[self.graph.updates[bucket.number][0]])]
        micros = range(self.num_micro) if bucket.stage == 1 else (micro,)
        return [d for d in layout.devices if any(layout.range(m, d)[1] for m in micros)]

    def ends_update(self, task: int) -> bool:
        """Whether a task makes new parameters: steps them or brings them to other devices."""
        kind = self.kinds[task]
        if kind is _GATHER_PARAMETERS:
            return self.sliced[int(self.program.subject[task])].stage < 3
        return kind in _ENDS_UPDATE

    def takes_part(self, task: int) -> bool:
        """Whether this rank has something to do in a task."""
        return self._takes_part[task]

    def channel(self, task: int) -> Channel:
        """Channel of a communication task."""
        return self.program.channels[int(self.program.channel[task])]

    def is_early(self, task: int) -> bool:
        """Whether a task reduces a value that follows from the batch alone."""
        if self.kinds[task] is not _REDUCE_VALUE:
            return False
        value = self.tables.slot_value[self.program.subject[task]]
        return bool(self.tables.value_is_early[value])

    def maker(self, value: int) -> int:
        """The op that makes a value."""
        return int(self.tables.op_id[self.tables.value_op[value]])

    def loss_op(self) -> int:
        """The op that makes the loss."""
        return int(self.graph.producer[self.graph.storage[self.graph.loss]])

    def reads(self, task: int) -> list[int]:
        """Buffers that a task reads; looked up once."""
        reads = self._reads_of.get(task)
        if reads is None:
            span = slice(self._read_start[task], self._read_start[task + 1])
            reads = self._reads_of[task] = self._read_buffer[span]
        return reads

    def made(self, task: int) -> range:
        """Buffers that a task makes."""
        return range(self._buffer_start[task], self._buffer_start[task + 1])

    def near(self, task: int) -> Near:
        """Buffer of each value that a task reads; looked up once."""
        near = self._near_of.get(task)
        if near is None:
            near = {self.value_in(buffer): buffer for buffer in self.reads(task)}
            self._near_of[task] = near
        return near

    def value_in(self, buffer: int) -> tuple[int, bool]:
        """(value, whether it was made whole by a collective) of a buffer; -1 for tokens."""
        known = self._value_in_buffer.get(buffer)
        if known is None:
            known = self._value_in_buffer[buffer] = self._look_up_value(buffer)
        return known

    def _look_up_value(self, buffer: int) -> tuple[int, bool]:
        maker = int(self.program.buffer_maker[buffer])
        kind, subject = self.kinds[maker], int(self.program.subject[maker])
        if kind in (TaskKind.COMPUTE, TaskKind.RECOMPUTE):
            first = int(self.program.buffer_start[maker])
            value = int(self.tables.value_start[subject]) + buffer - first
            is_token = value >= int(self.tables.value_start[subject + 1])
            return (-1 if is_token else value), False
        if kind in (TaskKind.SPLIT, TaskKind.CONCAT, TaskKind.SEND):
            return int(self.tables.slot_value[subject]), False
        if kind in (TaskKind.REDUCE_VALUE, TaskKind.GATHER_VALUE):
            return int(self.tables.slot_value[subject]), True
        if kind == TaskKind.GATHER_PARAMETERS and self.program.buffer_device[buffer] >= 0:
            return gathered(subject)
        return -1, False
