"""An asynchronous server: teams push their gradients and wait only beyond a staleness bound.

The teams of every decision train alone, like the islands of ``averaging``. A *server* keeps the
weights and the optimizer. A team pulls the weights, computes the gradient of its own samples and
pushes it; the server steps its optimizer with every push. A team may begin a step only if it is at
most tau steps ahead of the slowest team (stale synchronous parallel, Ho et al. 2013): with tau = 0
no team begins step k + 1 before all have finished step k.

A pushed gradient is the team's part of the mean over the whole batch. With tau = 0 all gradients
of a step use the same weights, so with plain SGD (no momentum, no weight decay) their updates add
up to one device's step on the whole batch. A stateful optimizer, however, steps once for every
team, not once per batch; and with tau > 0 gradients use weights older than those they change. So a
strategy has such a server only if a user asked for it.

A ``planned`` order of all pushes and pulls is part of the strategy: it follows from ``ticks``. All
runs then give the same weights, independent of clocks, but a late team delays the others. By
``arrival`` the server takes what comes first, so that teams wait only for the staleness bound, and
runs differ.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.modes.islands import (
    MOST_STEPS,
    check_islands,
    crossing_fault,
    crossing_tasks,
    island_of,
    island_samples,
    islands,
)
from heterog.modes.mode import EncodedMode, Mode
from heterog.records import Int32, Series

if TYPE_CHECKING:
    from heterog.cluster.topology import Cluster
    from heterog.lowering.channels import ChannelTable
    from heterog.lowering.choice import Choice
    from heterog.lowering.program import FloatArray, Program
    from heterog.lowering.tables import GraphTables
    from heterog.methods.planner import Planner
    from heterog.modes.on_ranks import RankMode
    from heterog.runtime.deploy import DeployedStep
    from heterog.simulator.evaluator import Evaluator
    from heterog.strategy.strategy import Strategy

MOST_TICKS = 1_000_000
"""Most ticks of one step; the order of pushes needs no finer clock."""


class PushOrder(StrEnum):
    """Order in which a server takes gradients."""

    PLANNED = "planned"
    """Order of ``AsynchronousServer.events``: each run gives the same weights."""
    ARRIVAL = "arrival"
    """Order of arrival: runs differ."""


class ServerEvent(NamedTuple):
    """Next action of a server.

    Attributes:
        is_push: Whether it takes a gradient and steps its optimizer, or else sends weights.
        team: Team that sends the gradient or gets the weights.
        step: The team's step for this gradient or these weights, from 0.
    """

    is_push: bool
    team: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousServer(Mode):
    """A server that keeps the weights, and the order in which gradients reach it.

    Attributes:
        staleness: Most steps tau that a team may be ahead of the slowest one.
        devices: Devices that share the server's work: each keeps the weights and the optimizer
            state of some of the parameters that it trains; see ``server_of_rows``.
        ticks: Relative duration of each team's step in whole numbers. The planned order of pushes
            assumes that teams take exactly these times.
        order: Order in which the server takes pushes.
    """

    key = "asynchronous"
    word = "server"
    trains_apart = True
    steps_differ = True
    takes_gradients = True
    counts_labels_alone = True
    masters_fault = (
        "an asynchronous server keeps weights in the model's own dtype; train without master "
        "weights, or with an exact plan."
    )

    staleness: Int32
    devices: Series[Int32]
    ticks: Series[Int32]
    order: PushOrder = PushOrder.PLANNED

    def __post_init__(self) -> None:
        if not 0 <= self.staleness <= MOST_STEPS:
            raise StrategyError(
                f"a server with a staleness of {self.staleness} steps; give a number from 0 to "
                f"{MOST_STEPS:,}."
            )
        if not self.devices or list(self.devices) != sorted(set(self.devices)):
            raise StrategyError(
                f"a server's devices must be ascending and distinct, got {self.devices}."
            )
        if not self.ticks or not all(1 <= each <= MOST_TICKS for each in self.ticks):
            raise StrategyError(
                f"the ticks of teams are {self.ticks}; each needs a number from 1 to "
                f"{MOST_TICKS:,}."
            )

    @property
    def words(self) -> str:
        """The server in a sentence.

        >>> AsynchronousServer(staleness=2, devices=(0,), ticks=(3, 5)).words
        'gradients pushed to a server on device 0 in a planned order, at most 2 steps ahead'
        """
        steps = "1 step" if self.staleness == 1 else f"{self.staleness} steps"
        where = f"device {self.devices[0]}"
        if len(self.devices) > 1:
            where = f"devices {', '.join(map(str, self.devices))}"
        order = "in a planned order" if self.order == PushOrder.PLANNED else "as they come"
        return f"gradients pushed to a server on {where} {order}, at most {steps} ahead"

    def events(self) -> Iterator[ServerEvent]:
        """All pushes and pulls from the start of training, without end.

        Team i takes ``ticks[i]`` from its pull to its push; the server takes no time. After a push
        all teams that may begin a step pull, in order of falling ticks. Simultaneous pushes come
        in order of team numbers.

        >>> server = AsynchronousServer(staleness=1, devices=(0,), ticks=(1, 3))
        >>> from itertools import islice
        >>> [(each.team, each.step) for each in islice(server.events(), 12) if each.is_push]
        [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]
        """
        num_teams = len(self.ticks)
        first = sorted(range(num_teams), key=lambda team: (-self.ticks[team], team))
        done = [0] * num_teams
        waiting, under_way = list(first), list[tuple[int, int]]()
        now = 0
        while True:
            slowest = min(done)
            for team in first:
                if team in waiting and done[team] - slowest <= self.staleness:
                    waiting.remove(team)
                    yield ServerEvent(False, team, done[team])
                    heapq.heappush(under_way, (now + self.ticks[team], team))
            now, team = heapq.heappop(under_way)
            yield ServerEvent(True, team, done[team])
            done[team] += 1
            waiting.append(team)

    def events_of(self, num_steps: int) -> Iterator[ServerEvent]:
        """The pushes and pulls of training in which every team makes a number of steps."""
        left = len(self.ticks) * num_steps
        events = self.events()
        while left:
            event = next(events)
            if event.step < num_steps:
                left -= event.is_push
                yield event

    @classmethod
    def method(cls, text: str) -> "Planner":
        """The method that searches teams and server."""
        from heterog.modes.asynchronous.method import parse_server

        return parse_server(text)

    def brief_words(self, strategy: "Strategy") -> str:
        """The server in a few words."""
        return f"asynchronous server, {self.staleness} steps ahead at most"

    def check(self, strategy: "Strategy", graph: OpGraph, cluster: "Cluster") -> None:
        """Refuse teams that cannot train alone, and parameters without a server."""
        check_islands(strategy, graph.batch_size, "an asynchronous server")
        num_teams = len(strategy.decisions[0].teams)
        if len(self.ticks) != num_teams:
            raise StrategyError(
                f"the server has ticks for {len(self.ticks)} teams, but there are {num_teams}; "
                "give each team a number."
            )
        used: set[int] = set()
        for decision in dict.fromkeys(strategy.decisions):
            own = set(self.devices) & set(decision.devices)
            used |= own
            if not own:
                raise StrategyError(
                    f"the server is on devices {self.devices}, but a group's parameters are on "
                    f"devices {decision.devices}; add one of these to the server."
                )
        if used != set(self.devices):
            raise StrategyError(
                f"the server is on devices {self.devices}, of which "
                f"{sorted(set(self.devices) - used)} train nothing; leave them out."
            )
        idle = set(self.devices) - set(server_of_rows(graph, strategy))
        if idle:
            raise StrategyError(
                f"the server is on devices {self.devices}, but its {len(graph.updates)} "
                f"parameters leave none for {sorted(idle)}; leave these out."
            )

    def fault(self, program: "Program", strategy: "Strategy", tables: "GraphTables") -> str:
        """Why a program's teams cannot train alone, and in their own time; empty if they can.

        The number of unmasked labels is not exchanged, because every rank has the whole batch and
        counts them itself.
        """
        from heterog.lowering.program import early_reductions

        early = early_reductions(program, tables)
        meeting = (
            f"devices {devices} of several teams exchange a value in every step, so that they "
            "would wait for each other; an asynchronous server needs a loss that is a mean over "
            "samples or labels"
            for task, devices in crossing_tasks(program, strategy)
            if task not in early
        )
        return crossing_fault(program, strategy) or next(meeting, "")

    def encode(
        self, strategy: "Strategy", tables: "GraphTables", channels: "ChannelTable"
    ) -> EncodedMode:
        """The bytes that the server adds to each device."""
        kept = kept_bytes(
            strategy,
            tables.parameter_bytes.tolist(),
            tables.parameter_group.tolist(),
            num_devices=channels.cluster.num_devices,
            state_ratio=tables.state_ratio,
        )
        return _EncodedServer(by_device=np.array(kept))

    def priced(
        self, encoded: EncodedMode, evaluator: "Evaluator", strategy: "Strategy", choice: "Choice"
    ) -> EncodedMode:
        """The teams' steady pace, minus the step of teams alone."""
        from heterog.modes.asynchronous.method import more_seconds

        return replace(encoded, more_s=more_seconds(evaluator, strategy, choice))

    def loss_part(
        self, graph: OpGraph, strategy: "Strategy", rank: int
    ) -> tuple[float, tuple[int, ...]]:
        """The mean over the team's own samples; NaN on a rank without a team."""
        team = island_of(strategy, rank)
        if team is None:
            return math.nan, ()
        samples = island_samples(strategy, graph.batch_size)[team]
        return graph.batch_size / samples, islands(strategy)[team]

    def device_sets(self, program: "Program", strategy: "Strategy") -> set[tuple[int, ...]]:
        """Teams, which sum their own losses."""
        return {devices for devices in islands(strategy) if len(devices) > 1}

    def owners(self, graph: OpGraph, strategy: "Strategy") -> tuple[int, ...]:
        """The server's devices, which keep the optimizer state with their copies."""
        return server_of_rows(graph, strategy)

    def on_rank(self, step: "DeployedStep") -> "RankMode":
        """Pulls and pushes of a rank."""
        from heterog.modes.asynchronous.ranks import AsynchronousTraining

        return AsynchronousTraining(step)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EncodedServer(EncodedMode):
    """Bytes that a server adds to each device, beyond those of training alone."""

    folds = False

    by_device: "FloatArray"  # [num_devices]

    def resident_bytes(self, tables: "GraphTables", choice: "Choice") -> "FloatArray | float":
        """Bytes of messages, weights and states."""
        return self.by_device


