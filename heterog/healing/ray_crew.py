"""The hosts of a healing job as nodes of a Ray cluster.

Each host of the plan has a bundle of a placement group and an actor in it. Ray places the bundle
of a lost node again when there is one with the same devices, and starts the actor there, without
ranks or snapshots: the host is back.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.files import write_atomically
from heterog.healing.assignment import Assignment
from heterog.healing.crew import Crew, JobState
from heterog.healing.journal import Event
from heterog.healing.ray_host import Carrier, HealingHost
from heterog.healing.shelf import Moment, Part, Shelf, newest_complete
from heterog.runtime.launch import temporary_folder
from heterog.runtime.ranks.on_ray import (
    END_S,
    SILENT_S,
    HostStatus,
    NodeHost,
    RankOnRay,
    actor_of,
    end_hosts,
    placed,
    variables_of_ranks,
)
from heterog.runtime.ranks.ray_nodes import asked_of_nodes, offers
from heterog.runtime.ranks.watching import SILENCE_S, wait_for_ranks
from heterog.runtime.request import RunRequest

_STARTED_S = 300.0
"""Seconds for nodes to start actors that have imported all that ranks need."""


class RayCrew(Crew):
    """A ``Crew`` of Ray's nodes.

    Args:
        ray: The module, connected.
        name: Name of the job in the cluster.
        cluster: The whole cluster of the plan.
        request: What every rank gets, but for the plan.
        redundancy: Number of further hosts that hold each part of a snapshot.
    """

    def __init__(
        self, ray: Any, name: str, cluster: Cluster, request: RunRequest, redundancy: int
    ) -> None:
        super().__init__(cluster, request)
        self._ray, self._name = ray, name
        self._hosts: list[NodeHost] = []
        self._redundancy = redundancy
        self._shelves: dict[int, str] = {}
        self._events: list[Event] = []
        self._untold: dict[int, Event] = {}
        self._first, self._last_step = 0, 0
        self._generation = -1

    def open(self, folder: Path, state: Callable[[], JobState]) -> JobState | None:
        """See ``Crew``; waits until all nodes are there, or those that a lost leader has left."""
        self._folder, self._state = folder, state
        group, was_there = self._group()
        for number in range(self._cluster.num_hosts):
            actor = self._actor(group, number)
            self._hosts.append(NodeHost(self._ray, actor, partial(self.hear, number)))
        found = self._remembered(SILENT_S if was_there else _STARTED_S)
        if found is None and not all(host.is_here for host in self._hosts):
            raise HeterogError(
                f"some node did not start its actor within {_STARTED_S:g} s; see ray status."
            )
        self._shelves = self._shelves or self._actors()
        return found

    def run(
        self,
        generation: int,
        devices: Sequence[int],
        decide: Callable[[], Assignment],
        watch: Callable[[str], None],
    ) -> None:
        """See ``Crew``; ranks that run already are watched on."""
        of_ranks = [self._cluster.host_of[device] for device in devices]
        hosts = sorted(set(of_ranks))
        ranks = [
            RankOnRay(self._hosts[host], rank, generation) for rank, host in enumerate(of_ranks)
        ]
        deciding = threading.Thread(target=self._assign, args=(hosts, decide), daemon=True)
        is_new = generation != self._generation
        if is_new:
            self._begin(generation, devices, hosts)
            deciding.start()
        try:
            limits = self._request.limits
            wait_for_ranks(ranks, limits, watch, lambda: watch(ranks[0].stage))
        finally:
            self._end(hosts)
            if is_new:
                deciding.join()

    def new_events(self) -> list[Event]:
        """See ``Crew``."""
        events, self._events = self._events, []
        untold = {step: told for step, told in self._untold.items() if step > self._last_step}
        self._untold = untold
        if self._hosts[self._first].is_here:
            return events
        self._last_step = max(untold, default=self._last_step)
        return [*events, *(untold[step] for step in sorted(untold))]

    def ask_to_stop(self) -> None:
        """See ``Crew``."""
        for host in self._hosts:
            if host.is_here:
                host.actor.ask_to_stop.remote(self._generation)

    def parts(self) -> list[list[Part]]:
        """See ``Crew``."""
        return self._ask_all("parts")

    def has_forgotten(self) -> bool:
        """See ``Crew``; the snapshots of a host are its actor's."""
        for host in self._hosts:
            host.look()
        before, self._shelves = self._shelves, self._actors()
        return any(self._shelves.get(number) != known for number, known in before.items())

    def lend(self) -> tuple[Path, Moment | None]:
        """See ``Crew``; hosts keep it, and what is asked for is carried here."""
        self._stack.close()
        moment = newest_complete(self.parts())
        folder = self._stack.enter_context(temporary_folder())
        self._ask_all("lend", moment)
        actors = [host.actor for host in self._hosts if host.is_here]
        self._stack.callback(Carrier(Shelf(folder), actors, redundancy=0).close)
        return folder, moment

    def is_here(self, device: int) -> bool:
        """See ``Crew``."""
        host = self._hosts[self._cluster.host_of[device]]
        host.look()
        return host.is_here and not self.is_leaving(device)

    def is_silent(self, device: int) -> bool:
        """See ``Crew``."""
        return self._hosts[self._cluster.host_of[device]].silent_s > SILENCE_S

    def is_leaving(self, device: int) -> bool:
        """See ``Crew``."""
        told = self._hosts[self._cluster.host_of[device]].told
        return told is not None and told.is_leaving

    def close(self, why: str) -> None:
        """See ``Crew``."""
        self._stack.close()
        lost = [number for number, host in enumerate(self._hosts) if not host.is_here]
        end_job(self._ray, self._name, self._cluster.num_hosts, lost)

    # --- parts -----------------------------------------------------------------------------------

    def hear(self, number: int, events: Sequence[Event]) -> None:
        """Take in a host's events; of others than rank 0's, steps that it may not live to tell."""
        now_s = time.monotonic()
        for told in events:
            event = {**told, "at_s": now_s - float(told["at_s"])}
            step = int(event["step"]) if event["event"] == "step" else 0
            if number == self._first:
                self._events.append(event)
                self._last_step = max(self._last_step, step)
            elif step:
                self._untold[step] = event

    def _group(self) -> tuple[Any, bool]:
        """The job's placement group, and whether a leader before this one has made it."""
        with suppress(ValueError):
            return self._ray.util.get_placement_group(self._name), True
        return placed(self._ray, self._cluster, name=self._name, lifetime="detached"), False

    def _actor(self, group: Any, number: int) -> Any:
        """The actor of a host, started unless it is there."""
        name = host_name(self._name, number)
        with suppress(ValueError):
            return self._ray.get_actor(name)
        asked = asked_of_nodes(self._cluster, offers(self._ray))[number]
        options = {"name": name, "lifetime": "detached", "max_restarts": -1}
        return actor_of(self._ray, group, HealingHost, number, asked, (number,), **options)

    def _remembered(self, limit_s: float) -> JobState | None:
        """What the hosts know of the job, if it has begun."""
        asked = [host.actor.remember.remote() for host in self._hosts]
        found: dict[int, tuple[JobState, bytes, HostStatus]] = {}
        for host in self._hosts:
            host.is_here = False
        for number, (told, remembered) in self._answers(asked, limit_s):
            host = self._hosts[number]
            host.told, host.is_here = told, True
            if remembered is not None:
                found[number] = *remembered, told
        if not found:
            return None
        self._shelves = dict.fromkeys(range(len(self._hosts)), "lost") | self._actors()
        state, plan, _ = max(found.values(), key=lambda each: each[0].generation)
        devices = state.running.devices
        self._generation = state.generation
        self._first = self._cluster.host_of[devices[0]]
        for number in sorted(found, key=lambda each: each != self._first):
            if found[number][0].generation == state.generation:
                host = self._hosts[number]
                host.position = state.generation, 0
                host.hear(found[number][2])
        for event in self.new_events():
            state.trained.hear(event)
        path = self._folder / "remembered.json"
        write_atomically(path, plan)
        state.running = replace(state.running, path=str(path))
        state.is_running = all(
            host in found
            and found[host][0].generation == found[host][2].generation == state.generation
            for host in {self._cluster.host_of[device] for device in devices}
        )
        if not state.is_running:  # ranks may have been started that nobody told what to run
            state.generation = max(told.generation for _, _, told in found.values())
        return state

    def _begin(self, generation: int, devices: Sequence[int], hosts: Sequence[int]) -> None:
        """Start the ranks of a generation."""
        self._generation, self._first = generation, self._cluster.host_of[devices[0]]
        self._devices = devices
        self._events, self._untold, self._last_step = [], {}, 0
        for host in hosts:
            self._hosts[host].position = generation, 0
        first = self._hosts[self._first].actor
        with suppress(self._ray.exceptions.RayError):  # its loss is seen by who waits for ranks
            address, port = self._ray.get(first.meeting_place.remote(), timeout=SILENT_S)
            variables = variables_of_ranks(self._cluster, devices, address, port)
            for host in hosts:
                self._hosts[host].actor.begin.remote(generation, self._request, variables[host])

    def _assign(self, hosts: Sequence[int], decide: Callable[[], Assignment]) -> None:
        """Tell the ranks what they run once that is decided."""
        assignment = decide()
        of_ranks = [self._cluster.host_of[device] for device in self._devices]
        writers = {host: rank for rank, host in reversed([*enumerate(of_ranks)])}
        assignment = replace(
            assignment, is_copied=self._redundancy > 0, writers=tuple(writers.values())
        )
        plan = b"" if assignment.why_not else Path(assignment.plan).read_bytes()
        actors = {number: host.actor for number, host in enumerate(self._hosts) if host.is_here}
        state = self._state()
        for host in hosts:
            self._hosts[host].actor.assign.remote(
                assignment, plan, actors, state, self._redundancy
            )

    def _ask_all(self, what: str, *about: Any) -> list[Any]:
        """What the actors of the hosts answer that do."""
        hosts = [host for host in self._hosts if host.is_here]
        asked = [getattr(host.actor, what).remote(*about) for host in hosts]
        return [answer for _, answer in self._answers(asked, SILENT_S)]

    def _answers(self, asked: Sequence[Any], limit_s: float) -> Iterator[tuple[int, Any]]:
        """Answers that come in time, with their places."""
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=limit_s)
        for place, answer in enumerate(asked):
            with suppress(self._ray.exceptions.RayError):
                yield place, self._ray.get(answer, timeout=0)

    def _actors(self) -> dict[int, str]:
        """Id of the actor of each host that is there."""
        return {
            number: host.told.actor
            for number, host in enumerate(self._hosts)
            if host.is_here and host.told
        }

    def _end(self, numbers: Sequence[int]) -> None:
        """Have all ranks ended, and hear their last words."""
        hosts = [self._hosts[number] for number in numbers if self._hosts[number].is_here]
        asked = [host.actor.end_generation.remote(*host.position) for host in hosts]
        for place, told in self._answers(asked, END_S):
            hosts[place].hear(told)


def host_name(job: str, number: int) -> str:
    """Name of the actor of a job's host."""
    return f"{job}-{number}"


def end_job(ray: Any, job: str, num_hosts: int, lost: Sequence[int] = ()) -> None:
    """End all that a job has in the cluster, but for who leads it."""
    actors = []
    for number in range(num_hosts):
        with suppress(ValueError):
            actor = ray.get_actor(host_name(job, number))
            ray.kill(actor) if number in lost else actors.append(actor)
    with suppress(ValueError):
        end_hosts(ray, ray.util.get_placement_group(job), actors)
