"""Snapshots on a host's shelf: what is there, what is let go, and what other hosts bring."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from heterog.errors import HeterogError, InputFileError
from heterog.healing import elastic, rank, snapshots
from heterog.healing.choices import Choice
from heterog.healing.crew import Crew, HealingHost
from heterog.healing.on_ray import RayCrew
from heterog.healing.rank import HealingRank
from heterog.healing.record import Trained
from heterog.healing.shelf import (
    LostError,
    Moment,
    Part,
    Shelf,
    Snapshot,
    newest_complete,
    parts_of,
)
from heterog.healing.snapshots import SnapshotWriter
from heterog.runtime.checkpoint.boxes import Box, Entry, whole_box
from heterog.runtime.request import RunRequest
from tests.healing.test_job import three
from tests.runtime.ranks import Ranks

ABOUT = {"model": "m", "graph": "g", "optimizer": "Adam", "num_steps": 7}


def entry(name: str, value: Tensor) -> Entry:
    shape = tuple(value.shape)
    return Entry(whole=name, shape=shape, box=whole_box(shape), value=value)


def put(where: Shelf, step: int, value: float = 0.0) -> Part:
    part = Part(Moment(0, step, 1), 0)
    where.put(part, [entry("w", torch.full((3,), value))], {}, ABOUT)
    return part


def steps(where: Shelf) -> set[int]:
    return {part.moment.step for part in where.parts()}


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
    for suffix in (".begun", ".index"):
        (tmp_path / f"0.1.0-2{suffix}").touch()
    (tmp_path / "0.2.1-2.begun").touch()
    put(where, 2, 2.0)
    where.forget_before(Moment(0, 2, 1))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["0.2.0-1", "0.2.0-1.index", "0.2.1-2.begun"]


@pytest.mark.parametrize("is_told", [True, False], ids=["refused", "nearly full"])
def test_a_part_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    where = Shelf(tmp_path)
    writer = SnapshotWriter(where, 0, (0, 1))
    values = [entry("w", torch.ones(3))]
    writer.take(1, values, {}, ABOUT)
    writer.settled = writer.newest
    assert (writer.failed, writer.num_bytes) == ("", 16)
    if is_told:
        full = mock.Mock(side_effect=OSError(28, "No space left on device"))
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:  # ranks still write their journals there
        left = mock.Mock(return_value=SimpleNamespace(f_bavail=1023, f_frsize=1024))
        monkeypatch.setattr(os, "fstatvfs", left)
    writer.take(2, values, {}, ABOUT)
    assert f"cannot write {tmp_path}: No space left on device; it needs 16 " in writer.failed
    assert newest_complete([where.parts()]) == Moment(0, 1, 1)
    assert len(list(tmp_path.iterdir())) == 2


def test_ranks_train_for_ten_times_as_long_as_a_snapshot_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([5.0, 5.5, 10.4, 10.6])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    monkeypatch.setattr(snapshots, "any_rank", lambda *values: list(values))
    writer = SnapshotWriter(Shelf(tmp_path), 0, (0, 1))
    writer.take(1, [], {}, ABOUT)
    assert writer.copy_s == 0.5
    assert writer.end_step() == [False]
    assert writer.settled == writer.newest, "it is complete long before the next one is due"
    assert writer.end_step() == [True]


def test_only_complete_snapshots_count_and_later_generations_come_first() -> None:
    one, two = parts_of(Moment(0, 1, 2))
    assert newest_complete([[one], [parts_of(Moment(0, 2, 2))[1]]]) is None
    assert newest_complete([[one], [two]]) == Moment(0, 1, 2)
    assert newest_complete([parts_of(Moment(0, 9, 1)), parts_of(Moment(1, 3, 1))])[:2] == (1, 3)  # type: ignore[index]


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LostError, match=r"0\.4\.0-1\.index of a snapshot was lost"):
        Snapshot(Shelf(tmp_path), Moment(0, 4, 1))


class Far:
    """The actor of a host on Ray, as far as snapshots are concerned; ``is_lost`` may be set."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.is_lost = False
        self.host = mock.Mock(shelf=Shelf(folder), parts=Shelf(folder).parts)

    def __getattr__(self, name: str) -> Any:
        method = getattr(HealingHost, name)

        def remote(*about: Any) -> Any:
            if self.is_lost and name == "give":
                return [ConnectionError()] * 2 * len(about)
            if any(isinstance(each, ConnectionError) for each in about):
                return ConnectionError()
            return self.host.parts() if name == "parts" else method(self.host, *about)

        return mock.Mock(remote=remote, options=lambda **how: mock.Mock(remote=remote))


