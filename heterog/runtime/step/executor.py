"""Runs a rank's part of a program: kernels, transfers, collectives, optimizer steps.

The program has the tasks and the plan their order; this module decides nothing. A rank follows the
order of ``step_order`` and does the tasks in which it takes part: communication is issued at once
and waited for where its result is needed. The first step is interpreted (``interpreter``); in
later steps the ops between two points of communication are one function (``segments``).
``conversions`` moves values between divisions, ``gradients`` and ``optimizer`` make new
parameters.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from heterog.errors import StrategyError
from heterog.graph.batch_plan import micro_batches_refused
from heterog.grouped import grouped
from heterog.lowering.program import OP_KINDS, IntArray, Program, TaskKind
from heterog.modes.mode import Traffic
from heterog.runtime.step.collectives import Pending
from heterog.runtime.step.compiled import Compiler
from heterog.runtime.step.conversions import Conversions
from heterog.runtime.step.gradients import ErrorFeedback, Gradients
from heterog.runtime.step.interpreter import Interpreter
from heterog.runtime.step.losses import Losses
from heterog.runtime.step.optimizer import (
    LossScale,
    StepUpdates,
    Updates,
    op_that_begins_backward,
)
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.recorder import Recorder as Recorder
from heterog.runtime.step.segments import Piece, Segments, lying_as
from heterog.runtime.step.step_order import LOSS, NORM, DueTask, StepOrder
from heterog.runtime.step.values import HeldValue, Values
from heterog.strategy.strategy import Strategy


class StepExecutor:
    """One rank's part of a training step, ready to be run again and again.

    Args:
        rank: What the rank runs the program with.
        order: Order of this rank's tasks; with clipping if ``max_grad_norm`` is given.
        sent_before: Pairs (transfer, op) of the plan; see ``sends_by_op``.
        read_parameter: Reads a parameter, by tensor id, as the batch's forward pass has read it,
            if several batches are under way; if ``None``, parameters are read as they are.
        max_grad_norm: Largest norm over all parameters; larger gradients are scaled down to it.
        loss_scale: Scale of the loss, if it is scaled.
        compiler: Compiles segments from the second step on; ``None`` runs them as they are.

    Attributes:
        part: The program as this rank sees it.
        turns: This rank's tasks in a step, in order.
        num_steps: Number of steps called; random ops draw other numbers in each.
        feedback: Parts of this rank's gradients that codecs have left out so far.
        times_segments: Whether ``recorder`` is notified of whole segments, each by its first task,
            instead of single tasks.
    """

    def __init__(
        self,
        rank: RankState,
        order: StepOrder,
        *,
        sent_before: Sequence[tuple[int, int]] | IntArray = (),
        read_parameter: Callable[[int], Tensor] | None = None,
        max_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        part = self.part = rank.part
        self.program = part.program
        self.num_steps = 0
        self.feedback = ErrorFeedback()
        self.times_segments = False
        self._rank = rank
        self._is_alone = read_parameter is None  # no other batch is under way
        if refused := micro_batches_refused(part.graph, part.num_micro):
            raise StrategyError(refused)
        self._max_grad_norm = max_grad_norm
        self._loss_scale = loss_scale
        facts, modes = (part.graph, part.strategy, part.rank), part.strategy.modes
        self._scale = None
        for scale in filter(None, (mode.gradient_scale(*facts) for mode in modes)):
            self._scale = torch.tensor(scale, dtype=torch.float64, device=rank.device)
        loss_parts = (mode.loss_part(*facts) for mode in modes)
        self._loss_part = next((each for each in loss_parts if each is not None), None)
        self.turns, self._end = order
        self._updates = Updates(rank)
        self._values = Values(
            rank,
            [turn.task for turn in self.turns if turn.task >= 0 and not turn.of_step_before],
            read_parameter or self._updates.read,
        )
        self._losses = Losses(rank, self._values)
        self._conversions = Conversions(rank, self._values, self._losses)
        begins_backward = op_that_begins_backward(part.graph) if loss_scale else None
        self._interpreter = Interpreter(
            rank, self._values, self._losses, self._conversions, begins_backward
        )
        pairs = np.array(sent_before, np.int32).reshape(-1, 2)
        own = pairs[self.program.senders(pairs[:, 0]) == part.rank].tolist()
        self._sent_before = grouped((task, send) for send, task in own)
        self._open: StepUpdates | None = None
        self._before: StepUpdates | None = None
        self._step: StepUpdates | None = None
        self._summed_loss: Pending | None = None
        self._pieces: dict[tuple[DueTask, int, bool], list[Piece]] = {}
        self._strides: dict[int, tuple[int, ...]] = {}  # of the batches, if steps are compiled
        self._kind = part.kinds
        # With a barrier all parameters are complete when a step begins.
        is_late = not (self._is_alone and part.strategy.step_barrier)
        self._segments = Segments(
            rank=rank,
            values=self._values,
            read_parameter=(read_parameter or self._updates.read) if is_late else None,
            updates=self._updates,
            sent_before=self._sent_before,
            noted=self._interpreter.noted,
            compiler=compiler,
        )

    @property
    def recorder(self) -> Recorder | None:
        """Recorder notified of every task of the next steps, if set."""
        return self._updates.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._updates.recorder = recorder
        self._rank.communicator.recorder = recorder

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of all gradients together, in the last step that was clipped."""
        return self._updates.norm

    def __call__(self, batch: Mapping[int, Tensor]) -> Tensor:
        """Run one training step.

        Without a step barrier its updates may still be under way when this returns.

        Args:
            batch: The global batch, by tensor id.

        Returns:
            The loss, the same on every rank.
        """
        with torch.no_grad():
            self.begin(batch)
            self.play(self.turns)
            loss = self.end()
            self._pieces_of(self.turns)  # made after the first step, so the second is not slower
            return loss

    def begin(self, batch: Mapping[int, Tensor]) -> None:
        """Begin a step; ``rehearsal`` calls the parts of a step one by one.

        Args:
            batch: The global batch, by tensor id.
        """
        self._before, self._open = self._open, None
        self._values.begin(batch if self._segments.compiler is None else self._laid(batch))
        # Sends must end first: a sent parameter may change at the next update. Received values
        # that no task has read are freed.
        if self._is_alone:
            self._rank.communicator.flush()
        self._losses.begin()
        self._step = StepUpdates(
            Gradients(self._rank, self._values, self.feedback),
            self._updates.options(),
            scale=self._scale,
            loss_scale=1.0 if self._loss_scale is None else self._loss_scale.scale,
        )
        self._summed_loss = None

    def _laid(self, batch: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """A batch that lies in memory as the first one did, for which segments are compiled."""
        plain = {tensor: value.resolve_conj().resolve_neg() for tensor, value in batch.items()}
        if not self._strides:  # of memory without holes, which ``empty_like`` has
            self._strides |= {key: torch.empty_like(each).stride() for key, each in plain.items()}
        return {key: lying_as(each, self._strides[key], each.dtype) for key, each in plain.items()}

    def play(self, turns: Sequence[DueTask]) -> None:
        """Run some consecutive turns: one by one in the first step, then as segments."""
        if not turns:
            return
        recorder, step, values = self._updates.recorder, self._step, self._values
        assert step is not None
        for turn, segment in self._pieces_of(turns) or [Piece(turn, None) for turn in turns]:
            if segment is None:
                self.take(turn)
                continue
            if recorder is not None:
                recorder.begin_task(turn.task)
            segment(values.held, values.batch, step, self.num_steps)
            if recorder is not None:
                recorder.end_task(turn.task)

    def _pieces_of(self, turns: Sequence[DueTask]) -> list[Piece] | None:
        """Turns cut into segments; ``None`` before all their ops have run once."""
        apart = self._updates.recorder is not None and not self.times_segments
        key = turns[0], len(turns), apart
        if key not in self._pieces:
            ops = (task for task, _ in turns if task >= 0 and self._kind[task] in OP_KINDS)
            if not all(task in self._interpreter.noted for task in ops):
                return None
            self._pieces[key] = self._segments.pieces(turns, apart=apart)
        return self._pieces[key]

    def take(self, turn: DueTask) -> None:
        """Run one of ``turns`` by itself; call it in their order."""
        assert self._step is not None
        task, of_step_before = turn
        step = self._before if of_step_before else self._step
        if task == LOSS:
            if self.program.num_devices > 1:
                self._summed_loss = self._sum_loss()
        elif step is not None:  # the first step has none before it
            self._play(task, step)
            if task >= 0 and not of_step_before:
                for buffer in self.part.reads(task):
                    if self._values.is_last_reader(task, buffer):
                        self._values.held.pop(buffer, None)

    def _sum_loss(self) -> Pending | None:
        """Sum the parts of the loss of all ranks, or of the ranks that a mode names."""
        total = self._losses.total
        if self._loss_part is None:
            return self._rank.communicator.sum_over_all(total)
        factor, devices = self._loss_part
        total *= factor
        return self._rank.communicator.all_reduce(total, devices) if len(devices) > 1 else None

    def end(self) -> Tensor:
        """End a step after its last turn; returns the loss."""
        self._interpreter.write_counters()
        if self.part.strategy.step_barrier:
            self._updates.finish()
        else:
            self._updates.step()
            self._open = self._step
        # With a barrier the step's gradients are no longer needed.
        self._before = self._step = None
        if self._summed_loss is not None:
            self._summed_loss.wait()
        self.num_steps += 1
        return self._losses.total

    def end_forward(self) -> Pending:
        """End the forward pass of a batch whose backward pass comes later.

        Returns:
            The loss, the same on every rank; its sum may still be under way.
        """
        self._interpreter.write_counters()
        loss, self._summed_loss = self._summed_loss, None
        assert loss is not None
        return loss

    def end_backward(self) -> None:
        """End the backward pass of a batch while others are under way: the optimizer steps."""
        self._interpreter.write_counters()
        self._updates.step()
        self._values.let_go()
        self._before = self._step = None

    def flush(self) -> None:
        """Finish all updates; without a step barrier every rank has to call it."""
        if self._open is None:
            return
        with torch.no_grad():
            for task in self._end:
                self.take_open(task)
            self.end_flush()

    def take_open(self, task: int) -> None:
        """Run a task that the last step has left open; a part of ``flush``."""
        assert self._open is not None
        self._play(task, self._open)

    def end_flush(self) -> None:
        """Finish the updates of the last step once all its tasks have run."""
        self._open = None
        self._updates.finish()

    def close(self) -> None:
        """End all communication once no rank has any under way; every rank has to call it."""
        self.flush()
        self._rank.communicator.flush()
        dist.barrier()
        self._rank.communicator.close()

    def abandon(self) -> None:
        """Wait for issued communication without finishing updates; needs no other rank's call.

        A process that ends while its communication is under way is aborted by gloo.
        """
        step, self._open = self._open, None
        if step is not None:
            with torch.no_grad():
                step.gradients.wait_for_issued()
                self._updates.wait_for_issued()
                self._rank.communicator.flush()

    def _play(self, task: int, step: StepUpdates) -> None:
        """Run one task, in the state of the step that it belongs to."""
        if task == NORM:
            self._updates.clip(step, self._max_grad_norm, self._loss_scale)
            return
        recorder = self._updates.recorder
        if recorder is not None:
            recorder.begin_task(task)
        act = _ACTION[self._kind[task]]
        assert act is not None
        act(self, task, self.part.subjects[task], self.part.micros[task], step)
        if recorder is not None:
            recorder.end_task(task)

    def _synchronise(self, task: int, bucket: int, micro: int, step: StepUpdates) -> None:
        kind = self._kind[task]
        if bucket in self.part.sliced:
            if kind == TaskKind.REDUCE_SCATTER:
                step.gradients.scatter(task, bucket, micro)
            else:
                step.gradients.add_up_copies(task, bucket)
        else:
            step.gradients.synchronise(task, kind, bucket)

    def _encode(self, task: int, subject: int, micro: int, step: StepUpdates) -> None:
        if self.program.encodes_value(task):
            self._conversions.run(task, subject, micro)
        elif self.part.rule(task).traffic == Traffic.PARAMETERS:
            self._updates.encode(task, subject)
        else:
            step.gradients.encode(task, subject)

    def _decode_sum(self, task: int, subject: int, _: int, step: StepUpdates) -> None:
        if self.part.rule(task).traffic == Traffic.PARAMETERS:
            self._updates.decode(subject)
        else:
            step.gradients.decode(task)

    def _convert(self, task: int, subject: int, micro: int, step: StepUpdates) -> None:
        self._conversions.run(task, subject, micro)

    def _gather_value(self, task: int, slot: int, micro: int, step: StepUpdates) -> None:
        self._conversions.run(task, slot, micro)
        value = int(self.part.tables.slot_value[slot])
        spans = self.part.spans_of_op[self.part.maker(value)]
        step.gradients.keep(task, spans, micro, gathered_by=slot)

    def _gather(self, task: int, number: int, micro: int, step: StepUpdates) -> None:
        """Gather the parameters of a bucket, to keep them or for the next ops that read them."""
        if self.part.ends_update(task):
            self._updates.gather(number)
            return
        bucket = self.part.sliced[number]
        made = {int(self.program.buffer_device[b]): b for b in self.part.made(task)}
        own = self._rank.slices.own[number].detach()
        communicator, devices = self._rank.communicator, bucket.devices
        whole = communicator.gather_slices(own, devices, bucket.counts, list(made))
        if whole is not None:
            self._values.held[made[self.part.rank]] = HeldValue(whole)

    def _run_op(self, task: int, row: int, micro: int, step: StepUpdates) -> None:
        for send in self._sent_before.get(task, ()):
            self._rank.communicator.wait_for_send(send)
        self._interpreter.run(task, row, micro, step, self.num_steps)


_Action = Callable[[StepExecutor, int, int, int, StepUpdates], None]
_ACTIONS: Mapping[TaskKind, _Action] = {
    TaskKind.COMPUTE: StepExecutor._run_op,
    TaskKind.RECOMPUTE: StepExecutor._run_op,
    TaskKind.REMAKE: StepExecutor._run_op,
    TaskKind.ACCUMULATE: lambda _, task, row, __, step: step.gradients.accumulate(task, row),
    TaskKind.FLATTEN: lambda _, task, number, micro, step: step.gradients.flatten(
        task, number, micro
    ),
    TaskKind.SUM: lambda _, task, row, __, step: step.gradients.add_pushed(task, row),
    TaskKind.ENCODE: StepExecutor._encode,
    TaskKind.DECODE: StepExecutor._convert,
    TaskKind.DECODE_SUM: StepExecutor._decode_sum,
    TaskKind.UPDATE: lambda ex, _, row, __, step: ex._updates.update(row, step),
    TaskKind.PUSH: lambda _, task, row, __, step: step.gradients.push(task, row),
    TaskKind.PULL: lambda ex, task, row, _, __: ex._updates.pull(task, row),
    TaskKind.ALL_REDUCE: StepExecutor._synchronise,
    TaskKind.REDUCE_SCATTER: StepExecutor._synchronise,
    TaskKind.ALL_GATHER: StepExecutor._synchronise,
    TaskKind.GATHER_PARAMETERS: StepExecutor._gather,
    TaskKind.SPLIT: StepExecutor._convert,
    TaskKind.CONCAT: StepExecutor._convert,
    TaskKind.SEND: StepExecutor._convert,
    TaskKind.REDUCE_VALUE: StepExecutor._convert,
    TaskKind.GATHER_VALUE: StepExecutor._gather_value,
    TaskKind.SCATTER_VALUE: StepExecutor._convert,
    TaskKind.EXCHANGE_VALUE: StepExecutor._convert,
    TaskKind.GATHER_ROWS: StepExecutor._convert,
}
"""Runs a task of each kind; takes the executor, the task, its subject, its micro-batch and the
state of the step."""
_ACTION = [_ACTIONS.get(kind) for kind in TaskKind]
# By number: members of an enum are slow keys in Python 3.11.


def device_sets(program: Program, strategy: Strategy) -> set[tuple[int, ...]]:
    """Device sets of the collectives in a program, and those that modes add."""
    used = np.unique(program.channel[program.channel >= 0]).tolist()
    found = {
        program.channels[number].devices for number in used if program.channels[number].kind != 0
    }
    return found.union(*(mode.device_sets(program, strategy) for mode in strategy.modes))
