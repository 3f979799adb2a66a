"""A keeper: a process beside the ranks that holds what they would lose if they died.

    python -m heterog.healing.keeper PID ADDRESS FOLDER LEAVING < token

It listens on one address, takes connections from who knows the token, prints the port that it
listens on as one line, and ends when the process with the given id does. SIGTERM announces the end
of its host: it makes the file LEAVING, and goes on. It knows nothing of
tensors: a part of a snapshot is an index (JSON) and bytes. A part can be read once all of it has
arrived, so a rank that dies while it sends leaves what was there before.

Requests, by ``do``:

    put    the part of a snapshot; ``settled`` is the newest moment that all ranks know to be
           complete, and what is older is let go
    list   all parts there are
    index  the index of a part
    pin    keep a moment's parts while this connection is open: somebody reads them
    get    bytes of a part, from ``begin`` on, ``size`` of them
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from heterog.healing.snapshots import Moment, Part
from heterog.healing.wire import (
    Header,
    WireError,
    connect,
    receive_header,
    receive_into,
    send_message,
)

_LOOK_S = 0.2


class Shelf:
    """The parts that a keeper holds; used by all its connections at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[Moment, int], tuple[Part, Any, bytearray]] = {}
        self._spare: list[bytearray] = []
        self._pinned: dict[object, Moment] = {}

    def pin(self, reader: object, moment: Moment | None) -> None:
        """Keep the parts of a moment for a reader, instead of those it read before."""
        with self._lock:
            self._pinned.pop(reader, None)
            if moment is not None:
                self._pinned[reader] = moment

    def room_for(self, part: Part, settled: Moment | None) -> bytearray:
        """Make a buffer for a part that is about to arrive; parts older than ``settled`` go."""
        with self._lock:
            pinned = set(self._pinned.values())
            for key in list(self._held):
                if settled is not None and key[0] < settled and key[0] not in pinned:
                    self._spare.append(self._held.pop(key)[2])
            # Memory that is already mapped costs no page faults.
            for number, buffer in enumerate(self._spare):
                if len(buffer) == part.num_bytes:
                    return self._spare.pop(number)
            self._spare.clear()
        return bytearray(part.num_bytes)

    def take(self, part: Part, index: Any, content: bytearray) -> None:
        """Store a part that has arrived completely."""
        with self._lock:
            self._held[part.moment, part.number] = part, index, content

    def parts(self) -> list[Part]:
        """All parts held."""
        with self._lock:
            return [part for part, _, _ in self._held.values()]

    def find(self, moment: Moment, number: int) -> tuple[Any, bytearray]:
        """The index and the bytes of a part.

        Raises:
            WireError: the part is not here.
        """
        with self._lock:
            found = self._held.get((moment, number))
        if found is None:
            raise WireError(f"part {number} of step {moment.step} is not here.")
        return found[1], found[2]


def serve(peer: socket.socket, shelf: Shelf, token: str) -> None:
    """Answer one client until it leaves."""
    with contextlib.suppress(WireError, OSError):
        with connect(peer, token, is_keeper=True) as connection, _unpinned(connection, shelf):
            while True:
                header = receive_header(connection)
                try:
                    _answer(connection, shelf, header)
                except WireError as error:
                    send_message(connection, {"error": str(error)})
                    if header.get("do") == "put":  # what follows will not be read
                        return


@contextlib.contextmanager
def _unpinned(connection: Connection, shelf: Shelf) -> Iterator[None]:
    """Unpin what a client reads when it disconnects."""
    try:
        yield
    finally:
        shelf.pin(id(connection), None)


def _answer(connection: Connection, shelf: Shelf, header: Header) -> None:
    match header.get("do"):
        case "put":
            part = Part.from_header(header)
            settled = header.get("settled")
            content = shelf.room_for(part, Moment(*settled) if settled else None)
            receive_into(connection, content)
            shelf.take(part, header.get("index"), content)
            send_message(connection, {})
        case "list":
            send_message(connection, {"parts": [part.to_header() for part in shelf.parts()]})
        case "index":
            part = Part.from_header(header)
            index, _ = shelf.find(part.moment, part.number)
            send_message(connection, {"index": index})
        case "pin":
            moment = Part.from_header(header).moment
            shelf.pin(id(connection), moment)
            send_message(connection, {})
        case "get":
            part = Part.from_header(header)
            begin, length = int(header.get("begin", -1)), int(header.get("size", -1))
            _, content = shelf.find(part.moment, part.number)
            if not 0 <= begin <= begin + length <= len(content):
                raise WireError(f"{length} bytes from {begin} on are not in {len(content)}.")
            send_message(connection, {}, memoryview(content)[begin : begin + length])
        case other:
            raise WireError(f"a keeper cannot {str(other)[:40]!r}.")


def listen(address: str, token: str, shelf: Shelf) -> int:
    """Answer, in threads of this process, on a free port of an address, which is returned."""
    listening = socket.create_server((address, 0))

    def accept() -> None:
        while True:
            connection, _ = listening.accept()
            thread = threading.Thread(target=serve, args=(connection, shelf, token), daemon=True)
            thread.start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listening.getsockname()[1])


def wait_for_end(pid: int) -> None:
    """Return when a process has ended, however it does."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or a kernel before 5.3
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            time.sleep(_LOOK_S)
    select.select([watched], [], [])


def main() -> None:
    """Run as a keeper: ends with a process, and then removes a folder if it is given one."""
    pid, address, folder, leaving = sys.argv[1:]
    if leaving:
        signal.signal(signal.SIGTERM, lambda number, frame: Path(leaving).touch())
    token = sys.stdin.readline().strip()
    print(listen(address, token, Shelf()), flush=True)
    # The starting process may read this one's output to its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    wait_for_end(int(pid))
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
