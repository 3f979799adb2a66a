"""The order in which ranks run a program, step after step: the same for all of them.

Nothing can deadlock, because all turns of all steps form one sequence that every rank follows:

* What a turn needs is made by turns before it, in the same step or in the one before.
* A rank waits only for turns that come before its own in the sequence (communication is issued
  without waiting; what was sent in one step is waited for when the next one begins).
* So the first turn that is not done has all its ranks at it, or on their way to it through turns
  that are done: nobody waits for anybody who waits for something later.

That is why nothing about the order may depend on a rank, on what has arrived, or on time; and why
a flush, which plays the end of a step before the next one begins, has to come from all ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from heterog.lowering.program import TaskKind
from heterog.runtime.step.rank_program import OP_KINDS, RankProgram

LOSS = -1
"""Takes the place of a task: the sum of the loss over all ranks is issued."""
NORM = -2
"""Takes the place of a task: the norm of all gradients is computed, to clip them."""

_OF_GRADIENTS = frozenset({TaskKind.SUM, TaskKind.DECODE_SUM, TaskKind.ALL_GATHER})
"""Kinds that have to wait for gradients, as updates do; others only issue communication."""


class DueTask(NamedTuple):
    """A task of this step, or a task that the step before has left open."""

    task: int
    of_step_before: bool = False


class StepOrder(NamedTuple):
    """The order of a step, and of the tasks that end one whose updates wait for the next.

    Attributes:
        turns: Turns of one step; those of the step before are skipped if nothing is open.
        end: Tasks that are still open after ``turns``.
    """

    turns: list[DueTask]
    end: list[int]

    def for_rank(self, part: RankProgram) -> "StepOrder":
        """The part of the order in which a rank takes part."""
        is_mine = part.is_mine
        return StepOrder(
            [turn for turn in self.turns if turn[0] < 0 or is_mine[turn[0]]],
            [task for task in self.end if task < 0 or is_mine[task]],
        )


def step_order(part: RankProgram, task_order: Sequence[int], *, clips: bool) -> StepOrder:
    """The order of all tasks of all ranks.

    Args:
        part: The program; the result does not depend on the rank.
        task_order: Order of tasks of the plan.
        clips: Whether all updates come after the norm of all gradients.

    With a step barrier this is the plan's order; clipping moves the updates to the end. Without
    one, what has to wait for gradients moves into the next step: before an op that reads a
    parameter come the tasks that make its new value on that device, and whatever they need. Slices
    that the plan updates between ops stay where they are, because it counts on the memory of their
    gradients from then on.

    An optimizer that does not treat each element on its own is called once in a step: all updates
    come after all gradients, and what sends new parameters after them.
    """
    together = not part.graph.updates_elementwise
    # Label counts need nothing: they come first on every rank, so that the loss finds them.
    tasks = sorted((int(task) for task in task_order), key=lambda task: not part.is_early(task))
    kinds = part.kinds
    if part.strategy.step_barrier:
        order = tasks
        if clips or together:
            updates = [task for task in tasks if part.ends_update(task)]
            if together:
                updates.sort(key=lambda task: kinds[task] != TaskKind.UPDATE)
            order = [task for task in tasks if not part.ends_update(task)]
            order += [NORM, *updates] if clips else updates
        return StepOrder([DueTask(task) for task in _with_loss(part, order)], [])
    stays = set() if clips or together else _updates_between_ops(part, tasks)
    end = [
        task
        for task in tasks
        if task not in stays and (kinds[task] in _OF_GRADIENTS or part.ends_update(task))
    ]
    late = set(end)
    begun = [task for task in tasks if task not in late]
    whole = range(0)  # places in ``end`` of what has to be done before any new parameter is read
    if clips or together:
        end.sort(
            key=lambda task: (
                part.ends_update(task),
                together and kinds[task] != TaskKind.UPDATE,
            )
        )
        first = next(i for i, task in enumerate(end) if part.ends_update(task))
        num_updates = sum(kinds[task] == TaskKind.UPDATE for task in end) if together else 0
        if clips:
            end.insert(first, NORM)
        whole = range(first, first + clips + num_updates)
    return StepOrder(_interleaved(part, _with_loss(part, begun), end, whole), end)


def _updates_between_ops(part: RankProgram, tasks: Sequence[int]) -> set[int]:
    """Updates of slices that are followed by an op of the same device."""
    program = part.program
    found: set[int] = set()
    goes_on: set[int] = set()  # devices
    for task in reversed(tasks):
        kind, device = part.kinds[task], int(program.device[task])
        if kind in OP_KINDS:
            goes_on.add(device)
        elif kind == TaskKind.UPDATE and device in goes_on:
            if part.zero_stage(int(program.subject[task])):
                found.add(task)
    return found


def _with_loss(part: RankProgram, tasks: Sequence[int]) -> list[int]:
    """Insert the sum of the loss as soon as all its parts are there."""
    program = part.program
    rows = np.flatnonzero(part.tables.op_id == part.loss_op())
    is_part = (program.kind == TaskKind.COMPUTE) & np.isin(program.subject, rows)
    parts = set(np.flatnonzero(is_part).tolist())
    after = 1 + max(position for position, task in enumerate(tasks) if task in parts)
    return [*tasks[:after], LOSS, *tasks[after:]]


def _makers(part: RankProgram, end: Sequence[int]) -> dict[tuple[int, int], int]:
    """The task that makes each new parameter, or slice of it, on each device."""
    program = part.program
    makes: dict[tuple[int, int], int] = {}
    for task in end:
        if task < 0 or not part.ends_update(task):
            continue
        subject = int(program.subject[task])
        if part.kinds[task] == TaskKind.GATHER_PARAMETERS:
            rows, devices = part.bucket_members[subject], part.channel(task).devices
            makes |= {(row, device): task for row in rows for device in devices}
        else:  # a slice is followed by its gather
            makes.setdefault((subject, int(program.device[task])), task)
    return makes


def _interleaved(
    part: RankProgram, begun: Sequence[int], end: Sequence[int], whole: range
) -> list[DueTask]:
    """The tasks of a step, each after those that the step before has left open for it.

    Args:
        part: The program.
        begun: Tasks of the step itself.
        end: Tasks that the step before has left open.
        whole: Places in ``end`` of tasks that are done together: the norm, all updates.
    """
    program, tables = part.program, part.tables
    position = {task: number for number, task in enumerate(end)}
    makes = _makers(part, end)
    turns: list[DueTask] = []
    done: set[int] = set()

    def finish(task: int) -> None:
        """Add an open task after the open tasks that it needs."""
        if task in done:
            return
        done.add(task)
        if task >= 0:
            for needed in program.dependencies(task):
                if needed in position:
                    finish(needed)
        if whole and position[task] >= whole.start:
            for needed in end[: whole.stop]:
                finish(needed)
        turns.append(DueTask(task, of_step_before=True))

    for task in begun:
        if task >= 0 and part.kinds[task] == TaskKind.GATHER_PARAMETERS:
            for row in part.bucket_members[int(program.subject[task])]:
                for device in part.channel(task).devices:
                    if (row, device) in makes:
                        finish(makes[row, device])
        if task >= 0 and part.kinds[task] == TaskKind.COMPUTE:
            row, device = program.subject[task], int(program.device[task])
            span = slice(tables.parameter_read_start[row], tables.parameter_read_start[row + 1])
            for parameter in tables.parameter_read[span]:
                made = makes.get((int(parameter), device))
                if made is not None:
                    finish(made)
        turns.append(DueTask(task))
    for task in end:
        finish(task)
    return turns
