"""The snapshots of a job's state that a host has, where they outlive the ranks that write them.

A snapshot has a part of each rank, and a part is a file in a folder for temporary files: its
tensors one after another, beside a file that says where each of them is. It has its name when all
of it is there, so a rank that dies while it writes leaves what was there before. Who reads maps it
into memory first, so that it may be deleted meanwhile.

    3.120.1-4           part 1 of 4 of step 120 of generation 3
    3.120.1-4.index     where its tensors are
    3.120.1-4.begun     as much of it as is written

A part has what a checkpoint would hold of its rank: the boxes of parameters, of the optimizer's
state and of buffers that it owns. Every element is owned by one rank, so a snapshot has the size
of the state, not of its replicas, and ranks of any plan can read it.
"""

import errno
import json
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from heterog import __version__
from heterog.errors import HeterogError
from heterog.files import cannot_write, write_atomically
from heterog.runtime.checkpoint.boxes import Entry, check_tiling
from heterog.runtime.checkpoint.contents import (
    Contents,
    SavedOptimizer,
    SavedTensor,
    elements,
    states_from_json,
    tensors_from_json,
    to_json,
)

INDEX = ".index"
_FILE = "__{}_0.distcp"
"""What the index calls the file of a part, by its number, as a checkpoint does."""
_ALIGNMENT = 16
"""Bytes to which tensors are aligned in a part: a multiple of every element's size."""
_LEFT_BYTES = 1 << 20
"""What is left of a disk by snapshots: ranks write their journals there, too."""
_NAME = re.compile(r"(\d+)\.(\d+)\.(\d+)-(\d+)")


class LostError(HeterogError):
    """A part of a snapshot is not there any more."""


class Moment(NamedTuple):
    """A step of a generation and the number of parts of its snapshot; later ones are larger."""

    generation: int
    step: int
    num_parts: int


class Part(NamedTuple):
    """What the rank of a number held at a moment."""

    moment: Moment
    number: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return "{}.{}.{}-{}".format(*self.moment[:2], self.number, self.moment.num_parts)

    @property
    def files(self) -> tuple[str, str]:
        """Names of both of its files, that which says where its tensors are first."""
        return f"{self.name}{INDEX}", self.name


NEVER = Moment(-1, -1, 0)
ANEW = "no snapshot was complete yet: training begins anew"


def parts_of(moment: Moment) -> list[Part]:
    """All parts of a snapshot."""
    return [Part(moment, number) for number in range(moment.num_parts)]


def newest_complete(lists: Iterable[Iterable[Part]]) -> Moment | None:
    """The newest moment of which all parts are in some list; ``None`` if there is none.

    >>> def part(step, number):
    ...     return Part(Moment(0, step, 2), number)
    >>> newest_complete([[part(3, 0), part(4, 0)], [part(3, 1)]])
    Moment(generation=0, step=3, num_parts=2)
    """
    there = {part for parts in lists for part in parts}
    moments = {part.moment for part in there}
    return max((each for each in moments if there.issuperset(parts_of(each))), default=None)


def to_go_on_from(
    newest: Moment | None, checkpoint: str, *, was_kept: bool, say: Callable[[str], object]
) -> str:
    """The folder of the checkpoint with which training goes on; empty: the snapshot, or anew.

    Args:
        newest: The newest complete snapshot that is left.
        checkpoint: Folder of a checkpoint; empty if there is none.
        was_kept: Whether a snapshot was complete before, so that its steps would be lost.
        say: Called with one line unless training goes on with the snapshot.

    Raises:
        HeterogError: the state is lost.
    """
    if newest is not None:
        return ""
    if checkpoint:
        say(f"no complete snapshot is left: on from checkpoint {checkpoint}")
    elif was_kept:
        raise HeterogError(
            "the state is lost: no complete snapshot is left in memory, and no checkpoint was "
            "written. A larger redundancy survives more, and so do checkpoints beside training "
            "(`checkpoint`)."
        )
    else:
        say(ANEW)
    return checkpoint


