"""Plays a rank's part of a program: kernels, transfers, collectives, optimizer steps.

The program says what happens and the plan in which order; nothing here decides. A rank goes
through the plan's task order and does the tasks it takes part in: communication is issued at once
and waited for where its result is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from heterog.errors import StrategyError
from heterog.graph.batch_plan import batch_plan
from heterog.graph.capture import CapturedStep
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import TensorKind
from heterog.graph.placement import P, Placement, R
from heterog.graph.sharding_rules import Special, local_shape
from heterog.runtime.collectives import Communicator, Pending, slice_counts
from heterog.runtime.local_op import LocalOp
from heterog.runtime.placed import cut, join
from heterog.strategy.lowering import micro_shares
from heterog.strategy.program import Program, TaskKind
from heterog.strategy.strategy import Strategy
from heterog.strategy.tables import graph_tables

Key = tuple[tuple[int, ...], tuple[int, ...]]  # devices and shares of a layout


@dataclass(slots=True)
class Held:
    """What a buffer holds: a tensor or one on its way, and which samples of the micro-batch."""

    value: Tensor | Pending
    begin: int = 0
    count: int = 0

    def tensor(self) -> Tensor:
        """The tensor, waited for if it is on its way."""
        return self.value.wait() if isinstance(self.value, Pending) else self.value


class Recorder(Protocol):
    """Hears when a rank begins and ends its tasks."""

    def begin_task(self, task: int) -> None:
        """A task of the program is about to run."""

    def end_task(self, task: int) -> None:
        """It has run; communication has only been issued."""

    def begin_update(self, parameters: Sequence[int]) -> None:
        """The optimizer is about to step these rows of ``graph.updates``, all in one call."""

    def end_update(self, parameters: Sequence[int]) -> None:
        """It has stepped them."""


class Layout:
    """Which samples each device owns, per micro-batch."""

    def __init__(self, devices: tuple[int, ...], shares: Sequence[Sequence[int]]) -> None:
        self.devices = devices
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
        """(first sample within the micro-batch, number of samples) of a device."""
        return self.begins[micro].get(device, 0), int(self.shares[micro].get(device, 0))


class StepExecutor:
    """One rank's part of a training step, ready to be run again and again.

    Args:
        captured: the step, captured on this rank.
        strategy: of the plan.
        program: lowered from both.
        task_order: the plan's.
        rank: this rank; ranks are device indices.
        communicator: process groups of every device set in the program.
        parameters: this rank's parameters by tensor id.
        buffers: the model's buffers and constants by tensor id.
        optimizer: steps the parameters that this rank updates.

    Attributes:
        recorder: told about every task of the next steps; ``None`` where nobody asks.
    """

    def __init__(
        self,
        captured: CapturedStep,
        strategy: Strategy,
        program: Program,
        task_order: Sequence[int],
        *,
        rank: int,
        communicator: Communicator,
        parameters: Mapping[int, nn.Parameter],
        buffers: Mapping[int, Tensor],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.graph = captured.graph
        self.plan = batch_plan(self.graph)
        self.grouping = group_ops(self.graph)
        self.tables = graph_tables(self.graph)
        self.strategy = strategy
        self.program = program
        self.rank = rank
        self.communicator = communicator
        self.parameters = parameters
        self.buffers = buffers
        self.optimizer = optimizer
        self.device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        self.recorder: Recorder | None = None
        self.num_micro = strategy.num_micro_batches
        self._ops = {
            index: LocalOp(self.graph, self.plan, index, node)
            for index, node in enumerate(captured.node_of_op)
        }
        self._layouts = self._make_layouts()
        self._micro_begin = self._micro_begins()
        self._value_of = {
            int(tensor): value for value, tensor in enumerate(self.tables.value_tensor)
        }
        self._parameters_of_value: dict[int, list[int]] = {}
        for row, value in enumerate(self.tables.parameter_gradient):
            self._parameters_of_value.setdefault(int(value), []).append(row)
        self._bucket_members, self._bucket_begin = self._find_bucket_members()
        self._maker = program.buffer_maker
        self._buffer_start: list[int] = program.buffer_start.tolist()
        self._reads_of: dict[int, list[int]] = {}
        self._near_of: dict[int, dict[tuple[int, bool], int]] = {}
        self._value_in_buffer: dict[int, tuple[int, bool]] = {}
        # Label counts need nothing: first on every rank, so that the loss finds them there.
        order = sorted(
            (int(task) for task in task_order), key=lambda task: not self._is_early(task)
        )
        self._tasks = [task for task in order if self._takes_part(task)]
        self._num_reads = self._count_reads()
        self._check()

    # --- what is fixed -----------------------------------------------------------------------

    def _make_layouts(self) -> list[Layout]:
        """Layout of each group."""
        known: dict[Key, Layout] = {}
        layouts = []
        for decision in self.strategy.decisions:
            key = (decision.devices, decision.shares)
            if key not in known:
                shares = micro_shares(
                    decision.shares, decision.devices, self.strategy.micro_batches, self.num_micro
                )
                known[key] = Layout(decision.devices, shares.tolist())
            layouts.append(known[key])
        return layouts

    def _find_bucket_members(self) -> tuple[dict[int, list[int]], dict[int, int]]:
        """(parameters of each bucket, first element of each parameter in its bucket)."""
        members: dict[int, list[int]] = {}
        begins: dict[int, int] = {}
        filled: dict[int, int] = {}
        for row, (_, parameter, _) in enumerate(self.graph.updates):
            bucket = int(self.program.bucket[row])
            if bucket >= 0:
                members.setdefault(bucket, []).append(row)
                begins[row] = filled.get(bucket, 0)
                filled[bucket] = begins[row] + self.graph.tensors[parameter].meta.num_elements
        return members, begins

    def _micro_begins(self) -> list[int]:
        sizes = [sum(row.values()) for row in self._layouts[0].shares]
        return [sum(sizes[:micro]) for micro in range(len(sizes))]

    def _takes_part(self, task: int) -> bool:
        if self.program.kind[task] < TaskKind.SEND:
            return bool(self.program.device[task] == self.rank)
        return self.rank in self.program.channels[self.program.channel[task]].devices

    def _is_early(self, task: int) -> bool:
        """Whether a task reduces a value that follows from the batch alone."""
        if self.program.kind[task] != TaskKind.REDUCE_VALUE:
            return False
        value = self.tables.slot_value[self.program.subject[task]]
        return bool(self.tables.value_is_early[value])

    def _reads(self, task: int) -> list[int]:
        """Buffers that a task reads; looked up once."""
        reads = self._reads_of.get(task)
        if reads is None:
            span = slice(self.program.read_start[task], self.program.read_start[task + 1])
            reads = self._reads_of[task] = [int(b) for b in self.program.read_buffer[span]]
        return reads

    def _made(self, task: int) -> range:
        """Buffers that a task makes."""
        return range(self._buffer_start[task], self._buffer_start[task + 1])

    def _near(self, task: int) -> dict[tuple[int, bool], int]:
        """Buffer of each value that a task reads, by (value, made whole); looked up once."""
        near = self._near_of.get(task)
        if near is None:
            near = {self._value_in(buffer): buffer for buffer in self._reads(task)}
            self._near_of[task] = near
        return near

    def _count_reads(self) -> dict[int, int]:
        """Local readers of each buffer, so that it is dropped after the last one."""
        counts: dict[int, int] = {}
        for task in self._tasks:
            for buffer in self._reads(task):
                counts[buffer] = counts.get(buffer, 0) + 1
        return counts

    def _check(self) -> None:
        gathers = any(self.program.kind == TaskKind.GATHER_VALUE)
        if self.num_micro > 1 and gathers:
            raise StrategyError(
                f"{self.num_micro} micro-batches cannot be combined with ops that need the whole "
                "batch (they would see a micro-batch only); plan without micro-batches."
            )

    # --- one step ----------------------------------------------------------------------------

    def __call__(self, batch: Mapping[int, Tensor]) -> Tensor:
        """Run one training step.

        Args:
            batch: the global batch by tensor id.

        Returns:
            The loss, the same on every rank.
        """
        self._batch = batch
        self._held: dict[int, Held] = {}
        self._left = dict(self._num_reads)
        self._gradient: dict[int, Tensor] = {}
        self._fresh: dict[int, Tensor | Pending] = {}
        self._received: dict[int, list[Pending]] = {}
        self._flat: dict[int, Tensor] = {}
        self._slices: dict[int, Pending] = {}
        self._totals: dict[int, Pending] = {}
        self._sums: dict[int, Tensor] = {}
        self._arriving: list[Pending] = []
        self._updating: list[int] = []
        self._label_weights: dict[int, Pending] = {}
        self._loss = self._zeros(self.graph.loss, ())
        with torch.no_grad():
            for task in self._tasks:
                if self.recorder is not None:
                    self.recorder.begin_task(task)
                self._run(task)
                self._drop(task)
                if self.recorder is not None:
                    self.recorder.end_task(task)
            self._step_optimizer()
            for pending in self._arriving:
                pending.wait()
            self.communicator.flush()
            dist.all_reduce(self._loss)
        return self._loss

    def _zeros(self, tensor: int, shape: tuple[int, ...]) -> Tensor:
        """Zeros of a tensor's dtype on this rank's device."""
        dtype = getattr(torch, self.graph.tensors[tensor].dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _drop(self, task: int) -> None:
        for buffer in self._reads(task):
            self._left[buffer] -= 1
            if self._left[buffer] == 0:
                self._held.pop(buffer, None)

    def _run(self, task: int) -> None:
        program = self.program
        kind = TaskKind(program.kind[task])
        subject, micro = int(program.subject[task]), int(program.micro[task])
        if kind == TaskKind.COMPUTE:
            self._compute(task, subject, micro)
        elif kind == TaskKind.ACCUMULATE:
            self._gradient[subject] = self._gradient[subject] + self._take_fresh(subject)
        elif kind == TaskKind.FLATTEN:
            self._flat[subject] = self._flatten(subject)
        elif kind == TaskKind.SUM:
            parts = [pending.wait() for pending in self._received[subject]]
            own = self._gradient.get(subject)
            total = parts[0].clone() if own is None else own + parts[0]
            for part in parts[1:]:
                total += part
            self._sums[subject] = total
        elif kind == TaskKind.UPDATE:
            self._update(subject)
        elif kind in (TaskKind.PUSH, TaskKind.PULL):
            self._move_parameter(task, kind, subject)
        elif kind in (TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER):
            self._synchronise(task, kind, subject)
        else:
            self._convert(task, kind, subject, micro)

    # --- ops ---------------------------------------------------------------------------------

    def _layout_of_op(self, op: int) -> Layout | None:
        """Layout of an op's group; ``None`` for constants."""
        group = int(self.grouping.group[op])
        return self._layouts[group] if group >= 0 else None

    def _compute(self, task: int, row: int, micro: int) -> None:
        op = int(self.tables.op_id[row])
        layout = self._layout_of_op(op)
        begin, count = layout.range(micro, self.rank) if layout else (0, 0)
        near = self._near(task)
        inputs = [
            self._input(tensor, needed, near, layout, micro)
            for tensor, needed in zip(self.graph.ops[op].inputs, self.plan.needed[op], strict=True)
        ]
        outputs = self._ops[op](inputs, count)
        if self._ops[op].rule.special == Special.NLL_GLOBAL_WEIGHT:
            assert layout is not None
            weight = self._label_weight(op, layout)
            outputs[0] = outputs[0] / weight
            if len(layout.devices) == 1:  # nobody to reduce it with, and the backward reads it
                outputs[1] = weight
        for buffer, output in zip(self._made(task), outputs, strict=True):
            self._held[buffer] = Held(output, begin, count)
        self._keep_gradients(task, layout, micro)
        self._keep_loss(task, op, layout, micro)
        for buffer in self._made(task):
            if not self._left.get(buffer):
                del self._held[buffer]

    def _value_in(self, buffer: int) -> tuple[int, bool]:
        """(value, whether it was made whole by a collective) of a buffer; -1 for tokens."""
        known = self._value_in_buffer.get(buffer)
        if known is None:
            known = self._value_in_buffer[buffer] = self._look_up_value(buffer)
        return known

    def _look_up_value(self, buffer: int) -> tuple[int, bool]:
        maker = int(self._maker[buffer])
        kind, subject = TaskKind(self.program.kind[maker]), int(self.program.subject[maker])
        if kind == TaskKind.COMPUTE:
            first = int(self.program.buffer_start[maker])
            return int(self.tables.value_start[subject]) + buffer - first, False
        if kind in (TaskKind.SPLIT, TaskKind.CONCAT, TaskKind.SEND):
            return int(self.tables.slot_value[subject]), False
        if kind in (TaskKind.REDUCE_VALUE, TaskKind.GATHER_VALUE):
            return int(self.tables.slot_value[subject]), True
        return -1, False

    def _input(
        self,
        tensor: int,
        needed: Placement,
        near: Mapping[tuple[int, bool], int],
        layout: Layout | None,
        micro: int,
    ) -> Tensor:
        """A tensor placed as an op on this rank needs it."""
        given = self.plan.placements[tensor]
        whole = given.kind in "SP" and given != needed
        value, placement = self._tensor(tensor, whole, near, layout, micro)
        return self._placed(value, placement, needed, layout, micro)

    def _placed(
        self,
        value: Tensor,
        placement: Placement,
        needed: Placement,
        layout: Layout | None,
        micro: int,
    ) -> Tensor:
        """Slice a whole tensor where the reader wants its own samples only."""
        if placement.kind == "R" and needed.kind == "S" and layout is not None:
            begin, count = layout.range(micro, self.rank)
            begin += self._micro_begin[micro]
            return cut(value, needed, self.graph.batch_size, begin, count)
        return value

    def _tensor(
        self,
        tensor: int,
        whole: bool,
        near: Mapping[tuple[int, bool], int],
        layout: Layout | None,
        micro: int,
    ) -> tuple[Tensor, Placement]:
        """A tensor and its placement, through the views between it and the value it looks at."""
        graph = self.graph
        maker = int(graph.producer[tensor])
        if maker < 0:
            return self._step_input(tensor, layout, micro)
        if graph.is_view[maker]:
            source = graph.ops[maker].inputs[0]
            needed = self.plan.needed[maker][0]
            given = self.plan.placements[source]
            inner = whole or (given.kind in "SP" and given != needed)
            value, placement = self._tensor(source, inner, near, layout, micro)
            if inner:
                # Everything after the gather is whole as well.
                return self._view(maker, tensor, value, layout, micro, is_whole=True), R
            value = self._placed(value, placement, needed, layout, micro)
            result = self._view(maker, tensor, value, layout, micro, is_whole=False)
            return result, self.plan.placements[tensor]
        return self._value(tensor, whole, near, layout, micro)

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
        count = layout.range(micro, self.rank)[1] if layout else 0
        outputs = self._ops[op]([value], self.graph.batch_size if is_whole else count)
        return outputs[tensor - self.graph.outputs(op)[0]]

    def _step_input(
        self, tensor: int, layout: Layout | None, micro: int
    ) -> tuple[Tensor, Placement]:
        kind = self.graph.tensors[tensor].kind
        if kind == TensorKind.PARAMETER and tensor in self.parameters:
            return self.parameters[tensor], R
        if kind != TensorKind.BATCH:
            return self.buffers[tensor], R
        placement = self.plan.placements[tensor]
        value = self._batch[tensor]
        if placement.kind == "S" and layout is not None:
            begin, count = layout.range(micro, self.rank)
            begin += self._micro_begin[micro]
            value = cut(value, placement, self.graph.batch_size, begin, count)
        return value, placement

    def _value(
        self,
        tensor: int,
        whole: bool,
        near: Mapping[tuple[int, bool], int],
        layout: Layout | None,
        micro: int,
    ) -> tuple[Tensor, Placement]:
        """The value that a buffer holds, narrowed to the samples that are wanted."""
        value, placement = self._value_of[tensor], self.plan.placements[tensor]
        buffer = near.get((value, whole), near.get((value, not whole)))
        if buffer is None:
            assert placement == P, f"tensor {tensor} is not here"
            # A whole value seen as a partial sum: it is on another device, and zero here.
            return self._zeros(tensor, self.graph.tensors[tensor].shape), P
        held = self._held[buffer]
        result = held.tensor()
        if whole:
            return result, R
        if placement.kind == "S" and layout is not None:
            begin, count = layout.range(micro, self.rank)
            if (begin, count) != (held.begin, held.count):
                result = cut(result, placement, held.count, begin - held.begin, count)
        return result, placement

    # --- losses ------------------------------------------------------------------------------

    def _keep_loss(self, task: int, op: int, layout: Layout | None, micro: int) -> None:
        """Add this rank's part of the loss when the op that makes it has run."""
        loss = self.graph.loss
        if int(self.graph.producer[self.graph.storage[loss]]) != op:
            return
        near = {(self._value_in(buffer)[0], False): buffer for buffer in self._made(task)}
        value, placement = self._tensor(loss, False, near, layout, micro)
        sharing = [d for d, n in layout.shares[micro].items() if n] if layout else [self.rank]
        if placement.kind == "P" or sharing[0] == self.rank:
            self._loss += value.reshape(()) / (1 if placement.kind == "P" else self.num_micro)

    def _label_weight(self, op: int, layout: Layout) -> Tensor:
        """Weight of the labels that count in the whole batch, on all devices together."""
        value = self._value_of[self.graph.outputs(op)[1]]
        if value not in self._label_weights:
            assert len(layout.devices) == 1, "the program reduces the label weight first"
            local = self._local_label_weight(op, layout)
            self._label_weights[value] = Pending(None, lambda: local)
        return self._label_weights[value].wait()

    def _local_label_weight(self, op: int, layout: Layout) -> Tensor:
        """Weight of this rank's labels over all micro-batches."""
        call = self._ops[op].call
        inputs = self.graph.ops[op].inputs
        needed = self.plan.needed[op]
        ignored = call.args["ignore_index"]
        assert isinstance(ignored, int)
        total = self._zeros(self.graph.outputs(op)[1], ())
        for micro in range(self.num_micro):
            if layout.range(micro, self.rank)[1] == 0:
                continue
            target = self._input(inputs[1], needed[1], {}, layout, micro)
            counts = torch.ne(target, ignored)
            if call.args.get("weight") is not None:
                weight = self._input(inputs[2], needed[2], {}, layout, micro)
                total += weight[target[counts]].sum()
            else:
                total += counts.sum()
        return total

    # --- gradients ---------------------------------------------------------------------------

    def _keep_gradients(self, task: int, layout: Layout | None, micro: int) -> None:
        for buffer in self._made(task):
            value, _ = self._value_in(buffer)
            for parameter in self._parameters_of_value.get(value, ()):
                gradient = self.graph.updates[parameter][2]
                near = {(value, False): buffer}
                result, _ = self._tensor(gradient, False, near, layout, micro)
                self._put_gradient(parameter, result)

    def _put_gradient(self, parameter: int, gradient: Tensor | Pending) -> None:
        if parameter in self._gradient:
            self._fresh[parameter] = gradient
        else:
            self._gradient[parameter] = (
                gradient.wait() if isinstance(gradient, Pending) else gradient
            )

    def _take_fresh(self, parameter: int) -> Tensor:
        fresh = self._fresh.pop(parameter)
        return fresh.wait() if isinstance(fresh, Pending) else fresh

    def _gradient_or_zeros(self, parameter: int) -> Tensor:
        gradient = self._gradient.get(parameter)
        if gradient is None:
            gradient = torch.zeros_like(self._parameter(parameter))
        return gradient

    def _parameter(self, row: int) -> nn.Parameter:
        return self.parameters[self.graph.updates[row][1]]

    def _flatten(self, bucket: int) -> Tensor:
        members = self._bucket_members[bucket]
        return torch.cat([self._gradient_or_zeros(row).reshape(-1) for row in members])

    def _synchronise(self, task: int, kind: TaskKind, bucket: int) -> None:
        channel = self.program.channels[self.program.channel[task]]
        if bucket not in self._flat:
            self._flat[bucket] = self._gradient_or_zeros(bucket).reshape(-1).clone()
        flat = self._flat[bucket]
        if kind == TaskKind.ALL_REDUCE:
            result = self.communicator.all_reduce(flat, channel.devices)
        else:
            counts = slice_counts(flat.numel(), channel.slices)
            if kind == TaskKind.REDUCE_SCATTER:
                result = self.communicator.reduce_scatter(flat, channel.devices, counts)
                self._slices[bucket] = result
            else:
                own = self._slices.pop(bucket).wait()
                result = self.communicator.all_gather(own, channel.devices, counts, torch.cat)
        for buffer in self._made(task):
            self._held[buffer] = Held(result)
        if kind != TaskKind.REDUCE_SCATTER:
            self._totals[bucket] = result

    def _total_gradient(self, parameter: int) -> Tensor:
        """The gradient summed over all devices, in the parameter's shape."""
        shape = self._parameter(parameter).shape
        bucket = int(self.program.bucket[parameter])
        if bucket >= 0:
            flat = self._totals[bucket].wait()
            begin = self._bucket_begin[parameter]
            return flat[begin : begin + shape.numel()].view(shape)
        if parameter in self._sums:
            return self._sums[parameter].view(shape)
        received = self._received.get(parameter)
        if received:
            return received[0].wait().view(shape)
        return self._gradient_or_zeros(parameter)

    def _update(self, parameter: int) -> None:
        """Give the optimizer a gradient; it steps when a result is needed, or at the end."""
        self._parameter(parameter).grad = self._total_gradient(parameter).contiguous()
        self._updating.append(parameter)

    def _step_optimizer(self) -> None:
        """Step the parameters that have a gradient; the others are left alone by ``None``."""
        if self._updating:
            assert self.optimizer is not None
            if self.recorder is not None:
                self.recorder.begin_update(self._updating)
            self.optimizer.step()
            if self.recorder is not None:
                self.recorder.end_update(self._updating)
            for parameter in self._updating:
                self._parameter(parameter).grad = None
            self._updating.clear()

    def _move_parameter(self, task: int, kind: TaskKind, parameter: int) -> None:
        """Push a gradient to where it is added, or pull a new parameter."""
        src, dst = self.program.channels[self.program.channel[task]].devices
        if self.rank == src:
            if kind == TaskKind.PULL:
                if parameter in self._updating:
                    self._step_optimizer()
                self.communicator.send(self._parameter(parameter).detach(), dst, task)
            else:
                fresh = self._fresh.get(parameter, self._gradient.get(parameter))
                assert fresh is not None
                value = fresh.wait() if isinstance(fresh, Pending) else fresh
                self.communicator.send(value, dst, task)
            return
        like = self._parameter(parameter).detach()
        if kind == TaskKind.PULL:
            self._arriving.append(self.communicator.receive(like, src, task))
            return
        pending = self.communicator.receive(torch.empty_like(like), src, task)
        if self.strategy.homes[parameter] == self.rank:
            self._received.setdefault(parameter, []).append(pending)
        else:
            self._put_gradient(parameter, pending)
        for buffer in self._made(task):
            self._held[buffer] = Held(pending)

    # --- conversions -------------------------------------------------------------------------

    def _convert(self, task: int, kind: TaskKind, slot: int, micro: int) -> None:
        value = int(self.tables.slot_value[slot])
        op = int(self.tables.op_id[self.tables.value_op[value]])
        tensor = int(self.tables.value_tensor[value])
        source = self._layout_of_op(op)
        target = self._layouts[int(self.tables.slot_group[slot])]
        placement = self.plan.placements[tensor]
        assert source is not None
        if kind == TaskKind.REDUCE_VALUE:
            self._reduce_value(task, op, tensor, micro)
        elif kind == TaskKind.GATHER_VALUE:
            self._gather_value(task, tensor, placement, target, micro)
        elif kind == TaskKind.CONCAT:
            self._concat(task, placement, target, micro)
        else:
            src, dst = self.rank, self.rank
            if kind == TaskKind.SEND:
                src, dst = self.program.channels[self.program.channel[task]].devices
            if kind == TaskKind.SPLIT:
                # Which device it is for is known by its reader; the piece is the one overlap
                # that the task's samples say, found when it is sent.
                (read,) = self._reads(task)
                held = self._held[read]
                for buffer in self._made(task):
                    self._held[buffer] = Held(held.tensor(), held.begin, held.count)
                return
            self._send(task, tensor, placement, source, target, micro, src, dst)

    def _send(
        self,
        task: int,
        tensor: int,
        placement: Placement,
        source: Layout,
        target: Layout,
        micro: int,
        src: int,
        dst: int,
    ) -> None:
        begin = count = 0
        shape = self.graph.tensors[tensor].shape
        if placement.kind == "S":
            low, owned = source.range(micro, src)
            wanted_low, wanted = target.range(micro, dst)
            begin = max(low, wanted_low)
            count = min(low + owned, wanted_low + wanted) - begin
            shape = local_shape(shape, placement, count, self.graph.batch_size)
        if self.rank == src:
            held = self._held[self._reads(task)[0]]
            value = held.tensor()
            if placement.kind == "S":
                value = cut(value, placement, held.count, begin - held.begin, count)
            self.communicator.send(value, dst, task)
            return
        like = self._zeros(tensor, shape)
        (made,) = self._made(task)
        self._held[made] = Held(self.communicator.receive(like, src, task), begin, count)

    def _concat(self, task: int, placement: Placement, target: Layout, micro: int) -> None:
        begin, count = target.range(micro, self.rank)
        parts = []
        for buffer in self._reads(task):
            held = self._held[buffer]
            low = max(held.begin, begin)
            high = min(held.begin + held.count, begin + count)
            part = cut(held.tensor(), placement, held.count, low - held.begin, high - low)
            parts.append((low, part))
        parts.sort(key=lambda pair: pair[0])
        (made,) = self._made(task)
        self._held[made] = Held(join([part for _, part in parts], placement), begin, count)

    def _reduce_value(self, task: int, op: int, tensor: int, micro: int) -> None:
        channel = self.program.channels[self.program.channel[task]]
        value = self._value_of[tensor]
        if self.tables.value_is_early[value]:
            layout = self._layout_of_op(op)
            assert layout is not None
            local = self._local_label_weight(op, layout)
        else:
            local = self._zeros(tensor, self.graph.tensors[tensor].shape)
            for buffer in self._reads(task):
                if buffer in self._held:
                    local = self._held[buffer].tensor().clone()
        pending = self.communicator.all_reduce(local.contiguous(), channel.devices)
        if self._is_early(task):
            self._label_weights[value] = pending
        for buffer in self._made(task):
            if self.program.buffer_device[buffer] == self.rank:
                self._held[buffer] = Held(pending)

    def _gather_value(
        self, task: int, tensor: int, placement: Placement, layout: Layout, micro: int
    ) -> None:
        channel = self.program.channels[self.program.channel[task]]
        shape, total = self.graph.tensors[tensor].shape, self.graph.batch_size
        shapes = [
            local_shape(shape, placement, layout.range(micro, device)[1], total)
            for device in channel.devices
        ]
        counts = [torch.Size(shape).numel() for shape in shapes]
        local = self._zeros(tensor, (0,))
        begin, count = layout.range(micro, self.rank)
        for buffer in self._reads(task):
            if count and buffer in self._held:
                held = self._held[buffer]
                part = cut(held.tensor(), placement, held.count, begin - held.begin, count)
                local = part.reshape(-1)

        def whole(parts: list[Tensor]) -> Tensor:
            shaped = [part.view(s) for part, s in zip(parts, shapes, strict=True)]
            return join([part for part in shaped if part.numel()], placement)

        pending = self.communicator.all_gather(local, channel.devices, counts, whole)
        for buffer in self._made(task):
            if self.program.buffer_device[buffer] == self.rank:
                self._held[buffer] = Held(pending)


def device_sets(program: Program) -> set[tuple[int, ...]]:
    """Device sets of the collectives in a program."""
    used = {int(number) for number in program.channel if number >= 0}
    return {
        program.channels[number].devices for number in used if program.channels[number].kind != 0
    }


def batch_by_tensor(captured: CapturedStep, batch: Any) -> dict[int, Tensor]:
    """The tensors of a batch by their ids in the graph."""
    graph = captured.graph
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    ids = graph.inputs_of_kind(TensorKind.BATCH)
    if len(leaves) != len(ids):
        raise StrategyError(
            f"the batch has {len(leaves)} tensors; the step was planned with {len(ids)}."
        )
    for leaf, tensor in zip(leaves, ids, strict=True):
        meta = graph.tensors[tensor]
        if tuple(leaf.shape) != meta.shape or str(leaf.dtype) != f"torch.{meta.dtype}":
            raise StrategyError(
                f"{meta.name} is {tuple(leaf.shape)} {leaf.dtype}; the step was planned with "
                f"{meta.shape} {meta.dtype}. Every rank gets the whole global batch."
            )
    return dict(zip(ids, leaves, strict=True))
