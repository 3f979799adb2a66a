"""Ranks that are forked off one process behave as processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from heterog.runtime.launch import parent_of, start_rank
from heterog.runtime.ranks.forks import SWITCH, Forks, RankProcess, open_forks, rank_forks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are told apart on Linux")

WAIT_S = 200.0
JOB = """
import json, os, random, sys, time
import numpy as np
IMPORTED_BY = os.getpid()
WARMED = []

def warm(what):
    WARMED.append((what, os.getpid()))
    raise ValueError("it is a rank that says so")

def main():
    about = {
        "arguments": sys.argv[1:], "folder": os.getcwd(), "pid": os.getpid(),
        "rank": os.environ["RANK"], "group": os.getpgid(0), "imported_by": IMPORTED_BY,
        "draws": [random.random(), np.random.random()], "input": sys.stdin.read(),
        "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd")),
        "warmed": WARMED,
    }
    print(json.dumps(about), flush=True)
    if sys.argv[1] == "wait":
        time.sleep(1000)
    if sys.argv[1] == "fail":
        raise ValueError("no")
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "job_of_forks.py").write_text(JOB)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}


@pytest.fixture
def forks() -> Iterator[Forks]:
    found = Forks(["RANK"], preloaded=[])
    yield found
    found.close()


def start(forks: Forks, variables: dict[str, str], words: Path, *arguments: str) -> RankProcess:
    found = forks.start("job_of_forks", arguments, variables, words)
    assert found is not None
    return found


def wait_until_told(words: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not words.read_text().endswith("\n"):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def wait_until_gone(rank: RankProcess) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while Path(f"/proc/{rank.pid}").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_ranks_are_processes_with_their_own_everything(
    forks: Forks, variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [Path(f"{rank}.words") for rank in range(3)]
    ranks = []
    for number in range(3):
        own = {**variables, "RANK": str(number)}
        ranks.append(start(forks, own, words[number], str(number), "a b"))
        if number == 1:
            forks.warm("job_of_forks", "a")
    assert [rank.wait(WAIT_S) for rank in ranks] == [0, 1, 2]
    assert [rank.poll() for rank in ranks] == [0, 1, 2], "told as often as it is asked for"
    told = [json.loads(each.read_text()) for each in words]
    for number, (rank, about) in enumerate(zip(ranks, told, strict=True)):
        assert about["pid"] == about["group"] == rank.pid
        assert about["rank"] == str(number)
        assert about["arguments"] == [str(number), "a b"]
        assert about["folder"] == str(tmp_path)
        assert about["input"] == ""
        assert about["descriptors"] == [0, 1, 2, 3], "and the one that lists them"
        wait_until_gone(rank)
    (parent,) = {about["imported_by"] for about in told}  # once for all
    assert [about["warmed"] for about in told] == [[], [], [["a", parent]]], "the later ones"
    draws = [draw for about in told for draw in about["draws"]]
    assert len(set(draws)) == len(draws), "no rank draws what another one draws"


def test_ends_are_told_as_of_any_process(
    forks: Forks, variables: dict[str, str], tmp_path: Path
) -> None:
    own = {**variables, "RANK": "0"}
    failed = start(forks, own, tmp_path / "failed", "fail")
    waiting = start(forks, own, tmp_path / "waiting", "wait")
    assert failed.wait(WAIT_S) == 1
    assert (tmp_path / "failed").read_text().endswith("ValueError: no\n")
    wait_until_told(tmp_path / "waiting")
    shown = Path(f"/proc/{waiting.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert shown[1:] == [b"-m", b"job_of_forks", b"wait"]
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)
    os.killpg(waiting.pid, signal.SIGKILL)
    assert waiting.wait(WAIT_S) == -signal.SIGKILL


def test_an_end_is_told_to_all_threads_that_wait(
    forks: Forks, variables: dict[str, str], tmp_path: Path
) -> None:
    rank = start(forks, {**variables, "RANK": "0"}, tmp_path / "words", "wait")
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(rank.wait, WAIT_S) for _ in range(8)]
        os.killpg(rank.pid, signal.SIGTERM)
        assert [each.result() for each in waiting] == [-signal.SIGTERM] * 8


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_ranks_end_with_what_they_were_forked_off(
    end: str, forks: Forks, variables: dict[str, str], tmp_path: Path
) -> None:
    rank = start(forks, {**variables, "RANK": "0"}, tmp_path / "words", "wait")
    if end == "closed":
        forks.close()
    else:
        os.kill(parent_of(rank.pid), signal.SIGKILL)
    assert rank.wait(WAIT_S) == -signal.SIGKILL
    wait_until_gone(rank)
    assert forks.start("job_of_forks", ["0"], variables, tmp_path / "more") is None


def test_imports_that_hang_are_given_up(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time; time.sleep(1000)")
    forks = Forks(["RANK"], preloaded=["hangs"], imported_s=0.5)
    own = {**variables, "RANK": "0"}
    for _ in range(2):  # the second one does not even begin
        assert forks.start("job_of_forks", ["0"], own, tmp_path / "words") is None


def test_what_libraries_may_read_when_imported_is_the_ranks_own(
    forks: Forks, variables: dict[str, str], tmp_path: Path
) -> None:
    first = start(forks, {**variables, "RANK": "0"}, tmp_path / "first", "wait")
    other = {**variables, "RANK": "1", "OMP_NUM_THREADS": "7"}
    assert forks.start("job_of_forks", ["0"], other, tmp_path / "second") is None
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait(WAIT_S) == -signal.SIGKILL
    second = start(forks, other, tmp_path / "second", "0")
    assert parent_of(second.pid) != os.getpid()
    assert second.wait(WAIT_S) == 0
    assert forks.start("job_of_forks", ["0"], {**other, SWITCH: "off"}, tmp_path / "x") is None
    assert first.poll() == -signal.SIGKILL


def test_bodies_within_share_one_process() -> None:
    outer = open_forks()
    with rank_forks([]) as forks:
        assert forks is outer
    assert open_forks() is outer is not None


def test_a_command_of_ours_is_forked_and_any_other_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "heterog.runtime.rank", "no", "such"]
    forked = start_rank(command, os.environ, tmp_path / "forked")
    plain = start_rank([sys.executable, "-c", "pass"], os.environ, tmp_path / "plain")
    assert isinstance(plain, subprocess.Popen)
    assert not isinstance(forked, subprocess.Popen)
    assert (forked.wait(WAIT_S), plain.wait(WAIT_S)) == (2, 0)
    assert "a rank takes one file and was given 2" in (tmp_path / "forked").read_text()
