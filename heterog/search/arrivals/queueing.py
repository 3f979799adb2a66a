"""Event simulation of jobs that arrive at a cluster, and rules that decide about them.

Each arriving job gets devices at once or is turned away (unless jobs may wait). An accepted job
holds its devices until it ends; a device has one job. At equal times, jobs end before another
arrives. A job is *blocked* if it is rejected, if no devices for it are free, or if it would end
after the time that its user accepts. A rule decides how many devices a job gets: ``RULES`` has
PAC-ML's baselines and some of our own.
"""

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from heterog.errors import HeterogError, UnknownNameError
from heterog.search.arrivals.ramp import devices_of

_ROUNDING = 1e-12
"""Relative error by rounding: a job on one device meets a deadline of exactly its time alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Devices for a job, and how long it takes there.

    Attributes:
        devices: Set of devices, one bit for each.
        seconds: Seconds of the whole job there.
        detail: How the job runs there, for people; empty if there is nothing to say.
    """

    devices: int
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFeatures:
    """What a scheduler may see of a job before it decides.

    Attributes:
        num_ops: Number of ops of a training step.
        num_edges: Number of tensors between them.
        memory_bytes: Bytes of all ops.
        edge_bytes: Bytes of all tensors between ops.
        num_steps: Number of training steps.
        compute_mean, compute_median: Compute of an op, in any unit that all jobs share.
        memory_mean, memory_median: Bytes of an op.
        edge_mean, edge_median: Bytes of a tensor between ops.
    """

    num_ops: float
    num_edges: float
    memory_bytes: float
    edge_bytes: float
    num_steps: float
    compute_mean: float
    compute_median: float
    memory_mean: float
    memory_median: float
    edge_mean: float
    edge_median: float

    @staticmethod
    def of(
        compute: Sequence[float], memory: Sequence[float], edges: Sequence[float], num_steps: int
    ) -> "JobFeatures":
        """Features from the compute and memory of each op and the bytes of each edge."""
        sent = edges or [0.0]
        return JobFeatures(
            num_ops=len(compute),
            num_edges=len(edges),
            memory_bytes=sum(memory),
            edge_bytes=sum(sent),
            num_steps=num_steps,
            compute_mean=statistics.fmean(compute),
            compute_median=statistics.median(compute),
            memory_mean=statistics.fmean(memory),
            memory_median=statistics.median(memory),
            edge_mean=statistics.fmean(sent),
            edge_median=statistics.median(sent),
        )


class JobCluster(Protocol):
    """Where jobs run: the numbers of devices they may get, and how long they take there."""

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Numbers of parts, or of devices, that a job may get, ascending."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the jobs that may arrive."""

    def alone_s(self, kind: str) -> float:
        """Seconds of a job on one device."""

    def features(self, kind: str) -> JobFeatures:
        """What a scheduler may see of a job."""

    def place(self, kind: str, degree: int, occupied: int) -> JobPlace | None:
        """Devices for a job beside those already occupied; ``None`` if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job that arrives.

    Attributes:
        name: Name of this job.
        kind: Name of what it trains, which the cluster knows.
        arrives_s: Arrival time.
        acceptable_s: Longest time from arrival to end that its user accepts; infinite: any.
        most_devices: Most devices that it may get.
    """

    name: str
    kind: str
    arrives_s: float
    acceptable_s: float = float("inf")
    most_devices: int = 10**9

    def __post_init__(self) -> None:
        if not 0.0 <= self.arrives_s < float("inf") or not self.acceptable_s > 0.0:
            raise HeterogError(
                f"job '{self.name}' arrives at {self.arrives_s:g} s and must end within "
                f"{self.acceptable_s:g} s; give an arrival from 0 on and a time above 0."
            )


class JobOutcome(StrEnum):
    """The outcome of a job; the values are printed."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """The rule turned it away: it asked for no devices."""
    NO_ROOM = "no room"
    """No devices were free, or none in a shape that the job could use."""
    TOO_LATE = "too late"
    """It would have ended after the time that its user accepts."""
    UNFINISHED = "unfinished"
    """It was running when the simulation ended, where that counts as blocked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """The decision about a job.

    Attributes:
        request: The job.
        outcome: Whether it was accepted, or why not.
        degree: Number of devices asked for; 0 for a rejection.
        devices: Devices that it got; empty if it was blocked.
        starts_s: Start time, or the time at which it was turned away.
        ends_s: End time; if it was too late, the time at which it would have ended.
        detail: How it runs, see ``JobPlace``.
    """

    request: JobRequest
    outcome: JobOutcome
    degree: int
    devices: tuple[int, ...] = ()
    starts_s: float
    ends_s: float
    detail: str = ""

    @property
    def is_accepted(self) -> bool:
        """Whether it ran to its end."""
        return self.outcome == JobOutcome.ACCEPTED


