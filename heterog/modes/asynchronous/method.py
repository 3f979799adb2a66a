"""``server``: teams that push gradients to a server as they have them, tau steps apart at most.

Only where a person asks for it (``server=2``), because the weights that come out
are not those of one device. It is a row beside the exact methods.

Teams are single devices, or the devices of a host, which then sum gradients in every step. In the
long run every team makes as many steps as the slowest one, so samples follow the teams' speeds,
and are then moved one by one from the team that takes longest to the one that takes shortest, the
exchange with the server included. The server is on one device (each is tried, on small clusters),
or parts of it are on the first device of every host.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from heterog.errors import HeterogError
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Planner, PlanResult, Problem
from heterog.modes.asynchronous.paces import team_paces, ticks_of
from heterog.modes.asynchronous.value import AsynchronousServer, PushOrder
from heterog.modes.search import (
    Tried,
    best_of,
    by_preference,
    is_count,
    island_decisions,
    nothing,
    refined,
)
from heterog.names import shown
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Decision, Strategy

_MOST_SERVERS = 8
"""Most devices that are tried as the server; the first ones of a larger cluster."""


def parse_server(text: str) -> "ServedTeams":
    """The method that a text such as ``server=2`` asks for.

    >>> parse_server("server=2").staleness
    2

    Raises:
        HeterogError: a word is unknown, missing or has no such value.
    """
    first, *others = (part.strip().partition("=")[::2] for part in text.split(","))
    value = first[1]
    if not is_count(value):
        raise HeterogError(
            f"`asynchronous` has server={shown(value)}; it needs the number of steps that a team "
            "may be ahead of the slowest one: server=2, or server=0 where all wait for each other."
        )
    options = dict(others)
    order = options.pop("order", PushOrder.PLANNED.value)
    if options or len(others) > 1 or order not in list(PushOrder):
        raise HeterogError(
            f"`asynchronous` has {shown(text)}; after server=TAU it takes order=planned or "
            "order=arrival, once, with a comma before it."
        )
    return ServedTeams(int(value), PushOrder(order))


class ServedTeams(Planner):
    """Searches the best teams and server for one bound of staleness.

    Args:
        staleness: Number of steps that a team may be ahead of the slowest one.
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
                server = best[1].mode(AsynchronousServer)
                assert server is not None
                attempt = partial(self._tried, evaluator, server.devices)
                tried += refined(best, partial(_device_speeds, evaluator), attempt)
        if not tried:
            return nothing("there are no two devices or hosts with samples to train alone")
        return best_of(tried, problem, spending)

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
    """Candidate places of the server: one device, or the first one of every host."""
    cluster = evaluator.cluster
    for device in decision.devices[:_MOST_SERVERS]:
        yield (device,)
    firsts = {cluster.host_of[device]: device for device in reversed(decision.devices)}
    if 1 < len(firsts) <= len(evaluator.graph.updates):
        yield tuple(sorted(firsts.values()))


def _device_speeds(evaluator: Evaluator, strategy: Strategy) -> tuple[float, ...]:
    """Samples per second of every device, the exchange of its team with the server included."""
    decision = strategy.decisions[0]
    paces = team_paces(evaluator, strategy, evaluator.encode(strategy))
    shares = dict(zip(decision.devices, decision.shares, strict=True))
    speeds = [1.0] * evaluator.cluster.num_devices
    for team, pace in zip(decision.teams, paces, strict=True):
        for device in team:
            speeds[device] = max(shares[device], 1) / pace.alone_s
    return tuple(speeds)
