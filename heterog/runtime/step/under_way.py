"""Communication under way: tensors of sends, receives that take turns, and groups of both."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
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
        self._under_way: queue.SimpleQueue[tuple[dist.Work, Tensor] | None] = queue.SimpleQueue()
        self._held: deque[tuple[dist.Work, Tensor]] = deque()  # not yet handed to the thread
        self._held_bytes = 0
        self._sent: list[Tensor] = []
        self._num_added = self._num_done = 0
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

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
            self._under_way.put(self._held.popleft())
        self._held_bytes = 0

    def release(self) -> None:
        """Drop sent tensors in the thread that made them, because profilers count by thread."""
        if self._sent:
            with self._changed:
                self._sent.clear()
        while self._held and self._is_first_sent():
            self._take_first()
            self._num_done += 1

    def _is_first_sent(self) -> bool:
        work, tensor = self._held[0]
        return is_accelerated(tensor) and work.is_completed()

    def _take_first(self) -> tuple[dist.Work, Tensor]:
        """The send that is held longest, which is then no longer held here."""
        work, tensor = self._held.popleft()
        self._held_bytes -= tensor.nbytes
        return work, tensor

    def flush(self) -> None:
        """Wait until all is sent.

        Raises:
            RuntimeError: the connection was lost.
        """
        self.wait(self._num_added)

    def wait(self, number: int) -> None:
        """Wait until the first ``number`` sends are done, and drop their tensors.

        Raises:
            RuntimeError: the connection was lost.
        """
        handed = min(number, self._num_added - len(self._held))
        if self._num_done < handed:
            with self._changed:
                self._changed.wait_for(lambda: self._num_done >= handed or self._error is not None)
        if self._error is not None:
            raise self._error
        while self._held and self._num_done < number:
            work, tensor = self._take_first()
            work.wait()
            del tensor
            self._num_done += 1
        self.release()

    def close(self) -> None:
        """End the thread, once all is sent."""
        self._under_way.put(None)

    def _wait(self) -> None:
        while (taken := self._under_way.get()) is not None:
            work, tensor = taken
            del taken
            try:
                work.wait()
            except Exception as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._sent.append(tensor)
                del work, tensor
                self._num_done += 1
                self._changed.notify_all()


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
