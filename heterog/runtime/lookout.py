"""A thread of a rank that looks every second whether its loop stands, and at what line.

Ranks that wait for one that takes no further step would wait until the timeout of the process
group: half an hour. ``balance.leaving`` and ``step.late_ranks`` say who keeps them waiting.
"""

import atexit
import threading
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Protocol
from weakref import ref

LOOK_S = 1.0
"""Seconds between looks at the loop of this rank."""
NUM_LOOKS = 10
"""Looks that find the loop in one place, after which it may wait for another rank."""
STORE_IS_GONE = RuntimeError, ValueError
"""Errors of a store whose rank has ended, and of a process group that has been destroyed."""
HETEROG = Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(threading.__file__).parent
_PACKAGES = {"site-packages", "dist-packages"}
_LOOKING: dict[threading.Thread, threading.Event] = {}
"""The threads that look, and what ends each."""


class Looker(Protocol):
    """What looks."""

    def look(self) -> None:
        """Look once, in the lookout's thread."""


class Lookout:
    """Lets an object look every second, as long as it and the store of the ranks exist.

    Args:
        looker: The object; it is not kept.
    """

    def __init__(self, looker: Looker) -> None:
        _end_looks_at_exit()
        ends = threading.Event()
        self._thread = threading.Thread(target=_look_often, args=(ref(looker), ends), daemon=True)
        _LOOKING[self._thread] = ends
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it looks; not in a process that was forked, for example."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the looks."""
        if self._thread in _LOOKING:
            _LOOKING[self._thread].set()
            self._thread.join(LOOK_S)


def users_line(frame: FrameType | None) -> str:
    """File and line of the user's code that calls a frame; empty if none is found."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_known = {HETEROG, _STANDARD_LIBRARY} & set(path.parents) or _PACKAGES & set(path.parts)
        if not is_known and not path.name.startswith("<"):
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _look_often(held: "ref[Looker]", ends: threading.Event) -> None:
    while not ends.wait(LOOK_S):
        looker = held()
        if looker is None:
            break
        try:
            looker.look()
        except STORE_IS_GONE:
            break
        del looker
    _LOOKING.pop(threading.current_thread(), None)


@cache
def _end_looks_at_exit() -> None:
    atexit.register(_end_looks)


def _end_looks() -> None:
    """End the threads: one that returned from the store later would abort the process."""
    for thread, ends in list(_LOOKING.items()):
        ends.set()
        thread.join(10)
