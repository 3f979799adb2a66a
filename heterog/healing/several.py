"""The machine that leads a job on several: tells the others what to run and hears how it goes.

Every machine, also this one, runs a process of ``host``, which connects to the leader and starts
ranks and a keeper as it is told. A machine is lost when its connection ends or nothing is heard
from it for ``SILENT_S``; then its ranks count as killed. One that comes back joins as before, and
is used again when the job tries its devices.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.healing.assignment import Assignment
from heterog.healing.journal import Event
from heterog.healing.keepers import KeeperPlace
from heterog.healing.rendezvous import TOKEN, Rendezvous
from heterog.healing.wire import (
    Header,
    WireError,
    answer_challenge,
    challenge,
    receive_message,
    send_message,
)
from heterog.runtime.launch import with_package
from heterog.runtime.ranks.watching import wait_for_ranks
from heterog.runtime.request import RunRequest

SILENT_S = 6.0
"""Seconds without a word after which a machine counts as lost; each says something twice a second.
"""
_BEAT_S = 1.0
_JOIN_S = 300.0
_KEEPER_S = 30.0
_END_S = 8.0


@dataclass(slots=True)
class _Host:
    """A machine that has joined.

    ``ranks`` is what it said last of each of its ranks, by rank of this generation.
    """

    connection: socket.socket
    address: str
    is_here: bool = True
    sending: threading.Lock = field(default_factory=threading.Lock)
    keeper: KeeperPlace | None = None
    keeper_pid: int = 0
    is_keeper_known: bool = False
    has_lost_keeper: bool = False
    generation: int = -1
    ranks: dict[int, Header] = field(default_factory=dict)
    ended: int = -1


@dataclass(slots=True)
class _FarRank:
    """A rank on some machine, by what that said of it; see ``watching.Watched``."""

    host: _Host | None
    number: int
    generation: int
    stage: str = ""
    since_s: float = field(default_factory=time.monotonic)
    stopped_since_s: float | None = None

    @property
    def _told(self) -> Header:
        if self.host is None or self.host.generation != self.generation:
            return {}
        return self.host.ranks.get(self.number, {})

    @property
    def pid(self) -> int:
        """See ``Watched``."""
        return int(self._told.get("pid", 0))

    def poll(self) -> int | None:
        """See ``Watched``; a rank of a lost machine was killed."""
        code = self._told.get("code")
        if code is None and (self.host is None or not self.host.is_here):
            return -signal.SIGKILL
        return None if code is None else int(code)

    def look(self, now_s: float) -> None:
        """See ``Watched``."""
        stage = str(self._told.get("stage", ""))
        if stage and stage != self.stage:
            self.stage, self.since_s = stage, now_s
        if not self._told.get("is_stopped"):
            self.stopped_since_s = None
        elif self.stopped_since_s is None:
            self.stopped_since_s = now_s

    def last_words(self) -> str:
        """See ``Watched``."""
        return str(self._told.get("words", ""))


class SeveralHosts:
    """A ``Crew`` of several machines, led by this one.

    Args:
        cluster: The whole cluster.
        program: Hash of the plan's program; who has another plan is sent away.
        listening: Socket of the rendezvous.
        rendezvous: Its address and secret.
        request: What every rank gets, but for the plan.
        own: Arguments of Python for this machine's own process of ``host``; empty for none.
        say: Called with one line about each machine that joins or is lost.
        join_s: Seconds to wait for all machines at the start.
    """

    def __init__(
        self,
        cluster: Cluster,
        program: str,
        listening: socket.socket,
        rendezvous: Rendezvous,
        request: RunRequest,
        *,
        own: Sequence[str] = (),
        say: Callable[[str], None] = lambda text: None,
        join_s: float = _JOIN_S,
    ) -> None:
        self._cluster, self._program, self._request = cluster, program, request
        self._listening, self._rendezvous = listening, rendezvous
        self._own, self._say, self._join_s = list(own), say, join_s
        self._process: subprocess.Popen[bytes] | None = None
        self._hosts: dict[int, _Host] = {}
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._generation = -1
        self._is_closed = False

    def open(self, folder: Path, token: str) -> None:
        """See ``Crew``; waits until all machines have joined.

        Raises:
            HeterogError: one does not join in time.
        """
        self._token = token
        for work in (self._accept, self._beat):
            threading.Thread(target=work, daemon=True).start()
        self._start_own()
        names = [host.name for host in self._cluster.hosts]
        deadline_s = time.monotonic() + self._join_s
        with self._changed:
            while len(self._hosts) < len(names):
                if not self._changed.wait(deadline_s - time.monotonic()):
                    missing = [n for number, n in enumerate(names) if number not in self._hosts]
                    raise HeterogError(
                        f"{', '.join(missing)} did not join within {self._join_s:g} s; run the "
                        "same command there, with `host` and the same secret."
                    )

    def run(
        self,
        generation: int,
        devices: Sequence[int],
        decide: Callable[[], Assignment],
        watch: Callable[[str], None],
    ) -> None:
        """See ``Crew``."""
        self._start_own()
        with self._changed:
            self._generation, self._events = generation, []
        hosts = [self._cluster.host_of[device] for device in devices]
        ranks = [
            _FarRank(self._hosts.get(host), number, generation)
            for number, host in enumerate(hosts)
        ]
        self._start(generation, devices, hosts)
        deciding = threading.Thread(target=self._assign, args=(decide, set(hosts)), daemon=True)
        deciding.start()
        try:
            wait_for_ranks(ranks, self._request.limits, watch)
        finally:
            self._end(generation, set(hosts))
            deciding.join()

    def new_events(self) -> list[Event]:
        """See ``Crew``."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def ask_to_stop(self) -> None:
        """See ``Crew``."""
        for host in list(self._hosts):
            self._send(host, {"do": "stop", "generation": self._generation})

    def start_keepers(self, hosts: Sequence[int]) -> bool:
        """See ``Crew``."""
        had = [host for host in self._hosts.values() if host.keeper or host.has_lost_keeper]
        all_alive = all(host.is_here and not host.has_lost_keeper for host in had)
        for host in hosts:
            if host in self._hosts:
                self._hosts[host].is_keeper_known = False
                self._send(host, {"do": "keeper", "token": self._token, "host": host})
        deadline_s = time.monotonic() + _KEEPER_S
        with self._changed:
            while any(
                self._hosts[host].is_here and not self._hosts[host].is_keeper_known
                for host in hosts
                if host in self._hosts
            ):
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise HeterogError("a host did not start its keeper; see what it printed.")
        return all_alive

    def places(self) -> list[KeeperPlace]:
        """See ``Crew``."""
        return [host.keeper for host in self._hosts.values() if host.is_here and host.keeper]

    @property
    def keeper_pids(self) -> dict[int, int]:
        """See ``Crew``."""
        return {number: host.keeper_pid for number, host in self._hosts.items() if host.keeper}

    def is_here(self, device: int) -> bool:
        """See ``Crew``."""
        host = self._hosts.get(self._cluster.host_of[device])
        return host is not None and host.is_here

    def close(self, why: str) -> None:
        """See ``Crew``."""
        self._is_closed = True
        for host in list(self._hosts):
            self._send(host, {"do": "leave", "why": why})
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self._process.kill()
            self._process.wait()
        self._listening.close()
        for each in self._hosts.values():
            with suppress(OSError):
                each.connection.close()

    # --- a generation ----------------------------------------------------------------------------

    def _start(self, generation: int, devices: Sequence[int], hosts: Sequence[int]) -> None:
        """Have every machine start its ranks; they meet at the address of rank 0's."""
        first = self._hosts.get(hosts[0])
        for host in sorted(set(hosts)):
            members = self._cluster.host_devices(host)
            self._send(
                host,
                {
                    "do": "run",
                    "generation": generation,
                    "ranks": [
                        [rank, members.index(device)]
                        for rank, device in enumerate(devices)
                        if hosts[rank] == host
                    ],
                    "num_ranks": len(devices),
                    "num_local": len(members),
                    "meet_at": first.address if first else "",
                },
            )

    def _assign(self, decide: Callable[[], Assignment], hosts: set[int]) -> None:
        """Send every machine what its ranks run, once that is decided, and the plan's file."""
        assignment = decide()
        plan = b"" if assignment.why_not else Path(assignment.plan).read_bytes()
        header = {"do": "assign", "generation": assignment.generation, "what": asdict(assignment)}
        for host in hosts:
            self._send(host, header, plan)

    def _end(self, generation: int, hosts: set[int]) -> None:
        """Have every machine end its ranks, and wait for that."""
        for host in hosts:
            self._send(host, {"do": "end", "generation": generation})
        deadline_s = time.monotonic() + _END_S
        with self._changed:
            while any(
                self._hosts[host].is_here and self._hosts[host].ended < generation
                for host in hosts
                if host in self._hosts
            ):
                if not self._changed.wait(deadline_s - time.monotonic()):
                    return  # it will be found out when the next ranks do not start

    # --- machines --------------------------------------------------------------------------------

    def _start_own(self) -> None:
        """Start this machine's own process of ``host``, unless it runs."""
        if not self._own or (self._process is not None and self._process.poll() is None):
            return
        self._process = subprocess.Popen(
            [sys.executable, *self._own],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches the leader first
            env={
                **os.environ,
                TOKEN: self._rendezvous.token,
                "PYTHONPATH": with_package(),
            },
        )

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _beat(self) -> None:
        """Let the machines know that this one is alive."""
        while not self._is_closed:
            for host in list(self._hosts):
                self._send(host, {"do": "alive"})
            time.sleep(_BEAT_S)

    def _serve(self, connection: socket.socket) -> None:
        """Hear one machine until it is lost."""
        number = -1
        # A machine whose messages make no sense is as good as lost.
        with suppress(WireError, OSError, KeyError, TypeError, ValueError):
            connection.settimeout(SILENT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if challenge(connection, self._rendezvous.token):
                answer_challenge(connection, self._rendezvous.token)
                number = self._admit(connection, receive_message(connection)[0])
            while number >= 0:
                self._hear(self._hosts[number], receive_message(connection)[0])
        connection.close()
        if number >= 0:
            self._lose(number, connection)

    def _admit(self, connection: socket.socket, hello: Header) -> int:
        """Number of the host that a machine is; -1 if it cannot join, which it is told."""
        names = [host.name for host in self._cluster.hosts]
        name, why = str(hello.get("host", "")), ""
        if name not in names:
            why = f"the plan has no host '{name}', but {', '.join(names)}."
        elif hello.get("program") != self._program:
            why = "it runs another plan than the host that leads; copy the plan's file."
        else:
            number = names.index(name)
            known = self._hosts.get(number)
            if known is not None and known.is_here:
                why = f"another command runs as host '{name}' already."
        if why:
            send_message(connection, {"do": "leave", "why": why})
            return -1
        address = str(connection.getpeername()[0])
        with self._changed:
            is_back = number in self._hosts
            self._hosts[number] = _Host(connection, address)
            self._changed.notify_all()
        if is_back:
            self._say(f"host {name} is there again")
        return number

    def _lose(self, number: int, connection: socket.socket) -> None:
        with self._changed:
            host = self._hosts[number]
            if host.connection is not connection:
                return
            host.is_here, host.has_lost_keeper = False, True
            host.keeper = None
            self._changed.notify_all()
        if not self._is_closed:
            self._say(f"host {self._cluster.hosts[number].name} is lost")

    def _hear(self, host: _Host, said: Header) -> None:
        """Take in a message of a machine."""
        with self._changed:
            match said.get("say"):
                case "ranks":
                    host.generation = int(said["generation"])
                    host.ranks = {int(each["rank"]): each for each in said["ranks"]}
                case "ended":
                    host.ended = int(said["generation"])
                case "events" if said["generation"] == self._generation:
                    now_s = time.monotonic()
                    self._events += [
                        {**each, "at_s": now_s - float(each["age_s"])} for each in said["events"]
                    ]
                case "keeper":
                    number = int(said["host"])
                    port, host.keeper_pid = int(said["port"]), int(said["pid"])
                    host.keeper = KeeperPlace(host=number, address=host.address, port=port)
                    host.is_keeper_known, host.has_lost_keeper = True, False
                case "keeper lost":
                    host.keeper, host.has_lost_keeper = None, True
            self._changed.notify_all()
        if said.get("say") == "port" and said["generation"] == self._generation:
            for each in list(self._hosts):
                order = {"do": "port", "generation": said["generation"], "port": said["port"]}
                self._send(each, order)

    def _send(self, number: int, header: Header, payload: bytes = b"") -> None:
        """Send a message; a machine that cannot be reached is lost, which its reader finds out."""
        host = self._hosts.get(number)
        if host is None or not host.is_here:
            return
        with host.sending:
            try:
                send_message(host.connection, header, [payload] if payload else [])
            except WireError:
                with suppress(OSError):
                    host.connection.shutdown(socket.SHUT_RDWR)
