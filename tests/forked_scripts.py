"""Scripts on rank processes that are forked off one process with their libraries imported.

Each rank is a process of its own with the variables of torchrun; only that ``import torch`` and
``import transformers``, four seconds for each rank, are paid once.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from heterog.runtime.launch import free_port

ROOT = Path(__file__).parents[1]
MOST_S = 300
"""Seconds after which a rank is ended, so that ranks that wait for each other end, too."""


class ForkedScripts:
    """The process that has imported libraries, and what starts jobs in it."""

    def __init__(self, *libraries: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_scripts", *libraries],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{':'.join(sys.path)}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, script: Path, num_ranks: int, **variables: str) -> dict[int, str]:
        """Run a script once per rank; what each of them prints.

        Raises:
            AssertionError: a rank failed; with what it said.
        """
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(num_ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            **variables,
        }
        outs = {rank: f"{script}.{num_ranks}.{rank}" for rank in range(num_ranks)}
        jobs = [
            {"script": str(script), "out": out, "variables": common | _ranks_own(rank)}
            for rank, out in outs.items()
        ]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(jobs) + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        assert said, "the process that has imported the libraries ended; see what it wrote above"
        failed = json.loads(said)
        texts = {rank: Path(out).read_text() for rank, out in outs.items()}
        assert not failed, "\n".join(Path(f"{outs[rank]}.err").read_text() for rank in failed)
        return texts

    def close(self) -> None:
        """End the process, which ends when it is told no more."""
        self._process.communicate(timeout=10)


def _ranks_own(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _start(job: dict[str, Any]) -> int:
    """Fork one rank; its process."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be_rank(job)
    return pid


def _be_rank(job: dict[str, Any]) -> NoReturn:
    code = 1
    signal.alarm(MOST_S)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(job["out"], flags), 1)
        os.dup2(os.open(f"{job['out']}.err", flags), 2)
        os.environ.update(job["variables"])
        sys.argv = [job["script"]]
        runpy.run_path(job["script"], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_for(pids: list[int]) -> list[int]:
    """The ranks that failed; one that fails ends those that would wait for it."""
    waiting, failed = dict(zip(pids, range(len(pids)), strict=True)), []
    while waiting:
        pid, status = os.wait()
        rank = waiting.pop(pid)
        if status:
            failed.append(rank)
            for other in waiting:
                os.kill(other, 9)
            for other in waiting:
                os.waitpid(other, 0)
            break
    return failed


def main() -> None:
    """Import libraries, then run jobs, a line each, until there are no more."""
    for library in sys.argv[1:]:
        import_module(library)
    for line in sys.stdin:
        pids = [_start(job) for job in json.loads(line)]
        print(json.dumps(_wait_for(pids)), flush=True)
    os._exit(0)  # collecting what all these libraries made takes seconds


if __name__ == "__main__":
    main()
