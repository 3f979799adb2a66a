"""Starts one process per rank on this machine and makes sure that they end together.

Ranks report their stage through small files, one each, from which the launcher also sees that
they are alive: a rank that died, that is stopped, or whose step takes too long ends the job.
"""

import ctypes
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from heterog.errors import HeterogError
from heterog.files import check_writable, read_json
from heterog.planners.background import BackgroundPlan
from heterog.user_code import trusted_source

CHECKPOINT_INDEX = "checkpoint.json"
"""The index file in a checkpoint's folder."""
ALONE_STEPS = 3
"""Number of measured steps before a background job begins, which give the time alone."""
HEARTBEAT = "HETEROG_HEARTBEAT"
"""Variable with the path of the file to which a rank writes its stage."""
PORT_FILE = "HETEROG_PORT_FILE"
"""Variable with the file to which rank 0 writes the port it chose; absent if it is given."""
STEP_TIMEOUT_S = 300.0
"""Longer than the slowest step that we know of; PyTorch's own limit for gloo is 30 minutes."""

_POLL_S = 0.05
_GRACE_S = 2.0  # the first rank seen to fail may not be the first that did: wait for the others
_STOPPED_S = 1.0  # a debugger or a suspended container stops a process for a moment only
_END_S = 3.0
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Beside = Callable[[int], list[str]]
"""Gives the arguments of this Python for a process beside a rank, which ends with the ranks."""
Wrap = Callable[[int, list[str]], list[str]]
"""Changes the command of a rank, to run it somewhere else."""


class LaunchError(HeterogError):
    """Error of a rank that failed, died or did not end in time; the others were ended too.

    Attributes:
        last_words: Last line of output of each rank that had ended by itself, by rank.
        lost: Ranks whose process was killed or frozen from outside, for no fault of the job.
    """

    def __init__(
        self,
        text: str,
        last_words: Mapping[int, str] | None = None,
        *,
        lost: Sequence[int] = (),
    ) -> None:
        super().__init__(text)
        self.last_words = dict(last_words or {})
        self.lost = tuple(lost)


