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

Cost of a team's exchange with an asynchronous server: its tasks, on tapes of their own.

Prices of an asynchronous server: paces of its teams, from a step alone and single exchanges.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from heterog.graph.op_graph import OpGraph
from heterog.lowering import Choice
from heterog.lowering.channels import ChannelTable
from heterog.lowering.program import FloatArray, TaskKind
from heterog.lowering.tape import NUM_TASKS, Tape, TapeWriter
from heterog.modes.asynchronous.value import (
    MOST_TICKS,
    AsynchronousServer,
    PushOrder,
    Traffic,
    pulls_of,
    pushes_of,
)
from heterog.modes.islands import islands
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy

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


_READ_AND_WRITTEN = 2.0
"""Bytes that a copy moves, as a multiple of its own."""


def push_tape(traffic: Sequence[Traffic], sizes: FloatArray, channels: ChannelTable) -> Tape:
    """The tasks of a push: copies into messages, transfers, steps of the server's optimizer.

    Args:
        traffic: Transfers of the team.
        sizes: Bytes of each row of ``graph.updates``.
        channels: Table of the cluster's channels.
    """
    num_devices = channels.cluster.num_devices
    writer = TapeWriter(sum(2 + len(each.rows) for each in traffic), len(sizes), num_devices)
    for number, (device, server, rows) in enumerate(traffic):
        size = float(sizes[list(rows)].sum())
        there = writer.write(TaskKind.FLATTEN, number, device, _READ_AND_WRITTEN * size)
        if device != server:
            channel = device * num_devices + server
            there = writer.write(
                TaskKind.PUSH, rows[0], server, size, channel=channel, reads=[there]
            )
        for row in rows:
            writer.write(TaskKind.UPDATE, row, server, 0.0, reads=[there])
    writer.end()
    return writer.tape


def pull_tape(traffic: Sequence[Traffic], sizes: FloatArray, channels: ChannelTable) -> Tape:
    """The tasks of a pull: copies into messages, transfers, copies into the parameters.

    Args:
        traffic: Transfers of the team.
        sizes: Bytes of each row of ``graph.updates``.
        channels: Table of the cluster's channels.
    """
    num_devices = channels.cluster.num_devices
    writer = TapeWriter(3 * len(traffic), len(sizes), num_devices)
    for number, (device, server, rows) in enumerate(traffic):
        size = float(sizes[list(rows)].sum())
        there = writer.write(TaskKind.FLATTEN, number, server, _READ_AND_WRITTEN * size)
        if device != server:
            channel = server * num_devices + device
            there = writer.write(
                TaskKind.PULL, rows[0], device, size, channel=channel, reads=[there]
            )
        writer.write(TaskKind.FLATTEN, number, device, _READ_AND_WRITTEN * size, reads=[there])
    writer.end()
    return writer.tape


def more_seconds(evaluator: Evaluator, strategy: Strategy, choice: Choice) -> float:
    """Seconds that a step takes longer than teams alone, at the pace that teams settle at."""
    if evaluator.tasks_of(choice) > evaluator.most_tasks:  # it will not be simulated
        return 0.0
    server = strategy.mode(AsynchronousServer)
    assert server is not None
    seconds = steady_seconds(team_paces(evaluator, strategy, choice), server)
    seconds = max(seconds, _on_links_s(evaluator, strategy))
    return seconds - evaluator.alone(choice)[1]


def team_paces(evaluator: Evaluator, strategy: Strategy, choice: Choice) -> tuple[TeamPace, ...]:
    """Seconds that a step of each team takes, and its exchange with the server alone.

    Not counted as an evaluation: it belongs to that of the strategy.

    Args:
        evaluator: Evaluator of the graph on the cluster.
        strategy: Strategy with an asynchronous server.
        choice: The same strategy, encoded.
    """
    counted = evaluator.num_evaluations
    lowered, _, timings = evaluator.alone(choice)
    number = int(lowered.tape.counts[NUM_TASKS])
    tasks, finish = lowered.tape.tasks[:number], timings.finish[:number].copy()
    # The server updates, and a team is done when it has its gradients.
    finish[tasks["kind"] == TaskKind.UPDATE] = 0.0
    paces = []
    for team, members in enumerate(islands(strategy)):
        own = np.isin(tasks["device"], members)
        compute_s = float(finish[own].max(initial=0.0))
        paces.append(_pace(evaluator, strategy, choice, team, compute_s))
    evaluator.num_evaluations = counted
    return tuple(paces)


