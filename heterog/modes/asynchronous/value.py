"""An asynchronous server: teams push gradients as they have them and never wait for all others.

The teams of every decision train alone, as the islands of ``averaging`` do. A *server* keeps the
weights and the optimizer. A team pulls the weights, computes a gradient of its own samples on
them, and pushes it; the server steps its optimizer with every push. A team may begin a step only
if it is at most tau steps ahead of the slowest one (stale synchronous parallel, Ho et al. 2013):
with tau = 0 nobody begins step k + 1 before all have finished step k.

A pushed gradient is the team's part of the mean over the whole batch. With tau = 0 all gradients
of a step are made on the same weights, so with plain SGD (no momentum, no weight decay) their
updates add up to the step of one device on the whole batch. An optimizer with a state steps once
for every team, which one device does not; and with tau > 0 gradients are made on weights that are
older than those they change. So a strategy has such a server only where a person asked for it.

The order of all pushes and pulls is part of the strategy, if it is ``planned``: it follows from
``ticks``. Runs are then the same each time, whatever clocks say, but a team that is late holds the
others up. By ``arrival`` the server takes what comes first, so that nobody waits before the bound
on staleness says so, and no two runs are alike.
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
    from heterog.runtime.step.rank_program import RankProgram
    from heterog.simulator.evaluator import Evaluator
    from heterog.strategy.strategy import Decision, Strategy

MOST_TICKS = 1_000_000
"""Most ticks of one step; the order of pushes needs no finer clock."""


class PushOrder(StrEnum):
    """Order in which a server takes gradients."""

    PLANNED = "planned"
    """Order of ``AsynchronousServer.events``: each run gives the same weights."""
    ARRIVAL = "arrival"
    """Order of arrival: no two runs are alike."""


class ServerEvent(NamedTuple):
    """Next action of a server.

    Attributes:
        is_push: Whether it takes a gradient and steps its optimizer; otherwise it gives weights.
        team: Team whose gradient it takes, or which gets the weights.
        step: Step of that team, from 0, that made the gradient or gets the weights.
    """

    is_push: bool
    team: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousServer(Mode):
    """A server that keeps the weights, and the order in which gradients reach it.

    Attributes:
        staleness: Number tau of steps that a team may be ahead of the slowest one.
        devices: Devices that share the server's work: each keeps the weights and the optimizer's
            state of some of the parameters that it trains; see ``server_of_rows``.
        ticks: Duration of a step of each team in whole numbers, relative to the others. The
            planned order of pushes is that of teams which take exactly so long.
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

        Team i takes ``ticks[i]`` from its pull to its push, the server takes no time. After a push
        all teams that may now begin a step pull, those with the most ticks first. Of pushes at
        the same time the team with the lower number is first.

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
        """The pushes and pulls of a training in which every team makes a number of steps."""
        left = len(self.ticks) * num_steps
        events = self.events()
        while left:
            event = next(events)
            if event.step < num_steps:
                left -= event.is_push
                yield event

    @classmethod
    def method(cls, text: str) -> "Planner":
        """The method that searches for it."""
        from heterog.modes.asynchronous.method import parse_server

        return parse_server(text)

    def brief_words(self, strategy: "Strategy") -> str:
        """The server in a few words."""
        return f"asynchronous server, {self.staleness} steps ahead at most"

    def check(self, strategy: "Strategy", graph: OpGraph, cluster: "Cluster") -> None:
        """Refuse teams that cannot train alone, and parameters that nobody serves."""
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
        """Why a program's teams cannot train alone; empty if they can."""
        return crossing_fault(program, strategy)

    def encode(
        self, strategy: "Strategy", tables: "GraphTables", channels: "ChannelTable"
    ) -> EncodedMode:
        """What the server adds to each device."""
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
        """The pace that teams settle at, beside a step of teams alone."""
        from heterog.modes.asynchronous.method import more_seconds

        return replace(encoded, more_s=more_seconds(evaluator, strategy, choice))

    def loss_part(
        self, graph: OpGraph, strategy: "Strategy", rank: int
    ) -> tuple[float, tuple[int, ...]]:
        """The mean over the team's own samples; not a number on a rank of no team."""
        team = island_of(strategy, rank)
        if team is None:
            return math.nan, ()
        samples = island_samples(strategy, graph.batch_size)[team]
        return graph.batch_size / samples, islands(strategy)[team]

    def device_sets(self, program: "Program", strategy: "Strategy") -> set[tuple[int, ...]]:
        """Teams, which sum their own losses."""
        return {devices for devices in islands(strategy) if len(devices) > 1}

    def owners(self, graph: OpGraph, strategy: "Strategy") -> tuple[int, ...]:
        """The server's devices, beside whose copies the optimizer's state is."""
        return server_of_rows(graph, strategy)

    def seen_fault(self, seen: "RankProgram") -> str:
        """Why teams would wait for each other in a step; empty if they do not."""
        from heterog.modes.asynchronous.ranks import meeting_fault

        return meeting_fault(seen)

    def on_rank(self, step: "DeployedStep") -> "RankMode":
        """Pulls and pushes of a rank."""
        from heterog.modes.asynchronous.ranks import AsynchronousTraining

        return AsynchronousTraining(step)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EncodedServer(EncodedMode):
    """What a server adds to each device, beside what it needs to train alone."""

    folds = False

    by_device: "FloatArray"  # [num_devices]

    def resident_bytes(self, tables: "GraphTables", choice: "Choice") -> "FloatArray | float":
        """Bytes of messages, weights and states."""
        return self.by_device


