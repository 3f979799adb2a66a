"""Groups values by a key; cuts sequences into even parts."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of each key; keys and values in the order in which they come first.

    >>> grouped((len(word), word) for word in ("a", "bc", "d"))
    {1: ['a', 'd'], 2: ['bc']}
    """
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def cut(items: Sequence[_Value], count: int) -> list[list[_Value]]:
    """Items in order, in ``count`` parts as even as possible.

    >>> cut("abcde", 2)
    [['a', 'b'], ['c', 'd', 'e']]
    """
    bounds = [round(len(items) * part / count) for part in range(count + 1)]
    return [list(items[first:last]) for first, last in pairwise(bounds)]
