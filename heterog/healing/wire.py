"""Messages between ranks and keepers: a JSON header and, behind some, the bytes of tensors.

They go through connections of ``multiprocessing``, as bytes: nothing is unpickled. Both sides show
that they know the job's token by its HMAC challenges, so the token never goes over the wire.
"""

import json
import os
import secrets
import socket
import struct
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


def connect(
    peer: socket.socket, token: str, *, is_keeper: bool, silent_s: float = 30.0
) -> Connection:
    """A connection, once both sides have shown that they know the token.

    Args:
        peer: A connected socket, which is taken over.
        token: The secret.
        is_keeper: Whether this side is a keeper, which waits for questions as long as it may take.
        silent_s: Seconds that a frozen peer is waited for, later on by who is no keeper only.

    Raises:
        WireError: the peer does not know the token, is gone or is silent.
    """
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _wait_at_most(peer, silent_s)
    steps = [deliver_challenge, answer_challenge]
    with peer:
        connection = Connection(os.dup(peer.fileno()))
        try:
            with _lost():
                for step in steps if is_keeper else reversed(steps):
                    step(connection, token.encode())
        except WireError:
            connection.close()
            raise
        if is_keeper:
            _wait_at_most(peer, 0.0)
    return connection


def _wait_at_most(peer: socket.socket, seconds: float) -> None:
    """Bound how long its system calls wait; 0 is no bound."""
    whole, part = divmod(seconds, 1.0)
    limit = struct.pack("ll", int(whole), int(part * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, limit)


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
    except BlockingIOError as error:
        raise WireError("the peer is silent; it may be frozen.") from error
    except (OSError, EOFError, ProcessError, ValueError) as error:
        why = getattr(error, "strerror", "") or str(error) or "it was closed"
        raise WireError(f"the connection was lost: {why}.") from error