class JobQueueing:
    """Arrivals on a cluster, decided one after another in the order of arrival.

    Args:
        cluster: Cluster on which they run.
        requests: The jobs.
        waits: Whether a job that finds no devices waits for others to end, as long as it may still
            be in time; later jobs wait behind it. The paper's jobs do not wait.
        end_s: End of the simulation; as in the paper, jobs that still run then count as blocked.
    """

    def __init__(
        self,
        cluster: JobCluster,
        requests: Sequence[JobRequest],
        *,
        waits: bool = False,
        end_s: float = float("inf"),
    ) -> None:
        self.cluster = cluster
        self.requests = sorted(requests, key=lambda request: request.arrives_s)
        self.waits = waits
        self.end_s = end_s
        self.now_s = 0.0
        self.verdicts: list[JobVerdict] = []
        self._running: list[tuple[float, int, int]] = []  # (end, number of the job, devices)
        self.occupied = 0
        self._arrive()

    @property
    def request(self) -> JobRequest | None:
        """The job to decide about; ``None`` when all are decided."""
        number = len(self.verdicts)
        return self.requests[number] if number < len(self.requests) else None

    @property
    def num_free(self) -> int:
        """Number of devices without a job."""
        return self.cluster.num_devices - self.occupied.bit_count()

    @property
    def num_running(self) -> int:
        """Number of jobs that run now."""
        return len(self._running)

    def legal(self) -> list[int]:
        """Degrees that the job at hand may ask for now, without 0; ascending.

        As in the paper, no degree exceeds the number of free devices, but a free block of the
        needed shape may still be missing.
        """
        request = self.request
        if request is None:
            return []
        most = min(self.num_free, request.most_devices)
        return [degree for degree in self.cluster.degrees if degree <= most]

    def place(self, degree: int) -> JobPlace | None:
        """Place where the job at hand would run now; ``None`` if there is none."""
        request = self.request
        assert request is not None
        return self.cluster.place(request.kind, degree, self.occupied)

    def in_time(self, place: JobPlace) -> bool:
        """Whether the job at hand would end in time there, were it to start now."""
        request = self.request
        assert request is not None
        waited_s = self.now_s - request.arrives_s
        return waited_s + place.seconds <= request.acceptable_s * (1.0 + _ROUNDING)

    def decide(self, degree: int) -> JobVerdict | None:
        """Give the job at hand up to ``degree`` devices; 0, or an illegal number, rejects it.

        Returns:
            The decision; ``None`` if the job waits and must be decided again.
        """
        request = self.request
        if request is None:
            raise HeterogError("all jobs are decided; begin another simulation.")
        legal = self.legal()
        place = self.place(degree) if degree in legal else None
        ends_s = self.now_s + (place.seconds if place else 0.0)
        if place is None:
            outcome = JobOutcome.REJECTED if legal and degree not in legal else JobOutcome.NO_ROOM
        else:
            outcome = JobOutcome.ACCEPTED if self.in_time(place) else JobOutcome.TOO_LATE
        if outcome in (JobOutcome.NO_ROOM, JobOutcome.TOO_LATE) and self._may_wait():
            self.now_s = max(self.now_s, self._running[0][0])
            self._release()
            return None
        granted = place if outcome == JobOutcome.ACCEPTED else None
        verdict = JobVerdict(
            request=request,
            outcome=outcome,
            degree=degree,
            devices=devices_of(granted.devices) if granted else (),
            starts_s=self.now_s,
            ends_s=ends_s,
            detail=granted.detail if granted else "",
        )
        if granted:
            heapq.heappush(self._running, (ends_s, len(self.verdicts), granted.devices))
            self.occupied |= granted.devices
        self.verdicts.append(verdict)
        self._arrive()
        return verdict

    def final(self) -> list[JobVerdict]:
        """All verdicts; jobs that run at ``end_s`` are unfinished, and so blocked."""
        return [
            replace(verdict, outcome=JobOutcome.UNFINISHED)
            if verdict.is_accepted and verdict.ends_s > self.end_s
            else verdict
            for verdict in self.verdicts
        ]

    def _may_wait(self) -> bool:
        request = self.request
        if not self.waits or not self._running or request is None:
            return False
        return self._running[0][0] - request.arrives_s < request.acceptable_s

    def _arrive(self) -> None:
        request = self.request
        if request is not None:
            self.now_s = max(self.now_s, request.arrives_s)
            self._release()

    def _release(self) -> None:
        while self._running and self._running[0][0] <= self.now_s:
            self.occupied &= ~heapq.heappop(self._running)[2]


