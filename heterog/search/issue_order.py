"""The order in which ranks take up a plan's tasks, and the time at which they release sends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from heterog.lowering.program import (
    FIRST_LINK_KIND,
    LAST_OP_KIND,
    FloatArray,
    IntArray,
    Program,
    TaskKind,
)
from heterog.memo import kept
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy
from heterog.units import MIB

AHEAD_BYTES = 2 * MIB
"""Bytes by which a parameter server issues transfers ahead of their turn: enough for the 40 ms
by which TCP may delay an acknowledgement at 100 Mbit/s, and little beside a step's memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IssuedStep:
    """A lowered strategy with the order in which ranks run its tasks.

    Attributes:
        program: Program lowered from the strategy, for one step.
        task_order: All tasks in the order in which ranks take them up; see ``issue_order``.
        sent_before: Latest op for each transfer; see ``sends_by_op``.
    """

    program: Program
    task_order: IntArray  # [num_tasks]
    sent_before: IntArray  # [number of such transfers, 2]


class Rehearse(Protocol):
    """Function that plays a strategy through without data."""

    def __call__(
        self, strategy: Strategy, issued: IssuedStep, check: Callable[[], None], /
    ) -> str:
        """Why ranks could not execute a strategy; empty if they can.

        Args:
            strategy: Strategy in question.
            issued: The strategy as ranks would run it.
            check: Called again and again; an exception from it ends the rehearsal.
        """


MOST_WRITTEN = 16_000_000
"""Most ops, on all devices and in all micro-batches of a step, for which a plan holds an order:
half a minute of work and 5 GB of memory to make, as much for each rank to read."""
MOST_REHEARSED = 2_000_000
"""Most ops, on all devices, of a step that is rehearsed: minutes of work and 5 GB of memory."""

_MADE_AT_ONCE = 100_000
"""Most tasks of a step for which an order is made only to count its turns."""


