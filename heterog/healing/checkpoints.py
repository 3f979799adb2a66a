"""Checkpoints that are written beside training, from snapshots.

Ranks do not take part and wait for nothing: a process of low priority reads the newest complete
snapshot and writes it in the format of ``heterog.runtime.checkpoint``, by
torch.distributed.checkpoint. Any plan resumes from it.
"""

import time
from collections.abc import Callable
from pathlib import Path

from heterog.files import check_save_folder
from heterog.healing.service import Service
from heterog.healing.shelf import Moment


class Writing:
    """Has a checkpoint written at regular intervals.

    Args:
        folder: Folder of the checkpoints; a new one replaces the one before.
        every_s: Seconds between checkpoints.

    Attributes:
        failed: Why the last checkpoint was not written; empty if it was.
        num_written: Number of checkpoints written so far.
    """

    def __init__(self, folder: Path, every_s: float) -> None:
        check_save_folder(folder)
        self.failed = ""
        self.num_written = 0
        self._folder, self._every_s = folder.resolve(), every_s
        self._since_s = time.monotonic()
        self._is_asked = False
        self._service = Service("heterog.healing.writing")

    def look(self, lend: Callable[[], tuple[Path, Moment | None]]) -> str:
        """Ask for a checkpoint if one is due.

        Args:
            lend: Says in which folder the newest snapshot can be read until the next call.

        Returns:
            The folder of a checkpoint that was just written, or ``""``.
        """
        written = ""
        for reply in self._service.replies():
            self._is_asked = False
            self.failed = str(reply.get("error", "")) if reply else "the process has ended"
            if not self.failed:
                written = str(self._folder)
                self.num_written += 1
        if not self._is_asked and time.monotonic() - self._since_s > self._every_s:
            self._since_s = time.monotonic()
            self._is_asked = self._service.is_alive
            if self._is_asked:
                shelf, moment = lend()
                asked = {"folder": str(self._folder), "shelf": str(shelf), "moment": moment}
                self._service.ask(asked, niceness=10)
        return written

    def close(self) -> None:
        """End the process that writes; the previous checkpoint survives an unfinished one."""
        self._service.close()