def answer_of_far(answer: Any, timeout: float) -> Any:
    """As Ray gives an answer."""
    if isinstance(answer, ConnectionError):
        raise answer
    return answer


FAR = SimpleNamespace(
    wait=lambda asked, **_: (asked, []),
    get=answer_of_far,
    exceptions=SimpleNamespace(RayError=ConnectionError),
)
"""The part of Ray that ``Far`` needs."""


def far_crew(folder: Path, hosts: Sequence[Far], redundancy: int = 1) -> RayCrew:
    """A crew of such hosts."""
    crew = RayCrew(None, "job", three(), RunRequest(plan=folder), redundancy)
    crew._ray = FAR
    crew._hosts = [mock.Mock(is_here=True, actor=each) for each in hosts]
    return crew


def far_put(far: Far, *parts: Part) -> None:
    """Let a host hold parts, each of its number."""
    for part in parts:
        value = entry(f"w{part.number}", torch.full((3,), float(part.number)))
        far.host.shelf.put(part, [value], {}, ABOUT)


def test_what_waits_to_be_given_may_be_deleted_meanwhile(tmp_path: Path) -> None:
    far, parts = Far(tmp_path / "a"), parts_of(Moment(0, 3, 2))
    far_put(far, *parts)
    given = HealingHost.give(far.host, *parts)
    far.host.shelf.forget_before(Moment(0, 4, 2))
    assert HealingHost.give(far.host, *parts) == [None] * 4
    there = Shelf(tmp_path)
    assert there.take(parts[0], given[:2])
    assert there.take(parts[1], given[2:])
    read = Snapshot(there, parts[0].moment).read(["w0", "w1"])
    assert [value.tolist() for value in read.values()] == [[0.0] * 3, [1.0] * 3]


def test_a_snapshot_for_a_checkpoint_is_brought_from_the_hosts_that_have_it(
    tmp_path: Path,
) -> None:
    moment, hosts = Moment(0, 3, 2), [Far(tmp_path / name) for name in ("a", "b")]
    for far, part in zip(hosts, parts_of(moment), strict=True):
        far_put(far, part)
    crew = far_crew(tmp_path, hosts)
    try:
        folder = crew.lend()
        for far in hosts:
            far.host.shelf.forget_before(Moment(0, 4, 2))
        read = Snapshot(Shelf(folder), moment).read(["w0", "w1"])
        assert [value.tolist() for value in read.values()] == [[0.0] * 3, [1.0] * 3]
    finally:
        crew._stack.close()
    assert not folder.exists()


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "deleted"])
def test_a_part_that_a_host_does_not_give_comes_from_the_next_that_holds_it(
    tmp_path: Path, is_lost: bool
) -> None:
    moment, hosts = Moment(0, 3, 2), [Far(tmp_path / name) for name in ("a", "b")]
    for far in hosts:
        far_put(far, *parts_of(moment))
    held = hosts[0].host.shelf.parts()
    hosts[0].host.parts = lambda: held
    hosts[0].is_lost = is_lost  # after that answer
    hosts[0].host.shelf.forget_before(Moment(0, 4, 2))
    crew = far_crew(tmp_path, hosts)
    read = Snapshot(Shelf(crew.lend()), moment).read(["w0", "w1"])
    assert [value.tolist() for value in read.values()] == [[0.0] * 3, [1.0] * 3]
    crew._stack.close()


