"""The hosts that run the ranks of a job and keep its snapshots, and the job's view of them.

A host is an object of the job's own process, or on Ray an actor.
"""

import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.errors import InputFileError
from heterog.files import write_atomically, write_json
from heterog.grouped import grouped
from heterog.healing.record import Assignment, Event, Trained, read_events
from heterog.healing.shelf import LostError, Moment, Part, Shelf, newest_complete
from heterog.runtime.accelerators import has_accelerator
from heterog.runtime.launch import PORT_FILE
from heterog.runtime.ranks.forks import open_forks
from heterog.runtime.ranks.on_ray import (
    ASIDE,
    END_S,
    SILENT_S,
    Host,
    HostRank,
    HostStatus,
    NodeHost,
    RankStatus,
    variables_of_ranks,
)
from heterog.runtime.ranks.place import HERE, Place
from heterog.runtime.ranks.ray_nodes import is_draining
from heterog.runtime.ranks.watching import POLL_S, SILENCE_S, wait_for_ranks
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
        self.shelf = Shelf(self._folder)
        self._run_file = self._folder / "run.json"
        self._own: Assignment | None = None
        self._refused: tuple[int, dict[int, RankStatus]] = -1, {}
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
        path = self._path(number, "plan")
        own = replace(assignment, plan=str(path), folder=str(self._folder))
        try:
            own.journal.unlink(missing_ok=True)  # of the generation before, which was heard
            write_atomically(path, plan)
            request.write(self._run_file)
            write_json(told, asdict(own))
        except (InputFileError, OSError) as error:
            if not self._is_node:
                raise
            # As if its ranks had been killed: others go on, with the snapshots that are here.
            gone = RankStatus(-signal.SIGKILL, "", False, 0, str(error))
            self._refused = number, dict.fromkeys(variables, gone)
            return
        self._own = own
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
        if self._refused[0] == generation:
            return told._replace(generation=generation, ranks=self._refused[1])
        if self._own is None or self._own.generation != generation:
            return told
        events, end = read_events(self._own.journal, at)
        aged = [{**each, "at_s": now_s - float(each["at_s"])} for each in events]
        return told._replace(end=end, events=aged)

    def ask_to_stop(self, generation: int) -> None:
        """Ask the ranks to stop after a step."""
        if self._own is not None and self._own.generation == generation:
            self._own.stop.touch()

    def end_generation(self, generation: int, at: int) -> HostStatus:
        """End the ranks; returns what ``look`` does."""
        self.end()
        return self.look(generation, at)

    # --- snapshots -------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """Parts that are here."""
        return self.shelf.parts()

    def give(self, *parts: Part) -> list[Any]:
        """Both files of parts that are here, as what Ray moves without pickling.

        All are opened before the first is sent, so that they may be deleted meanwhile for a newer
        snapshot. A part that is not here gives twice ``None``.
        """
        given: list[Any] = []
        for part in parts:
            try:
                given += [np.frombuffer(self.shelf.content(each), np.uint8) for each in part.files]
            except LostError:
                given += [None, None]
        return given

    def take(self, part: Part, *files: Any) -> bool:
        """Hold a part that another host has given; whether it had it."""
        return self.shelf.take(part, files)

    # --- parts -----------------------------------------------------------------------------------

    def _path(self, generation: int, what: str) -> Path:
        return self._folder / f"{what}{generation}.json"

    def _leave(self, *_: Any) -> None:
        """A signal announces the end of this host."""
        self._is_leaving = True

    def _watch_over(self) -> None:
        """See whether Ray drains this node, and end it when nobody leads the job any more."""
        ray = connect_to_ray()[0]
        while time.monotonic() - self._asked_s < _ALONE_S:
            time.sleep(_LOOK_S)
            with suppress(Exception):  # Ray's head may be away for a while
                if is_draining(ray):
                    self._is_leaving = True
        self.close()
        ray.util.remove_placement_group(ray.util.get_current_placement_group())
        ray.kill(ray.get_runtime_context().current_actor)


