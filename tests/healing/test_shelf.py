"""Snapshots on a host's shelf: what is there, what is let go, and what other hosts bring."""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from heterog.errors import HeterogError
from heterog.healing import elastic
from heterog.healing import host as host_module
from heterog.healing.host import Carrier
from heterog.healing.shelf import LostError, Moment, Part, Shelf, newest_complete, parts_of
from heterog.healing.snapshots import Snapshot, SnapshotWriter
from heterog.runtime.checkpoint.boxes import Box, Entry, whole_box

ABOUT = {"model": "m", "graph": "g", "optimizer": "Adam", "num_steps": 7}


def entry(name: str, value: Tensor) -> Entry:
    shape = tuple(value.shape)
    return Entry(whole=name, shape=shape, box=whole_box(shape), value=value)


def put(where: Shelf, step: int, value: float = 0.0, *, is_new: bool = False) -> Part:
    part = Part(Moment(0, step, 1), 0)
    where.put(part, [entry("w", torch.full((3,), value))], {}, ABOUT, is_new=is_new)
    return part


def steps(where: Shelf) -> set[int]:
    return {part.moment.step for part in where.parts()}


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_boxes_of_all_parts_are_read_whatever_their_type(tmp_path: Path) -> None:
    where, moment = Shelf(tmp_path), Moment(2, 5, 2)
    upper, lower = torch.arange(6.0).view(2, 3), torch.arange(6.0, 9.0).view(1, 3)
    for number, (value, begin) in enumerate(((upper, 0), (lower, 2))):
        box = Box((begin, 0), tuple(value.shape))
        boxes = [Entry(whole="w", shape=(3, 3), box=box, value=value)]
        boxes.append(entry(f"count{number}", torch.tensor(5 + number)))
        boxes.append(entry(f"none{number}", torch.empty(0, 4, dtype=torch.bfloat16)))
        where.put(Part(moment, number), boxes, {}, ABOUT)
    snapshot = Snapshot(where, moment)
    assert snapshot.contents.num_steps == 7
    assert snapshot.contents.shape("w") == (3, 3)
    names = ["w[0:2,0:3]", "w[2:3,0:3]", "count1", "none0"]
    first, second, count, none = snapshot.read(names).values()
    assert torch.equal(torch.cat([first, second]), torch.arange(9.0).view(3, 3))
    assert int(count) == 6
    assert none.shape == (0, 4)
    assert (snapshot.num_bytes, snapshot.far_bytes) == (9 * 4 + 8, 0)