def test_nothing_is_awaited_of_a_host_that_counts_as_lost(tmp_path: Path) -> None:
    first, second = parts_of(Moment(0, 3, 2))
    hosts = [Far(tmp_path / name) for name in ("a", "b")]
    for far in hosts:
        far_put(far, first, second)
    crew = far_crew(tmp_path, hosts)
    taken: list[tuple[Part, int]] = []

    def take(part: Part, files: Any, giver: Any) -> bool:
        taken.append((part, crew._hosts.index(giver)))
        crew._hosts[0].is_here = False
        return len(taken) > 1

    assert crew._hand_over(crew._held(), first.moment, (), take)
    assert taken == [(first, 0), (first, 1), (second, 1)]


def test_a_host_that_does_not_give_is_waited_for_until_it_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment, hosts = Moment(0, 3, 2), [Far(tmp_path / name) for name in ("a", "b")]
    for far in hosts:
        far_put(far, *parts_of(moment))
    crew = far_crew(tmp_path, hosts)
    looks: list[bool] = []

    def look() -> None:
        looks.append(True)
        crew._hosts[0].is_here = len(looks) < 3

    crew._hosts[0].look = look  # type: ignore[method-assign]
    never = mock.Mock(remote=lambda *parts: [None] * 2 * len(parts))
    give = mock.Mock(options=lambda **_: never)
    monkeypatch.setattr(hosts[0], "give", give, raising=False)
    crew._ray = SimpleNamespace(**vars(FAR))
    crew._ray.wait = lambda asked, **_: ([each for each in asked if each is not None], [])
    assert sorted(Shelf(crew.lend()).parts()) == parts_of(moment), "the other host gives them"
    crew._stack.close()
    assert len(looks) >= 3


DEVICE = three().host_devices[1][0]


def test_what_only_hosts_without_ranks_hold_is_brought_to_one_that_has_ranks(
    tmp_path: Path,
) -> None:
    """The only rank of a host was killed, and no other host holds its part."""
    moment, hosts = Moment(0, 3, 3), [Far(tmp_path / name) for name in ("a", "b", "c")]
    for number, far in enumerate(hosts):
        far_put(far, Part(moment, number), Part(Moment(0, 2, 3), number))
    lists = [*hosts[0].host.shelf.parts(), Part(moment, 2)]  # the last it has deleted since
    hosts[0].host.parts = lambda: lists
    assert far_crew(tmp_path, hosts, 0).newest([DEVICE], 0.0) == moment
    there = hosts[1].host.shelf
    read = Snapshot(there, moment).read(["w0", "w1", "w2"])
    assert [value.tolist() for value in read.values()] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert {part for part in there.parts() if part.moment != moment} == {Part(Moment(0, 2, 3), 1)}
    assert len(Shelf(tmp_path / "a").parts()) == 2, "who has no ranks gets nothing"


