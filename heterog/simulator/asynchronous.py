"""Steps of teams that push to an asynchronous server: when each ends, and how many in a second.

A server does one thing after the other, in the order of ``AsynchronousServer.events``. A pull of
team i takes q_i seconds and begins when the server is free and the team has pushed its last
gradient; then the team computes for w_i; its push takes p_i and begins when the server is free:

    pulled_i(n) = max(server, pushed_i(n - 1)) + q_i
    pushed_i(n) = max(server, pulled_i(n) + w_i) + p_i

with ``server`` the end of what it did before. Where several devices are the server, each does so
with its part of q_i and p_i, and a team waits for all of them; that their exchanges share links is
not counted, but for those of one pull or push. For two teams whose exchanges are short, c_1 <= c_2
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

from heterog.strategy.asynchronous import MOST_TICKS, AsynchronousServer
from heterog.strategy.program import FloatArray

SLOWEST_TICKS = 1000
"""Of a step of the slowest team: predictions of the others are no better than a thousandth."""
_MOST_SETTLING = 400
"""Steps for which teams may come to their steady pace; with a larger tau not all of them do."""
_MEASURED = 100
"""Steps over which the steady pace is measured, more than the teams' order takes to repeat where
their ticks have a common measure, as those that planners round have."""


class TeamPace(NamedTuple):
    """What a step of one team takes.

    Attributes:
        pull_s: q, seconds in which the server gives it weights.
        compute_s: w, seconds from having weights to having all gradients.
        push_s: p, seconds in which the server takes its gradients and steps the optimizer.
        pull_parts_s: seconds of the pull on each of the server's devices; empty: there is one.
        push_parts_s: those of the push.
    """

    pull_s: float
    compute_s: float
    push_s: float
    pull_parts_s: tuple[float, ...] = ()
    push_parts_s: tuple[float, ...] = ()

    @property
    def alone_s(self) -> float:
        """Seconds of a step when the server has nothing else to do."""
        return self.pull_s + self.compute_s + self.push_s


def ticks_of(paces: Sequence[TeamPace]) -> tuple[int, ...]:
    """What each team takes alone, the slowest ``SLOWEST_TICKS``.

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
    """When the server has taken each push, in seconds from the start.

    Args:
        paces: of each team.
        server: whose order it is.
        num_steps: steps of each team.

    Returns:
        # [num_steps, num_teams]
    """
    ended = np.zeros((num_steps, len(paces)))
    free = [0.0] * len(server.devices)
    ready = [0.0] * len(paces)
    pushes = [_parts(pace.push_parts_s, pace.push_s) for pace in paces]
    pulls = [_parts(pace.pull_parts_s, pace.pull_s) for pace in paces]
    for is_push, team, step in server.events_of(num_steps):
        pace, begin = paces[team], ready[team]
        parts = pushes[team] if is_push else pulls[team]
        free = [max(own, begin) + part for own, part in zip(free, parts, strict=True)]
        end = max(*free, begin + (pace.push_s if is_push else pace.pull_s))
        ready[team] = end if is_push else end + pace.compute_s
        if is_push:
            ended[step, team] = end
    return ended


def _parts(parts_s: tuple[float, ...], whole_s: float) -> tuple[float, ...]:
    return parts_s or (whole_s,)


def samples_by(ended: FloatArray, samples: Sequence[int], seconds: float) -> float:
    """Samples whose gradients the server has taken after so many seconds.

    Args:
        ended: from ``push_seconds``.  # [num_steps, num_teams]
        samples: of a step of each team.
        seconds: from the start; to be meant, less than the last push of any team.
    """
    return float((ended <= seconds).sum(0) @ np.asarray(samples, np.float64))


def steady_seconds(paces: Sequence[TeamPace], server: AsynchronousServer) -> float:
    """Seconds of a step, when teams have run for so long that the bound holds them together.

    All teams then make as many steps as the slowest one: a step is one of each team.
    """
    settling = min(server.staleness, _MOST_SETTLING) + _MEASURED
    # As many steps afterwards: in the last ones the server has less and less to do.
    done = push_seconds(paces, server, 2 * settling + _MEASURED).max(1)
    return float(done[settling + _MEASURED - 1] - done[settling - 1]) / _MEASURED


def unbounded_samples_per_s(paces: Sequence[TeamPace], samples: Sequence[int]) -> float:
    """Samples per second of teams that nothing holds together, from a server that is never busy.

    The sum of what each team does alone: no bound on staleness gives more.
    """
    return sum(count / pace.alone_s for count, pace in zip(samples, paces, strict=True))


def server_seconds(paces: Sequence[TeamPace]) -> float:
    """Seconds for which one step of all teams keeps a device of the server busy.

    No step takes less.
    """
    exchanges = [
        (_parts(pace.pull_parts_s, pace.pull_s), _parts(pace.push_parts_s, pace.push_s))
        for pace in paces
    ]
    by_team = [np.add(pull, push) for pull, push in exchanges]
    return float(np.sum(by_team, axis=0).max())
