"""The only place that converts units. Inside heterog everything is SI: bytes, seconds, FLOP/s."""

import re
from decimal import Decimal

from heterog.errors import HeterogError
from heterog.names import shown

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_BYTES = {
    "B": 1.0,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
}
_BYTES_PER_S = {
    "bit/s": 0.125,
    "kbit/s": 0.125e3,
    "Mbit/s": 0.125e6,
    "Gbit/s": 0.125e9,
    "B/s": 1.0,
    "KB/s": 1e3,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "TB/s": 1e12,
}
_FLOPS_PER_S = {"FLOP/s": 1.0, "MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_TIME_S = {
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "ns": 1e-9,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
}
_QUANTITY = re.compile(r"\s*([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([A-Za-z/]*)\s*")


def _parse(text: str | float, units: dict[str, float], what: str) -> float:
    if isinstance(text, bool):
        raise HeterogError(f"{what} must be a number with a unit, got {text!r}.")
    if isinstance(text, int | float):
        return float(text)
    match = _QUANTITY.fullmatch(text)
    if match is None or (match[2] and match[2] not in units):
        raise HeterogError(
            f"cannot read {what} {shown(text)}; write a number and one of {list(units)}."
        )
    # In decimal, because 5 * 1e-6 is not the float 5e-6, and equal texts and numbers must agree.
    try:
        return float(Decimal(match[1]) * Decimal(repr(units[match[2]] if match[2] else 1.0)))
    except ArithmeticError as error:
        raise HeterogError(
            f"{what} {shown(text)} is beyond any number; write a smaller one."
        ) from error


def parse_bandwidth(text: str | float) -> float:
    """Bandwidth in bytes/s from a number (already bytes/s) or a text with its unit.

    >>> parse_bandwidth("10 Gbit/s"), parse_bandwidth("16 GB/s")
    (1250000000.0, 16000000000.0)
    """
    return _parse(text, _BYTES_PER_S, "bandwidth")


def parse_bytes(text: str | float) -> int:
    """Size in bytes from a number (already bytes) or a text with its unit.

    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    return round(_parse(text, _BYTES, "size"))


def parse_flops_per_s(text: str | float) -> float:
    """Speed in FLOP/s from a number (already FLOP/s) or a text with its unit.

    >>> parse_flops_per_s("15.5 TFLOP/s")
    15500000000000.0
    """
    return _parse(text, _FLOPS_PER_S, "speed")


def parse_seconds(text: str | float) -> float:
    """Time in seconds from a number (already seconds) or a text with its unit.

    >>> parse_seconds("5 ms"), parse_seconds("2d"), parse_seconds("1.5 h")
    (0.005, 172800.0, 5400.0)
    """
    return _parse(text, _TIME_S, "time")


def format_seconds(seconds: float) -> str:
    """A short text for people.

    >>> format_seconds(0.4123), format_seconds(2.5e-5), format_seconds(83.0)
    ('412.3 ms', '25.0 us', '83.00 s')
    """
    if seconds >= 1.0:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def format_range(low_s: float, high_s: float, around_s: float) -> str:
    """Two times in the unit that ``format_seconds`` uses for a third, without its name.

    >>> format_range(0.36, 1.0472, around_s=0.61)
    '360.0 to 1,047.2'
    """
    unit = 1.0 if around_s >= 1.0 else 1e3 if around_s >= 1e-3 else 1e6
    digits = 2 if around_s >= 1.0 else 1
    return f"{low_s * unit:,.{digits}f} to {high_s * unit:,.{digits}f}"


def format_bytes_range(low: float, high: float, around: float) -> str:
    """Two sizes in the unit that ``format_bytes`` takes for a third, without its name.

    >>> format_bytes_range(800 * 1024**2, 1.5 * 1024**3, around=1024**3)
    '0.8 to 1.5'
    """
    unit = next((unit for unit in (GIB, MIB, KIB) if around >= unit), 1)
    digits = 0 if unit == 1 else 1
    return f"{low / unit:.{digits}f} to {high / unit:.{digits}f}"


def format_bytes(num_bytes: float) -> str:
    """A short text for people.

    >>> format_bytes(3 * 1024**3), format_bytes(1536)
    ('3.0 GiB', '1.5 KiB')
    """
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} B"
