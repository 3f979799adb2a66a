"""Communication between ranks: process groups per device set, asynchronous, waited for once.

Ranks issue communication in the plan's order, so they cannot deadlock. What gloo gets wrong is
avoided: waiting twice on a point-to-point work hangs, blocking sends rendezvous, list collectives
with uneven shapes fail (uneven slices travel by all-to-all), and coalescing silently drops later
work.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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


def _sent(tensor: Tensor, dst: int, group: dist.ProcessGroup | None = None, tag: int = 0) -> Any:
    """A send under way."""
    return dist.isend(tensor, dst, group=group, tag=tag)


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
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Send without waiting; ``flush`` waits."""
        tensor = tensor.contiguous()
        self._sending.append((_sent(tensor, dst, tag=tag), tensor))

    def receive(self, like: Tensor, src: int, tag: int) -> Pending:
        """Receive into ``like``, a contiguous tensor."""
        return self._pending(dist.irecv(like, src, tag=tag), lambda: like)

    def all_reduce(self, tensor: Tensor, devices: tuple[int, ...]) -> Pending:
        """Sum over devices, in place on a contiguous tensor."""
        work = dist.all_reduce(tensor, group=self._groups[devices], async_op=True)
        return self._pending(work, lambda: tensor)

    def reduce_scatter(
        self, tensor: Tensor, devices: tuple[int, ...], counts: Sequence[int]
    ) -> Pending:
        """Sum a flat tensor over devices and keep this rank's slice of ``counts`` elements.

        Every rank sends each other rank its slice and adds up what it receives: the slices may be
        uneven, and nothing is padded (gloo's own reduce-scatter is an all-reduce).
        """
        slices = list(torch.split(tensor, list(counts)))
        own = slices[devices.index(self.rank)]
        received = [own.clone() if d == self.rank else torch.empty_like(own) for d in devices]
        return self._pending(
            self._exchange(slices, received, devices),
            lambda: torch.stack(received).sum(0),
        )

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
                self._sending.append((_sent(tensor, devices[index], group), tensor))
        return _Works([work for work in works if work is not None])

    def _pending(self, work: "dist.Work | _Works | None", finish: Callable[[], Tensor]) -> Pending:
        return Pending(work, finish, self.recorder.waiting() if self.recorder else None)

    def flush(self) -> None:
        """Wait for everything that was sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()


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
