"""Plays a rank's part of a program: kernels, transfers, collectives, optimizer steps.

The program says what happens and the plan in which order; nothing here decides. A rank goes
through the order of ``step_order`` and does the tasks it takes part in: communication is issued at
once and waited for where its result is needed. ``conversions`` moves values between layouts,
``gradients`` and ``optimizer`` make new parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from heterog.errors import StrategyError
from heterog.graph.batch_plan import ops_of_the_whole_batch
from heterog.graph.capture import CapturedStep
from heterog.graph.op_graph import TensorKind
from heterog.graph.placement import Placement
from heterog.graph.sharding_rules import Special
from heterog.runtime.collectives import Communicator
from heterog.runtime.conversions import Conversions
from heterog.runtime.gradients import Gradients
from heterog.runtime.local_op import LocalOp
from heterog.runtime.losses import Losses
from heterog.runtime.optimizer import StepUpdates, Updates
from heterog.runtime.random_stream import RandomStream
from heterog.runtime.rank_program import Layout, Near, RankProgram
from heterog.runtime.recorder import Recorder as Recorder
from heterog.runtime.slices import Slices
from heterog.runtime.step_order import LOSS, NORM, step_order
from heterog.runtime.values import Held, Values
from heterog.strategy.program import Program, TaskKind
from heterog.strategy.strategy import Strategy


class _Call(NamedTuple):
    """An op as this rank runs it, on units of a micro-batch."""

    op: int
    local_op: LocalOp
    layout: Layout | None
    begin: int
    num_units: int
    is_first: bool
    near: Near
    inputs: list[tuple[int, Placement, bool]]
    made: range


class StepExecutor:
    """One rank's part of a training step, ready to be run again and again.

    Args:
        captured: the step, captured on this rank.
        strategy: of the plan.
        program: lowered from both.
        task_order: the plan's.
        sent_before: the plan's; see ``sends_by_op``.
        rank: this rank; ranks are device indices.
        communicator: process groups of every device set in the program.
        parameters: this rank's parameters by tensor id.
        buffers: the model's buffers and constants by tensor id.
        optimizer: steps the parameters that this rank updates.
        slices: of parameters, that this rank owns.
        max_grad_norm: gradients of a larger norm, over all parameters, are scaled down to it.
        seed: of random ops; the same on all ranks.
        device: where this rank computes; all tensors it is given are there.

    Attributes:
        num_steps: steps that were called; random ops draw other numbers in each.
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
        sent_before: Sequence[tuple[int, int]] = (),
        slices: Slices | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.graph = captured.graph
        self.program = program
        self.rank = rank
        self.num_steps = 0
        self._part = RankProgram(self.graph, strategy, program, rank)
        _check(self._part)
        self._communicator = communicator
        self._parameters = parameters
        self._max_grad_norm = max_grad_norm
        device = device or torch.device("cpu")
        self._random = RandomStream(seed, rank, device)
        self._ops = {
            index: LocalOp(self.graph, self._part.plan, index, node, device)
            for index, node in enumerate(captured.node_of_op)
        }
        clips = max_grad_norm is not None
        self._turns, self._end = step_order(self._part, task_order, clips=clips).for_rank(
            self._part
        )
        self._slices = slices or Slices([], rank, {})
        self._updates = Updates(
            self._part, parameters, optimizer, communicator, device, self._slices
        )
        self._values = Values(
            self._part,
            self._ops,
            [turn.task for turn in self._turns if turn.task >= 0 and not turn.of_step_before],
            parameters=parameters,
            read_parameter=self._updates.read,
            buffers=buffers,
            device=device,
        )
        self._losses = Losses(self._part, self._values)
        self._conversions = Conversions(
            self._part, self._ops, self._values, self._losses, communicator
        )
        self._sent_before: dict[int, list[int]] = {}
        for send, task in sent_before:
            if self._part.channel(send).devices[0] == rank:
                self._sent_before.setdefault(task, []).append(send)
        self._open: StepUpdates | None = None
        self._calls: dict[int, _Call] = {}
        # As lists: single elements are looked up for every task of every step.
        self._kind = [TaskKind(kind) for kind in program.kind.tolist()]
        self._subject: list[int] = program.subject.tolist()
        self._micro: list[int] = program.micro.tolist()
        self._op: list[int] = self._part.tables.op_id.tolist()

    @property
    def recorder(self) -> Recorder | None:
        """Notified of every task of the next steps, if set."""
        return self._updates.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._updates.recorder = recorder
        self._communicator.recorder = recorder

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of all gradients together, of the step that was clipped last."""
        return self._updates.norm

    def __call__(self, batch: Mapping[int, Tensor]) -> Tensor:
        """Run one training step.

        Without a step barrier its updates may still be under way when this returns.

        Args:
            batch: the global batch by tensor id.

        Returns:
            The loss, the same on every rank.
        """
        waits = self._part.strategy.step_barrier
        before, self._open = self._open, None
        if before is not None:
            # What is sent must not change on its way, and a parameter may at the next update.
            self._communicator.flush()
        self._values.begin(batch)
        self._losses.begin()
        gradients = Gradients(
            self._part, self._values, self._parameters, self._communicator, self._slices
        )
        step = StepUpdates(gradients, self._updates.options())
        loss_work = None
        with torch.no_grad():
            for task, of_step_before in self._turns:
                if of_step_before:
                    if before is not None:
                        self._play(task, before)
                elif task == LOSS:
                    if self.program.num_devices > 1:
                        loss_work = dist.all_reduce(self._losses.total, async_op=True)
                else:
                    self._play(task, step)
                    if task >= 0:
                        self._values.drop_read_by(task)
            if waits:
                self._updates.finish()
            else:
                self._updates.step()
                self._open = step
        if loss_work is not None:
            loss_work.wait()
        self.num_steps += 1
        return self._losses.total

    def flush(self) -> None:
        """Finish all updates; without a step barrier every rank has to call it."""
        step, self._open = self._open, None
        if step is None:
            return
        with torch.no_grad():
            for task in self._end:
                self._play(task, step)
            self._updates.finish()

    def close(self) -> None:
        """End all communication once no rank has any under way; every rank has to call it."""
        self.flush()
        self._communicator.flush()
        dist.barrier()
        self._communicator.close()

    def abandon(self) -> None:
        """Wait for what has been issued, without finishing updates; needs no other rank's call.

        A process that ends while its communication is under way is aborted by gloo.
        """
        step, self._open = self._open, None
        if step is not None:
            with torch.no_grad():
                step.gradients.wait_for_issued()
                self._updates.wait_for_issued()
                self._communicator.flush()

    def _play(self, task: int, step: StepUpdates) -> None:
        """Play one task, in the state of the step that it belongs to."""
        if task == NORM:
            assert self._max_grad_norm is not None
            self._updates.clip(step, self._max_grad_norm)
            return
        recorder = self._updates.recorder
        if recorder is not None:
            recorder.begin_task(task)
        self._run(task, step)
        if recorder is not None:
            recorder.end_task(task)

    def _run(self, task: int, step: StepUpdates) -> None:
        kind, subject, micro = self._kind[task], self._subject[task], self._micro[task]
        if kind in (TaskKind.COMPUTE, TaskKind.RECOMPUTE):
            for send in self._sent_before.get(task, ()):
                self._communicator.wait_for_send(send)
            self._compute(task, subject, micro, step.gradients)
        elif kind == TaskKind.ACCUMULATE:
            step.gradients.accumulate(task, subject)
        elif kind == TaskKind.FLATTEN:
            step.gradients.flatten(subject, micro)
        elif kind == TaskKind.SUM:
            step.gradients.add_pushed(subject)
        elif kind == TaskKind.PUSH:
            step.gradients.push(task, subject)
        elif kind == TaskKind.REDUCE_SCATTER and subject in self._part.sliced:
            step.gradients.scatter(task, subject, micro)
        elif kind == TaskKind.GATHER_PARAMETERS:
            self._gather(task, subject)
        elif kind in (TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER):
            step.gradients.synchronise(task, kind, subject)
        elif kind == TaskKind.UPDATE:
            self._updates.update(subject, step)
        elif kind == TaskKind.PULL:
            self._updates.pull(task, subject)
        else:
            self._conversions.run(task, kind, subject, micro)
            if kind == TaskKind.GATHER_VALUE:
                step.gradients.keep_gathered(task, self._part.layout_of_slot(subject), micro)

    def _gather(self, task: int, number: int) -> None:
        """Gather the parameters of a bucket: for good, or for the ops that read them next."""
        if self._part.ends_update(task):
            self._updates.gather(number)
            return
        bucket = self._part.sliced[number]
        made = {int(self.program.buffer_device[b]): b for b in self._part.made(task)}
        own = self._updates.own_slice(number)
        whole = self._communicator.gather_slices(own, bucket.devices, bucket.counts, list(made))
        if whole is not None:
            self._values.held[made[self.rank]] = Held(whole)

    def _compute(self, task: int, row: int, micro: int, gradients: Gradients) -> None:
        values = self._values
        call = self._calls.get(task)
        if call is None:
            call = self._calls[task] = self._call(task, row, micro)
        op, local_op, layout, begin, count, is_first, near, wanted, made = call
        is_again = self._kind[task] == TaskKind.RECOMPUTE
        inputs = [
            values.input(tensor, needed, near, layout, micro, whole=whole)
            for tensor, needed, whole in wanted
        ]
        if is_again:
            inputs = self._with_own_buffers(op, inputs)
        if local_op.is_random:
            # Seeded by what identifies the op: run again, it draws the same numbers.
            shared = local_op.rule.special == Special.SHARED_RANDOM_STREAM
            with self._random.drawing(self.num_steps, op, micro, shared=shared):
                outputs = local_op(inputs, count, is_first=is_first)
        else:
            outputs = local_op(inputs, count, is_first=is_first)
        if local_op.rule.special == Special.NLL_GLOBAL_WEIGHT:
            assert layout is not None
            weight = self._losses.label_weight(op, local_op, layout)
            outputs[0] = outputs[0] / weight
            if len(layout.devices) == 1:  # nobody to reduce it with, and the backward reads it
                outputs[1] = weight
        for buffer, output in zip(made, outputs, strict=True):
            values.held[buffer] = Held(output, begin, count)
        if not is_again:
            gradients.keep(task, layout, micro)
            self._losses.keep(task, op, layout, micro)
        for buffer in made:
            if not values.is_read(buffer):
                del values.held[buffer]

    def _call(self, task: int, row: int, micro: int) -> _Call:
        """What stays the same whenever an op is run; looked up once."""
        part = self._part
        op = self._op[row]
        layout = part.layout_of_op(op)
        begin, count = layout.range(micro, self.rank) if layout else (0, 0)
        return _Call(
            op=op,
            local_op=self._ops[op],
            layout=layout,
            begin=begin,
            num_units=count,
            # The micro-batches of a step are summed up like its devices.
            is_first=layout is None or (layout.first(micro) == self.rank and micro == 0),
            near=part.near(task),
            inputs=[
                (tensor, needed, self._values.is_whole_needed(tensor, needed, layout))
                for tensor, needed in zip(
                    self.graph.ops[op].inputs, part.plan.needed[op], strict=True
                )
            ],
            made=part.made(task),
        )

    def _with_own_buffers(self, op: int, inputs: list[Tensor]) -> list[Tensor]:
        """Copies in place of the model's buffers: BatchNorm updates its statistics in them."""
        graph = self.graph
        kinds = [graph.tensors[graph.storage[tensor]].kind for tensor in graph.ops[op].inputs]
        return [
            value.clone() if kind == TensorKind.BUFFER else value
            for value, kind in zip(inputs, kinds, strict=True)
        ]


def _check(part: RankProgram) -> None:
    if part.num_micro == 1:
        return
    whole = ops_of_the_whole_batch(part.graph)
    if whole:
        op = part.graph.ops[whole[0]]
        raise StrategyError(
            f"{part.num_micro} micro-batches cannot be combined with ops that need the whole "
            f"batch (they would see a micro-batch only): {len(whole)}, the first is '{op.kind}' "
            f"in module '{op.module or '(root)'}'; plan without micro-batches."
        )


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
