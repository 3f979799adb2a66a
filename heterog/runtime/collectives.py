"""Communication between ranks: process groups per device set, asynchronous, waited for once.

Ranks issue communication in the plan's order, so they cannot deadlock. What gloo gets wrong is
avoided: waiting twice on a point-to-point work hangs, blocking sends rendezvous, list collectives
with uneven shapes fail (uneven slices travel by all-to-all), and coalescing silently drops later
work.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Pending:
    """A tensor that is on its way.

    Args:
        work: the communication, ``None`` if there is nothing to wait for.
        finish: makes the tensor once the communication is done.
    """

    __slots__ = ("_finish", "_value", "_work")

    def __init__(self, work: dist.Work | None, finish: Callable[[], Tensor]) -> None:
        self._work = work
        self._finish: Callable[[], Tensor] | None = finish
        self._value: Tensor | None = None

    def wait(self) -> Tensor:
        """The tensor; may be called any number of times."""
        if self._finish is not None:
            if self._work is not None:
                self._work.wait()
            self._value = self._finish()
            self._work = self._finish = None
        assert self._value is not None
        return self._value


class Communicator:
    """The process groups of a plan, seen from one rank.

    Args:
        rank: this rank; ranks are device indices.
        device_sets: every set of devices that communicates; the same on all ranks.
    """

    def __init__(self, rank: int, device_sets: Iterable[tuple[int, ...]]) -> None:
        self.rank = rank
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
        work = dist.isend(tensor, dst, tag=tag)
        assert work is not None
        self._sending.append((work, tensor))

    def receive(self, like: Tensor, src: int, tag: int) -> Pending:
        """Receive into ``like``, a contiguous tensor."""
        return Pending(dist.irecv(like, src, tag=tag), lambda: like)

    def all_reduce(self, tensor: Tensor, devices: tuple[int, ...]) -> Pending:
        """Sum over devices, in place on a contiguous tensor."""
        work = dist.all_reduce(tensor, group=self._groups[devices], async_op=True)
        return Pending(work, lambda: tensor)

    def reduce_scatter(
        self, tensor: Tensor, devices: tuple[int, ...], counts: Sequence[int]
    ) -> Pending:
        """Sum a flat tensor over devices and keep this rank's slice of ``counts`` elements.

        Every rank sends each other rank its slice and adds up what it receives: the slices may be
        uneven, and nothing is padded (gloo's own reduce-scatter is an all-reduce).
        """
        own = counts[devices.index(self.rank)]
        received = tensor.new_empty(len(counts) * own)
        work = dist.all_to_all_single(
            received,
            tensor,
            [own] * len(counts),
            list(counts),
            group=self._groups[devices],
            async_op=True,
        )
        return Pending(work, lambda: received.view(len(counts), own).sum(0))

    def all_gather(
        self,
        part: Tensor,
        devices: tuple[int, ...],
        counts: Sequence[int],
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Pending:
        """Collect flat parts of uneven sizes from all devices and combine them."""
        copies = part.repeat(len(counts))
        received = part.new_empty(sum(counts))
        work = dist.all_to_all_single(
            received,
            copies,
            list(counts),
            [part.numel()] * len(counts),
            group=self._groups[devices],
            async_op=True,
        )
        return Pending(work, lambda: combine(list(received.split(list(counts)))))

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
