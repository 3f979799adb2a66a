"""Conversion of values between divisions of the work: sends, joins, reductions, gathers."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from heterog.graph.axis_plan import AS_MADE, BATCH_AXIS, EVERYTHING, IN_TEAM
from heterog.graph.placement import Placement, R, Window
from heterog.graph.sharding_rules import local_shape
from heterog.lowering.program import Program, TaskKind
from heterog.lowering.sparse_tables import matrix_of
from heterog.runtime.step.collectives import Pending
from heterog.runtime.step.losses import Losses
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.spans import (
    EVERY,
    RowSet,
    Span,
    Spans,
    common,
    count,
    cut,
    cut_span,
    first,
    join,
    join_in_order,
    nested,
    overlap,
    rows_of_neighbours,
    take,
    unit_rows,
)
from heterog.runtime.step.special_ops import completed
from heterog.runtime.step.values import HeldValue, Values, rows_held

_Box = tuple[Span, Span, RowSet | None]
"""Samples and units of a part of a value; or rows, if its readers need rows of neighbours."""


class Conversions:
    """Runs the tasks that bring a value to its readers' devices, in the form that they need.

    Args:
        rank: What the rank runs the program with.
        values: Values of the current step.
        losses: Loss of the current step; counts all labels.
    """

    def __init__(self, rank: RankState, values: Values, losses: Losses) -> None:
        part = self._part = rank.part
        self._ops = rank.ops
        self._values = values
        self._losses = losses
        self._communicator = rank.communicator
        sparse = part.tables.sparse
        self._patterns = [matrix_of(sparse, number) for number in range(len(sparse.axis))]
        self.incomplete: dict[int, Sequence[Tensor]] = {}
        self._goes_back: list[bool] = []  # by task; empty if none does
        for mode in part.strategy.modes:
            self._goes_back = mode.goes_back(part.program, part.tables) or self._goes_back

    def run(self, task: int, subject: int, micro: int) -> None:
        """Run one task; its subject is a slot, or a value whose team cuts it anew."""
        _RUN[self._part.kinds[task]](self, task, subject, micro)

    def _tensor(self, slot: int) -> int:
        return int(self._part.tables.value_tensor[self._part.tables.slot_value[slot]])

    def _maker(self, slot: int) -> Spans:
        """Spans of the op that makes a slot's value, along the value's axis."""
        return self._part.spans_of_value(int(self._part.tables.slot_value[slot]))

    def _window(self, slot: int, device: int) -> RowSet | None:
        """Rows that a slot brings to a device, its own included; ``None`` if it brings units."""
        step, before, after, size = self._part.tables.slot_window[slot].tolist()
        if not size:
            return None
        along, _ = self._part.target_of_slot(slot)
        begin, num_units = along.units_of(device)
        if step < 0:  # a sparse matrix names them
            return rows_of_neighbours(self._patterns[-1 - step], (begin, num_units), along.units)
        return Window(step, before, after).rows(begin, begin + num_units, size)

    def _wanted(self, task: int, slot: int, micro: int, device: int) -> _Box:
        """The part of a value that a slot brings to a device."""
        part = self._part
        along, reading = part.target_of_slot(slot)
        if along.axis == BATCH_AXIS:
            return along.own_samples(micro, device), EVERY, None
        rows = self._window(slot, device)
        if rows is not None:
            return along.team_samples(micro, device), EVERY, rows
        if part.program.units[task] > 0:  # boxes, which are gathered inside the team afterwards
            return along.team_samples(micro, device), along.units_of(device), None
        whole = int(part.tables.slot_whole[slot])
        is_sum = whole == AS_MADE and part.plan.placements[self._tensor(slot)].kind == "P"
        by_device = reading.axis == BATCH_AXIS and whole != IN_TEAM and not is_sum
        if by_device or whole == EVERYTHING:
            return along.own_samples(micro, device), EVERY, None
        return along.team_samples(micro, device), EVERY, None

    def _sent(self, task: int, slot: int, micro: int) -> _Box:
        """The part of a value that a transfer moves."""
        part = self._part
        src, dst = part.channel(task).devices
        if part.program.samples[task] == 0:
            return EVERY, EVERY, None
        maker = self._maker(slot)
        samples, units, rows = self._wanted(task, slot, micro, dst)
        if rows is not None:
            size = int(part.tables.slot_window[slot, 3])
            rows = common(unit_rows(maker.units_of(src), size, maker.units), rows)
        elif units != EVERY:
            units = overlap(maker.units_of(src), units)
        return overlap(maker.samples(micro, src), samples), units, rows

    def _split(self, task: int, slot: int, micro: int) -> None:
        """Keep the whole: only its reader knows the device of a piece, so sending cuts it."""
        (read,) = self._part.reads(task)
        self._hold(task, self._values.held[read])

    def _send(self, task: int, slot: int, micro: int) -> None:
        part, tensor = self._part, self._tensor(slot)
        src, dst = part.channel(task).devices
        box = self._sent(task, slot, micro)
        codec = part.program.codec_of(task)
        if part.rank == src:
            held = self._values.held[part.reads(task)[0]]
            piece = self._piece(slot, held, box) if codec is None else held.tensor()
            self._communicator.send(piece, dst, task, self._lane(task))
            return
        like = self._values.zeros(tensor, self._shape(slot, box))
        if codec is not None:
            size = codec.message_bytes(like.numel(), like.element_size())
            like = torch.empty(size, dtype=torch.uint8, device=like.device)
        received = self._communicator.receive(like, src, task, self._lane(task))
        self._hold(task, HeldValue(received, *box))

    def _lane(self, task: int) -> tuple[int, ...] | None:
        """Device set whose connections a transfer uses; ``None`` for the group of all ranks."""
        goes_back = self._goes_back and self._goes_back[task]
        return gradient_lane(self._part.program) if goes_back else None

    def _encode(self, task: int, slot: int, micro: int) -> None:
        """Encode the message of a transfer."""
        part = self._part
        codec = part.rule(task).codec
        box = self._sent(part.message_of[task], slot, micro)
        held = self._values.held[part.reads(task)[0]]
        self._hold(task, HeldValue(codec.encode(self._piece(slot, held, box))))

    def _decode(self, task: int, slot: int, micro: int) -> None:
        """Decode a received message."""
        part, tensor = self._part, self._tensor(slot)
        codec = part.rule(task).codec
        box = self._sent(part.message_of[task], slot, micro)
        shape = self._shape(slot, box)
        message = self._values.held[part.reads(task)[0]].tensor()
        dtype = getattr(torch, part.graph.tensors[tensor].dtype)
        value = codec.decode(message, prod(shape), dtype).view(shape)
        self._hold(task, HeldValue(value, *box))

    def _rows_held(self, slot: int, held: HeldValue) -> RowSet:
        """Rows in a buffer of a value whose readers need rows of neighbours."""
        size = int(self._part.tables.slot_window[slot, 3])
        return rows_held(held, size, self._maker(slot).units)

    def _places(self, slot: int) -> tuple[Placement, Placement]:
        """Placement of samples, and of units of the maker's axis, in a slot's value."""
        plan, tensor = self._part.plan, self._tensor(slot)
        is_ruled = plan.tensor_axis[tensor] != BATCH_AXIS
        return plan.batch_placements[tensor], plan.placements[tensor] if is_ruled else R

    def _shape(self, slot: int, box: _Box) -> tuple[int, ...]:
        """Shape of a part of a slot's value."""
        part, (samples, units, rows) = self._part, box
        in_batch, on_axis = self._places(slot)
        shape = part.graph.tensors[self._tensor(slot)].shape
        batch = part.graph.batch_size
        if samples != EVERY:
            shape = local_shape(shape, in_batch, samples[1], batch)
            on_axis = nested(on_axis, in_batch, batch, samples[1])
        if rows is not None:
            return (*shape[: on_axis.dim], count(rows), *shape[on_axis.dim + 1 :])
        if units != EVERY:
            shape = local_shape(shape, on_axis, units[1], self._maker(slot).units)
        return shape

    def _piece(self, slot: int, held: HeldValue, box: _Box) -> Tensor:
        """Cut a part out of a slot's value."""
        samples, units, rows = box
        in_batch, on_axis = self._places(slot)
        value = held.tensor()
        if samples != EVERY and in_batch.kind == "S":
            value = cut_span(value, in_batch, held.samples, samples)
            on_axis = nested(on_axis, in_batch, self._part.graph.batch_size, samples[1])
        if rows is not None:
            return take(value, on_axis.dim, self._rows_held(slot, held), rows)
        if units != EVERY and on_axis.kind == "S":
            owned = held.units if held.units != EVERY else (0, self._maker(slot).units)
            value = cut_span(value, on_axis, owned, units)
        return value

    def _concat(self, task: int, slot: int, micro: int) -> None:
        part = self._part
        wanted = self._wanted(task, slot, micro, part.rank)
        pieces: dict[Span, list[tuple[int, Tensor]]] = {}
        in_batch, on_axis = self._places(slot)
        for buffer in part.reads(task):
            held = self._values.held[buffer]
            samples, units, rows = wanted
            samples = overlap(held.samples, samples)
            if rows is not None:
                rows = common(self._rows_held(slot, held), rows)
            elif units != EVERY:
                units = overlap(held.units, units)
            begin = units[0] if rows is None else first(rows)
            piece = self._piece(slot, held, (samples, units, rows))
            pieces.setdefault(samples, []).append((begin, piece))
        batch = part.graph.batch_size
        parts = [
            join_in_order(across, nested(on_axis, in_batch, batch, samples[1]))
            for samples, across in sorted(pieces.items())
        ]
        self._hold(task, HeldValue(join(parts, in_batch), *wanted))

    def _reduce(self, task: int, slot: int, micro: int) -> None:
        part, tensor = self._part, self._tensor(slot)
        devices = part.channel(task).devices
        if part.is_early(task):
            value = int(part.tables.slot_value[slot])
            self._hold(task, HeldValue(self._losses.count_labels(value, devices)))
            return
        samples = EVERY
        if part.program.samples[task] > 0:
            samples = self._maker(slot).team_samples(micro, part.rank)
        own = self._own(task)
        if own is None:
            local = self._values.zeros(tensor, self._shape(slot, (samples, EVERY, None)))
        else:
            local = own.clone()
        pending = self._communicator.all_reduce(local.contiguous(), devices)
        self._hold(task, HeldValue(pending, samples))

    def _own(self, task: int) -> Tensor | None:
        """What this rank gives to a collective; ``None`` if it has no part of the value."""
        held = self._values.held
        own = [held[buffer] for buffer in self._part.reads(task) if buffer in held]
        return own[-1].tensor() if own else None

    def _hold(self, task: int, held: HeldValue) -> None:
        """Keep this rank's result of a task."""
        part = self._part
        for buffer in part.made(task):
            if part.program.buffer_device[buffer] == part.rank:
                self._values.held[buffer] = held

    def _gather(self, task: int, slot: int, micro: int) -> None:
        part, tensor = self._part, self._tensor(slot)
        devices = part.channel(task).devices
        in_batch, on_axis = self._places(slot)
        along, _ = part.target_of_slot(slot)
        by_units = int(part.program.units[task] > 0)
        if by_units:
            samples = along.team_samples(micro, devices[0])
            if in_batch.kind != "S":  # the makers' team gathers it before it goes to others
                along, samples = self._maker(slot), EVERY
            made = samples, (0, along.units)
            boxes = {d: (samples, along.units_of(d)) for d in devices}
            place = nested(on_axis, in_batch, part.graph.batch_size, samples[1])
        else:
            boxes = {d: (along.own_samples(micro, d), EVERY) for d in devices}
            number = sum(samples[1] for samples, _ in boxes.values())
            begin = min(samples[0] for samples, _ in boxes.values())
            made, place = ((begin, number), EVERY), in_batch
        shapes = {device: self._shape(slot, (*box, None)) for device, box in boxes.items()}
        counts = [prod(shapes[device]) for device in devices]
        local = self._values.zeros(tensor, (0,))
        own = (*boxes[part.rank], None)
        is_empty = counts[devices.index(part.rank)] == 0
        for buffer in part.reads(task):
            # In the backward pass the task also reads a gradient, to wait for it.
            is_value = part.value_in(buffer)[0] == int(part.tables.slot_value[slot])
            if is_value and not is_empty and buffer in self._values.held:
                local = self._piece(slot, self._values.held[buffer], own).reshape(-1)

        def whole(parts: list[Tensor]) -> Tensor:
            shaped = [
                (boxes[device][by_units][0], flat.view(shapes[device]))
                for device, flat in zip(devices, parts, strict=True)
            ]
            full = [each for each in shaped if each[1].numel()]
            return join_in_order(full or shaped, place)  # a layer may have no features

        pending = self._communicator.all_gather(local, devices, counts, whole)
        self._hold(task, HeldValue(pending, *made))

    def _scatter(self, task: int, value: int, micro: int) -> None:
        """Sum the parts of a value over the team that made them; each keeps its own slice."""
        part = self._part
        tensor = int(part.tables.value_tensor[value])
        along = part.spans_of_value(value)
        devices, batch = part.channel(task).devices, part.graph.batch_size
        samples = along.team_samples(micro, part.rank)
        in_batch = part.plan.batch_placements[tensor]
        place = nested(part.plan.placements[tensor], in_batch, batch, samples[1])
        whole = local_shape(part.graph.tensors[tensor].shape, in_batch, samples[1], batch)
        shapes = [local_shape(whole, place, along.units_of(d)[1], along.units) for d in devices]
        flat, made = None, self._own(task)
        if made is not None:
            pieces = [cut(made, place, along.units, *along.units_of(d)) for d in devices]
            flat = torch.cat([piece.reshape(-1) for piece in pieces])
        own = shapes[devices.index(part.rank)]
        pending = self._communicator.reduce_scatter_slices(
            flat,
            devices,
            [prod(shape) for shape in shapes],
            sorted({int(part.program.buffer_device[buffer]) for buffer in part.reads(task)}),
            like=self._values.zeros(tensor, (0,)),
        )
        summed = Pending(None, lambda: pending.wait().view(own))
        self._hold(task, HeldValue(summed, samples, along.units_of(part.rank)))

    def _complete(self, task: int, value: int, micro: int) -> None:
        """Gather the numbers per row of a team's members; each then makes its columns."""
        part = self._part
        tensor = int(part.tables.value_tensor[value])
        along, call = part.spans_of_value(value), self._ops[part.maker(value)].call
        devices, samples = part.channel(task).devices, along.team_samples(micro, part.rank)
        shape = list(call.outputs[0].shape)
        shape[part.plan.placements[tensor].dim] = 1
        rows = local_shape(
            tuple(shape), part.plan.batch_placements[tensor], samples[1], part.graph.batch_size
        )
        is_wide = call.inputs[0].dtype == "float64"
        dtype = torch.float64 if is_wide else torch.float32
        own = self._own(task)
        if own is None:
            own = torch.empty(0, dtype=dtype, device=self._values.device)
        made = [each for each in part.reads(task) if each in self.incomplete]
        inputs = self.incomplete.pop(made[0]) if made else ()
        counts = [prod(rows) if along.units_of(device)[1] else 0 for device in devices]

        def whole(parts: list[Tensor]) -> Tensor:
            return completed(call, inputs, [part.view(rows) for part in parts if part.numel()])

        pending = self._communicator.all_gather(own.reshape(-1), devices, counts, whole)
        self._hold(task, HeldValue(pending, samples, along.units_of(part.rank)))

    def _exchange(self, task: int, value: int, micro: int) -> None:
        """Cut a value along another axis, in the team whose members have just made it.

        Each member sends every other the overlap of its own old box with the other's new box.
        """
        part = self._part
        tensor = int(part.tables.value_tensor[value])
        before, after = part.spans_of_op[part.maker(value)], part.spans_of_value(value)
        assert before is not None
        cuts = TwoCuts.of_value(part, tensor, before, after)
        devices, rank = part.channel(task).devices, part.rank
        own = self._own(task) if before.shares[micro].get(rank, 0) else None
        nothing = self._values.zeros(tensor, (0,))
        pieces = [
            nothing if own is None else cuts.piece(own, micro, rank, device).reshape(-1)
            for device in devices
        ]
        shapes = [cuts.shape(micro, device, rank) for device in devices]

        def whole(parts: list[Tensor]) -> Tensor:
            shaped = [
                (begin, flat.view(shape))
                for begin, flat, shape in zip(
                    (cuts.begin(micro, device) for device in devices), parts, shapes, strict=True
                )
                if flat.numel()
            ]
            if not shaped:
                return nothing.new_zeros(cuts.shape(micro, rank, rank))
            return join_in_order(shaped, cuts.place_of_parts(micro, rank))

        counts = [prod(shape) for shape in shapes]
        pending = self._communicator.all_to_all(pieces, devices, counts, whole)
        samples = after.samples(micro, rank)
        units = EVERY if after.axis == BATCH_AXIS else after.units_of(rank)
        self._hold(task, HeldValue(pending, samples, units))


