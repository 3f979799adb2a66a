"""Pipelines whose stages do not wait, on ranks: each rank has several batches under way.

A call with a batch goes through its micro-batches (one, if batches are not cut). Micro-batch n,
counted over all batches, has five moments in this order, on a rank that is D micro-batches behind:

- The rank begins to receive inputs of micro-batch n from earlier stages, if n is the first one of
  its batch; otherwise it has begun already.
- It begins to receive inputs of micro-batch n + 1, if that belongs to the same batch.
- It begins to receive gradients for micro-batch n - D.
- It runs the backward pass of its oldest micro-batch, n - 1 - D; if that is the last one of its
  batch, it updates.
- It runs the forward pass of micro-batch n, with the weights that the first micro-batch of the
  batch found.

So messages travel while the rank computes: a message leaves only once its receive has begun, so a
rank begins to receive the next message before the pass that reads the current one. Inputs of the
next batch are the exception, because nobody has called with it yet. Each batch under way has its
own executor, which reads the weights of the batch's first forward pass. These are no copies: the
parameters get new memory before an update, and the old memory stays while a batch reads it.

There is no deadlock: a moment waits only for messages that an earlier stage sent for the same
micro-batch, or a later stage in the same micro-batch or before; a stage sends gradients before it
waits for inputs.

A rehearsal plays all stages in turn, moment by moment.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor, nn

from heterog.lowering.program import TaskKind
from heterog.modes.on_ranks import MakeExecutor, RankMode, Rehearsal
from heterog.modes.stash.value import (
    WeightStash,
    is_of_backward,
    micro_batch_of,
    oldest_weights,
    stages_of,
)
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.measure.rehearsal import BEGIN, CHECKED_EVERY, END, Stage
from heterog.runtime.step.collectives import Communicator, Pending
from heterog.runtime.step.executor import StepExecutor
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.recorder import Recorder
from heterog.runtime.step.step_order import LOSS, DueTask, StepOrder, step_order
from heterog.runtime.step.whole_model import ModelPart
from heterog.strategy.strategy import Strategy


class Moment(IntEnum):
    """Parts of a rank's work when a micro-batch comes, in order."""

    RECEIVE_INPUTS = 0
    RECEIVE_NEXT_INPUTS = 1
    RECEIVE_GRADIENTS = 2
    BACKWARD = 3
    FORWARD = 4


Turns = Mapping[tuple[int, Moment], Sequence[DueTask]]
"""The turns of a stage's ranks for each micro-batch of a batch, by moment."""


class TurnsByMoment:
    """The turns of a step, by the moment in which a rank takes them.

    Args:
        seen: The program, from the view of any rank.
        order: Order of a step.

    Attributes:
        order: The same order with all turns of the forward pass first, micro-batch by
            micro-batch. Ranks take the turns of each pass of a micro-batch in this order.
        num_micro: Number of micro-batches.
    """

    def __init__(self, seen: RankProgram, order: StepOrder) -> None:
        self._seen = seen
        program = seen.program
        late = is_of_backward(program.kind, program.subject, seen.tables).tolist()
        self._is_late: list[bool] = late
        num_reads, reads = np.diff(program.read_start), program.read_buffer
        micro = micro_batch_of(program.micro, num_reads, reads, program.buffer_maker)
        self._micro: list[int] = micro.tolist()
        self.num_micro = seen.num_micro
        stages = stages_of(seen.strategy)
        self._stage = {device: number for number, own in enumerate(stages) for device in own}
        self.order = StepOrder(sorted(order.turns, key=self._place), [])

    def of(self, stage: int) -> Turns:
        """The turns of a stage's ranks."""
        found: dict[tuple[int, Moment], list[DueTask]] = {
            (micro, moment): [] for micro in range(self.num_micro) for moment in Moment
        }
        for turn in self.order.turns:
            found[self._place(turn)[1], self._moment(turn.task, stage)].append(turn)
        for micro in range(self.num_micro):
            found[micro, Moment.RECEIVE_NEXT_INPUTS] = found[micro, Moment.RECEIVE_INPUTS]
        return found

    def _place(self, turn: DueTask) -> tuple[bool, int]:
        """(whether a turn belongs to the backward pass, its micro-batch)."""
        if turn.task == LOSS:
            return False, self.num_micro - 1
        return self._is_late[turn.task], self._micro[turn.task]

    def _moment(self, task: int, stage: int) -> Moment:
        """Moment of a task on a stage, if the stage takes part in it."""
        if task == LOSS:
            return Moment.FORWARD
        seen, is_late = self._seen, self._is_late[task]
        if seen.kinds[task] is TaskKind.SEND:
            src, dst = (self._stage[device] for device in seen.channel(task).devices)
            if src != dst and stage == dst:
                return Moment.RECEIVE_GRADIENTS if is_late else Moment.RECEIVE_INPUTS
        return Moment.BACKWARD if is_late else Moment.FORWARD


