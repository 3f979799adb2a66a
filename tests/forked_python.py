"""Scripts that are run by ``python``, whose libraries are there: they were imported before a fork.

``ForkedPython.command`` is a file that a test, or a shell script, runs as it would run ``python``
with a script. The process is forked off one that has imported torch, and maybe other libraries,
which take each process two to eight seconds of a core.
"""

import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from heterog.runtime.launch import free_port
from tests.runtime.ranks import FORKS

ROOT = Path(__file__).parents[1]
MOST_S = 300
"""Seconds after which a script is ended, so that ranks that wait for each other end, too."""
CLIENT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    job = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()])
    socket.send_fds(server, [job.encode() + b"\\n"], [0, 1, 2])
    sys.exit(int(server.recv(16) or 1))
"""
"""What ``command`` runs: the arguments, environment, folder and streams, for an exit code."""
WITHOUT = "TESTS_WITHOUT"
"""Variable that names a package of which a script shall find nothing imported."""


class ForkedPython:
    """The process that has imported libraries, and what starts scripts in it.

    Args:
        folder: for the command.
        libraries: that scripts import, beside torch.
    """

    def __init__(self, folder: Path, libraries: Sequence[str] = ()) -> None:
        address, self.command = folder / "address", folder / "python"
        client = [sys.executable, "-SsE", "-c", CLIENT, str(address)]
        self.command.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
        self.command.chmod(0o755)
        self._open, there = FORKS.Pipe()
        FORKS.Process(target=_serve, args=(str(address), there, libraries)).start()
        there.close()
        self._open.recv()  # it listens

    def run(self, script: Path, num_ranks: int, **variables: str) -> dict[int, str]:
        """Run a script once per rank, with the variables of torchrun; what each of them prints.

        Raises:
            AssertionError: a rank failed; with what it said.
        """
        common = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(num_ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            **variables,
        }
        outs = {rank: Path(f"{script}.{num_ranks}.{rank}") for rank in range(num_ranks)}
        running = {
            rank: self._start(script, out, {**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
            for rank, out in outs.items()
        }
        failed: list[int] = []
        while running and not failed:
            ended = [rank for rank, process in running.items() if process.poll() is not None]
            failed = [rank for rank in ended if running.pop(rank).returncode]
            time.sleep(0.01)
        for process in running.values():  # they would wait for the one that failed
            process.kill()
            process.wait()
        assert not failed, "\n".join(_errors_of(outs[rank]).read_text() for rank in failed)
        return {rank: out.read_text() for rank, out in outs.items()}

    def _start(
        self, script: Path, out: Path, variables: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        with out.open("wb") as words, _errors_of(out).open("wb") as errors:
            return subprocess.Popen(
                [self.command, script],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=errors,
            )

    def close(self) -> None:
        """End the process, which ends when this pipe does."""
        self._open.close()


def _errors_of(out: Path) -> Path:
    return Path(f"{out}.err")


def _serve(address: str, is_open: Connection, libraries: Sequence[str]) -> NoReturn:
    """Fork a process for each script that is asked for; nobody waits for them."""
    for library in libraries:
        import_module(library)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    is_open.send(True)
    ends, asks = is_open.fileno(), listener.fileno()
    while ends not in select.select([ends, asks], [], [])[0]:
        asked, _ = listener.accept()
        if os.fork() == 0:
            is_open.close()
            listener.close()
            _watch(asked)
        asked.close()
    os._exit(0)  # collecting what all these libraries made takes seconds


def _watch(asked: socket.socket) -> NoReturn:
    """Run a script in a process of its own, which ends with the one that asked for it."""
    text, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += asked.recv(1 << 20)
    pid = os.fork()
    if pid == 0:
        asked.close()
        arguments, variables, folder = json.loads(text)
        _be_script(arguments, variables, folder, streams)
    for stream in streams:
        os.close(stream)
    given_up = asked.fileno()
    if given_up in select.select([given_up, os.pidfd_open(pid)], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):
        asked.sendall(str(code).encode())
    os._exit(0)


def _be_script(
    arguments: Sequence[str], variables: Mapping[str, str], folder: str, streams: Sequence[int]
) -> NoReturn:
    code = 1
    signal.alarm(MOST_S)
    try:
        for meant, stream in enumerate(streams):
            os.dup2(stream, meant)
            os.close(stream)
        # New ones, as those of before may have been of files, and these of pipes.
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, 1, closefd=False) for number, mode in enumerate("rww")
        )
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        for name in [each for each in sys.modules if each.split(".")[0] == variables.get(WITHOUT)]:
            del sys.modules[name]
        _run([each for each in arguments if each != "-u"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
        if end.code is not code:
            print(end.code or "", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(arguments: Sequence[str]) -> None:
    """Do what ``python`` does with a script, or with ``-m`` and a module."""
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
