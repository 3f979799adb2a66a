"""What one machine does in a job of several: starts ranks and a keeper as it is told, and reports.

    python -m heterog.healing.host 10.0.0.1:29400 HOST PROGRAM_HASH RUN_FILE_TEXT

It ends, and with it the ranks and the keeper, when the job does or the machine that leads is gone.
"""

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from heterog.errors import HeterogError
from heterog.files import write_atomically, write_json
from heterog.healing.crew import rank_command
from heterog.healing.journal import JournalReader
from heterog.healing.keepers import KeeperPlace, start_keeper
from heterog.healing.rendezvous import Rendezvous
from heterog.healing.wire import (
    Header,
    WireError,
    answer_challenge,
    challenge,
    receive_message,
    send_message,
)
from heterog.records import parse_dataclass
from heterog.runtime.launch import (
    HEARTBEAT,
    PORT_FILE,
    RANKS_OWN,
    LocalRank,
    end_ranks,
    interface_of,
    signals_as_exit,
    start_rank,
    temporary_folder,
    with_package,
)
from heterog.runtime.ranks.forks import rank_forks
from heterog.runtime.request import RunRequest

_GONE_S = 30.0
"""Seconds without a word after which the machine that leads counts as gone; it says something each
second. Longer than it waits for this one, so that a job survives a short pause of its network."""
_BEAT_S = 0.5
_POLL_S = 0.05
_CONNECT_S = 300.0


class _Generation:
    """The ranks of one generation on this machine, and their files."""

    def __init__(self, folder: Path, run: RunRequest, order: Header, address: str) -> None:
        self.number = int(order["generation"])
        self._folder = folder
        self.assignment, self.stop = self._path("assignment.json"), self._path("stop")
        self.port = self._path("port")
        self.journal = JournalReader(self._path("journal.jsonl"))
        self.is_port_known = False
        self.is_leader_of_ranks = False
        self.ranks: dict[int, LocalRank] = {}
        run_file = self._path("run.json")
        run.write(run_file)
        arguments = rank_command(run_file, self.assignment, self._path("journal.jsonl"), self.stop)
        common = {
            "MASTER_ADDR": str(order["meet_at"]),
            "MASTER_PORT": "0",  # rank 0 chooses one and writes it to the file
            PORT_FILE: str(self.port),
            "WORLD_SIZE": str(order["num_ranks"]),
            "LOCAL_WORLD_SIZE": str(order["num_local"]),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": with_package(),
        }
        interface = interface_of(address)
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            common["GLOO_SOCKET_IFNAME"] = interface
        for rank, local in order["ranks"]:
            words, stage = self._path(f"rank{rank}.err"), self._path(f"rank{rank}.stage")
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), HEARTBEAT: str(stage)}
            process = start_rank(
                [sys.executable, *arguments], {**os.environ, **common, **own}, words
            )
            self.ranks[rank] = LocalRank(process, words, stage)
            self.is_leader_of_ranks |= rank == 0

    def _path(self, name: str) -> Path:
        return self._folder / f"{self.number}.{name}"

    def assign(self, what: dict[str, Any], plan: bytes) -> None:
        """Write what the ranks run; on which they begin."""
        path = self._path("plan.json")
        write_atomically(path, plan)
        write_json(self.assignment, {**what, "plan": str(path)})

    def meet_at(self, port: int) -> None:
        """Tell the ranks where rank 0, on another machine, listens."""
        if not self.port.exists():
            write_atomically(self.port, str(port).encode())
        self.is_port_known = True

    def report(self) -> list[Header]:
        """What is known of each rank."""
        now_s = time.monotonic()
        for rank in self.ranks.values():
            rank.look(now_s)
        return [
            {
                "rank": number,
                "code": rank.poll(),
                "stage": rank.stage,
                "is_stopped": rank.stopped_since_s is not None,
                "pid": rank.pid,
                "words": rank.last_words() if rank.poll() else "",
            }
            for number, rank in self.ranks.items()
        ]

    def new_events(self) -> list[Header]:
        """Events of rank 0, if it runs here, with their age instead of a time of this machine."""
        now_s = time.monotonic()
        return [
            {**{key: value for key, value in event.items() if key != "at_s"},
             "age_s": now_s - float(event["at_s"])}
            for event in self.journal.new_events()
        ]  # fmt: skip

    def end(self) -> None:
        """End all ranks."""
        end_ranks([rank.process for rank in self.ranks.values()])


