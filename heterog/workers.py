"""Workers for independent jobs: this process, processes of this machine, or Ray.

A job is ``work(shared, job)``: a function of a module, one large value for all jobs, which is
sent to each worker once, and a small value of its own. Results come in the order of the jobs, so
they depend neither on where jobs run nor on how many run at the same time.

``Seats`` are workers with memory: job ``i`` always runs on seat ``i``, so it may continue where
the previous job of that seat ended. ``signals_as_exit`` gives a process that others depend on the
time to end them.
"""

import atexit
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar, cast

from heterog.errors import HeterogError

RAY = "ray"
_HELP = "give a number of processes (4), ray (a whole Ray cluster) or ray:4"

Shared = TypeVar("Shared")
Job = TypeVar("Job")
Result = TypeVar("Result")


class Terminated(SystemExit):
    """SIGTERM or SIGHUP has come; no end that a user's code has asked for."""


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the body like Ctrl-C, so that it can clean up.

    Only the main thread can do this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    owner = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child ends as if there were no handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise Terminated(128 + number)

    # Existing handlers (a testbed's, for instance) have the same purpose.
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    try:
        for number in numbers:
            signal.signal(number, leave)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


class Closed(ABC):
    """A context manager that ends everything it started."""

    @abstractmethod
    def close(self) -> None:
        """End what was started; what still runs ends at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Workers(Closed):
    """Runs jobs; a context manager that ends everything it started."""

    @abstractmethod
    def map(
        self, work: Callable[[Shared, Job], Result], shared: Shared, jobs: Iterable[Job]
    ) -> Iterator[Result]:
        """Run ``work(shared, job)`` for every job; results in the order of the jobs.

        Jobs are taken from the iterable as workers become free, so a caller may stop early.

        Raises:
            HeterogError: a job raised one, or a worker was lost.
        """

    def stop(self) -> None:
        """Hand out no more jobs, and ask running ones for their results so far; callable once.

        Jobs that check ``is_asked_to_stop`` return early, and ``map`` yields what they return.

        Raises:
            KeyboardInterrupt: running jobs cannot be stopped here.
        """
        raise KeyboardInterrupt

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of jobs that run at a time."""

    @abstractmethod
    def seats(self) -> "Seats":
        """As many workers with memory, to be closed before these."""


class Here(Workers):
    """One job after another, in this process."""

    def map(
        self, work: Callable[[Shared, Job], Result], shared: Shared, jobs: Iterable[Job]
    ) -> Iterator[Result]:
        """Run each job when its result is asked for."""
        for job in jobs:
            yield work(shared, job)

    @property
    def count(self) -> int:
        """One job at a time."""
        return 1

    def seats(self) -> "Seats":
        """One more process, whose memory nobody else uses."""
        return Seats([Processes(1)])

    def close(self) -> None:
        """Nothing was started."""


HERE = Here()


class _Remote(Workers):
    """Common part of processes and Ray; it limits the number of jobs under way."""

    _is_stopped = False

    def map(
        self, work: Callable[[Shared, Job], Result], shared: Shared, jobs: Iterable[Job]
    ) -> Iterator[Result]:
        """Hand jobs out as others end."""
        limit = self._open(shared)
        ordered: deque[Future[_Outcome]] = deque()
        running: set[Future[_Outcome]] = set()
        try:
            for job in jobs:
                if len(running) >= limit:
                    running = wait(running, return_when=FIRST_COMPLETED).not_done
                if self._is_stopped:
                    break
                ordered.append(self._submit(work, job))
                running.add(ordered[-1])
                while ordered and ordered[0].done():
                    yield from self._results(ordered.popleft())
            while ordered:
                yield from self._results(ordered.popleft())
        finally:
            for future in ordered:
                self._cancel(future)

    @abstractmethod
    def _open(self, shared: Any) -> int:
        """Send ``shared``; return how many jobs may be under way."""

    @abstractmethod
    def _submit(self, work: Callable[[Any, Any], Any], job: Any) -> "Future[_Outcome]": ...

    def _cancel(self, future: "Future[_Outcome]") -> None:
        future.cancel()

    def _results(self, future: "Future[_Outcome]") -> Iterator[Any]:
        """The result of a job; nothing if it did not begin."""
        outcome = self._outcome(future)
        if outcome.error:
            raise HeterogError(outcome.error)
        if not outcome.is_left_out:
            yield outcome.value

    def _outcome(self, future: "Future[_Outcome]") -> "_Outcome":
        return future.result()

    def begin(
        self, work: Callable[[Any, Any], Any], shared: Any, job: Any
    ) -> Callable[[], list[Any]]:
        """Hand one job out; return a function that waits for its result: none if left out."""
        if self._is_stopped:
            return list
        self._open(shared)
        future = self._submit(work, job)
        return lambda: list(self._results(future))


