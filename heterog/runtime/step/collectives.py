"""Communication between ranks: process groups per device set, asynchronous, waited for once.

Ranks issue communication in the plan's order, so they cannot deadlock. The code avoids what gloo
gets wrong: a second wait for a point-to-point work hangs, blocking sends rendezvous, list
collectives with uneven shapes fail (uneven slices travel as sends and receives), and coalescing
silently drops later work.

Slices are summed and gathered in two levels (``routes``), inside hosts and between them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from heterog.grouped import grouped
from heterog.runtime.accelerators import beside, from_every_rank, is_accelerated
from heterog.runtime.step.recorder import Recorder
from heterog.runtime.step.routes import Message, Route, route_of
from heterog.runtime.step.under_way import InTurn, Phase, Sending, Start, Works

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
        host_of: Host of each rank; by default all are on one.

    Attributes:
        recorder: Recorder notified of each wait, if set.
    """

    def __init__(
        self, rank: int, device_sets: Iterable[tuple[int, ...]], host_of: Sequence[int] = ()
    ) -> None:
        self.rank = rank
        self._host_of = host_of
        self.recorder: Recorder | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._num_exchanges: Counter[tuple[int, ...]] = Counter()
        self._known: set[tuple[int, ...]] = set()
        self.open(device_sets)
        self._sending: dict[int, Sending] = {}  # by destination
        self._sent: dict[int, tuple[Sending, int]] = {}  # by tag
        self._passing: list[InTurn] = []  # exchanges in which this rank sends what it receives
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

        The slices may be uneven, and nothing is padded (gloo's own reduce-scatter is an
        all-reduce).
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
        slices = torch.split(tensor, list(counts))
        work = self._gather(slices, devices, counts, devices)
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
        index = devices.index(self.rank)
        # On the meta device twice as fast as ``new_empty``.
        room = partial(torch.empty, dtype=like.dtype, device=like.device)
        route = self._route(devices, counts, senders)
        slices: Sequence[Tensor] = () if tensor is None else torch.split(tensor, list(counts))
        own = None if tensor is None else slices[index]
        taken = [(each, room(each.end - each.begin)) for each in route.taken]
        parts_of = grouped((each.owner, part) for each, part in taken)
        rooms = {self._host(devices[each.peer]): room(counts[index]) for each in route.got}
        received = [*parts_of.get(index, ()), *rooms.values()]
        passed = [
            (owner, [*parts_of.get(owner, ()), slices[owner][begin:end]])
            for _, owner, begin, end in route.passed
        ]

        def add_up() -> None:
            for _, (total, *parts) in passed:
                for part in parts:
                    add_in_place(total, part)

        def finish() -> Tensor:
            if not received and before is None and own is None:
                return like.new_zeros(counts[index])  # only other slice groups have a gradient
            total = _added_up(received, own, before, in_place=in_place)
            if not in_place:
                works.wait_for_sends()
            return total

        inside = Phase(
            [(relay, slices[owner][begin:end]) for relay, owner, begin, end in route.given],
            [(each.peer, part) for each, part in taken],
        )
        between = Phase(
            [(owner, total) for owner, (total, *_) in passed],
            [(m.peer, rooms[self._host(devices[m.peer])][m.begin : m.end]) for m in route.got],
        )
        works = self._exchange(devices, inside, between, add_up=add_up)
        return self._pending(works, finish)

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
        self._let_go_passed()  # before memory is taken
        index = devices.index(self.rank)
        if self.rank not in receivers:
            self._gather({index: own}, devices, counts, receivers)
            return None
        whole = own.new_empty(sum(counts))
        slices = list(torch.split(whole, list(counts)))
        slices[index].copy_(own)
        slices[index] = own  # a send that is held does not hold all
        work = self._gather(slices, devices, counts, receivers)
        return self._pending(work, lambda: whole)

    def all_gather(
        self,
        part: Tensor,
        devices: tuple[int, ...],
        counts: Sequence[int],
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Pending:
        """Collect flat parts of uneven sizes from all devices and combine them."""
        own = devices.index(self.rank)
        parts = [
            part.contiguous() if index == own else part.new_empty(count)
            for index, count in enumerate(counts)
        ]
        return self._pending(self._gather(parts, devices, counts, devices), lambda: combine(parts))

    def _gather(
        self,
        slices: Sequence[Tensor] | Mapping[int, Tensor],
        devices: tuple[int, ...],
        counts: Sequence[int],
        receivers: Sequence[int],
    ) -> "Works":
        """Send this rank's slice, and receive the others if the rank is one of ``receivers``.

        Args:
            slices: Slices by position, to be received but for this rank's own; without the others
                if the rank receives none.
            devices: Their owners.
            counts: Number of elements of each.
            receivers: Devices that get all.
        """
        route = self._route(devices, counts, receivers)

        def messages(found: Iterable[Message]) -> list[tuple[int, Tensor]]:
            return [(each.peer, slices[each.owner][each.begin : each.end]) for each in found]

        return self._exchange(
            devices,
            Phase(messages(route.got), messages(route.passed)),
            Phase(messages(route.taken), messages(route.given)),
        )

    def _route(
        self, devices: tuple[int, ...], counts: Sequence[int], members: Iterable[int]
    ) -> Route:
        self._let_go_passed()
        places = tuple(sorted({devices.index(each) for each in members}))
        hosts = tuple(map(self._host, devices))
        return route_of(devices.index(self.rank), hosts, tuple(counts), places)

    def _let_go_passed(self) -> None:
        """Drop tensors that have been passed on, in the thread that made them."""
        self._passing = [each for each in self._passing if each.is_under_way()]

    def _host(self, device: int) -> int:
        return self._host_of[device] if self._host_of else 0

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
        others = [index for index in range(len(devices)) if index != own]
        phase = Phase(
            *([(o, each[o]) for o in others if each[o].numel()] for each in (pieces, parts))
        )
        return self._pending(self._exchange(devices, phase), lambda: combine(parts))

    def _exchange(
        self,
        devices: tuple[int, ...],
        *phases: Phase,
        add_up: Callable[[], None] = lambda: None,
    ) -> "Works":
        """Send to other devices and receive from them, in one phase or in two.

        It does not use all-to-all: gloo's posts the sends first, so its handshakes wait behind
        data on the same connection, and the two directions of a link take turns.

        Args:
            devices: The device set.
            phases: Messages; the second phase sends what is received in the first.
            add_up: Called between the phases.
        """
        phases = tuple(each for each in phases if any(each))
        tensors = [tensor for phase in phases for each in phase for _, tensor in each]
        if tensors and is_accelerated(tensors[0]):
            return self._batches(devices, phases, add_up)
        # Every exchange has a tag of its own, because receives that wait for their turn may begin
        # after receives of the next exchange.
        where = devices, _FIRST_TAG + self._num_exchanges[devices] % _NUM_TAGS
        self._num_exchanges[devices] += 1
        turns = [self._turns(each, *where) for each in phases]
        works: list[Any] = []
        if len(turns) > 1 and turns[0] and phases[1].sent and not tensors[0].is_meta:
            sent: list[tuple[dist.Work, Tensor]] = []

            def pass_on() -> list[Any]:
                with torch.no_grad():  # each thread has a setting of its own
                    add_up()
                sent.extend((work, tensor) for work, tensor, _ in self._sends(phases[1], *where))
                return []

            works = [InTurn([*turns[0], pass_on, *turns[1]], sent)]
            self._passing += works
            now = phases[:1]
        else:
            add_up()
            for each in turns:
                works += [InTurn(each)] if len(each) > 1 else each[0]() if each else []
            now = phases
        kept = [self._keep(*send) for phase in now for send in self._sends(phase, *where)]
        return Works([work for work in works if work is not None], kept)

    def _turns(self, phase: Phase, devices: tuple[int, ...], tag: int) -> list[Start]:
        """Starts of a phase's receives: one per other rank, or one of all together."""
        group, own = self._groups[devices], devices.index(self.rank)

        def start(messages: Sequence[tuple[int, Tensor]]) -> list[Any]:
            return [
                self._start_receive(tensor, devices[peer], group, tag) for peer, tensor in messages
            ]

        ordered = sorted(phase.received, key=lambda each: (own - each[0]) % len(devices))
        by_peer = grouped((peer, (peer, tensor)) for peer, tensor in ordered)
        if len(by_peer) > 1 and not ordered[0][1].is_meta and phase.is_large():
            return [partial(start, each) for each in by_peer.values()]
        return [partial(start, ordered)] if ordered else []

    def _sends(
        self, phase: Phase, devices: tuple[int, ...], tag: int
    ) -> Iterator[tuple[Any, Tensor, int]]:
        """Start a phase's sends, each with its tensor and destination."""
        group, own = self._groups[devices], devices.index(self.rank)
        for peer, part in sorted(phase.sent, key=lambda each: (each[0] - own) % len(devices)):
            tensor, dst = part.contiguous(), devices[peer]
            yield self._start_send(tensor, dst, group, tag), tensor, dst

    def _batches(
        self, devices: tuple[int, ...], phases: Sequence[Phase], add_up: Callable[[], None]
    ) -> "Works":
        """Exchange between accelerators; see ``_exchange``."""
        group, works = self._groups[devices], list[dist.Work]()
        for phase in phases:
            operations = [
                dist.P2POp(start, tensor.contiguous(), devices[peer], group)
                for start, each in ((dist.irecv, phase.received), (dist.isend, phase.sent))
                for peer, tensor in each
            ]
            if not works:
                works = dist.batch_isend_irecv(operations)
                continue
            # What this rank computes meanwhile does not wait for the first phase.
            with beside(operations[0].tensor.device):
                for work in works:
                    work.wait()
                add_up()
                works = dist.batch_isend_irecv(operations)
        return Works(works)

    def _keep(self, work: dist.Work | None, tensor: Tensor, dst: int) -> tuple[Sending, int]:
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
        while self._passing:
            self._passing.pop().wait_for_sends()
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


def _added_up(
    received: Sequence[Tensor], own: Tensor | None, before: Pending | None, *, in_place: bool
) -> Tensor:
    """Add up parts: to ``before``, or in place of this rank's own one, or of one received."""
    parts = [*received] if own is None else [*received, own]
    if before is not None:
        total = before.wait()
    elif in_place and own is not None:
        total = parts.pop()
    else:
        total = parts.pop(0)
        total = total.clone() if total is own else total
    for part in parts:
        add_in_place(total, part)
    return total


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
