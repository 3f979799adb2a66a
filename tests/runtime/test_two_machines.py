"""The page for two machines, typed by nobody else: its commands, in two namespaces."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import reduce
from pathlib import Path

import pytest

from tests.thorough import THOROUGH

PAGE = Path("docs/guide/two-machines.md")
START = Path("docs/start.md")
ADDRESSES = {"10.0.0.1": "10.79.0.1", "10.0.0.2": "10.79.0.2"}
FIRST, SECOND = 0, 1
WHERE = {
    "on the first machine": (FIRST,),
    "on the second machine": (SECOND,),
    "at once on the second machine": (SECOND,),
    "on both machines": (FIRST, SECOND),
}

HAS_NAMESPACES = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare")


class Machine:
    """Processes and a network of their own; all ends with the first of its processes."""

    def __init__(self, number: int, folder: Path) -> None:
        self._name, self._folder = f"two{number}", folder
        self.address = f"10.79.0.{number + 1}"
        self._first = subprocess.Popen(
            ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "inf"]
        )

    @property
    def pid(self) -> int:
        """The first process, as it is known outside."""
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        while not children.read_text():
            assert self._first.poll() is None
        return int(children.read_text())

    def start(self, script: str) -> subprocess.Popen[str]:
        """Start a script of bash, in the folder."""
        variables = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path().resolve()),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",  # of a machine that is busy
            "RAY_worker_niceness": "0",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        where = ["nsenter", "--target", str(self.pid), "--net", "--pid", "--mount"]
        return subprocess.Popen(
            [*where, f"--wdns={self._folder}", "bash", "-ec", script],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def close(self) -> None:
        """End all that runs there."""
        self._first.kill()
        self._first.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Two of them, with a link."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    with ExitStack() as stack:
        made = [Machine(number, tmp_path) for number in (FIRST, SECOND)]
        for each in made:
            stack.callback(each.close)
        first, second = (str(each.pid) for each in made)
        peer = ("peer", "name", "eth0", "netns", second)
        ip("link", "add", "eth0", "netns", first, "type", "veth", *peer)
        for each in made:
            up = f"ip addr add {each.address}/24 dev eth0; ip link set eth0 up; ip link set lo up"
            done = each.start(f"{up}; ip route add default dev eth0")
            assert done.wait() == 0, done.communicate()
        yield made


def blocks(heading: str) -> list[list[tuple[int, str]]]:
    """The commands below a heading, each with its machine; lists of what runs at once."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found: list[list[tuple[int, str]]] = []
    for where, text in re.findall(r'```bash title="([^"]*)"\n(.*?)```', section, re.DOTALL):
        script = reduce(lambda said, names: said.replace(*names), ADDRESSES.items(), text)
        if not where.startswith("at once "):
            found.append([])
        found[-1] += [(machine, script) for machine in WHERE[where]]
    return found


ENGINES = ("By torchrun", "By Ray")


@pytest.mark.parametrize("engine", ENGINES)
def test_both_machines_have_something_to_do(engine: str) -> None:
    found = [each for together in blocks(engine) for each in together]
    assert {machine for machine, _ in found} == {FIRST, SECOND}
    assert any("heterog" in script for _, script in found)
    assert not any(written in script for _, script in found for written in ADDRESSES)


@THOROUGH
@pytest.mark.distributed
@pytest.mark.skipif(not HAS_NAMESPACES, reason="makes namespaces, which takes root")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_stranger_trains_on_two_machines(
    machines: list[Machine], tmp_path: Path, engine: str
) -> None:
    if engine == "By Ray":
        pytest.importorskip("ray")
    model = re.search(r'title="my_model.py"\n(.*?)```', START.read_text(), re.DOTALL)
    assert model is not None
    (tmp_path / "my_model.py").write_text(model[1])
    said = ""
    for together in blocks(engine):  # the machines share a folder
        started = [machines[machine].start(script) for machine, script in together]
        told = [each.communicate(timeout=600)[0] for each in started]
        said += "".join(told)
        assert not any(each.returncode for each in started), said
    assert re.search(r' on 2 ranks: |"num_ranks": 2,', said), said
    assert "loss" in said
