"""The hosts that run the ranks of a job and keep its snapshots, as the job sees them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from heterog.cluster.topology import Cluster
from heterog.healing.choices import Choice
from heterog.healing.exchange import Assignment, Event
from heterog.healing.host import HealingHost
from heterog.healing.options import Trained
from heterog.healing.shelf import Part
from heterog.runtime.ranks.on_ray import (
    END_S,
    SILENT_S,
    HostRank,
    NodeHost,
    variables_of_ranks,
)
from heterog.runtime.ranks.place import HERE, Place
from heterog.runtime.ranks.watching import POLL_S, SILENCE_S, wait_for_ranks
from heterog.runtime.request import RunRequest


@dataclass(slots=True, kw_only=True)
class JobState:
    """What has to be known to go on with a job.

    Attributes:
        generation: Number of times ranks were started before.
        running: The plan that the generation runs.
        trained: Progress so far.
        is_running: Whether the ranks of the generation are there.
    """

    generation: int
    running: Choice
    trained: Trained
    is_running: bool = True


class _Here:
    """Has the part of Ray that a crew uses, where its only host is an object of this process."""

    exceptions = SimpleNamespace(RayError=(), RayTaskError=())

    def __init__(self, host: Any) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        """A method of the host, as Ray has methods of actors."""
        return SimpleNamespace(remote=getattr(self._host, name))

    @staticmethod
    def wait(asked: Sequence[Any], **how: Any) -> tuple[Sequence[Any], list[Any]]:
        """All answers are there."""
        return asked, []

    @staticmethod
    def get(answer: Any, timeout: float = 0.0) -> Any:
        """The answer is what the method returned."""
        return answer


class Crew:
    """Runs the ranks of one generation after another; snapshots outlive them.

    Here one host in this process runs all ranks and keeps the snapshots in the memory of this
    machine. ``RayCrew`` has a host on each of several nodes.

    Args:
        cluster: The whole cluster.
        request: What every rank gets, but for the plan.
        place: Where the rank of each device of the whole cluster runs.
    """

    def __init__(self, cluster: Cluster, request: RunRequest, place: Place = HERE) -> None:
        self._cluster, self._request, self._place = cluster, request, place
        self._redundancy: int | None = None
        self._host_of: Sequence[int] = [0] * cluster.num_devices
        self._ray: Any = _Here(None)
        self._hosts: list[NodeHost] = []
        self._stack = ExitStack()
        self._events: list[Event] = []
        self._untold: dict[int, Event] = {}
        self._first, self._last_step = 0, 0
        self._generation = -1

    def open(self, folder: Path) -> JobState | None:
        """Begin.

        Args:
            folder: Where files may be written.

        Returns:
            The job as it is if it has begun before; here it ends with this process.
        """
        self.host = HealingHost(self._place)
        self._stack.callback(self.host.close)
        self._hosts = [NodeHost(self._ray, _Here(self.host), partial(self.hear, 0))]
        return None

    def run(
        self, state: JobState, assignment: Assignment | None, watch: Callable[[str], None]
    ) -> None:
        """Run a generation of ranks until all are done.

        Args:
            state: The job, with the plan that they run.
            assignment: What they run; ``None`` if they run already.
            watch: Called with what rank 0 does, whenever that changes, and while a host is silent.

        Raises:
            LaunchError: a rank failed or is lost; all have ended.
        """
        of_ranks = [self._host_of[device] for device in state.running.devices]
        number = state.generation
        ranks = [HostRank(self._hosts[host], n, number) for n, host in enumerate(of_ranks)]
        try:
            if assignment is not None:
                self._begin(state, assignment)
            wait_for_ranks(ranks, self._request.limits, watch, lambda: watch(ranks[0].stage))
        finally:
            self._end(sorted(set(of_ranks)))

    def new_events(self) -> list[Event]:
        """Events of rank 0 since the last call, in this process's monotonic time."""
        events, self._events = self._events, []
        untold = {step: told for step, told in self._untold.items() if step > self._last_step}
        self._untold = untold
        if self._hosts[self._first].is_here:
            return events
        self._last_step = max(untold, default=self._last_step)
        return [*events, *(untold[step] for step in sorted(untold))]

    def ask_to_stop(self) -> None:
        """Ask the ranks to stop after a step."""
        for host in self._hosts:
            if host.is_here:
                host.actor.ask_to_stop.remote(self._generation)

    def parts(self) -> list[list[Part]]:
        """Parts of snapshots that each host holds."""
        return self._ask_all("parts")

    def lend(self) -> Path | None:
        """The folder of a shelf with the newest snapshot, when it is there."""
        return self.host.shelf.folder

    def lost_with(self, device: int) -> Sequence[int]:
        """The devices that are likely to be lost together with one, which is one of them."""
        return [device]

    def is_here(self, device: int) -> bool:
        """Whether a rank could be started for a device."""
        host = self._hosts[self._host_of[device]]
        host.look()
        return host.is_here and not self.is_leaving(device)

    def is_silent(self, device: int) -> bool:
        """Whether the host of a device does not answer and may be lost."""
        return self._hosts[self._host_of[device]].silent_s > SILENCE_S

    def is_leaving(self, device: int) -> bool:
        """Whether the host of a device has announced its end."""
        told = self._hosts[self._host_of[device]].told
        return told is not None and told.is_leaving

    def close(self) -> None:
        """End everything."""
        self._stack.close()

    # --- parts -----------------------------------------------------------------------------------

    def hear(self, number: int, events: Sequence[Event]) -> None:
        """Take in a host's events; of hosts without rank 0 only steps, in case that is lost."""
        now_s = time.monotonic()
        for told in events:
            event = {**told, "at_s": now_s - float(told["at_s"])}
            step = int(event["step"]) if event["event"] == "step" else 0
            if number == self._first:
                self._events.append(event)
                self._last_step = max(self._last_step, step)
            elif step:
                self._untold[step] = event

    def _variables(self, devices: Sequence[int]) -> Mapping[int, Mapping[int, dict[str, str]]]:
        """Environment variables of each host's ranks; none if the host of rank 0 is lost."""
        host = self._hosts[self._first]
        asked = host.actor.meeting_place.remote()
        while host.is_here and not self._ray.wait([asked], timeout=POLL_S)[0]:
            host.look()
        for _, (address, port) in self._answers([asked], 0):
            return variables_of_ranks(self._host_of, devices, address, port)
        return {}  # who waits for the ranks sees that the host is lost

    def _begin(self, state: JobState, assignment: Assignment) -> None:
        """Start the ranks of a generation."""
        of_ranks = [self._host_of[device] for device in state.running.devices]
        self._generation, self._first = state.generation, of_ranks[0]
        self._events, self._untold, self._last_step = [], {}, 0
        writers = {host: rank for rank, host in reversed([*enumerate(of_ranks)])}
        own = tuple(writers.values())
        assignment = replace(assignment, redundancy=self._redundancy, writers=own)
        plan = Path(assignment.plan).read_bytes()
        for number in writers:
            self._hosts[number].position = state.generation, 0
        for number, variables in self._variables(state.running.devices).items():
            self._hosts[number].actor.begin.remote(assignment, plan, self._request, variables)

    def _ask_all(self, what: str, *about: Any) -> list[Any]:
        """The answers of the hosts that answer."""
        hosts = [host for host in self._hosts if host.is_here]
        asked = [getattr(host.actor, what).remote(*about) for host in hosts]
        return [answer for _, answer in self._answers(asked, SILENT_S)]

    def _answers(self, asked: Sequence[Any], limit_s: float) -> Iterator[tuple[int, Any]]:
        """The answers that come in time, each with its position."""
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=limit_s)
        for place, answer in enumerate(asked):
            with suppress(self._ray.exceptions.RayError):
                yield place, self._ray.get(answer, timeout=0)

    def _end(self, numbers: Sequence[int]) -> None:
        """End all ranks, and take in their last events."""
        hosts = [self._hosts[number] for number in numbers if self._hosts[number].is_here]
        asked = [host.actor.end_generation.remote(*host.position) for host in hosts]
        for place, told in self._answers(asked, END_S):
            hosts[place].hear(told)
