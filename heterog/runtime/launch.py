"""Starts one process per rank on this machine and makes sure that they end together.

Each rank reports its stage through a small file, which also shows the launcher that the rank is
alive; ``watching`` decides when this ends the job.
"""

import fcntl
import os
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from heterog.errors import HeterogError
from heterog.files import CHECKPOINT_INDEX, check_save_folder, read_json
from heterog.runtime.ranks.forks import (
    RankProcess,
    end_with_parent,
    fields_of_process,
    open_forks,
    rank_forks,
)
from heterog.runtime.ranks.place import HERE, Place
from heterog.runtime.ranks.watching import DEFAULT_LIMITS, Limits, Watched, wait_for_ranks
from heterog.runtime.request import RunRequest
from heterog.search.background import BackgroundPlan
from heterog.search.plan import Plan
from heterog.user_code import trusted_source
from heterog.workers import signals_as_exit

ALONE_STEPS = 3
"""Number of steps before a background job begins; they measure the step time without it."""
_LEAST_ROOM = 8192
"""Bytes of a disk, two of its blocks, with less than which a process cannot say why it ends."""
HEARTBEAT = "HETEROG_HEARTBEAT"
"""Variable with the path of the file to which a rank writes its stage."""
PORT_FILE = "HETEROG_PORT_FILE"
"""Variable with the file to which rank 0 writes the port it chose; absent if a port is given."""
RANKS_OWN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *(HEARTBEAT, PORT_FILE),
)
"""Variables that differ between the ranks of a launcher; no module reads them at import."""

_END_S = 3.0
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>

Beside = Callable[[int], list[str]]
"""Python's arguments for a process beside a rank, by rank; the process ends with the ranks."""


@dataclass(slots=True)
class LocalRank(Watched):
    """A rank of this machine and what is known of it; see ``watching.Watched``."""

    process: RankProcess
    words: Path
    heartbeat: Path
    stage: str = ""
    since_s: float = field(default_factory=time.monotonic)
    stopped_since_s: float | None = None
    silent_s: float = 0.0

    @property
    def pid(self) -> int:
        """Id of its process."""
        return self.process.pid

    def poll(self) -> int | None:
        """Exit code; ``None`` while it runs."""
        return self.process.poll()

    def look(self, now_s: float) -> None:
        """Read its stage, and whether its process is stopped."""
        stage = self.heartbeat.read_text() if self.heartbeat.exists() else ""
        self.note(stage, now_s, is_stopped=_state(self.process.pid) == "T")

    def last_words(self) -> str:
        """Its error line, or the last line that it printed, or why there is none."""
        said, folder = _last_words(self.words), self.words.parent.parent
        is_full = not said and shutil.disk_usage(folder).free < _LEAST_ROOM
        return f"What it said is lost: {folder} (TMPDIR) has no room." if is_full else said


def ranks_of_this_process() -> dict[int, int]:
    """Processes of the running ranks of this process, by rank; Linux only.

    They are found by the file that a rank prints to, which has its number in its name. A rank is
    a child of this process or was forked by one.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(folder.name)
            prints_to = Path(os.readlink(folder / "fd" / "1")).name
            parents = {parent_of(pid), parent_of(parent_of(pid))}
        except OSError:  # the process has ended, or belongs to another user
            continue
        rank = re.fullmatch(r"rank([0-9]+)\.err", prints_to)
        if rank is not None and os.getpid() in parents:
            found[int(rank[1])] = pid
    return found


def parent_of(pid: int) -> int:
    """Process that started a process; Linux only.

    Raises:
        OSError: there is none with this id any more.
    """
    return int(fields_of_process(pid)[1])


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_package() -> str:
    """A value of ``PYTHONPATH`` that contains this package, for any working directory."""
    own = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH", "")]))


def interface_of(address: str) -> str:
    """Name of the network interface with an IPv4 address; empty if none has it.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def run_ranks(
    request: RunRequest,
    *,
    place: Place = HERE,
    progress: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Run a plan on local processes, a rank for each device of its cluster.

    A background job of the plan trains beside each rank, at the lowest priority, after the first
    steps; its progress is added to the result.

    Args:
        request: What to run.
        place: Where the ranks run.
        progress: Called with the stage of rank 0, whenever it changes.

    Returns:
        The measurements of rank 0.

    Raises:
        InputFileError: nothing can be saved at ``save`` or read from ``resume``, or a model is
            made by a file that nobody named.
        LaunchError: a rank failed or the time is over; names the rank and its last words.
        HeterogError: the plan cannot be run, or there are too few steps to measure the effect of
            a background job.
    """
    plan = request.load()
    background = _beside_ranks(plan, request.num_steps)
    if request.save is not None:
        check_save_folder(request.save)
    if request.resume is not None:
        read_json(request.resume / CHECKPOINT_INDEX, "checkpoint")
    with temporary_folder() as folder:
        output = request.output or folder / "measured.json"
        run_file = folder / "run.json"
        replace(request, output=output).write(run_file)
        done = [folder / f"background{rank}.json" for rank in range(plan.cluster.num_devices)]

        def beside(rank: int) -> list[str]:
            if background is None or rank not in background.devices:
                return []
            source = trusted_source(background.source, request.sources, str(request.plan))
            given = [source, background.batch_size, background.limit, done[rank]]
            return ["-m", "heterog.runtime.ranks.background", *map(str, given)]

        failed = run_commands(
            ["-m", "heterog.runtime.rank", str(run_file)],
            plan.cluster.num_devices,
            limits=request.limits,
            port=request.port,
            place=place,
            beside=beside,
            progress=progress,
        )
        measured = read_json(output, "measurement")
        assert isinstance(measured, dict)
        if background is not None:
            found = [read_json(path, "measurement") if path.exists() else {} for path in done]
            measured["background"] = _background_summary(measured, background, found) | {
                "failures": {str(rank): words for rank, words in failed.items()}
            }
        return measured


def _beside_ranks(plan: Plan, num_steps: int) -> BackgroundPlan | None:
    """The plan's background job, if it runs in processes beside the ranks.

    Raises:
        HeterogError: there are too few steps.
    """
    if plan.background is None:
        return None
    from heterog.runtime.ranks.background import has_own_process  # which imports torch

    if not has_own_process(plan.cluster):
        return None  # the ranks run it themselves
    if num_steps <= ALONE_STEPS:
        raise HeterogError(
            f"{num_steps} steps are too few beside a background job, which begins after "
            f"{ALONE_STEPS}; measure {3 * ALONE_STEPS} or more."
        )
    return plan.background


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed when the body ends, even if this process is killed meanwhile.

    A shell waits for the end of a pipe that only this process holds open.
    """
    name = tempfile.mkdtemp(prefix="heterog-")
    # The ranks end with this process, but may take a moment to end.
    cleaner = remove_after("read -r line; sleep 1", name)
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)  # before the shell ends, in case of a kill here
        _signal_group(cleaner, signal.SIGKILL)
        cleaner.wait()
        assert cleaner.stdin is not None
        cleaner.stdin.close()


