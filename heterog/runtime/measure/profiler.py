"""Measures ops and links on the devices of ranks, for ``heterog profile``.

The job runs in this process alone, as a rank among others, or on every rank of a testbed. Each op
is measured at several shares (``op_profiler``), then links (``link_profiler``).

    python -m heterog.runtime.measure.profiler ARGUMENTS  # one rank of ``profile_cluster``

Each finished measurement, a model at a share or a link, is a line of the rank's journal, so that
an interrupted run continues where it stopped.
"""

import hashlib
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from heterog.cluster.catalog import device_type_names
from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError, InputFileError
from heterog.files import MAX_JSON_BYTES, parse_json, read_bytes, write_atomically
from heterog.graph.capture import CapturedStep, capture_step
from heterog.pricing.op_fits import LinkMeasurement, Measurements, OpMeasurement
from heterog.records import Record, Text, parse_record
from heterog.runtime.accelerators import (
    device_count,
    device_label,
    has_accelerator,
    num_threads,
    why_none,
)
from heterog.runtime.launch import run_commands
from heterog.runtime.measure.link_profiler import PAYLOADS, gathered, link_cases, profile_links
from heterog.runtime.measure.op_profiler import profile_ops
from heterog.runtime.rank import as_rank, end_together, join
from heterog.runtime.rank import tell as tell_launcher
from heterog.runtime.ranks.place import HERE
from heterog.runtime.ranks.testbed import Testbed
from heterog.runtime.ranks.watching import Limits
from heterog.runtime.step.collectives import gather_texts
from heterog.zoo import load_workload

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Fractions of the batch at which ops are measured."""


def environment() -> dict[str, str]:
    """Versions and processors, for people to read."""
    device = device_label() if has_accelerator() else platform.processor() or "CPU"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "threads": str(torch.get_num_threads()),
    }


class Journal:
    """Measurements of a rank so far, one line each, so that none is repeated.

    A last line that was cut off is ignored; any other line that is no measurement is refused.

    Args:
        path: Path of the file, which is made if it does not exist.
        of: Description of the measurements; a journal with another one is refused.
        compiles: Whether steps are compiled, which is a part of the description.

    Raises:
        InputFileError: the file is no journal, or one of other measurements.
    """

    def __init__(self, path: Path, of: str, *, compiles: bool = False) -> None:
        self._path = path
        of += ", compiled" if compiles else ""
        lines = _whole_lines(path)
        if lines:
            other = parse_record(lines[0], _JournalHead, f"journal {path}, line 1").journal_of
            if other != of:
                raise InputFileError(
                    f"{path} holds measurements of {other}, not of {of}; remove it, or choose "
                    "another output."
                )
        found = [
            parse_record(line, _JournalLine, f"journal {path}, line {number}")
            for number, line in enumerate(lines[1:], 2)
        ]
        self._rows = {each.key: each.rows for each in found}
        # Rewritten, because a new line after a cut-off one would be lost with it.
        records = [{"journal_of": of}, *lines[1:]]
        write_atomically(path, "".join(f"{json.dumps(each)}\n" for each in records).encode())

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def rows(self, key: str) -> list[Any]:
        """The rows of a finished measurement."""
        return self._rows[key]

    def add(self, key: str, rows: list[OpMeasurement] | list[LinkMeasurement]) -> None:
        """Add the rows of a measurement."""
        self._rows[key] = rows
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "rows": list(map(asdict, rows))}) + "\n")


def own_journal(path: Path, device_type: str, *, compiles: bool = False) -> Journal:
    """The journal of a process that measures its own device alone.

    Raises:
        InputFileError: the file is of other measurements.
    """
    return Journal(path, f"a {device_type}, torch {torch.__version__}", compiles=compiles)


class _JournalHead(Record):
    journal_of: Text


class _JournalLine(Record):
    key: Text
    rows: list[OpMeasurement] | list[LinkMeasurement]


def _whole_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines; a last line that was cut off is ignored."""
    if not path.exists():
        return []
    content = read_bytes(path, "journal", MAX_JSON_BYTES)
    lines = [line for line in content.split(b"\n") if line.strip()]
    values = []
    for number, line in enumerate(lines, 1):
        try:
            values.append(parse_json(line, f"journal {path}, line {number}"))
        except InputFileError:
            if number < len(lines) or content.endswith(b"\n"):
                raise
    return values