_NO_RAY = SimpleNamespace(
    exceptions=SimpleNamespace(RayError=(), RayTaskError=()),
    wait=lambda asked, **how: (asked, []),
    get=lambda answer, **how: answer,
)
"""The part of Ray that a crew uses, where the answer of its only host is what a method returns."""


class _Here:
    """That host, an object of this process, with methods as Ray's actors have them."""

    def __init__(self, host: HealingHost) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._host, name))


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
        self._ray: Any = _NO_RAY
        self._hosts: list[NodeHost] = []
        self._stack = ExitStack()
        self._hearing, self._events = threading.Lock(), list[Event]()
        self._last: dict[str, int] = {}  # the last step of each kind of event that was told
        self._generation = -1

    def open(self, folder: Path) -> Trained | None:
        """Begin.

        Args:
            folder: Where files may be written.

        Returns:
            The job as it is if it has begun before; here it ends with this process.
        """
        self.host = HealingHost(self._place)
        self._stack.callback(self.host.close)
        self._hosts = [NodeHost(self._ray, _Here(self.host), self.hear)]
        return None

    def run(
        self, trained: Trained, assignment: Assignment | None, watch: Callable[[str], None]
    ) -> None:
        """Run a generation of ranks until all are done.

        Args:
            trained: The job, with the plan that they run.
            assignment: What they run; ``None`` if they run already.
            watch: Called with what rank 0 does, whenever that changes, and while a host is silent.

        Raises:
            LaunchError: a rank failed or is lost; all have ended.
        """
        of_ranks = [self._host_of[device] for device in trained.running.devices]
        number = trained.generation
        ranks = [HostRank(self._hosts[host], n, number) for n, host in enumerate(of_ranks)]
        try:
            if assignment is not None:
                self._begin(trained, assignment)
            limits, ask = self._request.limits, lambda: watch(ranks[0].stage)
            wait_for_ranks(ranks, limits, watch, ask, counts_steps=False)
        finally:  # end all ranks, and take in their last events
            used = {n: self._hosts[n] for n in sorted(set(of_ranks)) if self._hosts[n].is_here}
            asked = {n: h.actor.end_generation.remote(*h.position) for n, h in used.items()}
            for host, told in self._answers(asked, END_S).items():
                used[host].hear(told)

    def new_events(self) -> list[Event]:
        """Events of the ranks since the last call, in this process's monotonic time."""
        with self._hearing:
            events, self._events = self._events, []
        return events

    def ask_to_stop(self) -> None:
        """Ask the ranks to stop after a step."""
        for host in self._hosts:
            if host.is_here:
                host.actor.ask_to_stop.remote(self._generation)

    def newest(self, devices: Sequence[int], wait_s: float) -> Moment | None:
        """The newest snapshot with which ranks of some devices can begin.

        Ranks copy files among their own hosts, and parts that only other hosts have are brought to
        one of these. If a host is lost meanwhile that had a part alone, the snapshot before
        serves. One that was cut off still has its parts when it answers again.

        Args:
            devices: Those of the ranks.
            wait_s: Longest wait for hosts that do not answer, if no other has a snapshot.
        """
        used = sorted({self._host_of[device] for device in devices})
        hosts, held = [self._hosts[number] for number in used], self._held()
        until_s = time.monotonic() + wait_s
        while newest_complete(held.values()) is None and time.monotonic() < until_s:
            if all(host.is_here for host in self._hosts):
                break  # nobody else can have one
            time.sleep(POLL_S)
            for host in self._hosts:
                host.look()
            held = self._held()

        def take(part: Part, files: Sequence[Any], giver: NodeHost) -> bool:
            asked = hosts[0].actor.take.remote(part, *files)
            return bool(self._answer(asked, [hosts[0], giver]))

        while (moment := newest_complete(held.values())) is not None:
            if self._hand_over(held, moment, used, take) or not all(h.is_here for h in hosts):
                return moment  # who waits for ranks sees that a host is lost
            for number, parts in held.items():
                held[number] = [part for part in parts if part.moment < moment]
        return None

    def lend(self) -> Path:
        """The folder of a shelf with the newest snapshot, once that is there."""
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

    def hear(self, events: Sequence[Event]) -> None:
        """Take in a host's events, but not what another has told before: any host may be lost.

        Why there is no snapshot each host knows of itself.
        """
        now_s = time.monotonic()
        with self._hearing:
            for told in events:
                what = told["event"]
                if what == "no snapshot" or told["step"] > self._last.get(what, -1):
                    self._last[what] = told.get("step", -1)
                    self._events.append({**told, "at_s": now_s - float(told["at_s"])})

    def _hand_over(
        self,
        held: Mapping[int, Sequence[Part]],
        moment: Moment,
        used: Collection[int],
        take: Callable[[Part, Sequence[Any], NodeHost], bool],
    ) -> bool:
        """Have the parts of a snapshot taken that no used host has; whether all came.

        Args:
            held: Parts that each host holds.
            moment: Which snapshot.
            used: Hosts that have no need of theirs.
            take: Told a part, and both of its files as a host gives them, which are not there yet;
                whether they came. If not, the next host that holds the part is asked.
        """
        there = {part for number in used for part in held.get(number, ())}
        holders: dict[Part, list[NodeHost]] = {}
        for number, parts in held.items():
            for part in parts:
                if part.moment == moment and part not in there:
                    holders.setdefault(part, []).append(self._hosts[number])
        while holders:
            given: dict[Part, Sequence[Any]] = {}
            for host, parts in grouped(
                (hosts[0], part) for part, hosts in holders.items()
            ).items():
                # Aside, or the host would not answer until it has given all.
                how = {"concurrency_group": ASIDE, "num_returns": 2 * len(parts)}
                files = host.actor.give.options(**how).remote(*parts)
                given |= dict(zip(parts, zip(files[::2], files[1::2], strict=True), strict=True))
            for part, files in given.items():
                host, *others = holders.pop(part)
                if host.is_here and take(part, files, host):
                    continue
                if not others:
                    return False
                holders[part] = others
        return True

    def _held(self) -> dict[int, list[Part]]:
        """Parts of snapshots that each host holds, by the number of those that answer."""
        hosts = {number: host for number, host in enumerate(self._hosts) if host.is_here}
        asked = {number: host.actor.parts.remote() for number, host in hosts.items()}
        return self._answers(asked, SILENT_S)

    def _variables(self, devices: Sequence[int]) -> Mapping[int, Mapping[int, dict[str, str]]]:
        """Environment variables of each host's ranks; none if the host of rank 0 is lost."""
        host = self._hosts[self._host_of[devices[0]]]
        if (told := self._answer(host.actor.meeting_place.remote(), [host])) is None:
            return {}  # who waits for the ranks sees that the host is lost
        return variables_of_ranks(self._host_of, devices, *told)

    def _begin(self, trained: Trained, assignment: Assignment) -> None:
        """Start the ranks of a generation."""
        of_ranks = [self._host_of[device] for device in trained.running.devices]
        self._generation = trained.generation
        self._events, self._last = [], {}
        assignment = replace(assignment, redundancy=self._redundancy)
        plan = Path(assignment.plan).read_bytes()
        for number in set(of_ranks):
            self._hosts[number].position = trained.generation, 0
        for number, variables in self._variables(trained.running.devices).items():
            self._hosts[number].actor.begin.remote(assignment, plan, self._request, variables)

    def _answer(self, asked: Any, needed: Sequence[NodeHost]) -> Any:
        """An answer that takes as long as it takes; ``None`` if a host that is needed is lost."""
        while not self._ray.wait([asked], timeout=POLL_S)[0]:
            for host in needed:
                host.look()
            if not all(host.is_here for host in needed):
                return None
        return self._answers({0: asked}, 0).get(0)

    def _answers(self, asked: Mapping[int, Any], limit_s: float | None) -> dict[int, Any]:
        """The answers that come in time, or not as errors."""
        if asked:
            self._ray.wait([*asked.values()], num_returns=len(asked), timeout=limit_s)
        found = {}
        for number, answer in asked.items():
            with suppress(self._ray.exceptions.RayError):
                found[number] = self._ray.get(answer, timeout=0)
        return found
