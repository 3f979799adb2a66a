"""Ranks that are forked off one process, which has imported the modules of all ranks.

``import torch`` and the rest take four to five seconds of a core in each rank, and again in each
generation of a job that heals. So a launcher starts one process, the *server*, that imports them
and then forks a rank for each request (like the forkserver of ``multiprocessing``, but ranks are
ended, told apart and timed like any processes). The server runs no thread and touches no
accelerator, so a rank begins as if it had imported everything itself. It computes only ``warm``.

The launcher writes a line of JSON for each rank to the server's input, and reads lines from its
output: the id of each new process, and the exit code of each that ends. An ended rank stays a
zombie until the launcher has read its exit code, so that a signal never reaches another process
with a reused id. All ranks end with the server, and the server ends with the launcher.
"""

import ctypes
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

PRELOADED = ("torch._dynamo", "torch.distributed", "numpy")
"""Modules that ranks import later than their own module: capture, mostly."""

SWITCH = "HETEROG_FORKS"
"""Environment variable; ``off`` starts each rank by itself."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_ROOM = 4000 * " "
"""A long argument whose memory a rank overwrites with its command line; see ``_show``."""
_END_S = 3.0
_IMPORTED_S = 120.0
"""Seconds for imports; if they take longer, ranks are started by themselves."""


def end_with_parent(parent: int) -> None:
    """End this process when its parent ends for any reason; on Linux only.

    Args:
        parent: The parent's id, which may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def fields_of_process(pid: int) -> list[str]:
    """The third and further fields of a process's stat file, as proc(5) numbers them; Linux only.

    Raises:
        OSError: there is no such process any more, or no /proc.
    """
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()  # the name before it may contain spaces and brackets


@contextmanager
def rank_forks(own: Collection[str]) -> Iterator["Forks"]:
    """Fork the ranks that start in the body, and in nested bodies, off one process.

    Args:
        own: Environment variables in which ranks may differ: nothing reads them when imported.
    """
    global _forks
    if _forks is not None:
        yield _forks
        return
    _forks = Forks(own)
    try:
        yield _forks
    finally:
        _forks.close()
        _forks = None


def open_forks() -> "Forks | None":
    """The ``Forks`` of the outermost ``rank_forks``; ``None`` outside."""
    return _forks


_forks: "Forks | None" = None


class Forks:
    """The process that ranks are forked off, started for the first of them.

    Args:
        own: See ``rank_forks``.
        preloaded: Modules that are imported before a rank is forked, beside the rank's own.
        imported_s: Seconds after which imports are taken to hang.
    """

    def __init__(
        self,
        own: Collection[str],
        preloaded: Sequence[str] = PRELOADED,
        imported_s: float = _IMPORTED_S,
    ) -> None:
        self._own, self._preloaded, self._imported_s = frozenset(own), list(preloaded), imported_s
        self._process: subprocess.Popen[bytes] | None = None
        self._common: dict[str, str] = {}
        self._lock = threading.RLock()
        self._unread = b""
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._running: set[int] = set()  # ranks whose exit code was not read yet
        self._num_asked = 0
        self._is_lost = not hasattr(os, "pidfd_open")

    def start(
        self, module: str, arguments: Sequence[str], variables: Mapping[str, str], words: Path
    ) -> "_Forked | None":
        """Fork a rank in a process group of its own.

        Args:
            module: Module whose function ``main`` the rank runs.
            arguments: Its command-line arguments.
            variables: Its whole environment.
            words: Path of the file for its output.

        Returns:
            The rank's process; ``None`` if it has to be started otherwise: forking is switched off
            or not possible here, or ranks that were forked in another environment still run.
        """
        with self._lock:
            if variables.get(SWITCH) == "off" or self._is_lost or not self._has_begun(variables):
                return None
            try:
                folder = os.getcwd()
            except OSError:  # the folder was removed; a process of its own still inherits it
                return None
            number = self._num_asked
            self._num_asked += 1
            job = {
                "number": number,
                "module": module,
                "preloaded": self._preloaded,
                "arguments": list(arguments),
                "variables": dict(variables),
                "folder": folder,
                "words": str(words.absolute()),
            }
            self._tell(job)
            deadline_s = time.monotonic() + self._imported_s
            while number not in self._pids and not self._is_lost:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0.0 and not self._running:
                    self.close()
                # The server is not given up while ranks run, because they would end with it.
                self._read(max(left_s, 1.0))
            if number not in self._pids:
                return None
            pid = self._pids.pop(number)
            self._running.add(pid)
            return _Forked(self, pid)

    def warm(self, module: str, *arguments: str) -> None:
        """Let the server call a module's ``warm``, whose work all later ranks then share.

        It may start no thread and touch no accelerator. Only the next rank waits for it, and
        whoever wants to hear of the end of one.
        """
        with self._lock:
            self._tell({"warm": module, "arguments": arguments})

    def hear_end(self, rank: "_Forked", timeout_s: float | None) -> None:
        """Set the exit code of a rank, if it ends within these seconds.

        Several threads may wait for one rank, whose exit code the server writes only once.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            if rank.code is not None:  # another thread has read it
                return
            self._read(0.0)
            while rank.pid not in self._codes and not self._is_lost:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0.0:
                    return
                self._read(left_s)
            self._running.discard(rank.pid)
            # Without an exit code, the rank was killed with the server.
            rank.code = self._codes.pop(rank.pid, -int(signal.SIGKILL))
            self._tell({"let_go": rank.pid})

    def close(self) -> None:
        """End the process, and with it all ranks that were forked off it."""
        with self._lock:
            self._is_lost = True
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _has_begun(self, variables: Mapping[str, str]) -> bool:
        """Whether the server runs in this environment; starts or restarts it there if possible."""
        common = {name: value for name, value in variables.items() if name not in self._own}
        if self._common != common and not self._running:
            self._end()
            self._unread = b""
        if self._process is None:
            launcher = os.getpid()
            self._common = common
            self._process = subprocess.Popen(
                [sys.executable, "-m", "heterog.runtime.ranks.forks", _ROOM],
                env=self._common,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=lambda: end_with_parent(launcher),
            )
        return self._common == common

    def _tell(self, what: Mapping[str, Any]) -> None:
        if self._process is None or self._is_lost:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._is_lost = True

    def _read(self, timeout_s: float | None) -> None:
        """Read the server's output of these seconds; end of file means that it has ended."""
        if self._process is None or self._is_lost:
            return
        assert self._process.stdout is not None
        said = self._process.stdout.fileno()
        if not select.select([said], [], [], timeout_s)[0]:
            return
        new = os.read(said, 1 << 16)
        self._is_lost = not new
        *lines, self._unread = (self._unread + new).split(b"\n")
        for line in lines:
            what = json.loads(line)
            if "number" in what:
                self._pids[what["number"]] = what["pid"]
            else:
                self._codes[what["pid"]] = what["code"]


