"""The interface of cost models, and their answers as arrays for the simulator."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.lowering.channels import Channel, ChannelKind, communicators
from heterog.lowering.kernel_arguments import by_reference
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.sparse_tables import starts_of

_MOST_DRAG = 0.9
"""Largest fraction of compute speed that drag takes: compute never stops while bytes move."""


class CostModel(Protocol):
    """Seconds of compute tasks on a device type and of communication over a channel."""

    @property
    def name(self) -> str:
        """Name shown with every prediction: ``"roofline"`` or the calibration it comes from."""

    def __hash__(self) -> int:
        """Models are hashable because prices are cached by model."""

    def op_seconds(self, graph: OpGraph, device_type: DeviceType, samples: int) -> FloatArray:
        """Seconds of every op at a local share.

        Args:
            graph: The training step.
            device_type: Device type on which it runs.
            samples: Number of local samples of the batch.

        Returns:
            Seconds of each op, updates included; views are 0.  # [num_ops]
        """

    def work_seconds(
        self, graph: OpGraph, device_type: DeviceType, flops: FloatArray, num_bytes: FloatArray
    ) -> FloatArray:
        """Seconds of every op if its local part is this much work, on whatever axis it is split.

        Args:
            graph: The training step.
            device_type: Device type on which it runs.
            flops: FLOPs of each op.  # [num_ops]
            num_bytes: Bytes moved by each op.  # [num_ops]

        Returns:
            Seconds of each op; views are 0.  # [num_ops]
        """

    def in_teams(self, members: int) -> "CostModel":
        """The model of ops of teams while stages on several hosts send to each other.

        Args:
            members: Devices of a team.
        """

    def spread(self, graph: OpGraph, device_type: DeviceType) -> float:
        """Standard deviation of log(measured / predicted) of a step's compute time."""

    def copy_seconds(self, device_type: DeviceType) -> tuple[float, float]:
        """Fixed seconds, and seconds per byte moved, of copies and sums on a device."""

    def channel_seconds(self, cluster: Cluster, channel: Channel) -> "ChannelSeconds":
        """Cost of a channel per operation and payload byte."""


class ChannelSeconds(NamedTuple):
    """Cost of a channel: ``latency(payload) + payload x seconds_per_byte`` from start to end.

    latency(payload) = latency_s + min(fill_s, payload x fill_s_per_byte): a collective of many
    bytes takes a while until its pipeline is full; one of few bytes is over before.

    Each link resource is held for ``payload x held`` only: a 100 Gbit/s NIC that talks to one of
    50 Gbit/s is busy half the time. Members of the channel that compute lose time to it, by
    device type: ``overhead_s`` per operation and ``drag`` seconds per payload byte (o and O of
    the LogGP model, Alexandrov et al. 1995). While a member computes, the latency is
    ``loaded_latency_s`` if that is longer.

    Where flows share a link, their rates are in proportion to their ``weight`` (weighted max-min
    fairness): 1 is what networks do by themselves, others are for flows that are paced or have a
    traffic class of their own.
    """

    latency_s: float
    seconds_per_byte: float
    held: dict[int, float]
    drag: Mapping[str, float] = MappingProxyType({})
    loaded_latency_s: float = 0.0
    overhead_s: Mapping[str, float] = MappingProxyType({})
    fill_s: float = 0.0
    fill_s_per_byte: float = 0.0
    weight: float = 1.0

    def latency(self, payload: float) -> float:
        """Seconds of an operation before its bytes move at full rate."""
        return self.latency_s + min(self.fill_s, payload * self.fill_s_per_byte)


