"""Ranks copy parts of snapshots from host to host by themselves, beside training.

So nobody else has to know of snapshots, and nobody has to listen on a port.
"""

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from heterog.errors import InputFileError
from heterog.healing.elastic import set_silence
from heterog.healing.shelf import LostError, Part, Shelf
from heterog.runtime.accelerators import CPU_BACKEND
from heterog.runtime.step.collectives import gather_texts, open_group

_SLOW_BYTES_PER_S = 1e7
"""As slowly as a hundred megabits a second may files be carried, one after another."""
_NOTHING = torch.empty(0)
"""What is in an empty file."""


class _Way(NamedTuple):
    """A file, the rank that sends it, and the one that receives it: the first of its host."""

    name: str
    source: int
    target: int


class RankCarrier:
    """Copies parts between hosts; all ranks call all methods, in the same order.

    Args:
        shelf: The parts of this host.
        host_of: Number of each rank's host.
        redundancy: Number of further hosts that hold each part, if there are so many.
        silent_s: Seconds after which a rank gives up on the others, beside the time for files.

    Attributes:
        further: Names of files of this rank that go with its next part.
        failed: Why the last part is not on this host, which should hold it; empty if it is.
    """

    def __init__(
        self, shelf: Shelf, host_of: Sequence[int], redundancy: int, silent_s: float
    ) -> None:
        self._shelf, self._host_of = shelf, tuple(host_of)
        self._rank, hosts = dist.get_rank(), sorted(set(host_of))
        self._first = {host: self._host_of.index(host) for host in hosts}
        # Which ranks hold what a host has, too: those of the hosts after it.
        firsts = list(self._first.values())
        self._after = {
            host: [*firsts[place + 1 :], *firsts[:place]][:redundancy]
            for place, host in enumerate(hosts)
        }
        # Files are copied from and to memory of the host, whatever the ranks compute on.
        self._group = open_group(backend=CPU_BACKEND)
        self._silent_s = silent_s
        self._copying: threading.Thread | None = None
        self._lost: Exception | None = None
        self.further: list[str] = []
        self.failed = ""

    def copy(self, part: Part) -> None:
        """Begin to copy the part that each rank has just written to the hosts after its own."""
        names, self.further = [*part.files, *self.further], []
        self.wait()
        self._copying = threading.Thread(target=self._copy, args=(names,), daemon=True)
        self._copying.start()

    @property
    def is_busy(self) -> bool:
        """Whether parts are on their way.

        Raises:
            RuntimeError: the connection to another host is lost.
            Exception: what else has ended the thread that copies.
        """
        if self._lost is not None:
            raise self._lost
        return self._copying is not None and self._copying.is_alive()

    def wait(self) -> None:
        """Wait until they have arrived, or another host is lost."""
        if self._copying is not None:
            self._copying.join()

    def _copy(self, names: Sequence[str]) -> None:
        try:
            self._carry(
                names,
                lambda said: [
                    _Way(name, source, target)
                    for source, host in enumerate(self._host_of)
                    for target in self._after[host]
                    for name in said[source]
                ],
            )
            self.failed = ""
        except (InputFileError, OSError) as error:
            self.failed = str(error)
        except Exception as error:  # a thread's would only be printed
            self._lost = error

    def bring(self, names: Iterable[str]) -> None:
        """Bring files that ranks want to their hosts.

        Args:
            names: Names of the files that this rank wants.

        Raises:
            LostError: no host has one of them; all ranks raise it.
            InputFileError: there is no room left on this host.
            OSError: a file of this host cannot be read.
        """
        here = [path.name for path in self._shelf.folder.iterdir()], sorted(names)
        told = [json.loads(each) for each in gather_texts(json.dumps(here), self._group)]
        sources: dict[str, int] = {}
        wanted: dict[int, set[str]] = {host: set() for host in self._first}
        for rank, (held, wants) in reversed(list(enumerate(told))):
            sources |= dict.fromkeys(held, rank)
            wanted[self._host_of[rank]] |= set(wants)
        if missing := sorted(set().union(*wanted.values()).difference(sources)):
            raise LostError(f"{missing[0]} of a snapshot is on no host that has ranks.")
        ways = [
            _Way(name, sources[name], first)
            for host, first in self._first.items()
            for name in sorted(wanted[host].difference(told[first][0]))
        ]
        self._carry([way.name for way in ways if way.source == self._rank], lambda said: ways)

    def _carry(
        self, names: Iterable[str], ways: Callable[[list[dict[str, int]]], Sequence[_Way]]
    ) -> None:
        """Send files one after another; those of different ranks do not wait for each other.

        Args:
            names: Names of the files that this rank offers.
            ways: Where files go, by the sizes of those that each rank really has.

        Raises:
            InputFileError: a file could not be written here; all others have been carried.
            OSError: one could not be read here; all others have been carried.
        """
        failed: InputFileError | OSError | None = None  # others go on, and are heard to the end
        own: dict[str, Tensor] = {}
        for name in names:
            try:
                content = self._shelf.content(name)
                own[name] = torch.frombuffer(content, dtype=torch.uint8) if content else _NOTHING
            except LostError:
                pass  # it could not be written
            except OSError as error:
                failed = error
        told = {name: len(value) for name, value in own.items()}
        said = [json.loads(text) for text in gather_texts(json.dumps(told), self._group)]
        going = [(way, said[way.source].get(way.name)) for way in ways(said)]
        num_bytes = sum(size or 0 for _, size in going)
        set_silence(self._silent_s + num_bytes / _SLOW_BYTES_PER_S, [self._group])
        for (name, source, target), size in going:
            if source == self._rank and size:
                dist.send(own[name], target, group=self._group)
            elif target == self._rank and size is not None:
                value = torch.empty(size, dtype=torch.uint8)
                if size:
                    dist.recv(value, source, group=self._group)
                try:
                    self._shelf.bring(name, value.numpy().data)
                except (InputFileError, OSError) as error:
                    failed = error
        dist.barrier(self._group)  # who carries nothing waits here, however long it takes
        if failed is not None:
            raise failed
