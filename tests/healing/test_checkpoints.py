"""Checkpoints that are written from what keepers hold, also onto a disk that is full."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from heterog.healing.keeper import Shelf, listen
from heterog.healing.keepers import Keeper, KeeperPlace
from heterog.healing.sending import Packing
from heterog.healing.snapshots import Moment, Part
from heterog.healing.writing import answer
from heterog.runtime.checkpoint.contents import read_contents
from heterog.runtime.checkpoint.files import Entry, read_tensors
from heterog.runtime.checkpoint.held import whole_box

TOKEN = "secret"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def put(place: KeeperPlace, step: int, values: dict[str, Tensor]) -> None:
    """Send a snapshot of one part."""
    entries = [
        Entry(whole=name, shape=tuple(value.shape), box=whole_box(tuple(value.shape)), value=value)
        for name, value in values.items()
    ]
    about = {"model": "m", "graph": "g", "optimizer": "Adam", "num_steps": step}
    packed = Packing().pack(entries, {}, about, 0)
    moment = Moment(0, step)
    part = Part(moment=moment, number=0, num_parts=1, num_bytes=len(packed.content))
    Keeper(place).put(part, packed.index, packed.content)


def test_a_full_disk_leaves_the_checkpoint_that_was_there(small_disk: Path) -> None:
    port = listen("127.0.0.1", TOKEN, Shelf())
    place = KeeperPlace(host=0, address="127.0.0.1", port=port, token=TOKEN)
    folder = small_disk / "saved"
    request = {"folder": str(folder), "keepers": [asdict(place)]}
    assert answer(request) == {"error": "no snapshot is complete yet"}
    small = torch.arange(6.0)
    put(place, 3, {"weight": small})
    assert answer(request) == {"step": 3}
    put(place, 4, {"weight": torch.zeros(1 << 20)})
    with pytest.raises(Exception, match="No space left on device"):
        answer(request)
    contents = read_contents(folder)
    assert contents.num_steps == 3
    assert torch.equal(read_tensors(contents, folder, ["weight"])["weight"], small)
    left = [path.name for path in folder.iterdir() if path.name.startswith("data-")]
    assert left == [contents.data], "what was begun is gone"
    put(place, 5, {"weight": small + 1})
    assert answer(request) == {"step": 5}, "there is room again"
    assert json.loads((folder / "checkpoint.json").read_text())["num_steps"] == 5
