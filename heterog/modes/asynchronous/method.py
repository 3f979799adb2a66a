"""``server``: teams push their gradients to a server without waiting, at most tau steps apart.

Only if a user asks for it (``server=2``), because the resulting weights differ from those of one
device. It is a row beside the exact methods.

Teams are single devices, or the devices of a host, which then sum gradients in every step. In the
long run every team makes as many steps as the slowest one. So samples follow the teams' speeds,
and are then moved one by one from the slowest device to the fastest, counting the exchange with
the server. The server is on one device (on small clusters each is tried), or has a part on the
first device of every host.

**Times of teams.** Events come in the order of ``AsynchronousServer.events``. A pull of team i
takes q_i seconds after the team's last push; then the team computes for w_i; its push takes p_i.
For parts of q_i and p_i the server's own link or optimizer is busy, with one exchange after the
other:

    pulled_i(n) = max(pushed_i(n - 1) + q_i, server)
    pushed_i(n) = max(pulled_i(n) + w_i + p_i, server)

where ``server`` is the end of the server's part. In a planned order a push ends no earlier than
the pushes before it, and a pull begins when these have ended. If several devices are the server,
each is busy with its own parameters, and a team waits for all of them. This recurrence does not
share other links; a step takes at least the time that all exchanges hold any link, which the
evaluator adds.

For two teams with short exchanges that take c_1 <= c_2 seconds alone, and the staleness tau,

    pushed_2(n) = n c_2,   pushed_1(n) = max(n c_1, c_1 + (n - 1 - tau) c_2)

after n steps. So the faster team runs ahead until it is tau steps ahead. From then on it goes at
the slower team's pace, whatever tau is: samples should follow speeds. Without a bound, teams make
as many steps as they would alone, unless the server is busy: n steps of all teams keep it busy for
n sum(p_i + q_i).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from heterog.errors import HeterogError
from heterog.graph.op_graph import OpGraph
from heterog.lowering import Choice
from heterog.lowering.channels import ChannelTable
from heterog.lowering.program import FloatArray, TaskKind
from heterog.lowering.tape import NUM_TASKS, Tape, TapeWriter
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Planner, PlanResult, Problem
from heterog.modes.asynchronous.value import (
    MOST_TICKS,
    AsynchronousServer,
    Exchange,
    PushOrder,
    exchanged,
)
from heterog.modes.islands import islands
from heterog.modes.search import (
    Tried,
    best_of,
    by_preference,
    count_in,
    island_decisions,
    nothing,
    refined,
    words_in,
)
from heterog.names import shown
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Decision, Strategy

_MOST_SERVERS = 8
"""Most devices that are tried as the server; on larger clusters the first ones."""

SLOWEST_TICKS = 1000
"""Ticks of the slowest team's step; predictions are no more precise than a thousandth."""
_MOST_SETTLING = 400
"""Most steps for teams to reach their steady pace; with a larger tau not all of them do."""
_MEASURED = 100
"""Steps over which the steady pace is measured. The order of pushes repeats sooner if ticks have a
common divisor, as planners' rounded ticks have."""


def parse_server(text: str) -> "ServedTeams":
    """The method for a text such as ``server=2``.

    >>> parse_server("server=2").staleness
    2

    Raises:
        HeterogError: a word is unknown, missing or has no such value.
    """
    try:
        said = words_in(text, AsynchronousServer.word, "order")
        staleness = count_in(said.get(AsynchronousServer.word, ""))
        return ServedTeams(staleness, PushOrder(said.get("order", PushOrder.PLANNED)))
    except ValueError:
        raise HeterogError(
            f"`asynchronous` has {shown(text)}; it takes the number of steps that a team may be "
            "ahead of the slowest one, server=2 (with server=0 all wait for each other), then if "
            "wanted order=planned or order=arrival, with a comma before it."
        ) from None


