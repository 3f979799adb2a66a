"""The events that a rank reports while it runs its tasks, and a recorder of their times."""

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
        """Called before a task of the program runs."""

    def end_task(self, task: int) -> None:
        """Called after it has run; communication has only been issued."""

    def begin_update(self, parameters: Sequence[int]) -> None:
        """Called before the optimizer updates these rows of ``graph.updates``, all in one call."""

    def end_update(self, parameters: Sequence[int]) -> None:
        """Called after it has updated them."""

    def waiting(self) -> Callable[[float, float], None] | None:
        """A function to call with start and end of a wait for the communication issued now."""


class TaskTimes:
    """Records when this rank ran each task of one step.

    Times are seconds of ``time.perf_counter`` since this object was made. A wait at the start of
    a task counts for the communication that it waited for. Communication ends when a reader has
    waited for it, at the latest.

    Args:
        update_task: Task of each row of ``graph.updates`` that this rank updates.
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
        """Divide the time of the one call equally among the parameters."""
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
    """Start and finish of all tasks on all ranks, in seconds; NaN where none was recorded.

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
