"""Sending a rank's part of the state to keepers while the next step runs.

What is sent is what a checkpoint would hold of this rank: the boxes of parameters, of the
optimizer's state and of buffers that it owns. Every element is owned by one rank, so a snapshot
has the size of the state, not of its replicas; the redundancy says how many more keepers have it.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heterog.healing.keepers import Keeper
from heterog.healing.snapshots import Moment, Part
from heterog.healing.wire import WireError
from heterog.runtime.checkpoint.contents import (
    SavedOptimizer,
    SavedTensor,
    dtype_name,
    to_json,
)
from heterog.runtime.checkpoint.files import Entry
from heterog.runtime.checkpoint.state import own_entries
from heterog.runtime.deploy import DeployedStep

_ALIGNMENT = 16
"""Bytes to which tensors are aligned in a part: a multiple of every element's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Tensors copied into one buffer.

    Attributes:
        index: Position, shape and dtype of each tensor, as values that JSON can hold.
        content: The bytes.
    """

    index: dict[str, Any]
    content: memoryview


class Packing:
    """Copies tensors into one buffer, which is reused."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def pack(
        self,
        entries: Sequence[Entry],
        states: Mapping[str, SavedOptimizer],
        extra: Mapping[str, Any],
        part: int,
    ) -> Packed:
        """Copy boxes of tensors into the buffer.

        Args:
            entries: The boxes.
            states: State of the optimizer, by parameter.
            extra: Further entries of the index.
            part: Number of the part; the index names it as the file of the tensors.
        """
        begins, size = [], 0
        for entry in entries:
            begins.append(size)
            num_bytes = entry.value.numel() * entry.value.element_size()
            size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._buffer) != size:
            self._buffer = bytearray(size)
        saved = {}
        for entry, begin in zip(entries, begins, strict=True):
            saved[entry.name] = self._copy(entry, begin, part)
        index = {"tensors": to_json(saved), "states": to_json(dict(states)), **extra}
        return Packed(index=index, content=memoryview(self._buffer))

    def _copy(self, entry: Entry, begin: int, part: int) -> SavedTensor:
        value = entry.value.detach()
        num_bytes = value.numel() * value.element_size()
        if num_bytes:
            target = torch.frombuffer(
                self._buffer, dtype=value.dtype, count=value.numel(), offset=begin
            )
            target.view(value.shape).copy_(value)
        is_part = entry.name != entry.whole
        return SavedTensor(
            shape=tuple(value.shape),
            dtype=dtype_name(value.dtype),
            file=f"__{part}_0.distcp",
            offset=begin,
            num_bytes=num_bytes,
            whole=entry.whole if is_part else "",
            whole_shape=entry.shape if is_part else (),
            offsets=entry.box.offsets if is_part else (),
        )


def unpack(content: bytearray, saved: SavedTensor) -> Tensor:
    """View bytes as the tensor that they hold; the memory is shared."""
    dtype: torch.dtype = getattr(torch, saved.dtype)
    if not saved.num_bytes:
        return torch.empty(saved.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(saved.shape)


class Sender:
    """Sends this rank's parts to its keepers, one at a time, in a thread of its own.

    Args:
        keepers: Keepers that get each part, in order of preference.
        copies: Number of keepers that hold each part.
        rank: Rank of this process, which is the number of its part.
        num_ranks: Number of ranks, which is the number of parts of a snapshot.
        generation: Number of times the job's ranks were started before.
    """

    def __init__(
        self,
        keepers: Sequence[Keeper],
        *,
        copies: int,
        rank: int,
        num_ranks: int,
        generation: int,
    ) -> None:
        self._keepers = list(keepers)
        self._copies = copies
        self._rank, self._num_ranks = rank, num_ranks
        self._generation = generation
        self._packing = Packing()
        self._thread: threading.Thread | None = None
        self._sent = 0
        self.num_bytes = 0
        self.failed: list[str] = []

    @property
    def is_busy(self) -> bool:
        """Whether the last part is still being sent."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether no keeper has taken the last part."""
        return self._sent == 0

    def send(
        self,
        step_number: int,
        entries: Sequence[Entry],
        states: Mapping[str, SavedOptimizer],
        extra: Mapping[str, Any],
        settled: Moment | None,
    ) -> None:
        """Copy this rank's boxes and begin to send them; first waits for the part before."""
        self.wait()
        packed = self._packing.pack(entries, states, extra, self._rank)
        part = Part(
            moment=Moment(self._generation, step_number),
            number=self._rank,
            num_parts=self._num_ranks,
            num_bytes=len(packed.content),
        )
        self._sent = 0
        self.num_bytes = part.num_bytes
        self._thread = threading.Thread(
            target=self._send_all, args=(part, packed, settled), daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last part has arrived everywhere."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait, then close the connections to the keepers."""
        self.wait()
        for keeper in self._keepers:
            keeper.close()

    def _send_all(self, part: Part, packed: Packed, settled: Moment | None) -> None:
        sent = 0
        for keeper in list(self._keepers):
            if sent == self._copies:
                break
            try:
                keeper.put(part, packed.index, packed.content, settled)
                sent += 1
            except (WireError, OSError) as error:
                # The next keeper replaces it; the parts on it may be lost.
                self.failed.append(f"host {keeper.place.host}: {error}")
                self._keepers.remove(keeper)
                with suppress(OSError):
                    keeper.close()
        self._sent = sent


def entries_of(step: DeployedStep) -> tuple[list[Entry], dict[str, SavedOptimizer]]:
    """This rank's share of a step's state, between two steps; every rank calls it."""
    return own_entries(step, step.model)


def about(step: DeployedStep) -> dict[str, Any]:
    """Entries that a snapshot's index has beside its tensors."""
    graph = step.captured.graph
    return {
        "model": graph.name,
        "graph": graph.fingerprint,
        "optimizer": graph.optimizer,
        "num_steps": step.num_steps,
    }
