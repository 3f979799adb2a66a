"""Links to other machines that are cut, as the kernel knows them.

A process that is stopped, or waits on a busy machine for its turn, is not lost: its kernel goes on
to acknowledge what others send it. A machine that is gone or cut off does not. TCP then sends the
same again, after 0.2, 0.6, 1.4 and 3.0 s where a link is quick (RFC 6298: twice as long after each
time), and gives up after a quarter of an hour by itself. So what a link is worth can be read from
the connections that are there (Linux), and no machine has to be asked.
"""

import os
import socket
import struct
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

CUT_S = 2.0
"""Seconds without an acknowledgement after which a link counts as cut; in them data is sent four
times. One that is down for a second, as where one of two bonded links takes over, does not; one
that is down for 1.5 s may, as data is sent for the fifth time only 3 s after the first."""
_SENT_AGAIN = 3
"""Times that the same data has to have been sent again in it."""
_LENGTH = 104
"""Bytes of <linux/tcp.h>'s ``tcp_info`` that are read."""
_RETRANSMITS, _LAST_ACK_RECEIVED = 2, 56
"""Where it has tcpi_retransmits (in a row; one byte) and tcpi_last_ack_recv (ms)."""


class Connection(NamedTuple):
    """A TCP connection of this process with another machine.

    Attributes:
        here: Address on this side.
        there: Address on the other.
        sent_again: Times that the oldest data that is not acknowledged was sent again.
        heard_s: Seconds since the last acknowledgement.
    """

    here: str
    there: str
    sent_again: int
    heard_s: float


def cut_off() -> set[str]:
    """Addresses of machines that do not acknowledge what this process sends them.

    None where no machine acknowledges anything: then it is this one that is cut off.
    """
    every = [each for _, each in _connections()]
    cut = _cut(every)
    return cut if any(each.heard_s < CUT_S and each.there not in cut for each in every) else set()


def end_connections(machines: Collection[str]) -> set[str]:
    """End connections with those of some machines that are cut off; returns which are."""
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
