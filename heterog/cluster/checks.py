"""What names, texts, rates and shares of a cluster may be."""

import math

from heterog.errors import ClusterError
from heterog.names import name_fault, shown, text_fault

_LEAST = 1e-6  # of rates in bytes/s or FLOP/s, and of shares


def check_name(name: str, what: str) -> None:
    """Refuse an empty name and one that names cannot be; ``what`` begins the message."""
    if not name:
        raise ClusterError(f"{what} has an empty name; give it one.")
    if (fault := name_fault(name)) is not None:
        raise ClusterError(f"{what} has the name {shown(name)}, which {fault}.")


def check_text(text: str, what: str) -> None:
    """Refuse a text that no line can have."""
    if (fault := text_fault(text)) is not None:
        raise ClusterError(f"{what}, {shown(text)}, {fault}.")


def check_positive(value: float, what: str) -> None:
    """Refuse a number that is not finite, or too small to be a rate or a size."""
    if not (math.isfinite(value) and value > 0):
        raise ClusterError(f"{what} is {value:g}; it must be a finite number above 0.")
    _check_least(value, what)


def check_not_negative(value: float, what: str) -> None:
    """Refuse a number that is not finite, or below 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ClusterError(f"{what} is {value:g}; it must be a finite number, 0 or above.")


def check_share(value: float, what: str) -> None:
    """Refuse a number that is not above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ClusterError(f"{what} is {value:g}; it must be above 0 and at most 1.")
    _check_least(value, what)


def _check_least(value: float, what: str) -> None:
    """Check that seconds that follow from a rate stay within the range of floats."""
    if value < _LEAST:
        raise ClusterError(f"{what} is {value:g}; it must be at least {_LEAST:g}.")
