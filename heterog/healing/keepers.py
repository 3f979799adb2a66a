"""Clients of keepers: a connection to one, and to those of all hosts together."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from heterog.errors import HeterogError
from heterog.healing.snapshots import Moment, Part, newest_complete
from heterog.healing.wire import (
    Header,
    WireError,
    connect,
    new_token,
    receive_header,
    receive_into,
    send_message,
)
from heterog.runtime.launch import with_package

_CONNECT_S = 5.0
_REPLY_S = 120.0
"""Longer than the slowest transfer of a part that may still be useful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperPlace:
    """Address of a keeper.

    Attributes:
        host: Number of the host that it runs on.
        address: Network address of that host.
        port: Port that it listens on.
        token: Secret that it asks for.
    """

    host: int
    address: str
    port: int
    token: str = field(repr=False)


class Keeper:
    """A connection to one keeper.

    Args:
        place: Address that it listens on.

    Raises:
        WireError: no keeper answers.
    """

    def __init__(self, place: KeeperPlace) -> None:
        self.place = place
        try:
            peer = socket.create_connection((place.address, place.port), _CONNECT_S)
        except OSError as error:
            raise WireError(
                f"the keeper of host {place.host} does not answer: {error.strerror or error}."
            ) from error
        self._connection = connect(peer, place.token, is_keeper=False, silent_s=_REPLY_S)

    def put(
        self, part: Part, index: Any, content: memoryview, settled: Moment | None = None
    ) -> None:
        """Store a part there; see ``heterog.healing.keeper``."""
        header = {"do": "put", "index": index, "settled": settled, **part.to_header()}
        self._ask(header, content)

    def parts(self) -> list[Part]:
        """All parts that it holds."""
        answer = self._ask({"do": "list"})
        return [Part.from_header(each) for each in answer.get("parts", [])]

    def index(self, part: Part) -> Any:
        """The index of a part."""
        return self._ask({"do": "index", **part.to_header()}).get("index")

    def pin(self, part: Part) -> None:
        """Keep the snapshot of a part from being removed while this connection is open."""
        self._ask({"do": "pin", **part.to_header()})

    def get(self, part: Part, begin: int, size: int) -> bytearray:
        """Bytes of a part: ``size`` of them from ``begin`` on."""
        content = bytearray(size)
        self._ask({"do": "get", "begin": begin, "size": size, **part.to_header()})
        receive_into(self._connection, content)
        return content

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, header: Header, content: bytes | memoryview = b"") -> Header:
        # A keeper that refuses a part says why and closes, before it has read all of it.
        with suppress(WireError):
            send_message(self._connection, header, content)
        answer = receive_header(self._connection)
        if "error" in answer:
            raise WireError(str(answer["error"]))
        return answer


class Keepers:
    """Connections to all keepers that can be reached.

    Args:
        places: Addresses of all keepers; those that do not answer are left out.

    Attributes:
        reached: Open connections, by host.
    """

    def __init__(self, places: Sequence[KeeperPlace]) -> None:
        self.reached: dict[int, Keeper] = {}
        for place in places:
            with suppress(WireError, OSError):
                self.reached[place.host] = Keeper(place)

    def parts(self) -> dict[int, list[Part]]:
        """Parts that each keeper holds, by host; a keeper that is lost meanwhile is left out."""
        found = {}
        for host, keeper in list(self.reached.items()):
            try:
                found[host] = keeper.parts()
            except (WireError, OSError):
                self.reached.pop(host).close()
        return found

    def newest(self) -> Moment | None:
        """The newest complete snapshot; ``None`` if there is none."""
        return newest_complete(self.parts().values())

    def close(self) -> None:
        """Close all connections."""
        for keeper in self.reached.values():
            keeper.close()
        self.reached.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def start_keeper(
    host: int,
    *,
    pid: int,
    address: str = "127.0.0.1",
    folder: str = "",
    leaving: str = "",
) -> tuple["subprocess.Popen[bytes]", KeeperPlace]:
    """Start a keeper that ends together with a given process.

    Args:
        host: Number of the host that it runs on.
        pid: Id of the process to end with.
        address: Address to listen on.
        folder: Folder that it removes when it ends; empty for none.
        leaving: File that it makes when SIGTERM tells it that its host will end.

    Raises:
        HeterogError: the keeper does not start.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "heterog.healing.keeper"),
            *(str(pid), address, folder, leaving),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # would stay open in a pipe that is read to its end
        start_new_session=True,  # so that signals to the job's group do not reach it
        env={**os.environ, "PYTHONPATH": with_package()},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    token = new_token()
    process.stdin.write(f"{token}\n".encode())
    process.stdin.close()
    said = process.stdout.readline().strip()
    process.stdout.close()
    if not said.isdigit():
        process.kill()
        process.wait()
        raise HeterogError(f"the keeper of host {host} did not start on {address}.")
    return process, KeeperPlace(host=host, address=address, port=int(said), token=token)


def holders(parts: Mapping[int, Sequence[Part]], moment: Moment) -> dict[int, list[int]]:
    """Hosts whose keepers have each part of a snapshot, by number of the part."""
    found: dict[int, list[int]] = {}
    for host, own in parts.items():
        for part in own:
            if part.moment == moment:
                found.setdefault(part.number, []).append(host)
    return found