class HostProcess:
    """This machine's part in a job.

    Args:
        rendezvous: Where the machine that leads listens.
        host: Name of this host in the plan.
        program: Hash of the plan's program.
        request: What every rank gets, but for the plan.
        connect_s: Seconds to wait for the machine that leads.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        host: str,
        program: str,
        request: RunRequest,
        *,
        connect_s: float = _CONNECT_S,
    ) -> None:
        self._rendezvous, self._host, self._program = rendezvous, host, program
        self._request, self._connect_s = request, connect_s
        self._orders: queue.SimpleQueue[tuple[Header, bytes] | None] = queue.SimpleQueue()
        self._keeper: tuple[subprocess.Popen[bytes], KeeperPlace] | None = None
        self._generation: _Generation | None = None
        self._sending = threading.Lock()
        self._reported: list[Header] = []

    def run(self) -> None:
        """Take part until the job is done.

        Raises:
            HeterogError: the machine that leads sends this one away, is gone, or the job failed.
        """
        with signals_as_exit(), temporary_folder() as folder, rank_forks(RANKS_OWN):
            self._folder = folder
            connection = self._connect()
            try:
                self._connection = connection
                for work in (self._read, self._beat):
                    threading.Thread(target=work, daemon=True).start()
                while self._work():
                    time.sleep(_POLL_S)
            finally:
                if self._generation is not None:
                    self._generation.end()
                if self._keeper is not None:
                    self._keeper[0].kill()
                    self._keeper[0].wait()
                connection.close()

    def _connect(self) -> socket.socket:
        """Connect to the machine that leads, as soon as it listens."""
        place = self._rendezvous.address, self._rendezvous.port
        deadline_s = time.monotonic() + self._connect_s
        while True:
            try:
                connection = socket.create_connection(place, timeout=_GONE_S)
                break
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise HeterogError(
                        f"nobody leads at {place[0]}:{place[1]}: {error.strerror or error}; start "
                        "the same command there first, or at the same time."
                    ) from error
            time.sleep(10 * _POLL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            answer_challenge(connection, self._rendezvous.token)
            is_known = challenge(connection, self._rendezvous.token)
            send_message(connection, {"host": self._host, "program": self._program})
        except (WireError, OSError):
            is_known = False
        if not is_known:
            connection.close()
            raise HeterogError(
                f"who listens on {place[0]}:{place[1]} does not know this job's secret; set the "
                "same HETEROG_TOKEN on every host."
            )
        self._address = str(connection.getsockname()[0])
        return connection

    def _read(self) -> None:
        """Read orders in a thread of its own; ``None`` is the end of the connection."""
        with suppress(WireError, OSError):
            while True:
                header, payload = receive_message(self._connection)
                self._orders.put((header, bytes(payload)))
        self._orders.put(None)

    def _beat(self) -> None:
        """Say again and again that this machine is alive, in a thread of its own."""
        with suppress(WireError):
            while True:
                self._say("alive")
                time.sleep(_BEAT_S)

    def _say(self, what: str, **about: Any) -> None:
        with self._sending:
            send_message(self._connection, {"say": what, **about})

    def _work(self) -> bool:
        """Carry out orders and report; returns whether the job goes on."""
        try:
            while not self._orders.empty():
                order = self._orders.get()
                if order is None:
                    raise HeterogError("the host that leads is gone; all ranks were ended.")
                if not self._obey(*order):
                    return False
            self._report()
        except WireError:
            pass  # the reader says so, behind the orders that have arrived
        return True

    def _obey(self, order: Header, payload: bytes) -> bool:
        """Carry out an order; returns whether the job goes on.

        Raises:
            HeterogError: the job has failed.
        """
        generation = self._generation
        is_current = generation is not None and order.get("generation") == generation.number
        match order.get("do"):
            case "leave":
                if order.get("why"):
                    raise HeterogError(str(order["why"]))
                return False
            case "keeper":
                self._start_keeper(int(order["host"]), str(order["token"]))
            case "run":
                self._generation = _Generation(self._folder, self._request, order, self._address)
            case "end":
                if generation is not None:
                    generation.end()
                    self._report()
                self._generation = None
                self._say("ended", generation=order["generation"])
            case "assign" if is_current and generation:
                generation.assign(order["what"], payload)
            case "port" if is_current and generation:
                generation.meet_at(int(order["port"]))
            case "stop" if is_current and generation:
                generation.stop.touch()
        return True

    def _report(self) -> None:
        """Tell the machine that leads what is new."""
        if self._keeper is not None and self._keeper[0].poll() is not None:
            self._keeper = None
            self._say("keeper lost")
        generation = self._generation
        if generation is None:
            return
        said = generation.report()
        # Events after the codes: who has ended has written all of them.
        number = generation.number
        if events := generation.new_events():
            self._say("events", generation=number, events=events)
        if generation.is_leader_of_ranks and not generation.is_port_known:
            if generation.port.exists():
                generation.is_port_known = True
                self._say("port", generation=number, port=int(generation.port.read_text()))
        if said != self._reported:
            self._reported = said
            self._say("ranks", generation=number, ranks=said)

    def _start_keeper(self, host: int, token: str) -> None:
        """Start the keeper, unless it runs, and say where it listens."""
        if self._keeper is None or self._keeper[0].poll() is not None:
            self._keeper = start_keeper(host, token, pid=os.getpid(), address=self._address)
        process, place = self._keeper
        self._say("keeper", host=host, port=place.port, pid=process.pid)


def main() -> None:
    """Run the part of the machine that leads, from its command line."""
    rendezvous, host, program, request = sys.argv[1:]
    try:
        told = parse_dataclass(json.loads(request), RunRequest, "the run file")
        HostProcess(Rendezvous.parse(rendezvous), host, program, told).run()
    except HeterogError as error:
        sys.exit(f"heterog: {error}")


if __name__ == "__main__":
    main()
