"""A process beside a job that answers questions, which are Python values, as are the answers.

It ends when its standard input does, so it does not outlive who started it, however that ends.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from heterog.errors import HeterogError
from heterog.runtime.launch import with_package


class Service:
    """Starts a module as such a process and talks to it.

    If the process ends, for want of memory say, the next question starts another one.

    Args:
        module: Name of a module that calls ``answer_questions`` when it is run.
        first: Question with which each such process begins; it has number 0.
        is_forked: Whether its ``main`` may be forked off this process, if that has imported it;
            importing takes seconds. Not where threads compute or an accelerator is used already.

    Attributes:
        has_ended: Whether the process was found to have ended.
    """

    has_ended = False

    def __init__(self, module: str, first: Any = None, *, is_forked: bool = False) -> None:
        self._module, self._first = module, first
        self._num_asked, self._is_closed = 0, False
        self._process: subprocess.Popen[bytes] | BaseProcess
        self._start(is_forked=is_forked)

    def _start(self, *, is_forked: bool = False) -> None:
        module = self._module
        self.has_ended = False
        self._here, there = Pipe()
        if is_forked and module in sys.modules:
            given = sys.modules[module].main, there.fileno()
            self._process = get_context("fork").Process(target=_be, args=given, daemon=True)
            self._process.start()
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=there.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": with_package()},
            )
        there.close()
        if self._first is not None:
            self._here.send((0, 0, self._first))

    def ask(self, question: Any, *, niceness: int = 0) -> int:
        """Send a question and return its number, which comes with the answer.

        Args:
            question: What ``answer_questions`` passes to its ``answer``.
            niceness: By how much its work is nicer than this process, so that ranks come first.

        Raises:
            HeterogError: the process was closed, or cannot be started again.
        """
        if self._is_closed:
            raise HeterogError(f"the process {self._module} has ended.")
        self._num_asked += 1
        asked = self._num_asked, niceness, question
        try:
            self._here.send(asked)
        except OSError:
            self._end()
            try:
                self._start()
                self._here.send(asked)
            except OSError as error:
                self.has_ended = True
                raise HeterogError(f"the process {self._module} cannot start: {error}") from error
        return self._num_asked

    def next_answer(self, timeout_s: float = 0.0) -> tuple[int, Any] | None:
        """The number of a question and its answer, or a ``HeterogError`` instead of that.

        Returns:
            ``None`` if no answer comes in time, or the process has ended.
        """
        try:
            return self._here.recv() if self._here.poll(timeout_s) else None
        except (EOFError, OSError):
            self.has_ended = True
            return None

    def answer_to(self, number: int, timeout_s: float) -> Any:
        """Wait for the answer to the question of a number; earlier answers are dropped.

        Raises:
            HeterogError: the question has none, or none came in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while found := self.next_answer(max(deadline_s - time.monotonic(), 0.0)):
            if found[0] == number:
                if isinstance(found[1], HeterogError):
                    raise found[1]
                return found[1]
        why = "has ended" if self.has_ended else "does not answer"
        raise HeterogError(f"the process {self._module} {why}.")

    def close(self) -> None:
        """End the process; nobody waits for its answers any more."""
        self._is_closed = self.has_ended = True
        self._end()

    def _end(self) -> None:
        self._here.close()
        self._process.kill()
        if isinstance(self._process, BaseProcess):
            self._process.join()
        else:
            self._process.wait()


def _be(main: Callable[[], None], there: int) -> None:
    """Become what ``python -m`` would be, after a fork."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for meant, number in enumerate((there, nothing, nothing)):
        os.dup2(number, meant)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # connections end with who made them
    main()


def answer_questions(
    answer: Callable[[Any], Any], heard: Callable[[], None] = lambda: None
) -> None:
    """Answer questions from standard input one after another until it ends.

    Answers go there, too: it is a socket, and libraries may write to standard output.

    Args:
        answer: Computes an answer; an error of it is sent instead.
        heard: Called in another thread as soon as a question arrives.
    """
    questions: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()
    who_asks = Connection(0)

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                question = who_asks.recv()
                heard()
                questions.put(question)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        number, niceness, question = questions.get()
        # A thread cannot become less nice again, so each question has one of its own.
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(_answer, answer, question, niceness).result()
        who_asks.send((number, found))


def _answer(answer: Callable[[Any], Any], question: Any, niceness: int) -> Any:
    if niceness and sys.platform == "linux":
        niceness += os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    try:
        return answer(question)
    except HeterogError as error:
        return HeterogError(str(error))
    except (OSError, RuntimeError, ValueError) as error:
        return HeterogError(f"{type(error).__name__}: {error}")