def test_hosts_that_do_not_answer_are_waited_for_before_a_snapshot_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A switch that begins again cuts more hosts off than the redundancy covers."""
    moment, hosts = Moment(0, 3, 3), [Far(tmp_path / name) for name in ("a", "b", "c")]
    for number, far in enumerate(hosts):
        far_put(far, Part(moment, number))
    crew, looks = far_crew(tmp_path, hosts), list[bool]()
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def look() -> None:
        looks.append(True)
        crew._hosts[2].is_here = len(looks) == 3

    with monkeypatch.context() as lost:
        lost.setattr(hosts[2].host, "parts", list)
        assert crew.newest([DEVICE], 60.0) is None, "all are here, and nobody has it"
    crew._hosts[2].is_here, crew._hosts[2].look = False, look  # type: ignore[method-assign]
    assert crew.newest([DEVICE], 0.0) is None
    assert crew.newest([DEVICE], 60.0) == moment


def test_if_a_host_is_lost_with_a_part_that_no_other_has_the_snapshot_before_serves(
    tmp_path: Path,
) -> None:
    before, newest = Moment(0, 2, 3), Moment(0, 3, 3)
    hosts = [Far(tmp_path / name) for name in ("a", "b", "c")]
    for number, far in enumerate(hosts):
        far_put(far, *parts_of(before), Part(newest, number))
    hosts[2].is_lost = True  # it has told what it holds, and is gone when it is asked to give
    crew = far_crew(tmp_path, hosts)
    assert crew.newest([DEVICE], 0.0) == before


def test_a_snapshot_is_not_given_up_because_who_takes_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are started, who is lost shows there, and others begin with the same snapshot."""
    moment, far = Moment(0, 3, 3), Far(tmp_path / "a")
    far_put(far, *parts_of(moment))
    crew = far_crew(tmp_path, [far, Far(tmp_path / "b")])

    def hand_over(*_: Any) -> bool:
        crew._hosts[1].is_here = False
        return False

    monkeypatch.setattr(crew, "_hand_over", hand_over)
    assert crew.newest([DEVICE], 0.0) == moment


def carry(rank: int, folder: Path) -> tuple[list[int], list[str], str, list[float]]:
    """Be a host of two that hold each other's parts; the first has no room for those of others."""
    shelf, moment = Shelf(folder / str(rank)), Moment(0, 3, 2)
    shelf.folder.mkdir()
    writer, snapshots._REST = SnapshotWriter(shelf, 0, (rank, 2), [0, 1], 1), 0.0
    begun = threading.Event()
    bring = shelf.bring

    def bring_late(name: str, size: int, pieces: Any) -> None:
        begun.wait()
        if rank == 0:
            raise InputFileError("no room")
        bring(name, size, pieces)

    shelf.bring = bring_late  # type: ignore[method-assign]
    (shelf.folder / "plan.json").write_text("further")
    writer.further.append("plan.json")
    writer.take(3, [entry("w", torch.full((3,), float(rank)))], {}, ABOUT)
    was_copying = writer.is_copying
    begun.set()
    writer.wait()
    assert was_copying > writer.is_copying, "training went on meanwhile"
    there = sorted(part.number for part in shelf.parts())
    failed, shelf.bring = writer.failed, bring  # type: ignore[method-assign]
    writer.bring(each for part in parts_of(moment) for each in part.files)
    read = Snapshot(shelf, moment).read(["w"])["w"]
    return there, writer.further, failed, read.tolist()


