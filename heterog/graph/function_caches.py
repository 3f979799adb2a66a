"""Caches of functions that a capture must leave without fake tensors.

Libraries keep tables that depend only on sizes (positions of patches, say) in ``lru_cache``. A
model that is captured fills them with fake tensors, which the real model would then read.
"""

import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# By type: asking a lazy proxy what it is an instance of may import or warn.
_KIND: type = functools._lru_cache_wrapper
_OWN = ("torch.", "sympy.", "heterog.")
"""Packages whose caches hold no tensors."""


@contextmanager
def caches_without_fakes() -> Iterator[None]:
    """Empty the caches that were filled during the body."""
    before = {id(cache): cache.cache_info().misses for cache in _FOUND.all()}
    try:
        yield
    finally:
        for cache in _FOUND.all():
            if cache.cache_info().misses != before.get(id(cache), 0):
                cache.cache_clear()


class _FunctionCaches:
    """Every ``lru_cache`` of this process, except torch's and our own.

    Finding them means to look at every object of the process, a million and more, which takes a
    tenth of a second or two. Each cache holds a reference to its type, so while their number is
    the same, and all that were found still live, there is no new one to find.
    """

    def __init__(self) -> None:
        self._found: list[weakref.ref[Any]] = []
        self._num_references = -1

    def all(self) -> list[Any]:
        """The caches."""
        caches = [each() for each in self._found]
        num_references = _num_references()  # before looking: another thread may make a cache
        if self._num_references != num_references or None in caches:
            # Objects refer to their type: half the time of looking at what all of them are.
            caches = [each for each in gc.get_referrers(_KIND) if type(each) is _KIND]
            self._found = [weakref.ref(each) for each in caches]
            self._num_references = num_references if _are_counted() else -1
        return [
            cache for cache in caches if not str(getattr(cache, "__module__", "")).startswith(_OWN)
        ]


def _num_references() -> int:
    return sys.getrefcount(_KIND)


def _are_counted() -> bool:
    """Whether a cache counts as a reference to its type; not in every build of Python."""
    before = _num_references()
    cache = functools.cache(_are_counted)
    after = _num_references()
    del cache
    return after == before + 1


_FOUND = _FunctionCaches()
