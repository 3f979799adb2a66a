"""Times of teams that push to an asynchronous server: when each step ends, and steps per second.

Things happen in the order of ``AsynchronousServer.events``. A pull of team i takes q_i seconds
from when the team has pushed its last gradient; then the team computes for w_i; its push takes
p_i. For parts of q_i and p_i the server's own link or optimizer is busy, with one exchange after
the other:

    pulled_i(n) = max(pushed_i(n - 1) + q_i, server)
    pushed_i(n) = max(pulled_i(n) + w_i + p_i, server)

with ``server`` the end of its part. In a planned order a push is also taken no earlier than those
before it, and a pull begins when these are taken. Where several devices are the server, each is
busy with its parameters, and a team waits for all of them. Other links are not shared in this
recurrence; a step takes no less than all exchanges hold any of them, which the evaluator adds.

For two teams whose exchanges are short, c_1 <= c_2
the seconds that they take alone and tau the staleness, this is

    pushed_2(n) = n c_2,   pushed_1(n) = max(n c_1, c_1 + (n - 1 - tau) c_2)

after n steps. So a bound lets the faster team run ahead, for tau steps more than the slower one.
From then on it goes at the slower one's pace, whatever tau is: samples should follow speeds. And
no bound lets the teams make as many steps as they would alone, unless the server is busy: n steps
of all teams keep it busy for n sum(p_i + q_i).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from heterog.lowering.program import FloatArray
from heterog.modes.asynchronous.value import MOST_TICKS, AsynchronousServer, PushOrder

SLOWEST_TICKS = 1000
"""Ticks of a step of the slowest team: predictions are no better than a thousandth."""
_MOST_SETTLING = 400
"""Most steps until teams reach their steady pace; with a larger tau not all of them do."""
_MEASURED = 100
"""Steps over which the steady pace is measured, more than the teams' order takes to repeat where
their ticks have a common measure, as those that planners round have."""


class TeamPace(NamedTuple):
    """Seconds of the parts of one team's step.

    Attributes:
        pull_s: Seconds q until it has weights, when nobody else talks to the server.
        compute_s: Seconds w from having weights to having all gradients.
        push_s: Seconds p until the server has taken its gradients and stepped the optimizer.
        pull_busy_s: Seconds of the pull for which each of the server's devices is busy; empty
            for a single one that is busy for all of the pull.
        push_busy_s: Seconds of the push, in the same way.
    """

    pull_s: float
    compute_s: float
    push_s: float
    pull_busy_s: tuple[float, ...] = ()
    push_busy_s: tuple[float, ...] = ()

    @property
    def alone_s(self) -> float:
        """Seconds of a step when the server has nothing else to do."""
        return self.pull_s + self.compute_s + self.push_s


def ticks_of(paces: Sequence[TeamPace]) -> tuple[int, ...]:
    """Ticks of a step of each team alone, ``SLOWEST_TICKS`` for the slowest.

    >>> ticks_of([TeamPace(0.0, 1.0, 0.0), TeamPace(0.5, 1.0, 0.5)])
    (500, 1000)
    """
    slowest = max(pace.alone_s for pace in paces)
    if slowest <= 0.0:
        return (SLOWEST_TICKS,) * len(paces)
    ticks = (round(SLOWEST_TICKS * pace.alone_s / slowest) for pace in paces)
    return tuple(min(max(each, 1), MOST_TICKS) for each in ticks)


def push_seconds(
    paces: Sequence[TeamPace], server: AsynchronousServer, num_steps: int
) -> FloatArray:
    """Times at which the server has taken each push, in seconds from the start.

    Args:
        paces: Pace of each team.
        server: Server, for its order of pushes.
        num_steps: Number of steps of each team.

    Returns:
        # [num_steps, num_teams]
    """
    ended = np.zeros((num_steps, len(paces)))
    free = [0.0] * len(server.devices)
    ready = [0.0] * len(paces)
    taken = 0.0  # all pushes before this one in the order
    is_planned = server.order == PushOrder.PLANNED
    for is_push, team, step in server.events_of(num_steps):
        pace, begin = paces[team], ready[team]
        if is_planned and not is_push:
            begin = max(begin, taken)
        busy = _busy(pace, is_push=is_push)
        free = [max(own, begin) + part for own, part in zip(free, busy, strict=True)]
        end = max(*free, begin + (pace.push_s if is_push else pace.pull_s))
        if is_push:
            taken = max(taken, end) if is_planned else end
            ended[step, team] = ready[team] = taken
        else:
            ready[team] = end + pace.compute_s
    return ended


def _busy(pace: TeamPace, *, is_push: bool) -> tuple[float, ...]:
    if is_push:
        return pace.push_busy_s or (pace.push_s,)
    return pace.pull_busy_s or (pace.pull_s,)


def steady_seconds(paces: Sequence[TeamPace], server: AsynchronousServer) -> float:
    """Seconds of a step, once teams have run for so long that the bound holds them together.

    All teams then make as many steps as the slowest one: a step is one of each team.
    """
    settling = min(server.staleness, _MOST_SETTLING) + _MEASURED
    # As many steps afterwards: in the last ones the server has less and less to do.
    done = push_seconds(paces, server, 2 * settling + _MEASURED).max(1)
    return float(done[settling + _MEASURED - 1] - done[settling - 1]) / _MEASURED
