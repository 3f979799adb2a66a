"""Values on their way from one layout to another: sends, joins, reductions and gathers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from heterog.graph.placement import Placement
from heterog.graph.sharding_rules import local_shape
from heterog.runtime.collectives import Communicator
from heterog.runtime.local_op import LocalOp
from heterog.runtime.losses import Losses
from heterog.runtime.placed import cut, join
from heterog.runtime.rank_program import Layout, RankProgram
from heterog.runtime.values import Held, Values
from heterog.strategy.program import TaskKind


class Conversions:
    """Plays the tasks that bring a value to where, and how, it is needed.

    Args:
        part: the program as this rank sees it.
        ops: the op of every index.
        values: of the step.
        losses: of the step; learns the weight of all labels.
        communicator: talks to the other ranks.
    """

    def __init__(
        self,
        part: RankProgram,
        ops: Mapping[int, LocalOp],
        values: Values,
        losses: Losses,
        communicator: Communicator,
    ) -> None:
        self._part = part
        self._ops = ops
        self._values = values
        self._losses = losses
        self._communicator = communicator

    def run(self, task: int, kind: TaskKind, slot: int, micro: int) -> None:
        """Play one task."""
        part = self._part
        value = int(part.tables.slot_value[slot])
        op = int(part.tables.op_id[part.tables.value_op[value]])
        tensor = int(part.tables.value_tensor[value])
        source, target = part.layout_of_op(op), part.layout_of_slot(slot)
        placement = part.plan.placements[tensor]
        assert source is not None
        if kind == TaskKind.REDUCE_VALUE:
            self._reduce(task, op, tensor)
        elif kind == TaskKind.GATHER_VALUE:
            self._gather(task, tensor, placement, target, micro)
        elif kind == TaskKind.CONCAT:
            self._concat(task, placement, target, micro)
        elif kind == TaskKind.SPLIT:
            # Which device it is for is known by its reader; the piece is the one overlap that the
            # task's samples say, found when it is sent.
            (read,) = part.reads(task)
            held = self._values.held[read]
            for buffer in part.made(task):
                self._values.held[buffer] = Held(held.tensor(), held.begin, held.count)
        else:
            self._send(task, tensor, placement, source, target, micro)

    def _send(
        self,
        task: int,
        tensor: int,
        placement: Placement,
        source: Layout,
        target: Layout,
        micro: int,
    ) -> None:
        part = self._part
        src, dst = part.channel(task).devices
        begin = count = 0
        shape = part.graph.tensors[tensor].shape
        if placement.kind == "S":
            low, owned = source.range(micro, src)
            wanted_low, wanted = target.range(micro, dst)
            begin = max(low, wanted_low)
            count = min(low + owned, wanted_low + wanted) - begin
            shape = local_shape(shape, placement, count, source.units)
        if part.rank == src:
            held = self._values.held[part.reads(task)[0]]
            value = held.tensor()
            if placement.kind == "S":
                value = cut(value, placement, held.count, begin - held.begin, count)
            self._communicator.send(value, dst, task)
            return
        like = self._values.zeros(tensor, shape)
        (made,) = part.made(task)
        self._values.held[made] = Held(self._communicator.receive(like, src, task), begin, count)

    def _concat(self, task: int, placement: Placement, target: Layout, micro: int) -> None:
        begin, count = target.range(micro, self._part.rank)
        parts = []
        for buffer in self._part.reads(task):
            held = self._values.held[buffer]
            low = max(held.begin, begin)
            high = min(held.begin + held.count, begin + count)
            piece = cut(held.tensor(), placement, held.count, low - held.begin, high - low)
            parts.append((low, piece))
        parts.sort(key=lambda pair: pair[0])
        (made,) = self._part.made(task)
        whole = join([piece for _, piece in parts], placement)
        self._values.held[made] = Held(whole, begin, count)

    def _reduce(self, task: int, op: int, tensor: int) -> None:
        part = self._part
        is_early = part.is_early(task)
        if is_early:
            layout = part.layout_of_op(op)
            assert layout is not None
            local = self._losses.local_label_weight(op, self._ops[op], layout)
        else:
            local = self._values.zeros(tensor, part.graph.tensors[tensor].shape)
            for buffer in part.reads(task):
                if buffer in self._values.held:
                    local = self._values.held[buffer].tensor().clone()
        devices = part.channel(task).devices
        pending = self._communicator.all_reduce(local.contiguous(), devices)
        if is_early:
            self._losses.keep_label_weight(part.value_of[tensor], pending)
        for buffer in part.made(task):
            if part.program.buffer_device[buffer] == part.rank:
                self._values.held[buffer] = Held(pending)

    def _gather(
        self, task: int, tensor: int, placement: Placement, layout: Layout, micro: int
    ) -> None:
        part = self._part
        devices = part.channel(task).devices
        shape, total = part.graph.tensors[tensor].shape, layout.units
        shapes = [
            local_shape(shape, placement, layout.range(micro, device)[1], total)
            for device in devices
        ]
        counts = [torch.Size(each).numel() for each in shapes]
        local = self._values.zeros(tensor, (0,))
        begin, count = layout.range(micro, part.rank)
        for buffer in part.reads(task):
            if count and buffer in self._values.held:
                held = self._values.held[buffer]
                piece = cut(held.tensor(), placement, held.count, begin - held.begin, count)
                local = piece.reshape(-1)

        def whole(parts: list[Tensor]) -> Tensor:
            shaped = [flat.view(s) for flat, s in zip(parts, shapes, strict=True)]
            return join([piece for piece in shaped if piece.numel()], placement)

        pending = self._communicator.all_gather(local, devices, counts, whole)
        is_read = False
        for buffer in part.made(task):
            if part.program.buffer_device[buffer] == part.rank:
                self._values.held[buffer] = Held(pending)
                is_read = is_read or self._values.is_read(buffer)
        if not is_read:
            self._communicator.hold(pending)
