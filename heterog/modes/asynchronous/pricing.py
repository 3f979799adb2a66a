"""Prices of an asynchronous server: paces of its teams, from a step alone and single exchanges."""

from collections.abc import Sequence

import numpy as np

from heterog.graph.op_graph import OpGraph
from heterog.lowering import Choice
from heterog.lowering.program import TaskKind
from heterog.lowering.tape import NUM_TASKS
from heterog.modes.asynchronous.exchange import pull_tape, push_tape
from heterog.modes.asynchronous.paces import TeamPace, steady_seconds
from heterog.modes.asynchronous.value import AsynchronousServer, Traffic, pulls_of, pushes_of
from heterog.modes.islands import islands
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy


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
