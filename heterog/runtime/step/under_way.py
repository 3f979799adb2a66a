"""Communication under way: tensors of sends, receives that take turns, and groups of both."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch import Tensor

from heterog.runtime.accelerators import is_accelerated

_HELD_BYTES = 1 << 20
"""Sent tensors that one rank may hold for another until it needs to wait for them."""


class Sending:
    """Sends to one rank; holds each tensor until it has been sent.

    gloo reports the end of a send only to a thread that waits for it. So a thread waits, and
    memory is freed at once and not at the end of the step. The thread takes CPU time from the one
    that computes, so it gets several small tensors at a time. On an accelerator, a wait orders
    streams and does not block; which sends are done is seen without one.
    """

    def __init__(self) -> None:
        self._under_way = queue.SimpleQueue[tuple[dist.Work, Future[None]] | None]()
        self._handed: deque[tuple[Future[None], Tensor]] = deque()  # the thread waits for them
        self._held: deque[tuple[dist.Work, Tensor]] = deque()  # sent after those
        self._held_bytes = 0
        self._num_added = 0
        self._thread: threading.Thread | None = None

    @property
    def _num_done(self) -> int:
        return self._num_added - len(self._handed) - len(self._held)

    def add(self, work: dist.Work, tensor: Tensor) -> int:
        """Hold a tensor until it is sent; returns the number of sends so far, for ``wait``."""
        self._held.append((work, tensor))
        self._held_bytes += tensor.nbytes
        self._num_added += 1
        if self._held_bytes >= _HELD_BYTES and tensor.is_cpu:
            self._hand_over()
        self.release()
        return self._num_added

    def _hand_over(self) -> None:
        """Have the thread wait for the held sends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()
        while self._held:
            work, tensor = self._take_held()
            done = Future[None]()
            self._handed.append((done, tensor))
            self._under_way.put((work, done))

    def _take_held(self) -> tuple[dist.Work, Tensor]:
        """The send that is held longest, which is then no longer held here."""
        work, tensor = self._held.popleft()
        self._held_bytes -= tensor.nbytes
        return work, tensor

    def release(self) -> None:
        """Drop sent tensors in the thread that made them, because profilers count by thread.

        Raises:
            RuntimeError: the connection was lost.
        """
        self.wait(0)

    def flush(self) -> None:
        """Wait until all is sent; see ``wait``."""
        self.wait(self._num_added)

    def wait(self, number: int) -> None:
        """Wait until the first ``number`` sends are done, and drop their tensors.

        Raises:
            RuntimeError: the connection was lost.
        """
        while self._handed and (self._num_done < number or self._handed[0][0].done()):
            self._handed[0][0].result()
            self._handed.popleft()
        while self._held and self._num_done < number:
            self._held[0][0].wait()
            self._take_held()
        while self._held and is_accelerated(self._held[0][1]) and self._held[0][0].is_completed():
            self._take_held()

    def close(self) -> None:
        """End the thread, once all is sent."""
        self._under_way.put(None)

    def _wait(self) -> None:
        while (taken := self._under_way.get()) is not None:
            work, done = taken
            del taken
            try:
                work.wait()
            except Exception as error:
                done.set_exception(error)
                continue
            del work  # before its tensor may be dropped
            done.set_result(None)


class InTurn:
    """Receives of one exchange; each begins when the previous one has ended.

    If all ranks exchange with all others at once, flows share both ends of each link unevenly: one
    flow is done early, and its end of a link then idles until the others are done. In turns, every
    link carries one flow each way. gloo sends a message only when its receiver is ready for it, so
    receivers alone determine the turns. A thread starts them, so that other work can go on.

    Args:
        starts: Functions that each start a receive.
    """

    def __init__(self, starts: Sequence[Callable[[], Any]]) -> None:
        self._error: Exception | None = None
        first, *later = starts
        self._thread = threading.Thread(target=self._run, args=(first(), later), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all have arrived.

        Raises:
            RuntimeError: the connection was lost.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, first: dist.Work, later: Sequence[Callable[[], Any]]) -> None:
        try:
            first.wait()
            for start in later:
                start().wait()
        except Exception as error:
            self._error = error


class Works:
    """Several communications that end together."""

    def __init__(
        self, works: Sequence[dist.Work | InTurn], sends: Sequence[tuple[Sending, int]] = ()
    ) -> None:
        self._works = works
        self._sends = sends

    def wait(self) -> None:
        """Wait until everything to be received has arrived."""
        for work in self._works:
            work.wait()

    def wait_for_sends(self) -> None:
        """Wait until the sent tensors may be dropped."""
        for sending, number in self._sends:
            sending.wait(number)
