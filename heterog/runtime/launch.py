"""Starts one process per rank on this machine and sees that they end together."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heterog.errors import HeterogError
from heterog.files import read_json

_POLL_S = 0.05
_GRACE_S = 1.0  # the first rank that fails may not be the first that is seen: let all speak

Wrap = Callable[[int, list[str]], list[str]]
"""Changes the command of a rank, to run it somewhere else."""


class LaunchError(HeterogError):
    """A rank that failed, died or did not end in time; the others were ended too."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    plan: Path,
    num_ranks: int,
    *,
    model: str = "",
    num_steps: int = 10,
    timeout_s: float = 300.0,
    wrap: Wrap = lambda rank, command: command,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> dict[str, Any]:
    """Run a plan on local processes.

    Args:
        plan: the plan's file.
        num_ranks: devices of its cluster.
        model: the workload's source; the plan's own if empty.
        num_steps: measured steps.
        timeout_s: of the whole job.
        wrap: changes each rank's command (to enter a namespace, say).
        environment: more variables for each rank.

    Returns:
        What rank 0 measured.

    Raises:
        LaunchError: a rank failed or the time is over; names the rank and its last words.
    """
    with tempfile.TemporaryDirectory(prefix="heterog-") as folder:
        output = Path(folder) / "measured.json"
        run_commands(
            ["-m", "heterog.runtime.rank", str(plan.resolve()), "--model", model, "--steps",
             str(num_steps), "--timeout", str(timeout_s), "-o", str(output)],
            num_ranks,
            timeout_s=timeout_s,
            wrap=wrap,
            environment=environment,
        )  # fmt: skip
        measured = read_json(output, "measurement")
        assert isinstance(measured, dict)
        return measured


def run_commands(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    timeout_s: float = 300.0,
    wrap: Wrap = lambda rank, command: command,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> None:
    """Run this Python with the same arguments once per rank, under torchrun's variables.

    Raises:
        LaunchError: as ``run_ranks``.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="heterog-") as folder:
        words = [Path(folder) / f"rank{rank}.err" for rank in range(num_ranks)]
        try:
            for rank in range(num_ranks):
                variables = {**os.environ, **common, **environment(rank), "RANK": str(rank)}
                command = wrap(rank, [sys.executable, *arguments])
                with words[rank].open("wb") as sink:
                    processes.append(
                        subprocess.Popen(command, env=variables, stdout=sink, stderr=sink)
                    )
            _wait(processes, words, timeout_s)
        finally:
            _end(processes)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], words: Sequence[Path], timeout_s: float
) -> None:
    """Until all ranks are done, one fails, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        if any(code not in (None, 0) for code in codes):
            time.sleep(_GRACE_S)
            raise LaunchError(_explain([process.poll() for process in processes], words))
        if time.monotonic() > deadline:
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            raise LaunchError(
                f"ranks {waiting} did not end within {timeout_s:.0f} s; all ranks were ended. "
                "Raise --timeout if the steps take that long."
            )
        time.sleep(_POLL_S)


def _explain(codes: Sequence[int | None], words: Sequence[Path]) -> str:
    """The failing rank that has most to say: its own error before lost connections."""
    failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
    last = {rank: _last_words(words[rank]) for rank in failed}
    rank = min(failed, key=lambda r: ("onnection" in last[r] or not last[r], r))
    code = codes[rank]
    assert code is not None
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    said = last[rank].removeprefix("heterog: ").removeprefix(f"rank {rank}: ")
    return f"rank {rank} {how}; the others were ended. {said}".strip()


def _last_words(path: Path) -> str:
    """The error line of a rank, or the last line that it printed."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("heterog: ")]
    return (own or lines or [""])[-1]


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """No process survives the launcher."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + 3.0
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
