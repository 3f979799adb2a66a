"""A host of a job that heals: its ranks and its snapshots.

On Ray it is an actor.
"""

import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from heterog.files import write_atomically, write_json
from heterog.healing.exchange import Assignment, read_events
from heterog.healing.shelf import LostError, Moment, Part, Shelf
from heterog.runtime.accelerators import has_accelerator
from heterog.runtime.launch import PORT_FILE
from heterog.runtime.ranks.forks import open_forks
from heterog.runtime.ranks.on_ray import Host, HostStatus
from heterog.runtime.ranks.place import HERE, Place
from heterog.runtime.ranks.ray_nodes import is_draining
from heterog.runtime.request import RunRequest
from heterog.workers import connect_to_ray

_RANK = "heterog.healing.rank"
_LOOK_S = 1.0
_ALONE_S = 300.0
"""Seconds without a question after which nobody leads the job any more, and the host ends."""


class HealingHost(Host):
    """A host of a job.

    Args:
        place: Where the rank of each device runs, if this is the only host, in this process;
            ``None`` if it is an actor.

    Attributes:
        shelf: Its snapshots.
    """

    def __init__(self, place: Place | None = None) -> None:
        super().__init__("" if place is None else "127.0.0.1", place or HERE)
        self.shelf = Shelf(self._folder / "shelf")
        self.shelf.folder.mkdir()
        self._run_file = self._folder / "run.json"
        self._lent: dict[str, Any] = {}
        self._journal: tuple[int, Path] | None = None
        self._asked_s = time.monotonic()
        self._is_leaving = False
        if place is None:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._leave)
            # Until all that ranks import is imported, which others would wait for, it does not
            # answer.
            self._start(-1, ["-m", _RANK], {0: {}})
            threading.Thread(target=self._watch_over, daemon=True).start()

    # --- ranks -----------------------------------------------------------------------------------

    def begin(
        self,
        assignment: Assignment,
        plan: bytes,
        request: RunRequest,
        variables: Mapping[int, Mapping[str, str]],
    ) -> None:
        """Start the ranks of a generation.

        Args:
            assignment: What they run; its paths are replaced by those of here.
            plan: Content of the plan's file.
            request: How they train.
            variables: Environment variables of each.
        """
        self.end()
        number, told = assignment.generation, self._path(assignment.generation, "assignment")
        path, journal = self._path(number, "plan"), self._path(number, "journal")
        own = replace(
            assignment,
            plan=str(path),
            shelf=str(self.shelf.folder),
            journal=str(journal),
            stop=str(self._path(number, "stop")),
        )
        write_atomically(path, plan)
        request.write(self._run_file)
        write_json(told, asdict(own))
        self._journal = number, journal
        if not self._is_node:  # rank 0 chooses another port itself
            publish = {PORT_FILE: str(self._path(number, "port"))}
            variables = {rank: {**each, **publish} for rank, each in variables.items()}
        self._start(number, ["-m", _RANK, str(self._run_file), str(told)], variables)
        if (forks := open_forks()) is not None:  # later ranks with such a plan begin quicker
            forks.warm(_RANK, str(path), "" if has_accelerator() else str(self._run_file))

    def look(self, generation: int, at: int) -> HostStatus:
        """See ``Host``."""
        self._asked_s = now_s = time.monotonic()
        told = super().look(generation, at)  # before the journal: who has ended has written all
        told = told._replace(is_leaving=self._is_leaving)
        if self._journal is None or self._journal[0] != generation:
            return told
        events, end = read_events(self._journal[1], at)
        aged = [{**each, "at_s": now_s - float(each["at_s"])} for each in events]
        return told._replace(end=end, events=aged)

    def ask_to_stop(self, generation: int) -> None:
        """Ask the ranks to stop after a step."""
        self._path(generation, "stop").touch()

    def end_generation(self, generation: int, at: int) -> HostStatus:
        """End the ranks; returns what ``look`` does."""
        self.end()
        return self.look(generation, at)

    # --- snapshots -------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """Parts that are here."""
        return self.shelf.parts()

    def lend(self, moment: Moment | None) -> None:
        """Keep what is here of a snapshot readable until the next call."""
        self._lent = {}
        for part in self.parts():
            with suppress(LostError):  # it was deleted meanwhile, for a newer one
                if part.moment == moment:
                    self._lent |= {name: self.shelf.content(name) for name in part.files}

    def give(self, name: str) -> Any:
        """A file of a part that is lent or here, as what Ray moves without pickling."""
        with suppress(LostError):
            found = self._lent[name] if name in self._lent else self.shelf.content(name)
            return np.frombuffer(found, np.uint8)
        return None

    def take(self, name: str, content: Any) -> None:
        """Hold what another host has given, if it had it."""
        if content is not None:
            self.shelf.bring(name, content)

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
