"""Loading a snapshot into a deployed step of any plan."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heterog import __version__
from heterog.healing.shelf import INDEX, Moment, Shelf, parts_of
from heterog.runtime.checkpoint.boxes import check_tiling
from heterog.runtime.checkpoint.contents import (
    Contents,
    SavedTensor,
    states_from_json,
    tensors_from_json,
)


class Snapshot:
    """A complete snapshot; what is on this host stays readable although it is let go.

    Args:
        shelf: Where it is, or where whoever carries parts brings it.
        moment: Which.

    Attributes:
        moment: Which.
        contents: Index of the snapshot, in the form of a checkpoint's.
        num_bytes: Bytes read so far.
        far_bytes: Bytes of those in parts that came from other hosts.

    Raises:
        LostError: a part is nowhere.
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
        names = [part.name for part in parts_of(moment)]
        for name in names:
            shelf.wait_for(f"{name}{INDEX}")
        self.contents = _contents([json.loads(shelf.index(name)) for name in names])

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
            self._shelf.wait_for(name)
            self._content[number] = self._shelf.content(name)
        return self._content[number]


def part_of(saved: SavedTensor) -> int:
    """The number of the part that holds a tensor; the index stores it as the file name."""
    return int(saved.file.split("_")[2])


def _contents(indices: Sequence[Mapping[str, Any]]) -> Contents:
    """Merge the indices of all parts into one like a checkpoint's."""
    first = indices[0]
    tensors: dict[str, SavedTensor] = {}
    for index in indices:
        tensors |= tensors_from_json(index["tensors"])
    contents = Contents(
        heterog=__version__,
        torch=torch.__version__,
        model=str(first["model"]),
        graph=str(first["graph"]),
        optimizer=str(first["optimizer"]),
        num_steps=int(first["num_steps"]),
        data="",
        tensors=tensors,
        states={
            name: state
            for index in indices
            for name, state in states_from_json(index["states"]).items()
        },
        extra=dict(first.get("extra", {})),
    )
    for whole, names in contents.parts.items():
        check_tiling(
            whole,
            contents.shape(whole),
            [piece.box for name in names for piece in contents.tensors[name].pieces],
        )
    return contents
