"""Ranks copy parts of snapshots from host to host by themselves, where torchrun starts them.

Its agents know nothing of snapshots, and another process would have to listen on a port. Training
waits for these copies, as for the one on the rank's own host.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from heterog.errors import InputFileError
from heterog.healing.elastic import set_silence
from heterog.healing.shelf import INDEX, Moment, Part, Shelf, parts_of
from heterog.runtime.accelerators import CPU_BACKEND
from heterog.runtime.step.collectives import gather_texts, open_group

_SLOW_BYTES_PER_S = 1e7
"""As slowly as a hundred megabits a second may parts be carried, one after another."""


class _Way(NamedTuple):
    """A part, the rank that sends it, and the one that receives it: the first of its host."""

    part: Part
    source: int
    target: int


class RankCarrier:
    """Copies parts between hosts; all ranks call all methods, in the same order.

    Args:
        shelf: The parts of this host.
        host_of: Number of each rank's host.
        redundancy: Number of further hosts that hold each part, if there are so many.
        silent_s: Seconds after which a rank gives up on the others, beside the time for parts.
    """

    def __init__(
        self, shelf: Shelf, host_of: Sequence[int], redundancy: int, silent_s: float
    ) -> None:
        self._shelf, self._host_of = shelf, tuple(host_of)
        self._rank, hosts = dist.get_rank(), sorted(set(host_of))
        self._first = {host: self._host_of.index(host) for host in hosts}
        self._copies = min(redundancy, len(hosts) - 1)
        # Files are copied from and to memory of the host, whatever the ranks compute on.
        self._group = open_group(backend=CPU_BACKEND)
        self._silent_s = silent_s

    def copy(self, part: Part) -> None:
        """Copy the part that each rank has just written to the hosts after its own.

        Raises:
            InputFileError: there is no room left on this host.
        """
        hosts = list(self._first)
        self._carry(
            _Way(Part(part.moment, source), source, self._first[hosts[(at + step) % len(hosts)]])
            for source, host in enumerate(self._host_of)
            for at in [hosts.index(host)]
            for step in range(1, self._copies + 1)
        )

    def bring_indices(self, moment: Moment) -> None:
        """Bring the indices of all parts of a snapshot to every host."""
        here = {part.name: self._shelf.index(part.name) for part in self._own(moment)}
        every: dict[str, str] = {}
        for text in gather_texts(json.dumps(here)):
            every |= json.loads(text)
        if self._rank == self._first[self._host_of[self._rank]]:
            for name in every.keys() - here.keys():
                self._shelf.bring(f"{name}{INDEX}", every[name].encode())
        dist.barrier(self._group)

    def bring(self, moment: Moment, numbers: Iterable[int]) -> None:
        """Bring the parts of a snapshot that ranks want to their hosts.

        Args:
            moment: The snapshot, each of whose parts some host has.
            numbers: Numbers of the parts that this rank wants.

        Raises:
            InputFileError: there is no room left on this host.
        """
        held = [part.number for part in self._own(moment)]
        said = [json.loads(each) for each in gather_texts(json.dumps([held, sorted(numbers)]))]
        has: dict[int, set[int]] = {host: set() for host in self._first}
        wants: dict[int, set[int]] = {host: set() for host in self._first}
        for host, (there, wanted) in zip(self._host_of, said, strict=True):
            has[host] |= set(there)
            wants[host] |= set(wanted)
        sources = {
            number: rank
            for rank, (there, _) in reversed(list(enumerate(said)))
            for number in there
        }
        self._carry(
            _Way(Part(moment, number), sources[number], self._first[host])
            for host in self._first
            for number in sorted(wants[host] - has[host])
        )

    def _own(self, moment: Moment) -> list[Part]:
        """Parts of a snapshot that this host has, whole."""
        here = {part for part in self._shelf.parts() if part.moment == moment}
        return [part for part in parts_of(moment) if part in here]

    def _carry(self, ways: Iterable[_Way]) -> None:
        """Send parts one after another; those of different ranks do not wait for each other."""
        every = list(ways)
        own = {way.part: self._read(way.part) for way in every if way.source == self._rank}
        told = {part.name: [len(each) for each in pair] for part, pair in own.items() if pair}
        said = [json.loads(text) for text in gather_texts(json.dumps(told))]
        sizes: list[list[int]] = [said[way.source].get(way.part.name, []) for way in every]
        num_bytes = sum(map(sum, sizes))
        set_silence(self._silent_s + num_bytes / _SLOW_BYTES_PER_S, [self._group])
        failed: InputFileError | None = None
        for (part, source, target), lengths in zip(every, sizes, strict=True):
            if not lengths:  # it could not be written
                continue
            if source == self._rank:
                for each in own[part] or ():
                    self._send(each, target)
            elif target == self._rank:
                index, content = (self._receive(length, source) for length in lengths)
                try:
                    self._shelf.bring(f"{part.name}{INDEX}", index)
                    self._shelf.bring(part.name, content)
                except InputFileError as error:
                    failed = error  # the others go on, and have to be heard to the end
        dist.barrier(self._group)  # who carries nothing waits here, however long it takes
        if failed is not None:
            raise failed

    def _read(self, part: Part) -> tuple[Tensor, Tensor] | None:
        """Bytes of a part's index and of its tensors, if it is here."""
        try:
            index = bytearray(self._shelf.index(part.name).encode())
            content = self._shelf.content(part.name)
        except FileNotFoundError:
            return None
        return _bytes(index), _bytes(content)

    def _send(self, value: Tensor, target: int) -> None:
        if len(value):
            dist.send(value, target, group=self._group)

    def _receive(self, length: int, source: int) -> Any:
        value = torch.empty(length, dtype=torch.uint8)
        if length:
            dist.recv(value, source, group=self._group)
        return value.numpy().data


def _bytes(value: Any) -> Tensor:
    """The bytes of a buffer, shared with it.  # [num_bytes]"""
    return torch.frombuffer(value, dtype=torch.uint8) if len(value) else torch.empty(0)
