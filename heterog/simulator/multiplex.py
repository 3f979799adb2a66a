"""A background job in the gaps of a schedule: two jobs, two priorities, one compute stream each.

The foreground is a simulated schedule: tasks with their seconds, their dependencies and the order
on every device. The background is a list of ops per device, one training step of the second job,
that is repeated with a lower priority:

- While a device has no foreground op to run, it may begin its next background op. An op that has
  begun is not interrupted: a foreground op that gets ready meanwhile waits for its end. So one op
  is late by less than one background op, and so are the ops that wait for it, on every device.
- A background op is *issued* only if it fits into the rest of the gap, or if it is no longer than
  the device's *allowance*. The length of a gap is that without the background: the runtime
  measures gaps while the foreground runs alone. Allowances limit the slow-down of the foreground
  (DeepPool, Park et al., MLSys 2022, section 5).

Transfers and collectives keep their seconds, their order and their waits for links from the
foreground alone; the background sends nothing. Two ops never share a device, and switching takes
no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.lowering.channels import communicators
from heterog.lowering.kernels import kernel
from heterog.lowering.program import FIRST_LINK_KIND, FloatArray, IntArray, Program

WARM_UP_STEPS = 2
MEASURED_STEPS = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Foreground:
    """A simulated step, ready to be delayed; tasks are in the order of their starts.

    Attributes:
        num_devices: Number of devices of the cluster.
        step_seconds: Seconds of the step alone.
        device: Device whose compute stream runs the task, -1 for communication.  # [num_tasks]
        seconds: Seconds of each task.  # [num_tasks]
        lag: Seconds from the last dependency's end to the task's start without the background.
            # [num_tasks]
        gap: Seconds that the device of a compute task is idle before it without the background,
            counted from the last task of the step before for the first task.  # [num_tasks]
        before_start: First entry of each task in ``before``.  # [num_tasks + 1]
        before: Tasks that each task waits for.
    """

    num_devices: int
    step_seconds: float
    device: IntArray
    seconds: FloatArray
    lag: FloatArray
    gap: FloatArray
    before_start: IntArray
    before: IntArray

    @property
    def idle_share(self) -> FloatArray:
        """Fraction of the step in which each device runs nothing.  # [num_devices]"""
        on_device = self.device >= 0
        busy = np.bincount(self.device[on_device], self.seconds[on_device], self.num_devices)
        return 1.0 - busy / self.step_seconds


class Multiplexed(NamedTuple):
    """The result of both jobs, per step of the foreground in the steady state.

    Attributes:
        step_seconds: Seconds of a foreground step with the background.
        ops: Number of background ops done per step, by device.  # [num_devices]
        busy_seconds: Seconds in background ops per step, by device.  # [num_devices]
    """

    step_seconds: float
    ops: FloatArray
    busy_seconds: FloatArray


def foreground_of_program(program: Program, start: FloatArray, finish: FloatArray) -> Foreground:
    """Make the foreground of a simulated program.

    A transfer or collective also waits for the previous one over each of its links and over its
    communicator.
    """
    communicator = communicators(program.channels)
    links = [
        (*program.channels[number].traffic(), -1 - int(communicator[number]))
        if kind >= FIRST_LINK_KIND
        else ()
        for number, kind in zip(program.channel, program.kind, strict=True)
    ]
    waits = [program.dependencies(task) for task in range(program.num_tasks)]
    device = np.where(program.kind >= FIRST_LINK_KIND, -1, program.device)
    return make_foreground(
        device, start, finish, waits, links=links, num_devices=program.num_devices
    )


def make_foreground(
    device: IntArray,
    start: FloatArray,
    finish: FloatArray,
    waits: Sequence[Sequence[int]],
    *,
    num_devices: int,
    links: Sequence[Sequence[int]] = (),
) -> Foreground:
    """Make a foreground from start and finish of its tasks.

    Args:
        device: Device that runs each task, -1 for communication.
        start: Start of each task, in seconds from the start of the step.
        finish: End of each task; the last one ends the step.
        waits: Tasks whose results each task needs.
        num_devices: Number of devices of the cluster.
        links: Resources of each communication task: links or a communicator.
    """
    num_tasks = len(device)
    step_seconds = float(finish.max(initial=0.0))
    order = np.lexsort((np.arange(num_tasks), finish, start))
    place = np.empty(num_tasks, np.int64)
    place[order] = np.arange(num_tasks)
    last_on: dict[int, int] = {}
    last_over: dict[int, int] = {}
    first_on: dict[int, int] = {}
    before: list[list[int]] = []
    lag, gap = np.zeros(num_tasks), np.zeros(num_tasks)
    for position, task in enumerate(order.tolist()):
        needed = set(waits[task])
        own = int(device[task])
        if own >= 0:
            if own in last_on:
                gap[position] = start[task] - finish[last_on[own]]
            first_on.setdefault(own, position)
            needed |= {last_on[own]} if own in last_on else set()
            last_on[own] = task
        else:
            for link in links[task] if links else ():
                if link in last_over and finish[last_over[link]] <= start[task]:
                    needed.add(last_over[link])
                last_over[link] = task
        ready = max((float(finish[each]) for each in needed), default=0.0)
        lag[position] = max(float(start[task]) - ready, 0.0)
        before.append([int(place[each]) for each in needed])
    for own, position in first_on.items():
        gap[position] = start[order[position]] + step_seconds - finish[last_on[own]]
    return Foreground(
        num_devices=num_devices,
        step_seconds=step_seconds,
        device=np.asarray(device)[order].astype(np.int32),
        seconds=(finish - start)[order],
        lag=lag,
        gap=gap,
        before_start=np.concatenate([[0], np.cumsum([len(each) for each in before])]).astype(
            np.int32
        ),
        before=np.array([each for row in before for each in row], np.int32),
    )


