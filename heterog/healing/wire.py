"""Messages between ranks and keepers: a JSON header and, behind some, the bytes of tensors.

They go through connections of ``multiprocessing``, as bytes: nothing is unpickled. Both sides show
that they know the job's token by its HMAC challenges, so the token never goes over the wire.
"""

import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from heterog.errors import HeterogError

_MOST_HEADER_BYTES = 1 << 28
"""Limit of a header: the index of a snapshot takes about 300 bytes for each tensor."""
_PIECE_BYTES = 1 << 22

Header = dict[str, Any]


class WireError(HeterogError):
    """A peer that is gone, does not know the token, or sends a malformed message."""


def new_token() -> str:
    """A secret that the processes of one job share."""
    return secrets.token_hex(32)


def connect(peer: socket.socket, token: str, *, is_keeper: bool) -> Connection:
    """A connection, once both sides have shown that they know the token.

    Raises:
        WireError: the peer does not, or is gone.
    """
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(peer.detach())
    steps = [deliver_challenge, answer_challenge]
    try:
        with _lost():
            for step in steps if is_keeper else reversed(steps):
                step(connection, token.encode())
    except WireError:
        connection.close()
        raise
    return connection


def send_message(
    connection: Connection, header: Mapping[str, Any], content: bytes | memoryview = b""
) -> None:
    """Send a header and the bytes behind it, whose number the peer knows.

    Raises:
        WireError: the peer is gone.
    """
    with _lost():
        connection.send_bytes(json.dumps(header, separators=(",", ":")).encode())
        for begin in range(0, len(content), _PIECE_BYTES):
            connection.send_bytes(content[begin : begin + _PIECE_BYTES])


def receive_header(connection: Connection) -> Header:
    """The header of the next message.

    Raises:
        WireError: the peer is gone, or the header is longer than it may be or not JSON.
    """
    with _lost():
        header = json.loads(connection.recv_bytes(_MOST_HEADER_BYTES))
    if not isinstance(header, dict):
        raise WireError("a message is no JSON object.")
    return header


def receive_into(connection: Connection, buffer: bytearray) -> None:
    """Fill a buffer with the bytes behind a header.

    Raises:
        WireError: the peer is gone before the buffer is full, or sends more.
    """
    at = 0
    with _lost():
        while at < len(buffer):
            at += connection.recv_bytes_into(buffer, at)


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ProcessError, ValueError) as error:
        why = getattr(error, "strerror", "") or str(error) or "it was closed"
        raise WireError(f"the connection was lost: {why}.") from error
