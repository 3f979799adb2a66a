"""A process beside a job that answers requests: a line of JSON each way.

It ends when its standard input does, so it does not outlive who started it, however that ends.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

from heterog.errors import HeterogError
from heterog.runtime.launch import with_package

_END_S = 3.0
_POLL_S = 0.01

Message = dict[str, Any]


class Service:
    """Starts a module as such a process and talks to it.

    Args:
        module: Name of a module that calls ``answer_requests`` when it is run.
        is_forked: Whether its ``main`` may be forked off this process, if that has imported it;
            importing takes seconds. Not where threads compute or an accelerator is used already.
    """

    def __init__(self, module: str, *, is_forked: bool = False) -> None:
        self._replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._last_id = 0
        self._module = module
        asked, asking = os.pipe()
        saying, said = os.pipe()
        self._input, self._output = os.fdopen(asking, "wb"), os.fdopen(saying, "rb")
        self._process: subprocess.Popen[bytes] | BaseProcess
        if is_forked and module in sys.modules:
            main = sys.modules[module].main
            given = main, asked, said
            self._process = get_context("fork").Process(target=_be, args=given, daemon=True)
            self._process.start()
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=asked,
                stdout=said,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": with_package()},
            )
        os.close(asked)
        os.close(said)
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        if isinstance(self._process, BaseProcess):
            return self._process.is_alive()
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], *, niceness: int = 0) -> int:
        """Send a request and return its number, which the reply has as ``id``.

        Args:
            request: What ``answer_requests`` passes to its ``answer``.
            niceness: By how much its work is nicer than this process, so that ranks come first.

        Raises:
            HeterogError: the process has ended.
        """
        self._last_id += 1
        line = json.dumps({**request, "id": self._last_id, "niceness": niceness}) + "\n"
        try:
            self._input.write(line.encode())
            self._input.flush()
        except OSError as error:
            raise HeterogError(f"the process {self._module} has ended.") from error
        return self._last_id

    def replies(self) -> list[Message]:
        """Replies that have arrived since the last call."""
        found = []
        while not self._replies.empty():
            found.append(self._replies.get())
        return found

    def next_reply(self, timeout_s: float) -> Message | None:
        """The next reply; ``None`` if none comes in time or the process has ended."""
        try:
            reply = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return reply or None

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._input.close()
        end_s = time.monotonic() + _END_S
        while self.is_alive and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        if self.is_alive:
            self._process.kill()
        while self.is_alive:  # which also has the system forget it
            time.sleep(_POLL_S)
        self._output.close()

    def _read(self) -> None:
        with suppress(ValueError, OSError):
            for line in self._output:
                with suppress(json.JSONDecodeError):  # output of a library
                    reply = json.loads(line)
                    if isinstance(reply, dict):
                        self._replies.put(reply)
        self._replies.put({})  # wakes a waiting reader: no more replies come


def _be(main: Callable[[], None], asked: int, said: int) -> None:
    """Become what ``python -m`` would be, after a fork."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number, meant in ((asked, 0), (said, 1), (nothing, 2)):
        os.dup2(number, meant)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # connections end with who made them
    sys.stdin = open(0, closefd=False)
    main()


def answer_requests(
    answer: Callable[[Message], Message], heard: Callable[[Message], None] = lambda request: None
) -> None:
    """Answer requests one after another until the input ends.

    Args:
        answer: Computes the reply to a request; its errors become ``error`` of the reply.
        heard: Called in another thread as soon as a request arrives.
    """
    requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
    # Output of libraries is dropped; replies go where output went.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def listen() -> None:
        for line in sys.stdin:
            request = json.loads(line)
            heard(request)
            requests.put(request)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        request = requests.get()
        # A thread cannot become less nice again, so each request has one of its own.
        with ThreadPoolExecutor(1) as thread:
            reply = thread.submit(_answer, answer, request).result()
        out.write(json.dumps({**reply, "id": request["id"]}) + "\n")
        out.flush()


def _answer(answer: Callable[[Message], Message], request: Message) -> Message:
    if request["niceness"] and sys.platform == "linux":
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + int(request["niceness"])
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    try:
        return answer(request)
    except (HeterogError, OSError, RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
