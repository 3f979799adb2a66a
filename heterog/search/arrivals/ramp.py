"""RAMP: PAC-ML's all-optical network of communication groups, racks and servers.

One server holds one worker. Formulas are those of the authors' simulator (cwfparsonson/ddls); see
``RampNetwork.all_reduce_s`` and ``RampNetwork.one_to_one_s``. A set of workers is an integer with
one bit for each worker.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from heterog.errors import HeterogError
from heterog.memo import kept

_MEMORY_BYTES_PER_S = 2e12
_PEAK_ADDITIONS_PER_S = 130e12
_BYTES_PER_NUMBER = 2
"""An A100 in the authors' simulator: memory rate, peak rate, width of a number."""
MOST_PARTS = 16
"""Most parts of an op that the paper allows."""

Shape = tuple[int, int, int]
"""Groups, racks and servers of a block; -1 servers means a diagonal through groups and racks."""


@dataclass(frozen=True, kw_only=True)
class RampNetwork:
    """The network and its workers; the defaults are those of the paper.

    Attributes:
        num_groups: Number of communication groups.
        num_racks: Number of racks of each group.
        num_servers: Number of servers of each rack.
        node_bytes_per_s: Rate of all channels of a worker together.
        latency_s: Latency of a switch.
        io_latency_s: Latency of reading or writing a worker's memory.
    """

    num_groups: int = 4
    num_racks: int = 4
    num_servers: int = 2
    node_bytes_per_s: float = 1.6e12
    latency_s: float = 50e-9
    io_latency_s: float = 100e-9

    def __post_init__(self) -> None:
        sides = self.num_groups, self.num_racks, self.num_servers
        if min(sides) < 1 or math.prod(sides) > 4096:
            raise HeterogError(
                f"a RAMP network of {' x '.join(map(str, sides))} servers; each side must be at "
                "least 1 and all servers together at most 4096."
            )

    @property
    def num_workers(self) -> int:
        """Number of workers, one for each server."""
        return self.num_groups * self.num_racks * self.num_servers

    @property
    def channel_bytes_per_s(self) -> float:
        """Rate between two workers: a worker divides its own among the groups."""
        return self.node_bytes_per_s / self.num_groups

    def one_to_one_s(self, num_bytes: float) -> float:
        """Seconds of a message between two workers: latency + 2 io + bytes / rate."""
        return self.latency_s + 2 * self.io_latency_s + num_bytes / self.channel_bytes_per_s

    def all_reduce_s(
        self, num_bytes: float, nodes: int, racks: int, groups: int, contending: int = 1
    ) -> float:
        """Seconds of RAMP's all-reduce: four steps of reduce-scatter, and the same back.

        With x groups in the network, the steps have (groups, min(groups, nodes), racks,
        ceil(nodes / x)) members s. The message is divided by each s in turn and rounded up; a
        step with s > 1 takes latency + 2 io + message / (lanes rate / x) twice, and an addition.
        The rate of a channel is divided by x a second time, as in the authors' code.

        Args:
            num_bytes: Bytes of the message.
            nodes: Number of different servers in their racks.
            racks: Number of different racks.
            groups: Number of different communication groups.
            contending: Number of racks that use the same servers of the same groups.
        """
        if nodes * racks * groups <= 1:
            return 0.0
        x = self.num_groups
        lane = self.channel_bytes_per_s / x
        message, seconds = num_bytes, 0.0
        for members in (groups, min(groups, nodes), racks, math.ceil(nodes / x)):
            message = float(math.ceil(message / members))
            if members > 1:
                lanes = min(x // contending, x // (members - 1))
                transfer = message / (max(lanes, 1) * lane)
                seconds += 2 * (self.latency_s + 2 * self.io_latency_s + transfer)
                seconds += _addition_s(message * members, members)
        return seconds

    @cached_property
    def legal_degrees(self) -> tuple[int, ...]:
        """Numbers of parts for which a block exists: 1, 2, 4, 6, 8 and 16 in the paper."""
        most = min(MOST_PARTS, self.num_workers)
        return tuple(
            degree
            for degree in range(1, most + 1)
            if (degree == 1 or degree % 2 == 0) and list(self._shapes(degree))
        )

    def first_fit(self, num_parts: int, occupied: int) -> int:
        """The first block of workers that are all free; 0 if there is none."""
        return next((block for block in self._blocks(num_parts) if not block & occupied), 0)

    @kept
    def _blocks(self, num_parts: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._all_blocks(num_parts)))

    def extent(self, block: int) -> Shape:
        """Numbers of different servers, racks and groups of a block, as ``all_reduce_s`` takes."""
        places = [divmod(bit, self.num_servers) for bit in devices_of(block)]
        return (
            len({server for _, server in places}),
            len({row % self.num_racks for row, _ in places}),
            len({row // self.num_racks for row, _ in places}),
        )

    def _shapes(self, num_parts: int) -> Iterator[Shape]:
        """Shapes by factor pairs (x, y): (sqrt x, sqrt x, y), (x, 1, y) and (x, y, 1)."""
        for y in range(1, min(num_parts, self.num_servers) + 1):
            if num_parts % y:
                continue
            x = num_parts // y
            root = math.isqrt(x)
            if root * root == x and root <= min(self.num_groups, self.num_racks):
                yield root, root, y
            if x <= min(self.num_groups, self.num_racks):
                yield x, 1, y
                yield x, y, 1

    def _all_blocks(self, num_parts: int) -> Iterator[int]:
        """Blocks in the order in which they are tried."""
        last = (num_parts, num_parts, -1), (num_parts, 1, 1)
        for shape in (*self._shapes(num_parts), *last):
            groups, racks, servers = shape
            for i in range(self.num_groups - groups + 1):
                for j in range(self.num_racks - racks + 1):
                    for k in range(self.num_servers - max(servers, 1) + 1):
                        yield self._block(shape, (i, j, k))

    def _block(self, shape: Shape, origin: Shape) -> int:
        groups, racks, servers = shape
        i, j, k = origin
        if servers < 0:
            places = [(i + n, j + n, k) for n in range(groups)]
        else:
            places = [
                (i + c, j + r, k + s)
                for c in range(groups)
                for r in range(racks)
                for s in range(servers)
            ]
        return sum(1 << ((c * self.num_racks + r) * self.num_servers + s) for c, r, s in places)


def devices_of(occupied: int) -> tuple[int, ...]:
    """Numbers of the bits that are set.

    >>> devices_of(0b1101)
    (0, 2, 3)
    """
    found = []
    while occupied:
        low = occupied & -occupied
        found.append(low.bit_length() - 1)
        occupied ^= low
    return tuple(found)


def _addition_s(num_bytes: float, members: int) -> float:
    """Seconds to add up what the members sent, by a roofline of memory and peak rate."""
    additions = math.ceil(math.log2(members))
    intensity = additions / ((members + 1) * _BYTES_PER_NUMBER)
    total = additions * (num_bytes / members) / _BYTES_PER_NUMBER
    return total / min(_MEMORY_BYTES_PER_S * intensity, _PEAK_ADDITIONS_PER_S)