class IssuedSteps:
    """The programs and orders of strategies on one evaluator, each made once.

    A step of more than ``MOST_WRITTEN`` ops gets no order: its plan can be judged and compared,
    but neither rehearsed nor run.

    Args:
        evaluator: Evaluator of the graph and cluster.

    Attributes:
        num_ops: Number of ops of the graph.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self.num_ops = evaluator.graph.num_ops

    @kept
    def of(self, strategy: Strategy, order: Order) -> IssuedStep | None:
        """The program and order of a strategy; ``None`` if it has too many ops."""
        if self._tasks_of(strategy) > MOST_WRITTEN:
            return None
        return issued_step(self._evaluator, strategy, order)

    @kept
    def num_turns(self, strategy: Strategy, order: Order) -> int:
        """Turns of all ranks in a step; the number of tasks if that is large; 0 without order."""
        num_tasks = self._tasks_of(strategy)
        if num_tasks > MOST_WRITTEN:
            return 0
        step = self.of(strategy, order) if num_tasks <= _MADE_AT_ONCE else None
        return num_tasks if step is None else num_turns(step.program)

    def _tasks_of(self, strategy: Strategy) -> int:
        choice = self._evaluator.encode(strategy)
        return self._evaluator.tasks_of(choice._replace(num_steps=1))


def num_turns(program: Program) -> int:
    """Turns of all ranks in a step: one per task, and one per two devices that exchange messages.

    In a collective, every member exchanges messages with every other one.
    """
    members = np.array([len(set(channel.devices)) for channel in program.channels], np.int64)
    sizes = members[program.channel[program.kind >= FIRST_LINK_KIND]]
    return program.num_tasks + int((sizes * (sizes - 1) // 2).sum())


def issued_step(evaluator: Evaluator, strategy: Strategy, order: Order) -> IssuedStep:
    """The program of a strategy, and its tasks as ranks take them up in an order."""
    # The order is for one step, as ranks run it, even if eight were simulated.
    choice = evaluator.encode(strategy)._replace(num_steps=1)
    # The members of a team take their ops in one order, as the referee has them.
    has_teams = choice.teams.size.max(initial=1) > 1
    timings = evaluator.referee_timings if has_teams else evaluator.timings
    program, start, finish = timings(choice, order)
    tasks = issue_order(program, start, finish)
    return IssuedStep(
        program=program,
        task_order=tasks,
        sent_before=sends_by_op(program, start, finish, tasks),
    )


def issue_order(program: Program, start: FloatArray, finish: FloatArray) -> IntArray:
    """The order in which ranks take up the tasks of a schedule.

    A rank issues communication only between two ops. Communication that begins while an op runs
    is issued before that op: issued after it, the other ranks would wait and hold what they send.
    So ops are sorted by their end, communication by its start, and transfers from and to parameter
    servers a little before their start. The inputs of a task have ended when it begins, so their
    tasks come before it. Several transfers of a link may be moved up to the same moment; among
    equal moments, the task that starts first comes first.

    Args:
        program: Program with the tasks.
        start: Start of each task, in seconds.  # [num_tasks]
        finish: End of each task, in seconds.  # [num_tasks]

    Returns:
        All tasks in that order.  # [num_tasks]
    """
    moment = np.where(program.kind < FIRST_LINK_KIND, finish, start)
    _announce_ahead(program, start, moment)
    return np.lexsort((np.arange(program.num_tasks), start, moment)).astype(np.int32)


def sends_by_op(
    program: Program, start: FloatArray, finish: FloatArray, order: IntArray
) -> IntArray:
    """The op before which a sender releases each transfer, if all goes as planned.

    Without it, a rank that is faster than planned would run ahead of its receivers and hold more
    and more unreceived values, beyond the memory that the plan predicts.

    Args:
        program: Program that is run.
        start: Start of each task, in seconds.  # [num_tasks]
        finish: End of each task, in seconds.  # [num_tasks]
        order: Order from ``issue_order``.

    Returns:
        (transfer of a value, the first op on its source device that begins after it has ended),
        for each transfer with such an op.  # [number of them, 2]
    """
    is_op = program.kind[order] <= LAST_OP_KIND
    ops_in_order = order[is_op]
    place = np.argsort(order)
    sends = np.flatnonzero(program.kind == TaskKind.SEND)
    source = program.senders(sends)
    found = np.full(len(sends), -1, np.int64)
    for device in np.unique(source):
        ops = ops_in_order[program.device[ops_in_order] == device]
        own = np.flatnonzero(source == device)
        number = np.searchsorted(start[ops], finish[sends[own]])
        has_later = number < len(ops)
        found[own[has_later]] = ops[number[has_later]]
    is_pair = found >= 0
    is_pair[is_pair] = place[found[is_pair]] > place[sends[is_pair]]
    return np.stack([sends[is_pair], found[is_pair]], axis=1).astype(np.int32)


def _announce_ahead(program: Program, start: FloatArray, moment: FloatArray) -> None:
    """Move up transfers of parameter servers, by at most ``AHEAD_BYTES`` of their link.

    Otherwise a server would announce the next gradient only after it has received the current
    one, and the link would be idle while the two ranks agree on the transfer.
    """
    served = np.flatnonzero((program.kind == TaskKind.PUSH) | (program.kind == TaskKind.PULL))
    for channel in np.unique(program.channel[served]):
        tasks = served[program.channel[served] == channel]
        tasks = tasks[np.lexsort((tasks, start[tasks]))]
        bytes_before = np.cumsum(program.num_bytes[tasks]) - program.num_bytes[tasks]
        oldest = np.searchsorted(bytes_before, bytes_before - AHEAD_BYTES)
        latest = 0.0
        for task, place in zip(tasks.tolist(), oldest.tolist(), strict=True):
            needed = moment[program.dependencies(task)].max(initial=0.0)
            # Transfers of one link keep their order.
            latest = max(latest, needed, float(start[tasks[place]]))
            moment[task] = latest = min(latest, float(moment[task]))