def server_of_rows(graph: OpGraph, strategy: "Strategy") -> tuple[int, ...]:
    """The device that serves each parameter, by row of ``graph.updates``.

    The largest parameters first, each goes to the server's device that has the fewest bytes so
    far among those that train it.
    """
    group = group_ops(graph).group
    sizes = [float(graph.tensor_bytes[parameter]) for _, parameter, _ in graph.updates]
    return _dealt(strategy, sizes, [int(group[op]) for op, _, _ in graph.updates])


def _dealt(strategy: "Strategy", sizes: Sequence[float], groups: Sequence[int]) -> tuple[int, ...]:
    """The device that serves each parameter, given the bytes and the group of each."""
    server = strategy.own_mode(AsynchronousServer)
    load = dict.fromkeys(server.devices, 0.0)
    found = [0] * len(sizes)
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        devices = strategy.decisions[groups[row]].devices
        able = [device for device in server.devices if device in devices]
        found[row] = min(able, key=lambda device: (load[device], device))
        load[found[row]] += sizes[row]
    return tuple(found)


class Traffic(NamedTuple):
    """Parameters that one device of a team exchanges with one of the server in a step.

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


def pushes_of(graph: OpGraph, strategy: "Strategy", team: int) -> tuple[Traffic, ...]:
    """Gradients that a team pushes, by sender and server: of replicas, the first sends."""
    return _traffic(graph, strategy, team, all_replicas=False)


def pulls_of(graph: OpGraph, strategy: "Strategy", team: int) -> tuple[Traffic, ...]:
    """Parameters that a team pulls, by receiver and server: every replica receives."""
    return _traffic(graph, strategy, team, all_replicas=True)


def _traffic(
    graph: OpGraph, strategy: "Strategy", team: int, *, all_replicas: bool
) -> tuple[Traffic, ...]:
    group = group_ops(graph).group
    rows: dict[tuple[int, int], list[int]] = {}
    for row, server in enumerate(server_of_rows(graph, strategy)):
        decision: Decision = strategy.decisions[int(group[graph.updates[row][0]])]
        holders = sorted(decision.teams[team])
        for device in holders if all_replicas else holders[:1]:
            rows.setdefault((device, server), []).append(row)
    return tuple(Traffic(*key, tuple(found)) for key, found in sorted(rows.items()))


def kept_bytes(
    strategy: "Strategy",
    sizes: Sequence[float],
    groups: Sequence[int],
    *,
    num_devices: int,
    state_ratio: float,
) -> list[float]:
    """Bytes that a server adds to each device, beside what it needs to train alone.

    A replica keeps a message of gradients and one of weights, but no state of the optimizer, which
    is the server's. The server keeps weights of its own, the state, and a message to and one from
    each team.

    Args:
        strategy: Strategy with a server.
        sizes: Bytes of each parameter.
        groups: Group of each parameter, by which decisions are looked up.
        num_devices: Number of devices of the cluster.
        state_ratio: Bytes of the optimizer's state for each byte of parameters.

    Returns:
        # [num_devices]
    """
    server = strategy.own_mode(AsynchronousServer)
    messages = 2 * len(server.ticks)
    kept = [0.0] * num_devices
    dealt = _dealt(strategy, sizes, groups)
    for size, group, home in zip(sizes, groups, dealt, strict=True):
        for device in strategy.decisions[group].devices:
            kept[device] += size * (2.0 - state_ratio)
        kept[home] += size * (1.0 + messages + state_ratio)
    return kept
