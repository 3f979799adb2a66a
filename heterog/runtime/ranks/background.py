"""A background job beside one rank, which trains in the idle time of its device.

    python -m heterog.runtime.ranks.background MODEL BATCH_SIZE LIMIT OUTPUT

On CPUs it is a process of its own in the rank's place (its namespace, its CPU quota, its core) at
the lowest priority: the kernel runs it while the rank waits. On a GPU it must share the rank's
process, since priorities of streams hold inside one context only: ``LowPriorityThread``.

A *governor* keeps the foreground's slow-down under its limit, as DeepPool's runtime does (Park et
al., MLSys 2022). The foreground first runs alone for some steps. Then, after each step that took
more than the limit allows, the background rests a larger part of its time, and otherwise less.
"""

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from heterog.cluster import Cluster
from heterog.errors import HeterogError
from heterog.files import write_atomically
from heterog.graph.optimizer_probe import group_numbers, parameter_groups
from heterog.graph.workload import Workload
from heterog.runtime.accelerators import has_accelerator, is_on_cpus, stream_of_priority
from heterog.runtime.launch import ALONE_STEPS, HEARTBEAT
from heterog.runtime.step.optimizer import Masters, make_optimizer
from heterog.zoo import load_workload

_LEAST_DUTY = 0.02  # while the mean step is under the limit, and to begin to grow from 0
_BACK_OFF = 0.5  # factor of the duty after a step above the aim
_SPEED_UP = 1.15  # factor of the duty after any other step
_MARGIN = 0.5
"""Fraction of the allowed slow-down that the governor aims at, because steps vary."""
_POLL_S = 0.01
_NICEST = 19


