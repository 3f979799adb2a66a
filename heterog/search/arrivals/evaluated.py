"""Jobs on a cluster of unequal GPUs, with durations that heterog's own evaluator predicts.

Cheap methods plan a job on exactly the devices that it gets; its duration is the number of steps
times the step time by the referee. So the gain of more devices depends on links, slow cards and
memory, unlike PAC-ML's perfect splits. Step times are cached by kind of job and by the kinds of
devices and hosts. Jobs that share a host's link to other hosts do not slow each other down: that
is not simulated.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError, named
from heterog.graph.op_graph import OpGraph
from heterog.grouped import grouped
from heterog.memo import kept
from heterog.methods.planner import Budget
from heterog.search.arrivals.queueing import JobFeatures, JobPlace
from heterog.search.arrivals.ramp import devices_of
from heterog.search.portfolio import run_methods
from heterog.search.request import Request
from heterog.simulator.evaluator import Evaluator

METHODS = ("cp_ar", "ddp_accumulate")
"""Methods without search, which take a fraction of a second for each set of devices."""
IF_TOO_LARGE = ("pipeline",)
_SEARCHED = Budget(evaluations=100)
"""Budget of ``IF_TOO_LARGE``, a search that runs if no baseline fits into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The training of jobs of one kind.

    Attributes:
        graph: Graph of one training step.
        num_steps: Number of training steps.
    """

    graph: OpGraph
    num_steps: int

    @property
    def features(self) -> JobFeatures:
        """What a scheduler may see of the job: FLOPs as compute, written bytes as memory."""
        ops = self.graph.ops
        edges = [float(self.graph.tensors[tensor].num_bytes) for op in ops for tensor in op.inputs]
        return JobFeatures.of(
            [op.flops for op in ops], [op.bytes_written for op in ops], edges, self.num_steps
        )


class EvaluatedCluster:
    """Training jobs on a cluster, as ``queueing.JobCluster``.

    Args:
        cluster: The cluster.
        jobs: Training jobs by the names of their kinds.
        methods: Names of baselines that plan each job; the fastest that fits counts.
    """

    def __init__(
        self, cluster: Cluster, jobs: Mapping[str, TrainingJob], methods: Sequence[str] = METHODS
    ) -> None:
        self.cluster = cluster
        self.jobs = dict(jobs)
        self.kinds = tuple(self.jobs)
        self.methods = tuple(methods)
        self.num_devices = cluster.num_devices
        self.degrees = tuple(_degrees(cluster.num_devices))
        self.num_planned = 0
        self._steps: dict[tuple[object, ...], tuple[float, str] | None] = {}

    @kept
    def alone_s(self, kind: str) -> float:
        """Seconds on the fastest device; if none holds the job, device seconds on the fewest.

        Raises:
            HeterogError: not even all devices hold it.
        """
        for degree in self.degrees:
            place = self.place(kind, degree, 0)
            if place is not None:
                return degree * place.seconds
        raise HeterogError(
            f"job '{kind}' does not fit into the memory of cluster '{self.cluster.name}', "
            f"not on all {self.num_devices} devices by {', '.join(self.methods)} or "
            f"{', '.join(IF_TOO_LARGE)}; reduce its batch_size or give it more devices."
        )

    def features(self, kind: str) -> JobFeatures:
        """What a scheduler may see of a job."""
        return named("job", kind, self.jobs).features

    def place(self, kind: str, degree: int, occupied: int) -> JobPlace | None:
        """The better of two sets of free devices: the fastest, and those of the fewest hosts."""
        job = named("job", kind, self.jobs)
        found = [
            (job.num_steps * step[0], devices, step[1])
            for devices in self._choices(degree, occupied)
            if (step := self._step(kind, job.graph, devices)) is not None
        ]
        if not found:
            return None
        seconds, devices, method = min(found)
        return JobPlace(
            devices=sum(1 << device for device in devices),
            seconds=seconds,
            detail=f"{method} on {self.described(devices)}",
        )

    def described(self, devices: Sequence[int]) -> str:
        """Devices in words, by type and host: ``2 x V100-16GB (A), 1 x P100-12GB (B)``."""
        members = [self.cluster.devices[device] for device in devices]
        counts = Counter(
            (each.type.name, self.cluster.hosts[each.host_index].name) for each in members
        )
        return ", ".join(f"{n} x {kind} ({host})" for (kind, host), n in counts.items())

    def _choices(self, degree: int, occupied: int) -> Iterator[tuple[int, ...]]:
        free = devices_of(~occupied & ((1 << self.num_devices) - 1))
        if len(free) < degree or degree < 1:
            return
        cluster = self.cluster
        speeds = [max(device.type.peak_flops_per_s.values()) for device in cluster.devices]
        room = Counter(cluster.devices[device].host_index for device in free)

        def by_speed(device: int) -> tuple[float, int, int]:
            host = cluster.devices[device].host_index
            # Filling a host leaves whole hosts to other jobs.
            return (
                -speeds[device],
                room[host] if room[host] >= degree else 10**6 - room[host],
                device,
            )

        def by_host(device: int) -> tuple[bool, float, int, int]:
            host = cluster.devices[device].host_index
            return room[host] < degree, -speeds[device], -room[host], device

        chosen = (tuple(sorted(sorted(free, key=key)[:degree])) for key in (by_speed, by_host))
        yield from dict.fromkeys(chosen)

    def _step(
        self, kind: str, graph: OpGraph, devices: tuple[int, ...]
    ) -> tuple[float, str] | None:
        """Seconds and method of a step on some devices; ``None`` if no method can run it."""
        key = kind, *self._likeness(devices)
        if key not in self._steps:
            self._steps[key] = self._planned(graph, devices)
        return self._steps[key]

    def _likeness(self, devices: tuple[int, ...]) -> tuple[object, ...]:
        """A key that is equal for sets of devices on which every job takes equally long."""
        cluster = self.cluster
        if cluster.pairs:  # the lines between hosts are individual
            return devices
        members = [cluster.devices[device] for device in devices]
        hosts = grouped(
            (each.host_index, (each.type.name, each.usable_memory_bytes)) for each in members
        )
        return tuple(sorted((cluster.host_kind[host], *kinds) for host, kinds in hosts.items()))

    def _planned(self, graph: OpGraph, devices: tuple[int, ...]) -> tuple[float, str] | None:
        self.num_planned += 1
        evaluator = Evaluator(graph, self.cluster.part(devices))
        for methods in (self.methods, IF_TOO_LARGE if len(devices) > 1 else ()):
            if not methods:
                continue
            request = Request(
                graph=graph, cluster=evaluator.cluster, methods=methods, budget=_SEARCHED
            )
            rows = run_methods(evaluator, request)
            fits = [(row.step_time_s, row.method) for row in rows if row.step_time_s is not None]
            if fits:
                return min(fits)
        return None


def _degrees(num_devices: int) -> list[int]:
    """Numbers of devices to choose from: 1, 2, 3, 4, 6, 8, 12, 16, ... and all of them."""
    powers = [1 << exponent for exponent in range(num_devices.bit_length())]
    found = {num_devices, *powers, *(3 * power // 2 for power in powers[1:])}
    return sorted(degree for degree in found if degree <= num_devices)
