"""Checkpoints that are written beside training, from snapshots.

Ranks do not take part and wait for nothing: a process of low priority reads the newest complete
snapshot and writes it in the format of ``heterog.runtime.checkpoint``, by
torch.distributed.checkpoint. Any plan resumes from it.
"""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from heterog.errors import HeterogError
from heterog.files import CHECKPOINT_INDEX, check_save_folder
from heterog.healing.service import Service, answer_questions
from heterog.healing.shelf import LostError, Shelf, Snapshot, newest_complete, part_of
from heterog.runtime.checkpoint.boxes import Entry
from heterog.runtime.checkpoint.contents import SavedTensor

_DAY_S = 86400.0
"""Longest wait for a checkpoint, which nobody waits for."""
_CLOSING_S = 5.0
"""Longest wait at the end for a snapshot that is on its way."""


class Writing:
    """Has a checkpoint written at regular intervals.

    Args:
        folder: Folder of the checkpoints; a new one replaces the one before.
        every_s: Seconds between checkpoints.
        say: Called with one line when a checkpoint could not be written, unless it was before.
    """

    def __init__(
        self, folder: Path, every_s: float, say: Callable[[str], None] = lambda text: None
    ) -> None:
        check_save_folder(folder)
        self._failed, self._said, self._say = "", "", say
        self._folder, self._every_s = folder.resolve(), every_s
        self._since_s = time.monotonic()
        self._writing: threading.Thread | None = None
        self._service = Service("heterog.healing.checkpoints")

    def look(self, lend: Callable[[], Path]) -> None:
        """Have a checkpoint written if one is due, and say why the last one was not.

        Args:
            lend: Called in another thread: the folder of the newest snapshot, once it is there.
        """
        if self._writing is not None and self._writing.is_alive():
            return
        if self._failed not in ("", self._said):
            self._say(f"no checkpoint was written: {self._failed}")
        self._said = self._failed
        if time.monotonic() - self._since_s > self._every_s:
            self._since_s = time.monotonic()
            self._writing = threading.Thread(target=self._write, args=(lend,), daemon=True)
            self._writing.start()

    def _write(self, lend: Callable[[], Path]) -> None:
        try:
            asked = self._service.ask((self._folder, lend()), niceness=10)
            self._service.answer_to(asked, _DAY_S)
            self._failed = ""
        except (HeterogError, OSError) as error:
            self._failed = str(error)
        except Exception as error:  # nobody would hear of it in this thread
            self._failed = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """End the process that writes; the previous checkpoint survives an unfinished one."""
        self._service.close()
        if self._writing is not None:
            self._writing.join(_CLOSING_S)


def write_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Write a snapshot as a checkpoint; part by part, so that one at a time is in memory.

    Raises:
        InputFileError: for example, the disk is full; the previous checkpoint is still there.
    """
    from heterog.runtime.checkpoint.files import make_data_folder, publish, write_tensors

    data = folder / f"data-{make_data_folder(folder)}"
    contents = snapshot.contents
    try:
        tensors: dict[str, SavedTensor] = {}
        for number in range(snapshot.moment.num_parts):
            names = [name for name, saved in contents.tensors.items() if part_of(saved) == number]
            entries = []
            for name, value in snapshot.read(names).items():
                saved = contents.tensors[name]
                whole, box = saved.whole or name, saved.box
                shape = contents.shape(whole)
                entries.append(Entry(whole=whole, shape=shape, box=box, value=value))
            tensors |= write_tensors(entries, data, number)
        publish(
            replace(contents, tensors=tensors, data=data.name), folder / CHECKPOINT_INDEX, data
        )
    except (HeterogError, OSError):
        shutil.rmtree(data, ignore_errors=True)
        raise


def answer(question: tuple[Path, Path]) -> None:
    """Write into a folder the newest snapshot of a shelf.

    Raises:
        HeterogError: there is none, or it cannot be written.
    """
    folder, shelf = question[0], Shelf(question[1])
    lost = None
    while (moment := newest_complete([shelf.parts()])) not in (None, lost):
        assert moment is not None
        try:
            write_snapshot(Snapshot(shelf, moment), folder)
            return
        except LostError:
            lost = moment  # it was deleted meanwhile, for a newer one
    raise HeterogError("no snapshot is complete yet")


if __name__ == "__main__":
    answer_questions(answer)
