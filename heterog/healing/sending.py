"""Taking snapshots between two steps: each rank writes its part of the state.

What is written is what a checkpoint would hold of this rank: the boxes of parameters, of the
optimizer's state and of buffers that it owns. Every element is owned by one rank, so a snapshot
has the size of the state, not of its replicas.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from heterog.errors import InputFileError
from heterog.healing.shelf import Moment, Part, Shelf
from heterog.runtime.checkpoint.boxes import Entry
from heterog.runtime.checkpoint.contents import SavedOptimizer

_REST = 10.0
"""Seconds of training between snapshots for each second that one takes, for which ranks wait."""
_COPIED_S = 120.0
_POLL_S = 0.005


class Taker:
    """Takes this rank's parts.

    Args:
        shelf: Where they are put.
        number: Number of this rank's part.
        num_parts: Number of parts of a snapshot.
        generation: Number of times the job's ranks were started before.
        is_copied: Whether somebody copies parts to other hosts.
        carry: Copies a part to other hosts with all ranks, where nobody else does.

    Attributes:
        newest: The last snapshot begun.
        settled: The last one that is known to be complete; older parts are let go.
        failed: Why the last part could not be written; empty if it was.
        num_bytes: Its size.
        copy_s: Seconds that it took.
    """

    def __init__(
        self,
        shelf: Shelf,
        number: int,
        num_parts: int,
        generation: int,
        *,
        is_copied: bool = False,
        carry: Callable[[Part], None] | None = None,
    ) -> None:
        self.newest: Moment | None = None
        self.settled: Moment | None = None
        self.failed = ""
        self.num_bytes = 0
        self.copy_s = 0.0
        self._shelf, self._number, self._num_parts = shelf, number, num_parts
        self._generation, self._is_copied, self._carry = generation, is_copied, carry
        self._rested_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether it is too early for the next one."""
        return time.monotonic() < self._rested_s or self._is_on_its_way

    @property
    def _is_on_its_way(self) -> bool:
        return self.newest is not None and self._shelf.is_new(Part(self.newest, self._number))

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
            self.num_bytes = self._shelf.put(part, entries, states, about, is_new=self._is_copied)
            self.failed = ""
        except OSError as error:
            self.failed = f"{error.strerror or error} in {self._shelf.folder}"
        if self._carry is not None:
            try:
                self._carry(part)
            except InputFileError as error:
                self.failed = str(error)
        now_s = time.monotonic()
        self.copy_s = now_s - begin_s
        self._rested_s = now_s + _REST * self.copy_s

    def settle(self) -> None:
        """Note that the newest snapshot is complete: no rank has failed to write its part."""
        self.settled = self.newest or self.settled

    def wait(self) -> None:
        """Wait until other hosts hold the last part, if they should."""
        deadline_s = time.monotonic() + _COPIED_S
        while self._is_on_its_way and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
