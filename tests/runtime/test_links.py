"""Who is cut off is told from who is stopped, by what the kernel has heard."""

import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from unittest import mock

import pytest
from namespaces import inside, namespaces, set_link

from heterog.runtime.ranks import on_ray
from heterog.runtime.ranks.links import CUT_S, cut_off, end_connections, own_addresses
from heterog.runtime.ranks.on_ray import SILENT_S, HostStatus, NodeHost

HAS_NAMESPACES = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip")
LIMIT_S = 60.0


@pytest.mark.skipif(not HAS_NAMESPACES, reason="makes namespaces, which takes root")
def test_a_cut_link_is_no_stopped_process() -> None:
    with namespaces(2, "lk", "10.75.0") as [here, *machines]:
        connected, held = [], []
        for name, address in machines:
            with inside(name):
                there = socket.create_server((address, 5000))
            connected.append(socket.create_connection((address, 5000)))
            held += [there, there.accept()[0]]
        assert own_addresses() == {address for _, address in (here, *machines)}, "one process"
        to_cut, to_stopped = connected
        to_stopped.setblocking(False)
        with suppress(BlockingIOError):  # nobody reads any more, as in a stopped process
            while True:
                to_stopped.send(bytes(1 << 16))
        assert cut_off() == set()
        cut, stopped = (address for _, address in machines)
        set_link(machines[0][0], "down")
        to_cut.send(b"gradients")
        begin_s = time.monotonic()
        while (found := end_connections({cut, stopped})) != {cut}:
            assert not found, "stopped, not cut off"
            assert time.monotonic() < begin_s + LIMIT_S
            time.sleep(0.05)
        assert to_cut.recv(1) == b"", "as if the other side had ended"
        with pytest.raises(BlockingIOError):
            to_stopped.recv(1)
        for each in (*connected, *held):
            each.close()


def test_a_node_is_lost_sooner_if_its_link_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, actor, cut = mock.MagicMock(), mock.MagicMock(), set[str]()
    ray.wait.return_value = [], []  # it does not answer
    now_s = [100.0]
    monkeypatch.setattr("heterog.runtime.ranks.on_ray.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(on_ray, "cut_off", lambda: cut)

    def lost_after(address: str) -> float:
        """Seconds until a node of this address counts as lost."""
        host, begin_s = NodeHost(ray, actor), now_s[0]
        host.told = HostStatus("id", 0, {}, address=address)
        while host.is_here:
            now_s[0] += 0.25
            host.look()
        return now_s[0] - begin_s - 0.25

    assert lost_after("10.0.0.1") == SILENT_S
    cut.add("10.0.0.2")
    assert lost_after("10.0.0.1") == SILENT_S, "busy, or stopped"
    assert lost_after("10.0.0.2") == CUT_S
    asked = actor.look.remote.call_count
    assert asked >= 2 * SILENT_S, "or the kernel would have nothing to send to it"
