"""Keeps Python's garbage collector away from objects that live long.

torch, a captured step and its tables are half a million objects. A full collection walks over
all of them in 0.15 s, and a plan of one second paid for several collections.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """Exclude all present objects from collections inside the block; also decorates functions.

    A nested block changes nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch off Python's search for reference cycles.

    An import, a capture or a rehearsal makes hundreds of thousands of objects, which reference
    counts free. Meanwhile the search would start again and again, and each time look through all
    of torch and the graph.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def give_back_memory() -> None:
    """Collect cycles, and give freed memory back to the system where that is glibc's.

    Searches make and free large arrays, and what is left between them cannot be used for others:
    a process had 12 GB after a hundred searches of at most 2 GB each.
    """
    gc.collect()
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
