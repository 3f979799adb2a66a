"""Messages between ranks and keepers: a JSON header and raw bytes, both of announced length.

    8 bytes   length of the header
    8 bytes   length of the payload
    header    JSON object, UTF-8
    payload   bytes of tensors

Nothing is unpickled. Who connects has to answer a challenge: the keeper sends random bytes, the
client the HMAC-SHA256 of them under the job's token, which never goes over the wire.
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from heterog.errors import HeterogError

MOST_HEADER_BYTES = 1 << 28
"""Limit of a header: the index of a snapshot takes about 300 bytes for each tensor."""
MOST_PAYLOAD_BYTES = 1 << 40
_LENGTHS = struct.Struct("!QQ")
_NONCE_BYTES = 32

Header = dict[str, Any]


class WireError(HeterogError):
    """A peer that is gone, fails the challenge, or sends a malformed message."""


def new_token() -> str:
    """A secret that the processes of one job share."""
    return secrets.token_hex(32)


def challenge(connection: socket.socket, token: str) -> bool:
    """Ask the peer for the token; returns whether it knows it."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce)
    answer = _receive(connection, hashlib.sha256().digest_size)
    return hmac.compare_digest(answer, _answer(token, nonce))


def answer_challenge(connection: socket.socket, token: str) -> None:
    """Prove that this process knows the token."""
    connection.sendall(_answer(token, bytes(_receive(connection, _NONCE_BYTES))))


def send_message(
    connection: socket.socket,
    header: Mapping[str, Any],
    payload: Sequence[bytes | bytearray | memoryview] = (),
) -> None:
    """Send a header and the parts of a payload.

    Raises:
        WireError: the peer is gone.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    size = sum(len(part) for part in payload)
    try:
        connection.sendall(_LENGTHS.pack(len(text), size) + text)
        for part in payload:
            connection.sendall(part)
    except OSError as error:
        raise WireError(f"the connection was lost while sending: {_why(error)}.") from error


def receive_message(
    connection: socket.socket, most_payload_bytes: int = MOST_PAYLOAD_BYTES
) -> tuple[Header, bytearray]:
    """The next message.

    Raises:
        WireError: the peer is gone, or the message is longer than it may be or not JSON.
    """
    header, size = receive_header(connection)
    if size > most_payload_bytes:
        raise WireError(f"a message has {size} bytes; at most {most_payload_bytes} are taken.")
    return header, _receive(connection, size)


def receive_header(connection: socket.socket) -> tuple[Header, int]:
    """The header of the next message and the length of the payload, which is still to come.

    Raises:
        WireError: as ``receive_message``.
    """
    length, size = _LENGTHS.unpack(_receive(connection, _LENGTHS.size))
    if length > MOST_HEADER_BYTES or size > MOST_PAYLOAD_BYTES:
        raise WireError(f"a message of {length} + {size} bytes is none of ours.")
    try:
        header = json.loads(bytes(_receive(connection, length)))
    except ValueError as error:
        raise WireError("a message is not JSON.") from error
    if not isinstance(header, dict):
        raise WireError("a message is no JSON object.")
    return header, size


def receive_into(connection: socket.socket, buffer: bytearray) -> None:
    """Fill a buffer with received bytes.

    Raises:
        WireError: the peer is gone before the buffer is full.
    """
    view, at = memoryview(buffer), 0
    while at < len(view):
        try:
            count = connection.recv_into(view[at:])
        except OSError as error:
            raise WireError(f"the connection was lost: {_why(error)}.") from error
        if not count:
            raise WireError("the connection was closed in the middle of a message.")
        at += count


def _receive(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    receive_into(connection, buffer)
    return buffer


def _answer(token: str, nonce: bytes) -> bytes:
    return hmac.new(token.encode(), nonce, hashlib.sha256).digest()


def _why(error: OSError) -> str:
    return error.strerror or str(error)