class Seats(Closed):
    """Workers with memory: each is a process of its own, or an actor on Ray.

    Values that a job leaves in variables of its module are there for the next job on the seat.

    Args:
        crews: Workers of each seat.
    """

    def __init__(self, crews: Sequence[_Remote]) -> None:
        self._crews = crews

    def __len__(self) -> int:
        return len(self._crews)

    def run(
        self, work: Callable[[Shared, Job], Result], shared: Shared, jobs: Sequence[Job]
    ) -> list[Result | None]:
        """Run ``work(shared, jobs[i])`` on seat ``i``, all at the same time.

        Returns:
            Results in the order of the jobs; ``None`` for a job that was asked to stop before it
            began.

        Raises:
            HeterogError: a job raised one, or a worker was lost.
        """
        pairs = zip(self._crews, jobs, strict=False)
        waiting = [crew.begin(work, shared, job) for crew, job in pairs]
        results = [wait_for() for wait_for in waiting]
        return [result[0] if result else None for result in results]

    def stop(self) -> None:
        """Ask running jobs for their results so far; see ``Workers.stop``."""
        for crew in self._crews:
            crew.stop()

    def close(self) -> None:
        """End the workers; what still runs ends at once."""
        for crew in self._crews:
            crew.close()


class Processes(_Remote):
    """Processes of this machine.

    Ctrl-C and SIGTERM reach all processes of a terminal or a batch job; these processes ignore
    them and leave them to their parent. They end when the parent ends, in whatever way.

    Args:
        count: Number of processes.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None
        self._ends: tuple[Connection, Connection] | None = None  # closed by ``stop``
        self._handed: list[Future[_Outcome]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._file = ""
        self._shared: Any = None

    @property
    def count(self) -> int:
        """Number of processes."""
        return self._count

    def seats(self) -> Seats:
        """One process for each."""
        return Seats([Processes(1) for _ in range(self._count)])

    def _open(self, shared: Any) -> int:
        if self._pool is None or self._folder is None:
            context = multiprocessing.get_context("spawn")
            self._ends = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(self._count, context, _begin, self._ends[:1])
            self._folder = tempfile.TemporaryDirectory(prefix="heterog-")
        if not self._file or self._shared is not shared:
            # A new file, because running jobs may still read the previous one.
            number, self._file = tempfile.mkstemp(dir=self._folder.name)
            with os.fdopen(number, "wb") as file:
                pickle.dump(shared, file)
            self._shared = shared
        return 2 * self._count  # the next job waits in the pool

    def _submit(self, work: Callable[[Any, Any], Any], job: Any) -> "Future[_Outcome]":
        assert self._pool is not None
        self._handed = [each for each in self._handed if not each.done()]
        # A new process inherits the blocked signals, from its first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
        try:
            self._handed.append(self._pool.submit(_in_process, work, self._file, job))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._handed[-1]

    def stop(self) -> None:
        """See ``Workers``: running jobs are asked, waiting ones do not begin."""
        self._is_stopped = True
        if self._ends is not None:
            self._ends[1].close()

    def _outcome(self, future: "Future[_Outcome]") -> "_Outcome":
        try:
            return super()._outcome(future)
        except BrokenProcessPool as error:
            raise HeterogError(
                f"one of {self._count} worker processes ended without an answer, perhaps for "
                "lack of memory; use fewer workers."
            ) from error

    def close(self) -> None:
        """End the processes; processes that still work are killed, as nobody waits for them."""
        if self._pool is not None:
            processes = list((getattr(self._pool, "_processes", None) or {}).values())
            is_idle = all(future.done() for future in self._handed)
            self._pool.shutdown(wait=is_idle, cancel_futures=True)
            for process in processes:
                if not is_idle:
                    process.kill()
                process.join()
            self._pool, self._handed = None, []
        if self._ends is not None:
            for end in self._ends:
                end.close()
            self._ends = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        self._file, self._shared = "", None


def connect_to_ray() -> tuple[Any, bool]:
    """Ray's module, connected to the cluster of ``RAY_ADDRESS``, or to one that it starts here.

    Nothing is reported to Ray's makers unless ``RAY_USAGE_STATS_ENABLED`` says so.

    Returns:
        The module, and whether it was not connected before.

    Raises:
        HeterogError: Ray is not installed, or the cluster does not answer.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise HeterogError(
            "Ray is asked for, which is not installed; pip install heterog[ray]."
        ) from error
    is_mine = not ray.is_initialized()
    if is_mine:
        try:
            ray.init(
                namespace="heterog",
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).strip().split("\n")[0]
            raise HeterogError(
                f"cannot reach the Ray cluster at {os.environ.get('RAY_ADDRESS', 'hand')}: "
                f"{first}; start one with ray start --head, or unset RAY_ADDRESS."
            ) from error
    return ray, is_mine