def server_of_rows(graph: OpGraph, strategy: "Strategy") -> tuple[int, ...]:
    """The device that serves each parameter, by row of ``graph.updates``.

    In order of falling size, each parameter goes to the server's device with the fewest bytes so
    far among the devices that train it.
    """
    group = group_ops(graph).group
    sizes = [float(graph.tensor_bytes[parameter]) for _, parameter, _ in graph.updates]
    return _dealt(strategy, sizes, [int(group[op]) for op, _, _ in graph.updates])


def _dealt(strategy: "Strategy", sizes: Sequence[float], groups: Sequence[int]) -> tuple[int, ...]:
    """The device that serves each parameter, from the parameters' bytes and groups."""
    server = strategy.own_mode(AsynchronousServer)
    load = dict.fromkeys(server.devices, 0.0)
    found = [0] * len(sizes)
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        devices = strategy.decisions[groups[row]].devices
        able = [device for device in server.devices if device in devices]
        found[row] = min(able, key=lambda device: (load[device], device))
        load[found[row]] += sizes[row]
    return tuple(found)


class Exchange(NamedTuple):
    """Parameters that a team's device exchanges with a server's device in a step.

    Attributes:
        device: Device of the team.
        server: Device of the server.
        rows: Rows of ``graph.updates``, ascending.
    """

    device: int
    server: int
    rows: tuple[int, ...]

    def ends(self, *, is_push: bool) -> tuple[int, int]:
        """Sender and receiver."""
        return (self.device, self.server) if is_push else (self.server, self.device)


