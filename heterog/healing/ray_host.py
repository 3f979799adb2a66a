"""The actor of a host of a healing job on Ray: its ranks, its snapshots, its memory of the job.

Snapshots are files in memory, as everywhere; from node to node they go by calls of actors, in
Ray's object store.
"""

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from heterog.files import write_atomically
from heterog.healing.assignment import Assignment
from heterog.healing.crew import RANK_MODULE, JobState, rank_command, warm_ranks
from heterog.healing.journal import JournalReader
from heterog.healing.shelf import GONE, INDEX, NEW, WANTED, Moment, Part, Shelf
from heterog.runtime.launch import temporary_folder
from heterog.runtime.ranks.on_ray import Host, HostStatus
from heterog.runtime.ranks.ray_nodes import is_draining
from heterog.runtime.request import RunRequest
from heterog.workers import connect_to_ray

_CARRY_S = 0.01
_REPLY_S = 60.0
_LOOK_S = 1.0
_ALONE_S = 300.0
"""Seconds without a question after which nobody leads the job any more, and the host ends."""


class HealingHost(Host):
    """The class of the actor."""

    def __init__(self, number: int) -> None:
        super().__init__()
        folder = self._open.enter_context(temporary_folder())
        self._number, self._shelf = number, Shelf(folder)
        self._run_file = self._folder / "run.json"
        self._carrier: Carrier | None = None
        self._lent: dict[str, tuple[str, Any]] = {}
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
        journal = self._path(generation, "journal")
        request.write(self._run_file)
        self._journal = generation, journal
        paths = self._path(generation, "assignment"), journal, self._path(generation, "stop")
        self._start(generation, rank_command(self._run_file, *paths), variables)

    def assign(
        self,
        assignment: Assignment,
        plan: bytes,
        hosts: Mapping[int, Any],
        state: JobState,
        redundancy: int,
    ) -> None:
        """Tell the ranks what they run.

        Args:
            assignment: What; its paths are replaced by those of here.
            plan: Content of the plan's file.
            hosts: Actors of all hosts with snapshots, by number.
            state: To be remembered.
            redundancy: Number of further hosts that hold each part of a snapshot.
        """
        path = self._path(assignment.generation, "plan")
        write_atomically(path, plan)
        if self._carrier is not None:
            self._carrier.close()
        # To the following ones, so that each holds about as much.
        others = sorted(set(hosts) - {self._number}, key=lambda each: (each < self._number, each))
        self._carrier = Carrier(self._shelf, [hosts[each] for each in others], redundancy)
        replace(assignment, plan=str(path), shelf=str(self._shelf.folder)).write(
            self._path(assignment.generation, "assignment")
        )
        self._kept = state, plan
        warm_ranks(self._run_file, path)

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

    def parts(self) -> list[Part]:
        """Parts that are here."""
        return self._shelf.parts()

    def lend(self, moment: Moment | None) -> None:
        """Keep the parts of a moment, instead of those lent before, though they are let go."""
        own = [part.name for part in self._shelf.parts() if part.moment == moment]
        self._lent = {name: (self._shelf.index(name), self._shelf.content(name)) for name in own}

    def give(self, name: str) -> Any:
        """The index or the tensors of a part that is here, as what Ray moves without pickling."""
        part = name.removesuffix(INDEX)
        try:
            kept = self._lent.get(part)
            index, content = kept or (self._shelf.index(part), self._shelf.content(part))
        except FileNotFoundError:
            return None
        return np.frombuffer(content if part == name else index.encode(), np.uint8)

    def take(self, name: str, index: str, content: Any) -> bool:
        """Hold a part of another host, too."""
        self._shelf.bring(f"{name}{INDEX}", index.encode())
        self._shelf.bring(name, content)
        return True

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


class Carrier:
    """Carries parts between a shelf and other hosts: what is new to them, what is wanted here.

    Args:
        shelf: The shelf.
        others: Actors of the other hosts, in the order in which they are asked.
        redundancy: Number of them that hold each new part, too.
    """

    def __init__(self, shelf: Shelf, others: Sequence[Any], redundancy: int) -> None:
        self._shelf, self._others, self._redundancy = shelf, others, redundancy
        self._ray = connect_to_ray()[0]
        self._is_open = True
        threading.Thread(target=self._carry, daemon=True).start()

    def close(self) -> None:
        """Carry no more."""
        self._is_open = False

    def _carry(self) -> None:
        while self._is_open:
            time.sleep(_CARRY_S)
            with suppress(OSError):  # the folder is gone, or a part was let go
                for path in self._shelf.folder.iterdir():
                    if path.suffix == NEW:
                        self._send(path)
                    elif path.suffix == WANTED:
                        self._fetch(path)

    def _send(self, path: Path) -> None:
        name = path.stem
        index, content = self._shelf.index(name), self._shelf.content(name)
        held = 0
        for actor in self._others:
            if held == self._redundancy:
                break
            array = np.frombuffer(content, np.uint8)
            held += self._asked(actor.take, name, index, array) is True
        path.rename(path.with_suffix(""))

    def _fetch(self, path: Path) -> None:
        name = path.stem
        for actor in self._others:
            found = self._asked(actor.give, name)
            if found is not None:
                self._shelf.bring(name, found)
                break
        else:
            path.with_suffix(GONE).touch()
        path.unlink()

    def _asked(self, method: Any, *about: Any) -> Any:
        try:
            return self._ray.get(method.remote(*about), timeout=_REPLY_S)
        except self._ray.exceptions.RayError:
            return None