class RayWorkers(_Remote):
    """Ray, of any size: the cluster of ``RAY_ADDRESS`` or of this machine, or a new local one.

    Every node needs this version of heterog. Ray restarts a lost job on another node. Nothing
    is reported to Ray's makers unless ``RAY_USAGE_STATS_ENABLED`` says so.

    Args:
        count: Number of jobs at a time; the cluster's number of CPUs if ``None``.

    Raises:
        HeterogError: Ray is not installed, or the cluster does not answer.
    """

    def __init__(self, count: int | None = None) -> None:
        self._ray, self._is_mine = connect_to_ray()
        self._count = count
        self._shared: Any = None
        self._box: list[Any] = []
        self._run = self._ray.remote(_on_ray)

    @property
    def count(self) -> int:
        """Number of jobs at a time: as asked for, or the CPUs that the cluster has now."""
        if self._count is not None:
            return self._count
        return max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def seats(self) -> Seats:
        """One actor for each; Ray does not restart lost ones."""
        return Seats([_RaySeat() for _ in range(self.count)])

    def _open(self, shared: Any) -> int:
        if not self._box or self._shared is not shared:
            # In a list, Ray passes the reference and not the value.
            self._box, self._shared = [self._ray.put(shared)], shared
        return self.count

    def _submit(self, work: Callable[[Any, Any], Any], job: Any) -> "Future[_Outcome]":
        return cast("Future[_Outcome]", self._run.remote(work, self._box, job).future())

    def _cancel(self, future: "Future[_Outcome]") -> None:
        reference = getattr(future, "object_ref", None)
        if reference is not None:
            self._ray.cancel(reference)

    def _outcome(self, future: "Future[_Outcome]") -> "_Outcome":
        try:
            return super()._outcome(future)
        except self._ray.exceptions.RayError as error:
            last = str(error).strip().split("\n")[-1]
            raise HeterogError(
                f"a Ray worker failed: {last}; every node needs this version of heterog and "
                "memory for the job."
            ) from error

    def close(self) -> None:
        """Leave the cluster; shut it down if it was started here."""
        self._box, self._shared = [], None
        if self._is_mine:
            self._ray.shutdown()


