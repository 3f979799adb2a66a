"""A program as one rank sees it: spans, buffers and tasks, looked up and fixed at deployment.

The sources of tensors, and the placements in which ops need them, are found once for all ranks.
"""

import copy
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS, EVERYTHING, IN_TEAM, axis_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import IntArray, OpGraph
from heterog.graph.placement import OpRules, Placement
from heterog.graph.sharding_rules import local_shape
from heterog.grouped import grouped
from heterog.lowering import value_of_buffers
from heterog.lowering.channels import Channel
from heterog.lowering.program import (
    FIRST_LINK_KIND,
    LAST_OP_KIND,
    RECUT_KINDS,
    SLOT_KINDS,
    Program,
    TaskKind,
    early_reductions,
)
from heterog.lowering.tables import Domain, GraphTables, graph_tables
from heterog.lowering.value_reads import Recut
from heterog.modes.mode import MessageRule, Traffic
from heterog.runtime.step.slices import SlicedBucket, parameter_rings, sliced_buckets
from heterog.runtime.step.spans import Spans, cut_span, join, spans_of_groups
from heterog.strategy.division import Ring
from heterog.strategy.strategy import Decision, Strategy

_KINDS = {int(kind): kind for kind in TaskKind}
# Looked up for every task, and members of an enum are slow in Python 3.11.
_GATHER_PARAMETERS = TaskKind.GATHER_PARAMETERS
_ENDS_UPDATE = frozenset({TaskKind.UPDATE, TaskKind.PULL})
_CODES = frozenset({TaskKind.ENCODE, TaskKind.DECODE, TaskKind.DECODE_SUM})

WINDOW = -1
"""Marks a value that holds rows of neighbours, in place of the extent to which it was gathered."""
Near = dict[tuple[int, int], int]
"""Buffer of each value that a task reads, by (value, how much of it was gathered)."""


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


def gathered(bucket: int) -> tuple[int, int]:
    """Key, in place of a value's, of a bucket's parameters that are gathered for some ops."""
    return -2 - bucket, EVERYTHING


def nearest(near: Near, value: int, whole: int) -> int | None:
    """The buffer that holds as much of a value as a reader needs; ``None`` if there is none.

    If the value needed no conversion, this is the buffer of its maker.
    """
    for level in _LEVELS[whole]:
        if (value, level) in near:
            return near[value, level]
    return None


_LEVELS = {
    AS_MADE: (AS_MADE, IN_TEAM, EVERYTHING),
    IN_TEAM: (IN_TEAM, AS_MADE, EVERYTHING),
    EVERYTHING: (EVERYTHING, IN_TEAM, AS_MADE),
}


def _messages(program: Program) -> dict[int, int]:
    """The transfer or collective of a message, by the task that encodes or decodes it."""
    if not program.codecs:
        return {}
    maker, reader = program.edges
    is_message = (program.codec > 0) & (program.kind >= FIRST_LINK_KIND)
    is_decode = np.isin(program.kind, (TaskKind.DECODE, TaskKind.DECODE_SUM))
    sent = is_message[reader] & (program.kind[maker] == TaskKind.ENCODE)
    taken = is_decode[reader] & is_message[maker]
    codes = np.concatenate([maker[sent], reader[taken]]).tolist()
    return dict(zip(codes, np.concatenate([reader[sent], maker[taken]]).tolist(), strict=True))


def _groups_of_readers(program: Program, tables: GraphTables) -> dict[int, int]:
    """Group of the readers of each value that is made again for them, by the making task."""
    found: dict[int, int] = {}
    is_remade = program.kind == TaskKind.REMAKE
    maker, reader = program.edges
    chosen = np.flatnonzero(is_remade[maker])[::-1]  # first the readers that are remade themselves
    for task, by in zip(maker[chosen].tolist(), reader[chosen].tolist(), strict=True):
        group = found.get(by) if is_remade[by] else int(tables.op_group[program.subject[by]])
        assert group is not None
        assert program.kind[by] <= LAST_OP_KIND
        found[task] = group
    return found