class Shelf:
    """The parts that a host holds, as files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def parts(self) -> list[Part]:
        """All parts that are here."""
        return [part for part, suffix in self._files() if not suffix]

    def _files(self) -> Iterator[tuple[Part, str]]:
        """Files that are here: their part, and what their name has beyond the part's."""
        for name in os.listdir(self.folder):
            if match := _NAME.match(name):
                generation, step, number, num_parts = map(int, match.groups())
                yield Part(Moment(generation, step, num_parts), number), name[match.end() :]

    def put(
        self,
        part: Part,
        entries: Sequence[Entry],
        states: Mapping[str, SavedOptimizer],
        about: Mapping[str, Any],
    ) -> int:
        """Copy boxes of tensors into a part; returns its size in bytes.

        Args:
            part: Which.
            entries: The boxes.
            states: State of the optimizer, by parameter.
            about: Further entries of the index.

        Raises:
            InputFileError: for example, there is no room left.
        """
        size = sum(map(_aligned, (entry.value.nbytes for entry in entries)))
        saved: dict[str, SavedTensor] = {}
        with self._new(part.name, size) as file:
            for entry in entries:
                at = file.seek(_aligned(file.tell()))
                num_bytes = file.write(elements(entry.value))
                saved[entry.name] = SavedTensor.of(entry, _FILE.format(part.number), at, num_bytes)
            index = {"tensors": to_json(saved), "states": to_json(dict(states)), **about}
            write_atomically(self.folder / f"{part.name}{INDEX}", json.dumps(index).encode())
        return size

    def bring(self, name: str, size: int, pieces: Iterable[Any]) -> None:
        """Store a file of another host, whose bytes come in pieces.

        Raises:
            InputFileError: for example, there is no room left.
        """
        with self._new(name, size) as file:
            for piece in pieces:
                file.write(piece)

    def take(self, part: Part, files: Sequence[Any]) -> bool:
        """Store both files of a part that another host gives; whether it gave them."""
        for name, content in zip(part.files, files, strict=True):
            if content is None:
                return False
            self.bring(name, len(content), [content])
        return True

    @contextmanager
    def _new(self, name: str, size: int) -> Iterator[IO[bytes]]:
        """A file with room for so many bytes, which has its name when all is written."""
        begun = self.folder / f"{name}.begun"
        try:
            with begun.open("wb") as file:
                there = os.fstatvfs(file.fileno())
                if there.f_bavail * there.f_frsize < size + _LEFT_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if size and sys.platform == "linux":  # or others would find room, too
                    os.posix_fallocate(file.fileno(), 0, size)
                yield file
            begun.rename(self.folder / name)
        except OSError as error:
            raise cannot_write(self.folder, error, size) from error
        finally:
            with suppress(OSError):  # it has its name; or nothing can be changed there any more
                begun.unlink()

    def forget_before(self, moment: Moment, failed: Moment | None = None) -> None:
        """Delete older parts, and what is left of those whose rank died while it wrote them.

        Args:
            moment: What is older goes.
            failed: Whose parts go, too.
        """
        for part, suffix in self._files():
            if part.moment < moment or part.moment == failed:
                (self.folder / f"{part.name}{suffix}").unlink(missing_ok=True)

    def content(self, name: str) -> mmap.mmap | bytearray:
        """A file that is here, mapped into memory: it stays readable when it is deleted.

        Raises:
            LostError: it is not here any more.
        """
        try:
            with (self.folder / name).open("rb") as file:
                empty = not os.fstat(file.fileno()).st_size
                return (
                    bytearray() if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                )
        except FileNotFoundError as error:
            raise LostError(f"{name} of a snapshot was lost before it was read.") from error


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Snapshot:
    """A complete snapshot to read; what is on this host stays readable although it is deleted.

    Args:
        shelf: Where its parts are; those that are read may come later than their indices.
        moment: Which.

    Attributes:
        moment: Which.
        contents: Index of the snapshot, in the form of a checkpoint's.

    Raises:
        LostError: a part is not there.
        ValueError: the parts of a tensor do not cover all of it.
    """

    def __init__(self, shelf: Shelf, moment: Moment) -> None:
        self._shelf, self.moment = shelf, moment
        self._content: dict[int, Any] = {}
        for part in shelf.parts():
            if part.moment == moment:
                self._open(part.number)
        indices = [bytes(shelf.content(part.files[0])) for part in parts_of(moment)]
        self.contents = _contents(list(map(json.loads, indices)))

    def read(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Read tensors, or boxes of tensors, by the name under which they were written."""
        return {name: self._tensor(self.contents.tensors[name]) for name in names}

    def _tensor(self, saved: SavedTensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, saved.dtype)
        if not saved.num_bytes:
            return torch.empty(saved.shape, dtype=dtype)
        count = saved.num_bytes // dtype.itemsize
        content = self._open(part_of(saved))
        flat = torch.frombuffer(content, dtype=dtype, count=count, offset=saved.offset)
        return flat.view(saved.shape)

    def _open(self, number: int) -> Any:
        if number not in self._content:
            name = parts_of(self.moment)[number].name
            self._content[number] = self._shelf.content(name)
        return self._content[number]


def part_of(saved: SavedTensor) -> int:
    """The number of the part that holds a tensor; the index stores it as the file name."""
    return int(saved.file.split("_")[2])


def _contents(indices: Sequence[Mapping[str, Any]]) -> Contents:
    """Merge the indices of all parts into one like a checkpoint's."""
    tensors: dict[str, SavedTensor] = {}
    states: dict[str, SavedOptimizer] = {}
    for index in indices:
        tensors |= tensors_from_json(index["tensors"])
        states |= states_from_json(index["states"])
    contents = Contents(
        **{"extra": {}, **indices[0], "tensors": tensors, "states": states},
        heterog=__version__,
        torch=torch.__version__,
        data="",
    )
    for whole, names in contents.parts.items():
        check_tiling(
            whole,
            contents.shape(whole),
            [contents.tensors[name].box for name in names],
        )
    return contents
