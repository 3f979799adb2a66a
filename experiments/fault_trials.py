"""Shared parts of experiments with faults: a trial, its leftovers, and runs of many trials."""

import argparse
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rows import Option, finish, keep_row, option, progress, read_rows

from heterog.cluster import Cluster, Device, Host, Link, device_type
from heterog.runtime.launch import parent_of

KINDS = ("V100-16GB", "V100-16GB", "T4", "T4")
MODEL = Path(__file__).with_name("healing_model.py").resolve()
PARTS = ("noticed_s", "planned_s", "moved_s", "first_step_s")
SIGNALS = {
    **dict.fromkeys(("frozen", "stuck", "paused"), signal.SIGSTOP),
    "leaving": signal.SIGTERM,
}
"""What processes get by fault; ``SIGKILL`` by the others."""
PAUSE_S = 3.0
"""Seconds of a pause after which a host must not count as lost."""
_MARK = "HETEROG_FAULT_TRIALS"
"""Environment variable that marks all processes of trials; it holds the id of the first one."""
_GONE_S = 20.0
"""Longest wait until killed processes are gone; the process that removes their files waits,
too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one fault led to.

    Attributes:
        victims: hosts that were hit; none where only the leader was.
        killed_in_step: the step that was begun or done before.
        noticed_s: from the last event before the fault until ranks were ended, or the first gave
            up.
        planned_s: from there until new ranks know what to run; for a loop, until they are started.
        moved_s: from there until they have their state.
        first_step_s: from there to the end of their first step.
        decided_s: of a plan under torchrun, from the start of its ranks until they know it.
        total_s: the sum of these; if ranks train on, until the next step, or until the job's
            leader reports that it is back.
        caught_up_s: from the fault to the first step that had not been done before.
        num_ranks: that go on.
        steps_done_again: because no complete snapshot, or no checkpoint, had them.
        most_difference: the largest relative difference of a loss from its reference.
        is_complete: every step counts once, every sample of an epoch was dealt once, and the plan
            was changed once at most, or not at all where ranks should train on.
        left_behind: processes and files that are still there.
        source: where training resumed from.
        why: the reason if it failed.
    """

    victims: tuple[int, ...] = ()
    killed_in_step: int = 0
    noticed_s: float = 0.0
    planned_s: float = 0.0
    moved_s: float = 0.0
    first_step_s: float = 0.0
    decided_s: float = 0.0
    total_s: float = math.inf
    caught_up_s: float = math.inf
    num_ranks: int = 0
    steps_done_again: int = 0
    most_difference: float = math.inf
    is_complete: bool = False
    left_behind: tuple[str, ...] = ()
    source: str = ""
    why: str = ""


def cluster() -> Cluster:
    """Four hosts with one device each, and links that let data parallelism pay."""
    inner = Link(kind="loopback", bandwidth_bytes_per_s=100e9)
    hosts = [
        Host(name=f"h{number}", nic_line_rate_bytes_per_s=100e9, nic_latency_s=1e-7, intra=inner)
        for number in range(len(KINDS))
    ]
    devices = [
        Device(
            name=f"h{number}:0",
            type=device_type(kind),
            host_index=number,
            usable_memory_bytes=device_type(kind).memory_bytes,
        )
        for number, kind in enumerate(KINDS)
    ]
    return Cluster(name="four_hosts", hosts=tuple(hosts), devices=tuple(devices))


def processes() -> dict[int, tuple[int, str]]:
    """Parent and command of all processes that trials have started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={os.getpid()}\0".encode() not in (folder / "environ").read_bytes():
                continue
            words = (folder / "cmdline").read_text().replace("\0", " ").strip()
            found[int(folder.name)] = parent_of(int(folder.name)), words
        except OSError:  # it has ended
            continue
    return found


def left_behind(found: Callable[[], Collection[str]]) -> tuple[str, ...]:
    """Processes and files that are still there after killed processes had time to end."""
    gone_s = time.monotonic() + _GONE_S
    while (left := found()) and time.monotonic() < gone_s:
        time.sleep(0.2)
    return tuple(sorted(left))


def options(faults: Collection[str], first: str) -> tuple[Option, ...]:
    """Options of such an experiment."""
    return (
        option("--fault", choices=faults, default=first),
        option("--kills", type=int, default=20),
        option("--seed", type=int, default=0),
        option("--results", type=Path, help="JSON lines of trials, which is gone on with"),
    )


def mark_processes() -> None:
    """Mark all processes that this process starts."""
    os.environ[_MARK] = str(os.getpid())


def run_trials(
    asked: argparse.Namespace,
    of: dict[str, Any],
    run: Callable[[random.Random], Trial],
    *,
    goes_on: bool,
) -> None:
    """Run the trials that are missing, and print a summary of all.

    Args:
        asked: What the script was asked.
        of: What rows of these trials have in common.
        run: Causes one fault; its random choices come from its argument.
        goes_on: Whether the next trial runs after one that fails.
    """
    kept = asked.results and asked.results.resolve()
    of = {"fault": asked.fault, "seed": asked.seed, **of}
    trials = [row["trial"] for row in read_rows(kept) if row["of"] == of]
    for number in range(len(trials), asked.kills):
        try:
            trial = run(random.Random(f"{asked.seed} {asked.fault} {number}"))
        except Exception as error:
            trial = Trial(why=repr(error))
        trials.append(asdict(trial))
        keep_row(kept, {"of": of, "trial": trials[-1], "nice": os.nice(0)})
        progress(f"{number:2} {trials[-1]}")
        if trial.why and not goes_on:
            raise RuntimeError(trial.why)
    good = [each for each in trials if not each["why"]]
    summary = {
        "fault": asked.fault,
        "kills": len(trials),
        "failed": len(trials) - len(good),
        "medians_s": {
            part: round(statistics.median(each[part] for each in good), 3)
            for part in (*PARTS, "decided_s", "total_s", "caught_up_s")
            if good
        },
        "most_s": max((each["total_s"] for each in good), default=math.inf),
        "most_steps_again": max((each["steps_done_again"] for each in good), default=0),
        "most_difference": max((each["most_difference"] for each in good), default=math.inf),
        "all_complete": all(each["is_complete"] for each in trials),
        "nothing_left": not any(each["left_behind"] for each in trials),
    }
    finish(asked, summary | {"trials": trials}, [summary])
