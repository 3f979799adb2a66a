"""What a rank holds during a step, and how an op's inputs are read from it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from heterog.graph.axis_plan import BATCH_AXIS
from heterog.graph.op_graph import TensorKind
from heterog.graph.placement import P, Placement, R
from heterog.runtime.collectives import Pending
from heterog.runtime.local_op import LocalOp
from heterog.runtime.placed import cut
from heterog.runtime.rank_program import Layout, Near, RankProgram, gathered
from heterog.strategy.program import TaskKind

_READS_VALUES = frozenset(
    {
        *(TaskKind.COMPUTE, TaskKind.RECOMPUTE, TaskKind.SPLIT, TaskKind.CONCAT, TaskKind.SEND),
        *(TaskKind.REDUCE_VALUE, TaskKind.GATHER_VALUE),
    }
)


@dataclass(slots=True)
class Held:
    """What a buffer holds: a tensor or one on its way, and which units of the micro-batch."""

    value: Tensor | Pending
    begin: int = 0
    count: int = 0

    def tensor(self) -> Tensor:
        """The tensor, waited for if it is on its way."""
        return self.value.wait() if isinstance(self.value, Pending) else self.value


class Values:
    """The values of a step on this rank.

    Args:
        part: the program as this rank sees it.
        ops: the op of every index, for the views between a value and its reader.
        tasks: what this rank does in a step, so that a value is dropped after its last reader.
        parameters: tensor ids of the parameters that this rank holds.
        read_parameter: a parameter by tensor id, up to date.
        buffers: the model's buffers and constants by tensor id.
        device: where this rank computes.

    Attributes:
        held: what each buffer holds.
    """

    def __init__(
        self,
        part: RankProgram,
        ops: Mapping[int, LocalOp],
        tasks: Iterable[int],
        *,
        parameters: Iterable[int],
        read_parameter: Callable[[int], Tensor],
        buffers: Mapping[int, Tensor],
        device: torch.device,
    ) -> None:
        self._part = part
        self._ops = ops
        self._parameters = frozenset(parameters)
        self._read_parameter = read_parameter
        self._buffers = buffers
        self._device = device
        self._num_reads: dict[int, int] = {}
        self._last_op: dict[int, int] = {}  # position of the last op or conversion that reads it
        self._position: dict[int, int] = {}
        kind: list[int] = part.program.kind.tolist()
        for position, task in enumerate(tasks):
            self._position[task] = position
            reads_values = kind[task] in _READS_VALUES
            for buffer in part.reads(task):
                self._num_reads[buffer] = self._num_reads.get(buffer, 0) + 1
                if reads_values:
                    self._last_op[buffer] = position
        # Where parameters lie in their buckets.
        self._span: dict[int, slice] = {}
        for tensor, bucket in part.sliced_of_tensor.items():
            begins = {part.graph.updates[row][1]: at for row, at in bucket.begins().items()}
            size = part.graph.tensors[tensor].meta.num_elements
            self._span[tensor] = slice(begins[tensor], begins[tensor] + size)
        self.held: dict[int, Held] = {}
        self._left: dict[int, int] = {}
        self._batch: Mapping[int, Tensor] = {}
        self._from_batch: dict[int, Tensor] = {}

    def begin(self, batch: Mapping[int, Tensor]) -> None:
        """Start a step with the global batch by tensor id."""
        self.held = {}
        self._left = dict(self._num_reads)
        self._batch = batch
        self._from_batch = {}

    def is_read(self, buffer: int) -> bool:
        """Whether anyone on this rank still reads a buffer."""
        return bool(self._left.get(buffer))

    def is_needed_after(self, task: int, buffer: int) -> bool:
        """Whether an op or conversion on this rank reads a buffer after a task.

        Updates do not count: they read what has become of a gradient.
        """
        return self._last_op.get(buffer, -1) > self._position[task]

    def drop_read_by(self, task: int) -> None:
        """A task has run: let go what it was the last to read."""
        for buffer in self._part.reads(task):
            self._left[buffer] -= 1
            if self._left[buffer] == 0:
                self.held.pop(buffer, None)

    def zeros(self, tensor: int, shape: tuple[int, ...]) -> Tensor:
        """Zeros of a tensor's dtype on this rank's device."""
        dtype = getattr(torch, self._part.graph.tensors[tensor].dtype)
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def is_whole_needed(self, tensor: int, needed: Placement, layout: Layout | None) -> bool:
        """Whether an op reads a tensor whole, and not the units of its layout only."""
        axis = layout.axis if layout else BATCH_AXIS
        return self._part.plan.is_whole_needed(tensor, needed, axis)

    def input(
        self,
        tensor: int,
        needed: Placement,
        near: Near,
        layout: Layout | None,
        micro: int,
        *,
        whole: bool | None = None,
    ) -> Tensor:
        """A tensor placed as an op on this rank needs it.

        ``whole`` is what ``is_whole_needed`` says, if that is known already.
        """
        if whole is None:
            whole = self.is_whole_needed(tensor, needed, layout)
        value, placement = self.tensor(tensor, whole, near, layout, micro)
        return value if placement.kind != "R" else self.placed(value, needed, layout, micro)

    def placed(
        self, value: Tensor, needed: Placement, layout: Layout | None, micro: int
    ) -> Tensor:
        """Slice a whole tensor where the reader wants its own units only.

        Where it wants a part of a sum, the first device has the whole and the others nothing.
        """
        if layout is None:
            return value
        if needed.kind == "S":
            return cut(value, needed, layout.units, *self._part.samples_in(layout, micro))
        if needed.kind == "P" and layout.first(micro) != self._part.rank:
            return torch.zeros_like(value)
        return value

    def tensor(
        self, tensor: int, whole: bool, near: Near, layout: Layout | None, micro: int
    ) -> tuple[Tensor, Placement]:
        """A tensor and its placement, through the views between it and the value it looks at."""
        graph, plan = self._part.graph, self._part.plan
        maker = int(graph.producer[tensor])
        if maker < 0:
            return self._step_input(tensor, whole, near, layout, micro)
        if graph.is_view[maker]:
            source = graph.ops[maker].inputs[0]
            needed = plan.needed[maker][0]
            inner = whole or plan.is_whole_needed(source, needed, int(plan.op_axis[maker]))
            value, placement = self.tensor(source, inner, near, layout, micro)
            if inner:
                # Everything after the gather is whole as well.
                return self._view(maker, tensor, value, layout, micro, is_whole=True), R
            if placement.kind == "R":
                value = self.placed(value, needed, layout, micro)
            result = self._view(maker, tensor, value, layout, micro, is_whole=False)
            return result, plan.placements[tensor]
        return self._value(tensor, whole, near, layout, micro)

    def from_batch(self, tensor: int) -> Tensor:
        """The whole of a tensor that follows from the batch (``BatchPlan.follows_batch``).

        Every rank has the whole batch, so nothing needs to be sent. Kept until the step ends.
        """
        known = self._from_batch.get(tensor)
        if known is not None:
            return known
        graph = self._part.graph
        maker = int(graph.producer[tensor])
        if maker < 0:
            is_batch = graph.tensors[tensor].kind == TensorKind.BATCH
            return (self._batch if is_batch else self._buffers)[tensor]
        local_op = self._ops[maker]
        inputs = [self.from_batch(each) for each in graph.ops[maker].inputs]
        made = local_op(inputs, local_op.units)
        self._from_batch |= dict(zip(graph.outputs(maker), made, strict=True))
        return self._from_batch[tensor]

    def _view(
        self,
        op: int,
        tensor: int,
        value: Tensor,
        layout: Layout | None,
        micro: int,
        *,
        is_whole: bool,
    ) -> Tensor:
        count = layout.range(micro, self._part.rank)[1] if layout else 0
        local_op = self._ops[op]
        outputs = local_op([value], local_op.units if is_whole else count)
        return outputs[tensor - self._part.graph.outputs(op)[0]]

    def _step_input(
        self, tensor: int, whole: bool, near: Near, layout: Layout | None, micro: int
    ) -> tuple[Tensor, Placement]:
        bucket = self._part.sliced_of_tensor.get(tensor)
        if bucket is not None and bucket.stage == 3:
            flat = self.held[near[gathered(bucket.number)]].tensor()
            return flat[self._span[tensor]].view(self._part.graph.tensors[tensor].shape), R
        if tensor in self._parameters:
            return self._read_parameter(tensor), self._part.plan.placements[tensor]
        if self._part.graph.tensors[tensor].kind != TensorKind.BATCH:
            return self._buffers[tensor], R
        placement = self._part.plan.placements[tensor]
        value = self._batch[tensor]
        if whole:
            return value, R
        if placement.kind == "S" and layout is not None:
            value = cut(value, placement, layout.units, *self._part.samples_in(layout, micro))
        return value, placement

    def _value(
        self, tensor: int, whole: bool, near: Near, layout: Layout | None, micro: int
    ) -> tuple[Tensor, Placement]:
        """The value that a buffer holds, narrowed to the samples that are wanted."""
        value, placement = self._part.value_of[tensor], self._part.plan.placements[tensor]
        buffer = near.get((value, whole), near.get((value, not whole)))
        if buffer is None:
            assert placement == P, f"tensor {tensor} is not here"
            # A whole value seen as a partial sum: it is on another device, and zero here.
            return self.zeros(tensor, self._part.graph.tensors[tensor].shape), P
        held = self.held[buffer]
        result = held.tensor()
        if whole:
            return result, R
        if placement.kind == "S" and layout is not None:
            begin, count = layout.range(micro, self._part.rank)
            if (begin, count) != (held.begin, held.count):
                result = cut(result, placement, held.count, begin - held.begin, count)
        return result, placement
