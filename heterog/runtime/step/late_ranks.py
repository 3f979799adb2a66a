"""Says in one line which rank keeps the others waiting, and where its loop is.

A rank that leaves out a batch by itself (its samples are NaN, say), or ends its loop, makes fewer
steps than the others. They wait for its gradients then, until the timeout of the process group:
half an hour. So a thread of each rank looks, once its loop has stood in one place for ten seconds,
how many steps all ranks have begun. It ends nothing: a rank that is late may only be slow.
"""

import atexit
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from weakref import ref

import torch

from heterog.runtime.step.alike import BatchShapes

LOOK_S = 1.0
"""Seconds between looks at the loop of this rank."""
_NUM_LOOKS = 10
"""Looks that find the loop in one place, after which a line is printed; each doubles them."""
_GONE = RuntimeError, ValueError
"""Errors of a store whose rank has ended, and of a process group that has been destroyed."""
_LIBRARIES = {
    *(Path(__file__).parents[2], Path(torch.__file__).parent, Path(threading.__file__).parent)
}
_LOOKING: dict[threading.Thread, threading.Event] = {}
"""The threads that look, and what ends each."""


class LateRanks:
    """Notices that ranks stand in different steps.

    Args:
        shapes: Knows how many steps each rank has begun.
        rank: This rank.
    """

    def __init__(self, shapes: BatchShapes, rank: int) -> None:
        self._shapes, self._rank = shapes, rank
        self._loops_in = threading.get_ident()
        self._at = object()  # another one whenever the loop moves
        self._is_inside = False
        self._seen: object = None
        self._num_seen = 0
        self._told: object = None
        self._patience = _NUM_LOOKS
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on, in a thread."""
        _end_looks_at_exit()
        ends = threading.Event()
        self._thread = threading.Thread(target=_look_often, args=(ref(self), ends), daemon=True)
        _LOOKING[self._thread] = ends
        self._thread.start()

    def close(self) -> None:
        """End the looks."""
        if (thread := self._thread) in _LOOKING:
            _LOOKING[thread].set()
            thread.join(LOOK_S)

    def begin_step(self) -> None:
        """Note that the loop has called the step."""
        self._loops_in, self._is_inside, self._at = threading.get_ident(), True, object()

    def end_step(self) -> None:
        """Note that the step has returned."""
        self._is_inside, self._at = False, object()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Note both, with the step in the body."""
        self.begin_step()
        try:
            yield
        finally:
            self.end_step()

    def look(self) -> None:
        """Print a line if the loop stands, and another rank has begun fewer or more steps."""
        at = self._at
        if at is not self._seen:
            self._seen, self._num_seen = at, 0
        self._num_seen += 1
        if self._num_seen != self._patience or at is self._told:
            return
        begun = self._shapes.steps_begun()
        own, most = begun[self._rank], max(begun)
        late = [rank for rank, number in enumerate(begun) if number < most]
        if self._is_inside and own == most and late and begun.index(most) == self._rank:
            said = f"rank {self._rank} waits in step {own} for {_ranks(late)}, which "
            said += f"{'have' if len(late) > 1 else 'has'} not begun it"
        elif not self._is_inside and own < most:
            said = f"rank {self._rank} has not begun step {own + 1}, in which others wait for it; "
            said += f"it is {_place(self._loops_in)}"
        else:
            return
        self._told, self._patience = at, self._patience * 2
        print(
            f"heterog: {said}. If it goes on later it was only slow; a rank that leaves out a "
            "batch, or ends its loop, by something that the others do not see makes them wait "
            "until the timeout of the process group.",
            file=sys.stderr,
            flush=True,
        )


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))}"


def _place(thread: int) -> str:
    """File and line of the user's code in which a thread is."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if not _LIBRARIES & set(path.parents) and not path.name.startswith("<"):
            return f"at {path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of its loop"


def _look_often(held: "ref[LateRanks]", ends: threading.Event) -> None:
    """Look every second, as long as the step exists and is not closed."""
    while not ends.wait(LOOK_S):
        late_ranks = held()
        if late_ranks is None:
            break
        with suppress(*_GONE):
            late_ranks.look()
        del late_ranks
    _LOOKING.pop(threading.current_thread(), None)


@cache
def _end_looks_at_exit() -> None:
    atexit.register(_end_looks)


def _end_looks() -> None:
    """End the threads: one that returned from the store later would abort the process."""
    for thread, ends in list(_LOOKING.items()):
        ends.set()
        thread.join(10)