def remove_after(script: str, folder: str) -> "subprocess.Popen[bytes]":
    """A shell that removes a folder after a script.

    It has a session of its own, so that signals to this process's group miss it.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", f'{script}; rm -rf -- "$1"', "heterog-cleaner", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _background_summary(
    measured: Mapping[str, Any], background: BackgroundPlan, done: Sequence[Any]
) -> dict[str, Any]:
    """Results of both jobs; see ``runtime.ranks.background`` for how the limit was kept."""
    times = measured["step_times_s"]
    alone, together = times[:ALONE_STEPS], times[ALONE_STEPS:]
    # The background jobs of all ranks began after the first ``ALONE_STEPS`` steps.
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
    limits: Limits = DEFAULT_LIMITS,
    port: int = 0,
    place: Place = HERE,
    beside: Beside = lambda rank: [],
    progress: Callable[[str], None] = lambda stage: None,
) -> dict[int, str]:
    """Run this Python with the same arguments once per rank, under torchrun's variables.

    All ranks end with this function: after an error, a signal to this process, and on Linux even
    if this process is killed.

    Returns:
        The last words of processes beside ranks that ended before the ranks did, by rank.

    Raises:
        LaunchError: as ``run_ranks``.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        # For scripts without ``rank.join``; with it, rank 0 chooses a port.
        "MASTER_PORT": str(port or free_port()),
        "WORLD_SIZE": str(num_ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ranks: list[LocalRank] = []
    others: dict[int, tuple[RankProcess, Path]] = {}
    with signals_as_exit(), temporary_folder() as folder, rank_forks(RANKS_OWN):
        if not port:
            common[PORT_FILE] = str(folder / "port")
        try:
            for rank in range(num_ranks):
                words, heartbeat = folder / f"rank{rank}.err", folder / f"rank{rank}.stage"
                own = {"RANK": str(rank), HEARTBEAT: str(heartbeat)}
                there = place.environment(rank)
                command = place.command(rank, [sys.executable, *arguments])
                process = start_rank(command, {**os.environ, **common, **there, **own}, words)
                ranks.append(LocalRank(process, words, heartbeat))
                if beside(rank):
                    said = folder / f"beside{rank}.err"
                    command = place.command(rank, [sys.executable, *beside(rank)])
                    others[rank] = start_rank(command, {**os.environ, **there, **own}, said), said
            wait_for_ranks(ranks, limits, progress)
            return {
                rank: _last_words(said).removeprefix("heterog: ")
                for rank, (process, said) in others.items()
                if process.poll() is not None
            }
        finally:
            end_ranks(
                [rank.process for rank in ranks] + [process for process, _ in others.values()]
            )


def start_rank(command: Sequence[str], variables: Mapping[str, str], words: Path) -> RankProcess:
    """Start a rank in a process group of its own, so that its children end with it.

    Within ``forks.rank_forks``, a module of heterog is forked off a process that has imported it.

    Args:
        command: Command line of the rank.
        variables: Its whole environment.
        words: Path of the file for its output.
    """
    forks = open_forks()
    is_ours = [*command[:2]] == [sys.executable, "-m"] and command[2].startswith("heterog.")
    if forks is not None and is_ours:
        forked = forks.start(command[2], command[3:], variables, words)
        if forked is not None:
            return forked
    launcher = os.getpid()
    with words.open("wb") as sink:
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            process_group=0,
            preexec_fn=lambda: end_with_parent(launcher),
        )


def _last_words(path: Path) -> str:
    """The error line of a rank, or the last line that it printed."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("heterog: ")]
    return (own or lines or [""])[-1]


def _state(pid: int) -> str:
    """A process's state as ``ps`` shows it: T is stopped; empty where there is no /proc."""
    try:
        return fields_of_process(pid)[0]
    except OSError:
        return ""


def end_ranks(processes: Sequence[RankProcess]) -> None:
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


def _signal_group(process: RankProcess, number: signal.Signals) -> None:
    """Send a signal to a process that has not been waited for, and to those it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