def multiplex(
    foreground: Foreground, background: Sequence[FloatArray], allowance: FloatArray
) -> Multiplexed:
    """Run both jobs for some steps of the foreground.

    Args:
        foreground: The job with priority.
        background: Seconds of one step's ops on each device; empty where it must not run.
        allowance: Seconds that a background op may take on each device even if it fits no gap.
    """
    lengths = [len(ops) for ops in background]
    flat = np.concatenate([*background, np.zeros(0)]).astype(np.float64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ops = np.zeros((2, foreground.num_devices))
    busy = np.zeros((2, foreground.num_devices))
    ends = np.zeros(2)
    multiplex_kernel(
        foreground.device,
        foreground.seconds,
        foreground.lag,
        foreground.gap,
        foreground.before_start,
        foreground.before,
        flat,
        starts,
        np.asarray(allowance, np.float64),
        np.isin(np.arange(len(allowance)), foreground.device),
        foreground.step_seconds,
        WARM_UP_STEPS,
        WARM_UP_STEPS + MEASURED_STEPS,
        ops,
        busy,
        ends,
        starts[:-1].copy(),
        np.zeros((3, len(allowance))),
        np.zeros(len(foreground.device)),
    )
    return Multiplexed(
        step_seconds=float(ends[1] - ends[0]) / MEASURED_STEPS,
        ops=(ops[1] - ops[0]) / MEASURED_STEPS,
        busy_seconds=(busy[1] - busy[0]) / MEASURED_STEPS,
    )


@kernel
def multiplex_kernel(
    device: IntArray,
    seconds: FloatArray,
    lag: FloatArray,
    gap: FloatArray,
    before_start: IntArray,
    before: IntArray,
    background: FloatArray,
    background_start: IntArray,
    allowance: FloatArray,
    has_tasks: npt.NDArray[np.bool_],
    alone_seconds: float,
    num_warm_up: int,
    num_steps: int,
    ops: FloatArray,
    busy: FloatArray,
    ends: FloatArray,
    following: IntArray,
    times: FloatArray,
    finish: FloatArray,
) -> None:
    """Write the end of the warm-up and of all steps to ``ends``, totals to ``ops`` and ``busy``.

    The last three arguments are working memory: the first background op of each device, three
    rows of zeros with one entry per device, and one entry per task.
    """
    num_tasks = len(device)
    num_devices = len(allowance)
    free, done, used = times[0], times[1], times[2]
    begin = 0.0
    for step in range(num_steps):
        end = begin
        # Devices without foreground ops have the whole step for themselves.
        for task in range(num_tasks + num_devices):
            if task < num_tasks:
                own = device[task]
                ready = begin
                for entry in range(before_start[task], before_start[task + 1]):
                    ready = max(ready, finish[before[entry]])
                ready += lag[task]
            else:
                own = task - num_tasks
                ready = end
                if has_tasks[own]:
                    continue
            if own >= 0:
                time = free[own]
                planned = time + (gap[task] if task < num_tasks else alone_seconds)
                first, last = background_start[own], background_start[own + 1]
                while time < ready and last > first:
                    length = background[following[own]]
                    if length > allowance[own] and time + length > planned:
                        break
                    time += length
                    used[own] += length
                    done[own] += 1.0
                    following[own] += 1
                    if following[own] == last:
                        following[own] = first
                ready = max(ready, time)
                free[own] = ready
            if task < num_tasks:
                finish[task] = ready + seconds[task]
                if own >= 0:
                    free[own] = finish[task]
                end = max(end, finish[task])
        begin = end
        if step == num_warm_up - 1 or step == num_steps - 1:
            moment = 1 if step == num_steps - 1 else 0
            ends[moment] = end
            for own in range(num_devices):
                ops[moment, own], busy[moment, own] = done[own], used[own]
