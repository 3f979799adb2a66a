"""RAMP: PAC-ML's all-optical network of communication groups, racks and servers.

One server holds one worker. Formulas are those of the authors' simulator (cwfparsonson/ddls), and
sizes those of the paper. A set of workers is an integer with one bit for each worker.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

NUM_GROUPS, NUM_RACKS, NUM_SERVERS = 4, 4, 2
"""Communication groups, racks of each group, and servers of each rack."""
NUM_WORKERS = NUM_GROUPS * NUM_RACKS * NUM_SERVERS
LEGAL_DEGREES = (1, 2, 4, 6, 8, 16)
"""Numbers of parts of an op, at most 16 in the paper, for which a block exists."""
_CHANNEL_BYTES_PER_S = 1.6e12 / NUM_GROUPS
"""Rate between two workers: a worker divides its own among the groups."""
_MESSAGE_S = 50e-9 + 2 * 100e-9
"""Latency of a switch, and of reading and writing a worker's memory."""
_MEMORY_BYTES_PER_S = 2e12
_PEAK_ADDITIONS_PER_S = 130e12
_BYTES_PER_NUMBER = 2
"""An A100 in the authors' simulator: memory rate, peak rate, width of a number."""

Shape = tuple[int, int, int]
"""Groups, racks and servers of a block; -1 servers means a diagonal through groups and racks."""


def one_to_one_s(num_bytes: float) -> float:
    """Seconds of a message between two workers: latency + 2 io + bytes / rate."""
    return _MESSAGE_S + num_bytes / _CHANNEL_BYTES_PER_S


def all_reduce_s(num_bytes: float, nodes: int, racks: int, groups: int) -> float:
    """Seconds of RAMP's all-reduce: four steps of reduce-scatter, and the same back.

    With x groups in the network, the steps have (groups, min(groups, nodes), racks,
    ceil(nodes / x)) members s. The message is divided by each s in turn and rounded up; a step
    with s > 1 takes latency + 2 io + message / (lanes rate / x) twice, and an addition. The rate
    of a channel is divided by x a second time, as in the authors' code.

    Args:
        num_bytes: Bytes of the message.
        nodes: Number of different servers in their racks.
        racks: Number of different racks.
        groups: Number of different communication groups.
    """
    if nodes * racks * groups <= 1:
        return 0.0
    lane = _CHANNEL_BYTES_PER_S / NUM_GROUPS
    message, seconds = num_bytes, 0.0
    for members in (groups, min(groups, nodes), racks, math.ceil(nodes / NUM_GROUPS)):
        message = float(math.ceil(message / members))
        if members > 1:
            transfer = message / (max(NUM_GROUPS // (members - 1), 1) * lane)
            seconds += 2 * (_MESSAGE_S + transfer)
            seconds += _addition_s(message * members, members)
    return seconds


def first_fit(num_parts: int, occupied: int) -> int:
    """The first block of workers that are all free; 0 if there is none."""
    return next((block for block in _blocks(num_parts) if not block & occupied), 0)


def extent(block: int) -> Shape:
    """Numbers of different servers, racks and groups of a block, as ``all_reduce_s`` takes."""
    places = [divmod(bit, NUM_SERVERS) for bit in devices_of(block)]
    return (
        len({server for _, server in places}),
        len({row % NUM_RACKS for row, _ in places}),
        len({row // NUM_RACKS for row, _ in places}),
    )


def _shapes(num_parts: int) -> Iterator[Shape]:
    """Shapes by factor pairs (x, y): (sqrt x, sqrt x, y), (x, 1, y) and (x, y, 1)."""
    for y in range(1, min(num_parts, NUM_SERVERS) + 1):
        x, rest = divmod(num_parts, y)
        root = math.isqrt(x)
        if not rest and root * root == x and root <= min(NUM_GROUPS, NUM_RACKS):
            yield root, root, y
        if not rest and x <= min(NUM_GROUPS, NUM_RACKS):
            yield from ((x, 1, y), (x, y, 1))


@lru_cache(maxsize=64)
def _blocks(num_parts: int) -> tuple[int, ...]:
    """Blocks in the order in which they are tried, each once."""
    last = (num_parts, num_parts, -1), (num_parts, 1, 1)
    return tuple(
        dict.fromkeys(
            _block(shape, origin)
            for shape in (*_shapes(num_parts), *last)
            for origin in product(
                range(NUM_GROUPS - shape[0] + 1),
                range(NUM_RACKS - shape[1] + 1),
                range(NUM_SERVERS - max(shape[2], 1) + 1),
            )
        )
    )


def _block(shape: Shape, origin: Shape) -> int:
    """The workers of a shape, with its first corner at an origin."""
    inside = product(*map(range, shape)) if shape[2] > 0 else ((n, n, 0) for n in range(shape[0]))
    places = (tuple(map(sum, zip(origin, step, strict=True))) for step in inside)
    return sum(1 << ((c * NUM_RACKS + r) * NUM_SERVERS + s) for c, r, s in places)


def devices_of(occupied: int) -> tuple[int, ...]:
    """Numbers of the bits that are set.

    >>> devices_of(0b1101)
    (0, 2, 3)
    """
    return tuple(bit for bit in range(occupied.bit_length()) if occupied >> bit & 1)


def _addition_s(num_bytes: float, members: int) -> float:
    """Seconds to add up what the members sent, by a roofline of memory and peak rate."""
    additions = math.ceil(math.log2(members))
    intensity = additions / ((members + 1) * _BYTES_PER_NUMBER)
    total = additions * (num_bytes / members) / _BYTES_PER_NUMBER
    return total / min(_MEMORY_BYTES_PER_S * intensity, _PEAK_ADDITIONS_PER_S)
