"""Communication between ranks: process groups per device set, asynchronous, waited for once.

Ranks issue communication in the plan's order, so they cannot deadlock. What gloo gets wrong is
avoided: waiting twice on a point-to-point work hangs, blocking sends rendezvous, list collectives
with uneven shapes fail (uneven slices travel by all-to-all), and coalescing silently drops later
work.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from heterog.runtime.recorder import Recorder


class Pending:
    """A tensor that is on its way.

    Args:
        work: the communication, ``None`` if there is nothing to wait for.
        finish: makes the tensor once the communication is done.
        waited: hears of the wait: when it began and when it was over.
    """

    __slots__ = ("_finish", "_value", "_waited", "_work")

    def __init__(
        self,
        work: "dist.Work | _Works | None",
        finish: Callable[[], Tensor],
        waited: Callable[[float, float], None] | None = None,
    ) -> None:
        self._work = work
        self._waited = waited
        self._finish: Callable[[], Tensor] | None = finish
        self._value: Tensor | None = None

    def wait(self) -> Tensor:
        """The tensor; may be called any number of times."""
        if self._finish is not None:
            if self._work is not None:
                begin = time.perf_counter()
                self._work.wait()
                if self._waited is not None:
                    self._waited(begin, time.perf_counter())
            self._value = self._finish()
            self._work = self._finish = None
        assert self._value is not None
        return self._value


class _Works:
    """Several communications that end together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Until all are done."""
        for work in self._works:
            work.wait()


class _Sending:
    """Sends to one rank: holds each tensor until it has been sent.

    gloo tells that a send is done only to who waits for it: a thread does, so that what was sent
    is let go at once and not at the end of the step. NCCL's wait orders streams and does not
    block: its tensors are held until ``flush``.
    """

    def __init__(self) -> None:
        self._under_way: queue.SimpleQueue[tuple[dist.Work, Tensor]] = queue.SimpleQueue()
        self._on_gpu: list[tuple[dist.Work, Tensor]] = []
        self._sent: list[Tensor] = []
        self._num_left = 0
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work, tensor: Tensor) -> None:
        """Hold a tensor until its send is done."""
        if tensor.is_cuda:
            self._on_gpu.append((work, tensor))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()
        with self._changed:
            self._num_left += 1
        self._under_way.put((work, tensor))
        self.release()

    def release(self) -> None:
        """Let go what has been sent, in the thread that made it: profilers count by thread."""
        with self._changed:
            self._sent.clear()

    def flush(self) -> None:
        """Until all is sent.

        Raises:
            RuntimeError: the connection was lost.
        """
        for work, _ in self._on_gpu:
            work.wait()
        self._on_gpu.clear()
        with self._changed:
            self._changed.wait_for(lambda: self._num_left == 0 or self._error is not None)
        if self._error is not None:
            raise self._error
        self.release()

    def _wait(self) -> None:
        while True:
            work, tensor = self._under_way.get()
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
                self._num_left -= 1
                if self._num_left == 0:
                    self._changed.notify_all()


class Communicator:
    """The process groups of a plan, seen from one rank.

    Args:
        rank: this rank; ranks are device indices.
        device_sets: every set of devices that communicates; the same on all ranks.

    Attributes:
        recorder: hears of every wait; ``None`` where nobody asks.
    """

    def __init__(self, rank: int, device_sets: Iterable[tuple[int, ...]]) -> None:
        self.rank = rank
        self.recorder: Recorder | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for devices in sorted(set(device_sets)):
            # Every rank takes part in making every group.
            group = dist.new_group(list(devices))
            if rank in devices:
                self._groups[devices] = group
        self._sending: dict[int, _Sending] = {}  # by destination

    def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Send without waiting; ``flush`` waits."""
        tensor = tensor.contiguous()
        self._keep(dist.isend(tensor, dst, tag=tag), tensor, dst)

    def receive(self, like: Tensor, src: int, tag: int) -> Pending:
        """Receive into ``like``, a contiguous tensor."""
        for sending in self._sending.values():
            sending.release()
        return self._pending(dist.irecv(like, src, tag=tag), lambda: like)

    def all_reduce(self, tensor: Tensor, devices: tuple[int, ...]) -> Pending:
        """Sum over devices, in place on a contiguous tensor."""
        work = dist.all_reduce(tensor, group=self._groups[devices], async_op=True)
        return self._pending(work, lambda: tensor)

    def reduce_scatter(
        self, tensor: Tensor, devices: tuple[int, ...], counts: Sequence[int]
    ) -> Pending:
        """Sum a flat tensor over devices into this rank's slice of ``counts`` elements, in place.

        Every rank sends each other rank its slice and adds up what it receives: the slices may be
        uneven, and nothing is padded (gloo's own reduce-scatter is an all-reduce).
        """
        slices = list(torch.split(tensor, list(counts)))
        own = slices[devices.index(self.rank)]
        received = [own if d == self.rank else torch.empty_like(own) for d in devices]

        def finish() -> Tensor:
            for part in received:
                if part is not own:
                    own.add_(part)
            return own

        return self._pending(self._exchange(slices, received, devices), finish)

    def all_gather_slices(
        self, tensor: Tensor, devices: tuple[int, ...], counts: Sequence[int]
    ) -> Pending:
        """Complete a flat tensor of which each rank has its own slice, in place.

        After ``reduce_scatter`` of the same tensor nothing that must still be sent is overwritten:
        another rank sends its slice when it has all parts of it, this rank's too.
        """
        slices = list(torch.split(tensor, list(counts)))
        own = slices[devices.index(self.rank)]
        work = self._exchange([own] * len(devices), slices, devices)
        return self._pending(work, lambda: tensor)

    def all_gather(
        self,
        part: Tensor,
        devices: tuple[int, ...],
        counts: Sequence[int],
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Pending:
        """Collect flat parts of uneven sizes from all devices and combine them."""
        parts = [
            part if device == self.rank else part.new_empty(count)
            for device, count in zip(devices, counts, strict=True)
        ]
        work = self._exchange([part] * len(devices), parts, devices)
        return self._pending(work, lambda: combine(parts))

    def _exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], devices: tuple[int, ...]
    ) -> "_Works":
        """Send one tensor to each other device and receive one from each.

        Not by all-to-all: gloo's posts the sends first, so that its handshakes wait behind data on
        the same connection, and the two directions of a link take turns.
        """
        group = self._groups[devices]
        own = devices.index(self.rank)
        others = [index for index in range(len(devices)) if index != own]
        if received[own].is_cuda:
            operations = [
                dist.P2POp(dist.irecv, received[index], devices[index], group)
                for index in others
                if received[index].numel()
            ] + [
                dist.P2POp(dist.isend, sent[index].contiguous(), devices[index], group)
                for index in others
                if sent[index].numel()
            ]
            return _Works(dist.batch_isend_irecv(operations) if operations else [])
        works = []
        for index in others:
            if received[index].numel():
                works.append(dist.irecv(received[index], devices[index], group=group))
        for index in others:
            if sent[index].numel():
                tensor = sent[index].contiguous()
                self._keep(dist.isend(tensor, devices[index], group), tensor, devices[index])
        return _Works([work for work in works if work is not None])

    def _keep(self, work: dist.Work | None, tensor: Tensor, dst: int) -> None:
        assert work is not None
        self._sending.setdefault(dst, _Sending()).add(work, tensor)

    def _pending(self, work: "dist.Work | _Works | None", finish: Callable[[], Tensor]) -> Pending:
        return Pending(work, finish, self.recorder.waiting() if self.recorder else None)

    def flush(self) -> None:
        """Wait for everything that was sent."""
        for sending in self._sending.values():
            sending.flush()


def slice_counts(num_elements: int, parts: Sequence[float]) -> list[int]:
    """Elements of each slice of a flat tensor, in proportion to ``parts``.

    >>> slice_counts(10, (0.5, 0.3, 0.2)), slice_counts(3, (0.0, 1.0))
    ([5, 3, 2], [0, 3])
    """
    ends = []
    total = 0.0
    for part in parts:
        total += part
        ends.append(round(num_elements * total))
    ends[-1] = num_elements
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def gather_texts(text: str) -> list[str]:
    """What every rank says, as UTF-8 bytes: objects would be pickled."""
    mine = text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = max(int(size) for size in sizes)
    if longest == 0:
        return [""] * len(sizes)
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [
        each[: int(size)].numpy().tobytes().decode()
        for each, size in zip(received, sizes, strict=True)
    ]
