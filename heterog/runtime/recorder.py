"""What a rank reports about its tasks while it runs them, and a recorder of their times."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from heterog.strategy.program import FloatArray


class Recorder(Protocol):
    """Is notified when a rank begins and ends its tasks."""

    def begin_task(self, task: int) -> None:
        """A task of the program is about to run."""

    def end_task(self, task: int) -> None:
        """It has run; communication has only been issued."""

    def begin_update(self, parameters: Sequence[int]) -> None:
        """The optimizer is about to step these rows of ``graph.updates``, all in one call."""

    def end_update(self, parameters: Sequence[int]) -> None:
        """It has stepped them."""

    def waiting(self) -> Callable[[float, float], None] | None:
        """What to call, with begin and end, after a wait for the communication issued now."""


class TaskTimes:
    """Writes down when this rank ran each task of one step.

    Seconds are those of ``time.perf_counter`` since this was made. What a task waited for at its
    beginning belongs to the communication it waited for. Communication ends when a reader has
    waited for it, at the latest.

    Args:
        update_task: task of each row of ``graph.updates`` that this rank steps.
    """

    def __init__(self, update_task: dict[int, int]) -> None:
        self.start: dict[int, float] = {}
        self.finish: dict[int, float] = {}
        self._update_task = update_task
        self._task = -1
        self._origin = time.perf_counter()
        self._begin = 0.0
        self._waited = 0.0

    def begin_task(self, task: int) -> None:
        """See ``Recorder``."""
        self._task, self._waited, self._begin = task, 0.0, time.perf_counter()

    def end_task(self, task: int) -> None:
        """See ``Recorder``."""
        end = time.perf_counter()
        self._keep(task, min(self._begin + self._waited, end), end)
        self._task = -1

    def begin_update(self, parameters: Sequence[int]) -> None:
        """See ``Recorder``."""
        self._begin = time.perf_counter()

    def end_update(self, parameters: Sequence[int]) -> None:
        """One call for all: each gets an equal part of the time."""
        part = (time.perf_counter() - self._begin) / max(len(parameters), 1)
        for number, row in enumerate(parameters):
            task = self._update_task.get(row, -1)
            self._keep(task, self._begin + number * part, self._begin + (number + 1) * part)

    def waiting(self) -> Callable[[float, float], None]:
        """See ``Recorder``."""
        issued = self._task

        def waited(begin: float, end: float) -> None:
            self._waited += end - begin
            self.finish[issued] = end - self._origin

        return waited

    def _keep(self, task: int, begin: float, end: float) -> None:
        self.start[task] = begin - self._origin
        self.finish[task] = end - self._origin


def gather_task_times(times: TaskTimes, num_tasks: int) -> tuple[FloatArray, FloatArray]:
    """(start, finish) of all tasks on all ranks, seconds; NaN where a task was not recorded.

    Communication starts when its last member has issued it and ends when the last one has it.
    """
    mine = torch.full((2, num_tasks), -1.0, dtype=torch.float64)
    for row, column in enumerate((times.start, times.finish)):
        for task, seconds in column.items():
            if task >= 0:
                mine[row, task] = seconds
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    start, finish = np.where(mine.numpy() < 0.0, np.nan, mine.numpy())
    return start, finish
