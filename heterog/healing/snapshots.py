"""A rank writes its part of each snapshot between two steps, and copies it to other hosts.

Ranks copy files from host to host by themselves, beside training. So nobody else has to know of
snapshots, and nobody has to listen on a port.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from heterog.errors import InputFileError
from heterog.healing.elastic import any_rank, gather, set_silence
from heterog.healing.shelf import INDEX, NEVER, LostError, Moment, Part, Shelf
from heterog.runtime.accelerators import CPU_BACKEND
from heterog.runtime.checkpoint.boxes import Entry
from heterog.runtime.checkpoint.contents import SavedOptimizer
from heterog.runtime.step.collectives import group_limit, open_group

_REST = 10.0
"""Seconds of training between snapshots for each second that one takes, for which ranks wait."""
SLOW_BYTES_PER_S = 3e6
"""As slowly as this may files be carried, one after another: ranks that stand still are noticed
where they train."""
_PIECE_BYTES = 1 << 24
"""A file is carried in pieces of this size, so that no host needs memory for all of it."""
_Way: TypeAlias = tuple[str, int, int]
"""A file, the rank that sends it, and the one that receives it: the first of its host."""
_NOTHING = torch.empty(0)
"""What is in an empty file."""


class SnapshotWriter:
    """Writes this rank's parts of snapshots; all ranks call all methods, in the same order.

    Args:
        shelf: The parts of this host.
        generation: Number of times the job's ranks were started before.
        part: Number of this rank's part, and the number of parts of a snapshot.
        host_of: Number of each rank's host; nothing is copied on a single one.
        redundancy: Number of further hosts that hold each part, if there are so many.
        say: Called with why there was no last snapshot here, unless there was none before, too.

    Attributes:
        newest: The last snapshot begun.
        settled: The last one of which all hosts are known to have what they should; older parts
            are deleted.
        num_bytes: Its size.
        copy_s: Seconds that it took.
        failed: Why the last part could not be written here, or one of another host, which should
            be here, too; empty if both were.
        further: Names of files of this rank that go to other hosts with its next part.
    """

    def __init__(
        self,
        shelf: Shelf,
        generation: int,
        part: tuple[int, int],
        host_of: Sequence[int] = (0,),
        redundancy: int = 0,
        say: Callable[[str], object] = lambda why: None,
    ) -> None:
        self.newest: Moment | None = None
        self.settled: Moment | None = None
        self.num_bytes = 0
        self.copy_s = 0.0
        self.failed = ""
        self.further: list[str] = []
        self._shelf, self._generation, self._part = shelf, generation, part
        self._host_of, hosts = tuple(host_of), sorted(set(host_of))
        self._group: dist.ProcessGroup | None = None
        self._first = {host: self._host_of.index(host) for host in hosts}
        # Which ranks hold what a host has, too: those of the hosts after it.
        firsts = list(self._first.values())
        self._after = {
            host: [*firsts[place + 1 :], *firsts[:place]][:redundancy]
            for place, host in enumerate(hosts)
        }
        self._say, self._was_failed = say, False
        self._rested_s = 0.0
        self._copying: threading.Thread | None = None
        self._lost: Exception | None = None
        self._has_failed = False  # the newest, on any rank
        if len(hosts) > 1:
            # Files are copied from and to memory of the host, whatever the ranks compute on. A
            # rank waits as long as now for one that still writes or reads its part: in steps
            # ranks soon wait less.
            self._group = open_group(backend=CPU_BACKEND)
            self._limit_s = group_limit().total_seconds()

    @property
    def is_copying(self) -> bool:
        """Whether parts are on their way.

        Raises:
            RuntimeError: the connection to another host is lost.
            Exception: what else has ended the thread that copies.
        """
        if self._lost is not None:
            raise self._lost
        return self._copying is not None and self._copying.is_alive()

    def end_step(self, *values: bool) -> list[bool]:
        """Settle the newest snapshot if no rank has failed to write its part.

        Args:
            values: What else ranks have to agree about.

        Returns:
            Whether the next snapshot is due: parts have arrived, and ranks have trained since.
            And which of the values any rank has.
        """
        is_copying, is_resting, self._has_failed, *said = any_rank(
            self.is_copying, time.monotonic() < self._rested_s, bool(self.failed), *values
        )
        if not (is_copying or self._has_failed):
            self.settled = self.newest or self.settled
        return [not (is_copying or is_resting), *said]

    def take(
        self,
        step_number: int,
        entries: Sequence[Entry],
        states: Mapping[str, SavedOptimizer],
        about: Mapping[str, Any],
    ) -> None:
        """Write this rank's part of a snapshot, and begin to copy it to other hosts."""
        self.wait()
        if self.failed and not self._was_failed:
            self._say(self.failed)
        self._was_failed = bool(self.failed)
        begin_s, failed = time.monotonic(), self.newest if self._has_failed else None
        self.newest = Moment(self._generation, step_number, self._part[1])
        part, self.failed = Part(self.newest, self._part[0]), ""
        try:
            self._shelf.forget_before(self.settled or NEVER, failed)
            self.num_bytes = self._shelf.put(part, entries, states, about)
        # OSError: what is there cannot be deleted; the last two: JSON cannot say the state.
        except (InputFileError, OSError, TypeError, ValueError) as error:
            self.failed = str(error)
        if any(self._after.values()):
            names, self.further = [*part.files, *self.further], []
            self._copying = threading.Thread(target=self._copy, args=(names,), daemon=True)
            self._copying.start()
        now_s = time.monotonic()
        self.copy_s = now_s - begin_s
        self._rested_s = now_s + _REST * self.copy_s

    def wait(self) -> None:
        """Wait until other hosts hold the last part, if they should, or another host is lost."""
        if self._copying is not None:
            self._copying.join()

    def bring(self, names: Iterable[str]) -> None:
        """Bring files that ranks want to their hosts.

        Args:
            names: Names of the files that this rank wants.

        Raises:
            LostError: no host has one of them; all ranks raise it.
            InputFileError: there is no room left on this host.
            OSError: a file of this host cannot be read.
        """
        if self._group is None:
            return
        here = [path.name for path in self._shelf.folder.iterdir()], sorted(names)
        told = gather(here, self._group)
        sources: dict[str, int] = {}
        wanted: dict[int, set[str]] = {host: set() for host in self._first}
        for rank, (held, wants) in reversed(list(enumerate(told))):
            sources |= dict.fromkeys(held, rank)
            wanted[self._host_of[rank]] |= set(wants)
        if missing := sorted(set().union(*wanted.values()).difference(sources)):
            raise LostError(f"{missing[0]} of a snapshot is on no host that has ranks.")
        ways = [
            (name, sources[name], first)
            for host, first in self._first.items()
            for name in sorted(wanted[host].difference(told[first][0]))
        ]
        rank = dist.get_rank()
        self._carry([name for name, source, _ in ways if source == rank], lambda said: ways)

    # --- parts -----------------------------------------------------------------------------------

    def _copies(self, said: Sequence[Mapping[str, int]]) -> list[_Way]:
        """Where files go: each to a first host before any goes to a second, small files first.

        So a host that is lost meanwhile takes few files with it that no other has. Indices go
        first: a host that has a file has its index.
        """
        ways = [
            (copy, not name.endswith(INDEX), said[source][name], (name, source, target))
            for source, host in enumerate(self._host_of)
            for copy, target in enumerate(self._after[host])
            for name in said[source]
        ]
        return [way for _, _, _, way in sorted(ways)]

    def _copy(self, names: Sequence[str]) -> None:
        try:
            self._carry(names, self._copies)
        except (InputFileError, OSError) as error:
            self.failed = str(error)
        except Exception as error:  # a thread's would only be printed
            self._lost = error

    def _carry(
        self, names: Iterable[str], ways: Callable[[list[dict[str, int]]], list[_Way]]
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
        rank, own = dist.get_rank(), dict[str, Tensor]()
        for name in names:
            try:
                content = self._shelf.content(name)
                own[name] = torch.frombuffer(content, dtype=torch.uint8) if content else _NOTHING
            except LostError:
                pass  # it could not be written
            except OSError as error:
                failed = error
        said = gather({name: len(value) for name, value in own.items()}, self._group)
        going = [(*way, said[way[1]].get(way[0])) for way in ways(said)]
        num_bytes = sum(size or 0 for *_, size in going)
        set_silence(self._limit_s + num_bytes / SLOW_BYTES_PER_S, [self._group])
        for name, source, target, size in going:
            if source == rank and size:
                for piece in torch.split(own[name], _PIECE_BYTES):
                    dist.send(piece, target, group=self._group)
            elif target == rank and size is not None:
                pieces = self._received(size, source)
                try:
                    self._shelf.bring(name, size, pieces)
                except InputFileError as error:
                    failed = error
                    deque(pieces, 0)  # who sends them has more to send
        dist.barrier(self._group)  # who carries nothing waits here, however long it takes
        if failed is not None:
            raise failed

    def _received(self, size: int, source: int) -> Iterator[memoryview]:
        """The pieces of a file that another rank sends."""
        for begin in range(0, size, _PIECE_BYTES):
            piece = torch.empty(min(size - begin, _PIECE_BYTES), dtype=torch.uint8)
            dist.recv(piece, source, group=self._group)
            yield piece.numpy().data
