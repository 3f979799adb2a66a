"""The hosts of a healing job as nodes of a Ray cluster.

Each host of the plan has a bundle of a placement group and an actor in it. Ray places the bundle
of a lost node again when there is one with the same devices, and starts the actor there, without
ranks or snapshots: the host is back.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.files import write_atomically
from heterog.healing.crew import Crew
from heterog.healing.host import Carrier, HealingHost, JobState
from heterog.healing.shelf import Moment, Shelf, newest_complete
from heterog.runtime.launch import temporary_folder
from heterog.runtime.ranks.on_ray import (
    SILENT_S,
    HostStatus,
    NodeHost,
    actor_of,
    end_hosts,
    placed,
    variables_of_ranks,
)
from heterog.runtime.ranks.ray_nodes import asked_of_nodes, offers
from heterog.runtime.ranks.watching import POLL_S
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
        self._ray, self._name, self._redundancy = ray, name, redundancy
        self._host_of = cluster.host_of

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
        return found

    def lend(self) -> tuple[Path, Moment | None]:
        """See ``Crew``; hosts keep it, and what is asked for is carried here."""
        self._stack.close()
        moment = newest_complete(self.parts())
        folder = self._stack.enter_context(temporary_folder())
        self._ask_all("lend", moment)
        actors = [host.actor for host in self._hosts if host.is_here]
        self._stack.callback(Carrier(Shelf(folder), actors, redundancy=0).close)
        return folder, moment

    def close(self) -> None:
        """See ``Crew``."""
        super().close()
        lost = [number for number, host in enumerate(self._hosts) if not host.is_here]
        end_job(self._ray, self._name, self._cluster.num_hosts, lost)

    # --- parts -----------------------------------------------------------------------------------

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
        state, plan, _ = max(found.values(), key=lambda each: each[0].generation)
        of_ranks = [self._host_of[device] for device in state.running.devices]
        self._generation, self._first = state.generation, of_ranks[0]
        for number in sorted(found, key=lambda each: each != self._first):
            if found[number][0].generation == state.generation:
                self._hosts[number].position = state.generation, 0
                self._hosts[number].hear(found[number][2])
        for event in self.new_events():
            state.trained.hear(event)
        path = self._folder / "remembered.json"
        write_atomically(path, plan)
        state.running = replace(state.running, path=str(path))
        state.is_running = all(
            host in found
            and found[host][0].generation == found[host][2].generation == state.generation
            for host in of_ranks
        )
        if not state.is_running:  # ranks may have been started that nobody told what to run
            state.generation = max(told.generation for _, _, told in found.values())
        return state

    def _variables(self, devices: Sequence[int]) -> Mapping[int, Mapping[int, dict[str, str]]]:
        host = self._hosts[self._first]
        asked = host.actor.meeting_place.remote()
        while host.is_here and not self._ray.wait([asked], timeout=POLL_S)[0]:
            host.look()
        for _, (address, port) in self._answers([asked], 0):
            return variables_of_ranks(self._cluster, devices, address, port)
        return {}  # who waits for the ranks sees that the host is lost


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