class Trainer:
    """A plain training loop on one device.

    Args:
        workload: The workload to train; a step takes its batch.
        device: Device to train on.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._workload = workload
        self._model = workload.make_model().to(device)
        groups = parameter_groups(workload, self._model)
        named, group_of = dict(self._model.named_parameters()), group_numbers(groups)
        self._masters = Masters(workload.master_dtype, [named[name] for name in group_of])
        self._optimizer = make_optimizer(
            workload, groups, self._masters.stepped, list(group_of.values())
        )
        batch = workload.make_batch()
        self._batch: Any = (
            {key: value.to(device) for key, value in batch.items()}
            if isinstance(batch, dict)
            else tuple(value.to(device) for value in batch)
        )

    def step(self) -> float:
        """Train on the batch once; returns the loss."""
        self._model.zero_grad(set_to_none=True)
        loss = self._workload.step_loss(self._model, self._batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for value in self._model.parameters():
            stepped = self._masters.of(value)
            if stepped is not value:
                stepped.grad = None if value.grad is None else value.grad.to(stepped.dtype)
        self._optimizer.step()
        self._masters.write_back(self._model.parameters())
        return float(loss.detach())


class Governor:
    """Decides how much of the time the background may use.

    Args:
        limit: Largest allowed slow-down of the foreground, as a factor of its step time.
        num_alone: Number of first steps that measure how long the foreground takes alone.

    Attributes:
        duty: Fraction of the time that the background may use, 0 to 1; 0 until it may begin.
    """

    def __init__(self, limit: float, num_alone: int = ALONE_STEPS) -> None:
        self._limit = limit
        self._num_alone = num_alone
        self._alone: list[float] = []
        self._seconds_together = 0.0
        self._steps_together = 0
        self.duty = 0.0

    @property
    def alone_s(self) -> float:
        """Seconds of a foreground step alone; 0 until it is known."""
        return statistics.median(self._alone) if len(self._alone) >= self._num_alone else 0.0

    def observe(self, step_s: float) -> None:
        """Take in the duration of a foreground step.

        The limit holds for the mean since the background began, not for every step: after a slow
        step the background rests.
        """
        if len(self._alone) < self._num_alone:
            self._alone.append(step_s)
            if len(self._alone) == self._num_alone:
                self.duty = 0.25
            return
        self._seconds_together += step_s
        self._steps_together += 1
        aim = 1.0 + (self._limit - 1.0) * _MARGIN
        mean = self._seconds_together / self._steps_together
        if max(step_s, mean) > aim * self.alone_s:
            least = _LEAST_DUTY if mean < self._limit * self.alone_s else 0.0
            self.duty = max(self.duty * _BACK_OFF, least)
        else:
            self.duty = min(max(self.duty, _LEAST_DUTY) * _SPEED_UP, 1.0)


class StepWatch:
    """Measures the training steps of a rank from its heartbeat file.

    Args:
        heartbeat: File to which the rank writes its stage at the start of each step.
    """

    def __init__(self, heartbeat: Path) -> None:
        self._heartbeat = heartbeat
        self._first: int | None = None
        self._last: tuple[int, float] | None = None

    def steps(self) -> list[float]:
        """Seconds of each step that has ended since the last call; the first one is left out."""
        try:
            words = self._heartbeat.read_text().split()
            now = self._heartbeat.stat().st_mtime_ns / 1e9
        except OSError:
            return []
        if len(words) != 4 or words[0] != "step":
            return []
        number = int(words[1])
        if self._first is None:
            self._first = number  # the first step warms up
        last = self._last
        found: list[float] = []
        if last is not None and number > last[0]:
            found = [(now - last[1]) / (number - last[0])] * (number - last[0])
        if number > (self._first if last is None else last[0]):
            self._last = (number, now)
        return found


def paced(
    step: Callable[[], float], governor: Governor, over: threading.Event
) -> Iterator[tuple[float, float, float]]:
    """Make steps in the part of the time that a governor allows, until an event.

    Args:
        step: Function that makes a step and returns its loss.
        governor: The governor.
        over: Event that ends them.

    Yields:
        Begin and end of each step, in seconds of the process's clock, and its loss.
    """
    while not over.is_set():
        duty = governor.duty
        if duty <= 0.0:
            over.wait(_POLL_S)
            continue
        begin = time.perf_counter()
        loss = step()
        end = time.perf_counter()
        yield begin, end, loss
        over.wait((end - begin) * (1.0 - duty) / duty)


def lowest_priority() -> None:
    """Run only when nothing else wants the CPU."""
    os.nice(_NICEST)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def has_own_process(cluster: Cluster) -> bool:
    """Whether background jobs of a cluster run in processes beside the ranks."""
    return is_on_cpus(cluster) or not has_accelerator()


class LowPriorityThread(threading.Thread):
    """A background job inside a rank's process, on a stream of low priority.

    Args:
        trainer: Training loop of the job.
        device: Device of the rank.
        governor: The governor, to which the rank reports the duration of each of its steps.
    """

    def __init__(self, trainer: Trainer, device: torch.device, governor: Governor) -> None:
        super().__init__(daemon=True)
        self.steps = 0
        self.governor = governor
        self._trainer = trainer
        self._device = device
        self._over = threading.Event()

    def run(self) -> None:
        """Train until it is told to stop."""
        for _ in paced(self._step, self.governor, self._over):
            self.steps += 1

    def _step(self) -> float:
        with stream_of_priority(self._device, high=False):
            return self._trainer.step()

    def stop(self) -> int:
        """Stop the thread; returns the number of steps done."""
        self._over.set()
        self.join()
        return self.steps


def train_beside(
    workload: Workload, batch_size: int, heartbeat: Path, limit: float, output: Path
) -> None:
    """Train beside a rank of CPUs until this process is ended.

    After every step, ``output`` is rewritten with the progress so far.
    """
    trainer = Trainer(workload, torch.device("cpu"))
    governor = Governor(limit)
    watch = StepWatch(heartbeat)

    def look() -> None:
        while True:
            for seconds in watch.steps():
                governor.observe(seconds)
            time.sleep(_POLL_S)

    threading.Thread(target=look, daemon=True).start()
    steps, first_loss, began = 0, 0.0, 0.0
    for begin, end, loss in paced(trainer.step, governor, threading.Event()):
        began = began or begin
        first_loss = first_loss if steps else loss
        steps += 1
        done = {
            "steps": steps,
            "samples": steps * batch_size,
            "seconds": end - began,
            "first_loss": first_loss,
            "last_loss": loss,
            "duty": governor.duty,
        }
        write_atomically(output, json.dumps(done).encode())


def main() -> None:
    """Run beside one rank; errors are one line on stderr and exit code 2."""
    model, batch_size, limit, output = sys.argv[1:]
    lowest_priority()
    torch.set_num_threads(1)
    try:
        train_beside(
            load_workload(model, int(batch_size), must_take=False),
            int(batch_size),
            Path(os.environ[HEARTBEAT]),
            float(limit),
            Path(output),
        )
    except HeterogError as error:
        print(f"heterog: background job: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