class _Batch:
    """A batch under way on a rank, or room for one.

    Args:
        make_executor: Function that makes an executor, which reads parameters by the given
            function.

    Attributes:
        weights: The parameters as its first forward pass found them, by tensor id; empty unless
            the batch still reads them.
        executor: Executor of the batch.
    """

    def __init__(self, make_executor: MakeExecutor) -> None:
        self.weights: dict[int, Tensor] = {}
        self.executor = make_executor(self.weights.__getitem__)


@dataclass(slots=True, eq=False)
class _MicroBatch:
    """A micro-batch under way on a rank.

    Attributes:
        batch: Its batch.
        number: Its number in the batch.
        receives_inputs: Whether the rank has begun to receive its inputs.
        receives_gradients: Whether the rank has begun to receive its gradients.
    """

    batch: _Batch
    number: int
    receives_inputs: bool = False
    receives_gradients: bool = False


class StashedTraining(RankMode):
    """The batches under way on one rank.

    Args:
        turns: Turns of a step by moments, the same on all ranks.
        strategy: Strategy with a stash.
        rank: Number of this rank.
        parameters: Parameters of this rank, by tensor id.
        make_executor: Function that makes an executor, which reads parameters by the given
            function and follows ``turns.order``.
        flush: Ends communication that is under way.

    Attributes:
        num_micro: Number of micro-batches of a batch.
        loss_delay: Number of calls by which a batch's loss is late on all ranks: the staleness of
            the first stage.
        is_alone: Whether every micro-batch ends before the next one begins, as in the plan's
            timeline.
    """

    is_free_running = True

    def __init__(
        self,
        turns: TurnsByMoment,
        strategy: Strategy,
        rank: int,
        parameters: Mapping[int, nn.Parameter],
        make_executor: MakeExecutor,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        stash = strategy.own_mode(WeightStash)
        stages = stages_of(strategy)
        stage = next((number for number, own in enumerate(stages) if rank in own), None)
        self.num_micro = turns.num_micro
        self.loss_delay = oldest_weights(strategy)
        self.is_alone = False
        self._behind = 0 if stage is None else stash.behind(stage, len(stages))
        self._late_losses: list[float] = []
        self._parameters = parameters
        self._flush = flush
        self._free = [_Batch(make_executor) for _ in range(self._behind // self.num_micro + 2)]
        own = set(self._free[0].executor.turns)
        every = turns.of(-1 if stage is None else stage)
        self._turns: Turns = {
            key: [turn for turn in of_moment if turn in own] for key, of_moment in every.items()
        }
        self._to_come: deque[_MicroBatch] = deque()  # of the newest batch
        self._under_way: deque[_MicroBatch] = deque()
        self._losses: deque[Pending] = deque()

    @property
    def executors(self) -> list[StepExecutor]:
        """Executors of all batches that may be under way."""
        under_way = dict.fromkeys(each.batch for each in self._under_way)
        return [each.executor for each in (*under_way, *self._free)]

    def record(self, recorder: Recorder | None, *, is_alone: bool | None = None) -> None:
        """Notify a recorder, or none, of every task of the next batches."""
        for executor in self.executors:
            executor.recorder = recorder
        if is_alone is not None:
            self.is_alone = is_alone

    @property
    def is_alike(self) -> bool:
        """Whether all stages have updated with every batch."""
        return not self._under_way

    def why_apart(self, num_steps: int) -> str:
        """Why stages have weights of different steps; empty if they do not."""
        if self.is_alike:
            return ""
        return (
            f"after step {num_steps} stages of this plan have batches under way, and weights of "
            "different steps; call settle() on every rank, then read or save the model."
        )

    def run(self, batch: Mapping[int, Tensor], num_steps: int) -> Tensor:
        """Begin a batch, and end an older one.

        Args:
            batch: The global batch, by tensor id.
            num_steps: Number of steps before it since the start of training.

        Returns:
            The loss of the batch ``loss_delay`` calls before, the same on every rank; NaN if there
            was none since the last ``settle``.
        """
        with torch.no_grad():
            self.begin(batch, num_steps)
            for _ in range(self.num_micro):
                self.begin_micro_batch()
                for moment in Moment:
                    self._play(moment)
                if self.is_alone:
                    self._end_all()
            return self.end()

    def begin(self, batch: Mapping[int, Tensor], number: int) -> None:
        """Begin a call; a rehearsal makes the parts of a call one by one."""
        newest = self._free.pop()
        newest.executor.num_steps = number
        newest.executor.begin(batch)
        self._to_come.extend(_MicroBatch(newest, micro) for micro in range(self.num_micro))

    def begin_micro_batch(self) -> None:
        """Begin with the next micro-batch of the newest batch."""
        self._under_way.append(self._to_come.popleft())

    def enter(self, moment: Moment, *, is_last: bool = False) -> _MicroBatch | None:
        """Begin a moment; returns its micro-batch, or ``None`` if it has none.

        Args:
            moment: The moment.
            is_last: Whether no more micro-batches come, so that the oldest one need not wait for
                any.
        """
        if moment in (Moment.RECEIVE_INPUTS, Moment.RECEIVE_NEXT_INPUTS):
            return self._receiving_inputs(moment)
        if moment == Moment.RECEIVE_GRADIENTS:
            return self._receiving_gradients(is_last=is_last)
        oldest, newest = self._under_way[0], self._under_way[-1]
        if moment == Moment.BACKWARD:
            return oldest if is_last or len(self._under_way) > self._behind + 1 else None
        if newest.number == 0:
            newest.batch.weights.update(
                {tensor: value.detach() for tensor, value in self._parameters.items()}
            )
        return newest

    def _receiving_inputs(self, moment: Moment) -> _MicroBatch | None:
        """The newest micro-batch, or the next one of its batch, if its inputs are due."""
        found: _MicroBatch | None = self._under_way[-1]
        if moment == Moment.RECEIVE_NEXT_INPUTS:
            found = self._to_come[0] if self._to_come and not self.is_alone else None
        if found is None or found.receives_inputs:
            return None
        found.receives_inputs = True
        return found

    def _receiving_gradients(self, *, is_last: bool) -> _MicroBatch | None:
        """Micro-batch n - D; if no more come, the oldest one that receives no gradients yet."""
        due = len(self._under_way) if is_last else len(self._under_way) - self._behind
        waiting = (each for each in self._under_way if not each.receives_gradients)
        found = next(waiting, None) if due > 0 else None
        if found is not None:
            found.receives_gradients = True
        return found

    def leave(self, moment: Moment, ended: _MicroBatch | None) -> None:
        """End a moment of a micro-batch, if it had one."""
        if ended is None:
            return
        is_whole = ended.number == self.num_micro - 1
        if moment == Moment.FORWARD and is_whole:
            self._losses.append(ended.batch.executor.end_forward())
        if moment == Moment.BACKWARD:
            self._under_way.popleft()
            if is_whole:
                self._end_batch(ended.batch)

    def _end_batch(self, ended: _Batch) -> None:
        """Update with the gradients of a batch.

        The parameters get new memory if batches under way read the old memory.
        """
        ended.weights.clear()
        if any(each.batch.weights for each in self._under_way):
            for value in self._parameters.values():
                value.data = value.data.clone()
        ended.executor.end_backward()
        self._free.append(ended)

    def end(self) -> Tensor:
        """End a call; returns its loss."""
        if len(self._losses) <= self.loss_delay:
            return torch.tensor(torch.nan)
        return self._losses.popleft().wait()

    def settle(self, num_steps: int) -> None:
        """End all batches under way; every rank must call it."""
        with torch.no_grad():
            self._end_all()
        self._late_losses += [float(each.wait()) for each in self._losses]
        self._losses.clear()
        self._flush()

    def take_late_losses(self) -> list[float]:
        """Losses of the last batches before each ``settle``, which no call has returned."""
        found, self._late_losses = self._late_losses, []
        return found

    def _end_all(self) -> None:
        """End all micro-batches under way."""
        while not self.is_alike:
            self._play(Moment.RECEIVE_GRADIENTS, is_last=True)
            self._play(Moment.BACKWARD, is_last=True)

    def _play(self, moment: Moment, *, is_last: bool = False) -> None:
        about = self.enter(moment, is_last=is_last)
        if about is not None:
            about.batch.executor.play(self._turns[about.number, moment])
        self.leave(moment, about)


def training_of(step: "DeployedStep") -> StashedTraining:
    """The batches under way of a deployed step."""
    plan, seen = step.plan, step.rank_program
    turns = TurnsByMoment(seen, step_order(seen, plan.task_order, clips=False))

    def make_executor(read: Callable[[int], Tensor] | None) -> StepExecutor:
        # The stash limits how far ranks run ahead, so no op has to wait for sends.
        return step.executor_of(step.captured, seen, turns.order, (), read)

    return StashedTraining(
        turns,
        plan.strategy,
        step.rank,
        step.part.parameters,
        make_executor,
        step.communicator.flush,
    )


class RehearsedStash(Rehearsal):
    """The batches under way on all ranks.

    Args:
        stage: All ranks of the plan.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._turns: TurnsByMoment | None = None
        self._stashed: list[StashedTraining] = []

    def ordered(self, seen: RankProgram, order: StepOrder) -> StepOrder:
        """The order with the turns of the forward pass first."""
        self._turns = TurnsByMoment(seen, order)
        return self._turns.order

    def add_rank(
        self,
        seen: RankProgram,
        part: ModelPart,
        communicator: Communicator,
        make_executor: MakeExecutor,
    ) -> bool:
        """Make the executors of a rank's batches."""
        assert self._turns is not None
        strategy, parameters = self._stage.strategy, part.parameters
        self._stashed.append(
            StashedTraining(self._turns, strategy, seen.rank, parameters, make_executor)
        )
        return True

    def play(self) -> bool:
        """Run batches until the pipeline is full and every stage has ended one.

        In a moment a stage waits only for messages of earlier stages, or of later stages in the
        backward pass. So stages take a moment one after another, and the ranks of a stage take it
        turn by turn. At last all batches end, the last stage first.
        """
        turns = self._turns
        assert turns is not None
        stages = stages_of(self._stage.strategy)
        idle = tuple(sorted(set(self._stage.every_rank).difference(*stages)))
        by_stage = [(own, turns.of(number)) for number, own in enumerate(stages)]
        if idle:
            by_stage.append((idle, turns.of(-1)))
        for number in range(self._stashed[0].loss_delay + 2):
            for rank in self._stage.every_rank:
                self._stage.now = rank, BEGIN
                self._stashed[rank].begin(self._stage.batch, number)
            for _ in range(turns.num_micro):
                for rank in self._stage.every_rank:
                    self._stashed[rank].begin_micro_batch()
                for moment in Moment:
                    backwards = moment == Moment.BACKWARD
                    for own, own_turns in reversed(by_stage) if backwards else by_stage:
                        self._play_moment(own, moment, own_turns)
            for rank in self._stage.every_rank:
                self._stage.now = rank, END
                self._stashed[rank].end()
        for own, own_turns in reversed(by_stage):
            while not self._stashed[own[0]].is_alike:
                for moment in (Moment.RECEIVE_GRADIENTS, Moment.BACKWARD):
                    self._play_moment(own, moment, own_turns, is_last=True)
        return True

    def _play_moment(
        self, ranks: Sequence[int], moment: Moment, turns: Turns, *, is_last: bool = False
    ) -> None:
        """Run a moment on the ranks of a stage, turn by turn.

        Args:
            ranks: The ranks.
            moment: The moment.
            turns: Turns of the stage.
            is_last: Whether no more batches come.
        """
        about = {rank: self._stashed[rank].enter(moment, is_last=is_last) for rank in ranks}
        # All ranks of a stage are at the same micro-batch.
        number = next((each.number for each in about.values() if each is not None), 0)
        for place, turn in enumerate(turns[number, moment]):
            if place % CHECKED_EVERY == 0:
                self._stage.check()
            for rank in self._stage.ranks_of(turn.task):
                micro_batch = about.get(rank)
                if micro_batch is not None:
                    self._stage.now = rank, turn.task
                    micro_batch.batch.executor.take(turn)
        for rank in ranks:
            self._stashed[rank].leave(moment, about[rank])
