"""The actor of a host of a healing job on Ray: its ranks, its snapshots, its memory of the job.

Snapshots lie in the actor. Ranks reach them, and those of other hosts, through sockets of the
loopback interface; from node to node they go by calls of actors, in Ray's object store.
"""

import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from heterog.files import write_atomically
from heterog.healing.assignment import Assignment
from heterog.healing.crew import RANK_MODULE, JobState, rank_command, warm_ranks
from heterog.healing.journal import JournalReader
from heterog.healing.keeper import Shelf, listen
from heterog.healing.keepers import KeeperPlace
from heterog.healing.snapshots import Moment, Part
from heterog.healing.wire import WireError, new_token
from heterog.runtime.ranks.on_ray import Host, HostStatus
from heterog.runtime.ranks.ray_nodes import is_draining
from heterog.runtime.request import RunRequest
from heterog.workers import connect_to_ray

_LOOPBACK = "127.0.0.1"
_REPLY_S = 60.0
_LOOK_S = 1.0
_ALONE_S = 300.0
"""Seconds without a question after which nobody leads the job any more, and the host ends."""


class HealingHost(Host):
    """The class of the actor.

    Args:
        number: Number of the host.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self._shelf = Shelf()
        self._doors = {number: open_door(number, self._shelf)}
        self._journal: tuple[int, Path] | None = None
        self._kept: tuple[JobState, bytes] | None = None
        self._asked_s = time.monotonic()
        self._is_leaving = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._leave)
        # Until all that ranks import is imported, which others would wait for, it does not answer.
        self._start(-1, ["-m", RANK_MODULE], {0: {}})
        threading.Thread(target=self._watch_over, daemon=True).start()

    # --- ranks -----------------------------------------------------------------------------------

    def begin(
        self, generation: int, request: RunRequest, variables: Mapping[int, Mapping[str, str]]
    ) -> None:
        """Start the ranks of a generation, which wait for its assignment."""
        self.end()
        run_file, journal = self._path(generation, "run"), self._path(generation, "journal")
        request.write(run_file)
        self._journal = generation, journal
        paths = self._path(generation, "assignment"), journal, self._path(generation, "stop")
        self._start(generation, rank_command(run_file, *paths), variables)

    def assign(
        self, assignment: Assignment, plan: bytes, hosts: Mapping[int, Any], state: JobState
    ) -> None:
        """Tell the ranks what they run.

        Args:
            assignment: What; its keepers are replaced by what can be reached from here.
            plan: Content of the plan's file.
            hosts: Actors of all hosts with snapshots, by number.
            state: To be remembered.
        """
        path = self._path(assignment.generation, "plan")
        write_atomically(path, plan)
        for number, actor in hosts.items():
            if number not in self._doors:
                self._doors[number] = open_door(number, FarShelf(actor))
        writers = {host: rank for rank, host in reversed([*enumerate(assignment.host_of)])}
        replace(
            assignment,
            plan=str(path),
            keepers=tuple(self._doors[number] for number in hosts),
            writers=tuple(writers.values()),
        ).write(self._path(assignment.generation, "assignment"))
        self._kept = state, plan
        warm_ranks(path)

    def look(self, generation: int, at: int) -> HostStatus:
        """See ``Host``."""
        self._asked_s = now_s = time.monotonic()
        told = super().look(generation, at)  # before the journal: who has ended has written all
        told = told._replace(is_leaving=self._is_leaving)
        if self._journal is None or self._journal[0] != generation:
            return told
        reader = JournalReader(self._journal[1], at)
        events = [{**each, "at_s": now_s - float(each["at_s"])} for each in reader.new_events()]
        return told._replace(end=reader.at, events=events)

    def ask_to_stop(self, generation: int) -> None:
        """Ask the ranks to stop after a step."""
        self._path(generation, "stop").touch()

    def end_generation(self, generation: int, at: int) -> HostStatus:
        """End the ranks; returns what ``look`` does."""
        self.end()
        return self.look(generation, at)

    def remember(self) -> tuple[HostStatus, tuple[JobState, bytes] | None]:
        """What a new leader should know.

        Returns:
            What has happened in the last generation, the job as it was when that began, and its
            plan.
        """
        return self.look(self._kept[0].generation if self._kept else 0, 0), self._kept

    # --- snapshots -------------------------------------------------------------------------------

    def ask_shelf(self, what: str, *about: Any) -> Any:
        """Call a method of the shelf."""
        return getattr(self._shelf, what)(*about)

    def take(self, part: Part, index: Any, content: Any, settled: Moment | None) -> None:
        """See ``Shelf``."""
        room = self._shelf.room_for(part, settled)
        memoryview(room)[:] = memoryview(content)
        self._shelf.take(part, index, room)

    def find(self, moment: Moment, number: int) -> tuple[Any, Any]:
        """See ``Shelf``."""
        index, content = self._shelf.find(moment, number)
        return index, _as_array(content)

    # --- parts -----------------------------------------------------------------------------------

    def _path(self, generation: int, what: str) -> Path:
        return self._folder / f"{what}{generation}.json"

    def _leave(self, number: int, frame: Any) -> None:
        """A signal announces the end of this host."""
        self._is_leaving = True

    def _watch_over(self) -> None:
        """See whether Ray drains this node, and end it when nobody leads the job any more."""
        ray = connect_to_ray()[0]
        while time.monotonic() - self._asked_s < _ALONE_S:
            time.sleep(_LOOK_S)
            with suppress(Exception):  # Ray's head may be away for a while
                self._is_leaving = self._is_leaving or is_draining(ray)
        self.close()
        ray.util.remove_placement_group(ray.util.get_current_placement_group())
        ray.kill(ray.get_runtime_context().current_actor)


class FarShelf(Shelf):
    """The shelf of another host's actor, for who asks here.

    Args:
        actor: The actor.
    """

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self._ray, self._actor = connect_to_ray()[0], actor
        self._settled: dict[Part, Moment | None] = {}
        self._fetched: dict[tuple[Moment, int], tuple[Any, Any]] = {}

    def pin(self, reader: object, moment: Moment | None) -> None:
        """See ``Shelf``."""
        self._fetched.clear() if moment is None else None
        self._ask(
            "ask_shelf", "pin", (self._ray.get_runtime_context().get_worker_id(), reader), moment
        )

    def room_for(self, part: Part, settled: Moment | None) -> bytearray:
        """See ``Shelf``."""
        self._settled[part] = settled
        return bytearray(part.num_bytes)

    def take(self, part: Part, index: Any, content: bytearray) -> None:
        """See ``Shelf``."""
        self._ask("take", part, index, _as_array(content), self._settled.pop(part))

    def parts(self) -> list[Part]:
        """See ``Shelf``."""
        found: list[Part] = self._ask("ask_shelf", "parts")
        return found

    def find(self, moment: Moment, number: int) -> tuple[Any, Any]:
        """See ``Shelf``; a part comes whole, once, while somebody reads."""
        found = self._fetched.get((moment, number))
        if found is None:
            found = self._fetched[moment, number] = self._ask("find", moment, number)
        return found

    def _ask(self, what: str, *about: Any) -> Any:
        try:
            return self._ray.get(getattr(self._actor, what).remote(*about), timeout=_REPLY_S)
        except self._ray.exceptions.RayError as error:
            raise WireError(
                f"a node does not answer: {str(error).partition(chr(10))[0]}"
            ) from error


def open_door(number: int, shelf: Shelf) -> KeeperPlace:
    """Where the snapshots of a host can be read and written on this node."""
    token = new_token()
    port = listen(_LOOPBACK, token, shelf)
    return KeeperPlace(host=number, address=_LOOPBACK, port=port, token=token)


def _as_array(content: bytearray) -> Any:
    """The bytes as what Ray moves without pickling."""
    return np.frombuffer(content, np.uint8)