@dataclass(slots=True)
class _Rank:
    """A running rank and what is known of it."""

    process: subprocess.Popen[bytes]
    words: Path
    heartbeat: Path
    stage: str = ""
    since_s: float = field(default_factory=time.monotonic)
    stopped_since_s: float | None = None

    def look(self, now_s: float) -> None:
        """Read its stage, and whether its process is stopped."""
        stage = self.heartbeat.read_text() if self.heartbeat.exists() else ""
        if stage and stage != self.stage:
            self.stage, self.since_s = stage, now_s
        if _state(self.process.pid) != "T":
            self.stopped_since_s = None
        elif self.stopped_since_s is None:
            self.stopped_since_s = now_s


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    plan: Path,
    num_ranks: int,
    *,
    model: str = "",
    sources: Sequence[str] = (),
    num_steps: int = 10,
    timeout_s: float = 300.0,
    step_timeout_s: float = STEP_TIMEOUT_S,
    port: int = 0,
    save: Path | None = None,
    resume: Path | None = None,
    allow_nonfinite: bool = False,
    record: bool = False,
    background: BackgroundPlan | None = None,
    wrap: Wrap = lambda rank, command: command,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    progress: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Run a plan on local processes.

    Args:
        plan: Path of the plan.
        num_ranks: Number of devices of its cluster.
        model: Source of the workload; the plan's own if empty.
        sources: Python files that may be run although only the plan names them; see
            ``user_code.trusted_source``.
        num_steps: Number of measured steps.
        timeout_s: Seconds that the whole job may take.
        step_timeout_s: Seconds that a step may take.
        port: Port on which the ranks meet; 0 picks a free one.
        save: Folder for a checkpoint after the last step.
        resume: Folder of a checkpoint to begin with.
        allow_nonfinite: Go on when the loss is infinite or not a number.
        record: Record when each task ran in the last step.
        background: A job that trains beside each rank, at the lowest priority, after the first
            steps; its progress is added to the result.
        wrap: Changes each rank's command (to enter a namespace, say).
        environment: Further variables of each rank.
        progress: Called with what rank 0 does, whenever that changes.

    Returns:
        The measurements of rank 0.

    Raises:
        InputFileError: nothing can be saved at ``save`` or read from ``resume``, or the background
            job is made by a file that nobody named.
        LaunchError: a rank failed or the time is over; names the rank and its last words.
        HeterogError: there are too few steps to compare with and without a background job.
    """
    if background is not None and num_steps <= ALONE_STEPS:
        raise HeterogError(
            f"{num_steps} steps are too few beside a background job, which begins after "
            f"{ALONE_STEPS}; measure {3 * ALONE_STEPS} or more."
        )
    options = ["--model", model, "--steps", str(num_steps), "--timeout", str(timeout_s)]
    if save is not None:
        check_writable(save / CHECKPOINT_INDEX if save.is_dir() else save)
        options += ["--save", str(save.resolve())]
    if resume is not None:
        read_json(resume / CHECKPOINT_INDEX, "checkpoint")
        options += ["--resume", str(resume.resolve())]
    for source in sources:
        options += ["--source", source]
    if allow_nonfinite:
        options.append("--allow-nonfinite")
    if record:
        options.append("--record")
    with temporary_folder() as folder:
        output = folder / "measured.json"
        done = folder / "background"

        def beside(rank: int) -> list[str]:
            if background is None or rank not in background.devices:
                return []
            source = trusted_source(background.source, sources, str(plan))
            return [
                *("-m", "heterog.runtime.background", source),
                *("--batch-size", str(background.batch_size), "--limit", str(background.limit)),
                *("-o", f"{done}{rank}.json"),
            ]

        failed = run_commands(
            ["-m", "heterog.runtime.rank", str(plan.resolve()), *options, "-o", str(output)],
            num_ranks,
            timeout_s=timeout_s,
            step_timeout_s=step_timeout_s,
            port=port,
            wrap=wrap,
            environment=environment,
            beside=beside,
            progress=progress,
        )
        measured = read_json(output, "measurement")
        assert isinstance(measured, dict)
        if background is not None:
            each = [Path(f"{done}{rank}.json") for rank in range(num_ranks)]
            found = [read_json(path, "measurement") if path.exists() else {} for path in each]
            measured["background"] = _background_summary(measured, background, found) | {
                "failures": {str(rank): words for rank, words in failed.items()}
            }
        return measured


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone when the body ends, even if this process is killed meanwhile.

    A shell waits for the end of a pipe that only this process holds open, and then removes it. It
    is in a session of its own, so that what is sent to this process's group does not reach it.
    """
    with tempfile.TemporaryDirectory(prefix="heterog-") as name:
        # The ranks end with this process, but may need a moment to be gone.
        script = 'read -r line; sleep 1; rm -rf -- "$1"'
        cleaner = subprocess.Popen(
            ["/bin/sh", "-c", script, "heterog-cleaner", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Path(name)
        finally:
            _signal_group(cleaner, signal.SIGKILL)
            cleaner.wait()
            assert cleaner.stdin is not None
            cleaner.stdin.close()


def _background_summary(
    measured: Mapping[str, Any], background: BackgroundPlan, done: Sequence[Any]
) -> dict[str, Any]:
    """Results of both jobs; see ``runtime.background`` for how the limit was kept."""
    times = measured["step_times_s"]
    alone, together = times[:ALONE_STEPS], times[ALONE_STEPS:]
    # The background jobs of all ranks began after the steps without them.
    seconds = sum(together)
    return {
        "model": background.model,
        "limit": background.limit,
        "step_time_alone_s": statistics.median(alone),
        "step_time_s": statistics.mean(together),
        "slow_down": statistics.mean(together) / statistics.median(alone),
        "samples": [each.get("samples", 0) for each in done],
        "samples_per_s": sum(each.get("samples", 0) for each in done) / seconds,
        "ranks": list(done),
    }


def run_commands(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    timeout_s: float = 300.0,
    step_timeout_s: float = STEP_TIMEOUT_S,
    port: int = 0,
    wrap: Wrap = lambda rank, command: command,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    beside: Beside = lambda rank: [],
    progress: Callable[[str], None] = lambda stage: None,
) -> dict[int, str]:
    """Run this Python with the same arguments once per rank, under torchrun's variables.

    No rank survives: not an error, not a signal to this process, and on Linux not even its
    sudden death.

    Returns:
        The last words of processes beside ranks that ended before the ranks did, by rank.

    Raises:
        LaunchError: as ``run_ranks``.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        # For scripts that do not use ``rank.join``, which has rank 0 choose.
        "MASTER_PORT": str(port or free_port()),
        "WORLD_SIZE": str(num_ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ranks: list[_Rank] = []
    others: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}
    with signals_as_exit(), temporary_folder() as folder:
        if not port:
            common[PORT_FILE] = str(folder / "port")
        try:
            for rank in range(num_ranks):
                words, heartbeat = folder / f"rank{rank}.err", folder / f"rank{rank}.stage"
                own = {"RANK": str(rank), HEARTBEAT: str(heartbeat)}
                process = _start(
                    wrap(rank, [sys.executable, *arguments]),
                    {**os.environ, **common, **environment(rank), **own},
                    words,
                )
                ranks.append(_Rank(process, words, heartbeat))
                if beside(rank):
                    said = folder / f"beside{rank}.err"
                    command = wrap(rank, [sys.executable, *beside(rank)])
                    variables = {**os.environ, **environment(rank), **own}
                    others[rank] = _start(command, variables, said), said
            _wait(ranks, timeout_s, step_timeout_s, progress)
            return {
                rank: _last_words(said).removeprefix("heterog: ")
                for rank, (process, said) in others.items()
                if process.poll() is not None
            }
        finally:
            _end([rank.process for rank in ranks] + [process for process, _ in others.values()])


def _start(
    command: Sequence[str], variables: Mapping[str, str], words: Path
) -> subprocess.Popen[bytes]:
    """Start a rank in a process group of its own, to be ended with all that it starts."""
    launcher = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def die_with_launcher() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it was faster
                os._exit(1)

    with words.open("wb") as sink:
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            process_group=0,
            preexec_fn=die_with_launcher,
        )


def _wait(
    ranks: Sequence[_Rank],
    timeout_s: float,
    step_timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    """Wait until all ranks are done, one fails or stands still, or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    told = ""
    while True:
        codes = [rank.process.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return
        failed = [number for number, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            _wait_for_all(ranks, _GRACE_S)
            for rank in ranks:
                rank.look(time.monotonic())
            raise _failure(ranks, failed)
        now_s = time.monotonic()
        for rank in ranks:
            rank.look(now_s)
        if ranks[0].stage != told:
            told = ranks[0].stage
            progress(told)
        _check_alive(ranks, now_s, step_timeout_s)
        if now_s > deadline_s:
            waiting = [number for number, code in enumerate(codes) if code is None]
            raise LaunchError(
                f"ranks {waiting} did not end within {timeout_s:g} s ({_where(ranks)}); all ranks "
                "were ended. Raise --timeout if the steps take that long."
            )
        time.sleep(_POLL_S)


def _wait_for_all(ranks: Sequence[_Rank], limit_s: float) -> None:
    """Wait until all ranks have ended by themselves, or the limit is over."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if all(rank.process.poll() is not None for rank in ranks):
            return
        time.sleep(_POLL_S)


def _check_alive(ranks: Sequence[_Rank], now_s: float, step_timeout_s: float) -> None:
    """Check that no rank is stopped, or in the same step for too long.

    Raises:
        LaunchError: says which rank, and where all are.
    """
    for number, rank in enumerate(ranks):
        if rank.stopped_since_s is not None and now_s - rank.stopped_since_s > _STOPPED_S:
            raise LaunchError(
                f"rank {number} is frozen: its process {rank.process.pid} was stopped by a signal "
                f"at {rank.stage or 'its start'}; all ranks were ended.",
                lost=[number],
            )
    slow = any(
        rank.process.poll() is None
        and rank.stage.startswith("step ")
        and now_s - rank.since_s > step_timeout_s
        for rank in ranks
    )
    if slow:
        # Not the rank that exceeded it first: all entered the step within moments of each other.
        # They differ in where each one is.
        raise LaunchError(
            f"a step has taken more than {step_timeout_s:g} s ({_where(ranks)}); all ranks were "
            "ended. Raise --step-timeout if a step takes that long."
        )


def _where(ranks: Sequence[_Rank]) -> str:
    """The stage of every rank, ranks of one stage together."""
    doing: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        stage = rank.stage or "its start"
        doing.setdefault(stage if rank.process.poll() is None else "its end", []).append(number)
    return ", ".join(
        f"rank{'s' * (len(members) > 1)} {' and '.join(map(str, members))} at {stage}"
        for stage, members in doing.items()
    )


def _failure(ranks: Sequence[_Rank], first: Sequence[int]) -> LaunchError:
    """Make the error that names the rank that most likely failed by itself.

    A rank that was killed, or that has something to say of its own, comes before those that lost
    their connection to it; then those that were seen to fail first.
    """
    codes = {number: rank.process.poll() for number, rank in enumerate(ranks)}
    last = {number: _last_words(ranks[number].words) for number, code in codes.items() if code}

    def follows(number: int) -> tuple[bool, bool, int]:
        # gloo aborts a process (SIGABRT) when another one is gone.
        killed = _is_killed(codes[number])
        own = bool(last[number]) and "onnection" not in last[number]
        return not (killed or own), number not in first, number

    number = min(last, key=follows)
    code = codes[number]
    assert code is not None
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    where = f" at {ranks[number].stage}" if code < 0 and ranks[number].stage else ""
    said = last[number].removeprefix("heterog: ").removeprefix(f"rank {number}: ")
    text = f"rank {number} {how}{where}; the others were ended. {said}".strip()
    return LaunchError(text, last, lost=[each for each in sorted(last) if _is_killed(codes[each])])


def _is_killed(code: int | None) -> bool:
    """Whether a process ended by a signal that gloo does not send itself."""
    return code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)


def _last_words(path: Path) -> str:
    """The error line of a rank, or the last line that it printed."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("heterog: ")]
    return (own or lines or [""])[-1]


def _state(pid: int) -> str:
    """A process's state as ``ps`` shows it: T is stopped; empty where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]  # the name before it may contain spaces and brackets


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill all processes that still run."""
    for process in processes:
        if process.poll() is None:
            # A stopped process would not receive any other signal.
            stopped = _state(process.pid) == "T"
            _signal_group(process, signal.SIGKILL if stopped else signal.SIGTERM)
    deadline_s = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(deadline_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process that has not been waited for, and to those it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP end the body like Ctrl-C does, so that it can clean up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

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
