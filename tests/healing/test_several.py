"""Jobs of several machines: who leads, who may join, and what the loss of a machine is."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

import pytest

from heterog.errors import HeterogError
from heterog.healing.assignment import Assignment
from heterog.healing.host import HostProcess, main
from heterog.healing.rendezvous import TOKEN, Rendezvous, own_host
from heterog.healing.several import SeveralHosts
from heterog.runtime.launch import free_port
from heterog.runtime.ranks.watching import LaunchError, Limits
from heterog.runtime.request import RunRequest
from tests.runtime.ranks import FORKS, capture_before_forks
from tests.simulator.builders import cluster_of
from tests.thorough import THOROUGH

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="hosts know interfaces by ioctl")
SECRET = "known to all hosts of this job"
ROOT = Path(__file__).parents[2]
REQUEST = RunRequest(plan=Path("plan.json"))
DEVICES = ((1.0, ["T4"]), (1.0, ["T4", "T4"]), (1.0, ["T4"]))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    monkeypatch.setenv(TOKEN, SECRET)
    return Rendezvous.parse(f"127.0.0.1:{free_port()}")


def test_a_rendezvous_is_an_address_and_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    assert Rendezvous.parse("head") == Rendezvous(address="head", port=29400, token=SECRET)
    assert Rendezvous.parse("[::1]:77").address == "::1"
    for text in ("", ":5", "head:", "head:x", "head:0", "head:70000"):
        with pytest.raises(HeterogError, match="is no address; write HOST:PORT, such as"):
            Rendezvous.parse(text)
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(HeterogError, match="HETEROG_TOKEN has no secret of at least 16 char"):
        Rendezvous.parse("head")


def test_one_machine_leads_and_others_do_not(place: Rendezvous) -> None:
    leading = place.listen()
    assert leading is not None
    assert place.listen() is None, "somebody leads already"
    leading.close()
    elsewhere = Rendezvous(address="192.0.2.1", port=place.port, token=SECRET)
    assert elsewhere.listen() is None, "this address is another machine's"
    with pytest.raises(HeterogError, match=r"the rendezvous no\.such\.name\.invalid is not known"):
        Rendezvous(address="no.such.name.invalid", port=1, token=SECRET).listen()


def test_a_host_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_host("b", ["a", "b"]) == 1
    monkeypatch.setattr(socket, "gethostname", lambda: "b.example.org")
    assert own_host("", ["a", "b"]) == 1
    with pytest.raises(
        HeterogError, match=r"'b\.example\.org' is no host of the plan; name this one"
    ):
        own_host("", ["a", "c"])
    with pytest.raises(HeterogError, match="'d' is no host of the plan; `host` names one of a, c"):
        own_host("d", ["a", "c"])


def be_host(words: list[str], variables: dict[str, str], said: Path) -> None:
    """A process of ``heterog.healing.host``, whose ranks have no model.

    What is tested is who starts, hears and ends them.
    """
    os.environ |= variables
    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
    sys.argv = ["host", *words]
    with mock.patch("heterog.healing.crew.RANK_MODULE", "tests.healing.small_rank"):
        main()


class Hosts:
    """Real processes of ``heterog.healing.host``, all on this machine."""

    def __init__(
        self, place: Rendezvous, out: Path, request: RunRequest, session: pytest.Session
    ) -> None:
        capture_before_forks(session)  # as tests after these fork off the same process
        self._place, self._out, self._request = place, out, request
        self.processes: dict[str, ForkServerProcess] = {}

    def start(self, host: str) -> None:
        words = [f"127.0.0.1:{self._place.port}", host, "p", self._request.to_json()]
        variables = {TOKEN: SECRET, "PYTHONPATH": str(ROOT), "SMALL_OUT": str(self._out)}
        self.processes[host] = FORKS.Process(
            target=be_host, args=(words, variables, self._out / f"{host}.said")
        )
        self.processes[host].start()

    def words_of(self, host: str) -> str:
        """What a host that ended said."""
        self.processes.pop(host).join(60)
        return (self._out / f"{host}.said").read_text().strip()


@pytest.fixture
def started(
    place: Rendezvous,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], tuple[SeveralHosts, Hosts, list[str]]]]:
    """Starts hosts A, B with two devices, and C, whose ranks get a model's name."""
    made: list[tuple[SeveralHosts, Hosts]] = []
    monkeypatch.setattr("heterog.runtime.ranks.watching._GRACE_S", 0.1)  # no rank ends by itself

    def start(model: str) -> tuple[SeveralHosts, Hosts, list[str]]:
        said: list[str] = []
        asked = replace(REQUEST, model=model, limits=Limits(timeout_s=60.0))
        listening = place.listen()
        assert listening is not None
        crew = SeveralHosts(
            cluster_of(*DEVICES), "p", listening, place, asked, say=said.append, join_s=60.0
        )
        hosts = Hosts(place, tmp_path, asked, request.session)
        made.append((crew, hosts))
        for name in "ABC":
            hosts.start(name)
        crew.open(tmp_path, "token of the keepers")
        return crew, hosts, said

    yield start
    for crew, hosts in made:
        crew.close("")
        for process in hosts.processes.values():
            process.kill()
            process.join()


