"""In which order ranks take up the tasks of a plan, and when they let go of what they send."""

import numpy as np

from heterog.strategy.program import FIRST_LINK_KIND, FloatArray, IntArray, Program, TaskKind
from heterog.units import MIB

AHEAD_BYTES = 2 * MIB
"""How far ahead a parameter server announces what it receives and sends: enough to bridge the
40 ms that TCP may delay an acknowledgement at 100 Mbit/s; little beside what a step holds."""


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
