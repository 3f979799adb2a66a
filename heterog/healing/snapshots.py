"""Snapshots of a job's state: ranks write them between two steps, and read them when they begin.

A rank writes what a checkpoint would hold of it: the boxes of parameters, of the optimizer's state
and of buffers that it owns. Every element is owned by one rank, so a snapshot has the size of the
state, not of its replicas, and ranks of any plan can read it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heterog import __version__
from heterog.healing.carrying import RankCarrier
from heterog.healing.shelf import Moment, Part, Shelf, parts_of
from heterog.runtime.checkpoint.boxes import Entry, check_tiling
from heterog.runtime.checkpoint.contents import (
    Contents,
    SavedOptimizer,
    SavedTensor,
    states_from_json,
    tensors_from_json,
)

_REST = 10.0
"""Seconds of training between snapshots for each second that one takes, for which ranks wait."""


class SnapshotWriter:
    """Writes this rank's parts of snapshots.

    Args:
        shelf: Where they are put.
        number: Number of this rank's part.
        num_parts: Number of parts of a snapshot.
        generation: Number of times the job's ranks were started before.
        carrier: Copies the part of each rank to other hosts, if there are some.

    Attributes:
        newest: The last snapshot begun.
        settled: The last one that is known to be complete; older parts are deleted.
        num_bytes: Its size.
        copy_s: Seconds that it took.
    """

    def __init__(
        self,
        shelf: Shelf,
        number: int,
        num_parts: int,
        generation: int,
        carrier: RankCarrier | None = None,
    ) -> None:
        self.newest: Moment | None = None
        self.settled: Moment | None = None
        self.num_bytes = 0
        self.copy_s = 0.0
        self._shelf, self._number, self._num_parts = shelf, number, num_parts
        self._generation, self._carrier = generation, carrier
        self._failed, self._rested_s = "", 0.0

    @property
    def is_busy(self) -> bool:
        """Whether it is too early for the next one.

        Raises:
            RuntimeError: the connection to another host is lost.
            Exception: see ``RankCarrier``.
        """
        is_carried = self._carrier is not None and self._carrier.is_busy
        return is_carried or time.monotonic() < self._rested_s

    @property
    def failed(self) -> str:
        """Why the last part could not be written here or elsewhere; empty if it was."""
        return self._failed or (self._carrier.failed if self._carrier is not None else "")

    def take(
        self,
        step_number: int,
        entries: Sequence[Entry],
        states: Mapping[str, SavedOptimizer],
        about: Mapping[str, Any],
    ) -> None:
        """Write this rank's part of a snapshot."""
        begin_s = time.monotonic()
        self.newest = Moment(self._generation, step_number, self._num_parts)
        part = Part(self.newest, self._number)
        try:
            if self.settled is not None:
                self._shelf.forget_before(self.settled)
            self.num_bytes = self._shelf.put(part, entries, states, about)
            self._failed = ""
        except OSError as error:
            self._failed = f"{error.strerror or error} in {self._shelf.folder}"
        if self._carrier is not None:
            self._carrier.copy(part)
        now_s = time.monotonic()
        self.copy_s = now_s - begin_s
        self._rested_s = now_s + _REST * self.copy_s

    def settle(self) -> None:
        """Note that the newest snapshot is complete: no rank has failed to write its part."""
        self.settled = self.newest or self.settled

    def wait(self) -> None:
        """Wait until other hosts hold the last part, if they should."""
        if self._carrier is not None:
            self._carrier.wait()


class Snapshot:
    """A complete snapshot to read; what is on this host stays readable although it is deleted.

    Args:
        shelf: Where its parts are; those that are read may come later than their indices.
        moment: Which.

    Attributes:
        moment: Which.
        contents: Index of the snapshot, in the form of a checkpoint's.
        num_bytes: Bytes read so far.
        far_bytes: Bytes of those in parts that came from other hosts.

    Raises:
        LostError: a part is not there.
        ValueError: the parts of a tensor do not cover all of it.
    """

    def __init__(self, shelf: Shelf, moment: Moment) -> None:
        self._shelf, self.moment = shelf, moment
        here = set(shelf.parts())
        self._near = {part.number for part in here if part.moment == moment}
        self._content: dict[int, Any] = {}
        for number in self._near:
            self._open(number)
        self.num_bytes = self.far_bytes = 0
        indices = [bytes(shelf.content(part.files[0])) for part in parts_of(moment)]
        self.contents = _contents(list(map(json.loads, indices)))

    def read(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Read tensors, or boxes of tensors, by the name under which they were written."""
        return {name: self._tensor(self.contents.tensors[name]) for name in names}

    def _tensor(self, saved: SavedTensor) -> Tensor:
        number = part_of(saved)
        self.num_bytes += saved.num_bytes
        self.far_bytes += saved.num_bytes * (number not in self._near)
        dtype: torch.dtype = getattr(torch, saved.dtype)
        if not saved.num_bytes:
            return torch.empty(saved.shape, dtype=dtype)
        count = saved.num_bytes // dtype.itemsize
        flat = torch.frombuffer(self._open(number), dtype=dtype, count=count, offset=saved.offset)
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
            [piece.box for name in names for piece in contents.tensors[name].pieces],
        )
    return contents
