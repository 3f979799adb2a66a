"""Communication under way: tensors of sends, what begins in turns, and groups of both."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor

from heterog.runtime.accelerators import is_accelerated

_LARGE_BYTES = 1 << 20
"""Least size of an exchange's messages for which turns save more time than they take."""
_HELD_BYTES = 1 << 20
"""Sent tensors that one rank may hold for another until it needs to wait for them."""

Start: TypeAlias = Callable[[], Sequence[dist.Work]]
"""A function that starts communications."""


class Phase(NamedTuple):
    """Messages of one rank that are under way together, each with the other rank's position."""

    sent: Sequence[tuple[int, Tensor]]
    received: Sequence[tuple[int, Tensor]]

    def is_large(self) -> bool:
        """Whether receives should take turns.

        If a rank sends nothing to some rank, or receives nothing from it, turns do not use links
        evenly, and one slow link would delay the others.
        """
        peers = [{peer for peer, _ in each} for each in self]
        return peers[0] == peers[1] and all(
            tensor.nbytes >= _LARGE_BYTES for each in self for _, tensor in each
        )


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
    """Communications of one exchange; each begins when the previous one has ended.

    If all ranks exchange with all others at once, flows share both ends of each link unevenly: one
    flow is done early, and its end of a link then idles until the others are done. In turns, every
    link carries one flow each way. gloo sends a message only when its receiver is ready for it, so
    receivers alone determine the turns. A thread starts them, so that other work can go on.

    Args:
        starts: Functions that each start receives.
        sent: Sends that these functions add, with their tensors; the thread waits for them last.
    """

    def __init__(
        self, starts: Sequence[Start], sent: Sequence[tuple[dist.Work, Tensor]] = ()
    ) -> None:
        self._error: Exception | None = None
        self._arrived = threading.Event()
        first = starts[0]()
        self._starts, self._sent = [lambda: first, *starts[1:]], sent
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_under_way(self) -> bool:
        """Whether something is still received or sent."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until all have arrived.

        Raises:
            RuntimeError: the connection was lost.
        """
        self._arrived.wait()
        self._starts.clear()  # here, because profilers count by thread
        if self._error is not None:
            raise self._error

    def wait_for_sends(self) -> None:
        """Wait until everything has arrived and is sent; see ``wait``."""
        self._thread.join()
        self.wait()

    def _run(self) -> None:
        try:
            self._start_all()
            self._arrived.set()
            for work, _ in self._sent:
                work.wait()
        except Exception as error:
            self._error = error
            self._arrived.set()

    def _start_all(self) -> None:
        for start in self._starts:
            for work in start():
                work.wait()


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
        for work in self._works:
            if isinstance(work, InTurn):
                work.wait_for_sends()
        for sending, number in self._sends:
            sending.wait(number)
