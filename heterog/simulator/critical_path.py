"""The limits of a step: the seconds of its critical path by place, purpose and module.

``Timeline.critical_path`` is the chain of tasks that determines the step's time. This module cuts
each of its tasks into *pieces*: seconds of waiting, of compute on a device, of latency, of bytes
through the slowest link of a channel. The pieces follow one another without a gap from the start
of the step to its end, so they add up to the step.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

from heterog.cluster.topology import Cluster
from heterog.grouped import grouped
from heterog.lowering.channels import Channel, ChannelKind
from heterog.lowering.program import FIRST_LINK_KIND, OP_KINDS, TaskKind
from heterog.pricing.cost_model import CostModel
from heterog.pricing.device_models.model import DeviceModels
from heterog.simulator.timeline import PathStep, Timeline
from heterog.strategy.layouts.stages import layer_path

_ROUNDING = 1e-9
# A link counts as a slowest one if it is held for at least this share of the longest hold.
_AS_SLOW = 0.99

_NUMBERED = re.compile(r"(.*?)(\d+)$")


class Limit(StrEnum):
    """The resource that a piece's seconds are spent on."""

    COMPUTE = "compute"
    """A task of a compute stream."""
    HOST = "host"
    """A kernel that ends before the host has issued the next one, so the device waits."""
    LINK = "link"
    """Bytes pass through a link."""
    LATENCY = "latency"
    """A message is on its way; more bandwidth would not help."""
    WAIT = "wait"
    """A wait whose reason is not in the schedule."""


