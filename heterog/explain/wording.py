"""Numbers and lists in words."""

from collections.abc import Iterable, Sequence

from heterog.simulator.critical_path import PathPiece
from heterog.units import format_bytes


def seconds_of(pieces: Iterable[PathPiece]) -> float:
    """Seconds of some pieces together."""
    return sum(piece.seconds for piece in pieces)


def groups_of(count: int) -> str:
    """``"1 group"`` or ``"3 groups"``."""
    return "1 group" if count == 1 else f"{count} groups"


def percent(part: float) -> str:
    """Whole percent, with a decimal for small parts.

    >>> percent(0.416), percent(0.0163), percent(0.0)
    ('42 %', '1.6 %', '0.0 %')
    """
    return f"{100 * part:.1f} %" if part < 0.0995 else f"{100 * part:.0f} %"


def times_slower(slow: float, fast: float) -> str:
    """How many times as long: ``"1.52 times"``."""
    return f"{slow / fast:.2f} times"


def bytes_of(num_bytes: float, whole: float) -> str:
    """``"3.2 GiB of 16.0 GiB"``."""
    return f"{format_bytes(num_bytes)} of {format_bytes(whole)}"


def names_of(names: Sequence[str]) -> str:
    """Some names in full, many as their number and the ends."""
    if len(names) > 4:
        return f"{len(names)} devices, {names[0]} to {names[-1]}"
    return listed(names)


def listed(words: Sequence[str]) -> str:
    """``"a, b and c"``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
