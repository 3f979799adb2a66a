"""The process that writes checkpoints from snapshots; see ``checkpoints``.

python -m heterog.healing.writing      requests on standard input
"""

import shutil
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from heterog.errors import HeterogError
from heterog.files import CHECKPOINT_INDEX
from heterog.healing.restoring import Snapshot, part_of
from heterog.healing.service import Message, answer_requests
from heterog.healing.shelf import Moment, Shelf
from heterog.runtime.checkpoint.boxes import Box, Entry, whole_box
from heterog.runtime.checkpoint.contents import SavedTensor
from heterog.runtime.checkpoint.files import make_data_folder, publish, write_tensors


def write_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Write a snapshot as a checkpoint; part by part, so that one at a time is in memory.

    Raises:
        InputFileError: for example, the disk is full; the previous checkpoint is still there.
    """
    data = folder / f"data-{make_data_folder(folder)}"
    contents = snapshot.contents
    try:
        tensors: dict[str, SavedTensor] = {}
        for number in range(snapshot.moment.num_parts):
            names = [name for name, saved in contents.tensors.items() if part_of(saved) == number]
            entries = [
                _entry(name, contents.tensors[name], value)
                for name, value in snapshot.read(names).items()
            ]
            tensors |= write_tensors(entries, data, number)
        publish(
            replace(contents, tensors=tensors, data=data.name), folder / CHECKPOINT_INDEX, data
        )
    except (HeterogError, OSError):
        shutil.rmtree(data, ignore_errors=True)
        raise


def _entry(name: str, saved: SavedTensor, value: Tensor) -> Entry:
    shape = saved.whole_shape if saved.whole else saved.shape
    box = Box(saved.offsets, saved.shape) if saved.whole else whole_box(shape)
    return Entry(whole=saved.whole or name, shape=shape, box=box, value=value)


def answer(request: Message) -> Message:
    """Write a snapshot."""
    if request["moment"] is None:
        return {"error": "no snapshot is complete yet"}
    snapshot = Snapshot(Shelf(Path(request["shelf"])), Moment(*request["moment"]))
    write_snapshot(snapshot, Path(request["folder"]))
    return {"step": snapshot.contents.num_steps}


def main() -> None:
    """Answer requests until the input ends."""
    answer_requests(answer)


if __name__ == "__main__":
    main()