class Purpose(StrEnum):
    """The purpose of a piece."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    """Forward ops run again, because their results were not kept."""
    BACKWARD = "backward"
    UPDATE = "update"
    COPIES = "copies"
    """Splitting, joining and adding values that are or were sent."""
    GRADIENTS = "gradients"
    """Sending of parameters' gradients."""
    PARAMETERS = "parameters"
    """Sending of updated parameters, from a server or from the devices that own slices."""
    ACTIVATIONS = "activations"
    """Sending of activations and their gradients."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPiece:
    """Some seconds of the critical path, or a sum of such pieces.

    Attributes:
        limit: Resource that the seconds are spent on.
        place: The device, the slowest link (``"NICs of B and C"``), or ``""`` for a wait.
        purpose: Purpose of the piece.
        block: Path of the module up to its first number: ``"encoder.layer.3"``.
        seconds: Seconds of the path.
    """

    limit: Limit
    place: str
    purpose: Purpose
    block: str
    seconds: float


def critical_pieces(timeline: Timeline, cost_model: CostModel) -> tuple[PathPiece, ...]:
    """Cut the critical path into pieces, in the order of time; they add up to the step's seconds.

    Args:
        timeline: Timeline of a simulated step.
        cost_model: Cost model that priced it; gives the slowest link of a channel and latencies.
    """
    host = _HostBound(timeline, cost_model)
    return tuple(
        piece
        for step in timeline.critical_path
        for piece in _pieces_of(step, timeline, cost_model, host)
    )


def totals(pieces: Iterable[PathPiece]) -> tuple[PathPiece, ...]:
    """Sum pieces that differ only in their seconds, the longest first."""
    alike = grouped((replace(piece, seconds=0.0), piece.seconds) for piece in pieces)
    summed = [replace(piece, seconds=sum(seconds)) for piece, seconds in alike.items()]
    return tuple(sorted(summed, key=lambda p: (-p.seconds, p.place, p.purpose, p.block)))


def block_of(module: str) -> str:
    """A module's path up to and including its first number, or all of it.

    >>> block_of("bert.encoder.layer.3.output.dense"), block_of("cls.decoder"), block_of("")
    ('bert.encoder.layer.3', 'cls.decoder', '(root)')
    """
    return layer_path(module) or module or "(root)"


def merge_blocks(blocks: Iterable[str]) -> list[str]:
    """Blocks in order, with consecutive numbers as a range.

    >>> merge_blocks(["h.2", "h.0", "h.1", "head", "h.5"])
    ['h.0-2', 'h.5', 'head']
    """
    matches = {block: _NUMBERED.fullmatch(block) for block in blocks}
    numbered = grouped((match[1], int(match[2])) for match in matches.values() if match)
    plain = [block for block, match in matches.items() if not match]
    merged = []
    for stem, numbers in numbered.items():
        # Consecutive numbers have the same distance from their positions.
        for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
            run_numbers = [number for _, number in run]
            first, last = run_numbers[0], run_numbers[-1]
            merged.append(f"{stem}{first}" if first == last else f"{stem}{first}-{last}")
    return merged + plain


def slowest_links(cluster: Cluster, channel: Channel, cost_model: CostModel) -> tuple[int, ...]:
    """Resources of a channel that its bytes hold longest or nearly longest."""
    held = cost_model.channel_seconds(cluster, channel).held
    longest = max(held.values(), default=0.0)
    return tuple(link for link, seconds in held.items() if seconds >= _AS_SLOW * longest > 0.0)


def link_name(cluster: Cluster, links: Iterable[int]) -> str:
    """Links in words, by host and kind.

    >>> link_name(Cluster.load("paper_8gpu"), [2, 3, 5])
    '50 Gbit/s NICs of B and C'
    """
    nics: dict[int, None] = {}
    inner: dict[int, None] = {}
    between: dict[str, None] = {}
    for link in links:
        if cluster.is_between(link):
            resource = cluster.resources[link]
            ends = resource.name.partition(" limit ")[0]
            rate = resource.bandwidth_bytes_per_s * 8e-9
            between.setdefault(f"{rate:.3g} Gbit/s from {ends}")
            continue
        kind = nics if cluster.is_nic(link) else inner
        kind.setdefault(cluster.resources[link].host_index)
    names = []
    if nics:
        rates = sorted({cluster.hosts[h].nic_line_rate_bytes_per_s * 8e-9 for h in nics})
        speed = " and ".join(f"{rate:g}" for rate in (rates if len(rates) < 3 else rates[::2]))
        many = "s" if len(nics) > 1 else ""
        names.append(f"{speed} Gbit/s NIC{many} of {_hosts(cluster, nics)}")
    if inner:
        kinds = " and ".join(dict.fromkeys(cluster.hosts[h].intra.kind for h in inner))
        names.append(f"{kinds} inside {_hosts(cluster, inner)}")
    if between:
        more = f" and {len(between) - 2} more" if len(between) > 2 else ""
        names.append(" and ".join(list(between)[:2]) + more)
    return " and ".join(names)


def _hosts(cluster: Cluster, hosts: Iterable[int]) -> str:
    names = [cluster.hosts[host].name for host in sorted(hosts)]
    if len(names) > 4:
        return f"{len(names)} hosts"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


class _HostBound:
    """Finds the tasks that take as long as the host needs to issue their kernels.

    Ops of teams in pipelines over several hosts, whose hosts take longer, count as compute.
    """

    def __init__(self, timeline: Timeline, cost_model: CostModel) -> None:
        devices = timeline.program.device[timeline.program.kind < FIRST_LINK_KIND]
        is_alone = len(devices) > 0 and bool((devices == devices[0]).all())
        model, graph = cost_model.alone() if is_alone else cost_model, timeline.graph
        self._timeline, self._issue_s = timeline, []
        if isinstance(model, DeviceModels):
            kinds = timeline.cluster.device_types
            self._issue_s = [model.issue_seconds(graph, kind) for kind in kinds]
            self._whole_s = [model.op_seconds(graph, kind, graph.batch_size) for kind in kinds]

    def limits(self, task: int) -> bool:
        """Whether the host, not the device, decides how long a compute task takes."""
        timeline, kind = self._timeline, TaskKind(int(self._timeline.program.kind[task]))
        if not self._issue_s or kind not in {*OP_KINDS, TaskKind.UPDATE}:
            return False
        device, op = int(timeline.program.device[task]), timeline.op(task)
        number = timeline.cluster.type_index[device]
        seconds = float(timeline.finish[task] - timeline.start[task])
        if kind == TaskKind.UPDATE:  # that of a slice takes its part of the whole one
            seconds = float(self._whole_s[number][op])
        return 0.0 < seconds <= (1.0 + _ROUNDING) * float(self._issue_s[number][op])


def _pieces_of(
    step: PathStep, timeline: Timeline, cost_model: CostModel, host: _HostBound
) -> Iterator[PathPiece]:
    """The wait before a task, if any, and the task; latency of communication is separate."""
    block = block_of(timeline.module(step.task))
    purpose = _purpose(timeline, step.task)
    if step.wait_s > 0.0:
        yield PathPiece(
            limit=Limit.WAIT, place="", purpose=Purpose.NOTHING, block="", seconds=step.wait_s
        )
    if timeline.is_compute(step.task):
        device = timeline.cluster.devices[int(timeline.program.device[step.task])]
        yield PathPiece(
            limit=Limit.HOST if host.limits(step.task) else Limit.COMPUTE,
            place=device.name,
            purpose=purpose,
            block=block,
            seconds=step.seconds,
        )
        return
    channel = timeline.program.channels[int(timeline.program.channel[step.task])]
    latency_s = _latency_on_path(step, timeline, channel, cost_model)
    place = link_name(timeline.cluster, slowest_links(timeline.cluster, channel, cost_model))
    for limit, seconds in ((Limit.LATENCY, latency_s), (Limit.LINK, step.seconds - latency_s)):
        if seconds > 0.0:
            yield PathPiece(
                limit=limit, place=place, purpose=purpose, block=block, seconds=seconds
            )


def _latency_on_path(
    step: PathStep, timeline: Timeline, channel: Channel, cost_model: CostModel
) -> float:
    """The latency within a communication's seconds on the path.

    The latency of a collective comes first. The latency of a transfer comes last; it is not on the
    path if the next task on the path did not wait for it.
    """
    payload = float(timeline.program.num_bytes[step.task])
    latency_s = cost_model.channel_seconds(timeline.cluster, channel).latency(payload)
    if channel.kind == ChannelKind.POINT_TO_POINT:
        whole = float(timeline.finish[step.task] - timeline.start[step.task])
        latency_s -= max(whole - step.seconds, 0.0)
    return min(max(latency_s, 0.0), step.seconds)


_PURPOSES = {
    TaskKind.RECOMPUTE: Purpose.RECOMPUTE,
    TaskKind.UPDATE: Purpose.UPDATE,
    TaskKind.PULL: Purpose.PARAMETERS,
    TaskKind.GATHER_PARAMETERS: Purpose.PARAMETERS,
    TaskKind.PUSH: Purpose.GRADIENTS,
    TaskKind.ALL_REDUCE: Purpose.GRADIENTS,
    TaskKind.REDUCE_SCATTER: Purpose.GRADIENTS,
    TaskKind.ALL_GATHER: Purpose.GRADIENTS,
}
"""Purpose of the tasks whose kind decides about it."""


def _purpose(timeline: Timeline, task: int) -> Purpose:
    kind = TaskKind(int(timeline.program.kind[task]))
    if kind in (TaskKind.COMPUTE, TaskKind.REMAKE):
        return Purpose(timeline.phase(task))
    if kind not in _PURPOSES and timeline.is_compute(task):
        return Purpose.COPIES
    whole = timeline.makes_gradient_whole(task)
    return _PURPOSES.get(kind, Purpose.GRADIENTS if whole else Purpose.ACTIVATIONS)