def test_what_is_older_than_settled_is_let_go_but_not_for_who_reads(tmp_path: Path) -> None:
    where = Shelf(tmp_path)
    first = put(where, 1, 1.0)
    reader = Snapshot(where, first.moment)
    put(where, 2, 2.0)
    where.forget_before(Moment(0, 2, 1))
    assert steps(where) == {2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.2.0-1", "0.2.0-1.index"]
    assert reader.read(["w"])["w"].tolist() == [1.0] * 3


def test_what_a_rank_left_that_died_while_it_wrote_is_let_go(tmp_path: Path) -> None:
    where = Shelf(tmp_path)
    for suffix in (".begun", ".index", ".new", ".index.wanted"):
        (tmp_path / f"0.1.0-2{suffix}").touch()
    (tmp_path / "0.2.1-2.begun").touch()
    put(where, 2, 2.0)
    where.forget_before(Moment(0, 2, 1))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["0.1.0-2.index.wanted", "0.2.0-1", "0.2.0-1.index", "0.2.1-2.begun"]


def test_a_part_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = Shelf(tmp_path)
    writer = SnapshotWriter(where, 0, 1, 0)
    values = [entry("w", torch.ones(3))]
    writer.take(1, values, {}, ABOUT)
    writer.settle()
    assert (writer.failed, writer.num_bytes) == ("", 16)
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    writer.take(2, values, {}, ABOUT)
    assert writer.failed == f"No space left on device in {tmp_path}"
    assert newest_complete([where.parts()]) == Moment(0, 1, 1)
    assert len(list(tmp_path.iterdir())) == 2


def test_ranks_train_for_ten_times_as_long_as_a_snapshot_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([5.0, 5.5, 10.4, 10.6])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    writer = SnapshotWriter(Shelf(tmp_path), 0, 1, 0)
    writer.take(1, [], {}, ABOUT)
    assert writer.copy_s == 0.5
    assert writer.is_busy
    assert not writer.is_busy


def test_only_complete_snapshots_count_and_later_generations_come_first() -> None:
    one, two = parts_of(Moment(0, 1, 2))
    assert newest_complete([[one], [parts_of(Moment(0, 2, 2))[1]]]) is None
    assert newest_complete([[one], [two]]) == Moment(0, 1, 2)
    assert newest_complete([parts_of(Moment(0, 9, 1)), parts_of(Moment(1, 3, 1))])[:2] == (1, 3)  # type: ignore[index]


class Far:
    """The actor of another host, as far as parts are concerned."""

    def __init__(self, folder: Path, ray: Any) -> None:
        folder.mkdir()
        self.host = mock.Mock(shelf=Shelf(folder))
        self.is_lost = False
        for name in ("give", "take"):
            method = getattr(host_module.HealingHost, name)
            setattr(self, name, mock.Mock(remote=self._asked(method, ray)))

    def _asked(self, method: Any, ray: Any) -> Callable[..., Any]:
        def asked(*about: Any) -> Any:
            if self.is_lost:
                raise ray.exceptions.RayError
            return method(self.host, *about)

        return asked

    @property
    def shelf(self) -> Shelf:
        found: Shelf = self.host.shelf
        return found


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of Ray only that it answers."""
    found = mock.Mock(get=lambda answer, timeout: answer)
    found.exceptions.RayError = type("RayError", (Exception,), {})
    monkeypatch.setattr(host_module, "connect_to_ray", lambda: (found, False))
    return found


def test_new_parts_go_to_as_many_other_hosts_as_asked(tmp_path: Path, ray: Any) -> None:
    (tmp_path / "own").mkdir()
    own = Shelf(tmp_path / "own")
    lost, near, far = (Far(tmp_path / name, ray) for name in ("lost", "near", "far"))
    lost.is_lost = True
    with closing(Carrier(own, [lost, near, far], redundancy=1)):
        part = put(own, 3, 4.0, is_new=True)
        wait_until(lambda: not own.is_new(part))
    assert [steps(each) for each in (own, near.shelf, far.shelf)] == [{3}, {3}, set()]
    assert Snapshot(near.shelf, part.moment).read(["w"])["w"].tolist() == [4.0] * 3


def test_parts_are_fetched_when_they_are_read(tmp_path: Path, ray: Any) -> None:
    (tmp_path / "own").mkdir()
    own, far = Shelf(tmp_path / "own"), Far(tmp_path / "far", ray)
    moment = Moment(0, 3, 2)
    for number in range(2):
        value = entry(f"w{number}", torch.full((3,), float(number)))
        far.shelf.put(Part(moment, number), [value], {}, ABOUT)
    host_module.HealingHost.lend(far.host, moment)
    far.shelf.forget_before(Moment(0, 4, 2))  # it is lent, so it can still be read
    with closing(Carrier(own, [far], redundancy=0)):
        snapshot = Snapshot(own, moment)
        assert snapshot.read(["w1"])["w1"].tolist() == [1.0] * 3
        assert [part.number for part in own.parts()] == [1]
        assert snapshot.far_bytes == 12
        with pytest.raises(LostError, match=r"0\.4\.0-1\.index of a snapshot was lost"):
            Snapshot(own, Moment(0, 4, 1))


def test_what_is_lent_stays(tmp_path: Path) -> None:
    where = Shelf(tmp_path)
    assert where.lend()[1] is None
    put(where, 1, 1.0)
    part = put(where, 2, 2.0)
    lent, moment = where.lend()
    put(where, 3, 3.0)
    where.forget_before(Moment(0, 3, 1))
    assert moment == part.moment
    assert Snapshot(Shelf(lent), part.moment).read(["w"])["w"].tolist() == [2.0] * 3
    assert where.lend()[1] == Moment(0, 3, 1)
    assert steps(Shelf(lent)) == {3}


def test_who_waits_for_a_part_reads_it_when_it_comes(tmp_path: Path) -> None:
    where = Shelf(tmp_path)
    later = threading.Timer(0.05, put, (where, 3, 2.0))
    later.start()
    assert Snapshot(where, Moment(0, 3, 1)).read(["w"])["w"].tolist() == [2.0] * 3
    later.join()


def test_a_folder_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"heterog-loop-{os.getuid()}-{os.getpid()}").mkdir(mode=0o755)
    with pytest.raises(HeterogError, match="others may read it; remove it"):
        elastic.folder_of_host()