class ServedTeams(Planner):
    """Searches the best teams and server for one bound of staleness.

    Args:
        staleness: Most steps that a team may be ahead of the slowest one.
        order: Order in which the server takes pushes.
    """

    name = AsynchronousServer.word
    stage = "search"

    def __init__(self, staleness: int, order: PushOrder = PushOrder.PLANNED) -> None:
        self.staleness = staleness
        self.order = order

    def plan(self, problem: Problem) -> PlanResult:
        """Try teams of devices and of hosts with servers in several places, then refine."""
        evaluator = problem.evaluator
        if not problem.step_barrier:
            return nothing("a server needs a step barrier")
        spending = problem.spend()
        tried: list[Tried] = []
        with spending.limits():
            for decision in island_decisions(evaluator):
                for devices in _servers(evaluator, decision):
                    tried.append(self._tried(evaluator, devices, decision))
            if tried:
                best = min(tried, key=by_preference)
                server = best[1].own_mode(AsynchronousServer)
                attempt = partial(self._tried, evaluator, server.devices)
                tried += refined(best, partial(_device_speeds, evaluator), attempt)
        why_none = "there are no two devices or hosts with samples to train alone"
        return best_of(tried, problem, spending, why_none)

    def _tried(self, evaluator: Evaluator, devices: tuple[int, ...], decision: Decision) -> Tried:
        strategy = served_strategy(evaluator, decision, self.staleness, devices, self.order)
        return evaluator.evaluate(strategy, Order.FIFO), strategy


def served_strategy(
    evaluator: Evaluator,
    decision: Decision,
    staleness: int,
    devices: tuple[int, ...],
    order: PushOrder = PushOrder.PLANNED,
) -> Strategy:
    """A strategy whose order of pushes follows the predicted paces of its teams.

    Args:
        evaluator: Evaluator of the graph on the cluster.
        decision: Decision of all groups, with teams.
        staleness: Number of steps that a team may be ahead of the slowest one.
        devices: Devices of the server.
        order: Order in which the server takes pushes.
    """
    equal = AsynchronousServer(
        staleness=staleness, devices=devices, ticks=(1,) * len(decision.teams), order=order
    )
    strategy = uniform_strategy(evaluator, decision).with_mode(equal)
    paces = team_paces(evaluator, strategy, evaluator.encode(strategy))
    return strategy.with_mode(replace(equal, ticks=ticks_of(paces)))


def _servers(evaluator: Evaluator, decision: Decision) -> Iterator[tuple[int, ...]]:
    """Candidate places of the server: one device, or the first device of every host."""
    cluster = evaluator.cluster
    for device in decision.devices[:_MOST_SERVERS]:
        yield (device,)
    firsts = {cluster.host_of[device]: device for device in reversed(decision.devices)}
    if 1 < len(firsts) <= len(evaluator.graph.updates):
        yield tuple(sorted(firsts.values()))


def _device_speeds(evaluator: Evaluator, strategy: Strategy) -> tuple[float, ...]:
    """Samples per second of every device, counting its team's exchange with the server."""
    decision = strategy.decisions[0]
    paces = team_paces(evaluator, strategy, evaluator.encode(strategy))
    shares = dict(zip(decision.devices, decision.shares, strict=True))
    speeds = [1.0] * evaluator.cluster.num_devices
    for team, pace in zip(decision.teams, paces, strict=True):
        for device in team:
            speeds[device] = max(shares[device], 1) / pace.alone_s
    return tuple(speeds)


class TeamPace(NamedTuple):
    """Seconds of the parts of one team's step.

    Attributes:
        pull_s: Seconds q of a pull, while no other team uses the server.
        compute_s: Seconds w from having weights to having all gradients.
        push_s: Seconds p until the server has taken the gradients and stepped the optimizer.
        pull_busy_s: Seconds of the pull for which each of the server's devices is busy; empty
            for a single device that is busy for the whole pull.
        push_busy_s: The same for the push.
    """

    pull_s: float
    compute_s: float
    push_s: float
    pull_busy_s: tuple[float, ...] = ()
    push_busy_s: tuple[float, ...] = ()

    @property
    def alone_s(self) -> float:
        """Seconds of a step while no other team uses the server."""
        return self.pull_s + self.compute_s + self.push_s


