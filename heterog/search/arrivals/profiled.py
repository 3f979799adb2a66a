"""PAC-ML's jobs and users.

A job is a profiled graph of ops, which are split perfectly and placed on RAMP. Users say when jobs
arrive, and set deadlines as factors of a job's time on one worker.
"""

import csv
import io
import math
from dataclasses import dataclass
from functools import cached_property, reduce
from importlib import resources
from operator import or_
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.stats import skewnorm

from heterog.errors import HeterogError, UnknownNameError, named
from heterog.grouped import grouped
from heterog.memo import kept
from heterog.search.arrivals import ramp
from heterog.search.arrivals.queueing import JobCluster, JobFeatures, JobPlace, JobRequest

NUM_STEPS = 50  # training steps of each job
_QUANTUM = 0.01
"""Cost of a forward op, in the profile's unit, that is worth a part of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledOp:
    """A forward op and its backward op.

    Attributes:
        forward: Seconds of the forward op. The authors' simulator takes the milliseconds of the
            profiles for seconds; so do we, or jobs would never overlap on the cluster.
        backward: Seconds of the backward op, likewise.
        activation_bytes: Bytes of the activations that it outputs.
        parameter_bytes: Bytes of its parameters.
        inputs: Positions of the ops whose outputs it reads.
    """

    forward: float
    backward: float
    activation_bytes: int
    parameter_bytes: int
    inputs: tuple[int, ...]

    @property
    def memory_bytes(self) -> int:
        """Bytes of activations and parameters; as in the authors' code, a split op sends both."""
        return self.activation_bytes + self.parameter_bytes

    def parts(self, degree: int) -> int:
        """Number of parts it is split into: max(1, min(2 ceil(ceil(cost / 0.01) / 2), degree))."""
        wanted = 2 * math.ceil(math.ceil(self.forward / _QUANTUM) / 2)
        return max(1, min(wanted, degree))


@dataclass(frozen=True, kw_only=True)
class ProfiledJob:
    """A model to train for 50 steps.

    Attributes:
        name: Name of the model.
        ops: Forward ops, in the order of the profile.
    """

    name: str
    ops: tuple[ProfiledOp, ...]

    @cached_property
    def alone_s(self) -> float:
        """Seconds of the whole job on one worker."""
        return NUM_STEPS * sum(op.forward + op.backward for op in self.ops)

    def widths(self, degree: int) -> tuple[int, ...]:
        """Distinct numbers of parts of the ops at some degree, ascending."""
        return tuple(sorted({op.parts(degree) for op in self.ops}))

    def step_s(self, degree: int, blocks: dict[int, int]) -> float:
        """Seconds of a training step whose ops are split into at most ``degree`` parts.

        The time of a split op is divided by its number of parts. A message between ops on the same
        block is an all-reduce, other messages are one to one, and parts of a split backward op
        exchange their results. Unlike in the paper's simulator, nothing overlaps: communication
        is below 0.2 % of a job.

        Args:
            degree: Most parts of an op.
            blocks: Block of workers for each number of parts.
        """
        total = 0.0
        for op in self.ops:
            parts = op.parts(degree)
            total += (op.forward + op.backward) / parts
            if parts > 1:
                pair = (min(2, side) for side in ramp.extent(blocks[parts]))
                total += ramp.all_reduce_s(2 * op.memory_bytes / parts, *pair)
            for index in op.inputs:
                total += 2 * self._edge_s(self.ops[index], parts, degree, blocks)
        return total

    @staticmethod
    def _edge_s(source: ProfiledOp, parts: int, degree: int, blocks: dict[int, int]) -> float:
        sent_from = source.parts(degree)
        if blocks[sent_from] != blocks[parts]:
            return ramp.one_to_one_s(source.memory_bytes / (sent_from * parts))
        if parts == 1:
            return 0.0
        return ramp.all_reduce_s(source.memory_bytes, *ramp.extent(blocks[parts]))

    @cached_property
    def features(self) -> JobFeatures:
        """What a scheduler may see of the job: forward and backward ops together."""
        costs = [cost for op in self.ops for cost in (op.forward, op.backward)]
        memory = [float(op.memory_bytes) for op in self.ops for _ in range(2)]
        sent = [op.activation_bytes for op in self.ops]
        edges = [float(sent[i]) for op in self.ops for i in op.inputs]
        edges += [float(op.activation_bytes) for op in self.ops for _ in op.inputs]
        edges.append(float(sent[-1]))  # from the last forward op to its backward op
        return JobFeatures.of(costs, memory, edges, NUM_STEPS)


def profiled_jobs() -> dict[str, ProfiledJob]:
    """The paper's five jobs by name: AlexNet, ResNet-18, SqueezeNet, VGG-16 and GNMT."""
    table = resources.files("heterog.search.arrivals") / "pipedream_jobs.csv"
    lines = table.read_text(encoding="utf-8").splitlines()
    ops = grouped(
        (
            row["job"],
            ProfiledOp(
                forward=float(row["forward_ms"]),
                backward=float(row["backward_ms"]),
                activation_bytes=int(row["activation_bytes"]),
                parameter_bytes=int(row["parameter_bytes"]),
                inputs=tuple(map(int, row["inputs"].split())),
            ),
        )
        for row in csv.DictReader(io.StringIO("\n".join(lines[1:])))
    )
    return {name: ProfiledJob(name=name, ops=tuple(found)) for name, found in ops.items()}


