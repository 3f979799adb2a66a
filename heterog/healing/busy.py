"""How long each device computes in a step, predicted or measured."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from heterog.lowering.program import FIRST_LINK_KIND, FloatArray, Program
from heterog.runtime.step.recorder import Recorder


def device_seconds(program: Program, start_s: FloatArray, finish_s: FloatArray) -> list[float]:
    """Sum the seconds of all compute tasks on each device.

    Args:
        program: The program of the step.
        start_s: Start of each task; not a number where it is unknown.
        finish_s: End of each task; not a number where it is unknown.
    """
    computes = program.kind < FIRST_LINK_KIND
    seconds = np.nan_to_num(finish_s - start_s)
    of_device = program.device[computes]
    found: list[float] = np.bincount(of_device, seconds[computes], program.num_devices).tolist()
    return found


class BusyClock(Recorder):
    """Sums the seconds that this rank spends in compute tasks, over many steps.

    It is for ranks on CPUs. A process whose share of a core was cut runs on at full speed
    until its share of a period is used up and then stands still, so that single steps say little.

    Args:
        program: The program of the steps.
        now: Clock, in seconds.

    Attributes:
        seconds: Seconds of compute tasks so far, without the waits in them.
    """

    def __init__(self, program: Program, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._computes: list[bool] = (program.kind < FIRST_LINK_KIND).tolist()
        self._now = now
        self._begin_s = self._waited_s = self._update_s = 0.0
        self._is_in_task = False

    def begin_task(self, task: int) -> None:
        """See ``Recorder``."""
        self._is_in_task, self._waited_s, self._begin_s = True, 0.0, self._now()

    def end_task(self, task: int) -> None:
        """See ``Recorder``."""
        self._is_in_task = False
        if self._computes[task]:
            self.seconds += max(self._now() - self._begin_s - self._waited_s, 0.0)

    def begin_update(self, parameters: Sequence[int]) -> None:
        """See ``Recorder``."""
        self._update_s = self._now()

    def end_update(self, parameters: Sequence[int]) -> None:
        """Count an update that ran between tasks; one within a task is part of it."""
        if not self._is_in_task:
            self.seconds += self._now() - self._update_s

    def waiting(self) -> Callable[[float, float], None]:
        """See ``Recorder``."""
        return self._waited

    def _waited(self, begin_s: float, end_s: float) -> None:
        self._waited_s += end_s - begin_s