class _Forked:
    """A rank that was forked, with the part of the interface of ``Popen`` that is in use."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self._forks.hear_end(self, 0.0)
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            self._forks.hear_end(self, timeout)
        if self.code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.code


RankProcess: TypeAlias = subprocess.Popen[bytes] | _Forked
"""A rank's process, which leads a process group of its id."""


class _Server:
    """The server: forks ranks and reports their exit codes."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._pids: dict[int, int] = {}  # by pidfd
        self._unread = b""

    def serve(self) -> dict[str, Any] | None:
        """Fork ranks on request; returns its job in a rank, ``None`` in the server at its end."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._pids:
                    self._tell_end(descriptor)
                    continue
                new = os.read(0, 1 << 16)
                if not new:
                    self._end_all()
                    return None
                *lines, self._unread = (self._unread + new).split(b"\n")
                for line in lines:
                    what = json.loads(line)
                    if "let_go" in what:
                        os.waitpid(what["let_go"], 0)
                    elif "warm" in what:
                        with suppress(Exception):  # the rank meets the same error
                            import_module(what["warm"]).warm(*what["arguments"])
                    elif self._is_rank(what):
                        return dict(what)

    def _is_rank(self, job: Mapping[str, Any]) -> bool:
        """Fork a rank; ``True`` in the rank, ``False`` in the server."""
        for name in (job["module"], *job["preloaded"]):
            # The rank meets the same error, and can report it.
            with suppress(Exception):
                import_module(name)
        gc.freeze()  # otherwise a rank's collector copies all imported pages, for 0.3 s each time
        pid = os.fork()
        if pid == 0:
            for descriptor in self._pids:
                os.close(descriptor)
            return True
        with suppress(OSError):  # server and rank both do it, so that signals reach it from now on
            os.setpgid(pid, pid)
        descriptor = os.pidfd_open(pid)
        self._pids[descriptor] = pid
        self._poll.register(descriptor, select.POLLIN)
        _say({"number": job["number"], "pid": pid})
        return False

    def _tell_end(self, descriptor: int) -> None:
        found = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
        assert found is not None
        is_exit = found.si_code == os.CLD_EXITED
        code = found.si_status if is_exit else -found.si_status
        _say({"pid": self._pids.pop(descriptor), "code": code})
        self._poll.unregister(descriptor)
        os.close(descriptor)

    def _end_all(self) -> None:
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)


def _say(what: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _be_rank(job: Mapping[str, Any], parent: int) -> None:
    """Become what ``python -m module arguments`` would be in its environment and folder."""
    with suppress(OSError):
        os.setpgid(0, 0)
    end_with_parent(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    words = os.open(job["words"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for descriptor, meant in ((nothing, 0), (words, 1), (words, 2)):
        os.dup2(descriptor, meant)
    os.close(nothing)
    os.close(words)
    os.environ.clear()
    os.environ.update(job["variables"])
    os.chdir(job["folder"])
    if not sys.flags.safe_path:
        sys.path[0] = job["folder"]
    random.seed()
    with suppress(ImportError):
        import_module("numpy").random.seed()  # otherwise forked ranks would draw alike
    _show([sys.executable, "-m", job["module"], *job["arguments"]])
    module = import_module(job["module"])
    sys.argv = [str(module.__file__), *job["arguments"]]
    module.main()


def _show(command: Sequence[str]) -> None:
    """Let ``ps`` and ``pgrep -f`` show a command as this process's, cut to the available memory.

    The kernel shows the memory in which the arguments of a process lie; proc(5) says where it is.
    """
    with suppress(OSError, ValueError, IndexError):
        fields = fields_of_process(os.getpid())
        begin, end = int(fields[45]), int(fields[46])
        shown = b"\0".join(os.fsencode(word) for word in command)[: end - begin - 1]
        ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def main() -> None:
    """Serve a launcher; see the module."""
    server = os.getpid()
    job = _Server().serve()
    if job is None:
        os._exit(0)  # an ordinary exit would first collect all imported modules
    _be_rank(job, server)


if __name__ == "__main__":
    main()
