"""In which order ranks take up the tasks of a plan, and when they let go of what they send."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from heterog.planners.planner import Candidate
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.program import FIRST_LINK_KIND, FloatArray, IntArray, Program, TaskKind
from heterog.strategy.strategy import Strategy
from heterog.units import MIB

AHEAD_BYTES = 2 * MIB
"""How far ahead a parameter server announces what it receives and sends: enough to bridge the
40 ms that TCP may delay an acknowledgement at 100 Mbit/s; little beside what a step holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IssuedStep:
    """A strategy as ranks run it.

    Attributes:
        program: lowered from the strategy, for one step.
        task_order: every task in the order in which ranks take them up; see ``issue_order``.
        sent_before: see ``sends_by_op``.
    """

    program: Program
    task_order: tuple[int, ...]
    sent_before: tuple[tuple[int, int], ...]


class Rehearse(Protocol):
    """Plays a strategy through without data."""

    def __call__(
        self, strategy: Strategy, issued: IssuedStep, check: Callable[[], None], /
    ) -> str:
        """Why ranks could not execute a strategy; empty if they can.

        Args:
            strategy: that is asked about.
            issued: as ranks would run it.
            check: called again and again; what it raises ends the rehearsal.
        """


class IssuedSteps:
    """The programs and orders of candidates on one evaluator, each made once.

    Args:
        evaluator: of the graph and cluster.
        clock: seconds of some clock.
    """

    def __init__(
        self, evaluator: Evaluator, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._evaluator = evaluator
        self._clock = clock
        self._known: dict[tuple[Strategy, Order], tuple[IssuedStep, float]] = {}

    def of(self, candidate: Candidate) -> IssuedStep:
        """The program and order of a candidate, in the first of its orders."""
        return self._made(candidate)[0]

    def seconds(self, candidate: Candidate) -> float:
        """How long it took to make them."""
        return self._made(candidate)[1]

    def _made(self, candidate: Candidate) -> tuple[IssuedStep, float]:
        key = candidate.strategy, candidate.orders[0]
        if key not in self._known:
            begin_s = self._clock()
            made = issued_step(self._evaluator, candidate)
            self._known[key] = made, self._clock() - begin_s
        return self._known[key]


def issued_step(evaluator: Evaluator, candidate: Candidate) -> IssuedStep:
    """The program and order of a candidate, in the first of its orders."""
    # The order is that of one step, which is what a rank runs, also where eight were simulated.
    choice = evaluator.encode(candidate.strategy)._replace(num_steps=1)
    program, start, finish = evaluator.timings(choice, candidate.orders[0])
    order = issue_order(program, start, finish)
    return IssuedStep(
        program=program,
        task_order=tuple(order.tolist()),
        sent_before=sends_by_op(program, start, finish, order),
    )


def issue_order(program: Program, start: FloatArray, finish: FloatArray) -> IntArray:
    """The order in which ranks take up the tasks of a schedule.

    A rank issues communication only between two ops. One that begins while an op runs is issued
    before it: after it, the other ranks would wait, and hold what they send. So ops are listed by
    their end, communication by its begin, and transfers from and to parameter servers a little
    before. What a task needs has ended when it begins, and is listed before it.

    Args:
        program: whose tasks they are.
        start: of each task, seconds.  # [num_tasks]
        finish: of each task, seconds.  # [num_tasks]

    Returns:
        All tasks.  # [num_tasks]
    """
    moment = np.where(program.kind < FIRST_LINK_KIND, finish, start)
    _announce_ahead(program, start, moment)
    order: IntArray = np.lexsort((np.arange(program.num_tasks), moment)).astype(np.int32)
    return order


def sends_by_op(
    program: Program, start: FloatArray, finish: FloatArray, order: IntArray
) -> tuple[tuple[int, int], ...]:
    """When a sender lets go of what it sends, if all goes as planned.

    A rank that is faster than planned would otherwise run ahead of those it sends to, and hold
    more and more that they have not received: more than the plan says it needs.

    Args:
        program: what is run.
        start: of each task, seconds.  # [num_tasks]
        finish: of each task, seconds.  # [num_tasks]
        order: as by ``issue_order``.

    Returns:
        (transfer of a value, the first op on its source that begins when it has ended), for the
        transfers for which there is such an op.
    """
    ops: dict[int, list[int]] = {}
    for task in order.tolist():
        if program.kind[task] <= TaskKind.RECOMPUTE:
            ops.setdefault(int(program.device[task]), []).append(task)
    begins = {device: start[tasks] for device, tasks in ops.items()}
    place = np.argsort(order)
    pairs = []
    for send in np.flatnonzero(program.kind == TaskKind.SEND).tolist():
        source = program.channels[int(program.channel[send])].devices[0]
        if source in ops:
            number = int(np.searchsorted(begins[source], finish[send]))
            later = ops[source][number:]
            if later and place[later[0]] > place[send]:
                pairs.append((send, later[0]))
    return tuple(pairs)


def _announce_ahead(program: Program, start: FloatArray, moment: FloatArray) -> None:
    """Moves up what parameter servers receive and send, over ``AHEAD_BYTES`` of its link at most.

    A server that waits for one gradient would else announce the next one when it has this one, and
    the link would be idle for as long as two ranks need to agree.
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