class RampCluster:
    """The paper's profiled jobs on its RAMP network, as ``queueing.JobCluster``."""

    num_devices, degrees = ramp.NUM_WORKERS, ramp.LEGAL_DEGREES

    def __init__(self) -> None:
        self.jobs = profiled_jobs()
        self.kinds = tuple(self.jobs)

    def alone_s(self, kind: str) -> float:
        """Seconds of a job on one worker."""
        return named("job", kind, self.jobs).alone_s

    def features(self, kind: str) -> JobFeatures:
        """What a scheduler may see of a job."""
        return named("job", kind, self.jobs).features

    def place(self, kind: str, degree: int, occupied: int) -> JobPlace | None:
        """First-fit blocks, one for each distinct number of parts; a worker has one job."""
        widths = named("job", kind, self.jobs).widths(degree)
        blocks = tuple(ramp.first_fit(parts, occupied) for parts in widths)
        if not all(blocks):
            return None
        return JobPlace(devices=reduce(or_, blocks), seconds=self._seconds(kind, degree, blocks))

    @kept
    def _seconds(self, kind: str, degree: int, blocks: tuple[int, ...]) -> float:
        job = self.jobs[kind]
        block_of = dict(zip(job.widths(degree), blocks, strict=True))
        return NUM_STEPS * job.step_s(degree, block_of)


DeadlineName = Literal["A", "B", "C", "D"]
DEADLINES: tuple[DeadlineName, ...] = get_args(DeadlineName)
"""Even, tight, medium and loose."""
_SKEWNESS = {"B": 5.0, "C": 0.0, "D": -5.0}
_LEAST_FACTOR = 0.1  # smaller factors are raised to it
_DECIMALS = 2
_NUM_SAMPLES, _NUM_BINS = 50_000, 1_000
"""Size of the authors' ``CustomSkewNorm``: a histogram of samples, whose upper edges are drawn."""
SPACING_S = 1_000.0
EPISODE_S = 1e6
"""Seconds between arrivals, and seconds for which they go on: 1001 jobs."""

Factors = npt.NDArray[np.float64]


def draw_factors(name: str, number: int, rng: np.random.Generator) -> Factors:
    """Deadlines as factors of jobs' times alone.

    ``A`` is uniform from 0.1 to 1. The others are normal distributions skewed by 5, 0 and -5,
    shifted to begin at 0 and scaled to end at 1. The authors' code draws a value below 0.1 again
    between two equal bounds, so it becomes 0.1.

    Raises:
        UnknownNameError: no such distribution.
    """
    if name not in DEADLINES:
        raise UnknownNameError("distribution of deadlines", name, DEADLINES)
    if name == "A":
        return np.round(rng.integers(10, 101, number) / 100.0, _DECIMALS)
    values = np.asarray(
        skewnorm.rvs(_SKEWNESS[name], loc=1.0, size=_NUM_SAMPLES, random_state=rng)
    )
    values = (values - values.min()) / np.ptp(values)
    counts, edges = np.histogram(np.maximum(values, _LEAST_FACTOR), bins=_NUM_BINS)
    return rng.choice(np.round(edges[1:], _DECIMALS), number, p=counts / counts.sum())


def draw_requests(
    cluster: JobCluster,
    deadlines: str,
    seed: int,
    *,
    spacing_s: float = SPACING_S,
    episode_s: float = EPISODE_S,
) -> list[JobRequest]:
    """An episode: a cluster's kinds in equal numbers and random order, one job each spacing.

    Args:
        cluster: Cluster that knows the kinds and their times alone.
        deadlines: Name of a distribution: ``A`` to ``D``.
        seed: Seed of the order and the deadlines.
        spacing_s: Seconds between arrivals.
        episode_s: Latest time at which a job arrives.
    """
    if not 0.0 < spacing_s <= 1e12 or not 0.0 <= episode_s <= 1e6 * spacing_s:
        raise HeterogError(
            f"arrivals every {spacing_s:g} s for {episode_s:g} s; give a spacing above 0 and at "
            "most a million arrivals."
        )
    rng = np.random.default_rng(seed)
    number = int(episode_s // spacing_s) + 1
    factors = draw_factors(deadlines, number, rng)
    kinds = cluster.kinds * -(-number // len(cluster.kinds))
    order = rng.permutation(len(kinds))[:number]
    return [
        JobRequest(
            name=f"{kinds[place]}-{index}",
            kind=kinds[place],
            arrives_s=index * spacing_s,
            acceptable_s=float(factors[index]) * cluster.alone_s(kinds[place]),
        )
        for index, place in enumerate(order)
    ]