def remove_journal(folder: Path) -> None:
    """Remove the journals of a folder, and the folder if nothing else is in it."""
    for path in [*folder.glob("rank*.jsonl"), folder / _CLUSTER_FILE, folder / _RESULT_FILE]:
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


_CLUSTER_FILE = "cluster.yaml"
_RESULT_FILE = "measurements.json"


def profile_local(
    sources: Sequence[str],
    done: Journal,
    device_type: str,
    *,
    batch_size: int | None = None,
    quota: float | None = None,
    compiles: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> list[OpMeasurement]:
    """Measure models on this process's device.

    Args:
        sources: Zoo names or ``file.py:function``.
        done: Measurements done; lines are added, and none in it is repeated.
        device_type: Name of the device type in the rows.
        batch_size: Batch size of the workloads; their own by default.
        quota: Fraction of a core that this process may use.
        compiles: Whether steps are compiled.
        tell: Called with progress in words.

    Returns:
        The rows of these models; without those of a share of the batch that does not fit into a
        GPU's memory.
    """
    distinct = list(dict.fromkeys(sources))
    rows: list[OpMeasurement] = []
    with _alone():
        for position, source in enumerate(distinct):
            workload = load_workload(source, batch_size)
            code = Path(source.rpartition(":")[0])  # a user's; none for the zoo
            version = hashlib.sha256(code.read_bytes()).hexdigest()[:8] if code.is_file() else ""
            captured: CapturedStep | None = None
            measured: set[int] = set()
            for number, share in enumerate(SHARES, position * len(SHARES) + 1):
                key = f"{source} {version} {batch_size} {share}"
                if key not in done:
                    captured = captured or capture_step(workload)
                    samples = max(1, round(share * captured.graph.batch_size))
                    tell(
                        f"ops {number} of {len(SHARES) * len(distinct)}: {workload.name}, "
                        f"batch {samples}"
                    )
                    found: list[OpMeasurement] = []
                    if samples not in measured:  # shares of a small batch may be equal
                        try:
                            found = profile_ops(
                                captured, workload, samples, device_type, quota, compiles
                            )
                        except torch.OutOfMemoryError:
                            tell(
                                f"{workload.name}: batch {samples} does not fit on {device_type}; "
                                "left out"
                            )
                    measured.add(samples)
                    done.add(key, found)
                rows += done.rows(key)
    return rows


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _threads_of_a_rank() -> int:
    """Number of threads that a rank will have when it runs a plan."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


def profile_here(
    sources: Sequence[str],
    journal: Path,
    device_type: str,
    *,
    batch_size: int | None = None,
    compiles: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Measurements:
    """Measure the ops of models on this machine's first device, in this process.

    Args:
        sources: Zoo names or ``file.py:function``.
        journal: Folder of the measurements done.
        device_type: Name of this device's type in cluster files.
        batch_size: Batch size of the workloads; their own by default.
        compiles: Whether steps are compiled.
        tell: Called with progress in words.

    Raises:
        HeterogError: the type is a GPU's, and there is none.
    """
    if not has_accelerator() and device_type != "CPU" and device_type in device_type_names():
        raise HeterogError(
            f"{device_type} cannot be measured: {why_none()}. Choose the `device_type` CPU to "
            "measure this machine's processor."
        )
    journal.mkdir(exist_ok=True)
    with num_threads(_threads_of_a_rank()):
        ops = profile_local(
            sources,
            own_journal(journal / "rank0.jsonl", device_type, compiles=compiles),
            device_type,
            batch_size=batch_size,
            compiles=compiles,
            tell=tell,
        )
        return Measurements(environment=environment(), ops=tuple(ops), compiled=compiles)


def profile_cluster(
    sources: Sequence[str],
    cluster: Cluster,
    journal: Path,
    *,
    batch_size: int | None = None,
    timeout_s: float = 3600.0,
    testbed: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> Measurements:
    """Measure models on every device of a testbed, all at once, and then its links.

    All ranks measure at the same time, as they will compute at the same time.

    Args:
        sources: Zoo names or ``file.py:function``.
        cluster: Cluster of the testbed.
        journal: Folder of the measurements done, one file per rank.
        batch_size: Batch size of the workloads; their own by default.
        timeout_s: Seconds that the whole job may take.
        testbed: Whether to build the testbed; otherwise plain processes on this machine.
        tell: Called with the stage of rank 0, in words.
    """
    arguments = {
        "sources": [*sources],
        "journal": str(journal.resolve()),
        "batch_size": batch_size,
        "timeout_s": timeout_s,
        "throttled": testbed,
    }
    with Testbed(cluster) if testbed else nullcontext(HERE) as place:
        journal.mkdir(parents=True, exist_ok=True)
        cluster.save(journal / _CLUSTER_FILE)
        run_commands(
            ["-m", "heterog.runtime.measure.profiler", json.dumps(arguments)],
            cluster.num_devices,
            limits=Limits(timeout_s=timeout_s),
            place=place,
            progress=tell,
        )
    return Measurements.load(journal / _RESULT_FILE)


def profile_as_rank(
    sources: Sequence[str],
    cluster: Cluster,
    journal: Path,
    *,
    batch_size: int | None = None,
    timeout_s: float = 3600.0,
    throttled: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Measurements | None:
    """Measure as the rank that the environment describes: its device, then links with the others.

    The process group still exists when this returns; ``end_together`` ends the process.

    Args:
        sources: Zoo names or ``file.py:function``.
        cluster: A cluster whose device ``i`` is rank ``i``; says whether steps are compiled.
        journal: Folder of the measurements done.
        batch_size: Batch size of the workloads; their own by default.
        timeout_s: Seconds after which a rank gives up on the others.
        throttled: Whether ranks have the CPU quotas of the cluster's testbed.
        tell: Called with progress in words.

    Returns:
        The measurements of all ranks, on rank 0.

    Raises:
        HeterogError: there is not one rank per device.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks != cluster.num_devices:
        raise HeterogError(
            f"cluster '{cluster.name}' has {cluster.num_devices} devices, but {num_ranks} ranks "
            "are running; start one rank per device."
        )
    if has_accelerator():
        local = int(os.environ.get("LOCAL_RANK", rank))
        torch.accelerator.set_device_index(local % device_count())
    device = cluster.devices[rank]
    quota = cluster.hosts[cluster.host_of[rank]].cpu_quota if throttled else None
    journal.mkdir(exist_ok=True)
    compiles = cluster.execution.compiles
    of = f"{device.name} of cluster '{cluster.name}' ({cluster.fingerprint})"
    done = Journal(journal / f"rank{rank}.jsonl", of, compiles=compiles)
    with num_threads(_threads_of_a_rank()):
        ops = profile_local(
            sources,
            done,
            device.type.name,
            batch_size=batch_size,
            quota=quota,
            compiles=compiles,
            tell=tell,
        )
        tell("waiting for the other ranks")
        join(timeout_s)
        links = _journalled_links(cluster, done, quota=quota, tell=tell)
        parts = gather_texts(json.dumps([asdict(row) for row in ops]))
        if rank > 0:
            return None
        return Measurements(
            environment=environment(),
            ops=tuple(OpMeasurement(**row) for part in parts for row in json.loads(part)),
            links=links,
            cluster=replace(cluster, calibration=None).to_dict(),
            compiled=compiles,
        )


def _journalled_links(
    cluster: Cluster, journal: Journal, *, quota: float | None, tell: Callable[[str], None]
) -> tuple[LinkMeasurement, ...]:
    """All rows of links; rank 0's journal decides which ones are still missing."""
    keys = [f"link {case}" for case in link_cases(dist.get_world_size(), PAYLOADS)]
    known = list(itertools.takewhile(lambda key: key in journal, keys))
    num_done = int(gathered([len(known)])[0][0])
    rows = [journal.rows(key)[0] for key in known]
    measured = profile_links(cluster, num_done=num_done, quota=quota, tell=tell)
    for key, row in zip(keys[num_done:], measured, strict=True):
        if dist.get_rank() == 0:
            journal.add(key, [row])
        rows.append(row)
    return tuple(rows)


def main() -> None:
    """Measure as one rank of a testbed."""
    given = json.loads(sys.argv[1])
    folder = Path(given.pop("journal"))
    with as_rank(int(os.environ["RANK"])):
        measured = profile_as_rank(
            given.pop("sources"),
            Cluster.load(folder / _CLUSTER_FILE),
            folder,
            **given,
            tell=tell_launcher,
        )
        if measured is not None:
            measured.save(folder / _RESULT_FILE)
    end_together()


if __name__ == "__main__":
    main()