@by_reference
class Prices(NamedTuple):
    """A cost model's answers for one graph, cluster and set of channels, for the kernels."""

    type_of_device: IntArray
    op_seconds: FloatArray  # [num_types, batch_size + 1, num_compute_ops]
    has_rule: npt.NDArray[np.bool_]  # of each compute op
    ruled_row: IntArray  # of ``Choice.shares``, for ops with a rule  # [num_compute_ops]
    ruled_number: IntArray  # of its work on a device  # [num_rows, num_micro, num_devices]
    ruled_seconds: FloatArray  # [numbers, num_compute_ops]
    update_seconds: FloatArray  # [num_types, num_parameters]
    parameter_bytes: FloatArray
    copy_fixed_s: FloatArray  # [num_types]
    copy_s_per_byte: FloatArray  # [num_types]
    channel_latency_s: FloatArray
    channel_fill_s: FloatArray  # the most that is added to the latency of large payloads
    channel_fill_s_per_byte: FloatArray
    channel_s_per_byte: FloatArray
    channel_weight: FloatArray  # rates on a shared link are in proportion to it
    channel_is_collective: npt.NDArray[np.bool_]
    channel_drag: FloatArray  # share of compute speed that members lose  # [channels, num_types]
    channel_overhead_s: FloatArray  # compute seconds that an operation takes from each busy member
    member_start: IntArray  # devices of each channel  # [num_channels + 1]
    member: IntArray
    has_drag: bool
    blocks_sends: bool  # devices compute nothing while a value that they send is under way
    channel_loaded_s: FloatArray  # added to the latency while a member computes
    channel_queue: IntArray  # of a collective, its communicator's; of a transfer, its links'
    channel_communicator: IntArray  # first channel of the same communicator; a transfer's own
    resource_start: IntArray  # link resources of each channel  # [num_channels + 1]
    resource: IntArray
    resource_s_per_byte: FloatArray
    gate: npt.NDArray[np.uint64]  # bit set of the resources that must be free  # [channels, words]
    gated_start: IntArray  # queues whose gate holds each resource  # [num_resources + 1]
    gated_queue: IntArray
    num_queues: int
    num_resources: int


class ChannelPrices(NamedTuple):
    """The part of ``Prices`` about channels; made again when new channels appear."""

    latency_s: FloatArray
    fill_s: FloatArray
    fill_s_per_byte: FloatArray
    s_per_byte: FloatArray
    weight: FloatArray
    is_collective: npt.NDArray[np.bool_]
    drag: FloatArray
    overhead_s: FloatArray
    loaded_s: FloatArray
    member_start: IntArray
    member: IntArray
    queue: IntArray
    communicator: IntArray
    resource_start: IntArray
    resource: IntArray
    resource_s_per_byte: FloatArray
    gate: npt.NDArray[np.uint64]
    gated_start: IntArray
    gated_queue: IntArray
    num_queues: int


_Way = tuple[ChannelKind, tuple[int, ...], tuple[float, ...]]