def blocking_rate(verdicts: Sequence[JobVerdict]) -> float:
    """Part of the jobs that were blocked; 0 without jobs."""
    blocked = sum(not verdict.is_accepted for verdict in verdicts)
    return blocked / max(len(verdicts), 1)


def causes(verdicts: Sequence[JobVerdict]) -> dict[str, float]:
    """Part of the jobs with each outcome."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return {str(outcome): counts[outcome] / max(len(verdicts), 1) for outcome in JobOutcome}


Rule = Callable[[JobQueueing], int]
"""Function that decides the degree of the job at hand; 0 rejects it."""


def most_devices(state: JobQueueing) -> int:
    """Maximum partitioning: as many as are legal now (the paper's Para_max)."""
    return max(state.legal(), default=0)


def fewest_in_time(state: JobQueueing) -> int:
    """Minimum partitioning that should meet the deadline, by arithmetic (the paper's Para_min).

    The first legal degree from ceil(time alone / acceptable time) on, else the largest.
    """
    legal, request = state.legal(), state.request
    if not legal or request is None:
        return 0
    ratio = state.cluster.alone_s(request.kind) / request.acceptable_s
    wanted = math.ceil(min(ratio, 1e9))
    return next((degree for degree in legal if degree >= wanted), legal[-1])


def fewest_that_fit(state: JobQueueing) -> int:
    """The fewest devices with which the job starts now and ends in time; not one of PAC-ML's.

    It asks the cluster for the job's place and time instead of assuming perfect splits.
    """
    for degree in state.legal():
        place = state.place(degree)
        if place is not None and state.in_time(place):
            return degree
    return 0 if not state.waits else max(state.legal(), default=0)


def fastest(state: JobQueueing) -> int:
    """The degree with which the job ends first; 0 if nothing fits. Not one of PAC-ML's."""
    found = [
        (place.seconds, degree)
        for degree in state.legal()
        if (place := state.place(degree)) is not None
    ]
    return min(found)[1] if found else 0


def at_most(limit: int) -> Rule:
    """A rule that gives the largest legal degree up to a limit."""

    def rule(state: JobQueueing) -> int:
        return max((degree for degree in state.legal() if degree <= limit), default=0)

    return rule


def random_degree(seed: int) -> Rule:
    """A rule that draws any legal degree."""
    rng = np.random.default_rng(seed)

    def rule(state: JobQueueing) -> int:
        legal = state.legal()
        return int(rng.choice(legal)) if legal else 0

    return rule


RULES: dict[str, Rule] = {
    "one": at_most(1),
    "most": most_devices,
    "fewest": fewest_in_time,
    "fit": fewest_that_fit,
    "fastest": fastest,
}
"""Rules by their command-line names; ``random`` and ``at_most_4`` (any number) are known too."""


_AT_MOST = "at_most_"


def rule_named(name: str, seed: int = 0) -> Rule:
    """The rule of a name.

    Raises:
        UnknownNameError: there is none.
    """
    if name == "random":
        return random_degree(seed)
    limit = name.removeprefix(_AT_MOST)
    if limit != name and limit.isascii() and limit.isdigit() and 0 < len(limit) < 10:
        return at_most(int(limit))
    if name not in RULES:
        raise UnknownNameError("rule", name, [*RULES, "random", f"{_AT_MOST}4"])
    return RULES[name]


def run_rule(
    cluster: JobCluster,
    requests: Sequence[JobRequest],
    rule: Rule,
    *,
    waits: bool = False,
    end_s: float = float("inf"),
) -> list[JobVerdict]:
    """Decide about all jobs by a rule; see ``JobQueueing``."""
    state = JobQueueing(cluster, requests, waits=waits, end_s=end_s)
    while state.request is not None:
        state.decide(rule(state))
    return state.final()
