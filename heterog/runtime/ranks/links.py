"""Finds links to other machines that are cut, from the kernel's TCP connections.

A process that is stopped, or waits on a busy machine for its turn, is not lost: its kernel still
acknowledges data that others send. A machine that is gone or cut off does not. TCP then sends the
data again, on a quick link after 0.2, 0.6, 1.4 and 3.0 s (RFC 6298: the wait doubles each time),
and gives up only after a quarter of an hour. So the state of a link can be read from existing
connections (Linux), without asking any machine.
"""

import os
import socket
import struct
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

CUT_S = 2.0
"""Seconds without an acknowledgement after which a link counts as cut; data is sent four times
within them. A link that is down for a second, as when one of two bonded links takes over, does not
count; one that is down for 1.5 s may, as the fifth attempt comes only 3 s after the first."""
_SENT_AGAIN = 3
"""Least number of times that the same data was sent again on a cut link."""
_LENGTH = 104
"""Bytes of <linux/tcp.h>'s ``tcp_info`` that are read."""
_RETRANSMITS, _LAST_ACK_RECEIVED = 2, 56
"""Offsets in it of tcpi_retransmits (in a row; one byte) and tcpi_last_ack_recv (ms)."""


class Connection(NamedTuple):
    """A TCP connection of this process with another machine.

    Attributes:
        here: Address on this side.
        there: Address on the other.
        sent_again: Number of times that the oldest unacknowledged data was sent again.
        heard_s: Seconds since the last acknowledgement.
    """

    here: str
    there: str
    sent_again: int
    heard_s: float


def cut_off() -> set[str]:
    """Addresses of machines that do not acknowledge data of this process.

    Empty if no machine acknowledges anything, because then this machine itself is cut off.
    """
    every = [each for _, each in _connections()]
    cut = _cut(every)
    return cut if any(each.heard_s < CUT_S and each.there not in cut for each in every) else set()


def end_connections(machines: Collection[str]) -> set[str]:
    """End connections with some machines, as far as they are cut off; returns which these are."""
    cut = _cut([each for _, each in _connections()]) & set(machines)
    for connected, each in _connections() if cut else ():
        if each.there in cut:
            with suppress(OSError):  # it has ended
                connected.shutdown(socket.SHUT_RDWR)
    return cut


def own_addresses() -> set[str]:
    """Addresses from which this process is connected with other machines."""
    return {each.here for _, each in _connections()}


def _cut(connections: Iterable[Connection]) -> set[str]:
    every = list(connections)
    silent = {
        each.there for each in every if each.sent_again >= _SENT_AGAIN and each.heard_s >= CUT_S
    }
    return silent - {each.there for each in every if each.heard_s < CUT_S}


def _connections() -> Iterator[tuple[socket.socket, Connection]]:
    """Connections with other machines, each with a socket that is open until the next one."""
    if sys.platform != "linux":
        return
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), _socket(int(number)) as connected:
            if connected.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            here, there = (
                name[0].removeprefix("::ffff:")  # an IPv4 address
                for name in (connected.getsockname(), connected.getpeername())
            )
            told = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
            (heard_ms,) = struct.unpack_from("I", told, _LAST_ACK_RECEIVED)
            if here != there:
                yield connected, Connection(here, there, told[_RETRANSMITS], heard_ms / 1e3)


def _socket(number: int) -> socket.socket:
    """The socket of a descriptor, under another one.

    Raises:
        OSError: it is none.
    """
    own = os.dup(number)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
