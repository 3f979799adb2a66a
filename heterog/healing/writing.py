"""The process that writes checkpoints from what keepers hold; see ``checkpoints``.

python -m heterog.healing.writing      requests on standard input
"""

import shutil
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from heterog.errors import HeterogError
from heterog.healing.keepers import KeeperPlace, Keepers
from heterog.healing.restoring import Snapshot, part_of
from heterog.healing.service import Message, answer_requests
from heterog.runtime.checkpoint.contents import SavedTensor
from heterog.runtime.checkpoint.files import (
    Entry,
    make_data_folder,
    publish,
    write_tensors,
)
from heterog.runtime.checkpoint.held import Box, whole_box
from heterog.runtime.launch import CHECKPOINT_INDEX


def write_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Write a snapshot as a checkpoint; part by part, so that one at a time is in memory.

    Raises:
        InputFileError: for example, the disk is full; the previous checkpoint is still there.
    """
    data = folder / f"data-{make_data_folder(folder)}"
    contents = snapshot.contents
    try:
        tensors: dict[str, SavedTensor] = {}
        for number in snapshot.numbers:
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
    """Write the newest complete snapshot."""
    places = [KeeperPlace(**each) for each in request["keepers"]]
    with Keepers(places) as keepers:
        moment = keepers.newest()
        if moment is None:
            return {"error": "no snapshot is complete yet"}
        write_snapshot(Snapshot(keepers, moment), Path(request["folder"]))
    return {"step": moment.step}


def main() -> None:
    """Answer requests until the input ends."""
    answer_requests(answer)


if __name__ == "__main__":
    main()
