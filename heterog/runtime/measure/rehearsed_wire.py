"""Messages of a rehearsal: what ranks send, expect and reduce is compared instead of moved."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heterog.runtime.step.collectives import Communicator, Pending

_Key = tuple[int, int, tuple[int, ...] | None, int]
"""Source, destination, group and tag, by which gloo tells messages apart."""


class RehearsalError(Exception):
    """A failure that would happen between ranks; its text says what it is."""


class _Line:
    """Messages between two ranks that gloo would match with each other, in order of issue.

    Attributes:
        src: Rank that sends them.
        dst: Rank that receives them.
        sent: What was sent.
        expected: What receives were issued for.
    """

    __slots__ = ("dst", "expected", "sent", "src")

    def __init__(self, src: int, dst: int) -> None:
        self.src, self.dst = src, dst
        self.sent: list[_Parcel] = []
        self.expected: list[_Parcel] = []


class Wire:
    """Everything that ranks have sent, expected and reduced, in order of issue."""

    def __init__(self) -> None:
        self.lines: dict[_Key, _Line] = {}
        self.reduced: dict[tuple[int, ...], dict[int, list[_Parcel]]] = {}

    def line(self, src: int, dst: int, group: tuple[int, ...] | None, tag: int) -> _Line:
        """The line of a message, by all that tells messages apart."""
        key = src, dst, group, tag
        line = self.lines.get(key)
        if line is None:
            line = self.lines[key] = _Line(src, dst)
        return line

    def check_all_received(self) -> None:
        """Check that every message was received when a plan has been run.

        Raises:
            RehearsalError: a message is left.
        """
        for line in self.lines.values():
            sent, expected = len(line.sent), len(line.expected)
            if sent != expected:
                raise RehearsalError(
                    f"rank {line.src} sends {sent} messages to rank {line.dst}, which receives "
                    f"{expected} of them"
                )
        for group, by_rank in self.reduced.items():
            counts = {len(by_rank.get(rank, ())) for rank in group}
            if len(counts) > 1:
                raise RehearsalError(f"ranks {group} reduce unequally often")


class _Sent:
    """A send that is under way."""

    __slots__ = ("_line", "_number")

    def __init__(self, line: _Line, number: int) -> None:
        self._line, self._number = line, number

    def wait(self) -> None:
        """Check that the receiver has issued its receive."""
        line = self._line
        if len(line.expected) <= self._number:
            raise RehearsalError(f"rank {line.dst} has not begun to take what is sent to it")


class _Expected:
    """A receive that is under way."""

    __slots__ = ("_line", "_number")

    def __init__(self, line: _Line, number: int) -> None:
        self._line, self._number = line, number

    def wait(self) -> None:
        """Check that the sender has sent it, with the expected size and dtype."""
        line, number = self._line, self._number
        if len(line.sent) <= number:
            raise RehearsalError(f"rank {line.src} has not begun to send what is waited for")
        sent, wanted = line.sent[number], line.expected[number]
        if sent != wanted:
            raise RehearsalError(f"rank {line.src} sends {sent}, {wanted} are expected")


class _Reduced:
    """An all-reduce that is under way."""

    def __init__(self, wire: Wire, group: tuple[int, ...], rank: int, number: int) -> None:
        self._wire, self._group, self._rank, self._number = wire, group, rank, number

    def wait(self) -> None:
        """Check that all members have issued it, with the same size and dtype."""
        by_rank = self._wire.reduced[self._group]
        mine = by_rank[self._rank][self._number]
        for rank in self._group:
            theirs = by_rank.get(rank, [])
            if len(theirs) <= self._number:
                raise RehearsalError(f"rank {rank} has not begun to take part in an all-reduce")
            if theirs[self._number] != mine:
                raise RehearsalError(
                    f"rank {rank} reduces {theirs[self._number]}, rank {self._rank} {mine}"
                )


class RehearsedCommunicator(Communicator):
    """A communicator that compares messages instead of sending them."""

    def __init__(self, rank: int, sets: Iterable[tuple[int, ...]], wire: Wire, size: int) -> None:
        self._wire = wire
        self._everyone = tuple(range(size))
        super().__init__(rank, sets)

    def _open(self, devices: tuple[int, ...]) -> Any:
        return devices

    def _start_send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        line = self._wire.line(self.rank, dst, group, tag)
        line.sent.append(_Parcel(tensor.numel(), tensor.dtype))
        return _Sent(line, len(line.sent) - 1)

    def _start_receive(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        line = self._wire.line(src, self.rank, group, tag)
        line.expected.append(_Parcel(tensor.numel(), tensor.dtype))
        return _Expected(line, len(line.expected) - 1)

    def _start_all_reduce(self, tensor: Tensor, group: Any = None) -> Any:
        members = group or self._everyone
        parcels = self._wire.reduced.setdefault(members, {}).setdefault(self.rank, [])
        parcels.append(_Parcel(tensor.numel(), tensor.dtype))
        return _Reduced(self._wire, members, self.rank, len(parcels) - 1)

    def sum_over_all(self, tensor: Tensor) -> Pending:
        """Sum over all ranks.

        The norm of all gradients is waited for in the turn that issues it, before the next rank of
        the rehearsal has its turn, so whether all take part is checked at the end.
        """
        self._start_all_reduce(tensor)
        return Pending(None, lambda: tensor)

    def close(self) -> None:
        """Do nothing: there are no threads to end."""


class _Parcel(NamedTuple):
    """Size and dtype of a message."""

    num_elements: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.num_elements} elements of {str(self.dtype).removeprefix('torch.')}"
