"""Keepers: what they hold, what they let go, and whom they talk to."""

import os
import signal
import socket
import struct
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest

from heterog.errors import HeterogError
from heterog.healing import keepers
from heterog.healing.keeper import Shelf, listen
from heterog.healing.keepers import Keeper, KeeperPlace, Keepers, holders, start_keeper
from heterog.healing.near_keeper import near_keeper
from heterog.healing.snapshots import Moment, Part, newest_complete
from heterog.healing.wire import WireError, _wait_at_most, receive_header, send_message

TOKEN = "secret"


def place_of(shelf: Shelf, host: int = 0) -> KeeperPlace:
    port = listen("127.0.0.1", TOKEN, shelf)
    return KeeperPlace(host=host, address="127.0.0.1", port=port, token=TOKEN)


def part(step: int, number: int = 0, num_parts: int = 1, num_bytes: int = 4) -> Part:
    return Part(moment=Moment(0, step), number=number, num_parts=num_parts, num_bytes=num_bytes)


def content(step: int) -> memoryview:
    return memoryview(bytes([step] * 4))


def test_what_was_put_is_read_and_what_is_settled_before_is_let_go() -> None:
    keeper = Keeper(place_of(Shelf()))
    keeper.put(part(1), {"a": 1}, content(1))
    keeper.put(part(2), {"a": 2}, content(2), Moment(0, 1))
    assert {each.moment.step for each in keeper.parts()} == {1, 2}, "1 is the last that is settled"
    keeper.put(part(3), {"a": 3}, content(3), Moment(0, 2))
    assert {each.moment.step for each in keeper.parts()} == {2, 3}
    assert keeper.index(part(2)) == {"a": 2}
    assert bytes(keeper.get(part(3), 1, 2)) == b"\3\3"
    with pytest.raises(WireError, match="part 0 of step 1 is not here"):
        keeper.get(part(1), 0, 4)
    with pytest.raises(WireError, match="3 bytes from 2 on are not in 4"):
        keeper.get(part(2), 2, 3)
    with pytest.raises(WireError, match="cannot 'dance'"):
        keeper._ask({"do": "dance"})


def test_a_snapshot_that_is_read_stays_until_its_reader_leaves() -> None:
    place = place_of(Shelf())
    writer, reader = Keeper(place), Keeper(place)
    writer.put(part(1), {}, content(1))
    reader.pin(part(1))
    for step in (2, 3, 4):
        writer.put(part(step), {}, content(step), Moment(0, step - 1))
    assert bytes(reader.get(part(1), 0, 4)) == b"\1\1\1\1"
    assert {each.moment.step for each in writer.parts()} == {1, 3, 4}


def test_a_rank_that_dies_while_it_sends_leaves_what_was_there() -> None:
    place = place_of(Shelf())
    keeper = Keeper(place)
    keeper.put(part(1), {}, content(1))
    dying = Keeper(place)
    send_message(dying._connection, {"do": "put", **part(2).to_header()}, b"\2\2")
    dying.close()
    assert [each.moment.step for each in keeper.parts()] == [1]
    keeper.put(part(3), {}, content(3), Moment(0, 1))
    assert [each.moment.step for each in keeper.parts()] == [1, 3]


def test_a_keeper_talks_only_to_who_knows_the_token() -> None:
    place = place_of(Shelf())
    with pytest.raises(WireError, match="digest sent was rejected"):
        Keeper(replace(place, token="wrong"))
    stranger = socket.create_connection((place.address, place.port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    Keeper(place).close()


def test_a_frozen_keeper_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "_REPLY_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # takes connections and says nothing
        port = frozen.getsockname()[1]
        with pytest.raises(WireError, match="silent"):
            Keeper(KeeperPlace(host=0, address="127.0.0.1", port=port, token="t"))


def test_a_keeper_that_freezes_later_is_not_waited_for() -> None:
    process, place = start_keeper(0, pid=os.getpid())
    try:
        keeper = Keeper(place)
        with socket.socket(fileno=os.dup(keeper._connection.fileno())) as peer:
            limit = peer.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.calcsize("ll"))
            assert struct.unpack("ll", limit) == (keepers._REPLY_S, 0)
            _wait_at_most(peer, 0.05)  # from here on: meeting a busy keeper may take longer
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # a signal that is sent is not yet obeyed
        with pytest.raises(WireError, match="silent"):
            keeper.parts()
        keeper.close()
    finally:
        process.kill()
        process.wait()


def test_messages_are_bounded() -> None:
    for text, why in ((b"{", "lost"), (b"[1,2]", "no JSON object")):
        reader, writer = Pipe(duplex=False)
        writer.send_bytes(text)
        with pytest.raises(WireError, match=why):
            receive_header(reader)
    reader, writer = Pipe(duplex=False)
    os.write(writer.fileno(), b"\x7f\xff\xff\xff")  # the length of more than 2 GiB
    with pytest.raises(WireError, match="lost"):
        receive_header(reader)
    with pytest.raises(WireError, match="there is no part 3 of 2"):
        Part.from_header(part(1).to_header() | {"number": 3, "num_parts": 2})
    with pytest.raises(WireError, match="has"):
        Part.from_header({"generation": "x"})


def test_only_complete_snapshots_count_and_later_generations_come_first() -> None:
    assert newest_complete([[part(1, 0, 2)], [part(2, 1, 2)]]) is None
    later = Part(moment=Moment(1, 3), number=0, num_parts=1, num_bytes=0)
    assert newest_complete([[part(9, 0, 1)], [later]]) == Moment(1, 3)


def test_redundancy_survives_a_keeper_that_is_killed(tmp_path: Path) -> None:
    """And one that is told of the end of its host says so, and goes on."""
    leaving = tmp_path / "leaving"
    one, two = (start_keeper(host, pid=os.getpid(), leaving=str(leaving)) for host in range(2))
    try:
        with Keepers([one[1], two[1]]) as keepers:
            for host, number in ((0, 0), (1, 0), (1, 1)):
                keepers.reached[host].put(part(1, number, 2), {}, content(1))
            assert holders(keepers.parts(), Moment(0, 1)) == {0: [0, 1], 1: [1]}
            assert not leaving.exists()
            two[0].terminate()
            one[0].kill()
            one[0].wait()
            assert keepers.newest() == Moment(0, 1)
            while not leaving.exists():
                time.sleep(0.01)
            two[0].kill()
            two[0].wait()
            assert keepers.newest() is None
    finally:
        for process, _ in (one, two):
            process.kill()
            process.wait()


def test_a_folder_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"heterog-keeper-{os.getuid()}-{os.getpid()}").mkdir(mode=0o755)
    with pytest.raises(HeterogError, match="others may read it; remove it"):
        near_keeper(0)
