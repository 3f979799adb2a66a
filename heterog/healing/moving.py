"""The cost of a change from one plan to another: bytes between hosts, and a restart.

Every rank of the new plan reads what it holds. Of each parameter, what the same host
has costs nothing; the rest comes over the network, all ranks at once:

    seconds = restart + max over hosts and directions (bytes / bandwidth of its NICs)

Unlike what ranks really read, parameters that op rules cut count whole: the cost is an upper
bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering.program import FloatArray
from heterog.strategy.strategy import Strategy
from heterog.strategy.sync import Sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Fraction of each parameter's state on each device.

    Attributes:
        value: Fraction of each parameter on each device.  # [num_parameters, num_devices]
        state: Fraction of its optimizer state on each device.  # [num_parameters, num_devices]
        owned: Fraction that the device writes into snapshots.  # [num_parameters, num_devices]
    """

    value: FloatArray
    state: FloatArray
    owned: FloatArray


def held(graph: OpGraph, strategy: Strategy, num_devices: int) -> Held:
    """Fraction of each parameter that each device has under a strategy."""
    group_of = group_ops(graph).group
    shape = len(graph.updates), num_devices
    value, state, owned = np.zeros(shape), np.zeros(shape), np.zeros(shape)
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
    return Held(value=value, state=state, owned=owned)


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
    before = held(graph, old[0], len(old[1]))
    after = held(graph, new[0], len(new[1]))
    have = _by_host(before.owned, cluster, old[1])
    needed = after.value + graph.optimizer_state_ratio * after.state
    host_of = [cluster.host_of[device] for device in new[1]]
    sent, received = np.zeros(cluster.num_hosts), np.zeros(cluster.num_hosts)
    for rank, host in enumerate(host_of):
        wanted = sizes * needed[:, rank]
        for source in range(cluster.num_hosts):
            if source != host:
                num_bytes = float(wanted @ have[:, source])
                sent[source] += num_bytes
                received[host] += num_bytes
    rates = np.array([cluster.nic_bandwidth_bytes_per_s(h) for h in range(cluster.num_hosts)])
    return float(max((sent / rates).max(), (received / rates).max()))


def _by_host(parts: FloatArray, cluster: Cluster, device_of: Sequence[int]) -> FloatArray:
    found = np.zeros((len(parts), cluster.num_hosts))
    for rank, device in enumerate(device_of):
        found[:, cluster.host_of[device]] += parts[:, rank]
    return found
