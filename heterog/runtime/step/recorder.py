"""The events that a rank reports while it runs its tasks, and a recorder of their times."""

import platform
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from heterog.runtime.accelerators import from_every_rank

if TYPE_CHECKING:
    from heterog.lowering.program import FloatArray


class Recorder:
    """Is notified when a rank begins and ends its tasks; this one ignores it."""

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
        return None


class TaskTimes(Recorder):
    """Records when this rank ran each task of one step.

    Times are seconds of ``time.perf_counter`` since ``origin``. A wait at the start of a task
    counts for the communication that it waited for. Communication ends at the latest when a reader
    has waited for it.

    Args:
        update_task: Task of each row of ``graph.updates`` that this rank updates.

    Attributes:
        start: Start of each task.
        finish: Its end.
        origin: When this object was made, by ``time.perf_counter``.
    """

    def __init__(self, update_task: dict[int, int]) -> None:
        self.start: dict[int, float] = {}
        self.finish: dict[int, float] = {}
        self._update_task = update_task
        self._task = -1
        self.origin = time.perf_counter()
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
            self.finish[issued] = end - self.origin

        return waited

    def _keep(self, task: int, begin: float, end: float) -> None:
        self.start[task] = begin - self.origin
        self.finish[task] = end - self.origin


def gather_task_times(times: TaskTimes, num_tasks: int) -> "tuple[FloatArray, FloatArray]":
    """Start and finish of all tasks on all ranks, in seconds; NaN where none was recorded.

    Communication starts when its last member has issued it and ends when the last member has it.
    Ranks of one machine have one clock; ranks of several machines are assumed to begin together,
    after a barrier.
    """
    mine = torch.full((2, num_tasks), -1.0, dtype=torch.float64)
    behind = _seconds_behind(times.origin)
    for row, column in enumerate((times.start, times.finish)):
        for task, seconds in column.items():
            if task >= 0:
                mine[row, task] = seconds + behind
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    start, finish = np.where(mine.numpy() < 0.0, np.nan, mine.numpy())
    return start, finish


def _seconds_behind(origin: float) -> float:
    """Seconds from the first origin among the ranks of this machine to this rank's.

    The clock of ``time.perf_counter`` counts from the machine's start for all of its processes.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")  # on Linux, drawn at each start of the machine
    machine = boot.read_text("ascii") if boot.exists() else platform.node()
    own = torch.tensor([float(zlib.crc32(machine.encode())), origin], dtype=torch.float64)
    return origin - min(float(each[1]) for each in from_every_rank(own) if each[0] == own[0])
