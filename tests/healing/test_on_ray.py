"""Jobs that heal on a Ray cluster: nodes and the actor that leads are lost, training goes on."""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from heterog.graph.capture import capture
from heterog.healing.crew import HealingHost
from heterog.healing.on_ray import RayCrew, heal_on_ray
from heterog.healing.options import HealOptions
from heterog.healing.record import Assignment
from heterog.healing.shelf import Moment, Part, parts_of
from heterog.runtime.launch import parent_of
from heterog.runtime.ranks.on_ray import Host, actor_of, variables_of_ranks
from heterog.runtime.ranks.place import HERE
from heterog.runtime.request import RunRequest
from heterog.zoo import load_workload
from tests.healing.test_job import MODEL, losses_of_one_process, three
from tests.ray_nodes import ray_nodes
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of
from tests.thorough import THOROUGH


def test_devices_keep_their_number_on_a_host_when_others_are_lost() -> None:
    hosts = cluster_of((1.0, ["T4"]), (1.0, ["T4", "T4"]))
    found = variables_of_ranks(hosts.host_of, [0, 2], "10.0.0.1", 77)
    assert {host: list(ranks) for host, ranks in found.items()} == {0: [0], 1: [1]}
    assert found[1][1] == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77",
    }  # fmt: skip


def test_what_ranks_tell_is_heard_once_from_whoever_lives_to_tell_it(tmp_path: Path) -> None:
    crew = RayCrew(None, "job", three(), RunRequest(plan=tmp_path), 1)

    def told(*events: tuple[str, int]) -> list[tuple[str, int]]:
        crew.hear([{"event": what, "step": step, "at_s": 1.0} for what, step in events])
        return [(each["event"], each["step"]) for each in crew.new_events()]

    begun = [("taken up", 0), ("step", 1), ("step", 2)]
    assert told(*begun) == begun
    assert told(*begun, ("snapshot", 1)) == [("snapshot", 1)], "of rank 0"
    assert told(("step", 3), ("kept", 3)) == [("step", 3), ("kept", 3)]
    failed = {"event": "no snapshot", "why": "B: no room", "at_s": 1.0}
    crew.hear([failed, failed])
    assert len(crew.new_events()) == 2, "each host tells of itself"


class Threads:
    """An actor of Ray: each call has a thread of its concurrency group, or waits for one."""

    def __init__(self, host: Any, **groups: int) -> None:
        self.host = host
        self.groups = {name: ThreadPoolExecutor(number) for name, number in groups.items()}

    def __getattr__(self, name: str) -> Any:
        def options(concurrency_group: str = "others", num_returns: int = 1) -> Any:
            def remote(*about: Any) -> Any:
                group = self.groups[concurrency_group]
                asked = group.submit(getattr(self.host, name), *about)
                return asked if num_returns == 1 else [asked] * num_returns

            return mock.Mock(remote=remote)

        return mock.Mock(remote=options().remote, options=options)


def test_a_host_that_gives_answers_meanwhile(tmp_path: Path) -> None:
    """Although a checkpoint and a new generation of ranks are waited for, by many hosts each."""
    pytest.importorskip("ray")
    goes, host = threading.Event(), mock.Mock()
    host.give = lambda *parts: goes.wait()
    host.look.return_value = "answer"

    def remote(concurrency_groups: dict[str, int]) -> Any:
        def options(max_concurrency: int, **_: Any) -> Any:
            return mock.Mock(
                remote=lambda: Threads(host, others=max_concurrency, **concurrency_groups)
            )

        return lambda kind: mock.Mock(options=options)

    actor = actor_of(mock.Mock(remote=remote), mock.Mock(), HealingHost, 0, {})
    crew = RayCrew(None, "job", three(), RunRequest(plan=tmp_path), 1)
    crew._hosts = [mock.Mock(is_here=True, actor=actor) for _ in range(50)]
    parts = parts_of(Moment(0, 3, 50))

    def take(part: Part, files: Any, giver: Any) -> bool:
        try:
            return bool(actor.look.remote(0, 0).result(timeout=20) == "answer")
        finally:
            goes.set()

    held = {number: [part] for number, part in enumerate(parts)}
    assert crew._hand_over(held, parts[0].moment, (), take)


def test_ranks_can_be_looked_at_while_later_ones_start(monkeypatch: pytest.MonkeyPatch) -> None:
    process = mock.Mock(poll=lambda: None, pid=os.getpid())
    monkeypatch.setattr("heterog.runtime.ranks.on_ray.start_rank", lambda *_: process)
    host = Host("127.0.0.1")
    try:
        host._start(0, [], {3: {}})
        rank = host._running[1][3]
        rank.heartbeat.write_text("step 7 of 9")
        host._start(1, [], {3: {}})
        rank.look(0.0)
        assert rank.stage == "step 7 of 9"
        assert host._running[1][3].heartbeat != rank.heartbeat
    finally:
        monkeypatch.undo()
        host._open.close()