class _RaySeat(RayWorkers):
    """One actor of the Ray cluster that is open already."""

    def __init__(self) -> None:
        super().__init__(1)
        # Two calls at a time: ``run``, and ``stop`` while it runs.
        self._actor = self._ray.remote(max_concurrency=2)(_Remembering).remote()

    def _submit(self, work: Callable[[Any, Any], Any], job: Any) -> "Future[_Outcome]":
        return cast("Future[_Outcome]", self._actor.run.remote(work, self._box, job).future())

    def stop(self) -> None:
        """See ``Workers``: the running job is asked, later ones do not begin."""
        self._is_stopped = True
        self._actor.stop.remote()

    def close(self) -> None:
        """End the actor; the cluster is left running."""
        self._ray.kill(self._actor)
        super().close()


class _Remembering:
    """The class of an actor: one process, so variables of modules stay."""

    def run(self, work: Callable[[Any, Any], Any], box: list[Any], job: Any) -> "_Outcome":
        return _Outcome(is_left_out=True) if is_asked_to_stop() else _on_ray(work, box, job)

    def stop(self) -> None:
        _asked.set()


def open_workers(text: str) -> Workers:
    """The workers of ``"1"`` (this process), ``"4"`` (processes), ``"ray"`` or ``"ray:4"``.

    Raises:
        HeterogError: it is something else, too small, or Ray is asked for and not there.
    """
    kind, colon, number = text.strip().rpartition(":")
    if text.strip() == RAY:
        return RayWorkers()
    if (colon and kind != RAY) or not number.isdigit():
        raise HeterogError(f"cannot read `workers` {text}; {_HELP}.")
    if int(number) < 1:
        raise HeterogError(f"`workers` {text} is too small; {_HELP}.")
    if kind == RAY:
        return RayWorkers(int(number))
    return HERE if int(number) == 1 else Processes(int(number))


@contextmanager
def open_seats(text: str) -> Iterator[Seats | None]:
    """``Seats`` for the texts of ``open_workers``; ``None`` for ``"1"``: this process suffices."""
    with open_workers(text) as crew:
        if crew is HERE:
            yield None
            return
        with crew.seats() as seats:
            yield seats


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of a job, or the text of the error that a user should read.

    Only its text, because errors with arguments of their own do not survive pickling.
    """

    value: Any = None
    error: str = ""
    is_left_out: bool = False


def _outcome(work: Callable[[Any, Any], Any], shared: Any, job: Any) -> _Outcome:
    try:
        return _Outcome(work(shared, job))
    except HeterogError as error:
        return _Outcome(error=str(error))
    except KeyboardInterrupt:  # asked to stop before it had any result
        return _Outcome(is_left_out=True)


_kept: tuple[str, Any] = ("", None)
"""In a worker: name and value of the object that was sent once."""


_LEFT_TO_PARENT = {signal.SIGINT, signal.SIGTERM}
_asked = threading.Event()
"""In a worker: set when its parent wants results so far."""


def is_asked_to_stop() -> bool:
    """In a worker: whether its job should hand over its best so far; see ``Workers.stop``."""
    return _asked.is_set()


def _begin(open_while_wanted: Connection) -> None:
    # When Python exits, it would search all imported modules for garbage, which takes a second.
    atexit.register(gc.freeze)
    threading.Thread(target=_watch, args=(open_while_wanted,), daemon=True).start()


def _watch(open_while_wanted: Connection) -> None:
    """Wait until the parent closes its end, by a call or because it dies."""
    with suppress(EOFError, OSError):
        open_while_wanted.recv_bytes()
    _asked.set()
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_process(work: Callable[[Any, Any], Any], file: str, job: Any) -> _Outcome:
    global _kept
    if is_asked_to_stop():
        return _Outcome(is_left_out=True)
    if _kept[0] != file:
        with open(file, "rb") as opened:
            _kept = file, pickle.load(opened)
    return _outcome(work, _kept[1], job)


def _on_ray(work: Callable[[Any, Any], Any], box: list[Any], job: Any) -> _Outcome:
    global _kept
    (reference,) = box
    if _kept[0] != reference.hex():
        import ray

        _kept = reference.hex(), ray.get(reference)
    return _outcome(work, _kept[1], job)