def ticks_of(paces: Sequence[TeamPace]) -> tuple[int, ...]:
    """Ticks of each team's step alone, ``SLOWEST_TICKS`` for the slowest team.

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
        server: Server, which has the order of pushes.
        num_steps: Number of steps of each team.

    Returns:
        # [num_steps, num_teams]
    """
    ended = np.zeros((num_steps, len(paces)))
    free = [0.0] * len(server.devices)
    ready = [0.0] * len(paces)
    taken = 0.0  # end of all pushes before this one in the order
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
    """Seconds of a step at the steady pace, once the bound holds faster teams back.

    All teams then make as many steps as the slowest one; a step is one step of each team.
    """
    settling = min(server.staleness, _MOST_SETTLING) + _MEASURED
    # As many steps after the measured ones, because the server becomes idle in the last ones.
    done = push_seconds(paces, server, 2 * settling + _MEASURED).max(1)
    return float(done[settling + _MEASURED - 1] - done[settling - 1]) / _MEASURED


_READ_AND_WRITTEN = 2.0
"""Bytes that a copy reads and writes, per byte copied."""


def exchange_tape(
    exchanges: Sequence[Exchange], sizes: FloatArray, channels: ChannelTable, *, is_push: bool
) -> Tape:
    """The tasks of a push or pull: copies into messages, transfers, and the receivers' work.

    After a push the server's optimizer steps; pulled weights are copied into the parameters.

    Args:
        exchanges: Transfers of the team.
        sizes: Bytes of each row of ``graph.updates``.
        channels: Table of the cluster's channels.
        is_push: Whether gradients are pushed, or weights pulled.
    """
    num_devices = channels.cluster.num_devices
    writer = TapeWriter(sum(3 + len(each.rows) for each in exchanges), len(sizes), num_devices)
    kind = TaskKind.PUSH if is_push else TaskKind.PULL
    for number, each in enumerate(exchanges):
        sender, receiver = each.ends(is_push=is_push)
        size = float(sizes[list(each.rows)].sum())
        there = writer.write(TaskKind.FLATTEN, number, sender, _READ_AND_WRITTEN * size)
        if sender != receiver:
            channel = sender * num_devices + receiver
            there = writer.write(
                kind, each.rows[0], receiver, size, channel=channel, reads=[there]
            )
        if not is_push:
            copied = _READ_AND_WRITTEN * size
            writer.write(TaskKind.FLATTEN, number, receiver, copied, reads=[there])
            continue
        for row in each.rows:
            writer.write(TaskKind.UPDATE, row, receiver, 0.0, reads=[there])
    writer.end()
    return writer.tape


def more_seconds(evaluator: Evaluator, strategy: Strategy, choice: Choice) -> float:
    """Seconds of a step at the steady pace beyond the teams' own step."""
    if evaluator.tasks_of(choice) > evaluator.most_tasks:  # it will not be simulated
        return 0.0
    server = strategy.own_mode(AsynchronousServer)
    seconds = steady_seconds(team_paces(evaluator, strategy, choice), server)
    seconds = max(seconds, _on_links_s(evaluator, strategy))
    return seconds - evaluator.alone(choice)[1]


