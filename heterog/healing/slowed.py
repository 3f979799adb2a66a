"""Clusters in which some devices take longer than planned, and what computing costs there."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.lowering.channels import Channel
from heterog.lowering.program import FloatArray
from heterog.pricing.cost_model import ChannelSeconds, CostModel

_SLOW = "_slow_"


def slowed(cluster: Cluster, factors: Mapping[int, float]) -> Cluster:
    """Make kernels of some devices take longer.

    Each slow device gets a type of its own, whose name says how slow it is.

    Args:
        cluster: The cluster as planned.
        factors: Factor by which kernels take longer, by device.
    """
    devices = list(cluster.devices)
    for device, factor in factors.items():
        kind = devices[device].type
        name = f"{kind.name.partition(_SLOW)[0]}{_SLOW}{factor:.3g}"
        devices[device] = replace(
            devices[device],
            type=replace(
                kind,
                name=name,
                peak_flops_per_s={
                    dtype: peak / factor for dtype, peak in kind.peak_flops_per_s.items()
                },
                memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s / factor,
                launch_overhead_s=kind.launch_overhead_s * factor,
            ),
        )
    return replace(cluster, devices=tuple(devices))


class SlowedCosts:
    """A cost model in which some devices take longer than their type.

    Args:
        model: Cost model of the types at their planned speed.
        cluster: Cluster with those types.
        factors: Factor by which kernels take longer, by device.
    """

    def __init__(self, model: CostModel, cluster: Cluster, factors: Mapping[int, float]) -> None:
        self._model, self._cluster = model, cluster
        changed = slowed(cluster, factors)
        self._known: dict[str, tuple[DeviceType, float]] = {
            changed.devices[device].type.name: (cluster.devices[device].type, factor)
            for device, factor in factors.items()
        }

    @property
    def name(self) -> str:
        """Name of the underlying cost model."""
        return self._model.name

    def _as_planned(self, kind: DeviceType) -> tuple[DeviceType, float]:
        return self._known.get(kind.name, (kind, 1.0))

    def op_seconds(self, graph: OpGraph, device_type: DeviceType, samples: int) -> FloatArray:
        """See ``CostModel``."""
        kind, factor = self._as_planned(device_type)
        return factor * self._model.op_seconds(graph, kind, samples)

    def work_seconds(
        self, graph: OpGraph, device_type: DeviceType, flops: FloatArray, num_bytes: FloatArray
    ) -> FloatArray:
        """See ``CostModel``."""
        kind, factor = self._as_planned(device_type)
        return factor * self._model.work_seconds(graph, kind, flops, num_bytes)

    def in_teams(self, members: int) -> CostModel:
        """See ``CostModel``."""
        found = copy(self)
        found._model = self._model.in_teams(members)
        return found

    def spread(self, graph: OpGraph, device_type: DeviceType) -> float:
        """See ``CostModel``."""
        return self._model.spread(graph, self._as_planned(device_type)[0])

    def copy_seconds(self, device_type: DeviceType) -> tuple[float, float]:
        """See ``CostModel``."""
        kind, factor = self._as_planned(device_type)
        fixed_s, per_byte_s = self._model.copy_seconds(kind)
        return factor * fixed_s, factor * per_byte_s

    def channel_seconds(self, cluster: Cluster, channel: Channel) -> ChannelSeconds:
        """Cost of a channel between the devices at their planned speed."""
        return self._model.channel_seconds(self._cluster, channel)