def _pace(
    evaluator: Evaluator, strategy: Strategy, choice: Choice, team: int, compute_s: float
) -> TeamPace:
    """Pace of a team, given its compute seconds."""
    server = strategy.mode(AsynchronousServer)
    assert server is not None
    whole, busy = [], []
    for is_push, of in ((False, pulls_of), (True, pushes_of)):
        traffic = of(evaluator.graph, strategy, team)
        whole.append(_exchange_s(evaluator, traffic, choice, is_push=is_push))
        busy.append(
            tuple(
                sum(
                    _busy_s(evaluator, each, is_push=is_push)
                    for each in traffic
                    if each.server == device
                )
                for device in server.devices
            )
        )
    return TeamPace(whole[0], compute_s, whole[1], *busy)


def _busy_s(evaluator: Evaluator, traffic: Traffic, *, is_push: bool) -> float:
    """Seconds that an exchange occupies the server's link, and its device.

    A push holds the device for the optimizer's step, a pull for the copy of the weights.
    """
    num_bytes, cluster = _bytes_of(evaluator.graph, traffic.rows), evaluator.cluster
    if is_push:
        own_s = evaluator.prices.update_s(traffic.server, traffic.rows)
    else:
        own_s = evaluator.prices.copy_s(traffic.server, num_bytes * 2)
    if traffic.device == traffic.server:
        return own_s
    ends = (traffic.device, traffic.server) if is_push else (traffic.server, traffic.device)
    route = cluster.route(*ends)
    channel = ends[0] * cluster.num_devices + ends[1]
    link_s = evaluator.prices.held_by(channel)[route[-1 if is_push else 0]] if route else 0.0
    return own_s + num_bytes * float(link_s)


def _exchange_s(
    evaluator: Evaluator, traffic: tuple[Traffic, ...], choice: Choice, *, is_push: bool
) -> float:
    """Seconds of a push or pull when nobody else talks to the server; simulated once."""
    graph, key = evaluator.graph, (AsynchronousServer.key, is_push, traffic)
    if key not in evaluator.memo:
        sizes = np.array([graph.tensor_bytes[row] for _, row, _ in graph.updates])
        tape = (push_tape if is_push else pull_tape)(traffic, sizes, evaluator.channels)
        evaluator.memo[key] = evaluator.tape_s(tape, choice)
    return evaluator.memo[key]


def _on_links_s(evaluator: Evaluator, strategy: Strategy) -> float:
    """Seconds that one step of all teams occupies the busiest link.

    Teams of one host share its NIC, and a device of the server sends and receives for others.
    """
    graph, num_devices = evaluator.graph, evaluator.cluster.num_devices
    held = np.zeros(len(evaluator.cluster.resources))
    for team in range(len(strategy.decisions[0].teams)):
        for device, server, rows in pushes_of(graph, strategy, team):
            if device != server:
                channel = device * num_devices + server
                held += _bytes_of(graph, rows) * evaluator.prices.held_by(channel)
        for device, server, rows in pulls_of(graph, strategy, team):
            if device != server:
                channel = server * num_devices + device
                held += _bytes_of(graph, rows) * evaluator.prices.held_by(channel)
    return float(held.max(initial=0.0))


def _bytes_of(graph: OpGraph, rows: Sequence[int]) -> float:
    """Bytes of the parameters of some rows of ``graph.updates``."""
    return float(sum(graph.tensor_bytes[graph.updates[row][1]] for row in rows))