def team_paces(evaluator: Evaluator, strategy: Strategy, choice: Choice) -> tuple[TeamPace, ...]:
    """Seconds of each team's step and of its exchange with the server, each alone.

    Not counted as an evaluation, because it is part of the strategy's evaluation.

    Args:
        evaluator: Evaluator of the graph on the cluster.
        strategy: Strategy with an asynchronous server.
        choice: The same strategy, encoded.
    """
    counted = evaluator.num_evaluations
    lowered, _, timings = evaluator.alone(choice)
    number = int(lowered.tape.counts[NUM_TASKS])
    tasks, finish = lowered.tape.tasks[:number], timings.finish[:number].copy()
    # Not the updates: the server makes them, and a team ends with its gradients.
    finish[tasks["kind"] == TaskKind.UPDATE] = 0.0
    paces = []
    for team, members in enumerate(islands(strategy)):
        own = np.isin(tasks["device"], members)
        paces.append(_pace(evaluator, strategy, choice, team, float(finish[own].max(initial=0.0))))
    evaluator.num_evaluations = counted
    return tuple(paces)


def _pace(
    evaluator: Evaluator, strategy: Strategy, choice: Choice, team: int, compute_s: float
) -> TeamPace:
    """Pace of a team with given compute seconds."""
    server = strategy.own_mode(AsynchronousServer)
    whole, busy = [], []
    for is_push in (True, False):
        exchanges = exchanged(evaluator.graph, strategy, team, is_push=is_push)
        whole.append(_exchange_s(evaluator, exchanges, choice, is_push=is_push))
        busy.append(
            tuple(
                sum(
                    _busy_s(evaluator, each, is_push=is_push)
                    for each in exchanges
                    if each.server == device
                )
                for device in server.devices
            )
        )
    return TeamPace(whole[1], compute_s, whole[0], busy[1], busy[0])


def _busy_s(evaluator: Evaluator, exchange: Exchange, *, is_push: bool) -> float:
    """Seconds that an exchange occupies the server's link and device.

    A push occupies the device for the optimizer's step, a pull for the copy of the weights.
    """
    num_bytes, cluster = _bytes_of(evaluator.graph, exchange.rows), evaluator.cluster
    if is_push:
        own_s = evaluator.prices.update_s(exchange.server, exchange.rows)
    else:
        own_s = evaluator.prices.copy_s(exchange.server, num_bytes * 2)
    if exchange.device == exchange.server:
        return own_s
    ends = exchange.ends(is_push=is_push)
    route = cluster.route(*ends)
    channel = ends[0] * cluster.num_devices + ends[1]
    link_s = evaluator.prices.held_by(channel)[route[-1 if is_push else 0]] if route else 0.0
    return own_s + num_bytes * float(link_s)


def _exchange_s(
    evaluator: Evaluator, exchanges: tuple[Exchange, ...], choice: Choice, *, is_push: bool
) -> float:
    """Seconds of a push or pull while no other team uses the server; simulated once."""
    graph, key = evaluator.graph, (AsynchronousServer.key, is_push, exchanges)
    if key not in evaluator.memo:
        sizes = np.array([graph.tensor_bytes[row] for _, row, _ in graph.updates])
        tape = exchange_tape(exchanges, sizes, evaluator.channels, is_push=is_push)
        evaluator.memo[key] = evaluator.tape_s(tape, choice)
    return evaluator.memo[key]


def _on_links_s(evaluator: Evaluator, strategy: Strategy) -> float:
    """Seconds that one step of all teams occupies the busiest link.

    Teams of one host share its NIC, and a server's device exchanges with all teams.
    """
    graph, num_devices = evaluator.graph, evaluator.cluster.num_devices
    held = np.zeros(len(evaluator.cluster.resources))
    for team in range(len(strategy.decisions[0].teams)):
        for is_push in (True, False):
            for each in exchanged(graph, strategy, team, is_push=is_push):
                sender, receiver = each.ends(is_push=is_push)
                if sender != receiver:
                    channel = sender * num_devices + receiver
                    held += _bytes_of(graph, each.rows) * evaluator.prices.held_by(channel)
    return float(held.max(initial=0.0))


def _bytes_of(graph: OpGraph, rows: Sequence[int]) -> float:
    """Bytes of the parameters of some rows of ``graph.updates``."""
    return float(sum(graph.tensor_bytes[graph.updates[row][1]] for row in rows))
