"""Passes over memory of a replica in one averaging; encoding and decoding not counted.

``ranks`` makes these passes, ``pricing`` prices them as stated here.

    x  parameters, in the optimizer's dtype    s  copy of them when they were sent
    a  parameters after the averaging before   w  weight of the replica, or of its island's message
    f  the bucket                              m  momentum, c its coefficient
    d  difference a - average                  r  outer learning rate

Every tensor has one element for each of the bucket, so that bytes moved for each byte of the
bucket are the tensors read and written. What error feedback moves belongs to
``codec.encode_bytes``, and masters are rounded into the model's values afterwards.
"""

from collections.abc import Iterable
from typing import NamedTuple

from heterog.modes.averaging.value import Averaging


class Pass(NamedTuple):
    """One pass over memory.

    Attributes:
        formula: The assignment that it makes.
        reads: Number of tensors read.
        writes: Number of tensors written.
    """

    formula: str
    reads: int
    writes: int


KEEP = Pass("s = x", 1, 1)
WEIGH = Pass("f = w x", 1, 1)
CHANGE = Pass("f = a - x", 2, 1)
WEIGH_CHANGE = Pass("f = w f", 1, 1)
CLEAR = Pass("d = 0", 0, 1)
DIFFER = Pass("d = a - f", 2, 1)
MOMENTUM = (
    Pass("m = c m", 1, 1),
    Pass("m = m + d", 2, 1),
    Pass("d = d + c m", 2, 1),
)
MOVE = Pass("a = a - r d", 2, 1)
TAKE_OVER = Pass("x = f, or x = a", 1, 1)
LEARNED_SINCE = (Pass("x = x - s", 2, 1), Pass("x = x + f, or x = x + a", 2, 1))


def passes_before(averaging: Averaging, *, has_codec: bool, sends: bool) -> tuple[Pass, ...]:
    """Passes before what a replica sends of a bucket is encoded, or summed as it is.

    Args:
        averaging: The averaging.
        has_codec: Whether the bucket has a codec.
        sends: Whether the replica sends something; with a codec one of each island does.
    """
    kept = (KEEP,) if averaging.delay else ()
    if not has_codec:
        return *kept, WEIGH
    return (*kept, CHANGE, WEIGH_CHANGE) if sends else kept


def passes_after(averaging: Averaging, *, has_codec: bool) -> tuple[Pass, ...]:
    """Passes around the decoding of what has come, and after it; without a codec, after the sum.

    Args:
        averaging: The averaging.
        has_codec: Whether the bucket has a codec.
    """
    found: tuple[Pass, ...] = ()
    if has_codec or averaging.has_outer:
        momentum = MOMENTUM if averaging.has_outer else ()
        found = (CLEAR if has_codec else DIFFER, *momentum, MOVE)
    return (*found, *LEARNED_SINCE) if averaging.delay else (*found, TAKE_OVER)


def times_moved(passes: Iterable[Pass]) -> int:
    """Bytes that passes read and write for each byte of the bucket.

    >>> averaging = Averaging(every=8)
    >>> times_moved(passes_before(averaging, has_codec=False, sends=True))
    2
    >>> times_moved(passes_after(averaging, has_codec=False))
    2
    """
    return sum(each.reads + each.writes for each in passes)