_RUN: Mapping[TaskKind, Callable[[Conversions, int, int, int], None]] = {
    TaskKind.SPLIT: Conversions._split,
    TaskKind.SEND: Conversions._send,
    TaskKind.CONCAT: Conversions._concat,
    TaskKind.ENCODE: Conversions._encode,
    TaskKind.DECODE: Conversions._decode,
    TaskKind.REDUCE_VALUE: Conversions._reduce,
    TaskKind.GATHER_VALUE: Conversions._gather,
    TaskKind.SCATTER_VALUE: Conversions._scatter,
    TaskKind.EXCHANGE_VALUE: Conversions._exchange,
    TaskKind.GATHER_ROWS: Conversions._complete,
}


class TwoCuts(NamedTuple):
    """A value of a team, cut along one axis before an all-to-all and along another after it."""

    shape_of_all: tuple[int, ...]
    batch_size: int
    in_batch: Placement
    made: Placement  # along the axis before, R if that is the batch
    wanted: Placement  # along the axis afterwards, R if that is the batch
    before: Spans
    after: Spans

    @staticmethod
    def of_value(part: RankProgram, tensor: int, before: Spans, after: Spans) -> "TwoCuts":
        """The cuts of a tensor."""
        plan = part.plan
        return TwoCuts(
            shape_of_all=part.graph.tensors[tensor].shape,
            batch_size=part.graph.batch_size,
            in_batch=plan.batch.placements[tensor],
            made=R if before.axis == BATCH_AXIS else plan.made(tensor),
            wanted=R if after.axis == BATCH_AXIS else plan.placements[tensor],
            before=before,
            after=after,
        )

    def begin(self, micro: int, src: int) -> int:
        """First sample, or first unit of the old axis, of the piece from a device."""
        if self.before.axis == BATCH_AXIS:
            return self.before.samples(micro, src)[0]
        return self.before.units_of(src)[0]

    def place_of_parts(self, micro: int, dst: int) -> Placement:
        """Placement of received parts in a device's new part."""
        if self.before.axis == BATCH_AXIS:
            units = self.after.units_of(dst)[1]
            return nested(self.in_batch, self.wanted, self.after.units, units)
        samples = self.after.samples(micro, dst)[1]
        made, wanted = self._inside(self.made, samples), self._inside(self.wanted, samples)
        return nested(made, wanted, self.after.units, self.after.units_of(dst)[1])

    def _inside(self, place: Placement, samples: int) -> Placement:
        """Placement of units in a part with some samples."""
        return nested(place, self.in_batch, self.batch_size, samples)

    def _samples(self, micro: int, src: int, dst: int) -> Span:
        """Samples that go from one device to another."""
        return overlap(self.before.samples(micro, src), self.after.samples(micro, dst))

    def shape(self, micro: int, src: int, dst: int) -> tuple[int, ...]:
        """Shape of the piece that goes from one device to another."""
        count = self._samples(micro, src, dst)[1]
        shape = local_shape(self.shape_of_all, self.in_batch, count, self.batch_size)
        made, wanted = self._inside(self.made, count), self._inside(self.wanted, count)
        if self.before.axis != BATCH_AXIS:
            units = self.before.units_of(src)[1]
            shape = local_shape(shape, made, units, self.before.units)
            wanted = nested(wanted, made, self.before.units, units)
        if self.after.axis == BATCH_AXIS:
            return shape
        return local_shape(shape, wanted, self.after.units_of(dst)[1], self.after.units)

    def piece(self, local: Tensor, micro: int, src: int, dst: int) -> Tensor:
        """The piece of a device's old part that it sends to another device."""
        samples = self._samples(micro, src, dst)
        units = self.before.units_of(src)[1]
        in_batch = nested(self.in_batch, self.made, self.before.units, units)
        local = cut_span(local, in_batch, self.before.samples(micro, src), samples)
        if self.after.axis == BATCH_AXIS:
            return local
        made, wanted = (self._inside(place, samples[1]) for place in (self.made, self.wanted))
        place = nested(wanted, made, self.before.units, units)
        return cut(local, place, self.after.units, *self.after.units_of(dst))


def gradient_lane(program: Program) -> tuple[int, ...]:
    """Device set whose connections gradients use on their way to earlier stages that do not wait.

    gloo has one connection between two ranks of a group, and a rank's notice that it is ready to
    receive queues there behind the data that it sends. So with one group for both directions,
    activations would wait for gradients in the other direction, though lines carry both at once.
    """
    return tuple(range(program.num_devices))