def test_ranks_copy_parts_to_other_hosts_beside_training(tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        first, second = ranks.run(carry, tmp_path)
    finally:
        ranks.close()
    assert first == ([0], [], "no room", [1.0] * 3), "the later of both parts named w is read"
    assert second == ([0, 1], [], "", [1.0] * 3)


def test_small_files_go_first_and_each_to_one_host_before_any_goes_to_a_second() -> None:
    """A host that is lost while a large part is on its way has given its own small one."""
    after = {0: [1, 2], 1: [2, 0], 2: [0, 1]}
    writer = mock.Mock(_host_of=(0, 1, 2), _after=after)
    ways = SnapshotWriter._copies(writer, [{"large": 10**9}, {"small": 5}, {"empty": 0}])
    assert [(name, target) for name, _, target in ways] == [
        ("empty", 0), ("small", 2), ("large", 1), ("empty", 1), ("small", 0), ("large", 2)
    ]  # fmt: skip


def begin_late(rank: int, folder: Path) -> tuple[str, list[int]]:
    """Be a host of two that begin again; the second writes its part when it pleases."""
    shelf = Shelf(folder / str(rank))
    shelf.folder.mkdir()
    writer = SnapshotWriter(shelf, 1, (rank, 2), [0, 1], 1)
    writer.bring([])
    elastic.set_silence(0.3)  # from now on ranks wait for a step only so long
    if rank == 1:
        time.sleep(1.0)
    writer.take(3, [entry("w", torch.full((3,), float(rank)))], {}, ABOUT)
    writer.wait()
    assert not writer.is_copying
    elastic.set_silence(60.0)
    return writer.failed, sorted(part.number for part in shelf.parts())


def test_ranks_wait_for_the_first_part_of_one_that_writes_slowly(tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        assert ranks.run(begin_late, tmp_path) == [("", [0, 1]), ("", [0, 1])]
    finally:
        ranks.close()


def test_a_folder_that_can_only_be_read_ends_no_training(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heterog.healing.shelf._LEFT_BYTES", 0)
    said: list[str] = []
    writer = SnapshotWriter(Shelf(small_disk), 0, (0, 1), say=said.append)
    values = [entry("w", torch.ones(3))]
    writer.take(1, values, {}, ABOUT)
    writer.settled = Moment(0, 2, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for step in (2, 3):
        writer.take(step, values, {}, ABOUT)
        assert "Read-only file system" in writer.failed
    assert len(said) == 1, "once, and not each time"
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    writer.take(4, values, {}, ABOUT)
    assert (writer.failed, steps(writer._shelf)) == ("", {4})


def begin_again(rank: int, folder: Path) -> list[set[tuple[int, int]]]:
    """Be a host of two that begin with a snapshot of which neither has the other's part."""
    shelf = Shelf(folder / str(rank))
    shelf.folder.mkdir()
    values = [entry(f"w{rank}", torch.full((3,), float(rank)))]
    before, settled, alone = Moment(0, 1, 2), Moment(0, 2, 2), Moment(0, 3, 2)
    for part in (*parts_of(before), *parts_of(settled), Part(alone, rank)):
        shelf.put(part, values, {}, ABOUT)
    writer, snapshots._REST = SnapshotWriter(shelf, 1, (rank, 2), [0, 1], 1), 0.0
    assert newest_complete([[*shelf.parts(), Part(alone, 1 - rank)]]) == alone
    there, own = [], shelf.put
    for number, is_full in ((4, rank == 0), (5, False), (6, False)):
        full = mock.Mock(side_effect=InputFileError("no room") if is_full else own)
        shelf.put = full  # type: ignore[method-assign]
        writer.take(number, values, {}, ABOUT)
        writer.wait()
        writer.end_step()
        there.append({part.moment[:2] for part in shelf.parts()})
    return there


def test_what_serves_is_kept_until_a_newer_one_is_where_it_should_be(tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        both = ranks.run(begin_again, tmp_path)
    finally:
        ranks.close()
    for there in both:
        assert [{step for _, step in each} for each in there] == [
            {1, 2, 3, 4},  # rank 0 had no room for its part of 4, so all others stay
            {1, 2, 3, 5},  # what is left of 4 is gone before 5 is written
            {5, 6},
        ]


def carry_badly(rank: int, folder: Path) -> tuple[list[str], list[list[int]], list[str]]:
    """Be a host of two, of which the first cannot read a file; then there is a bug."""
    shelf = Shelf(folder / str(rank))
    shelf.folder.mkdir()
    writer = SnapshotWriter(shelf, 0, (rank, 2), [0, 1], 1)
    content, values = shelf.content, [entry("w", torch.full((3,), float(rank)))]
    failed, there = [], []
    for error in (PermissionError("not for you") if rank == 0 else None, None):
        shelf.content = mock.Mock(side_effect=error or content)  # type: ignore[method-assign]
        writer.take(3, values, {}, ABOUT)
        writer.wait()
        failed.append(writer.failed)
        there.append(sorted(part.number for part in shelf.parts()))
    with pytest.raises(LostError) as lost:
        writer.bring(["0.9.0-2.index"] if rank == 0 else [])
    shelf.content = mock.Mock(side_effect=KeyError("a bug"))  # type: ignore[method-assign]
    writer.take(3, values, {}, ABOUT)
    writer.wait()
    with pytest.raises(KeyError) as bug:
        _ = writer.is_copying
    return failed, there, [str(lost.value), str(bug.value)]


def test_what_fails_while_ranks_copy_is_told(tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        first, second = ranks.run(carry_badly, tmp_path)
    finally:
        ranks.close()
    raised = ["0.9.0-2.index of a snapshot is on no host that has ranks.", "'a bug'"]
    assert first == (["not for you", ""], [[0, 1], [0, 1]], raised)
    assert second == (["", ""], [[1], [0, 1]], raised)


@pytest.mark.parametrize("has_agent", [True, False])
def test_a_rank_without_room_for_parts_of_others_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_agent: bool
) -> None:
    """By its signal, as wherever ranks are watched; under torchrun its agent leaves."""
    healing: Any = mock.Mock(_rank=2)
    healing._writer.bring.side_effect = InputFileError("no room")
    kill = mock.Mock()
    monkeypatch.setattr(os, "kill", kill)
    if has_agent:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
        with pytest.raises(InputFileError):
            HealingRank._bring(healing, ["0.3.0-2"])
        return
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    HealingRank._bring(healing, ["0.3.0-2"])
    kill.assert_called_once_with(os.getpid(), signal.SIGKILL)
    assert capsys.readouterr().err == "heterog: rank 2: no room\n"


def test_ranks_wait_longer_for_those_that_write_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under torchrun they wait for a step for a few seconds only, and disks may be slow."""
    done: list[Any] = []
    healing = mock.MagicMock(_silent_s=6.0, _written_s=11.0, _patience_s=300.0, _is_kept=False)
    healing._be_patient = partial(HealingRank._be_patient, healing)
    healing._request.limits.timeout_s = 300.0
    healing._take_snapshot = partial(HealingRank._take_snapshot, healing)
    healing._assignment.last, healing._step.num_steps = 5, 0
    now_s = 0.0

    def step(batch: Any) -> float:
        nonlocal now_s
        done.append("step")
        now_s += {1: 20.0, 3: 2.0}.get(done.count("step"), 0.1)
        return 1.0

    healing._step.side_effect = step
    healing._writer.end_step.side_effect = [[False] * 3, [True, False, False], *[[False] * 3] * 3]
    healing._writer.take.side_effect = lambda *_: done.append("take")
    monkeypatch.setattr(rank, "set_silence", lambda seconds, groups: done.append(seconds))
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    monkeypatch.setattr(rank, "own_entries", lambda *_: ([], {}))
    monkeypatch.setattr(rank, "check_can_save", lambda step: None)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    assert HealingRank.train(healing)
    # Not in the step after a snapshot, in which a rank may stop, too. But ten times as long as the
    # last step took: the first one compiles, and others may take far longer than planned.
    written = [200.0, "step", 211.0, "take"]
    assert done == ["step", *written, 6.0, "step", pytest.approx(20.0), "step", 6.0, "step"]
    told = [call.args[0] for call in healing._write.call_args_list]
    assert told.count("kept") == 1, "as soon as one is complete, and not with the next one"


def test_a_job_that_heals_may_train_for_days(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = mock.Mock()
    monkeypatch.setattr("heterog.healing.crew.wait_for_ranks", waited)
    own = mock.MagicMock(_host_of=[0], _hosts=[mock.MagicMock()])
    trained = Trained(running=Choice(path="", method="", devices=(0,)))
    Crew.run(own, trained, None, mock.Mock())
    assert waited.call_args.kwargs == {"counts_steps": False}


def test_a_folder_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is that of an earlier process with the same id taken for this one's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = elastic.path_of_host()
    with monkeypatch.context() as earlier:
        earlier.setattr(elastic, "fields_of_process", lambda pid: ["1"] * 20)
        assert elastic.path_of_host() != own
    elastic.path_of_host().mkdir(mode=0o755)
    with pytest.raises(HeterogError, match="others may read it; remove it"):
        elastic.folder_of_host()
