"""How long devices compute, what steps cost where they are slow, and what a change of plan costs.

In a change every rank of the new plan reads what it holds. Of each parameter, what the same host
has costs nothing; the rest comes over the network, all ranks at once:

    seconds = restart + max over hosts and directions (bytes / bandwidth of its NICs)

Unlike what ranks really read, parameters that op rules cut count whole: the cost is an upper
bound.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from heterog.cluster.hardware import DeviceType
from heterog.cluster.schema import throttled
from heterog.cluster.topology import Cluster
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering.channels import Channel
from heterog.lowering.program import FIRST_LINK_KIND, FloatArray, Program
from heterog.pricing.cost_model import ChannelSeconds, CostModel
from heterog.runtime.step.recorder import Recorder
from heterog.strategy.strategy import Strategy
from heterog.strategy.sync import Sharded


def device_seconds(program: Program, start_s: FloatArray, finish_s: FloatArray) -> list[float]:
    """Sum the seconds of all compute tasks on each device.

    Args:
        program: The program of the step.
        start_s: Start of each task; not a number where it is unknown.
        finish_s: End of each task; not a number where it is unknown.
    """
    computes = program.kind < FIRST_LINK_KIND
    seconds = np.nan_to_num(finish_s - start_s)
    of_device = program.device[computes]
    found: list[float] = np.bincount(of_device, seconds[computes], program.num_devices).tolist()
    return found


class BusyClock(Recorder):
    """Sums the seconds that this rank spends in compute tasks, over many steps.

    It is for ranks on CPUs. A process whose share of a core was cut runs on at full speed
    until its share of a period is used up and then stands still, so that single steps say little.

    Args:
        program: The program of the steps.
        now: Clock, in seconds.

    Attributes:
        seconds: Seconds of compute tasks so far, without the waits in them.
    """

    def __init__(self, program: Program, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._computes: list[bool] = (program.kind < FIRST_LINK_KIND).tolist()
        self._now = now
        self._begin_s = self._waited_s = self._update_s = 0.0
        self._is_in_task = False

    def begin_task(self, task: int) -> None:
        """See ``Recorder``."""
        self._is_in_task, self._waited_s, self._begin_s = True, 0.0, self._now()

    def end_task(self, task: int) -> None:
        """See ``Recorder``."""
        self._is_in_task = False
        if self._computes[task]:
            self.seconds += max(self._now() - self._begin_s - self._waited_s, 0.0)

    def begin_update(self, parameters: Sequence[int]) -> None:
        """See ``Recorder``."""
        self._update_s = self._now()

    def end_update(self, parameters: Sequence[int]) -> None:
        """Count an update that ran between tasks; one within a task is part of it."""
        if not self._is_in_task:
            self.seconds += self._now() - self._update_s

    def waiting(self) -> Callable[[float, float], None]:
        """See ``Recorder``."""
        return self._waited

    def _waited(self, begin_s: float, end_s: float) -> None:
        self._waited_s += end_s - begin_s


def slowed(cluster: Cluster, factors: Mapping[int, float]) -> Cluster:
    """Make kernels of some devices take longer; each gets a type that says so in its name.

    Args:
        cluster: The cluster as planned.
        factors: Factor by which kernels take longer, by device.
    """
    devices = list(cluster.devices)
    for device, factor in factors.items():
        kind = throttled(devices[device].type, 1 / factor)
        devices[device] = replace(devices[device], type=kind)
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

    def alone(self) -> CostModel:
        """See ``CostModel``."""
        alone = self._model.alone()
        if alone is self._model:
            return self
        found = copy(self)
        found._model = alone
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
    sizes = np.array([graph.tensors[each].num_bytes for _, each, _ in graph.updates], np.float64)
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
    rates = np.array(cluster.nic_bandwidth_bytes_per_s)
    return float(max((sent / rates).max(), (received / rates).max()))
