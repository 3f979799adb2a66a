"""What steps cost where devices are slow, and what a change from one plan to another costs.

In a change every rank of the new plan reads what it holds. Of each parameter, what the same host
has costs nothing; the rest comes over the network, all ranks at once:

    seconds = restart + max over hosts and directions (bytes / bandwidth of its NICs)

Unlike what ranks really read, parameters that op rules cut count whole: the cost is an upper
bound.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import Cluster
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering.channels import Channel
from heterog.lowering.program import FloatArray
from heterog.pricing.cost_model import ChannelSeconds, CostModel
from heterog.strategy.strategy import Strategy
from heterog.strategy.sync import Sharded

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

    Attributes:
        name: Name of the underlying cost model.
    """

    def __init__(self, model: CostModel, cluster: Cluster, factors: Mapping[int, float]) -> None:
        self.name, self._model, self._cluster = model.name, model, cluster
        changed = slowed(cluster, factors)
        self._known: dict[str, tuple[DeviceType, float]] = {
            changed.devices[device].type.name: (cluster.devices[device].type, factor)
            for device, factor in factors.items()
        }

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


def held(graph: OpGraph, strategy: Strategy, num_devices: int) -> FloatArray:
    """Fractions of each parameter that each device has under a strategy.

    Returns:
        Of the parameter, of its optimizer state, and of both what the device writes into
        snapshots.  # [3, num_parameters, num_devices]
    """
    group_of = group_ops(graph).group
    found = np.zeros((3, len(graph.updates), num_devices))
    value, state, owned = found
    for row, (op, _, _) in enumerate(graph.updates):
        decision = strategy.decisions[int(group_of[op])]
        devices = list(decision.devices)
        home = strategy.homes[row]
        value[row, devices] = 1.0
        if home >= 0:
            value[row, home] = state[row, home] = owned[row, home] = 1.0
            continue
        if decision.sync.is_sharded and len(devices) > 1:
            weights = np.array(decision.slices or [1] * len(devices), np.float64)
            copies = max(len(decision.slice_groups), 1)
            parts = weights / weights.sum() * copies
            saving = np.isin(devices, decision.slice_groups[0] if copies > 1 else devices)
            state[row, devices], owned[row, devices] = parts, parts * saving
            if decision.sync.sharded == Sharded.PARAMETERS:
                value[row, devices] = parts
            continue
        state[row, devices] = 1.0
        owned[row, devices[0]] = 1.0
    return found


def transfer_s(
    graph: OpGraph,
    cluster: Cluster,
    old: tuple[Strategy, Sequence[int]],
    new: tuple[Strategy, Sequence[int]],
) -> float:
    """Seconds until all ranks of a new plan have their state.

    Args:
        graph: Graph of the training step.
        cluster: The whole cluster.
        old: Strategy of the plan that ran, and the device of the whole cluster of each rank.
        new: The same for the plan to change to.
    """
    sizes = np.array(
        [graph.tensors[each].meta.num_bytes for _, each, _ in graph.updates], np.float64
    )
    _, _, owned = held(graph, old[0], len(old[1]))
    value, state, _ = held(graph, new[0], len(new[1]))
    have = np.zeros((len(sizes), cluster.num_hosts))
    for rank, device in enumerate(old[1]):
        have[:, cluster.host_of[device]] += owned[:, rank]
    needed = value + graph.optimizer_state_ratio * state
    sent, received = np.zeros(cluster.num_hosts), np.zeros(cluster.num_hosts)
    for rank, device in enumerate(new[1]):
        host = cluster.host_of[device]
        num_bytes = (sizes * needed[:, rank]) @ have  # by host that has them
        num_bytes[host] = 0.0
        sent += num_bytes
        received[host] += num_bytes.sum()
    rates = np.array([cluster.nic_bandwidth_bytes_per_s(h) for h in range(cluster.num_hosts)])
    return float(max((sent / rates).max(), (received / rates).max()))
