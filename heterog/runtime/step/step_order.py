"""The order in which ranks run a program, step after step: the same for all of them.

Nothing can deadlock, because all turns of all steps form one sequence that every rank follows:

* The inputs of a turn are made by earlier turns, in the same step or in the previous one.
* A rank waits only for turns that come before its own in the sequence (communication is issued
  without waiting; a rank waits for sends of one step when the next one begins).
* So all ranks of the first turn that is not done are at it, or on their way to it through turns
  that are done: no rank waits for a rank that waits for a later turn.

Therefore the order may not depend on a rank, on arrivals, or on time; and all ranks have to call a
flush, which plays the end of a step before the next one begins.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.lowering.program import OP_KINDS, IntArray, TaskKind
from heterog.runtime.step.rank_program import RankProgram

LOSS = -1
"""Takes the place of a task: the sum of the loss over all ranks is issued."""
NORM = -2
"""Takes the place of a task: the norm of all gradients is computed, to clip them."""

_OF_GRADIENTS = frozenset({TaskKind.SUM, TaskKind.DECODE_SUM, TaskKind.ALL_GATHER})
"""Kinds that wait for gradients, as updates do; other kinds only issue communication."""


class DueTask(NamedTuple):
    """A task of this step, or a task that the previous step has left open."""

    task: int
    of_step_before: bool = False


class StepOrder(NamedTuple):
    """The order of a step, and of the tasks that end a step whose updates wait for the next.

    Attributes:
        turns: Turns of one step; turns of the previous step are skipped if nothing is open.
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


def step_order(
    part: RankProgram, task_order: Sequence[int] | IntArray, *, clips: bool, own: bool = False
) -> StepOrder:
    """The order of all tasks of all ranks, or of those that one rank needs.

    Args:
        part: The program; the order does not depend on the rank.
        task_order: Order of tasks of the plan.
        clips: Whether all updates come after the norm of all gradients.
        own: Whether turns may be left out in which the rank takes no part, as they are in steps
            that end with a barrier.

    With a step barrier this is the plan's order; clipping moves the updates to the end. Without
    one, tasks that wait for gradients move into the next step: the tasks that make the new value
    of a parameter on a device, and the tasks that they need, come before the first op that reads
    it there. Updates of slices that the plan has between ops stay where they are, because the plan
    counts on the memory of their gradients from then on.

    An optimizer that does not treat each element on its own is called once in a step: all updates
    come after all gradients, and sends of new parameters come after all updates.
    """
    together = not part.graph.updates_elementwise
    # Label counts have no inputs: they come first on every rank, so that the loss finds them.
    planned, is_early = np.array(task_order), np.zeros(part.program.num_tasks, np.bool_)
    is_early[list(part.early)] = True
    if own and part.strategy.step_barrier:
        planned = planned[(part.is_mine | _is_part_of_loss(part))[planned]]
    early = is_early[planned]
    tasks: list[int] = np.concatenate([planned[early], planned[~early]]).tolist()
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
    whole = range(0)  # places in ``end`` of tasks that precede any read of a new parameter
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
    """Insert the sum of the loss after the last of its parts."""
    parts = set(np.flatnonzero(_is_part_of_loss(part)).tolist())
    after = 1 + max(position for position, task in enumerate(tasks) if task in parts)
    return [*tasks[:after], LOSS, *tasks[after:]]


def _is_part_of_loss(part: RankProgram) -> npt.NDArray[np.bool_]:
    """Whether each task makes a part of the loss.  # [num_tasks]"""
    program = part.program
    rows = np.flatnonzero(part.tables.op_id == part.loss_op())
    is_part: npt.NDArray[np.bool_] = np.isin(program.subject, rows)
    is_part &= program.kind == TaskKind.COMPUTE
    return is_part


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
        else:  # a slice's gather, which follows, replaces its update
            makes.setdefault((subject, int(program.device[task])), task)
    return makes


def _interleaved(
    part: RankProgram, begun: Sequence[int], end: Sequence[int], whole: range
) -> list[DueTask]:
    """The tasks of a step, each after the open tasks of the previous step that it needs.

    Args:
        part: The program.
        begun: Tasks of the step itself.
        end: Tasks that the previous step has left open.
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