def test_a_node_without_room_for_the_files_of_ranks_is_gone_on_without(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    host = HealingHost(HERE)
    try:
        host._is_node, host._folder = True, tmp_path / "none"
        assignment = Assignment(generation=4, plan="", last=9, moment=None, checkpoint="")
        host.begin(assignment, b"", RunRequest(plan=tmp_path / "plan.json"), {2: {}})
        ((number, told),) = host.look(4, 0).ranks.items()
        assert (number, told.code) == (2, -signal.SIGKILL), "as if it had been killed"
        assert "does not exist" in told.words
    finally:
        host.close()


def test_a_node_announces_its_end_by_a_signal_or_is_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = mock.MagicMock()
    ray.get_runtime_context().get_node_id.return_value = "mine"
    ray._private.state.state.get_draining_nodes.return_value = {"other": 0}
    monkeypatch.setattr("heterog.runtime.ranks.on_ray.connect_to_ray", lambda: (ray, False))
    monkeypatch.setattr("heterog.healing.crew.connect_to_ray", lambda: (ray, False))
    monkeypatch.setattr("heterog.healing.crew._LOOK_S", 0.01)
    monkeypatch.setattr(HealingHost, "_start", lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    hosts = []
    try:
        for drained in (False, True):
            hosts.append(HealingHost())
            assert not hosts[-1].look(0, 0).is_leaving
            if drained:
                ray._private.state.state.get_draining_nodes.return_value["mine"] = 0
            else:
                os.kill(os.getpid(), signal.SIGTERM)
            deadline_s = time.monotonic() + 20
            while not hosts[-1].look(0, 0).is_leaving:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
        for host in hosts:
            host.close()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head, and three nodes with a T4 each."""
    with ray_nodes(monkeypatch, *[{"T4": 1}] * 3, namespace="heterog") as made:
        yield made


def kill_leader() -> None:
    """End the actor that leads the job."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_text()
            of_raylet = parent_of(parent_of(int(folder.name)))
        except OSError:  # it has ended
            continue
        if title.startswith("ray::_Leader") and of_raylet == os.getpid():
            os.kill(int(folder.name), signal.SIGKILL)


def kill_node_of_a_rank(nodes: Any) -> None:
    """End a node that has a rank, and all that it has started."""
    node = nodes.worker_nodes.copy().pop()
    raylet = node.all_processes["raylet"][0].process.pid
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_child = parent_of(int(folder.name)) == raylet
        except OSError:
            continue
        if is_child:
            os.kill(int(folder.name), signal.SIGKILL)
    nodes.remove_node(node, allow_graceful=False)


def kill_rank() -> None:
    """End a rank; the actor of its host, which has forked who forks ranks, lives on."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            actor = parent_of(parent_of(int(folder.name)))
            of_raylet = parent_of(parent_of(actor))
        except OSError:
            continue
        if b"heterog.healing.rank" in title and of_raylet == os.getpid():
            os.kill(int(folder.name), signal.SIGKILL)
            return


def heal(folder: Path, num_steps: int, options: HealOptions, **how: Any) -> dict[str, Any]:
    """Train a model on three hosts."""
    (folder / "model.py").write_text(MODEL)
    graph = capture(load_workload(f"{folder}/model.py:workload", None))
    make_plan(graph, three(), methods=["cp_ar"], budget="1e").save(folder / "plan.json")
    sources = (str(folder / "model.py"),)
    request = RunRequest(plan=folder / "plan.json", num_steps=num_steps, sources=sources)
    return heal_on_ray(request, options, **how)


OPTIONS = HealOptions(search_budget="", back_after_s=0.0, slow_factor=0.0)  # busy machines


@THOROUGH
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("where_models_are", "nodes")
def test_a_job_outlives_a_rank_whose_part_no_other_host_holds(tmp_path: Path) -> None:
    done: list[str] = []

    def watch(stage: str) -> None:
        words = stage.split()
        if words[0] == "step" and int(words[1]) >= 20 and not done:
            done.append("rank")
            kill_rank()

    measured = heal(tmp_path, 1500, replace(OPTIONS, redundancy=0), progress=watch)
    assert [(move["kind"], move["num_ranks"]) for move in measured["moves"]] == [("lost", 2)]
    assert measured["steps"] == list(range(1, 1502)), "none twice, none missing"


@THOROUGH
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("where_models_are")
def test_a_job_outlives_who_leads_it_and_a_node(nodes: Any, tmp_path: Path) -> None:
    said: list[str] = []
    done: list[str] = []

    def watch(stage: str) -> None:
        words = stage.split()
        number = int(words[1]) if words[0] == "step" else 0
        if number >= 20 and not done:
            done.append("leader")
            kill_leader()
        elif number and done == ["leader"] and any("is there again" in line for line in said):
            done.append("node")
            kill_node_of_a_rank(nodes)

    measured = heal(tmp_path, 3000, OPTIONS, progress=watch, say=said.append)
    assert done == ["leader", "node"], said
    assert [(move["kind"], move["num_ranks"]) for move in measured["moves"]] == [("lost", 2)]
    assert measured["steps"] == list(range(1, 3002)), "none twice, none missing"
    expected = losses_of_one_process(tmp_path, 3001)
    assert measured["losses"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    ray: Any = importlib.import_module("ray")
    assert ray.util.list_named_actors() == []