class ChannelPricer:
    """Computes the prices of channels from a cost model, each channel only once.

    A channel may start when its *gate* is free: the resources it holds for more than half as long
    as the one it holds longest. It only loads the others: their next user waits longer. So two
    transfers from a fast NIC to two slow ones run side by side, as they do in reality.

    All collectives over one device set belong to one *communicator*, which runs one operation at
    a time: they wait in one queue, whatever their links are.

    Args:
        model: Cost model of the channels.
        cluster: The cluster with the links.
    """

    def __init__(self, model: CostModel, cluster: Cluster) -> None:
        self._model = model
        self._cluster = cluster
        self._names = [device_type.name for device_type in cluster.device_types]
        self._costs: dict[_Way, _Cost] = {}

    def seconds(self, channel: Channel) -> ChannelSeconds:
        """Cost of a channel."""
        return self._cost(channel).seconds

    def prices(self, channels: Sequence[Channel]) -> ChannelPrices:
        """Prices of some channels, numbered in their order."""
        costs = [self._cost(channel) for channel in channels]
        queues: dict[tuple[bool, tuple[int, ...]], int] = {}
        queue = [queues.setdefault(cost.queue, len(queues)) for cost in costs]
        gated: list[dict[int, None]] = [{} for _ in self._cluster.resources]
        for number, cost in zip(queue, costs, strict=True):
            for resource in cost.gate:
                gated[resource].setdefault(number)
        words = max((len(self._cluster.resources) + 63) // 64, 1)
        gate = np.zeros((len(channels), words), np.uint64)
        of = np.repeat(np.arange(len(costs)), [len(cost.gate) for cost in costs])
        bits = np.array([resource for cost in costs for resource in cost.gate], np.int64)
        np.bitwise_or.at(gate, (of, bits // 64), np.uint64(1) << (bits % 64).astype(np.uint64))
        starts = starts_of([len(cost.seconds.held) for cost in costs])
        by_type = len(costs), len(self._names)  # also where there is no channel
        return ChannelPrices(
            latency_s=np.array([cost.seconds.latency_s for cost in costs], np.float64),
            fill_s=np.array([cost.seconds.fill_s for cost in costs], np.float64),
            fill_s_per_byte=np.array([cost.seconds.fill_s_per_byte for cost in costs], np.float64),
            s_per_byte=np.array([cost.seconds.seconds_per_byte for cost in costs], np.float64),
            weight=np.array([cost.seconds.weight for cost in costs], np.float64),
            is_collective=np.array([cost.queue[0] for cost in costs], np.bool_),
            drag=np.array([cost.drag for cost in costs], np.float64).reshape(by_type),
            overhead_s=np.array([cost.overhead_s for cost in costs], np.float64).reshape(by_type),
            loaded_s=np.array([cost.loaded_s for cost in costs], np.float64),
            member_start=starts_of([len(channel.devices) for channel in channels]),
            member=np.array([d for channel in channels for d in channel.devices], np.int32),
            queue=np.array(queue, np.int32),
            communicator=communicators(channels),
            resource_start=starts,
            resource=np.array([r for cost in costs for r in cost.seconds.held], np.int32),
            resource_s_per_byte=np.array(
                [s for cost in costs for s in cost.seconds.held.values()], np.float64
            ),
            gate=gate,
            gated_start=starts_of([len(numbers) for numbers in gated]),
            gated_queue=np.array([number for numbers in gated for number in numbers], np.int32),
            num_queues=len(queues),
        )

    def _cost(self, channel: Channel) -> "_Cost":
        way = channel.kind, channel.devices, channel.slices
        cost = self._costs.get(way)
        if cost is None:
            cost = self._costs[way] = self._new_cost(channel)
        return cost

    def _new_cost(self, channel: Channel) -> "_Cost":
        cost = self._model.channel_seconds(self._cluster, channel)
        is_collective = channel.kind != ChannelKind.POINT_TO_POINT
        longest = max(cost.held.values(), default=0.0)
        return _Cost(
            seconds=cost,
            queue=(is_collective, channel.devices if is_collective else tuple(sorted(cost.held))),
            gate=tuple(link for link, seconds in cost.held.items() if seconds > 0.5 * longest),
            drag=_lost_speed(cost, self._names),
            overhead_s=[cost.overhead_s.get(name, 0.0) for name in self._names],
            loaded_s=max(cost.loaded_latency_s - cost.latency_s, 0.0),
        )


class _Cost(NamedTuple):
    """Everything known about a single channel."""

    seconds: ChannelSeconds
    queue: tuple[bool, tuple[int, ...]]  # whether of a communicator; its devices, or links
    gate: tuple[int, ...]  # resources that must be free
    drag: list[float]
    overhead_s: list[float]
    loaded_s: float


def _lost_speed(cost: ChannelSeconds, device_types: Sequence[str]) -> list[float]:
    """Fraction of compute speed that a device of each type loses while a channel is busy."""
    if cost.seconds_per_byte <= 0.0:
        return [0.0] * len(device_types)
    return [
        min(cost.drag.get(name, 0.0) / cost.seconds_per_byte, _MOST_DRAG) for name in device_types
    ]