def _values_in_buffers(program: Program, tables: GraphTables) -> tuple[list[int], list[int]]:
    """The value in each buffer, and how much of it was gathered; see ``RankProgram.value_in``."""
    maker = program.buffer_maker
    kind, subject = program.kind[maker], program.subject[maker]
    value = value_of_buffers(program, tables)
    whole = np.full(len(maker), AS_MADE, np.int32)

    def made_by(*kinds: TaskKind) -> IntArray:
        return np.flatnonzero(np.isin(kind, kinds)).astype(np.int32)

    recut = made_by(*RECUT_KINDS)
    value[recut] = subject[recut]
    converted = made_by(*SLOT_KINDS)
    slot = subject[converted]
    value[converted] = tables.slot_value[slot]
    is_window = tables.slot_window[slot, 3] != 0
    whole[converted] = np.where(is_window, WINDOW, tables.slot_whole[slot])
    gathers = made_by(TaskKind.GATHER_PARAMETERS)
    for buffer in gathers[program.buffer_device[gathers] >= 0].tolist():
        value[buffer], whole[buffer] = gathered(int(subject[buffer]))
    return value.tolist(), whole.tolist()


class RankProgram:
    """The program of a strategy, seen from one rank.

    Args:
        graph: The captured step.
        strategy: Strategy of the plan.
        program: Program lowered from both.
        rank: Number of this rank; ranks are device indices.

    Attributes:
        plan: Placements of the graph's tensors along the batch and the axes of rules.
        sources: Where each tensor comes from.
        needs: Inputs of each op, as it needs them.
        tables: The graph in flat arrays.
        kinds: Kind of each task of the program.
        subjects: What each task works on.
        micros: Micro-batch of each task.
        num_micro: Number of micro-batches of the step.
        micro_begin: First sample of each micro-batch.
        value_of: Value of each tensor that owns its memory, by tensor id.
        is_recut: Whether a team cuts an op's output anew, by row of the tables.
        sharded: Placement and spans of the parameters that live in slices, by row.
        parameters_of_value: Rows of ``graph.updates`` whose gradient a value holds, by value.
        makes_gradients: Ops that make gradients, as rows of the tables.
        accumulated: Gradients, as (row, micro-batch), that this rank adds to earlier ones.
        given_to_replicas: Gradients, as (row, micro-batch), that this rank gives to replicas
            without one.
        spans_of_op: Spans of each op's group along the op's axis; ``None`` for constants.
        rings: The rings that add up each parameter's gradients, by row.
        bucket: Number of the bucket of each parameter's gradient, by row; -1 if it is in none.
        bucket_members: Rows of each bucket, in their order in it.
        buckets: All buckets of the program whose parameters are updated in slices (ZeRO).
        sliced: Buckets that this rank updates in slices, by number.
        sliced_of_tensor: Buckets of ``sliced`` by tensor id of their parameters.
        early: Tasks that reduce a value that follows from the batch alone.
        is_mine: Whether this rank takes part in each task of the program.  # [num_tasks]
        message_of: Transfer or collective of a message, by the task that encodes or decodes it.
        is_converted: Whether each buffer holds the result of a conversion.
    """

    def __init__(self, graph: OpGraph, strategy: Strategy, program: Program, rank: int) -> None:
        self.graph = graph
        self.strategy = strategy
        self.program = program
        self.plan = axis_plan(graph, strategy.op_rules)
        self.tables = graph_tables(graph, strategy.op_rules, strategy.blocks)
        self.num_micro = strategy.num_micro_batches
        self.sources = sources(graph, strategy.op_rules)
        self.needs = needs(graph, strategy.op_rules)
        self._group = group_ops(graph).group
        self._spans = spans_of_groups(strategy, self.plan.axes)
        self.sharded: dict[int, tuple[Placement, Spans]] = {
            row: (
                self.plan.placements[parameter],
                self._spans[int(self.plan.tensor_axis[parameter])][int(self._group[op])],
            )
            for row, (op, parameter, _) in enumerate(graph.updates)
            if parameter in self.plan.sharded
        }
        sizes = map(self._spans[BATCH_AXIS][0].size, range(self.num_micro - 1))
        self.micro_begin = [0, *accumulate(sizes)]
        self.spans_of_op: list[Spans | None] = [
            self._spans[axis][group] if group >= 0 else None
            for axis, group in zip(self.plan.op_axis.tolist(), self._group.tolist(), strict=True)
        ]
        tables = self.tables
        self.value_of = {each: value for value, each in enumerate(tables.value_tensor.tolist())}
        self.is_recut: list[bool] = (tables.op_recut != Recut.NONE).tolist()
        gradients = enumerate(tables.parameter_gradient.tolist())
        self.parameters_of_value = grouped((value, row) for row, value in gradients)
        made = tables.parameter_gradient[tables.parameter_gradient >= 0]
        self.makes_gradients = frozenset(tables.value_op[made].tolist())
        self.bucket: list[int] = program.bucket.tolist()
        self.bucket_members = grouped(
            (bucket, row) for row, bucket in enumerate(self.bucket) if bucket >= 0
        )
        self.rings = parameter_rings(graph, strategy)
        self.buckets = sliced_buckets(graph, strategy, program, self.rings)
        self.sliced: dict[int, SlicedBucket] = {}
        self.sliced_of_tensor: dict[int, SlicedBucket] = {}
        # As lists: single elements are looked up for every task.
        self.kinds = [_KINDS[kind] for kind in program.kind.tolist()]
        self.subjects: list[int] = program.subject.tolist()
        self.micros: list[int] = program.micro.tolist()
        self._read_start: list[int] = program.read_start.tolist()
        self._read_buffer: list[int] = program.read_buffer.tolist()
        self._buffer_start: list[int] = program.buffer_start.tolist()
        self.message_of = _messages(program)
        self.early = early_reductions(program, tables)
        self._reads_of: dict[int, list[int]] = {}
        self._near_of: dict[int, Near] = {}
        self._ring_devices: dict[int, tuple[int, ...]] = {}
        self._place_in_ring: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._value_in, self._whole_in = _values_in_buffers(program, tables)
        maker_kind = program.kind[program.buffer_maker]
        self.is_converted: list[bool] = np.isin(maker_kind, list(SLOT_KINDS)).tolist()
        self._remade_for: dict[int, int] = {}  # the group for which each task makes a value
        self._given_by = self._find_given()
        self._look_from(rank)

    def _find_given(self) -> dict[int, set[tuple[int, int]]]:
        """Gradients, as (row, micro-batch), that each rank gives to replicas without one."""
        program = self.program
        found: dict[int, set[tuple[int, int]]] = {}
        for task in np.flatnonzero(program.kind == TaskKind.PUSH).tolist():
            row, (src, dst) = int(program.subject[task]), self.channel(task).devices
            if not self.is_served_by(row, dst):
                found.setdefault(src, set()).add((row, int(program.micro[task])))
        return found

    def seen_from(self, rank: int) -> "RankProgram":
        """The same program as another rank sees it; shares data that do not depend on the rank."""
        other = copy.copy(self)
        other._look_from(rank)
        return other

    def _look_from(self, rank: int) -> None:
        """Compute the fields that depend on the rank."""
        program = self.program
        self.rank = rank
        self.sliced = {each.number: each for each in self.buckets if rank in each.devices}
        self.sliced_of_tensor = {
            self.graph.updates[row][1]: bucket
            for bucket in self.sliced.values()
            for row in bucket.rows
        }
        adds = (program.kind == TaskKind.ACCUMULATE) & (program.device == rank)
        self.accumulated = frozenset(
            zip(program.subject[adds].tolist(), program.micro[adds].tolist(), strict=True)
        )
        self.given_to_replicas = self._given_by.get(rank, set())
        # Buckets that one ring of this rank sums whole, with parameters that are whole here.
        self.in_one_ring = frozenset(
            bucket
            for bucket, rows in self.bucket_members.items()
            if all(
                row not in self.sharded
                and len(self.rings[row]) == 1
                and rank in self.rings[row][0].devices
                for row in rows
            )
        )
        member = np.array([rank in channel.devices for channel in program.channels], np.bool_)
        self.is_mine = np.where(
            program.kind < FIRST_LINK_KIND, program.device == rank, member[program.channel]
        )
        gathers = (program.kind == TaskKind.GATHER_VALUE) & self.is_mine
        self._gathered_slots = frozenset(program.subject[gathers].tolist())

    def spans_of_task(self, task: int, op: int) -> Spans | None:
        """Spans, along an op's axis, of the group for which a task runs it.

        This is the readers' group if the task makes a value again where it is read.
        """
        if self.kinds[task] is not TaskKind.REMAKE:
            return self.spans_of_op[op]
        if not self._remade_for:
            self._remade_for = _groups_of_readers(self.program, self.tables)
        return self._spans[int(self.plan.op_axis[op])][self._remade_for[task]]

    def spans_of_value(self, value: int) -> Spans:
        """Spans of a value's group along the value's axis; not of constants, which have none."""
        group = int(self._group[self.maker(value)])
        assert group >= 0
        return self._spans[int(self.tables.value_axis[value])][group]

    def target_of_slot(self, slot: int) -> tuple[Spans, Spans]:
        """Spans of the group to which a slot brings its value.

        The first are along the axis of the value, the second along that of the reader.
        """
        tables, group = self.tables, int(self.tables.slot_group[slot])
        made = int(tables.value_axis[tables.slot_value[slot]])
        return self._spans[made][group], self._spans[int(tables.slot_axis[slot])][group]

    def owners(self, row: int) -> list[int]:
        """Devices whose copies of a parameter count: home or first replica, or all slices."""
        if row in self.sharded:
            _, spans = self.sharded[row]
            return [device for device in spans.first_team() if spans.units_of(device)[1]]
        home = self.strategy.homes[row]
        return [home if home >= 0 else self.decision(row).devices[0]]

    def decision(self, row: int) -> Decision:
        """The decision of a parameter's group."""
        return self.strategy.decisions[int(self._group[self.graph.updates[row][0]])]

    def gradient_dtype(self, row: int) -> torch.dtype:
        """Dtype of a parameter's gradient, which may differ from the parameter's."""
        dtype: torch.dtype = getattr(torch, self.graph.tensors[self.graph.updates[row][2]].dtype)
        return dtype

    def gradient_is_converted(self, row: int) -> bool:
        """Whether this rank makes a part of a gradient, which a collective completes."""
        slot = int(self.tables.gradient_slot[row])
        return slot >= 0 and slot in self._gathered_slots

    def zero_stage(self, row: int) -> int:
        """Stage of ZeRO in which a parameter is updated in slices, 0 if it is not."""
        if self.bucket[row] < 0:
            return 0
        return int(self.decision(row).sync.sharded)

    def scatters_by_micro(self, row: int) -> bool:
        """Whether each micro-batch's gradient of a parameter is reduced."""
        return self.zero_stage(row) > 1 and not self.strategy.gathers_once

    def sliced_bucket(self, row: int) -> SlicedBucket | None:
        """The bucket in which this rank updates a slice of a parameter, if it does."""
        return self.sliced.get(self.bucket[row])

    def is_own(self, row: int, micro: int) -> bool:
        """Whether a micro-batch's gradient is the first on this rank, and only begins a sum."""
        sliced = self.sliced_bucket(row)
        return (
            (row, micro) not in self.accumulated
            and (row, micro) not in self.given_to_replicas
            and (sliced is None or sliced.stage == 1)
        )

    def place_in_ring(self, row: int, ring: Ring) -> tuple[int, int]:
        """First element, and number of elements, of a parameter in its bucket of a ring."""
        place = self._place_in_ring.get((row, ring.devices))
        if place is None:
            begin = 0
            for each in self.bucket_members[self.bucket[row]]:
                size = self.graph.tensors[self.graph.updates[each][1]].num_elements
                if each in self.sharded:
                    size = round(size * ring.part)
                self._place_in_ring[each, ring.devices] = begin, size
                begin += size
            place = self._place_in_ring[row, ring.devices]
        return place

    def flattened_for(self, task: int) -> Ring:
        """The ring for which a task copies gradients together."""
        if not self._ring_devices:
            self._find_rings_of_copies()
        devices = self._ring_devices[task]
        return self.ring_over(int(self.program.subject[task]), devices)

    def ring_over(self, row: int, devices: tuple[int, ...]) -> Ring:
        """The ring of a parameter's gradients over some devices."""
        return next(ring for ring in self.rings[row] if ring.devices == devices)

    def _find_rings_of_copies(self) -> None:
        """Note the devices over which copies are summed: those of the task that reads them."""
        program = self.program
        collective = (TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER)
        for task in np.flatnonzero(np.isin(program.kind, collective)).tolist():
            for buffer in self.reads(task):
                maker = int(program.buffer_maker[buffer])
                while self.kinds[maker] is TaskKind.ENCODE:
                    maker = int(program.buffer_maker[self.reads(maker)[0]])
                if self.kinds[maker] is TaskKind.FLATTEN:
                    # Only the first task counts: slice groups add up later what was scattered.
                    self._ring_devices.setdefault(maker, self.channel(task).devices)

    def cut_to_ring(self, gradient: Tensor, row: int, ring: Ring) -> Tensor:
        """The part of this rank's gradient of a parameter that a ring sums."""
        if row not in self.sharded:
            return gradient
        place, spans = self.sharded[row]
        wanted = ring.begin, ring.end - ring.begin
        return cut_span(gradient, place, spans.units_of(self.rank), wanted)

    def join_rings(self, row: int, pieces: Sequence[Tensor]) -> Tensor:
        """Join the parts of a gradient that several rings have summed, in their order."""
        place, spans = self.sharded[row]
        shape = self.graph.tensors[self.graph.updates[row][1]].shape
        own = [ring for ring in self.rings[row] if self.rank in ring.devices]
        shaped = [
            piece.view(local_shape(shape, place, ring.end - ring.begin, spans.units))
            for piece, ring in zip(pieces, own, strict=True)
        ]
        return join(shaped, place)

    def senders(self, task: int) -> list[int]:
        """Devices that give gradients to a reduce-scatter, without slices of earlier ones."""
        program = self.program
        found = {
            int(program.buffer_device[buffer])
            for buffer in self.reads(task)
            if self.kinds[int(program.buffer_maker[buffer])] is not TaskKind.REDUCE_SCATTER
        }
        return sorted(found - {-1})

    def is_served_by(self, row: int, device: int) -> bool:
        """Whether gradients of a parameter are pushed to a device because it is the server.

        If each replica has the whole gradient, the server may be a replica that has made none;
        then it gets each micro-batch's gradient like any other replica.
        """
        if self.strategy.homes[row] != device:
            return False
        decision = self.decision(row)
        domain = int(self.tables.gradient_domain[row])
        has_one_team = len(decision.division.all_teams) == 1
        is_whole = domain == Domain.NOBODY or (domain == Domain.PEERS and has_one_team)
        return not (is_whole and device in decision.devices)

    def gives(self, row: int, micro: int) -> bool:
        """Whether this rank's gradient of a parameter enters the sum over devices.

        If all devices are in one ring, only the first of the team members with the same gradient
        gives it.
        """
        if not any(ring.is_once for ring in self.rings[row]):
            return True
        spans = self.spans_of_op[self.maker(int(self.tables.parameter_gradient[row]))]
        assert spans is not None
        team = spans.team_of(self.rank)
        if self.tables.gradient_slot[row] >= 0:  # gathered, so that every member has it
            return team[0] == self.rank
        return spans.speaks(micro, self.rank)

    def ends_update(self, task: int) -> bool:
        """Whether a task makes new parameters: updates them or sends them to other devices."""
        kind = self.kinds[task]
        if kind is _GATHER_PARAMETERS:
            return self.zero_stage(int(self.program.subject[task])) < 3
        if kind in _CODES:
            return self.rule(task).traffic == Traffic.PARAMETERS
        return kind in _ENDS_UPDATE

    def rule(self, task: int) -> MessageRule:
        """Codec rule of the message that a task encodes, moves or decodes."""
        return self.program.codecs[int(self.program.codec[task]) - 1]

    def channel(self, task: int) -> Channel:
        """Channel of a communication task."""
        return self.program.channels[int(self.program.channel[task])]

    def is_early(self, task: int) -> bool:
        """Whether a task reduces a value that follows from the batch alone."""
        return task in self.early

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

    def value_in(self, buffer: int) -> tuple[int, int]:
        """The value in a buffer, and how much of it was gathered; value -1 for tokens."""
        return self._value_in[buffer], self._whole_in[buffer]
