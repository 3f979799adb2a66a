"""The file of jobs that ``heterog schedule`` reads.

    schema_version: 1
    jobs:
      - name: nightly
        model: bert_base          # a name of 'heterog models', or a captured graph
        batch_size: 64            # optional: the model's own
        steps: 2000
        arrives: 10 min           # optional: at once
        every: 1 h                # optional, with count: it comes again and again
        count: 3
        deadline: 2 h             # optional: longest time from arrival to end, or
        deadline_factor: 0.5      # as a part of its time on one device
        most_devices: 8           # optional: it never gets more

Times are seconds, or texts with a unit. A model is never Python code, which would be run.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

from heterog.errors import HeterogError, InputFileError
from heterog.files import read_bytes
from heterog.names import shown
from heterog.records import Count, MadeBy, Many, Name, PositiveSeconds, Record, Text, parse_record
from heterog.search.arrivals.queueing import JobCluster, JobRequest
from heterog.units import parse_seconds
from heterog.user_code import is_from_file
from heterog.yaml_files import parse_yaml

_MOST_BYTES = 1024**2  # of a file
MOST_ARRIVALS = 100_000  # of all jobs of a file
_MOST_S = 1e9  # for each time in a file, and the last arrival


def _seconds(value: object, *, is_positive: bool = True) -> float:
    """The seconds of a field.

    Raises:
        ValueError: it is no time in range; ``records`` names the field.
    """
    if value is None:  # as if it was not there
        return 0.0
    try:
        found = parse_seconds(value)  # type: ignore[arg-type]  # which refuses what is no time
    except (HeterogError, OverflowError, TypeError) as error:
        raise ValueError(f"is {shown(value)}, not a time; write 90, 90 s or 1.5 h") from error
    if not (0.0 <= found <= _MOST_S) or (is_positive and found == 0.0):
        least = "above 0" if is_positive else "0 or above"
        raise ValueError(f"is {shown(value)}; it must be {least}, at most 1e9 s")
    return found


_Time: TypeAlias = Annotated[float, MadeBy(_seconds)]


class JobRecord(Record):
    """One entry; see the module docstring.

    Attributes:
        name: Name of the job.
        model: Name of a zoo model, or path of a captured graph.
        batch_size: Samples per step; ``None`` for the model's own.
        steps: Number of training steps.
        arrives: Seconds until the first arrival.
        every: Seconds between arrivals; 0 for a single one.
        count: Number of arrivals.
        deadline: Longest seconds from arrival to end, if there are any.
        deadline_factor: The deadline as a part of the job's time on one device.
        most_devices: Most devices that it may get; ``None`` for as many as there are.
    """

    name: Name
    model: Text
    batch_size: Count | None = None
    steps: Count
    arrives: Annotated[float, MadeBy(partial(_seconds, is_positive=False))] = 0.0
    every: _Time = 0.0
    count: Count = 1
    deadline: _Time | None = None
    deadline_factor: PositiveSeconds | None = None
    most_devices: Count | None = None

    @property
    def kind(self) -> str:
        """Name of the job's kind: jobs of one kind take equally long on equal devices."""
        return f"{self.model}, batch {self.batch_size or 'as given'}, {self.steps} steps"


class JobsRecord(Record):
    """The whole file.

    Attributes:
        schema_version: Version of the format: 1.
        jobs: The entries.
    """

    schema_version: Count
    jobs: Many[JobRecord]


def read_jobs(path: Path) -> list[JobRecord]:
    """The entries of a file, checked one by one and against each other.

    Raises:
        InputFileError: the file cannot be read, or says something that makes no sense.
    """
    content = read_bytes(path, "jobs", _MOST_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"cannot read jobs {path}: it is not UTF-8 text.") from error
    _, value = parse_yaml(
        text, path, what="a file of jobs", if_empty="list at least one under 'jobs'"
    )
    found = parse_record(value, JobsRecord, f"jobs {path}", versions=(1,)).jobs
    if not found:
        raise InputFileError(f"jobs {path}: there is no job; list at least one under 'jobs'.")
    total = sum(job.count for job in found)
    if total > MOST_ARRIVALS:
        raise InputFileError(
            f"jobs {path}: {total:,} arrivals; at most {MOST_ARRIVALS:,} are simulated."
        )
    names = [job.name for job in found]
    for number, job in enumerate(found):
        where = f"jobs {path}: job '{job.name}'"
        if job.name in names[:number]:
            raise InputFileError(f"{where} is there twice; give each its own name.")
        _check(job, where)
    return found


def _check(job: JobRecord, where: str) -> None:
    if is_from_file(job.model):
        raise InputFileError(
            f"{where}: {shown(job.model)} is Python code, which a file of jobs does not get to "
            "run; capture it with 'heterog capture' and name the graph."
        )
    if (job.every == 0.0) != (job.count == 1):
        raise InputFileError(f"{where} has one of 'every' and 'count'; give both or none.")
    if job.deadline is not None and job.deadline_factor is not None:
        raise InputFileError(f"{where} has 'deadline' and 'deadline_factor'; give one of them.")
    last_s = job.arrives + (job.count - 1) * job.every
    if last_s > _MOST_S:
        raise InputFileError(f"{where} arrives last after {last_s:.3g} s; at most {_MOST_S:g}.")


def requests_of(jobs: list[JobRecord], cluster: JobCluster) -> list[JobRequest]:
    """All arrivals; jobs that come again are numbered from 1 on."""
    return [request for job in jobs for request in _arrivals(job, cluster)]


def _arrivals(job: JobRecord, cluster: JobCluster) -> Iterator[JobRequest]:
    acceptable_s = float("inf")
    if job.deadline is not None:
        acceptable_s = job.deadline
    elif job.deadline_factor is not None:
        acceptable_s = job.deadline_factor * cluster.alone_s(job.kind)
    for number in range(job.count):
        yield JobRequest(
            name=job.name if job.count == 1 else f"{job.name} {number + 1}",
            kind=job.kind,
            arrives_s=job.arrives + number * job.every,
            acceptable_s=acceptable_s,
            most_devices=job.most_devices or cluster.num_devices,
        )