def exchanged(
    graph: OpGraph, strategy: "Strategy", team: int, *, is_push: bool
) -> tuple[Exchange, ...]:
    """Gradients that a team pushes, or parameters that it pulls, by device and server.

    The first of replicas sends; every replica receives.
    """
    group = group_ops(graph).group
    rows: dict[tuple[int, int], list[int]] = {}
    for row, server in enumerate(server_of_rows(graph, strategy)):
        holders = sorted(strategy.decisions[int(group[graph.updates[row][0]])].teams[team])
        for device in holders[:1] if is_push else holders:
            rows.setdefault((device, server), []).append(row)
    return tuple(Exchange(*key, tuple(found)) for key, found in sorted(rows.items()))


def kept_bytes(
    strategy: "Strategy",
    sizes: Sequence[float],
    groups: Sequence[int],
    *,
    num_devices: int,
    state_ratio: float,
) -> list[float]:
    """Bytes that a server adds to each device, beyond those of training alone.

    A replica keeps a message of gradients and one of weights, but no optimizer state, which the
    server keeps. The server also keeps weights of its own, and a message to and one from each
    team.

    Args:
        strategy: Strategy with a server.
        sizes: Bytes of each parameter.
        groups: Group of each parameter, for its decision.
        num_devices: Number of devices of the cluster.
        state_ratio: Bytes of optimizer state per byte of parameters.

    Returns:
        # [num_devices]
    """
    messages = 2 * len(strategy.own_mode(AsynchronousServer).ticks)
    kept = [0.0] * num_devices
    for size, group, home in zip(sizes, groups, _dealt(strategy, sizes, groups), strict=True):
        for device in strategy.decisions[group].devices:
            kept[device] += size * (2.0 - state_ratio)
        kept[home] += size * (1.0 + messages + state_ratio)
    return kept
