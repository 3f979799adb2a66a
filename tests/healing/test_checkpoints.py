"""Checkpoints that are written from snapshots, also onto a disk that is full."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from heterog.errors import HeterogError
from heterog.healing import checkpoints
from heterog.healing.checkpoints import answer
from heterog.healing.shelf import Moment, Part, Shelf
from heterog.runtime.checkpoint.boxes import Entry, whole_box
from heterog.runtime.checkpoint.contents import read_contents
from heterog.runtime.checkpoint.files import read_tensors


def put(shelf: Shelf, step: int, values: dict[str, Tensor]) -> None:
    """Take a snapshot of one part."""
    entries = [
        Entry(whole=name, shape=tuple(value.shape), box=whole_box(tuple(value.shape)), value=value)
        for name, value in values.items()
    ]
    about = {"model": "m", "graph": "g", "optimizer": "Adam", "num_steps": step}
    shelf.put(Part(Moment(0, step, 1), 0), entries, {}, about)


def test_a_full_disk_leaves_the_checkpoint_that_was_there(
    small_disk: Path, tmp_path: Path
) -> None:
    place, folder = Shelf(tmp_path / "shelf"), small_disk / "saved"
    place.folder.mkdir()

    def write() -> None:
        answer((folder, place.folder))

    with pytest.raises(HeterogError, match="no snapshot is complete yet"):
        write()
    small = torch.arange(6.0)
    put(place, 3, {"weight": small})
    write()
    put(place, 4, {"weight": torch.zeros(1 << 20)})
    with pytest.raises(Exception, match="No space left on device"):
        write()
    contents = read_contents(folder)
    assert contents.num_steps == 3
    assert torch.equal(read_tensors(contents, folder, ["weight"])["weight"], small)
    left = [path.name for path in folder.iterdir() if path.name.startswith("data-")]
    assert left == [contents.data], "what was begun is gone"
    put(place, 5, {"weight": small + 1})
    write()  # there is room again
    assert json.loads((folder / "checkpoint.json").read_text())["num_steps"] == 5


def test_a_process_that_has_ended_is_asked_again_for_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, service = list[str](), mock.Mock()
    service.answer_to.side_effect = [HeterogError("it has ended"), HeterogError("it has ended"), 0]
    monkeypatch.setattr(checkpoints, "Service", lambda module: service)
    writing = checkpoints.Writing(tmp_path / "saved", -1.0, said.append)
    for number in range(1, 5):
        writing.look(lambda: tmp_path)
        assert writing._writing is not None
        writing._writing.join()
        assert service.ask.call_count == number
    assert said == ["no checkpoint was written: it has ended"], "once, and not each time"


def test_a_snapshot_that_is_deleted_while_it_is_opened_gives_way_to_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks delete it as soon as the next is complete, and wait for nobody."""
    shelf, opened = Shelf(tmp_path), list[Any]()

    def opens(where: Shelf, moment: Moment) -> int:
        if not opened:
            put(where, 2, {"weight": torch.zeros(1)})
            where.forget_before(Moment(0, 2, 1))
        opened.append(where.content(f"0.{moment.step}.0-1"))
        return moment.step

    put(shelf, 1, {"weight": torch.zeros(1)})
    written: list[int] = []
    monkeypatch.setattr(checkpoints, "Snapshot", opens)
    monkeypatch.setattr(checkpoints, "write_snapshot", lambda step, folder: written.append(step))
    answer((tmp_path, tmp_path))
    assert written == [2]
    (tmp_path / "0.2.0-1").unlink()
    monkeypatch.setattr(checkpoints, "newest_complete", lambda parts: Moment(0, 2, 1))
    with pytest.raises(HeterogError, match="no snapshot is complete yet"):
        answer((tmp_path, tmp_path))
