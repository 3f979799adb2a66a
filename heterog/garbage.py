"""Keeps Python's garbage collector away from what lives long.

torch, a captured step and its tables are half a million objects, and a full collection walks over
all of them: 0.15 s, which a plan of a second paid for several times.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """Leave what is in memory now out of collections inside the block; or decorate a function.

    A block in another one changes nothing.
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
    counts free; the search would start again and again, and each time look through all of torch
    and the graph.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
