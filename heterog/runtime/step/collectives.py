"""Communication between ranks: process groups per device set, asynchronous, waited for once.

Ranks issue communication in the plan's order, so they cannot deadlock. The code avoids what gloo
gets wrong: a second wait for a point-to-point work hangs, blocking sends rendezvous, list
collectives with uneven shapes fail (uneven slices travel as sends and receives), and coalescing
silently drops later work.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from heterog.runtime.accelerators import from_every_rank, is_accelerated
from heterog.runtime.step.recorder import Recorder
from heterog.runtime.step.under_way import InTurn, Sending, Works

_LARGE_BYTES = 1 << 20
"""Least size of an exchange's messages for which turns save more time than they take."""
_FIRST_TAG, _NUM_TAGS = 1 << 30, 1 << 20
"""Tags of exchanges; lower tags are for single sends and receives."""


class Pending:
    """A tensor whose communication is under way.

    Args:
        work: The communication; ``None`` if there is nothing to wait for.
        finish: Makes the tensor once the communication is done.
        waited: Called after the wait with its start and end, in seconds of the process's clock.
        forgotten: Gets ``work`` and ``finish`` if this object is dropped before a wait. The
            communication goes on, and writes into tensors that ``finish`` keeps; gloo's connection
            hangs if their memory is freed.
    """

    __slots__ = ("_finish", "_forgotten", "_value", "_waited", "_work")

    def __init__(
        self,
        work: "dist.Work | Works | None",
        finish: Callable[[], Tensor],
        waited: Callable[[float, float], None] | None = None,
        forgotten: "list[_Forgotten] | None" = None,
    ) -> None:
        self._work = work
        self._waited = waited
        self._forgotten = forgotten
        self._finish: Callable[[], Tensor] | None = finish
        self._value: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the tensor and return it; may be called any number of times."""
        if self._finish is not None:
            work, finish = self._work, self._finish
            self._work = self._finish = None  # no second wait, even if this one fails
            if work is not None:
                begin = time.perf_counter()
                work.wait()
                if self._waited is not None:
                    self._waited(begin, time.perf_counter())
            self._value = finish()
        if self._value is None:
            raise RuntimeError("what this rank waits for was lost before; start the ranks again.")
        return self._value

    def __del__(self) -> None:
        if self._work is not None and self._finish is not None and self._forgotten is not None:
            self._forgotten.append((self._work, self._finish))


_Forgotten: TypeAlias = tuple[dist.Work | Works, Callable[[], Tensor]]


class Communicator:
    """The process groups of a plan, seen from one rank.

    All communication goes through ``_open``, ``_start_send``, ``_start_receive`` and
    ``_start_all_reduce``; a subclass may replace these (``rehearsal`` does).

    Args:
        rank: Number of this rank; ranks are device indices.
        device_sets: Every set of devices that communicates; the same on all ranks.

    Attributes:
        recorder: Recorder notified of each wait, if set.
    """

    def __init__(self, rank: int, device_sets: Iterable[tuple[int, ...]]) -> None:
        self.rank = rank
        self.recorder: Recorder | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._num_exchanges: Counter[tuple[int, ...]] = Counter()
        self._known: set[tuple[int, ...]] = set()
        self.open(device_sets)
        self._sending: dict[int, Sending] = {}  # by destination
        self._sent: dict[int, tuple[Sending, int]] = {}  # by tag
        self._forgotten: list[_Forgotten] = []  # abandoned, kept until ``flush``

    def open(self, device_sets: Iterable[tuple[int, ...]]) -> None:
        """Make the process groups of device sets that have none yet; every rank has to call it."""
        for devices in sorted(set(device_sets) - self._known):
            self._known.add(devices)
            # Every rank takes part in making every group.
            group = self._open(devices)
            if self.rank in devices:
                self._groups[devices] = group

    def _open(self, devices: tuple[int, ...]) -> dist.ProcessGroup:
        return open_group(devices)

    def _start_send(
        self, tensor: Tensor, dst: int, group: dist.ProcessGroup | None = None, tag: int = 0
    ) -> dist.Work | None:
        return dist.isend(tensor, dst, group, tag)

    def _start_receive(
        self, tensor: Tensor, src: int, group: dist.ProcessGroup | None = None, tag: int = 0
    ) -> dist.Work | None:
        return dist.irecv(tensor, src, group, tag)

    def _start_all_reduce(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None
    ) -> dist.Work | None:
        # For a view with strides, gloo would also add up the memory in between.
        assert tensor.is_contiguous()
        work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
        return work

    def sum_over_all(self, tensor: Tensor) -> Pending:
        """Sum over all ranks, in place on a contiguous tensor."""
        return self._pending(self._start_all_reduce(tensor), lambda: tensor)

    def send(
        self, tensor: Tensor, dst: int, tag: int, devices: tuple[int, ...] | None = None
    ) -> None:
        """Start a send; ``wait_for_send`` and ``flush`` wait for it.

        Args:
            tensor: Tensor that is sent.
            dst: Rank that receives it.
            tag: Tag that distinguishes it from other messages.
            devices: Device set whose connections it uses; if ``None``, those of the group of all
                ranks, which most messages use.
        """
        tensor = tensor.contiguous()
        work = self._start_send(tensor, dst, self._group(devices), tag)
        self._sent[tag] = self._keep(work, tensor, dst)

    def wait_for_send(self, tag: int) -> None:
        """Wait until a sent tensor may be dropped; does nothing if none waits under this tag."""
        if tag in self._sent:
            sending, number = self._sent.pop(tag)
            sending.wait(number)

    def receive(
        self, like: Tensor, src: int, tag: int, devices: tuple[int, ...] | None = None
    ) -> Pending:
        """Receive into ``like``, a contiguous tensor; see ``send``."""
        for sending in self._sending.values():
            sending.release()
        work = self._start_receive(like, src, self._group(devices), tag)
        return self._pending(work, lambda: like)

    def _group(self, devices: tuple[int, ...] | None) -> dist.ProcessGroup | None:
        return None if devices is None else self._groups[devices]

    def all_reduce(self, tensor: Tensor, devices: tuple[int, ...]) -> Pending:
        """Sum over devices, in place on a contiguous tensor."""
        return self._pending(self._start_all_reduce(tensor, self._groups[devices]), lambda: tensor)

    def reduce_scatter(
        self, tensor: Tensor, devices: tuple[int, ...], counts: Sequence[int]
    ) -> Pending:
        """Sum a flat tensor over devices into this rank's slice of ``counts`` elements, in place.

        Every rank sends each other rank its slice and adds up what it receives: the slices may be
        uneven, and nothing is padded (gloo's own reduce-scatter is an all-reduce).
        """
        return self.reduce_scatter_slices(
            tensor, devices, counts, devices, like=tensor, in_place=True
        )

    def all_gather_slices(
        self, tensor: Tensor, devices: tuple[int, ...], counts: Sequence[int]
    ) -> Pending:
        """Complete a flat tensor in place, of which each rank has its own slice.

        After ``reduce_scatter`` of the same tensor this overwrites nothing that must still be
        sent: another rank sends its slice only when it has all parts of it, including this rank's.
        """
        slices = list(torch.split(tensor, list(counts)))
        work = self._exchange([slices[devices.index(self.rank)]] * len(devices), slices, devices)
        return self._pending(work, lambda: tensor)

    def reduce_scatter_slices(
        self,
        tensor: Tensor | None,
        devices: tuple[int, ...],
        counts: Sequence[int],
        senders: Sequence[int],
        *,
        like: Tensor,
        before: Pending | None = None,
        in_place: bool = False,
    ) -> Pending:
        """Sum the slices of flat tensors that some of the devices have.

        Args:
            tensor: This rank's tensor; ``None`` if the rank is not one of ``senders``.
            devices: Devices that each get the sum of their slice.
            counts: Number of elements of each device's slice.
            senders: Devices that have a tensor.
            like: A tensor with the dtype and device of the slices.
            before: A slice that the sum is added to.
            in_place: Whether the sum may overwrite this rank's own slice of ``tensor``.
        """
        index, nothing = devices.index(self.rank), like.new_empty(0)
        slices = [nothing] * len(devices)
        if tensor is not None:
            slices = list(torch.split(tensor, list(counts)))
        own, slices[index] = slices[index], nothing
        # On the meta device twice as fast as ``new_empty``.
        room = partial(torch.empty, counts[index], dtype=like.dtype, device=like.device)
        others = {*senders} - {self.rank}
        received = [room() if d in others else nothing for d in devices]

        def finish() -> Tensor:
            parts = [part for part in received if part is not nothing]
            if tensor is not None:
                parts.append(own)
            if before is not None:
                total = before.wait()
            elif in_place and tensor is not None:
                total = parts.pop()
            elif not parts:  # only other slice groups have a gradient
                total = like.new_zeros(counts[index])
            else:
                total = parts.pop(0)
                total = total.clone() if total is own else total
            for part in parts:
                add_in_place(total, part)
            return total

        works = self._exchange(slices, received, devices)
        if in_place:
            return self._pending(works, finish)
        del slices

        def finish_and_let_go() -> Tensor:
            total = finish()
            works.wait_for_sends()
            return total

        return self._pending(works, finish_and_let_go)

    def gather_slices(
        self,
        own: Tensor,
        devices: tuple[int, ...],
        counts: Sequence[int],
        receivers: Sequence[int],
    ) -> Pending | None:
        """Gather the slices of all devices on some of them, in a new flat tensor.

        Returns:
            The whole tensor, or ``None`` if this rank is not one of ``receivers``.
        """
        nothing = own.new_empty(0)
        received = [nothing] * len(devices)
        whole = nothing
        if self.rank in receivers:
            whole = own.new_empty(sum(counts))
            received = list(torch.split(whole, list(counts)))
            index = devices.index(self.rank)
            received[index].copy_(own)
            received[index] = nothing
        sent = [own if d in receivers else nothing for d in devices]
        work = self._exchange(sent, received, devices)
        return self._pending(work, lambda: whole) if self.rank in receivers else None

    def all_gather(
        self,
        part: Tensor,
        devices: tuple[int, ...],
        counts: Sequence[int],
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Pending:
        """Collect flat parts of uneven sizes from all devices and combine them."""
        return self.all_to_all([part] * len(devices), devices, counts, combine)

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        devices: tuple[int, ...],
        counts: Sequence[int],
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Pending:
        """Send every device its flat piece, receive one from each, and combine these.

        Args:
            pieces: Piece for each of the devices, the one for this rank among them.
            devices: Devices that take part.
            counts: Number of elements of the piece from each of them.
            combine: Makes one tensor of the pieces, in the order of the devices.
        """
        own = devices.index(self.rank)
        parts = [
            pieces[own] if index == own else pieces[own].new_empty(count)
            for index, count in enumerate(counts)
        ]
        return self._pending(self._exchange(pieces, parts, devices), lambda: combine(parts))

    def _exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], devices: tuple[int, ...]
    ) -> "Works":
        """Send one tensor to each other device and receive one from each.

        It does not use all-to-all: gloo's posts the sends first, so its handshakes wait behind
        data on the same connection, and the two directions of a link take turns.
        """
        group = self._groups[devices]
        own = devices.index(self.rank)
        others = [(own + turn) % len(devices) for turn in range(1, len(devices))]
        if is_accelerated(received[own]):
            operations = [
                dist.P2POp(dist.irecv, received[index], devices[index], group)
                for index in others
                if received[index].numel()
            ] + [
                dist.P2POp(dist.isend, sent[index].contiguous(), devices[index], group)
                for index in others
                if sent[index].numel()
            ]
            return Works(dist.batch_isend_irecv(operations) if operations else [])
        # Every exchange has a tag of its own, because receives that wait for their turn may begin
        # after receives of the next exchange.
        tag = _FIRST_TAG + self._num_exchanges[devices] % _NUM_TAGS
        self._num_exchanges[devices] += 1
        starts = [
            partial(self._start_receive, received[index], devices[index], group, tag)
            for index in reversed(others)
            if received[index].numel()
        ]
        works: list[Any] = []
        # If a rank sends nothing to some rank, or receives nothing from it, turns do not use links
        # evenly, and one slow link would delay the others.
        is_large = (
            each[index].nbytes >= _LARGE_BYTES for each in (sent, received) for index in others
        )
        if len(others) > 1 and not received[others[0]].is_meta and all(is_large):
            works.append(InTurn(starts))
        else:
            works.extend(start() for start in starts)
        sends = []
        for index in others:
            if sent[index].numel():
                tensor, dst = sent[index].contiguous(), devices[index]
                sends.append(self._keep(self._start_send(tensor, dst, group, tag), tensor, dst))
        return Works([work for work in works if work is not None], sends)

    def _keep(self, work: Any, tensor: Tensor, dst: int) -> tuple[Sending, int]:
        assert work is not None
        sending = self._sending.get(dst)
        if sending is None:
            sending = self._sending[dst] = Sending()
        return sending, sending.add(work, tensor)

    def _pending(self, work: "dist.Work | Works | None", finish: Callable[[], Tensor]) -> Pending:
        waited = self.recorder.waiting() if self.recorder else None
        return Pending(work, finish, waited, self._forgotten)

    def flush(self) -> None:
        """Wait for all sends, and for communication that was abandoned on this rank."""
        while self._forgotten:  # the end of one may drop another, which then joins this list
            work, finish = self._forgotten.pop()
            work.wait()
            del finish
        self._sent.clear()
        for sending in self._sending.values():
            sending.flush()

    def close(self) -> None:
        """End the process groups and their threads; no rank may communicate in them any more."""
        for sending in self._sending.values():
            sending.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._sending.clear()
        self._groups.clear()
        self._known.clear()


def add_in_place(total: Tensor, part: Tensor) -> None:
    """``total += part``.

    In a rehearsal it only checks that shapes and dtypes are equal: torch's own addition would take
    a tenth of a millisecond, some ten thousand times.
    """
    if total.is_meta and total.shape == part.shape and total.dtype == part.dtype:
        return
    total += part


def slice_counts(num_elements: int, parts: Sequence[float]) -> list[int]:
    """Elements of each slice of a flat tensor, in proportion to ``parts``.

    >>> slice_counts(10, (0.5, 0.3, 0.2)), slice_counts(3, (0.0, 1.0))
    ([5, 3, 2], [0, 3])
    """
    ends = [round(num_elements * total) for total in accumulate(parts)]
    ends[-1] = num_elements
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def group_limit() -> timedelta:
    """How long a rank waits for the others in the process group of all ranks."""
    # torch has no public function for it.
    everybody = dist.distributed_c10d._get_default_group()
    limit: timedelta = everybody._get_backend(everybody._device_types[0]).options._timeout
    return limit


def open_group(
    devices: Sequence[int] | None = None,
    backend: str | None = None,
    limit: timedelta | None = None,
) -> dist.ProcessGroup:
    """Make a process group; every rank calls it.

    Args:
        devices: Its ranks; by default all.
        backend: Its backend; by default that of all ranks.
        limit: How long a rank waits in it for the others, by default as in the group of all ranks.
            torch's own default is half an hour (NCCL: ten minutes), whatever the job's limit is.
    """
    ranks = None if devices is None else list(devices)
    limit = limit or group_limit()
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=limit, backend=backend)
    return group


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Gather a text from every rank, as UTF-8 bytes; objects would have to be pickled.

    Args:
        text: This rank's text.
        group: A group of all ranks; by default their first.
    """
    mine = text.encode()
    sizes = from_every_rank(torch.tensor([len(mine)]), group)
    longest = max(int(size) for size in sizes)
    if longest == 0:
        return [""] * len(sizes)
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    received = from_every_rank(padded, group)
    return [
        each[: int(size)].numpy().tobytes().decode()
        for each, size in zip(received, sizes, strict=True)
    ]
