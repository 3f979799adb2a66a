"""Python's search for reference cycles, switched off where it would only look."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch off Python's search for reference cycles.

    A capture or a rehearsal makes hundreds of thousands of objects, which reference counts free;
    the search would start again and again, and each time look through all of torch and the graph.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