def decision(generation: int, folder: Path) -> Callable[[], Assignment]:
    plan = folder / "some_plan.json"
    plan.write_text(f"the plan of generation {generation}")
    return lambda: Assignment(
        generation=generation, plan=str(plan), last=9, moment=None, checkpoint="", keepers=(),
        token="", host_of=(), copies=1,
    )  # fmt: skip


def stop_at_first_step(crew: SeveralHosts) -> Callable[[str], None]:
    return lambda stage: crew.ask_to_stop() if stage.startswith("step") else None


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


Start = Callable[[str], tuple[SeveralHosts, Hosts, list[str]]]


@THOROUGH
def test_a_lost_machine_loses_its_ranks_and_its_keeper_and_may_come_back(
    started: Start, tmp_path: Path
) -> None:
    crew, hosts, said = started("")
    assert crew.start_keepers([0, 1, 2])
    assert len({place.port for place in crew.places()}) == 3
    before_s = time.monotonic()
    crew.run(0, [0, 1, 2, 3], decision(0, tmp_path), stop_at_first_step(crew))
    (event,) = crew.new_events()
    assert before_s < event["at_s"] < time.monotonic()
    seen = [json.loads((tmp_path / f"0.{rank}.json").read_text()) for rank in range(4)]
    assert [each["local"] for each in seen] == [["0", "1"], ["0", "2"], ["1", "2"], ["0", "1"]]
    assert {tuple(each["meet"]) for each in seen} == {("127.0.0.1", "4321", "4")}
    assert {each["plan"] for each in seen} == {"the plan of generation 0"}
    assert {each["interface"] for each in seen} == {"lo"}

    keeper = crew.keeper_pids[1]

    def kill(stage: str) -> None:
        if stage.startswith("step"):
            hosts.processes["B"].kill()

    with pytest.raises(LaunchError, match="rank 1 was killed by signal 9") as failed:
        crew.run(1, [0, 1, 2, 3], decision(1, tmp_path), kill)
    assert failed.value.lost == (1, 2)
    assert said == ["host B is lost"]
    assert [crew.is_here(device) for device in range(4)] == [True, False, False, True]
    wait_until(lambda: not os.path.exists(f"/proc/{keeper}"))
    assert not crew.start_keepers([0, 2]), "one was lost"
    assert sorted(place.host for place in crew.places()) == [0, 2]

    # Device 3 is rank 1 now; and a lost machine that is used all the same is lost at once.
    crew.run(2, [0, 3], decision(2, tmp_path), stop_at_first_step(crew))
    assert json.loads((tmp_path / "2.1.json").read_text())["meet"][2] == "2"
    with pytest.raises(LaunchError) as failed:
        crew.run(3, [0, 1, 3], decision(3, tmp_path), lambda stage: None)
    assert failed.value.lost == (1,)

    hosts.start("B")
    wait_until(lambda: crew.is_here(1))
    assert said[1:] == ["host B is there again"]
    crew.start_keepers([0, 1, 2])
    assert crew.start_keepers([0, 1, 2]), "all are alive again"
    crew.run(4, [0, 1, 2, 3], decision(4, tmp_path), stop_at_first_step(crew))
    crew.close("")
    for process in hosts.processes.values():
        process.join(30)
        assert process.exitcode == 0


def test_who_may_not_join_is_told_why_and_an_error_of_a_rank_reaches_all(
    started: Start, place: Rendezvous, tmp_path: Path
) -> None:
    crew, hosts, _ = started("fails")
    other = replace(place, token="some other secret")
    for where, host, program, why in (
        (place, "D", "p", "the plan has no host 'D', but A, B, C"),
        (place, "B", "p", "another command runs as host 'B' already"),
        (place, "A", "q", "it runs another plan than the host that leads; copy"),
        (other, "A", "p", "does not know this job's secret; set the same HETEROG_TOKEN"),
    ):
        with pytest.raises(HeterogError, match=why):
            HostProcess(where, host, program, REQUEST).run()
    with pytest.raises(
        LaunchError, match=r"rank 1 failed with exit code 1.*it has failed"
    ) as failed:
        crew.run(0, [0, 1, 2, 3], decision(0, tmp_path), stop_at_first_step(crew))
    assert failed.value.lost == ()
    crew._hosts[2].connection.shutdown(socket.SHUT_RDWR)  # as if the leading host were gone
    assert hosts.words_of("C") == "heterog: the host that leads is gone; all ranks were ended."
    crew.close("rank 1 failed")
    assert {hosts.words_of(name) for name in "AB"} == {"heterog: rank 1 failed"}


def test_who_does_not_come_is_named(place: Rendezvous, tmp_path: Path) -> None:
    listening = place.listen()
    assert listening is not None
    crew = SeveralHosts(cluster_of(*DEVICES), "p", listening, place, REQUEST, join_s=0.1)
    with pytest.raises(HeterogError, match=r"A, B, C did not join within 0\.1 s; run the same"):
        crew.open(tmp_path, "")
    crew.close("")
